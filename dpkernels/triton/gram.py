"""outer_gram: norms of rows from inner products of their addends, in Triton.

    squares_b = sum_(t, s) <a_bt, a_bs> <g_bt, g_bs>,   sizes_b = sum_t |a_bt| |g_bt|,   a [B, T, p], g [B, T, d]

Products and sums in float64, where a product of two float32 is exact: the margins of `dpkernels.inner` are made for
that, and A100, H100 and MI300 multiply matrices in float64 as fast as in float32. A program has one tile of T by T, at
or below the diagonal; what is above is the same by symmetry. Both products stay in registers; one number for each tile
goes to memory, and they are added in order. Limiter: float64 tensor cores, T^2 (p + d) operations a sample.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.triton import configurations


@triton.jit
def products(
    x, sample, length, width, stride_b, stride_t, stride_k, rows, columns, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    """The inner products of two tiles of lines, [SIDE, SIDE]."""
    total = tl.zeros([SIDE, SIDE], tl.float64)
    lines = x + sample * stride_b
    for k in range(0, width, DEPTH):
        at = k + tl.arange(0, DEPTH)
        inside = at[None, :] < width
        left = tl.load(
            lines + rows[:, None] * stride_t + at[None, :] * stride_k, mask=(rows[:, None] < length) & inside, other=0.0
        )
        right = tl.load(
            lines + columns[:, None] * stride_t + at[None, :] * stride_k,
            mask=(columns[:, None] < length) & inside,
            other=0.0,
        )
        wide = tl.trans(right.to(tl.float32).to(tl.float64))
        total = tl.dot(left.to(tl.float32).to(tl.float64), wide, total, out_dtype=tl.float64)
    return total


@triton.jit
def gram(
    a, g, out, length, width, height, tiles, a_b, a_t, a_k, g_b, g_t, g_k, SIDE: tl.constexpr, DEPTH: tl.constexpr
):
    """One tile of one sample: its part of squares and of sizes."""
    program = tl.program_id(0).to(tl.int64)
    sample, tile = program // (tiles * tiles), (program % (tiles * tiles)).to(tl.int32)
    row, column = tile // tiles, tile % tiles
    if column > row:
        tl.store(out + 2 * program, 0.0)
        tl.store(out + 2 * program + 1, 0.0)
    else:
        rows, columns = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
        of_a = products(a, sample, length, width, a_b, a_t, a_k, rows, columns, SIDE, DEPTH)
        of_g = products(g, sample, length, height, g_b, g_t, g_k, rows, columns, SIDE, DEPTH)
        twice = tl.where(row == column, 1.0, 2.0).to(tl.float64)
        tl.store(out + 2 * program, tl.sum(tl.sum(of_a * of_g, 1), 0) * twice)
        on_diagonal = rows[:, None] == columns[None, :]
        sizes = tl.sqrt(tl.where(on_diagonal, of_a, 0.0)) * tl.sqrt(tl.where(on_diagonal, of_g, 0.0))
        tl.store(out + 2 * program + 1, tl.sum(tl.sum(sizes, 1), 0))


def outer_gram(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_layers.outer_gram`."""
    batch, length = a.shape[:2]
    chosen = configurations.tile(configurations.GRAM, length, length)
    tiles = triton.cdiv(length, chosen.height)
    out = torch.zeros(batch, tiles * tiles, 2, dtype=torch.float64, device=a.device)
    if out.numel():
        sizes = (length, a.shape[2], g.shape[2], tiles)
        gram[(batch * tiles * tiles,)](
            a, g, out, *sizes, *a.stride(), *g.stride(), SIDE=chosen.height, DEPTH=chosen.depth, **chosen.options()
        )
    squares, sums = out.sum(1).unbind(1)
    return squares, sums
