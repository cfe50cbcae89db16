"""A private training step on a GPU against an ordinary one: `make gpu-bench`, for whoever has a GPU.

Kernels are waited for before and after each step; otherwise as `bench training`. No figure of this has ever been seen
by those who wrote it; bench/roofline.py says what they expect.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from dpkernels.bench import harness
from dpkernels.bench.methods import METHODS, Step
from dpkernels.bench.models import MODELS, Task

NO_GPU = (
    "bench: torch sees no GPU here, and this times kernels on one. `python -m bench roofline` has what is predicted, "
    "`python -m bench gpu_kernels` what compilers say."
)


def on(task: Task, device: torch.device) -> Task:
    """The task on a device."""
    return replace(task, model=task.model.to(device), inputs=task.inputs.to(device), targets=task.targets.to(device))


def timed(step: Step, device: torch.device) -> float:
    """Seconds of one step, kernels included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def compare(name: str, device: torch.device, rounds: int, **sizes: int) -> list[str]:
    """A line of the table: milliseconds of SGD, and how many times as long each method takes."""
    task = on(MODELS[name](**sizes), device)
    steps = {method: make(task) for method, make in METHODS.items() if method in ("SGD", "dpkernels", "vmap")}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(rounds + 2):
        for method, step in steps.items():
            seconds = timed(step, device)
            if i >= 2:
                times[method].append(seconds)
    plain = statistics.median(times["SGD"])
    others = [f"{statistics.median(times[m]) / plain:.2f}" for m in ("dpkernels", "vmap") if m in times]
    return [name, f"{1e3 * plain:.2f}", *others]


def main(words: Sequence[str] = ()) -> int:
    """Print the table; `--device cpu` runs it without a GPU, to test it."""
    device = torch.device("cpu" if "cpu" in words else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 3
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    if device.type == "cuda":
        print(f"GPU: {torch.cuda.get_device_name()}")
    from dpkernels.columns import aligned

    small = {"batch": 4} if device.type == "cpu" else {}
    lines = [compare(name, device, 2 if small else 20, **small) for name in MODELS]
    print(aligned([("model", "SGD ms", "dpkernels", "vmap"), *(tuple(line) for line in lines)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
