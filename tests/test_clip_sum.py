import math

import pytest
import torch

import dpkernels as dpk
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shapes", cases.SHAPES)
def test_equals_reference(shapes, dtype, isa):
    vectors = cases.vectors(cases.SHAPES[shapes], dtype)
    cases.check("clip_sum", [vectors], cases.bounds(2.0), None)
    cases.check("clip_sum", [vectors], cases.bounds(2.0), 0.01)
    cases.check("clip_sum", [vectors], cases.bounds(*(0.5 + i % 3 for i in range(len(vectors)))), None)


def test_equals_the_lines_in_its_docstring():
    vectors, clip = cases.vectors([(40, 30), (40, 3, 5)]), 4.0
    norms = torch.stack([v.flatten(1).norm(dim=1) for v in vectors]).norm(dim=0)
    scale = (clip / norms).clamp(max=1)
    expected = [torch.einsum("b,b...->...", scale, v) for v in vectors]
    result = dpk.clip_sum(vectors, clip)
    torch.testing.assert_close(result.sum, expected)
    torch.testing.assert_close(result.norms, norms)


def test_container_of_the_input():
    tensor = torch.randn(4, 3)
    assert isinstance(dpk.clip_sum(tensor, 1.0).sum, torch.Tensor)
    assert isinstance(dpk.clip_sum([tensor], 1.0).sum, list)
    assert isinstance(dpk.clip_sum((tensor,), 1.0).sum, tuple)


@pytest.mark.parametrize(
    "strided",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t[::2],
        lambda t: t[:, 1:],
        lambda t: t[:, :, ::3],
        lambda t: t[:1].expand(5, -1, -1),
        lambda t: t.permute(2, 0, 1),
    ],
)
def test_any_strides(strided, isa):
    view = strided(cases.vectors([(8, 6, 9)])[0])
    cases.check("clip_sum", [[view]], cases.bounds(1.0), None)


def test_mixed_types_in_one_list(isa):
    vectors = [t for dtype in cases.DTYPES for t in cases.vectors([(12, 70)], dtype)]
    cases.check("clip_sum", [vectors], cases.bounds(3.0), None)


def test_float16_is_read_exactly(isa):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    total = dpk.clip_sum(finite[None, :], math.inf).sum
    torch.testing.assert_close(total, finite.float(), rtol=0, atol=0)


@pytest.mark.parametrize("shapes", ["by_samples", "by_columns"])
def test_threads_do_not_change_a_bit(shapes, isa):
    vectors = cases.vectors(cases.SHAPES[shapes])
    noise = cases.noise()

    def call():
        sums, norms = torch.ops.dpkernels.clip_sum(vectors, cases.bounds(1.0), None, *noise)
        return [*sums, norms]

    cases.thread_invariant(call)


SCALES = (1e-320, 1e-200, 1e-160, 1e-45, 1e-30, 1e-8, 1.0, 1e8, 1e30, 1e150)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("clip", [1e-250, 1e-40, 0.37, 1.0, 1e20])
def test_the_bound_holds_in_real_arithmetic(scale, clip, isa):
    for seed in range(4):
        row = cases.vectors([(1, 5000)], torch.float64, seed=seed, scale=scale)[0]
        row[0, seed] *= 1e5
        clipped = dpk.clip_sum(row, clip).sum
        assert math.isfinite(cases.row_norm([clipped]))
        assert cases.row_norm([clipped]) <= clip


def test_the_bound_is_nearly_reached(isa):
    row = cases.vectors([(1, 5000)], torch.float64, scale=100.0)[0]
    assert cases.row_norm([dpk.clip_sum(row, 1.0).sum]) > 1 - 1e-11


def test_per_layer_bounds_hold_for_each_tensor(isa):
    rows = cases.vectors([(1, 50), (1, 5000)], torch.float64, scale=10.0)
    clipped = dpk.clip_sum(rows, dpk.clipping.PerLayer([0.3, 2.0])).sum
    assert 0.3 - 1e-9 < cases.row_norm([clipped[0]]) <= 0.3
    assert 2.0 - 1e-9 < cases.row_norm([clipped[1]]) <= 2.0


def test_automatic_stays_below_its_bound(isa):
    row = cases.vectors([(1, 500)], torch.float64, scale=1e6)[0]
    assert cases.row_norm([dpk.clip_sum(row, dpk.clipping.Automatic(1.5)).sum]) < 1.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("batch", [6, 200])
def test_a_row_that_is_not_finite_counts_as_zero(bad, dtype, batch, isa):
    vectors = cases.vectors([(batch, 70), (batch, 3)], dtype)
    without = [torch.cat([v[:3], v[4:]]) for v in vectors]
    vectors[1][3, 1] = bad
    result = dpk.clip_sum(vectors, 1.0)
    torch.testing.assert_close(result.sum, dpk.clip_sum(without, 1.0).sum)
    assert not result.norms[3].isfinite()


def test_float64_rows_whose_square_overflows_count_as_zero(isa):
    vectors = torch.full((2, 5), 1e200, dtype=torch.float64)
    vectors[0] = 0.1
    torch.testing.assert_close(dpk.clip_sum(vectors, 1.0).sum, vectors[0])


def test_zero_rows_zero_bound_and_no_bound(isa):
    vectors = cases.vectors([(5, 9)])[0]
    vectors[2] = 0
    assert dpk.clip_sum(torch.zeros(4, 3), 1.0).sum.eq(0).all()
    assert dpk.clip_sum(vectors, 0.0).sum.eq(0).all()
    torch.testing.assert_close(dpk.clip_sum(vectors, math.inf).sum, vectors.sum(0))
    torch.testing.assert_close(dpk.clip_sum(vectors, 1e6).sum, vectors.sum(0))


def test_an_empty_batch_releases_noise_alone():
    noise = dpk.Gaussian(2.0, seed=1)
    sums = dpk.clip_sum([torch.empty(0, 3, 5), torch.empty(0, 70)], 1.0, noise=noise).sum
    only = [torch.zeros(3, 5), torch.zeros(70)]
    dpk.add_gaussian_(only, dpk.Gaussian(2.0, seed=1))
    torch.testing.assert_close(sums, only, rtol=0, atol=0)
    assert all(s.ne(0).all() for s in sums)


def test_noise_lands_on_every_coordinate_also_where_no_sample_did():
    vectors = torch.zeros(200, 4000)
    vectors[:, 0] = 1
    assert dpk.clip_sum(vectors, 1.0, noise=dpk.Gaussian(1.0)).sum.ne(0).all()


def test_the_sum_is_as_exact_as_float64_makes_it(isa):
    # Cancelling rows: a float32 accumulator would be off by about 1e-3.
    vectors = torch.cat([torch.full((500, 40), 1e4), torch.full((500, 40), -1e4), torch.full((1, 40), 1e-3)])
    torch.testing.assert_close(dpk.clip_sum(vectors, math.inf).sum, torch.full((40,), 1e-3), rtol=1e-7, atol=0)


def test_the_bound_holds_over_thousands_of_tiny_tensors(isa):
    """Squares that each round away when added to 1: a chain of 20,000 roundings, all to the same side."""
    small = torch.tensor([[math.nextafter(2.0**-26.5, 0)]], dtype=torch.float64)
    clipped = dpk.clip_sum([torch.ones(1, 1, dtype=torch.float64), *[small] * 20_000], 1.0).sum
    assert cases.row_norm(clipped) <= 1.0
