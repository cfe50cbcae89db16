"""Who is whose neighbour, as consensus matrices: symmetric, doubly stochastic, W = I - 2 / (3 lambda_max(L)) L.

L is the Laplacian of the graph. Its eigenvalues make those of W lie in [1/3, 1], with 1 only for the mean.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpkernels import checks


def ring(n: int) -> Tensor:
    """Each node has two neighbours (one, of two nodes)."""
    place = torch.arange(checks.whole("n", n, low=1))
    linked = torch.zeros(n, n, dtype=torch.bool)
    linked[place, (place + 1) % n] = True
    return of_graph(linked | linked.T)


def complete(n: int) -> Tensor:
    """All are neighbours of all."""
    checks.whole("n", n, low=1)
    return of_graph(torch.ones(n, n, dtype=torch.bool))


def erdos_renyi(n: int, p: float, seed: int = 0) -> Tensor:
    """Any two are neighbours with probability p; an error if that leaves some out of reach: take another seed."""
    checks.whole("n", n, low=1)
    checks.number("p", p, low=0, high=1)
    above = np.triu(np.random.default_rng(checks.whole("seed", seed, low=0)).random((n, n)) < p, 1)
    return of_graph(torch.from_numpy(above | above.T))


def of_graph(linked: Tensor) -> Tensor:
    """The consensus matrix, float64, of a graph given by a symmetric bool [n, n], whose diagonal is ignored."""
    if linked.dim() != 2 or linked.dtype != torch.bool or not torch.equal(linked, linked.T) or not len(linked):
        raise ValueError(f"linked: got {tuple(linked.shape)} of {linked.dtype}, must be a symmetric bool matrix")
    edges = linked.double().fill_diagonal_(0)
    laplacian = torch.diag(edges.sum(1)) - edges
    values = torch.linalg.eigvalsh(laplacian)
    if len(values) == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if values[1] < 1e-9 * values[-1] or values[-1] == 0:
        raise ValueError("linked: is not connected, must have a way from each node to each other: add edges")
    return torch.eye(len(edges), dtype=torch.float64) - 2 / (3 * float(values[-1])) * laplacian


def check_topology(topology: object, nodes: int) -> Tensor:
    """A consensus matrix for so many nodes, or an error."""
    if not isinstance(topology, Tensor) or topology.shape != (nodes, nodes) or not topology.is_floating_point():
        found = tuple(topology.shape) if isinstance(topology, Tensor) else type(topology).__name__
        raise ValueError(f"topology: got {found}, must be a matrix of {nodes} by {nodes} floating-point numbers")
    w = topology.detach().double()
    if not (torch.isfinite(w).all() and torch.equal(w, w.T) and (w.sum(1) - 1).abs().max() < 1e-6):
        raise ValueError("topology: must be symmetric with rows that add up to 1, as topologies.ring(n) gives it")
    others = torch.linalg.eigvalsh(w)
    if nodes > 1 and (others[0] <= -1 + 1e-9 or others[-2] >= 1 - 1e-9):
        raise ValueError("topology: has an eigenvalue -1, or 1 twice, must lead all nodes to their mean (connected?)")
    return w
