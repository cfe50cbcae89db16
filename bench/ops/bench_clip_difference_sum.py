import pytest

import dpkernels as dpk
from dpkernels.bench import harness
from dpkernels.bench.ops import sums
from tests import cases


@pytest.mark.parametrize("shapes", sums.SHAPES)
def bench_clip_difference_sum(benchmark, shapes):
    memory = sums.Memory(sums.SHAPES[shapes], inputs=2)
    now, before = memory.inputs
    noise = dpk.Gaussian(1.0)

    def plain():
        difference = [a - b for a, b in zip(now, before, strict=True)]
        return sums.plain_sum(*sums.plain_clip(difference, 1.0), 1.0)

    harness.compare(
        benchmark,
        f"clip_difference_sum, {shapes}",
        ours=lambda: dpk.clip_difference_sum(now, before, 1.0, noise=noise),
        peers={"read": memory.read, "plain torch": plain},
        gate=lambda: sums.gate("clip_difference_sum", memory.inputs, (cases.bounds(1.0), None), cases.noise()),
        at_most=sums.targets(shapes, 2, {}),
    )
