"""Tile sizes: a fixed table, so that results do not depend on what was tuned when, and all of it is compiled by tests.

Small tiles where a layer has few outputs: whole programs on masked columns are wasted work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Tiles of `height` by `width` outputs, `depth` addends at a time, by `warps` of so many registers a thread."""

    height: int
    width: int
    depth: int
    warps: int
    registers: int

    def options(self) -> dict[str, int | bool]:
        """What Triton takes besides the kernel's own arguments. Multiply-adds are fused: that rounds less."""
        limit = {} if torch.version.hip else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": True, **limit}


SMALL, LARGE = Tile(16, 16, 16, 4, 128), Tile(64, 64, 32, 8, 144)
ROWS = (SMALL, LARGE)  # rows of outer products and convolutions
SUMS = (SMALL, LARGE)  # of outer products
GRAM = (Tile(16, 16, 16, 4, 128), Tile(32, 32, 16, 8, 128))  # float64
CLAMP = (SMALL, Tile(32, 32, 16, 8, 128))  # with sums in float64 beside
LOW_RANK = Tile(16, 64, 16, 4, 128)


def tile(table: tuple[Tile, ...], height: int, width: int) -> Tile:
    """The largest that is no larger than twice the outputs, in either direction."""
    fitting = [t for t in table if t.height <= 2 * height and t.width <= 2 * width]
    return fitting[-1] if fitting else table[0]


def is_small(*tensors: Tensor) -> bool:
    """Whether 32 bits reach every element of one sample; from sample to sample, kernels count in 64."""
    return all(sum((n - 1) * s for n, s in zip(t.shape[1:], t.stride()[1:], strict=True)) < 2**31 for t in tensors)
