"""local_updates: every sample walks steps of its own, without a copy of the weights for each where factors do.

    w_i <- w_i - lr * gradient of loss_i at w_i, K times from the model's weights w;  row_i = w_i - w

What a sample's weights are off by is itself a row. A step records the model with each sample's own weights
(`dpkernels.each`), and its rows are added to what each parameter is off by: to factors, or to values.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dpkernels import checks
from dpkernels.gradients import per_sample_gradients, prepare
from dpkernels.per_sample import PerSample
from dpkernels.placing import Shape
from dpkernels.record import LossFunction, record
from dpkernels.self_check import ensure
from dpkernels.walk import Walk


def local_updates(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    steps: int,
    lr: float,
    max_bytes: int | None = None,
) -> PerSample:
    """How far each sample's weights move in `steps` steps of SGD on its own loss, from the model's: a `PerSample`.

    Equivalent to, but for the rounding::

        for i in range(B):
            own = copy.deepcopy(model)
            for _ in range(steps):
                loss = loss_fn(own(inputs[i : i + 1]), targets[i : i + 1])
                own -= lr * torch.autograd.grad(loss.sum(), own)
            row[i] = own - model

    Args:
        model, loss_fn, inputs, targets: as of `dpk.per_sample_gradients`, which is -1 / lr of this for one step.
        steps: K, how many.
        lr: the step size.
        max_bytes: memory that samples' own weights may take, where they are faster than factors (convolutions, long
            sequences); a quarter of what is free unless given. What has no factors takes what it needs.

    The unit of privacy is dim 0. Nothing here is private: `clip_sum` with noise is. Models are refused as by
    `dpk.per_sample_gradients`. Besides, a parameter's value may not be read in forward (by `item`, `if` or as an
    index), and what is made of it without a gradient (`w.detach()`) may not be written into: after the first step it is
    another one for each sample.
    """
    count = checks.whole("steps", steps, low=1)
    rate = checks.number("lr", lr, low=0)
    if count == 1:
        return -rate * per_sample_gradients(model, loss_fn, inputs, targets, max_bytes=max_bytes)
    members, batch, room = prepare(model, loss_fn, inputs, targets, max_bytes)
    shapes = {name: Shape(p.shape, p.dtype, p.device) for name, p in members.trainable.items()}
    if batch == 0:
        return PerSample(0, shapes, {})
    plan = ensure(model, members, loss_fn, inputs, targets, walking=True).plan
    walk = Walk(batch, {name: p.detach() for name, p in members.trainable.items()}, count, room)
    for _ in range(count):
        rows = record(model, loss_fn, inputs, targets, batch, plan=plan, members=members, each=walk.each())
        walk.add(rows, -rate)
        del rows
    return PerSample(batch, shapes, walk.parts())
