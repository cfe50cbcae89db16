"""What the ranks of one run do together: meet, and add up what is released."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import ops
from dpkernels.members import members_of
from dpkernels.ranks import Ranks


def meet(ranks: Ranks, algorithm: object, model: nn.Module, seed: int | None, **settings: Any) -> None:
    """All ranks must train the same, by the same code; they start from the first one's weights."""
    if ranks.size == 1:
        return
    members, salt = members_of(model), ranks.from_rank(secrets.token_hex(16))
    facts: dict[str, Any] = {
        "dpkernels": dpk.__version__,
        "torch": torch.__version__,
        "kernels": "reference" if ops.native is None else ops.native.active_isa(),
        "algorithm": type(algorithm).__name__,
        # a seed is as secret as the noise, and errors are printed: hashed with what only ranks know
        "seed": None if seed is None else hashlib.sha256(f"{salt} {seed}".encode()).hexdigest()[:16],
        **settings,
    }
    for kind, tensors in (("parameter", members.parameters), ("buffer", members.buffers)):
        for name, t in tensors.items():
            facts[f"{kind} {name}"] = f"{tuple(t.shape)} of {t.dtype}" + ("" if t.requires_grad else ", frozen")
    with ranks.doing("the start"):
        ranks.agree(facts)
        with torch.no_grad():
            ranks.spread_([p.detach() for p in members.parameters.values()])
        for name, saved in ranks.from_rank(dict(members.buffers)).items():
            members.buffers[name].copy_(saved)


def add_up_(ranks: Ranks, totals: Sequence[Tensor], noise: dpk.Gaussian, *, sensitivity: float) -> None:
    """The sum of all ranks' totals, with noise once, in place; every rank's ledger has the entry before.

    The first rank adds the noise, and no other has its key: so no two ranks can add the same noise to different sums,
    whatever became of their counters. On the way there, ranks hold parts of the sum without noise.
    """
    width = sum(t.numel() for t in totals)
    if ranks.rank > 0:
        noise.follow(sensitivity, width)
    elif ranks.size > 1:
        noise.check(sensitivity, width)  # before others are waited for, whom their ledgers refuse it too
    ranks.sum_(totals, to=0)
    if ranks.rank == 0:
        dpk.add_gaussian_(list(totals), noise, sensitivity=sensitivity)
    ranks.spread_(totals)
