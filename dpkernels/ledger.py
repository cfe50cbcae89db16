"""The ledger: what was released, written by `Gaussian` before each release; epsilon is read from here."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor

from dpkernels import checks, events
from dpkernels.clipping import Adjacency, check_adjacency
from dpkernels.events import Event
from dpkernels.noise import host_tensor

MOST_AHEAD = 1 << 20  # releases that are counted before they happen; many more take PLD accounting long
Kind = tuple[float, bool]  # noise multiplier, and whether the release was of a sample as claimed


class BudgetError(RuntimeError):
    """The release that was refused would have spent more than the budget."""


class Ledger:
    """Releases by noise multiplier, append-only; grouped, so that many steps are counted as quickly as few.

    Args:
        sampling_rate: claims that each record is in each batch independently with this probability; the default, 1,
            claims no amplification. The claim is the caller's, unless batches came from `dpk.sampling` with this
            ledger: `sampling` says which.
        adjacency: "add-remove", or "replace-one".
        fixed_size: (records, size) claims batches of `size` of `records` without replacement instead; "replace-one".
        budget: (epsilon, delta). The release that would exceed it is refused with a `BudgetError`, before it happens.

    Noise multipliers and sampling rates must not be chosen by looking at earlier releases: composition is counted for
    a plan that was fixed, whatever part of it ran.
    """

    def __init__(
        self,
        sampling_rate: float = 1.0,
        *,
        adjacency: Adjacency = "add-remove",
        fixed_size: tuple[int, int] | None = None,
        budget: tuple[float, float] | None = None,
    ) -> None:
        self.sampling_rate = checks.number("sampling_rate", sampling_rate, low=0, high=1)
        self.adjacency = check_adjacency(adjacency)
        self.fixed_size = fixed_size
        if fixed_size is not None:
            if adjacency != "replace-one":
                raise ValueError(f"adjacency: got {adjacency!r}, must be 'replace-one' with batches of a fixed size")
            events.fixed_size_gaussian(1.0, *fixed_size)
        if budget is not None:
            limit, delta = budget
            checks.number("budget[0]", limit, low=0)
            events.epsilon(Event(()), delta)
        self._budget = budget
        self.reproducible = False
        self._verified = 0  # releases that had a batch of our sampler
        self._batch_waits = False  # one was drawn for the next release
        self._next_batch: dict[tuple[int, int], int] = {}  # of each seed and purpose; never saved, as no seed is
        # number of releases of each kind, a tensor so that a compiled step does not depend on its value
        self._counts: dict[Kind, Tensor] = {}
        self._allowed = Event((), adjacency)  # is within the budget
        self._lock = threading.Lock()

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta), fixed for good."""
        return self._budget

    def check(self, *, std: float, sensitivity: float, sampled: bool = True) -> None:
        """Raise a `BudgetError` if such a release would be refused; nothing is entered."""
        kind = self._kind(std, sensitivity, sampled)
        with self._lock:
            self._refuse_beyond(kind)

    @staticmethod
    def _kind(std: float, sensitivity: float, sampled: bool) -> Kind:
        checks.number("std", std, low=0)
        checks.number("sensitivity", sensitivity, low=0, finite=False)
        # at sensitivity 0 nothing about any record is in the release
        return std / sensitivity if sensitivity > 0 else math.inf, sampled

    def record(self, *, std: float, sensitivity: float, reproducible: bool, sampled: bool = True) -> None:
        """Enter one release. `sensitivity` is the norm of one record's row, `std` that of the noise.

        `reproducible` noise is private only from those who do not know its seed. `sampled=False`: a release of all
        records, in a ledger whose other releases are of samples.
        """
        kind = self._kind(std, sensitivity, sampled)
        if torch.compiler.is_compiling():
            self._enter(kind, reproducible)
            return
        with self._lock:
            self._refuse_beyond(kind)
            self._enter(kind, reproducible)
            if sampled:
                self._verified += self._batch_waits
                self._batch_waits = False

    def check_claim(self, *, sampling_rate: float = 1.0, fixed_size: tuple[int, int] | None = None) -> None:
        """Refuse a sampler that draws otherwise than is claimed here."""
        if (sampling_rate, fixed_size) != (self.sampling_rate, self.fixed_size):
            raise ValueError(
                f"ledger: claims {_sampled(self.sampling_rate, self.fixed_size)}, must claim what is drawn: "
                f"{_sampled(sampling_rate, fixed_size)}"
            )

    def note_batch(
        self,
        *,
        sampling_rate: float = 1.0,
        fixed_size: tuple[int, int] | None = None,
        drawn: tuple[int, int, int] | None = None,
    ) -> None:
        """Our sampler has drawn a batch as claimed: the next release is of it, and only that one.

        `drawn`: by which seed, for which purpose and as which number. The same batch again is refused: it is no new
        sample, and who is in it once is in all its releases.
        """
        self.check_claim(sampling_rate=sampling_rate, fixed_size=fixed_size)
        with self._lock:
            if drawn is not None and drawn[2] < self._next_batch.get(drawn[:2], 0):
                raise ValueError(
                    f"batches: number {drawn[2]} of this seed was drawn before, must be new: use another seed or start"
                )
            if drawn is not None:
                self._next_batch[drawn[:2]] = drawn[2] + 1
            self._batch_waits = True
            self.reproducible = self.reproducible or drawn is not None

    @property
    def batch_waits(self) -> bool:
        """Whether our sampler has drawn a batch for the next release."""
        return self._batch_waits

    @property
    def sampling(self) -> str:
        """Whether it was seen: "none" is claimed, "verified" (each release had a batch of our sampler) or "claimed"."""
        if self.fixed_size is None and self.sampling_rate == 1:
            return "none"
        sampled = sum(int(count) for (_, of_sample), count in self._counts.items() if of_sample)
        return "verified" if self._verified == sampled > 0 else "claimed"

    def _enter(self, kind: Kind, reproducible: bool) -> None:
        if torch.compiler.is_compiling() and self.budget is not None:
            raise RuntimeError("a ledger with a budget cannot be used in a compiled step: it must be able to refuse")
        if kind not in self._counts:
            self._counts[kind] = host_tensor(0, torch.int64)
        self._counts[kind].add_(1)
        self.reproducible = self.reproducible or reproducible

    def allow(self, event: Event) -> None:
        """Count a plan once, if it is within the budget: releases no worse than `event` are then not counted anew."""
        if not isinstance(event, Event):
            raise ValueError(f"event: got a {type(event).__name__}, must be an Event, whose releases can be counted")
        self._check_budget(event)
        self._allowed = event

    def _check_budget(self, event: Event) -> None:
        if self.budget is not None and events.epsilon(event, self.budget[1]) > self.budget[0]:
            limit, delta = self.budget
            raise BudgetError(
                f"release {len(self) + 1}: would spend more than the budget of epsilon = {limit:g} at delta = {delta:g}"
            )

    def _refuse_beyond(self, kind: Kind) -> None:
        """Refuse a release that the budget does not allow; how many like those so far it does is found now and then."""
        if self.budget is None or math.isinf(kind[0]):
            return
        counts = {other: int(n) for other, n in self._counts.items()}
        counts[kind] = counts.get(kind, 0) + 1
        if events.no_worse(self._event(counts), self._allowed):
            return
        self._check_budget(self._event(counts))

        def times(scale: float) -> Event:
            return self._event({other: int(n * scale) for other, n in counts.items()})

        def within(scale: float) -> bool:
            return events.epsilon(times(scale), delta) <= limit

        limit, delta = self.budget
        low, high = 1.0, 2.0
        most = max(2.0, MOST_AHEAD / sum(counts.values()))
        while within(high) and high < most:
            low, high = high, 2 * high
        while high - low > low / 64 and times(high) != times(low):
            middle = (low + high) / 2
            low, high = (middle, high) if within(middle) else (low, middle)
        self._allowed = times(low)

    def __len__(self) -> int:
        return sum(int(count) for count in self._counts.values())

    def _event(self, counts: dict[Kind, int]) -> Event:
        found = []
        for (z, sampled), count in counts.items():
            if math.isinf(z) or count == 0:
                continue
            if not sampled:
                found.append(events.gaussian(z, count, adjacency=self.adjacency))
            elif self.fixed_size is not None:
                found.append(events.fixed_size_gaussian(z, *self.fixed_size, count))
            else:
                found.append(events.poisson_gaussian(z, self.sampling_rate, count, adjacency=self.adjacency))
        return events.compose(*found) if found else Event((), self.adjacency)

    def event(self) -> Event:
        """Everything released so far."""
        return self._event({kind: int(count) for kind, count in self._counts.items()})

    def epsilon(self, delta: float) -> float:
        """The epsilon of everything released so far."""
        return events.epsilon(self.event(), delta)

    def state_dict(self) -> dict[str, Any]:
        """All of it, in plain numbers."""
        return {
            "sampling_rate": self.sampling_rate,
            "adjacency": self.adjacency,
            "fixed_size": None if self.fixed_size is None else list(self.fixed_size),
            "reproducible": self.reproducible,
            "verified": self._verified,
            "releases": [[z, sampled, int(count)] for (z, sampled), count in self._counts.items()],
        }

    def follow(self, state: dict[str, Any]) -> None:
        """Take over what the same ledger on another rank has, which must be all of this one's entries and more."""
        self._refuse_other(state)
        there = {(z, sampled): count for z, sampled, count in state["releases"]}
        for kind, count in self._counts.items():
            if there.get(kind, 0) < int(count):
                raise ValueError(f"ledger: has {int(count)} releases at multiplier {kind[0]:g}, must have no more here")
        self._counts.clear()
        self.load_state_dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What another ledger had, into this one, which must be empty and make the same claims."""
        if len(self):
            raise ValueError(f"ledger: has {len(self)} releases, must be empty: entries are never taken back")
        self._refuse_other(state)
        for z, sampled, count in state["releases"]:
            self._counts[float(z), bool(sampled)] = host_tensor(count, torch.int64)
        self.reproducible = self.reproducible or bool(state["reproducible"])
        self._verified = state.get("verified", 0)

    def _refuse_other(self, state: dict[str, Any]) -> None:
        """A state that makes other claims than this ledger, or is none."""
        mine = self.state_dict()
        for name in ("sampling_rate", "adjacency", "fixed_size"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"{name}: is {state[name]!r} in the saved ledger, must be {mine[name]!r} as in this one"
                )
        for z, _, count in state["releases"]:
            checks.number("releases", z, low=0, finite=False)
            checks.whole("releases", count, low=0)
        checks.whole("verified", state.get("verified", 0), low=0)

    def __repr__(self) -> str:
        sampled = _sampled(self.sampling_rate, self.fixed_size)
        return f"Ledger({len(self)} releases, {sampled} ({self.sampling}), {self.adjacency})"


def _sampled(rate: float, fixed_size: tuple[int, int] | None) -> str:
    return f"sampling rate {rate:g}" if fixed_size is None else f"batches of {fixed_size[1]} of {fixed_size[0]}"
