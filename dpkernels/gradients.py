"""per_sample_gradients: the public door to recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels import checks, planner, self_check
from dpkernels.each import Each
from dpkernels.members import Members, members_of
from dpkernels.nested import flat_tensors
from dpkernels.per_sample import PerSample
from dpkernels.placing import Shape
from dpkernels.record import LossFunction, record


def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    max_bytes: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
    where: Tensor | None = None,
) -> PerSample:
    """The gradient of each sample's loss, as a `PerSample`: from one forward and one backward.

    Equivalent to, but for the rounding::

        for i in range(B):
            loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])
            row[i] = torch.autograd.grad(loss.sum(), trainable parameters)

    Args:
        model: any module; it is not changed, and its parameters' `.grad` is not touched.
        loss_fn: `loss_fn(outputs, targets)`, whatever the model returns; gives one loss for each sample, [B].
        inputs: a tensor, a tuple (the model's arguments) or a dict (its keywords); dim 0 of every tensor is the sample.
        targets: a tensor, or tensors in any nesting, with the sample in dim 0.
        max_bytes: memory that rows of linear layers may take, where storing them is faster than working with factors
            (long sequences), and of convolutions, which otherwise form theirs twice; a quarter of what is free unless
            given, so give it where two runs must agree to the last bit. With 0 linear layers stay factors, and the
            difference of two results keeps more digits.
        weights: by name, [N, *shape] for each parameter that requires grad: samples come in N equally long runs, and
            gradients are taken at the weights of each run instead of the model's. Then nothing is stored (`max_bytes`
            has no effect), and rows stand for the inputs as they are when the rows are used.
        where: bool [B], the samples whose loss counts; others are padding, with rows of zeros.

    The unit of privacy is dim 0. Models whose rows would not be exact are refused with a `ValueError` that names the
    parameter and the op: layers that mix samples (BatchNorm in training mode), a loss that is not [B], gradients that
    reach a parameter by a way that is not seen. The first call for a model and form of input checks this on made-up
    inputs, which costs a few small steps; later calls are one forward and one backward. What a model does only for
    some values or some batch sizes is not seen by that check, and then exact only if it keeps samples apart.
    """
    members, batch, room = prepare(model, loss_fn, inputs, targets, max_bytes)
    each = None if weights is None else _of_runs(members, weights, batch)
    counted = None if where is None else checks.samples("where", where, batch).float()
    if batch == 0:
        shapes = {name: Shape(p.shape, p.dtype, p.device) for name, p in members.trainable.items()}
        return PerSample(0, shapes, {})
    plan = self_check.ensure(model, members, loss_fn, inputs, targets, walking=each is not None).plan
    options: dict[str, Any] = {"room": room} if each is None else {"each": each}
    return record(model, loss_fn, inputs, targets, batch, plan=plan, members=members, weights=counted, **options)


def row_bytes(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> int:
    """The memory that the row of one sample of this form takes, as far as rows are kept: see `dpkernels.planner`."""
    members, batch, _ = prepare(model, loss_fn, inputs, targets, None)
    return self_check.ensure(model, members, loss_fn, inputs, targets).row_bytes if batch else 0


def _of_runs(members: Members, weights: Mapping[str, Tensor], batch: int) -> dict[str, Each]:
    """What parameters are for each run of samples."""
    names = set(members.trainable)
    if not isinstance(weights, Mapping) or set(weights) != names:
        found = sorted(weights) if isinstance(weights, Mapping) else type(weights).__name__
        raise ValueError(f"weights: got {found}, must have each parameter that requires grad: {sorted(names)}")
    if not all(isinstance(w, Tensor) and w.dim() and len(w) for w in weights.values()):
        raise ValueError("weights: must be tensors [N, ...] with N at least 1")
    if len({len(w) for w in weights.values()}) != 1:
        raise ValueError(f"weights: has {sorted({len(w) for w in weights.values()})} runs, must have as many of each")
    for name, p in members.trainable.items():
        given = weights[name]
        if (given.shape[1:], given.dtype, given.device) != (p.shape, p.dtype, p.device) or batch % len(given):
            raise ValueError(
                f"weights[{name!r}]: has shape {tuple(given.shape)} of {given.dtype}, must be [N, *{tuple(p.shape)}] "
                f"of {p.dtype}, where N divides the {batch} samples"
            )
    return {name: Each(p, of_runs=weights[name].detach(), batch=batch) for name, p in members.trainable.items()}


def check_independence(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> None:
    """Raise a `ValueError` unless samples stay apart in this model and loss, on some of these inputs.

    What `dpk.per_sample_gradients` proves once on made-up inputs, proven again on real ones with the parameters as they
    are: rows add up to the ordinary gradient, do not depend on which other samples are in the batch, and are zero for
    samples without a loss. Looks at a handful of samples. The outcome depends on data: it is not private.
    """
    _, batch, _ = prepare(model, loss_fn, inputs, targets, None)
    if batch == 0:
        raise ValueError("inputs: has no sample, must have at least one")
    self_check.check(model, loss_fn, inputs, targets, real=True)


def prepare(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, max_bytes: int | None
) -> tuple[Members, int, Callable[[], int] | int]:
    """The model's members, the size of the batch and the memory there is, if all arguments are sound."""
    members = members_of(model)
    if not callable(loss_fn):
        raise ValueError(f"loss_fn: got {loss_fn!r}, must be callable as loss_fn(outputs, targets)")
    batch = batch_of(inputs, targets)
    room = room_for(members, max_bytes)
    parameters = members.trainable
    if not parameters:
        raise ValueError("model: has no parameter that requires grad, must have at least one")
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(f"parameter {name}: is {p.dtype}, must be real: keep it as torch.view_as_real of itself")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"parameter {name}: has gradient hooks, which rows would not pass; remove them")
    return members, batch, room


def batch_of(inputs: Any, targets: Any) -> int:
    """B, if every tensor has it as dim 0."""
    if not isinstance(inputs, Tensor | list | tuple | Mapping):
        raise ValueError(f"inputs: got a {type(inputs).__name__}, must be a tensor, a tuple or a dict of tensors")
    found = [t for t in flat_tensors(inputs) if t.dim() > 0]
    if not found:
        raise ValueError("inputs: has no tensor with a dimension, dim 0 of a tensor must be the sample")
    batch = found[0].shape[0]
    for name, tensors in (("inputs", found), ("targets", flat_tensors(targets))):
        for t in tensors:
            if t.dim() > 0 and t.shape[0] != batch:
                raise ValueError(
                    f"{name}: a tensor has shape {tuple(t.shape)}, must have {batch} samples in dim 0 as inputs do"
                )
    return batch


def room_for(members: Members, max_bytes: int | None) -> Callable[[], int] | int:
    """Bytes that rows may take: as given, or a quarter of what is free when it is asked for."""
    if max_bytes is None:
        device = next((p.device for p in members.parameters.values()), torch.device("cpu"))
        return lambda: planner.free_bytes_lately(device) // 4
    return checks.whole("max_bytes", max_bytes, low=0, cure=" or None")
