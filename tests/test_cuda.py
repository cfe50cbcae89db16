"""The CUDA kernels: run by the emulation on a CPU, under sanitizers, and compiled by nvcc for three GPUs."""

import re
import shutil
import struct
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from dpkernels import reference, reference_noise
from dpkernels.build_cuda import build

CSRC = Path(__file__).parent.parent / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
BUILDS = {
    "plain": ["-O2"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"],
    "thread": ["-O1", "-fsanitize=thread"],
}
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The emulation, built once in each way."""
    folder = tmp_path_factory.mktemp("emulation")
    source = str(CSRC / "cuda" / "emulation" / "run.cpp")
    for name, flags in BUILDS.items():
        subprocess.run(["g++", "-std=c++17", "-g", *flags, *WARNINGS, source, "-o", str(folder / name)], check=True)
    return folder


@pytest.fixture
def emulate(programs, tmp_path):
    return lambda op, *arrays: run(programs / "plain", tmp_path, op, arrays)


def run(program, folder, op, arrays):
    """The arrays, as bytes, that a kernel makes of these."""
    with (folder / "in").open("wb") as file:
        for array in arrays:
            data = array.tobytes() if isinstance(array, np.ndarray) else to_bytes(array)
            file.write(struct.pack("q", len(data)) + data)
    subprocess.run([program, op, folder / "in", folder / "out"], check=True, capture_output=True, text=True)
    data, found = (folder / "out").read_bytes(), []
    while data:
        (size,) = struct.unpack("q", data[:8])
        found.append(data[8 : 8 + size])
        data = data[8 + size :]
    return found


def to_bytes(t):
    t = t.contiguous()
    return (t.view(torch.int16) if t.dtype in (torch.bfloat16, torch.float16) else t).numpy().tobytes()


def tensor(data, dtype):
    return torch.from_numpy(np.frombuffer(data, dtype).copy())


NONE = torch.tensor([], dtype=torch.int64)
PLAIN = torch.tensor([123456789, 5])
SECURE = torch.tensor([1, -2, 3, -4, 5])


@pytest.mark.parametrize("stream", [PLAIN, SECURE], ids=["philox", "chacha20"])
@pytest.mark.parametrize("sizes", [(1,), (64, 0, 63), (5, 700, 1, 1300), (130,)])
def test_noise_is_that_of_every_other_device(sizes, stream, emulate):
    torch.manual_seed(0)
    tensors = [torch.randn(n, dtype=torch.float64 if i % 2 else torch.float32) for i, n in enumerate(sizes)]
    found = weighted(emulate, tensors, [True] * len(sizes), [], [], torch.zeros(0, 1).double(), stream, 1.7, 0.25)
    wanted = reference_noise.add_noise([t.double() for t in tensors], stream, torch.tensor(1.7, dtype=torch.float64))
    for got, t, exact in zip(found, tensors, wanted, strict=True):
        assert got.shape == t.shape
        torch.testing.assert_close(got.double(), exact * 0.25, rtol=1e-6, atol=2e-6)
        if len(stream) == 5 and t.dtype == torch.float64:  # on the lattice, so exactly
            assert torch.equal(got, exact * 0.25)


def weighted(emulate, sums, filled, rows, owner, weights, stream, std, scale):
    """`weighted_sum_` by the emulated kernel: the sums it makes."""
    in_order = [row for i in range(len(sums)) for row, own in zip(rows, owner, strict=True) if own == i]
    of_sums = [v for i, s in enumerate(sums) for v in (s.dtype == torch.float64, filled[i], owner.count(i))]
    sizes = [len(weights) if rows else 0, weights.shape[1], len(sums), *of_sums, *(KINDS[r.dtype] for r in in_order)]
    inputs = [np.array(sizes, dtype=np.int64), np.array([std, scale]), stream, weights, *sums, *in_order]
    found = emulate("weighted", *inputs)
    return [tensor(data, s.numpy().dtype).view(s.shape) for data, s in zip(found, sums, strict=True)]


@pytest.mark.parametrize("stream", [NONE, PLAIN, SECURE], ids=["none", "philox", "chacha20"])
@pytest.mark.parametrize(("batch", "groups"), [(5, 1), (3, 3), (0, 1)])
def test_weighted_sums_of_several_rows(batch, groups, stream, emulate):
    """One sum of two lists of rows, one of none, one that holds something."""
    torch.manual_seed(0)
    sums = [torch.randn(70), torch.randn(3, 5, dtype=torch.float64), torch.randn(200)]
    shapes, owner, dtypes = [(70,), (200,), (70,)], [0, 2, 0], [torch.float32, torch.bfloat16, torch.float16]
    rows = [torch.randn(batch, *s).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    weights = torch.rand(batch, groups, dtype=torch.float64)
    weights[:1] = 0
    std = torch.tensor(0.5, dtype=torch.float64)
    filled = [False, True, True]
    found = weighted(emulate, sums, filled, rows, owner, weights, stream, 0.5, 3.0)
    reference.weighted_sum_(sums, filled, rows, owner, weights, stream if len(stream) else None, std, 3.0)
    for got, want in zip(found, sums, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("probability", [1.0, 0.2, 2.0**-9])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 5000])
def test_the_mask_is_the_same_bit_for_bit(size, probability, emulate):
    torch.manual_seed(0)
    x = torch.randn(size)
    indices, values = emulate("sparsify", np.array([77]), np.array([probability]), x)
    wanted = reference.sparsify(x, probability, torch.tensor([77]), None, None)
    assert torch.equal(tensor(indices, np.int64), wanted[1])
    assert torch.equal(tensor(values, np.float32), x[wanted[1]])


SHAPES = [(3, [5]), (1, [4096]), (4, [4097, 1, 700]), (2, [3] * 9), (0, [10]), (5, [300, 0, 20])]


RULES = {"flat": 1, "automatic": 2, "per layer": 1, "difference": 1, "one before": 1, "momentum": 3, "clamp": 4}
BOUNDS = torch.tensor([2.0, 0.7, 0.3], dtype=torch.float64)  # of momentum


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("batch", "lengths", "dtype"), [(*s, d) for s, d in zip(SHAPES, [*KINDS] * 2, strict=False)])
def test_clipped_sums(batch, lengths, dtype, rule, emulate):
    """Whole ops, their noise and their norms included, against the reference."""
    torch.manual_seed(0)
    now = [torch.randn(batch, n).to(dtype) for n in lengths]
    check_clipped(emulate, now, rule)


def check_clipped(emulate, now, rule):
    batch, lengths = len(now[0]), [t.shape[1] for t in now]
    before = []
    if rule in ("difference", "one before", "momentum"):
        nudge = 0.1 if rule == "momentum" else 1.0
        before = [(t[:1] if rule == "one before" and batch else t) for t in now]
        before = [(t.double() + nudge * torch.randn(t.shape)).to(t.dtype) for t in before]
    groups = len(lengths) if rule == "per layer" else 1
    max_norms = torch.linspace(0.5, 2, groups, dtype=torch.float64)
    sizes = [batch, groups, RULES[rule], *(v for t in now for v in (t.shape[1], KINDS[t.dtype], rule == "one before"))]
    limit = 0.4 if rule == "clamp" else -1.0
    numbers = np.concatenate([[0.01], BOUNDS.numpy(), [limit, 0.3], max_norms.numpy()])
    op = "momentum" if rule == "momentum" else "clipped"
    found = emulate(op, np.array(sizes, dtype=np.int64), numbers, PLAIN, *now, *before)
    norms, sums = tensor(found[0], np.float64), found[2:]
    noise = PLAIN, torch.tensor(0.3, dtype=torch.float64)
    stability = 0.01 if rule == "automatic" else None
    if rule == "momentum":
        wanted = reference.clip_momentum_sum(now, before, BOUNDS, *noise)
    elif rule == "clamp":
        wanted = reference.clamp_sum(now, torch.tensor(0.4, dtype=torch.float64), *noise)
    elif before:
        wide = [b.expand(batch, -1) for b in before]
        wanted = reference.clip_difference_sum(now, wide, max_norms, stability, *noise)
    else:
        wanted = reference.clip_sum(now, max_norms, stability, *noise)
    torch.testing.assert_close(norms.to(wanted[1].dtype), wanted[1], equal_nan=True)
    for data, want in zip(sums, wanted[0], strict=True):
        torch.testing.assert_close(tensor(data, want.numpy().dtype), want, rtol=1e-6, atol=2e-6)
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_not_finite_is_left_out(rule, emulate):
    now = [torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, float("inf")]]), torch.ones(3, 1)]
    coefficients = tensor(check_clipped(emulate, now, rule)[1], np.float64).view(3, -1)
    assert (coefficients[0] != 0).any()
    assert (coefficients[1:] == 0).all()


def test_the_bound_holds_in_exact_arithmetic(emulate):
    """Rows of one sample, clipped: never longer than the bound, in fractions."""
    torch.manual_seed(0)
    for scale in (1.0, 1e-150, 1e150):
        row = torch.randn(1, 50, dtype=torch.float64) * scale
        numbers = np.concatenate([[0.0] * 4, [-1.0, 0.0], [0.5 * scale]])
        sizes = np.array([1, 1, RULES["flat"], 50, KINDS[torch.float64], 0])
        c = Fraction(tensor(emulate("clipped", sizes, numbers, NONE, row)[1], np.float64).item())
        assert c * c * sum(Fraction(x) ** 2 for x in row[0].tolist()) <= Fraction(0.5 * scale) ** 2


@pytest.mark.parametrize(("batch", "length", "width"), [(3, 5, 4), (2, 130, 33), (1, 1, 1), (0, 4, 2), (2, 0, 3)])
def test_lookup_squares(batch, length, width, emulate):
    torch.manual_seed(0)
    ids, g = torch.randint(0, 7, (batch, length)), torch.randn(batch, length, width)
    (found,) = emulate("lookup", np.array([batch, length, width]), ids, g)
    torch.testing.assert_close(tensor(found, np.float64), reference.lookup_squares(ids, g), rtol=1e-13, atol=0)


@pytest.mark.parametrize("build", ["address", "thread"])
def test_under_sanitizers(build, programs, tmp_path):
    """Few threads and small tensors, with edges everywhere: a read beyond the end or a race is an error."""

    def checked(op, *arrays):
        return run(programs / build, tmp_path, op, arrays)

    test_noise_is_that_of_every_other_device((64, 0, 63), PLAIN, checked)
    test_noise_is_that_of_every_other_device((5, 70), SECURE, checked)
    test_the_mask_is_the_same_bit_for_bit(1100, 0.2, checked)
    test_weighted_sums_of_several_rows(5, 1, PLAIN, checked)
    test_clipped_sums(2, [300, 1], torch.bfloat16, "difference", checked)
    test_clipped_sums(3, [5, 70], torch.float32, "per layer", checked)
    test_clipped_sums(3, [5], torch.float16, "momentum", checked)
    test_lookup_squares(2, 70, 33, checked)


def failure(programs, tmp_path, build, op):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(programs / build, tmp_path, op, [np.zeros(64, dtype=np.float32)])
    return caught.value.stderr


def test_the_emulation_notices_what_is_wrong(programs, tmp_path):
    """Kernels broken on purpose: a race, a write beyond the end, a barrier that not all reach, unwritten memory."""
    assert "data race" in failure(programs, tmp_path, "thread", "race")
    assert "heap-buffer-overflow" in failure(programs, tmp_path, "address", "beyond")
    for name in BUILDS:
        assert "emulation: block (0, 0)" in failure(programs, tmp_path, name, "divergent")
        (out,) = run(programs / name, tmp_path, "unwritten", [np.zeros(64, dtype=np.float32)])
        assert tensor(out, np.float32).isnan().all()


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_compiles_and_links_the_module(gpu, tmp_path):
    """Without warnings, without spills, and with room for three blocks of 256 threads at once."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    report = build(tmp_path / "_cuda.so", [gpu], strict=True)
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert len(kernels) == len(set(kernels)) == 22
    assert re.findall(r"(\d+) bytes spill", report) == ["0"] * 2 * len(kernels)
    assert all(int(n) <= 80 for n in re.findall(r"Used (\d+) registers", report))
    assert (tmp_path / "_cuda.so").stat().st_size > 0
