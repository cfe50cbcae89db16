"""What recording refuses: each with a word on the cure, and before anything has changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from tests import truth
from tests.models import CLASSES, B, Function, labels
from tests.test_record import record


class Bypass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


def captured():
    model = Function(lambda m, x: F.linear(x, m.hidden[0]), w=torch.randn(CLASSES, 5))
    model.__dict__["hidden"] = [model.w]
    return model


def running():
    def forward(m, x):
        m.mean.mul_(0.9).add_(x.mean(0))
        return m.layer(x)

    model = Function(forward, layer=nn.Linear(5, CLASSES))
    model.register_buffer("mean", torch.zeros(5))
    return model


def written(m, x):
    out = x[:, :CLASSES].clone()
    out[:, 0] = m.w[0]
    return out


def second_order(m, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(torch.tanh(m.layer(x)).sum(), x, create_graph=True)
    return g[:, :CLASSES]


REFUSED = {
    "batch_norm": (lambda: nn.Sequential(nn.Linear(5, CLASSES), nn.BatchNorm1d(CLASSES)), "batch_norm.*GroupNorm"),
    "batch_norm_plain": (lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, affine=False)), "batch_norm"),
    "instance_norm_running": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), nn.Linear(5, CLASSES)
        ),
        "instance_norm with running statistics",
    ),
    "buffer": (running, "mean: changes during forward"),
    "custom_function": (
        lambda: Function(lambda m, x: Bypass.apply(x, m.w), w=torch.randn(CLASSES, 5)),
        "parameter w.*bypass",
    ),
    "captured": (captured, "parameter w.*bypass"),
    "written_by_index": (lambda: Function(written, w=torch.randn(CLASSES)), "w.*written by index"),
    "written_in_place": (
        lambda: Function(lambda m, x: F.linear(x, (m.w + 1).mul_(2)), w=torch.randn(CLASSES, 5)),
        "w.*written in place by mul_",
    ),
    "second_order": (lambda: Function(second_order, layer=nn.Linear(5, 4)), "create_graph"),
    "embedding_max_norm": (
        lambda: Function(lambda m, x: m.table((x > 0).long()).sum(1), table=nn.Embedding(2, CLASSES, max_norm=1.0)),
        "max_norm",
    ),
    "embedding_frequency": (
        lambda: Function(lambda m, x: m.t((x > 0).long()).sum(1), t=nn.Embedding(2, CLASSES, scale_grad_by_freq=True)),
        "scale_grad_by_freq",
    ),
    "packed": (
        lambda: Function(
            lambda m, x: m.rnn(nn.utils.rnn.pack_padded_sequence(x.unsqueeze(2), [5] * len(x), batch_first=True))[1][
                -1
            ],
            rnn=nn.GRU(1, CLASSES),
        ),
        "packed sequence",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_word_on_the_cure(name):
    make, words = REFUSED[name]
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        record(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda o, y: F.cross_entropy(o, y), r"loss_fn: returned shape \(\).*reduction='none'"),
        (lambda o, y: o, r"loss_fn: returned shape \(\d, 3\)"),
        (lambda o, y: o.sum(1, keepdim=True), "loss_fn"),
        (lambda o, y: 1.0, "loss_fn: returned a float"),
    ],
)
def test_a_loss_that_is_not_one_per_sample(loss_fn, words):
    with pytest.raises(ValueError, match=words):
        record(nn.Linear(5, CLASSES), loss_fn=loss_fn)


def test_bad_arguments_are_named():
    model, x, y = nn.Linear(5, CLASSES), torch.randn(B, 5), labels()
    for arguments, words in (
        ((lambda x: x, truth.cross_entropy, x, y), "model"),
        ((model, None, x, y), "loss_fn"),
        ((model, truth.cross_entropy, "x", y), "inputs"),
        ((model, truth.cross_entropy, torch.tensor(1.0), y), "inputs"),
        ((model, truth.cross_entropy, (x, x[:2]), y), r"inputs: a tensor has shape \(2, 5\), must have 6 samples"),
        ((model, truth.cross_entropy, x, y[:2]), "targets"),
        ((nn.Linear(5, 2).requires_grad_(False), truth.cross_entropy, x, y), "requires grad"),
    ):
        with pytest.raises(ValueError, match=words):
            dpk.per_sample_gradients(*arguments)


def test_stand_ins_of_an_earlier_call_are_refused():
    """A weight cached over calls would have no row in the second."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(5, CLASSES))
    record(model)
    with nn.utils.parametrize.cached():
        record(model)
        with pytest.raises(ValueError, match="kept from an earlier call"):
            record(model)


def test_complex_parameters_and_hooks_on_parameters_are_refused():
    model = Function(lambda m, x: torch.fft.rfft(x).mul(m.w).abs(), w=torch.randn(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"parameter w: is torch\.complex64"):
        record(model)
    model = nn.Linear(5, CLASSES)
    model.weight.register_hook(lambda g: 0 * g)
    with pytest.raises(ValueError, match="parameter weight: has gradient hooks"):
        record(model)


@pytest.mark.parametrize("how", ["detached", "data", "buffer"])
def test_writing_into_the_model_is_refused_before_it_happens(how):
    def forward(m, x):
        if m.writing and how == "buffer":
            m.mean += x.mean()
        elif m.writing:
            (m.layer.weight.detach() if how == "detached" else m.layer.weight.data)[:] = x.mean()
        return m.layer(x)

    model = Function(forward, layer=nn.Linear(5, CLASSES))
    model.register_buffer("mean", torch.zeros(()))
    model.writing = 0  # a number: not what tells one model from another
    record(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.writing = 1
    with pytest.raises(ValueError, match="changes during forward"):
        record(model)
    with pytest.raises(ValueError, match="changes during forward"):
        record(model.eval())  # not known yet: found by the check
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_samples_that_left_torch_are_noticed():
    model = Function(lambda m, x: m.layer(torch.from_numpy(x.detach().numpy() * 2)), layer=nn.Linear(5, CLASSES))
    for loss_fn in (truth.cross_entropy, lambda o, y: o.sum(1)):
        with pytest.raises(ValueError, match="NumPy"):
            record(model, loss_fn=loss_fn)
