"""conv_each and conv_each_input against autograd in float64, on every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from dpkernels import reference_layers
from tests.test_weight_rows import CONVOLUTIONS, convolution

OPS = torch.ops.dpkernels


def made(name, batch=3):
    """Images, weights for each, an output gradient, and the geometry."""
    torch.manual_seed(0)
    x, g, (kernel, *steps, groups) = convolution(name, batch)
    return x, torch.randn(batch, g.shape[1], x.shape[1] // groups, *kernel), g, (*steps, groups)


def by_autograd(x, w, g, stride, padding, dilation, groups):
    function = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    found = []
    for a, own, b in zip(x.double(), w.double(), g.double(), strict=True):
        a = a[None].requires_grad_()
        y = function(a, own, None, stride, padding, dilation, groups)
        found.append((y.detach(), torch.autograd.grad(y, a, b[None])[0]))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def both(source, x, w, g, steps):
    return [
        source.conv_each(x, w, list(g.shape[2:]), *steps),
        source.conv_each_input(g, w, list(x.shape[2:]), *steps),
    ]


def close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert ((a.double() - b).flatten(1).norm(dim=1) <= tolerance * b.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("isa")
def test_convolution(name):
    x, w, g, steps = made(name)
    close(both(OPS, x, w, g, steps), by_autograd(x, w, g, *steps), 1e-6)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("isa")
def test_a_weight_for_each_run_of_images(name):
    x, w, g, steps = made(name, batch=6)
    each = w[:2].repeat_interleave(3, 0)
    for source in (OPS, reference_layers):
        for got, wanted in zip(both(source, x, w[:2], g, steps), both(source, x, each, g, steps), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_reference(name):
    x, w, g, steps = made(name)
    close(both(reference_layers, x.double(), w.double(), g.double(), steps), by_autograd(x, w, g, *steps), 1e-13)


@pytest.mark.usefixtures("isa")
def test_other_strides_and_empty_batches():
    x, w, g, steps = made("wide")
    like = torch.channels_last
    own = w.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = both(OPS, x, w, g, steps)
    got = both(OPS, x.to(memory_format=like), own, g.to(memory_format=like), steps)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    nothing = both(OPS, x[:0], w[:0], g[:0], steps)
    assert [t.shape for t in nothing] == [g[:0].shape, x[:0].shape]


@pytest.mark.parametrize("name", ["wide", "groups", "strided", "3d"])
@pytest.mark.usefixtures("isa")
def test_bits_depend_neither_on_threads_nor_on_other_samples(name):
    x, w, g, steps = made(name, batch=9)
    whole = both(OPS, x, w, g, steps)
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(both(OPS, x, w, g, steps), whole, strict=True))
    assert all(torch.equal(a, b[8:]) for a, b in zip(both(OPS, x[8:], w[8:], g[8:], steps), whole, strict=True))
    w[:5] = torch.nan
    assert all(torch.equal(a[5:], b[5:]) for a, b in zip(both(OPS, x, w, g, steps), whole, strict=True))
