"""Training with secure noise: the same algorithm, in batches of one shape, with its roundings counted."""

import copy
from functools import partial

import pytest
import torch

import dpkernels as dpk
from dpkernels.algorithms import DPLSGD, DPSGD
from dpkernels.algorithms.micro_batches import micro_batches
from dpkernels.algorithms.private_training import PrivateTraining
from dpkernels.per_sample import PerSample
from tests import models, truth
from tests.test_dp_sgd import batches_of

MICRO = 4


def dp_sgd(model, loss_fn, **options):
    return DPSGD(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


def dp_lsgd(model, loss_fn, **options):
    return DPLSGD(model, loss_fn, local_steps=2, lr=0.1, **options)


ALGORITHMS = pytest.mark.parametrize("make", [dp_sgd, dp_lsgd])


@ALGORITHMS
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_padding_changes_nothing(make, name):
    """Noise of a millionth of the bound: what is left is the algorithm."""
    model, loss_fn, batches = batches_of(name, [5, 0, 3, 4, 1])
    other = copy.deepcopy(model)
    options = {"max_norm": 0.5, "expected_batch_size": 6.0}
    secure = make(model, loss_fn, noise_multiplier=1e-6, secure=True, micro_batch_size=MICRO, **options)
    plain = make(other, loss_fn, noise_multiplier=0.0, **options)
    for x, y in batches:
        secure.step(x, y)
        plain.step(x, y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)


@ALGORITHMS
def test_every_batch_runs_in_one_shape(make, monkeypatch):
    model, loss_fn, batches = batches_of("cnn", [5, 0, 3, 8, 1])
    algorithm = make(
        model,
        loss_fn,
        max_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=6.0,
        secure=True,
        micro_batch_size=MICRO,
        watch_norms=True,
    )
    seen = []
    rows_of = PrivateTraining._release

    def watched(self, rows, *arguments):
        def noted(x, y):
            seen.append(len(x))
            return rows(x, y)

        return rows_of(self, noted, *arguments)

    monkeypatch.setattr(PrivateTraining, "_release", watched)
    for x, y in batches:
        algorithm.step(x, y)
    assert seen == [MICRO] * (2 + 1 + 1 + 2 + 1)
    assert algorithm.incremental_norms().rows == 17


@ALGORITHMS
def test_roundings_are_counted_and_the_budget_holds_for_all_steps(make):
    model, loss_fn, batches = batches_of("cnn", [5])
    options = {"max_norm": 0.5, "expected_batch_size": 6.0, "secure": True, "micro_batch_size": 8}
    algorithm = type(make(model, loss_fn, noise_multiplier=1.0, **options)).with_budget(
        model,
        loss_fn,
        epsilon=3.0,
        delta=1e-5,
        steps=3,
        **options,
        **({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if make is dp_sgd else {}),
        **({"local_steps": 2, "lr": 0.1} if make is dp_lsgd else {}),
    )
    z = dpk.accounting.calibrate(lambda z: dpk.accounting.gaussian(z, 3), 3.0, 1e-5)
    assert z * 0.5 < algorithm.noise.std < z * 0.5 * (1 + 1e-5)
    for _ in range(3):
        algorithm.step(*batches[0])
    (entry,) = algorithm.ledger.event().releases
    assert z <= entry.noise_multiplier < z * (1 + 1e-5)
    with pytest.raises(dpk.accounting.BudgetError):
        algorithm.step(*batches[0])


def check_others_do_not_matter(rows_of, model, loss_fn, inputs, targets):
    """The first three rows have the same bits whatever stands behind them."""
    rows = []
    for keep in (5, 3):
        x, y = inputs.clone(), targets.clone()
        x[keep:], y[keep:] = 0, 0
        rows.append(truth.flat(rows_of(model, loss_fn, x, y).materialize())[:3])
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", ["cnn", "gpt", "resnet20"])
def test_a_rows_bits_do_not_depend_on_the_other_rows(name):
    """In a batch of one shape. In batches of different shapes they may, which is why secure training has one."""
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    check_others_do_not_matter(partial(dpk.per_sample_gradients, max_bytes=0), model, loss_fn, inputs, targets)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    whole, moved = (
        truth.flat(dpk.per_sample_gradients(model, loss_fn, x, y, max_bytes=0).materialize())
        for x, y in ((inputs, targets), (inputs[order], targets[order]))
    )
    assert torch.equal(whole[order], moved)  # nor on its place


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_a_walks_bits_do_not_depend_on_the_other_rows(name):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    walk = partial(dpk.local_updates, steps=3, lr=0.1, max_bytes=1 << 30)
    check_others_do_not_matter(walk, model, loss_fn, inputs, targets)


def test_one_record_less_changes_no_other_row_however_inputs_lie_in_memory():
    """Kernels round differently for channels that lie last; a part that is filled up must not lie otherwise."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 8, 3),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 3),
    )
    x = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
    y = torch.randint(0, 3, (16,))
    parts = [next(micro_batches(x[:n], y[:n], 16, filled=True)) for n in (16, 15)]
    assert [part[0].stride() for part in parts] == [(192, 64, 8, 1)] * 2
    rows = [truth.flat(dpk.per_sample_gradients(model, truth.cross_entropy, a, b).materialize()) for a, b, _ in parts]
    assert torch.equal(rows[0][:15], rows[1][:15])
    assert parts[0][2] is None
    assert parts[1][2].tolist() == [True] * 15 + [False]


def test_sums_are_double_precision(monkeypatch):
    """Factors of a linear layer too, which otherwise are one product in single precision."""
    model, x, y = torch.nn.Linear(50, 40), torch.randn(30, 50), torch.randint(0, 40, (30,))
    rows = dpk.per_sample_gradients(model, truth.cross_entropy, x, y)
    seen = []
    product = PerSample._product
    monkeypatch.setattr(PerSample, "_product", lambda *a, **k: seen.append("single") or product(*a, **k))
    rows.clip_sum(1.0, dpk.Gaussian(1.0, secure=True))
    assert seen == []
    rows.clip_sum(1.0, dpk.Gaussian(1.0))
    assert seen


def test_a_size_is_needed():
    model, loss_fn, _ = batches_of("cnn", [])
    with pytest.raises(ValueError, match="micro_batch_size: got None, must be a number with secure=True"):
        dp_sgd(model, loss_fn, max_norm=1.0, noise_multiplier=1.0, expected_batch_size=6.0, secure=True)
    options = {"max_norm": 1.0, "noise_multiplier": 0.0, "expected_batch_size": 6.0, "micro_batch_size": 4}
    with pytest.raises(ValueError, match="secure: got True without noise"):
        dp_sgd(model, loss_fn, **options, secure=True)
