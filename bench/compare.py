"""A private training step against other libraries': `dpkernels bench`, and with --full over batch sizes, with a plot.

Ratios are taken round by round, all methods in turn, after our clipped sums have been compared with those of per-sample
gradients by vmap. Peak memory is that of a fresh process, less what it had before the first step. The largest batch
within a limit of memory is calculated from the peaks at two sizes. Methods that do not run a model are named.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpkernels.bench import harness, memory
from dpkernels.bench.methods import MORE, Step
from dpkernels.bench.models import MODELS
from dpkernels.bench.training import gate, timed
from dpkernels.columns import aligned

SIZES = {"MLP": (16, 64, 128), "CNN": (32, 128, 512), "ResNet-20": (16, 32, 64), "GPT": (4, 8, 16)}
PATIENCE, LIMIT = 5.0, 1024  # seconds for one method's rounds; megabytes
RESULTS = Path(__file__).parent / "results"


def steps_of(name: str, batch: int) -> tuple[dict[str, Step], dict[str, str]]:
    """A step by each method that can, and why others cannot."""
    torch.manual_seed(0)
    task = MODELS[name](batch)
    gate(task)
    found, refused = {}, {}
    for method, make in MORE.items():
        try:
            found[method] = make(task)
            found[method]()
        except Exception as error:
            found.pop(method, None)
            refused[method] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    return found, refused


def measured(name: str, batch: int, rounds: int = 7) -> tuple[dict[str, Any], dict[str, str]]:
    """Median seconds of SGD, and the ratios of all others to it, with quartiles."""
    steps, refused = steps_of(name, batch)
    slow = {method: timed(step) for method, step in steps.items()}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for i in range(rounds):
        for method, step in steps.items():
            if i < 3 or (i + 1) * slow[method] < PATIENCE:
                times[method].append(timed(step))
    plain = times["SGD"]
    ratios = {
        method: harness.spread([t / s for t, s in zip(own, plain, strict=False)])
        for method, own in times.items()
        if method != "SGD"
    }
    return {"model": name, "batch": batch, "sgd_seconds": statistics.median(plain), "ratios": ratios}, refused


def largest_batch(peaks: dict[int, float]) -> int | None:
    """The batch whose peak is the limit, if memory grows with it in a line."""
    (small, first), (large, second) = sorted(peaks.items())
    each = (second - first) / (large - small)
    if not each > 0 or first != first or second != second:
        return None
    return max(0, int(small + (LIMIT - first) / each))


def table(results: list[dict[str, Any]]) -> str:
    """Steps over SGD's, one line for each model and batch."""
    methods = [m for m in MORE if m != "SGD"]
    lines = [("model, batch", "SGD ms", *methods)]
    for r in results:
        cells = [f"{r['ratios'][m][1]:.2f}" if m in r["ratios"] else "-" for m in methods]
        lines.append((f"{r['model']}, {r['batch']}", f"{1e3 * r['sgd_seconds']:.1f}", *cells))
    return aligned(lines)


def memory_table(peaks: dict[str, dict[str, dict[int, float]]]) -> str:
    """Peaks at the larger of two sizes, and the largest batch within the limit."""
    methods = list(MORE)
    lines = [(f"peak MB; batch within {LIMIT} MB", *methods)]
    for name, found in peaks.items():
        cells = []
        for method in methods:
            if method not in found:
                cells.append("-")
                continue
            most = largest_batch(found[method])
            cells.append(f"{max(found[method].items())[1]:.0f}; {most if most is not None else '?'}")
        lines.append((f"{name}, {SIZES[name][-1]}", *cells))
    return aligned(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Times over SGD's against the batch size, one panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r["model"] for r in results))
    figure, panels = pyplot.subplots(1, len(names), figsize=(4 * len(names), 4), sharey=True, squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        mine = [r for r in results if r["model"] == name]
        for i, method in enumerate(m for m in MORE if m != "SGD"):
            line = [(r["batch"], r["ratios"][method][1]) for r in mine if method in r["ratios"]]
            if line:
                ours = method.startswith("dpkernels")
                style = {"linewidth": 3 if ours else 1.5, "linestyle": "-" if ours else "--", "color": f"C{i}"}
                panel.plot(*zip(*line, strict=True), marker="o", label=method, **style)
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set(title=name, xlabel="batch size", xscale="log", yscale="log")
        panel.set_xticks([r["batch"] for r in mine], [str(r["batch"]) for r in mine], minor=False)
        panel.minorticks_off()
    panels[0][0].set_ylabel("time of a step / time of SGD")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    panels[0][0].set_yticks(ticks, [str(t) for t in ticks])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle("The price of privacy on a CPU: lower is better, 1 is training without privacy")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(names: Sequence[str] = (), quick: bool = True) -> None:
    """Print the table; in full also memory, and write bench/results/compare.json and compare.png."""
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        raise ValueError(f"models: got {unknown[0]!r}, must be among {', '.join(MODELS)}")
    warnings.simplefilter("ignore")  # of peers
    start = time.perf_counter()
    machine = harness.machine()
    print("\n".join(f"{what}: {how}" for what, how in machine.items()), flush=True)
    results, reasons = [], {}
    peaks: dict[str, dict[str, dict[int, float]]] = {}
    for name in names or MODELS:
        for batch in SIZES[name][1:2] if quick else SIZES[name]:
            print(f"  {name}, {batch} samples", file=sys.stderr, flush=True)
            result, refused = measured(name, batch)
            results.append(result)
            reasons |= {f"{method} on {name}": why for method, why in refused.items()}
        if not quick:
            peaks[name] = {
                method: {b: memory.peak("dpkernels.bench.compare", name, method, str(b)) for b in SIZES[name][1:]}
                for method in results[-1]["ratios"] | {"SGD": 1}
            }
    print(f"\ntime of a step over that of SGD, medians\n{table(results)}")
    for what, why in reasons.items():
        print(f"not run: {what}: {why}")
    if not quick:
        print(f"\n{memory_table(peaks)}")
        record = {"machine": machine, "versions": versions(), "results": results, "peak_megabytes": peaks}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "compare.json").write_text(json.dumps(record, indent=1) + "\n")
        draw(results, RESULTS / "compare.png")
        print(f"\nsaved to {RESULTS.name}/compare.json and compare.png")
    print(f"{time.perf_counter() - start:.0f} s")


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    from importlib import metadata

    found = {}
    for name in ("torch", "opacus", "backpack-for-pytorch", "dpkernels"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    memory.measure(MORE[sys.argv[2]](MODELS[sys.argv[1]](int(sys.argv[3]))))
