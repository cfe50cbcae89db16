"""How the rows of a layer are handled: three ways, chosen from shapes and from the memory there is.

    keep   form g a^T for each sample during the backward, with its norm; add the stored rows up later
    gram   norms from inner products of factors; the sum is one product of matrices
    tile   norms from rows formed in pieces and dropped; the sum is one product of matrices (of a convolution, of rows
           formed again)

The cost counts the sum too. Besides the 2 T p d operations of the ordinary weight gradient, which every way has once
(`keep` as it forms rows, the others as they sum), a sample costs `keep` its row written and read again, `gram` two
T x T products in float64, and `tile` another 2 T p d. A T of 1 costs `gram` nothing: the norm is |a| |g|.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpkernels import ops

OPERATIONS_PER_BYTE = 8  # that a core does while it moves a byte to or from memory
WIDE = 2  # operations in float64 cost this many in float32
AT_A_TIME, FEW = 128 << 20, 8  # bytes of rows, and samples, that are worth a recording of their own
TUNING = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
OWN_RATE = 0.3  # of the time of a product with shared weights, which one with samples' own takes more


class Way(Enum):
    """How one layer's rows are handled."""

    KEEP = "keep"
    GRAM = "gram"
    TILE = "tile"


class Hold(Enum):
    """How each sample's own weights are held while it walks steps of its own: see `dpkernels.each`."""

    FACTORS = "factors"
    VALUES = "values"


class Choice(NamedTuple):
    """What was chosen for one use of a parameter, and what it costs in float32 operations."""

    parameter: str
    op: str
    way: Way
    batch: int
    length: int
    height: int
    width: int
    itemsize: int

    @property
    def weight_gradient(self) -> float:
        """What the ordinary weight gradient costs."""
        return self.batch * weight_gradient(self.length, self.height, self.width)

    @property
    def extra(self) -> float:
        """What it costs beyond that."""
        return self.batch * extra_cost(self.way, self.length, self.height, self.width)

    @property
    def row_bytes(self) -> int:
        """Memory that the row of one sample would take if there is room, where keeping it is worth that."""
        formed = self.way is Way.KEEP or self.op.startswith("conv")  # convolutions form theirs in any case
        keeps = formed or choose(1, self.length, self.height, self.width, sys.maxsize, self.itemsize) is Way.KEEP
        return stored_bytes(1, self.height, self.width, self.itemsize) if keeps else 0

    @property
    def stored_bytes(self) -> int:
        """Memory that rows take until they are summed."""
        kept = self.way is Way.KEEP
        return stored_bytes(self.batch, self.height, self.width, self.itemsize) if kept else 0


_forced: list[Way] = []
_forced_hold: list[Hold] = []


@contextlib.contextmanager
def forced(way: Way | Hold) -> Iterator[None]:
    """Every layer goes this way, whatever it costs: for tests and measurements."""
    ways: list[Any] = _forced if isinstance(way, Way) else _forced_hold
    ways.append(way)
    try:
        yield
    finally:
        ways.pop()


def weight_gradient(length: int, height: int, width: int) -> float:
    """Operations of the ordinary weight gradient for one sample."""
    return 2.0 * length * height * width


def extra_cost(way: Way, length: int, height: int, width: int) -> float:
    """What one sample costs beyond that, in float32 operations."""
    if way is Way.KEEP:
        return 2.0 * stored_bytes(1, height, width) * OPERATIONS_PER_BYTE
    if way is Way.TILE:
        return weight_gradient(length, height, width)
    return WIDE * 2.0 * length**2 * (height + width) if length > 1 else 2.0 * (height + width)


def stored_bytes(batch: int, height: int, width: int, itemsize: int = 4) -> int:
    """Memory that kept rows take."""
    return itemsize * batch * height * width


def choose(batch: int, length: int, height: int, width: int, room: int, itemsize: int = 4) -> Way:
    """The cheapest way whose rows fit into `room` bytes."""
    if _forced:
        return _forced[-1]
    ways = [Way.GRAM, Way.TILE]
    if length > 1 and stored_bytes(batch, height, width, itemsize) <= room:
        ways.append(Way.KEEP)
    return min(ways, key=lambda way: extra_cost(way, length, height, width))


def at_a_time(batch: int, row_bytes: int) -> int:
    """Into parts of how many samples to share out a batch, so that rows which are kept do not take much memory.

    What keeps 128 MiB of rows has so much to compute that to record one part more hardly counts.
    """
    parts = -(-batch // max(AT_A_TIME // max(row_bytes, 1), FEW))
    return -(-batch // max(parts, 1))


def fits(batch: int, height: int, width: int, room: int) -> bool:
    """Whether a convolution, which forms its rows in any case, keeps them; otherwise it forms them twice."""
    return stored_bytes(batch, height, width) <= room if not _forced else _forced[-1] is not Way.TILE


def hold(length: int, height: int, width: int, steps: int, *, stored: int, factors: int, room: int) -> Hold:
    """For a linear layer with so many factors from each of `steps` steps: what costs less, if its values fit.

    `stored` and `factors` are the bytes that either takes; where values do not fit, the smaller one is held.

    Besides the products that either has, a step costs factors a pass through those of all steps before, forward and
    backward; and values reading them twice and adding to them. Products with samples' own weights run at a lower rate.
    """
    if _forced_hold:
        return _forced_hold[-1]
    rank = length * (steps - 1) / 2
    by_factors = 2 * (2.0 * length + 4 * OPERATIONS_PER_BYTE) * rank * (height + width)
    by_factors += WIDE * (length * steps) ** 2 * (height + width) / steps  # of the norm, shared by the steps
    by_values = (16.0 * OPERATIONS_PER_BYTE + OWN_RATE * 4.0 * length) * height * width
    if stored > room:
        return Hold.FACTORS if factors <= stored else Hold.VALUES
    return Hold.FACTORS if by_factors <= by_values else Hold.VALUES


def gram_or_tile(length: int, other: int, height: int, width: int) -> Way:
    """Between the two ways of taking inner products of rows with so many addends each."""
    if _forced:
        return Way.GRAM if _forced[-1] is Way.GRAM else Way.TILE
    gram = WIDE * 2.0 * length * other * (height + width)
    return Way.GRAM if gram <= (length + other) * height * width else Way.TILE


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, as far as the system tells."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    known = [n for n in (_meminfo(), _control_group()) if n is not None]
    kept = min(ops.native.pool_bytes(), _resident()) if ops.native else 0  # a block may never have been touched
    return (min(known) if known else 1 << 30) + kept


def free_bytes_lately(device: torch.device) -> int:
    """The same, at most a tenth of a second ago: asking the system takes as long as several small layers."""
    now = time.monotonic()
    asked, free = _lately.get(device, (-math.inf, 0))
    if now - asked > 0.1:
        asked, free = _lately[device] = now, free_bytes(device)
    return free


_lately: dict[torch.device, tuple[float, int]] = {}


def empty_pool() -> None:
    """Give memory that is kept from step to step back to the system."""
    if ops.native is not None:
        ops.native.empty_pool()


def keep_memory() -> None:
    """From now on torch's large CPU tensors take memory that stays with the process when they go: see csrc/cpu/pool.h.

    Every step needs the same memory again. The C library gives it back to the system whenever the end of its heap is
    free, and new pages cost a step of a small network a fifth of its time; what it does keep is full of holes. Where
    environment variables tune or replace it, it is left alone.
    """
    if ops.native is not None and not any(name in os.environ for name in TUNING):
        ops.native.serve_torch(torch.__version__)


def _meminfo() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        return os.sysconf(names[0]) * os.sysconf(names[1]) if all(n in os.sysconf_names for n in names) else None


def _resident() -> int:
    """Memory that this process has."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _control_group() -> int | None:
    """What a container's limit leaves."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):  # no limit is the word "max"
        return None
