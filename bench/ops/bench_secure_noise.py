import pytest
import torch

import dpkernels as dpk
from dpkernels import ops, reference_noise
from dpkernels.bench import harness


@pytest.mark.parametrize("threads", [1, 2])
def bench_secure_noise(benchmark, threads):
    torch.set_num_threads(threads)
    x = torch.zeros(2**24)
    plain, secure = dpk.Gaussian(1.0), dpk.Gaussian(1.0, secure=True)

    def gate():
        got = torch.from_numpy(ops.native.secure_normals([1, 2, 3, 4], 5, 0, 2**14))
        true = reference_noise.secure_normals(torch.tensor([1, 2, 3, 4, 5]), 2**14, torch.device("cpu"))
        assert ((got - true).abs() <= 2e-15 * true.abs().clamp(min=1)).all()

    harness.compare(
        benchmark,
        f"secure add_gaussian_, 16M elements, {threads} thread{'s' * (threads > 1)}",
        ours=lambda: dpk.add_gaussian_(x, secure),
        peers={"plain noise": lambda: dpk.add_gaussian_(x, plain)},
        gate=gate,
        at_most={"plain noise": 6.0},
        rounds=15,
    )
    torch.set_num_threads(2)
