import math
import time

import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, TensorDataset

from dpkernels import sampling
from dpkernels.accounting import Ledger
from dpkernels.algorithms import DPSGD
from dpkernels.sampling import Loader


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("n", "rate"), [(1000, 0.01), (50, 0.5), (7, 0.9), (10_000, 1e-4)])
def test_poisson_batches_are_poisson(n, rate, seed):
    """Sizes are binomial, every index as often as any other, neighbours independent."""
    steps = 4000
    batches = list(sampling.poisson(n, rate, steps, seed))
    assert all(bool((b[1:] > b[:-1]).all()) for b in batches)
    sizes = torch.tensor([len(b) for b in batches], dtype=torch.float64)
    spread = math.sqrt(n * rate * (1 - rate))
    assert abs(float(sizes.mean()) - n * rate) < 5 * spread / math.sqrt(steps)
    assert abs(float(sizes.var()) / spread**2 - 1) < 0.15
    counts = torch.bincount(torch.cat(batches), minlength=n)
    assert len(counts) == n
    wanted = steps * rate
    if wanted >= 5:
        statistic = float(((counts - wanted) ** 2).sum()) / (wanted * (1 - rate))
        assert 1e-5 < stats.chi2.sf(statistic, n) < 1 - 1e-5
    if n <= 50:
        pairs = sum(int(((b[1:] - b[:-1]) == 1).sum()) for b in batches)
        expected = steps * (n - 1) * rate**2
        assert abs(pairs - expected) < 6 * math.sqrt(3 * expected)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 8), (1000, 40), (5, 5), (5, 0), (1, 1)])
def test_fixed_size_batches_are_all_sets_alike(n, size, seed):
    steps = 3000
    batches = list(sampling.fixed_size(n, size, steps, seed))
    assert all(len(b) == size and bool((b[1:] > b[:-1]).all()) for b in batches)
    counts = torch.bincount(torch.cat(batches), minlength=n)
    wanted = steps * size / n
    if 0 < size < n:
        statistic = float(((counts - wanted) ** 2).sum()) / (wanted * (1 - size / n)) * (n - 1) / n
        assert 1e-5 < stats.chi2.sf(statistic, n - 1) < 1 - 1e-5
    else:
        assert bool((counts == wanted).all())


def test_the_ends_of_the_rate():
    assert [b.tolist() for b in sampling.poisson(3, 1.0, 2)] == [[0, 1, 2], [0, 1, 2]]
    assert [b.tolist() for b in sampling.poisson(3, 0.0, 2)] == [[], []]
    assert [b.tolist() for b in sampling.poisson(0, 0.5, 1)] == [[]]
    assert all(len(b) <= 1 for b in sampling.poisson(10, 1e-12, 50))
    assert all(len(b) == 10 for b in sampling.poisson(10, 1 - 1e-15, 50))


@pytest.mark.parametrize(
    "make",
    [lambda s, **o: sampling.poisson(100, 0.1, 6, s, **o), lambda s, **o: sampling.fixed_size(100, 7, 6, s, **o)],
)
def test_a_seed_repeats_and_goes_on_from_any_step(make):
    whole = [b.tolist() for b in make(5)]
    assert whole == [b.tolist() for b in make(5)]
    assert whole != [b.tolist() for b in make(6)]
    assert whole[4:] == [b.tolist() for b in make(5, start=4)][:2]
    assert [b.tolist() for b in make(None)] != [b.tolist() for b in make(None)]
    assert len({tuple(b) for b in whole}) == 6


def test_neither_torch_nor_numpy_decides():
    torch.manual_seed(0)
    first = [b.tolist() for b in sampling.poisson(100, 0.3, 3)]
    torch.manual_seed(0)
    assert first != [b.tolist() for b in sampling.poisson(100, 0.3, 3)]


@pytest.mark.parametrize("seed", [None, 1])
def test_ten_million_records(seed):
    start = time.perf_counter()
    sizes = [len(b) for b in sampling.poisson(10**7, 1e-4, 100, seed)]
    sizes += [len(b) for b in sampling.fixed_size(10**7, 1000, 100, seed)]
    assert time.perf_counter() - start < 5
    assert 800 < min(sizes) <= max(sizes) < 1200


def test_a_loader_collates_and_has_empty_batches():
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    batches = sampling.poisson(10, 0.1, 60, seed=1)
    seen = []
    for (x, y), indices in zip(Loader(data, batches), batches, strict=True):
        assert x.shape == (len(indices), 2)
        assert torch.equal(y, indices)
        assert torch.equal(x[:, 0], 2.0 * indices)
        seen.append(len(y))
    assert 0 in seen
    assert len(Loader(data, batches)) == 60


def test_training_from_a_loader():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(30, 4), torch.randint(0, 3, (30,)))
    model = torch.nn.Linear(4, 3)
    algorithm = DPSGD(
        model,
        torch.nn.CrossEntropyLoss(reduction="none"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        max_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=3,
        sampling_rate=0.1,
    )
    for x, y in Loader(data, sampling.poisson(30, 0.1, 40, ledger=algorithm.ledger)):
        algorithm.step(x, y)
    assert len(algorithm.ledger) == 40
    assert algorithm.ledger.sampling == "verified"
    assert not algorithm.ledger.reproducible


def test_a_ledger_knows_which_releases_had_a_batch_of_ours():
    ledger = Ledger(0.1)
    release = lambda: ledger.record(std=1.0, sensitivity=1.0, reproducible=False)  # noqa: E731
    assert ledger.sampling == "claimed"
    for _ in sampling.poisson(30, 0.1, 3, ledger=ledger):
        release()
    assert ledger.sampling == "verified"
    for _ in sampling.poisson(30, 0.1, 1, ledger=ledger):
        release()
        release()  # of the same batch: not an independent sample
    assert ledger.sampling == "claimed"
    assert "sampling rate 0.1 (claimed)" in repr(ledger)
    other = Ledger(0.1)
    other.load_state_dict(ledger.state_dict())
    assert other.state_dict() == ledger.state_dict()
    assert Ledger().sampling == "none"
    fixed = Ledger(adjacency="replace-one", fixed_size=(30, 4))
    for _ in sampling.fixed_size(30, 4, 2, seed=1, ledger=fixed):
        fixed.record(std=1.0, sensitivity=1.0, reproducible=False)
    assert fixed.sampling == "verified"
    assert fixed.reproducible  # so were the batches


def test_a_batch_that_was_drawn_before_is_refused():
    """Who is in it is in all its releases: at rate 0.1 that is no amplification but ten times less."""
    ledger = Ledger(0.1)
    batches = sampling.poisson(30, 0.1, 3, seed=5, ledger=ledger)
    list(batches)
    with pytest.raises(ValueError, match="batches: number 0 of this seed was drawn before"):
        list(batches)
    list(sampling.poisson(30, 0.1, 3, seed=5, start=3, ledger=ledger))
    list(sampling.poisson(30, 0.1, 3, seed=6, ledger=ledger))
    unseeded = sampling.poisson(30, 0.1, 3, ledger=ledger)
    assert [b.tolist() for b in unseeded] != [b.tolist() for b in unseeded]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sampling.poisson(-1, 0.1, 1), "n: got -1"),
        (lambda: sampling.poisson(10, 1.5, 1), "rate: got 1.5"),
        (lambda: sampling.poisson(10, 0.5, -1), "steps: got -1"),
        (lambda: sampling.poisson(10, 0.5, 1, seed=-3), "seed: got -3"),
        (lambda: sampling.poisson(10, 0.5, 1, seed=2**63), "seed"),
        (lambda: sampling.fixed_size(10, 11, 1), "size: got 11, must be at most n = 10"),
        (
            lambda: sampling.poisson(10, 0.5, 1, ledger=Ledger(0.1)),
            "claims sampling rate 0.1, must claim what is drawn",
        ),
        (lambda: sampling.fixed_size(10, 5, 1, ledger=Ledger(0.5)), "what is drawn: batches of 5 of 10"),
        (lambda: Loader(TensorDataset(torch.zeros(3)), DataLoader([1])), "batches: got a DataLoader"),
        (lambda: Loader(DataLoader([1]), sampling.poisson(1, 0.5, 1)), "got a DataLoader"),
        (lambda: Loader(TensorDataset(torch.zeros(3)), [1, 2]), "batches: got a list"),
        (lambda: Loader(TensorDataset(torch.zeros(3)), sampling.poisson(4, 0.5, 1)), "of 4 records, must be of .* 3"),
        (lambda: Loader(TensorDataset(torch.zeros(0)), sampling.poisson(0, 0.5, 1)), "dataset: has no record"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_batches_of_several_parties_are_one_draw_over_all():
    sizes, cuts = (50, 1, 0, 300), torch.tensor([0, 50, 51, 51])
    ledgers = [Ledger(0.2) for _ in sizes]
    each = sampling.poisson_of_each(sizes, 0.2, 400, seed=5, ledgers=ledgers)
    total = torch.zeros(sum(sizes))
    for whole, (indices, counts) in zip(sampling.poisson(sum(sizes), 0.2, 400, seed=5), each, strict=True):
        assert len(counts) == len(sizes)
        assert torch.equal(indices + cuts.repeat_interleave(torch.tensor(counts)), whole)
        for part, n in zip(indices.split(counts), sizes, strict=True):
            assert ((part >= 0) & (part < n)).all()
        total[whole] += 1
    assert ((total / 400 - 0.2).abs() < 4.5 * (0.2 * 0.8 / 400) ** 0.5).all()
    assert all(ledger.batch_waits for ledger in ledgers)
    some = sampling.poisson_of_each(sizes, 0.2, 9, seed=5, start=3, ledgers=[Ledger(0.2)], own=range(1, 4))
    others = sampling.poisson_of_each(sizes, 0.2, 9, seed=5, start=3, ledgers=[])
    for (own, own_counts), (indices, counts) in zip(some, others, strict=True):
        assert torch.equal(own, indices[counts[0] :])
        assert own_counts == counts[1:]


def test_parties_without_a_seed_draw_anew_and_another_rate_than_claimed_is_refused():
    a, b = (next(sampling.poisson_of_each((1000, 1000), 0.5, 1, ledgers=[])) for _ in range(2))
    assert not torch.equal(a[0], b[0])
    first, second = a[0].split(a[1])
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="claims"):
        sampling.poisson_of_each((3, 4), 0.5, 1, ledgers=[Ledger(0.4)])
    with pytest.raises(ValueError, match="rate: got 2"):
        sampling.poisson_of_each((3, 4), 2, 1, ledgers=[])
