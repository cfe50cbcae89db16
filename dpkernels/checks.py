"""Checks of arguments. Every message names the argument, what it was and what it must be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

FLOATING = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def number(name: str, value: object, *, low: float, high: float = math.inf, finite: bool = True) -> float:
    """`value` as a float in [low, high]; NaN never, infinity only when `finite` is False."""
    if type(value) is float and low <= value <= high and (math.isfinite(value) or not finite):
        return value  # nearly always: numbers.Real takes a while to ask
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        x = float(value)
        if low <= x <= high and not (finite and math.isinf(x)):
            return x
    span = f">= {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    raise ValueError(f"{name}: got {value!r}, must be a {'finite ' if finite else ''}number {span}")


def positive(name: str, value: object, *, high: float = math.inf) -> float:
    """`value` as a finite float above 0, at most `high`."""
    x = number(name, value, low=0, high=high)
    if x == 0:
        raise ValueError(f"{name}: got 0, must be > 0")
    return x


def whole(name: str, value: object, *, low: int, cure: str = "") -> int:
    """`value` as an int of at least `low`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        return value
    raise ValueError(f"{name}: got {value!r}, must be a whole number >= {low}{cure}")


def tensor_list(name: str, value: object) -> list[Tensor]:
    """A floating-point tensor, or a non-empty sequence of them on one device, as a list."""
    tensors = [value] if isinstance(value, Tensor) else value
    if not isinstance(tensors, Sequence) or isinstance(tensors, str) or not tensors:
        raise ValueError(f"{name}: got {_describe(value)}, must be a tensor or a non-empty sequence of tensors")
    device = getattr(tensors[0], "device", None)
    for i, t in enumerate(tensors):  # hundreds of tensors are common: the good case is one quick test each
        if not (isinstance(t, Tensor) and t.dtype in FLOATING and t.layout is torch.strided and t.device == device):
            _refuse(name if isinstance(value, Tensor) else f"{name}[{i}]", t, device)
    return list(tensors)


def per_sample(name: str, value: object) -> list[Tensor]:
    """Like tensor_list, and each tensor has the samples in dim 0, equally many in all."""
    tensors = tensor_list(name, value)
    if 0 in set(map(Tensor.dim, tensors)):
        i = next(i for i, t in enumerate(tensors) if t.dim() == 0)
        at = name if isinstance(value, Tensor) else f"{name}[{i}]"
        raise ValueError(f"{at}: got a tensor without dimensions, dim 0 must be the sample")
    sizes = [t.size(0) for t in tensors]
    if len(set(sizes)) > 1:
        i = next(i for i, size in enumerate(sizes) if size != sizes[0])
        raise ValueError(f"{name}[{i}]: has {sizes[i]} samples (dim 0), must have {sizes[0]} like {name}[0]")
    return tensors


def matching(name: str, value: object, now: list[Tensor]) -> list[Tensor]:
    """`value` shaped like the tensors `now`, or like one sample of them: then expanded over the samples."""
    before = tensor_list(name, value)
    if len(before) != len(now):
        raise ValueError(f"{name}: has {len(before)} tensors, must have {len(now)} like now")
    expanded = []
    for i, (a, b) in enumerate(zip(now, before, strict=True)):
        if b.dtype != a.dtype or b.device != a.device:
            raise ValueError(f"{name}[{i}]: is {b.dtype} on {b.device}, must be {a.dtype} on {a.device} like now[{i}]")
        if b.shape != a.shape and b.shape != a.shape[1:]:
            raise ValueError(
                f"{name}[{i}]: has shape {tuple(b.shape)}, must be {tuple(a.shape)} like now[{i}], "
                f"or {tuple(a.shape[1:])} for one vector shared by all samples"
            )
        expanded.append(b if b.shape == a.shape else b.expand(a.shape))
    return expanded


def _refuse(at: str, t: object, device: object) -> NoReturn:
    if not isinstance(t, Tensor):
        raise ValueError(f"{at}: got {_describe(t)}, must be a tensor")
    if t.layout is not torch.strided:
        raise ValueError(f"{at}: got a tensor of layout {t.layout}, must be dense (torch.strided)")
    if t.dtype not in FLOATING:
        raise ValueError(f"{at}: got a tensor of {t.dtype}, must be float32, float64, bfloat16 or float16")
    raise ValueError(f"{at}: is on {t.device}, must be on {device} like the first tensor")


def _describe(value: object) -> str:
    return repr(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"


def samples(name: str, value: object, batch: int) -> Tensor:
    """A bool for each sample."""
    if not (isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == (batch,)):
        raise ValueError(f"{name}: got {value!r:.60}, must be a bool tensor of shape ({batch},)")
    return value
