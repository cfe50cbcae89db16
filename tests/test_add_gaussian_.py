import pytest
import torch

import dpkernels as dpk
from dpkernels import dense, reference
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equals_reference(dtype, isa):
    stream, std = cases.noise(std=2.5)
    shapes = [(3, 5), (1,), (0,), (70, 70), (10_000,)]
    got, true = cases.vectors(shapes, dtype), cases.vectors(shapes, dtype)
    torch.ops.dpkernels.add_gaussian_(got, stream, std)
    reference.add_gaussian_(true, stream, std)
    for a, b in zip(got, true, strict=True):
        assert a.dtype == dtype
        rounding = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 0)
        torch.testing.assert_close(a, b, rtol=rounding, atol=3e-5)


def test_elements_are_counted_over_the_list(isa):
    whole = torch.zeros(10_000)
    parts = [torch.zeros(1), torch.zeros(62), torch.zeros(7, 100), torch.zeros(9_237)]
    dpk.add_gaussian_(whole, dpk.Gaussian(1.0, seed=2))
    dpk.add_gaussian_(parts, dpk.Gaussian(1.0, seed=2))
    torch.testing.assert_close(torch.cat([p.flatten() for p in parts]), whole, rtol=0, atol=0)


def test_in_place_also_on_views_and_returned():
    base = torch.zeros(6, 8)
    view = base.T[::2]
    assert dpk.add_gaussian_(view, dpk.Gaussian(1.0)) is view
    assert base[:, ::2].ne(0).all()
    assert base[:, 1::2].eq(0).all()


def test_threads_do_not_change_a_bit(isa):
    cases.thread_invariant(lambda: [dpk.add_gaussian_(torch.zeros(300_000), dpk.Gaussian(1.0, seed=3))])


def test_to_autograd_it_is_the_identity():
    x = torch.ones(5, requires_grad=True)
    y = x * 2
    dpk.add_gaussian_(y, dpk.Gaussian(1.0))
    y.sum().backward()
    assert x.grad.eq(2).all()


def test_std_0_changes_nothing():
    x = cases.vectors([(500,)])[0]
    torch.testing.assert_close(dpk.add_gaussian_(x.clone(), dpk.Gaussian(0.0)), x, rtol=0, atol=0)


def test_a_backward_that_needs_the_overwritten_value_is_refused():
    e = torch.zeros(3, requires_grad=True).exp()
    dpk.add_gaussian_(e, dpk.Gaussian(1.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        e.sum().backward()


def test_a_tensor_given_twice_is_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="the same tensor is there twice"):
        dpk.add_gaussian_([x, x], dpk.Gaussian(1.0))
    assert x.eq(0).all()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_several_at_once_have_the_noise_that_each_would_have(dtype, secure):
    """Each from its own Gaussian, entered in its own ledger; a ledger that refuses lets none through."""
    counts, stds = [5, 0, 700, 1], [1.0, 2.0, 0.5, 3.0]
    x = torch.randn(sum(counts), dtype=dtype)
    ledgers = [dpk.accounting.Ledger() for _ in counts]
    noises = [
        dpk.Gaussian(s, None if secure else i, secure, own)
        for i, (s, own) in enumerate(zip(stds, ledgers, strict=True))
    ]
    streams, std = torch.stack([n._stream.clone() for n in noises]), torch.tensor(stds, dtype=torch.float64)
    got = dense.add_gaussian_each_(x.clone(), counts, noises, [1.0, 1.0, 2.0, 1.0])
    wanted = x.clone()
    for part, stream, s in zip(wanted.split(counts), streams, std, strict=True):
        torch.ops.dpkernels.add_gaussian_([part], stream, s)
    assert torch.equal(got, wanted)
    assert (got != x).all()
    again = x.clone()
    reference.add_gaussian_each_(again, torch.tensor(counts), streams, std)
    torch.testing.assert_close(again, got, rtol=0, atol=1e-4)
    assert [len(ledger) for ledger in ledgers] == [n.releases for n in noises] == [1] * 4
    ledgers[2].record = None  # cannot be entered
    with pytest.raises(TypeError):
        dense.add_gaussian_each_(again.copy_(x), counts, noises, [1.0] * 4)
    assert torch.equal(again, x)


@pytest.mark.parametrize("counts", [[4, 3], [4, 5], [9, -1], [8]])
def test_several_at_once_leave_none_without_noise(counts):
    """Nor write behind the last."""
    memory = torch.zeros(16)
    streams, stds = torch.tensor([[1, 0], [2, 0]]), torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"add_gaussian_each_|counts"):
        torch.ops.dpkernels.add_gaussian_each_(memory[:8], torch.tensor(counts), streams, stds)
    with pytest.raises(RuntimeError, match="add_gaussian_each_"):
        torch.ops.dpkernels.add_gaussian_each_(
            memory[:8], torch.tensor([4, 4]), torch.stack([streams, streams], 2)[..., 0], stds
        )
    assert not memory.any()
