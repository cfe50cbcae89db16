"""The cost of a step against batch size, sequence length and number of parameters: a bad exponent shows as a bend.

`python -m bench scaling` prints a table and draws results/scaling-*.svg.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dpkernels import plot
from dpkernels.bench.methods import ours, plain
from dpkernels.bench.models import Task, cnn, gpt, mlp
from dpkernels.bench.training import timed

RESULTS = Path(__file__).parent.parent / "results"


def parameters(task: Task) -> int:
    return sum(p.numel() for p in task.model.parameters())


# by name: what is on the axis, how it is read off a task, and the tasks
SWEEPS: dict[str, tuple[str, Callable[[Task], int], list[Callable[[], Task]]]] = {
    "batch": (
        "samples (CNN)",
        lambda task: len(task.inputs),
        [partial(cnn, n) for n in (16, 32, 64, 128, 256, 512, 1024)],
    ),
    "length": (
        "tokens of each of 4 sequences (GPT)",
        lambda task: task.inputs.shape[1],
        [partial(gpt, 4, n) for n in (32, 64, 128, 256, 512, 1024, 2048)],
    ),
    "width": (
        "parameters of an MLP, 64 samples",
        parameters,
        [partial(mlp, 64, n) for n in (12, 32, 100, 300, 1000, 2048)],
    ),
}


def sweep(
    size_of: Callable[[Task], int], tasks: list[Callable[[], Task]], rounds: int = 7
) -> list[tuple[int, float, float]]:
    """(size, seconds of SGD, seconds of ours) for each task."""
    rows = []
    for make in tasks:
        task = make()
        steps = [plain(task), ours(task)]
        for step in steps:
            step()
        rounds_taken = [[timed(step) for step in steps] for _ in range(rounds)]
        theirs, mine = (statistics.median(column) for column in zip(*rounds_taken, strict=True))
        size = size_of(task)
        rows.append((size, theirs, mine))
        print(f"  {size:>9}  SGD {1e3 * theirs:9.2f} ms  ours {1e3 * mine:9.2f} ms  {mine / theirs:5.2f}x", flush=True)
    return rows


def main() -> None:
    torch.manual_seed(0)
    for name, (label, size_of, tasks) in SWEEPS.items():
        print(f"\n{label}")
        rows = sweep(size_of, tasks)
        lines = {"SGD": [(x, 1e3 * t) for x, t, _ in rows], "dpkernels": [(x, 1e3 * t) for x, _, t in rows]}
        file = RESULTS / f"scaling-{name}.svg"
        plot.save(file, f"A training step against {label}", label, "ms", lines)
        print(f"drawn to {file.parent.name}/{file.name}", file=sys.stderr)
