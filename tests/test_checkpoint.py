"""Runs that are interrupted and go on."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels import checkpoint, sampling
from dpkernels.algorithms import DPLSGD, DPSGD

N, RATE, STEPS = 40, 0.2, 12


def made(kind, seed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    common = {"noise_multiplier": 1.2, "expected_batch_size": N * RATE, "sampling_rate": RATE, "seed": seed}
    if kind == "DPLSGD":
        return DPLSGD(model, loss_fn, local_steps=3, lr=0.1, max_norm=0.1, **common)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return DPSGD(model, loss_fn, optimizer=optimizer, max_norm=1.0, **common)


def train(kind, seed, path=None, pause=0.0):
    """Take all steps, a checkpoint after each; go on from one that is there."""
    torch.manual_seed(1)
    x, y = torch.randn(N, 5), torch.randint(0, 3, (N,))
    algorithm = made(kind, seed)
    taken = 0
    if path is not None and Path(path).exists():
        state = checkpoint.load(path)
        algorithm.load_state_dict(state["algorithm"])
        taken = state["step"]
    for step, indices in enumerate(sampling.poisson(N, RATE, STEPS - taken, seed=9, start=taken), start=taken + 1):
        algorithm.step(x[indices], y[indices])
        if path is not None:
            checkpoint.save(path, {"algorithm": algorithm.state_dict(), "step": step})
        time.sleep(pause)
    return algorithm


def weights(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.model.parameters()])


@pytest.mark.parametrize("kind", ["DPSGD", "DPLSGD"])
def test_a_seeded_run_that_is_killed_goes_on_as_if_nothing_had_happened(kind, tmp_path):
    path = tmp_path / "run.ckpt"
    code = f"from tests.test_checkpoint import train; train({kind!r}, 5, {str(path)!r}, pause=0.05)"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent.parent)
        before = checkpoint.load(path)["step"] if path.exists() else 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not path.exists() or checkpoint.load(path)["step"] < before + 3):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert 0 < checkpoint.load(path)["step"] < STEPS
    resumed, whole = train(kind, 5, path), train(kind, 5)
    assert torch.equal(weights(resumed), weights(whole))
    assert len(resumed.ledger) == len(whole.ledger) == STEPS
    assert resumed.epsilon(1e-5) == whole.epsilon(1e-5)
    assert resumed.ledger.reproducible


def test_without_a_seed_noise_is_new_and_every_release_counts(tmp_path):
    path = tmp_path / "run.ckpt"
    algorithm = train("DPSGD", None)
    checkpoint.save(path, algorithm.state_dict())
    again = []
    for _ in range(2):
        resumed = made("DPSGD", None)
        resumed.load_state_dict(checkpoint.load(path))
        assert torch.equal(weights(resumed), weights(algorithm))
        resumed.step(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
        assert len(resumed.ledger) == STEPS + 1
        again.append(weights(resumed))
    assert not torch.equal(*again)


@pytest.mark.parametrize("seed", [None, 0x1234567890ABCDEF])
def test_no_key_on_disk(seed, tmp_path):
    path = tmp_path / "run.ckpt"
    algorithm = train("DPSGD", seed)
    checkpoint.save(path, algorithm.state_dict())
    key = int(algorithm.noise._stream[0])
    raw = path.read_bytes()
    for form in (struct.pack("<q", key), struct.pack(">q", key), str(key).encode(), f"{key & (2**64 - 1):x}".encode()):
        assert form not in raw


def test_what_was_cut_short_or_changed_is_refused(tmp_path):
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, made("DPSGD", 1).state_dict())
    raw = path.read_bytes()
    for broken in (
        raw[:-1],
        raw[: len(raw) // 2],
        raw[:10],
        b"",
        raw[:500] + bytes([raw[500] ^ 1]) + raw[501:],
        b"x" + raw,
    ):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"run\.ckpt: (is no checkpoint|was cut short or changed)"):
            checkpoint.load(path)


def test_a_failed_save_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, {"step": 1})

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["run.ckpt"]


def test_a_state_goes_only_into_a_fresh_algorithm_with_the_same_claims():
    algorithm = train("DPSGD", 5)
    state = algorithm.state_dict()
    with pytest.raises(ValueError, match="must be empty"):
        algorithm.load_state_dict(state)
    other = made("DPSGD", 5)
    other.ledger.sampling_rate = 0.5
    with pytest.raises(ValueError, match="sampling_rate"):
        other.load_state_dict(state)
    assert json.dumps(state["ledger"])


def test_release_numbers_are_never_taken_again():
    noise = dpk.Gaussian(1.0, seed=1)
    noise.release()
    noise.skip(5)
    assert noise.releases == 5
    with pytest.raises(ValueError, match="releases: got 3, must be at least the 5"):
        noise.skip(3)


@pytest.mark.parametrize("kind", [DPSGD, DPLSGD])
def test_with_budget_spends_it_and_no_more(kind):
    model = nn.Linear(5, 3)
    options = {"max_norm": 1.0, "expected_batch_size": 8, "sampling_rate": 0.2}
    options |= (
        {"local_steps": 2, "lr": 0.1} if kind is DPLSGD else {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    )
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    algorithm = kind.with_budget(model, loss_fn, epsilon=3.0, delta=1e-5, steps=6, **options)
    batch = torch.randn(8, 5), torch.randint(0, 3, (8,))
    for _ in range(6):
        algorithm.step(*batch)
    assert 2.9 < algorithm.epsilon(1e-5) <= 3.0
    before = weights(algorithm)
    for _ in range(2):
        with pytest.raises(dpk.accounting.BudgetError):
            algorithm.step(*batch)
    assert torch.equal(weights(algorithm), before)
    assert len(algorithm.ledger) == 6
