"""Which coordinates nodes send: drawn from a public seed, so that everybody knows them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import dpkernels as dpk
from dpkernels import checks


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
