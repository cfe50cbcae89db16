"""DP-LSGD against its definition, sample by sample, with the same noise."""

import copy

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import DPLSGD, DPSGD
from tests import truth
from tests.test_dp_sgd import SIZE, batches_of, check_micro_batches


def make(model, loss_fn=truth.cross_entropy, **options):
    settings = {"local_steps": 3, "lr": 0.2, "max_norm": 0.1, "noise_multiplier": 1.3, "seed": 3}
    return DPLSGD(model, loss_fn, expected_batch_size=SIZE, **(settings | options))


def definition(model, loss_fn, batches, *, local_steps, lr, max_norm, noise_multiplier):
    """The algorithm by its words: copies that walk, clip, add, noise, divide, move."""
    noise = dpk.Gaussian(noise_multiplier * max_norm, seed=3)
    for x, y in batches:
        rows = truth.walk(model, loss_fn, x, y, local_steps, lr) if len(y) else truth.loop(model, loss_fn, x, y)
        scale = (max_norm / truth.flat(rows).norm(dim=1)).clamp(max=1).nan_to_num(1.0)
        sums = [torch.einsum("b,b...->...", scale, row.double()) for row in rows.values()]
        dpk.add_gaussian_(sums, noise)
        with torch.no_grad():
            for p, s in zip(model.parameters(), sums, strict=True):
                p += s / SIZE


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm", "routed"])
def test_equals_its_definition(name):
    """Batches of changing sizes, an empty one among them."""
    model, loss_fn, batches = batches_of(name, [5, 0, 3, 6, 1])
    other = copy.deepcopy(model)
    algorithm = make(model, loss_fn)
    for x, y in batches:
        algorithm.step(x, y)
    definition(other, loss_fn, batches, local_steps=3, lr=0.2, max_norm=0.1, noise_multiplier=1.3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)
    assert len(algorithm.ledger) == 5
    assert algorithm.epsilon(1e-5) == pytest.approx(
        dpk.accounting.epsilon(dpk.accounting.poisson_gaussian(1.3, 1.0, 5), 1e-5)
    )


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm"])
def test_one_local_step_is_dp_sgd_with_the_noise_negated(name):
    lr, threshold = 0.2, 0.1
    model, loss_fn, batches = batches_of(name, [5, 3, 6])
    other = copy.deepcopy(model)
    algorithm = make(model, loss_fn, local_steps=1, lr=lr, max_norm=threshold)
    for x, y in batches:
        algorithm.step(x, y)
    parameters = list(other.parameters())
    noise = dpk.Gaussian(1.3 * threshold / lr, seed=3)
    optimizer = torch.optim.SGD(parameters, lr=lr)
    for x, y in batches:
        sums = list(dpk.per_sample_gradients(other, loss_fn, x, y).clip_sum(threshold / lr).sum.values())
        alone = [torch.zeros_like(p) for p in parameters]
        dpk.add_gaussian_(alone, noise)
        for p, s, z in zip(parameters, sums, alone, strict=True):
            p.grad = (s - z) / SIZE
        optimizer.step()
    for a, b in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_one_local_step_has_the_distribution_of_dp_sgd():
    """The classes themselves, without noise: thresholds and step sizes correspond."""
    model, loss_fn, batches = batches_of("cnn", [5, 3, 6])
    other = copy.deepcopy(model)
    local = make(model, loss_fn, local_steps=1, noise_multiplier=0.0)
    plain = DPSGD(
        other,
        loss_fn,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.2),
        max_norm=0.1 / 0.2,
        noise_multiplier=0.0,
        expected_batch_size=SIZE,
    )
    for x, y in batches:
        local.step(x, y)
        plain.step(x, y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_have_noise_once(size):
    check_micro_batches(make, size)


def test_micro_batches_do_not_hide_wrong_lengths():
    model, loss_fn, batches = batches_of("cnn", [6])
    x, y = batches[0]
    with pytest.raises(ValueError, match="targets: a tensor has shape"):
        make(model, loss_fn, micro_batch_size=3).step(x, torch.cat([y, y[:2]]))


def test_incremental_norms_are_those_of_the_definition():
    model, loss_fn, batches = batches_of("cnn", [6])
    norms = truth.flat(truth.walk(model, loss_fn, *batches[0], 3, 0.2)).norm(dim=1)
    threshold = 1.001 * float(norms.sort().values[2])
    algorithm = make(model, loss_fn, max_norm=threshold, watch_norms=True, micro_batch_size=4)
    algorithm.step(*batches[0])
    found, excess = algorithm.incremental_norms(), (norms - threshold).clamp(min=0)
    assert found.rows == 6
    assert found.clipped == pytest.approx(float((excess > 0).double().mean()))
    assert 0 < found.clipped < 1
    assert found.mean == pytest.approx(float(excess.mean()))
    assert found.over(0.2).mean == pytest.approx(float(excess.mean()) / 0.2)
    ordered = excess.sort().values
    assert found.quartiles == pytest.approx([float(ordered[i]) for i in (1, 3, 4)])


def test_incremental_norms_are_off_unless_asked_for():
    model, loss_fn, batches = batches_of("cnn", [6])
    algorithm = make(model, loss_fn)
    algorithm.step(*batches[0])
    with pytest.raises(ValueError, match="watch_norms: got False, must be True"):
        algorithm.incremental_norms()


def test_an_interrupted_step_shows_no_sum_without_noise(monkeypatch):
    model, loss_fn, batches = batches_of("cnn", [6])
    algorithm = make(model, loss_fn)
    algorithm.step(*batches[0])
    before = copy.deepcopy(model.state_dict())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.ops.dpkernels, "weighted_sum_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        algorithm.step(*batches[0])
    assert algorithm._moves == {}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_steps": 0}, "local_steps: got 0, must be a whole number >= 1"),
        ({"lr": float("inf")}, "lr: got inf"),
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_bytes": -5}, "max_bytes: got -5, must be a whole number >= 0 or None"),
        ({"micro_batch_size": 0}, "micro_batch_size: got 0, must be a whole number >= 1 or None"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make(nn.Linear(3, 2), **options)
