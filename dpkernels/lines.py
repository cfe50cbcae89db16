"""Following samples through a run: which tensors hold them, and which sample each line of dim 0 belongs to.

A tensor's mark is True (samples in their usual place), False (a constant), a tensor of sample numbers, one for each
line of dim 0 (after indexing, routing, sorting, concatenating), or LOST: it holds samples, but an op has reordered
them in a way that is not followed. A parameter that meets a LOST tensor is refused. Which ops lose the order does not
depend on values, so that it shows in the self-check already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpkernels.layouts import Layout
from dpkernels.nested import flat_tensors
from dpkernels.tape import LOST, Mark, Tape

_WRITING = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__"}
_WRITING |= {"__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__ilshift__", "__irshift__"}
_RESHAPING = {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as"}
_SPLITTING = {"split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"}
_MOVING = {"t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "flip", "roll", "rot90"}
_PICKING = {"sort", "gather", "take_along_dim", "topk", "take", "msort", "unique", "masked_select", "kthvalue", "mode"}
_PUTTING_BACK = {"index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_fill"}
_FRESH = {f"{k}_like" for k in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
_FRESH |= {f"new_{k}" for k in ("zeros", "ones", "empty", "full", "tensor")}
_CATS = {"cat", "concat", "concatenate"}
# Ops that may pick or reorder lines of dim 0. Any other leaves samples that are in their usual place there.
_ARRANGING = {"__getitem__", "index_select", "select", "unbind", "narrow", "repeat_interleave"}
_ARRANGING |= _CATS | _FRESH | _PICKING | _SPLITTING


def writes(name: str) -> bool:
    """Whether an op of this name writes into its first argument."""
    if name.startswith("__"):
        return name in _WRITING
    return name.endswith("_") and name != "requires_grad_"


def makes_fresh(name: str) -> bool:
    """Whether an op of this name takes only shape and type from its argument."""
    return name in _FRESH


def propagate(
    tape: Tape,
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
    operands: list[Tensor] | None = None,
) -> None:
    """Mark the results of an op, and what it wrote into. `operands`, where known: those that hold samples."""
    if operands is None:
        operands = [t for t in flat_tensors((args, kwargs) if kwargs else args) if tape.holds_samples(t)]
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    if not operands:
        for t in flat_tensors(result):
            if tape.mark_of(t) is None:
                tape.mark(t, False)
        return
    if writes(name) or out is not None:
        _mark_written(tape, name, operands, flat_tensors(list(args) if out is None else out)[0])
        return
    results = flat_tensors(result)
    if name not in _ARRANGING and all(tape.mark_of(t) is True for t in operands):  # most ops of most models
        for t in results:
            tape.mark(t, True)
        return
    for t, mark in zip(results, _marks(tape, name, args, kwargs, operands, results), strict=True):
        tape.mark(t, _simplified(tape, mark))


def _mark_written(tape: Tape, name: str, operands: list[Tensor], target: Tensor) -> None:
    """What is written into keeps its mark; a constant takes on that of what comes in.

    By index, samples go where the check proves that they belong: a constant then has them in their places.
    """
    own = tape.mark_of(target)
    constant = own is None or own is False
    placed = name == "__setitem__" or name.rstrip("_") in _PUTTING_BACK
    values = operands[-1:] if placed else operands  # behind the index
    coming = [tape.mark_of(t) for t in values if t is not target]
    lines = next((m for m in coming if isinstance(m, Tensor) and target.dim() and len(m) == target.shape[0]), None)
    if any(mark is LOST for mark in coming):
        tape.mark(target, LOST)
    elif placed:
        tape.mark(target, LOST if isinstance(own, Tensor) or own is LOST else True)
    elif constant:
        tape.mark(target, True if lines is None else lines)
    elif lines is not None and not (isinstance(own, Tensor) and torch.equal(own, lines)):
        tape.mark(target, LOST)
    if target._base is not None and not tape.holds_samples(target._base):
        tape.mark(target._base, True)


def _simplified(tape: Tape, mark: Mark) -> Mark:
    """Lines that are simply the samples in order are their usual place."""
    if isinstance(mark, Tensor) and len(mark) == tape.batch:
        return True if torch.equal(mark, torch.arange(tape.batch, device=mark.device)) else mark
    return mark


def _marks(
    tape: Tape,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: list[Tensor],
    results: list[Tensor],
) -> list[Mark]:
    if name in _FRESH:
        return [False] * len(results)
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if name in _CATS and _dim(args, kwargs, results[0], 0) == 0:
        parts = [line_numbers(tape, t, _site("cat")) for t in flat_tensors(args[0] if args else kwargs["tensors"])]
        known = [p for p in parts if isinstance(p, Tensor)]
        unknown = _any_lines(tape, operands) or any(p is LOST for p in parts)
        return [torch.cat(known) if len(known) == len(parts) else LOST if unknown else True]
    if isinstance(x, Tensor) and tape.holds_samples(x) and x.dim() > 0:
        found = _of_selection(tape, name, x, args, kwargs, results)
        if found is not None:
            return found
    if not _any_lines(tape, operands):
        return [LOST if any(tape.mark_of(t) is LOST for t in operands) else True] * len(results)
    return [_of_lined(tape, name, args, operands, t) for t in results]


def _of_selection(
    tape: Tape, name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], results: list[Tensor]
) -> list[Mark] | None:
    """The marks of results of ops that pick lines of x; None for other ops."""
    if name == "__getitem__":
        return [_indexed(tape, x, args[1])] * len(results)
    if name == "index_select":
        index = args[2] if len(args) > 2 else kwargs["index"]
        before = (slice(None),) * _dim(args, kwargs, x, 0)
        return [_indexed(tape, x, (*before, index))]
    if name in ("select", "unbind"):
        return [_indexed(tape, x, 0) if _dim(args, kwargs, x, 0) == 0 else _kept(tape, x)] * len(results)
    if name in _PICKING:
        behind = args[1:] if name in ("topk", "kthvalue") and "k" not in kwargs else args  # k comes before dim
        default = -1 if name in ("sort", "topk", "kthvalue", "mode") else 0
        return [LOST if _dim(behind, kwargs, x, default) == 0 else _kept(tape, x)] * len(results)
    lines = None
    if name in _SPLITTING and _dim(args[1:], kwargs, x, 0) == 0:
        lines = line_numbers(tape, x, _site(name))
        if isinstance(lines, Tensor) and sum(len(t) for t in results) == len(lines):
            return list(lines.split([len(t) for t in results]))
    elif name == "narrow" and args[1:2] == (0,):
        lines = line_numbers(tape, x, _site(name))
        if isinstance(lines, Tensor):
            return [lines.narrow(0, int(args[2]), int(args[3]))]
    elif name == "repeat_interleave":
        counts = args[1] if len(args) > 1 else kwargs.get("repeats")
        if isinstance(counts, Tensor) and counts.dim() == 1 and _dim((x, *args[2:]), kwargs, x, 0) == 0:
            lines = line_numbers(tape, x, _site(name))
            return [lines.repeat_interleave(counts) if isinstance(lines, Tensor) else LOST]
    return [LOST] * len(results) if lines is LOST else None


def _of_lined(tape: Tape, name: str, args: Sequence[Any], operands: list[Tensor], t: Tensor) -> Mark:
    """The mark of a result of some other op, one of whose operands has lines of its own."""
    if name in _PUTTING_BACK:  # by index, which the check has seen
        return LOST if tape.mark_of(operands[-1]) is LOST or tape.lines_of(operands[0]) is not None else True
    if any(tape.mark_of(o) is LOST for o in operands):
        return LOST
    lines = next(lines for o in operands if (lines := tape.lines_of(o)) is not None)
    if t.dim() == 0:
        return LOST
    if name in _MOVING:
        inner = name in ("transpose", "swapaxes", "swapdims") and 0 not in [d % t.dim() for d in args[1:3]]
        inner = inner or (name == "permute" and _first(args[1:]) == 0)
        return lines if inner else LOST
    for other in operands:
        own = tape.lines_of(other)
        in_order = own is None and other.dim() == t.dim() and other.shape[0] == t.shape[0]
        if in_order or (own is not None and other.dim() == t.dim() and not torch.equal(own, lines)):
            return LOST  # two orders of samples side by side
    if t.shape[0] == len(lines):
        return lines
    if name in _RESHAPING and len(lines) and t.shape[0] % len(lines) == 0:
        return lines.repeat_interleave(t.shape[0] // len(lines))
    if name in _RESHAPING and t.shape[0] and len(lines) % t.shape[0] == 0:
        groups = lines.view(t.shape[0], -1)
        return groups[:, 0] if bool((groups == groups[:, :1]).all()) else LOST
    return LOST


def _indexed(tape: Tape, x: Tensor, index: Any) -> Mark:
    """The mark of x[index]."""
    items = [_as_index(i, x) for i in (index if isinstance(index, tuple) else (index,))]
    first = items[0] if items else slice(None)
    picked = any(isinstance(i, Tensor) and tape.holds_samples(i) for i in items)
    if first is None or first is Ellipsis:  # what follows may pick lines of dim 0
        return LOST if picked else _kept(tape, x)
    where = tape.find_layout(x, min(x.dim(), 2), _site("indexing"))
    if where is LOST:
        return LOST
    if isinstance(where, Layout) and where.dim == 1:
        second = items[1] if len(items) > 1 else None
        return LOST if isinstance(second, Tensor) and tape.holds_samples(second) else True
    lines = line_numbers(tape, x, _site("indexing"))
    if not isinstance(lines, Tensor):  # samples are neither in dim 0 nor in dim 1
        return LOST if isinstance(first, Tensor) and tape.holds_samples(first) else _kept(tape, x)
    if isinstance(first, slice):
        return lines[first]
    if isinstance(first, int) or first.dim() == 0:
        return LOST  # one sample
    if first.dtype in (torch.bool, torch.uint8):
        return lines[first.nonzero()[:, 0]]
    if first.dim() == 1:
        return lines[first]
    return LOST if tape.holds_samples(first) else True  # the same whatever the data: the check has seen it


def _as_index(item: Any, x: Tensor) -> Any:
    """Lists, ranges and arrays as the tensors that indexing makes of them."""
    if isinstance(item, list | range | np.ndarray):
        return torch.as_tensor(list(item) if isinstance(item, range) else item, device=x.device)
    return item


def line_numbers(tape: Tape, t: Any, what: str) -> Tensor | Literal["lost"] | None:
    """For each line of dim 0, which sample it belongs to; None where dim 0 is something else, LOST if not settled."""
    if not tape.holds_samples(t) or t.dim() == 0:
        return None
    lines = tape.lines_of(t)
    if lines is not None:
        tape.seen.setdefault(what, set()).add(Layout(lines=lines).kind)
        return lines
    layout = tape.find_layout(t, min(t.dim(), 2), what)
    if not isinstance(layout, Layout):
        return layout
    return torch.arange(tape.batch, device=t.device).repeat_interleave(layout.rows) if layout.dim == 0 else None


def _site(op: str) -> str:
    """The op and the line of the model that calls it: what the plan knows such ops by."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("dpkernels", "torch"):
        frame = frame.f_back
    return f"{op} at {frame.f_code.co_filename}:{frame.f_lineno}"


def _kept(tape: Tape, *operands: Tensor) -> Mark:
    marks = [tape.mark_of(t) for t in operands]
    if any(mark is LOST for mark in marks):
        return LOST
    return next((mark for mark in marks if isinstance(mark, Tensor)), True)


def _any_lines(tape: Tape, operands: list[Tensor]) -> bool:
    return any(tape.lines_of(t) is not None for t in operands)


def _dim(args: Sequence[Any], kwargs: dict[str, Any], t: Tensor, default: int) -> int:
    """The op's dimension argument: by keyword, or the first plain integer behind the first argument."""
    found = kwargs.get("dim", next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), default))
    return found % t.dim() if isinstance(found, int) and t.dim() else 0


def _first(dims: Sequence[Any]) -> Any:
    return _first(dims[0]) if dims and isinstance(dims[0], list | tuple) else dims[0] if dims else None
