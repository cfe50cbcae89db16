"""A model in somebody else's training loop: its ordinary backward leaves rows, and no gradient.

The forward is recorded and handed out through one node of autograd's graph. When `loss.backward()` reaches that node,
it runs the model's own backward under the recording, nested, as a reentrant checkpoint does; so the loop in between,
the loss and who calls backward are the user's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpkernels import self_check
from dpkernels.gradients import batch_of, per_sample_gradients, room_for
from dpkernels.members import Members, members_of
from dpkernels.nested import flat_tensors, map_tensors, rebuilt
from dpkernels.opacus.loader import Given, HandOuts
from dpkernels.per_sample import PerSample
from dpkernels.places import Places, filled
from dpkernels.placing import Shape
from dpkernels.record import Recording, call
from dpkernels.tape import RecordingError

Reduction = Literal["mean", "sum"]


class Rows(NamedTuple):
    """Rows of one backward, or of a part of one; which of them count; the forward they are of, and its batch."""

    rows: PerSample
    where: Tensor | None
    forward: int
    given: Given | None


class PrivateModule(nn.Module):
    """The model, wrapped: call it as before. In train mode, rows of each backward wait here for the optimizer's step.

    The loss must be the mean (or the sum, with `loss_reduction="sum"`) of what each sample contributes, as Opacus wants
    it: what it does with outputs of several samples together is not seen here, and would not be private. A mean over
    tokens is one only where every sample has as many: else sum over tokens and divide by a constant. A loss that the
    model makes itself is no such output, and gradients through it are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: Reduction = "mean",
        max_bytes: int | None = None,
        physical_batch_size: int | None = None,
        secure: bool = False,
    ) -> None:
        """`physical_batch_size`: run the model on exactly so many samples at a time, filled up with zeros.

        `secure`: refuse a model whose rows have other bits in other places of such a batch.
        """
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction: got {loss_reduction!r}, must be 'mean' or 'sum'")
        self._module = module
        self.loss_reduction = loss_reduction
        self._max_bytes = max_bytes
        self._names = {id(p): name for name, p in members_of(module).trainable.items()}
        self._size = physical_batch_size
        self._places = Places(secure=secure)
        self._rows: list[Rows] = []
        self._forwards = 0
        self._projection = _Projection()
        self.handed = HandOuts()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The model's own; recorded in train mode, if gradients are on."""
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*arguments, **keywords)
        members = self.check_parameters()
        inputs: Any = arguments if not keywords else {**dict(enumerate(arguments)), **keywords}
        batch = batch_of(inputs, None)
        self._forwards += 1
        if batch == 0:
            return self._of_nobody(inputs)
        if self._size is None:
            return self._of_samples(members, inputs, batch, batch)
        parts = []
        for first in range(0, batch, self._size):
            count = min(self._size, batch - first)
            part = map_tensors(partial(_filled, first, self._size), inputs)
            self._places.check(self._module, self._gradients, part, None)
            where = torch.arange(self._size) < count
            parts.append(_first_of(self._of_samples(members, part, self._size, batch, where), count))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gradients(self, inputs: Any, targets: Any) -> PerSample:
        return per_sample_gradients(self._module, self._projection, inputs, targets, max_bytes=self._max_bytes)

    def _of_nobody(self, inputs: Any) -> Any:
        with torch.no_grad():
            outputs = call(self._module, inputs)
        real = [t for t in flat_tensors(_as_mapping(outputs)) if t.is_floating_point()]
        return _handed_out(outputs, _Backward(self, None, real, (), 0))

    def _of_samples(self, members: Members, inputs: Any, batch: int, counted: int, where: Tensor | None = None) -> Any:
        """Outputs for a batch, of which `where` counts; `counted` is how many samples a mean is taken over."""
        plan = self_check.ensure(self._module, members, self._projection, inputs, None).plan
        recording = Recording(members, batch, plan=plan, room=room_for(members, self._max_bytes))
        outside = tuple(t for t in flat_tensors(inputs) if t.requires_grad)
        inside = {id(t): t.detach().requires_grad_() for t in outside}
        given = recording.take_in(map_tensors(lambda t: inside.get(id(t), t), inputs))

        def forward() -> Any:
            outputs = call(self._module, given)
            recording.refuse_changes()
            return outputs

        outputs = recording.run(forward)
        tensors = [t for t in flat_tensors(_as_mapping(outputs)) if t.requires_grad]
        aside = [t for i, t in enumerate(tensors) if i in self._projection.aside or not t.dim() or len(t) != batch]
        kept = [t for t in tensors if all(t is not other for other in aside)]
        backward = _Backward(self, recording, kept, tuple(inside.values()), counted, where)
        return _handed_out(outputs, backward, outside, aside)

    def check_parameters(self) -> Members:
        """Refuse a model whose trainable parameters are no longer those that were wrapped."""
        members = members_of(self._module)
        now = {id(p): name for name, p in members.trainable.items()}
        if now.keys() != self._names.keys():
            new = [name for i, name in now.items() if i not in self._names]
            gone = [name for i, name in self._names.items() if i not in now]
            what = f"parameter {new[0]} is new" if new else f"parameter {gone[0]} no longer trains"
            raise ValueError(
                f"model: {what} since make_private, which would train it without noise or not at all. Replace, freeze "
                "or add parameters (LoRA) first, then make the optimizer, then call make_private"
            )
        return members

    def add_rows(self, rows: Rows) -> None:
        """Of one backward, or of a part of one."""
        self._rows.append(rows)

    def take_rows(self) -> list[Rows]:
        """Of all backwards since the last step; they are not kept."""
        rows, self._rows = self._rows, []
        return rows

    def to_standard_module(self) -> nn.Module:
        """The model that was wrapped, which was never changed."""
        return self._module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def __repr__(self) -> str:
        return f"PrivateModule({self._module!r})"


class _Backward:
    """A model's backward that has not run yet: its outputs, and where its rows go."""

    def __init__(
        self,
        owner: PrivateModule,
        recording: Recording | None,
        outputs: list[Tensor],
        inputs: tuple[Tensor, ...],
        counted: int,
        where: Tensor | None = None,
    ) -> None:
        self._owner, self._recording, self._inputs, self._where = owner, recording, inputs, where
        self._forward, self._given = owner._forwards, owner.handed.last
        self._factor = counted if owner.loss_reduction == "mean" else 1
        self.outputs = outputs
        self._is_done = False

    def run(self, gradients: tuple[Tensor | None, ...], keep: bool) -> tuple[Tensor | None, ...]:
        """The gradients of inputs that have one; `keep`: rows too."""
        if self._is_done:
            raise RuntimeError(
                "backward: came a second time through one forward of a private model (retain_graph=True), which keeps "
                "its graph for one. Add the losses up first, or run the model again"
            )
        self._is_done = True
        if self._recording is None:
            members = members_of(self._owner._module)
            shapes = {name: Shape(p.shape, p.dtype, p.device) for name, p in members.trainable.items()}
            if keep:
                self._owner.add_rows(Rows(PerSample(0, shapes, {}), None, self._forward, self._given))
            return ()
        recording, factor = self._recording, self._factor
        pairs = [(y, g * factor) for y, g in zip(self.outputs, gradients, strict=True) if g is not None]

        def differentiate() -> None:
            if pairs:
                recording.backward(*zip(*pairs, strict=True))

        with recording.closing():
            recording.run(differentiate)
            if keep:
                self._owner.add_rows(Rows(recording.rows(), self._where, self._forward, self._given))
        found = tuple(None if t.grad is None else t.grad / factor for t in self._inputs)
        self.outputs, self._inputs, self._recording = [], (), None
        return found

    def __del__(self) -> None:
        if self._recording is not None:  # a forward without a backward: tape and stand-ins hold one another
            self._recording.tape.close()


class _Door(torch.autograd.Function):
    """Hands outputs out; gradients that come back in run the model's backward."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, anchor: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        """The outputs, without the graph behind them."""
        ctx.inner, ctx.anchor = backward, torch.autograd.graph.get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        return tuple(t.detach() for t in backward.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Run it; rows are for `loss.backward()`, not where somebody asks for the gradient of inputs alone."""
        keep = torch._C._will_engine_execute_node(ctx.anchor)
        return None, None, *ctx.inner.run(gradients, keep)


class _Wall(torch.autograd.Function):
    """Hands out what must not be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, t: Tensor) -> Tensor:
        """As it is."""
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Refused."""
        raise RecordingError(
            "backward: through an output of the model whose dim 0 is not the sample (a loss that the model makes "
            "itself, a statistic of the batch), which may mix samples: nothing would bound what one of them does. "
            "Compute the loss in the loop, from outputs with samples in dim 0, as a mean or sum over samples"
        )


def _handed_out(
    outputs: Any, backward: _Backward, outside: tuple[Tensor, ...] = (), aside: Sequence[Tensor] = ()
) -> Any:
    """The outputs in the container they came in, each through the door."""
    if not backward.outputs:
        raise RecordingError(
            "model: returned no tensor with samples in dim 0 that depends on its parameters: nothing would train"
        )
    anchor = torch.zeros((), requires_grad=True)
    through = _Door.apply(backward, anchor, *outside)
    by_id = {id(t): new for t, new in zip(backward.outputs, through, strict=True)}
    by_id |= {id(t): _Wall.apply(anchor, t) for t in aside}
    return rebuilt(lambda t: by_id.get(id(t), t), outputs)


def _as_mapping(x: Any) -> Any:
    return vars(x) if dataclasses.is_dataclass(x) and not isinstance(x, Mapping) else x


def _filled(first: int, size: int, t: Tensor) -> Tensor:
    return filled(t, first, size) if t.dim() else t


def _first_of(outputs: Any, count: int) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0:
        raise RecordingError(
            "model: must return one tensor with samples in dim 0 where it runs in parts of a fixed size"
        )
    return outputs[:count]


class _Projection:
    """One number for each sample from a model's outputs: what the self-check differentiates in place of a loss.

    Notes which outputs have not the sample in dim 0, in the order of all that depend on parameters.
    """

    def __init__(self) -> None:
        self.aside: set[int] = set()

    def __call__(self, outputs: Any, _: Any) -> Tensor:
        total: Tensor | None = None
        depending = [t for t in flat_tensors(_as_mapping(outputs)) if t.requires_grad and t.is_floating_point()]
        for i, t in enumerate(depending):
            if t.dim() == 0 or (total is not None and len(t) != len(total)):
                self.aside.add(i)
                continue
            lines = t.reshape(t.shape[0], -1).float()
            along = torch.arange(lines.shape[1], device=t.device, dtype=torch.float32)
            part = (lines * torch.cos(along + 0.5)).sum(1) / max(lines.shape[1], 1) ** 0.5
            total = part if total is None else total + part
        if total is None:
            raise RecordingError(
                "model: returned no tensor with samples in dim 0, must return outputs and leave the loss to the loop"
            )
        return total
