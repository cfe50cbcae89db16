"""What a recording adds to autograd's graph: taps, which turn a gradient that passes into terms of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpkernels.tape import Tape


class RecordingError(ValueError):
    """A model, or an op in it, whose per-sample gradients cannot be had exactly."""


def is_whole_view(t: Tensor) -> bool:
    """Whether a tensor is all of another one in another shape, as the output of a linear layer of sequences is."""
    base = t._base
    return base is not None and base.is_contiguous() and t.is_contiguous() and base.numel() == t.numel()


class Tap(torch.autograd.Function):
    """Identity on the outputs; its backward writes the terms. Saved tensors obey checkpointing like any op's."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tape: Tape, write: Callable[..., None], kind: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Hand the outputs on."""
        outputs, saved = tensors[:count], tensors[count:]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.write, ctx.op, ctx.saved_count = tape, write, tape.op, len(saved)
        if kind == "fresh":
            ctx.mark_dirty(*outputs)
            return outputs
        return tuple(t.view_as(t) if kind == "view" else t.clone() for t in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Write the terms, and hand the gradients on."""
        _refuse_second_derivative(ctx.tape)
        arrived = any([g is not None for g in gradients])
        if arrived:
            _refuse_from_outside(ctx)
        if ctx.tape.in_backward and arrived:
            saved = ctx.saved_tensors  # a checkpoint recomputes here, recorded
            with torch._C.DisableTorchFunction(), _no_grad(), no_autocast():
                ctx.tape.op = ctx.op
                ctx.write(saved, gradients)
        return (None, None, None, None, None, *gradients, *[None] * ctx.saved_count)


class Replaced(torch.autograd.Function):
    """An op whose backward is the library's own."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tape: Tape, write: Callable[..., Any], output: Tensor, input: Tensor
    ) -> Tensor:
        """Hand the output on."""
        ctx.save_for_backward(input)
        ctx.tape, ctx.write, ctx.op = tape, write, tape.op
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Write the terms; the gradient of the input."""
        tape: Tape = ctx.tape
        _refuse_second_derivative(tape)
        _refuse_from_outside(ctx)
        (input,) = ctx.saved_tensors  # a checkpoint recomputes here, recorded
        with torch._C.DisableTorchFunction(), _no_grad(), no_autocast():
            tape.op = ctx.op
            found = ctx.write(input, gradients[0], tape.in_backward, ctx.needs_input_grad[4])
        return None, None, None, None, found


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(...)`; without what torch prepares there for functorch, where none of it is active."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def _refuse_from_outside(ctx: Any) -> None:
    if ctx.tape.away:
        raise RecordingError(
            f"{ctx.op}: got a gradient from outside of the model, through a tensor that it made and did not "
            "return, which would be lost. Return that tensor from the model's forward"
        )


def _refuse_second_derivative(tape: Tape) -> None:
    if not tape.in_backward and torch.is_grad_enabled():
        raise RecordingError(
            "the model differentiates within its forward (create_graph=True): gradients of gradients are not recorded"
        )


_NOTHING = contextlib.nullcontext()


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """Autocast off, for every kind of device it may be on for."""
    devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not devices:
        return _NOTHING
    stack = contextlib.ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
