"""FusedDPOptimizer: for those who keep Opacus's hooks. Its optimizer, with our clip, sum and noise."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

import dpkernels as dpk
from dpkernels import dense


class FusedDPOptimizer(DPOptimizer):  # type: ignore[misc]
    """As Opacus's `DPOptimizer`: flat clipping of `grad_sample`, in one fused pass, and noise by `dpkernels.Gaussian`.

    Unlike there the clip bound holds in real arithmetic, a sample that is not finite counts as zero, and the noise is
    right in its tail. Accounting stays Opacus's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        generator = self.generator
        seed = None if generator is None else int(torch.randint(2**62, (1,), generator=generator))
        self._door = dpk.Gaussian(self.noise_multiplier * self.max_grad_norm, seed=seed, secure=self.secure_mode)

    def clip_and_accumulate(self) -> None:
        """Into `summed_grad`."""
        for p in self.params:
            _check_processed_flag(p.grad_sample)
        found = dpk.clip_sum(self.grad_samples, self.max_grad_norm).sum
        for p, total in zip(self.params, found, strict=True):
            total = total.to(p.dtype)
            p.summed_grad = total if p.summed_grad is None else p.summed_grad.add_(total)
            _mark_as_processed(p.grad_sample)

    def add_noise(self) -> None:
        """To `summed_grad`, all of them in one release, into `grad`."""
        for p in self.params:
            _check_processed_flag(p.summed_grad)
        std = self.noise_multiplier * self.max_grad_norm
        if std != self._door.std:  # a scheduler changed it
            self._door = self._door.with_std(std)
        totals = [p.summed_grad.clone() for p in self.params]
        dense.add_gaussian_(totals, self._door)
        for p, total in zip(self.params, totals, strict=True):
            p.grad = total.view_as(p)
            _mark_as_processed(p.summed_grad)
