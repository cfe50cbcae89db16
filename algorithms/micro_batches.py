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


class Stacks:
    """Batches of several parties stacked, in equally long runs behind one another.

    Parties have tensors of one form (`federation.check_clients`). Runs are of `size`, as many as the largest batch
    needs, or of that batch's size. Memory is kept from batch to batch.
    """

    def __init__(self, parties: Sequence[tuple[Any, Any]], size: int | None) -> None:
        self._form, self._size = tuple(parties[0]), size
        tensors = [[t.detach() for t in flat_tensors(party)] for party in parties]
        self._columns = list(zip(*tensors, strict=True))
        self._memory: dict[int, Tensor] = {}

    def __call__(self, indices: Tensor, counts: Sequence[int]) -> Iterator[tuple[Any, Any, Tensor]]:
        """Inputs, targets, and which of them count: the records `indices`, so many of each party, one after the other.

        What does not count is zeros. There is always one such part.
        """
        most = max(*counts, 1)
        length = self._size or most
        for first in range(0, most, length):
            here, numbers = indices, torch.tensor(counts)
            if most > length:
                here = torch.cat([own[first : first + length] for own in indices.split(list(counts))])
                numbers = (numbers - first).clamp(0, length)
            stacked = [self._stacked(i, here, numbers, length) for i in range(len(self._columns))]
            inputs, targets = nested_like(self._form, stacked)
            yield inputs, targets, (torch.arange(length) < numbers[:, None]).flatten()

    def _stacked(self, number: int, indices: Tensor, counts: Tensor, length: int) -> Tensor:
        column = self._columns[number]
        form: Tensor = column[0]
        if not form.dim():
            return form
        shape = (len(column), length, *form.shape[1:])
        kept = self._memory.get(number)
        if kept is None or kept.numel() < math.prod(shape):
            self._memory[number] = kept = torch.empty(math.prod(shape), dtype=form.dtype, device=form.device)
        whole = kept[: math.prod(shape)].view(shape)
        contiguous = all([t.is_contiguous() for t in column])  # others would be copied whole
        gather = torch.ops.dpkernels if contiguous else reference
        gather.gather_runs_(whole, column, indices.to(form.device), counts)
        return whole.flatten(0, 1)
