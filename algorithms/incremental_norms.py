"""How much clipping takes away: the incremental norm of each row, max(|row| - C, 0). NOT private."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormSummary:
    """Of a run's incremental norms. NOT private."""

    rows: int
    clipped: float  # the share of rows that were
    mean: float
    quartiles: tuple[float, float, float]

    def over(self, lr: float) -> NormSummary:
        """The same divided by a step size."""
        low, middle, high = (q / lr for q in self.quartiles)
        return NormSummary(self.rows, self.clipped, self.mean / lr, (low, middle, high))


class IncrementalNorms:
    """The incremental norms of every row of a run. NOT private: for research on public data, and off unless asked for.

    Rows that are not finite, which count as zero, are left out.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._found: list[Tensor] = []

    def add(self, norms: Tensor) -> None:
        """The rows of one release."""
        norms = norms.detach().double().cpu()
        self._found.append((norms[norms.isfinite()] - self._max_norm).clamp(min=0))

    def summary(self) -> NormSummary:
        """Mean and quartiles over the run so far."""
        every = torch.cat(self._found) if self._found else torch.zeros(0, dtype=torch.float64)
        if not len(every):
            return NormSummary(0, 0.0, 0.0, (0.0, 0.0, 0.0))
        ordered = every.sort().values
        low, middle, high = (float(ordered[min(len(every) - 1, len(every) * i // 4)]) for i in (1, 2, 3))
        return NormSummary(len(every), float((every > 0).double().mean()), float(every.mean()), (low, middle, high))
