import torch

import dpkernels as dpk
from dpkernels import reference
from dpkernels.bench import harness
from tests import cases


def bench_sparsify(benchmark):
    x = torch.randn(10_000_000)
    noise = dpk.Gaussian(1.0)

    def gate():
        values, indices = torch.ops.dpkernels.sparsify(x, 0.2, torch.tensor([1]), *cases.noise())
        true_values, true_indices = reference.sparsify(x, 0.2, torch.tensor([1]), *cases.noise())
        assert torch.equal(indices, true_indices)
        assert (values - true_values).norm() <= 1e-6 * true_values.norm()

    def plain():
        indices = (torch.rand(x.shape) < 0.2).nonzero().squeeze(1)
        return indices, (x[indices] + torch.normal(0.0, 1.0, indices.shape)) / 0.2

    harness.compare(
        benchmark,
        "sparsify, 10M elements, p = 0.2",
        ours=lambda: dpk.sparsify(x, 0.2, seed=1, noise=noise),
        peers={"plain torch": plain},
        gate=gate,
        at_most={"plain torch": 1 / 5},
        rounds=15,
    )
