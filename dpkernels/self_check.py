"""The proof, once for each model and form of input, that recording it is exact.

An op sees shapes, not which dimension is the sample: time-major flattening, `x - x.mean(0)` or a permuted batch would
otherwise run silently wrong. On made-up inputs of the same form, with parameters a little off their values (so that one
that starts at zero hides nothing) and random ops held still:

  (i)   sum_i c_i row_i, for random c, is the plain autograd gradient of sum_i c_i loss_i
  (ii)  parts of the batch, each in another order, give the same rows as the whole; each sample is missing from one
  (iii) with the loss of some samples masked, their terms are exactly zero
  (iv)  after a step of its own, each sample's row is the plain autograd gradient at its own weights

Failing any refuses the model, naming parameter and op. What passed is the plan for later runs: where samples are in the
operands of each op. Data are looked at only where the model does not run on made-up values. What a model does only for
some values, or only for some batch sizes, is not proven.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpkernels import factors, planner, products
from dpkernels.each import Each
from dpkernels.factors import at_least_float
from dpkernels.members import Members, members_of
from dpkernels.nested import flat_tensors, map_tensors
from dpkernels.per_sample import PerSample
from dpkernels.record import LossFunction, backward, call, check_losses, record, refuse_bypass
from dpkernels.signatures import signature
from dpkernels.still import STILL, Still
from dpkernels.swapping import gradients_aside, running
from dpkernels.tape import Plan, RecordingError, Tape
from dpkernels.taps import no_autocast
from dpkernels.walk import Walk


class Proven(NamedTuple):
    """What a check found: where samples are, and the memory that kept rows of one sample would take."""

    plan: Plan
    row_bytes: int


_proven: weakref.WeakKeyDictionary[nn.Module, dict[Any, Proven]] = weakref.WeakKeyDictionary()


def ensure(
    model: nn.Module, members: Members, loss_fn: LossFunction, inputs: Any, targets: Any, walking: bool = False
) -> Proven:
    """What holds for this model and form of input; checks it when it is new, also (iv) if samples are to walk."""
    plans = _proven.setdefault(model, {})
    key = (signature(members, loss_fn, inputs, targets), walking)
    if key not in plans:
        if len(plans) >= 256:
            plans.clear()
        planner.keep_memory()
        plans[key] = check(model, loss_fn, inputs, targets, walking)
        planner.empty_pool()
    return plans[key]


def check(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, walking: bool = False, real: bool = False
) -> Proven:
    """Prove (i), (ii) and (iii), and (iv) if asked to, or raise; on `real` inputs and parameters as they are.

    The first check batch may have the size of something else in the model: a refusal there is tried again with another.
    Where a ReLU's input is zero but for rounding, a sample's gradient in float32 is another each time it is taken,
    which in a network of twenty layers happens to one batch in eight. So what was off by more than rounding twice is
    proven in float64; then float32 must have the same losses, the same gradients but for such samples, and zeros where
    (iii) has them, so that a model which mixes samples in float32 alone is still refused.
    """
    sizes = {n for t in flat_tensors(inputs) for n in t.shape[1:]}
    primes = [p for p in (3, 5, 7, 11, 13) if all(n % p for n in sizes)] + [3, 5]
    refused: list[RecordingError] = []
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]), gradients_aside(model.parameters()):
        proof = partial(_Proof, model, loss_fn, inputs, targets, only_real=real)
        for batch in primes[:2]:
            try:
                return proof(batch).found(walking)
            except RecordingError as error:
                refused.append(error)
        if all(isinstance(error, _OffError) for error in refused) and _can_widen(model, inputs):
            with contextlib.suppress(Exception):  # the model may have a type of its own
                wide = proof(primes[0], wide=True)
                wide.found(walking)
                for batch in primes[:2]:
                    narrow = proof(batch, loose=True)
                    if batch == primes[0] and not narrow.has_losses_of(wide):
                        break
                    with contextlib.suppress(_OffError):
                        return narrow.found(walking)
    raise refused[0]


class _OffError(RecordingError):
    """Two gradients that should be the same differ by more than rounding."""


def _can_widen(model: nn.Module, inputs: Any) -> bool:
    floats = [t for t in (*model.parameters(), *flat_tensors(inputs)) if t.is_floating_point()]
    return all(t.dtype == torch.float32 and t.is_cpu for t in floats) and not torch.is_autocast_enabled("cpu")


class _Proof:
    """A check at one batch size: inputs, parameters and weights to check with, and the ordinary gradient."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        inputs: Any,
        targets: Any,
        batch: int,
        only_real: bool = False,
        wide: bool = False,
        loose: bool = False,
    ) -> None:
        self.model, self.loss_fn, self.batch, self._loose = model, loss_fn, batch, loose
        self._wide: Callable[[Tensor], Tensor] = _in_float64 if wide else lambda t: t
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5
        normal, uniform = (partial(_made_up, batch, generator, draw) for draw in (torch.randn, torch.rand))
        real = partial(_repeated, batch)
        empty = not any(t.shape[1:].numel() for t in flat_tensors(inputs) if t.dim())  # then zero is all there is
        error: Exception | None = None
        attempts: list[tuple[bool, Any]]
        attempts = [(True, normal), (True, uniform), (False, normal), (False, uniform), (False, real)]
        for nudged, make in attempts[-1:] if only_real else attempts:
            self.inputs = map_tensors(self._wide, map_tensors(make, inputs))
            self.targets = map_tensors(self._wide, map_tensors(real if make is real else uniform, targets))
            try:
                found = self.ordinary(self._parameters(nudged), self.weights)
            except RecordingError:
                raise
            except Exception as failure:  # the model wants other values
                error = error or failure
                continue
            self.plain = {name: at_least_float(g).contiguous() for name, g in found.items()}
            norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in found.values()])
            if bool(norms.isfinite().all()) and (bool(norms.any()) or empty):
                self.losses = self._losses
                self.values = self._parameters(nudged) if nudged else {}  # made again, not kept: as large as the model
                return
        if error is not None:
            raise error
        raise RecordingError(
            "model: its gradients are zero or not finite on made-up inputs and on the first batch, so that it cannot "
            "be checked. Call it first on a batch with a finite loss that depends on the parameters"
        )

    def _parameters(self, nudged: bool) -> dict[str, Tensor]:
        """Copies of the parameters, the same each time: as they are, or a little off."""
        generator = torch.Generator().manual_seed(1)
        trainable = members_of(self.model).trainable
        return {
            name: self._wide(_nudged(p, generator) if nudged else p.detach().clone()) for name, p in trainable.items()
        }

    def has_losses_of(self, other: _Proof) -> bool:
        """Whether the forward is the same but for rounding."""
        size = other.losses.abs()
        return bool(((self.losses - other.losses).abs() <= 1e-4 * (size + size.mean())).all())

    def found(self, walking: bool) -> Proven:
        """Prove it."""
        plan: Plan = {}
        ops: dict[str, str] = {}
        choices: list[planner.Choice] = []

        def look(tape: Tape) -> None:
            plan.update(tape.seen)
            choices.extend(tape.choices)
            ops.update(_ops(tape))

        everyone = torch.arange(self.batch)
        rows = self.recorded(everyone, inspect=look)
        sizes = rows.sizes(self.weights)
        words = "the sum of its rows is not the ordinary gradient"
        types = {name: self._wide(p).dtype for name, p in members_of(self.model).trainable.items()}
        off = self.plain
        rows.add_weighted_(off, -self.weights)
        for name, t in off.items():
            _refuse_off(ops, sizes, name, t, types[name], words, loose=self._loose)
            t.zero_()
        parts = [everyone[everyone % 3 != missing].flip(0) for missing in range(3)]
        masks = [torch.zeros_like(self.weights).index_fill(0, part, 1.0) for part in parts]
        shares = (0.6, 0.9, 1.4)  # what parts are off by does not cancel in their sum
        mixed = sum((share * mask for share, mask in zip(shares, masks, strict=True)), torch.zeros_like(self.weights))
        rows.add_weighted_(off, self.weights * mixed)
        del rows
        for alike in (False, True):
            look_masked = partial(_check_masked, masks[0] == 0)
            self.recorded(everyone, mask=masks[0], plan=plan, inspect=look_masked, alike=alike)
        with products.of_every_size():  # large batches may take another way
            for part, share in zip(parts, shares, strict=True):
                self.recorded(part, plan=plan).add_weighted_(off, -share * self.weights[part])
        words = "a sample's row depends on which other samples are in the batch"
        for name, t in off.items():
            _refuse_off(ops, sizes, name, t, types[name], words, in_float32=(1e-5, 1e-7), loose=self._loose)
        off.clear()
        if walking:
            with no_autocast():  # two steps in half precision are too far from each other to tell
                self.check_walk(plan, ops)
        return Proven(plan, sum(choice.row_bytes for choice in choices))

    def check_walk(self, plan: Plan, ops: dict[str, str]) -> None:
        """Prove (iv), with steps of about a tenth of the parameters' size, or less where that is too far for them."""
        everyone = torch.arange(self.batch)
        parameters = self.values or self._parameters(nudged=False)
        first = self.recorded(everyone, plan=plan, each={})
        length = math.hypot(*(float(torch.linalg.vector_norm(p)) for p in parameters.values()))
        for share in (1e-1, 1e-2, 1e-3, 1e-4):
            rate = -share * length / max(float(first.norms().max()), 1e-30)
            if self._walked(first, rate, parameters, plan, ops):
                return
        raise RecordingError(
            "model: after a small step of its own, a sample's gradient is not finite on made-up inputs, so that local "
            "steps cannot be checked. Call it first on a batch with moderate losses"
        )

    def _walked(
        self, first: PerSample, rate: float, parameters: Mapping[str, Tensor], plan: Plan, ops: dict[str, str]
    ) -> bool:
        """Whether it was proven with steps of this size; False where ordinary gradients are not finite there."""
        everyone = torch.arange(self.batch)
        walk = Walk(self.batch, dict(parameters), 2, 0)
        walk.add(first, rate)
        before = {name: own.plain.clone() for name, own in walk.each().items() if own.memory is not None}

        def look(tape: Tape) -> None:  # at ops that no gradient passes, which have not been seen yet
            for what, kinds in tape.seen.items():
                plan.setdefault(what, kinds)

        rows = self.recorded(everyone, each=walk.each(), inspect=look)
        words = "after a step of its own, a sample's row is not the gradient at its own weights"
        for i in range(self.batch):
            chosen = torch.zeros_like(self.weights)
            chosen[i] = 1.0
            own = {name: p.clone() for name, p in parameters.items()}
            for name, total in first.weighted_sums(rate * chosen):
                own[name] += total
            plain, sizes = self.ordinary(own, chosen), rows.sizes(chosen)
            if not all(bool(g.isfinite().all()) for g in plain.values()):
                return False
            for name, total in rows.weighted_sums(chosen):
                off = total.sub_(plain.pop(name))
                dtype, loose = parameters[name].dtype, self._loose
                _refuse_off(ops, sizes, name, off, dtype, words, (1e-3, 1e-5), (2e-1, 2e-2), loose)
        for name, own_after in walk.each().items():
            if name in before and not torch.equal(own_after.plain, before[name]):
                raise _refusal(ops, name, "the model writes into what it is made of")
        return True

    def recorded(
        self,
        part: Tensor,
        mask: Tensor | None = None,
        plan: Plan | None = None,
        inspect: Callable[[Tape], None] | None = None,
        alike: bool = False,
        each: Mapping[str, Each] | None = None,
    ) -> PerSample:
        """The rows of some samples, in this order; or of as many that are nearly alike, which go one way if routed."""
        torch.manual_seed(0)
        x, y = (map_tensors(lambda t: t[part.to(t.device)] if t.dim() else t, z) for z in (self.inputs, self.targets))
        if alike:
            x = map_tensors(lambda t: _repeated(len(part), t[:1]) if t.dim() else t, x)
        return record(
            self.model,
            self.loss_fn,
            x,
            y,
            len(part),
            plan=plan,
            weights=mask,
            values=self.values or self._parameters(nudged=False),
            buffers=self.constants(),
            replaced=STILL,
            inspect=inspect,
            each=each,
        )

    def constants(self) -> dict[int, Tensor]:
        """Copies of buffers and frozen parameters, by the ids of those, for a model that writes into them."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        return {id(t): self._wide(t.detach().clone()) for t in (*self.model.buffers(), *frozen)}

    def ordinary(self, values: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
        """The ordinary gradient of sum_i weights_i loss_i at values, which may change; the model is left as it was."""
        torch.manual_seed(0)
        members = members_of(self.model)
        parameters = members.trainable
        leaves = {name: nn.Parameter(values[name]) for name in parameters}
        swaps: dict[int, Tensor] = {id(p): leaves[name] for name, p in parameters.items()}
        swaps |= self.constants()
        with running(members, swaps, undone=True), Still():
            losses = self.loss_fn(call(self.model, self.inputs), self.targets)
            check_losses(losses, self.batch)
            self._losses = losses.detach().double()
            if losses.requires_grad:
                with no_autocast():
                    backward(losses, weights.to(losses))
        refuse_bypass(parameters)
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}


def _in_float64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _ops(tape: Tape) -> dict[str, str]:
    """For each parameter, the ops it was seen in."""
    found: dict[str, set[str]] = {}
    for t in tape.tracked:
        for name in t._leaves:
            found.setdefault(name, set()).update(tape.ops.get(id(t), ()))
    return {name: ", ".join(sorted(ops)) for name, ops in found.items()}


def _check_masked(masked: Tensor, tape: Tape) -> None:
    for t in tape.tracked:
        terms = [term.values if isinstance(term, factors.Dense) else term.g for term in tape.terms.get(id(t), ())]
        for values in (*terms, *tape.aligned.get(id(t), ())):
            if bool((values[masked.to(values.device)] != 0).any()):
                raise _refusal(_ops(tape), t._leaves[0], "a sample's loss depends on other samples")


def _refuse_off(
    ops: dict[str, str],
    sizes: dict[str, float],
    name: str,
    difference: Tensor,
    dtype: torch.dtype,
    words: str,
    in_float32: tuple[float, float] = (2e-4, 1e-6),
    in_half: tuple[float, float] = (5e-2, 1e-3),
    loose: bool = False,
) -> None:
    """Refuse a parameter of some type whose sums differ by more than rounding."""
    coarse = loose or dtype.itemsize < 4 or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    own, others = in_half if coarse else (1e-7, 1e-10) if dtype == torch.float64 else in_float32
    error = float(difference.norm())
    if not error <= own * sizes[name] + others * sum(sizes.values()):  # a NaN is no proof
        raise _refusal(ops, name, f"{words} (off by {error:.1e})", _OffError)


def _refusal(ops: dict[str, str], name: str, words: str, kind: type[RecordingError] = RecordingError) -> RecordingError:
    where = f" in {ops[name]}" if ops.get(name) else ""
    return kind(
        f"parameter {name}{where}: {words}. The model or loss_fn mixes samples, keeps them in another dimension than "
        "dim 0, or uses the parameter where it is not seen. Keep samples in dim 0 and apart"
    )


def _nudged(p: Tensor, generator: torch.Generator) -> Tensor:
    """A parameter moved by a tenth of its size, or of one."""
    scale = float(torch.linalg.vector_norm(at_least_float(p.detach()))) / max(p.numel(), 1) ** 0.5 or 1.0
    return torch.randn(p.shape, generator=generator).mul_(0.1 * scale).to(p).add_(p.detach())


def _made_up(batch: int, generator: torch.Generator, draw: Callable[..., Tensor], t: Tensor) -> Tensor:
    if t.dim() == 0:
        return t
    shape = (batch, *t.shape[1:])
    if t.dtype == torch.bool:  # as many as no other sample has, not in order, neither none nor all
        size = max(t.shape[1:].numel(), 1)
        count = 1 + (torch.arange(batch) * 2 + 1) % batch % max(size - 1, 1)
        return (torch.arange(size) < count[:, None]).view(shape).to(t.device)
    if t.is_floating_point():
        values = draw(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    return values.to(dtype=t.dtype, device=t.device)


def _repeated(batch: int, t: Tensor) -> Tensor:
    """Samples again and again, numbers a little off each time, so that no two are alike."""
    if t.dim() == 0:
        return t
    again = torch.arange(batch, device=t.device)
    values = t[again % len(t)].detach()
    scale = (1 + 0.01 * (again // len(t))).view(-1, *[1] * (t.dim() - 1))
    return (values * scale).to(t.dtype) if t.is_floating_point() else values
