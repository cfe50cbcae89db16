"""What the GPU kernels should cost, on paper: bytes and operations, and the time that the slower of both takes.

`python -m bench roofline`. PREDICTED, NEVER MEASURED BY US: we have no GPU. A kernel's time is that of its arithmetic
at a part of the peak or of its bytes at a part of the bandwidth, whichever is longer, and a launch; kernels run one
after the other. The Python that launches them is not in it: with small models that is what takes the time on a GPU, as
long as a step is not captured as a graph.

The parts of the peak are guesses: 80% for the library's products of matrices, 60% for our own in Triton, 85% of the
bandwidth. Ways are those that `dpkernels.planner` chooses.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import planner
from dpkernels.bench.models import MODELS, Task
from dpkernels.columns import aligned

LAUNCH = 3e-6  # seconds
LIBRARY, OWN, BANDWIDTH = 0.8, 0.6, 0.85  # of the peaks
NOISE_OPERATIONS = 55  # of an element: a quarter of a Philox block, half a Box-Muller pair, the addition


@dataclass(frozen=True)
class GPU:
    """Peaks, in operations and bytes a second, as their makers publish them."""

    name: str
    float32: float  # without tensor cores: full precision
    float64: float  # with them
    bfloat16: float
    integer: float
    bandwidth: float


GPUS = (
    GPU("A100", 19.5e12, 19.5e12, 312e12, 9.7e12, 1.555e12),
    GPU("H100", 67e12, 67e12, 989e12, 33e12, 3.35e12),
)


@dataclass(frozen=True)
class Work:
    """One kernel: operations in a type, bytes to and from memory, and the part of the peak it should reach."""

    name: str
    operations: float
    type: str
    bytes: float
    part: float = LIBRARY

    def seconds(self, gpu: GPU) -> float:
        """Predicted."""
        return max(self.arithmetic(gpu), self.traffic(gpu)) + LAUNCH

    def arithmetic(self, gpu: GPU) -> float:
        """Of the operations alone."""
        return self.operations / (self.part * float(getattr(gpu, self.type)))

    def traffic(self, gpu: GPU) -> float:
        """Of the bytes alone."""
        return self.bytes / (BANDWIDTH * gpu.bandwidth)


def product(name: str, batch: int, length: int, width: int, height: int, part: float = LIBRARY) -> Work:
    """A product of matrices in float32, one of the three that a linear layer has."""
    lines = batch * length
    return Work(name, 2.0 * lines * width * height, "float32", 4.0 * (lines * (width + height) + width * height), part)


def noise(parameters: int) -> Work:
    """Noise in place, for all parameters at once."""
    return Work("gaussian", NOISE_OPERATIONS * parameters, "integer", 8.0 * parameters, 1.0)


def private_weight(choice: planner.Choice, is_conv: bool) -> list[Work]:
    """What a layer has in place of its ordinary weight gradient."""
    b, t, p, d = choice.batch, choice.length, choice.width, choice.height
    factors, rows = 4.0 * b * t * (p + d), 4.0 * b * p * d
    if is_conv:
        factors = 4.0 * b * t * (p / 9 + d)  # patches are read in place: a pixel from memory once
    form = Work("rows formed", 2.0 * b * t * p * d, "float32", factors + rows, OWN)
    read = Work("rows summed", 2.0 * b * p * d, "float64", rows + 4.0 * p * d)
    if choice.way is planner.Way.KEEP:
        return [form, read]
    if choice.way is planner.Way.TILE:
        if is_conv:
            return [form, form, read]
        drop = Work("rows dropped", 2.0 * b * t * p * d, "float32", factors, OWN)
        return [drop, product("outer sum", b, t, p, d, OWN)]
    square = Work("row squares", 2.0 * b * (p + d), "float64", factors)
    gram = Work("outer gram", 1.0 * b * t * t * (p + d), "float64", factors, OWN)
    return [square if t == 1 else gram, product("outer sum", b, t, p, d, OWN)]


def other_bytes(task: Task) -> tuple[float, int]:
    """Bytes that layers other than products of matrices move, forward and backward; and how many there are."""
    moved, count = 0.0, 0

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal moved, count
        if not isinstance(module, nn.Linear | nn.Conv2d) and not list(module.children()):
            moved += 4.0 * (5 * output.numel())
            count += 2

    handles = [m.register_forward_hook(hook) for m in task.model.modules()]
    with torch.no_grad():
        task.model(task.inputs)
    for handle in handles:
        handle.remove()
    return moved, count


def steps(task: Task) -> tuple[list[Work], list[Work]]:
    """The kernels of an ordinary step and of a private one."""
    with contextlib.redirect_stdout(io.StringIO()):
        choices = dpk.explain(task.model, task.inputs)
    parameters = sum(p.numel() for p in task.model.parameters())
    moved, count = other_bytes(task)
    shared = [Work("other layers", 0.0, "float32", moved / max(count, 1))] * count
    ordinary, private = [], []
    for i, c in enumerate(reversed(choices)):
        passes = ("forward", "input gradient") if i else ("forward",)
        shared += [product(name, c.batch, c.length, c.width, c.height) for name in passes]
        ordinary.append(product("weight gradient", c.batch, c.length, c.width, c.height))
        private += private_weight(c, "conv" in c.op)
    update = Work("update", 2.0 * parameters, "float32", 12.0 * parameters)
    small = [Work("coefficients", 0.0, "float32", 0.0)] * 12  # norms to coefficients: small tensors, launches only
    return [*shared, *ordinary, update], [*shared, *private, *small, noise(parameters), update]


def total(work: Sequence[Work], gpu: GPU) -> float:
    """Seconds of kernels that run one after the other."""
    return sum(w.seconds(gpu) for w in work)


def models_table() -> str:
    """The predicted price of privacy, for each model of the bench."""
    lines = [("model", *(f"{g.name} {word}" for g in GPUS for word in ("SGD", "DP-SGD", "ratio")))]
    for name, make in MODELS.items():
        ordinary, private = steps(make())
        cells = []
        for gpu in GPUS:
            plain, noisy = total(ordinary, gpu), total(private, gpu)
            cells += [f"{plain * 1e6:.0f} us", f"{noisy * 1e6:.0f} us", f"{noisy / plain:.2f}"]
        lines.append((name, *cells))
    return aligned(lines)


def ops() -> list[Work]:
    """Every op of the pipeline at one size: B = 256; rows of 1M; a layer of 1024 x 1024; T = 1 and T = 128."""
    b, d, side = 256, 1 << 20, 1024
    rows = 4.0 * b * d
    conv = 2.0 * 64 * 1024 * 16 * 144
    return [
        Work("dense gram, 256 x 1M", 2.0 * b * d, "float64", rows),
        Work("weighted sum, 256 x 1M", 2.0 * b * d, "float64", rows + 4.0 * d),
        Work("outer gram, T = 128", b * 128.0 * 128 * 2 * side, "float64", 4.0 * b * 128 * 2 * side, OWN),
        # widened copies of four factors, and two matrices T x T, are written and read
        Work("outer inner of two, T = 128 (library)", b * 128.0 * 128 * 4 * side, "float64",
             b * 128.0 * (4 * side * (4 + 2 * 8) + 2 * 2 * 8 * 128)),
        Work("outer rows, T = 128", 2.0 * b * 128 * side**2, "float32", 4.0 * b * (256 * side + side**2), OWN),
        product("outer sum, T = 1", b, 1, side, side, OWN),
        product("outer sum, T = 128", b, 128, side, side, OWN),
        Work("conv rows, 16 x 16 x 3 x 3, 32 x 32, B = 64", conv, "float32", 4.0 * 64 * (2 * 16 * 1024 + 2304), OWN),
        Work("outer clamp sum, T = 1", 4.0 * b * side**2, "float64", 4.0 * b * 2 * side + 16.0 * side**2, OWN),
        Work("rows inner, T = 128, d = 256", 2.0 * b * 128 * 256, "float64", 4.0 * b * 128 * 256),
        Work("rows weighted sum (library), V = 50k", 2.0 * b * 128 * 256, "float32", 4.0 * (3 * b * 128 + 50000) * 256),
        noise(1 << 20),
        Work("mask, noise, sparsify at 0.2, 1M", (50 + 0.2 * NOISE_OPERATIONS) * d, "integer", (0.4 * 16 + 8) * d, 1.0),
        Work("low rank, S = 10", 4.0 * b * 10 * side, "float32", 4.0 * b * (20 * side + 2 * side), OWN),
    ]  # fmt: skip


def ops_table() -> str:
    """Bytes, operations, predicted time, and what limits it."""
    lines = [("op", "MB", "MFLOP", *(word for g in GPUS for word in (f"{g.name} us", "limit")))]
    for work in ops():
        cells = []
        for gpu in GPUS:
            by_bytes = work.traffic(gpu) >= work.arithmetic(gpu)
            cells += [f"{work.seconds(gpu) * 1e6:.0f}", "bandwidth" if by_bytes else work.type]
        lines.append((work.name, f"{work.bytes / 1e6:.1f}", f"{work.operations / 1e6:.0f}", *cells))
    return aligned(lines)


def fused_noise(side: int = 1024, batch: int = 256) -> str:
    """Whether noise in the epilogue of a layer's sum would pay."""
    gpu = GPUS[0]
    apart = noise(side * side)
    sum_alone = product("outer sum", batch, 1, side, side, OWN)
    drawn_again = 4 * apart.arithmetic(gpu)  # tiles lie across groups of 64 elements: one word of each block is used
    fused = sum_alone.seconds(gpu) + drawn_again
    both = sum_alone.seconds(gpu) + apart.seconds(gpu) - LAUNCH  # one launch for all parameters together
    return f"{side} x {side} on {gpu.name}: noise apart {both * 1e6:.0f} us, in the epilogue {fused * 1e6:.0f} us"


def main() -> None:
    """Print the tables."""
    print("PREDICTED, never measured by us: we have no GPU.\n")
    print("A training step's kernels, float32:\n" + models_table() + "\n")
    print("Ops:\n" + ops_table() + "\n")
    print("Noise of a layer: " + fused_noise())
    share = [f"{name} {noise(n).seconds(GPUS[0]) * 1e6:.0f} us" for name, n in _sizes().items()]
    print("Noise of whole models on A100: " + ", ".join(share))


def _sizes() -> dict[str, int]:
    return {name: math.ceil(sum(p.numel() for p in make(1).model.parameters())) for name, make in MODELS.items()}


if __name__ == "__main__":
    main()
