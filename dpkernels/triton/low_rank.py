"""low_rank_: what a sample's own low-rank change of the weights adds to the outputs of a linear layer, in Triton.

    y_b[t, i] += sum_s (sum_j x_b[t, j] a_b[s, j]) g_b[s, i]          y [B, T, d], x [B, T, p], a [B, S, p], g [B, S, d]

A program has one sample and a tile of outputs; the inner products of x and a are formed again for each tile, from the
cache, and stay in registers. float32, not rounded to TF32. For the few lines (T up to 16) that `forming.low_rank` sends
here; more are two products of matrices, which the library has. Limiter: reading a and g.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dpkernels import reference_layers
from dpkernels.triton import configurations


@triton.jit
def low_rank(
    y, x, a, g, length, rank, height, width, tiles, y_b, y_t, y_i, x_b, x_t, x_j, a_b, a_s, a_j, g_b, g_s, g_i,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of HEIGHT lines by WIDTH outputs of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample, tile = program // tiles, (program % tiles).to(tl.int32)
    y, x, a, g = y + sample * y_b, x + sample * x_b, a + sample * a_b, g + sample * g_b  # from here on, 32 bits
    lines, outputs = tl.arange(0, HEIGHT), tile * WIDTH + tl.arange(0, WIDTH)
    inside = (lines[:, None] < length) & (outputs[None, :] < height)
    to = y + lines[:, None] * y_t + outputs[None, :] * y_i
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in range(0, rank, DEPTH):
        s = first + tl.arange(0, DEPTH)
        part = tl.zeros([HEIGHT, DEPTH], tl.float32)
        for k in range(0, width, DEPTH):
            j = k + tl.arange(0, DEPTH)
            left = tl.load(
                x + lines[:, None] * x_t + j[None, :] * x_j,
                mask=(lines[:, None] < length) & (j[None, :] < width),
                other=0.0,
            )
            right = tl.load(
                a + s[None, :] * a_s + j[:, None] * a_j,
                mask=(s[None, :] < rank) & (j[:, None] < width),
                other=0.0,
            )
            part = tl.dot(left.to(tl.float32), right.to(tl.float32), part, input_precision="ieee")
        right = tl.load(
            g + s[:, None] * g_s + outputs[None, :] * g_i,
            mask=(s[:, None] < rank) & (outputs[None, :] < height),
            other=0.0,
        )
        total = tl.dot(part, right.to(tl.float32), total, input_precision="ieee")
    tl.store(to, tl.load(to, mask=inside, other=0.0) + total, mask=inside)


def low_rank_(y: Tensor, x: Tensor, a: Tensor, g: Tensor) -> None:
    """As `reference_layers.low_rank_`."""
    tile = configurations.LOW_RANK
    if y.shape[1] > tile.height:
        reference_layers.low_rank_(y, x, a, g)
    elif y.numel():
        tiles = triton.cdiv(y.shape[2], tile.width)
        sizes = (y.shape[1], a.shape[1], y.shape[2], x.shape[2], tiles)
        low_rank[(len(y) * tiles,)](
            y, x, a, g, *sizes, *y.stride(), *x.stride(), *a.stride(), *g.stride(),
            HEIGHT=tile.height, WIDTH=tile.width, DEPTH=tile.depth, **tile.options(),
        )  # fmt: skip
