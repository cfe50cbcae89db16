"""Tensors in nested lists, tuples and mappings: what models take and ops are called with."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_SEQUENCES = (list, tuple)
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice}  # known to hold no tensor


def flat_tensors(x: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    found: list[Tensor] = []
    _collect(x, found)
    return found


def _collect(x: Any, found: list[Tensor]) -> None:  # runs for every op of a model: the frequent kinds first
    if isinstance(x, Tensor):
        found.append(x)
    elif isinstance(x, _SEQUENCES):
        for item in x:
            if isinstance(item, Tensor):
                found.append(item)
            elif type(item) not in _LEAVES:
                _collect(item, found)
    elif isinstance(x, Mapping):
        for item in x.values():
            if type(item) not in _LEAVES:
                _collect(item, found)


def nested_like(x: Any, tensors: Sequence[Tensor]) -> Any:
    """`x` with other tensors in the places of those in it, in the order of `flat_tensors`."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), x)


def rebuilt(f: Callable[[Any], Any], x: Any) -> Any:
    """`x` with `f` applied to everything in it that is no container; containers stay of their own kinds.

    Objects that are mappings too, as Hugging Face's outputs are, and dataclasses are containers.
    """
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping) and type(x) is not dict:
        new: Any = copy.copy(x)
        for key, value in x.items():
            new[key] = rebuilt(f, value)
        return new
    if isinstance(x, dict):
        return {key: rebuilt(f, value) for key, value in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{key: rebuilt(f, value) for key, value in vars(x).items()})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(rebuilt(f, item) for item in x))
    if type(x) in (list, tuple):
        return type(x)(rebuilt(f, item) for item in x)
    return f(x)


def map_tensors(f: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` with `f` applied to every tensor in it."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_tensors(f, item) for item in x))
    if isinstance(x, _SEQUENCES):
        return type(x)([map_tensors(f, item) for item in x])
    if isinstance(x, Mapping):
        return {key: map_tensors(f, item) for key, item in x.items()}
    return x
