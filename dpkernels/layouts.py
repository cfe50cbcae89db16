"""Where in a tensor the samples are, and bringing them to the front and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the samples are: dimension `dim`, in dim 0 with `rows` consecutive lines for each.

    `lines`, if given, says for each line of dim 0 which sample it belongs to (a routed part of a batch).
    """

    dim: int = 0
    rows: int = 1
    lines: Tensor | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """What does not depend on sizes: the layouts of one op in two runs of a model are of one kind."""
        return "lines" if self.lines is not None else f"dim {self.dim}" if self.rows == 1 else "rows"

    @property
    def in_dim_0(self) -> bool:
        """Lines of samples may come to be in order, and one for each: dim 0, rows and lines are one family."""
        return self.dim == 0

    @property
    def in_order(self) -> bool:
        """Whether dim 0 has the samples one after the other, each with as many lines."""
        return self.dim == 0 and self.lines is None

    def by_sample(self, t: Tensor, batch: int, event: int) -> Tensor:
        """`t` as [B, T, *its last `event` dimensions]; zeros where a sample has fewer lines than another."""
        tail = t.shape[t.dim() - event :]
        if self.lines is not None:
            inner = t.shape[1 : t.dim() - event].numel()
            sample, place, most = self._places(batch)
            result = t.new_zeros((batch, most, inner, *tail))
            result[sample, place] = t.reshape(t.shape[0], inner, *tail)
            return result.flatten(1, 2)
        if self.dim == 1:
            t = t.transpose(0, 1)
        count = t.shape[: t.dim() - event].numel() // batch
        return t.reshape(batch, count, *tail)

    def in_place(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse: [B, T, *event] as a tensor of `shape`, samples where they are in this layout."""
        if self.lines is not None:
            sample, place, most = self._places(t.shape[0])
            inner = t.shape[1] // most if most else 1
            return t.reshape(t.shape[0], most, inner, *t.shape[2:])[sample, place].reshape(list(shape))
        if self.dim == 1:
            return t.reshape([shape[1], shape[0], *shape[2:]]).transpose(0, 1)
        return t.reshape(list(shape))

    def copies(self, values: Tensor) -> Tensor:
        """Each sample's value, [B, ...], for each line of the dimension that samples are in."""
        if self.lines is not None:
            return values[self.lines]
        return values if self.rows == 1 else values.repeat_interleave(self.rows, 0)

    def _places(self, batch: int) -> tuple[Tensor, Tensor, int]:
        """For each line its sample and its number among that sample's; and the most lines a sample has."""
        lines = self.lines
        assert lines is not None
        counts = torch.bincount(lines, minlength=batch)
        order = lines.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.empty_like(lines)
        place[order] = torch.arange(len(lines), device=lines.device) - first[lines[order]]
        return lines, place, int(counts.max()) if len(counts) else 0
