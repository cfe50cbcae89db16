"""PerSample as users have it: clipping, clamping, differences, noise, bad rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels import planner, products, sums
from tests import models, truth

NAMES = ["gpt", "three_uses", "overlapping_views", "routed", "weight_norm", "lstm"]


def recorded(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    model, inputs = model.to(dtype), truth.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return model, loss_fn, inputs, targets, dpk.per_sample_gradients(model, loss_fn, inputs, targets)


@pytest.mark.parametrize("name", NAMES)
def test_rules_equal_the_dense_ops(name):
    *_, rows = recorded(name)
    dense = rows.materialize()
    bounds = [0.1 + 0.05 * i for i in range(len(dense))]
    for clip in (0.3, dpk.clipping.Automatic(0.5, 0.1), dpk.clipping.PerLayer(bounds), float("inf"), 0.0):
        got, want = rows.clip_sum(clip), dpk.clip_sum(list(dense.values()), clip)
        assert list(got.sum) == list(dense)
        torch.testing.assert_close(list(got.sum.values()), want.sum, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-10, atol=1e-12)
    got, want = rows.clamp_sum(0.01), dpk.clamp_sum(list(dense.values()), 0.01)
    torch.testing.assert_close(list(got.sum.values()), want.sum, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_noise_is_that_of_the_dense_ops(name):
    *_, rows = recorded(name)
    dense = list(rows.materialize().values())
    got = rows.clip_sum(0.3, dpk.Gaussian(0.7, seed=5)).sum
    want = dpk.clip_sum(dense, 0.3, noise=dpk.Gaussian(0.7, seed=5)).sum
    torch.testing.assert_close(list(got.values()), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic(name):
    model, loss_fn, inputs, targets, now = recorded(name)
    with torch.no_grad():
        for p in model.parameters():
            p += 1e-3 * torch.randn_like(p)
    before = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    a, b = truth.flat(now.materialize()), truth.flat(before.materialize())
    for rows, want in ((now - before, a - b), (2.5 * now, 2.5 * a), (-now, -a), (now - 0.5 * before, a - 0.5 * b)):
        torch.testing.assert_close(truth.flat(rows.materialize()), want, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(rows.norms(), want.norm(dim=1), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(now.inner(before), (a * b).sum(1), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-6, 1e-4])
def test_differences_of_near_iterates_keep_the_clip_bound(scale):
    """The norm^2 of the difference as |a|^2 - 2<a,b> + |b|^2 has no right digit here; the released rows obey C."""
    model, loss_fn, inputs, targets, now = recorded("gpt", torch.float32)
    start = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn_like(p)
    before = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    difference = now - before
    clip = 0.1 * float(difference.norms().min())
    naive = now.inner(now) - 2 * now.inner(before) + before.inner(before)
    if scale < 1e-5:
        assert not torch.allclose(naive, difference.norms().square(), rtol=0.1)
    assert float(truth.flat_sum(difference.clip_sum(clip, dtype=torch.float64).sum).norm()) <= models.B * clip
    for i in range(models.B):
        now, before = (
            _at(model, loss_fn, inputs[i : i + 1], targets[i : i + 1], p) for p in (start, [*model.parameters()])
        )
        row = truth.flat_sum((now - before).clip_sum(clip, dtype=torch.float64).sum)
        assert clip * (1 - 1e-4) <= float(row.norm()) <= clip


def _at(model, loss_fn, inputs, targets, values):
    """Rows with other values of the parameters."""
    kept = [p.detach().clone() for p in model.parameters()]
    values = [v.detach().clone() for v in values]
    with torch.no_grad():
        for p, v in zip(model.parameters(), values, strict=True):
            p.copy_(v)
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    with torch.no_grad():
        for p, v in zip(model.parameters(), kept, strict=True):
            p.copy_(v)
    return rows


def test_bound_holds_for_every_sample_alone():
    """A row that cancels inside: two halves of a sequence with opposite gradients."""
    torch.manual_seed(0)
    model = models.Function(
        lambda m, x: (F.linear(x, m.w) * torch.tensor([1.0, -1.0])[:, None]).sum(1), w=torch.randn(3, 4)
    )
    x = torch.randn(5, 1, 4).repeat(1, 2, 1) * 1e3
    x[:, 1] += 1e-3 * torch.randn(5, 4)
    loss = lambda y, t: (y * t).sum(1)  # noqa: E731
    rows = dpk.per_sample_gradients(model, loss, x, torch.randn(5, 3))
    for i in range(5):
        one = dpk.per_sample_gradients(model, loss, x[i : i + 1], torch.randn(1, 3))
        assert float(one.clip_sum(1e-3, dtype=torch.float64).sum["w"].norm()) <= 1e-3
    assert float(rows.clip_sum(1e-3, dtype=torch.float64).sum["w"].norm()) <= 5e-3


@pytest.mark.parametrize("name", ["gpt", "cnn", "routed", "lstm"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_counts_as_zero(name, bad):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    poisoned = lambda outputs, y: loss_fn(outputs, y[0]) * y[1]  # noqa: E731
    factor = torch.ones(models.B)
    clean = dpk.per_sample_gradients(model, poisoned, inputs, (targets, factor.index_fill(0, torch.tensor([2]), 0.0)))
    spoilt = dpk.per_sample_gradients(model, poisoned, inputs, (targets, factor.index_fill(0, torch.tensor([2]), bad)))
    rules = 0.5, dpk.clipping.Automatic(0.5), dpk.clipping.PerLayer([0.2] * len(clean.materialize()))
    for method, bound in (*(("clip_sum", rule) for rule in rules), ("clamp_sum", 0.1)):
        got, want = getattr(spoilt, method)(bound).sum, getattr(clean, method)(bound).sum
        for parameter in want:
            torch.testing.assert_close(got[parameter], want[parameter], rtol=1e-5, atol=1e-6)


def test_noise_lands_on_parameters_that_no_sample_touched():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2), "table": nn.Embedding(50, 3)})
    model.forward = lambda ids: model["used"](model["table"](ids))
    rows = dpk.per_sample_gradients(model, lambda y, t: y.sum((1, 2)), torch.tensor([[1, 2], [1, 3]]), torch.zeros(2))
    for s in rows.clip_sum(1.0, dpk.Gaussian(1.0)).sum.values():
        assert (s != 0).all()
    assert not rows.clip_sum(1.0).sum["idle.weight"].any()


def test_the_ledger_has_the_release():
    *_, rows = recorded("gpt")
    ledger = dpk.accounting.Ledger()
    rows.clip_sum(2.0, dpk.Gaussian(3.0, ledger=ledger))
    assert [r.noise_multiplier for r in ledger.event().releases] == [1.5]
    rows.clamp_sum(0.1, dpk.Gaussian(1.0, ledger=ledger))
    assert len(ledger) == 2


def test_micro_batches_add_up():
    model, loss_fn, inputs, targets, rows = recorded("cnn", torch.float32)
    total = None
    for part in (slice(0, 2), slice(2, 3), slice(3, 6)):
        some = dpk.per_sample_gradients(model, loss_fn, inputs[part], targets[part])
        total = some.clip_sum(0.5, onto=total, dtype=torch.float64).sum
    assert all(s.dtype == torch.float64 for s in total.values())
    torch.testing.assert_close(truth.flat_sum(total), truth.flat_sum(rows.clip_sum(0.5).sum), rtol=1e-5, atol=1e-6)


def test_a_sum_that_is_added_to_is_left_as_it_was_unless_it_may_be_used():
    *_, rows = recorded("gpt", torch.float32)
    alone = rows.clip_sum(0.5, dtype=torch.float64).sum
    zeros = {name: torch.zeros_like(s) for name, s in alone.items()}
    for exact in (None, False):
        found = rows.clip_sum(0.5, onto=zeros, dtype=torch.float64, exact=exact).sum
        torch.testing.assert_close(truth.flat_sum(found), truth.flat_sum(alone), rtol=1e-5, atol=1e-6)
        assert not any(bool(z.any()) for z in zeros.values())
    again = rows.clip_sum(0.5, onto={name: s.clone() for name, s in alone.items()}, reuse=True).sum
    torch.testing.assert_close(truth.flat_sum(again), 2 * truth.flat_sum(alone), rtol=1e-5, atol=1e-6)


def test_sums_have_the_parameters_shapes_and_types():
    model = models.Function(lambda m, x: x @ m.a.double() + m.b, a=torch.randn(3, 2), b=torch.randn(2).double())
    rows = dpk.per_sample_gradients(model, lambda y, _: y.sum(1), torch.randn(4, 3).double(), torch.zeros(4))
    assert {n: (s.dtype, s.shape) for n, s in rows.clip_sum(1.0).sum.items()} == {
        "a": (torch.float32, (3, 2)),
        "b": (torch.float64, (2,)),
    }


def test_mistakes_are_named():
    *_, rows = recorded("cnn")
    *_, other = recorded("gpt")
    for mistake, word in (
        (lambda: rows - other, "other"),
        (lambda: rows.inner("no"), "other"),
        (lambda: rows.clip_sum(-1.0), "clip"),
        (lambda: rows.clip_sum(dpk.clipping.PerLayer([1.0])), "PerLayer has 1 bounds, must have 6"),
        (lambda: rows.clip_sum(dpk.clipping.RecursiveMomentum(1, 1, 0.5)), "clip"),
        (lambda: rows.clamp_sum(float("nan")), "bound"),
        (lambda: rows.clip_sum(1.0, noise=1.0), "noise"),
        (lambda: rows.clip_sum(1.0, onto={"x": torch.zeros(1)}), "onto"),
        (lambda: rows * float("nan"), "scale"),
    ):
        with pytest.raises(ValueError, match=word):
            mistake()
    assert "6 rows of" in repr(rows)


def _one_linear(x, g, **options):
    """Rows g x^T of a linear layer, from factors as they are."""
    model = nn.Linear(x.shape[-1], g.shape[-1], bias=False)
    return dpk.per_sample_gradients(model, lambda y, t: (y * t).flatten(1).sum(1), x, g, **options)


@pytest.mark.parametrize("way", planner.Way)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("x", "g", "clip"), [(1e22, 1e22, 1.0), (5e37, 1e-2, 1e-6), (1e-30, 1e-12, 1e-44), (3e18, 1, 1)]
)
def test_the_bound_at_the_ends_of_float32(x, g, clip, length, way):
    """Coefficients, or their products with factors, that float32 can hardly hold."""
    torch.manual_seed(0)
    with planner.forced(way):
        rows = _one_linear(x * torch.randn(1, length, 4), g * torch.randn(1, length, 3))
        released = truth.flat_sum(rows.clip_sum(clip, dtype=None).sum)
    assert float(released.norm()) <= clip * (1 + 1e-6) + 2.0**-140  # the sum itself is rounded to float32
    assert released.isfinite().all()


def test_automatic_clipping_of_what_float32_cannot_hold():
    for rule in (dpk.clipping.Automatic(1.0), dpk.clipping.Automatic(1.0, 1e-39)):
        for x, g in ((1e-40, 1e37), (1e-20, 1e-20), (0.0, 1.0)):
            total = _one_linear(torch.full((1, 4), x), torch.full((1, 3), g)).clip_sum(rule).sum["weight"]
            assert total.isfinite().all()
            assert float(total.norm()) <= 1.0
            assert x > 0 or not total.any()


def test_float64_factors_whose_squares_underflow():
    rows = _one_linear_in_float64(1e-162, 7e153)
    assert float(rows.clip_sum(1e-9).sum["weight"].norm()) <= 1e-9


def _one_linear_in_float64(x, g):
    model = nn.Linear(4000, 3, bias=False).double()
    x, g = torch.full((1, 4000), x, dtype=torch.float64), torch.full((1, 3), g, dtype=torch.float64)
    return dpk.per_sample_gradients(model, lambda y, t: (y * t).sum(1), x, g)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_of_any_type(dtype):
    *_, rows = recorded("cnn", torch.float32)
    exact = rows.clip_sum(0.3, dtype=torch.float64).sum
    for name, total in rows.clip_sum(
        0.3, dtype=dtype, out={name: t.to(dtype) for name, t in exact.items()}
    ).sum.items():
        assert total.dtype == dtype
        torch.testing.assert_close(total, exact[name].to(dtype), rtol=2e-2, atol=1e-4)


def test_rounding_of_matrix_products_that_the_user_allowed_is_not_used(monkeypatch):
    """A coarser float32 product would round c * g after the coefficient was made."""
    *_, rows = recorded("gpt", torch.float32)
    wanted = rows.clip_sum(0.3, dtype=torch.float64).sum
    monkeypatch.setattr(products, "full_precision", lambda device: False)
    monkeypatch.setattr(sums, "product_sum", None)
    for name, total in rows.clip_sum(0.3).sum.items():
        torch.testing.assert_close(total.double(), wanted[name], rtol=1e-6, atol=1e-8)
