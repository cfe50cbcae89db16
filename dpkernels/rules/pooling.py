"""Pooling: no parameter, but an op of ours in the place of torch's, with the same values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dpkernels import ops, reference_layers

MOST, FARTHEST = 255, 16  # elements of a window, and a stride


_Pair = list[int] | None


class MaxPool(torch.autograd.Function):
    """The largest of each window; a byte is kept for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *sizes: list[int]) -> Tensor:
        """`sizes`: of kernel, stride, padding and output."""
        y, where = torch.ops.dpkernels.max_pool(x, *sizes)
        ctx.save_for_backward(where)
        ctx.sizes = (*sizes[:3], list(x.shape[2:]))
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each gradient goes to the largest of its window."""
        (where,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # a second derivative is asked for: ops of torch have it
        found = reference_layers.max_pool_input if again else torch.ops.dpkernels.max_pool_input
        return found(gradients[0], where, *ctx.sizes), None, None, None, None


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch's max_pool2d: by our kernel where that serves."""
    sizes = None
    if type(ceil_mode) is bool and not return_indices:
        same = stride is None or (isinstance(stride, list | tuple) and not stride)
        kernel, step = _pair(kernel_size), _pair(kernel_size if same else stride)
        sizes = _sizes(input, kernel, step, _pair(padding), _pair(dilation), ceil_mode)
    if sizes is not None:
        return MaxPool.apply(input, *sizes)
    torchs: Any = F.max_pool2d
    return torchs(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _sizes(
    x: Tensor, kernel: _Pair, stride: _Pair, padding: _Pair, dilation: _Pair, ceil: bool
) -> tuple[list[int], ...] | None:
    """Kernel, stride, padding and output, if our kernel takes them."""
    if kernel is None or stride is None or padding is None or dilation != [1, 1]:
        return None
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if x.dtype != torch.float32 or not x.is_cpu or x.dim() != 4 or not x.is_contiguous() or not x.numel():
        return None
    steps = list(zip(kernel, stride, padding, strict=True))
    if kernel[0] * kernel[1] > MOST or not all(k > 0 and 0 < s <= FARTHEST and 0 <= 2 * p <= k for k, s, p in steps):
        return None
    output = [_count(n, *step, ceil) for n, step in zip(x.shape[2:], steps, strict=True)]
    return (kernel, stride, padding, output) if min(output) > 0 else None


def _count(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> int:
    """Windows along a dimension; with `ceil` one more may reach beyond the end, if it starts before it."""
    beyond = stride - 1 if ceil else 0
    count = (size + 2 * padding - kernel + beyond) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _pair(value: Any) -> _Pair:
    """One number for rows and one for columns; None for anything but plain numbers, which is left to torch."""
    pair = [value, value] if type(value) is int else list(value) if type(value) in (list, tuple) else []
    pair = pair * 2 if len(pair) == 1 else pair
    return pair if len(pair) == 2 and all(type(v) is int for v in pair) else None


# Ops that run by functions of ours while a model is recorded.
QUICK = {F.max_pool2d: max_pool2d, torch.max_pool2d: max_pool2d} if ops.native is not None else {}
