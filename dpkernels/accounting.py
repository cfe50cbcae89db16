"""Privacy accounting, thin over Google's dp-accounting: events in, epsilon out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from dpkernels import checks
from dpkernels.noise import host_tensor


def poisson_gaussian(noise_multiplier: float, sampling_rate: float, steps: int = 1) -> dp_event.DpEvent:
    """`steps` releases, each a Gaussian mechanism on a Poisson sample.

    `noise_multiplier` is the noise's std over the sum's add-remove sensitivity; each record is in a step's
    sample independently with probability `sampling_rate`.
    """
    checks.number("noise_multiplier", noise_multiplier, low=0)
    checks.number("sampling_rate", sampling_rate, low=0, high=1)
    checks.whole("steps", steps, low=0)
    gaussian: dp_event.DpEvent = dp_event.GaussianDpEvent(noise_multiplier)
    if sampling_rate < 1:
        gaussian = dp_event.PoissonSampledDpEvent(sampling_rate, gaussian)
    return dp_event.SelfComposedDpEvent(gaussian, steps)


def epsilon(event: dp_event.DpEvent, delta: float) -> float:
    """The epsilon of (epsilon, delta)-DP for `event`, under add-remove adjacency, by privacy loss distributions.

    An upper bound that is tight to the accountant's discretisation. An event the accountant does not know
    raises.
    """
    return _spent(event, delta)


def _spent(event: dp_event.DpEvent, delta: float) -> float:
    if checks.number("delta", delta, low=0, high=1) in (0.0, 1.0):
        raise ValueError(f"delta: got {delta!r}, must be strictly between 0 and 1")
    accountant = PLDAccountant(privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(accountant.compose(event).get_epsilon(delta))


def calibrate(make_event: Callable[[float], dp_event.DpEvent], epsilon: float, delta: float) -> float:
    """The smallest noise multiplier z, to a thousandth of itself, whose event `make_event(z)` has at most `epsilon`.

    For example `calibrate(lambda z: poisson_gaussian(z, rate, steps), 2.0, 1e-5)`.
    """
    target = checks.number("epsilon", epsilon, low=0)
    if target == 0:
        raise ValueError("epsilon: got 0, must be > 0: no noise is large enough for 0")
    low, high = 0.5, 1.0
    while _spent(make_event(high), delta) > target:
        low, high = high, 2 * high
        if high > 1e9:
            raise ValueError("make_event: its epsilon stays above the target whatever the noise, must fall with z")
    while low > 1e-3 and _spent(make_event(low), delta) <= target:
        low, high = low / 2, low
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _spent(make_event(middle), delta) <= target else (middle, high)
    return high


@dataclass
class Ledger:
    """What was released, written by `Gaussian` before each release; epsilon is read from here.

    Claims that each record is in each step's batch independently with probability `sampling_rate` (the
    default, 1, claims no amplification) and counts under add-remove adjacency. The claim is the caller's:
    nothing here has seen the sampling.
    """

    sampling_rate: float = 1.0
    reproducible: bool = field(default=False, init=False)
    # noise multiplier: number of releases, a tensor so that a compiled step does not depend on its value
    _releases: dict[float, Tensor] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.number("sampling_rate", self.sampling_rate, low=0, high=1)

    def record(self, *, std: float, sensitivity: float, reproducible: bool) -> None:
        """Enter one release. `reproducible` noise is private only from those who do not know its seed."""
        checks.number("std", std, low=0)
        checks.number("sensitivity", sensitivity, low=0, finite=False)
        # at sensitivity 0 nothing about any record is in the release
        multiplier = std / sensitivity if sensitivity > 0 else math.inf
        if torch.compiler.is_compiling():
            self._enter(multiplier, reproducible)
        else:
            with self._lock:
                self._enter(multiplier, reproducible)

    def _enter(self, multiplier: float, reproducible: bool) -> None:
        if multiplier not in self._releases:
            self._releases[multiplier] = host_tensor(0, torch.int64)
        self._releases[multiplier].add_(1)
        self.reproducible = self.reproducible or reproducible

    def __len__(self) -> int:
        return sum(int(count) for count in self._releases.values())

    def epsilon(self, delta: float) -> float:
        """The epsilon of everything released so far."""
        counted = {z: int(count) for z, count in self._releases.items() if not math.isinf(z)}
        if 0.0 in counted:
            return math.inf
        events = [poisson_gaussian(z, self.sampling_rate, count) for z, count in counted.items()]
        return epsilon(dp_event.ComposedDpEvent(events), delta) if events else 0.0
