"""row_squares, lookup_squares and weighted_sum_ against their references, on every instruction set."""

import pytest
import torch

from dpkernels import reference
from tests import cases

OPS = torch.ops.dpkernels


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.usefixtures("isa")
def test_row_squares(dtype):
    tensors = cases.vectors([(9, 5000), (9, 3, 4), (9,), (9, 0)], dtype)
    tensors.append(tensors[1].transpose(1, 2))
    torch.testing.assert_close(OPS.row_squares(tensors), reference.row_squares(tensors), rtol=1e-13, atol=0)


@pytest.mark.parametrize("sizes", [(3, 9, 6), (2, 1, 5), (0, 3, 2), (4, 0, 3), (3, 50, 300)])
def test_lookup_squares(sizes):
    batch, length, _ = sizes
    ids, g = torch.randint(0, 4, (batch, length)), torch.randn(sizes)
    torch.testing.assert_close(OPS.lookup_squares(ids, g), reference.lookup_squares(ids, g), rtol=1e-13, atol=1e-13)


def problem(batch=9, groups=1):
    rows = cases.vectors([(batch, 5000), (batch, 3, 4), (batch, 5000)])
    sums = [torch.randn(5000), torch.randn(3, 4).double(), torch.randn(7), torch.randn(())]
    weights = torch.rand(batch, groups, dtype=torch.float64)
    return sums, [True, False, True, False], rows, [0, 1, 0], weights


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("with_noise", [True, False])
@pytest.mark.parametrize("batch", [9, 1, 0])
@pytest.mark.usefixtures("isa")
def test_weighted_sum(groups, with_noise, batch):
    sums, *rest = problem(batch, groups)
    copies = [s.clone() for s in sums]
    stream, std = cases.noise() if with_noise else (None, None)
    OPS.weighted_sum_(sums, *rest, stream, std, 0.3)
    reference.weighted_sum_(copies, *rest, stream, std, 0.3)
    torch.testing.assert_close(sums, copies, rtol=1e-6, atol=1e-6)


def test_a_sample_of_weight_zero_is_left_out_by_selection():
    sums, filled, rows, owner, weights = problem()
    weights[4] = 0
    rows[0][4], rows[1][4] = torch.nan, torch.inf
    OPS.weighted_sum_(sums, filled, rows, owner, weights, None, None, 1.0)
    assert all(s.isfinite().all() for s in sums)


@pytest.mark.usefixtures("isa")
def test_the_same_bits_for_any_number_of_threads():
    sums, *rest = problem(33)
    copies = [s.clone() for s in sums]
    OPS.weighted_sum_(sums, *rest, *cases.noise(), 1.0)
    torch.set_num_threads(1)
    OPS.weighted_sum_(copies, *rest, *cases.noise(), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(sums, copies, strict=True))
