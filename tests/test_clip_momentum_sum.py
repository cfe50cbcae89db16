import itertools
from fractions import Fraction
from math import isqrt

import pytest
import torch

import dpkernels as dpk
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shapes", cases.SHAPES)
def test_equals_reference(shapes, dtype, isa):
    now = cases.vectors(cases.SHAPES[shapes], dtype)
    before = cases.vectors(cases.SHAPES[shapes], dtype, seed=1)
    for momentum in (0.0, 0.3, 1.0):
        cases.check("clip_momentum_sum", [now, before], cases.bounds(3.0, 0.5, momentum))
        cases.check("clip_momentum_sum", [now, cases.near(now, 1e-3)], cases.bounds(3.0, 0.5, momentum))


def clip(v, bound):
    return v * (bound / v.flatten(1).norm(dim=1)).clamp(max=1)[:, None]


def test_equals_the_lines_in_its_docstring():
    now, before = (cases.vectors([(20, 30)], torch.float64, seed=seed)[0] for seed in (0, 1))
    a, b = clip(now, 5.0), clip(before, 5.0)
    expected = (0.3 * a + 0.7 * clip(a - b, 2.0)).sum(0)
    result = dpk.clip_momentum_sum(now, before, gradient_norm=5.0, difference_norm=2.0, momentum=0.3)
    torch.testing.assert_close(result.sum, expected)
    torch.testing.assert_close(result.norms, now.norm(dim=1))


def test_momentum_1_is_clip_sum():
    now, before = cases.vectors([(20, 30)])[0], cases.vectors([(20, 30)], seed=1)[0]
    result = dpk.clip_momentum_sum(now, before, gradient_norm=2.0, difference_norm=0.1, momentum=1.0)
    torch.testing.assert_close(result.sum, dpk.clip_sum(now, 2.0).sum)


@pytest.mark.parametrize("agreement", [1.0, 1e-2, 1e-6, 1e-9, 1e-12, 1e-15, 0.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_the_bound_holds_in_real_arithmetic(agreement, scale, isa):
    """Rows near the bounds, from nearly equal gradients, in every case of the coefficient formula."""
    generator = torch.Generator().manual_seed(5)
    for size, momentum, tightness in itertools.product((1, 3, 700), (0.0, 0.1, 0.9), (1e-9, 1e-3, 1.0)):
        now = scale * torch.randn(1, size, generator=generator, dtype=torch.float64)
        other = now.norm() * torch.nn.functional.normalize(torch.randn(1, size, generator=generator).double())
        before = now + agreement * other
        for relative in (0.3, 1 - 1e-12, 1.0, 1 + 1e-12, 1 + 0.5 * agreement, 3.0):
            gradient_norm = relative * now.norm().item()
            difference_norm = tightness * max(agreement, 1e-16) * gradient_norm
            rule = dpk.clipping.RecursiveMomentum(gradient_norm, difference_norm, momentum)
            row = dpk.clip_momentum_sum(
                now, before, gradient_norm=gradient_norm, difference_norm=difference_norm, momentum=momentum
            ).sum
            # the sum of one row is itself rounded: 2^-52 of its terms, which are not larger than C1
            assert cases.row_norm([row]) <= rule.sensitivity() + 2.0**-52 * gradient_norm


def test_the_difference_is_right_where_the_gradients_nearly_agree(isa):
    """d = clip(a) - clip(b) with both clipped and equal to twelve digits, against rational arithmetic."""
    a = cases.vectors([(1, 40)], torch.float64, scale=10.0)
    b = cases.near(a, 1e-12)

    def exact_unit(v):
        parts = [Fraction(x) for x in v[0].flatten().tolist()]
        square = sum(x * x for x in parts)
        digits = 2**200
        norm = Fraction(isqrt(square.numerator * digits * digits // square.denominator), digits)
        return [x / norm for x in parts]

    difference = [float(x - y) for x, y in zip(exact_unit(a), exact_unit(b), strict=True)]
    expected = torch.tensor(difference, dtype=torch.float64)
    row = dpk.clip_momentum_sum(a, b, gradient_norm=1.0, difference_norm=1.0, momentum=0.0).sum[0]
    assert (row - expected).norm() <= 1e-9 * expected.norm()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_counts_as_zero(side, bad, isa):
    pair = [cases.vectors([(6, 70)])[0], cases.vectors([(6, 70)], seed=1)[0]]
    without = [torch.cat([v[:3], v[4:]]) for v in pair]
    pair[side][3, 1] = bad
    settings = {"gradient_norm": 1.0, "difference_norm": 0.5, "momentum": 0.5}
    torch.testing.assert_close(
        dpk.clip_momentum_sum(*pair, **settings).sum, dpk.clip_momentum_sum(*without, **settings).sum
    )


def test_threads_do_not_change_a_bit(isa):
    now = cases.vectors(cases.SHAPES["by_columns"])
    before = cases.near(now)

    def call():
        sums, norms = dpk.clip_momentum_sum(
            now, before, gradient_norm=1.0, difference_norm=1e-6, momentum=0.2, noise=dpk.Gaussian(0.1, seed=4)
        )
        return [*sums, norms]

    cases.thread_invariant(call)


def test_float64_rows_next_to_overflow_keep_the_bound(isa):
    huge = 1.3e154
    pairs = [
        ([[huge, 0.0]], [[0.8 * huge, 0.6 * huge]]),
        ([[1.3407807929942596e154, 0.0]], [[1e154, 0.0]]),
        ([[1.0, 0.0]], [[1.3407807929942596e154, 0.0]]),
    ]
    for now, before in pairs:
        row = dpk.clip_momentum_sum(
            torch.tensor(now, dtype=torch.float64),
            torch.tensor(before, dtype=torch.float64),
            gradient_norm=1e300,
            difference_norm=1.0,
            momentum=0.0,
        ).sum
        assert cases.row_norm([row]) <= 1.0
