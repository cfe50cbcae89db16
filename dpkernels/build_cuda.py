"""Builds the CUDA kernels: `python -m dpkernels.build_cuda [sm_80 ...]`, or `make gpu`, where nvcc is.

They are a module of their own, dpkernels/_cuda.so, that an install for CPUs never needs. nvcc compiles and links it
against torch's stable ABI; it is loaded where torch finds a GPU. Needs the sources, so an editable install or a clone.
Its loading is untested: those who wrote it have no GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.cpp_extension import CUDA_HOME, include_paths, library_paths

SOURCE = Path(__file__).parent.parent / "csrc" / "cuda" / "launchers.cu"
MODULE = Path(__file__).parent / "_cuda.so"
GPUS = ("sm_80", "sm_90", "sm_100")  # A100, H100, B200


def compiler() -> str:
    """nvcc, from the path or from where torch finds the CUDA toolkit."""
    found = shutil.which("nvcc") or (CUDA_HOME and shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")))
    if not found:
        raise RuntimeError("nvcc is not on the path: install the CUDA toolkit that your torch was built with")
    return str(found)


def known_gpus() -> list[str]:
    """Those of GPUS that this nvcc compiles for; older ones do not know the newest."""
    known = subprocess.run([compiler(), "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    return [gpu for gpu in GPUS if gpu in known]


def build(module: Path = MODULE, gpus: Sequence[str] = (), *, strict: bool = False) -> str:
    """Compile and link the module for these GPUs, all that are known unless given; what the compiler reports.

    `strict`: warnings are errors.
    """
    nvcc, gpus = compiler(), gpus or known_gpus()
    if not gpus:
        raise RuntimeError(f"nvcc knows none of {', '.join(GPUS)}, must know one: install a later CUDA toolkit")
    if not SOURCE.exists():
        raise RuntimeError(f"{SOURCE.name} is not there: build from a clone of the repository")
    command = [nvcc, "-std=c++17", "-O3", "-shared", *(("-Werror", "all-warnings") if strict else ()), "-Xptxas", "-v"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    for gpu in gpus:
        command += ["-gencode", f"arch={gpu.replace('sm', 'compute')},code={gpu}"]
    for path in include_paths():
        command += ["-isystem", path]
    for path in library_paths():
        command += ["-L", path]
    last = gpus[-1].replace("sm", "compute")
    command += ["-gencode", f"arch={last},code={last}"]  # for later GPUs, to be compiled when it is loaded
    # torch's CUDA library comes with libtorch, which nothing here names: the linker would leave it out
    command += [str(SOURCE), "-Xlinker", "--no-as-needed", "-lc10", "-ltorch", "-ltorch_cpu", "-o", str(module)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    if torch.version.hip:
        print("dpkernels: nothing to build for AMD, where all kernels are Triton's or the library's")
        sys.exit()
    try:
        chosen = sys.argv[1:] or known_gpus()
        build(gpus=chosen)
    except RuntimeError as error:
        sys.exit(f"dpkernels: {error}")
    print(f"built {MODULE.name} for {', '.join(chosen)}")
