"""The Triton kernels: run by Triton's interpreter against the reference, and compiled ahead of time for four GPUs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpkernels import gpu, ops, reference_layers, sums
from dpkernels.bench import gpu_kernels
from dpkernels.triton import configurations

HERE = Path(__file__).parent
# float32 sums of up to 300 addends in another order; what is in float64 throughout is held to more below
TOLERANCE, WIDE_TOLERANCE = 3e-6, 1e-14


@pytest.fixture(scope="session")
def errors():
    """The largest error of every case in the interpreter, which needs a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, HERE / "run_triton.py"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", gpu.triton_ops())
def test_every_op_in_the_interpreter(op, errors):
    mine = {case: worst for case, worst in errors.items() if case.startswith((f"{op}:", f"{op},"))}
    assert len(mine) >= 4
    half = mine.pop("outer_sum: bfloat16", 0.0)
    assert half < 1e-4  # of the largest number; held to its bound below
    assert max(mine.values()) < (WIDE_TOLERANCE if op == "outer_gram" else TOLERANCE)


def test_bfloat16_sums_are_within_what_the_clip_rule_knows(errors):
    """Over the sum of absolute products; float32 accumulates in another order, besides."""
    assert errors["split over its size"] < sums.SPLIT_UNIT / 2


def test_what_is_not_finite_in_the_interpreter(errors):
    assert errors["clamped, not finite"] < TOLERANCE
    assert errors["squares, not finite"] < TOLERANCE


KERNELS = list(gpu_kernels.triton_kernels())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_compiled_ahead_of_time(kernel, tmp_path_factory, monkeypatch):
    """For A100, H100, B200 and MI300: no spills, no TF32, shared memory within the limit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    for target in gpu_kernels.TARGETS:
        report = gpu_kernels.compile_triton(kernel, target)
        assert report.spills == 0, target
        assert not report.tf32, target
        assert 0 < report.shared <= target.shared, target
        assert report.occupancy >= 0.1, target
        if "gram" in kernel.name or "bf16" in kernel.name or target.backend == "hip":
            assert report.tensor_cores, target


def test_the_compiled_code_is_searched_for_tf32(monkeypatch, tmp_path):
    """A kernel that would use it, so that the test above can fail."""
    import triton
    import triton.language as tl

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")

    @triton.jit
    def rounds(x, SIDE: tl.constexpr):
        at = x + tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
        tile = tl.load(at)
        tl.store(at, tl.dot(tile, tile, input_precision="tf32"))

    kernel = gpu_kernels.Kernel("rounds", rounds, {"x": "*fp32"}, {"SIDE": 32}, {"num_warps": 4})
    assert gpu_kernels.compile_triton(kernel, gpu_kernels.TARGETS[0]).tf32


def test_every_configuration_is_compiled():
    tables = [configurations.ROWS, configurations.SUMS, configurations.GRAM, configurations.CLAMP]
    assert all(len(table) <= 3 for table in tables)
    chosen = {configurations.tile(table, h, w) for table in tables for h in (1, 20, 500) for w in (1, 20, 500)}
    assert chosen == {tile for table in tables for tile in table}


def test_registered_with_the_dispatcher():
    """Under the CUDA key, as where there is a GPU; each op has a schema that the function takes."""
    library = torch.library.Library("dpkernels", "IMPL")
    assert set(gpu.triton_ops()) <= set(ops.SCHEMAS)
    for name in gpu.triton_ops():
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"dpkernels::{name}", "CUDA")
    gpu._load_triton(library)
    try:
        assert gpu.has_tiles(torch.device("cuda"))
        assert not gpu.has_tiles(torch.device("cpu"))
        for name in gpu.triton_ops():
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dpkernels::{name}", "CUDA")
    finally:
        gpu._loaded.clear()
        library._destroy()


def test_every_op_has_a_gpu_kernel_or_a_reason():
    """What is in neither list below runs on the reference, on a GPU too: compositions of library calls."""
    launchers = (HERE.parent / "csrc" / "cuda" / "launchers.cu").read_text()
    in_cuda = set(re.findall(r'm\.impl\("(\w+)"', launchers))
    composed = {"conv_each", "conv_each_input", "unfilled", "copies", "layer_norm_rows", "group_norm_rows"}
    composed |= {"max_pool", "max_pool_input"}  # in the place of torch's on a CPU alone
    composed |= {"linear_runs", "gather_runs_", "masks", "add_gaussian_each_"}  # of many nodes that a CPU simulates
    composed |= {"dense_difference"}  # torch subtracts
    assert in_cuda | set(gpu.triton_ops()) | composed == set(ops.SCHEMAS)
    assert not in_cuda & set(gpu.triton_ops())


def test_the_reference_where_a_kernel_does_not_reach(monkeypatch):
    """float64, and samples whose elements 32 bits do not count: those in float64."""
    called = []

    def plain(a, g):
        called.append(a.dtype)
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(reference_layers, "outer_gram", plain)
    chosen = gpu.triton_ops()["outer_gram"]
    chosen(torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 3, dtype=torch.float64))
    wide = torch.empty(1, 2**16, 2**15 + 1, device="meta")
    assert not configurations.is_small(wide)
    chosen(wide, wide)
    assert called == [torch.float64] * 2


def test_strides_beyond_32_bits_are_copied():
    """Lines far apart in memory: what the kernel is given is not."""
    seen = []
    far = torch.empty(2, 2**16, 2**16, device="meta")[:, :, :3]
    assert not configurations.is_small(far)
    gpu._or_reference(_named("outer_gram", lambda a, g: seen.append(a.is_contiguous())))(far, far)
    assert seen == [True]


def _named(name, function):
    function.__name__ = name
    return function


def test_a_number_as_two_bfloat16_is_right_to_the_unit_the_clip_rule_knows():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(10**6), torch.randn(10**5) * 2.0**-60, torch.tensor([1.0, 2.0**20, 255 / 256])])
    high = x.bfloat16()
    low = (x - high.float()).bfloat16()
    error = (x.double() - high.double() - low.double()).abs()
    assert (error <= 2.0**-17 * x.double().abs()).all()
    assert sums.SPLIT_UNIT / 2 >= 2 * 2.0**-17
    assert sums.rounding(x) == sums.FLOAT_UNIT  # on a CPU, float32 throughout
    assert sums.rounding(x.bfloat16()) == sums.FLOAT_UNIT
