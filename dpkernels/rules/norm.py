"""Normalisation layers: scale and shift are Dense terms, from the normalised input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels.layouts import Layout
from dpkernels.rules.broadcast import promote
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import apart, named, plain, reduced, reduced_to_channels, rule, tracked, values_of
from dpkernels.tape import RecordingError, Tape, Tracked


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    tape: Tape,
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """y = w * normalised(x) + b over the last dimensions."""

    def normalise(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
        if w is None or w.dim() == len(normalized_shape):
            return torch.layer_norm(x, tuple(normalized_shape), w, b, eps)
        n = F.layer_norm(x, tuple(normalized_shape), eps=eps).view(tape.batch, -1, *normalized_shape)
        y = n.mul_(w.unsqueeze(1)) if b is None else torch.addcmul(b.unsqueeze(1), n, w.unsqueeze(1))
        return y.view(x.shape)

    def rows(x: Tensor, g: Tensor, w: Tensor, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
        lines = (tape.batch, -1, w.shape[-1])
        return torch.ops.dpkernels.layer_norm_rows(x.reshape(lines), g.reshape(lines), w, eps, needed)  # type: ignore[no-any-return]

    return _over_last(tape, "layer_norm", normalise, input, len(normalized_shape), weight, bias, rows)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    tape: Tape, input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """y = w * x / rms(x) over the last dimensions."""

    def normalise(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
        return F.rms_norm(x, tuple(normalized_shape), w, eps)

    return _over_last(tape, "rms_norm", normalise, input, len(normalized_shape), weight, None)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    tape: Tape,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """y = w * normalised(x) + b, one w and b for each channel."""

    def normalise(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
        if w is None or w.dim() == 1:
            return torch.group_norm(x, num_groups, w, b, eps)
        images, scale, shift = x.reshape(1, -1, *x.shape[2:]), w.flatten(), None if b is None else b.flatten()
        return F.group_norm(images, len(x) * num_groups, scale, shift, eps).view(x.shape)  # groups of one image

    def rows(x: Tensor, g: Tensor, w: Tensor, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
        places = (*x.shape[:2], x.shape[2:].numel())
        return torch.ops.dpkernels.group_norm_rows(x.reshape(places), g.reshape(places), w, num_groups, eps, needed)  # type: ignore[no-any-return]

    return _over_channels(tape, "group_norm", normalise, input, weight, bias, rows)


@rule(F.instance_norm)
def instance_norm(
    tape: Tape,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """As group_norm with a group for each channel, or with running statistics as constants."""

    def normalise(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
        return F.instance_norm(x, running_mean, running_var, w, b, use_input_stats, momentum, eps)

    return _over_channels(tape, "instance_norm", normalise, input, weight, bias)


@rule(F.batch_norm)
def batch_norm(
    tape: Tape,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """With running statistics as constants."""

    def normalise(x: Tensor, w: Any = None, b: Any = None) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, w, b, False, momentum, eps)

    return _over_channels(tape, "batch_norm", normalise, input, weight, bias)


def refuse_mixing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse norm layers that take statistics over the batch or keep running ones of it."""
    if func is F.batch_norm and (args[5] if len(args) > 5 else kwargs.get("training", False)):
        raise RecordingError(
            "batch_norm in training mode: mixes the samples of a batch, so no sample has a gradient of its own. "
            "Replace it by GroupNorm or LayerNorm, or put it in eval mode"
        )
    if func is F.instance_norm and (args[5] if len(args) > 5 else kwargs.get("use_input_stats", True)):
        mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
        if mean is not None:
            raise RecordingError(
                "instance_norm with running statistics in training mode: they mix the samples of a batch and are "
                "released without noise. Use track_running_stats=False, or put it in eval mode"
            )


# (the input's gradient if it is needed, rows of scale, rows of shift) from (input, output gradient, scale, needed)
Rows = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def _over_last(
    tape: Tape,
    name: str,
    normalise: Callable[..., Tensor],
    input: Any,
    event: int,
    weight: Any,
    bias: Any,
    rows: Rows | None = None,
) -> Any:
    if tracked(input):
        return fallback(tape, normalise, (input, weight, bias), {})
    layout = tape.layout(input, input.dim() - event, named(name, weight, bias))
    if rows is not None and isinstance(weight, Tracked) and _in_order(layout, input, weight):
        return _replaced(tape, normalise, rows, input, weight, bias, lambda t: t, lambda t: t)
    if apart(weight, bias):
        return _scaled_apart(tape, normalise(input), weight, bias, layout, (1,) * (input.dim() - event), ())

    def write(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (g,) = gradients
        assert g is not None
        if isinstance(weight, Tracked):
            tape.add_dense(weight, reduced(tape, g * normalise(saved[0]), layout, event))
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced(tape, g, layout, event))

    output = normalise(input, plain(weight), plain(bias))
    return tape.tap((output,), (input,) if tracked(weight) else (), write)[0]


def _over_channels(
    tape: Tape,
    name: str,
    normalise: Callable[..., Tensor],
    input: Any,
    weight: Any,
    bias: Any,
    rows: Rows | None = None,
) -> Any:
    if tracked(input) or input.dim() < 2:
        return fallback(tape, normalise, (input, weight, bias), {})
    layout = tape.layout(input, 1, named(name, weight, bias))
    if rows is not None and isinstance(weight, Tracked) and _in_order(layout, input, weight):
        by_sample, copies = (lambda t: reduced(tape, t, layout, 1)), layout.copies
        return _replaced(tape, normalise, rows, input, weight, bias, by_sample, copies)
    if apart(weight, bias):
        return _scaled_apart(tape, normalise(input), weight, bias, layout, (1,), (1,) * (input.dim() - 2))

    def write(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (g,) = gradients
        assert g is not None
        if isinstance(weight, Tracked):
            tape.add_dense(weight, reduced_to_channels(tape, g * normalise(saved[0]), layout))
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced_to_channels(tape, g, layout))

    output = normalise(input, plain(weight), plain(bias))
    return tape.tap((output,), (input,) if tracked(weight) else (), write)[0]


def _in_order(layout: Layout, input: Tensor, weight: Tracked) -> bool:
    """Whether the fused backward serves: float32, and samples one after the other in dim 0."""
    return layout.in_dim_0 and layout.lines is None and input.dtype == weight._value.dtype == torch.float32


def _replaced(
    tape: Tape,
    normalise: Callable[..., Tensor],
    rows: Rows,
    input: Tensor,
    weight: Tracked,
    bias: Any,
    by_sample: Callable[[Tensor], Tensor],
    copies: Callable[[Tensor], Tensor],
) -> Tensor:
    """The layer with a backward that gives rows and the input's gradient in one pass."""
    each = apart(weight, bias)
    w, b = (copies(values_of(tape, t)) if each and t is not None else plain(t) for t in (weight, bias))

    def backward(x: Tensor, g: Tensor, write: bool, needed: bool) -> Tensor | None:
        dx, scale, shift = rows(x, g, w.flatten(1 if each else 0).contiguous(), needed)
        if write:
            tape.add_dense(weight, by_sample(scale))
            if isinstance(bias, Tracked):
                tape.add_dense(bias, by_sample(shift))
        return dx.view(x.shape) if needed else None

    with torch.no_grad():
        output = normalise(input, w, b)
    return tape.replace(output, input, backward, (w,))


def _scaled_apart(
    tape: Tape, normalised: Tensor, weight: Any, bias: Any, layout: Layout, before: Sequence[int], after: Sequence[int]
) -> Tensor:
    """normalised * w + b, where each sample has a scale or a shift of its own."""

    def spread(t: Any) -> Tensor:
        shape = (*before, *t.shape, *after)
        return promote(tape, t, layout, shape) if tracked(t) else t.reshape(shape)

    y = normalised if weight is None else normalised * spread(weight)
    return y if bias is None else y + spread(bias)
