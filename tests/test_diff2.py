"""DIFF2 against its definition, sample by sample, with the same noise and batches."""

import copy
import math

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels import sampling
from dpkernels.algorithms import BVRLSGD, DIFF2, GD
from dpkernels.algorithms.federation import seed_of
from dpkernels.algorithms.problems import softplus_regression, squared_loss
from tests import truth

SETTINGS = {
    "lr": 0.3,
    "restart_every": 4,
    "gradient_norm": 0.7,
    "difference_norm": 0.9,
    "gradient_noise": 0.02,
    "difference_noise": 0.05,
}
SIZES = (9, 1, 4)  # one client has a single record


def problem(sizes=SIZES, dtype=torch.float64):
    torch.manual_seed(0)
    model = softplus_regression(3, hidden=4).to(dtype)
    clients = [(torch.randn(n, 3, dtype=dtype), torch.randn(n, dtype=dtype)) for n in sizes]
    return model, clients


def clip(rows, bound):
    """Each row scaled to at most `bound`, [B, d]."""
    norms = rows.norm(dim=1, keepdim=True)
    return rows * torch.where(norms > bound, bound / norms, 1.0)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model, vector):
    with torch.no_grad():
        for p, part in zip(model.parameters(), vector.split([p.numel() for p in model.parameters()]), strict=True):
            p.copy_(part.view_as(p))


def rows_at(model, x, client):
    put(model, x)
    return truth.flat(truth.loop(model, squared_loss, *client))


def noises(seed):
    """Standard normals of one stream, a release at a time."""
    gaussian = dpk.Gaussian(1.0, seed=seed)
    return lambda like: dpk.add_gaussian_(torch.zeros_like(like), gaussian)


def definition(model, clients, rounds, *, lr, restart_every, gradient_norm, difference_norm, gradient_noise,
               difference_noise, routine=None, seed=3):  # fmt: skip
    """The algorithm by its words."""
    model = copy.deepcopy(model)
    x, before, v = weights(model), None, None
    draw = noises(seed_of(seed, 0))
    own = [noises(seed_of(seed, 1, p)) for p in range(len(clients))]
    for r in range(1, rounds + 1):
        if (r - 1) % restart_every == 0:
            d = sum(clip(rows_at(model, x, c), gradient_norm).mean(0) for c in clients) / len(clients)
            v = d + gradient_noise * gradient_norm * draw(x)
        else:
            bound = difference_norm * (x - before).norm()
            if bound > 0:
                change = [rows_at(model, x, c) - rows_at(model, before, c) for c in clients]
                d = sum(clip(rows, bound).mean(0) for rows in change) / len(clients)
                v = v + d + difference_noise * bound * draw(x)
        before, x = x, x - lr * v
        if routine is not None:
            p, u, last = r % len(clients), v, before
            steps = routine.local_steps - 1
            batches = dpk.sampling.fixed_size(
                len(clients[p][1]), routine.batch_size, steps, seed_of(seed, 2, p), start=r * steps
            )
            for indices in batches:
                bound = routine.difference_norm * (x - last).norm()
                batch = [t[indices] for t in clients[p]]
                d = clip(rows_at(model, x, batch) - rows_at(model, last, batch), bound).mean(0)
                u = u + d + routine.noise * bound * own[p](x)
                last, x = x, x - lr * u
    return x


@pytest.mark.parametrize("micro_batch_size", [None, 4])
@pytest.mark.parametrize("restart_every", [1, 4, 100])
def test_equals_its_definition(restart_every, micro_batch_size):
    model, clients = problem()
    settings = SETTINGS | {"restart_every": restart_every}
    algorithm = DIFF2(model, squared_loss, clients, **settings, micro_batch_size=micro_batch_size, seed=3)
    true = definition(model, clients, 20, **settings)
    for _ in range(20):
        algorithm.step()
    torch.testing.assert_close(weights(model), true, rtol=0, atol=1e-9)
    assert len(algorithm.ledgers[0]) == 20


def test_the_local_routine_equals_its_definition():
    model, clients = problem((9, 5, 4))
    routine = BVRLSGD(local_steps=4, batch_size=3, difference_norm=0.8, noise=0.1)
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS, routine=routine, seed=3)
    true = definition(model, clients, 20, **SETTINGS, routine=routine)
    for _ in range(20):
        algorithm.step()
    torch.testing.assert_close(weights(model), true, rtol=0, atol=1e-9)
    # each client is in all twenty releases of the server and in those of its own walks
    assert [len(ledger) for ledger in algorithm.ledgers] == [20 + 3 * own for own in (6, 7, 7)]
    assert all(ledger.sampling == "verified" for ledger in algorithm.ledgers)


def test_one_local_step_is_gd():
    results = []
    for routine in (GD(), BVRLSGD(local_steps=1, batch_size=1, difference_norm=1.0, noise=1.0)):
        model, clients = problem()
        algorithm = DIFF2(model, squared_loss, clients, **SETTINGS, routine=routine, seed=3)
        for _ in range(6):
            algorithm.step()
        results.append(weights(model))
    assert torch.equal(*results)


def test_without_noise_and_clipping_it_is_gradient_descent():
    model, clients = problem((5, 5))
    other = copy.deepcopy(model)
    free = {"gradient_norm": 1e6, "difference_norm": 1e6, "gradient_noise": 0.0, "difference_noise": 0.0}
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS | free)
    optimizer = torch.optim.SGD(other.parameters(), lr=SETTINGS["lr"])
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    for _ in range(20):
        algorithm.step()
        optimizer.zero_grad()
        squared_loss(other(x), y).mean().backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-9)
    assert algorithm.epsilon(1e-5) == math.inf


def test_the_estimate_starts_again_at_a_restart():
    model, clients = problem()
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS | {"gradient_noise": 0.0}, seed=3)
    for _ in range(4):
        algorithm.step()
    x = weights(model)
    algorithm.step()
    fresh = sum(clip(rows_at(copy.deepcopy(model), x, c), 0.7).mean(0) for c in clients) / 3
    found = torch.cat([t.flatten() for t in algorithm._estimate.values()])
    torch.testing.assert_close(found, fresh, rtol=0, atol=1e-12)


def test_weights_that_did_not_move_release_nothing():
    model, clients = problem()
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS | {"lr": 0.0})
    for _ in range(4):
        algorithm.step()
    assert len(algorithm.ledgers[0]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iterates_close_together_keep_the_clip_bound(dtype):
    """A millionth apart: norms by |g|^2 - 2 <g, g'> + |g'|^2 have lost their digits, the library's have not."""
    torch.manual_seed(0)
    now = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)).to(dtype)
    before = copy.deepcopy(now)
    with torch.no_grad():
        for p in before.parameters():
            p.add_(1e-6 * torch.randn_like(p))
    x, y = torch.randn(50, 20, dtype=dtype), torch.randn(50, dtype=dtype)
    a, b = (dpk.per_sample_gradients(m, squared_loss, x, y) for m in (now, before))
    rows = a - b
    exact = truth.flat(rows.materialize())  # of the factors as they are
    bound = float(exact.norm(dim=1).median()) / 10
    longest = 0.0
    for i in range(50):
        one = [dpk.per_sample_gradients(m, squared_loss, x[i : i + 1], y[i : i + 1]) for m in (now, before)]
        sums = (one[0] - one[1]).clip_sum(bound, dtype=torch.float64).sum
        longest = max(longest, float(torch.cat([t.flatten() for t in sums.values()]).norm()))
    assert longest <= bound * (1 + 1e-12)
    if dtype == torch.float32:
        naive = (a.norms() ** 2 - 2 * a.inner(b) + b.norms() ** 2).clamp(min=0).sqrt()
        let_through = torch.where(naive > bound, bound / naive, 1.0).double() * exact.norm(dim=1)
        assert float(let_through.max()) > 1.5 * bound


def test_privacy_is_exact_gaussian_composition_for_the_smallest_client():
    model, clients = problem((9, 6, 4))
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS)
    for _ in range(10):
        algorithm.step()
    event = dpk.accounting.diff2(
        gradient_noise=0.02, difference_noise=0.05, rounds=10, restart_every=4, clients=3, smallest_client=4
    )
    assert algorithm.epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(event, 1e-5), rel=1e-9)
    with pytest.warns(UserWarning, match=r"Proposition 4\.1"):
        assert algorithm.epsilon(1e-5, accounting="published") > algorithm.epsilon(1e-5)


def test_with_the_local_routine_the_largest_epsilon_counts():
    model, clients = problem((40, 20, 30))
    routine = BVRLSGD(local_steps=3, batch_size=2, difference_norm=0.8, noise=0.8)
    algorithm = DIFF2(model, squared_loss, clients, **SETTINGS, routine=routine)
    for _ in range(6):
        algorithm.step()
    options = {"gradient_noise": 0.02, "difference_noise": 0.05, "rounds": 6, "restart_every": 4, "clients": 3}
    walk = {"local_noise": 0.8, "local_steps": 3, "batch_size": 2, "own_rounds": 2}
    event = dpk.accounting.bvr_l_sgd(**options, **walk, records=20)
    assert algorithm.epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(event, 1e-5), rel=1e-9)


@pytest.mark.parametrize("secure", [{}, {"secure": True, "micro_batch_size": 5}])
@pytest.mark.parametrize("routine", [None, BVRLSGD(local_steps=3, batch_size=2, difference_norm=0.8, noise=3.0)])
def test_a_budget_is_met_and_kept(routine, secure):
    model, clients = problem((9, 6, 4))
    options = {k: v for k, v in SETTINGS.items() if not k.endswith("noise")} | {"routine": routine} | secure
    algorithm = DIFF2.with_budget(model, squared_loss, clients, epsilon=3.0, delta=1e-5, rounds=6, **options)
    for _ in range(6):
        algorithm.step()
    assert 2.7 < algorithm.epsilon(1e-5) <= 3.0
    assert algorithm.ledgers[0].budget == (3.0, 1e-5)
    spent = algorithm.epsilon(1e-5)
    with pytest.raises(dpk.accounting.BudgetError, match="budget of epsilon = 3"):
        [algorithm.step() for _ in range(6)]
    assert spent <= algorithm.epsilon(1e-5) <= 3.0


def check_resumed(fresh, folder):
    """Four rounds, saved, loaded and gone on with are nine rounds; for any algorithm that `fresh` makes."""
    whole, first, second = fresh(), fresh(), fresh()
    for _ in range(9):
        whole.step()
    for _ in range(4):
        first.step()
    dpk.checkpoint.save(folder / "run.ckpt", first.state_dict())
    second.load_state_dict(dpk.checkpoint.load(folder / "run.ckpt"))
    for _ in range(5):
        second.step()
    assert torch.equal(weights(whole.model), weights(second.model))
    assert whole.epsilon(1e-5) == second.epsilon(1e-5)
    assert whole.bytes_sent == second.bytes_sent


@pytest.mark.parametrize("routine", [None, BVRLSGD(local_steps=3, batch_size=2, difference_norm=0.8, noise=0.1)])
def test_a_run_that_is_resumed_is_the_run_that_was_not(routine, tmp_path):
    def fresh():
        model, clients = problem((9, 6, 4))
        return DIFF2(model, squared_loss, clients, **SETTINGS, routine=routine, seed=3)

    check_resumed(fresh, tmp_path)


def check_failed_round(fresh, monkeypatch, after, retried):
    """A round fails after so many releases: no batch of it is drawn again, by this run or by one that resumes it."""
    drawn, left = [], [math.inf]
    words, release = sampling._words, dpk.Gaussian.release

    def noted(*which):
        drawn.append(which)
        return words(*which)

    def failing(self, *arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            left[0] = math.inf
            raise RuntimeError("in the middle")
        return release(self, *arguments, **options)

    monkeypatch.setattr(sampling, "_words", noted)
    monkeypatch.setattr(dpk.Gaussian, "release", failing)
    first = fresh()
    first.step()
    left[0], before = after, len(drawn)
    with pytest.raises(RuntimeError, match="in the middle"):
        first.step()
    assert len(drawn) > before > 0
    if retried:
        first.step()
    second = fresh()
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        second.step()
    assert len(set(drawn)) == len(drawn) > 3 * before


@pytest.mark.parametrize("retried", [False, True])
def test_a_batch_of_a_round_that_failed_is_in_no_other(retried, monkeypatch):
    routine = BVRLSGD(local_steps=3, batch_size=2, difference_norm=0.8, noise=0.1)

    def fresh():
        model, clients = problem((9,))
        return DIFF2(model, squared_loss, clients, **SETTINGS, routine=routine, seed=3)

    check_failed_round(fresh, monkeypatch, 2, retried)  # the server's and the first local release are out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": []}, "clients: got"),
        ({"clients": [(torch.zeros(0, 3), torch.zeros(0))]}, r"clients\[0\]: has no record"),
        ({"clients": [torch.zeros(3)]}, r"clients\[0\]: got a Tensor, must be a pair"),
        ({"restart_every": 0}, "restart_every: got 0"),
        ({"difference_noise": -1.0}, "difference_noise: got -1.0"),
        ({"routine": "gd"}, "routine: got 'gd', must be GD"),
        ({"routine": BVRLSGD(2, 5, 1.0, 1.0)}, "must be at most the smallest client's 1"),
        ({"secure": True}, "micro_batch_size: got None"),
    ],
)
def test_mistakes_are_named(change, words):
    model, clients = problem()
    given = {"clients": clients, **SETTINGS, **change}
    with pytest.raises(ValueError, match=words):
        DIFF2(model, squared_loss, given.pop("clients"), **given)
