"""Stand-ins for a model's parameters and buffers, while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.members import Members, loose_tensors
from dpkernels.tape import Tracked

Held = tuple[dict[str, Any], str, Any]  # a module's dict, a name in it, and what stood there


@contextlib.contextmanager
def swapped(members: Members, replacements: Mapping[int, Tensor], undone: bool = False) -> Iterator[list[Held]]:
    """Parameters and buffers (by id) replaced wherever the modules hold them.

    `undone`: other tensors that the modules hold as attributes are afterwards what they were before.
    """
    undo: list[Held] = []
    flat: list[tuple[Any, list[Any]]] = []
    modules = members.modules.values()
    loose = [(m, loose_tensors(m)) for m in modules]
    try:
        for module in modules:
            held: dict[str, Any]
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if id(tensor) in replacements:
                        undo.append((held, name, tensor))
            if isinstance(module, nn.RNNBase):  # keeps a list of its own, which would go stale
                flat.append((module, module._flat_weights))
        for held, name, tensor in undo:
            held[name] = replacements[id(tensor)]
        for module, weights in flat:
            module.__dict__["_flat_weights"] = [replacements.get(id(w), w) for w in weights]
        yield undo
    finally:
        for held, name, tensor in undo:
            held[name] = tensor
        for module, weights in flat:
            module.__dict__["_flat_weights"] = weights
        for module, tensors in loose:  # weight_norm by hooks leaves the weight it made on the module
            now = [k for k, v in loose_tensors(module).items() if undone or type(v) is Tracked]
            for name in now:
                vars(module).pop(name)
                vars(module).update({name: tensors[name]} if name in tensors else {})


@contextlib.contextmanager
def running(members: Members, replacements: Mapping[int, Tensor], undone: bool = False) -> Iterator[list[Held]]:
    """What a forward and backward with replaced parameters run under; compiled models run as they were written."""
    with contextlib.ExitStack() as stack:
        modules = members.modules.values()
        if any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield stack.enter_context(swapped(members, replacements, undone))


@contextlib.contextmanager
def gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """No parameter has a gradient; afterwards each has what it had."""
    kept = [(p, p.grad) for p in parameters]
    try:
        for p, _ in kept:
            p.grad = None
        yield
    finally:
        for p, grad in kept:
            p.grad = grad
