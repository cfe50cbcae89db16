"""Batches in a loop that knows nothing of privacy: drawn as they are counted, each stepped on once, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from dpkernels.opacus import BatchMemoryManager
from dpkernels.opacus.loader import PoissonBatches
from tests.opacus_loops import BATCH, N, data, fixed, private, train, truth


def test_empty_poisson_batches():
    """They are steps of noise like any other; shapes come from the data."""
    x, y = data(4)
    loader = DataLoader(TensorDataset(x, y), batch_size=1)
    model, optimizer, loader, engine = private(loader=loader, noise_multiplier=1.0, sample_rate=0.01)
    sizes = []
    for a, b in loader:
        sizes.append(len(a))
        assert a.shape[1:] == x.shape[1:]
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        assert all(bool(p.isfinite().all()) and bool(p.grad.any()) for p in model.parameters())
    assert 0 in sizes
    assert len(engine.accountant) == 4


def test_a_sampler_that_contradicts_the_rate_is_refused():
    dataset = TensorDataset(*data())
    weighted = DataLoader(dataset, batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * N, N))
    with pytest.raises(ValueError, match="data_loader: draws by WeightedRandomSampler"):
        private(loader=weighted)
    again = DataLoader(dataset, batch_size=BATCH, sampler=torch.utils.data.RandomSampler(dataset, replacement=True))
    with pytest.raises(ValueError, match="RandomSampler with replacement"):
        private(loader=again)
    with pytest.raises(ValueError, match=r"sample_rate: got 0.2, but data_loader draws batches of a fixed size"):
        private(poisson_sampling=False, sample_rate=0.2)
    drawn = DataLoader(dataset, batch_sampler=PoissonBatches(N, 0.25, 4))
    with pytest.raises(ValueError, match=r"sample_rate: got 0.2, must be the 0.25"):
        private(loader=drawn, poisson_sampling=False, sample_rate=0.2)
    engine = private(loader=drawn, poisson_sampling=False)[-1]
    assert engine.accountant.ledgers[0].sampling_rate == 0.25

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

        def __len__(self):
            return 10

    with pytest.raises(ValueError, match="IterableDataset"):
        private(loader=DataLoader(Stream(), batch_size=2), sample_rate=0.1)


def test_without_poisson_sampling_nothing_is_claimed():
    engine = fixed(noise_multiplier=5.0)[-1]
    assert engine.accountant.ledgers[0].sampling_rate == 1.0


def test_other_batches_than_were_drawn_are_refused():
    """The loader that was given in, instead of the one that came back."""
    given = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    model, optimizer, loader, engine = private(loader=given)
    with pytest.raises(ValueError, match="has handed out no batch for it"):
        train(model, optimizer, given)
    assert len(engine.accountant) == 0
    train(model, optimizer, loader)
    assert len(engine.accountant) == 5


def test_a_batch_is_stepped_on_once():
    """Not after a look at it that did not train, not twice, not with a record in it several times."""
    given = DataLoader(TensorDataset(*data()), batch_size=BATCH)
    model, optimizer, loader, engine = private(loader=given, noise_multiplier=1.0)
    for _ in loader:
        pass
    with pytest.raises(ValueError, match="has handed out no batch for it"):
        train(model, optimizer, given)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(ValueError, match="has handed out no batch for it"):
            optimizer.step()
        break
    optimizer.zero_grad()
    for x, y in loader:
        if len(x):
            F.cross_entropy(model(x.repeat(6, 1)), y.repeat(6)).backward()
            with pytest.raises(ValueError, match="a record that is there twice counts twice"):
                optimizer.step()
            break
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_logical_batch_that_is_left_is_dropped(workers):
    """break, an exception, continue: what is released is of one batch, and no later step is out of step."""
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, num_workers=workers)
    with pytest.warns(UserWarning, match="counted as if each record"):
        model, optimizer, loader, engine = private(loader=loader, poisson_sampling=False)
    plain = copy.deepcopy(model.to_standard_module())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        for i, (x, y) in enumerate(small):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i == 1:
                break
    assert len(engine.accountant) == 0
    optimizer.zero_grad()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    assert len(engine.accountant) == 1
    for p, g in zip(model.parameters(), truth(plain, x, y, 0.5), strict=True):
        torch.testing.assert_close(p.grad, g / BATCH, rtol=1e-9, atol=1e-12)


def test_opacus_own_manager_is_refused():
    from opacus.utils.batch_memory_manager import BatchMemoryManager as Theirs

    _, optimizer, loader, _ = private()
    with (
        Theirs(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small,
        pytest.raises(ValueError, match=r"must be dpkernels.opacus.BatchMemoryManager"),
    ):
        next(iter(small))
    with pytest.raises(ValueError, match="must be the one that make_private returned"):
        BatchMemoryManager(data_loader=DataLoader([1]), max_physical_batch_size=1)


def test_a_seeded_run_that_is_resumed_repeats_nothing(tmp_path):
    """Neither batches nor noise: their difference would have no noise in it."""
    seen = []
    for resumed in (False, True):
        loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, generator=torch.Generator().manual_seed(0))
        noise = torch.Generator().manual_seed(0)
        model, optimizer, loader, engine = private(loader=loader, noise_multiplier=1.0, noise_generator=noise)
        if resumed:
            engine.load_checkpoint(tmp_path / "run", module=model, optimizer=optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y, reduction="sum") * 0).backward()
            optimizer.step()
            seen.append((x, model.to_standard_module()[0].weight.grad.clone()))
        engine.save_checkpoint(tmp_path / "run", module=model, optimizer=optimizer)
    assert len(engine.accountant) == 10
    for (x, g), (u, h) in zip(seen[:5], seen[5:], strict=True):
        assert x.shape != u.shape or not torch.equal(x, u)
        assert not torch.equal(g, h)


def test_verified_also_where_workers_draw_ahead():
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, num_workers=2)
    model, optimizer, loader, engine = private(loader=loader, noise_multiplier=1.0)
    train(model, optimizer, loader)
    assert engine.accountant.ledgers[0].sampling == "verified"


def test_samplers_that_repeat_a_record_are_refused_without_poisson_sampling_too():
    dataset = TensorDataset(*data())
    weighted = DataLoader(dataset, batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * N, N))
    with pytest.raises(ValueError, match="WeightedRandomSampler with replacement, which may have a record twice"):
        private(loader=weighted, poisson_sampling=False)

    class Mine(torch.utils.data.BatchSampler):
        pass

    own = DataLoader(dataset, batch_sampler=Mine(torch.utils.data.SequentialSampler(dataset), BATCH, False))
    with pytest.raises(ValueError, match="Mine, which may have a record twice"):
        private(loader=own, poisson_sampling=False, sample_rate=0.001)
    part = DataLoader(dataset, batch_size=BATCH, sampler=torch.utils.data.SequentialSampler(range(10)))
    with pytest.raises(ValueError, match="SequentialSampler of 10, must draw all records"):
        private(loader=part)


def test_an_empty_batch_never_holds_a_record():
    class Box:
        def __init__(self, x):
            self.x = x

    collate = lambda records: Box(torch.stack([x for x, _ in records]))  # noqa: E731
    loader = DataLoader(TensorDataset(*data()), batch_size=BATCH, collate_fn=collate)
    with pytest.raises(ValueError, match="its collate_fn makes a Box"):
        private(loader=loader)
