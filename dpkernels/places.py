"""Whether the bits of a row depend on where in the batch its sample is.

Libraries round products of matrices differently from shape to shape, and some of them from place to place. A record
that is left out moves others to the places before: if that changes their rows, it shows in the last bits of a sum,
where secure noise must hide one record and not many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels import factors
from dpkernels.factors import Matrix
from dpkernels.members import members_of
from dpkernels.nested import flat_tensors, map_tensors
from dpkernels.per_sample import PerSample


def filled(t: Tensor, first: int, size: int) -> Tensor:
    """`size` samples from `first` on in memory of their own, zeros where there are no more."""
    own = t[first : first + size]
    whole = torch.zeros((size, *t.shape[1:]), dtype=t.dtype, device=t.device)
    whole[: len(own)] = own
    return whole


class Places:
    """The check of a training run: once, at its first batch, and only where noise is secure."""

    def __init__(self, *, secure: bool) -> None:
        self._due = secure

    def check(
        self,
        model: nn.Module,
        rows_of: Callable[[Any, Any], PerSample],
        inputs: Any,
        targets: Any,
        runs: int = 1,
    ) -> None:
        """See `check_places`."""
        if self._due:
            check_places(model, rows_of, inputs, targets, runs)
            self._due = False


def check_places(
    model: nn.Module, rows_of: Callable[[Any, Any], PerSample], inputs: Any, targets: Any, runs: int = 1
) -> None:
    """Raise a `ValueError` unless `rows_of(inputs, targets)` has the same bits for samples in other places.

    In other places of its run, where samples come in `runs`. Tried with made-up numbers in place of those in `inputs`,
    and random layers as in eval mode. In float64 nothing is tried: there the difference is far below what secure noise
    counts for rounding.
    """
    if all(p.dtype == torch.float64 for p in members_of(model).trainable.values()):
        return
    generator = torch.Generator().manual_seed(0)

    def made_up(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() and t.dim() else t

    inputs = map_tensors(made_up, inputs)
    batch = next(len(t) for t in flat_tensors(inputs) if t.dim())
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        first = rows_of(inputs, targets)
        for shift in (1, 3):
            order = torch.arange(batch).view(runs, -1).roll(shift, 1).flatten()
            second = rows_of(_taken(inputs, order), _taken(targets, order))
            for name, parts in first.parts.items():
                for one, other in zip(parts, second.parts[name], strict=True):
                    _refuse_other_bits(name, one.matrix, other.matrix, order)
    finally:
        for module, mode in modes:
            module.training = mode


def _taken(x: Any, order: Tensor) -> Any:
    return map_tensors(lambda t: t[order] if t.dim() else t, x)


def _refuse_other_bits(name: str, one: Matrix, other: Matrix, order: Tensor) -> None:
    for t, u in zip(factors.made_of(one), factors.made_of(other), strict=True):
        if not factors.same_bits(t[order], u):
            raise ValueError(
                f"secure: got True, but the last bits of the rows of parameter {name} depend on the places of samples, "
                "as products of float32 matrices are computed here. Use model.double() and float64 inputs"
            )
