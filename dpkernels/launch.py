"""Several processes of this machine that run the same command, with the environment that torchrun would give them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 20.0  # seconds for the others to say what they saw when one has failed


def run(count: int, arguments: Sequence[str]) -> int:
    """`python arguments` as ranks 0 .. count - 1, until all have ended; the exit code of the first that failed.

    Unlike torchrun it lets the others end by themselves when one fails, so that they can say which and why; who has not
    ended 20 seconds later is killed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # some builds of torch have none

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, where it outlives all ranks
    shared = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            own = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(subprocess.Popen([sys.executable, *arguments], env=own))
        return _ended(ranks)
    except KeyboardInterrupt:  # the terminal has told them too
        _ended(ranks, failed=time.monotonic())
        return 128 + signal.SIGINT
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _ended(ranks: Sequence[subprocess.Popen[bytes]], failed: float | None = None) -> int:
    """Waits; not for long after the time at which one has `failed`. The first exit code that is not 0."""
    first = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        first = first or next((code for code in codes if code), 0)
        if first and failed is None:
            failed = time.monotonic()
        if None not in codes or (failed is not None and time.monotonic() > failed + GRACE):
            return 128 - first if first < 0 else first
        time.sleep(0.05)
