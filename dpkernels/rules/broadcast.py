"""Element-wise ops that broadcast a parameter over samples, and expanding a parameter to one copy per sample.

The parameter becomes a stride-0 copy with a sample dimension; the op runs as it is, and autograd's own gradient of
that copy, summed over whatever else was broadcast, is the row of each sample: a Dense term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpkernels.factors import at_least_float
from dpkernels.layouts import Layout
from dpkernels.nested import flat_tensors, map_tensors
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import named, plain, rule
from dpkernels.tape import Tape, Tracked

ELEMENTWISE = [
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "rsub",
    "pow",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "where",
    "lerp",
    "addcmul",
    "addcdiv",
    "atan2",
    "hypot",
    "fmod",
    "remainder",
    "logaddexp",
    "logaddexp2",
    "xlogy",
    "copysign",
    "heaviside",
    "ge",
    "gt",
    "le",
    "lt",
    "eq",
    "ne",
    "add_",
    "sub_",
    "subtract_",
    "mul_",
    "multiply_",
    "div_",
    "divide_",
    "true_divide_",
    "pow_",
    "lerp_",
    "addcmul_",
    "addcdiv_",
    "__add__",
    "__radd__",
    "__iadd__",
    "__sub__",
    "__rsub__",
    "__isub__",
    "__mul__",
    "__rmul__",
    "__imul__",
    "__truediv__",
    "__rtruediv__",
    "__itruediv__",
    "__pow__",
    "__rpow__",
    "__ipow__",
    "__mod__",
    "__rmod__",
    "__ge__",
    "__gt__",
    "__le__",
    "__lt__",
    "__eq__",
    "__ne__",
]


def promote(tape: Tape, parameter: Tracked, layout: Layout, shape: Sequence[int]) -> Tensor:
    """The parameter in a shape that has 1 for the samples' dimension, with one copy for each line there."""
    lines = tape.batch * layout.rows if layout.lines is None else len(layout.lines)
    if parameter._each is None:
        size = [lines if i == layout.dim else -1 for i in range(len(shape))]
        value = plain(parameter).reshape(shape).expand(size)
    else:
        own = layout.copies(parameter._each.plain).reshape(lines, *shape)
        value = own.transpose(0, layout.dim + 1).squeeze(0)
        if not torch.is_grad_enabled():  # the model may write into it
            value = value.clone()

    def write(_: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (g,) = gradients
        assert g is not None
        g = at_least_float(g.movedim(layout.dim, 0).reshape(lines, parameter._value.numel()))
        if layout.lines is None:
            rows = g if layout.rows == 1 else g.view(tape.batch, layout.rows, g.shape[1]).sum(1)
        else:
            rows = g.new_zeros(tape.batch, g.shape[1]).index_add(0, layout.lines, g)
        tape.add_dense(parameter, rows)

    return tape.tap((value,), (), write, kind="view")[0]


def aligned(tape: Tape, parameter: Any, samples: Tensor, what: str) -> bool:
    """Whether dim 0 of a derived parameter is the sample, as in a table looked up by ids [B, T] that are constants.

    As with copies: a size that happens to equal B is told apart by what the check has seen.
    """
    fits = (
        isinstance(parameter, Tracked)
        and not parameter._is_param
        and tape.batch > 1
        and parameter._value.dim() == samples.dim()
        and parameter._value.shape[0] == samples.shape[0] == tape.batch
    )
    if fits and tape.plan is not None and "aligned" not in tape.plan.get(what, ()):
        return False
    if fits:
        tape.seen.setdefault(what, set()).add("aligned")
    return fits


def promote_aligned(tape: Tape, parameter: Tracked) -> Tensor:
    """A derived parameter, line i of which belongs to sample i, as a tensor that holds samples."""

    def write(_: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (g,) = gradients
        assert g is not None
        tape.add_aligned(parameter, g)

    if parameter._each is None:
        value = plain(parameter)
    elif parameter._lookup is not None and (table := parameter._lookup[0]._each) is not None:
        value = table.lines(parameter._lookup[1].reshape(tape.batch, -1).long()).reshape(parameter._value.shape)
    else:
        value = parameter._each.plain.diagonal().movedim(-1, 0)
    return tape.tap((value,), (), write, kind="view")[0]


def _join(func: Callable[..., Any], tape: Tape, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Parameters whose dim 0 is the sample, beside samples."""
    samples = next((t for t in tensors if tape.holds_samples(t)), None)
    parameters = [t for t in tensors if isinstance(t, Tracked)]
    if samples is None or not all(aligned(tape, t, samples, named(func.__name__, t)) for t in parameters):
        return fallback(tape, func, (tensors, *args), kwargs)
    parts = [promote_aligned(tape, t) if isinstance(t, Tracked) else t for t in tensors]
    return func(parts, *args, **kwargs)


def _elementwise(func: Callable[..., Any], tape: Tape, *args: Any, **kwargs: Any) -> Any:
    tensors = flat_tensors((args, kwargs))
    samples = max((t for t in tensors if tape.holds_samples(t)), key=lambda t: t.dim())
    dims = samples.dim()

    def replace(t: Tensor) -> Tensor:
        if not isinstance(t, Tracked):
            return t
        what = named(func.__name__, t)
        if aligned(tape, t, samples, what):
            return promote_aligned(tape, t)
        shape = tuple(t._value.shape)
        covered = [i + dims - len(shape) for i, size in enumerate(shape) if size != 1]
        return promote(tape, t, tape.layout(samples, dims, what, covered), (1,) * (dims - len(shape)) + shape)

    if any(isinstance(t, Tracked) and t._value.dim() > dims for t in tensors):
        return fallback(tape, func, args, kwargs)
    return func(*map_tensors(replace, args), **map_tensors(replace, kwargs))


for _func in (torch.cat, torch.concat, torch.concatenate, torch.stack):
    rule(_func)(partial(_join, _func))
for _name in ELEMENTWISE:
    for _owner in (torch, Tensor):
        if hasattr(_owner, _name):
            rule(getattr(_owner, _name))(partial(_elementwise, getattr(_owner, _name)))


def expanded(tape: Tape, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """An expand or repeat of a parameter that makes one copy for each sample; None if it is something else.

    Only these meet no samples and yet speak of them; which dimension is the sample's goes by its size.
    """
    if func not in _EXPANDS or not args or not isinstance(args[0], Tracked) or tape.batch == 0:
        return None
    parameter = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        meta = map_tensors(lambda t: t._value.detach().to("meta") if isinstance(t, Tracked) else t, args)
        size = tuple(func(*meta, **kwargs).shape)
    shape = tuple(parameter._value.shape)
    padded = (1,) * (len(size) - len(shape)) + shape
    new = len(size) - len(shape)
    grown = [i for i, n in enumerate(size) if i < 2 and n == tape.batch and padded[i] == 1 and (n > 1 or i < new)]
    dim = tape.choose_copies(grown, named("expand", parameter))
    if dim is None:
        return None
    with tape.mode:
        others = [1 if i == dim else n for i, n in enumerate(size)]
        base = parameter.reshape(padded)
        if list(padded) != others:
            repeats = [n // a if a else 1 for n, a in zip(others, padded, strict=True)]
            base = (
                base.expand(others)
                if all(a in (1, n) for n, a in zip(others, padded, strict=True))
                else base.repeat(repeats)
            )
    assert isinstance(base, Tracked)
    result = promote(tape, base, Layout(dim), others)
    tape.mark(result, True)
    return result


_EXPANDS = {
    Tensor.expand,
    Tensor.expand_as,
    Tensor.repeat,
    torch.broadcast_to,
    Tensor.broadcast_to,
    torch.tile,
    Tensor.tile,
}
