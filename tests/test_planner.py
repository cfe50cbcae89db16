"""Which way the rows of a layer go, and what `explain` says about it."""

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels import ops, planner
from dpkernels.planner import Way
from tests import models, truth


def test_the_cheapest_way_that_fits():
    plenty = 1 << 40
    assert planner.choose(8, 1, 1000, 1000, plenty) is Way.GRAM  # one addend: |a| |g|
    assert planner.choose(8, 8, 1000, 1000, plenty) is Way.GRAM
    assert planner.choose(8, 512, 256, 1024, plenty) is Way.KEEP
    assert planner.choose(8, 512, 256, 1024, 4 * 8 * 256 * 1024 - 1) is Way.TILE  # a byte short
    assert planner.choose(8, 16, 1000, 1000, 0) is Way.GRAM


@pytest.mark.parametrize("way", Way)
def test_a_forced_way(way):
    with planner.forced(way):
        assert planner.choose(8, 1, 10, 10, 0) is way
    assert planner.choose(8, 1, 10, 10, 0) is Way.GRAM


def test_the_budget_is_kept_layer_after_layer():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs = torch.randn(2, 200, 64)
    rows = 4 * 2 * 64 * 64
    for budget, ways in ((2 * rows, {Way.KEEP}), (rows, {Way.KEEP, Way.TILE}), (0, {Way.TILE})):
        choices = dpk.explain(model, inputs, max_bytes=budget)
        assert {c.way for c in choices} == ways
        assert sum(c.stored_bytes for c in choices) <= budget


@pytest.mark.parametrize("name", ["cnn", "gpt", "resnet20", "hugging_face_gpt2", "lstm"])
def test_explain_names_every_layer(name, capsys):
    model, _, inputs, _ = models.ZOO[name]()
    choices = dpk.explain(model, inputs)
    printed = capsys.readouterr().out
    assert choices
    assert all(c.parameter in printed for c in choices)
    assert "in all: weight gradients" in printed
    assert all(p.grad is None for p in model.parameters())


def test_bad_budgets():
    model = nn.Linear(2, 1)
    for bad in (-1, 1.5, True, "1"):
        with pytest.raises(ValueError, match=r"max_bytes: got .*must be a whole number >= 0 or None"):
            dpk.per_sample_gradients(model, lambda y, t: y[:, 0], torch.randn(3, 2), torch.zeros(3), max_bytes=bad)
    with pytest.raises(ValueError, match="model: got a int"):
        dpk.explain(3, torch.randn(2, 2))
    with pytest.raises(ValueError, match="inputs: has no samples"):
        dpk.explain(model, torch.randn(0, 2))
    with pytest.raises(ValueError, match="model: returned no tensor"):
        dpk.explain(models.Function(lambda m, x: x.argmax(1), w=torch.ones(2)), torch.randn(3, 2))


def test_free_memory_is_known():
    assert planner.free_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize("way", Way)
def test_kept_rows_of_a_transposed_weight(way):
    """A weight used as x @ w: rows are formed in the order of its memory."""
    model = models.Function(lambda m, x: (x @ m.w).relu() @ m.v.t(), w=torch.randn(5, 4), v=torch.randn(3, 4))
    with planner.forced(way):
        truth.check(model, lambda y, t: y.square().sum((1, 2)), torch.randn(4, 6, 5), torch.zeros(4))


@pytest.mark.skipif(ops.native is None, reason="without native code rows formed again may differ, so they are kept")
def test_convolutions_keep_the_budget_too():
    """Rows that do not fit are formed twice, and come out the same to the last bit."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 3))
    inputs, targets = torch.randn(5, 3, 6, 6), torch.randint(0, 3, (5,))
    inputs[2, 0, 0, 0] = torch.nan
    choices = dpk.explain(model, inputs, max_bytes=4 * 5 * 8 * 27)
    assert [c.way for c in reversed(choices)] == [Way.TILE, Way.KEEP, Way.GRAM] or [
        c.way for c in reversed(choices)
    ] == [Way.KEEP, Way.TILE, Way.GRAM]
    sums = [
        dpk.per_sample_gradients(model, truth.cross_entropy, inputs, targets, max_bytes=budget).clip_sum(0.1)
        for budget in (None, 0)
    ]
    for name, kept in sums[0].sum.items():
        assert kept.isfinite().all()
        torch.testing.assert_close(sums[1].sum[name], kept, rtol=1e-6, atol=1e-8)
    assert torch.equal(sums[0].norms.nan_to_num(), sums[1].norms.nan_to_num())
    rows = dpk.per_sample_gradients(model, truth.cross_entropy, inputs, targets, max_bytes=0)
    nothing = rows - rows
    assert not nothing.norms()[[0, 1, 3, 4]].any()
    assert (2.0 * rows).clamp_sum(0.01).sum["0.weight"].isfinite().all()


def test_inputs_may_be_overwritten_before_rows_are_formed_again():
    model = nn.Conv2d(1, 2, 3)
    inputs, targets = torch.randn(3, 1, 5, 5), torch.zeros(3)

    def loss_fn(y, t):
        return y.square().sum((1, 2, 3))

    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets, max_bytes=0)
    wanted = dpk.per_sample_gradients(model, loss_fn, inputs, targets).clip_sum(1.0).sum
    inputs.zero_()
    torch.testing.assert_close(rows.clip_sum(1.0).sum, wanted, rtol=1e-6, atol=1e-8)


def test_the_system_is_not_asked_for_free_memory_again_and_again(monkeypatch):
    found, now = iter([100, 200, 300]), [0.0]
    monkeypatch.setattr(planner, "free_bytes", lambda device: next(found))
    monkeypatch.setattr(planner.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(planner, "_lately", {})
    cpu = torch.device("cpu")
    seen = []
    for now[0] in (5.0, 5.05, 5.2, 5.25):
        seen.append(planner.free_bytes_lately(cpu))
    assert seen == [100, 100, 200, 200]
    assert next(found) == 300  # asked twice
