import math

import pytest
import torch

import dpkernels as dpk
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shapes", cases.SHAPES)
def test_equals_reference(shapes, dtype, isa):
    cases.check("clamp_sum", [cases.vectors(cases.SHAPES[shapes], dtype)], cases.bounds(0.5))


def test_equals_clamp_and_sum():
    vectors = cases.vectors([(30, 50)])[0]
    torch.testing.assert_close(dpk.clamp_sum(vectors, 0.3).sum, vectors.clamp(-0.3, 0.3).sum(0))
    torch.testing.assert_close(dpk.clamp_sum(vectors, math.inf).sum, vectors.sum(0))
    assert dpk.clamp_sum(vectors, 0.0).sum.eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_counts_as_zero(bad, isa):
    vectors = cases.vectors([(6, 70)])[0]
    without = torch.cat([vectors[:3], vectors[4:]])
    vectors[3, 1] = bad
    torch.testing.assert_close(dpk.clamp_sum(vectors, 0.5).sum, dpk.clamp_sum(without, 0.5).sum)


def test_its_ledger_entry_has_the_norm_of_all_coordinates():
    ledger = dpk.accounting.Ledger()
    dpk.clamp_sum([torch.zeros(2, 10), torch.zeros(2, 3, 2)], 0.5, noise=dpk.Gaussian(4.0, ledger=ledger))
    assert ledger.epsilon(1e-5) == pytest.approx(
        dpk.accounting.epsilon(dpk.accounting.poisson_gaussian(4.0 / (0.5 * 4), 1.0), 1e-5)
    )
