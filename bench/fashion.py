"""DP-LSGD with ten local steps against DP-SGD on Fashion-MNIST, both at epsilon 2 and delta 1e-5.

`python -m bench fashion DIRECTORY`, where DIRECTORY has fashion-mnist/*.gz as published. Each algorithm gets a modest
search over its step size, threshold and number of steps, on 5,000 images held out of the training set; the best
setting is then run with three seeds and its accuracy on the test set reported, with the time it took and how far its
rows went beyond the threshold. The epsilon of a run does not count the search. Writes bench/results/fashion.json.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import DPLSGD, DPSGD, datasets
from dpkernels.algorithms.datasets import Data
from dpkernels.bench import harness
from dpkernels.bench.models import class_loss, cnn
from dpkernels.columns import aligned

EPSILON, DELTA, BATCH, HELD_OUT, SEEDS = 2.0, 1e-5, 512, 5000, (1, 2, 3)
RESULTS_FILE = Path(__file__).parent / "results" / "fashion.json"


@dataclass(frozen=True)
class Setting:
    """`threshold` is the largest move of one sample in weight space: of DP-SGD, lr times the gradient's bound."""

    local_steps: int  # 0 for DP-SGD
    lr: float
    threshold: float
    steps: int

    def __str__(self) -> str:
        name = f"DP-LSGD K={self.local_steps}" if self.local_steps else "DP-SGD"
        return f"{name}, lr {self.lr:g}, threshold {self.threshold:g}, {self.steps} steps"


SEARCH = {
    "DP-SGD": [
        Setting(0, lr, threshold, steps)
        for steps, lr, threshold in itertools.product((300, 1000), (0.5, 2.0), (0.5, 1.0, 2.0, 4.0))
    ],
    "DP-LSGD": [
        Setting(10, lr, threshold, 300) for lr, threshold in itertools.product((0.025, 0.1), (0.5, 1.0, 2.0, 4.0))
    ],
}


def load(directory: Path) -> tuple[Data, Data, Data]:
    """Training, held-out and test images, scaled by constants."""
    (x, y), test = (((x - 0.3) / 0.35, y) for x, y in datasets.images(directory, "fashion-mnist"))
    return (x[HELD_OUT:], y[HELD_OUT:]), (x[:HELD_OUT], y[:HELD_OUT]), test


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return statistics.fmean(
            float((model(x).argmax(1) == y).float().mean())
            for x, y in zip(data[0].split(1000), data[1].split(1000), strict=True)
        )


def run(setting: Setting, multiplier: float, train: Data, seed: int, watch: bool = False) -> dict[str, object]:
    """Train; the model, seconds, epsilon and, if watched, incremental norms."""
    torch.manual_seed(seed)
    model = cnn(1).model
    rate = BATCH / len(train[0])
    common = {
        "noise_multiplier": multiplier,
        "expected_batch_size": BATCH,
        "sampling_rate": rate,
        "seed": seed,
        "micro_batch_size": 1024,
        "watch_norms": watch,
    }
    algorithm: DPLSGD | DPSGD
    if setting.local_steps:
        algorithm = DPLSGD(
            model,
            class_loss,
            local_steps=setting.local_steps,
            lr=setting.lr,
            max_norm=setting.threshold,
            **common,
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
        algorithm = DPSGD(model, class_loss, optimizer=optimizer, max_norm=setting.threshold / setting.lr, **common)
    sampler = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(setting.steps):
        chosen = torch.rand(len(train[0]), generator=sampler) < rate
        algorithm.step(train[0][chosen], train[1][chosen])
    seconds = time.perf_counter() - start
    norms = algorithm.incremental_norms() if watch else None
    # of a gradient g the move is lr * g: in both cases `ratio` is the excess of moves over lr
    ratio = None if norms is None else norms.over(setting.lr) if setting.local_steps else norms
    return {"model": model, "seconds": seconds, "epsilon": algorithm.epsilon(DELTA), "ratio": ratio}


def main(words: list[str]) -> None:
    if len(words) != 1:
        sys.exit(f"bench fashion: got {words}, must be one directory, the one that has fashion-mnist in it")
    train, held_out, test = load(Path(words[0]))
    rate = BATCH / len(train[0])
    multipliers = {
        steps: dpk.accounting.calibrate(
            lambda z, steps=steps: dpk.accounting.poisson_gaussian(z, rate, steps), EPSILON, DELTA
        )
        for steps in sorted({setting.steps for settings in SEARCH.values() for setting in settings})
    }
    report: dict[str, object] = {"machine": harness.machine(), "epsilon": EPSILON, "delta": DELTA, "batch": BATCH}
    report["noise multipliers"] = multipliers
    rows = [("", "test accuracy", "seconds", "clipped", "mean", "quartiles of the excess over lr")]
    for name, settings in SEARCH.items():
        found = []
        for setting in settings:
            result = run(setting, multipliers[setting.steps], train, seed=0)
            found.append((accuracy(result["model"], held_out), setting))
            print(f"  {setting}: {found[-1][0]:.1%} on held-out images, {result['seconds']:.0f} s", flush=True)
        best = max(found, key=lambda pair: pair[0])[1]
        finals = [run(best, multipliers[best.steps], train, seed, watch=True) for seed in SEEDS]
        scores = [accuracy(final["model"], test) for final in finals]
        seconds = statistics.fmean(final["seconds"] for final in finals)
        ratios = [final["ratio"] for final in finals]
        report[name] = {
            "search": [{"held-out accuracy": score, **asdict(setting)} for score, setting in found],
            "best": asdict(best),
            "test accuracies": scores,
            "seconds": [final["seconds"] for final in finals],
            "epsilons": [final["epsilon"] for final in finals],
            "excess over lr": [asdict(ratio) for ratio in ratios],
        }
        spread = f"{statistics.fmean(scores):.2%} ± {statistics.stdev(scores):.2%}"
        quartiles = " ".join(f"{statistics.fmean(q):.3g}" for q in zip(*(r.quartiles for r in ratios), strict=True))
        share = f"{statistics.fmean(r.clipped for r in ratios):.0%}"
        mean = f"{statistics.fmean(r.mean for r in ratios):.3g}"
        rows.append((str(best), spread, f"{seconds:.0f}", share, mean, quartiles))
        RESULTS_FILE.parent.mkdir(parents=True, exist_ok=True)
        RESULTS_FILE.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nepsilon {EPSILON} at delta {DELTA:g}, {len(SEEDS)} seeds\n" + aligned(rows))
