"""`python -m bench soundness [ROWS]`: the hunt of tests/soundness.py for a row beyond its bound, ten million rows.

Prints, for each family, the largest clipped norm over the bound. More than 1 would be a breach.
"""

from __future__ import annotations

import sys
import time

from dpkernels.bench import harness
from dpkernels.columns import aligned
from tests import soundness


def main(words: list[str]) -> int:
    rows = int(float(words[0])) if words else 10_000_000
    start, worst = time.perf_counter(), 0.0
    results = [("family", "rows", "largest norm / bound", "")]
    for name, tried, largest in soundness.hunt(rows, seed=2026):
        print(f"  {name}", file=sys.stderr, flush=True)
        kept = largest <= 1
        results.append(
            (name, f"{tried:,}", f"1 - {1 - largest:.1e}" if kept else repr(largest), "" if kept else "BREACH")
        )
        worst = max(worst, largest)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    print(f"\n{aligned(results)}\n\n{time.perf_counter() - start:.0f} s")
    return 0 if worst <= 1 else 1
