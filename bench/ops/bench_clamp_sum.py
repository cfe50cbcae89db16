import pytest
import torch

import dpkernels as dpk
from dpkernels.bench import harness
from dpkernels.bench.ops import sums
from tests import cases


@pytest.mark.parametrize("shapes", sums.SHAPES)
def bench_clamp_sum(benchmark, shapes):
    memory = sums.Memory(sums.SHAPES[shapes], inputs=1)
    (vectors,) = memory.inputs
    noise = dpk.Gaussian(1.0)
    harness.compare(
        benchmark,
        f"clamp_sum, {shapes}",
        ours=lambda: dpk.clamp_sum(vectors, 0.1, noise=noise),
        peers={
            "read": memory.read,
            "plain torch": lambda: [v.clamp(-0.1, 0.1).sum(0) + torch.normal(0.0, 1.0, v.shape[1:]) for v in vectors],
        },
        gate=lambda: sums.gate("clamp_sum", [vectors], (cases.bounds(0.1),), cases.noise()),
        at_most={},
    )
