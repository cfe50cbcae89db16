import os
import subprocess
import sys

import pytest

from dpkernels import cli, ops


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"{ops.native.active_isa()} kernels" in text


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


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_bad_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err
