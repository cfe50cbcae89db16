"""PriSMA: clients keep private momentum estimates, corrected recursively; the server clips their mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.accounting import Event, Ledger, PublishedBound
from dpkernels.paper_events import Accounting
from dpkernels.ranks import ALONE, Ranks, given

from .federation import Client, chosen, largest_epsilon, secured, seed_of, shared_out
from .together import meet
from .two_points import Sum, TwoPoints


class PriSMA(TwoPoints):
    """In each round every client i updates its estimate v_i on a batch, adds its own noise, and sends it::

        v_i = (1 - g) v_i + 1/b sum_j [ g clip(a_j, C1) + (1 - g) clip(clip(a_j, C1) - clip(a'_j, C1), C3) ] + noise
        x   = x - lr clip(mean_i v_i, C2)

    with a_j, a'_j the gradients of record j at x and at the x before. The first round has v_i = 1/b sum_j clip(a_j, C1)
    + noise of std sigma0.

    Args:
        model: any module `dpk.per_sample_gradients` can record.
        loss_fn: `loss_fn(outputs, targets)` gives one loss for each sample.
        clients: a sequence of (inputs, targets).
        lr: the step size.
        momentum: g (gamma), in (0, 1]. 1, without `server_norm`, is DPSGD-GC.
        gradient_norm: C1.
        server_norm: C2, or None for no clipping there.
        difference_norm: C3. None leaves the third clip out: see `smoothness`.
        batch_size: b, the size of batches, or what it is expected to be under Poisson sampling; sums are divided by it.
        noise: sigma1, the std of what each client adds to its estimate.
        initial_noise: sigma0, the same in the first round.
        sampling: "poisson", each record with probability b / n, or "fixed-size" as in the paper, which needs more
            noise.
        smoothness: L, with `difference_norm=None`: then a record's difference is *assumed* to be at most L lr C2, which
            nothing here can verify. The guarantee is as good as that assumption.
        micro_batch_size: the most records to run at a time.
        max_bytes: memory that rows may take, see `dpk.per_sample_gradients`.
        seed: makes noise and batches reproducible, and nothing private from whoever knows it.
        secure: noise whose low bits are safe too, see `dpk.Gaussian`; needs `micro_batch_size`.
        budget: (epsilon, delta); the round that would exceed it is refused.
        ranks: processes that share out the clients, see `dpk.ranks`.

    Formal guarantee: everything that a client sends is (epsilon(delta), delta)-DP under replace-one adjacency for its
    records, whoever sees it: noise is added in the client, from a stream of its own. Numbers of records, clients and
    rounds are public.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        clients: Sequence[Client],
        *,
        lr: float,
        momentum: float,
        gradient_norm: float,
        server_norm: float | None,
        difference_norm: float | None,
        batch_size: int,
        noise: float,
        initial_noise: float,
        sampling: Literal["poisson", "fixed-size"] = "poisson",
        smoothness: float | None = None,
        micro_batch_size: int | None = None,
        max_bytes: int | None = None,
        seed: int | None = None,
        secure: bool = False,
        budget: tuple[float, float] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            clients,
            lr=lr,
            micro_batch_size=micro_batch_size,
            max_bytes=max_bytes,
            secure=secure,
            ranks=ranks,
        )
        self._momentum = checks.positive("momentum", momentum, high=1)
        self._gradient_norm = checks.number("gradient_norm", gradient_norm, low=0)
        self._server_norm = math.inf if server_norm is None else checks.number("server_norm", server_norm, low=0)
        self._clips_differences = difference_norm is not None
        self._difference_norm = _difference_bound(difference_norm, smoothness, lr, server_norm, momentum)
        self._batch_size = checks.whole("batch_size", batch_size, low=1)
        if batch_size > min(self._sizes):
            raise ValueError(f"batch_size: got {batch_size}, must be at most the smallest client's {min(self._sizes)}")
        if sampling not in ("poisson", "fixed-size"):
            raise ValueError(f"sampling: got {sampling!r}, must be 'poisson' or 'fixed-size'")
        self._sampling = sampling
        self._noise = checks.number("noise", noise, low=0)
        self._initial_noise = checks.number("initial_noise", initial_noise, low=0)
        self.ledgers = [
            Ledger(batch_size / size, adjacency="replace-one", budget=budget)
            if sampling == "poisson"
            else Ledger(adjacency="replace-one", fixed_size=(size, batch_size), budget=budget)
            for size in self._sizes
        ]
        self._noises = [dpk.Gaussian(1.0, seed_of(seed, 1, i), secure, ledger) for i, ledger in enumerate(self.ledgers)]
        self._seed = seed
        self._drawn = [0] * len(self.clients)  # batches of each, also for a round that failed: none is drawn twice
        self._estimates = [self._zeros() if i in self._own else None for i in range(len(self.clients))]
        meet(
            self.ranks,
            self,
            model,
            seed,
            lr=lr,
            momentum=momentum,
            norms=(gradient_norm, server_norm, difference_norm, smoothness),
            noises=(noise, initial_noise),
            batch_size=batch_size,
            sampling=sampling,
            secure=secure,
            budget=budget,
        )
        self._earlier.load_state_dict(model.state_dict())

    def step(self) -> None:
        """One round."""
        with self.ranks.doing(f"round {self.round + 1}"):
            self._step()

    def _step(self) -> None:
        self._refuse_beyond()
        for i in range(len(self.clients)):
            self._client_step(i) if i in self._own else self._count(i)
        self.bytes_sent += 4 * self.width * len(self.clients)
        mean = self._spare[0]
        first, *others = (self._estimates[i] for i in self._own)
        for name, t in mean.items():
            t.copy_(first[name])
            for v in others:
                t.add_(v[name])
        self.ranks.sum_(list(mean.values()))
        for t in mean.values():
            t.div_(len(self.clients))
        norm = math.hypot(*(float(t.norm()) for t in mean.values()))
        self._move(mean, self._lr * (self._server_norm / norm if norm > self._server_norm else 1.0))
        self.round += 1

    def _refuse_beyond(self) -> None:
        """None sends if one may not."""
        if self.ledgers[0].budget is None:
            return
        std, row_norm = self._of_release()
        for noise in self._noises:
            noise.with_std(std).check(row_norm, self.width)

    def _client_step(self, i: int) -> None:
        """Client i's estimate, which it sends, gets its correction with noise of its own."""
        indices = self._draw(i)
        inputs, targets = (chosen(z, indices) for z in self.clients[i])
        rows_of = self._first_rows if self.round == 0 else self._rows
        parts = [(inputs, targets, 1 / self._batch_size)]
        sent = self._released(rows_of, parts, self._noises[i], *self._of_release())
        for name, v in self._estimates[i].items():
            v.mul_(1 - self._momentum).add_(sent[name])

    def _of_release(self) -> tuple[float, float]:
        """This round's noise, and how far one record can move what a client sends."""
        first, g = self.round == 0, self._momentum
        row_norm = self._gradient_norm if first else g * self._gradient_norm + (1 - g) * self._difference_norm
        return self._initial_noise if first else self._noise, row_norm / self._batch_size

    def _count(self, i: int) -> None:
        """Enter what client i, of another rank, draws and releases in this round: all of it is public."""
        std, row_norm = self._of_release()
        self.ledgers[i].note_batch(sampling_rate=self.ledgers[i].sampling_rate, fixed_size=self.ledgers[i].fixed_size)
        self._noises[i].with_std(std).follow(row_norm, self.width)

    def _all_estimates(self) -> list[Sum]:
        found = self.ranks.gather([self._estimates[i] for i in self._own])
        return [estimate for part in found for estimate in part]

    def state_dict(self) -> dict[str, Any]:
        """As `TwoPoints` has it, and how many batches were drawn of each client."""
        drawn = [max(numbers) for numbers in zip(*self.ranks.gather(self._drawn), strict=True)]
        return super().state_dict() | {"drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was, into an algorithm made with the same arguments that has not stepped yet."""
        super().load_state_dict(state)
        self._drawn = [int(number) for number in state["drawn"]]

    def _draw(self, i: int) -> Tensor:
        """Client i's next batch."""
        n, seed, ledger = self._sizes[i], seed_of(self._seed, 2, i), self.ledgers[i]
        start = self._drawn[i]
        self._drawn[i] += 1
        if self._sampling == "poisson":
            rate = self._batch_size / n
            return next(iter(dpk.sampling.poisson(n, rate, 1, seed, start=start, ledger=ledger, ranks=ALONE)))
        return next(iter(dpk.sampling.fixed_size(n, self._batch_size, 1, seed, start=start, ledger=ledger)))

    def _first_rows(self, x: Any, y: Any) -> list[tuple[dpk.PerSample, float, float]]:
        return [(self._rows_now(x, y), self._gradient_norm, 1.0)]

    def _rows(self, x: Any, y: Any) -> list[tuple[dpk.PerSample, float, float]]:
        """Each sample's row as a sum of two parts, each within its bound."""
        g, bound = self._momentum, self._gradient_norm
        if g == 1:
            return self._first_rows(x, y)
        now, before = self._rows_now(x, y), self._rows_before(x, y)
        change = now.clipped_difference(before, bound)
        return [(now, bound, g), (change, self._difference_norm if self._clips_differences else math.inf, 1 - g)]

    def epsilon(self, delta: float, accounting: Accounting = "exact") -> float:
        """The epsilon at `delta` of all rounds so far: the largest over clients.

        `accounting="published"` is the figure of the paper's Theorem 3.
        """
        if accounting == "exact":
            return largest_epsilon(self.ledgers, delta)
        return dpk.accounting.epsilon(
            dpk.accounting.prisma(
                noise=self._noise,
                initial_noise=self._initial_noise,
                rounds=self.round,
                momentum=self._momentum,
                batch_size=self._batch_size,
                records=min(self._sizes),
                gradient_norm=self._gradient_norm,
                difference_norm=self._difference_norm,
                accounting=accounting,
            ),
            delta,
        )

    @classmethod
    def with_budget(
        cls,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        clients: Sequence[Client],
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        lr: float,
        momentum: float,
        gradient_norm: float,
        server_norm: float | None,
        difference_norm: float | None,
        batch_size: int,
        sampling: Literal["poisson", "fixed-size"] = "poisson",
        smoothness: float | None = None,
        **arguments: Any,
    ) -> Self:
        """With the smallest noise for which `rounds` rounds spend at most (epsilon, delta); a round beyond is refused.

        All rounds, the first one too, have the same noise relative to what a record moves.
        """
        bound = _difference_bound(difference_norm, smoothness, lr, server_norm, momentum, quiet=True)
        row = momentum * gradient_norm + (1 - momentum) * bound
        size = min(shared_out(clients, given(arguments.get("ranks")))[1])

        def event(z: float) -> Event | PublishedBound:
            return dpk.accounting.prisma(
                noise=z * row / batch_size,
                initial_noise=z * gradient_norm / batch_size,
                rounds=rounds,
                gradient_norm=gradient_norm,
                difference_norm=bound,
                momentum=momentum,
                batch_size=batch_size,
                records=size,
                sampling=sampling,
            )

        z = dpk.accounting.calibrate(event, epsilon, delta)
        z = secured(z, z, model, arguments)
        return cls(
            model,
            loss_fn,
            clients,
            lr=lr,
            momentum=momentum,
            gradient_norm=gradient_norm,
            server_norm=server_norm,
            difference_norm=difference_norm,
            batch_size=batch_size,
            sampling=sampling,
            smoothness=smoothness,
            noise=z * row / batch_size,
            initial_noise=z * gradient_norm / batch_size,
            budget=(epsilon, delta),
            **arguments,
        )


def _difference_bound(
    difference_norm: float | None,
    smoothness: float | None,
    lr: float,
    server_norm: float | None,
    momentum: float,
    quiet: bool = False,
) -> float:
    """C3, or L lr C2 where that is assumed instead."""
    if difference_norm is not None:
        return checks.number("difference_norm", difference_norm, low=0)
    if momentum == 1:
        return 0.0  # there is no difference
    if smoothness is None or server_norm is None:
        raise ValueError("difference_norm: got None, must be a number unless smoothness and server_norm are given")
    if not quiet:
        warnings.warn(
            "difference_norm: got None, so epsilon rests on smoothness, which nothing here can verify: not a guarantee",
            stacklevel=3,
        )
    return checks.number("smoothness", smoothness, low=0) * lr * server_norm
