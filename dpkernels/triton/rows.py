"""Rows formed in Triton: of outer products, and of convolutions, whose patches are read in place.

    row_b[i, j] = sum_t g_b[t, i] a_b[t, j]          a [B, T, p] and g [B, T, d]; or, of a convolution,
    a_b[t, j] = x_b[channel of j, place of t * stride + tap of j * dilation - padding], zero outside of the image

Addends go into float32 accumulators, 256 of them and then by 256s, as `dpkernels.inner` counts their errors; float32 is
multiplied as it is, never rounded to TF32 first. Half types are widened when loaded; only rows that are stored, and so
are what they are stored as, multiply bfloat16 and float16 on tensor cores (WIDE off).

`form` has one tile of one sample's row to a program: it stores it, or adds it to what is there, or drops it, and in any
case writes its norm^2 in float64; those of a sample are added in order. `clamp` has one tile of the sum over a run of
samples: each sample's tile is formed, clamped and added in float64, never stored. Limiter: float32 arithmetic (CUDA
cores), of stored rows bandwidth; for convolutions, the index arithmetic of patches beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpkernels.reference_layers import selected
from dpkernels.triton import configurations
from dpkernels.triton.configurations import Tile

CHUNK = tl.constexpr(256)
DROP, STORE, ADD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def patch(x, t, j, inside, group, geometry, CONV: tl.constexpr):
    """a[t, j] of the sample at x: of a matrix with strides, or of a convolution's patches."""
    if CONV:
        (channels, in0, in1, in2, out1, out2, k0, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2) = geometry
        taps = k0 * k1 * k2
        channel, tap = j // taps, j % taps
        z = (t // (out1 * out2)) * s0 + (tap // (k1 * k2)) * d0 - p0
        y = (t // out2 % out1) * s1 + (tap // k2 % k1) * d1 - p1
        w = (t % out2) * s2 + (tap % k2) * d2 - p2
        inside = inside & (z >= 0) & (z < in0) & (y >= 0) & (y < in1) & (w >= 0) & (w < in2)
        at = (((group * channels + channel) * in0 + z) * in1 + y) * in2 + w
    else:
        (stride_t, stride_j) = geometry
        at = t * stride_t + j * stride_j
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def row_tile(
    x, g, sample, group, length, height, width, rows, columns, x_b, g_b, g_t, g_i, geometry,
    CONV: tl.constexpr, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of one sample's row, in float32."""
    x, g = x + sample * x_b, g + sample * g_b  # from here on, 32 bits: `is_small` saw to it
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for chunk in range(0, length, CHUNK):
        part = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for first in range(chunk, tl.minimum(chunk + CHUNK, length), DEPTH):
            t = first + tl.arange(0, DEPTH)
            at = (group * height + rows)[:, None] * g_i + t[None, :] * g_t
            left = tl.load(g + at, mask=(rows[:, None] < height) & (t[None, :] < length), other=0.0)
            inside = (t[:, None] < length) & (columns[None, :] < width)
            right = patch(x, t[:, None], columns[None, :], inside, group, geometry, CONV)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            part = tl.dot(left, right, part, input_precision="ieee")
        total += part
    return total


@triton.jit
def form(
    x, g, out, squares, scale, length, height, width, groups, x_b, g_b, g_t, g_i, geometry,
    MODE: tl.constexpr, CONV: tl.constexpr, WIDE: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's row in one group of channels; out [B, groups, height, width]."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, WIDTH)
    tiles = tl.cdiv(height, HEIGHT) * across
    sample, rest = program // (groups * tiles), (program % (groups * tiles)).to(tl.int32)
    group, tile = rest // tiles, rest % tiles
    rows = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    columns = tile % across * WIDTH + tl.arange(0, WIDTH)
    found = row_tile(
        x, g, sample, group, length, height, width, rows, columns, x_b, g_b, g_t, g_i, geometry,
        CONV, WIDE, HEIGHT, WIDTH, DEPTH,
    )  # fmt: skip
    if MODE != DROP:
        inside = (rows[:, None] < height) & (columns[None, :] < width)
        to = out + (sample * groups + group) * height * width + rows.to(tl.int64)[:, None] * width + columns[None, :]
        if MODE == ADD:
            found = tl.load(to, mask=inside, other=0.0) + scale * found
        tl.store(to, found, mask=inside)
    if MODE != ADD:
        wide = found.to(tl.float64)
        tl.store(squares + program, tl.sum(tl.sum(wide * wide, 1), 0))


@triton.jit
def clamp(
    x, g, sums, bound, each, length, height, width, groups, x_b, g_b, g_t, g_i, geometry,
    CONV: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of the sum over one run of `each` samples; sums [runs, groups, height, width] in float64."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, WIDTH)
    tiles = tl.cdiv(height, HEIGHT) * across
    run, rest = program // (groups * tiles), (program % (groups * tiles)).to(tl.int32)
    group, tile = rest // tiles, rest % tiles
    rows = tile // across * HEIGHT + tl.arange(0, HEIGHT)
    columns = tile % across * WIDTH + tl.arange(0, WIDTH)
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    to = sums + (run * groups + group) * height * width + rows.to(tl.int64)[:, None] * width + columns[None, :]
    total = tl.load(to, mask=inside, other=0.0)
    limit = tl.load(bound)
    for i in range(0, each):
        found = row_tile(
            x, g, run * each + i, group, length, height, width, rows, columns, x_b, g_b, g_t, g_i, geometry,
            CONV, True, HEIGHT, WIDTH, DEPTH,
        ).to(tl.float64)  # fmt: skip
        found = tl.where(found < limit, found, limit)  # also what is no number
        total += tl.where(found > -limit, found, -limit)
    tl.store(to, total, mask=inside)


@dataclass(frozen=True)
class Problem:
    """Factors of rows, and where they are: x and g of a batch, `height` outputs by `width` inputs in each group."""

    x: Tensor
    g: Tensor
    groups: int
    length: int
    height: int
    width: int
    g_strides: tuple[int, int]  # from addend to addend, from output to output
    geometry: tuple[int, ...]
    conv: bool

    @classmethod
    def of_outer(cls, a: Tensor, g: Tensor) -> Problem:
        """Rows g^T a."""
        strides = (a.stride(1), a.stride(2))
        return cls(a, g, 1, a.shape[1], g.shape[2], a.shape[2], (g.stride(1), g.stride(2)), strides, False)

    @classmethod
    def of_convolution(
        cls,
        x: Tensor,
        g: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Problem:
        """Weight gradients; missing dimensions of space come first, of size one."""

        def three(values: Sequence[int], missing: int) -> tuple[int, ...]:
            return (*[missing] * (3 - len(values)), *values)

        x, g = x.contiguous(), g.contiguous()
        channels, places = x.shape[1] // groups, math.prod(g.shape[2:])
        sizes = (*three(x.shape[2:], 1), *three(g.shape[2:], 1)[1:], *three(kernel, 1))
        geometry = (channels, *sizes, *three(stride, 1), *three(padding, 0), *three(dilation, 1))
        width = channels * math.prod(kernel)
        return cls(x, g, groups, places, g.shape[1] // groups, width, (1, places), geometry, True)

    def arguments(self) -> tuple[Any, ...]:
        """Sizes, strides and geometry, as both kernels take them."""
        sizes = (self.length, self.height, self.width, self.groups)
        return (*sizes, self.x.stride(0), self.g.stride(0), *self.g_strides, self.geometry)

    def tiles(self, tile: Tile) -> int:
        """Of one sample."""
        return self.groups * -(-self.height // tile.height) * -(-self.width // tile.width)


def options(tile: Tile) -> dict[str, Any]:
    """Of a launch, besides what a kernel takes."""
    return {"HEIGHT": tile.height, "WIDTH": tile.width, "DEPTH": tile.depth, **tile.options()}


def _form(mode: int, out: Tensor, problem: Problem, scale: float = 1.0) -> Tensor:
    tile = configurations.tile(configurations.ROWS, problem.height, problem.width)
    squares = torch.zeros(len(problem.x), problem.tiles(tile), dtype=torch.float64, device=out.device)
    if squares.numel():
        exact = mode != STORE.value or problem.x.dtype == torch.float32 or not problem.x.is_cuda
        form[(squares.numel(),)](
            problem.x, problem.g, out, squares, scale, *problem.arguments(),
            MODE=mode, CONV=problem.conv, WIDE=exact, **options(tile),
        )  # fmt: skip
    return squares.sum(1)


def _clamp(sums: Tensor, problem: Problem, bound: float) -> None:
    tile = configurations.tile(configurations.CLAMP, problem.height, problem.width)
    programs = len(sums) * problem.tiles(tile)
    if programs and len(problem.x):
        each = len(problem.x) // len(sums)
        limit = sums.new_full((1,), bound)  # in memory, in float64: a number that is given would be rounded to float32
        clamp[(programs,)](
            problem.x, problem.g, sums, limit, each, *problem.arguments(), CONV=problem.conv, **options(tile)
        )  # fmt: skip


def outer_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_layers.outer_rows`; of half types, rows in float32."""
    rows = torch.empty(len(a), g.shape[2], a.shape[2], dtype=torch.float32, device=a.device)
    return rows, _form(STORE.value, rows, Problem.of_outer(a, g))


def outer_squares(a: Tensor, g: Tensor) -> Tensor:
    """As `reference_layers.outer_squares`."""
    return _form(DROP.value, a, Problem.of_outer(a, g))


def outer_rows_(rows: Tensor, a: Tensor, g: Tensor, scale: float) -> None:
    """As `reference_layers.outer_rows_`."""
    own = rows.contiguous()
    _form(ADD.value, own, Problem.of_outer(a, g), scale)
    if own is not rows:
        rows.copy_(own)


def conv_rows(x: Tensor, g: Tensor, kernel: Sequence[int], *geometry: Any) -> tuple[Tensor, Tensor]:
    """As `reference_layers.conv_rows`."""
    problem = Problem.of_convolution(x, g, kernel, *geometry)
    shape = (len(x), g.shape[1], x.shape[1] // problem.groups, *kernel)
    rows = torch.empty(shape, dtype=torch.float32, device=x.device)
    return rows, _form(STORE.value, rows, problem)


def conv_rows_(rows: Tensor, x: Tensor, g: Tensor, scale: float, *geometry: Any) -> None:
    """As `reference_layers.conv_rows_`."""
    own = rows.contiguous()
    _form(ADD.value, own, Problem.of_convolution(x, g, rows.shape[3:], *geometry), scale)
    if own is not rows:
        rows.copy_(own)


def outer_clamp_sum_(sums: Tensor, a: Tensor, g: Tensor, live: Tensor | None, bound: float) -> None:
    """As `reference_layers.outer_clamp_sum_`."""
    _clamp_into(sums, Problem.of_outer(selected(a, live), selected(g, live)), bound)


def conv_clamp_sum_(sums: Tensor, x: Tensor, g: Tensor, bound: float, *geometry: Any) -> None:
    """As `reference_layers.conv_clamp_sum_`."""
    _clamp_into(sums, Problem.of_convolution(x, g, sums.shape[3:], *geometry), bound)


def _clamp_into(sums: Tensor, problem: Problem, bound: float) -> None:
    own = sums.contiguous()
    _clamp(own, problem, bound)
    if own is not sums:
        sums.copy_(own)
