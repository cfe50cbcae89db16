"""What a model consists of, found in one walk over its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that a module has beside its parameters, buffers, parts and hooks."""
    return [(k, v) for k, v in vars(module).items() if k not in _OF_EVERY_MODULE]


@dataclass(frozen=True)
class Members:
    """Modules, parameters and buffers of a model: each once, under its first name."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that train."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def width(self) -> int:
        """How many numbers train."""
        return sum(p.numel() for p in self.trainable.values())


def members_of(model: nn.Module) -> Members:
    """As named_modules, named_parameters and named_buffers give them, in a fraction of the time."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got a {type(model).__name__}, must be a torch.nn.Module")
    modules = dict(model.named_modules())
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        dot = "." if prefix else ""
        for held, found in ((module._parameters, parameters), (module._buffers, buffers)):
            for name, t in held.items():
                if t is not None and id(t) not in seen:
                    seen.add(id(t))
                    found[f"{prefix}{dot}{name}"] = t
    return Members(modules, parameters, buffers)
