"""Local steps against as many ordinary ones, and against a copy of the weights for each sample under vmap.

`python -m bench local [models]`. A step of each sort is K local steps of every sample, clipped, summed and noised; or K
steps of plain SGD on the batch. Ratios are taken round by round after the clipped sums have been compared with those
of the copies, in float64. Draws results/local-*.svg: time against K.
"""

from __future__ import annotations

import copy
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.func import functional_call, grad, vmap

import dpkernels as dpk
from dpkernels import plot
from dpkernels.algorithms import DPLSGD
from dpkernels.bench import harness, memory
from dpkernels.bench.methods import CLIP, NOISE, RATE, Step, clipped_sum, plain
from dpkernels.bench.models import MODELS, Task
from dpkernels.bench.training import timed
from dpkernels.columns import aligned

CASES = {"MLP": (128, 10), "CNN": (256, 10), "ResNet-20": (64, 10), "GPT": (16, 4)}  # samples, and K of the targets
AT_MOST = {"MLP": 1.3, "CNN": 2.0, "ResNet-20": 2.5, "GPT": 1.6}  # of the time of K steps of SGD
FASTER = {"MLP": 100.0, "CNN": 1.0, "ResNet-20": 1.0, "GPT": 1.0}  # than vmap
MEMORY = {"MLP": 3.0}  # of SGD's
STEPS = (1, 2, 5, 10, 20)
THRESHOLD = CLIP * RATE
RESULTS = Path(__file__).parent.parent / "results"


def ours(task: Task, steps: int) -> Step:
    training = DPLSGD(
        copy.deepcopy(task.model),
        task.loss_fn,
        local_steps=steps,
        lr=RATE,
        max_norm=THRESHOLD,
        noise_multiplier=NOISE,
        expected_batch_size=len(task.inputs),
    )
    return lambda: training.step(task.inputs, task.targets)


def sgd(task: Task, steps: int) -> Step:
    step = plain(task)
    return lambda: [step() for _ in range(steps)]


def by_vmap(task: Task, steps: int, in_place: bool = False) -> Step:
    """The papers' way; with the copies written in place it allocates less."""
    model = copy.deepcopy(task.model)

    def step() -> None:
        total = vmap_sum(model, task, slice(None), steps, in_place)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += (total[name] + NOISE * THRESHOLD * torch.randn_like(p)) / len(task.inputs)

    return step


METHODS: dict[str, Callable[[Task, int], Step]] = {
    "SGD": sgd,
    "dpkernels": ours,
    "vmap": by_vmap,
    "vmap, in place": partial(by_vmap, in_place=True),
}


def vmap_sum(
    model: torch.nn.Module, task: Task, samples: slice, steps: int, in_place: bool = True
) -> dict[str, torch.Tensor]:
    """The clipped sum over some samples, without noise."""
    x, y = task.inputs[samples], task.targets[samples]
    shared = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return task.loss_fn(functional_call(model, values, (a.unsqueeze(0),)), b.unsqueeze(0)).sum()

    def walk(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        values = shared
        for _ in range(steps):
            gradients = grad(loss)(values, a, b)
            values = {name: p - RATE * gradients[name] for name, p in values.items()}
        return {name: p - shared[name] for name, p in values.items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that vmap runs one by one
        if in_place:
            own = {name: p.expand(len(x), *p.shape).clone() for name, p in shared.items()}
            for _ in range(steps):
                gradients = vmap(grad(loss))(own, x, y)
                for name, p in own.items():
                    p.sub_(gradients.pop(name), alpha=RATE)
            for name, p in own.items():
                p.sub_(shared[name])
        else:
            own = vmap(walk)(x, y)
    return clipped_sum(own, THRESHOLD)


def gate(task: Task, steps: int = 3) -> None:
    """Raise unless our clipped sums are as near to the truth, in float64, as those of the copies in float32.

    Eight samples at a time: where a ReLU's input is zero to rounding, a sample may go another way (see
    `bench.training.gate`), with several steps more so. Of the parts' errors the medians are compared.
    """
    wide = task.in_float64()
    mine, plain_ = [], []
    for first in range(0, min(len(task.inputs), 64), 8):
        part = slice(first, first + 8)
        rows = dpk.local_updates(task.model, task.loss_fn, task.inputs[part], task.targets[part], steps=steps, lr=RATE)
        truth = vmap_sum(wide.model, wide, part, steps)
        mine.append(harness.relative_error(rows.clip_sum(THRESHOLD).sum, truth))
        plain_.append(harness.relative_error(vmap_sum(task.model, task, part, steps), truth))
    if statistics.median(mine) > max(2e-5, 2 * statistics.median(plain_)) or max(mine) > 1e-2:
        raise AssertionError(f"the clipped sums are off by {sorted(mine)} of their norms, plain ones {sorted(plain_)}")


def compare(name: str) -> tuple[harness.Result, list[tuple[int, float, float]]]:
    """Ours against the others at the K of the targets; and (K, seconds of SGD, seconds of ours) for others."""
    batch, chosen = CASES[name]
    task = MODELS[name](batch)
    gate(task)
    curve = []
    ratios: dict[str, tuple[float, float, float]] = {}
    mine: list[float] = []
    for steps in sorted({*STEPS, chosen}):
        methods = [METHODS[method](task, steps) for method in ("SGD", "dpkernels")]
        for step in methods:
            step()
        rounds = [[timed(step) for step in methods] for _ in range(9 if steps == chosen else 3)]
        theirs, taken = zip(*rounds, strict=True)
        curve.append((steps, statistics.median(theirs), statistics.median(taken)))
        if steps == chosen:
            mine = list(taken)
            ratios["SGD"] = harness.spread([b / a for a, b in rounds])
    middle = statistics.median(mine)
    for method in ("vmap", "vmap, in place"):
        step = METHODS[method](task, chosen)
        times = [timed(step)]
        if times[0] < 20:
            times = [timed(step) for _ in range(3)]
        ratios[method] = harness.spread([middle / t for t in times] * 2)
    targets = {"SGD": AT_MOST[name], "vmap": 1 / FASTER[name]}
    return harness.Result(f"{name}, {batch} samples, K = {chosen}", middle, ratios, targets), curve


def main(names: Sequence[str] = ()) -> None:
    torch.manual_seed(0)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    results, words = [], []
    for name in names or CASES:
        print(f"  {name}", file=sys.stderr, flush=True)
        result, curve = compare(name)
        results.append(result)
        steps = CASES[name][1]
        used = {method: memory.peak("dpkernels.bench.local", name, method, str(steps)) for method in METHODS}
        rows = [("K", "SGD", "ours", "ours / SGD", "ours / K")]
        rows += [
            (str(k), f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms", f"{b / a:.2f}", f"{1e3 * b / k:.1f} ms")
            for k, a, b in curve
        ]
        words.append(f"{name}\n{aligned(rows)}\nat K = {steps}, {memory.told(used, MEMORY.get(name))}")
        lines = {"SGD": [(k, 1e3 * a) for k, a, _ in curve], "dpkernels": [(k, 1e3 * b) for k, _, b in curve]}
        plot.save(RESULTS / f"local-{name}.svg", f"K local steps, {name}", "K", "ms", lines)
    print("\n" + harness.table(results) + "\n\n" + "\n\n".join(words))
    harness.save(results, RESULTS / "local.json")
    print(f"\nsaved to {RESULTS.name}/local.json, drawn to {RESULTS.name}/local-*.svg")


if __name__ == "__main__":
    torch.manual_seed(0)
    name, method, steps = sys.argv[1:4]
    memory.measure(METHODS[method](MODELS[name](CASES[name][0]), int(steps)), times=1 if "vmap" in method else 3)
