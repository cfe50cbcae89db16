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
from dpkernels.gradients import batch_of
from dpkernels.members import members_of
from dpkernels.places import Places
from dpkernels.ranks import ALONE, Ranks, given
from dpkernels.reference import wide_type

from .federation import shared_out
from .micro_batches import check_size, memory_for_rows, micro_batches
from .together import add_up_

Sum = dict[str, Tensor]  # by parameter
RowsOf = Callable[[Any, Any], list[tuple[dpk.PerSample, float, float]]]  # rows, bound, weight


class TwoPoints:
    """A model, its weights of an earlier round in a copy, and clients' data that goes through both in parts."""

    ledgers: list[dpk.accounting.Ledger]
    _noises: list[dpk.Gaussian]
    _estimates: list[Any]  # of the gradient; None where it is another rank's

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
        ranks: Ranks | None,
    ) -> None:
        if not members_of(model).trainable:
            raise ValueError("model: has no parameter that requires grad, must have at least one")
        check_size(micro_batch_size, secure=secure)
        self.model = model
        self.loss_fn = loss_fn
        self.ranks = given(ranks)
        self.clients, self._sizes = shared_out(clients, self.ranks)
        self._own = self.ranks.share(len(self.clients))  # the clients of this rank
        self.round = 0
        self.bytes_sent = 0
        self._lr = checks.number("lr", lr, low=0)
        self._earlier = copy.deepcopy(model)
        self._spare = [self._zeros() for _ in range(2)]  # memory for sums, which nobody sees before the noise is in
        self._micro_batch_size = micro_batch_size
        self._secure, self._places = secure, Places(secure=secure)
        self._max_bytes = memory_for_rows(max_bytes, secure=secure)

    @property
    def width(self) -> int:
        """How many numbers are trained."""
        return members_of(self.model).width

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

    def _released(
        self,
        rows_of: RowsOf,
        parts: Sequence[tuple[Any, Any, float]],
        noise: dpk.Gaussian,
        std: float,
        row_norm: float,
        ranks: Ranks = ALONE,
    ) -> Sum:
        """The sum over (inputs, targets, weight) of weight * clipped rows, with noise of `std`; over all `ranks`.

        One record's row in it has at most `row_norm`. It may lie in memory that the next one uses again.
        """
        total = self._clipped_sum(rows_of, parts, together=ranks.size > 1)
        add_up_(ranks, list(total.values()), noise.with_std(std), sensitivity=row_norm)
        return total

    def _clipped_sum(self, rows_of: RowsOf, parts: Sequence[tuple[Any, Any, float]], together: bool) -> Sum:
        """In micro-batches, of which only the sum is kept: in float64 if there is more than one."""
        size = self._micro_batch_size
        alone = not together and len(parts) == 1 and (size is None or batch_of(*parts[0][:2]) <= size)
        dtype = None if alone and not self._secure else torch.float64
        memory: list[Any] = self._spare if alone else [None, None]
        total: Sum = {}
        for inputs, targets, weight in parts:
            for x, y, where in micro_batches(inputs, targets, size, filled=self._secure):
                self._places.check(self.model, self._rows_now, x, y)
                for (rows, bound, share), out in zip(rows_of(x, y), memory, strict=False):
                    found = rows.clip_sum(bound, dtype=dtype, scale=weight * share, where=where, out=out).sum
                    total = {name: t.add_(found[name]) for name, t in total.items()} if total else found
        return total

    def state_dict(self) -> dict[str, Any]:
        """Weights of two rounds, estimates, counters and ledgers; no key. See `dpk.checkpoint`.

        All ranks must call it together; each gets all of it.
        """
        return {
            "model": self.model.state_dict(),
            "earlier": self._earlier.state_dict(),
            "estimates": self._all_estimates(),
            "round": self.round,
            "bytes_sent": self.bytes_sent,
            "releases": [noise.releases for noise in self._noises],
            "ledgers": [ledger.state_dict() for ledger in self.ledgers],
        }

    def _all_estimates(self) -> list[Sum]:
        return self._estimates

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was, into an algorithm made with the same arguments that has not stepped yet."""
        for ledger, saved in zip(self.ledgers, state["ledgers"], strict=True):
            ledger.load_state_dict(saved)
        for noise, releases in zip(self._noises, state["releases"], strict=True):
            noise.skip(releases)
        for estimate, saved in zip(self._estimates, state["estimates"], strict=True):
            for name, t in estimate.items() if estimate is not None else ():
                t.copy_(saved[name])
        self.model.load_state_dict(state["model"])
        self._earlier.load_state_dict(state["earlier"])
        self.round, self.bytes_sent = int(state["round"]), int(state["bytes_sent"])
