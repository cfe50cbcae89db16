"""outer_rows, outer_squares, outer_gram and conv_rows against float64, on every instruction set."""

import pytest
import torch

import dpkernels as dpk
from dpkernels import ops, reference_layers

OPS = torch.ops.dpkernels
OUTER = [(3, 7, 5, 3), (2, 300, 50, 33), (5, 1, 16, 8), (1, 9, 1, 1), (2, 513, 97, 9), (4, 3, 48, 64), (0, 3, 4, 5)]
# channels, outputs, groups, sizes, kernel, stride, padding, dilation
CONVOLUTIONS = {
    "plain": (3, 5, 1, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    "wide": (16, 24, 1, (7, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    "strided": (4, 9, 1, (11, 10), (4, 3), (3, 2), (0, 1), (1, 1)),
    "dilated": (2, 8, 1, (12, 13), (3, 2), (1, 2), (2, 0), (2, 3)),
    "groups": (6, 9, 3, (6, 5), (2, 3), (1, 1), (0, 2), (1, 1)),
    "depthwise": (5, 10, 5, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    "one_tap": (7, 3, 1, (4, 4), (1, 1), (2, 2), (0, 0), (1, 1)),
    "many_places": (1, 2, 1, (70, 65), (2, 2), (1, 1), (0, 0), (1, 1)),
    "1d": (3, 6, 1, (40,), (5,), (2,), (2,), (1,)),
    "3d": (2, 5, 1, (5, 6, 4), (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
    "unused_edge": (2, 3, 1, (8, 8), (2, 2), (3, 3), (0, 0), (1, 1)),
}


def convolution(name, batch=3, seed=0):
    channels, outputs, groups, sizes, kernel, stride, padding, dilation = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, *sizes, generator=generator)
    places = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)
    ]
    g = torch.randn(batch, outputs, *places, generator=generator)
    return x, g, (kernel, stride, padding, dilation, groups)


def by_autograd(x, g, kernel, stride, padding, dilation, groups):
    """Each sample's weight gradient by torch, in float64."""
    function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(kernel) - 1]
    rows = []
    for a, b in zip(x.double(), g.double(), strict=True):
        w = torch.zeros(g.shape[1], x.shape[1] // groups, *kernel, dtype=torch.float64, requires_grad=True)
        y = function(a[None], w, None, stride, padding, dilation, groups)
        rows.append(torch.autograd.grad(y, w, b[None])[0])
    return torch.stack(rows)


def close(rows, squares, exact):
    size = exact.flatten(1).norm(dim=1)
    assert ((rows.double() - exact).flatten(1).norm(dim=1) <= 1e-6 * size).all()
    torch.testing.assert_close(squares, rows.double().flatten(1).square().sum(1), rtol=1e-13, atol=0)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("sizes", OUTER)
@pytest.mark.usefixtures("isa")
def test_outer(sizes):
    batch, length, width, height = sizes
    a, g = torch.randn(batch, length, width), torch.randn(batch, length, height)
    rows, squares = OPS.outer_rows(a, g)
    close(rows, squares, g.double().transpose(1, 2) @ a.double())
    assert torch.equal(OPS.outer_squares(a, g), squares)
    by_gram, sizes = OPS.outer_gram(a, g)
    wanted = reference_layers.outer_gram(a, g)
    torch.testing.assert_close(sizes, wanted[1], rtol=1e-13, atol=0)
    assert ((by_gram - wanted[0]).abs() <= 1e-14 * sizes.square()).all()


@pytest.mark.usefixtures("isa")
def test_outer_in_other_strides():
    a, g = torch.randn(6, 3, 20).transpose(0, 1), torch.randn(9, 6, 3).permute(2, 1, 0)
    rows, squares = OPS.outer_rows(a, g)
    close(rows, squares, g.double().transpose(1, 2) @ a.double())


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("isa")
def test_convolution(name):
    x, g, options = convolution(name)
    rows, squares = OPS.conv_rows(x, g, *options)
    close(rows, squares, by_autograd(x, g, *options))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_reference_of_the_convolution(name):
    x, g, options = convolution(name)
    rows, squares = reference_layers.conv_rows(x.double(), g.double(), *options)
    close(rows, squares, by_autograd(x, g, *options))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("isa")
def test_convolution_onto_weights(name):
    x, g, (kernel, *steps) = convolution(name)
    start = torch.randn(len(x), g.shape[1], x.shape[1] // steps[-1], *kernel)
    weights = start.clone()
    OPS.conv_rows_(weights, x, g, -0.3, *steps)
    wanted = start - 0.3 * by_autograd(x, g, kernel, *steps)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("sizes", OUTER)
@pytest.mark.usefixtures("isa")
def test_outer_onto_weights(sizes):
    batch, length, width, height = sizes
    a, g, start = torch.randn(batch, length, width), torch.randn(batch, length, height), torch.randn(height, width)
    weights = OPS.copies(start, batch)
    assert torch.equal(weights, start.expand(batch, -1, -1))
    OPS.outer_rows_(weights, a, g, -0.3)
    wanted = start - 0.3 * (g.double().transpose(1, 2) @ a.double())
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-4)


def check_clamped(got, rows, bound):
    """Sums over two runs of float64 rows; coordinates whose rounding decides about the clamp are off by as little."""
    wanted = rows.clamp(-bound, bound).unflatten(0, (2, -1)).sum(1) + 1
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6 * len(rows) * float(rows.abs().max()))


@pytest.mark.parametrize("bound", [0.0, 0.7, 1e3])
@pytest.mark.parametrize("sizes", [(4, *sizes[1:]) for sizes in OUTER])
@pytest.mark.usefixtures("isa")
def test_clamped_sums_of_outer_products(sizes, bound):
    batch, length, width, height = sizes
    a, g = torch.randn(batch, length, width), torch.randn(batch, length, height)
    whole = torch.ones(2, height * width + 3, dtype=torch.float64)
    sums = whole[:, 1:-2].view(2, height, width)
    OPS.outer_clamp_sum_(sums, a, g, None, bound)
    check_clamped(sums, g.double().transpose(1, 2) @ a.double(), bound)
    assert (whole[:, [0, -2, -1]] == 1).all()
    again = torch.ones_like(sums)
    reference_layers.outer_clamp_sum_(again, a.double(), g.double(), None, bound)
    check_clamped(again, g.double().transpose(1, 2) @ a.double(), bound)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.usefixtures("isa")
def test_samples_that_are_not_live_are_left_out_of_clamped_sums(length):
    """Whatever is in them; and none may be."""
    a, g = torch.randn(12, length, 37), torch.randn(12, length, 11)
    live = torch.tensor([True, False, True, True] * 2 + [False] * 4)
    a[1, 0, 0], g[5, 0, 3], a[8:] = float("nan"), float("inf"), float("nan")
    for source, dtype in ((OPS, torch.float32), (reference_layers, torch.float64)):
        sums = torch.ones(3, 11, 37, dtype=torch.float64)
        source.outer_clamp_sum_(sums, a.to(dtype), g.to(dtype), live, 0.4)
        rows = (g.double().transpose(1, 2) @ a.double())[live].clamp(-0.4, 0.4)
        torch.testing.assert_close(sums[:2], 1 + rows.view(2, 3, 11, 37).sum(1), rtol=0, atol=1e-5)
        assert (sums[2] == 1).all()


@pytest.mark.parametrize("height", range(1, 13))
@pytest.mark.parametrize("width", [1, 7, 8, 31, 33, 100])
@pytest.mark.usefixtures("isa")
def test_clamped_sums_of_single_products_are_exact(height, width):
    """A product of two float32 is one float64."""
    a, g = torch.randn(6, 1, width), torch.randn(6, 1, height)
    sums = torch.zeros(1, height, width, dtype=torch.float64)
    OPS.outer_clamp_sum_(sums, a, g, None, 0.3)
    wanted = (g.double().transpose(1, 2) * a.double()).clamp(-0.3, 0.3).sum(0, keepdim=True)
    torch.testing.assert_close(sums, wanted, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.usefixtures("isa")
def test_clamped_sums_of_convolutions(name):
    x, g, (kernel, *steps) = convolution(name, batch=4)
    rows = by_autograd(x, g, kernel, *steps)
    bound = float(rows.abs().median())
    for source, dtype in ((OPS, torch.float32), (reference_layers, torch.float64)):
        sums = torch.ones(2, *rows.shape[1:], dtype=torch.float64)
        source.conv_clamp_sum_(sums, x.to(dtype), g.to(dtype), bound, *steps)
        check_clamped(sums, rows, bound)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.usefixtures("isa")
def test_a_clamped_coordinate_is_never_beyond_its_bound(length):
    """Also where the bound is no float32, and where products overflow."""
    bound = 0.1
    assert float(torch.tensor(bound)) > bound
    a, g = torch.full((1, length, 37), 3e38), torch.full((1, length, 5), 1e30)
    g[:, :, ::2] *= -1
    a[:, :, 3] = 0.1 / length
    g[:, :, 4] = 1.0
    sums = torch.zeros(1, 5, 37, dtype=torch.float64)
    OPS.outer_clamp_sum_(sums, a, g, None, bound)
    assert float(sums.abs().max()) <= bound
    assert float(sums.abs().min()) > bound * (1 - 1e-6)


@pytest.mark.parametrize("name", ["wide", "groups", "3d"])
@pytest.mark.usefixtures("isa")
def test_a_clamped_coordinate_of_a_convolution_is_never_beyond_its_bound(name):
    x, g, (kernel, *steps) = convolution(name, batch=1)
    sums = torch.zeros(1, g.shape[1], x.shape[1] // steps[-1], *kernel, dtype=torch.float64)
    OPS.conv_clamp_sum_(sums, 1e6 * x, g, 0.1, *steps)
    assert float(sums.abs().max()) <= 0.1
    assert float(sums.abs().max()) > 0.1 * (1 - 1e-6)


@pytest.mark.usefixtures("isa")
def test_clamped_sums_have_the_same_bits_for_any_number_of_threads():
    x, g, (_, *steps) = convolution("wide", batch=9)
    a, b = torch.randn(9, 1, 60), torch.randn(9, 1, 21)
    found = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        sums = [torch.zeros(3, 24, 16, 3, 3).double(), torch.zeros(3, 21, 60).double()]
        OPS.conv_clamp_sum_(sums[0], x, g, 0.5, *steps)
        OPS.outer_clamp_sum_(sums[1], a, b, None, 0.5)
        found.append(sums)
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


@pytest.mark.usefixtures("isa")
def test_channels_last_input():
    x, g, options = convolution("wide")
    apart = OPS.conv_rows(x.to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last), *options)
    assert torch.equal(apart[0], OPS.conv_rows(x, g, *options)[0])


@pytest.mark.parametrize("name", ["wide", "groups", "3d"])
@pytest.mark.usefixtures("isa")
def test_bits_depend_neither_on_threads_nor_on_other_samples(name):
    x, g, options = convolution(name, batch=9)
    a, b = torch.randn(9, 300, 60), torch.randn(9, 300, 21)
    whole = [*OPS.conv_rows(x, g, *options), *OPS.outer_rows(a, b)]
    torch.set_num_threads(1)
    for again, first in zip([*OPS.conv_rows(x, g, *options), *OPS.outer_rows(a, b)], whole, strict=True):
        assert torch.equal(again, first)
    part = slice(5, 9)
    x[:5], a[:5] = torch.nan, torch.inf
    for alone, first in zip([*OPS.conv_rows(x, g, *options), *OPS.outer_rows(a, b)][::2], whole[::2], strict=True):
        assert torch.equal(alone[part], first[part])
        assert alone[:5].isnan().any() or alone[:5].isinf().any()
    for alone, first in zip(
        [*OPS.conv_rows(x[8:], g[8:], *options), *OPS.outer_rows(a[8:], b[8:])], whole, strict=True
    ):
        assert torch.equal(alone[0], first[8])


def test_memory_of_rows_is_used_again():
    a, g = torch.randn(4, 3, 700), torch.randn(4, 3, 500)
    first = OPS.outer_rows(a, g)[0]
    place, kept = first.data_ptr(), first.clone()
    second = OPS.outer_rows(a, g)[0]
    assert second.data_ptr() != place, "two tensors in one place"
    del first
    third = OPS.outer_rows(a[:3], g[:3])[0]
    assert third.data_ptr() == place
    assert torch.equal(second, kept)
    assert torch.equal(third, kept[:3])
    del second, third
    assert ops.native.pool_bytes() >= kept.nbytes
    dpk.empty_pool()
    assert ops.native.pool_bytes() == 0
    assert torch.equal(OPS.outer_rows(a, g)[0], kept)
