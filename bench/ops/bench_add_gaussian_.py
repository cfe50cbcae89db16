import pytest
import torch

import dpkernels as dpk
from dpkernels import reference
from dpkernels.bench import harness
from tests import cases

FASTER = {1: 4.0, 2: 8.0}


@pytest.mark.parametrize("threads", [1, 2])
def bench_add_gaussian_(benchmark, threads):
    torch.set_num_threads(threads)
    x = torch.zeros(2**24)
    noise = dpk.Gaussian(1.0)

    def gate():
        got, true = torch.zeros(2**20), torch.zeros(2**20)
        torch.ops.dpkernels.add_gaussian_([got], *cases.noise())
        reference.add_gaussian_([true], *cases.noise())
        assert (got - true).norm() <= 1e-6 * true.norm()

    harness.compare(
        benchmark,
        f"add_gaussian_, 16M elements, {threads} thread{'s' * (threads > 1)}",
        ours=lambda: dpk.add_gaussian_(x, noise),
        peers={"torch.randn_like + add_": lambda: x.add_(torch.randn_like(x))},
        gate=gate,
        at_most={"torch.randn_like + add_": 1 / FASTER[threads]},
        rounds=15,
    )
    torch.set_num_threads(2)
