"""PriSMA against its definition, sample by sample, with the same noise and batches."""

import copy
import math

import pytest
import torch

import dpkernels as dpk
from dpkernels.algorithms import PriSMA
from dpkernels.algorithms.federation import seed_of
from dpkernels.algorithms.problems import (
    RegularisedLeastSquares,
    least_squares,
    least_squares_clients,
    softplus_regression,
    squared_loss,
)
from tests import truth
from tests.test_diff2 import check_failed_round, check_resumed, clip, noises, put, weights

SETTINGS = {
    "lr": 0.2,
    "momentum": 0.2,
    "gradient_norm": 0.8,
    "server_norm": 0.5,
    "difference_norm": 0.02,
    "batch_size": 4,
    "noise": 0.03,
    "initial_noise": 0.1,
}
SIZES = (9, 4, 6)


def softplus():
    return softplus_regression(3, hidden=4).double(), squared_loss, 3


def regularised():
    return RegularisedLeastSquares(5).double(), least_squares, 5


PROBLEMS = {"softplus": softplus, "regularised": regularised}


def problem(name="softplus", sizes=SIZES):
    torch.manual_seed(0)
    model, loss_fn, width = PROBLEMS[name]()
    clients = [(torch.randn(n, width).double(), torch.randn(n).double()) for n in sizes]
    return model, loss_fn, clients


def definition(model, loss_fn, clients, rounds, *, lr, momentum, gradient_norm, server_norm, difference_norm,
               batch_size, noise, initial_noise, sampling="poisson", seed=3):  # fmt: skip
    """The algorithm by its words."""
    model = copy.deepcopy(model)

    def gradients(at, client):
        put(model, at)
        return clip(truth.flat(truth.loop(model, loss_fn, *client)), gradient_norm)

    x, before, g = weights(model), None, momentum
    draw = [noises(seed_of(seed, 1, i)) for i in range(len(clients))]
    v = [torch.zeros_like(x) for _ in clients]
    for t in range(rounds):
        for i, client in enumerate(clients):
            n, own = len(client[1]), seed_of(seed, 2, i)
            if sampling == "poisson":
                (indices,) = dpk.sampling.poisson(n, batch_size / n, 1, own, start=t)
            else:
                (indices,) = dpk.sampling.fixed_size(n, batch_size, 1, own, start=t)
            batch = [z[indices] for z in client]
            now = gradients(x, batch)
            if t == 0:
                v[i] = now.sum(0) / batch_size + initial_noise * draw[i](x)
                continue
            change = now - gradients(before, batch)
            change = change if difference_norm is None else clip(change, difference_norm)
            rows = g * now + (1 - g) * change
            v[i] = (1 - g) * v[i] + rows.sum(0) / batch_size + noise * draw[i](x)
        mean = sum(v) / len(v)
        before, x = x, x - lr * clip(mean[None], math.inf if server_norm is None else server_norm)[0]
    return x


def run(model, loss_fn, clients, rounds, **settings):
    algorithm = PriSMA(model, loss_fn, clients, **settings, seed=3)
    for _ in range(rounds):
        algorithm.step()
    return algorithm


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_equals_its_definition(name, sampling, micro_batch_size):
    model, loss_fn, clients = problem(name)
    settings = SETTINGS | {"sampling": sampling}
    true = definition(model, loss_fn, clients, 20, **settings)
    algorithm = run(model, loss_fn, clients, 20, **settings, micro_batch_size=micro_batch_size)
    torch.testing.assert_close(weights(model), true, rtol=0, atol=1e-9)
    assert [len(ledger) for ledger in algorithm.ledgers] == [20] * 3
    # a client whose batch is all its records needs no sampler's word
    assert {ledger.sampling for ledger in algorithm.ledgers} <= {"verified", "none"}


def test_without_momentum_and_server_clipping_it_is_dpsgd_gc():
    """The baseline: the mean of clients' clipped, noised gradients."""
    model, loss_fn, clients = problem()
    settings = SETTINGS | {"momentum": 1.0, "server_norm": None, "difference_norm": None}
    x = weights(model)
    draw = [noises(seed_of(3, 1, i)) for i in range(3)]
    other = copy.deepcopy(model)
    for t in range(20):
        sums = []
        for i, client in enumerate(clients):
            n = len(client[1])
            (indices,) = dpk.sampling.poisson(n, 4 / n, 1, seed_of(3, 2, i), start=t)
            put(other, x)
            rows = clip(truth.flat(truth.loop(other, loss_fn, *(z[indices] for z in client))), 0.8)
            sums.append(rows.sum(0) / 4 + (0.1 if t == 0 else 0.03) * draw[i](x))
        x = x - 0.2 * sum(sums) / 3
    run(model, loss_fn, clients, 20, **settings)
    torch.testing.assert_close(weights(model), x, rtol=0, atol=1e-9)


def test_the_variant_without_the_third_clip_says_what_it_rests_on():
    model, loss_fn, clients = problem()
    settings = SETTINGS | {"difference_norm": None}
    true = definition(model, loss_fn, clients, 10, **settings)
    with pytest.warns(UserWarning, match="rests on smoothness, which nothing here can verify"):
        algorithm = run(model, loss_fn, clients, 10, **settings, smoothness=2.0)
    torch.testing.assert_close(weights(model), true, rtol=0, atol=1e-9)
    z = {entry.noise_multiplier for entry in algorithm.ledgers[0].event().releases}
    row = 0.2 * 0.8 + 0.8 * (2.0 * 0.2 * 0.5)
    assert min(z) == pytest.approx(0.03 * 4 / row, rel=1e-12)


def test_no_client_shares_noise_with_another():
    model, loss_fn, clients = problem(sizes=(4, 4))
    still = SETTINGS | {"gradient_norm": 0.0, "difference_norm": 0.0, "initial_noise": 1.0}
    algorithm = run(model, loss_fn, clients, 1, **still)
    first, second = (torch.cat([t.flatten() for t in v.values()]) for v in algorithm._estimates)
    assert (first != second).all()


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_privacy_is_that_of_the_smallest_client(sampling):
    model, loss_fn, clients = problem(sizes=(40, 20, 60))
    algorithm = run(model, loss_fn, clients, 5, **SETTINGS | {"noise": 0.3, "initial_noise": 0.6, "sampling": sampling})
    event = dpk.accounting.prisma(
        noise=0.3,
        initial_noise=0.6,
        rounds=5,
        gradient_norm=0.8,
        difference_norm=0.02,
        momentum=0.2,
        batch_size=4,
        records=20,
        sampling=sampling,
    )
    assert algorithm.epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(event, 1e-5), rel=1e-6)
    with pytest.warns(UserWarning, match="Theorem 3"):
        assert algorithm.epsilon(1e-5, accounting="published") > algorithm.epsilon(1e-5)


@pytest.mark.parametrize("secure", [{}, {"secure": True, "micro_batch_size": 5}])
def test_a_budget_is_met_and_kept(secure):
    model, loss_fn, clients = problem(sizes=(40, 20))
    options = {k: v for k, v in SETTINGS.items() if not k.endswith("noise")} | secure
    algorithm = PriSMA.with_budget(model, loss_fn, clients, epsilon=3.0, delta=1e-5, rounds=5, **options)
    for _ in range(5):
        algorithm.step()
    assert 2.9 < algorithm.epsilon(1e-5) <= 3.0
    with pytest.raises(dpk.accounting.BudgetError, match="budget of epsilon = 3"):
        algorithm.step()


def test_a_run_that_is_resumed_is_the_run_that_was_not(tmp_path):
    check_resumed(lambda: PriSMA(*problem(), **SETTINGS, seed=3), tmp_path)


def test_a_row_keeps_its_bound_where_gradients_are_close():
    """In single precision, points a millionth apart: the released row of one record is never longer than it may be."""
    torch.manual_seed(0)
    model = softplus_regression(20, hidden=30)
    clients = [(torch.randn(1, 20), 10 * torch.randn(1)) for _ in range(30)]
    settings = SETTINGS | {"lr": 1e-6, "batch_size": 1, "noise": 0.0, "initial_noise": 0.0, "difference_norm": 1e-7}
    algorithm = PriSMA(model, squared_loss, clients, **settings)
    algorithm.step()
    before = [torch.cat([t.flatten() for t in v.values()]) for v in algorithm._estimates]
    algorithm.step()
    for v, u in zip(algorithm._estimates, before, strict=True):
        row = torch.cat([t.flatten() for t in v.values()]) - 0.8 * u
        assert float(row.norm()) <= (0.2 * 0.8 + 0.8 * 1e-7) * (1 + 1e-12)


def test_the_data_of_figure_1():
    once, twice = least_squares_clients(2, 50, copies=1), least_squares_clients(2, 50, copies=2)
    assert [len(y) for _, y in twice] == [100, 100]
    assert torch.equal(twice[0][0][:50], once[0][0])
    assert once[0][0].abs().max() <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"momentum": 0.0}, "momentum: got 0, must be > 0"),
        ({"batch_size": 5}, "batch_size: got 5, must be at most the smallest client's 4"),
        ({"sampling": "shuffled"}, "sampling: got 'shuffled', must be"),
        ({"difference_norm": None}, "difference_norm: got None, must be a number unless"),
        ({"noise": -1.0}, "noise: got -1.0"),
    ],
)
def test_mistakes_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        PriSMA(*problem(), **SETTINGS | change)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
@pytest.mark.parametrize("retried", [False, True])
def test_a_batch_of_a_round_that_failed_is_in_no_other(retried, sampling, monkeypatch):
    """A client may have sent before another fails."""

    def fresh():
        return PriSMA(*problem(), **SETTINGS, sampling=sampling, seed=3)

    check_failed_round(fresh, monkeypatch, 1, retried)
