"""Clip rules: how far one record can move the released sum.

A rule turns the norms of a sample's vector into the coefficient it is summed with, and knows the L2
sensitivity of the sum that results. `clip` arguments take a rule, or a number for `Flat`.

| rule | row of the sum | norm of the row |
|---|---|---|
| `Flat(C)` | v * min(1, C / |v|) | at most C |
| `Automatic(C, s)` | v * C / (|v| + s) | below C |
| `PerLayer([C1, ...])` | each tensor clipped on its own | at most sqrt(C1^2 + ...) |
| `Difference(C)` | (a - b) * min(1, C / |a - b|) | at most C |
| `RecursiveMomentum(C1, C3, g)` | g clip_C1(a) + (1-g) clip_C3(clip_C1(a) - clip_C1(b)) | at most g C1 + (1-g) C3 |

Edge cases, the same for all: a bound of 0 releases zeros, an infinite bound does not clip, a zero row stays
zero, a row with a NaN or an Inf anywhere counts as zero. The norms hold in real arithmetic: coefficients
are made from norms rounded up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dpkernels import checks

if TYPE_CHECKING:
    from dpkernels.noise import Gaussian

Adjacency = Literal["add-remove", "replace-one"]


def check_adjacency(adjacency: object) -> Adjacency:
    """One of the two, or an error."""
    if adjacency in ("add-remove", "replace-one"):
        return adjacency
    raise ValueError(f"adjacency: got {adjacency!r}, must be 'add-remove' or 'replace-one'")


class Rule(ABC):
    """What all clip rules have."""

    @property
    @abstractmethod
    def row_norm(self) -> float:
        """The largest L2 norm of one sample's row of the sum."""

    def sensitivity(
        self, adjacency: Adjacency = "add-remove", *, noise: Gaussian | None = None, width: int | None = None
    ) -> float:
        """L2 sensitivity of the clipped sum.

        "add-remove": data sets that differ in one record more or less; one row norm.
        "replace-one": one record has another value; two row norms.
        With `noise`, of the sum of `width` coordinates as that noise rounds it: secure noise does, to its lattice.
        """
        moves = self.row_norm * (2 if check_adjacency(adjacency) == "replace-one" else 1)
        return moves if noise is None else noise.widened(moves, width)


@dataclass(frozen=True)
class Flat(Rule):
    """Scale a row down to `max_norm` where it is longer."""

    max_norm: float

    def __post_init__(self) -> None:
        checks.number("max_norm", self.max_norm, low=0, finite=False)

    @property
    def row_norm(self) -> float:
        """`max_norm`."""
        return self.max_norm


@dataclass(frozen=True)
class Difference(Flat):
    """`Flat` on the difference of two vectors of a sample; named so that code says what it clips."""


@dataclass(frozen=True)
class Automatic(Rule):
    """Scale every row to nearly `max_norm`: `v * max_norm / (norm + stability)`."""

    max_norm: float
    stability: float = 0.01

    def __post_init__(self) -> None:
        checks.number("max_norm", self.max_norm, low=0)
        if checks.number("stability", self.stability, low=0) == 0:
            raise ValueError("stability: got 0, must be > 0 (a zero row would have no direction)")
        if math.isinf(self.max_norm / self.stability):
            raise ValueError(
                f"stability: got {self.stability!r}, must be large enough that max_norm / stability is finite"
            )

    @property
    def row_norm(self) -> float:
        """`max_norm`."""
        return self.max_norm


@dataclass(frozen=True)
class PerLayer(Rule):
    """Clip each tensor of a list to its own bound."""

    max_norms: Sequence[float]

    def __post_init__(self) -> None:
        if isinstance(self.max_norms, str) or not isinstance(self.max_norms, Sequence) or not self.max_norms:
            raise ValueError(f"max_norms: got {self.max_norms!r}, must be a non-empty sequence of numbers")
        for i, bound in enumerate(self.max_norms):
            checks.number(f"max_norms[{i}]", bound, low=0, finite=False)
        object.__setattr__(self, "max_norms", tuple(float(bound) for bound in self.max_norms))

    @property
    def row_norm(self) -> float:
        """The bounds' root sum of squares."""
        return math.hypot(*self.max_norms)


@dataclass(frozen=True)
class RecursiveMomentum(Rule):
    """The recursive-momentum row of PriSMA, from a sample's gradients at two points.

    `gradient_norm` (C1) bounds each gradient, `difference_norm` (C3) the difference of the two clipped
    gradients, `momentum` (gamma) weighs the first against the second.
    """

    gradient_norm: float
    difference_norm: float
    momentum: float

    def __post_init__(self) -> None:
        checks.number("gradient_norm", self.gradient_norm, low=0)
        checks.number("difference_norm", self.difference_norm, low=0)
        checks.number("momentum", self.momentum, low=0, high=1)

    @property
    def row_norm(self) -> float:
        """gamma C1 + (1 - gamma) C3."""
        return self.momentum * self.gradient_norm + (1 - self.momentum) * self.difference_norm


def as_rule(clip: object) -> Rule:
    """`clip` itself if it is a rule, `Flat(clip)` if it is a number."""
    if isinstance(clip, Rule):
        return clip
    return Flat(checks.number("clip", clip, low=0, finite=False))
