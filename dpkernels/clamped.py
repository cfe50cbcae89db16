"""Rows clamped coordinate by coordinate and summed over runs of samples, without storing them where that can be helped.

Each coordinate of a clamped row is within the bound in real arithmetic, and added in float64. A row is zero if one of
its factors is not finite; a coordinate that overflows counts as the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpkernels import factors, forming, reference_layers
from dpkernels.factors import Later, Matrix


def finite(m: Matrix) -> Tensor:
    """Which samples have nothing but finite factors, bool [B]."""
    made_of, known = factors.made_of(m), None
    if m.outer is not None and m.outer.faults is not None and m.outer.faults.version == m.outer.a._version:
        known, a = m.outer.faults.seen, m.outer.a
        made_of = [t for t in made_of if t is not a]
    squares = torch.ops.dpkernels.row_squares([t.flatten(1) for t in made_of]).sum(1)
    return (squares if known is None else squares + known).isfinite()  # type: ignore[no-any-return]


def add_clamped(sums: Tensor, m: Matrix, bound: float, keep: Tensor | None = None) -> None:
    """sums [N, height, width] in float64 += those over N equal runs of samples of the rows, clamped.

    Of the samples that are kept, all unless given.
    """
    if m.outer is not None and len(m.terms) == 1 and forming.is_native(m.outer.a):
        forming.add_outer_clamped(sums, m.outer.a, m.outer.g, keep, bound)
        return
    m = factors.zero_samples(m, keep)
    if isinstance(m.dense, Later) and len(m.terms) == 1 and m.dense.clamp is not None:
        m.dense.clamp(sums, bound)
        return
    each = m.batch // len(sums)
    for samples, low, high in factors.pieces(m):
        rows = factors.block(m, samples, low, high)
        first, last = samples.start // each, -(-samples.stop // each)
        if samples.stop - samples.start == each * (last - first):  # whole runs
            reference_layers.clamp_sum_(sums[first:last, low:high], rows, bound)
        else:
            for run in range(first, last):
                start, stop = (min(max(run * each + end - samples.start, 0), len(rows)) for end in (0, each))
                reference_layers.clamp_sum_(sums[run : run + 1, low:high], rows[start:stop], bound)
