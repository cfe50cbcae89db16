"""The CUDA kernels: run by the emulation on a CPU, under sanitizers, and compiled by nvcc for three GPUs."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from dpkernels import reference, reference_noise

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


PLAIN = torch.tensor([123456789, 5])
SECURE = torch.tensor([1, -2, 3, -4, 5])


@pytest.mark.parametrize("stream", [PLAIN, SECURE], ids=["philox", "chacha20"])
@pytest.mark.parametrize("sizes", [(1,), (64, 0, 63), (5, 700, 1, 1300), (130,)])
def test_noise_is_that_of_every_other_device(sizes, stream, emulate):
    torch.manual_seed(0)
    wide = [i % 2 for i in range(len(sizes))]
    tensors = [torch.randn(n, dtype=torch.float64 if w else torch.float32) for n, w in zip(sizes, wide, strict=True)]
    std, scale = 1.7, 0.25
    found = emulate("noise", stream, np.array([std, scale]), np.array(wide), *tensors)
    wanted = reference_noise.add_noise([t.double() for t in tensors], stream, torch.tensor(std, dtype=torch.float64))
    for data, t, exact in zip(found, tensors, wanted, strict=True):
        got = tensor(data, np.float64 if t.dtype == torch.float64 else np.float32)
        assert got.shape == t.shape
        torch.testing.assert_close(got.double(), exact * scale, rtol=1e-6, atol=2e-6)
        if len(stream) == 5 and t.dtype == torch.float64:  # on the lattice, so exactly
            assert torch.equal(got, exact * scale)


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


@pytest.mark.parametrize("kind", ["single", "difference", "one before", "clamp"])
@pytest.mark.parametrize(("batch", "lengths", "dtype"), [(*s, d) for s, d in zip(SHAPES, [*KINDS] * 2, strict=False)])
def test_squares_and_weighted_sums(batch, lengths, dtype, kind, emulate):
    torch.manual_seed(0)
    now = [torch.randn(batch, n).to(dtype) for n in lengths]
    before = []
    if kind in ("difference", "one before"):
        before = [torch.randn(*((batch, n) if kind == "difference" else (n,))).to(dtype) for n in lengths]
    groups = len(lengths) if kind == "difference" else 1
    weights = torch.rand(batch, groups, dtype=torch.float64)
    weights[:1] = 0
    limit = 0.5 if kind == "clamp" else -1.0
    sizes = [batch, groups, *(v for n in lengths for v in (n, KINDS[dtype], kind == "one before"))]
    numbers = np.concatenate([[limit], weights.flatten().numpy()])
    partial, sums = emulate("sums", np.array(sizes, dtype=np.int64), numbers, *now, *before)
    rows = [a.double() - (b.double() if before else 0) for a, b in zip(now, before or now, strict=True)]
    chunks = sum(-(-n // 4096) for n in lengths)
    squares = tensor(partial, np.float64).view(batch, chunks).sum(1)
    torch.testing.assert_close(squares, sum(r.square().sum(1) for r in rows), rtol=1e-13, atol=0)
    clamped = [r.clamp(-limit, limit) if limit >= 0 else r for r in rows]
    wanted = [weights[:, i % groups] @ r for i, r in enumerate(clamped)]
    torch.testing.assert_close(tensor(sums, np.float64), torch.cat(wanted), rtol=1e-12, atol=1e-12)


def test_a_sample_of_weight_zero_is_left_out_by_selection(emulate):
    x = torch.tensor([[float("nan"), float("inf")], [1.0, 2.0]])
    _, sums = emulate("sums", np.array([2, 1, 2, 0, 0]), np.array([-1.0, 0.0, 3.0]), x)
    assert tensor(sums, np.float64).tolist() == [3.0, 6.0]


@pytest.mark.parametrize("build", ["address", "thread"])
def test_under_sanitizers(build, programs, tmp_path):
    """Few threads and small tensors, with edges everywhere: a read beyond the end or a race is an error."""

    def checked(op, *arrays):
        return run(programs / build, tmp_path, op, arrays)

    test_noise_is_that_of_every_other_device((64, 0, 63), PLAIN, checked)
    test_noise_is_that_of_every_other_device((5, 70), SECURE, checked)
    test_the_mask_is_the_same_bit_for_bit(1100, 0.2, checked)
    test_squares_and_weighted_sums(2, [300, 1], torch.bfloat16, "difference", checked)
    test_squares_and_weighted_sums(3, [5], torch.float32, "clamp", checked)


def failure(programs, tmp_path, build, op):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(programs / build, tmp_path, op, [np.zeros(64, dtype=np.float32)])
    return caught.value.stderr


def test_the_emulation_notices_what_is_wrong(programs, tmp_path):
    """Kernels broken on purpose: a race, a write beyond the end, a barrier that not all reach, unwritten memory."""
    assert "data race" in failure(programs, tmp_path, "thread", "race")
    assert "heap-buffer-overflow" in failure(programs, tmp_path, "address", "beyond")
    for build in BUILDS:
        assert "emulation: block (0, 0)" in failure(programs, tmp_path, build, "divergent")
        (out,) = run(programs / build, tmp_path, "unwritten", [np.zeros(64, dtype=np.float32)])
        assert tensor(out, np.float32).isnan().all()


@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_compiles_without_warnings_and_without_spills(gpu, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on this machine")
    flags = ["-std=c++17", "-O3", f"-arch={gpu}", "-Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run(
        [nvcc, *flags, "-c", str(CSRC / "cuda" / "kernels.cu"), "-o", str(tmp_path / "kernels.o")],
        check=True,
        capture_output=True,
        text=True,
    )
    report = done.stdout + done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", report)
    assert len(kernels) == len(set(kernels)) == 8
    assert re.findall(r"(\d+) bytes spill", report) == ["0"] * 16
    assert all(int(n) <= 64 for n in re.findall(r"Used (\d+) registers", report))  # a block's 256 threads, four times
