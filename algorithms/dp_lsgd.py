"""DP-LSGD: every sample walks K local steps; the clipped moves are summed, noised, and move the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.members import members_of
from dpkernels.ranks import Ranks

from .private_training import PrivateTraining


class DPLSGD(PrivateTraining):
    """Each step: K times w_i <- w_i - lr * gradient of loss_i at w_i, from w, for each sample i of the batch; then

        w <- w + (sum_i clip(w_i - w) + N(0, (z C)^2)) / expected_batch_size

    Args:
        model: any module `dpk.local_updates` can record. Its parameters are moved in place.
        loss_fn: `loss_fn(outputs, targets)` gives one loss for each sample, [B].
        local_steps: K.
        lr: the size of a local step.
        max_norm: C, the largest norm of one sample's clipped move.
        noise_multiplier: z; the noise on the sum has standard deviation z * C.
        expected_batch_size: what the sum is divided by: a public constant, never the size a batch happens to have.
        sampling_rate: the probability with which each record is in each batch, independently. The default, 1, claims
            no amplification. It is your claim: nothing here sees the sampling.
        clip: a rule instead of `Flat(max_norm)`; its rows must not be longer than `max_norm`.
        micro_batch_size: the most samples to run at a time; a larger batch goes in parts, with noise once.
        max_bytes: memory that samples' own weights may take, see `dpk.local_updates`.
        seed: makes the noise reproducible, and nothing private from whoever knows it.
        watch_norms: keep every sample's incremental norm for `incremental_norms`. NOT private.
        secure: noise whose low bits are safe too, see `dpk.Gaussian`; needs `micro_batch_size`, to which every part of
            a batch is filled up with zeros, which the model must take. `noise_multiplier` then counts the roundings,
            and `max_bytes` is 1 GiB unless given.
        budget: (epsilon, delta) that the step which would exceed it is refused for; see `with_budget`.
        ranks: processes that train together, see `dpk.ranks`; each is given batches of its own records, and the sum is
            over all of them.

    With one local step it is DP-SGD with step size lr, threshold C / lr and the noise negated.

    Formal guarantee: the weights after any number of steps are (epsilon(delta), delta)-DP under add-remove adjacency,
    one record being one index of dim 0, if batches are Poisson samples at `sampling_rate` (or anything, at rate 1).
    Only the noisy sum is released, and one sample moves it by at most C, however it walked. Hyper-parameters, initial
    weights and the number of steps must not depend on the data. Not private: losses, norms, the time a step takes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        local_steps: int,
        lr: float,
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
        self._local_steps = checks.whole("local_steps", local_steps, low=1)
        self._lr = checks.number("lr", lr, low=0)
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
            local_steps=self._local_steps,
            lr=self._lr,
        )
        self._moves: dict[str, Tensor] = {}  # memory of the last step's

    def step(self, inputs: Any, targets: Any) -> None:
        """One step on a batch, of whatever size the sampling gave it; an empty one is a step of noise alone."""
        self._moves = self._release(self._updates, inputs, targets, self._memory)
        with torch.no_grad():
            for name, p in members_of(self.model).trainable.items():
                p.add_(self._moves[name])

    def _memory(self) -> dict[str, Tensor]:
        """That of the last moves, which nobody sees before the noise is in."""
        moves, self._moves = self._moves, {}
        return moves

    def _updates(self, inputs: Any, targets: Any) -> dpk.PerSample:
        return dpk.local_updates(
            self.model,
            self.loss_fn,
            inputs,
            targets,
            steps=self._local_steps,
            lr=self._lr,
            max_bytes=self._max_bytes,
        )
