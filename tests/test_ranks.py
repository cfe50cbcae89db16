"""Several processes that train together: the one-process result, one ledger, and an end in bounded time."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dpkernels as dpk
from tests import run_ranks

ROOT = Path(__file__).parent.parent


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(size, *words):
    """So many ranks; returns their exit codes and what they printed to stderr."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common |= {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.run_ranks", *map(str, words)],
            cwd=ROOT,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return ranks


def ended(ranks, seconds):
    """Exit codes and stderr of ranks that must end by then."""
    end = time.monotonic() + seconds
    try:
        told = [rank.communicate(timeout=max(end - time.monotonic(), 0.1))[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], told


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What all cases gave on 2 and on 4 ranks, those going on from checkpoints of the 2."""
    found, before = {}, ()
    for size in (2, 4):
        directory = tmp_path_factory.mktemp(f"ranks{size}")
        codes, told = ended(launch(size, "equal", directory, *before), 300)
        assert codes == [0] * size, told
        found[size] = [torch.load(directory / f"rank{rank}.pt") for rank in range(size)]
        before = (directory,)
    return found


def entries(releases):
    """How many releases there were of each kind; a multiplier is a quotient, and rounded."""
    found = {}
    for multiplier, sampled, count in releases:
        kind = f"{multiplier:.12g}", sampled
        found[kind] = found.get(kind, 0) + count
    return found


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return {case: run_ranks.train(case) for case in run_ranks.CASES}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", run_ranks.CASES)
def test_many_ranks_give_what_one_process_gives(case, size, runs, alone):
    true, tolerance = alone[case], 2e-6 if "float32" in case else 1e-11
    for rank in runs[size]:
        for found in (rank[case], *([rank[case, "resumed"]] if size == 4 else [])):
            if case.split(": ")[0] in run_ranks.UNSEEDED:
                tolerance = 3e-4  # there is a little noise, another one in each run
            for a, b in zip(found["weights"], true["weights"], strict=True):
                assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())
            assert [entries(r) for r in found["releases"]] == [entries(r) for r in true["releases"]]
            assert found["sampling"] == true["sampling"]
        assert rank[case]["epsilon"] == pytest.approx(true["epsilon"], rel=1e-12)
        for a, b in zip(rank[case]["weights"], runs[size][0][case]["weights"], strict=True):
            assert torch.equal(a, b)  # no rank drifts away from others


def test_batches_were_unequal_and_some_empty(runs, alone):
    case = "DPSGD: mlp"
    sizes = torch.tensor([rank[case]["sizes"] for rank in runs[4]])
    assert sizes.sum(0).tolist() == alone[case]["sizes"]
    assert (sizes == 0).any()
    assert len(set(sizes.flatten().tolist())) > 2


@pytest.mark.parametrize("model", run_ranks.MODELS)
def test_bytes_are_those_on_the_wire(model, runs, alone):
    """With one node to a rank; of two, some messages stay within a rank."""
    case = f"SDMDSGD: {model}"
    total = {size: sum(rank[case]["bytes"] for rank in runs[size]) for size in (2, 4)}
    wire = {size: sum(rank[case]["wire"] for rank in runs[size]) for size in (2, 4)}
    assert total[2] == total[4] == alone[case]["bytes"] == wire[4]
    assert 0 < wire[2] < total[2]


@pytest.mark.parametrize(
    ("kind", "case", "rank", "words"),
    [
        ("kill", "DPSGD: mlp", 1, "rank 1 shows no sign of life: it was killed, or stopped"),
        ("kill", "DPSGD: mlp", 0, "rank 0 cannot be reached any more"),
        ("kill", "SDMDSGD: mlp", 2, "rank 2 shows no sign of life: it was killed, or stopped"),
        ("stop", "DPSGD: mlp", 0, "rank 0 cannot be reached any more"),
        ("stop", "PriSMA: mlp", 1, "rank 1 shows no sign of life: it was killed, or stopped"),
        ("stall", "DIFF2: mlp", 2, "rank 2 is alive, but did not come within 4 s"),
        ("stall", "SDMDSGD: mlp", 1, "rank 1 is alive, but did not come within 4 s"),
        ("error", "DPLSGD: mlp", 1, "rank 1 failed: ValueError: a disk is full"),
        ("error", "DPSGD: mlp", 0, "rank 0 failed: ValueError: a disk is full"),
    ],
)
def test_a_rank_that_comes_to_grief_is_named_by_all_others_in_time(kind, case, rank, words, tmp_path):
    ranks = launch(3, "fault", tmp_path, kind, case, rank, 4)
    others = [process for i, process in enumerate(ranks) if i != rank]
    try:
        codes, told = ended(others, 60)
        seconds = time.time() - float((tmp_path / f"at{(rank + 1) % 3}").read_text())
    finally:
        ranks[rank].kill()
        ranks[rank].communicate()
    assert all(code not in (0, None) for code in codes)
    for printed in told:
        assert "RankError" in printed
        assert words in printed
    assert seconds < (4 if kind in ("stall", "stop") else 0) + 15
    state = dpk.checkpoint.load(tmp_path / "checkpoint")  # from before, and whole
    ledgers = state.get("ledgers") or [state["ledger"]]
    assert all(sum(count for *_, count in ledger["releases"]) == 2 for ledger in ledgers)


def test_ranks_that_train_something_else_are_refused_by_all(tmp_path):
    codes, told = ended(launch(2, "differ", tmp_path), 60)
    assert codes == [0, 0], told
    for rank in range(2):
        words = torch.load(tmp_path / f"rank{rank}.pt")
        assert 'rank 1: has dpkernels = "9.9", must have "' in words["version"]
        assert "rank 1: has seed = " in words["seed"]
        assert "rank 1: has parameter weight = " in words["model"]
        assert "(3, 6) of torch.float32" in words["model"]
        assert "rank 1: has clip = " in words["setting"]
        assert "inputs: are not a batch of dpk.sampling.poisson" in words["unshared"]


def test_the_step_that_a_budget_refuses_is_refused_on_all_ranks(tmp_path):
    codes, told = ended(launch(2, "budgets", tmp_path), 60)
    assert codes == [0, 0], told
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for name in ("DPSGD", "DIFF2", "PriSMA", "SDMDSGD"):
        assert first[name].startswith("BudgetError: release 3: would spend more than the budget"), first[name]
        assert second[name] == first[name]
        assert set(first[name, "entries"]) == set(second[name, "entries"]) == {2}
    name = "BVRLSGD"  # in the middle of one client's steps, on its rank
    assert first[name] == second[name]
    assert first[name].startswith("BudgetError")
    assert len(set(first[name, "entries"])) > 1
    assert first[name, "entries"] == second[name, "entries"]
    assert all(torch.equal(a, b) for a, b in zip(first[name, "weights"], second[name, "weights"], strict=True))


def test_shares_are_all_there_is():
    ranks = dpk.ranks.ALONE
    for size in (1, 2, 3, 7):
        shares = [range(r * 12 // size, (r + 1) * 12 // size) for r in range(size)]
        assert [i for share in shares for i in share] == list(range(12))
    assert ranks.share(5) == range(5)
    assert dpk.ranks.start() is ranks
    with pytest.raises(ValueError, match=r"ranks: got a int, must be what dpk\.ranks\.start"):
        dpk.sampling.poisson(5, 0.5, 1, ranks=3)
    with pytest.raises(ValueError, match="timeout: got 0, must be > 0"):
        dpk.ranks.start(0)
