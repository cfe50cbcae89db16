"""What a check of a model holds for: the same model, loss function and form of inputs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.members import Members, own_attributes
from dpkernels.nested import map_tensors


def signature(members: Members, loss_fn: Any, inputs: Any, targets: Any) -> Any:
    """What is equal for two calls that one check holds for."""
    forms = map_tensors(lambda t: (tuple(t.shape[1:]), t.dtype, t.device), (inputs, targets))
    precision = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    parts = _parts(members.modules, ())
    return repr(forms), _identity(loss_fn, ()), parts, tuple(members.trainable), tuple(precision)


_AS_THEY_ARE = (bool, str, Enum)
_BY_FORM = (int, float, complex, Tensor, type)


def _identity(x: Any, seen: tuple[int, ...]) -> Any:
    """What tells one model or loss function from another. One made anew in the same way is the same one.

    Functions by their code and what they take in; modules by type, switches and parts; switches and names as they are;
    numbers (which change as training goes) and tensors by form; other objects as objects. So a model that switches by a
    number it keeps is not checked again.
    """
    if x is None or isinstance(x, _AS_THEY_ARE):
        return x
    if isinstance(x, _BY_FORM) or id(x) in seen:
        return type(x)
    inside = (*seen, id(x))
    if isinstance(x, partial):
        return _identity((x.func, x.args, x.keywords), inside)
    if isinstance(x, tuple | list):
        return tuple(_identity(item, inside) for item in x)
    if isinstance(x, dict):
        return tuple((str(key), _identity(item, inside)) for key, item in x.items())
    if isinstance(x, types.MethodType):
        return _identity((x.__func__, x.__self__), inside)
    if isinstance(x, types.BuiltinFunctionType):
        return x
    if isinstance(x, types.FunctionType):
        cells = [_content(cell) for cell in x.__closure__ or ()]
        return x.__code__, _identity((x.__defaults__, x.__kwdefaults__, cells), inside)
    if isinstance(x, nn.Module):
        return _parts(dict(x.named_modules()), inside)
    try:
        return weakref.ref(x)
    except TypeError:
        return type(x)


def _parts(modules: Mapping[str, nn.Module], seen: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple((name, type(m), _switches(m, seen)) for name, m in modules.items())


_SWITCHES = (bool, str, Enum, partial, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def _switches(module: nn.Module, seen: tuple[int, ...]) -> tuple[Any, ...]:
    named = tuple([(k, _identity(v, seen)) for k, v in own_attributes(module) if isinstance(v, _SWITCHES)])
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return named, tuple([_identity(hook, seen) for hook in hooks])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
