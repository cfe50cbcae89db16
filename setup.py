"""Builds the native module. Without a working C++ compiler the package installs all the same and runs on
`dpkernels.reference`; `dpkernels info` says which it is."""

import os
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths

SOURCES = ["csrc/bindings.cpp", *sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp"))]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

# -Wno-psabi: vectors wider than the baseline never cross a translation unit.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    # The stable ABI of torch 2.11: one build serves that release and later ones.
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]
if os.environ.get("DPKERNELS_WERROR"):
    FLAGS += ["-Werror", "-Wconversion", "-Wshadow"]
for path in (*include_paths(), pybind11.get_include()):
    FLAGS += ["-isystem", path]


class OptionalBuild(BuildExtension):
    """A build that may fail: then there is no native module, and a loud word about it."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except Exception as error:
            if os.environ.get("DPKERNELS_REQUIRE_NATIVE"):
                raise
            print(
                f"\ndpkernels: native kernels not built ({error}).\n"
                "dpkernels: the package will run on plain PyTorch, correct but slow.\n",
                file=sys.stderr,
            )
            self.extensions = []


native = Extension(
    "dpkernels._native",
    sources=SOURCES,
    depends=HEADERS,
    extra_compile_args=FLAGS,
    library_dirs=library_paths(),
    libraries=["c10", "torch", "torch_cpu"],
    language="c++",
)

setup(
    packages=[
        "dpkernels",
        "dpkernels.bench",
        "dpkernels.bench.ops",
        "dpkernels.opacus",
        "dpkernels.rules",
        "dpkernels.triton",
        "dpkernels.algorithms",
    ],
    package_dir={"dpkernels": "dpkernels", "dpkernels.algorithms": "algorithms", "dpkernels.bench": "bench"},
    package_data={"dpkernels": ["py.typed"]},
    ext_modules=[native],
    cmdclass={"build_ext": OptionalBuild},
)
