"""Which rule serves which op, and what rules have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from dpkernels.factors import at_least_float
from dpkernels.tape import Tape, Tracked

Rule = Callable[..., Any]  # (tape, *the op's arguments), at least one of them Tracked, at least one holding samples
RULES: dict[Any, Rule] = {}
_R = TypeVar("_R", bound=Rule)


def rule(*ops: Any) -> Callable[[_R], _R]:
    """Register a function as the rule of these ops."""

    def register(function: _R) -> _R:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def plain(x: Any) -> Any:
    """A Tracked's value, cut off from autograd; anything else as it is."""
    assert not apart(x), "samples have values of their own"
    return shared(x)


def shared(x: Any) -> Any:
    """The same, also where samples have values of their own: what these start from."""
    return x._value.detach() if isinstance(x, Tracked) else x


def apart(*xs: Any) -> bool:
    """Whether any of these is a parameter that samples have values of their own for."""
    # Runs for every op of a model, and a list is faster than a generator.
    return any([isinstance(x, Tracked) and x._each is not None for x in xs])


def values_of(tape: Tape, x: Any) -> Tensor:
    """What a parameter is for each sample, or a constant, which is the same for all: [B, *shape]."""
    if apart(x):
        return x._each.plain  # type: ignore[no-any-return]
    return plain(x).expand(tape.batch, *x.shape)  # type: ignore[no-any-return]


def tracked(*xs: Any) -> bool:
    """Whether any of these is a parameter."""
    return any([isinstance(x, Tracked) for x in xs])


def named(op: str, *xs: Any) -> str:
    """The op and its parameters, for errors."""
    labels = [x._label for x in xs if isinstance(x, Tracked)]
    return f"{op} with parameter {', '.join(labels)}"


def reduced(tape: Tape, gradient: Tensor, layout: Any, event: int) -> Tensor:
    """A gradient summed over all but the sample and its last `event` dimensions, at least in float32."""
    lines = at_least_float(tape.by_sample(gradient, layout, event))
    return lines[:, 0] if lines.shape[1] == 1 else lines.sum(1)


def reduced_to_channels(tape: Tape, gradient: Tensor, layout: Any) -> Tensor:
    """A gradient [N, C, ...] summed over all but the sample and the channel."""
    return reduced(tape, at_least_float(gradient).flatten(2).sum(2) if gradient.dim() > 2 else gradient, layout, 1)
