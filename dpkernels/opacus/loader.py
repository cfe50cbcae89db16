"""Data loaders that draw batches as the accounting counts them, and that know which batch they have handed out.

A step is one of the batch that was handed out last, of every record in it at most once. So what is drawn, how it is
split into physical batches and where a logical one ends is noted as batches are handed out, in the process that trains,
not as indices are drawn, which workers do ahead of time.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from dpkernels import checks, sampling
from dpkernels.ledger import Ledger
from dpkernels.nested import rebuilt
from dpkernels.ranks import ALONE


@dataclass(frozen=True)
class Given:
    """A batch that was handed out: its number, that of its logical batch and of its epoch, its records, and its end."""

    number: int
    logical: int
    epoch: int
    records: int
    is_last: bool


class HandOuts:
    """What the loaders of one training run have handed out."""

    def __init__(self, ledger: Ledger | None = None, seed: int | None = None) -> None:
        self.ledger, self.seed = ledger, seed
        self.last: Given | None = None
        self._count = self._logical = self._epoch = 0

    def begin(self) -> None:
        """An epoch; what was handed out before it is over, also if its logical batch was not."""
        self._epoch += 1
        self.last = None

    def give(self, records: int, is_last: bool, drawn: int | None) -> None:
        """One batch; `drawn` is its number among Poisson batches."""
        if self.last is None or self.last.is_last:
            self._logical += 1
            if self.ledger is not None and drawn is not None:
                by = None if self.seed is None else (self.seed, 1, drawn)
                self.ledger.note_batch(sampling_rate=self.ledger.sampling_rate, drawn=by)
        self._count += 1
        self.last = Given(self._count, self._logical, self._epoch, records, is_last)


class PoissonBatches(Sampler[list[int]]):
    """An epoch of Poisson batches: `steps` of them, each record in each with probability `sample_rate`.

    Drawn from the operating system's randomness, or from a seed, which makes them reproducible and secret from nobody
    who knows it. `drawn` is how many there were, over all epochs: no batch of a seed is drawn again.
    """

    def __init__(self, n: int, sample_rate: float, steps: int, seed: int | None = None) -> None:
        self.num_samples, self.sample_rate, self.steps, self.seed = n, sample_rate, steps, seed
        self.drawn = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for indices in sampling.poisson(
            self.num_samples, self.sample_rate, self.steps, self.seed, start=self.drawn, ranks=ALONE
        ):
            self.drawn += 1
            yield indices.tolist()


class Noted(Sampler[list[int]]):
    """Batches, cut into parts of at most `size` if that is given, with notes of what each is, in order."""

    def __init__(self, batches: Any, size: int | None = None) -> None:
        self.batches, self.size = batches, size
        self.notes: deque[tuple[int, bool, int | None]] = deque()

    def __len__(self) -> int:
        expected = getattr(self.batches, "sample_rate", 0) * getattr(self.batches, "num_samples", 0)
        expected = expected or getattr(self.batches, "batch_size", self.size) or 1
        return math.ceil(len(self.batches) * max(1.0, expected / (self.size or expected)))

    def __iter__(self) -> Iterator[list[int]]:
        self.notes = deque()
        return self._parts(self.notes)

    def _parts(self, notes: deque[tuple[int, bool, int | None]]) -> Iterator[list[int]]:
        drawn = getattr(self.batches, "drawn", None)
        for i, drawn_indices in enumerate(self.batches):
            indices = list(drawn_indices)
            size = self.size or max(len(indices), 1)
            for first in range(0, max(len(indices), 1), size):
                part = indices[first : first + size]
                notes.append((len(part), first + size >= len(indices), None if drawn is None else drawn + i))
                yield part

    @property
    def sample_rate(self) -> float:
        """Of the batches, if they are Poisson samples."""
        return float(self.batches.sample_rate)


class PrivateLoader(DataLoader[Any]):
    """A data loader that says what it hands out."""

    handed: HandOuts

    def __iter__(self) -> Any:
        self.handed.begin()
        batches = super().__iter__()
        noted: Any = self.batch_sampler
        for batch in batches:
            self.handed.give(*noted.notes.popleft())
            yield batch
        self.handed.last = None

    @property
    def sample_rate(self) -> float:
        """Of Poisson sampling."""
        return float(getattr(self.batch_sampler, "sample_rate", 1.0))


class _Collate:
    """Collates as before; an empty batch is that of a record with its samples taken away."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._collate = collate
        self._empty = rebuilt(self._taken_away, collate([dataset[0]]))

    @staticmethod
    def _taken_away(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[:0] if x.dim() else x
        if x is None or isinstance(x, bool | int | float | str | bytes):
            return x
        raise ValueError(
            f"data_loader: its collate_fn makes a {type(x).__name__}, must make tensors in lists, tuples or mappings: "
            "a batch that nobody is in could not be made of it"
        )

    def __call__(self, records: list[Any]) -> Any:
        return self._collate(records) if records else self._empty


def poisson_loader(loader: DataLoader[Any], sample_rate: float) -> PrivateLoader:
    """The same data, drawn by Poisson sampling at this rate; as many batches an epoch as before."""
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError("data_loader: has an IterableDataset, must have one with indices: Poisson sampling needs them")
    batches = _inner(loader)
    records = len(loader.dataset)  # type: ignore[arg-type]
    plain = type(batches) is BatchSampler and _is_plain(batches.sampler) and len(batches.sampler) == records  # type: ignore[arg-type]
    if not plain and not isinstance(batches, PoissonBatches):
        raise ValueError(
            f"data_loader: draws by {_name(loader)}, must draw all records, in order or shuffled: Poisson sampling "
            "would replace that sampler in silence. Pass a plain DataLoader; of a part of the data, a torch Subset"
        )
    seed = None
    if loader.generator is not None:
        seed = int(torch.randint(2**62, (1,), generator=loader.generator))
    drawn = PoissonBatches(records, sample_rate, len(batches), seed)
    return _with_batches(loader, Noted(drawn), _Collate(loader.dataset, loader.collate_fn))


def other_loader(loader: DataLoader[Any], sample_rate: float | None) -> tuple[PrivateLoader, float]:
    """The loader that draws as before, and the rate that its releases are counted at.

    Refuses a rate that it contradicts, and samplers that may have a record twice in a batch or an epoch.
    """
    batches: Any = _inner(loader)
    if type(batches).__name__ in ("PoissonBatches", "UniformWithReplacementSampler"):  # ours, and Opacus's of that name
        own = float(batches.sample_rate)
        if sample_rate is not None and not math.isclose(own, sample_rate):
            raise ValueError(f"sample_rate: got {sample_rate:g}, must be the {own:g} that data_loader draws at")
        return _with_batches(loader, Noted(batches)), checks.number("sample_rate", own, low=0, high=1)
    known = isinstance(batches, BatchSampler) and (
        _is_plain(batches.sampler) or type(batches.sampler) is SubsetRandomSampler
    )
    if not known or type(batches) is not BatchSampler:
        raise ValueError(
            f"data_loader: draws by {_name(loader)}, which may have a record twice; must draw in order, shuffled, or "
            "by Poisson sampling"
        )
    if sample_rate is not None and sample_rate < 1:
        raise ValueError(
            f"sample_rate: got {sample_rate:g}, but data_loader draws batches of a fixed size by {_name(loader)}, "
            "which is no Poisson sampling: no such rate may be claimed. Use poisson_sampling=True"
        )
    warnings.warn(
        f"poisson_sampling=False: batches come from {_name(loader)}, so nothing is gained by sampling, and every "
        "step is counted as if each record were in it. Use poisson_sampling=True for a smaller epsilon",
        stacklevel=4,
    )
    return _with_batches(loader, Noted(batches)), 1.0


def _inner(loader: DataLoader[Any]) -> Any:
    batches: Any = loader.batch_sampler
    return batches.batches if isinstance(batches, Noted) else batches


def _is_plain(sampler: Any) -> bool:
    return type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)


def _name(loader: DataLoader[Any]) -> str:
    batches = _inner(loader)
    inner = batches.sampler if type(batches) is BatchSampler else batches
    part = f" of {len(inner)}" if _is_plain(inner) and len(inner) != len(loader.dataset) else ""  # type: ignore[arg-type]
    return type(inner).__name__ + (" with replacement" if getattr(inner, "replacement", False) else part)


def _with_batches(loader: DataLoader[Any], batches: Noted, collate: Any = None) -> PrivateLoader:
    made = PrivateLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn if collate is None else collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    made.handed = loader.handed if isinstance(loader, PrivateLoader) else HandOuts()
    return made


class BatchMemoryManager:
    """Physical batches of at most `max_physical_batch_size` records; the optimizer steps at the end of a logical one.

    As Opacus's, for a loader that `make_private` returned. A logical batch that is left before its end is dropped.
    """

    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: Any = None) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise ValueError(
                f"data_loader: got a {type(data_loader).__name__}, must be the one that make_private returned"
            )
        self._loader = data_loader
        self._size = checks.whole("max_physical_batch_size", max_physical_batch_size, low=1)

    def __enter__(self) -> PrivateLoader:
        return _with_batches(self._loader, Noted(_inner(self._loader), self._size))

    def __exit__(self, *_: object) -> None:
        self._loader.handed.begin()
