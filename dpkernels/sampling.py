"""Which records are in which batch, drawn as the accounting assumes.

    for indices in dpk.sampling.poisson(n=len(x), rate=0.01, steps=1000):
        algorithm.step(x[indices], y[indices])

Batches are tensors of indices in increasing order; under Poisson sampling they have different sizes, and an empty one
is as good as any other. Who knows which records were in a batch knows more than the accounting says: with `seed=None`
every batch is drawn from the operating system's own randomness, which nobody can repeat.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from dpkernels import checks
from dpkernels.ledger import Ledger
from dpkernels.nested import map_tensors
from dpkernels.ranks import Ranks, given

_POISSON, _FIXED = 1, 2  # purposes, so that the two kinds of batches share no randomness


def poisson(
    n: int,
    rate: float,
    steps: int,
    seed: int | None = None,
    *,
    start: int = 0,
    ledger: Ledger | None = None,
    ranks: Ranks | None = None,
) -> Poisson:
    """`steps` batches of indices below `n`, each index in each batch with probability `rate`, independently.

    With a `seed`, batch number t is the same in every run; `start` is the number of the first one, for going on.
    Takes time in proportion to the size of batches, not to n.

    A `ledger` that claims such sampling is told of every batch, and so knows which releases had one.

    Of several `ranks` (the current ones unless given, see `dpk.ranks`) each gets the indices of its own share of the
    records, `ranks.share(n)`, drawn by itself: all of them together are such a batch, with a seed that of one process.
    Records must be in the same order on all ranks, or one may be in the shares of two and count twice.
    """
    ranks = given(ranks)
    batches = Poisson(n, rate, steps, seed, start, [] if ledger is None else [ledger], ranks.share)
    if ranks.size > 1:
        ranks.agree({"n": n, "rate": rate, "start": start})
    return batches


def fixed_size(
    n: int, size: int, steps: int, seed: int | None = None, *, start: int = 0, ledger: Ledger | None = None
) -> FixedSize:
    """`steps` batches of `size` different indices below `n`, each such set as likely as any other."""
    return FixedSize(n, size, steps, seed, start, ledger)


def poisson_of_each(
    sizes: Sequence[int],
    rate: float,
    steps: int,
    seed: int | None = None,
    *,
    start: int = 0,
    ledgers: Sequence[Ledger],
    own: range | None = None,
) -> Iterator[tuple[Tensor, list[int]]]:
    """`poisson` over several parties at once, with so many records and a ledger each: their batches behind one another.

    In each step the indices of the records, counted within each party, and how many of each there are.

    One draw over all their records, which are in a batch independently, is cheaper than one for each party. `own`:
    the parties whose batches are wanted, all unless given. With a seed these do not depend on which.
    """
    own = range(len(sizes)) if own is None else own
    ends = torch.tensor([0, *sizes], device="cpu").cumsum(0)[own.start : own.stop + 1]
    share = range(int(ends[0]), int(ends[-1]))

    def of_each(indices: Tensor) -> tuple[Tensor, list[int]]:
        counts = torch.searchsorted(indices, ends).diff()
        return indices - ends[:-1].repeat_interleave(counts), counts.tolist()

    return map(of_each, Poisson(sum(sizes), rate, steps, seed, start, ledgers, lambda _: share))


class Batches(ABC):
    """Batches of indices, one after the other: what `poisson` and `fixed_size` return."""

    _purpose: int

    def __init__(self, n: int, steps: int, seed: int | None, start: int, ledgers: Sequence[Ledger]) -> None:
        self.n = checks.whole("n", n, low=0)
        self.steps = checks.whole("steps", steps, low=0)
        self.start = checks.whole("start", start, low=0)
        if seed is not None and checks.whole("seed", seed, low=0) >= 2**63:
            raise ValueError(f"seed: got {seed}, must be below 2**63")
        self.seed = seed
        self._ledgers = ledgers
        for ledger in ledgers:
            ledger.check_claim(**self._claim)

    @property
    def reproducible(self) -> bool:
        """Whether batches come from a seed."""
        return self.seed is not None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.start, self.start + self.steps):
            indices = torch.from_numpy(self._draw(_words(self.seed, self._purpose, step)))
            for ledger in self._ledgers:
                ledger.note_batch(**self._claim, drawn=None if self.seed is None else (self.seed, self._purpose, step))
            yield indices

    @property
    @abstractmethod
    def _claim(self) -> dict[str, Any]:
        """How a ledger would claim this sampling."""

    @abstractmethod
    def _draw(self, words: Callable[[int], np.ndarray]) -> np.ndarray:
        """One batch, from a source of random 64-bit words."""


class Poisson(Batches):
    """See `poisson`."""

    _purpose = _POISSON

    def __init__(
        self,
        n: int,
        rate: float,
        steps: int,
        seed: int | None,
        start: int,
        ledgers: Sequence[Ledger],
        share: Callable[[int], range],
    ) -> None:
        self.rate = checks.number("rate", rate, low=0, high=1)
        super().__init__(n, steps, seed, start, ledgers)
        self._share = share(n)

    @property
    def _claim(self) -> dict[str, Any]:
        return {"sampling_rate": self.rate}

    def _draw(self, words: Callable[[int], np.ndarray]) -> np.ndarray:
        share = self._share
        if self.seed is None:
            return self._below(len(share), words) + share.start
        drawn = self._below(self.n, words)  # of all, so that it does not depend on how many ranks there are
        first, end = np.searchsorted(drawn, (share.start, share.stop))
        return drawn[first:end]

    def _below(self, n: int, words: Callable[[int], np.ndarray]) -> np.ndarray:
        """Gaps between chosen indices are geometric: floor(log u / log(1 - rate)) are passed over."""
        if self.rate == 1 or n == 0:
            return np.arange(n, dtype=np.int64)
        if self.rate == 0:
            return np.zeros(0, dtype=np.int64)
        mean = n * self.rate
        at_a_time = int(mean + 6 * math.sqrt(mean) + 16)
        parts, last = [], -1
        while last < n:
            uniform = (words(at_a_time) >> np.uint64(11)).astype(np.float64) + 1  # 1 .. 2^53
            passed = np.log(uniform * 2.0**-53) / math.log1p(-self.rate)
            places = last + np.cumsum(np.minimum(np.floor(passed), n).astype(np.int64) + 1)
            parts.append(places[places < n])
            last = int(places[-1])
        return np.concatenate(parts)


class FixedSize(Batches):
    """See `fixed_size`."""

    _purpose = _FIXED

    def __init__(self, n: int, size: int, steps: int, seed: int | None, start: int, ledger: Ledger | None) -> None:
        self.n, self.size = checks.whole("n", n, low=0), checks.whole("size", size, low=0)
        if size > n:
            raise ValueError(f"size: got {size}, must be at most n = {n}")
        super().__init__(n, steps, seed, start, [] if ledger is None else [ledger])

    @property
    def _claim(self) -> dict[str, Any]:
        return {"fixed_size": (self.n, self.size)}

    def _draw(self, words: Callable[[int], np.ndarray]) -> np.ndarray:
        """Indices are drawn until so many different ones have come; of more than half, those that are left out."""
        few = min(self.size, self.n - self.size)
        chosen = np.zeros(0, dtype=np.int64)
        while len(chosen) < few:
            drawn = words(2 * (few - len(chosen)) + 16)
            fair = drawn[drawn < np.uint64(2**64 - 2**64 % self.n)] if 2**64 % self.n else drawn
            both = np.concatenate([chosen, (fair % np.uint64(self.n)).astype(np.int64)])
            _, first = np.unique(both, return_index=True)
            chosen = both[np.sort(first)][:few]
        if few == self.size:
            return np.sort(chosen)
        kept = np.ones(self.n, dtype=bool)
        kept[chosen] = False
        return kept.nonzero()[0]


def _words(seed: int | None, purpose: int, step: int) -> Callable[[int], np.ndarray]:
    """A source of random 64-bit words for one batch."""
    if seed is None:
        return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    generator = np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64), counter=[0, 0, 0, step])
    return lambda count: generator.random_raw(count)


class Loader:
    """Batches of a torch data set, collated: `for inputs, targets in Loader(dataset, poisson(len(dataset), ...))`.

    Args:
        dataset: with `__len__` and `__getitem__`.
        batches: from `poisson` or `fixed_size`, over as many records as the data set has. A `DataLoader` is refused:
            its shuffled batches are neither, and amplification would be claimed that is not there.
        collate: makes a batch of a list of records; torch's `default_collate` unless given. An empty batch is that of
            the first record with its samples taken away.
    """

    def __init__(
        self, dataset: Dataset[Any], batches: Batches, *, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        if isinstance(dataset, DataLoader) or isinstance(batches, DataLoader):
            raise ValueError(
                "batches: got a DataLoader, must be dpk.sampling.poisson(...) or fixed_size(...): shuffled batches are "
                "not sampled as the accounting counts them"
            )
        if not isinstance(batches, Batches):
            raise ValueError(f"batches: got a {type(batches).__name__}, must be dpk.sampling.poisson or fixed_size")
        size = len(dataset)  # type: ignore[arg-type]
        if batches.n != size:
            raise ValueError(f"batches: are of {batches.n} records, must be of the data set's {size}")
        if size == 0:
            raise ValueError("dataset: has no record, must have at least one to know the form of a batch")
        self.dataset, self.batches, self._collate = dataset, batches, collate

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for indices in self.batches:
            records = [self.dataset[i] for i in indices.tolist()]
            if records:
                yield self._collate(records)
            else:
                yield map_tensors(lambda t: t[:0] if t.dim() else t, self._collate([self.dataset[0]]))
