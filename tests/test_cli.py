"""The command line, as somebody who types it sees it."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from dpkernels import accounting, cli, ops


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"{ops.native.active_isa()} kernels" in text
    assert "never timed" in text


def test_without_native_module_it_runs_on_the_reference_and_says_so():
    result = run("-m", "dpkernels", "info", DPKERNELS_NATIVE="0")
    assert result.returncode == 0
    assert "native kernels  no: switched off" in result.stdout
    assert "plain PyTorch reference" in result.stdout
    code = (
        "import torch, dpkernels as dpk\n"
        "x = torch.ones(4, 3)\n"
        "print(dpk.clip_sum(x, 1.0).sum.tolist(), dpk.sparsify(x[0], 1.0, seed=0).values.tolist())\n"
        "assert dpk.add_gaussian_(x, dpk.Gaussian(1.0)).ne(1).all()"
    )
    result = run("-c", code, DPKERNELS_NATIVE="0")
    assert result.returncode == 0, result.stderr
    assert "2.309" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["train", "--algorithm", "sgd"], ["account", "--steps", "3"]])
def test_bad_words_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--steps", "0"], "dpkernels train: steps: got 0, must be a whole number >= 1"),
        (["train", "--epsilon", "-1"], "dpkernels train: epsilon"),
        (["train", "--data", "mnist"], "dpkernels train: data_dir: got None"),
        (["train", "--set", "lr=fast"], "dpkernels train: --set: got 'lr=fast', must be NAME=NUMBER"),
        (["train", "--set", "size=3"], "dpkernels train: size: is no constant of dp-sgd"),
        (["train", "--checkpoint-every", "0"], "dpkernels train: --checkpoint-every: got 0"),
        (["train", "--resume"], "dpkernels train: [Errno 2]"),
        (["account", "--noise-multiplier", "-1", "--sampling-rate", "0.1", "--steps", "3"], "noise_multiplier: got -1"),
        (["bench", "VGG"], "dpkernels bench: models: got 'VGG', must be among MLP"),
    ],
)
def test_bad_values_exit_with_2_and_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_account(capsys):
    assert (
        cli.main(["account", "--noise-multiplier", "1.1", "--sampling-rate", "0.01", "--steps", "100", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(accounting.epsilon(accounting.poisson_gaussian(1.1, 0.01, 100), 1e-5))
    assert cli.main(["account", "--epsilon", "2", "--sampling-rate", "0.01", "--steps", "100"]) == 0
    assert "for 100 steps of DP-SGD with noise multiplier" in capsys.readouterr().out


def test_train_leaves_a_record_a_model_and_a_plot(capsys, tmp_path):
    out = tmp_path / "run"
    assert cli.main(["train", "--steps", "5", "--out", str(out), "--json", "--seed", "1"]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record == json.loads((out / "record.json").read_text())
    assert 2.8 < record["epsilon"] <= 3.0
    assert record["accuracy"] > 0.2
    assert [entry["step"] for entry in record["history"]] == list(range(1, 6))
    assert "5/5" in shown.err
    assert "accuracy" in shown.err
    assert "loss" not in shown.err  # of training data: not private
    assert set(torch.load(out / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert (out / "plot.svg").read_text().startswith("<svg")
    assert not (out / "checkpoint").exists()
    assert cli.main(["train", "--steps", "2", "--out", str(tmp_path / "b"), "--show-private-metrics"]) == 0
    shown = capsys.readouterr()
    assert "training loss (NOT private)" in shown.err
    assert "on the public test set" in shown.out


def test_an_interrupted_run_goes_on(tmp_path):
    """Ctrl-C leaves a checkpoint; with --resume the run ends as one that was not interrupted."""
    words = ["-m", "dpkernels", "train", "--algorithm", "diff2", "--steps", "400", "--seed", "3", "--epsilon", "20"]
    with subprocess.Popen([sys.executable, *words, "--out", tmp_path], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "40/400" in line:
                break
        process.send_signal(signal.SIGINT)
        assert "--resume goes on" in process.stderr.read()
        assert process.wait(60) == 130
    assert (tmp_path / "checkpoint").exists()
    refused = run(*words, "--out", tmp_path)
    assert refused.returncode == 2
    assert "has a checkpoint; use --resume to go on" in refused.stderr
    done = run(*words, "--out", tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert [entry["step"] for entry in record["history"]] == list(range(20, 401, 20))


def test_two_ranks_leave_what_one_process_leaves(tmp_path):
    words = ["-m", "dpkernels", "train", "--steps", "6", "--seed", "3", "--epsilon", "20", "--json"]
    records = [
        json.loads(run(*words, "--ranks", ranks, "--out", tmp_path / ranks).stdout.strip().splitlines()[-1])
        for ranks in ("1", "2")
    ]
    assert [record["ranks"] for record in records] == [1, 2]
    assert records[0]["history"] == records[1]["history"]
    one, two = (torch.load(tmp_path / ranks / "model.pt") for ranks in ("1", "2"))
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    refused = run(*words, "--algorithm", "diff2", "--ranks", "4", "--out", tmp_path / "4")
    assert refused.returncode != 0
    assert "ranks: there are 4, must be at most as many as clients, 2" in refused.stderr


def test_control_c_ends_all_ranks_in_one_line(tmp_path):
    words = ["-m", "dpkernels", "train", "--steps", "10000", "--ranks", "2", "--out", tmp_path]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        for line in process.stderr:
            if "/10000" in line:
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        try:
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    lines = [line for line in told.splitlines() if not line.startswith("[")]  # but for progress
    assert len(lines) == 1
    assert lines[0].startswith("stopped; --resume goes on from what was saved last")


def test_audit(capsys):
    assert cli.main(["audit", "--canaries", "200"]) == 0
    assert "the claim stands" in capsys.readouterr().out
