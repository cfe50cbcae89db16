"""explain: how the rows of each layer of a model are handled, and what that costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpkernels import planner
from dpkernels.columns import aligned
from dpkernels.gradients import batch_of, room_for
from dpkernels.members import members_of
from dpkernels.nested import flat_tensors
from dpkernels.record import record
from dpkernels.tape import Tape

HEADER = ("parameter", "op", "T", "row", "way", "weight gradient", "extra", "stored")


def explain(model: nn.Module, inputs: Any, *, max_bytes: int | None = None) -> list[planner.Choice]:
    """Print a table of what is done with the rows of each linear and convolution layer; returns its lines.

    Runs the model once on `inputs`, with the sum of its outputs as the loss. T is how many addends a row has for each
    sample, `weight gradient` what the ordinary one costs, and `extra` the predicted cost of having rows, in the time of
    as many float32 operations; `stored` is the memory that rows take until they are summed. Biases, norm layers and
    embeddings are left out: they cost little. See `dpkernels.planner` for the ways.

    `max_bytes` is as in `per_sample_gradients`.
    """
    members = members_of(model)
    batch = batch_of(inputs, None)
    if batch == 0:
        raise ValueError("inputs: has no samples, must have at least one")
    choices: list[planner.Choice] = []

    def look(tape: Tape) -> None:
        choices.extend(tape.choices)

    room = room_for(members, max_bytes)
    record(model, _sum_of_outputs, inputs, None, batch, inspect=look, room=room, members=members)
    print(_table(choices))
    return choices


def _sum_of_outputs(outputs: Any, _: Any) -> Tensor:
    values = outputs if isinstance(outputs, dict) else getattr(outputs, "__dict__", outputs)
    for t in flat_tensors(outputs if isinstance(outputs, Tensor) else values):
        if t.is_floating_point() and t.dim() > 0 and t.requires_grad:
            return t.flatten(1).sum(1) if t.dim() > 1 else t
    raise ValueError("model: returned no tensor that depends on its parameters, must return one with samples in dim 0")


def _table(choices: list[planner.Choice]) -> str:
    lines = [HEADER]
    for c in reversed(choices):  # backward meets the last layer first
        lines.append(
            (
                c.parameter,
                c.op,
                str(c.length),
                f"{c.height} x {c.width}",
                c.way.value,
                f"{c.weight_gradient / 1e6:.1f} MFLOP",
                f"+{100 * c.extra / max(c.weight_gradient, 1):.0f}%",
                f"{c.stored_bytes / 2**20:.1f} MB" if c.stored_bytes else "-",
            )
        )
    total, extra = sum(c.weight_gradient for c in choices), sum(c.extra for c in choices)
    stored = sum(c.stored_bytes for c in choices)
    return (
        f"{aligned(lines)}\nin all: weight gradients {total / 1e6:.1f} MFLOP, "
        f"extra +{100 * extra / max(total, 1):.0f}%, {stored / 2**20:.1f} MB stored"
    )
