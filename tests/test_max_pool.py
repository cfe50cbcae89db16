"""max_pool and its backward against torch's own, bit for bit, on every instruction set; and its use in recording."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels import reference_layers
from dpkernels.rules import pooling

from .truth import loop


def images(*shape, ties=True):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(3)
    return x.round_().relu_() if ties else x


def both(x, g_seed=1, **arguments):
    """Output and input gradient, by torch and by ours."""
    found = []
    for pool in (F.max_pool2d, pooling.max_pool2d):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, **arguments)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(g_seed))
        found += [y.detach(), *torch.autograd.grad(y, leaf, g)]
    return found


WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 2, "stride": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 3), "padding": (1, 0)},
    {"kernel_size": (1, 5), "stride": (2, 2), "padding": (0, 2)},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
    {"kernel_size": [4], "stride": [1]},
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [(5, 5), (14, 14), (7, 33), (16, 40)])
@pytest.mark.usefixtures("isa")
def test_equals_torch_to_the_bit(window, size):
    y, dx, own_y, own_dx = both(images(2, 3, *size), **window)
    assert torch.equal(own_y, y)
    assert torch.equal(own_dx, dx)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.usefixtures("isa")
def test_what_is_not_finite_goes_where_torch_has_it(window):
    x = images(3, 2, 9, 10)
    x[0, 0, 2, 3] = x[0, 0, 2, 4] = float("nan")  # of several the last
    x[1] = -float("inf")  # nothing is larger: the first that is in the image
    x[2, 1, 4, 4] = float("inf")
    y, dx, own_y, own_dx = both(x, **window)
    assert torch.equal(own_y.nan_to_num(nan=1e9), y.nan_to_num(nan=1e9))
    assert torch.equal(own_y.isnan(), y.isnan())
    assert torch.equal(own_dx, dx)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_reference(window):
    x = images(2, 3, 9, 11)
    y = F.max_pool2d(x, **window)
    kernel, stride, padding = (
        pooling._pair(window.get(k, d)) for k, d in (("kernel_size", 1), ("stride", 1), ("padding", 0))
    )
    stride = stride if "stride" in window else kernel
    arguments = (kernel, stride, padding)
    own, where = torch.ops.dpkernels.max_pool(x, *arguments, list(y.shape[2:]))
    want, codes = reference_layers.max_pool(x, *arguments, list(y.shape[2:]))
    assert torch.equal(own, want)
    assert torch.equal(where, codes)
    g = images(*y.shape, ties=False)
    dx = torch.ops.dpkernels.max_pool_input(g, where, *arguments, [9, 11])
    torch.testing.assert_close(dx, reference_layers.max_pool_input(g, where, *arguments, [9, 11]))


def test_threads_do_not_change_a_bit():
    x = images(64, 8, 14, 14, ties=False)
    before = both(x, kernel_size=3, stride=1, padding=1)
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(before, both(x, kernel_size=3, stride=1, padding=1), strict=True))


def test_others_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(pooling.MaxPool, "apply", lambda *_: pytest.fail("ours"))
    x = images(2, 4, 8, 8)
    for t, arguments in [
        (x.double(), {}),
        (x.bfloat16(), {}),
        (x[0], {}),
        (x[:0], {}),
        (x.to(memory_format=torch.channels_last), {}),
        (x, {"dilation": 2}),
        (x, {"stride": 1 << 20}),
        (x, {"kernel_size": 8, "stride": 1, "dilation": 1, "return_indices": True}),
    ]:
        arguments = {"kernel_size": 2, **arguments}
        for a, b in zip(pooling.max_pool2d(t, **arguments), F.max_pool2d(t, **arguments), strict=True):
            assert torch.equal(a, b)
    monkeypatch.setattr(pooling, "MOST", 3)
    pooling.max_pool2d(x, 2)


@pytest.mark.parametrize("arguments", [{"kernel_size": 9}, {"kernel_size": 2, "padding": 2}, {"kernel_size": 0}])
def test_errors_are_torchs(arguments):
    with pytest.raises(RuntimeError) as theirs:
        F.max_pool2d(images(1, 1, 8, 8), **arguments)
    with pytest.raises(RuntimeError) as own:
        pooling.max_pool2d(images(1, 1, 8, 8), **arguments)
    assert str(own.value) == str(theirs.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 2, "stride": 0},
        {"kernel_size": (2, 2, 2)},
        {"kernel_size": 2, "padding": []},
        {"kernel_size": True},
    ],
)
def test_odd_arguments_are_refused_as_by_torch(arguments):
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        F.max_pool2d(images(1, 1, 8, 8), **arguments)
    with pytest.raises(type(theirs.value)):
        pooling.max_pool2d(images(1, 1, 8, 8), **arguments)


def test_numbers_of_numpy():
    x = images(2, 3, 8, 8)
    assert torch.equal(pooling.max_pool2d(x, np.int64(2), stride=()), F.max_pool2d(x, 2))


def test_second_derivatives_are_torchs():
    found = []
    for pool in (F.max_pool2d, pooling.max_pool2d):
        x = images(2, 3, 9, 8, ties=False).requires_grad_()
        (g,) = torch.autograd.grad(pool(x, 3, 2, 1).pow(3).sum(), x, create_graph=True)
        found += torch.autograd.grad(g.pow(2).sum(), x)
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0])


def test_transforms_and_subclasses_are_left_to_torch():
    class Own(torch.Tensor):
        pass

    x = images(2, 3, 8, 8, ties=False)
    pooled = lambda t: pooling.max_pool2d(t, 2)  # noqa: E731
    torchs = lambda t: F.max_pool2d(t, 2)  # noqa: E731
    assert torch.equal(torch.vmap(pooled)(x[:, None]), torch.vmap(torchs)(x[:, None]))
    slope = [torch.func.grad(lambda t, f=f: f(t).pow(2).sum())(x) for f in (pooled, torchs)]
    assert torch.equal(*slope)
    tangents = [torch.func.jvp(f, (x,), (torch.ones_like(x),))[1] for f in (pooled, torchs)]
    assert torch.equal(*tangents)
    assert isinstance(pooled(x.as_subclass(Own)), Own)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_recorded_model_pools_by_ours(in_place, monkeypatch):
    used = []
    apply = pooling.MaxPool.apply
    monkeypatch.setattr(pooling.MaxPool, "apply", lambda *a: used.append(a) or apply(*a))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2, 1), nn.ReLU(in_place), nn.Flatten(), nn.Linear(3 * 25, 4))
    x, y = images(5, 1, 8, 8, ties=False), torch.arange(5) % 4
    loss = nn.CrossEntropyLoss(reduction="none")
    rows = dpk.per_sample_gradients(model, loss, x, y).materialize()
    assert used
    truth = loop(model, loss, x, y)
    for name, row in rows.items():
        torch.testing.assert_close(row, truth[name], rtol=1e-5, atol=1e-6)
