"""Differences of stored rows with their norms, against the reference; clipped differences, against their definition."""

import math

import pytest
import torch

import dpkernels as dpk
from dpkernels import factors, reference
from dpkernels.factors import Dense, Matrix
from dpkernels.placing import Part, Shape
from tests import truth
from tests.test_per_sample import NAMES, recorded

OPS = torch.ops.dpkernels


@pytest.mark.parametrize("size", [(5, 3, 7), (1, 1, 1), (3, 1, 8), (4, 9, 4097), (0, 2, 3), (2, 0, 3), (6, 33)])
@pytest.mark.parametrize("weighted", [(False, False), (True, False), (True, True)])
@pytest.mark.usefixtures("isa")
def test_equals_reference(size, weighted):
    x, y = torch.randn(size), torch.randn(size)
    weights = [torch.rand(size[0], dtype=torch.float64) if given else None for given in weighted]
    rows, squares = OPS.dense_difference(x, y, *weights)
    true_rows, true_squares = reference.dense_difference(x, y, *weights)
    torch.testing.assert_close(rows, true_rows, rtol=0, atol=2e-7)  # fused or not, before the one rounding
    torch.testing.assert_close(squares, rows.double().square().flatten(1).sum(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(squares, true_squares, rtol=1e-6, atol=1e-12)
    apart = torch.cat([x, y], dim=1)[:, : x.shape[1]], torch.stack([y, x], dim=1)[:, 0]
    assert torch.equal(OPS.dense_difference(*apart, *weights)[0], rows)  # strides change nothing


@pytest.mark.usefixtures("isa")
def test_a_term_of_weight_zero_may_hold_anything():
    x, y = torch.randn(4, 5000), torch.randn(4, 5000)
    x[1, 3], y[2, 4999], x[3, 0], y[3, 1] = math.nan, math.inf, math.inf, math.nan
    w, v = torch.tensor([0.5, 0, 1, 0]).double(), torch.tensor([1.0, 0.25, 0, 0]).double()
    for source in (OPS, reference):
        rows, squares = source.dense_difference(x, y, w, v)
        wanted = torch.stack([0.5 * x[0] - y[0], -0.25 * y[1], x[2], torch.zeros(5000)])
        torch.testing.assert_close(rows, wanted, rtol=0, atol=2e-7)
        assert squares.isfinite().all()
        assert squares[3] == 0


@pytest.mark.parametrize("bound", [0.0, 0.3, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*NAMES, "cnn"])
def test_clipped_differences_are_those_of_clipped_rows(name, dtype, bound):
    now, before = (recorded(name, dtype, seed)[-1] for seed in (0, 1))
    got = truth.flat(now.clipped_difference(before, bound).materialize())
    wanted = truth.flat((now.clipped(bound) - before.clipped(bound)).materialize())
    scale = float(wanted.norm(dim=1).max())
    torch.testing.assert_close(got, wanted, rtol=0, atol=(1e-12 if dtype == torch.float64 else 3e-6) * scale)


def test_rows_that_are_not_finite_are_zero_in_a_clipped_difference():
    rows = []
    for bad in (1, 3):
        values = torch.randn(5, 2, 3)
        values[bad, 1, 1] = math.nan
        matrix = Matrix(5, 2, 3, dense=Dense(values))
        shape = Shape(torch.Size((2, 3)), torch.float32, torch.device("cpu"))
        rows.append(dpk.PerSample(5, {"w": shape}, {"w": [Part(None, matrix)]}))
    now, before = rows
    change = now.clipped_difference(before, 0.5).materialize()["w"]
    a, b = (r.clipped(0.5).materialize()["w"] for r in rows)
    torch.testing.assert_close(change, a - b, rtol=0, atol=1e-6)
    assert not a[1].any()
    assert not b[3].any()
    assert change[[1, 3]].abs().min() > 0
    assert now.clipped_difference(now, 0.5).norms().max() == 0


def test_the_bound_of_what_is_made_of_them_holds_where_they_nearly_agree():
    """Rows a part in 10^6 apart, in float32: the clipped sum of each difference alone is within its bound."""
    base = torch.randn(8, 4, 50)
    x, y = (Matrix(8, 4, 50, dense=Dense(base * (1 + s * 1e-6))) for s in (1, 0))
    difference = factors.difference(x, y)
    rows, squares = difference.dense.values.double(), difference.dense.squares
    torch.testing.assert_close(squares, rows.square().sum((1, 2)), rtol=1e-13, atol=0)
    assert ((rows - (x.dense.values.double() - y.dense.values.double())).abs() <= 1e-12).all()
