"""Peak memory of steps: that of a fresh process, less what it had before the first step."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak(module: str, *words: str, processes: int = 1) -> float:
    """Megabytes that `python -m module words` prints by `measure`, the median of some; NaN if it fails."""
    command = [sys.executable, "-m", module, *words]
    peaks = []
    for _ in range(processes):
        found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
        peaks.append(float(found.stdout.split()[-1]) if found.returncode == 0 else float("nan"))
    return statistics.median(peaks)


def told(used: dict[str, float], at_most: float | None) -> str:
    """Peaks by method in words, and whether ours is at most so many times SGD's."""
    ratio = used["dpkernels"] / used["SGD"]
    target = "" if at_most is None else f" (target {at_most}: {'met' if ratio <= at_most else 'MISSED'})"
    peaks = ", ".join(f"{method} {mb:.0f} MB" for method, mb in used.items())
    return f"peak memory: {peaks}; ours is {ratio:.2f} of SGD's{target}"


def measure(step: Callable[[], object], times: int = 10, small: Callable[[], object] | None = None) -> None:
    """Take steps and print how many megabytes they took at their peak.

    `small` is the same on a small model: the code of libraries, and what they allocate once, is not the step's.
    """
    (small or (lambda: torch.randn(64, 64) @ torch.randn(64, 64)))()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the most that it had
    before = _status("VmRSS")
    for _ in range(times):
        step()
    print(_status("VmHWM") - before)


def _status(field: str) -> float:
    """Megabytes of this process's memory that the system calls so: VmRSS is what it has, VmHWM the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
