"""`python -m bench [ops | training | scaling | local | differences] [words]`: time the library against its peers.

All of them without words. Words behind `ops` pick cases by name (pytest's -k), behind the others models.
`python -m bench fashion DIRECTORY` trains by two algorithms on Fashion-MNIST and takes an hour; `bench soundness
[ROWS]` hunts for a row that exceeds its clip bound, for minutes; `python -m bench audit` attacks what is released.
"""

import sys
from pathlib import Path

import pytest

from bench import audit, differences, fashion, local, scaling, soundness, training

HERE = Path(__file__).parent


def ops(words: list[str]) -> int:
    chosen = ["-k", " or ".join(words)] if words else []
    options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parent), "-s", "--benchmark-disable-gc"]
    return pytest.main([*options, *chosen, str(HERE / "ops")])


if __name__ == "__main__":
    kind, *words = sys.argv[1:] or ["all"]
    if kind == "fashion":
        fashion.main(words)
        sys.exit()
    if kind in ("soundness", "audit"):
        sys.exit({"soundness": soundness, "audit": audit}[kind].main(words))
    timed = ("all", "ops", "training", "scaling", "local", "differences")
    if kind not in timed:
        sys.exit(f"bench: got {kind!r}, must be one of {', '.join(timed)}, fashion, soundness, audit")
    status = ops(words) if kind in ("all", "ops") else 0
    if kind in ("all", "training"):
        training.main(words)
    if kind in ("all", "scaling"):
        scaling.main()
    if kind in ("all", "local"):
        local.main(words)
    if kind in ("all", "differences"):
        differences.main(words)
    sys.exit(status)
