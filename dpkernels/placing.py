"""Where matrices of factors belong in a parameter: all of it, or the elements that a view of it has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels import factors
from dpkernels.reference import wide_type


@dataclass(frozen=True)
class Shape:
    """What a parameter looks like."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def matrix(self) -> tuple[int, int]:
        """Height and width of the parameter seen as a matrix."""
        height = self.size[0] if self.size else 1
        return height, math.prod(self.size[1:])


@dataclass(frozen=True)
class Place:
    """Which elements of a contiguous parameter a matrix of factors stands for: its geometry as a strided view."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """Those elements of a contiguous tensor [..., *parameter shape], in the shape of the view."""
        lead = whole.dim() - 1  # the parameter is flattened
        outer = whole.stride()[:lead]
        return whole.as_strided(
            (*whole.shape[:lead], *self.size), (*outer, *self.stride), whole.storage_offset() + self.offset
        )


@dataclass(frozen=True)
class Part:
    """Factors, and where in the parameter they belong: None for all of it, in order."""

    place: Place | None
    matrix: factors.Matrix


def add(total: Tensor, place: Place | None, lines: Tensor) -> None:
    """total, a flat parameter, += lines at their place."""
    if place is None:
        total += lines.flatten()
    else:
        place.of(total).add_(lines.view(place.size))


def formed(shape: Shape, parts: list[Part], batch: int) -> Tensor:
    """The rows of one parameter, [B, *size] in float64."""
    total = torch.zeros((batch, shape.size.numel()), dtype=torch.float64, device=shape.device)
    for part in parts:
        for samples, low, high in factors.pieces(part.matrix):
            lines = factors.block(part.matrix, samples, low, high)
            target = total[samples]
            if part.place is None:
                width = part.matrix.width
                target[:, low * width : high * width] += lines.flatten(1)
            else:
                whole = lines.new_zeros((len(lines), part.matrix.height, part.matrix.width))
                whole[:, low:high] = lines
                view = part.place.of(target)
                view += whole.view(view.shape)
    return total.view(batch, *shape.size)


def separate(shape: Shape, parts: list[Part], batch: int) -> list[Part]:
    """The parts, if no two of them share an element of the parameter; else one dense part that is their sum.

    A row is what is stored: where parts overlap, the dense sum as rounded is the row from here on.
    """
    if len(parts) <= 1:
        return parts
    taken = torch.zeros(shape.size.numel(), dtype=torch.bool)
    for part in parts:
        view = taken if part.place is None else part.place.of(taken)
        if view.any():
            return [_dense_part(shape, parts, batch)]
        view.fill_(True)
    return parts


def _dense_part(shape: Shape, parts: list[Part], batch: int) -> Part:
    height, width = shape.matrix
    values = formed(shape, parts, batch).view(batch, height, width).to(wide_type(shape.dtype))
    return Part(None, factors.Matrix(batch, height, width, dense=factors.Dense(values)))


def matched(shape: Shape, mine: list[Part], theirs: list[Part]) -> list[tuple[factors.Matrix, factors.Matrix]]:
    """Pairs of matrices whose inner products add up to that of the two lists."""
    if not mine or not theirs:
        return []
    if _same_places(mine, theirs):
        return [(a.matrix, b.matrix) for a, b in zip(mine, theirs, strict=True)]
    batch = mine[0].matrix.batch
    return [(_dense_part(shape, mine, batch).matrix, _dense_part(shape, theirs, batch).matrix)]


def _same_places(mine: list[Part], theirs: list[Part]) -> bool:
    return [(p.place, p.matrix.height, p.matrix.width) for p in mine] == [
        (p.place, p.matrix.height, p.matrix.width) for p in theirs
    ]


def difference(
    shape: Shape,
    mine: list[Part],
    theirs: list[Part],
    batch: int,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Part]:
    """Mine minus theirs, each with weights of samples, 1 unless given; subtracted in the factors where places agree."""
    if not mine and not theirs:
        return []
    if _same_places(mine, theirs):
        pairs = zip(mine, theirs, strict=True)
        return [Part(a.place, factors.difference(a.matrix, b.matrix, *weights)) for a, b in pairs]
    mine, theirs = (
        [Part(p.place, factors.weighted(p.matrix, w)) for p in parts]
        for parts, w in zip((mine, theirs), weights, strict=True)
    )
    both = [*mine, *(Part(p.place, factors.scaled(p.matrix, -1.0)) for p in theirs)]
    return [_dense_part(shape, both, batch)] if len(both) > 1 else both


def stored(parts: list[Part]) -> tuple[list[Tensor], list[Part]]:
    """The rows of parts that are stored and cover their parameter in order; and the other parts."""
    whole, others = [], []
    for part in parts:
        m = part.matrix
        alone = part.place is None and len(m.terms) == 1
        if alone and m.dense is not None and not isinstance(m.dense, factors.Later):
            whole.append(m.dense.values)
        else:
            others.append(part)
    return whole, others
