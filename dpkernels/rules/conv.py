"""Convolutions: Dense terms, each sample's own weight gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels import planner
from dpkernels.factors import Later, chunks
from dpkernels.forming import add_conv_clamped, add_conv_rows, conv_each, conv_each_input, conv_rows, is_native
from dpkernels.layouts import Layout
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import apart, named, plain, reduced, reduced_to_channels, rule, shared, tracked, values_of
from dpkernels.tape import Tape, Tracked

FEW_CHANNELS, LARGE_IMAGE = 16, 512  # places


@dataclass(frozen=True)
class _Geometry:
    kernel: list[int]
    stride: list[int]
    before: list[int]  # padding before the first element
    dilation: list[int]
    groups: int
    around: list[int]  # padding in all

    @property
    def steps(self) -> tuple[list[int], list[int], list[int], int]:
        """As the ops take it, behind sizes."""
        return self.stride, self.before, self.dilation, self.groups

    def output(self, sizes: Sequence[int]) -> list[int]:
        """Sizes of the output for those of the input."""
        parts = zip(sizes, self.kernel, self.stride, self.dilation, self.around, strict=True)
        return [(n + around - d * (k - 1) - 1) // s + 1 for n, k, s, d, around in parts]


def _conv(
    func: Any,
    dims: int,
    tape: Tape,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    if tracked(input) or not tape.holds_samples(input) or tape.holds_samples(weight) or input.dim() != dims + 2:
        return fallback(tape, func, (input, weight, bias, stride, padding, dilation, groups), {})
    layout = tape.layout(input, 1, named(func.__name__, weight, bias))
    geometry = _geometry(shared(weight).shape[2:], _hashable(stride), _hashable(padding), _hashable(dilation), groups)

    def write(x: Tensor, g: Tensor) -> None:
        if isinstance(weight, Tracked):
            _write_rows(tape, weight, x.detach().to(g.dtype), g.detach(), layout, geometry)
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced_to_channels(tape, g, layout))

    if apart(weight, bias) or _is_faster(input, shared(weight), shared(bias), geometry):
        return _conv_by_ours(tape, input, weight, bias, layout, geometry, write)

    output = func(input, plain(weight), plain(bias), stride, padding, dilation, groups)
    return tape.tap_one(output, input if tracked(weight) else None, write)


def _write_rows(tape: Tape, weight: Tracked, x: Tensor, g: Tensor, layout: Layout, geometry: _Geometry) -> None:
    shape, batch = weight._value.shape, tape.batch
    height, width, length = shape[0], shape[1:].numel(), g.shape[2:].numel()
    in_order = layout.in_order and layout.rows == 1
    if tape.walking and in_order:
        tape.add(weight, _later(x, g, batch, shape, geometry))
    elif planner.fits(batch, height, width, tape.room) or not in_order or not is_native(x):
        tape.note(weight, planner.Way.KEEP, length, height, width)
        rows, squares = conv_rows(x, g, geometry.kernel, *geometry.steps)
        if in_order:
            tape.add_dense(weight, rows, squares)
        else:
            tape.add_dense(weight, reduced(tape, rows, layout, len(shape)))
    else:
        tape.note(weight, planner.Way.TILE, length, height, width)
        x = tape.own(x)
        parts = chunks(batch, height * width)
        squares = torch.cat([conv_rows(x[s], g[s], geometry.kernel, *geometry.steps)[1] for s in parts])
        tape.add(weight, _later(x, g, batch, shape, geometry, squares))


def _later(
    x: Tensor, g: Tensor, batch: int, shape: torch.Size, geometry: _Geometry, squares: Tensor | None = None
) -> Later:
    """The weight gradients of images, formed when asked for; `shape` is the weight's, which its leaf may not have."""

    def form(samples: slice) -> Tensor:
        return conv_rows(x[samples], g[samples], geometry.kernel, *geometry.steps)[0].flatten(2)

    def add(rows: Tensor, scale: float) -> None:
        add_conv_rows(rows.view(batch, *shape), x, g, scale, *geometry.steps)

    def clamp(sums: Tensor, bound: float) -> None:
        add_conv_clamped(sums.view(-1, *shape), x, g, bound, *geometry.steps)

    def again(x: Tensor, g: Tensor) -> Later:
        return _later(x, g, batch, shape, geometry)

    return Later(form, batch, squares, add, clamp if is_native(x) else None, (x, g), again)


def _is_faster(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: _Geometry) -> bool:
    """Whether `conv_each` with one weight for all images serves and takes less time than torch's convolution.

    It does for few channels over large images, which oneDNN has to bring into an order of its own first: by a quarter
    for 16 channels of 32 x 32, on a Zen 5. By shape alone, so that two runs have the same bits. What torch would refuse
    is left to torch.
    """
    if not (is_native(x) and x.is_cpu and x.dtype == weight.dtype == torch.float32 and x.is_contiguous()):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if bias is not None and (bias.dtype, bias.shape) != (x.dtype, weight.shape[:1]):
        return False
    few = geometry.groups == 1 and max(weight.shape[:2]) <= FEW_CHANNELS and x.shape[2:].numel() >= LARGE_IMAGE
    fits = x.shape[1] == weight.shape[1] and weight.numel() > 0 and min(geometry.before) >= 0 and len(x) > 0
    dims = len(geometry.kernel)
    whole = len(geometry.before) == len(geometry.dilation) == dims and min(geometry.dilation) > 0
    return few and fits and whole and geometry.stride == [1] * dims and min(geometry.output(x.shape[2:])) > 0


def _conv_by_ours(
    tape: Tape,
    input: Tensor,
    weight: Any,
    bias: Any,
    layout: Layout,
    geometry: _Geometry,
    write: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """The convolution by our own kernels: each sample may have a weight or a bias of its own."""
    each = apart(weight, bias)
    of_runs = weight._each.of_runs if apart(weight) and layout.in_order and layout.rows == 1 else None
    values = of_runs if each else plain(weight)[None]
    values = layout.copies(values_of(tape, weight)) if values is None else values
    with torch.no_grad():
        y = conv_each(input, values, geometry.output(input.shape[2:]), *geometry.steps)
        if bias is not None:
            added = layout.copies(values_of(tape, bias)) if each else plain(bias)[None]
            y += added.view(*added.shape, *(1 for _ in geometry.kernel))

    def backward(x: Tensor, g: Tensor, write_terms: bool, needed: bool) -> Tensor | None:
        if write_terms:
            write(x, g)
        return conv_each_input(g, values, x.shape[2:], *geometry.steps).to(x.dtype) if needed else None

    return tape.replace(y, input, backward, (values,))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache
def _geometry(sizes: torch.Size, stride: Any, padding: Any, dilation: Any, groups: int) -> _Geometry:
    kernel = list(sizes)
    steps = _for_each(dilation, len(kernel))
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise RuntimeError(f"padding: got {padding!r}, must be 'same', 'valid' or numbers")
        around = [d * (k - 1) if padding == "same" else 0 for d, k in zip(steps, kernel, strict=True)]
        before = [n // 2 for n in around]
    else:
        before = _for_each(padding, len(kernel))
        around = [2 * n for n in before]
    return _Geometry(kernel, _for_each(stride, len(kernel)), before, steps, groups, around)


def _for_each(value: Any, dims: int) -> list[int]:
    return list(value) * (dims if len(value) == 1 else 1) if isinstance(value, Sequence) else [value] * dims


for _dims, _func in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
    rule(_func)(partial(_conv, _func, _dims))
