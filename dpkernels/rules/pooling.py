"""Pooling: no parameter, but an op of ours in the place of torch's, with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from dpkernels import ops, reference_layers

MOST = 255  # elements of a window


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
    plain = not return_indices and _pair(dilation) == [1, 1]
    sizes = (
        _sizes(input, _pair(kernel_size), _pair(stride or kernel_size), _pair(padding), ceil_mode) if plain else None
    )
    if sizes is not None:
        return MaxPool.apply(input, *sizes)
    torchs: Any = F.max_pool2d
    return torchs(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _sizes(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool
) -> tuple[list[int], ...] | None:
    """Kernel, stride, padding and output, if our kernel takes them."""
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if x.dtype != torch.float32 or not x.is_cpu or x.dim() != 4 or not x.is_contiguous() or not x.numel():
        return None
    steps = list(zip(kernel, stride, padding, strict=True))
    if kernel[0] * kernel[1] > MOST or not all(k > 0 and s > 0 and 0 <= 2 * p <= k for k, s, p in steps):
        return None
    output = [_count(n, *step, ceil) for n, step in zip(x.shape[2:], steps, strict=True)]
    return (kernel, stride, padding, output) if min(output) > 0 else None


def _count(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> int:
    """Windows along a dimension; with `ceil` one more may reach beyond the end, if it starts before it."""
    beyond = stride - 1 if ceil else 0
    count = (size + 2 * padding - kernel + beyond) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 if len(value) == 1 else 1)


# Ops that run by functions of ours while a model is recorded.
QUICK = {F.max_pool2d: max_pool2d, torch.max_pool2d: max_pool2d} if ops.native is not None else {}
