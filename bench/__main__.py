"""`python -m bench [words]`: time the ops against their peers; words pick cases by name (pytest's -k)."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if __name__ == "__main__":
    chosen = ["-k", " or ".join(sys.argv[1:])] if sys.argv[1:] else []
    options = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE.parent), "-s", "--benchmark-disable-gc"]
    sys.exit(pytest.main([*options, *chosen, str(HERE / "ops")]))
