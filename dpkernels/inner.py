"""Inner products of rows, and their norms with bounds that are true in real arithmetic.

Factors are widened to float64, where a product of two float32 is exact. What is computed differs from the row's own by
rounding alone, and `squared_norms` returns a number above the true value in spite of it, by this reckoning. Let N_i be
the sum of the norms of the row's addends, |g_it| |a_it| and so on; u is the rounding unit of the arithmetic.

    gram   inner products of addends are off by at most k u N_i^2 in total, for sums of at most k terms each
    tile   a row formed by adding up is off by at most (T + 2) u N_i in norm; in float32, T counts up to 256 and then
           by 256s, as `outer_squares` adds
    keep   a stored row is what it is

Where addends cancel, so that such a margin would shrink a row too much, that sample's row is formed again in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpkernels import factors, forming, planner, sums
from dpkernels.factors import TINY, UNIT, Dense, Matrix, Outer, Rows, Term, block, chunks, pieces, take
from dpkernels.sums import FLOAT_UNIT

GRAM_MARGIN = 1e-4  # of norm^2: with more, the row is formed
TILE_MARGIN = 1e-2  # of the norm, in float32: with more, the row is formed in float64
UNDERFLOW = 2.0**-1022  # more than a square in float64 loses at the lower end of its range


def inner(x: Matrix, y: Matrix) -> Tensor:
    """<x_i, y_i> for each sample, [B] in float64."""
    if _by_terms(x, y):
        return _inner_by_terms(x, y)
    result = _zeros(x)
    for samples, low, high in pieces(x):
        result[samples] += (block(x, samples, low, high) * block(y, samples, low, high)).sum((1, 2))
    return result


def squared_norms(matrices: Sequence[Matrix], *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """|row_i|^2 of each matrix as computed, and numbers that are not below the true ones; [B, matrices] in float64.

    `rounded`: the bound is to hold also for the rows whose factors g were multiplied by coefficients and rounded.
    """
    if not matrices:
        return torch.zeros(0, 0), torch.zeros(0, 0)
    kinds: dict[_Kind, list[int]] = {}
    for i, m in enumerate(matrices):
        kinds.setdefault(_kind(m), []).append(i)
    found = [kind([matrices[i] for i in places], rounded) for kind, places in kinds.items()]
    if len(found) == 1:
        return found[0]
    order = torch.tensor([i for places in kinds.values() for i in places], device=found[0][0].device).argsort()
    squares, uppers = (torch.cat(columns, dim=1)[:, order] for columns in zip(*found, strict=True))
    return squares, uppers


_Kind = Callable[[list[Matrix], bool], tuple[Tensor, Tensor]]  # squares and uppers [B, matrices], all together


def _kind(m: Matrix) -> _Kind:
    """How the norms of a matrix's rows are taken."""
    if m.outer is None and m.rows is None:
        return _of_stored if m.dense is None or m.dense.squares is None else _of_known
    if m.outer is not None and m.length == 1 and len(m.terms) == 1:
        return _of_single
    return _of_short if _is_short_outer(m) else _of_others


def _of_stored(matrices: list[Matrix], rounded: bool) -> tuple[Tensor, Tensor]:
    """Rows that are there."""
    squares = torch.ops.dpkernels.row_squares([m.dense.values for m in matrices if m.dense is not None])
    return squares, _upper_of_stored(matrices, squares)


def _of_known(matrices: list[Matrix], rounded: bool) -> tuple[Tensor, Tensor]:
    """Rows that are there, whose norm was taken when they were formed."""
    known = [m.dense.squares for m in matrices if m.dense is not None]
    squares = torch.stack([s for s in known if s is not None], dim=1)
    return squares, _upper_of_stored(matrices, squares)


def _upper_of_stored(matrices: list[Matrix], squares: Tensor) -> Tensor:
    margins = [1 + (m.height * m.width + 64) * UNIT for m in matrices]
    return squares * squares.new_tensor(margins) + TINY**2


def _of_others(matrices: list[Matrix], rounded: bool) -> tuple[Tensor, Tensor]:
    """One after the other."""
    squares, uppers = zip(*(_squared_norm(m, rounded) for m in matrices), strict=True)
    return torch.stack(squares, dim=1), torch.stack(uppers, dim=1)


def _of_single(matrices: list[Matrix], rounded: bool) -> tuple[Tensor, Tensor]:
    """Rows of one addend, |g a^T| = |g| |a|, where nothing can cancel."""
    outers = [m.outer for m in matrices if m.outer is not None]
    found = torch.ops.dpkernels.row_squares([outer.a for outer in outers] + [outer.g for outer in outers])
    a, g = found.split(len(outers), dim=1)
    margins = [1 + (m.height + m.width + 64) * UNIT for m in matrices]
    if rounded:
        margins = [margin * (1 + 4.1 * _unit(m)) for margin, m in zip(margins, matrices, strict=True)]
    lost = a.new_tensor([m.height + m.width for m in matrices]) * UNDERFLOW  # of squares, in float64
    return a * g, (a + lost) * (g + lost) * a.new_tensor(margins) + TINY**2


def _is_short_outer(m: Matrix) -> bool:
    if m.outer is None or len(m.terms) > 1 or m.outer.g.dtype == torch.float64:
        return False
    return _by_terms(m, m)


def _of_short(matrices: list[Matrix], rounded: bool) -> tuple[Tensor, Tensor]:
    """Rows of few addends, by their Gram matrices: the margins of all together."""
    found = [
        torch.ops.dpkernels.outer_gram(*forming.for_kernels(m.outer.a, m.outer.g))
        for m in matrices
        if m.outer is not None
    ]
    squares, raw = (torch.stack(columns, dim=1) for columns in zip(*found, strict=True))
    sizes_ = raw * raw.new_tensor([_size_margin(m) for m in matrices]) + TINY
    margins = raw.new_tensor([_gram_margin(m) for m in matrices]) * sizes_.square() + TINY**2
    uppers = squares.clamp(min=0) + margins
    poor = (margins > GRAM_MARGIN * squares) & (sizes_ > 2 * TINY)
    for i in poor.any(0).nonzero().squeeze(1).tolist():
        squares[:, i], uppers[:, i] = _redone(matrices[i], squares[:, i], uppers[:, i], sizes_[:, i], poor[:, i])
    if rounded:
        uppers = (uppers.sqrt() + 2 * raw.new_tensor([_unit(m) for m in matrices]) * sizes_).square()
    return squares, uppers * (1 + 8 * UNIT)


def _row_squares(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.ops.dpkernels.row_squares(tensors).unbind(1) if tensors else ()


def sizes(m: Matrix) -> Tensor:
    """N_i, rounded up, in float64."""
    size = _zeros(m)
    for t in m.terms:
        if isinstance(t, Dense):
            size += (_row_squares([t.values])[0] if t.squares is None else t.squares).sqrt()
            continue
        lines = [x.flatten(0, 1) for x in ((t.a, t.g) if isinstance(t, Outer) else (t.g,))]
        lost = (m.height + m.width) * UNDERFLOW
        norms = [(found + lost).sqrt().view(m.batch, m.length_of(t)) for found in _row_squares(lines)]
        size += (norms[0] * norms[1] if isinstance(t, Outer) else norms[0]).sum(1)
    return size * _size_margin(m) + TINY


def _size_margin(m: Matrix) -> float:
    """What makes a computed N_i larger than the true one."""
    return 1 + (m.height * m.width + m.length + 64) * UNIT


def _gram_margin(m: Matrix) -> float:
    """How far inner products of addends may be off, in units of N_i^2."""
    return (m.height + m.width + m.length**2 + 64) * UNIT


def _squared_norm(m: Matrix, rounded: bool) -> tuple[Tensor, Tensor]:
    size = sizes(m)
    if m.outer is None and m.dense is None and m.rows is not None and m.rows.g.dtype == torch.float32:
        square = torch.ops.dpkernels.lookup_squares(m.rows.ids, m.rows.g)
        upper = _upper_of_formed(m, square, size)
    elif _by_terms(m, m):
        square, upper = _by_gram(m, size)
    else:
        square, upper = _by_tiles(m, size)
    if rounded:
        upper = (upper.sqrt() + 2 * _unit(m) * size).square()
    return square, upper * (1 + 8 * UNIT)


def _unit(m: Matrix) -> float:
    """Of the type that g is multiplied and rounded in."""
    return max(sums.rounding(t.g) for t in m.terms if not isinstance(t, Dense))


def _by_gram(m: Matrix, size: Tensor) -> tuple[Tensor, Tensor]:
    square = _inner_by_terms(m, m)
    margin = _gram_margin(m) * size.square() + TINY**2
    upper = square.clamp(min=0) + margin
    return _redone(m, square, upper, size, margin > GRAM_MARGIN * square)


def _by_tiles(m: Matrix, size: Tensor) -> tuple[Tensor, Tensor]:
    if len(m.terms) > 1 or m.outer is None or not forming.is_native(m.outer.g):
        square = _formed_squares(m)
        return square, _upper_of_formed(m, square, size)
    square = torch.ops.dpkernels.outer_squares(*forming.for_kernels(m.outer.a, m.outer.g))
    additions = min(m.length, 256) + m.length // 256 + 3
    margin = additions * FLOAT_UNIT * size + m.height * m.width * m.length * 2.0**-149
    upper = (square.sqrt() * (1 + (m.height * m.width + 64) * UNIT) + margin).square()
    return _redone(m, square, upper, size, margin > TILE_MARGIN * square.sqrt())


def _redone(m: Matrix, square: Tensor, upper: Tensor, size: Tensor, poor: Tensor) -> tuple[Tensor, Tensor]:
    """Norms whose bound is poor, from the rows themselves."""
    redo = (poor & (size > 2 * TINY)).nonzero().squeeze(1)
    if len(redo):
        chosen = take(m, redo)
        square[redo] = _formed_squares(chosen)
        upper[redo] = _upper_of_formed(chosen, square[redo], size[redo])
    return square, upper


def _formed_squares(m: Matrix) -> Tensor:
    square = _zeros(m)
    for samples, low, high in pieces(m):
        square[samples] += block(m, samples, low, high).square().sum((1, 2))
    return square


def _upper_of_formed(m: Matrix, square: Tensor, size: Tensor) -> Tensor:
    norm = square.sqrt() * (1 + (m.height * m.width + 64) * UNIT)
    return (norm + (m.length + 2) * UNIT * size).square() * (1 + 8 * UNIT) + TINY**2


def _by_terms(x: Matrix, y: Matrix) -> bool:
    """Whether inner products of addends cost less than forming the rows."""
    if x.outer is None and y.outer is None:
        return x.rows is not None or y.rows is not None  # one line per id, never height lines
    return planner.gram_or_tile(x.length, y.length, x.height, x.width) is planner.Way.GRAM


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
            result[samples] = (s.of(samples).double() * t.of(samples).double()).sum((1, 2))
        return result
    if isinstance(s, Outer) and isinstance(t, Rows):
        return _outer_rows(m, s, t)
    if isinstance(s, Outer) and isinstance(t, Dense):
        result = _zeros(m)
        for samples in chunks(m.batch, max(m.height * m.width, s.g.shape[1] * max(m.height, m.width))):
            lines = s.g[samples].double() @ t.of(samples).double()
            result[samples] = (lines * s.a[samples].double()).sum((1, 2))
        return result
    if isinstance(s, Rows) and isinstance(t, Dense):
        result = _zeros(m)
        for samples in chunks(m.batch, s.g.shape[1] * m.width):
            index = s.ids[samples].unsqueeze(2).expand(-1, -1, m.width)
            result[samples] = (t.of(samples).gather(1, index).double() * s.g[samples].double()).sum((1, 2))
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
        step = max(1, factors.PIECE // max(1, long * a_.shape[0]))
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
        step = max(1, factors.PIECE // max(1, t.ids.shape[1] * lines.shape[0]))
        for first in range(0, s.g.shape[1], step):
            g = s.g[samples][:, first : first + step]
            index = t.ids[samples].unsqueeze(1).expand(-1, g.shape[1], -1)
            products = s.a[samples][:, first : first + step].double() @ lines
            result[samples] += (g.gather(2, index).double() * products).sum((1, 2))
    return result


def _zeros(m: Matrix) -> Tensor:
    first = m.terms[0]
    like = first.of(slice(0, 0)) if isinstance(first, Dense) else first.g
    return like.new_zeros(m.batch, dtype=torch.float64)
