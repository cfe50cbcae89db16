"""What was released, and its epsilon: thin over Google's dp-accounting.

An event is made by one of the functions here and by nothing else, because the accountants below read the same numbers
differently. A `noise_multiplier` is always the noise's std over the norm of one record's row, whatever the adjacency;
under "replace-one" (one record has another value) a record moves the sum by up to twice its norm.

| sampling | adjacency | counted by |
|---|---|---|
| all records in each release | either | the exact curve of the Gaussian mechanism |
| Poisson | either | privacy loss distributions |
| of a fixed size, without replacement | "replace-one" | Renyi DP |
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import dp_accounting
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpkernels import checks
from dpkernels.clipping import Adjacency, check_adjacency

COARSE, FINE = 1e-3, 1e-4  # steps of grids of privacy losses
TIGHT = 1e-4  # of epsilon, by which two coarse grids may differ
ROUNDING = 2e-16  # of delta, for each release: more than twice what was measured
_RELATIONS = {
    "add-remove": privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": privacy_accountant.NeighboringRelation.REPLACE_ONE,
}


@dataclass(frozen=True)
class Releases:
    """Some Gaussian releases of one kind."""

    noise_multiplier: float
    steps: int
    sampling: Literal["full", "poisson", "fixed-size"] = "full"
    rate: float = 1.0  # Poisson
    records: int = 0  # fixed size: of which
    size: int = 0  # so many are in each batch


@dataclass(frozen=True)
class Event:
    """Releases under one adjacency: what `epsilon` counts."""

    releases: tuple[Releases, ...]
    adjacency: Adjacency = "add-remove"


@dataclass(frozen=True)
class PublishedBound:
    """A paper's own bound, in place of an event; `epsilon` warns of what is wrong with it."""

    bound: Callable[[float], float]  # delta to epsilon
    warning: str
    holds: Callable[[float, float], bool] = lambda epsilon, delta: False
    warning_if_it_holds: str = ""

    def epsilon(self, delta: float) -> float:
        """As the paper has it."""
        found = self.bound(delta)
        good = math.isfinite(found) and self.holds(found, delta)
        warnings.warn(self.warning_if_it_holds if good else self.warning, stacklevel=3)
        return found


def gaussian(noise_multiplier: float, steps: int = 1, *, adjacency: Adjacency = "add-remove") -> Event:
    """`steps` releases of a sum over all records."""
    return poisson_gaussian(noise_multiplier, 1.0, steps, adjacency=adjacency)


def poisson_gaussian(
    noise_multiplier: float, sampling_rate: float, steps: int = 1, *, adjacency: Adjacency = "add-remove"
) -> Event:
    """`steps` releases, each of a sum over a Poisson sample: every record is in it with probability `sampling_rate`."""
    z = checks.number("noise_multiplier", noise_multiplier, low=0)
    rate = checks.number("sampling_rate", sampling_rate, low=0, high=1)
    checks.whole("steps", steps, low=0)
    check_adjacency(adjacency)
    return Event((Releases(z, steps, "full" if rate == 1 else "poisson", rate),), adjacency)


def fixed_size_gaussian(noise_multiplier: float, records: int, size: int, steps: int = 1) -> Event:
    """`steps` releases, each of a sum over `size` of `records` drawn without replacement, under "replace-one"."""
    z = checks.number("noise_multiplier", noise_multiplier, low=0)
    checks.whole("steps", steps, low=0)
    if checks.whole("size", size, low=0) > checks.whole("records", records, low=1):
        raise ValueError(f"size: got {size}, must be at most records = {records}")
    if size == records:
        return gaussian(z, steps, adjacency="replace-one")
    return Event((Releases(z, steps, "fixed-size", records=records, size=size),), "replace-one")


def compose(*events: Event) -> Event:
    """All of these, on the same records."""
    adjacencies = {event.adjacency for event in events}
    if len(adjacencies) > 1:
        raise ValueError("events: are under different adjacencies, must be under one")
    return Event(tuple(r for event in events for r in event.releases), *adjacencies)


def no_worse(event: Event, other: Event) -> bool:
    """Whether every release of `event` has one of its own in `other` that is sampled alike and has no more noise.

    Then `event` has at most the epsilon of `other`, whatever the delta.
    """

    def by_sampling(releases: tuple[Releases, ...]) -> dict[tuple[object, ...], list[tuple[float, int]]]:
        found: dict[tuple[object, ...], list[tuple[float, int]]] = {}
        for r in releases:
            found.setdefault((r.sampling, r.rate, r.records, r.size), []).append((r.noise_multiplier, r.steps))
        return found

    mine, theirs = by_sampling(event.releases), by_sampling(other.releases)
    return event.adjacency == other.adjacency and all(
        sum(n for m, n in releases if m <= z) <= sum(n for m, n in theirs.get(sampling, []) if m <= z)
        for sampling, releases in mine.items()
        for z, _ in releases
    )


def epsilon(event: Event | PublishedBound | dp_event.DpEvent, delta: float) -> float:
    """The epsilon of (epsilon, delta)-DP for `event`; an upper bound, tight to the accountant's discretisation.

    An event of dp-accounting's own is counted under add-remove adjacency by privacy loss distributions. One that no
    accountant can count raises.
    """
    if checks.number("delta", delta, low=0, high=1) in (0.0, 1.0):
        raise ValueError(f"delta: got {delta!r}, must be strictly between 0 and 1")
    if isinstance(event, dp_event.DpEvent):
        return _by_loss_distribution(event, "add-remove", delta, 1e-10)  # how many releases it has is not known here
    if isinstance(event, PublishedBound):
        return event.epsilon(delta)
    if not isinstance(event, Event):
        raise ValueError(f"event: got a {type(event).__name__}, must be an Event or one of dp-accounting's")
    return _epsilon(event, float(delta))


@functools.lru_cache(maxsize=1024)  # ledgers of many nodes have few different events
def _epsilon(event: Event, delta: float) -> float:
    counted = [r for r in event.releases if r.steps > 0 and (r.sampling != "poisson" or r.rate > 0)]
    if any(r.noise_multiplier == 0 for r in counted):
        return math.inf
    kinds = {r.sampling for r in counted}
    moves = 2 if event.adjacency == "replace-one" else 1
    if kinds <= {"full"}:
        square = sum(r.steps * (moves / r.noise_multiplier) ** 2 for r in counted)
        return float(dp_accounting.get_epsilon_gaussian(1 / math.sqrt(square), delta)) if square > 0 else 0.0
    if "fixed-size" not in kinds:
        # under either relation this accountant takes std over one record's norm, and doubles itself
        steps = sum(r.steps for r in counted)
        return _by_loss_distribution(_composed(counted, 1), event.adjacency, delta, ROUNDING * (5000 + steps))
    if "poisson" in kinds:
        raise ValueError("event: has Poisson and fixed-size samples, which no accountant counts together")
    # this one takes std over how far a replaced record moves the sum
    rdp = RdpAccountant(neighboring_relation=_RELATIONS["replace-one"])
    return float(rdp.compose(_composed(counted, moves)).get_epsilon(delta))


def _by_loss_distribution(event: dp_event.DpEvent, adjacency: Adjacency, delta: float, rounded: float) -> float:
    """By privacy loss distributions, on a grid that is fine enough.

    In real arithmetic what is found on any grid is an upper bound, the less too large the finer it is. Two coarse grids
    that agree take a tenth of the time of a fine one. Distributions are composed by Fourier transforms in float64,
    which round delta by up to `rounded`, either way: so much is taken off it. A delta that is not far above that is
    left to Renyi DP, which has a larger bound, where it can.
    """
    if delta < 10 * rounded:
        if adjacency == "replace-one":
            raise ValueError(f"delta: got {delta:g}, must be at least {10 * rounded:.2g} here, as far as is computed")
        return float(RdpAccountant().compose(event).get_epsilon(delta))

    def found(step: float) -> float:
        pld = PLDAccountant(_RELATIONS[adjacency], value_discretization_interval=step)
        return float(pld.compose(event).get_epsilon(delta - rounded))

    coarse, finer = found(2 * COARSE), found(COARSE)
    return finer if abs(coarse - finer) <= TIGHT * finer else found(FINE)


def _composed(releases: list[Releases], moves: int) -> dp_event.DpEvent:
    events: list[dp_event.DpEvent] = []
    for r in releases:
        inner: dp_event.DpEvent = dp_event.GaussianDpEvent(r.noise_multiplier / moves)
        if r.sampling == "poisson":
            inner = dp_event.PoissonSampledDpEvent(r.rate, inner)
        elif r.sampling == "fixed-size":
            inner = dp_event.SampledWithoutReplacementDpEvent(r.records, r.size, inner)
        events.append(dp_event.SelfComposedDpEvent(inner, r.steps))
    return dp_event.ComposedDpEvent(events)


def calibrate(
    make_event: Callable[[float], Event | PublishedBound | dp_event.DpEvent], epsilon: float, delta: float
) -> float:
    """The smallest noise multiplier z, to a thousandth of itself, whose event `make_event(z)` has at most `epsilon`.

    For example `calibrate(lambda z: poisson_gaussian(z, rate, steps), 2.0, 1e-5)`.
    """
    target = checks.number("epsilon", epsilon, low=0)
    if target == 0:
        raise ValueError("epsilon: got 0, must be > 0: no noise is large enough for 0")
    spent: dict[float, float] = {}

    def enough(z: float) -> bool:
        spent[z] = _spent(make_event(z), delta)
        return spent[z] <= target

    low, high = 1.0, 1.0  # too little, and enough
    while not enough(high):
        low, high = high, 2 * high
        if high > 1e9:
            raise ValueError("make_event: its epsilon stays above the target whatever the noise, must fall with z")
    if low == high:
        low = high / 2
        while low > 1e-6 and enough(low):
            low, high = low / 2, low
    while high - low > 1e-3 * low:
        # log epsilon is nearly linear in log z: ask a little beyond where the line through both ends meets the target
        slope = math.log(spent[high] / spent[low]) / math.log(high / low) if spent[high] > 0 else -math.inf
        finite = math.isfinite(slope) and slope < 0
        guess = low * (target / spent[low]) ** (1 / slope) if finite else (low + high) / 2
        last = high if high - guess < guess - low else low  # the nearer end moved last: now the other one should
        guess *= 1 - 4e-4 if last == high else 1 + 4e-4
        guess = min(max(guess, low + 0.02 * (high - low)), high - 0.02 * (high - low))
        low, high = (low, guess) if enough(guess) else (guess, high)
    return high


_spent = epsilon
