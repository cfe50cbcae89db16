"""What a derived parameter is for each sample, where the parameters that it is made of differ between samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dpkernels.each import Each, for_each
from dpkernels.lines import makes_fresh
from dpkernels.nested import flat_tensors
from dpkernels.tape import Tracked


def each_of_derived(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> dict[int, Each]:
    """By the ids of the tensors in `result`, which is the op on the shared values, of parameters that differ."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    parents = [x for x in leaves if isinstance(x, Tracked)]
    tensors = flat_tensors(result)
    if makes_fresh(name) or not tensors:
        return {}
    if len(parents) == 1 and len(tensors) == 1 and parents[0]._each is not None and tensors[0].requires_grad:
        view = parents[0]._each.viewed(tensors[0])
        if view is not None:
            return {id(tensors[0]): view}

    def one(*values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        a, k = pytree.tree_unflatten([next(given) if isinstance(x, Tracked) else x for x in leaves], spec)
        return tuple(flat_tensors(func(*a, **k)))

    operands = [x._value if x._each is None else x._each.values for x in parents]
    found = for_each(one, [None if x._each is None else 0 for x in parents], operands)
    return {id(t): Each(t, values=values) for t, values in zip(tensors, found, strict=True)}
