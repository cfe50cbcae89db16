"""The self-check: models that mix or misplace samples are refused, whatever the sizes, and sound ones pass once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels import self_check
from tests import truth
from tests.models import CLASSES, Function, labels

MIXING = {
    "centred": lambda h: h - h.mean(0),
    "centred_by_a_constant": lambda h: h - h.mean(0).detach(),
    "softmax_over_samples": lambda h: h.softmax(0),
    "neighbour": lambda h: h + h.roll(1, 0),
    "reversed": lambda h: h.flip(0),
    "largest": lambda h: h / h.abs().max(),
    "sample_attention": lambda h: torch.softmax(h @ h.t(), -1) @ h,
    "cumulative": lambda h: h.cumsum(0),
    "first": lambda h: h + h[:1],
    "faint": lambda h: h + 1e-8 * h.roll(1, 0),
    "shuffled": lambda h: h[torch.arange(len(h) - 1, -1, -1)],
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("batch", [2, 4, 6])
def test_mixing_samples_is_refused(name, batch):
    torch.manual_seed(0)
    model = Function(lambda m, x: m.head(MIXING[name](m.body(x))), body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"parameter body.weight in linear: .*(sample|gradient)"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(batch, 5), labels(batch))


def test_mixing_in_the_loss_is_refused():
    def contrastive(outputs, targets):
        return F.cross_entropy(outputs @ outputs.t(), torch.arange(len(outputs)), reduction="none")

    with pytest.raises(ValueError, match="weight"):
        dpk.per_sample_gradients(nn.Linear(5, 4), contrastive, torch.randn(6, 5), labels())


@pytest.mark.parametrize("length", [3, 5, 6, 7, 12])
def test_time_major_flattening_is_refused(length):
    """[T, B, E] flattened: lines of one sample are not consecutive. Shapes alone do not show it."""

    def forward(m, x):
        h = m.body(x.transpose(0, 1).reshape(-1, 5)).reshape(x.shape[1], x.shape[0], 4)
        return m.head(h.mean(0))

    model = Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"body\.weight"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, length, 5), labels())


@pytest.mark.parametrize("length", [2, 3, 4, 6, 8, 12])
def test_square_and_multiple_shapes_are_exact(length):
    """A position table [T, d] and a mask [T, T] of constants, with T equal to B and to multiples of it."""

    def forward(m, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() / x.shape[1]
        h = mask @ m.body(x) + m.table(torch.arange(x.shape[1])) * m.scale[: x.shape[1], None]
        return m.head(torch.tanh(h).mean(1))

    parts = {"body": nn.Linear(5, 4), "table": nn.Embedding(12, 4), "head": nn.Linear(4, CLASSES)}
    truth.check(
        Function(forward, **parts, scale=torch.randn(12)), truth.cross_entropy, torch.randn(6, length, 5), labels()
    )


def test_a_lost_gradient_is_refused():
    """A parameter whose gradient is dropped on the way that recording does not see."""
    from dpkernels.rules import RULES

    kept = RULES[F.linear]
    try:
        RULES[F.linear] = lambda tape, x, w, b=None: F.linear(x, w._value.detach(), b._value.detach()) + 0 * tape.anchor
        with pytest.raises(ValueError, match="not the ordinary gradient"):
            dpk.per_sample_gradients(nn.Linear(5, CLASSES), truth.cross_entropy, torch.randn(6, 5), labels())
    finally:
        RULES[F.linear] = kept


def test_checks_once_for_a_form_of_input(monkeypatch):
    checks = []
    real = self_check.check
    monkeypatch.setattr(self_check, "check", lambda *a: checks.append(1) or real(*a))
    model = Function(
        lambda m, x: m.head(F.dropout(m.body(x), 0.5, m.training).flatten(1)[:, :4]),
        body=nn.Linear(5, 4),
        head=nn.Linear(4, CLASSES),
    )
    for batch in (6, 1, 9, 0, 4):
        dpk.per_sample_gradients(model, lambda o, y: truth.cross_entropy(o, y), torch.randn(batch, 5), labels(batch))
    assert len(checks) == 1
    dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 2, 5), labels())
    assert len(checks) == 2
    dpk.per_sample_gradients(model.eval(), truth.cross_entropy, torch.randn(6, 5), labels())
    assert len(checks) == 3
    model.body.bias.requires_grad_(False)
    dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 5), labels())
    assert len(checks) == 4


def test_never_looks_at_data():
    """Inputs that would break the check (or be refused by it) are recorded: nothing raises because of values."""
    model = nn.Linear(5, CLASSES)
    x = torch.full((6, 5), float("nan"))
    rows = dpk.per_sample_gradients(model, truth.cross_entropy, x, labels())
    assert not rows.clip_sum(1.0).sum["weight"].any()


class Depth(nn.Module):
    """Stochastic depth: a coin for each sample."""

    def forward(self, x):
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5) / 0.5 if self.training else x


@pytest.mark.parametrize("layer", [Depth(), nn.Dropout(0.3), nn.AlphaDropout(0.3), nn.RReLU()])
def test_random_layers_are_held_still(layer):
    model = nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, CLASSES))
    rows = dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 5), labels())
    assert rows.norms().isfinite().all()


def test_models_that_want_particular_values():
    """Made-up inputs fail: real ones take their place."""

    def forward(m, x):
        if not bool((x >= 10).all()):
            raise RuntimeError("wants values from 10")
        return m.layer(x)

    truth.check(Function(forward, layer=nn.Linear(5, CLASSES)), truth.cross_entropy, 10 + torch.rand(6, 5), labels())
