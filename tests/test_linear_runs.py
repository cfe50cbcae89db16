"""Products of lines with the weights of their run, against plain torch."""

import pytest
import torch

from dpkernels import reference_layers

OPS = torch.ops.dpkernels


@pytest.mark.parametrize(
    ("runs", "lines", "width", "height"),
    [(3, 7, 300, 10), (1, 1, 1, 1), (2, 4, 16, 4), (5, 13, 63, 7), (2, 0, 8, 3), (4, 9, 500, 1), (1, 33, 257, 22)],
)
@pytest.mark.usefixtures("isa")
def test_equals_reference(runs, lines, width, height):
    x, w = torch.randn(runs, lines, width), torch.randn(runs, height, width)
    y, faults = OPS.linear_runs(x, w)
    true, sound = reference_layers.linear_runs(x.double(), w.double())
    torch.testing.assert_close(y.double(), true, rtol=0, atol=2e-6 * width**0.5)
    assert (faults == 0).all()
    assert (sound == 0).all()
    apart = OPS.linear_runs(x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([w, w], 2)[:, :, :width])
    assert torch.equal(apart[0], y)  # strides change nothing


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.usefixtures("isa")
def test_lines_that_are_not_finite_are_noted(fault):
    for width in (1, 16, 45, 300):
        x, w = torch.randn(2, 9, width), torch.randn(2, 3, width)
        x[0, 0, :] = 3e38  # finite, and its square is not
        for place in (0, width // 2, width - 1):
            for source in (OPS, reference_layers):
                bad = x.clone()
                bad[1, 4, place] = fault
                faults = source.linear_runs(bad, w)[1]
                assert faults.isnan().nonzero().tolist() == [[1, 4]]
                assert (faults.nan_to_num(0) == 0).all()


@pytest.mark.usefixtures("isa")
def test_a_line_has_the_same_bits_wherever_it_is():
    x, w = torch.randn(1, 50, 333), torch.randn(1, 11, 333)
    y = OPS.linear_runs(x, w)[0]
    for first in (1, 2, 3, 17, 49):
        assert torch.equal(OPS.linear_runs(x[:, first:], w)[0], y[:, first:])
    torch.set_num_threads(1)
    assert torch.equal(OPS.linear_runs(x, w)[0], y)
