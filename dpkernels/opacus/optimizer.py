"""An optimizer that clips, sums and noises the rows of a `PrivateModule` before it steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpkernels import checks, clipping
from dpkernels.members import members_of
from dpkernels.noise import Gaussian, std_for
from dpkernels.opacus.module import PrivateModule, Rows
from dpkernels.written import Written


class PrivateOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, made private: schedulers and checkpoints see the original.

    Each step puts (sum over samples of clip(g_i) + N(0, (z C)^2)) / expected_batch_size into `.grad` (with a sum loss,
    undivided), then the original optimizer steps. Formal guarantee: as of `dpkernels.algorithms.DPSGD`, under the
    sampling that the ledger of `noise` claims, if the loss is a mean or sum over samples (see `PrivateModule`).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: PrivateModule,
        *,
        noise: Gaussian,
        noise_multiplier: float,
        clip: clipping.Rule,
        expected_batch_size: float,
        sample_rate: float,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer: got an LBFGS, which evaluates its closure many times a step; must take one")
        self.original_optimizer = optimizer
        self.expected_batch_size = checks.positive("expected_batch_size", expected_batch_size)
        self._model, self._clip, self._sample_rate = model, clip, sample_rate
        self._noise, self._noise_multiplier = noise, noise_multiplier
        self._written = Written(model.to_standard_module(), optimizer)
        self._onto: dict[str, Tensor] | None = None  # the parts of a logical batch so far
        self._onto_of = 0  # the number of that batch
        self._used = 0  # the number of the batch that was stepped on last
        self.step_hook: Callable[[PrivateOptimizer], None] | None = None

    @property
    def noise_multiplier(self) -> float:
        """z; may be set between steps (by a schedule that does not look at the data)."""
        return self._noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._noise_multiplier = checks.number("noise_multiplier", value, low=0)
        self._set_std()

    @property
    def max_grad_norm(self) -> float:
        """The largest norm of one sample's clipped gradient; may be set between steps, as the noise."""
        return self._clip.row_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if isinstance(self._clip, clipping.PerLayer):
            raise ValueError("max_grad_norm: cannot be set with clipping='per_layer'")
        self._clip = dataclasses.replace(self._clip, max_norm=checks.number("max_grad_norm", value, low=0))  # type: ignore[type-var]
        self._set_std()

    def _set_std(self) -> None:
        width = members_of(self._model.to_standard_module()).width
        std = std_for(self._noise_multiplier, self._clip.row_norm, width, secure=self._noise.secure)
        self._noise = self._noise.with_std(std)

    def attach_step_hook(self, hook: Callable[[PrivateOptimizer], None]) -> None:
        """Called after the noise is in, before the original optimizer steps."""
        self.step_hook = hook

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Opacus's BatchMemoryManager calls this as it draws; where workers draw ahead, that is out of step."""
        raise ValueError("BatchMemoryManager: got Opacus's, must be dpkernels.opacus.BatchMemoryManager")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and rows that no step has taken; parts of a logical batch stay."""
        self._model.take_rows()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release one private sum and step on it; within a logical batch, only add its parts up."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._model.check_parameters()
        self._written.check()
        parts = self._model.take_rows()
        if not parts:
            raise ValueError(
                "step: no backward has gone through the private model since the last step. Call the model that "
                "make_private returned, in train mode, and loss.backward()"
            )
        batches = self._batches(parts)
        last = batches[-1][0].given
        assert last is not None
        if self._onto_of != last.logical:  # one that was left before its end is dropped
            self._onto = None
        summed = [_of_one_batch(batch) for batch in batches]
        *first, final = [part for batch in summed for part in batch]
        how: dict[str, Any] = {"exact": self._noise.secure, "reuse": True}
        for part in first if last.is_last else [*first, final]:
            onto, self._onto = self._onto, None
            found = part.rows.clip_sum(self._clip, onto=onto, dtype=torch.float64, where=part.where, **how)
            self._onto = found.sum
        self._onto_of, self._used = last.logical, last.number
        if not last.is_last:
            return loss
        onto, self._onto = self._onto, None
        divisor = self.expected_batch_size * len(batches) if self._model.loss_reduction == "mean" else 1.0
        out = self._written.take()
        found = final.rows.clip_sum(
            self._clip, self._noise, onto=onto, scale=1 / divisor, out=out, where=final.where, **how
        )
        self._written.write(found.sum)
        if self.step_hook is not None:
            self.step_hook(self)
        self.original_optimizer.step()
        return loss

    def _batches(self, parts: list[Rows]) -> list[list[Rows]]:
        """Rows by the batch that they are of; refused unless each record can be in the sum but once."""
        found: dict[int, list[Rows]] = {}
        for part in parts:
            if part.given is None or part.given.number <= self._used:
                raise ValueError(
                    "step: the data loader that make_private returned has handed out no batch for it, so that it is "
                    "not sampled as it is counted. Train on that loader, one step for each batch"
                )
            found.setdefault(part.given.number, []).append(part)
        for batch in found.values():
            given = batch[0].given
            assert given is not None
            forwards: dict[int, int] = {}
            for part in batch:
                count = part.rows.batch_size if part.where is None else int(part.where.sum())
                forwards[part.forward] = forwards.get(part.forward, 0) + count
            if max(forwards.values()) > given.records:
                raise ValueError(
                    f"step: got {max(forwards.values())} samples of a batch that was handed out with {given.records}, "
                    "must not be more: a record that is there twice counts twice. Put its copies into one sample"
                )
        epochs = {batch[0].given.epoch for batch in found.values() if batch[0].given}
        if len(found) > 1 and (self._sample_rate < 1 or len(epochs) > 1):
            raise ValueError(
                f"step: got backward passes of {len(found)} batches since the last one, must be of one: a record may "
                "be in several of them, and would count as often. Use BatchMemoryManager, or a larger batch size"
            )
        return list(found.values())

    # What others see is the original optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the original."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """Of the original."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Of the original."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the original; its parameters must be of the model."""
        self.original_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Of the original."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the original."""
        self.original_optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "original_optimizer":
            raise AttributeError(name)
        return getattr(self.original_optimizer, name)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"


def _of_one_batch(parts: list[Rows]) -> list[Rows]:
    """Rows of one batch: those of several forwards added up, sample by sample, before anything is clipped."""
    if len({part.forward for part in parts}) == 1:
        return parts
    sizes = {part.rows.batch_size for part in parts}
    if len(sizes) > 1 or any(part.where is not None for part in parts):
        raise ValueError(
            f"step: got several forwards of one batch, of {sorted(sizes)} samples, must be of the same samples each: "
            "rows of one record are added before they are clipped"
        )
    total = parts[0].rows
    for part in parts[1:]:
        total = total - (-1.0 * part.rows)
    return [Rows(total, None, parts[0].forward, parts[0].given)]
