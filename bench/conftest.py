import sys
from pathlib import Path

from dpkernels.bench import harness

RESULTS_FILE = Path(__file__).parent.parent / "results" / "ops.json"


def pytest_runtest_logstart(nodeid):
    print(f"  {nodeid.split('::')[-1]}", file=sys.stderr, flush=True)


def pytest_sessionfinish():
    if harness.RESULTS:
        print("\n" + "\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
        print("\n" + harness.table(harness.RESULTS))
        harness.save(harness.RESULTS, RESULTS_FILE)
        print(f"\nsaved to {RESULTS_FILE.parent.name}/{RESULTS_FILE.name}")
