"""Tensors in nested lists, tuples and mappings: what models take and ops are called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def flat_tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from flat_tensors(item)
    elif isinstance(x, Mapping):
        for item in x.values():
            yield from flat_tensors(item)


def map_tensors(f: Callable[[Tensor], Any], x: Any) -> Any:
    """`x` with `f` applied to every tensor in it."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_tensors(f, item) for item in x))
    if isinstance(x, list | tuple):
        return type(x)([map_tensors(f, item) for item in x])
    if isinstance(x, Mapping):
        return {key: map_tensors(f, item) for key, item in x.items()}
    return x
