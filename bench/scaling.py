"""The cost of a step against batch size, sequence length and number of parameters: a bad exponent shows as a bend.

`python -m bench scaling` prints a table and draws results/scaling-*.svg.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import plot
from bench.methods import ours, plain
from bench.models import Task, cnn, gpt, mlp
from bench.training import timed

RESULTS = Path(__file__).parent.parent / "results"
SWEEPS: dict[str, tuple[str, Sequence[int], Callable[[int], Task]]] = {
    "batch": ("samples (CNN)", (16, 32, 64, 128, 256, 512, 1024), cnn),
    "length": ("tokens of each of 4 sequences (GPT)", (32, 64, 128, 256, 512, 1024, 2048), lambda n: gpt(4, n)),
    "width": ("width of an MLP, 64 samples", (12, 32, 100, 300, 1000, 2048), lambda n: mlp(64, n)),
}


def sweep(sizes: Sequence[int], make: Callable[[int], Task], rounds: int = 7) -> list[tuple[int, float, float]]:
    """(size, or number of parameters for an MLP; seconds of SGD; seconds of ours)."""
    rows = []
    for size in sizes:
        task = make(size)
        steps = [plain(task), ours(task)]
        for step in steps:
            step()
        rounds_taken = [[timed(step) for step in steps] for _ in range(rounds)]
        theirs, mine = (statistics.median(column) for column in zip(*rounds_taken, strict=True))
        x = sum(p.numel() for p in task.model.parameters()) if make is SWEEPS["width"][2] else size
        rows.append((x, theirs, mine))
        print(f"  {x:>9}  SGD {1e3 * theirs:9.2f} ms  ours {1e3 * mine:9.2f} ms  {mine / theirs:5.2f}x", flush=True)
    return rows


def main() -> None:
    torch.manual_seed(0)
    for name, (what, sizes, make) in SWEEPS.items():
        label = "parameters of an MLP, 64 samples" if name == "width" else what
        print(f"\n{label}")
        rows = sweep(sizes, make)
        lines = {"SGD": [(x, 1e3 * t) for x, t, _ in rows], "dpkernels": [(x, 1e3 * t) for x, _, t in rows]}
        file = RESULTS / f"scaling-{name}.svg"
        plot.save(file, f"A training step against {label}", label, "ms", lines)
        print(f"drawn to {file.parent.name}/{file.name}", file=sys.stderr)
