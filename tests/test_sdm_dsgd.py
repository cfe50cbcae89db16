"""SDM-DSGD against its definition, node by node and sample by sample, with the same noise, batches and masks."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import SDMDSGD, topologies
from dpkernels.algorithms.federation import seed_of
from dpkernels.algorithms.masks import mask_seed_of
from dpkernels.algorithms.problems import cross_entropy, softplus_regression, squared_loss
from tests import truth
from tests.test_diff2 import check_failed_round, check_resumed, noises, put, weights

SETTINGS = {
    "lr": 0.3,
    "mixing": 0.5,
    "keep_probability": 0.4,
    "clamp": 0.2,
    "noise_std": 0.5,
    "batch_size": 3.0,
    "sampling_rate": 0.4,
}
SIZES = (9, 1, 4, 7)  # one node has a single record


class Tied(nn.Module):
    """A weight used twice, once transposed, behind a convolution with norm."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.weight = nn.Parameter(0.5 * torch.randn(4, 6))

    def forward(self, x):
        x = self.norm(self.convolution(x[:, None])).flatten(1)
        return torch.tanh(nn.functional.linear(x, self.weight)) @ self.weight


def problem(sizes=SIZES, dtype=torch.float64, kind="softplus"):
    torch.manual_seed(0)
    if kind == "softplus":
        model = softplus_regression(3, hidden=4).to(dtype)
        return model, squared_loss, [(torch.randn(n, 3, dtype=dtype), torch.randn(n, dtype=dtype)) for n in sizes]
    nodes = [(torch.randn(n, 3, dtype=dtype), torch.randint(0, 6, (n,))) for n in sizes]
    return Tied().to(dtype), cross_entropy, nodes


def kept_by(mask_seed, number, node, width, p):
    return dpk.sparsify(torch.ones(width), p, seed=mask_seed_of(mask_seed, number, node)).indices


def batches_of(sizes, rate, seed, number):
    """The records of each node in a round: one draw over all of them."""
    (drawn,) = dpk.sampling.poisson(sum(sizes), rate, 1, seed_of(seed, 2), start=number)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [drawn[(drawn >= end - n) & (drawn < end)] - (end - n) for n, end in zip(sizes, ends, strict=True)]


def definition(model, loss_fn, nodes, w, rounds, *, lr, mixing, keep_probability, clamp, noise_std, batch_size,
               sampling_rate, order="noise-then-sparsify", seed=3, mask_seed=0):  # fmt: skip
    """The algorithm by its words: all nodes' vectors after so many rounds."""
    model = copy.deepcopy(model)
    x = weights(model).repeat(len(nodes), 1)
    draws = [noises(seed_of(seed, 1, i)) for i in range(len(nodes))]
    for number in range(rounds):
        sent = torch.zeros_like(x)
        batches = batches_of([len(node[1]) for node in nodes], sampling_rate, seed, number)
        for i, (node, batch) in enumerate(zip(nodes, batches, strict=True)):
            put(model, x[i])
            rows = truth.flat(truth.loop(model, loss_fn, node[0][batch], node[1][batch]))
            g = rows.clamp(-clamp, clamp).sum(0) / batch_size
            kept = kept_by(mask_seed, number, i, x.shape[1], keep_probability)
            noise = noise_std * draws[i](x[i, kept])
            if order == "noise-then-sparsify":
                d = mixing * (w[i] @ x - x[i] - lr * g)[kept] + mixing * lr * noise
                sent[i, kept] = d / keep_probability
            else:
                d = mixing * (w[i] @ x - x[i] - lr * g)
                sent[i, kept] = d[kept] / keep_probability + mixing * lr * noise
        x = x + sent
    return x


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("order", ["noise-then-sparsify", "sparsify-then-noise"])
@pytest.mark.parametrize("kind", ["softplus", "tied"])
def test_equals_its_definition(kind, order, micro_batch_size):
    model, loss_fn, nodes = problem(kind=kind)
    w = topologies.ring(4)
    true = definition(model, loss_fn, nodes, w, 20, **SETTINGS, order=order)
    algorithm = SDMDSGD(
        model, loss_fn, nodes, topology=w, **SETTINGS, order=order, micro_batch_size=micro_batch_size, seed=3
    )
    for _ in range(20):
        algorithm.step()
    torch.testing.assert_close(algorithm.node_vectors, true, rtol=0, atol=1e-9)
    torch.testing.assert_close(weights(model), true.mean(0), rtol=0, atol=1e-9)
    assert all(len(ledger) == 20 and ledger.sampling == "verified" for ledger in algorithm.ledgers)


def test_float32_follows_float64():
    single, double = problem(dtype=torch.float32, kind="tied"), problem(kind="tied")
    found = []
    for model, loss_fn, nodes in (single, double):
        put(model, weights(double[0]))
        nodes = [(x.to(weights(model).dtype), y) for (x, y) in double[2]]
        algorithm = SDMDSGD(model, loss_fn, nodes, topology=topologies.ring(4), **SETTINGS, seed=3)
        for _ in range(5):
            algorithm.step()
        found.append(algorithm.node_vectors.double())
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)


def run(settings, rounds=20, sizes=SIZES, topology=None, **options):
    model, loss_fn, nodes = problem(sizes)
    w = topologies.complete(len(sizes)) if topology is None else topology
    algorithm = SDMDSGD(model, loss_fn, nodes, topology=w, **SETTINGS | settings, seed=3, **options)
    for _ in range(rounds):
        algorithm.step()
    return algorithm, (model, loss_fn, nodes, w)


def test_everything_kept_and_no_mixing_is_dsgd():
    """x_i = sum_j W_ij x_j - lr (g + noise), the baseline."""
    settings = SETTINGS | {"keep_probability": 1.0, "mixing": 1.0}
    start, loss_fn, nodes = problem()
    algorithm, (_, _, _, w) = run(settings, rounds=20)
    model, x = copy.deepcopy(start), weights(start).repeat(4, 1)
    draws = [noises(seed_of(3, 1, i)) for i in range(4)]
    for number in range(20):
        g = []
        for i, (node, batch) in enumerate(zip(nodes, batches_of(SIZES, 0.4, 3, number), strict=True)):
            put(model, x[i])
            rows = truth.flat(truth.loop(model, loss_fn, node[0][batch], node[1][batch]))
            g.append(rows.clamp(-0.2, 0.2).sum(0) / 3.0 - 0.5 * draws[i](x[i]))  # noise has either sign
        x = w @ x - 0.3 * torch.stack(g)
    torch.testing.assert_close(algorithm.node_vectors, x, rtol=0, atol=1e-9)


def test_dc_dsgd_is_mixing_of_one_and_diverges_where_sdm_dsgd_does_not():
    """At p = 0.2, as in the paper's Figure 2: nodes drift apart."""
    quiet = {"noise_std": 0.0, "keep_probability": 0.2, "lr": 0.01}
    with pytest.warns(UserWarning, match="may diverge"):
        bad, _ = run(quiet | {"mixing": 1.0}, rounds=300, topology=topologies.complete(4))
    good, _ = run(quiet | {"mixing": 0.5}, rounds=300, topology=topologies.complete(4))
    apart = [float((a.node_vectors - a.node_vectors.mean(0)).norm()) for a in (bad, good)]
    assert apart[0] > 1e3
    assert apart[1] < 1.0


def test_the_mean_moves_by_the_mean_gradient_alone():
    """W is doubly stochastic: mixing moves no mean."""
    settings = {"keep_probability": 1.0, "noise_std": 0.0, "sampling_rate": 1.0}
    algorithm, (model, loss_fn, nodes, _) = run(settings, rounds=3)
    before, x = algorithm.node_vectors.clone(), copy.deepcopy(model)
    algorithm.step()
    g = []
    for i, node in enumerate(nodes):
        put(x, before[i])
        g.append(truth.flat(truth.loop(x, loss_fn, *node)).clamp(-0.2, 0.2).sum(0) / 3.0)
    wanted = before.mean(0) - 0.5 * 0.3 * torch.stack(g).mean(0)
    torch.testing.assert_close(algorithm.node_vectors.mean(0), wanted, rtol=0, atol=1e-12)


def test_messages_are_unbiased():
    """Over masks, a message is the move: what is sent where everything is kept."""
    settings, count = SETTINGS | {"noise_std": 0.0}, 3000
    model, loss_fn, nodes = problem()
    start = copy.deepcopy(model.state_dict())

    def moved(mask_seed, **options):
        model.load_state_dict(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            algorithm = SDMDSGD(
                model, loss_fn, nodes, topology=topologies.ring(4), **settings | options, seed=3, mask_seed=mask_seed
            )
        before = algorithm.node_vectors.clone()
        algorithm.step()
        return algorithm.node_vectors - before

    move = moved(0, keep_probability=1.0)
    mean = sum(moved(mask_seed << 40) for mask_seed in range(count)) / count
    spread = math.sqrt((1 - 0.4) / 0.4 / count)
    assert (move != 0).sum() > 40
    assert ((mean - move).abs() <= 4.5 * spread * move.abs()).all()


@pytest.mark.parametrize("retried", [False, True])
def test_a_batch_of_a_round_that_failed_is_in_no_other(retried, monkeypatch):
    model, loss_fn, nodes = problem()
    start = copy.deepcopy(model.state_dict())

    def fresh():
        model.load_state_dict(start)
        return SDMDSGD(model, loss_fn, nodes, topology=topologies.ring(4), **SETTINGS, seed=3)

    check_failed_round(fresh, monkeypatch, 1, retried)


class Listening:
    """A transport that keeps what was sent."""

    def __init__(self):
        self.bytes_sent, self.heard = 0, []

    def send(self, message, receivers):
        self.bytes_sent += receivers * message.numel() * message.element_size()
        self.heard.append((message.clone(), receivers))
        return message


def test_a_message_has_values_only_and_neighbours_know_where_they_belong():
    transport = Listening()
    model, loss_fn, nodes = problem(dtype=torch.float32)
    algorithm = SDMDSGD(
        model, loss_fn, nodes, topology=topologies.ring(4), **SETTINGS, mask_seed=7, transport=transport
    )
    copies = algorithm.node_vectors.clone()
    for number in range(5):
        transport.heard.clear()
        algorithm.step()
        for i, (values, receivers) in enumerate(transport.heard):
            assert receivers == 2
            assert values.dtype == torch.float32
            copies[i, kept_by(7, number, i, 21, 0.4)] += values
        assert torch.equal(copies, algorithm.node_vectors)
    sent = sum(len(kept_by(7, number, i, 21, 0.4)) for number in range(5) for i in range(4))
    assert algorithm.bytes_sent == 2 * 4 * sent


def test_epsilon_is_that_of_the_masks_that_were_and_of_the_worst_node():
    algorithm, _ = run({}, rounds=30)
    found = []
    for i in range(4):
        kept = [len(kept_by(0, number, i, 21, 0.4)) for number in range(30)]
        event = dpk.accounting.sdm_dsgd(kept, noise_std=0.5, clamp=0.2, batch_size=3.0, sampling_rate=0.4)
        found.append(dpk.accounting.epsilon(event, 1e-5))
    assert algorithm.epsilon(1e-5) == pytest.approx(max(found), rel=1e-6)
    assert min(found) < max(found)
    with pytest.warns(UserWarning, match="not a guarantee"):
        assert algorithm.epsilon(1e-5, accounting="published") > 0


def test_numbers_of_kept_coordinates_are_rounded_up_in_the_ledger():
    """Of 401 coordinates about 160 are kept, counted in steps of 8: as few kinds, and never less than they were."""
    torch.manual_seed(0)
    nodes = [(torch.randn(5, 400), torch.randn(5)) for _ in range(3)]
    algorithm = SDMDSGD(nn.Linear(400, 1), squared_loss, nodes, topology=topologies.ring(3), **SETTINGS, seed=3)
    _steps(algorithm, 12)
    kept = [len(kept_by(0, number, 0, 401, 0.4)) for number in range(12)]
    multipliers = {r.noise_multiplier: r.steps for r in algorithm.ledgers[0].event().releases}
    wanted = {}
    for number in kept:
        z = 0.5 * 3.0 / (0.2 * math.sqrt(-(-number // 8) * 8))
        wanted[z] = wanted.get(z, 0) + 1
    assert sorted(multipliers) == pytest.approx(sorted(wanted))
    assert sorted(multipliers.values()) == sorted(wanted.values())
    assert any(number % 8 for number in kept)


def test_noise_after_sparsifying_is_counted_as_less():
    first, second = run({}, 5)[0], run({}, 5, order="sparsify-then-noise")[0]
    assert second.epsilon(1e-5) > 1.5 * first.epsilon(1e-5)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("order", ["noise-then-sparsify", "sparsify-then-noise"])
def test_a_budget_is_met_and_kept(order, secure):
    model, loss_fn, nodes = problem()
    settings = {k: v for k, v in SETTINGS.items() if k != "noise_std"}
    options = {"secure": True, "micro_batch_size": 4} if secure else {}
    algorithm = SDMDSGD.with_budget(
        model, loss_fn, nodes, topology=topologies.ring(4), **settings, order=order,
        epsilon=2.0, delta=1e-5, rounds=12, **options,
    )  # fmt: skip
    _steps(algorithm, 12)
    assert 1.9 < algorithm.epsilon(1e-5) <= 2.0
    with pytest.raises(dpk.accounting.BudgetError):
        _steps(algorithm, 3)
    assert algorithm.epsilon(1e-5) <= 2.0
    before, entries = algorithm.node_vectors.clone(), [len(ledger) for ledger in algorithm.ledgers]
    assert entries == [algorithm.round] * 4
    with pytest.raises(dpk.accounting.BudgetError):
        algorithm.step()
    assert torch.equal(algorithm.node_vectors, before)  # a round that is refused moves nobody, and is entered nowhere
    assert [len(ledger) for ledger in algorithm.ledgers] == entries


def _steps(algorithm, count):
    for _ in range(count):
        algorithm.step()


def test_a_run_that_is_resumed_is_the_run_that_was_not(tmp_path):
    def fresh(**options):
        model, loss_fn, nodes = problem()
        return SDMDSGD(model, loss_fn, nodes, topology=topologies.ring(4), **SETTINGS, seed=3, **options)

    check_resumed(fresh, tmp_path)
    state = fresh().state_dict()
    with pytest.raises(ValueError, match="mask_seed: is 0 in the saved run, must be 5 as here"):
        fresh(mask_seed=5).load_state_dict(state)


def test_empty_batches_release_noise_and_mixing():
    algorithm, _ = run({"sampling_rate": 1e-9}, rounds=2)
    assert algorithm.node_vectors.isfinite().all()
    assert (algorithm.node_vectors[0] != algorithm.node_vectors[1]).any()


def test_a_record_that_is_not_finite_counts_as_zero():
    model, loss_fn, nodes = problem(dtype=torch.float32)
    found = []
    for value in (math.nan, math.inf, None):
        x, y = nodes[0][0].clone(), nodes[0][1].clone()
        if value is None:
            x, y = x[1:], y[1:]
        else:
            x[0, 0] = value
        algorithm = SDMDSGD(
            copy.deepcopy(model), loss_fn, [(x, y), *nodes[1:]], topology=topologies.ring(4),
            **SETTINGS | {"sampling_rate": 1.0}, seed=3,
        )  # fmt: skip
        algorithm.step()
        found.append(algorithm.node_vectors)
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize("make", [topologies.ring, topologies.complete, lambda n: topologies.erdos_renyi(n, 0.5, 3)])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_topologies_are_consensus_matrices(make, n):
    w = make(n)
    assert torch.equal(w, w.T)
    torch.testing.assert_close(w.sum(1), torch.ones(n, dtype=torch.float64))
    values = torch.linalg.eigvalsh(w)
    assert (values > 1 / 3 - 1e-9).all()
    assert (values > 1 - 1e-9).sum() == 1  # connected: only the mean stays
    if n > 2:
        assert float(values[0]) == pytest.approx(1 / 3)


def test_a_step_size_that_may_diverge_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run({"mixing": 0.99, "keep_probability": 0.4}, rounds=0, topology=topologies.ring(4))
    with pytest.warns(UserWarning, match=r"mixing: got 0.99, must be below .* = 0.828 \(for L = 1\)"):
        run({"mixing": 0.99, "keep_probability": 0.4}, rounds=0, topology=topologies.ring(4), smoothness=1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topology": torch.eye(3)}, r"topology: got \(3, 3\), must be a matrix of 4 by 4"),
        ({"topology": torch.eye(4)}, "topology: has an eigenvalue -1, or 1 twice"),
        ({"topology": torch.ones(4, 4)}, "topology: must be symmetric with rows that add up to 1"),
        ({"keep_probability": 0.0}, "keep_probability: got 0.0"),
        ({"mixing": 1.5}, "mixing: got 1.5"),
        ({"clamp": -1.0}, "clamp: got -1.0"),
        ({"batch_size": 0}, "batch_size: got 0, must be > 0"),
        ({"sampling_rate": 2.0}, "sampling_rate: got 2.0"),
        ({"order": "both"}, "order: got 'both', must be 'noise-then-sparsify' or 'sparsify-then-noise'"),
        ({"mask_seed": -1}, "mask_seed: got -1"),
        ({"nodes": []}, r"nodes: got \[\], must be a non-empty sequence"),
        ({"secure": True}, "micro_batch_size: got None, must be a number with secure=True"),
        ({"noise_std": math.nan}, "noise_std: got nan"),
        ({"mixing": 0}, "mixing: got 0, must be > 0"),
        ({"nodes": [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))] * 2}, r"nodes\[1\]: has"),
        ({"nodes": [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 3), torch.zeros(2).long())] * 2}, "type"),
    ],
)
def test_mistakes_are_named(change, words):
    model, loss_fn, nodes = problem()
    arguments = {"topology": topologies.ring(4), "nodes": nodes, **SETTINGS} | change
    with pytest.raises(ValueError, match=words):
        SDMDSGD(model, loss_fn, arguments.pop("nodes"), **arguments)


def test_inputs_by_name_must_come_in_one_order():
    x, y = torch.zeros(2, 3), torch.zeros(2)
    nodes = [({"a": x, "b": x}, y), ({"b": x, "a": x}, y)]
    with pytest.raises(ValueError, match=r"nodes\[1\]: has inputs or targets of another form than nodes\[0\]"):
        SDMDSGD(softplus_regression(3), squared_loss, nodes, topology=topologies.ring(2), **SETTINGS)


@pytest.mark.parametrize("change", [{"clamp": 0.0}, {"clamp": math.inf}, {"batch_size": 0}, {"mask_seed": 1.5}])
def test_mistakes_are_named_before_noise_is_calibrated(change):
    model, loss_fn, nodes = problem()
    settings = {k: v for k, v in SETTINGS.items() if k != "noise_std"} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got"):
        SDMDSGD.with_budget(
            model, loss_fn, nodes, topology=topologies.ring(4), epsilon=1.0, delta=1e-5, rounds=3, **settings
        )


def test_a_state_of_other_nodes_changes_nothing():
    three, four = (run({}, rounds=2, sizes=SIZES[:n])[0] for n in (3, 4))
    fresh = run({}, rounds=0)[0]
    with pytest.raises(ValueError, match=r"node_vectors: are \(3, 21\) in the saved run, must be \(4, 21\)"):
        fresh.load_state_dict(three.state_dict())
    fresh.load_state_dict(four.state_dict())
    assert torch.equal(fresh.node_vectors, four.node_vectors)


def test_a_graph_in_two_parts_is_refused():
    with pytest.raises(ValueError, match="linked: is not connected"):
        topologies.erdos_renyi(10, 0.01)
    with pytest.raises(ValueError, match="must be a symmetric bool matrix"):
        topologies.of_graph(torch.eye(3))
