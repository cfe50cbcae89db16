"""Any op without a rule of its own: the op under `vmap`, with a copy of the parameter for each sample. Dense terms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpkernels.each import for_each
from dpkernels.layouts import Layout
from dpkernels.rules.registry import apart, named, shared, values_of
from dpkernels.tape import RecordingError, Tape, Tracked

_said: set[str] = set()


class SlowOpWarning(UserWarning):
    """An op has no rule of its own and is differentiated for each sample."""


def fallback(tape: Tape, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the op and tap its outputs."""
    name = getattr(func, "__name__", str(func))
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    parameters = [i for i, x in enumerate(leaves) if isinstance(x, Tracked)]
    samples = [i for i, x in enumerate(leaves) if tape.holds_samples(x)]
    what = named(name, *leaves)
    if name.endswith("_") and not name.endswith("__"):
        raise RecordingError(f"{what}: writes in place; use the op without the underscore")
    layout = _common_layout(tape, [leaves[i] for i in samples], what)
    units = tape.batch if layout.lines is None else len(layout.lines)

    out_specs: list[Any] = [None]

    def call(own: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Any]:
        values = list(leaves)
        for i, value in zip((*parameters, *samples), (*own, *xs), strict=True):
            values[i] = value
        a, k = pytree.tree_unflatten(values, spec)
        flat, out_specs[0] = pytree.tree_flatten(func(*a, **k))
        return flat

    each = apart(*leaves) and units > 0
    own = [values_of(tape, leaves[i]) if each else shared(leaves[i]) for i in parameters]
    if each and layout.lines is not None:
        own = [values[layout.lines] for values in own]
    before = torch.get_rng_state()
    if each:
        flat = _run_apart(call, own, [leaves[i] for i in samples], units)
        result = pytree.tree_unflatten(flat, out_specs[0])
    else:
        result = func(*pytree.tree_map(shared, tuple(args)), **pytree.tree_map(shared, kwargs))
    if not torch.equal(before, torch.get_rng_state()):
        raise RecordingError(f"{what}: draws random numbers and has no rule of its own. Draw them in an op before it")
    outputs, out_spec = pytree.tree_flatten(result)
    chosen = [i for i, y in enumerate(outputs) if isinstance(y, Tensor) and y.is_floating_point()]
    if not chosen or units == 0:
        return result
    for i in chosen:
        if outputs[i].dim() == 0 or outputs[i].shape[0] % units != 0:
            raise RecordingError(
                f"{what}: gives an output of shape {tuple(outputs[i].shape)} for {tape.batch} samples, must have the "
                "sample in dim 0: the op mixes samples or moves them"
            )
    if tape.replaced and not each:
        _check_separate(
            call, own, [leaves[i].detach() for i in samples], [outputs[i] for i in chosen], chosen, units, what
        )
    _say(name)

    def write(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        gs = [torch.zeros_like(y) if g is None else g for y, g in zip(saved[len(samples) :], gradients, strict=True)]
        xs, gs = ([_split(t, units) for t in ts] for ts in (saved[: len(samples)], gs))
        rows = _per_unit(lambda ps, x: [call(ps, x)[i] for i in chosen], own, xs, gs, what, each)
        for i, row in zip(parameters, rows, strict=True):
            if layout.lines is not None:
                row = row.new_zeros(tape.batch, *row.shape[1:]).index_add(0, layout.lines, row)
            tape.add_dense(leaves[i], row)

    shapes = tuple(outputs[i].detach().new_zeros(()).expand(outputs[i].shape) for i in chosen)
    saved = tuple(leaves[i] for i in samples)
    tapped = tape.tap(tuple(outputs[i] for i in chosen), (*saved, *shapes), write, kind="kept")
    for i, y in zip(chosen, tapped, strict=True):
        outputs[i] = y
    return pytree.tree_unflatten(outputs, out_spec)


def _run_apart(call: Callable[..., list[Any]], own: list[Tensor], xs: list[Tensor], units: int) -> list[Any]:
    """The op's tensors, each unit with parameters of its own."""
    count = len(own)
    operands = [*own, *(_split(x, units) for x in xs)]
    found = for_each(lambda *t: tuple(call(t[:count], t[count:])), [0] * len(operands), operands)
    return [y.flatten(0, 1) if y.dim() > 1 else y for y in found]


def _common_layout(tape: Tape, tensors: list[Tensor], what: str) -> Layout:
    layouts = [tape.layout(t, 1, what) for t in tensors]
    first = layouts[0]
    for other in layouts[1:]:
        if (other.lines is None) != (first.lines is None) or (
            first.lines is not None and other.lines is not None and not torch.equal(first.lines, other.lines)
        ):
            raise RecordingError(f"{what}: operands hold different samples")
    return first


def _split(t: Tensor, units: int) -> Tensor:
    return t.reshape(units, t.shape[0] // units if units else 1, *t.shape[1:])


def _per_unit(
    function: Callable[..., list[Tensor]],
    own: list[Tensor],
    xs: list[Tensor],
    gs: list[Tensor],
    what: str,
    each: bool,
) -> list[Tensor]:
    """The vjp with respect to `own` for each unit, stacked; with `each`, every unit has its own in dim 0."""

    def one(values: list[Tensor], x: list[Tensor], g: list[Tensor]) -> Any:
        vjp = torch.func.vjp(lambda *ps: tuple(function(ps, x)), *values)[1]
        return vjp(tuple(g))

    try:
        with warnings.catch_warnings():  # vmap's own about slow ops; ours has been said
            warnings.simplefilter("ignore")
            return list(torch.func.vmap(one, in_dims=(0 if each else None, 0, 0))(own, xs, gs))
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule: one after the other
        try:
            return _one_by_one(function, own, xs, gs, each)
        except Exception as error:
            raise RecordingError(f"{what}: does not run on one sample alone ({error})") from error


def _one_by_one(
    function: Callable[..., list[Tensor]], own: list[Tensor], xs: list[Tensor], gs: list[Tensor], each: bool
) -> list[Tensor]:
    rows: list[list[Tensor]] = [[] for _ in own]
    for i in range(len(gs[0])):
        with torch.enable_grad():
            leaves = [(p[i] if each else p).detach().requires_grad_() for p in own]
            outputs = function(leaves, [x[i] for x in xs])
            grads = torch.autograd.grad(outputs, leaves, [g[i] for g in gs], allow_unused=True)
        for row, p, grad in zip(rows, leaves, grads, strict=True):
            row.append(torch.zeros_like(p) if grad is None else grad)
    return [torch.stack(row) for row in rows]


def _check_separate(
    call: Callable[..., list[Any]],
    own: list[Tensor],
    xs: list[Tensor],
    outputs: list[Tensor],
    chosen: list[int],
    units: int,
    what: str,
) -> None:
    """Each sample alone must give its part of the outputs."""
    with torch.no_grad():
        for unit in range(min(units, 2)):
            try:
                alone = call(own, [_split(x, units)[unit] for x in xs])
            except Exception as error:
                raise RecordingError(
                    f"{what}: does not run on one sample alone ({error}). Samples must be in dim 0 of every operand "
                    "that depends on them, and reach the op by torch ops (not through NumPy)"
                ) from error
            for i, y in zip(chosen, outputs, strict=True):
                part = _split(y.detach(), units)[unit]
                if alone[i].shape != part.shape or not torch.allclose(
                    alone[i],
                    part,
                    rtol=1e-3,
                    atol=1e-4 * float(part.abs().max()) if part.numel() else 0,
                    equal_nan=True,
                ):
                    raise RecordingError(
                        f"{what}: a sample alone gives another result than in the batch: it mixes samples"
                    )


def _say(name: str) -> None:
    if name not in _said:
        _said.add(name)
        warnings.warn(
            f"dpkernels: {name} has no rule of its own; exact, but differentiated for each sample, which is slower",
            SlowOpWarning,
            stacklevel=2,
        )
