"""Weighted sums of rows: sum_i weights_i row_i.

`add_exact_sum` is float64 throughout. `product_sum` is one product of matrices in the factors' own precision, as fast
as the ordinary weight gradient; rows that are stored are added in float64 by the op `weighted_sum_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpkernels import forming, gpu, products
from dpkernels.factors import UNIT, Matrix, Outer, at_least_float, chunks

LINES = 1 << 15  # elements of a sum that are made at a time
SCALED = 1 << 18  # elements of g that are scaled at a time
FLOAT_UNIT = 2.0**-23  # twice the rounding unit of float32
SPLIT_UNIT = 2.0**-14  # of two bfloat16 that a float32 is written as, should conversions truncate


def rounding(g: Tensor) -> float:
    """Twice the unit to which a factor times its coefficient is rounded before it is summed."""
    if g.dtype == torch.float64:
        return UNIT
    return SPLIT_UNIT if g.dtype == torch.bfloat16 and gpu.has_tiles(g.device) else FLOAT_UNIT


def product_sum(m: Matrix, weights: Tensor, out: Tensor | None = None) -> Tensor | None:
    """The sum [height, width] of a matrix that is one Outer or one Rows; None for others.

    The factor g is multiplied by the weight and rounded, so the summed row is not exactly the clipped row: see
    `rounded` in `inner.squared_norms`. `out`: where to put it, if it has the right type.
    """
    if m.dense is not None or len(m.terms) != 1:
        return None
    if m.outer is not None:
        a, g = forming.for_kernels(m.outer.a, m.outer.g)
        if gpu.takes(a, g) and g.dtype != torch.float64:
            return torch.ops.dpkernels.outer_sum(a, g, weights.float())  # type: ignore[no-any-return]
        fits = out is not None and out.dtype == g.dtype
        total = out.view(m.height, m.width) if out is not None and fits else g.new_empty(m.height, m.width)
        return _scaled_product(a, g, weights.to(g.dtype), total)
    assert m.rows is not None
    g = at_least_float(m.rows.g)
    scaled = g * weights.to(g.dtype)[:, None, None]
    return torch.ops.aten.embedding_dense_backward(scaled, m.rows.ids, m.height, -1, False)  # type: ignore[no-any-return]


def _scaled_product(a: Tensor, g: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """total = (weights g)^T a, some samples at a time: what is scaled stays in cache."""
    if not len(g):
        return total.zero_()
    lines = a.flatten(0, 1).T
    if products.is_faster(g.flatten(0, 1).T, lines):
        for low in range(0, len(total), step := max(1, SCALED // total.shape[1])):
            part = slice(low, low + step)
            scaled = torch.mul(g[:, :, part], weights[:, None, None]).flatten(0, 1).T.contiguous()
            total[part] = products.linear(scaled, lines)
        return total
    count = max(1, SCALED // max(g.shape[1] * g.shape[2], 1))
    memory = g.new_empty(min(count, len(g)), *g.shape[1:])
    for first in range(0, len(g), count):
        samples = slice(first, first + count)
        scaled = torch.mul(g[samples], weights[samples, None, None], out=memory[: len(g) - first])
        total.addmm_(scaled.flatten(0, 1).T, a[samples].flatten(0, 1), beta=0 if first == 0 else 1)
    return total


def exact_sum_by_lines(m: Matrix, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """sum_i weights_i row_i as by `add_exact_sum`; where rows are factors alone, some lines of it at a time."""
    alone = m.outer is not None and len(m.terms) == 1
    step = max(1, LINES // max(m.width, 1)) if alone else max(m.height, 1)
    for low in range(0, m.height, step):
        lines = slice(low, min(m.height, low + step))
        part = (
            m
            if m.outer is None or not alone
            else replace(m, height=lines.stop - low, outer=Outer(m.outer.a, m.outer.g[:, :, lines]))
        )
        yield lines, add_exact_sum(weights.new_zeros(part.height, m.width), part, weights)


def add_exact_sum(total: Tensor, m: Matrix, weights: Tensor) -> Tensor:
    """total += sum_i weights_i row_i, [height, width]; weights and total in float64."""
    if m.outer is not None:
        length = m.outer.g.shape[1]
        for samples in chunks(m.batch, length * max(m.height, m.width)):
            g = m.outer.g[samples].double() * weights[samples, None, None]
            total.addmm_(g.flatten(0, 1).T, m.outer.a[samples].double().flatten(0, 1))
    if m.dense is not None:
        for samples in chunks(m.batch, m.height * m.width):
            part = weights[samples].unsqueeze(1).contiguous()
            torch.ops.dpkernels.weighted_sum_([total], [True], [m.dense.of(samples)], [0], part, None, None, 1.0)
    if m.rows is not None:
        for samples in chunks(m.batch, m.rows.g[0].numel() if m.batch else 1):
            g = m.rows.g[samples].double() * weights[samples, None, None]
            total.index_add_(0, m.rows.ids[samples].flatten(), g.flatten(0, 1))
    return total
