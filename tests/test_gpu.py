"""What can be tried here of what is for machines with a GPU: its tests on the CPU, its messages, its predictions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from dpkernels import build_cuda, gpu, ops, sums
from dpkernels.bench import roofline
from dpkernels.bench.models import MODELS
from dpkernels.factors import Matrix, Outer

ROOT = Path(__file__).parent.parent
HERE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-test")


def run(*words, **environment):
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_the_tests_for_a_gpu_pass_on_the_cpu():
    done = run("pytest", "tests/gpu/check_gpu.py", DPKERNELS_TEST_DEVICE="cpu")
    assert done.returncode == 0, done.stdout
    assert "3 skipped" in done.stdout  # torch.compile, graphs and a second device, which need a driver


def test_the_cuda_module_itself_passes_them_on_an_emulation_of_cuda(tmp_path):
    """Launchers, tables and kernels as one, with the CPU for a device; the rest of the library is the reference."""
    module = tmp_path / "emulated.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-x", "c++", str(build_cuda.SOURCE)]
    command += [word for path in include_paths() for word in ("-isystem", path)]
    command += [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch", "-ltorch_cpu", "-o", str(module)]
    subprocess.run(command, check=True)
    emulated = {"DPKERNELS_NATIVE": "0", "DPKERNELS_TEST_DEVICE": "cpu", "DPKERNELS_TEST_MODULE": str(module)}
    ran = "loaded or sums or stored or masks or lookups or training"
    done = run("pytest", "tests/gpu/check_gpu.py", "-k", ran, **emulated)
    assert done.returncode == 0, done.stdout
    assert "17 passed" in done.stdout


@HERE
@pytest.mark.parametrize("words", [("pytest", "tests/gpu/check_gpu.py"), ("bench", "gpu")], ids=["test", "bench"])
def test_without_a_gpu_they_say_so(words):
    done = run(*words)
    assert done.returncode == 3
    assert "torch sees no GPU here" in done.stdout + done.stderr


@HERE
def test_without_a_gpu_nothing_is_loaded():
    assert set(ops.gpu_status.values()) == {"not loaded: torch sees no GPU"}
    code = "import sys, dpkernels; assert 'triton' not in sys.modules and 'dpkernels.triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_is_not_there_or_does_not_load_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "CUDA_MODULE", tmp_path / "_cuda.so")
    assert "build_cuda" in gpu._load_cuda()
    (tmp_path / "_cuda.so").write_bytes(b"no module")
    assert gpu._load_cuda().startswith("not loadable")
    assert not gpu.has_tiles(torch.device("cuda"))


def test_without_nvcc_the_build_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build_cuda, "CUDA_HOME", None)
    with pytest.raises(RuntimeError, match="nvcc is not on the path"):
        build_cuda.build()


def test_sums_as_a_gpu_takes_them(monkeypatch):
    """The way of the engine that only a GPU goes, with the reference in place of the kernel."""
    torch.manual_seed(0)
    m = Matrix(3, 5, 4, outer=Outer(torch.randn(3, 2, 4), torch.randn(3, 2, 5)))
    weights = torch.rand(3, dtype=torch.float64)
    wanted = sums.product_sum(m, weights)
    monkeypatch.setattr(gpu, "takes", lambda *factors: True)
    found = sums.product_sum(m, weights)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_predictions(name):
    """A private step has every kernel of an ordinary one but the weight gradients, and costs more."""
    ordinary, private = roofline.steps(MODELS[name]())
    kept = [w for w in ordinary if w.name != "weight gradient"]
    assert all(w in private for w in kept)
    for a_gpu in roofline.GPUS:
        assert 1.0 < roofline.total(private, a_gpu) / roofline.total(ordinary, a_gpu) < 3.0


def test_a_product_is_limited_by_what_it_is_limited_by():
    a100 = roofline.GPUS[0]
    large, thin = roofline.product("large", 4096, 1, 4096, 4096), roofline.product("thin", 1, 1, 4096, 4096)
    assert large.arithmetic(a100) > large.traffic(a100)
    assert thin.arithmetic(a100) < thin.traffic(a100)
    assert large.seconds(a100) == pytest.approx(2 * 4096**3 / (0.8 * 19.5e12) + 3e-6)
