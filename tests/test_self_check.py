"""The self-check: models that mix or misplace samples are refused, whatever the sizes, and sound ones pass once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels import self_check
from tests import truth
from tests.models import CLASSES, B, Function, labels

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
    with pytest.raises(ValueError, match=r"(parameter (body|head)\.weight|loss_fn).*(sample|gradient)"):
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


UNSEEN = {
    "first": lambda x: x - x[:1],
    "cumulative": lambda x: x.cumsum(0),
    "previous": lambda x: x - torch.cat([x[:1], x[:-1]]),
    "place": lambda x: x + torch.arange(len(x))[:, None],
    "largest": lambda x: x / x.abs().max(),
    "centred": lambda x: x - x.mean(0),
    "centred_logarithm": lambda x: x.log() - x.log().mean(0),
    "sorted_by_column": lambda x: torch.take_along_dim(x, x.argsort(0), 0),
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("width", [2, 5, 9])
def test_mixing_of_inputs_has_no_gradient_to_show_it(name, width):
    model = Function(lambda m, x: m.layer(UNSEEN[name](x)), layer=nn.Linear(width, CLASSES))
    with pytest.raises(ValueError, match="layer"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.rand(6, width), labels())


def test_made_up_values_that_prove_nothing():
    """A loss that is zero, or NaN, on made-up values; a first batch of one sample for a model that wants its own."""
    layer = nn.Linear(5, CLASSES)
    far = lambda o, y: torch.where(y > 5, o - o.mean(0), 0.0 * o).square().sum(1)  # noqa: E731
    with pytest.raises(ValueError, match="weight"):
        dpk.per_sample_gradients(layer, far, torch.randn(6, 5), torch.full((6, 1), 9))
    with pytest.raises(ValueError, match="cannot be checked"):
        dpk.per_sample_gradients(layer, lambda o, y: o.sum(1) * float("nan"), torch.randn(6, 5), labels())

    def picky(m, x):
        if bool((x < 10).any()):
            raise RuntimeError("wants values from 10")
        return m.layer(x / x.max())

    with pytest.raises(ValueError, match="layer"):
        dpk.per_sample_gradients(Function(picky, layer=layer), truth.cross_entropy, 10 + torch.rand(1, 5), labels(1))


def test_parameters_that_start_at_zero_hide_nothing():
    def forward(m, x):
        return m.head(x) + m.gate * (m.side(x) - m.side(x).mean(0))

    model = Function(forward, head=nn.Linear(5, CLASSES), side=nn.Linear(5, CLASSES), gate=torch.zeros(CLASSES))
    with pytest.raises(ValueError, match=r"side|gate"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 5), labels())


SIZES_BY_CHANCE = {
    "copies_for_steps": lambda m, x: m.head((m.body(x) + m.token.expand(x.shape[1], -1)).tanh().mean(1)),
    "repeats_for_steps": lambda m, x: m.head((m.body(x) * m.token.repeat(x.shape[1], 1)).tanh().mean(1)),
    "copies_of_its_own": lambda m, x: m.head((m.body(x) + m.token.expand(4, -1).sum(0)).tanh().mean(1)),
    "copies_by_three": lambda m, x: m.head((m.body(x) + m.token.expand(3, -1).sum(0)).tanh().mean(1)),
    "positions_time_major": lambda m, x: m.head(
        (m.body(x).transpose(0, 1) + m.steps[: x.shape[1], None]).tanh().mean(0)
    ),
    "copies_for_samples": lambda m, x: m.head((m.body(x) + m.token.expand(len(x), -1)[:, None]).tanh().mean(1)),
}


@pytest.mark.parametrize("name", SIZES_BY_CHANCE)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_sizes_that_happen_to_equal_the_batch(name, batch):
    torch.manual_seed(0)
    parts = {
        "body": nn.Linear(5, 4),
        "head": nn.Linear(4, CLASSES),
        "token": torch.randn(1, 4),
        "steps": torch.randn(9, 4),
    }
    model = Function(SIZES_BY_CHANCE[name], **parts)
    truth.check(model, truth.cross_entropy, torch.randn(batch, 4, 5), labels(batch))


def test_a_changed_model_or_loss_is_checked_again():
    layer, x, y = nn.Linear(5, CLASSES), torch.randn(6, 5), labels()
    settings = {"mixed": False}

    def loss(o, y, *, mixed=False):
        return truth.cross_entropy(o - o.mean(0) if mixed or settings["mixed"] else o, y)

    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.layer, self.last = False, nn.Linear(5, CLASSES), nn.Identity()

        def forward(self, x):
            return self.last(self.layer(x - x.mean(0) if self.mixed else x))

    dpk.per_sample_gradients(layer, loss, x, y)
    settings["mixed"] = True
    with pytest.raises(ValueError, match="weight"):
        dpk.per_sample_gradients(layer, loss, x, y)
    changes = [
        lambda m: setattr(m, "mixed", True),
        lambda m: setattr(m, "last", nn.Softmax(0)),
        lambda m: m.layer.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(0),)),
        lambda m: setattr(m.layer, "forward", lambda x: F.linear(x - x.mean(0), m.layer.weight)),
    ]
    for change in changes:
        model = Switch()
        dpk.per_sample_gradients(model, truth.cross_entropy, x, y)
        change(model)
        with pytest.raises(ValueError, match="weight"):
            dpk.per_sample_gradients(model, truth.cross_entropy, x, y)


def test_losses_made_anew_are_not_checked_anew(monkeypatch):
    checks = []
    real = self_check.check
    monkeypatch.setattr(self_check, "check", lambda *a: checks.append(1) or real(*a))
    model, x, y = nn.Linear(5, CLASSES), torch.randn(6, 5), labels()
    for step in range(3):
        loss = nn.CrossEntropyLoss(reduction="none")
        dpk.per_sample_gradients(model, loss, x, y)
        dpk.per_sample_gradients(model, lambda o, y, s=step: truth.cross_entropy(o, y) / (1 + s), x, y)
    assert len(checks) == 2


def test_a_check_leaves_frozen_weights_and_attributes_alone():
    def forward(m, x):
        m.teacher.weight.data.mul_(0.9)
        m.seen = x.mean()
        return m.layer(x) + m.teacher(x).detach()

    model = Function(forward, layer=nn.Linear(5, CLASSES), teacher=nn.Linear(5, CLASSES).requires_grad_(False))
    model.seen = torch.zeros(())
    before = model.teacher.weight.clone()
    with pytest.raises(ValueError, match="weight: changes during forward"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 5), labels())
    assert torch.equal(model.teacher.weight, before)
    assert float(model.seen) == 0.0


def test_check_independence_looks_at_real_inputs():
    """A model that mixes samples only where a feature is large passes the made-up check, and not the real one."""

    def forward(m, x):
        far = (x.abs().amax() > 1000).to(x.dtype)
        return m.layer(x) + far * m.layer(x).mean(0)

    torch.manual_seed(0)
    model = Function(forward, layer=nn.Linear(5, CLASSES))
    x, y = torch.randn(B, 5), labels()
    dpk.check_independence(model, truth.cross_entropy, x, y)
    x[0, 0] = 5000.0
    with pytest.raises(ValueError, match=r"layer\.weight"):
        dpk.check_independence(model, truth.cross_entropy, x, y)
    with pytest.raises(ValueError, match="inputs: has no sample"):
        dpk.check_independence(model, truth.cross_entropy, x[:0], y[:0])


def test_a_check_that_rounding_refuses_is_made_in_float64(monkeypatch):
    """A ReLU whose input is zero but for rounding has one gradient in one run and another in the next."""
    tried = []
    found = self_check._Proof.found

    def refusing(proof, walking):
        tried.append((next(iter(proof.plain.values())).dtype, proof._loose))
        if tried[-1] == (torch.float32, False):
            raise self_check._OffError("by chance")
        return found(proof, walking)

    monkeypatch.setattr(self_check._Proof, "found", refusing)
    x, y = torch.randn(4, 20), labels(4)
    dpk.per_sample_gradients(nn.Linear(20, CLASSES), truth.cross_entropy, x, y)
    strict = (torch.float32, False)
    assert tried == [strict, strict, (torch.float64, False), (torch.float32, True)]
    mixing = Function(lambda m, x: m.layer(x - x.mean(0)), layer=nn.Linear(20, CLASSES))
    with pytest.raises(ValueError, match="by chance"):
        dpk.per_sample_gradients(mixing, truth.cross_entropy, x, y)
    types = Function(lambda m, x: m.layer(x) @ torch.eye(CLASSES), layer=nn.Linear(20, CLASSES))  # in float32 only
    with pytest.raises(ValueError, match="by chance"):
        dpk.per_sample_gradients(types, truth.cross_entropy, x, y)


def _centred_aside(m, x):
    """`.float()` is the same tensor in float32, and a copy in float64."""
    h = m.a(x)
    with torch.no_grad():
        aside = h.float()
        aside -= aside.mean(0)
    return m.b(h)


def _quantised_in_float32(m, x):
    h = m.a(x)
    return m.b(h / h.detach().abs().max() * 3 if h.dtype == torch.float32 else h)


class _MixesBackward(torch.autograd.Function):
    """Samples mix in the gradient, in float32."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0) if g.dtype == torch.float32 else g


@pytest.mark.parametrize(
    "forward", [_centred_aside, _quantised_in_float32, lambda m, x: m.b(_MixesBackward.apply(m.a(x)))]
)
def test_what_mixes_samples_in_float32_alone_is_refused(forward):
    model = Function(forward, a=nn.Linear(16, 16), b=nn.Linear(16, CLASSES))
    with pytest.raises(ValueError, match="row"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(8, 16), labels(8))
    with pytest.raises(ValueError, match="row"):
        dpk.check_independence(model, truth.cross_entropy, torch.randn(8, 16), labels(8))
