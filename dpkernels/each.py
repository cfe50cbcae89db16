"""What a parameter is for each sample, while every sample walks steps of its own: the shared value plus its row.

Held in one of two ways (`planner.Hold` chooses):

    factors   the row as terms: a linear layer is the shared product plus a low-rank correction,
                  x (W + sum_s g_s a_s^T)^T = x W^T + (x a^T) g
    values    W + row, [B, *shape]: a layer works with each sample's own weights

Or samples come in N equal runs, each with weights of its own, [N, *shape]: a layer works with those of each run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels import factors, forming, products
from dpkernels.factors import Matrix

WIDE = 256  # lines of which our kernel multiplies faster than torch's bmm


class Each:
    """Each sample's own value of a parameter, or of something derived from parameters.

    `turned`: the matrix is that of the transpose of `shared`. `of_runs`: the values of N equal runs of `batch` samples.
    """

    def __init__(
        self,
        shared: Tensor,
        *,
        matrix: Matrix | None = None,
        turned: bool = False,
        values: Tensor | None = None,
        of_runs: Tensor | None = None,
        batch: int = 0,
        source: Each | None = None,
    ) -> None:
        self.shared = shared.detach()
        self.matrix = matrix
        self.of_runs = of_runs
        self._batch = batch
        self._turned = turned
        self._values = values
        self._source = source

    @property
    def values(self) -> Tensor:
        """W_i, [B, *shape]; derived ones have the graph that leads to those of the leaves."""
        if self._values is None and self._source is not None:
            values = self._source.values
            self._values = values.transpose(1, 2) if self._turned != self._source._turned else values
        elif self._values is None and self.of_runs is not None:
            self._values = self.of_runs.repeat_interleave(self._batch // len(self.of_runs), 0).requires_grad_()
        elif self._values is None:
            self._values = self._formed().requires_grad_()
        return self._values

    @property
    def plain(self) -> Tensor:
        """The same without a graph."""
        return self.values.detach()

    @property
    def memory(self) -> int | None:
        """Where values are that this does not own, and nobody may write into."""
        if self.of_runs is not None:
            return self.of_runs.untyped_storage().data_ptr()
        return self._values.untyped_storage().data_ptr() if self.matrix is None and self._values is not None else None

    def viewed(self, value: Tensor) -> Each | None:
        """For a view of the shared value; None if these factors have none."""
        same = (self.shared.shape, self.shared.stride())
        if (self.matrix is None and self.of_runs is None) or value.data_ptr() != self.shared.data_ptr():
            return None
        turn = (value.shape, value.stride()) != same
        if turn and (value.dim() != 2 or (value.T.shape, value.T.stride()) != same):
            return None
        runs = self.of_runs.transpose(1, 2) if turn and self.of_runs is not None else self.of_runs
        turned = self._turned != turn
        return Each(value, matrix=self.matrix, turned=turned, of_runs=runs, batch=self._batch, source=self)

    def linear(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x_i W_i^T, from x [B, T, width]; and, where it was seen on the way, 0 for finite samples, else NaN."""
        if self.of_runs is not None:
            return _linear_of_runs(x, self.of_runs)
        if self.matrix is None:
            return _product(x, self.plain.transpose(1, 2)), None
        y = products.linear(x, self.shared)
        return (_add_backward if self._turned else _add_forward)(y, x, self.matrix), None

    def linear_input(self, g: Tensor) -> Tensor:
        """g_i W_i, from g [B, T, height]."""
        if self.of_runs is not None:
            return _product_of_runs(g, self.of_runs)
        if self.matrix is None:
            return _product(g, self.plain)
        dx = products.linear(g, self.shared.to(g.dtype).t())
        return _add_forward(dx, g, self.matrix) if self._turned else _add_backward(dx, g, self.matrix)

    def lines(self, ids: Tensor) -> Tensor:
        """Lines W_i[ids_i], [B, T, width] from ids [B, T]."""
        if self.of_runs is not None:
            runs = ids.reshape(len(self.of_runs), -1, 1).expand(-1, -1, self.shared.shape[1])
            return self.of_runs.gather(1, runs).view(*ids.shape, -1)
        if self.matrix is None or self._turned:
            index = ids.unsqueeze(2).expand(-1, -1, self.shared.shape[1])
            return self.plain.gather(1, index)  # of its own table only: an id beyond it raises
        result = F.embedding(ids, self.shared)
        m = self.matrix
        if m.outer is not None:
            index = ids.unsqueeze(1).expand(-1, m.outer.g.shape[1], -1)
            result = result + (m.outer.g.gather(2, index).transpose(1, 2) @ m.outer.a).to(result.dtype)
        if m.rows is not None:
            same = (ids.unsqueeze(2) == m.rows.ids.unsqueeze(1)).to(m.rows.g.dtype)
            result = result + (same @ m.rows.g).to(result.dtype)
        return result

    def _formed(self) -> Tensor:
        m, shared = self.matrix, self.shared
        assert m is not None
        if not m.terms:
            return shared.expand(m.batch, *shared.shape).clone()
        pieces = [factors.block(m, s, 0, m.height).to(shared.dtype) for s in factors.chunks(m.batch, shared.numel())]
        return torch.cat(pieces).reshape(m.batch, *shared.shape) + shared


def _product(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w.to(x.dtype))


def _linear_of_runs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """x_i w^T of its run, from x [B, T, p] and w [N, d, p]."""
    batch, length, width = x.shape
    ours = width >= WIDE and x.dtype == torch.float32 and x.is_cpu and forming.is_native(x) and w.stride(2) == 1
    ours = ours and not torch.is_autocast_enabled("cpu")
    if not ours:
        return _product_of_runs(x, w.transpose(1, 2)), None
    y, faults = forming.linear_runs(x.reshape(len(w), -1, width), w)
    return y.view(batch, length, w.shape[1]), faults.view(batch, length).sum(1)


def _product_of_runs(x: Tensor, w: Tensor) -> Tensor:
    """x_i w of its run, from x [B, T, p] and w [N, p, d]."""
    return _product(x.reshape(len(w), -1, x.shape[2]), w).view(*x.shape[:2], w.shape[2])


def _add_forward(y: Tensor, x: Tensor, m: Matrix) -> Tensor:
    """y += x row^T."""
    if m.outer is not None:
        y = forming.low_rank(y, x, m.outer.a, m.outer.g)
    if m.rows is not None:
        ids = m.rows.ids.unsqueeze(1).expand(-1, x.shape[1], -1)
        y = y.scatter_add(2, ids, x @ m.rows.g.transpose(1, 2).to(x.dtype))
    return y


def _add_backward(dx: Tensor, g: Tensor, m: Matrix) -> Tensor:
    """dx += g row."""
    if m.outer is not None:
        dx = forming.low_rank(dx, g, m.outer.g, m.outer.a)
    if m.rows is not None:
        ids = m.rows.ids.unsqueeze(1).expand(-1, g.shape[1], -1)
        dx = torch.baddbmm(dx, g.gather(2, ids), m.rows.g.to(g.dtype))
    return dx


def for_each(function: Callable[..., Any], in_dims: Sequence[int | None], operands: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `function` gives for each sample, stacked; operands with a dim of None are the same for all."""
    try:
        with warnings.catch_warnings():  # vmap's own about slow ops
            warnings.simplefilter("ignore")
            return list(torch.func.vmap(function, in_dims=tuple(in_dims))(*operands))
    except (RuntimeError, NotImplementedError, ValueError):  # no batching rule: one after the other
        batch = next(len(t) for t, dim in zip(operands, in_dims, strict=True) if dim == 0)
        alone = [
            function(*(t if dim is None else t[i] for t, dim in zip(operands, in_dims, strict=True)))
            for i in range(batch)
        ]
        return [torch.stack(parts) for parts in zip(*alone, strict=True)]
