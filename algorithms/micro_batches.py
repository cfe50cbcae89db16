"""A batch in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpkernels import checks
from dpkernels.gradients import batch_of
from dpkernels.nested import map_tensors

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
            own = t[first : first + size] if batch > size else t
            if not filled:
                return own
            whole = torch.zeros((size, *t.shape[1:]), dtype=t.dtype, device=t.device)
            whole[: len(own)] = own
            return whole

        where = torch.arange(size) < count if filled and count < size else None
        yield map_tensors(part, inputs), map_tensors(part, targets), where
