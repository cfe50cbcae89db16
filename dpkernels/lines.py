"""Following samples through a run: which tensors hold them, and which sample each line of dim 0 belongs to.

A tensor's mark is True (samples in their usual place), False (a constant), a tensor of sample numbers, one for each
line of dim 0 (after indexing, routing, sorting, concatenating), or LOST: it holds samples, but an op has reordered
them in a way that is not followed. A parameter that meets a LOST tensor is refused. That does not depend on values:
the ops do, so it shows in the self-check already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpkernels.nested import flat_tensors
from dpkernels.tape import LOST, Mark, Tape

_WRITING = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imod__"}
_WRITING |= {"__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__ilshift__", "__irshift__"}
_RESHAPING = {
    "reshape",
    "view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "reshape_as",
    "view_as",
    "_unsafe_view",
}
_SPLITTING = {"split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"}
_MOVING = {
    "t",
    "transpose",
    "permute",
    "movedim",
    "moveaxis",
    "swapaxes",
    "swapdims",
    "flip",
    "roll",
    "flipud",
    "rot90",
}
_PICKING = {"sort", "gather", "take_along_dim", "topk", "take", "msort", "unique", "masked_select", "kthvalue", "mode"}
_PUTTING_BACK = {"index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_fill"}


def writes(name: str) -> bool:
    """Whether an op of this name writes into its first argument."""
    if name.startswith("__"):
        return name in _WRITING
    return name.endswith("_") and name != "requires_grad_"


def propagate(tape: Tape, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Mark the results of an op, and what it wrote into."""
    operands = [t for t in flat_tensors((list(args), kwargs)) if tape.holds_samples(t)]
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    if not operands:
        for t in flat_tensors(result):
            if tape.mark_of(t) is None:
                tape.mark(t, False)
        return
    if writes(name) or out is not None:
        _mark_written(tape, operands, next(flat_tensors(list(args) if out is None else out)))
        return
    results = list(flat_tensors(result))
    for t, mark in zip(results, _marks(tape, func, name, args, kwargs, operands, results), strict=True):
        tape.mark(t, _simplified(tape, mark))


def _mark_written(tape: Tape, operands: list[Tensor], target: Tensor) -> None:
    """What is written into keeps its mark; a constant takes on that of what comes in."""
    mark = tape.mark_of(target)
    if mark is None or mark is False:
        lines = next((lines for t in operands if (lines := tape.lines_of(t)) is not None), None)
        fits = lines is not None and target.dim() > 0 and target.shape[0] == len(lines)
        tape.mark(target, lines if lines is not None and fits else True)
    if target._base is not None and not tape.holds_samples(target._base):
        tape.mark(target._base, True)


def _simplified(tape: Tape, mark: Mark) -> Mark:
    """Lines that are simply the samples in order are their usual place."""
    if isinstance(mark, Tensor) and len(mark) == tape.batch:
        return True if torch.equal(mark, torch.arange(tape.batch, device=mark.device)) else mark
    return mark


def _marks(
    tape: Tape,
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    operands: list[Tensor],
    results: list[Tensor],
) -> list[Mark]:
    x = args[0] if args else None
    if func is Tensor.__getitem__ and tape.holds_samples(x):
        return [_indexed(tape, args[0], args[1])] * len(results)
    if name == "index_select" and tape.holds_samples(x):
        index = args[2] if len(args) > 2 else kwargs["index"]
        return [_indexed(tape, args[0], index) if _dim(args, kwargs, args[0], 0) == 0 else _kept(tape, args[0])]
    if name in ("cat", "concat", "concatenate") and _dim(args, kwargs, results[0], 0) == 0:
        parts = [line_numbers(tape, t, "cat") for t in flat_tensors(args[0])]
        known = [p for p in parts if p is not None]
        return [torch.cat(known) if len(known) == len(parts) else LOST if _any_lines(tape, operands) else True]
    if name in _PICKING and isinstance(x, Tensor):
        default = -1 if name in ("sort", "topk", "kthvalue", "mode") else 0
        over_samples = x.dim() > 0 and _dim(args, kwargs, x, default) == 0
        return [LOST if over_samples else _kept(tape, *operands)] * len(results)
    if name in _SPLITTING and isinstance(x, Tensor) and _dim(args[1:], kwargs, x, 0) == 0:
        lines = line_numbers(tape, x, name)
        if lines is not None and sum(len(t) for t in results) == len(lines):
            return list(lines.split([len(t) for t in results]))
    if name == "narrow" and isinstance(x, Tensor) and args[1:2] == (0,):
        lines = line_numbers(tape, x, name)
        return [_kept(tape, x) if lines is None else lines.narrow(0, args[2], args[3])]
    if not _any_lines(tape, operands):
        return [LOST if any(tape.mark_of(t) is LOST for t in operands) else True] * len(results)
    return [_of_lined(tape, name, args, operands, t) for t in results]


def _of_lined(tape: Tape, name: str, args: Sequence[Any], operands: list[Tensor], t: Tensor) -> Mark:
    """The mark of a result of some other op, one of whose operands has lines of its own."""
    if any(tape.mark_of(o) is LOST for o in operands):
        return LOST
    if name in _PUTTING_BACK:
        return True
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
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, list):
        first = torch.tensor(first, device=x.device)
    if isinstance(first, slice):
        if first == slice(None):
            return _kept(tape, x)
        lines = line_numbers(tape, x, "indexing")
        return _kept(tape, x) if lines is None else lines[first]
    if not isinstance(first, Tensor):
        return LOST if tape.lines_of(x) is not None and isinstance(first, int) else _kept(tape, x)
    lines = line_numbers(tape, x, "indexing")
    if lines is None:
        followed = tape.find_layout(x, min(x.dim(), 2), "indexing")
        return True if (followed is not None and followed.dim == 1) or not tape.holds_samples(first) else LOST
    if first.dtype in (torch.bool, torch.uint8):
        return lines[first.nonzero()[:, 0]]
    return lines[first] if first.dim() == 1 else LOST if tape.holds_samples(first) else True


def line_numbers(tape: Tape, t: Any, what: str) -> Tensor | None:
    """For each line of dim 0, which sample it belongs to; None where dim 0 is something else."""
    if not tape.holds_samples(t) or tape.mark_of(t) is LOST or t.dim() == 0:
        return None
    lines = tape.lines_of(t)
    if lines is not None:
        return lines
    layout = tape.find_layout(t, min(t.dim(), 2), what)
    if layout is None or layout.dim == 1:
        return None
    return torch.arange(tape.batch, device=t.device).repeat_interleave(layout.rows)


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
