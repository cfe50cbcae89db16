"""What the benchmarks of the summing ops share: the memory, its read, and the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import reference

# name: per-sample shapes
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "rows of 8k": [(25_600, 8_192)],
    "rows of 100k": [(2_560, 100_000)],
    "rows of 1M in 21 tensors": [(256, 47_619)] * 21,
    "300 tensors of 1000": [(64, 1_000)] * 300,
}
# ours / read, from the issue these kernels were built for; two inputs have 0.1 more
READS = {"rows of 8k": 1.35, "rows of 100k": 1.45, "rows of 1M in 21 tensors": 1.9}


class Memory:
    """Per-sample tensors as views of one buffer, so that one streaming read covers exactly them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], inputs: int) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.buffer = torch.randn(inputs * sum(sizes), generator=torch.Generator().manual_seed(0))
        views = [
            part.view(shape) for part, shape in zip(self.buffer.split(sizes * inputs), [*shapes] * inputs, strict=True)
        ]
        self.inputs = [views[i * len(shapes) : (i + 1) * len(shapes)] for i in range(inputs)]

    def read(self) -> Tensor:
        """One streaming read: torch's own vectorised, multi-threaded sum."""
        return self.buffer.sum()


def gate(name: str, inputs: list[list[Tensor]], arguments: tuple[object, ...], noise: tuple[Tensor, Tensor]) -> None:
    """The op against float64 truth on the very inputs that are timed; the truth goes over samples in chunks."""
    got, norms = getattr(torch.ops.dpkernels, name)(*inputs, *arguments, *noise)
    truth = [torch.zeros(t.shape[1:], dtype=torch.float64) for t in inputs[0]]
    width = sum(t.numel() for t in truth)
    chunk = max(1, 2**25 // width)
    for first in range(0, len(norms), chunk):
        part = [[t[first : first + chunk] for t in tensors] for tensors in inputs]
        sums, part_norms = getattr(reference, name)(*part, *arguments, None, None)
        for total, s in zip(truth, sums, strict=True):
            total += s
        torch.testing.assert_close(norms[first : first + chunk], part_norms, rtol=1e-6, atol=0)
    reference.add_gaussian_(truth, *noise)
    error = math.sqrt(sum((g.double() - t).square().sum().item() for g, t in zip(got, truth, strict=True)))
    size = math.sqrt(sum(t.square().sum().item() for t in truth))
    assert error <= 1e-6 * size, f"{name}: relative error {error / size:.1e}"


def plain_clip(vectors: list[Tensor], clip: float) -> tuple[list[Tensor], Tensor]:
    """Coefficients of a clipped sum in plain torch."""
    norms = torch.stack([v.flatten(1).norm(dim=1) for v in vectors]).norm(dim=0)
    return vectors, (clip / norms).clamp(max=1)


def plain_sum(vectors: list[Tensor], scale: Tensor, std: float) -> list[Tensor]:
    return [torch.einsum("b,b...->...", scale, v) + torch.normal(0.0, std, v.shape[1:]) for v in vectors]


def targets(shapes: str, inputs: int, plain: dict[str, float]) -> dict[str, float]:
    found = {"plain torch": 1 / plain[shapes]} if shapes in plain else {}
    return found | ({"read": READS[shapes] + 0.1 * (inputs - 1)} if shapes in READS else {})
