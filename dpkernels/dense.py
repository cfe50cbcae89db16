"""Clip, difference, sum and noise per-sample tensors that are in memory: one native call each.

`vectors`, `now` and `before` are a tensor [B, ...] or a sequence of them; dim 0 is the sample and row i of
all tensors together is the vector of sample i. The sum comes back in the same container, float64 for float64
input and float32 otherwise.

What is released is the sum, and only when `noise` is given. `norms` are those of the rows before clipping:
they are for diagnosis and NOT private.

Soundness. The coefficients keep the bound of the clip rule in real arithmetic (norms are float64 sums of
exact squares, rounded up). The sum is accumulated in float64, noise is added there, and the result is rounded
once, after the noise: the rounding error E of the sum itself, which widens the sensitivity to S + 2E, is below
B^2 * 2^-53 * S for B rows. A row with a NaN or an Inf counts as zero, whatever the rule; so does a float64 row
whose squared norm overflows. An empty batch releases noise alone. Nothing raises depending on values.

Any strides do; a tensor whose samples are not each contiguous is copied first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dpkernels import checks, clipping, ops  # noqa: F401  (ops registers torch.ops.dpkernels)
from dpkernels.noise import Gaussian

Tensors = TypeVar("Tensors", Tensor, Sequence[Tensor])


class ClippedSum(NamedTuple):
    """A clipped sum over samples, and the norms [B] of the rows before clipping: NOT private."""

    sum: Any
    norms: Tensor


class SparseMessage(NamedTuple):
    """The kept coordinates of a vector of `size` elements, scaled so that its expectation is the vector."""

    indices: Tensor
    values: Tensor
    size: int

    def to_dense(self) -> Tensor:
        """The vector with zeros where nothing was kept."""
        return self.values.new_zeros(self.size).index_put((self.indices,), self.values)


def clip_sum(vectors: Tensors, clip: float | clipping.Rule, *, noise: Gaussian | None = None) -> ClippedSum:
    """Clip each sample's vector, sum over samples, add noise. Equivalent, for a float `clip`, to::

        norms  = torch.stack([v.flatten(1).norm(dim=1) for v in vectors]).norm(dim=0)
        scale  = (clip / norms).clamp(max=1)
        sum    = [torch.einsum("b,b...->...", scale, v) for v in vectors]
        sum    = [s + noise.std * torch.randn_like(s) for s in sum]

    Args:
        vectors: per-sample tensors, [B, ...].
        clip: the largest norm of a row, or a rule: `Flat`, `Automatic` or `PerLayer`.
        noise: added to every coordinate of the sum. Without it nothing here is private.

    Sensitivity of the sum: `clip` under add-remove, twice that under replace-one; see `rule.sensitivity`.
    """
    tensors = checks.per_sample("vectors", vectors)
    rule, max_norms, stability = norm_rule(clip, len(tensors))
    result = _sum(
        "clip_sum", [tensors], max_norms, stability, *take_release(noise, rule.sensitivity(), _width(tensors))
    )
    return _like(vectors, *result)


def clip_difference_sum(
    now: Tensors, before: Tensors, clip: float | clipping.Rule, *, noise: Gaussian | None = None
) -> ClippedSum:
    """`clip_sum` of `now - before`, without forming the difference in memory.

    Args:
        now: per-sample tensors, [B, ...].
        before: tensors of the same shapes and types, or without dim 0: one vector for all samples
            (local weights minus the weights they started from).
        clip: as in `clip_sum`, for the difference.
        noise: as in `clip_sum`.

    The difference is taken in float64 registers: it does not cancel where the two nearly agree, so the bound
    holds there too. Sensitivity as in `clip_sum`.
    """
    tensors = checks.per_sample("now", now)
    others = checks.matching("before", before, tensors)
    rule, max_norms, stability = norm_rule(clip, len(tensors))
    result = _sum(
        "clip_difference_sum",
        [tensors, others],
        max_norms,
        stability,
        *take_release(noise, rule.sensitivity(), _width(tensors)),
    )
    return _like(now, *result)


def clip_momentum_sum(
    now: Tensors,
    before: Tensors,
    *,
    gradient_norm: float,
    difference_norm: float,
    momentum: float,
    noise: Gaussian | None = None,
) -> ClippedSum:
    """Sum of the recursive-momentum rows of PriSMA, from each sample's gradients at two points. Equivalent to::

        a, b = clip(now, gradient_norm), clip(before, gradient_norm)
        sum  = (momentum * a + (1 - momentum) * clip(a - b, difference_norm)).sum(0) + noise

    Args:
        now: per-sample gradients at the current point, [B, ...].
        before: those at the point before, same shapes and types (or one vector for all samples).
        gradient_norm: bound C1 on each gradient.
        difference_norm: bound C3 on the difference of the two clipped gradients.
        momentum: gamma, between 0 and 1.
        noise: as in `clip_sum`.

    Sensitivity of the sum: momentum * C1 + (1 - momentum) * C3 under add-remove, twice that under replace-one.
    `norms` are those of `now`. The sum counts rows as zero whose `now` or `before` has a NaN or an Inf.
    """
    rule = clipping.RecursiveMomentum(gradient_norm, difference_norm, momentum)
    tensors = checks.per_sample("now", now)
    others = checks.matching("before", before, tensors)
    bounds = _bounds(gradient_norm, difference_norm, momentum)
    result = _sum(
        "clip_momentum_sum", [tensors, others], bounds, *take_release(noise, rule.sensitivity(), _width(tensors))
    )
    return _like(now, *result)


def clamp_sum(vectors: Tensors, bound: float, *, noise: Gaussian | None = None) -> ClippedSum:
    """Clamp each coordinate of each sample to [-bound, bound], sum over samples, add noise.

    Sensitivity of the sum under add-remove: `bound` in each coordinate, so bound * sqrt(d) in L2 norm for d
    coordinates in all; twice that under replace-one.
    """
    limit = checks.number("bound", bound, low=0, finite=False)
    tensors = checks.per_sample("vectors", vectors)
    width = _width(tensors)
    released = take_release(noise, limit * math.sqrt(width) if width else 0.0, width)
    return _like(vectors, *_sum("clamp_sum", [tensors], _bounds(limit), *released))


def add_gaussian_(tensors: Tensors, noise: Gaussian, *, sensitivity: float | None = None) -> Tensors:
    """Add noise to every coordinate of the tensors, in place; returns them. To autograd it is the identity.

    `sensitivity`: the L2 sensitivity of what the tensors hold, which only the caller knows; needed when `noise`
    has a ledger. bfloat16 and float16 tensors are noised in float32 and rounded.
    """
    targets = checks.tensor_list("tensors", tensors)
    for i, t in enumerate(targets):
        if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
            raise ValueError(f"tensors[{i}]: is an expanded view, must have memory of its own for each element")
    if len({id(t) for t in targets}) < len(targets):
        raise ValueError("tensors: the same tensor is there twice, each must be there once")
    check_noise(noise)
    with torch.no_grad():
        torch.ops.dpkernels.add_gaussian_(targets, *noise.release(sensitivity, sum(t.numel() for t in targets)))
    for t in targets:
        if not t.is_inference():
            torch.autograd.graph.increment_version(t)
    return tensors


def sparsify(
    vector: Tensor,
    keep_probability: float,
    *,
    seed: int,
    noise: Gaussian | None = None,
    sensitivity: float | None = None,
) -> SparseMessage:
    """Keep each coordinate with `keep_probability`, add noise to the kept ones, divide by the probability.

    Equivalent to::

        kept   = torch.rand(vector.numel(), generator=seeded) < keep_probability
        values = (vector[kept] + noise.std * torch.randn(kept.sum())) / keep_probability

    Args:
        vector: one-dimensional.
        keep_probability: in (0, 1]; resolved to multiples of 2^-32.
        seed: of the mask, an integer in [0, 2^63). The mask does not depend on data and is public: whoever
            has the seed knows the indices. It shares no randomness with the noise, even for equal seeds.
        noise: on the kept coordinates only, before the division.
        sensitivity: the L2 sensitivity of the kept coordinates; needed when `noise` has a ledger.
    """
    checks.tensor_list("vector", vector)
    if vector.dim() != 1:
        raise ValueError(f"vector: has shape {tuple(vector.shape)}, must be one-dimensional")
    probability = checks.number("keep_probability", keep_probability, low=2.0**-32, high=1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed: got {seed!r}, must be an integer, at least 0 and below 2**63")
    key = torch.tensor([seed], dtype=torch.int64, device="cpu")
    released = take_release(noise, sensitivity, vector.numel())
    values, indices = _called("sparsify", [vector], vector, probability, key, *released)
    return SparseMessage(indices, values, vector.numel())


def masks(
    seeds: Sequence[int], size: int, keep_probability: float, *, with_indices: bool = True
) -> tuple[Tensor, list[int]]:
    """What `sparsify` keeps of vectors [N, size], a seed each: indices, counted over all of them; how many of each.

    No indices, which take memory, where only their numbers are wanted.
    """
    probability = checks.number("keep_probability", keep_probability, low=2.0**-32, high=1)
    keys = torch.tensor(seeds, dtype=torch.int64, device="cpu")
    indices, counts = torch.ops.dpkernels.masks(keys, size, probability, with_indices)
    return indices, counts.tolist()


def add_gaussian_each_(
    values: Tensor, counts: Sequence[int], noises: Sequence[Gaussian], sensitivities: Sequence[float]
) -> Tensor:
    """`add_gaussian_` of vectors behind one another, so many values each, with a Gaussian (all secure or none) each."""
    released = [take_release(noise, s, n) for noise, s, n in zip(noises, sensitivities, counts, strict=True)]
    streams, stds = (torch.stack(parts) for parts in zip(*released, strict=True))
    numbers = torch.tensor(counts, dtype=torch.int64, device="cpu")
    torch.ops.dpkernels.add_gaussian_each_(values, numbers, streams, stds)
    return values


def _sum(name: str, lists: list[list[Tensor]], *arguments: object) -> tuple[list[Tensor], Tensor]:
    found = _called(name, (t for tensors in lists for t in tensors), *lists, *arguments)
    return found  # type: ignore[no-any-return]


def _called(name: str, differentiable: Iterable[Tensor], *arguments: object) -> Any:
    """An op of ours; past torch's Python layer for autograd, which costs a microsecond a tensor, where it can be."""
    op = getattr(torch.ops.dpkernels, name).default
    if torch.compiler.is_compiling():
        return op(*arguments)
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(f"{name}: has no forward-mode derivative, only reverse mode (backward)")
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or (torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)):
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _width(tensors: list[Tensor]) -> int:
    """How many coordinates the sum has."""
    batch = tensors[0].size(0)
    return sum(map(Tensor.numel, tensors)) // batch if batch else sum(math.prod(t.shape[1:]) for t in tensors)


def _bounds(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def norm_rule(clip: object, count: int) -> tuple[clipping.Rule, Tensor, float | None]:
    """The rule, its bounds (one, or one for each tensor) and its stability constant."""
    rule = clipping.as_rule(clip)
    if isinstance(rule, clipping.Flat):
        return rule, _bounds(rule.max_norm), None
    if isinstance(rule, clipping.Automatic):
        return rule, _bounds(rule.max_norm), rule.stability
    if isinstance(rule, clipping.PerLayer):
        if len(rule.max_norms) != count:
            raise ValueError(f"clip: PerLayer has {len(rule.max_norms)} bounds, must have {count}, one for each tensor")
        return rule, _bounds(*rule.max_norms), None
    raise ValueError(f"clip: got {rule!r}, must be a number, Flat, Automatic or PerLayer here")


def check_noise(noise: object) -> None:
    """Refuse anything but a Gaussian."""
    if not isinstance(noise, Gaussian):
        raise ValueError(f"noise: got {noise!r}, must be a dpkernels.Gaussian")


def take_release(noise: Gaussian | None, sensitivity: float | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Stream and std of the next release, entered in the ledger; nothing without noise."""
    if noise is None:
        return None, None
    check_noise(noise)
    return noise.release(sensitivity, width)


def _like(container: object, sums: list[Tensor], norms: Tensor) -> ClippedSum:
    if isinstance(container, Tensor):
        return ClippedSum(sums[0], norms)
    return ClippedSum(tuple(sums) if isinstance(container, tuple) else sums, norms)
