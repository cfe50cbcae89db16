"""For whoever has a GPU: `make gpu-test`. DPKERNELS_TEST_DEVICE=cpu runs the same tests without one, to try them.

DPKERNELS_TEST_MODULE is a module of kernels to load first: the CUDA ones, built to run on the CPU.
"""

import os

import pytest
import torch

import dpkernels  # noqa: F401  (defines the ops that a module has kernels for)

if "DPKERNELS_TEST_MODULE" in os.environ:
    torch.ops.load_library(os.environ["DPKERNELS_TEST_MODULE"])
DEVICE = os.environ.get("DPKERNELS_TEST_DEVICE", "cuda")


def pytest_sessionstart():
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit(
            "dpkernels: torch sees no GPU here, and these tests need one. All that can be checked without one is in "
            "`make test`: kernels in Triton's interpreter and in an emulation of CUDA, compiled for four GPUs.",
            returncode=3,
        )


@pytest.fixture(autouse=True)
def full_precision():
    """Convolutions of the library as they are on the CPU, not in TF32."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"


@pytest.fixture
def device():
    return torch.device(DEVICE)
