"""Products of matrices by the faster library: what they are, and when."""

import pytest
import torch
import torch.nn.functional as F

import dpkernels as dpk
from dpkernels import products
from dpkernels.opacus.module import PrivateModule

CLASSES = 64


@pytest.fixture
def every_size(monkeypatch):
    """oneDNN for all sizes, on any CPU."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "SMALL", 0)
    monkeypatch.setattr(products, "_onednn", lambda: torch.ops.mkldnn._linear_pointwise)


SHAPES = {
    "plain": lambda: (torch.randn(33, 70), torch.randn(50, 70)),
    "sequences": lambda: (torch.randn(4, 7, 70), torch.randn(50, 70)),
    "transposed weight": lambda: (torch.randn(33, 70), torch.randn(70, 50).t()),
    "transposed lines": lambda: (torch.randn(70, 33).t(), torch.randn(50, 70)),
    "every other": lambda: (torch.randn(33, 140)[:, ::2], torch.randn(50, 70)),
    "one line for all": lambda: (torch.randn(1, 70).expand(33, 70), torch.randn(50, 70)),
    "one number for all": lambda: (torch.ones(()).expand(33, 70), torch.randn(50, 70)),
    "no line": lambda: (torch.randn(0, 70), torch.randn(50, 70)),
    "one column": lambda: (torch.randn(33, 1), torch.randn(50, 1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shapes", SHAPES)
def test_is_the_product(shapes, bias, every_size):
    x, w = SHAPES[shapes]()
    b = torch.randn(len(w)) if bias else None
    assert products.is_faster(x, w, b) == (x.numel() > 0)
    found, truth = products.linear(x, w, b), F.linear(x.double(), w.double(), None if b is None else b.double())
    plain = F.linear(x, w, b)
    assert found.shape == plain.shape
    assert found.dtype == torch.float32
    size = (x.double().abs() @ w.double().abs().T).clamp(min=1)
    assert bool(((found.double() - truth).abs() <= 2.0**-22 * (size + 1) * max(1, x.shape[-1] ** 0.5)).all())


def test_a_line_that_is_not_finite_stays_alone(every_size):
    x, w = torch.randn(9, 70), torch.randn(50, 70)
    x[2, 3], x[5, 1] = float("nan"), float("inf")
    assert products.linear(x, w).isfinite().all(1).tolist() == [i not in (2, 5) for i in range(9)]


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.randn(9, 5).double(), torch.randn(3, 5).double()),
        (torch.randn(9, 5).bfloat16(), torch.randn(3, 5).bfloat16()),
        (torch.randn(9, 5), torch.randn(3, 5).double()),
        (torch.randn(9, 4), torch.randn(3, 5)),
        (torch.randn(9, 5).to("meta"), torch.randn(3, 5).to("meta")),
    ],
)
def test_other_operands_are_left_to_torch(x, w, every_size):
    assert not products.is_faster(x, w)


def test_whoever_allows_coarser_products_or_autocast_is_left_to_torch(every_size, monkeypatch):
    x, w = torch.randn(9, 5), torch.randn(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert not products.is_faster(x, w)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert not products.is_faster(x, w)
    finally:
        torch._C._set_mkldnn_enabled(True)
    monkeypatch.setattr(products, "full_precision", lambda device: False)
    assert not products.is_faster(x, w)


@pytest.mark.parametrize("bias", [torch.randn(6)[::2], torch.randn(1).expand(3), torch.randn(3).double()])
def test_a_bias_that_does_not_lie_in_order_is_left_to_torch(bias, every_size):
    assert not products.is_faster(torch.randn(9, 5), torch.randn(3, 5), bias)


def test_a_weight_that_lies_on_itself_is_left_to_torch(every_size):
    assert not products.is_faster(torch.randn(9, 5), torch.randn(9).unfold(0, 5, 1))
    assert not products.is_faster(torch.randn(9, 5), torch.randn(5))


def test_a_weight_that_changed_since_forward_is_refused_as_torch_does(every_size):
    """As in loops of two losses, where an optimizer steps between a forward and its backward."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
    private = PrivateModule(model, loss_reduction="mean", max_bytes=None, physical_batch_size=None).train()
    outputs = private(torch.randn(8, 16))
    with torch.no_grad():
        model[2].weight.mul_(5)
    with pytest.raises(RuntimeError, match="modified in place"):
        outputs.square().sum(1).mean().backward()


def test_frozen_weights_do_not_hold_what_the_model_writes_into(every_size):
    class BitFit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.v, self.w = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
            self.w.weight.requires_grad_(False)

        def forward(self, x):
            h = self.v(x)
            h.add_(self.w(h))
            return h

    def loss(outputs, targets):
        return (outputs - targets).square().sum(1)

    model, x, y = BitFit(), torch.randn(5, 20), torch.randn(5, 20)
    rows = dpk.per_sample_gradients(model, loss, x, y).materialize()
    for i in range(5):
        wanted = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), (model.v.weight, model.w.bias))
        for row, g in zip((rows["v.weight"][i], rows["w.bias"][i]), wanted, strict=True):
            torch.testing.assert_close(row, g, rtol=1e-4, atol=1e-5)


def test_the_check_runs_large_products_ways_on_its_few_samples(monkeypatch):
    """What is wrong with them alone is refused, not found by a large batch."""
    monkeypatch.setattr(products, "_onednn", lambda: lambda x, w, b, *_: F.linear(x, w, b) + x.mean())
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
    with pytest.raises(ValueError, match="row"):
        dpk.per_sample_gradients(model, _loss, torch.randn(8, 16), torch.randint(0, CLASSES, (8,)))


def test_small_products_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(products, "_onednn", lambda: torch.ops.mkldnn._linear_pointwise)
    assert not products.is_faster(torch.randn(8, 64), torch.randn(64, 64))


def _loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(1)[:, :CLASSES], targets, reduction="none")


@pytest.mark.parametrize("length", [None, 5])
def test_rows_and_sums_of_a_network_are_those_of_torch(length, every_size, monkeypatch):
    """In one process, with and without; the first layer's input has no gradient, the second's is written into."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (torch.nn.Linear(a, b) for a, b in ((40, 48), (48, 40), (40, CLASSES)))

        def forward(self, x):
            y = F.relu(self.first(x), inplace=True)
            return self.last(F.gelu(self.second(y)) + x)

    torch.manual_seed(0)
    model, shape = Network(), (6, 40) if length is None else (6, length, 40)
    x, y = torch.randn(shape), torch.randint(0, CLASSES, (6,))
    found = dpk.per_sample_gradients(model, _loss, x, y)
    rows, total = found.materialize(), found.clip_sum(0.3).sum
    wide = Network().double()
    wide.load_state_dict(model.state_dict())
    truth = dpk.per_sample_gradients(wide, _loss, x.double(), y)
    for name, row in truth.materialize().items():
        assert float((rows[name] - row).norm()) <= 1e-5 * float(row.norm())
    for name, s in truth.clip_sum(0.3).sum.items():
        assert float((total[name] - s).norm()) <= 1e-5 * float(s.norm())


def test_a_frozen_weight_and_a_bias_alone(every_size):
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, CLASSES))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    x, y = torch.randn(5, 20), torch.randint(0, CLASSES, (5,))
    rows = dpk.per_sample_gradients(model, _loss, x, y).materialize()
    assert set(rows) == {"0.bias", "2.weight"}
    for i in range(5):
        grads = torch.autograd.grad(_loss(model(x[i : i + 1]), y[i : i + 1]).sum(), (model[0].bias, model[2].weight))
        for row, g in zip((rows["0.bias"][i], rows["2.weight"][i]), grads, strict=True):
            torch.testing.assert_close(row, g, rtol=1e-4, atol=1e-6)
