"""The terms of a per-sample matrix that is never stored, and the arithmetic on them.

A parameter seen as a matrix [height, width] (a vector is [n, 1]) has one row of that shape for each of B samples:

    row_i = sum_t g_it a_it^T  +  sum_t e_(id_it) g_it^T  +  values_i
            Outer                 Rows                       Dense

A row *is* the exact product of its stored factors. Everything here widens them to float64, where a product of two
float32 is exact, so what is computed differs from the row by float64 rounding alone; `squared_norms` returns a bound
that is above the true value in spite of it. Work goes in pieces of about `PIECE` elements: no tensor of B x T x T or
B x height x width exists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

PIECE = 1 << 21  # float64 elements that a piece of work may hold
TINY = 2.0**-500  # covers underflow: its square is still a normal number
UNIT = 2.0**-52  # twice the rounding unit of float64
REDO = 1e-4  # of norm^2: a Gram margin above this is taken again from the row itself


@dataclass(frozen=True)
class Outer:
    """row_i = sum_t g_it a_it^T, from a [B, T, width] and g [B, T, height]."""

    a: Tensor
    g: Tensor


@dataclass(frozen=True)
class Rows:
    """row_i = sum_t e_(ids_it) g_it^T, from ids [B, T] below height and g [B, T, width]."""

    ids: Tensor
    g: Tensor


@dataclass(frozen=True)
class Dense:
    """row_i = values_i, [B, height, width]."""

    values: Tensor


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
        return sum(1 if isinstance(t, Dense) else t.g.shape[1] for t in self.terms)


def merge(batch: int, height: int, width: int, terms: Sequence[Term]) -> Matrix:
    """The sum of the terms: Outers and Rows one after the other along T, Denses added."""
    outers = [t for t in terms if isinstance(t, Outer)]
    rows = [t for t in terms if isinstance(t, Rows)]
    denses = [t.values for t in terms if isinstance(t, Dense)]
    return Matrix(
        batch,
        height,
        width,
        outer=Outer(_join([t.a for t in outers]), _join([t.g for t in outers])) if outers else None,
        rows=Rows(_join([t.ids for t in rows]), _join([t.g for t in rows])) if rows else None,
        dense=Dense(functools.reduce(torch.add, denses)) if denses else None,
    )


def transposed(m: Matrix) -> Matrix | None:
    """The same rows with height and width exchanged; None where the terms have no such form."""
    if m.rows is not None:
        return None
    outer = None if m.outer is None else Outer(m.outer.g, m.outer.a)
    dense = None if m.dense is None else Dense(m.dense.values.transpose(1, 2))
    return Matrix(m.batch, m.width, m.height, outer=outer, dense=dense)


def scaled(m: Matrix, scale: float) -> Matrix:
    """scale * m."""
    return replace(
        m,
        outer=None if m.outer is None else Outer(m.outer.a, m.outer.g * scale),
        rows=None if m.rows is None else Rows(m.rows.ids, m.rows.g * scale),
        dense=None if m.dense is None else Dense(m.dense.values * scale),
    )


def difference(x: Matrix, y: Matrix) -> Matrix:
    """x - y, subtracted in the factors, where nothing cancels:

        g a^T - g' a'^T = g (a - a')^T + (g - g') a'^T

    Terms that do not correspond are put side by side, one negated; the margins of `squared_norms` cover that.
    """
    outers: list[Term] = []
    if x.outer is not None and y.outer is not None and x.outer.a.shape == y.outer.a.shape:
        a, g, a_, g_ = (at_least_float(t) for t in (x.outer.a, x.outer.g, y.outer.a, y.outer.g))
        outers = [Outer(a - a_, g), Outer(a_, g - g_)]
    else:
        outers = [t for t in (x.outer, scaled(y, -1).outer) if t is not None]
    rows: list[Term] = []
    if x.rows is not None and y.rows is not None and torch.equal(x.rows.ids, y.rows.ids):
        rows = [Rows(x.rows.ids, at_least_float(x.rows.g) - at_least_float(y.rows.g))]
    else:
        rows = [t for t in (x.rows, scaled(y, -1).rows) if t is not None]
    dense = [t for t in (x.dense, scaled(y, -1).dense) if t is not None]
    return merge(x.batch, x.height, x.width, [*outers, *rows, *dense])


def zero_samples(m: Matrix, keep: Tensor) -> Matrix:
    """Samples that are not kept become zero by selection, in both factors: 0 * Inf would be NaN."""
    if bool(keep.all()):
        return m

    def select(t: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))

    return replace(
        m,
        outer=None if m.outer is None else Outer(select(m.outer.a), select(m.outer.g)),
        rows=None if m.rows is None else Rows(m.rows.ids, select(m.rows.g)),
        dense=None if m.dense is None else Dense(select(m.dense.values)),
    )


def block(m: Matrix, samples: slice | Tensor, low: int, high: int) -> Tensor:
    """Lines low:high of the rows of some samples, [b, high - low, width] in float64."""
    result: Tensor | None = None
    if m.outer is not None:
        a, g = m.outer.a[samples].double(), m.outer.g[samples][:, :, low:high].double()
        result = g.transpose(1, 2) @ a
    if m.dense is not None:
        values = m.dense.values[samples][:, low:high].double()
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


def inner(x: Matrix, y: Matrix) -> Tensor:
    """<x_i, y_i> for each sample, [B] in float64."""
    if _gram_is_cheaper(x, y):
        return _inner_by_terms(x, y)
    result = _zeros(x)
    for samples, low, high in pieces(x):
        result[samples] += (block(x, samples, low, high) * block(y, samples, low, high)).sum((1, 2))
    return result


def squared_norms(m: Matrix) -> tuple[Tensor, Tensor]:
    """|row_i|^2 as computed, and a number that is not below its true value; each [B] in float64.

    Let N_i be the sum of the norms of the row's addends, |g_it| |a_it| and so on. Inner products of addends are off
    by at most k u N_i^2 in total, for sums of at most k terms each. A row formed by adding up is off by at most
    (T + 2) u N_i in norm. The first is poor where addends cancel: such rows are then formed.
    """
    if m.length == 1 and m.outer is not None:  # |g a^T| = |g| |a|: nothing to cancel
        square = _inner_by_terms(m, m)
        return square, square * (1 + (m.height + m.width + 64) * UNIT) + TINY**2
    size = sizes(m)
    if not _gram_is_cheaper(m, m):
        return _squared_norms_of_formed(m, size)
    square = _inner_by_terms(m, m)
    margin = (m.height + m.width + m.length**2 + 64) * UNIT * size.square() + TINY**2
    upper = square.clamp(min=0) + margin
    redo = ((margin > REDO * square) & (size > 2 * TINY)).nonzero().squeeze(1)
    if len(redo):
        chosen = take(m, redo)
        square[redo], upper[redo] = _squared_norms_of_formed(chosen, size[redo])
    return square, upper


def weighted_sum(m: Matrix, weights: Tensor) -> Tensor:
    """sum_i weights_i row_i, [height, width]; weights and the sum in float64."""
    total = torch.zeros((m.height, m.width), dtype=torch.float64, device=weights.device)
    if m.outer is not None:
        length = m.outer.g.shape[1]
        for samples in chunks(m.batch, length * max(m.height, m.width)):
            g = m.outer.g[samples].double() * weights[samples, None, None]
            total.addmm_(g.flatten(0, 1).T, m.outer.a[samples].double().flatten(0, 1))
    if m.dense is not None:
        for samples in chunks(m.batch, m.height * m.width):
            total += torch.einsum("b,bhw->hw", weights[samples], m.dense.values[samples].double())
    if m.rows is not None:
        for samples in chunks(m.batch, m.rows.g[0].numel() if m.batch else 1):
            g = m.rows.g[samples].double() * weights[samples, None, None]
            total.index_add_(0, m.rows.ids[samples].flatten(), g.flatten(0, 1))
    return total


def take(m: Matrix, samples: Tensor) -> Matrix:
    """The matrix of these samples only."""
    return replace(
        m,
        batch=len(samples),
        outer=None if m.outer is None else Outer(m.outer.a[samples], m.outer.g[samples]),
        rows=None if m.rows is None else Rows(m.rows.ids[samples], m.rows.g[samples]),
        dense=None if m.dense is None else Dense(m.dense.values[samples]),
    )


def _squared_norms_of_formed(m: Matrix, size: Tensor) -> tuple[Tensor, Tensor]:
    square = _zeros(m)
    for samples, low, high in pieces(m):
        square[samples] += block(m, samples, low, high).square().sum((1, 2))
    norm = square.sqrt() * (1 + (m.height * m.width + 64) * UNIT)
    return square, (norm + (m.length + 2) * UNIT * size).square() * (1 + 8 * UNIT) + TINY**2


def sizes(m: Matrix) -> Tensor:
    """N_i: the sum of the norms of the addends of row i, rounded up."""
    size = _zeros(m)
    for samples in chunks(m.batch, m.length * max(m.height, m.width)):
        for t in m.terms:
            if isinstance(t, Outer):
                norms = t.a[samples].double().norm(dim=2) * t.g[samples].double().norm(dim=2)
            elif isinstance(t, Rows):
                norms = t.g[samples].double().norm(dim=2)
            else:
                norms = t.values[samples].double().flatten(1).norm(dim=1, keepdim=True)
            size[samples] += norms.sum(1)
    return size * (1 + (m.height + m.width + m.length + 64) * UNIT) + TINY


def _gram_is_cheaper(x: Matrix, y: Matrix) -> bool:
    """Whether inner products of addends cost less than forming the rows."""
    if x.outer is None and y.outer is None:
        return x.rows is not None or y.rows is not None  # one line per id, never height lines
    return x.length * y.length * (x.height + x.width) <= (x.length + y.length) * x.height * x.width


def _inner_by_terms(x: Matrix, y: Matrix) -> Tensor:
    result = _zeros(x)
    for s in x.terms:
        for t in y.terms:
            result += _inner_of(x, s, t)
    return result


def _inner_of(m: Matrix, s: Term, t: Term) -> Tensor:
    if isinstance(s, Outer) and isinstance(t, Outer):
        return _outer_outer(m, s, t)
    if isinstance(s, Rows) and isinstance(t, Rows):
        return _rows_rows(m, s, t)
    if isinstance(s, Dense) and isinstance(t, Dense):
        result = _zeros(m)
        for samples in chunks(m.batch, m.height * m.width):
            result[samples] = (s.values[samples].double() * t.values[samples].double()).sum((1, 2))
        return result
    if isinstance(s, Outer) and isinstance(t, Rows):
        return _outer_rows(m, s, t)
    if isinstance(s, Outer) and isinstance(t, Dense):
        result = _zeros(m)
        for samples in chunks(m.batch, max(m.height * m.width, s.g.shape[1] * max(m.height, m.width))):
            lines = s.g[samples].double() @ t.values[samples].double()
            result[samples] = (lines * s.a[samples].double()).sum((1, 2))
        return result
    if isinstance(s, Rows) and isinstance(t, Dense):
        result = _zeros(m)
        for samples in chunks(m.batch, s.g.shape[1] * m.width):
            index = s.ids[samples].unsqueeze(2).expand(-1, -1, m.width)
            result[samples] = (t.values[samples].gather(1, index).double() * s.g[samples].double()).sum((1, 2))
        return result
    return _inner_of(m, t, s)


def _outer_outer(m: Matrix, s: Outer, t: Outer) -> Tensor:
    """sum over t, u of <a_t, a'_u> <g_t, g'_u>, in tiles of t."""
    result = _zeros(m)
    if s.g.shape[1] == 1 and t.g.shape[1] == 1:
        for samples in chunks(m.batch, max(m.height, m.width)):
            a = (s.a[samples].double() * t.a[samples].double()).sum((1, 2))
            result[samples] = a * (s.g[samples].double() * t.g[samples].double()).sum((1, 2))
        return result
    long = max(s.g.shape[1], t.g.shape[1])
    for samples in chunks(m.batch, long * max(m.height, m.width)):
        a_, g_ = t.a[samples].double().transpose(1, 2), t.g[samples].double().transpose(1, 2)
        step = max(1, PIECE // max(1, long * a_.shape[0]))
        for first in range(0, s.g.shape[1], step):
            tile = slice(first, first + step)
            a = s.a[samples][:, tile].double() @ a_
            result[samples] += (a * (s.g[samples][:, tile].double() @ g_)).sum((1, 2))
    return result


def _rows_rows(m: Matrix, s: Rows, t: Rows) -> Tensor:
    """Lines with equal ids are added up first; then it is a product of sparse matrices, line by line."""
    result = _zeros(m)
    for samples in chunks(m.batch, (s.g.shape[1] + t.g.shape[1]) * m.width):
        offset = m.height * torch.arange(samples.stop - samples.start, device=result.device).unsqueeze(1)
        keys = [(term.ids[samples] + offset).flatten() for term in (s, t)]
        lines, place = torch.cat(keys).unique(return_inverse=True)
        sums = []
        for term, where in zip((s, t), place.split([len(k) for k in keys]), strict=True):
            total = torch.zeros((len(lines), m.width), dtype=torch.float64, device=result.device)
            sums.append(total.index_add_(0, where, term.g[samples].double().flatten(0, 1)))
        result[samples] = result[samples].index_add(0, lines // max(m.height, 1), (sums[0] * sums[1]).sum(1))
    return result


def _outer_rows(m: Matrix, s: Outer, t: Rows) -> Tensor:
    """sum over t, u of g_t[id_u] <a_t, g'_u>: gather, then dot, in tiles of t."""
    result = _zeros(m)
    long = max(s.g.shape[1], t.g.shape[1])
    for samples in chunks(m.batch, long * max(m.width, t.g.shape[1])):
        lines = t.g[samples].double().transpose(1, 2)
        step = max(1, PIECE // max(1, t.ids.shape[1] * lines.shape[0]))
        for first in range(0, s.g.shape[1], step):
            g = s.g[samples][:, first : first + step]
            index = t.ids[samples].unsqueeze(1).expand(-1, g.shape[1], -1)
            products = s.a[samples][:, first : first + step].double() @ lines
            result[samples] += (g.gather(2, index).double() * products).sum((1, 2))
    return result


def _zeros(m: Matrix) -> Tensor:
    first = m.terms[0]
    like = first.values if isinstance(first, Dense) else first.g
    return like.new_zeros(m.batch, dtype=torch.float64)


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def at_least_float(t: Tensor) -> Tensor:
    """Half types widened to float32; float32 and float64 as they are."""
    return t if t.dtype == torch.float64 else t.float()
