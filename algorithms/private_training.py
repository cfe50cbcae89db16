"""What algorithms that release one clipped sum for each batch have in common: (sum_i clip(row_i) + noise) / size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.members import members_of
from dpkernels.noise import std_for
from dpkernels.places import Places
from dpkernels.ranks import Ranks, given
from dpkernels.reference import wide_type

from .incremental_norms import IncrementalNorms, NormSummary
from .micro_batches import check_size, memory_for_rows, micro_batches
from .together import add_up_, meet


class PrivateTraining:
    """Clips rows to `max_norm`, adds N(0, (noise_multiplier * max_norm)^2), divides by `expected_batch_size`.

    Arguments are those of the algorithms, which say what they mean.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        max_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        sampling_rate: float,
        clip: dpk.clipping.Rule | None,
        micro_batch_size: int | None,
        max_bytes: int | None,
        seed: int | None,
        watch_norms: bool,
        secure: bool,
        budget: tuple[float, float] | None,
        ranks: Ranks | None,
        **settings: Any,
    ) -> None:
        members = members_of(model)
        bound = checks.number("max_norm", max_norm, low=0, finite=False)
        multiplier = checks.number("noise_multiplier", noise_multiplier, low=0)
        if multiplier > 0 and math.isinf(bound):
            raise ValueError("max_norm: got inf, must be finite when noise_multiplier > 0: noise is relative to it")
        checks.positive("expected_batch_size", expected_batch_size)
        check_size(micro_batch_size, secure=secure)
        rule = dpk.clipping.Flat(bound) if clip is None else dpk.clipping.as_rule(clip)
        if rule.row_norm > bound * (1 + 1e-9):
            raise ValueError(f"clip: its rows are up to {rule.row_norm:g} long, must be at most max_norm = {bound:g}")
        self.model = model
        self.loss_fn = loss_fn
        self.ledger = dpk.accounting.Ledger(sampling_rate, budget=budget)
        std = std_for(multiplier, bound, members.width, secure=secure)
        self.noise = dpk.Gaussian(std, seed=seed, secure=secure, ledger=self.ledger)
        self._norms = IncrementalNorms(bound) if watch_norms else None
        self._clip = rule
        self._expected_batch_size = float(expected_batch_size)
        self._micro_batch_size = micro_batch_size
        self._max_bytes = memory_for_rows(max_bytes, secure=secure)
        self._places = Places(secure=secure)
        self.ranks = given(ranks)
        meet(
            self.ranks,
            self,
            model,
            seed,
            clip=repr(rule),
            std=std,
            expected_batch_size=self._expected_batch_size,
            sampling_rate=self.ledger.sampling_rate,
            secure=secure,
            budget=budget,
            **settings,
        )

    @classmethod
    def with_budget(
        cls,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        epsilon: float,
        delta: float,
        steps: int,
        **arguments: Any,
    ) -> Self:
        """With the smallest noise for which `steps` steps spend at most (epsilon, delta); a step beyond is refused.

        `arguments` are those of the constructor but for `noise_multiplier`.
        """
        rate, count = arguments.get("sampling_rate", 1.0), checks.whole("steps", steps, low=1)
        event = lambda z: dpk.accounting.poisson_gaussian(z, rate, count)  # noqa: E731
        multiplier = dpk.accounting.calibrate(event, epsilon, delta)
        made = cls(model, loss_fn, noise_multiplier=multiplier, budget=(epsilon, delta), **arguments)
        made.ledger.allow(event(multiplier))
        return made

    def epsilon(self, delta: float) -> float:
        """The epsilon at `delta` of all steps so far."""
        return self.ledger.epsilon(delta)

    def state_dict(self) -> dict[str, Any]:
        """Weights, counters and the ledger; no key. See `dpk.checkpoint`."""
        return {
            "model": self.model.state_dict(),
            "ledger": self.ledger.state_dict(),
            "releases": self.noise.releases,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was, into an algorithm made with the same arguments that has not stepped yet.

        With a seed it goes on as that run would have; without, noise is new.
        """
        self.ledger.load_state_dict(state["ledger"])
        self.noise.skip(state["releases"])
        self.model.load_state_dict(state["model"])

    def incremental_norms(self) -> NormSummary:
        """How far rows went beyond max_norm. NOT private: needs `watch_norms`."""
        if self._norms is None:
            raise ValueError("watch_norms: got False, must be True to have incremental norms, which are not private")
        return self._norms.summary()

    def _release(
        self,
        rows_of: Callable[[Any, Any], dpk.PerSample],
        inputs: Any,
        targets: Any,
        out: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """The private mean over a batch; `out` is asked for memory to put it in when all else is done."""
        with self.ranks.doing(f"release {self.noise.releases + 1}"):
            return self._released(rows_of, inputs, targets, out)

    def _released(
        self,
        rows_of: Callable[[Any, Any], dpk.PerSample],
        inputs: Any,
        targets: Any,
        out: Callable[[], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        self._refuse_unshared()
        *first, (x, y, last) = micro_batches(
            inputs, targets, self._part_size(inputs, targets), filled=self.noise.secure
        )
        onto: dict[str, Tensor] | None = None
        parts: dict[str, Any] = {"exact": self.noise.secure, "reuse": True}
        self._places.check(self.model, rows_of, x, y)
        for x_, y_, where in first:
            found = rows_of(x_, y_).clip_sum(self._clip, **parts, onto=onto, dtype=torch.float64, where=where)
            onto = found.sum
            self._watch(found.norms, where)
        rows = rows_of(x, y)
        scale = 1 / self._expected_batch_size
        private: dict[str, Tensor]
        if self.ranks.size == 1:
            found = rows.clip_sum(self._clip, self.noise, **parts, onto=onto, scale=scale, out=out(), where=last)
            private = found.sum
        else:  # what ranks send is float64, as noise is added there
            found = rows.clip_sum(self._clip, **parts, onto=onto, dtype=torch.float64, where=last)
            add_up_(self.ranks, list(found.sum.values()), self.noise, sensitivity=self._clip.sensitivity())
            kinds = {name: wide_type(p.dtype) for name, p in members_of(self.model).trainable.items()}
            private = {name: t.mul_(scale).to(kinds[name]) for name, t in found.sum.items()}
        self._watch(found.norms, last)
        return private

    def _part_size(self, inputs: Any, targets: Any) -> int | None:
        """The most samples to run at a time, if there is such a number."""
        return self._micro_batch_size

    def _refuse_unshared(self) -> None:
        """A batch that several ranks were given would count as often: unless they say so, it must be our sampler's."""
        if self.ranks.size > 1 and not self.ranks.chosen and not self.ledger.batch_waits:
            raise ValueError(
                f"inputs: are not a batch of dpk.sampling.poisson(..., ledger=algorithm.ledger), must be with "
                f"{self.ranks.size} ranks, which each need records of their own. If you share them out yourself, say "
                "so with ranks=dpk.ranks.start()"
            )

    def _watch(self, norms: Tensor, where: Tensor | None) -> None:
        if self._norms is not None:
            self._norms.add(norms if where is None else norms[where])
