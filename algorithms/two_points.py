"""What DIFF2 and PriSMA share: rows at this point and at the one before, and private means of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.members import members_of
from dpkernels.noise import std_for
from dpkernels.reference import wide_type

from .federation import check_clients
from .micro_batches import SECURE_BYTES, check_size, micro_batches

Sum = dict[str, Tensor]  # by parameter
RowsOf = Callable[[Any, Any], list[tuple[dpk.PerSample, float, float]]]  # rows, bound, weight


class TwoPoints:
    """A model, its weights of an earlier round in a copy, and clients' data that goes through both in parts."""

    ledgers: list[dpk.accounting.Ledger]

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        clients: Any,
        *,
        lr: float,
        micro_batch_size: int | None,
        max_bytes: int | None,
        secure: bool,
    ) -> None:
        if not members_of(model).trainable:
            raise ValueError("model: has no parameter that requires grad, must have at least one")
        check_size(micro_batch_size, secure=secure)
        self.model = model
        self.loss_fn = loss_fn
        self.clients = check_clients(clients)
        self.round = 0
        self.bytes_sent = 0
        self._lr = checks.number("lr", lr, low=0)
        self._earlier = copy.deepcopy(model)
        self._spare = [self._zeros() for _ in range(2)]  # memory for sums, which nobody sees before the noise is in
        self._micro_batch_size = micro_batch_size
        self._secure = secure
        self._max_bytes = SECURE_BYTES if secure and max_bytes is None else max_bytes

    @property
    def width(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in members_of(self.model).trainable.values())

    def _rows_now(self, inputs: Any, targets: Any) -> dpk.PerSample:
        return dpk.per_sample_gradients(self.model, self.loss_fn, inputs, targets, max_bytes=self._max_bytes)

    def _rows_before(self, inputs: Any, targets: Any) -> dpk.PerSample:
        return dpk.per_sample_gradients(self._earlier, self.loss_fn, inputs, targets, max_bytes=self._max_bytes)

    def _move(self, estimate: Sum, scale: float) -> None:
        """Weights now become those before; then they move against the estimate."""
        now, before = self._trained()
        with torch.no_grad():
            torch._foreach_copy_(before, now)
            moves = [t.to(p.dtype) for t, p in zip(estimate.values(), now, strict=True)]
            torch._foreach_sub_(now, moves, alpha=scale)

    def _distance(self) -> float:
        """How far the weights now are from those before."""
        now, before = self._trained()
        with torch.no_grad():
            for p, q, out in zip(now, before, self._spare[0].values(), strict=True):
                torch.sub(p, q, out=out)
            squares = torch.ops.dpkernels.row_squares([t.view(1, -1) for t in self._spare[0].values()])
        return math.sqrt(float(squares.sum()))

    def _trained(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters now, and before."""
        before = members_of(self._earlier).trainable
        now = members_of(self.model).trainable
        return list(now.values()), [before[name] for name in now]

    def _zeros(self) -> Sum:
        return {n: torch.zeros_like(p, dtype=wide_type(p.dtype)) for n, p in members_of(self.model).trainable.items()}

    def _clipped_sum(self, rows_of: RowsOf, parts: Sequence[tuple[Any, Any, float]]) -> Sum:
        """The sum over (inputs, targets, weight) of weight * clipped rows, in micro-batches; only the sum is kept.

        In float64 if there is more than one micro-batch. It may lie in memory that the next sum uses again.
        """
        cut = [
            (x, y, where, weight)
            for inputs, targets, weight in parts
            for x, y, where in micro_batches(inputs, targets, self._micro_batch_size, filled=self._secure)
        ]
        dtype = torch.float64 if len(cut) > 1 or self._secure else None
        memory: list[Any] = self._spare if len(cut) == 1 else [None, None]
        total: Sum = {}
        for x, y, where, weight in cut:
            for (rows, bound, share), out in zip(rows_of(x, y), memory, strict=False):
                found = rows.clip_sum(bound, dtype=dtype, scale=weight * share, where=where, out=out).sum
                total = {name: t.add_(found[name]) for name, t in total.items()} if total else found
        return total

    def state_dict(self) -> dict[str, Any]:
        """Weights of two rounds, counters and ledgers; no key."""
        return {
            "model": self.model.state_dict(),
            "earlier": self._earlier.state_dict(),
            "round": self.round,
            "bytes_sent": self.bytes_sent,
            "ledgers": [ledger.state_dict() for ledger in self.ledgers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was."""
        for ledger, saved in zip(self.ledgers, state["ledgers"], strict=True):
            ledger.load_state_dict(saved)
        self.model.load_state_dict(state["model"])
        self._earlier.load_state_dict(state["earlier"])
        self.round, self.bytes_sent = int(state["round"]), int(state["bytes_sent"])


def secured(noise: float, largest: float, model: nn.Module, arguments: dict[str, Any]) -> float:
    """The noise that has the same effect once the roundings of secure noise are counted, if that is asked for.

    `largest`: the largest noise multiplier of the run, for which they weigh most.
    """
    width = sum(p.numel() for p in members_of(model).trainable.values())
    return noise * std_for(largest, 1.0, width, secure=bool(arguments.get("secure", False))) / largest
