"""What only a GPU can show: that kernels load, launch, and give what the reference gives on the CPU."""

import copy
import os

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import dpkernels as dpk
from dpkernels import gpu, ops, reference, reference_layers
from dpkernels.algorithms import DPSGD
from dpkernels.bench.models import MODELS

STREAMS = {"philox": torch.tensor([123456789, 5]), "chacha20": torch.tensor([1, -2, 3, -4, 5])}
STD = torch.tensor(0.7, dtype=torch.float64)
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    return [moved(v, device) for v in value] if isinstance(value, list) else value


def close(found, wanted, tolerance=2e-6):
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance * 10, equal_nan=True)
    else:
        assert len(found) == len(wanted)
        for got, want in zip(found, wanted, strict=True):
            close(got, want, tolerance)


def test_the_kernels_are_loaded(device):
    if device.type == "cuda":
        assert ops.gpu_status["triton"].startswith("loaded")
        assert torch.version.hip or ops.gpu_status["cuda"] == "loaded"
        for name in gpu.triton_ops():
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dpkernels::{name}", "CUDA")
    elif "DPKERNELS_TEST_MODULE" in os.environ:
        assert ops.native is None
        assert torch._C._dispatch_has_kernel_for_dispatch_key("dpkernels::clip_sum", "CPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", STREAMS)
def test_clipped_sums(kind, stream, device):
    torch.manual_seed(0)
    now = [torch.randn(5, *shape).to(kind) for shape in [(3,), (70, 61), (1,), ()]]
    before = [torch.randn(t.shape).to(kind) for t in now]
    bounds = torch.tensor([2.0, 0.7, 0.3], dtype=torch.float64)
    one, each = torch.tensor([0.5], dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64)
    noise = STREAMS[stream], STD
    for name, arguments in {
        "clip_sum": (now, one, None, *noise),
        "clip_difference_sum": (now, before, each, 0.01, *noise),
        "clip_momentum_sum": (now, before, bounds, *noise),
        "clamp_sum": (now, one[0], *noise),
    }.items():
        lists = 2 if name in ("clip_difference_sum", "clip_momentum_sum") else 1
        there = [moved(a, device) for a in arguments[:lists]]
        close(getattr(torch.ops.dpkernels, name)(*there, *arguments[lists:]), getattr(reference, name)(*arguments))


def test_sums_of_nobody_and_of_what_is_not_finite(device):
    torch.manual_seed(0)
    one = torch.tensor([0.5], dtype=torch.float64)
    rows = [torch.randn(6, 700), torch.randn(6, 3)]
    rows[0][1, 650], rows[1][4, 0] = float("nan"), float("inf")
    for now in (rows, [t[:0] for t in rows], [t.T.contiguous().T for t in rows]):
        found, norms = torch.ops.dpkernels.clip_sum(moved(now, device), one, None, STREAMS["philox"], STD)
        wanted, true_norms = reference.clip_sum(now, one, None, STREAMS["philox"], STD)
        assert all(t.isfinite().all() for t in found)
        close(found, wanted)
        close(norms, true_norms)


@pytest.mark.parametrize("stream", [None, *STREAMS])
def test_stored_rows(stream, device):
    torch.manual_seed(0)
    rows = [torch.randn(5, 300), torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 300)]
    sums = [torch.randn(300), torch.randn(7, dtype=torch.float64), torch.randn(11)]
    weights = torch.rand(5, 3, dtype=torch.float64)
    noise = (None, None) if stream is None else (STREAMS[stream], STD)
    close(torch.ops.dpkernels.row_squares(moved(rows, device)), reference.row_squares(rows), 1e-12)
    there = moved(sums, device)
    filled, owner = [True, False, True], [0, 1, 0]
    torch.ops.dpkernels.weighted_sum_(there, filled, moved(rows, device), owner, weights.to(device), *noise, 0.5)
    reference.weighted_sum_(sums, filled, rows, owner, weights, *noise, 0.5)
    close(there, sums)


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_and_masks_are_those_of_the_cpu(stream, device):
    torch.manual_seed(0)
    tensors = [torch.randn(1000), torch.randn(7, 9, dtype=torch.float64)]
    there = moved(tensors, device)
    torch.ops.dpkernels.add_gaussian_(there, STREAMS[stream], STD)
    reference.add_gaussian_(tensors, STREAMS[stream], STD)
    close(there, tensors)
    for kind in (torch.float32, torch.float64):
        vector = torch.randn(100_000, dtype=kind)
        found = torch.ops.dpkernels.sparsify(vector.to(device), 0.2, torch.tensor([9]), STREAMS[stream], STD)
        wanted = reference.sparsify(vector, 0.2, torch.tensor([9]), STREAMS[stream], STD)
        assert torch.equal(found[1].cpu(), wanted[1])
        close(found[0], wanted[0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 5, 17, 33), (4, 300, 130, 70), (2, 1, 1024, 512)])
def test_outer_products(sizes, kind, device):
    torch.manual_seed(0)
    batch, length, width, height = sizes
    kind = kind if device.type == "cuda" else torch.float32
    a, g = torch.randn(batch, length, width).to(kind), torch.randn(batch, length, height).to(kind)
    wide = a.float(), g.float()
    there = a.to(device), g.to(device)
    call = torch.ops.dpkernels
    close(call.outer_gram(*there), reference_layers.outer_gram(a, g), 1e-12)
    found, squares = call.outer_rows(*there)
    close(found, reference_layers.outer_rows(*wide)[0], 1e-4)
    close(squares, found.cpu().double().square().sum((1, 2)), 1e-12)
    close(call.outer_squares(*there), reference_layers.outer_squares(*wide), 1e-4)
    weights = torch.rand(batch)
    close(call.outer_sum(*there, weights.to(device)), reference_layers.outer_sum(*wide, weights), 1e-3)
    sums, wanted = (torch.zeros(1, height, width, dtype=torch.float64) for _ in range(2))
    there_sums = sums.to(device)
    call.outer_clamp_sum_(there_sums, *there, None, 0.3)
    reference_layers.outer_clamp_sum_(wanted, *wide, None, 0.3)
    close(there_sums, wanted, 1e-4)


def test_lines_in_other_orders(device):
    """Time-major factors, and single lines of long sequences."""
    torch.manual_seed(0)
    a, g = torch.randn(7, 5, 6).transpose(0, 1), torch.randn(7, 5, 4).transpose(0, 1)
    weights = torch.rand(5)
    for x, y in ((a, g), (a[:, 3:4], g[:, 3:4])):
        found = torch.ops.dpkernels.outer_sum(x.to(device), y.to(device), weights.to(device))
        close(found, reference_layers.outer_sum(x, y, weights), 1e-5)
        close(torch.ops.dpkernels.outer_gram(x.to(device), y.to(device)), reference_layers.outer_gram(x, y), 1e-12)
    rows = torch.zeros(5, 4, 6)
    there = rows.to(device)
    torch.ops.dpkernels.outer_rows_(there, a.to(device), g.to(device), 0.5)
    reference_layers.outer_rows_(rows, a, g, 0.5)
    close(there, rows, 1e-5)
    y, x, low, high = torch.zeros(5, 2, 4), torch.randn(5, 2, 6), torch.randn(5, 3, 6), torch.randn(5, 3, 4)
    there = y.to(device)
    torch.ops.dpkernels.low_rank_(there, x.to(device), low.to(device), high.to(device))
    reference_layers.low_rank_(y, x, low, high)
    close(there, y, 1e-5)


def test_a_graph_cannot_be_captured(device):
    """Its replays would release the same noise again."""
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    x = torch.zeros(10, device=device)
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ops.dpkernels.add_gaussian_([x], STREAMS["philox"], STD)


def test_another_device_than_the_current_one(device):
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("there is no second GPU")
    test_outer_products((4, 300, 130, 70), torch.float32, torch.device("cuda:1"))
    test_clipped_sums(torch.float32, "philox", torch.device("cuda:1"))


def test_convolutions_and_lookups(device):
    torch.manual_seed(0)
    x, g = torch.randn(3, 4, 9, 8), torch.randn(3, 6, 7, 4)
    geometry = ([1, 2], [1, 0], [2, 1], 2)
    found = torch.ops.dpkernels.conv_rows(x.to(device), g.to(device), [3, 2], *geometry)
    close(found, reference_layers.conv_rows(x, g, [3, 2], *geometry), 1e-5)
    ids, lines = torch.randint(0, 9, (4, 200)), torch.randn(4, 200, 33)
    close(
        torch.ops.dpkernels.lookup_squares(ids.to(device), lines.to(device)),
        reference.lookup_squares(ids, lines),
        1e-12,
    )


@pytest.mark.parametrize("name", MODELS)
def test_models(name, device):
    """Clipped sums of whole models, those of the CPU."""
    torch.manual_seed(0)
    task = MODELS[name](4)
    rows = dpk.per_sample_gradients(task.model, task.loss_fn, task.inputs, task.targets)
    wanted = rows.clip_sum(0.1, noise=dpk.Gaussian(0.1, seed=3))
    model = copy.deepcopy(task.model).to(device)
    rows = dpk.per_sample_gradients(model, task.loss_fn, task.inputs.to(device), task.targets.to(device))
    found = rows.clip_sum(0.1, noise=dpk.Gaussian(0.1, seed=3))
    close(found.norms, wanted.norms, 1e-3)
    for key, value in wanted.sum.items():
        assert float((found.sum[key].cpu() - value).norm()) < 2e-3


def test_training(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda y, t: F.cross_entropy(y, t, reduction="none")  # noqa: E731
    training = DPSGD(
        model, loss, optimizer=optimizer, max_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, seed=0
    )
    for _ in range(3):
        training.step(torch.randn(8, 4, device=device), torch.randint(0, 2, (8,), device=device))
    assert all(p.isfinite().all() for p in model.parameters())


def test_compiled(device):
    """Over changing noise streams, compiled once."""
    if device.type == "cpu":
        pytest.skip("tests/test_ops.py has it for the CPU")
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True)
    def step(vectors, stream, std):
        bound = torch.ones(1, dtype=torch.float64)
        return torch.ops.dpkernels.clip_sum([vectors], bound, None, stream, std)[0][0] * 2

    x = torch.randn(5, 7, device=device)
    for release in range(3):
        step(x, torch.tensor([1, release]), STD)
    assert counter.frame_count == 1
