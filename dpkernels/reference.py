"""Every op in plain torch: the truth for tests, and what runs where there is no kernel.

Functions have the ops' own signatures (see `ops.SCHEMAS`): tensor lists, bounds and noise as tensors. All
arithmetic is float64. Written to be read; a kernel may order its sums differently and so differ in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.reference_noise import MASK, add_noise, element_words


def clip_sum(
    vectors: Sequence[Tensor], max_norms: Tensor, stability: float | None, stream: Tensor | None, std: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """sum_i c_i v_i + noise; c_i = min(1, C/n_i), or C/(n_i + stability), n_i the norm of row i."""
    return _clip_rows(vectors, [_flat(v) for v in vectors], max_norms, stability, stream, std)


def clip_difference_sum(
    now: Sequence[Tensor],
    before: Sequence[Tensor],
    max_norms: Tensor,
    stability: float | None,
    stream: Tensor | None,
    std: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """clip_sum of now - before."""
    rows = [_flat(a) - _flat(b) for a, b in zip(now, before, strict=True)]
    return _clip_rows(now, rows, max_norms, stability, stream, std)


def clip_momentum_sum(
    now: Sequence[Tensor], before: Sequence[Tensor], bounds: Tensor, stream: Tensor | None, std: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """sum_i [g clip_1(a_i) + (1-g) clip_3(clip_1(a_i) - clip_1(b_i))] + noise; bounds = (C1, C3, g)."""
    gradient_norm, difference_norm, momentum = bounds.to(now[0].device)
    a, b = [_flat(t) for t in now], [_flat(t) for t in before]
    keep = _finite(a) & _finite(b)
    norms = _norms(now, a, keep)
    a, b = _select(a, keep), _select(b, keep)
    width = sum(t.shape[1] for t in a)
    ca = _shrink(_safe_norm(_squares(a).sum(1), width, len(a)), gradient_norm)
    cb = _shrink(_safe_norm(_squares(b).sum(1), width, len(b)), gradient_norm)
    difference = [ca[:, None] * x - cb[:, None] * y for x, y in zip(a, b, strict=True)]
    c3 = _shrink(_safe_norm(_squares(difference).sum(1), width, len(a)), difference_norm)
    rows = [
        (momentum * ca)[:, None] * x + ((1 - momentum) * c3)[:, None] * d for x, d in zip(a, difference, strict=True)
    ]
    return _release(now, rows, stream, std), norms


def clamp_sum(
    vectors: Sequence[Tensor], bound: Tensor, stream: Tensor | None, std: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """sum_i min(max(v_i, -bound), bound) + noise, coordinate by coordinate."""
    rows = [_flat(v) for v in vectors]
    keep = _finite(rows)
    limit = bound.to(vectors[0].device)
    clamped = [row.clamp(-limit, limit) for row in _select(rows, keep)]
    return _release(vectors, clamped, stream, std), _norms(vectors, rows, keep)


def row_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The norm^2 of each sample's row in each tensor, [B, tensors] in float64."""
    return _squares([_flat(t) for t in tensors])


def lookup_squares(ids: Tensor, g: Tensor) -> Tensor:
    """The norm^2 of each row sum_t e_(ids_t) g_t^T, [B] in float64."""
    squares = []
    for own, lines in zip(ids, g.double(), strict=True):
        places, where = own.unique(return_inverse=True)
        squares.append(lines.new_zeros(len(places), g.shape[2]).index_add(0, where, lines).square().sum())
    return torch.stack(squares) if squares else g.new_zeros(0, dtype=torch.float64)


def dense_difference(x: Tensor, y: Tensor, x_weights: Tensor | None, y_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows w_i x_i - v_i y_i of samples [B, ...], both terms rounded to their type, and the norm^2 of what is left.

    Weights are 1 unless given. A sample's term of weight zero is left out by selection.
    """

    def weighted(t: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None:
            return t
        w = weights.view(-1, *[1] * (t.dim() - 1))
        return (torch.where(w != 0, t.double(), 0.0) * w).to(t.dtype)

    rows = weighted(x, x_weights) - weighted(y, y_weights)
    return rows, rows.double().square().flatten(1).sum(1)


def weighted_sum_(
    sums: Sequence[Tensor],
    filled: Sequence[bool],
    rows: Sequence[Tensor],
    owner: Sequence[int],
    weights: Tensor,
    stream: Tensor | None,
    std: Tensor | None,
    scale: float,
) -> None:
    """sum = (what it holds, if filled, + sum_b weight_b row_b + std * z) * scale; weights [B, 1] or [B, sums].

    Samples of weight zero are left out by selection.
    """
    totals = [
        s.double() if full else torch.zeros_like(s, dtype=torch.float64) for s, full in zip(sums, filled, strict=True)
    ]
    each = weights.to(totals[0].device).expand(-1, len(sums)) if totals else weights
    for row, i in zip(rows, owner, strict=True):
        weight = each[:, i, None]
        values = torch.where(weight != 0, _flat(row), 0.0) * weight
        totals[i] = totals[i] + values.sum(0).reshape(totals[i].shape)
    for s, total in zip(sums, add_noise(totals, stream, std), strict=True):
        s.copy_(total * scale)


def add_gaussian_(tensors: Sequence[Tensor], stream: Tensor, std: Tensor) -> None:
    """x += std * z; elements are counted over the whole list."""
    for x, noised in zip(tensors, add_noise([t.double() for t in tensors], stream, std), strict=True):
        x.copy_(noised)


def add_gaussian_each_(values: Tensor, counts: Tensor, streams: Tensor, stds: Tensor) -> None:
    """`add_gaussian_` of vectors that lie behind one another, each with a stream and a std of its own."""
    for x, stream, std in zip(values.split(counts.tolist()), streams, stds, strict=True):
        add_gaussian_([x], stream, std)


def sparsify(
    vector: Tensor, keep_probability: float, seed: Tensor, stream: Tensor | None, std: Tensor | None
) -> tuple[Tensor, Tensor]:
    """indices = {j : word_j(seed) < p 2^32}; values = (vector[indices] + std * z) / p, z counted by place."""
    indices = masks(seed.reshape(1), vector.numel(), keep_probability, True)[0].to(vector.device)
    values = add_noise([vector.double()[indices]], stream, std)[0]
    return (values / keep_probability).to(wide_type(vector.dtype)), indices


def masks(seeds: Tensor, size: int, keep_probability: float, with_indices: bool) -> tuple[Tensor, Tensor]:
    """The indices that `sparsify` keeps of vectors [N, size], one seed each, counted over all; and how many of each.

    No indices where only their numbers are wanted.
    """
    streams = torch.stack([seeds, torch.zeros_like(seeds)], dim=1)
    words = [element_words(stream, MASK, size, seeds.device) for stream in streams]
    kept = torch.stack(words) < int(keep_probability * 2**32)
    return kept.flatten().nonzero().squeeze(1) if with_indices else seeds.new_empty(0), kept.sum(1)


def gather_runs_(out: Tensor, sources: Sequence[Tensor], indices: Tensor, counts: Tensor) -> None:
    """out[n, k] = sources[n][indices of run n, k], zeros behind the last of them."""
    for source, chosen, run in zip(sources, indices.split(counts.tolist()), out, strict=True):
        torch.index_select(source, 0, chosen, out=run[: len(chosen)])
        run[len(chosen) :] = 0


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Sums and messages are float64 for float64 input, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms_type(tensors: Sequence[Tensor]) -> torch.dtype:
    """Norms are as wide as the widest sum."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _clip_rows(
    like: Sequence[Tensor],
    rows: list[Tensor],
    max_norms: Tensor,
    stability: float | None,
    stream: Tensor | None,
    std: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    keep = _finite(rows)
    norms = _norms(like, rows, keep)
    rows = _select(rows, keep)
    bounds = max_norms.to(keep.device)
    squares = _squares(rows)  # [B, tensors]
    widths = [row.shape[1] for row in rows]
    if len(bounds) == 1:
        squares, widths = squares.sum(1, keepdim=True), [sum(widths)]
    norm = torch.stack([_safe_norm(n2, width, len(rows)) for n2, width in zip(squares.T, widths, strict=True)], dim=1)
    coefficient = _shrink(norm, bounds) if stability is None else bounds / (norm + stability)
    coefficient = coefficient.expand(-1, len(rows))
    clipped = [coefficient[:, i, None] * row for i, row in enumerate(rows)]
    return _release(like, clipped, stream, std), norms


def _flat(t: Tensor) -> Tensor:
    return t.double().reshape(t.shape[0], math.prod(t.shape[1:]))


def _squares(rows: list[Tensor]) -> Tensor:
    return torch.stack([(row * row).sum(1) for row in rows], dim=1)


def _select(rows: list[Tensor], keep: Tensor) -> list[Tensor]:
    """Rows that are not kept become zero, by selection: 0 * Inf would be NaN."""
    return [torch.where(keep[:, None], row, 0.0) for row in rows]


def _shrink(norm: Tensor, bound: Tensor) -> Tensor:
    clipped = norm > bound
    return torch.where(clipped, bound / torch.where(clipped, norm, 1.0), 1.0)  # no gradient of inf / norm


def _safe_norm(square: Tensor, width: int, tensors: int) -> Tensor:
    """The norm, rounded up by more than the error of its sum of squares and of underflow in it."""
    margin = (4096 + width // 2048 + tensors) * 2.0**-52
    return (square * (1 + margin) + max(width, 1) * 2.0**-1022).sqrt()


def _finite(rows: list[Tensor]) -> Tensor:
    """Which rows have a finite norm^2, [B]."""
    return _squares([row.detach() for row in rows]).isfinite().all(1)


def _norms(like: Sequence[Tensor], rows: list[Tensor], keep: Tensor) -> Tensor:
    """The norms as reported. Rows of norm 0 and rows that are not finite have no gradient."""
    raw = _squares([row.detach() for row in rows]).sum(1).sqrt()
    smooth = keep & (raw > 0)
    squares = _squares(_select(rows, smooth)).sum(1)
    return torch.where(smooth, torch.where(smooth, squares, 1.0).sqrt(), raw).to(norms_type(like))


def _release(like: Sequence[Tensor], rows: list[Tensor], stream: Tensor | None, std: Tensor | None) -> list[Tensor]:
    sums = [row.sum(0).reshape(t.shape[1:]) for t, row in zip(like, rows, strict=True)]
    return [s.to(wide_type(t.dtype)) for t, s in zip(like, add_noise(sums, stream, std), strict=True)]
