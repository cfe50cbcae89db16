"""What each sample's weights are off by while it walks steps of its own: factors that grow, or values of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkernels import factors, forming, planner
from dpkernels.each import Each
from dpkernels.factors import Dense, Later, Matrix, Outer, Rows
from dpkernels.per_sample import PerSample
from dpkernels.placing import Part, Shape


class Walk:
    """What each sample's weights are off by, after as many steps as were added."""

    def __init__(self, batch: int, shared: dict[str, Tensor], steps: int, room: Any) -> None:
        self.taken = 0
        self._batch, self._shared, self._steps = batch, shared, steps
        self._room = room if isinstance(room, int) else room()
        self._held: dict[str, _Factors | _Values] = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, rows: PerSample, scale: float) -> None:
        """One step: the rows, scaled."""
        for name, parts in rows.parts.items():
            if not parts:
                continue
            held = self._held.get(name)
            if held is None:
                held = self._start(self._shared[name], parts)
            elif isinstance(held, _Factors) and not _Factors.possible(parts, self._shared[name]):
                held = _Values(held.each(self._shared[name]).plain.contiguous())
            held.add(parts, scale)
            self._held[name] = held
        self.taken += 1

    @torch.inference_mode(False)
    def each(self) -> dict[str, Each]:
        """What every parameter is for each sample now; nothing of its own before the first step."""
        if self.taken == 0:
            return {}
        nothing = Matrix(self._batch, 0, 0)
        return {
            name: self._held[name].each(shared) if name in self._held else Each(shared, matrix=nothing)
            for name, shared in self._shared.items()
        }

    def parts(self) -> dict[str, list[Part]]:
        """The rows; what is held may not be used afterwards."""
        return {name: [Part(None, held.matrix(self._shared[name]))] for name, held in self._held.items()}

    def _start(self, shared: Tensor, parts: list[Part]) -> _Factors | _Values:
        left = self._steps - self.taken
        bytes_ = self._batch * shared.numel() * shared.element_size()
        if _Factors.possible(parts, shared):
            m = parts[0].matrix
            growing = 0 if m.outer is None else m.outer.g.shape[1] * (1 if m.outer.fixed else left)
            growing += 0 if m.rows is None else m.rows.g.shape[1]
            factors_ = self._batch * growing * (m.height + m.width) * shared.element_size()
            sizes = {"stored": bytes_, "factors": factors_, "room": self._room}
            if planner.hold(m.length, m.height, m.width, left, **sizes) is planner.Hold.FACTORS:
                return _Factors(parts[0].matrix, left)
        self._room -= bytes_
        return _Values(forming.copies(shared, self._batch))


class _Factors:
    """A matrix whose terms grow with each step, in memory for all of them."""

    def __init__(self, first: Matrix, steps: int) -> None:
        self._batch, self._height, self._width, self._steps = first.batch, first.height, first.width, steps
        self._outer: _Growing | None = None
        self._rows: _Growing | None = None

    @staticmethod
    def possible(parts: list[Part], shared: Tensor) -> bool:
        """Whether the rows of a step are factors of one whole matrix."""
        if len(parts) != 1 or parts[0].place is not None:
            return False
        m = parts[0].matrix
        return m.dense is None and (m.height, m.width) == tuple(shared.shape)

    def add(self, parts: list[Part], scale: float) -> None:
        (part,) = parts
        outer, rows = part.matrix.outer, part.matrix.rows
        if outer is not None:
            self._outer = self._outer or _Growing(self._steps)
            self._outer.add(outer.a, outer.g, scale, outer.fixed)
        if rows is not None:
            self._rows = self._rows or _Growing(self._steps)
            self._rows.add(rows.ids, rows.g, scale, True)

    def matrix(self, shared: Tensor) -> Matrix:
        outer = None if self._outer is None else Outer(*self._outer.factors())
        rows = None if self._rows is None else Rows(*self._rows.factors())
        return Matrix(self._batch, self._height, self._width, outer=outer, rows=rows)

    def each(self, shared: Tensor) -> Each:
        return Each(shared, matrix=self.matrix(shared))


class _Growing:
    """Pairs of factors, those of each step behind those before; the second ones added up where the first stay."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._used = 0
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    def add(self, first: Tensor, second: Tensor, scale: float, may_stay: bool) -> None:
        """`may_stay`: the first factors may be those of the step before, which is seen by comparing them."""
        length = first.shape[1]
        first = first if not first.is_floating_point() else factors.at_least_float(first)
        second = factors.at_least_float(second)
        if self._first is None or self._second is None:
            room = length if may_stay else length * self._steps
            self._first, self._second = (forming.unfilled(t, t.shape[0], room, *t.shape[2:]) for t in (first, second))
        elif may_stay and length == self._used and factors.same_bits(self._first[:, :length], first):
            self._second[:, :length].add_(second, alpha=scale)
            return
        if self._used + length > self._first.shape[1]:
            room = self._used + length * self._steps
            self._first, self._second = (_longer(t, room) for t in (self._first, self._second))
        here = slice(self._used, self._used + length)
        self._first[:, here] = first
        torch.mul(second, scale, out=self._second[:, here])
        self._used += length

    def factors(self) -> tuple[Tensor, Tensor]:
        """Both, as far as they go."""
        assert self._first is not None
        assert self._second is not None
        return self._first[:, : self._used], self._second[:, : self._used]


def _longer(t: Tensor, length: int) -> Tensor:
    longer = forming.unfilled(t, t.shape[0], length, *t.shape[2:])
    longer[:, : t.shape[1]] = t
    return longer


class _Values:
    """Each sample's own weights, [B, *shape]."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def add(self, parts: list[Part], scale: float) -> None:
        for part in parts:
            _add_rows(self._values, part, scale)

    def matrix(self, shared: Tensor) -> Matrix:
        batch, (height, width) = len(self._values), Shape(shared.shape, shared.dtype, shared.device).matrix
        rows = self._values.sub_(shared).view(batch, height, width)
        return Matrix(batch, height, width, dense=Dense(rows))

    def each(self, shared: Tensor) -> Each:
        return Each(shared, values=self._values.detach().requires_grad_())


def _add_rows(values: Tensor, part: Part, scale: float) -> None:
    """values += scale * rows, in place."""
    m = part.matrix
    target = values if part.place is None else part.place.of(values.flatten(1))
    whole = part.place is None
    if m.dense is not None:
        if isinstance(m.dense, Later) and m.dense.add is not None and whole:
            m.dense.add(values, scale)
        else:
            target.add_(m.dense.values.reshape(target.shape), alpha=scale)
    if m.outer is not None and whole:
        forming.add_outer_rows(values.view(m.batch, m.height, m.width), m.outer.a, m.outer.g, scale)
    elif m.outer is not None:
        rows = factors.at_least_float(m.outer.g).transpose(1, 2) @ factors.at_least_float(m.outer.a)
        target.add_(rows.reshape(target.shape), alpha=scale)
    if m.rows is not None:
        lines = (values if whole else target).reshape(m.batch, m.height, m.width)
        index = m.rows.ids.unsqueeze(2).expand(-1, -1, m.width)
        lines.scatter_add_(1, index, m.rows.g.to(values.dtype) * scale)  # to its own table only
        if not whole:
            target.copy_(lines.view(target.shape))
