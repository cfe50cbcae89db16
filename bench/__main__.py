"""`python -m bench [ops | training | scaling] [words]`: time the library against its peers; without a word, all.

Words behind `ops` pick cases by name (pytest's -k), behind the others models.
"""

import sys
from pathlib import Path

import pytest

from bench import scaling, training

HERE = Path(__file__).parent


def ops(words: list[str]) -> int:
    chosen = ["-k", " or ".join(words)] if words else []
    options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parent), "-s", "--benchmark-disable-gc"]
    return pytest.main([*options, *chosen, str(HERE / "ops")])


if __name__ == "__main__":
    kind, *words = sys.argv[1:] or ["all"]
    if kind not in ("all", "ops", "training", "scaling"):
        sys.exit(f"bench: got {kind!r}, must be ops, training, scaling or nothing")
    status = ops(words) if kind in ("all", "ops") else 0
    if kind in ("all", "training"):
        training.main(words)
    if kind in ("all", "scaling"):
        scaling.main()
    sys.exit(status)
