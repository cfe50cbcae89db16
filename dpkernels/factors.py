"""The terms of a per-sample matrix, and the arithmetic on them.

A parameter seen as a matrix [height, width] (a vector is [n, 1]) has one row of that shape for each of B samples:

    row_i = sum_t g_it a_it^T  +  sum_t e_(id_it) g_it^T  +  values_i
            Outer                 Rows                       Dense

A row *is* the exact product of its stored factors. `dpkernels.inner` has the norms, `dpkernels.sums` the weighted sums.
Work goes in pieces of about `PIECE` elements: no tensor of B x T x T or B x height x width is made of factors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from dpkernels import ops
from dpkernels.reference_layers import selected

PIECE = 1 << 21  # float64 elements that a piece of work may hold
TINY = 2.0**-500  # covers underflow: its square is still a normal number
UNIT = 2.0**-52  # twice the rounding unit of float64


@dataclass(frozen=True)
class Outer:
    """row_i = sum_t g_it a_it^T, from a [B, T, width] and g [B, T, height]; `fixed`: a does not depend on weights.

    `faults`, where known: which samples' a is finite.
    """

    a: Tensor
    g: Tensor
    fixed: bool = False
    faults: Faults | None = None


class Faults(NamedTuple):
    """What was seen of a factor: 0 for samples that are finite, else NaN, [B]; and its version then."""

    seen: Tensor
    version: int


@dataclass(frozen=True)
class Rows:
    """row_i = sum_t e_(ids_it) g_it^T, from ids [B, T] below height and g [B, T, width]."""

    ids: Tensor
    g: Tensor


@dataclass(frozen=True)
class Dense:
    """row_i = values_i, [B, height, width]; `squares`, where known, are the rows' norm^2 in float64."""

    values: Tensor
    squares: Tensor | None = None

    def of(self, samples: slice | Tensor) -> Tensor:
        """The rows of some samples."""
        return self.values[samples]


class Later(Dense):
    """Rows formed whenever they are asked for, with the same bits each time: memory for a few samples at a time.

    `form(samples)` gives the rows of a slice of `count` samples, [b, height, width]. Without storing them, where given,
    `add(values, scale)` adds all of them, scaled, to [B, *shape], and `clamp(sums, bound)` adds them, clamped, to the
    sums [N, height, width] of N equal runs of samples. `made_of`: what they are formed of, [B, ...] each, and
    `again(*made_of)` is the same of other such.
    """

    def __init__(
        self,
        form: Callable[[slice], Tensor],
        count: int,
        squares: Tensor | None = None,
        add: Callable[[Tensor, float], None] | None = None,
        clamp: Callable[[Tensor, float], None] | None = None,
        made_of: tuple[Tensor, ...] = (),
        again: Callable[..., Later] | None = None,
    ) -> None:
        hooks = {"form": form, "count": count, "squares": squares, "add": add, "clamp": clamp}
        for name, value in {**hooks, "made_of": made_of, "again": again}.items():
            object.__setattr__(self, name, value)

    form: Callable[[slice], Tensor]
    count: int
    add: Callable[[Tensor, float], None] | None
    clamp: Callable[[Tensor, float], None] | None
    made_of: tuple[Tensor, ...]
    again: Callable[..., Later] | None

    @property
    def values(self) -> Tensor:
        """All of them."""
        return self.form(slice(0, self.count))

    def of(self, samples: slice | Tensor) -> Tensor:
        """The rows of some samples."""
        return self.form(samples) if isinstance(samples, slice) else self.values[samples]


Term = Outer | Rows | Dense


@dataclass(frozen=True)
class Matrix:
    """The sum of at most one term of each kind: all uses of one parameter (or of one part of it)."""

    batch: int
    height: int
    width: int
    outer: Outer | None = None
    rows: Rows | None = None
    dense: Dense | None = None

    @property
    def terms(self) -> list[Term]:
        """Those that are there."""
        return [t for t in (self.outer, self.rows, self.dense) if t is not None]

    @property
    def length(self) -> int:
        """How many factors add up in one row, over all terms."""
        return sum(self.length_of(t) for t in self.terms)

    @staticmethod
    def length_of(t: Term) -> int:
        """How many factors of one term add up in one row."""
        return 1 if isinstance(t, Dense) else t.g.shape[1]


def factors_of(m: Matrix) -> list[Tensor]:
    """The floating-point factors of the terms that are no rows themselves."""
    found = [] if m.outer is None else [m.outer.a, m.outer.g]
    return found if m.rows is None else [*found, m.rows.g]


def made_of(m: Matrix) -> list[Tensor]:
    """All that the rows are made of, [B, ...] each."""
    if m.dense is None:
        return factors_of(m)
    return [*factors_of(m), *((m.dense.made_of if isinstance(m.dense, Later) else ()) or (m.dense.values,))]


def merge(batch: int, height: int, width: int, terms: Sequence[Term]) -> Matrix:
    """The sum of the terms: Outers and Rows one after the other along T, Denses added."""
    if len(terms) == 1:
        (term,) = terms
        if isinstance(term, Outer):
            return Matrix(batch, height, width, outer=term)
        if isinstance(term, Rows):
            return Matrix(batch, height, width, rows=term)
        return Matrix(batch, height, width, dense=term)
    outers = [t for t in terms if isinstance(t, Outer)]
    rows = [t for t in terms if isinstance(t, Rows)]
    denses = [t for t in terms if isinstance(t, Dense)]
    return Matrix(
        batch,
        height,
        width,
        outer=Outer(_join([t.a for t in outers]), _join([t.g for t in outers])) if outers else None,
        rows=Rows(_join([t.ids for t in rows]), _join([t.g for t in rows])) if rows else None,
        dense=functools.reduce(lambda s, t: Dense(s.values + t.values), denses) if denses else None,
    )


def transposed(m: Matrix) -> Matrix | None:
    """The same rows with height and width exchanged; None where the terms have no such form."""
    if m.rows is not None:
        return None
    outer = None if m.outer is None else Outer(m.outer.g, m.outer.a)
    dense = None if m.dense is None else Dense(m.dense.values.transpose(1, 2), m.dense.squares)
    return Matrix(m.batch, m.width, m.height, outer=outer, dense=dense)


def scaled(m: Matrix, scale: float | Tensor) -> Matrix:
    """scale * m; a tensor [B] has one number for each sample. Products are rounded: they are the rows from here on."""

    def times(t: Tensor, samples: slice | Tensor = slice(None)) -> Tensor:
        return t * (scale[samples].to(t.dtype).view(-1, 1, 1) if isinstance(scale, Tensor) else scale)

    return replace(
        m,
        outer=None if m.outer is None else Outer(m.outer.a, times(m.outer.g)),
        rows=None if m.rows is None else Rows(m.rows.ids, times(m.rows.g)),
        dense=None if m.dense is None else _scaled_dense(m.dense, times, m.height * m.width),
    )


def _scaled_dense(dense: Dense, times: Callable[..., Tensor], elements: int) -> Dense:
    if not isinstance(dense, Later):
        return Dense(times(dense.values))
    form, count = dense.form, dense.count
    again = lambda samples: times(form(samples), samples)  # noqa: E731
    squares = [torch.ops.dpkernels.row_squares([again(samples)])[:, 0] for samples in chunks(count, elements)]
    return Later(again, count, torch.cat(squares))


def weighted(m: Matrix, weights: Tensor | None) -> Matrix:
    """weights_i m_i in float64 weights [B], 1 unless given; rows of weight zero are zero by selection."""
    if weights is None or not m.terms:
        return m
    counts = weights != 0
    return scaled(m if bool(counts.all()) else zero_samples(m, counts), weights)


def difference(x: Matrix, y: Matrix, x_weights: Tensor | None = None, y_weights: Tensor | None = None) -> Matrix:
    """w x - v y with weights of each sample, 1 unless given; subtracted in the factors, where nothing cancels:

        g a^T - g' a'^T = g (a - a')^T + (g - g') a'^T

    Terms that do not correspond are put side by side, one negated; the margins of `squared_norms` cover that.
    """
    dense: Term | None = None
    if _is_for_kernel(x.dense) and _is_for_kernel(y.dense):
        dense = Dense(*torch.ops.dpkernels.dense_difference(x.dense.values, y.dense.values, x_weights, y_weights))
        x, y = replace(x, dense=None), replace(y, dense=None)
    x, y = weighted(x, x_weights), weighted(y, y_weights)
    negative = functools.cache(lambda: scaled(y, -1))
    terms: list[Term | None] = [dense]
    if x.outer is not None and y.outer is not None and x.outer.a.shape == y.outer.a.shape:
        terms.append(_outer_difference(x.outer, y.outer))
    else:
        terms += [x.outer, None if y.outer is None else negative().outer]
    if x.rows is not None and y.rows is not None and torch.equal(x.rows.ids, y.rows.ids):
        terms.append(Rows(x.rows.ids, at_least_float(x.rows.g) - at_least_float(y.rows.g)))
    else:
        terms += [x.rows, None if y.rows is None else negative().rows]
    if x.dense is not None and y.dense is not None:
        terms.append(_dense_difference(x.dense, y.dense, x.batch, x.height * x.width))
    else:
        terms += [x.dense, None if y.dense is None else negative().dense]
    return merge(x.batch, x.height, x.width, [t for t in terms if t is not None])


def _is_for_kernel(dense: Dense | None) -> TypeGuard[Dense]:
    if dense is None or isinstance(dense, Later) or ops.native is None:
        return False
    return dense.values.is_cpu and dense.values.dtype == torch.float32


def _outer_difference(x: Outer, y: Outer) -> Outer:
    a, g, a_, g_ = (at_least_float(t) for t in (x.a, x.g, y.a, y.g))
    if x.fixed and y.fixed and same_bits(a, a_):  # what both runs were given
        return Outer(a, g - g_)
    length = a.shape[1]
    sides = _kept(a, a_, (len(a), 2 * length, a.shape[2])), _kept(g, g_, (len(g), 2 * length, g.shape[2]))
    torch.sub(a, a_, out=sides[0][:, :length])
    sides[0][:, length:] = a_
    sides[1][:, :length] = g
    torch.sub(g, g_, out=sides[1][:, length:])
    return Outer(*sides)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether they are equal, by their bits: a NaN in one sample does not change what is done for the others."""
    as_bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(x.dtype, x.dtype)
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(as_bits), y.contiguous().view(as_bits))


def _kept(x: Tensor, y: Tensor, size: tuple[int, ...]) -> Tensor:
    """Memory for what is made of both, kept from step to step where there is such."""
    if x.dtype == y.dtype == torch.float32:
        return torch.ops.dpkernels.unfilled(x, size)  # type: ignore[no-any-return]
    return x.new_empty(size, dtype=torch.promote_types(x.dtype, y.dtype))


def _dense_difference(x: Dense, y: Dense, batch: int, elements: int) -> Dense:
    first, other = (at_least_float(d.of(slice(0, 0))) for d in (x, y))
    out = _kept(first, other, (batch, *first.shape[1:]))
    for samples in chunks(batch, elements):
        torch.sub(at_least_float(x.of(samples)), at_least_float(y.of(samples)), out=out[samples])
    return Dense(out)


def zero_samples(m: Matrix, keep: Tensor | None) -> Matrix:
    """Samples that are not kept become zero by selection, in both factors: 0 * Inf would be NaN. None keeps all."""
    if keep is None:
        return m

    def select(t: Tensor) -> Tensor:
        return selected(t, keep)

    dense = m.dense
    if isinstance(dense, Later) and dense.again is not None:
        dense = dense.again(*(select(t) for t in dense.made_of))
    elif dense is not None:
        dense = Dense(select(dense.values))
    return replace(
        m,
        outer=None if m.outer is None else Outer(select(m.outer.a), select(m.outer.g)),
        rows=None if m.rows is None else Rows(m.rows.ids, select(m.rows.g)),
        dense=dense,
    )


def block(m: Matrix, samples: slice | Tensor, low: int, high: int) -> Tensor:
    """Lines low:high of the rows of some samples, [b, high - low, width] in float64."""
    result: Tensor | None = None
    if m.outer is not None:
        a, g = m.outer.a[samples].double(), m.outer.g[samples][:, :, low:high].double()
        result = g.transpose(1, 2) @ a
    if m.dense is not None:
        values = m.dense.of(samples)[:, low:high].double()
        result = values if result is None else result + values
    if m.rows is not None:
        ids, g = m.rows.ids[samples], m.rows.g[samples]
        if result is None:
            result = g.new_zeros((len(ids), high - low, m.width), dtype=torch.float64)
        sample, place = ((ids >= low) & (ids < high)).nonzero(as_tuple=True)
        line = sample * (high - low) + ids[sample, place] - low
        result = result.reshape(-1, m.width).index_add(0, line, g[sample, place].double()).view(result.shape)
    assert result is not None, "a matrix without terms"
    return result


def pieces(m: Matrix) -> Iterator[tuple[slice, int, int]]:
    """Samples and lines in pieces that `block` may hold."""
    work = max(m.height * m.width, m.length * m.width, 1)
    if work <= PIECE:
        for samples in chunks(m.batch, work):
            yield samples, 0, m.height
        return
    lines = max(1, PIECE // max(m.width, m.length))
    for i in range(m.batch):
        for low in range(0, m.height, lines):
            yield slice(i, i + 1), low, min(m.height, low + lines)


def chunks(batch: int, elements: int) -> Iterator[slice]:
    """Consecutive samples of so many elements each, `PIECE` elements at a time."""
    count = max(1, PIECE // max(elements, 1))
    for first in range(0, batch, count):
        yield slice(first, min(batch, first + count))


def take(m: Matrix, samples: Tensor) -> Matrix:
    """The matrix of these samples only."""
    return replace(
        m,
        batch=len(samples),
        outer=None if m.outer is None else Outer(m.outer.a[samples], m.outer.g[samples]),
        rows=None if m.rows is None else Rows(m.rows.ids[samples], m.rows.g[samples]),
        dense=None if m.dense is None else Dense(m.dense.of(samples)),
    )


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def at_least_float(t: Tensor) -> Tensor:
    """Half types widened to float32; float32 and float64 as they are."""
    return t if t.dtype == torch.float64 else t.float()
