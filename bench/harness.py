"""How speed is measured: ratios in one process, rounds interleaved, after a correctness gate.

A case gives `ours`, the `peers` to compare with (the read of the same memory is one), a `gate` that raises on a
wrong answer, and its targets. In every round each peer runs once and then ours, so that all see the same weather;
a ratio is taken round by round, and its median and quartiles are reported. No speed is printed for a wrong answer.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import dpkernels
from dpkernels import ops
from dpkernels.columns import aligned


@dataclass
class Result:
    case: str
    seconds: float
    ratios: dict[str, tuple[float, float, float]]  # peer: lower quartile, median, upper quartile of ours / peer
    at_most: dict[str, float] = field(default_factory=dict)  # peer: target for the median of ours / peer

    def met(self, peer: str) -> bool | None:
        return self.ratios[peer][1] <= self.at_most[peer] if peer in self.at_most else None


def spread(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return lower, median, upper


def relative_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """How far tensors are off, over the norm of all of them."""
    off = sum(float((found[name] - t).square().sum()) for name, t in truth.items())
    return float((off / sum(float(t.square().sum()) for t in truth.values())) ** 0.5)


RESULTS: list[Result] = []


def compare(
    benchmark: Any,
    case: str,
    *,
    ours: Callable[[], object],
    peers: dict[str, Callable[[], object]],
    gate: Callable[[], None],
    at_most: dict[str, float],
    rounds: int = 9,
) -> None:
    gate()
    times: dict[str, list[float]] = {name: [] for name in peers}

    def peers_first() -> None:
        for name, peer in peers.items():
            start = time.perf_counter()
            peer()
            times[name].append(time.perf_counter() - start)

    peers_first()
    ours()
    for recorded in times.values():
        recorded.clear()
    benchmark.pedantic(ours, setup=peers_first, rounds=rounds)
    mine = benchmark.stats.stats.data
    ratios = {name: spread([a / b for a, b in zip(mine, theirs, strict=True)]) for name, theirs in times.items()}
    benchmark.extra_info.update({f"ours/{name}": median for name, (_, median, _) in ratios.items()})
    RESULTS.append(Result(case, statistics.median(mine), ratios, at_most))


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.open() if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "isa": ops.native.active_isa() if ops.native else "reference",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "dpkernels": dpkernels.__version__,
    }


def table(results: list[Result]) -> str:
    rows = [("case", "ours", "ours / peer, median [quartiles]", "target", "")]
    for result in results:
        for peer, (lower, median, upper) in result.ratios.items():
            met = result.met(peer)
            speed = f" = {1 / median:.1f}x faster" if peer not in ("read", "SGD") else ""  # the limits
            rows.append(
                (
                    result.case,
                    f"{1e3 * result.seconds:.2f} ms",
                    f"{peer}: {median:.3f} [{lower:.3f} {upper:.3f}]{speed}",
                    f"<= {result.at_most[peer]:.3f}" if met is not None else "",
                    {True: "met", False: "MISSED", None: ""}[met],
                )
            )
    return aligned(rows)


def save(results: list[Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "results": [asdict(r) for r in results]}, indent=1))
