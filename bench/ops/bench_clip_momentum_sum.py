import pytest

import dpkernels as dpk
from dpkernels.bench import harness
from dpkernels.bench.ops import sums
from tests import cases


@pytest.mark.parametrize("shapes", sums.SHAPES)
def bench_clip_momentum_sum(benchmark, shapes):
    memory = sums.Memory(sums.SHAPES[shapes], inputs=2)
    now, before = memory.inputs
    noise = dpk.Gaussian(1.0)

    def plain():
        _, a = sums.plain_clip(now, 1.0)
        _, b = sums.plain_clip(before, 1.0)
        spread = [v.dim() * (1,) for v in now]
        difference = [
            a.view(-1, *s[1:]) * x - b.view(-1, *s[1:]) * y for s, x, y in zip(spread, now, before, strict=True)
        ]
        _, c = sums.plain_clip(difference, 0.5)
        first = sums.plain_sum(now, 0.3 * a, 1.0)
        return [f + s for f, s in zip(first, sums.plain_sum(difference, 0.7 * c, 0.0), strict=True)]

    harness.compare(
        benchmark,
        f"clip_momentum_sum, {shapes}",
        ours=lambda: dpk.clip_momentum_sum(
            now, before, gradient_norm=1.0, difference_norm=0.5, momentum=0.3, noise=noise
        ),
        peers={"read": memory.read, "plain torch": plain},
        gate=lambda: sums.gate("clip_momentum_sum", memory.inputs, (cases.bounds(1.0, 0.5, 0.3),), cases.noise()),
        at_most=sums.targets(shapes, 2, {}),
        rounds=5,
    )
