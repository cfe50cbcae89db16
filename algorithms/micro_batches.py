"""A batch in parts that fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpkernels import checks, places, reference
from dpkernels.gradients import batch_of
from dpkernels.nested import flat_tensors, map_tensors, nested_like

SECURE_BYTES = 1 << 30  # that rows may take with secure noise, unless said otherwise


def check_size(size: int | None, *, secure: bool) -> None:
    """A number, or None where noise need not be secure."""
    if size is not None:
        checks.whole("micro_batch_size", size, low=1, cure=" or None")
    elif secure:
        raise ValueError("micro_batch_size: got None, must be a number with secure=True: the size all batches run in")


def memory_for_rows(max_bytes: int | None, *, secure: bool) -> int | None:
    """As given. What memory happens to be free must not decide how rows are rounded where noise is secure."""
    if max_bytes is None:
        return SECURE_BYTES if secure else None
    return checks.whole("max_bytes", max_bytes, low=0, cure=" or None")


def micro_batches(
    inputs: Any, targets: Any, size: int | None, *, filled: bool
) -> Iterator[tuple[Any, Any, Tensor | None]]:
    """Parts of at most `size` samples, and which of these count (None for all). There is always one, if an empty one.

    `filled`: all parts have that size and lie in memory in the same way, the last one filled up with zeros that do not
    count. The bits of a row may depend on the shapes that a product of matrices has; these then do not depend on data.
    """
    batch = batch_of(inputs, targets)
    size = size or max(batch, 1)
    for first in range(0, max(batch, 1), size):
        count = min(size, batch - first)

        def part(t: Tensor, first: int = first) -> Tensor:
            if not t.dim():
                return t
            if filled:
                return places.filled(t, first, size)
            return t[first : first + size] if batch > size else t

        where = torch.arange(size) < count if filled and count < size else None
        yield map_tensors(part, inputs), map_tensors(part, targets), where


def stacked_batches(
    parties: Sequence[tuple[Any, Any]], batches: Sequence[Tensor], size: int | None, memory: dict[int, Tensor]
) -> Iterator[tuple[Any, Any, Tensor]]:
    """The records that `batches` have of each party, in equally long runs behind one another, and which of them count.

    Parties have tensors of one form (`federation.check_clients`). Runs of `size`, as often as the largest batch needs,
    or of that batch's size. What does not count is zeros. Tensors lie in `memory`, by their number, which is for the
    next call too.
    """
    most = max(len(batch) for batch in batches)
    length = size or max(most, 1)
    for first in range(0, max(most, 1), length):
        here = [batch[first : first + length] for batch in batches]
        indices, counts = torch.cat(here), torch.tensor([len(own) for own in here])
        columns = zip(*(flat_tensors(party) for party in parties), strict=True)
        stacked = [_stacked(column, indices, counts, length, memory, i) for i, column in enumerate(columns)]
        inputs, targets = nested_like(tuple(parties[0]), stacked)
        yield inputs, targets, (torch.arange(length) < counts[:, None]).flatten()


def _stacked(
    column: Sequence[Tensor], indices: Tensor, counts: Tensor, length: int, memory: dict[int, Tensor], number: int
) -> Tensor:
    form = column[0]
    if not form.dim():
        return form
    shape = (len(column), length, *form.shape[1:])
    kept = memory.get(number)
    if kept is None or kept.numel() < math.prod(shape) or kept.dtype != form.dtype:
        memory[number] = kept = torch.empty(math.prod(shape), dtype=form.dtype, device=form.device)
    whole = kept[: math.prod(shape)].view(shape)
    sources = [t.detach() for t in column]
    gather = torch.ops.dpkernels if all(t.is_contiguous() for t in sources) else reference  # without a copy of all
    gather.gather_runs_(whole, sources, indices.to(form.device), counts)
    return whole.flatten(0, 1)
