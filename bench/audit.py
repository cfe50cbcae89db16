"""`python -m bench audit [words]`, `make audit`: attack every release, and broken builds of it, with many runs.

Words pick attacks by name. Prints the epsilon that is claimed beside what the attack proves. A sound build's bound must
not exceed its claim; a broken build's must.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from dpkernels import audit
from dpkernels.bench import harness, mechanisms
from dpkernels.columns import aligned

OP_RUNS, ALGORITHM_RUNS, CANARIES = 30_000, 4_000, 5_000


def one_run(name: str, **options: float) -> audit.Finding:
    train, claimed = mechanisms.canaries(mechanisms.ALGORITHMS[name], **options)
    return audit.one_run(train, claimed, canaries=CANARIES, seed=2026)


def broken_builds() -> dict[str, Callable[[], contextlib.AbstractContextManager[object]]]:
    """Builds that an attack must catch; they are with the tests, so in a clone only."""
    try:
        from tests import broken
    except ImportError:
        return {}
    return broken.BUILDS


def attacks() -> dict[str, Callable[[], audit.Finding]]:
    found: dict[str, Callable[[], audit.Finding]] = {}
    for name, op in mechanisms.OPS.items():
        found[f"{name}, two neighbours"] = lambda op=op: mechanisms.OfOp(op).told_apart(runs=OP_RUNS)
    for name, make in mechanisms.TRAINING.items():
        found[f"{name}, two neighbours"] = lambda make=make: make().told_apart(runs=ALGORITHM_RUNS, gaussian=True)
    return found


def quick(name: str, canaries: int) -> int:
    """Train once with canaries and guess which were in: `dpkernels audit`."""
    kind = name.replace("-", "")
    train, claimed = mechanisms.canaries(mechanisms.ALGORITHMS[kind], steps=10, rate=0.5)
    finding = audit.one_run(train, claimed, canaries=canaries)
    print(f"{name}, 10 steps, {canaries} canaries, each in a step's batch with probability 1/2:\n{finding}")
    return 1 if finding.broken else 0


def main(words: list[str]) -> int:
    start, wrong = time.perf_counter(), 0
    rows = [("attack", "build", "claimed", "at least", "at delta", "")]

    def add(attack: str, build: str, finding: audit.Finding, expected: bool) -> None:
        nonlocal wrong
        print(f"  {attack}, {build}", file=sys.stderr, flush=True)
        verdict = ("caught" if expected else "BREACH") if finding.broken else ("MISSED" if expected else "stands")
        wrong += verdict in ("BREACH", "MISSED")
        figures = f"{finding.claimed:.2f}", f"{finding.lower:.2f}", f"{finding.delta:g}"
        rows.append((attack, build, *figures, verdict))

    def wanted(attack: str) -> bool:
        return not words or any(word in attack for word in words)

    for name, attack in attacks().items():
        if not wanted(name):
            continue
        for build, context in {"sound": contextlib.nullcontext, **broken_builds()}.items():
            with context():
                add(name, build, attack(), build != "sound")
    for name in mechanisms.ALGORITHMS:
        for rate in (1.0, 0.5, 0.1):
            attack_name = f"{name}, {CANARIES} canaries, rate {rate:g}"
            if wanted(attack_name):
                add(attack_name, "sound", one_run(name, steps=10, rate=rate), False)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    print(f"\n{aligned(rows)}\n\n{time.perf_counter() - start:.0f} s, {wrong} wrong")
    return 1 if wrong else 0
