"""Inner products, norms, sums and differences of factored rows against the rows themselves."""

import contextlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dpkernels import factors, inner, planner, sums
from dpkernels.factors import Dense, Matrix, Outer, Rows

few = settings(max_examples=25, deadline=None, derandomize=True)
size = st.integers(1, 6)
KINDS = ("outer", "rows", "dense")
kinds = st.sets(st.sampled_from(KINDS), min_size=1)


def exact_sum(m, weights):
    return sums.add_exact_sum(torch.zeros(m.height, m.width, dtype=torch.float64), m, weights)


def matrix(chosen, batch, height, width, length, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    made = {
        "outer": Outer(
            torch.randn(batch, length, width, generator=g).to(dtype),
            torch.randn(batch, length, height, generator=g).to(dtype),
        ),
        "rows": Rows(
            torch.randint(0, height, (batch, length), generator=g),
            torch.randn(batch, length, width, generator=g).to(dtype),
        ),
        "dense": Dense(torch.randn(batch, height, width, generator=g).to(dtype)),
    }
    return Matrix(batch, height, width, **{kind: made[kind] for kind in chosen})


def formed(m):
    """The rows in float64, term by term and sample by sample."""
    total = torch.zeros(m.batch, m.height, m.width, dtype=torch.float64)
    for i in range(m.batch):
        if m.outer is not None:
            for a, g in zip(m.outer.a[i].double(), m.outer.g[i].double(), strict=True):
                total[i] += torch.outer(g, a)
        if m.rows is not None:
            for line, g in zip(m.rows.ids[i], m.rows.g[i].double(), strict=True):
                total[i, line] += g
        if m.dense is not None:
            total[i] += m.dense.values[i].double()
    return total


@pytest.fixture(params=[factors.PIECE, 7])
def piece(request, monkeypatch):
    """Work in one piece, and in pieces of a few elements."""
    monkeypatch.setattr(factors, "PIECE", request.param)


@pytest.fixture(params=[None, planner.Way.GRAM, planner.Way.TILE])
def way(request):
    """The cheaper way, inner products of addends, and forming the rows."""
    with contextlib.nullcontext() if request.param is None else planner.forced(request.param):
        yield


def squared_norms(m, **options):
    square, upper = inner.squared_norms([m], **options)
    return square[:, 0], upper[:, 0]


DIMENSIONS = [(3, 4, 5, 2), (2, 1, 1, 1), (1, 5, 3, 9), (4, 2, 7, 1), (0, 3, 2, 2), (3, 2, 2, 0)]
COMBINATIONS = [("outer",), ("rows",), ("dense",), ("outer", "rows"), ("outer", "dense"), ("rows", "dense"), KINDS]


@pytest.mark.usefixtures("piece", "way")
@pytest.mark.parametrize("dimensions", DIMENSIONS)
@pytest.mark.parametrize("chosen", COMBINATIONS)
def test_against_formed_rows(chosen, dimensions):
    x, y = matrix(chosen, *dimensions), matrix(chosen, *dimensions, seed=1)
    rows, other = formed(x), formed(y)
    torch.testing.assert_close(inner.inner(x, y), (rows * other).sum((1, 2)), rtol=1e-12, atol=1e-12)
    square, upper = squared_norms(x)
    in_float32 = chosen == ("outer",)  # tiles of float32 factors
    torch.testing.assert_close(square, rows.square().sum((1, 2)), rtol=1e-5 if in_float32 else 1e-12, atol=1e-12)
    assert (upper >= rows.square().sum((1, 2))).all()
    assert (upper <= square * (1 + (2.1 * inner.TILE_MARGIN if in_float32 else 1e-6)) + 1e-200).all()
    weights = torch.linspace(-1, 2, x.batch, dtype=torch.float64)
    torch.testing.assert_close(exact_sum(x, weights), torch.einsum("b,bhw->hw", weights, rows))
    if x.rows is None:
        torch.testing.assert_close(formed(factors.transposed(x)), rows.transpose(1, 2))
    torch.testing.assert_close(formed(factors.scaled(x, -2.0)), -2 * rows)
    torch.testing.assert_close(formed(factors.difference(x, y)), rows - other, rtol=1e-5, atol=1e-5)


@few
@given(kinds, kinds, size, size, size, size)
def test_mixed_inner_products(a, b, batch, height, width, length):
    x, y = matrix(a, batch, height, width, length), matrix(b, batch, height, width, length + 1, seed=1)
    torch.testing.assert_close(inner.inner(x, y), (formed(x) * formed(y)).sum((1, 2)), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(formed(factors.difference(x, y)), formed(x) - formed(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", COMBINATIONS)
def test_difference_of_near_equal_rows_does_not_cancel(chosen):
    """Rows that agree to six digits: the difference is right to its own norm, not to the rows' norms."""
    x = matrix(chosen, 3, 4, 5, 6)
    near = matrix(chosen, 3, 4, 5, 6, seed=1)

    def nudge(t, other):
        return (
            t
            if t is None
            else type(t)(
                *(_nudged(a, b) for a, b in zip(vars(t).values(), vars(other).values(), strict=True) if a is not None)
            )
        )

    def _nudged(a, b):
        return a + 1e-6 * b if isinstance(a, torch.Tensor) and a.is_floating_point() else a

    y = Matrix(3, 4, 5, nudge(x.outer, near.outer), nudge(x.rows, near.rows), nudge(x.dense, near.dense))
    difference = factors.difference(x, y)
    exact = formed(x) - formed(y)
    assert (inner.sizes(difference) <= 1e-4 * inner.sizes(x)).all(), "not subtracted in the factors"
    error = (formed(difference) - exact).flatten(1).norm(dim=1)
    assert (error <= 1e-6 * exact.flatten(1).norm(dim=1)).all()
    square, upper = squared_norms(difference)
    assert (upper >= formed(difference).square().sum((1, 2))).all()
    assert (upper <= square * (1 + 1e-3)).all()


@pytest.mark.parametrize("tiny", [0.0, 1e-7, 1e-4, 1e-2])
@pytest.mark.parametrize("length", [2, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_cancel_inside_keep_their_bound(tiny, length, dtype):
    """Halves of a sequence that cancel but for a part `tiny`: the norm^2 by inner products has no right digit."""
    g = torch.Generator().manual_seed(3)
    a = torch.randn(4, length // 2, 8, generator=g, dtype=torch.float64)
    b = torch.randn(4, length // 2, 6, generator=g, dtype=torch.float64)
    a = torch.cat([a, a + tiny * torch.randn(a.shape, generator=g, dtype=torch.float64)], dim=1).to(dtype)
    b = torch.cat([b, -b], dim=1).to(dtype)
    m = Matrix(4, 6, 8, outer=Outer(1e3 * a, 1e3 * b))
    exact = (
        torch.stack(
            [
                sum(torch.outer(y, x) for x, y in zip(p.double(), q.double(), strict=True))
                for p, q in zip(m.outer.a, m.outer.g, strict=True)
            ]
        )
        .flatten(1)
        .norm(dim=1)
    )
    _, upper = squared_norms(m)
    # the sum above is itself off by a few float64 roundings of its addends
    slack = length * 2.0**-50 * (m.outer.a.double().norm(dim=2) * m.outer.g.double().norm(dim=2)).sum(1)
    assert (upper.sqrt() >= exact - slack).all()
    assert (upper.sqrt() <= exact * (1 + 1.1 * inner.TILE_MARGIN) + 4 * slack).all(), (
        "the margin costs more than rounding explains"
    )


@pytest.mark.parametrize("way", [planner.Way.GRAM, planner.Way.TILE])
@pytest.mark.parametrize("tiny", [0.0, 1e-5, 1e-2, 1.0])
@pytest.mark.parametrize("length", [1, 2, 64, 600])
def test_rounded_factors_keep_the_bound(length, tiny, way):
    """c g is rounded to float32 before the sum: what is summed is another row, and it obeys the bound too."""
    generator = torch.Generator().manual_seed(3)
    a, g = torch.randn(5, length, 40, generator=generator), torch.randn(5, length, 30, generator=generator)
    half = length // 2
    a[:, half : 2 * half] = a[:, :half] + tiny * a[:, half : 2 * half]
    g[:, half : 2 * half] = -g[:, :half]
    m = Matrix(5, 30, 40, outer=Outer(a, g))
    with planner.forced(way):
        upper = squared_norms(m, rounded=True)[1].sqrt()
    for bound in (1e-3, 0.37, 1.0):
        weights = torch.where(upper > bound, bound / upper, 1.0)
        rounded = (g * weights.float()[:, None, None]).double()
        norms = torch.einsum("btd,btp->bdp", rounded, a.double()).flatten(1).norm(dim=1)
        slack = length * 2.0**-50 * bound * (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1) / upper
        assert (norms <= bound + slack).all()


def test_dropped_samples_do_not_spread_their_nans():
    m = matrix(KINDS, 3, 4, 5, 2)
    m.outer.a[1], m.outer.g[1, 0, 0], m.rows.g[1], m.dense.values[1] = torch.inf, torch.nan, torch.nan, torch.inf
    keep = torch.tensor([True, False, True])
    kept = factors.zero_samples(m, keep)
    assert not formed(kept)[1].any()
    assert (
        sums.add_exact_sum(
            torch.zeros(kept.height, kept.width, dtype=torch.float64), kept, torch.ones(3, dtype=torch.float64)
        )
        .isfinite()
        .all()
    )
    assert torch.isnan(squared_norms(m)[1]).tolist() == [False, True, False]


def test_a_zero_row_is_not_formed_again(monkeypatch):
    m = matrix(("outer",), 2, 50, 50, 3)
    m.outer.g.zero_()
    monkeypatch.setattr(inner, "_formed_squares", None)
    assert not squared_norms(m)[0].any()
