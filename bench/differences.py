"""Rounds of DIFF2 and PriSMA, whose rows are gradients at two points, against two ordinary forward-backwards.

`python -m bench differences [models]`. Ratios are taken round by round, all in turn, after what is released has been
compared, without noise, with per-sample gradients by vmap in float64.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpkernels.algorithms import DIFF2, PriSMA
from dpkernels.bench import harness
from dpkernels.bench.methods import Step, clip_weights, clipped_sum, vmap_rows
from dpkernels.bench.models import MODELS, Task
from dpkernels.bench.training import timed

AT_MOST, FASTER = 1.15, 2.0  # of two forward-backwards; than vmap
LR, BOUND, GAMMA, DIFFERENCE = 1e-3, 1.0, 0.1, 0.05
RESULTS_FILE = Path(__file__).parent.parent / "results" / "differences.json"


def two_passes(task: Task) -> Step:
    """The limit: ordinary gradients at two points."""
    models = [copy.deepcopy(task.model) for _ in range(2)]

    def step() -> None:
        for model in models:
            model.zero_grad()
            task.loss_fn(model(task.inputs), task.targets).mean().backward()

    return step


def diff2(task: Task, noise: float = 1e-3) -> DIFF2:
    settings = {"gradient_norm": BOUND, "difference_norm": BOUND, "gradient_noise": noise, "difference_noise": noise}
    clients = [(task.inputs, task.targets)]
    return DIFF2(copy.deepcopy(task.model), task.loss_fn, clients, lr=LR, restart_every=1 << 30, **settings)


def prisma(task: Task, noise: float = 1e-3) -> PriSMA:
    return PriSMA(
        copy.deepcopy(task.model),
        task.loss_fn,
        [(task.inputs, task.targets)],
        lr=LR,
        momentum=GAMMA,
        gradient_norm=BOUND,
        server_norm=1.0,
        difference_norm=DIFFERENCE,
        batch_size=len(task.inputs),
        noise=noise,
        initial_noise=noise,
    )


Rows = dict[str, Tensor]


def vmap_difference(now: torch.nn.Module, before: torch.nn.Module, task: Task, bound: float) -> Rows:
    """The clipped sum of differences, in plain torch."""
    a, b = vmap_rows(now, task), vmap_rows(before, task)
    return clipped_sum({name: a[name] - b[name] for name in a}, bound)


def vmap_momentum(now: torch.nn.Module, before: torch.nn.Module, task: Task) -> Rows:
    def clip(rows: Rows) -> Rows:
        scale = clip_weights(rows, BOUND)
        return {name: torch.einsum("b,b...->b...", scale, row) for name, row in rows.items()}

    a, b = clip(vmap_rows(now, task)), clip(vmap_rows(before, task))
    change = clipped_sum({name: a[name] - b[name] for name in a}, DIFFERENCE)
    return {name: GAMMA * a[name].sum(0) + (1 - GAMMA) * change[name] for name in a}


def gate(task: Task) -> None:
    """Raise unless what a second round releases, without noise, is that of the truth."""
    wide = task.in_float64()
    size = len(task.inputs)
    one, other = diff2(task, noise=0.0), prisma(task, noise=0.0)
    one.step()
    other.step()
    for kind, algorithm in (("DIFF2", one), ("PriSMA", other)):
        points = [copy.deepcopy(m).double() for m in (algorithm.model, algorithm._earlier)]
        if isinstance(algorithm, DIFF2):
            before = {name: t.clone() for name, t in algorithm._estimate.items()}
            truth = vmap_difference(*points, wide, BOUND * algorithm._distance())
            algorithm.step()
            found = {name: algorithm._estimate[name] - t for name, t in before.items()}
        else:
            before = {name: t.clone() for name, t in algorithm._estimates[0].items()}
            truth = vmap_momentum(*points, wide)
            algorithm.step()
            found = {name: algorithm._estimates[0][name] - (1 - GAMMA) * t for name, t in before.items()}
        error = harness.relative_error(
            {n: t.double() for n, t in found.items()}, {n: t / size for n, t in truth.items()}
        )
        if error > 1e-2:  # differences of single-precision gradients a step apart
            raise AssertionError(f"{kind}: what is released is off by {error:g} of its norm")


def compare(name: str, rounds: int = 15) -> list[harness.Result]:
    task = MODELS[name]()
    gate(task)
    mine: dict[str, Callable[[], object]] = {"DIFF2": diff2(task).step, "PriSMA": prisma(task).step}
    now, before = copy.deepcopy(task.model), copy.deepcopy(task.model)
    vmaps: dict[str, Step] = {  # the same sums of rows
        "DIFF2": lambda: vmap_difference(now, before, task, BOUND),
        "PriSMA": lambda: vmap_momentum(now, before, task),
    }
    two = two_passes(task)
    times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in mine}
    for step in mine.values():
        step()  # the first round, of gradients alone
    for i in range(rounds + 2):
        for kind, step in mine.items():
            times[kind].append((timed(two), timed(vmaps[kind]) if i < 5 else math.nan, timed(step)))
    results = []
    for kind in mine:
        taken = times[kind][2:]
        ratios = {
            "two passes": harness.spread([own / passes for passes, _, own in taken]),
            "vmap": harness.spread([own / by_vmap for _, by_vmap, own in taken if not math.isnan(by_vmap)]),
        }
        targets = {"two passes": AT_MOST, "vmap": 1 / FASTER}
        case = f"{kind} round, {name}, {len(task.inputs)} samples"
        results.append(harness.Result(case, statistics.median(own for *_, own in taken), ratios, targets))
    return results


def main(names: Sequence[str] = ()) -> None:
    torch.manual_seed(0)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    results = []
    for name in names or ("MLP", "CNN"):
        print(f"  {name}", file=sys.stderr, flush=True)
        results += compare(name)
    print("\n" + harness.table(results))
    harness.save(results, RESULTS_FILE)
    print(f"\nsaved to {RESULTS_FILE.parent.name}/{RESULTS_FILE.name}")
