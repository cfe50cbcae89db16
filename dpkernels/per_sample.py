"""PerSample: one row for each sample, over all parameters of a model, held as factors where that is better.

Soundness. A row is the exact product of its stored factors (`dpkernels.factors`). Coefficients are made from norms
rounded up by more than their error (`dpkernels.inner`), so the bound of the clip rule holds in real arithmetic, also
for rows whose parts cancel. What the sum of clipped rows rounds off, E, widens the sensitivity to S + 2E. Stored rows
are added in float64, where E is below B * 2^-52 * S. Factors are summed by one product of matrices in their own
precision: in float32 there is no useful worst-case bound (measured: 1e-7 to 1e-6 of S). With `dtype=torch.float64`, and
where numbers come near the ends of float32's range, that is float64 too. Noise is added in float64 and the result
rounded once, after it. A row with a NaN or an Inf counts as zero. An empty batch releases noise alone. Noise lands on
every coordinate of every trainable parameter, also where no sample has a gradient. Nothing raises depending on values.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpkernels import checks, clamped, clipping, factors, inner, placing, products, sums
from dpkernels.dense import ClippedSum, check_noise, norm_rule, take_release
from dpkernels.noise import Gaussian
from dpkernels.placing import Part, Shape
from dpkernels.reference import wide_type


class PerSample:
    """A [B, d] matrix, one row for each sample, that is not formed as a whole.

    `per_sample_gradients` and `local_updates` make them. The rows of two can be subtracted and scaled; `clip_sum` and
    `clamp_sum` release their sum.
    """

    def __init__(self, batch_size: int, shapes: Mapping[str, Shape], parts: Mapping[str, list[Part]]) -> None:
        self._batch_size = batch_size
        self._shapes = dict(shapes)
        self._parts = {name: placing.separate(shape, parts.get(name, []), batch_size) for name, shape in shapes.items()}

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        return self._batch_size

    @property
    def _width(self) -> int:
        return sum(shape.size.numel() for shape in self._shapes.values())

    @property
    def parts(self) -> Mapping[str, list[Part]]:
        """The factors of each parameter's rows."""
        return self._parts

    def __repr__(self) -> str:
        return f"PerSample({self.batch_size} rows of {self._width} elements in {len(self._shapes)} parameters)"

    def norms(self) -> Tensor:
        """The norm of each row, [B]. NOT private."""
        return self._norms(self._squares()[0])

    def inner(self, other: PerSample) -> Tensor:
        """The inner product of each row with the other's, [B]. NOT private."""
        self._check_other(other)
        total = self._zeros(self.batch_size)
        for name, parts in self._parts.items():
            for mine, theirs in placing.matched(self._shapes[name], parts, other._parts[name]):
                total += inner.inner(mine, theirs)
        return total.to(self._norms(total[:, None]).dtype)

    def materialize(self) -> dict[str, Tensor]:
        """The rows themselves, a tensor [B, ...] for each parameter: as large as B models. NOT private."""
        return {
            name: placing.formed(self._shapes[name], parts, self.batch_size).to(wide_type(self._shapes[name].dtype))
            for name, parts in self._parts.items()
        }

    def clip_sum(
        self,
        clip: float | clipping.Rule,
        noise: Gaussian | None = None,
        *,
        onto: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
        out: Mapping[str, Tensor] | None = None,
        where: Tensor | None = None,
        exact: bool | None = None,
        reuse: bool = False,
    ) -> ClippedSum:
        """Clip each row, sum over samples, add noise; `sum` is a dict of tensors like the parameters.

        Args:
            clip: the largest norm of a row, or a rule: `Flat`, `Automatic` or `PerLayer` with one bound for each
                parameter in their order.
            noise: added to every coordinate of the sum. Without it nothing here is private.
            onto: a sum to add to before the noise, that of earlier micro-batches of one batch.
            dtype: of the sum; unless given, float64 for float64 parameters and float32 for others. float64 also does
                all arithmetic there, as adding `onto` a sum does.
            scale: what the noisy sum is multiplied by.
            out: contiguous tensors to put the sum into, by name; new ones where there is none that fits.
            where: bool [B], the samples to count; others are padding.
            exact: False has factors multiplied in their own precision although `dtype` is float64 or `onto` is given.
            reuse: whether the memory of `onto` may be used, which then is not that sum any more.

        Sensitivity of the sum: `clip` under add-remove, twice that under replace-one, times `scale`; see
        `rule.sensitivity`. `norms` are those of the rows before clipping: NOT private.
        """
        rule, bounds, stability = norm_rule(clip, len(self._shapes))
        self._check_sums(onto)
        if noise is not None:
            check_noise(noise)
        if where is not None:
            checks.samples("where", where, self.batch_size)
        scale = checks.number("scale", scale, low=-math.inf)
        exact = dtype == torch.float64 or onto is not None if exact is None else bool(exact)
        exact = exact or (noise is not None and noise.secure)
        squares, uppers = self._squares(rounded=not exact)
        keep = uppers.sum(1).isfinite()
        keep = keep if where is None else keep & where.to(keep.device)
        bounds = bounds.to(squares.device)
        wide = wide_type(dtype) if dtype is not None else None
        if len(bounds) == 1:
            uppers = uppers.sum(1, keepdim=True) * (1 + len(self._shapes) * factors.UNIT)
        upper = uppers.sqrt() * (1 + 8 * factors.UNIT)
        if stability is None:
            weights = torch.where(upper > bounds, bounds / upper, 1.0)
        else:
            weights = bounds / (upper + stability)
        weights = torch.where(keep[:, None], weights, 0.0)
        kept = None if bool(keep.all()) else keep
        exact = exact or not self._in_range(weights, bounds, keep)
        stream, std = take_release(noise, rule.sensitivity(), self._width)
        totals, filled, rows, owner = [], [], [], []
        for i, (name, shape) in enumerate(self._shapes.items()):
            kind = wide or wide_type(shape.dtype)
            given = None if out is None else out.get(name)
            target = _fitting(given, shape.size, kind, shape.device)
            stored, others = placing.stored(self._parts[name])
            base = self._product(others, weights[:, i % weights.shape[1]], kept, target) if not exact else None
            total = None if onto is None else onto[name].to(torch.float64, copy=not reuse).contiguous()
            if base is None and (others or onto is not None):
                base = self._exact(shape, others, weights[:, i % weights.shape[1]], kept, total)
            elif base is not None and total is not None:
                base = total.add_(base)
            totals.append(target if base is None else base)
            filled.append(base is not None)
            rows += stored
            owner += [i] * len(stored)
        if totals:
            torch.ops.dpkernels.weighted_sum_(totals, filled, rows, owner, weights.contiguous(), stream, std, scale)
        return ClippedSum(self._named(totals, dtype, out), self._norms(squares))

    def clipped(self, max_norm: float) -> PerSample:
        """The rows, scaled down to `max_norm` where they are longer and zero where they are not finite; NOT private.

        For what is made of clipped rows. Scaling rounds, so a row may end up longer by a few parts in 2^23 (2^52 in
        float64); clip what is made of them to have a bound.
        """
        weights = self._clipping(max_norm)
        if weights is None:
            return self
        parts = {
            name: [Part(p.place, factors.weighted(p.matrix, weights)) for p in parts]
            for name, parts in self._parts.items()
        }
        return PerSample(self.batch_size, self._shapes, parts)

    def clipped_difference(self, other: PerSample, max_norm: float) -> PerSample:
        """`self.clipped(max_norm) - other.clipped(max_norm)` in fewer passes over memory; NOT private."""
        self._check_other(other)
        weights = self._clipping(max_norm), other._clipping(max_norm)
        parts = {
            name: placing.difference(shape, self._parts[name], other._parts[name], self.batch_size, weights)
            for name, shape in self._shapes.items()
        }
        return PerSample(self.batch_size, self._shapes, parts)

    def _clipping(self, max_norm: float) -> Tensor | None:
        """What scales rows down to `max_norm`, float64 [B], zero for those not finite; None if that changes nothing."""
        bound = checks.number("max_norm", max_norm, low=0, finite=False)
        uppers = self._squares(rounded=True)[1].sum(1)
        norm = uppers.sqrt() * (1 + (len(self._shapes) + 8) * factors.UNIT)
        weights = torch.where(norm > bound, bound / norm, 1.0)
        weights = torch.where(uppers.isfinite(), weights, 0.0)
        return None if bool((weights == 1).all()) else weights

    def clamp_sum(self, bound: float, noise: Gaussian | None = None) -> ClippedSum:
        """Clamp each coordinate of each row to [-bound, bound], sum over samples, add noise.

        Sensitivity under add-remove: `bound` in each coordinate, so bound * sqrt(d) in L2 norm for d coordinates in
        all; twice that under replace-one.
        """
        totals = [t[0] for t in self.clamped_sums(bound).values()]
        sensitivity = bound * math.sqrt(self._width) if self._width else 0.0
        stream, std = take_release(noise, sensitivity, self._width)
        if stream is not None and totals:
            torch.ops.dpkernels.add_gaussian_(totals, stream, std)
        return ClippedSum(self._named(totals), self.norms())

    def clamped_sums(
        self,
        bound: float,
        runs: int = 1,
        *,
        onto: Mapping[str, Tensor] | None = None,
        where: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The sums of clamped rows over `runs` equally long runs of samples, [runs, *shape] in float64; NOT private.

        For what is made of such sums: one record moves one of them, by at most `bound` in each coordinate. They are
        added to those of `onto`, if given, each run of which must be contiguous. `where`, bool [B]: the samples that
        count, all unless given.
        """
        limit = checks.number("bound", bound, low=0, finite=False)
        if checks.whole("runs", runs, low=1) and self.batch_size % runs:
            raise ValueError(f"runs: got {runs}, must divide the number of samples, {self.batch_size}")
        sizes = {name: (runs, *shape.size) for name, shape in self._shapes.items()}
        if onto is not None and (
            {name: tuple(t.shape) for name, t in onto.items()} != sizes
            or any(t.dtype != torch.float64 or not t[0].is_contiguous() for t in onto.values())
        ):
            raise ValueError(f"onto: must have float64 sums [{runs}, ...] of all parameters, each run contiguous")
        matrices = [p.matrix for parts in self._parts.values() for p in parts]
        given = [] if where is None else [checks.samples("where", where, self.batch_size)]
        keep = functools.reduce(operator.and_, [*given, *(clamped.finite(m) for m in matrices)]) if matrices else None
        keep = None if keep is None or bool(keep.all()) else keep
        totals = {}
        for name, shape in self._shapes.items():
            total = self._zeros(runs, *shape.size) if onto is None else onto[name]
            for part in self._parts[name]:
                matrix = part.matrix
                if part.place is None:
                    clamped.add_clamped(total.view(runs, matrix.height, matrix.width), matrix, limit, keep)
                else:
                    lines = total.new_zeros(runs, matrix.height, matrix.width)
                    clamped.add_clamped(lines, matrix, limit, keep)
                    part.place.of(total.view(runs, -1)).add_(lines.view(runs, *part.place.size))
            totals[name] = total
        return totals

    def weighted_sums(self, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """sum_i weights_i row_i, one parameter after the other, without clipping or noise: NOT private. In float64."""
        for name, shape in self._shapes.items():
            yield name, self._exact(shape, self._parts[name], weights.double())

    def add_weighted_(self, totals: Mapping[str, Tensor], weights: Tensor) -> None:
        """totals += sum_i weights_i row_i, made in float64 with little memory: NOT private. They must be contiguous."""
        for name, shape in self._shapes.items():
            total = totals[name]
            for part in self._parts[name]:
                if part.place is not None:
                    total += self._exact(shape, [part], weights.double())
                    continue
                m = part.matrix
                for lines, made in sums.exact_sum_by_lines(m, weights.double()):
                    total.view(m.height, m.width)[lines] += made

    def sizes(self, weights: Tensor) -> dict[str, float]:
        """For each parameter, sum_i |weights_i| N_i, with N_i the norms of row i's addends: NOT private."""
        return {
            name: sum(float((inner.sizes(part.matrix) * weights.abs()).sum()) for part in parts)
            for name, parts in self._parts.items()
        }

    def __sub__(self, other: PerSample) -> PerSample:
        if not isinstance(other, PerSample):
            return NotImplemented
        self._check_other(other)
        parts = {
            name: placing.difference(shape, self._parts[name], other._parts[name], self.batch_size)
            for name, shape in self._shapes.items()
        }
        return PerSample(self.batch_size, self._shapes, parts)

    def __mul__(self, scale: Any) -> PerSample:
        number = checks.number("scale", scale, low=-math.inf)
        parts = {
            name: [Part(part.place, factors.scaled(part.matrix, number)) for part in parts]
            for name, parts in self._parts.items()
        }
        return PerSample(self.batch_size, self._shapes, parts)

    __rmul__ = __mul__

    def __neg__(self) -> PerSample:
        return self * -1.0

    def _zeros(self, *size: int) -> Tensor:
        device = next(iter(self._shapes.values())).device if self._shapes else torch.device("cpu")
        return torch.zeros(size, dtype=torch.float64, device=device)

    def _check_other(self, other: PerSample) -> None:
        if not isinstance(other, PerSample):
            raise ValueError(f"other: got a {type(other).__name__}, must be a PerSample")
        if other.batch_size != self.batch_size:
            raise ValueError(f"other: has {other.batch_size} samples, must have {self.batch_size}")
        if {n: s.size for n, s in other._shapes.items()} != {n: s.size for n, s in self._shapes.items()}:
            raise ValueError("other: is over other parameters, must be over those of this PerSample")

    def _squares(self, rounded: bool = False) -> tuple[Tensor, Tensor]:
        """Norm^2 of each row in each parameter, and the same rounded up: [B, parameters] in float64."""
        owners = [i for i, name in enumerate(self._shapes) for _ in self._parts[name]]
        found = inner.squared_norms([p.matrix for parts in self._parts.values() for p in parts], rounded=rounded)
        if owners == list(range(len(self._shapes))) and owners:
            return found
        where = torch.tensor(owners, dtype=torch.int64, device=found[0].device)
        zeros = self._zeros(self.batch_size, len(self._shapes))
        squares, uppers = (zeros.index_add(1, where, t) if owners else zeros for t in found)
        return squares, uppers * (1 + len(owners) * factors.UNIT)

    def _named(
        self, totals: list[Tensor], dtype: torch.dtype | None = None, out: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        named = {}
        for (name, shape), total in zip(self._shapes.items(), totals, strict=True):
            kind = dtype or wide_type(shape.dtype)
            if total.dtype == kind:
                named[name] = total
            else:
                given = None if out is None else out.get(name)
                named[name] = _fitting(given, shape.size, kind, shape.device).copy_(total)
        return named

    def _in_range(self, weights: Tensor, bounds: Tensor, keep: Tensor) -> bool:
        """Whether products of factors and coefficients in float32 are far from overflow and underflow.

        With |a|, |g| <= 2^40, bounds >= 2^-40 and coefficients in [2^-60, 2^20], what underflows in the sum of a row is
        below 2^-90: nothing, beside the 2^-23 that `rounded` norms are larger by.
        """
        factors_ = [
            x
            for parts in self._parts.values()
            for p in parts
            for x in factors.factors_of(p.matrix)
            if x.dtype != torch.float64
        ]
        if not factors_:
            return True
        used = weights[keep]
        used = used[used != 0]
        bounded = bool(((bounds == 0) | (bounds >= 2.0**-40)).all()) and products.full_precision(weights.device)
        if not bounded or (used.numel() and not 2.0**-60 <= float(used.min()) <= float(used.max()) <= 2.0**20):
            return False
        largest = torch.ops.dpkernels.row_squares(factors_)[keep]
        return not bool((largest > 2.0**80).any())

    def _product(self, parts: list[Part], weights: Tensor, keep: Tensor | None, target: Tensor) -> Tensor | None:
        """The weighted sum of parts that are one product of matrices in their own precision, in `target`."""
        if len(parts) != 1 or parts[0].place is not None:
            return None
        found = sums.product_sum(factors.zero_samples(parts[0].matrix, keep), weights, target)
        if found is None or torch.promote_types(found.dtype, target.dtype) != target.dtype:
            return None
        if found.dtype != target.dtype:
            return target.copy_(found.view(target.shape))
        return target if found.data_ptr() == target.data_ptr() else found.view(target.shape)

    def _exact(
        self,
        shape: Shape,
        parts: list[Part],
        weights: Tensor,
        keep: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        total = self._zeros(shape.size.numel()) if onto is None else onto.view(-1)
        for part in parts:
            matrix = factors.zero_samples(part.matrix, keep)
            if part.place is None:
                sums.add_exact_sum(total.view(matrix.height, matrix.width), matrix, weights)
            else:
                lines = total.new_zeros(matrix.height, matrix.width)
                placing.add(total, part.place, sums.add_exact_sum(lines, matrix, weights))
        return total.view(shape.size)

    def _norms(self, squares: Tensor) -> Tensor:
        wide = any(shape.dtype == torch.float64 for shape in self._shapes.values())
        return squares.sum(1).clamp(min=0).sqrt().to(torch.float64 if wide else torch.float32)

    def _check_sums(self, onto: Mapping[str, Tensor] | None) -> None:
        if onto is not None and {n: t.shape for n, t in onto.items()} != {n: s.size for n, s in self._shapes.items()}:
            raise ValueError("onto: has other names or shapes, must be a sum over the parameters of this PerSample")


def _fitting(given: Tensor | None, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor that is given, if it can hold the sum; else a new one."""
    wanted = (size, dtype, device)
    if given is not None and given.is_contiguous() and (given.shape, given.dtype, given.device) == wanted:
        return given
    return torch.empty(size, dtype=dtype, device=device)
