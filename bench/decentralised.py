"""A round of SDM-DSGD with 50 nodes against loops over nodes in plain torch.

`python -m bench decentralised`. Logistic regression on images of 28 by 28 and a small network, batches of 64. The loops
take per-sample gradients by vmap in each node, or record by record by autograd; batches, masks and noise are torch's.
Ratios are taken round by round, all in turn, after what nodes have was compared in float64, without noise.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import dpkernels as dpk
from dpkernels.algorithms import SDMDSGD, problems, topologies
from dpkernels.algorithms.masks import mask_seed_of
from dpkernels.bench import harness
from dpkernels.bench.training import timed

NODES, RECORDS, BATCH = 50, 1200, 64
LR, MIXING, KEEP, CLAMP, NOISE = 0.1, 0.5, 0.2, 0.01, 0.01
FASTER = 10.0  # than the loop over nodes
RESULTS_FILE = Path(__file__).parent.parent / "results" / "decentralised.json"
Rows = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]  # of one node's batch at its weights
MODELS = {
    "logistic regression": (problems.logistic_regression, (784,)),
    "small CNN": (problems.small_cnn, (1, 28, 28)),
}


def rows_by_vmap(model: nn.Module) -> Rows:
    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return problems.cross_entropy(functional_call(model, weights, (x[None],)), y[None])[0]

    return vmap(grad(loss), in_dims=(None, 0, 0))


def rows_by_autograd(model: nn.Module) -> Rows:
    def rows(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        found = [
            torch.autograd.grad(
                problems.cross_entropy(functional_call(model, leaves, (x[i : i + 1],)), y[i : i + 1]).sum(),
                list(leaves.values()),
            )
            for i in range(len(x))
        ]
        return {name: torch.stack(parts) for name, parts in zip(leaves, zip(*found, strict=True), strict=True)}

    return rows


class Loop:
    """The algorithm node by node in plain torch."""

    def __init__(self, model: nn.Module, nodes: list[tuple[Tensor, Tensor]], topology: Tensor, rows: Rows) -> None:
        parameters = dict(model.named_parameters())
        self._shapes = {name: p.shape for name, p in parameters.items()}
        start = torch.cat([p.detach().flatten() for p in parameters.values()])
        self.vectors = start.repeat(len(nodes), 1)
        self._nodes, self._topology, self._rows = nodes, topology.to(start.dtype), rows

    def step(self, noise: float = NOISE, rate: float = BATCH / RECORDS, masks: list[Tensor] | None = None) -> None:
        mixed = self._topology @ self.vectors
        messages = []
        for i, (x, y) in enumerate(self._nodes):
            chosen = (torch.rand(len(x)) < rate).nonzero().squeeze(1)
            parts = self.vectors[i].split([shape.numel() for shape in self._shapes.values()])
            weights = {name: p.view(s) for (name, s), p in zip(self._shapes.items(), parts, strict=True)}
            rows = self._rows(weights, x[chosen], y[chosen])
            g = torch.cat([rows[name].clamp(-CLAMP, CLAMP).sum(0).flatten() for name in self._shapes]) / BATCH
            d = MIXING * (mixed[i] - self.vectors[i] - LR * (g + noise * torch.randn_like(g)))
            mask = torch.rand(len(d)) < KEEP if masks is None else masks[i]
            messages.append(torch.where(mask, d / KEEP, 0))
        self.vectors += torch.stack(messages)


def ours(model: nn.Module, nodes: list[tuple[Tensor, Tensor]], topology: Tensor, **options: float) -> SDMDSGD:
    settings = {"lr": LR, "mixing": MIXING, "keep_probability": KEEP, "clamp": CLAMP, "batch_size": BATCH}
    settings |= {"noise_std": NOISE, "sampling_rate": BATCH / RECORDS} | options
    return SDMDSGD(model, problems.cross_entropy, nodes, topology=topology, **settings)


def gate(make: Callable[[], nn.Module], nodes: list[tuple[Tensor, Tensor]], topology: Tensor) -> None:
    """Raise unless two rounds over small nodes, without noise, are those of the loop in float64."""
    small = [(x[:9], y[:9]) for x, y in nodes]
    model = make()
    mine = ours(model, small, topology, noise_std=0.0, sampling_rate=1.0)
    wide = [(x.double(), y) for x, y in small]
    loop = Loop(model.double(), wide, topology, rows_by_vmap(model))
    for number in range(2):
        masks = []
        for i in range(len(nodes)):
            kept = dpk.sparsify(torch.zeros(mine.width), KEEP, seed=mask_seed_of(0, number, i)).indices
            masks.append(torch.zeros(mine.width, dtype=torch.bool).index_fill(0, kept, True))
        loop.step(noise=0.0, rate=1.0, masks=masks)
        model.float()
        mine.step()
        model.double()
    start = torch.cat([p.detach().flatten() for p in make().double().parameters()])
    moved = (loop.vectors - start).norm()
    error = float((mine.node_vectors.double() - loop.vectors).norm() / moved)
    if error > 1e-3:
        raise AssertionError(f"what nodes have is off by {error:g} of how far they moved")


def compare(name: str, rounds: int = 9) -> harness.Result:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    images, labels = torch.rand(NODES * RECORDS, *shape), torch.randint(0, 10, (NODES * RECORDS,))
    nodes = list(zip(images.split(RECORDS), labels.split(RECORDS), strict=True))
    topology = topologies.erdos_renyi(NODES, 0.35, seed=1)

    def seeded() -> nn.Module:
        torch.manual_seed(1)
        return make()

    gate(seeded, nodes, topology)
    mine = ours(seeded(), nodes, topology)
    model = seeded()
    peers = {
        "vmap in each node": Loop(model, nodes, topology, rows_by_vmap(model)),
        "record by record": Loop(model, nodes, topology, rows_by_autograd(model)),
    }
    times: dict[str, list[float]] = {kind: [] for kind in ("ours", *peers)}
    for i in range(rounds + 1):
        for kind, loop in peers.items():
            if i < 4 or kind != "record by record":
                times[kind].append(timed(loop.step))
        times["ours"].append(timed(mine.step))
    ratios = {
        peer: harness.spread([a / b for a, b in zip(times["ours"][1:], times[peer][1:], strict=False)])
        for peer in peers
    }
    targets = dict.fromkeys(peers, 1 / FASTER) if name == "logistic regression" else {}
    case = f"SDM-DSGD round, {name}, {NODES} nodes"
    return harness.Result(case, statistics.median(times["ours"][1:]), ratios, targets)


def main() -> None:
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    results = []
    for name in MODELS:
        print(f"  {name}", file=sys.stderr, flush=True)
        results.append(compare(name))
    print("\n" + harness.table(results))
    harness.save(results, RESULTS_FILE)
    print(f"\nsaved to {RESULTS_FILE.parent.name}/{RESULTS_FILE.name}")
