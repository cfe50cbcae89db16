"""low_rank_ against float64, on every instruction set."""

import pytest
import torch

from dpkernels import forming

SIZES = [(3, 1, 4, 37, 50), (2, 3, 9, 64, 16), (5, 1, 1, 7, 1), (1, 2, 0, 5, 5), (0, 1, 3, 4, 4), (2, 9, 6, 33, 20)]


def made(batch, length, rank, width, height, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = ((length, height), (length, width), (rank, width), (rank, height))
    return [torch.randn(batch, *size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("isa")
def test_adds_the_products(sizes):
    y, x, a, g = made(*sizes)
    wide = [t.double() for t in (y, x, a, g)]
    wanted = wide[0] + (wide[1] @ wide[2].mT) @ wide[3]
    got = forming.low_rank(y, x, a, g)
    assert got.data_ptr() == y.data_ptr()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("isa")
def test_factors_of_which_more_are_to_come():
    """Views of memory for all steps; and a transposed input."""
    y, x, a, g = made(4, 2, 5, 40, 24)
    wanted = forming.low_rank(y.clone(), x, a, g)
    a_all, g_all = (torch.full((4, 11, n), torch.nan) for n in (40, 24))
    a_all[:, :5], g_all[:, :5] = a, g
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(forming.low_rank(y, turned, a_all[:, :5], g_all[:, :5]), wanted, rtol=0, atol=0)


@pytest.mark.usefixtures("isa")
def test_bits_depend_neither_on_threads_nor_on_other_samples():
    y, x, a, g = made(9, 1, 7, 300, 200)
    whole = forming.low_rank(y.clone(), x, a, g)
    torch.set_num_threads(1)
    assert torch.equal(forming.low_rank(y.clone(), x, a, g), whole)
    x[:4] = torch.inf
    assert torch.equal(forming.low_rank(y.clone(), x, a, g)[4:], whole[4:])


def test_half_types_are_corrected_in_float32():
    y, x, a, g = made(3, 1, 4, 37, 50)
    half = forming.low_rank(y.bfloat16(), x.bfloat16(), a, g)
    assert half.dtype == torch.bfloat16
    wanted = y.bfloat16().double() + (x.bfloat16().double() @ a.double().mT) @ g.double()
    assert ((half.double() - wanted).norm() <= 0.01 * wanted.norm()).all()
