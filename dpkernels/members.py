"""What a model consists of, found in one walk over its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


_without_tensors: set[type] = set()  # types of attributes that were seen to be no tensors


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that a module has beside its parameters, buffers, parts and hooks."""
    return [(k, v) for k, v in vars(module).items() if k not in _OF_EVERY_MODULE]


def loose_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are plain attributes of a module."""
    values = vars(module).values()
    if _without_tensors.issuperset(map(type, values)):  # nearly always; runs for each module at each step
        return {}
    _without_tensors.update({type(v) for v in values if not issubclass(type(v), Tensor)})
    return {name: v for name, v in own_attributes(module) if isinstance(v, Tensor)}


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


def _gather(module: nn.Module, name: str, found: dict[str, nn.Module], seen: set[int]) -> None:
    """A module and its parts, each once, under its first name."""
    seen.add(id(module))
    found[name] = module
    for part, inside in module._modules.items():
        if inside is not None and id(inside) not in seen:
            _gather(inside, f"{name}.{part}" if name else part, found, seen)


def members_of(model: nn.Module) -> Members:
    """As named_modules, named_parameters and named_buffers give them, in a fraction of the time."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: got a {type(model).__name__}, must be a torch.nn.Module")
    modules: dict[str, nn.Module] = {}
    _gather(model, "", modules, set())
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        dot = "." if prefix else ""
        kinds: tuple[tuple[Any, dict[str, Any]], ...] = ((module._parameters, parameters), (module._buffers, buffers))
        for held, found in kinds:
            for name, t in held.items():
                if t is not None and id(t) not in seen:
                    seen.add(id(t))
                    found[f"{prefix}{dot}{name}"] = t
    return Members(modules, parameters, buffers)
