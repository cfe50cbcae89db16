"""What the algorithms of the papers release, as events, and the papers' own bounds beside them.

`accounting="exact"` is the default and a guarantee. `accounting="published"` is the figure that the paper's theorem
gives for the same run; counting it says what is wrong with it.

| algorithm | adjacency | sampling | what a record moves, over the noise |
|---|---|---|---|
| DIFF2 | replace-one | none | 1 / (n P sigma), in the mean over P clients of n records |
| its BVR-L-SGD routine | replace-one | none, and fixed size | the same, and 1 / (b sigma3) |
| PriSMA | replace-one | Poisson or fixed size | (g C1 + (1-g) C3) / (b sigma1), at first C1 / (b sigma0) |
| SDM-DSGD | add-remove | Poisson | C sqrt(kept) / (b sigma), for the coordinates that the mask of a round kept |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from dpkernels import checks
from dpkernels.clipping import RecursiveMomentum
from dpkernels.events import Event, PublishedBound, compose, fixed_size_gaussian, gaussian, poisson_gaussian

Accounting = Literal["exact", "published"]
_BUCKETS = 16  # numbers of kept coordinates are rounded up to so many values within a factor of two


def diff2(
    *,
    gradient_noise: float,
    difference_noise: float,
    rounds: int,
    restart_every: int,
    clients: int,
    smallest_client: int,
    accounting: Accounting = "exact",
) -> Event | PublishedBound:
    """DIFF2: `rounds` releases, every `restart_every`-th of a gradient with sigma1, others of a difference with sigma2.

    Published: Proposition 4.1.
    """
    restarts = _restarts(rounds, restart_every)
    records = checks.whole("clients", clients, low=1) * checks.whole("smallest_client", smallest_client, low=1)
    _positive(gradient_noise=gradient_noise, difference_noise=difference_noise)
    if _exact(accounting):
        parts = (gradient_noise, restarts), (difference_noise, rounds - restarts)
        return compose(*(gaussian(sigma * records, steps, adjacency="replace-one") for sigma, steps in parts))

    def enough(epsilon: float, delta: float) -> bool:
        alpha = 1 + math.ceil(2 * math.log(1 / delta) / epsilon)
        spent = restarts / gradient_noise**2 + ((rounds - restarts) / difference_noise**2 if rounds > restarts else 0)
        return 2 * alpha * spent / records**2 <= epsilon / 2

    return PublishedBound(
        _smallest(enough),
        "Proposition 4.1 of DIFF2 is sound but loose: for the same noise accounting='exact' gives a smaller epsilon",
    )


def bvr_l_sgd(
    *,
    gradient_noise: float,
    difference_noise: float,
    rounds: int,
    restart_every: int,
    clients: int,
    records: int,
    local_noise: float,
    local_steps: int,
    batch_size: int,
    own_rounds: int,
) -> Event:
    """DIFF2 with its BVR-L-SGD routine, for one client of `records` that walked in `own_rounds` of the rounds.

    The epsilon of a run is the largest over clients: their records are different ones.
    """
    restarts = _restarts(rounds, restart_every)
    everybody = checks.whole("clients", clients, low=1) * checks.whole("records", records, low=1)
    checks.whole("local_steps", local_steps, low=1)
    checks.whole("own_rounds", own_rounds, low=0)
    _positive(gradient_noise=gradient_noise, difference_noise=difference_noise, local_noise=local_noise)
    return compose(
        gaussian(gradient_noise * everybody, restarts, adjacency="replace-one"),
        gaussian(difference_noise * everybody, rounds - restarts, adjacency="replace-one"),
        fixed_size_gaussian(local_noise * batch_size, records, batch_size, own_rounds * (local_steps - 1)),
    )


def prisma(
    *,
    noise: float,
    initial_noise: float,
    rounds: int,
    gradient_norm: float,
    difference_norm: float,
    momentum: float,
    batch_size: int,
    records: int,
    sampling: Literal["poisson", "fixed-size"] = "poisson",
    accounting: Accounting = "exact",
) -> Event | PublishedBound:
    """PriSMA, for one client of `records`: a first release with sigma0, then `rounds` - 1 with sigma1.

    Published: Theorem 3 with Corollary 1, which is about batches of a fixed size.
    """
    row = RecursiveMomentum(gradient_norm, difference_norm, momentum).row_norm
    _positive(gradient_norm=gradient_norm, noise=noise, initial_noise=initial_noise)
    if row == 0:
        raise ValueError("difference_norm: got 0 with momentum 0, must leave something to release")
    if checks.whole("batch_size", batch_size, low=1) > checks.whole("records", records, low=1):
        raise ValueError(f"batch_size: got {batch_size}, must be at most records = {records}")
    first, later = initial_noise * batch_size / gradient_norm, noise * batch_size / row
    checks.whole("rounds", rounds, low=1)
    if sampling not in ("poisson", "fixed-size"):
        raise ValueError(f"sampling: got {sampling!r}, must be 'poisson' or 'fixed-size'")
    if _exact(accounting):
        if sampling == "fixed-size":
            parts = [fixed_size_gaussian(z, records, batch_size, n) for z, n in ((first, 1), (later, rounds - 1))]
        else:
            rate = batch_size / records
            parts = [
                poisson_gaussian(z, rate, n, adjacency="replace-one") for z, n in ((first, 1), (later, rounds - 1))
            ]
        return compose(*parts)

    def enough(epsilon: float, delta: float) -> bool:
        alpha, rho = 1 + 2 * math.log(1 / delta) / epsilon, epsilon / 2
        needed = 2 * batch_size * math.sqrt(3.5 * rounds * alpha / (records**2 * rho))
        return min(first, later) >= needed * (1 - 1e-12)

    def holds(epsilon: float, delta: float) -> bool:
        """The side condition (18)."""
        alpha, rho = 1 + 2 * math.log(1 / delta) / epsilon, epsilon / 2
        square = 3.5 * batch_size**2 * rounds * alpha / (records**2 * rho)
        room = records / (batch_size * alpha * (1 + square))
        return square >= 0.7 and alpha <= 2 * square / 3 * math.log(room) + 1

    return PublishedBound(
        _smallest(enough),
        "Theorem 3 of PriSMA is loose, and its condition (18) does not hold here: this figure is not a guarantee",
        holds,
        "Theorem 3 of PriSMA is loose: accounting='exact' gives a smaller epsilon for the same noise",
    )


def sdm_dsgd(
    kept: Iterable[int],
    *,
    noise_std: float,
    clamp: float,
    batch_size: float,
    sampling_rate: float,
    keep_probability: float | None = None,
    order: Literal["noise-then-sparsify", "sparsify-then-noise"] = "noise-then-sparsify",
) -> Event:
    """SDM-DSGD, for one node: one release in each round, of as many coordinates as the mask of the round `kept`.

    Masks do not depend on data and are public, so the numbers are; they are rounded up to few, to be counted quickly.
    A true (epsilon, delta), unlike the published figure (`sdm_dsgd_published`). The paper's inferior order divides what
    is kept by `keep_probability` before the noise, and so needs that.
    """
    _positive(noise_std=noise_std, clamp=clamp, batch_size=batch_size)
    scale = 1.0
    if order == "sparsify-then-noise":
        scale = checks.number("keep_probability", keep_probability, low=2.0**-32, high=1)
    elif order != "noise-then-sparsify":
        raise ValueError(f"order: got {order!r}, must be 'noise-then-sparsify' or 'sparsify-then-noise'")
    counts: dict[int, int] = {}
    for number in kept:
        rounded = rounded_up(checks.whole("kept", number, low=0))
        counts[rounded] = counts.get(rounded, 0) + 1
    parts = [
        poisson_gaussian(noise_std * batch_size * scale / (clamp * math.sqrt(number)), sampling_rate, rounds)
        for number, rounds in sorted(counts.items())
        if number > 0
    ]
    return compose(*parts) if parts else Event(())


def sdm_dsgd_published(
    *,
    noise_std: float,
    clamp: float,
    width: int,
    records: int,
    sampling_rate: float,
    keep_probability: float,
    rounds: int,
) -> PublishedBound:
    """The figure of SDM-DSGD's Theorem 1 for a node of `records`, gradients of `width` coordinates up to `clamp`."""
    _positive(noise_std=noise_std, clamp=clamp)
    checks.number("keep_probability", keep_probability, low=2.0**-32, high=1)
    bound = clamp * math.sqrt(checks.whole("width", width, low=1)) / checks.whole("records", records, low=1)

    def enough(epsilon: float, delta: float) -> bool:
        alpha = 2 * math.log(1 / delta) / epsilon + 1
        moved = sampling_rate * bound / noise_std
        return 4 * alpha * keep_probability * rounds * moved**2 <= epsilon / 2

    return PublishedBound(
        _smallest(enough),
        "Theorem 1 of SDM-DSGD holds in expectation over masks, counts subsampling twice and is not a guarantee",
    )


def _exact(accounting: object) -> bool:
    if accounting not in ("exact", "published"):
        raise ValueError(f"accounting: got {accounting!r}, must be 'exact' or 'published'")
    return accounting == "exact"


def _restarts(rounds: int, restart_every: int) -> int:
    return -(-checks.whole("rounds", rounds, low=0) // checks.whole("restart_every", restart_every, low=1))


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        checks.positive(name, value)


def rounded_up(number: int) -> int:
    """To a number of so few that many rounds are counted quickly."""
    step = max(1, 1 << max(0, number.bit_length() - 1 - (_BUCKETS.bit_length() - 1)))
    return -(-number // step) * step


def _smallest(enough: Callable[[float, float], bool]) -> Callable[[float], float]:
    """The epsilon, to a part of 1e-9, from which on `enough(epsilon, delta)`."""

    def found(delta: float) -> float:
        low, high = 0.0, 1.0
        while not enough(high, delta):
            low, high = high, 2 * high
            if high > 1e12:
                return math.inf
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if enough(middle, delta) else (middle, high)
        return high

    return found
