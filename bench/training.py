"""A private training step against an ordinary one and against other libraries' private ones: time and memory.

`python -m bench training [models]`. Ratios are taken round by round, all methods in turn, after the clipped sums have
been compared with those of per-sample gradients by vmap. Peak memory is that of a fresh process for each, less what it
had before the first step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import dpkernels as dpk
from dpkernels.bench import harness, memory
from dpkernels.bench.methods import CLIP, METHODS, NOISE, RATE, Step, vmap_sum
from dpkernels.bench.models import MODELS, Task, mlp

AT_MOST = {"MLP": 1.15, "CNN": 1.15, "ResNet-20": 1.15, "GPT": 1.10}  # of SGD's time
FASTER = {"MLP": 1.25, "CNN": 1.25, "ResNet-20": 1.1, "GPT": 1.25}  # than any peer
MEMORY = 1.25  # of SGD's
RESULTS_FILE = Path(__file__).parent.parent / "results" / "training.json"
PATIENCE = 20.0  # seconds for one method's rounds


def gate(task: Task) -> None:
    """Raise unless our clipped sums are those of the truth, in float64 by vmap.

    Four samples at a time: where a ReLU's input is zero to rounding, one sample's gradient may be off by a hundredth in
    float32 (of ResNet-20's, one in some thirty), so of the parts' errors the median must be that of rounding, and the
    worst small.
    """
    wide = task.in_float64()
    errors = []
    for first in range(0, len(task.inputs), 4):
        part = slice(first, first + 4)
        rows = dpk.per_sample_gradients(task.model, task.loss_fn, task.inputs[part], task.targets[part])
        found, truth = rows.clip_sum(CLIP).sum, vmap_sum(wide.model, wide, part)
        errors.append(harness.relative_error(found, truth))
    if statistics.median(errors) > 1e-5 or max(errors) > 1e-2:
        raise AssertionError(f"the clipped sums are off by {sorted(errors)} of their norms")


def timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(name: str, rounds: int = 15) -> tuple[harness.Result, float]:
    """Ours against all others on one model; also the median seconds of SGD."""
    task = MODELS[name]()
    gate(task)
    steps = {method: make(task) for method, make in METHODS.items()}
    slow = {method: max(timed(step), timed(step)) for method, step in steps.items()}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(rounds):
        for method, step in steps.items():
            if i < 3 or (i + 1) * slow[method] < PATIENCE:
                times[method].append(timed(step))
    mine = times["dpkernels"]
    ratios = {}
    for method, theirs in times.items():
        if method != "dpkernels":
            ratios[method] = harness.spread([a / b for a, b in zip(mine, theirs, strict=False)])
    targets = {method: AT_MOST[name] if method == "SGD" else 1 / FASTER[name] for method in ratios}
    case = f"{name}, {len(task.inputs)} samples"
    return harness.Result(case, statistics.median(mine), ratios, targets), statistics.median(times["SGD"])


def stages(name: str, rounds: int = 9) -> dict[str, float]:
    """Where a private step spends its time, in milliseconds."""
    task = MODELS[name]()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=RATE)
    noise = dpk.Gaussian(NOISE * CLIP)
    for p in task.model.parameters():
        p.grad = torch.zeros_like(p)
    spent: dict[str, list[float]] = {}
    own = {n: p.grad for n, p in task.model.named_parameters() if p.grad is not None}
    for _ in range(rounds + 2):
        start = time.perf_counter()
        rows = dpk.per_sample_gradients(task.model, task.loss_fn, task.inputs, task.targets)
        recorded = time.perf_counter()
        rows.norms()
        normed = time.perf_counter()
        rows.clip_sum(CLIP, noise, scale=1 / len(task.inputs), out=own)
        summed = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        for stage, seconds in {
            "forward, backward, rows": recorded - start,
            "norms": normed - recorded,
            "sum and noise": summed - normed - (normed - recorded),
            "optimizer": end - summed,
        }.items():
            spent.setdefault(stage, []).append(seconds)
    return {stage: 1e3 * statistics.median(seconds[2:]) for stage, seconds in spent.items()}


def main(names: Sequence[str] = ()) -> None:
    torch.manual_seed(0)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    results, tables = [], []
    for name in names or MODELS:
        print(f"  {name}", file=sys.stderr, flush=True)
        result, seconds = compare(name)
        results.append(result)
        compared = ("SGD", "dpkernels")
        used = {
            method: memory.peak("dpkernels.bench.training", name, method, processes=3 if method in compared else 1)
            for method in METHODS
        }
        lines = [
            f"{name}: SGD {1e3 * seconds:.1f} ms; a private step takes "
            f"{result.ratios['SGD'][1]:.2f} of that. Stages: "
            + ", ".join(f"{stage} {ms:.1f} ms" for stage, ms in stages(name).items()),
            f"  {memory.told(used, MEMORY)}",
        ]
        tables.append("\n".join(lines))
    print("\n" + harness.table(results) + "\n\n" + "\n".join(tables))
    harness.save(results, RESULTS_FILE)
    print(f"\nsaved to {RESULTS_FILE.parent.name}/{RESULTS_FILE.name}")


if __name__ == "__main__":
    torch.manual_seed(0)
    step = METHODS[sys.argv[2]]
    memory.measure(step(MODELS[sys.argv[1]]()), small=step(mlp(64, 128)))
