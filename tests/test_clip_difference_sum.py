import pytest
import torch

import dpkernels as dpk
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shapes", cases.SHAPES)
def test_equals_reference(shapes, dtype, isa):
    now = cases.vectors(cases.SHAPES[shapes], dtype)
    before = cases.vectors(cases.SHAPES[shapes], dtype, seed=1)
    cases.check("clip_difference_sum", [now, before], cases.bounds(2.0), None)
    cases.check("clip_difference_sum", [now, cases.near(now)], cases.bounds(1e-6), None)
    cases.check("clip_difference_sum", [now, before], cases.bounds(*(1.0 for _ in now)), None)


def test_equals_clip_sum_of_the_difference():
    now, before = cases.vectors([(9, 30)])[0], cases.vectors([(9, 30)], seed=1)[0]
    torch.testing.assert_close(dpk.clip_difference_sum(now, before, 1.0), dpk.clip_sum(now - before, 1.0))


@pytest.mark.parametrize("batch", [5, 200])
def test_one_vector_for_all_samples(batch, isa):
    now = cases.vectors([(batch, 6, 7), (batch, 70)])
    base = cases.vectors([(6, 7), (70,)], seed=1)
    spread = [b.expand(batch, *b.shape).contiguous() for b in base]
    torch.testing.assert_close(
        dpk.clip_difference_sum(now, base, 1.0), dpk.clip_difference_sum(now, spread, 1.0), rtol=0, atol=0
    )


@pytest.mark.parametrize("relative", [1e-3, 1e-6, 1e-12, 1e-15])
def test_the_bound_holds_where_the_two_nearly_agree(relative, isa):
    for seed in range(5):
        now = cases.vectors([(1, 5000)], torch.float64, seed=seed, scale=1e3)
        before = cases.near(now, relative, seed=seed + 10)
        clip = 0.5 * cases.row_norm([now[0] - before[0]])
        clipped = dpk.clip_difference_sum(now, before, clip).sum
        assert clip * (1 - 1e-9) < cases.row_norm(clipped) <= clip


def test_float32_differences_do_not_cancel(isa):
    now = cases.vectors([(1, 5000)], scale=1e3)[0]
    before = cases.near([now], 1e-6)[0]
    exact = now.double() - before.double()
    result = dpk.clip_difference_sum(now, before, 1e-4)
    torch.testing.assert_close(result.norms.double(), exact.norm(dim=1), rtol=1e-7, atol=0)
    torch.testing.assert_close(result.sum.double(), exact[0] * 1e-4 / exact.norm(), rtol=1e-6, atol=0)


def test_equal_vectors_release_nothing(isa):
    now = cases.vectors([(7, 40)])[0]
    assert dpk.clip_difference_sum(now, now.clone(), 1.0).sum.eq(0).all()


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_that_is_not_finite_counts_as_zero(side, isa):
    pair = [cases.vectors([(6, 70)])[0], cases.vectors([(6, 70)], seed=1)[0]]
    without = [torch.cat([v[:3], v[4:]]) for v in pair]
    pair[side][3, 1] = torch.inf
    torch.testing.assert_close(dpk.clip_difference_sum(*pair, 1.0).sum, dpk.clip_difference_sum(*without, 1.0).sum)


@pytest.mark.parametrize("shapes", ["by_samples", "by_columns"])
def test_threads_do_not_change_a_bit(shapes, isa):
    now = cases.vectors(cases.SHAPES[shapes])
    before = cases.near(now)

    def call():
        sums, norms = dpk.clip_difference_sum(now, before, 1e-6, noise=dpk.Gaussian(0.1, seed=4))
        return [*sums, norms]

    cases.thread_invariant(call)
