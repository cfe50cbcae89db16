"""The GPU kernels: loaded under the dispatcher's CUDA key where torch has a GPU; elsewhere nothing is imported.

Tiles of matrix products are in Triton (`dpkernels.triton`), for NVIDIA and AMD; lists of tensors, noise and masks are
in CUDA C++ (csrc/cuda), for NVIDIA, if they were built (`python -m dpkernels.build_cuda`). An op without a kernel runs
on the reference, on any device.

Everything here was checked without a GPU: kernels in Triton's interpreter and in an emulation of CUDA, and by compiling
them for A100, H100, B200 and MI300. Loading and launching them is untested by those who wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkernels import reference_layers

CUDA_MODULE = Path(__file__).parent / "_cuda.so"
_loaded: set[str] = set()


def load(library: torch.library.Library) -> dict[str, str]:
    """Register what there is; a word on each of the two parts."""
    if os.environ.get("DPKERNELS_NATIVE", "1") == "0":
        return dict.fromkeys(("triton", "cuda"), "switched off by DPKERNELS_NATIVE=0")
    if not torch.cuda.is_available():
        return dict.fromkeys(("triton", "cuda"), "not loaded: torch sees no GPU")
    return {"triton": _load_triton(library), "cuda": _load_cuda()}


def triton_ops() -> dict[str, Callable[..., Any]]:
    """The ops that are Triton kernels."""
    from dpkernels.triton import gram, low_rank, rows, sums

    found: list[Callable[..., Any]] = [gram.outer_gram, sums.outer_sum, low_rank.low_rank_]
    found += [rows.outer_rows, rows.outer_squares, rows.outer_rows_, rows.outer_clamp_sum_]
    found += [rows.conv_rows, rows.conv_rows_, rows.conv_clamp_sum_]
    return {function.__name__: _or_reference(function) for function in found}


def _or_reference(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for what it takes; the reference for float64, older GPUs, and samples of 2^31 elements and more."""
    from dpkernels.triton.configurations import is_small

    plain = getattr(reference_layers, function.__name__)
    first = 1 if function.__name__.endswith("_") else 0  # behind what is written to

    @functools.wraps(function)
    def chosen(*arguments: Any) -> Any:
        written, factors = arguments[:first], arguments[first:]
        if not is_small(*_tensors(factors)):
            factors = tuple(t.contiguous() if isinstance(t, Tensor) else t for t in factors)
        device = _tensors(factors)[0].device
        if any(t.dtype == torch.float64 for t in _tensors(factors)) or not _is_new_enough(device):
            return plain(*arguments)
        if not is_small(*_tensors((*written, *factors))):  # in float64: the error that is counted on is the kernel's
            wide = tuple(t.double() if isinstance(t, Tensor) else t for t in factors)
            return _narrowed(plain(*written, *wide)) if not written else _plain_into(plain, written, wide)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return function(*written, *factors)

    return chosen


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in arguments if isinstance(t, Tensor)]


def _narrowed(found: Any) -> Any:
    """Rows and sums as kernels give them, in float32; norms, [B], stay in float64."""
    if isinstance(found, tuple):
        return tuple(_narrowed(t) for t in found)
    return found.float() if found.dim() > 1 else found


def _plain_into(plain: Callable[..., Any], written: tuple[Any, ...], wide: tuple[Any, ...]) -> None:
    total = written[0].double()
    plain(total, *wide)
    written[0].copy_(total)


def has_tiles(device: torch.device) -> bool:
    """Whether the Triton kernels run there. They take half types as they are, and never round float32 to TF32."""
    return device.type == "cuda" and "triton" in _loaded and _is_new_enough(device)


def takes(*factors: Tensor) -> bool:
    """Whether these factors go to the Triton kernels as they are."""
    return has_tiles(factors[0].device) and len({t.dtype for t in factors}) == 1


def _load_triton(library: torch.library.Library) -> str:
    if importlib.util.find_spec("triton") is None:
        return "not loaded: triton is not installed"
    for name, function in triton_ops().items():
        library.impl(name, function, "CUDA")
    _loaded.add("triton")
    return "loaded; on NVIDIA used from compute capability 8.0 on"


@functools.cache
def _is_new_enough(device: torch.device) -> bool:
    """Asked when a tensor is there already: asking earlier would start CUDA in every process that imports this."""
    known = torch.cuda.is_available() and not torch.version.hip
    return not known or torch.cuda.get_device_capability(device) >= (8, 0)


def _load_cuda() -> str:
    if torch.version.hip:
        return "not loaded: they are for NVIDIA"
    if not CUDA_MODULE.exists():
        return "not built: python -m dpkernels.build_cuda"
    try:
        torch.ops.load_library(CUDA_MODULE)
    except OSError as error:
        return f"not loadable ({error.__cause__ or error})"
    _loaded.add("cuda")
    return "loaded"
