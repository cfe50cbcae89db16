"""Rows that are formed and kept: each sample's own gradient of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpkernels import ops, reference
from dpkernels.factors import Dense, at_least_float


def outer_rows(a: Tensor, g: Tensor) -> Dense:
    """sum_t g_t a_t^T as stored rows."""
    a, g = at_least_float(a), at_least_float(g)
    form = torch.ops.dpkernels.outer_rows if a.dtype == torch.float32 else reference.outer_rows
    return Dense(*form(a, g))


def is_native(x: Tensor) -> bool:
    """Whether rows of such factors are formed by native code: with the same bits each time, added as it says."""
    return x.dtype != torch.float64 and x.device.type == "cpu" and ops.native is not None


def conv_rows(x: Tensor, g: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    """The weight gradient of each image on its own, and its norm^2; arguments as of `reference.conv_rows`."""
    x, g = at_least_float(x), at_least_float(g)
    form = torch.ops.dpkernels.conv_rows if x.dtype == torch.float32 else reference.conv_rows
    return form(x, g, *geometry)
