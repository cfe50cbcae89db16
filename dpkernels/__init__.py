"""Fused kernels for differentially private training in PyTorch.

Per-sample tensors in hand, one call clips, sums and noises them::

    import dpkernels as dpk

    noise = dpk.Gaussian(std=1.1 * 1.0)
    private = dpk.clip_sum(per_sample_gradients, 1.0, noise=noise).sum

The names below are the public API.
"""

from dpkernels import accounting, audit, checkpoint, clipping, ranks, sampling
from dpkernels.dense import (
    ClippedSum,
    SparseMessage,
    add_gaussian_,
    clamp_sum,
    clip_difference_sum,
    clip_momentum_sum,
    clip_sum,
    sparsify,
)
from dpkernels.explain import explain
from dpkernels.gradients import check_independence, per_sample_gradients
from dpkernels.local import local_updates
from dpkernels.noise import Gaussian
from dpkernels.per_sample import PerSample
from dpkernels.planner import empty_pool

__version__ = "0.1.0"

__all__ = [
    "ClippedSum",
    "Gaussian",
    "PerSample",
    "SparseMessage",
    "accounting",
    "add_gaussian_",
    "audit",
    "check_independence",
    "checkpoint",
    "clamp_sum",
    "clip_difference_sum",
    "clip_momentum_sum",
    "clip_sum",
    "clipping",
    "empty_pool",
    "explain",
    "local_updates",
    "per_sample_gradients",
    "ranks",
    "sampling",
    "sparsify",
]
