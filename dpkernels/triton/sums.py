"""outer_sum: the weighted sum of outer rows as one product of matrices, in Triton.

    sum[i, j] = sum_b weight_b sum_t g_b[t, i] a_b[t, j]            a [B, T, p], g [B, T, d], weights [B] in float32

g is multiplied by its sample's weight as it is loaded, rounded to float32 and never further: float32 is not multiplied
in TF32. bfloat16 goes to tensor cores all the same (SPLIT): weight * g is written as the sum of two bfloat16, right to
2^-17 of it if conversions round and 2^-15 if they truncate, and multiplied twice (WIDE: in float32, for the
interpreter, which has no products of bfloat16); `sums.rounding` tells the clip rule so. Accumulators are float32. The
addends of all samples are cut into pieces, so that small layers fill a GPU; the pieces are added in order. Noise comes
after, in one launch for all parameters: fused in here, where tiles lie across the generator's groups of 64 elements,
it would be drawn four times over to save 8 bytes an element (bench/roofline.py). Limiter: float32 arithmetic, or
tensor cores for bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.triton import configurations
from dpkernels.triton.rows import options

PIECE = 2048  # addends to a program, at least
ENOUGH = 1024  # programs, to fill a GPU


@triton.jit
def weighted(
    a, g, weights, out, addends, length, height, width, piece, a_b, a_t, a_j, g_b, g_t, g_i,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one piece's sum; out [pieces, height, width]."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, WIDTH)
    tiles = tl.cdiv(height, HEIGHT) * across
    part, tile = program // tiles, (program % tiles).to(tl.int32)
    rows = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    columns = tile % across * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    start = part * piece
    a_start = start // length * a_b + start % length * a_t
    g_start = start // length * g_b + start % length * g_t
    a, g = a + a_start, g + g_start
    last = tl.minimum(start + piece, addends)
    for first in range(start, last, DEPTH):
        addend = first + tl.arange(0, DEPTH)
        sample, t = addend // length, addend % length
        there = addend < last
        weight = tl.load(weights + sample, mask=there, other=0.0)
        a_at, g_at = sample * a_b + t * a_t - a_start, sample * g_b + t * g_t - g_start
        left = tl.load(
            g + rows[:, None] * g_i + g_at[None, :],
            mask=(rows[:, None] < height) & there[None, :],
            other=0.0,
        )
        right = tl.load(
            a + a_at[:, None] + columns[None, :] * a_j,
            mask=there[:, None] & (columns[None, :] < width),
            other=0.0,
        )
        scaled = left.to(tl.float32) * weight[None, :]
        if SPLIT:
            high = scaled.to(tl.bfloat16)
            low = (scaled - high.to(tl.float32)).to(tl.bfloat16)
            if WIDE:
                high, low, right = high.to(tl.float32), low.to(tl.float32), right.to(tl.float32)
            total = tl.dot(low, right, total, input_precision="ieee")
            total = tl.dot(high, right, total, input_precision="ieee")
        else:
            total = tl.dot(scaled, right.to(tl.float32), total, input_precision="ieee")
    to = out + part * height * width + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, total, mask=(rows[:, None] < height) & (columns[None, :] < width))


def outer_sum(a: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    """As `reference_layers.outer_sum`."""
    samples, length = a.shape[:2]
    height, width = g.shape[2], a.shape[2]
    weights = weights.contiguous()
    tile = configurations.tile(configurations.SUMS, height, width)
    tiles = triton.cdiv(height, tile.height) * triton.cdiv(width, tile.width)
    pieces = min(triton.cdiv(samples * length, PIECE), max(1, ENOUGH // max(tiles, 1)))
    if pieces == 0 or height * width == 0:
        return torch.zeros(height, width, dtype=torch.float32, device=a.device)
    out = torch.empty(pieces, height, width, dtype=torch.float32, device=a.device)
    split = a.dtype == g.dtype == torch.bfloat16
    sizes = (samples * length, length, height, width, triton.cdiv(samples * length, pieces))
    weighted[(pieces * tiles,)](
        a, g, weights, out, *sizes, *a.stride(), *g.stride(), SPLIT=split, WIDE=not a.is_cuda, **options(tile)
    )  # fmt: skip
    return out[0] if pieces == 1 else out.sum(0)
