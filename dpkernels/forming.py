"""Rows that are formed: each sample's own gradient of a weight; and layers with each sample's own weights.

float32 runs in the ops of `dpkernels.ops`, float64 in the reference; half types are widened, unless a GPU takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkernels import gpu, ops, reference_layers
from dpkernels.factors import Dense, at_least_float

FEW = 4  # lines of a sample, below which factors are read at the speed of memory


def outer_rows(a: Tensor, g: Tensor) -> Dense:
    """sum_t g_t a_t^T as stored rows."""
    a, g = for_kernels(a, g)
    return Dense(*_op("outer_rows", a)(a, g))


def is_native(x: Tensor) -> bool:
    """Whether rows of such factors are formed by native code: with the same bits each time, added as it says."""
    native = ops.native is not None if x.device.type == "cpu" else gpu.has_tiles(x.device)
    return x.dtype != torch.float64 and native


def for_kernels(*factors: Tensor) -> tuple[Tensor, ...]:
    """Half types widened to float32, unless kernels take them as they are."""
    return factors if gpu.takes(*factors) else tuple(at_least_float(t) for t in factors)


def conv_rows(x: Tensor, g: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    """The weight gradient of each image on its own, and its norm^2; arguments as of `reference_layers.conv_rows`."""
    x, g = for_kernels(x, g)
    return _op("conv_rows", x)(x, g, *geometry)  # type: ignore[no-any-return]


def add_outer_rows(rows: Tensor, a: Tensor, g: Tensor, scale: float) -> None:
    """rows [B, height, width] += scale * sum_t g_t a_t^T."""
    _op("outer_rows_", rows)(rows, a.to(rows.dtype), g.to(rows.dtype), scale)


def add_conv_rows(rows: Tensor, x: Tensor, g: Tensor, scale: float, *geometry: Any) -> None:
    """rows [N, O, C / groups, *kernel] += scale * the weight gradient of each image."""
    _op("conv_rows_", rows)(rows, x.to(rows.dtype), g.to(rows.dtype), scale, *geometry)


def add_outer_clamped(sums: Tensor, a: Tensor, g: Tensor, live: Tensor | None, bound: float) -> None:
    """sums [N, height, width] += those over N equal runs of samples of rows sum_t g_t a_t^T, clamped; of live ones."""
    a, g = for_kernels(a, g)
    _op("outer_clamp_sum_", a)(sums, a, g, live, bound)


def add_conv_clamped(sums: Tensor, x: Tensor, g: Tensor, bound: float, *geometry: Any) -> None:
    """sums [N, O, C / groups, *kernel] += those over N equal runs of images of their weight gradients, clamped."""
    x, g = for_kernels(x, g)
    _op("conv_clamp_sum_", x)(sums, x, g, bound, *geometry)


def conv_each(x: Tensor, w: Tensor, size: Any, *geometry: Any) -> Tensor:
    """The convolution of each image with weights of its own, w [N, O, C / groups, *kernel]; `size` of the output."""
    return _op("conv_each", x)(x, w.to(x.dtype), size, *geometry)  # type: ignore[no-any-return]


def conv_each_input(g: Tensor, w: Tensor, size: Any, *geometry: Any) -> Tensor:
    """Its gradient with respect to the images, of `size`."""
    return _op("conv_each_input", g)(g, w.to(g.dtype), size, *geometry)  # type: ignore[no-any-return]


def linear_runs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x w^T of each run of lines, and whether lines are finite; see `reference_layers.linear_runs`."""
    return _op("linear_runs", x)(x, w.to(x.dtype))  # type: ignore[no-any-return]


def low_rank(y: Tensor, x: Tensor, a: Tensor, g: Tensor) -> Tensor:
    """y + (x a^T) g for each sample, in the memory of y; x [B, T, p], a [B, S, p], g [B, S, d]."""
    if y.dtype != a.dtype:  # half types: the correction in float32
        return y + ((x.to(a.dtype) @ a.transpose(1, 2)) @ g).to(y.dtype)
    if x.shape[1] > FEW or not y.is_contiguous():  # then it is two products of matrices
        reference_layers.low_rank_(y, x, a, g)
    else:
        _op("low_rank_", y)(y, x, a, g)
    return y


def copies(shared: Tensor, batch: int) -> Tensor:
    """A copy of a parameter for each sample."""
    return _op("copies", shared)(shared, batch)  # type: ignore[no-any-return]


def unfilled(like: Tensor, *size: int) -> Tensor:
    """Memory of this type that is kept for later steps, with anything in it."""
    return _op("unfilled", like)(like, size)  # type: ignore[no-any-return]


def _op(name: str, like: Tensor) -> Any:
    is_half = like.dtype in (torch.float16, torch.bfloat16)
    with_kernel = like.dtype == torch.float32 or (is_half and gpu.has_tiles(like.device))
    return getattr(torch.ops.dpkernels if with_kernel else reference_layers, name)
