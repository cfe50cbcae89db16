"""From one process to thousands: two ranks measured here, and what a network model says of more.

`python -m bench scale` starts two ranks of one thread each. In one run, interleaved, it times

    alone      one rank trains on the whole batch while the other waits
    apart      both work at the same time on their halves, without a word: what one rank's work takes
    together   both train together
    small      an all-reduce of one number, and one of a million: the latency and bandwidth of this machine

and predicts the third from the second and the fourth, which is the check of the model. The same model then gives time
per step and bytes per rank for 1 to 4096 ranks that have each as many records as here, on a network of its own.

    seconds(n) = work + rounds(n) * latency + bytes(n) / bandwidth

algorithm         what travels                                         rounds(n)    bytes(n), of d numbers
DP-SGD, DP-LSGD   sums to the first rank, the noisy one back, float64  2 log2 n     2 (n-1)/n 8 d
DIFF2             sums to the first rank, the noisy one back, float64  2 log2 n     2 (n-1)/n 8 d
PriSMA            all-reduce of the estimates, float32                 2 log2 n     2 (n-1)/n 4 d
SDM-DSGD          values kept to each of the neighbours, float32       neighbours   neighbours p 4 d

Predicted, never measured: everything beyond two ranks.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpkernels as dpk
from dpkernels import launch, plot
from dpkernels.algorithms import DIFF2, DPLSGD, DPSGD, SDMDSGD, PriSMA, topologies
from dpkernels.bench.models import Task, cnn, resnet20
from dpkernels.columns import aligned
from dpkernels.members import members_of
from dpkernels.ranks import ALONE, Ranks

RESULTS = Path(__file__).parent.parent / "results"
ROUNDS, TARGET = 9, 1.6
LATENCY, BANDWIDTH = 50e-6, 1.25e9  # of the network that is predicted for: 10 Gbit/s
RANKS = [4**i for i in range(7)]
KEEP, NEIGHBOURS = 0.2, 4
Step = Callable[[], None]


def batches(make: Any, task: Task, ranks: Ranks, part: slice) -> Step:
    x, y = task.inputs[part], task.targets[part]
    options = {"max_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": len(task.inputs), "seed": 1}
    algorithm = make(task.model, task.loss_fn, ranks=ranks, **options)
    return lambda: algorithm.step(x, y)


def sgd(model: Any, loss_fn: Any, **options: Any) -> DPSGD:
    return DPSGD(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), **options)


def clients(make: Any, task: Task, ranks: Ranks, part: slice) -> Step:
    """Each half of the records is a client's, on every rank that has any of them."""
    half = len(task.inputs) // 2
    all_ = [(task.inputs[:half], task.targets[:half]), (task.inputs[half:], task.targets[half:])]
    parties = all_ if part == slice(None) or ranks.size > 1 else all_[:1]
    algorithm = make(task.model, task.loss_fn, parties, ranks=ranks, seed=1)
    return algorithm.step  # type: ignore[no-any-return]


def diff2(*a: Any, **k: Any) -> DIFF2:
    norms = {"gradient_norm": 1.0, "difference_norm": 1.0, "gradient_noise": 0.1, "difference_noise": 0.1}
    return DIFF2(*a, lr=0.01, restart_every=1000, **norms, **k)


def prisma(*a: Any, **k: Any) -> PriSMA:
    norms = {"gradient_norm": 1.0, "server_norm": 1.0, "difference_norm": 0.5, "noise": 0.1, "initial_noise": 0.1}
    return PriSMA(*a, lr=0.01, momentum=0.5, batch_size=len(a[2][0][0]), sampling="fixed-size", **norms, **k)


def sdm(*a: Any, **k: Any) -> SDMDSGD:
    settings = {"lr": 0.01, "mixing": 0.2, "keep_probability": KEEP, "clamp": 0.1, "noise_std": 1.0}
    n = len(a[2])
    return SDMDSGD(*a, topology=topologies.complete(n), batch_size=64.0, sampling_rate=1.0, **settings, **k)


# by name: how a step is made, of which task, and whether it is all-reduced (with bytes a number) or goes to neighbours
CASES: dict[str, tuple[Callable[..., Step], Callable[[], Task], int]] = {
    "DP-SGD, ResNet-20": (partial(batches, sgd), partial(resnet20, 128), 8),
    "DP-SGD, CNN": (partial(batches, sgd), partial(cnn, 128), 8),
    "DP-LSGD (4 steps), CNN": (partial(batches, partial(DPLSGD, local_steps=4, lr=0.01)), partial(cnn, 128), 8),
    "DIFF2, CNN": (partial(clients, diff2), partial(cnn, 128), 8),
    "PriSMA, CNN": (partial(clients, prisma), partial(cnn, 128), 4),
    "SDM-DSGD, CNN": (partial(clients, sdm), partial(cnn, 128), 0),
}


def travels(ranks: int, width: int, each: int, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """How many messages one after the other, and bytes that a rank sends in a step."""
    if ranks == 1:
        return 0, 0
    if each:
        return 2 * math.log2(ranks), 2 * (ranks - 1) / ranks * each * width
    near = min(ranks - 1, neighbours)
    return near, near * KEEP * 4 * width


def timed(ranks: Ranks, step: Step) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return max(ranks.gather(time.perf_counter() - start))


def work() -> None:
    """What each of the two ranks runs; the first prints."""
    torch.set_num_threads(1)
    ranks = dpk.ranks.start()
    first = ranks.rank == 0
    numbers = [torch.zeros(1, dtype=torch.float64), torch.zeros(1 << 20, dtype=torch.float64)]
    small, large = (
        statistics.median([timed(ranks, partial(ranks.sum_, [t])) for _ in range(4 * ROUNDS)]) for t in numbers
    )
    latency, bandwidth = small / 2, 8 * (1 << 20) / (large - small)
    rows = [("case", "alone", "together", "faster", "apart", "predicted", "off", "")]
    found: dict[str, tuple[float, int, int]] = {}
    for name, (make, make_task, each) in CASES.items():
        torch.manual_seed(0)
        task = make_task()
        half = len(task.inputs) // 2
        part = slice(0, half) if first else slice(half, None)
        steps: dict[str, Step] = {
            "alone": make(make_task(), ALONE, slice(None)) if first else lambda: None,
            "apart": make(make_task(), ALONE, part),
            "together": make(task, ranks, part),
        }
        for step in steps.values():
            timed(ranks, step), timed(ranks, step)  # the check of the model, and memory
        taken = [{kind: timed(ranks, step) for kind, step in steps.items()} for _ in range(ROUNDS)]
        alone, apart, together = (statistics.median(r[kind] for r in taken) for kind in steps)
        speed = statistics.median(r["alone"] / r["together"] for r in taken)
        width = members_of(task.model).width
        rounds, sent = travels(2, width, each, 1)
        predicted = apart + rounds * latency + sent / bandwidth
        met = ("met" if speed >= TARGET else "MISSED") if "ResNet" in name else ""
        line = [f"{1e3 * t:.1f} ms" for t in (alone, together)]
        line += [
            f"{speed:.2f}x",
            f"{1e3 * apart:.1f} ms",
            f"{1e3 * predicted:.1f} ms",
            f"{predicted / together - 1:+.0%}",
        ]
        rows.append((name, *line, f"target {TARGET}x: {met}" if met else ""))
        found[name] = (apart, width, each)
    if first:
        print(f"two ranks of one thread: latency {1e6 * latency:.0f} us, bandwidth {bandwidth / 1e9:.2f} GB/s here\n")
        print(aligned(rows))
        _predict(found)


def _predict(found: dict[str, tuple[float, int, int]]) -> None:
    """For a network of its own, each rank with as many records as here."""
    header = ("ms a step, kB a rank; ranks", *(str(n) for n in RANKS))
    rows, lines = [header], {}
    for name, (seconds, width, each) in found.items():
        costs = [travels(n, width, each) for n in RANKS]
        times = [1e3 * (seconds + rounds * LATENCY + sent / BANDWIDTH) for rounds, sent in costs]
        cells = (f"{t:.1f}, {sent / 1e3:.0f}" for t, (_, sent) in zip(times, costs, strict=True))
        rows.append((name, *cells))
        lines[name] = list(zip(RANKS, times, strict=True))
    print(f"\npredicted, never measured: {1e6 * LATENCY:.0f} us and {BANDWIDTH / 1e9:g} GB/s between any two\n")
    print(aligned(rows))
    file = RESULTS / "scale.svg"
    file.parent.mkdir(exist_ok=True)
    plot.save(file, "A step against ranks, predicted (same records a rank)", "ranks", "ms", lines)
    print(f"\ndrawn to {file.parent.name}/{file.name}", file=sys.stderr)


def main() -> None:
    code = launch.run(2, ["-c", "from dpkernels.bench import scale; scale.work()"])
    if code:
        sys.exit(f"bench scale: a rank ended with {code}")
