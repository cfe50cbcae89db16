import os

# Some virtual machines advertise AMX and stop a process that uses it, as torch's bfloat16 products then do.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Several processes of two threads each share two cores: threads that wait must not keep one busy.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from dpkernels import ops

ISAS = ops.native.available_isas() if ops.native is not None else []


@pytest.fixture(autouse=True)
def poisoned_empty():
    """torch.empty, also inside the kernels, comes filled with NaN: an element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(params=ISAS)
def isa(request):
    """Each instruction set that this CPU has, in turn."""
    before = ops.native.active_isa()
    ops.native.use_isa(request.param)
    yield request.param
    ops.native.use_isa(before)
