"""Inputs that the tests of the summing ops share, and how their results are compared."""

import math

import torch

import dpkernels as dpk
from dpkernels import reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Per-sample shapes by name. Long rows and few samples are shared by columns, short rows and many samples by samples.
SHAPES = {
    "one_tensor": [(33, 7, 5)],
    "odd_sizes": [(9, 63), (9, 500), (9, 1), (9,)],
    "empty_batch": [(0, 63), (0, 5)],
    "one_sample": [(1, 4099)],
    "no_columns": [(5, 0)],
    "some_columns": [(5, 0), (5, 3)],
    "by_samples": [(301, 65), (301, 17, 3)],
    "by_samples_long": [(130, 2500)],
    "by_columns": [(7, 70_001), (7, 300_001)],
    "many_tensors": [(6, 11)] * 120,
}


def bounds(*values):
    return torch.tensor(values, dtype=torch.float64)


def noise(std=0.7, seed=11):
    return dpk.Gaussian(std, seed=seed).release()


def vectors(shapes, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def near(tensors, relative=1e-6, seed=1):
    """Tensors that agree with the given ones to about six digits (or to what the type holds)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (t.double() * (1 + relative * torch.randn(t.shape, generator=generator, dtype=torch.float64))).to(t.dtype)
        for t in tensors
    ]


def check(name, lists, *arguments):
    """The op against its reference, with and without noise."""
    for stream in ((None, None), noise()):
        sums, norms = getattr(torch.ops.dpkernels, name)(*lists, *arguments, *stream)
        true_sums, true_norms = getattr(reference, name)(*lists, *arguments, *stream)
        assert len(sums) == len(true_sums)
        # Both accumulate in float64 and round once; noise is single precision, with its radius near 0 (normal.h).
        tolerance = {torch.float64: 1e-12, torch.float32: 1.2e-7}[norms.dtype]
        slack = 0 if stream[0] is None else 3e-5
        for got, true in zip([*sums, norms], [*true_sums, true_norms], strict=True):
            assert got.dtype == true.dtype
            assert got.shape == true.shape
            limit = tolerance * true.norm() + 1e-30 if true.numel() else 0
            assert (got - true).abs().max().item() <= limit + slack if true.numel() else True


def row_norm(sums):
    """The exact Euclidean norm of float64 tensors."""
    return math.sqrt(math.fsum(x * x for s in sums for x in s.flatten().tolist()))


def thread_invariant(call):
    """The same bits for one and two threads."""
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(call())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
