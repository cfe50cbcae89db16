import pytest

import dpkernels as dpk
from dpkernels.bench import harness
from dpkernels.bench.ops import sums
from tests import cases

FASTER = {"rows of 8k": 1.5, "rows of 100k": 1.4, "rows of 1M in 21 tensors": 1.15, "300 tensors of 1000": 3.0}


@pytest.mark.parametrize("shapes", sums.SHAPES)
def bench_clip_sum(benchmark, shapes):
    memory = sums.Memory(sums.SHAPES[shapes], inputs=1)
    (vectors,) = memory.inputs
    noise = dpk.Gaussian(1.0)
    harness.compare(
        benchmark,
        f"clip_sum, {shapes}",
        ours=lambda: dpk.clip_sum(vectors, 1.0, noise=noise),
        peers={"read": memory.read, "plain torch": lambda: sums.plain_sum(*sums.plain_clip(vectors, 1.0), 1.0)},
        gate=lambda: sums.gate("clip_sum", [vectors], (cases.bounds(1.0), None), cases.noise()),
        at_most=sums.targets(shapes, 1, FASTER),
    )
