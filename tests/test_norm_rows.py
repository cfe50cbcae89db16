"""layer_norm_rows and group_norm_rows against autograd in float64, on every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from dpkernels import reference_layers

OPS = torch.ops.dpkernels


def rows_of(normalise, x, g, w):
    """Input gradient and rows of scale and shift, sample by sample; w may have a scale for each."""
    found = []
    for i, (a, b) in enumerate(zip(x.double(), g.double(), strict=True)):
        a = a[None].requires_grad_()
        own = w[i] if w is not None and w.dim() == 2 else w
        scale = (torch.ones(w_size(x, w), dtype=torch.float64) if w is None else own.double()).requires_grad_()
        shift = torch.zeros_like(scale, requires_grad=True)
        found.append(torch.autograd.grad(normalise(a, scale, shift), (a, scale, shift), b[None]))
    return [torch.cat([f[0] for f in found]), *(torch.stack([f[i] for f in found]) for i in (1, 2))]


def w_size(x, w):
    return x.shape[2] if w is None else len(w)


def check(got, want, g, needed):
    """To rounding of what is added up: the normalised input is of size one, but for an epsilon of a thousandth."""
    size = 30 * g.double().flatten(1).norm(dim=1)
    for a, b in zip(got if needed else got[1:], want if needed else want[1:], strict=True):
        assert ((a.double() - b).flatten(1).norm(dim=1) <= 3e-7 * size).all()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("sizes", [(3, 7, 33), (2, 1, 5), (1, 4, 16), (5, 3, 256), (4, 2, 1)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.usefixtures("isa")
def test_layer_norm(sizes, weighted, needed):
    x, g = 3 + torch.randn(sizes), torch.randn(sizes)
    w = torch.randn(sizes[2]) if weighted else None
    want = rows_of(lambda a, s, b: F.layer_norm(a, sizes[2:], s, b, 1e-3), x, g, w)
    check(OPS.layer_norm_rows(x, g, w, 1e-3, needed), want, g, needed)


@pytest.mark.parametrize("sizes", [(3, 6, 37), (2, 4, 1), (1, 8, 16), (5, 2, 100)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.usefixtures("isa")
def test_group_norm(sizes, groups, needed):
    x, g, w = 3 + torch.randn(sizes), torch.randn(sizes), torch.randn(sizes[1])
    want = rows_of(lambda a, s, b: F.group_norm(a, groups, s, b, 1e-3), x, g, w)
    check(OPS.group_norm_rows(x, g, w, groups, 1e-3, needed), want, g, needed)


@pytest.mark.usefixtures("isa")
def test_samples_with_scales_of_their_own():
    x, g, w = 3 + torch.randn(3, 4, 33), torch.randn(3, 4, 33), torch.randn(3, 33)
    want = rows_of(lambda a, s, b: F.layer_norm(a, (33,), s, b, 1e-3), x, g, w)
    check(OPS.layer_norm_rows(x, g, w, 1e-3, True), want, g, True)
    w = torch.randn(3, 4)
    want = rows_of(lambda a, s, b: F.group_norm(a, 2, s, b, 1e-3), x, g, w)
    check(OPS.group_norm_rows(x, g, w, 2, 1e-3, True), want, g, True)
    for rows, at in ((reference_layers.layer_norm_rows, 33), (reference_layers.group_norm_rows, 4)):
        own, options = torch.randn(3, at), (2, 1e-3, True) if at == 4 else (1e-3, True)
        for i in range(3):
            together, alone = rows(x, g, own, *options), rows(x[i : i + 1], g[i : i + 1], own[i], *options)
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[i], b[0])


def test_an_input_far_from_zero():
    """Mean a thousand times the deviation: the normalised input must not be a difference of large numbers."""
    x, g, w = 1000 + torch.randn(3, 4, 64), torch.randn(3, 4, 64), torch.randn(4)
    want = rows_of(lambda a, s, b: F.group_norm(a, 2, s, b, 1e-5), x, g, w)
    for a, b in zip(OPS.group_norm_rows(x, g, w, 2, 1e-5, True), want, strict=True):
        assert ((a.double() - b).norm() <= 1e-3 * b.norm()).all()
