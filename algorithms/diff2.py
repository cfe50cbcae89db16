"""DIFF2: private gradient estimates kept up to date by private gradient differences (Murata and Suzuki, 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.accounting import BudgetError, Event, Ledger, PublishedBound
from dpkernels.paper_events import Accounting
from dpkernels.ranks import Ranks, given

from .federation import Client, chosen, joined, largest_epsilon, secured, seed_of, shared_out
from .together import meet
from .two_points import RowsOf, TwoPoints


@dataclass(frozen=True)
class GD:
    """One step along the estimate in each round."""


@dataclass(frozen=True)
class BVRLSGD:
    """Then one client walks on: `local_steps` - 1 steps of its own, each corrected by differences on a small batch.

    `batch_size` records without replacement, differences clipped to `difference_norm` (C3) times the last move, noise
    of `noise` (sigma3) times that.
    """

    local_steps: int
    batch_size: int
    difference_norm: float
    noise: float

    def __post_init__(self) -> None:
        checks.whole("local_steps", self.local_steps, low=1)
        checks.whole("batch_size", self.batch_size, low=1)
        checks.number("difference_norm", self.difference_norm, low=0)
        checks.number("noise", self.noise, low=0)


class DIFF2(TwoPoints):
    """In each round all clients' clipped gradient differences, averaged and noised, correct the gradient estimate.

    Every `restart_every`-th round starts again from clipped gradients::

        d_p = mean_i clip(g_i(x), C1), v = 0             at a restart, noise of std sigma1 C1
        d_p = mean_i clip(g_i(x) - g_i(x before), C)     otherwise, C = C2 |x - x before|, noise of std sigma2 C
        v   = v + mean_p d_p + noise;   x = x - lr v

    Args:
        model: any module `dpk.per_sample_gradients` can record.
        loss_fn: `loss_fn(outputs, targets)` gives one loss for each sample.
        clients: a sequence of (inputs, targets).
        lr: the step size.
        restart_every: T; 1 is DP-GD.
        gradient_norm: C1.
        difference_norm: C2, relative to how far the weights moved.
        gradient_noise: sigma1, of the mean, relative to C1.
        difference_noise: sigma2, of the mean, relative to C.
        routine: `GD()`, or `BVRLSGD(...)`.
        micro_batch_size: the most records to run at a time; memory does not grow with a client beyond it.
        max_bytes: memory that rows may take, see `dpk.per_sample_gradients`.
        seed: makes noise and batches reproducible, and nothing private from whoever knows it.
        secure: noise whose low bits are safe too, see `dpk.Gaussian`; needs `micro_batch_size`.
        budget: (epsilon, delta); the round that would exceed it is refused.
        ranks: processes that share out the clients, see `dpk.ranks`; the first one is the server.

    Formal guarantee: all weights and estimates of all rounds are (epsilon(delta), delta)-DP under replace-one adjacency
    for every record of every client. The server is trusted: it sees what clients send and adds the noise (a client adds
    its own in its own walk). Numbers of records, clients and rounds are public.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        clients: Sequence[Client],
        *,
        lr: float,
        restart_every: int,
        gradient_norm: float,
        difference_norm: float,
        gradient_noise: float,
        difference_noise: float,
        routine: GD | BVRLSGD | None = None,
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
        self._restart_every = checks.whole("restart_every", restart_every, low=1)
        self._gradient_norm = checks.number("gradient_norm", gradient_norm, low=0)
        self._difference_norm = checks.number("difference_norm", difference_norm, low=0)
        self._gradient_noise = checks.number("gradient_noise", gradient_noise, low=0)
        self._difference_noise = checks.number("difference_noise", difference_noise, low=0)
        self.routine = GD() if routine is None else routine
        if not isinstance(self.routine, GD | BVRLSGD):
            raise ValueError(f"routine: got {routine!r}, must be GD() or BVRLSGD(...)")
        walks = self.routine if isinstance(self.routine, BVRLSGD) else None
        if walks is not None and walks.batch_size > min(self._sizes):
            raise ValueError(
                f"routine: has batch_size {walks.batch_size}, must be at most the smallest client's {min(self._sizes)}"
            )
        if walks is None:  # a record of the smallest client moves the mean most
            self.ledgers = [Ledger(adjacency="replace-one", budget=budget)]
            everybody: dpk.noise.Book = self.ledgers[0]
        else:
            self.ledgers = [
                Ledger(adjacency="replace-one", fixed_size=(size, walks.batch_size), budget=budget)
                for size in self._sizes
            ]
            everybody = _Everybody(self.ledgers, self._sizes)
        self._noise = dpk.Gaussian(1.0, seed_of(seed, 0), secure, everybody)
        self._local = [dpk.Gaussian(1.0, seed_of(seed, 1, p), secure, ledger) for p, ledger in enumerate(self.ledgers)]
        self._noises = [self._noise, *self._local]
        self._seed = seed
        self._by_size = _merged(self.clients, self._sizes, self._own)
        self._estimate = self._zeros()
        self._estimates = [self._estimate]
        meet(
            self.ranks,
            self,
            model,
            seed,
            lr=lr,
            restart_every=restart_every,
            norms=(gradient_norm, difference_norm),
            noises=(gradient_noise, difference_noise),
            routine=repr(self.routine),
            secure=secure,
            budget=budget,
        )
        self._earlier.load_state_dict(model.state_dict())

    def step(self) -> None:
        """One round."""
        with self.ranks.doing(f"round {self.round + 1}"):
            refused = self._step()
        if refused is not None:  # on all ranks, which are in step
            raise BudgetError(refused)

    def _step(self) -> str | None:
        """One round; in whose words a client's budget ended in it, if it did."""
        restart = self.round % self._restart_every == 0
        bound = self._gradient_norm if restart else self._difference_norm * self._distance()
        sigma = self._gradient_noise if restart else self._difference_noise
        if restart or bound > 0:  # weights that did not move have no difference, and nothing to hide
            rows_of = self._gradients(bound) if restart else self._differences(bound)
            parties = len(self.clients)
            parts = [(*alike, 1 / (size * parties)) for size, alike in self._by_size.items()]
            row_norm = bound / (min(self._sizes) * parties)
            released = self._released(rows_of, parts, self._noise, sigma * bound, row_norm, self.ranks)
            self.bytes_sent += 4 * self.width * parties
            for name, t in self._estimate.items():
                t.copy_(released[name]) if restart else t.add_(released[name])
        self._move(self._estimate, self._lr)
        self.round += 1
        if isinstance(self.routine, BVRLSGD):
            p, refused = self.round % len(self.clients), None
            if p in self._own:
                try:
                    self._walk(self.routine, p)
                except BudgetError as error:
                    refused = str(error)
            return self._follow(p, refused)
        return None

    def _gradients(self, bound: float) -> RowsOf:
        return lambda x, y: [(self._rows_now(x, y), bound, 1.0)]

    def _differences(self, bound: float) -> RowsOf:
        return lambda x, y: [(self._rows_now(x, y) - self._rows_before(x, y), bound, 1.0)]

    def _walk(self, routine: BVRLSGD, p: int) -> None:
        """The steps 2 .. K of one client. The next round's difference is over all of them: from before the first."""
        start = {name: t.detach().clone() for name, t in self._earlier.state_dict().items()}
        estimate = {name: t.clone() for name, t in self._estimate.items()}
        ledger, steps = self.ledgers[p], routine.local_steps - 1
        seed, first = seed_of(self._seed, 2, p), self.round * steps
        draws = dpk.sampling.fixed_size(self._sizes[p], routine.batch_size, steps, seed, start=first, ledger=ledger)
        try:
            for indices in draws:
                bound = routine.difference_norm * self._distance()
                if bound > 0:
                    x, y = (chosen(z, indices) for z in self.clients[p])
                    rows_of, parts = self._differences(bound), [(x, y, 1 / routine.batch_size)]
                    row_norm = bound / routine.batch_size
                    released = self._released(rows_of, parts, self._local[p], routine.noise * bound, row_norm)
                    for name, t in estimate.items():
                        t.add_(released[name])
                self._move(estimate, self._lr)
        finally:  # also where the budget ends in the middle of a walk
            self._earlier.load_state_dict(start)

    def _follow(self, p: int, refused: str | None) -> str | None:
        """All ranks go on from where client p has come, with what it has entered, and know where its budget ended."""
        self.bytes_sent += 4 * self.width
        if self.ranks.size > 1:
            owner, (now, _) = self.ranks.owner(p, len(self.clients)), self._trained()
            told = self.ledgers[p].state_dict(), self._local[p].releases, refused
            entries, releases, refused = self.ranks.from_rank(told, owner)
            self.ranks.spread_([t.detach() for t in now], owner)
            if p not in self._own:
                self.ledgers[p].follow(entries)
                self._local[p].skip(releases)
        return refused

    def epsilon(self, delta: float, accounting: Accounting = "exact") -> float:
        """The epsilon at `delta` of all rounds so far: the largest over clients.

        `accounting="published"` is the figure of the paper's Proposition 4.1, for `GD` only.
        """
        if accounting == "exact":
            return largest_epsilon(self.ledgers, delta)
        if not isinstance(self.routine, GD):
            raise ValueError(f"accounting: got {accounting!r}, must be 'exact' with BVRLSGD")
        return dpk.accounting.epsilon(
            dpk.accounting.diff2(
                gradient_noise=self._gradient_noise,
                difference_noise=self._difference_noise,
                rounds=self.round,
                restart_every=self._restart_every,
                clients=len(self.clients),
                smallest_client=min(self._sizes),
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
        restart_every: int,
        split: float = 1.25,
        **arguments: Any,
    ) -> Self:
        """With the smallest noise for which `rounds` rounds spend at most (epsilon, delta); a round beyond is refused.

        `split` is the paper's u: 1 / u of the loss goes to restarts, the rest to differences. A `BVRLSGD` routine keeps
        the noise it has. Other `arguments` are those of the constructor but for the two noises.
        """
        if checks.number("split", split, low=1) == 1 and restart_every > 1:
            raise ValueError("split: got 1, must be > 1 unless restart_every is 1: nothing is left for differences")
        restarts = -(-checks.whole("rounds", rounds, low=1) // checks.whole("restart_every", restart_every, low=1))
        _, sizes = shared_out(clients, given(arguments.get("ranks")))
        first = math.sqrt(split * restarts)
        later = math.sqrt(split / (split - 1) * (rounds - restarts)) if rounds > restarts else first
        routine = arguments.get("routine")

        def event(z: float) -> Event | PublishedBound:
            unit = z / (min(sizes) * len(sizes))
            options: dict[str, Any] = {
                "gradient_noise": unit * first,
                "difference_noise": unit * later,
                "rounds": rounds,
                "restart_every": restart_every,
                "clients": len(sizes),
            }
            if not isinstance(routine, BVRLSGD):
                return dpk.accounting.diff2(**options, smallest_client=min(sizes))
            return dpk.accounting.bvr_l_sgd(
                **options,
                records=min(sizes),
                local_noise=routine.noise,
                local_steps=routine.local_steps,
                batch_size=routine.batch_size,
                own_rounds=-(-rounds // len(sizes)),
            )

        z = dpk.accounting.calibrate(event, epsilon, delta)
        unit = secured(z, z * max(first, later), model, arguments) / (min(sizes) * len(sizes))
        return cls(
            model,
            loss_fn,
            clients,
            restart_every=restart_every,
            gradient_noise=unit * first,
            difference_noise=unit * later,
            budget=(epsilon, delta),
            **arguments,
        )


def _merged(clients: list[Client], sizes: list[int], own: range) -> dict[int, Client]:
    """Those of `own` clients that have one size as one: their records have the same weight in the mean."""
    alike: dict[int, list[Client]] = {}
    for p in own:
        alike.setdefault(sizes[p], []).append(clients[p])
    return {size: (joined([c[0] for c in found]), joined([c[1] for c in found])) for size, found in alike.items()}


class _Everybody:
    """Passes a release of all clients' records on to each one's ledger; a record of a small client moves it more."""

    def __init__(self, ledgers: list[Ledger], sizes: list[int]) -> None:
        self._ledgers, self._shares = ledgers, [min(sizes) / size for size in sizes]

    def check(self, *, std: float, sensitivity: float) -> None:
        for ledger, share in zip(self._ledgers, self._shares, strict=True):
            ledger.check(std=std, sensitivity=sensitivity * share, sampled=False)

    def record(self, *, std: float, sensitivity: float, reproducible: bool) -> None:
        self.check(std=std, sensitivity=sensitivity)  # all have the entry, or none
        for ledger, share in zip(self._ledgers, self._shares, strict=True):
            ledger.record(std=std, sensitivity=sensitivity * share, reproducible=reproducible, sampled=False)
