"""The GPU kernels compiled ahead of time, where there is no GPU: registers, shared memory and occupancy of each.

`python -m bench gpu_kernels` prints the table, for every Triton kernel in every configuration that the dispatcher can
choose and every CUDA kernel. Occupancy is calculated from the limits below, not measured; nothing here was ever run on
a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A GPU: what one of its processors (SM or CU) has."""

    name: str
    backend: str
    arch: int | str
    warp: int
    registers: int  # of 32 bits
    shared: int  # bytes a block may have
    shared_in_all: int
    threads: int


TARGETS = (
    Target("A100", "cuda", 80, 32, 65536, 166912, 167936, 2048),
    Target("H100", "cuda", 90, 32, 65536, 232448, 233472, 2048),
    Target("B200", "cuda", 100, 32, 65536, 232448, 233472, 2048),
    Target("MI300", "hip", "gfx942", 64, 131072, 65536, 65536, 2048),
)


@dataclass(frozen=True)
class Report:
    """What a compiler made of a kernel."""

    kernel: str
    target: str
    registers: int  # of a thread
    shared: int  # bytes of a block
    threads: int
    spills: int
    tf32: bool
    tensor_cores: bool
    occupancy: float  # threads that fit at once, of those that could


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with the types of its arguments and its constants."""

    name: str
    function: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]


def triton_kernels() -> Iterator[Kernel]:
    """Every kernel in every configuration; float32, and bfloat16 where it goes another way."""
    from dpkernels.triton import configurations, gram, low_rank, rows, sums

    def number(names: str, kind: str = "i32") -> dict[str, Any]:
        return dict.fromkeys(names.split(), kind)

    def sides(tile: Any) -> dict[str, Any]:
        return {"HEIGHT": tile.height, "WIDTH": tile.width, "DEPTH": tile.depth}

    for tile in configurations.GRAM:
        types = {"a": "*fp32", "g": "*fp32", "out": "*fp64", **number("length width height tiles a_b a_t g_b g_t")}
        constants = {"a_k": 1, "g_k": 1, "SIDE": tile.height, "DEPTH": tile.depth}
        yield Kernel(f"gram {tile.height}", gram.gram, types, constants, tile.options())
    matrix = {**number("x_b g_b g_t g_i"), "geometry": ("i32", "i32")}
    patches = {**matrix, "geometry": ("i32",) * 18}
    shape = number("length height width groups")
    for tile in configurations.ROWS:
        for conv, places in ((False, matrix), (True, patches)):
            word = f"{'patches' if conv else 'outer'} {tile.height}x{tile.width}"
            modes = [(rows.STORE, "*fp32"), (rows.ADD, "*fp32"), (rows.STORE, "*bf16")]
            for mode, kind in modes if conv else [*modes, (rows.DROP, "*fp32")]:
                types = {"x": kind, "g": kind, "out": "*fp32", "squares": "*fp64", "scale": "fp32", **shape, **places}
                constants = {"MODE": mode.value, "CONV": conv, "WIDE": kind == "*fp32", **sides(tile)}
                name = f"{('drop', 'store', 'add')[mode.value]} {word}{' bf16' if kind == '*bf16' else ''}"
                yield Kernel(name, rows.form, types, constants, tile.options())
    for tile in configurations.SUMS:
        for kind in ("*fp32", "*bf16"):
            types = {"a": kind, "g": kind, "weights": "*fp32", "out": "*fp32"}
            types |= number("addends length height width piece a_b a_t g_b g_t")
            constants = {"a_j": 1, "g_i": 1, "SPLIT": kind == "*bf16", "WIDE": False, **sides(tile)}
            name = f"sum {tile.height}x{tile.width}{' bf16' if kind == '*bf16' else ''}"
            yield Kernel(name, sums.weighted, types, constants, tile.options())
    for tile in configurations.CLAMP:
        for conv, places in ((False, matrix), (True, patches)):
            types = {"x": "*fp32", "g": "*fp32", "sums": "*fp64", "bound": "*fp64", "each": "i32", **shape, **places}
            name = f"clamp {'patches' if conv else 'outer'} {tile.height}x{tile.width}"
            yield Kernel(name, rows.clamp, types, {"CONV": conv, **sides(tile)}, tile.options())
    tile = configurations.LOW_RANK
    types = {**number("y x a g", "*fp32"), **number("length rank height width tiles y_b y_t x_b x_t a_b a_s g_b g_s")}
    constants = {**dict.fromkeys(("y_i", "x_j", "a_j", "g_i"), 1), **sides(tile)}
    yield Kernel("low rank", low_rank.low_rank, types, constants, tile.options())


def compile_triton(kernel: Kernel, target: Target) -> Report:
    """Compile one kernel for one GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    signature = {name: kernel.types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if str(signature[n]).startswith("*")}
    source = ASTSource(kernel.function, signature, {(names.index(n),): v for n, v in kernel.constants.items()}, aligned)
    made = triton.compile(
        source, target=GPUTarget(target.backend, target.arch, target.warp), options=dict(kernel.options)
    )
    threads = made.metadata.num_warps * target.warp
    if target.backend == "cuda":
        text = made.asm["ptx"]
        registers, spills = _resources(made.asm["cubin"])
    else:
        text = made.asm["amdgcn"]
        registers = int(_found(r"\.vgpr_count:\s+(\d+)", text))
        spills = int(_found(r"\.vgpr_spill_count:\s+(\d+)", text))
    shared = made.metadata.shared
    matrices = bool(re.search(r"\bmma\.sync|wgmma|tcgen05\.mma|v_mfma", text))
    tf32 = "tf32" in text or "xf32" in text
    return Report(
        kernel.name, target.name, registers, shared, threads, spills, tf32, matrices,
        occupancy(target, registers, shared, threads),
    )  # fmt: skip


def occupancy(target: Target, registers: int, shared: int, threads: int) -> float:
    """The part of a processor's threads that run at once, from registers (in 8s a thread) and shared memory."""
    by_registers = target.registers // (-(-registers // 8) * 8 * threads)
    by_shared = target.shared_in_all // (shared + 1024) if shared else by_registers
    return min(by_registers, by_shared, target.threads // threads) * threads / target.threads


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"the compiler's output has no {pattern}"
    return match.group(1)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, which is where spills go."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True)
    return int(_found(r"REG:(\d+)", done.stdout)), int(_found(r"STACK:(\d+)", done.stdout))


def triton_reports() -> Iterator[Report]:
    """All of them, one after the other."""
    for kernel in triton_kernels():
        for target in TARGETS:
            yield compile_triton(kernel, target)


def cuda_reports() -> Iterator[Report]:
    """Of the CUDA kernels, from nvcc; none where it is not installed."""
    from dpkernels.build_cuda import build

    if shutil.which("nvcc") is None:
        return
    for target in (t for t in TARGETS if t.backend == "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            text = build(Path(folder) / "_cuda.so", [f"sm_{target.arch}"])
        parts = text.split("Compiling entry function '")[1:]
        for part in parts:
            name = _demangled(part.split("'")[0])
            registers = int(_found(r"Used (\d+) registers", part))
            shared = int((re.search(r"(\d+) bytes smem", part) or [0, 0])[1])
            threads = 64 if name.endswith(", 1>") else 1024 if name == "add_up_counts" else 256
            spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
            fit = occupancy(target, registers, shared, threads)
            yield Report(name, target.name, registers, shared, threads, spills, False, False, fit)


def _demangled(name: str) -> str:
    done = subprocess.run(["c++filt", name], capture_output=True, text=True)
    plain = done.stdout.strip() or name
    plain = re.sub(r"\(dpk::cuda::Form\)(\d)", lambda m: ("single", "momentum")[int(m[1])], plain)
    return plain.split("(")[0].replace("void ", "").replace("dpk::cuda::", "")


def table(reports: list[Report]) -> str:
    """One line for each kernel, one column for each GPU: registers, shared bytes, occupancy."""
    names = [t.name for t in TARGETS]
    by_kernel: dict[str, dict[str, Report]] = {}
    for report in reports:
        by_kernel.setdefault(report.kernel, {})[report.target] = report
    lines = ["| kernel | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kernel, found in by_kernel.items():
        cells = [f"{r.registers}, {r.shared}, {r.occupancy:.0%}" if (r := found.get(name)) else "" for name in names]
        lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    print(
        f"Compiled by Triton and nvcc, torch {torch.__version__}: registers, shared bytes, occupancy by calculation.\n"
    )
    print(table([*triton_reports(), *cuda_reports()]))


if __name__ == "__main__":
    main()
