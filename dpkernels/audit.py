"""Attacks on what is released, to measure how much it gives away: a lower bound of epsilon, to hold against the claim.

`two_neighbours` runs a mechanism many times on a data set without and with one record; `one_run` trains once, with
canaries that are each in the data or not by the toss of a coin (Steinke, Nasr, Jagielski: Privacy Auditing with One
(1) Training Run, 2023). Either can show that a claim is false, up to its confidence; neither can show that it is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from dpkernels import checks, events

DELTAS = (1e-5, 1e-3, 0.01, 0.05, 0.1)


@dataclass(frozen=True)
class Finding:
    """At `delta`, epsilon is at least `lower` with probability `confidence`; claimed were `claimed`."""

    lower: float
    claimed: float
    delta: float
    confidence: float

    @property
    def broken(self) -> bool:
        """Whether the claim is false."""
        return self.lower > self.claimed

    def __str__(self) -> str:
        verdict = "the claim is BROKEN" if self.broken else "the claim stands"
        return (
            f"epsilon >= {self.lower:.3g} at delta = {self.delta:g} ({self.confidence:.1%} sure), "
            f"claimed {self.claimed:.3g}: {verdict}"
        )


def two_neighbours(
    without: Callable[[], float],
    with_record: Callable[[], float],
    claimed: Callable[[float], float],
    *,
    runs: int = 4000,
    confidence: float = 0.999,
    deltas: Sequence[float] = DELTAS,
    gaussian: bool = False,
) -> Finding:
    """Tell two neighbouring data sets apart by a score, over many runs.

    Args:
        without: runs the mechanism on a data set, afresh, and returns a score of what was released.
        with_record: the same on its neighbour. The score should be larger here.
        claimed: the epsilon that is claimed, for a given delta.
        runs: of each of the two. A quarter of them choose the threshold on the score, the others measure it.
        confidence: that the bound is below the true epsilon, over both directions and all deltas together.
        deltas: the bound is taken at the one of these where it stands worst against the claim.
        gaussian: what is claimed is a Gaussian mechanism, or several, without sampling. The bound then uses the form
            of its curve and needs far fewer runs; it says nothing of mechanisms that are not, and looks at one
            direction only: scores must be larger with the record.
    """
    checks.whole("runs", runs, low=4)
    checks.number("confidence", confidence, low=0, high=1)
    if not deltas:
        raise ValueError("deltas: is empty, must have at least one")
    for delta in deltas:
        checks.number("deltas", delta, low=0, high=1)
    out, in_ = (_finite([f() for _ in range(runs)]) for f in (without, with_record))
    if gaussian:
        mu = max(float(_measured(in_, out, 1 - confidence, _separation)[0]), 0.0)
        curve = lambda delta: events.epsilon(events.gaussian(1 / mu), delta) if mu > 0 else 0.0  # noqa: E731
        findings = [Finding(curve(delta), claimed(delta), delta, confidence) for delta in deltas]
        return max(findings, key=lambda f: f.lower - f.claimed)
    error = (1 - confidence) / (2 * len(deltas))
    findings = []
    for delta in deltas:

        def log_ratio(least: np.ndarray, most: np.ndarray, delta: float = delta) -> np.ndarray:
            return np.asarray(np.log(np.maximum(least - delta, 1e-300) / most))

        both = (_measured(*pair, error, log_ratio) for pair in ((in_, out), (-out, -in_)))
        lower = max(0.0, *(float(found[0]) for found in both))
        findings.append(Finding(lower, claimed(delta), delta, confidence))
    return max(findings, key=lambda f: f.lower - f.claimed)


def _finite(scores: Sequence[float]) -> np.ndarray:
    """The scores, with the infinite ones at the ends; one that is no number would hide all others."""
    found = np.asarray(scores, dtype=np.float64)
    if np.isnan(found).any():
        raise ValueError("scores: one is NaN, must be numbers: give it a value that says what it tells")
    return np.clip(found, -1e300, 1e300)


def _separation(least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """How far apart two normal distributions are whose shares above a threshold are these."""
    return np.asarray(stats.norm.ppf(least) - stats.norm.ppf(most))


def _measured(
    high: np.ndarray, low: np.ndarray, error: float, bound: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The bound at a threshold chosen on the first quarter of runs, measured on the others.

    `bound(least, most)` is of the least that P(high above t) and the most that P(low above t) may be; these are Clopper
    and Pearson's limits, each missed with probability error / 2.
    """
    first = len(high) // 4

    def bounds(part: slice, thresholds: np.ndarray) -> np.ndarray:
        h, n = high[part], low[part]
        hits, false = ((x[:, None] > thresholds).sum(0) for x in (h, n))
        least = np.where(hits > 0, stats.beta.ppf(error / 2, np.maximum(hits, 1), len(h) - hits + 1), 0.0)
        most = np.where(false < len(n), stats.beta.ppf(1 - error / 2, false + 1, np.maximum(len(n) - false, 1)), 1.0)
        return bound(least, most)

    thresholds = np.quantile(np.concatenate([high[:first], low[:first]]), np.linspace(0.005, 0.995, 199))
    best = int(bounds(slice(None, first), thresholds).argmax())
    return bounds(slice(first, None), thresholds[best : best + 1])


def one_run(
    train: Callable[[np.ndarray], Sequence[float]],
    claimed: Callable[[float], float],
    *,
    canaries: int = 1000,
    guesses: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.99,
    seed: int | None = None,
) -> Finding:
    """Train once and guess, for each of many canaries, whether it was in the data.

    Args:
        train: `train(included)` gets a bool for each canary, trains with those that are True among the data, and
            returns a score for each, larger where it believes that the canary was in.
        claimed: the epsilon that is claimed, for a given delta.
        canaries: how many. Each is in or out with probability 1/2.
        guesses: how many canaries to guess, those with the largest and smallest scores; a fifth of them unless given.
            Must not be chosen by looking at the outcome.
        delta: where epsilon is bounded.
        confidence: that the bound is below the true epsilon.
        seed: of the coins.
    """
    m = checks.whole("canaries", canaries, low=2)
    r = max(1, m // 5) if guesses is None else checks.whole("guesses", guesses, low=1)
    if r > m:
        raise ValueError(f"guesses: got {r}, must be at most canaries = {m}")
    checks.number("delta", delta, low=0, high=1)
    checks.number("confidence", confidence, low=0, high=1)
    included = np.random.default_rng(seed).integers(0, 2, m).astype(bool)
    scores = _finite(train(included))
    if scores.shape != (m,):
        raise ValueError(f"train: gave scores of shape {scores.shape}, must give {m}, one for each canary")
    order = np.argsort(scores, kind="stable")
    out, in_ = order[: r // 2], order[m - (r - r // 2) :]
    correct = int((~included[out]).sum() + included[in_].sum())
    low, high = 0.0, 1.0
    while _chance(m, r, correct, high, delta) < 1 - confidence and high < 100:
        low, high = high, 2 * high
    if _chance(m, r, correct, low, delta) >= 1 - confidence:
        return Finding(0.0, claimed(delta), delta, confidence)
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(m, r, correct, middle, delta) < 1 - confidence else (low, middle)
    return Finding(low, claimed(delta), delta, confidence)


def _chance(m: int, r: int, correct: int, epsilon: float, delta: float) -> float:
    """The most that the probability of so many correct guesses can be under (epsilon, delta)-DP (their Theorem 5.2)."""
    each = 1 / (1 + math.exp(-epsilon))
    beyond = float(stats.binom.sf(correct - 1, r, each))
    just_below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), r, each))
    slack = float((just_below / np.arange(1, correct + 1)).max()) if correct else 0.0
    return min(1.0, beyond + 2 * m * delta * slack)
