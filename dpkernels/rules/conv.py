"""Convolutions: Dense terms, each sample's own weight gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels import planner
from dpkernels.factors import Later, chunks
from dpkernels.forming import conv_rows, is_native
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import named, plain, reduced, reduced_to_channels, rule, tracked
from dpkernels.tape import Tape, Tracked


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
    output = func(input, plain(weight), plain(bias), stride, padding, dilation, groups)

    def write(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (g,) = gradients
        assert g is not None
        if isinstance(weight, Tracked):
            shape = weight._value.shape
            before, steps = _before(padding, dilation, shape[2:]), _each(dilation, dims)
            x = saved[0].to(g.dtype)

            def form(samples: slice) -> tuple[Tensor, Tensor]:
                return conv_rows(x[samples], g[samples], shape[2:], _each(stride, dims), before, steps, groups)

            in_order = layout.dim == 0 and layout.rows == 1 and layout.lines is None
            height, width, length = shape[0], shape[1:].numel(), g.shape[2:].numel()
            if planner.fits(tape.batch, height, width, tape.room) or not in_order or not is_native(x):
                tape.note(weight, planner.Way.KEEP, length, height, width)
                rows, squares = form(slice(None))
                if in_order:
                    tape.add_dense(weight, rows, squares)
                else:
                    tape.add_dense(weight, reduced(tape, rows, layout, dims + 2))
            else:
                tape.note(weight, planner.Way.TILE, length, height, width)
                x = tape.own(x)
                squares = torch.cat([form(samples)[1] for samples in chunks(tape.batch, height * width)])
                again = Later(lambda samples: form(samples)[0].flatten(2), tape.batch, squares)
                tape.add(weight, again)
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced_to_channels(tape, g, layout))

    return tape.tap((output,), (input,) if tracked(weight) else (), write)[0]


def _before(padding: int | str | Sequence[int], dilation: int | Sequence[int], kernel: Sequence[int]) -> list[int]:
    """The padding before the first element in each dimension."""
    if not isinstance(padding, str):
        return _each(padding, len(kernel))
    steps = _each(dilation, len(kernel))
    return [d * (k - 1) // 2 if padding == "same" else 0 for d, k in zip(steps, kernel, strict=True)]


def _each(value: Any, dims: int) -> list[int]:
    return list(value) * (dims if len(value) == 1 else 1) if isinstance(value, Sequence) else [value] * dims


for _dims, _func in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
    rule(_func)(partial(_conv, _func, _dims))
