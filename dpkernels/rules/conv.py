"""Convolutions: Dense terms, each sample's own weight gradient by a convolution with one group for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
            x = saved[0].to(g.dtype)
            rows = weight_gradients(x, g, weight._value.shape, stride, padding, dilation, groups)
            tape.add_dense(weight, reduced(tape, rows, layout, dims + 2))
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced_to_channels(tape, g, layout))

    return tape.tap((output,), (input,) if tracked(weight) else (), write)[0]


def weight_gradients(
    x: Tensor,
    g: Tensor,
    shape: Sequence[int],
    stride: int | Sequence[int],
    padding: int | str | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    """The weight gradient of each image on its own, [N, *shape], from x [N, C, ...] and g [N, O, ...]."""
    dims, count = x.dim() - 2, x.shape[0]
    if count == 0:  # no sample was routed here
        return g.new_zeros(0, *shape)
    stride, dilation = _each(stride, dims), _each(dilation, dims)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, shape[2:], strict=True)]
        sides = [side for n in reversed(total) for side in (n // 2, n - n // 2)]
        x, padding = F.pad(x, sides), 0
    x = x.reshape(1, count * x.shape[1], *x.shape[2:])
    g = g.reshape(1, count * g.shape[1], *g.shape[2:])
    like = g.new_zeros(1).expand(count * shape[0], *shape[1:])
    _, rows, _ = torch.ops.aten.convolution_backward(
        g,
        x,
        like,
        None,
        stride,
        _each(padding, dims),
        dilation,
        False,
        [0] * dims,
        groups * count,
        [False, True, False],
    )
    return rows.reshape(count, *shape)  # type: ignore[no-any-return]


def _each(value: Any, dims: int) -> list[int]:
    return list(value) * (dims if len(value) == 1 else 1) if isinstance(value, Sequence) else [value] * dims


for _dims, _func in enumerate((F.conv1d, F.conv2d, F.conv3d), start=1):
    rule(_func)(partial(_conv, _func, _dims))
