"""SDM-DSGD: nodes without a server exchange sparse, noisy differences with their neighbours (Zhang et al., 2020)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks
from dpkernels.accounting import Event, Ledger
from dpkernels.gradients import batch_of
from dpkernels.members import members_of
from dpkernels.paper_events import Accounting, rounded_up
from dpkernels.places import Places

from .federation import Client, InProcess, check_clients, largest_epsilon, secured, seed_of
from .micro_batches import check_size, stacked_batches
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
        transport: what carries messages; within this process unless given.

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
    ) -> None:
        members = members_of(model)
        if len({p.dtype for p in members.trainable.values()}) != 1:
            raise ValueError("model: must have parameters that require grad, of one type")
        check_size(micro_batch_size, secure=secure)
        self.model, self.loss_fn = model, loss_fn
        self.nodes = check_clients(nodes, "nodes")
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
        self._micro_batch_size, self._places = micro_batch_size, Places(secure=secure)
        self._warn_of_divergence(checks.number("smoothness", smoothness, low=0))
        self._sizes = [batch_of(*node) for node in self.nodes]
        self._neighbours = (self._topology.clone().fill_diagonal_(0) != 0).sum(1).tolist()
        self.transport = InProcess() if transport is None else transport
        self.ledgers = [Ledger(sampling_rate, budget=budget) for _ in self.nodes]
        std = self._mixing * self._lr * self._noise_std * self._noise_scale
        self._noises = [dpk.Gaussian(std, seed_of(seed, 1, i), secure, own) for i, own in enumerate(self.ledgers)]
        self._seed = seed
        self._shapes = {name: p.shape for name, p in members.trainable.items()}
        self._memory: dict[int, Tensor] = {}
        start = torch.cat([p.detach().flatten() for p in members.trainable.values()])
        self.node_vectors = start.repeat(len(self.nodes), 1)
        self._sums = torch.zeros_like(self.node_vectors, dtype=torch.float64)
        self._start(0)

    def _start(self, number: int) -> None:
        """Batches are drawn from round `number` on."""
        self.round = number
        self._draws = [
            iter(dpk.sampling.poisson(n, self._rate, 1 << 40, seed_of(self._seed, 2, i), start=number, ledger=ledger))
            for i, (n, ledger) in enumerate(zip(self._sizes, self.ledgers, strict=True))
        ]

    @property
    def bytes_sent(self) -> int:
        """By all nodes to all their neighbours."""
        return self.transport.bytes_sent

    @property
    def width(self) -> int:
        """How many numbers are trained."""
        return self.node_vectors.shape[1]

    def step(self) -> None:
        """One round."""
        vectors = self.node_vectors
        moves = self._gradients().mul_(-self._lr)
        moves += torch.addmm(vectors, self._topology.to(vectors.dtype), vectors, beta=-1)
        moves *= self._mixing
        kept = [self._kept(i, move) for i, move in enumerate(moves)]
        for ledger, noise, message in zip(self.ledgers, self._noises, kept, strict=True):  # none sends if one may not
            ledger.check(std=noise.std, sensitivity=noise.widened(self._row_norm(message), len(message.values)))
        messages = [self._noisy(i, message) for i, message in enumerate(kept)]
        for i, message in enumerate(messages):
            values = self.transport.send(message.values.to(vectors.dtype), self._neighbours[i])
            vectors[i].index_add_(0, message.indices, values)
        self.round += 1
        self._average()

    def _kept(self, i: int, move: Tensor) -> dpk.SparseMessage:
        """The coordinates of node i's move that it sends, without noise."""
        return dpk.sparsify(move, self._keep, seed=mask_seed_of(self._mask_seed, self.round, i))

    def _row_norm(self, message: dpk.SparseMessage) -> float:
        """How far one record can move what is sent."""
        moved = self._mixing * self._lr * self._clamp / (self._keep * self._batch_size)  # each coordinate, at most
        return moved * math.sqrt(rounded_up(len(message.values)))

    def _noisy(self, i: int, message: dpk.SparseMessage) -> dpk.SparseMessage:
        """What node i sends: with noise of its own, in its ledger."""
        dpk.add_gaussian_(message.values, self._noises[i], sensitivity=self._row_norm(message))
        return message

    def _gradients(self) -> Tensor:
        """Each node's clamped gradients at its own weights on a batch, summed and divided by b: [N, d] in float64."""
        batches = [next(draw) for draw in self._draws]
        total = self._sums.zero_()
        weights, sums = self._by_parameter(self.node_vectors), self._by_parameter(total)
        rows_of = partial(dpk.per_sample_gradients, self.model, self.loss_fn, weights=weights)
        for inputs, targets, where in stacked_batches(self.nodes, batches, self._micro_batch_size, self._memory):
            self._places.check(self.model, rows_of, inputs, targets, runs=len(self.nodes))
            rows_of(inputs, targets, where=where).clamped_sums(self._clamp, len(self.nodes), onto=sums)
        return total.div_(self._batch_size)

    def _by_parameter(self, vectors: Tensor) -> dict[str, Tensor]:
        """Vectors [n, d] as parameters, [n, *shape]."""
        parts = vectors.split([shape.numel() for shape in self._shapes.values()], dim=1)
        return {
            name: part.view(len(vectors), *shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    @torch.no_grad()
    def _average(self) -> None:
        mean = self._by_parameter(self.node_vectors.mean(0, keepdim=True))
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
        kept = most_kept(width, keep_probability, mask_seed, len(check_clients(nodes, "nodes")), rounds)
        unit = clamp * math.sqrt(max(rounded_up(kept[0]), 1)) / batch_size

        def event(z: float) -> Event:
            return dpk.accounting.sdm_dsgd(
                kept,
                noise_std=z * unit,
                clamp=clamp,
                batch_size=batch_size,
                sampling_rate=sampling_rate,
                keep_probability=keep_probability,
                order=order,
            )

        z = dpk.accounting.calibrate(event, epsilon, delta) * (1 + 1e-6)
        weakest = z * math.sqrt(max(rounded_up(kept[0]), 1) / max(kept[-1], 1))
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
        """Every node's weights, counters and ledgers; no key. See `dpk.checkpoint`."""
        return {
            "node_vectors": self.node_vectors,
            "round": self.round,
            "bytes_sent": self.bytes_sent,
            "mask_seed": self._mask_seed,
            "releases": [noise.releases for noise in self._noises],
            "ledgers": [ledger.state_dict() for ledger in self.ledgers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another run was, into an algorithm made with the same arguments that has not stepped yet."""
        if state["mask_seed"] != self._mask_seed:
            raise ValueError(f"mask_seed: is {state['mask_seed']} in the saved run, must be {self._mask_seed} as here")
        if state["node_vectors"].shape != self.node_vectors.shape:
            raise ValueError(
                f"node_vectors: are {tuple(state['node_vectors'].shape)} in the saved run, must be "
                f"{tuple(self.node_vectors.shape)} as here: nodes, and numbers of each"
            )
        for ledger, saved in zip(self.ledgers, state["ledgers"], strict=True):
            ledger.load_state_dict(saved)
        for noise, releases in zip(self._noises, state["releases"], strict=True):
            noise.skip(releases)
        self.node_vectors.copy_(state["node_vectors"])
        self.transport.bytes_sent = int(state["bytes_sent"])
        self._start(int(state["round"]))
        self._average()


def mask_seed_of(mask_seed: int, number: int, node: int) -> int:
    """The seed of a node's mask in a round: public, as all masks are."""
    return (mask_seed + (number << 20) + node) % 2**63  # seeds that differ have nothing in common


def most_kept(width: int, keep_probability: float, mask_seed: int, nodes: int, rounds: int) -> list[int]:
    """How many coordinates rounds keep, largest first, for a node no better than any: the most at each place."""
    checks.whole("rounds", rounds, low=1)
    nothing = torch.zeros(width)

    def of_node(i: int) -> Iterator[int]:
        for number in range(rounds):
            yield len(dpk.sparsify(nothing, keep_probability, seed=mask_seed_of(mask_seed, number, i)).values)

    by_node = [sorted(of_node(i), reverse=True) for i in range(nodes)]
    return [max(numbers) for numbers in zip(*by_node, strict=True)]


def _noise_scale(order: str, keep_probability: float) -> float:
    """What the noise of a message is multiplied by."""
    if order not in ("noise-then-sparsify", "sparsify-then-noise"):
        raise ValueError(f"order: got {order!r}, must be 'noise-then-sparsify' or 'sparsify-then-noise'")
    return 1 / keep_probability if order == "noise-then-sparsify" else 1.0
