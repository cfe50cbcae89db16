"""What DIFF2 and PriSMA share: rows at this point and at the one before, and private means of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.members import members_of

from .federation import check_clients
from .micro_batches import check_size, micro_batches

Sum = dict[str, Tensor]  # by parameter, in float64
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
        self._micro_batch_size = micro_batch_size
        self._secure = secure
        self._max_bytes = max_bytes

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
        before = members_of(self._earlier).trainable
        with torch.no_grad():
            for name, p in members_of(self.model).trainable.items():
                before[name].copy_(p)
                p.sub_((scale * estimate[name]).to(p.dtype))

    def _distance(self) -> float:
        """How far the weights now are from those before."""
        before = members_of(self._earlier).trainable
        moves = [
            (p.detach().double() - before[n].detach().double()) for n, p in members_of(self.model).trainable.items()
        ]
        return math.sqrt(sum(float(move.square().sum()) for move in moves))

    def _zeros(self) -> Sum:
        return {n: torch.zeros_like(p, dtype=torch.float64) for n, p in members_of(self.model).trainable.items()}

    def _add_clipped(self, total: Sum, rows_of: RowsOf, inputs: Any, targets: Any, weight: float) -> None:
        """total += weight * sum_i of clipped rows, in parts; nothing is kept but the sum."""
        for x, y, where in micro_batches(inputs, targets, self._micro_batch_size, filled=self._secure):
            for rows, bound, share in rows_of(x, y):
                found = rows.clip_sum(bound, dtype=torch.float64, where=where).sum
                for name, t in total.items():
                    t.add_(found[name], alpha=weight * share)

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


class UnitNoise:
    """Releases whose noise differs from one to the next, through one door: scaled to noise of std 1, and back."""

    def __init__(self, seed: int | None, secure: bool, ledger: dpk.noise.Book) -> None:
        self._unit = dpk.Gaussian(1.0, seed=seed, secure=secure, ledger=ledger)
        self._none = dpk.Gaussian(0.0, ledger=ledger)  # what is released without noise is entered all the same

    def noised(self, total: Sum, std: float, row_norm: float) -> Sum:
        """total + N(0, std^2), where one record's row in it has at most `row_norm`; changes `total`."""
        tensors = list(total.values())
        if std == 0:
            dpk.add_gaussian_(tensors, self._none, sensitivity=row_norm)
            return total
        for t in tensors:
            t.div_(std)
        dpk.add_gaussian_(tensors, self._unit, sensitivity=row_norm / std)
        for t in tensors:
            t.mul_(std)
        return total

    @property
    def releases(self) -> int:
        """How many had noise."""
        return self._unit.releases

    def skip(self, releases: int) -> None:
        """Go on behind so many."""
        self._unit.skip(releases)
