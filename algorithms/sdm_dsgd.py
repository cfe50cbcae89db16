"""SDM-DSGD: nodes without a server exchange sparse, noisy differences with their neighbours (Zhang et al., 2020)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks, products
from dpkernels.accounting import Event, Ledger
from dpkernels.dense import add_gaussian_each_
from dpkernels.members import members_of
from dpkernels.paper_events import Accounting, rounded_up
from dpkernels.places import Places
from dpkernels.ranks import Ranks, given
from dpkernels.sampling import poisson_of_each

from .federation import Client, InProcess, largest_epsilon, secured, seed_of, shared_out
from .masks import counts_of, kept_by, most_kept
from .micro_batches import Stacks, check_size
from .together import meet
from .topologies import check_topology

Order = Literal["noise-then-sparsify", "sparsify-then-noise"]


class SDMDSGD:
    """In each round every node i moves towards its neighbours and against its gradient, by what it tells them::

        g   = 1/b sum_j clamp(gradient of record j at x_i, -C, C)          over a Poisson batch
        d   = theta (sum_j W_ij x_j - x_i - lr (g + noise))
        x_i = x_i + S(d)                                                   S(d) is what it sends

    S keeps each coordinate with probability p and divides it by p. Which ones is drawn from a public seed, so a message
    has values only, and noise is drawn only for those.

    Args:
        model: any module `dpk.per_sample_gradients` can record; its weights are where all nodes start, and their
            average after each round.
        loss_fn: `loss_fn(outputs, targets)` gives one loss for each sample.
        nodes: a sequence of (inputs, targets).
        topology: W, the consensus matrix, see `dpkernels.algorithms.topologies`.
        lr: the step size (gamma).
        mixing: theta, in (0, 1]. 1 is DC-DSGD; with `keep_probability=1` it is DSGD.
        keep_probability: p, in (0, 1].
        clamp: C, for each coordinate of each record's gradient.
        noise_std: sigma, of the noise on the mean gradient g.
        batch_size: b, a constant that sums are divided by, whatever the size of a batch.
        sampling_rate: with which each record of a node is in a batch of its.
        order: "noise-then-sparsify", or the paper's alternative, which needs 1 / p times the noise: then the noise on
            what is sent is lr theta sigma, not divided by p.
        smoothness: of the loss (L), if known, for a warning of divergence that takes it into account.
        micro_batch_size: the most records of a node to run at a time.
        mask_seed: of the masks; public.
        seed: makes noise and batches reproducible, and nothing private from whoever knows it.
        secure: noise whose low bits are safe too, see `dpk.Gaussian`; needs `micro_batch_size`.
        budget: (epsilon, delta); the round that would exceed it for some node is refused.
        transport: what counts messages; within this process unless given.
        ranks: processes that share out the nodes, see `dpk.ranks`. Each has its own nodes' weights and copies of their
            neighbours' in `node_vectors`, in the order of `followed`; `model` is then the average of its own nodes, and
            `gathered()` brings all together. Messages go from rank to rank, once to each that has a neighbour.

    Formal guarantee: everything that a node sends is (epsilon(delta), delta)-DP under add-remove adjacency for its
    records, whoever sees all messages of all nodes: given its mask, which does not depend on data, a message is a
    Gaussian mechanism on the coordinates that were kept, on a Poisson sample. Each round is counted with its own number
    of them. The mask's seed, rates, numbers of nodes and rounds are public; so is `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        nodes: Sequence[Client],
        *,
        topology: Tensor,
        lr: float,
        mixing: float,
        keep_probability: float,
        clamp: float,
        noise_std: float,
        batch_size: float,
        sampling_rate: float,
        order: Order = "noise-then-sparsify",
        smoothness: float = 0.0,
        micro_batch_size: int | None = None,
        mask_seed: int = 0,
        seed: int | None = None,
        secure: bool = False,
        budget: tuple[float, float] | None = None,
        transport: InProcess | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        members = members_of(model)
        if len({p.dtype for p in members.trainable.values()}) != 1:
            raise ValueError("model: must have parameters that require grad, of one type")
        check_size(micro_batch_size, secure=secure)
        self.model, self.loss_fn = model, loss_fn
        self.ranks = given(ranks)
        self.nodes, self._sizes = shared_out(nodes, self.ranks, "nodes")
        self._own = self.ranks.share(len(self.nodes))  # the nodes of this rank
        self._topology = check_topology(topology, len(self.nodes))
        self._lr = checks.number("lr", lr, low=0)
        self._mixing = checks.positive("mixing", mixing, high=1)
        self._keep = checks.number("keep_probability", keep_probability, low=2.0**-32, high=1)
        self._clamp = checks.number("clamp", clamp, low=0)
        self._noise_std = checks.number("noise_std", noise_std, low=0)
        self._batch_size = checks.positive("batch_size", batch_size)
        self._rate = checks.number("sampling_rate", sampling_rate, low=0, high=1)
        self._noise_scale = _noise_scale(order, self._keep)
        self._mask_seed = checks.whole("mask_seed", mask_seed, low=0)
        self._places = Places(secure=secure)
        self._stacks = Stacks([self.nodes[i] for i in self._own], micro_batch_size)  # of the tensors that are there now
        self._warn_of_divergence(checks.number("smoothness", smoothness, low=0))
        linked = self._topology.clone().fill_diagonal_(0) != 0
        self._neighbours = [row.nonzero().squeeze(1).tolist() for row in linked]
        near = sorted({j for i in self._own for j in self._neighbours[i]} - set(self._own))
        self.followed = [*self._own, *near]
        # d has sum_j W_ij x_j - x_i
        self._pulls = (self._topology - torch.eye(len(self.nodes), device=self._topology.device))[
            self._own.start : self._own.stop, self.followed
        ]
        self.transport = InProcess() if transport is None else transport
        self.ledgers = [Ledger(sampling_rate, budget=budget) for _ in self.nodes]
        std = self._mixing * self._lr * self._noise_std * self._noise_scale
        self._noises = [dpk.Gaussian(std, seed_of(seed, 1, i), secure, own) for i, own in enumerate(self.ledgers)]
        self._seed, self._counted = seed, 0
        self._shapes = {name: p.shape for name, p in members.trainable.items()}
        meet(
            self.ranks,
            self,
            model,
            seed,
            topology=self._topology.tolist(),
            settings=(lr, mixing, keep_probability, clamp, noise_std, batch_size, sampling_rate, order),
            mask_seed=mask_seed,
            secure=secure,
            budget=budget,
        )
        start = torch.cat([p.detach().flatten() for p in members.trainable.values()])
        self.node_vectors = start.repeat(len(self.followed), 1)
        self._sums = start.new_zeros((len(self._own), len(start)), dtype=torch.float64)
        self.round = 0
        self._start(0)

    def _start(self, number: int) -> None:
        """Batches are drawn from number `number` on: a round that fails has drawn one, which is never used again."""
        self._drawn = number
        own, seed = self._own, seed_of(self._seed, 2)
        ledgers = self.ledgers[own.start : own.stop]
        self._draws = poisson_of_each(self._sizes, self._rate, 1 << 40, seed, start=number, ledgers=ledgers, own=own)

    @property
    def bytes_sent(self) -> int:
        """By all nodes (of this rank) to all their neighbours; `ranks.bytes_sent` is what went from rank to rank."""
        return self.transport.bytes_sent

    @property
    def width(self) -> int:
        """How many numbers are trained."""
        return self.node_vectors.shape[1]

    def step(self) -> None:
        """One round."""
        with self.ranks.doing(f"round {self.round + 1}"):
            self._step()

    def _step(self) -> None:
        vectors, own = self.node_vectors, len(self._own)
        indices, counts = kept_by(self.followed, self.round, *self._mask)
        kept = indices[: sum(counts[:own])]
        gradients = self._gradients().view(-1).index_select(0, kept)
        towards = products.linear(self._pulls.to(vectors.dtype), vectors.t()).view(-1).index_select(0, kept)
        self._refuse_beyond(counts)
        values = towards.double().sub_(gradients, alpha=self._lr).mul_(self._mixing / self._keep)
        messages = self._exchange(self._noisy(values, counts[:own]), counts[own:])
        vectors.view(-1).index_add_(0, indices, torch.cat(messages))
        self.round += 1
        self._count_others()
        self._average()

    @property
    def _mask(self) -> tuple[int, int, float]:
        """What masks are drawn by, beside the node and the round."""
        return self._mask_seed, self.width, self._keep

    def _row_norm(self, count: int) -> float:
        """How far one record can move what is sent, of so many coordinates."""
        moved = self._mixing * self._lr * self._clamp / (self._keep * self._batch_size)  # each coordinate, at most
        return moved * math.sqrt(rounded_up(count))

    def _refuse_beyond(self, counts: list[int]) -> None:
        """None sends if one may not; `counts` are those of the nodes that are followed."""
        if self.ledgers[0].budget is None:
            return
        if self.ranks.size > 1:
            counts = counts_of(range(len(self.nodes)), self.round, *self._mask)
        for ledger, noise, count in zip(self.ledgers, self._noises, counts, strict=True):
            ledger.check(std=noise.std, sensitivity=noise.widened(self._row_norm(count), count))

    def _noisy(self, values: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """What nodes of this rank send: each with noise of its own, in its ledger; counted."""
        noises = self._noises[self._own.start : self._own.stop]
        add_gaussian_each_(values, counts, noises, [self._row_norm(count) for count in counts])
        messages = values.to(self.node_vectors.dtype).split(list(counts))
        return [
            self.transport.send(message, len(self._neighbours[i]))
            for i, message in zip(self._own, messages, strict=True)
        ]

    def _exchange(self, messages: list[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Adds those of other ranks' nodes that are followed here: masks are public, so values alone travel."""
        if self.ranks.size == 1:
            return messages
        owner = [self.ranks.owner(i, len(self.nodes)) for i in range(len(self.nodes))]
        sent = [
            (rank, message)
            for i, message in zip(self._own, messages, strict=True)
            for rank in sorted({owner[j] for j in self._neighbours[i]} - {self.ranks.rank})
        ]
        near = self.followed[len(self._own) :]
        awaited = [(owner[i], messages[0].new_zeros(count)) for i, count in zip(near, counts, strict=True)]
        self.ranks.exchange(sent, awaited)
        return messages + [message for _, message in awaited]

    def _count_others(self) -> None:
        """Enter what nodes of other ranks released since: how much they kept is public, and so is all else of it."""
        others = [i for i in range(len(self.nodes)) if i not in self._own]
        for number in range(self._counted, self.round) if others else ():
            for i, count in zip(others, counts_of(others, number, *self._mask), strict=True):
                self.ledgers[i].note_batch(sampling_rate=self._rate)
                self._noises[i].follow(self._row_norm(count), count)
        self._counted = self.round

    def gathered(self) -> Tensor:
        """All nodes' weights, [N, d], on every rank; `model` becomes their average. All ranks must call it together."""
        whole = self.node_vectors
        if self.ranks.size > 1:
            whole = torch.cat(self.ranks.gather(self.node_vectors[: len(self._own)].clone()))
        self._average(whole)
        return whole

    def _gradients(self) -> Tensor:
        """Each node's clamped gradients at its own weights on a batch, summed and divided by b: [N, d] in float64."""
        total = self._sums.zero_()
        weights, sums = (self._by_parameter(t) for t in (self.node_vectors[: len(self._own)], total))
        rows_of = partial(dpk.per_sample_gradients, self.model, self.loss_fn, weights=weights)
        self._drawn += 1
        for inputs, targets, where in self._stacks(*next(self._draws)):
            self._places.check(self.model, rows_of, inputs, targets, runs=len(self._own))
            rows = rows_of(inputs, targets, where=where)
            rows.clamped_sums(self._clamp, len(self._own), onto=sums, where=where)
        return total.div_(self._batch_size)

    def _by_parameter(self, vectors: Tensor) -> dict[str, Tensor]:
        """Vectors [n, d] as parameters, [n, *shape]."""
        parts = vectors.split([shape.numel() for shape in self._shapes.values()], dim=1)
        return {
            name: part.view(len(vectors), *shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    @torch.no_grad()
    def _average(self, vectors: Tensor | None = None) -> None:
        vectors = self.node_vectors[: len(self._own)] if vectors is None else vectors
        mean = self._by_parameter(vectors.mean(0, keepdim=True))
        for name, p in members_of(self.model).trainable.items():
            p.copy_(mean[name][0])

    def _warn_of_divergence(self, smoothness: float) -> None:
        least = float(torch.linalg.eigvalsh(self._topology)[0])
        spread = 1 - least + self._lr * smoothness
        if self._mixing * spread >= 2 * self._keep * (1 - 1e-9):
            warnings.warn(
                f"mixing: got {self._mixing:g}, must be below 2 p / (1 - lambda_n + lr L) = "
                f"{2 * self._keep / spread:.3g} (for L = {smoothness:g}), or training may diverge",
                stacklevel=3,
            )

    def epsilon(self, delta: float, accounting: Accounting = "exact") -> float:
        """The epsilon at `delta` of all rounds so far: the largest over nodes.

        `accounting="published"` is the figure of the paper's Theorem 1, which is not a guarantee.
        """
        if accounting == "exact":
            return largest_epsilon(self.ledgers, delta)
        if accounting != "published":
            raise ValueError(f"accounting: got {accounting!r}, must be 'exact' or 'published'")
        bound = dpk.accounting.sdm_dsgd_published(
            noise_std=self._noise_std,
            clamp=self._clamp,
            width=self.width,
            records=min(self._sizes),
            sampling_rate=self._rate,
            keep_probability=self._keep,
            rounds=self.round,
        )
        return dpk.accounting.epsilon(bound, delta)

    @classmethod
    def with_budget(
        cls,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        nodes: Sequence[Client],
        *,
        epsilon: float,
        delta: float,
        rounds: int,
        keep_probability: float,
        clamp: float,
        batch_size: float,
        sampling_rate: float,
        order: Order = "noise-then-sparsify",
        mask_seed: int = 0,
        **arguments: Any,
    ) -> Self:
        """With the smallest noise for which `rounds` rounds spend at most (epsilon, delta); a round beyond is refused.

        Masks come from a public seed, so how many coordinates each round keeps is known before the first. Other
        `arguments` are those of the constructor but for the noise.
        """
        width = members_of(model).width
        checks.positive("clamp", clamp)
        checks.positive("batch_size", batch_size)
        checks.whole("mask_seed", mask_seed, low=0)
        parties = len(shared_out(nodes, given(arguments.get("ranks")), "nodes")[0])
        sizes = most_kept(width, keep_probability, mask_seed, parties, rounds)
        unit = clamp * math.sqrt(max(rounded_up(sizes[0]), 1)) / batch_size

        def event(z: float) -> Event:
            return dpk.accounting.sdm_dsgd(
                sizes,
                noise_std=z * unit,
                clamp=clamp,
                batch_size=batch_size,
                sampling_rate=sampling_rate,
                keep_probability=keep_probability,
                order=order,
            )

        z = dpk.accounting.calibrate(event, epsilon, delta) * (1 + 1e-6)
        weakest = z * math.sqrt(max(rounded_up(sizes[0]), 1) / max(sizes[-1], 1))
        algorithm = cls(
            model,
            loss_fn,
            nodes,
            keep_probability=keep_probability,
            clamp=clamp,
            noise_std=secured(z, weakest, model, arguments) * unit,
            batch_size=batch_size,
            sampling_rate=sampling_rate,
            order=order,
            mask_seed=mask_seed,
            budget=(epsilon, delta),
            **arguments,
        )
        for ledger in algorithm.ledgers:
            ledger.allow(event(z * (1 - 1e-9)))  # multipliers are rounded
        return algorithm

    def state_dict(self) -> dict[str, Any]:
        """Every node's weights, counters and ledgers; no key. See `dpk.checkpoint`.

        All ranks must call it together; each gets all of it.
        """
        return {
            "node_vectors": self.gathered(),
            "round": self.round,
            "drawn": self._drawn,
            "bytes_sent": sum(self.ranks.gather(self.bytes_sent)),
            "mask_seed": self._mask_seed,
            "releases": [noise.releases for noise in self._noises],
            "ledgers": [ledger.state_dict() for ledger in self.ledgers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was, into an algorithm made with the same arguments that has not stepped yet."""
        if state["mask_seed"] != self._mask_seed:
            raise ValueError(f"mask_seed: is {state['mask_seed']} in the saved run, must be {self._mask_seed} as here")
        if state["node_vectors"].shape != (len(self.nodes), self.width):
            raise ValueError(
                f"node_vectors: are {tuple(state['node_vectors'].shape)} in the saved run, must be "
                f"{(len(self.nodes), self.width)} as here: nodes, and numbers of each"
            )
        for ledger, saved in zip(self.ledgers, state["ledgers"], strict=True):
            ledger.load_state_dict(saved)
        for noise, releases in zip(self._noises, state["releases"], strict=True):
            noise.skip(releases)
        self.node_vectors.copy_(state["node_vectors"][self.followed])
        self.transport.bytes_sent = int(state["bytes_sent"]) if self.ranks.rank == 0 else 0
        self.round = self._counted = int(state["round"])
        self._start(int(state["drawn"]))
        self._average()


def _noise_scale(order: str, keep_probability: float) -> float:
    """What the noise of a message is multiplied by."""
    if order not in ("noise-then-sparsify", "sparsify-then-noise"):
        raise ValueError(f"order: got {order!r}, must be 'noise-then-sparsify' or 'sparsify-then-noise'")
    return 1 / keep_probability if order == "noise-then-sparsify" else 1.0
