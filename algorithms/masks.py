"""Which coordinates nodes send: drawn from a public seed, so that everybody knows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpkernels import checks
from dpkernels.dense import masks


def mask_seed_of(mask_seed: int, number: int, node: int) -> int:
    """The seed of a node's mask in a round: public, as all masks are."""
    return (mask_seed + (number << 20) + node) % 2**63  # seeds that differ have nothing in common


def counts_of(nodes: Sequence[int], number: int, mask_seed: int, width: int, p: float) -> list[int]:
    """How many coordinates nodes send in a round."""
    return masks([mask_seed_of(mask_seed, number, i) for i in nodes], width, p, with_indices=False)[1]


def kept_by(nodes: Sequence[int], number: int, mask_seed: int, width: int, p: float) -> tuple[Tensor, list[int]]:
    """The coordinates that nodes send in a round: indices counted over vectors [N, width], and how many of each."""
    return masks([mask_seed_of(mask_seed, number, i) for i in nodes], width, p)


def most_kept(width: int, keep_probability: float, mask_seed: int, nodes: int, rounds: int) -> list[int]:
    """How many coordinates rounds keep, largest first, for a node no better than any: the most at each place."""
    checks.whole("rounds", rounds, low=1)
    of_round = [counts_of(range(nodes), number, mask_seed, width, keep_probability) for number in range(rounds)]
    by_node = [sorted(numbers, reverse=True) for numbers in zip(*of_round, strict=True)]
    return [max(numbers) for numbers in zip(*by_node, strict=True)]
