"""DP-SGD: clipped per-sample gradients, summed, noised, handed to any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import planner
from dpkernels.gradients import batch_of, row_bytes
from dpkernels.nested import flat_tensors
from dpkernels.ranks import Ranks
from dpkernels.written import Written

from .private_training import PrivateTraining


class DPSGD(PrivateTraining):
    """Each step puts (sum_i clip(g_i) + N(0, (z C)^2)) / expected_batch_size into `.grad`, then the optimizer steps.

    Args:
        model: any module `dpk.per_sample_gradients` can record.
        loss_fn: `loss_fn(outputs, targets)` gives one loss for each sample, [B].
        optimizer: any torch optimizer over the model's parameters.
        max_norm: C, the largest norm of one sample's clipped gradient.
        noise_multiplier: z; the noise on the sum has standard deviation z * C.
        expected_batch_size: what the sum is divided by: a public constant, never the size a batch happens to have.
        sampling_rate: the probability with which each record is in each batch, independently. The default, 1, claims
            no amplification. It is your claim: nothing here sees the sampling.
        clip: a rule instead of `Flat(max_norm)`; its rows must not be longer than `max_norm`.
        micro_batch_size: the most samples to run at a time; a larger batch goes in parts, with noise once. Unless this
            or `max_bytes` is given, as many as have 128 MiB of rows to keep, but not fewer than 8.
        max_bytes: memory that rows may take, see `dpk.per_sample_gradients`.
        seed: makes the noise reproducible, and nothing private from whoever knows it.
        watch_norms: keep every sample's incremental norm for `incremental_norms`. NOT private.
        secure: noise whose low bits are safe too, see `dpk.Gaussian`; needs `micro_batch_size`, to which every part of
            a batch is filled up with zeros, which the model must take. `noise_multiplier` then counts the roundings,
            and `max_bytes` is 1 GiB unless given.
        budget: (epsilon, delta) that the step which would exceed it is refused for; see `with_budget`.
        ranks: processes that train together, see `dpk.ranks`; each is given batches of its own records, and the sum is
            over all of them.

    The tensors in `.grad` are written again by the next step unless `zero_grad` let go of them: clone what you keep.

    Formal guarantee: the weights after any number of steps are (epsilon(delta), delta)-DP under add-remove adjacency,
    one record being one index of dim 0, if batches are Poisson samples at `sampling_rate` (or anything, at rate 1).
    Hyper-parameters, initial weights and the number of steps must not depend on the data. Not private: the model's
    losses, norms and the time a step takes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        sampling_rate: float = 1.0,
        clip: dpk.clipping.Rule | None = None,
        micro_batch_size: int | None = None,
        max_bytes: int | None = None,
        seed: int | None = None,
        watch_norms: bool = False,
        secure: bool = False,
        budget: tuple[float, float] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._written = Written(model, optimizer)
        super().__init__(
            model,
            loss_fn,
            max_norm=max_norm,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            sampling_rate=sampling_rate,
            clip=clip,
            micro_batch_size=micro_batch_size,
            seed=seed,
            max_bytes=max_bytes,
            watch_norms=watch_norms,
            secure=secure,
            budget=budget,
            ranks=ranks,
            optimizer=f"{type(optimizer).__name__} {_settings_of(optimizer)}",
        )
        self.optimizer = optimizer
        self._row_bytes: dict[Any, int] = {}  # by the form of a sample

    def step(self, inputs: Any, targets: Any) -> None:
        """One step on a batch, of whatever size the sampling gave it; an empty one is a step of noise alone."""
        self._written.check()
        self._written.write(self._release(self._gradients, inputs, targets, self._written.take))
        self.optimizer.step()

    def _gradients(self, inputs: Any, targets: Any) -> dpk.PerSample:
        return dpk.per_sample_gradients(self.model, self.loss_fn, inputs, targets, max_bytes=self._max_bytes)

    def _part_size(self, inputs: Any, targets: Any) -> int | None:
        if self._micro_batch_size is not None or self._max_bytes is not None:
            return self._micro_batch_size
        batch, form = batch_of(inputs, targets), tuple(t.shape[1:] for t in flat_tensors((inputs, targets)))
        if batch and form not in self._row_bytes:
            self._row_bytes[form] = row_bytes(self.model, self.loss_fn, inputs, targets)
        return planner.at_a_time(batch, self._row_bytes.get(form, 0)) or None

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state, counters and the ledger; no key. See `dpk.checkpoint`."""
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of every algorithm; the optimizer's state too."""
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
