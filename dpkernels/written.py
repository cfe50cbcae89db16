"""Gradients that were written here, with noise; any other gradient is refused before an optimizer steps on it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpkernels.members import members_of


class Written:
    """The `.grad` of a model's parameters, as far as it is private."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer: got a {type(optimizer).__name__}, must be a torch.optim.Optimizer")
        self._model, self._optimizer = model, optimizer
        self._written: dict[str, tuple[Tensor, int]] = {}  # gradients of ours, and their versions
        self._trainable: dict[str, nn.Parameter] = {}  # at the last check
        self._frozen: dict[str, nn.Parameter] = {}
        self.check()

    def check(self) -> dict[str, nn.Parameter]:
        """Refuse what the optimizer would step without noise: other parameters, and gradients not written here.

        The parameters that train; `take` and `write` are for these.
        """
        parameters = members_of(self._model).parameters
        names = {id(p): name for name, p in parameters.items()}
        for p in (p for group in self._optimizer.param_groups for p in group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"optimizer: has a parameter of shape {tuple(p.shape)} that is not of the model, must have those "
                    "of the model only: others would be stepped without noise. Make them part of it"
                )
        for name, p in parameters.items():
            ours, version = self._written.get(name, (None, 0))
            if p.grad is not None and (p.grad is not ours or p.grad._version != version) and bool(p.grad.any()):
                raise ValueError(
                    f"parameter {name}: has a .grad that is not private, from a backward outside of this step; "
                    "must be None: call optimizer.zero_grad() first"
                )
        self._trainable = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        return self._trainable

    def take(self) -> dict[str, Tensor]:
        """Gradients of ours, to be written again, taken off the parameters: nobody sees them before the noise is in."""
        found = {}
        for name, p in self._trainable.items():
            if p.grad is not None and p.grad is self._written.get(name, (None, 0))[0]:
                found[name] = p.grad
            p.grad = None
        return found

    def write(self, private: Mapping[str, Tensor]) -> None:
        """Put private sums into `.grad`."""
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise ValueError(
                    f"parameter {name}: began to train during a step, must be so before it: noise was made without it"
                )
        for name, p in self._trainable.items():
            p.grad = private[name].to(p.dtype)
            torch.autograd.graph.increment_version(p.grad)
            self._written[name] = (p.grad, p.grad._version)
