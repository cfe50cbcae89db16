"""Products of float32 matrices by the faster of the two libraries that torch has.

torch multiplies by MKL, which on AMD's CPUs does without AVX-512; oneDNN, which torch has for convolutions, uses it:
there it takes less than half the time (480 against 210 GFLOPS on two cores of a Zen 5). Which of them goes by the CPU
and by shapes alone, so that two runs have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels import gpu, ops

SMALL = 1 << 22  # multiplications that MKL is done with before oneDNN has started


@functools.cache
def _onednn() -> Any:
    """oneDNN's linear layer, where it is the faster one; it is for use without autograd."""
    if ops.native is None or not ops.native.is_amd() or "avx512" not in ops.native.available_isas():
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def full_precision(device: torch.device) -> bool:
    """Whether torch multiplies float32 matrices as they are, and does not round them to fewer digits first."""
    if gpu.has_tiles(device):
        return True
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return getattr(library.matmul, "fp32_precision", "ieee") in ("none", "ieee")


_every_size: list[None] = []


@contextlib.contextmanager
def of_every_size() -> Iterator[None]:
    """Small products go the same way as large ones: for the check of a model, which runs it on few samples."""
    _every_size.append(None)
    try:
        yield
    finally:
        _every_size.pop()


def is_faster(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` here serves x weight^T + bias, and takes less time than torch's."""
    if _onednn() is None or not (x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu):
        return False
    if weight.dim() != 2 or type(x) is not Tensor or x.shape[-1] != weight.shape[1]:
        return False
    if x.numel() * weight.shape[0] < (1 if _every_size else max(SMALL, 1)):  # oneDNN refuses tensors without elements
        return False
    if not (weight.is_contiguous() or weight.t().is_contiguous()):  # it may lie on itself, which oneDNN refuses
        return False
    wanted = (torch.float32, weight.shape[:1], True)  # oneDNN does not look at a bias's strides
    if bias is not None and (bias.dtype, bias.shape, bias.is_contiguous()) != wanted:
        return False
    return bool(torch.backends.mkldnn.enabled) and full_precision(x.device) and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, without autograd."""
    if not is_faster(x, weight, bias):
        return F.linear(x, weight, bias)
    return _onednn()(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
