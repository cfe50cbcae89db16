"""local_updates against its definition: a copy of the model for each sample, and plain SGD."""

import copy

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels import each, planner
from dpkernels.tape import RecordingError
from tests import truth
from tests.models import CLASSES, ZOO, B, Function, labels

HOLDS = [None, *planner.Hold]
MAIN = ["mlp", "cnn", "resnet20", "gpt", "lstm"]


def mlp():
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers), truth.cross_entropy, torch.randn(B, 5), labels()


def made(name, double=True):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = mlp() if name == "mlp" else ZOO[name]()
    return (
        (model.double(), loss_fn, *map(truth.as_double, (inputs, targets)))
        if double
        else (model, loss_fn, inputs, targets)
    )


def ours(model, loss_fn, inputs, targets, hold, **options):
    if hold is None:
        return dpk.local_updates(model, loss_fn, inputs, targets, **options)
    with planner.forced(hold):
        return dpk.local_updates(model, loss_fn, inputs, targets, **options)


def off(rows, wanted):
    """The largest error of a row, relative to its norm."""
    got, exact = truth.flat(rows), truth.flat(wanted)
    return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize(
    ("name", "steps"), [(name, k) for name in MAIN for k in ([2] if name == "resnet20" else [1, 2, 5, 12])]
)
def test_equals_copies_of_the_model(name, steps, hold):
    model, loss_fn, inputs, targets = made(name)
    wanted = truth.walk(model, loss_fn, inputs, targets, steps, 0.1)
    rows = ours(model, loss_fn, inputs, targets, hold, steps=steps, lr=0.1)
    assert off(rows.materialize(), wanted) < 1e-9
    torch.testing.assert_close(rows.norms(), truth.flat(wanted).norm(dim=1), rtol=1e-9, atol=0)
    clip = float(rows.norms().median())
    torch.testing.assert_close(
        truth.flat_sum(rows.clip_sum(clip).sum), truth.clipped_sum(wanted, clip), rtol=1e-9, atol=1e-9 * clip
    )


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("name", MAIN)
def test_in_float32_as_good_as_plain_float32(name, hold):
    model, loss_fn, inputs, targets = made(name, double=False)
    exact_model = copy.deepcopy(model).double()
    exact = truth.walk(exact_model, loss_fn, *map(truth.as_double, (inputs, targets)), 6, 0.1)
    plain = off(truth.walk(model, loss_fn, inputs, targets, 6, 0.1), exact)
    rows = ours(model, loss_fn, inputs, targets, hold, steps=6, lr=0.1)
    assert off(rows.materialize(), exact) <= max(2 * plain, 2e-5)


@pytest.mark.parametrize("hold", planner.Hold)
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(MAIN)))
def test_every_kind_of_model(name, hold):
    model, loss_fn, inputs, targets = made(name)
    wanted = truth.walk(model, loss_fn, inputs, targets, 4, 0.3)
    rows = ours(model, loss_fn, inputs, targets, hold, steps=4, lr=0.3)
    assert off(rows.materialize(), wanted) < 1e-9


@pytest.mark.parametrize("name", MAIN)
def test_one_step_is_exactly_the_gradient(name):
    model, loss_fn, inputs, targets = made(name, double=False)
    rows = dpk.local_updates(model, loss_fn, inputs, targets, steps=1, lr=0.3, max_bytes=10**6).materialize()
    wanted = -0.3 * dpk.per_sample_gradients(model, loss_fn, inputs, targets, max_bytes=10**6)
    for name, row in wanted.materialize().items():
        assert torch.equal(rows[name], row)


def straight_through(m, x):
    """A rounded weight with the gradient of a plain one, and the weight as a constant."""
    rounded = m.w + (m.w.round() - m.w).detach()
    return torch.tanh(x @ rounded.t()) * m.w.detach().sum().sigmoid() @ m.head


def without_gradient(m, x):
    """What a parameter does to samples where no gradient is taken."""
    with torch.no_grad():
        gate = torch.sigmoid(nn.functional.linear(x, m.w.exp()).mean(1, keepdim=True) + m.head.mean())
    return gate * (x @ m.w.t()) @ m.head


def late(m, x):
    """A second weight that is not used before the first is large enough."""
    y = x @ m.w.t()
    far = (y.detach().norm(dim=1, keepdim=True) > 1e-3).to(y.dtype)
    return (y * far) @ m.head


@pytest.mark.parametrize("hold", planner.Hold)
@pytest.mark.parametrize("function", [straight_through, without_gradient, late])
def test_values_that_carry_no_gradient(function, hold):
    torch.manual_seed(0)
    model = Function(function, w=torch.randn(4, 5), head=torch.randn(4, CLASSES)).double()
    inputs, targets = torch.randn(B, 5, dtype=torch.float64), labels()
    wanted = truth.walk(model, truth.cross_entropy, inputs, targets, 4, 0.3)
    rows = ours(model, truth.cross_entropy, inputs, targets, hold, steps=4, lr=0.3)
    assert off(rows.materialize(), wanted) < 1e-9


@pytest.mark.parametrize("name", MAIN)
def test_half_types(name):
    """As near to the truth as plain steps in bfloat16, or nearer."""
    model, loss_fn, inputs, targets = made(name, double=False)
    exact = truth.walk(copy.deepcopy(model).double(), loss_fn, *map(truth.as_double, (inputs, targets)), 3, 0.1)
    half = copy.deepcopy(model).bfloat16()
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    plain = off(truth.walk(half, loss_fn, inputs, targets, 3, 0.1), exact)
    for hold in planner.Hold:
        assert off(ours(half, loss_fn, inputs, targets, hold, steps=3, lr=0.1).materialize(), exact) <= 1.5 * plain


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm"])
def test_under_autocast(name):
    model, loss_fn, inputs, targets = made(name, double=False)
    exact = truth.walk(copy.deepcopy(model).double(), loss_fn, *map(truth.as_double, (inputs, targets)), 3, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = dpk.local_updates(model, loss_fn, inputs, targets, steps=3, lr=0.1)
    assert off(rows.materialize(), exact) < 0.06


def test_in_inference_mode():
    model, loss_fn, inputs, targets = made("cnn")
    wanted = truth.walk(model, loss_fn, inputs, targets, 3, 0.1)
    with torch.inference_mode():
        rows = dpk.local_updates(model, loss_fn, inputs.clone(), targets, steps=3, lr=0.1)
        assert off(rows.materialize(), wanted) < 1e-9


def test_dropout_draws_anew_in_each_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, CLASSES))
    x, y = torch.randn(B, 50), labels()
    torch.manual_seed(1)
    rows = dpk.local_updates(model, truth.cross_entropy, x, y, steps=3, lr=0.1)
    (part,) = rows.parts["1.weight"]
    assert part.matrix.length == 3  # inputs of the three steps differ
    model.eval()
    (part,) = dpk.local_updates(model, truth.cross_entropy, x, y, steps=3, lr=0.1).parts["1.weight"]
    assert part.matrix.length == 1


def test_first_layers_do_not_grow():
    model, loss_fn, inputs, targets = made("mlp")
    rows = ours(model, loss_fn, inputs, targets, planner.Hold.FACTORS, steps=7, lr=0.1)
    assert [rows.parts[f"{i}.weight"][0].matrix.length for i in (0, 2, 4)] == [1, 7, 7]
    model, loss_fn, inputs, targets = made("gpt")
    rows = ours(model, loss_fn, inputs, targets, planner.Hold.FACTORS, steps=3, lr=0.1)
    tokens = rows.parts["tokens.weight"][0].matrix
    assert (tokens.rows.g.shape[1], tokens.outer.g.shape[1]) == (7, 21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_that_cancel_keep_the_clip_bound(dtype):
    """A loss whose gradient turns around at each step: the way is long, the end is near the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 1, bias=False)).to(dtype)
    with torch.no_grad():
        model[1].weight.fill_(1.0)
    model[1].weight.requires_grad_(False)
    x = torch.randn(B, 20, dtype=dtype)
    curvature = 30 * x.square().sum(1)
    loss = lambda out, c: 0.5 * c * (out.squeeze(1) - 1).square()  # noqa: E731
    for scale in (1, 1 - 1e-3, 1 - 1e-6):
        targets = 2 * scale / curvature / 0.1
        for hold in planner.Hold:
            rows = ours(model, loss, x, targets, hold, steps=8, lr=0.1)
            exact = truth.flat(rows.materialize())
            clip = float(exact.norm(dim=1).min()) / 10
            for i in range(B):
                alone = ours(model, loss, x[i : i + 1], targets[i : i + 1], hold, steps=8, lr=0.1)
                total = truth.flat_sum(alone.clip_sum(clip, dtype=torch.float64).sum)
                assert 0.97 * clip <= float(total.norm()) <= clip * (1 + 1e-12)


def test_a_sample_that_overflows_stays_alone():
    model, loss_fn, inputs, targets = made("mlp", double=False)
    inputs[2] = 1e30
    rows = dpk.local_updates(model, loss_fn, inputs, targets, steps=5, lr=0.1)
    keep = torch.arange(B) != 2
    others = dpk.local_updates(model, loss_fn, inputs[keep], targets[keep], steps=5, lr=0.1)
    total, wanted = (truth.flat_sum(r.clip_sum(0.1).sum) for r in (rows, others))
    assert bool(total.isfinite().all())
    assert float((total - wanted).norm()) <= 0.1 + 1e-5


def test_empty_batch_and_bad_arguments():
    model, loss_fn, inputs, targets = made("mlp")
    assert dpk.local_updates(model, loss_fn, inputs[:0], targets[:0], steps=3, lr=0.1).batch_size == 0
    for options, words in [
        ({"steps": 0, "lr": 0.1}, "steps: got 0, must be a whole number >= 1"),
        ({"steps": 2.5, "lr": 0.1}, "steps: got 2.5"),
        ({"steps": 2, "lr": -1.0}, "lr: got -1.0"),
        ({"steps": 2, "lr": float("nan")}, "lr: got nan"),
        ({"steps": 2, "lr": 0.1, "max_bytes": -1}, "max_bytes: got -1"),
    ]:
        with pytest.raises(ValueError, match=words):
            dpk.local_updates(model, loss_fn, inputs, targets, **options)


def test_the_model_is_left_as_it_was():
    model, loss_fn, inputs, targets = made("gpt")
    before = copy.deepcopy(model.state_dict())
    dpk.local_updates(model, loss_fn, inputs, targets, steps=3, lr=0.1)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_room_decides():
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False)
    x, y = torch.randn(2, 64, 256), torch.zeros(2)
    loss = lambda out, _: out.square().mean((1, 2))  # noqa: E731
    small, large = (
        dpk.local_updates(model, loss, x, y, steps=2, lr=0.1, max_bytes=n).parts["weight"][0].matrix for n in (0, 10**9)
    )
    assert small.outer is not None
    assert large.outer is None


def test_the_check_sees_a_layer_that_forgets_samples_own_weights(monkeypatch):
    model, loss_fn, inputs, targets = made("mlp", double=False)
    dpk.per_sample_gradients(model, loss_fn, inputs, targets)  # nothing is wrong with the gradients
    monkeypatch.setattr(each.Each, "linear", lambda self, x: (nn.functional.linear(x, self.shared), None))
    with pytest.raises(RecordingError, match=r"0\.weight in linear: after a step of its own, a sample's row is not"):
        dpk.local_updates(model, loss_fn, inputs, targets, steps=3, lr=0.1)
