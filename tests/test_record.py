"""What recording promises: behaves as torch does, and costs one forward and one backward."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpkernels as dpk
from dpkernels.factors import Dense, Outer
from tests import models, truth
from tests.models import CLASSES, B, Function, labels


def record(model, inputs=None, loss_fn=truth.cross_entropy, targets=None):
    inputs = torch.randn(B, 5) if inputs is None else inputs
    return dpk.per_sample_gradients(model, loss_fn, inputs, labels() if targets is None else targets)


class Seen(TorchDispatchMode):
    """Counts ops, and notes the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


# Cost ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cnn", "gpt", "vit", "hugging_face_gpt2"])
def test_one_forward_and_one_backward_without_weight_gradients(name):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    dpk.per_sample_gradients(model, loss_fn, inputs, targets)  # with the self-check
    forwards.clear()
    with Seen() as ours:
        rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    assert len(forwards) == 1
    assert rows.batch_size == B
    with Seen() as plain:
        loss_fn(truth.call(model, inputs), targets).sum().backward()
    products = ("mm", "addmm", "bmm", "convolution_backward")
    ours, plain = (sum(seen.calls.get(op, 0) for op in products) for seen in (ours, plain))
    weights = sum(isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D" for m in model.modules())
    assert ours <= plain - weights + 1  # an ordinary backward has one for each weight


def test_no_weight_gradient_is_computed():
    """The gradient of a weight that is never formed cannot be slow: a linear layer's backward has one product."""
    model, x, y = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, CLASSES)), torch.randn(B, 5), labels()
    record(model, x, targets=y)
    with Seen() as seen:
        record(model, x, targets=y)
    assert seen.calls["addmm"] == 2
    assert seen.calls["mm"] == 1  # the input gradient of the second layer; the first layer's input needs none


def test_frozen_parameters_cost_nothing():
    model, x, y = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)), torch.randn(B, 5), labels()
    model[0].requires_grad_(False)
    assert list(record(model, x, targets=y).materialize()) == ["2.weight", "2.bias"]
    with Seen() as seen:
        record(model, x, targets=y)
    assert "mm" not in seen.calls
    assert "tanh_backward" not in seen.calls
    truth.check(model, truth.cross_entropy, x, y)


def test_long_sequences_make_no_square_for_each_sample():
    model = models.GPT(11, 2048, 16, 1)
    ids = torch.randint(0, 11, (2, 2048))
    with Seen() as seen:
        rows = dpk.per_sample_gradients(model, truth.token_loss, ids, ids)
        rows.clip_sum(1.0, dpk.Gaussian(1.0))
    assert seen.largest < 2 * 2048 * 2048
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(
        rows.norms().double(), truth.flat(truth.loop(exact, truth.token_loss, ids, ids)).norm(dim=1), rtol=1e-4, atol=0
    )


PEAK = """
import sys, torch
import dpkernels as dpk
from tests import models, truth
torch.manual_seed(0)
model = models.GPT(50_000, 8, 32, 1)
ids = torch.randint(0, 50_000, (64, 4))
def memory(kind):  # not getrusage: its maximum outlives exec and would be the parent's
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))
before = memory("VmRSS")
if sys.argv[1] == "private":
    dpk.per_sample_gradients(model, truth.token_loss, ids, ids).clip_sum(1.0, dpk.Gaussian(1.0))
else:
    truth.token_loss(model(ids), ids).sum().backward()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_vocabulary_makes_no_table_for_each_sample():
    used = {}
    for kind in ("private", "plain"):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PEAK, kind], capture_output=True, text=True, check=True
        )
        used[kind] = int(run.stdout)
    assert used["private"] < 64 * 50_000 * 32 * 4  # B x V x d in float32
    assert used["private"] < 4 * used["plain"]


# As torch does ------------------------------------------------------------------------------------------------------


def test_nothing_is_left_on_the_model():
    model, x, y = models.cnn()[0], torch.randn(B, 3, 8, 8), labels()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, kept = torch.get_rng_state(), [p.grad for p in model.parameters()]
    record(model, x, targets=y)
    assert torch.equal(state, torch.get_rng_state())
    assert all(a is b for a, b in zip(kept, [p.grad for p in model.parameters()], strict=True))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with pytest.raises(ValueError, match="loss_fn"):
        record(model, x, lambda o, y: o.sum(), y)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_weight_norm_by_hooks_leaves_no_stand_in():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, CLASSES)))
    record(model)
    assert type(model[0].weight) is not dpk.tape.Tracked
    x, y = torch.randn(B, 5), labels()
    torch.testing.assert_close(record(model, x, targets=y).materialize(), truth.loop(model, truth.cross_entropy, x, y))


def test_dropout_draws_what_torch_draws():
    model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))
    x, y = torch.randn(B, 5), labels()
    record(model, x, targets=y)
    torch.manual_seed(7)
    total = record(model, x, targets=y).clip_sum(float("inf")).sum
    torch.manual_seed(7)
    truth.cross_entropy(model(x), y).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(total[name], p.grad)
    model.zero_grad()
    truth.check(model.eval(), truth.cross_entropy, x, y)


@pytest.mark.parametrize("layer", [nn.LSTM(5, 4, 2, dropout=0.5), nn.MultiheadAttention(5, 1, dropout=0.5)])
def test_dropout_inside_layers(layer):
    forward = lambda m, x: m.head((m.layer(x) if isinstance(layer, nn.LSTM) else m.layer(x, x, x))[0][-1])  # noqa: E731
    model = Function(
        lambda m, x: forward(m, x.transpose(0, 1)),
        layer=layer,
        head=nn.Linear(4 if isinstance(layer, nn.LSTM) else 5, CLASSES),
    )
    rows = record(model, torch.randn(B, 3, 5))
    assert rows.norms().isfinite().all()
    truth.check(model.eval(), truth.cross_entropy, torch.randn(B, 3, 5), labels())


def test_no_grad_parts_have_no_gradient():
    def forward(m, x):
        with torch.no_grad():
            x = m.first(x) * m.scale
        return m.second(x + m.first.weight.detach().sum())

    model = Function(forward, first=nn.Linear(5, 4), scale=torch.randn(4), second=nn.Linear(4, CLASSES))
    rows = record(model)
    assert not rows.materialize()["first.weight"].any()
    truth.check(model, truth.cross_entropy, torch.randn(B, 5), labels())


def test_called_without_gradients_on():
    model, x, y = nn.Linear(5, CLASSES), torch.randn(B, 5), labels()
    want = record(model, x, targets=y).norms()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            torch.testing.assert_close(record(model, x.clone(), targets=y).norms(), want)


def test_autocast():
    model, x, y = models.gpt()[0], *[torch.randint(0, 11, (B, 7))] * 2
    exact = truth.loop(copy.deepcopy(model).double(), truth.token_loss, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        plain = truth.loop(model, truth.token_loss, x, y)
        rows = dpk.per_sample_gradients(model, truth.token_loss, x, y)
    sums = rows.clip_sum(1.0)
    got = truth.errors(rows.materialize(), sums.norms, truth.flat_sum(sums.sum), exact, 1.0)
    theirs = truth.errors(plain, truth.flat(plain).norm(dim=1), truth.clipped_sum(plain, 1.0), exact, 1.0)
    for mine, allowed in zip(got, theirs, strict=True):
        assert mine <= 2 * allowed
    assert max(got) > 1e-4, "bfloat16 was not used"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_its_promise(reentrant):
    """Inside activations are recomputed, dropout included."""
    runs = []

    def block(m, h):
        runs.append(1)
        return F.dropout(torch.tanh(m.inner(h)), 0.5)

    forward = lambda m, x: m.head(checkpoint(lambda h: block(m, h), m.first(x), use_reentrant=reentrant))  # noqa: E731
    model = Function(forward, first=nn.Linear(5, 4), inner=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))
    x, y = torch.randn(B, 5), labels()
    record(model, x, targets=y)
    runs.clear()
    torch.manual_seed(3)
    total = record(model, x, targets=y).clip_sum(float("inf")).sum
    assert len(runs) == 2
    torch.manual_seed(3)
    truth.cross_entropy(model(x), y).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(total[name], p.grad)


def test_inputs_and_outputs_of_any_structure():
    layer, y = nn.Linear(5, CLASSES), labels()
    model = Function(lambda m, a, b: {"logits": (m.layer(a * b), a), "other": None}, layer=layer)
    loss = lambda out, t: truth.cross_entropy(out["logits"][0], t["y"][0])  # noqa: E731
    a, b = torch.randn(B, 5), torch.randn(B, 5)
    want = truth.loop(layer, truth.cross_entropy, a * b, y)
    for inputs in ((a, b), [a, b]):
        rows = dpk.per_sample_gradients(model, loss, inputs, {"y": [y]}).materialize()
        torch.testing.assert_close(rows["layer.weight"], want["weight"])
    model.forward = lambda a=None, b=None: {"logits": (layer(a * b), a)}
    rows = dpk.per_sample_gradients(model, loss, {"a": a, "b": b}, {"y": [y]}).materialize()
    torch.testing.assert_close(rows["layer.weight"], want["weight"])


def test_rows_do_not_change_when_the_model_does():
    forward = lambda m, x: F.linear(m.token.expand(len(x), -1), m.weight) * x.mean(1, keepdim=True)  # noqa: E731
    model = Function(forward, token=torch.randn(1, 5), weight=torch.randn(CLASSES, 5))
    rows = record(model)
    before = rows.materialize()
    with torch.no_grad():
        model.token.zero_()
        model.weight.zero_()
    torch.testing.assert_close(rows.materialize(), before)


def test_memory_is_given_back_at_once():
    """No cycle keeps a step's factors until the garbage collector comes."""

    def factors_alive():
        return sum(isinstance(o, Outer | Dense) for o in gc.get_objects())

    model, x = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)), torch.randn(B, 5)
    gc.collect()
    gc.disable()
    try:
        before = factors_alive()
        rows = record(model, x)
        rows.clip_sum(1.0)
        assert factors_alive() > before
        del rows
        assert factors_alive() == before
    finally:
        gc.enable()


def test_a_module_shared_by_two_names_has_one_row():
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, CLASSES))
    truth.check(model, truth.cross_entropy, torch.randn(B, 5), labels())


def test_rows_do_not_change_when_the_inputs_do():
    x, ids = torch.randn(B, 5), torch.randint(0, 4, (B, 3))
    forward = lambda m, x, ids: m.layer(x) + m.table(ids).sum(1)  # noqa: E731
    rows = record(Function(forward, layer=nn.Linear(5, CLASSES), table=nn.Embedding(4, CLASSES)), (x, ids))
    before = rows.materialize()
    x.zero_()
    ids.zero_()
    torch.testing.assert_close(rows.materialize(), before)


def test_gradients_inside_forward_that_are_only_looked_at():
    def forward(m, x):
        x = x.detach().requires_grad_()
        (saliency,) = torch.autograd.grad(torch.tanh(m.layer(x)).sum(), x)
        return m.layer(x) * saliency.mean(1, keepdim=True)

    truth.check(Function(forward, layer=nn.Linear(5, CLASSES)), truth.cross_entropy, torch.randn(B, 5), labels())


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [lambda m: torch.compile(m, backend="eager"), compiled_in_place])
def test_compiled_models_are_recorded_as_written(compiled):
    model, x, y = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)), torch.randn(B, 5), labels()
    want = list(record(model, x, targets=y).materialize().values())
    got = list(record(compiled(model), x, targets=y).materialize().values())
    torch.testing.assert_close(got, want)


class Straight(torch.autograd.Function):
    """An activation with a gradient of its own, that keeps no parameter."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g


def test_custom_functions_without_parameters():
    forward = lambda m, x: m.head(Straight.apply(m.body(Straight.apply(x))))  # noqa: E731
    model = Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    truth.check(model, truth.cross_entropy, torch.randn(B, 5), labels())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_modules_with_hooks():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    calls = []
    for module in model:
        module.register_full_backward_hook(lambda *_: calls.append("backward"))
        module.register_forward_hook(lambda *_: calls.append("forward"))
    truth.check(model, truth.cross_entropy, torch.randn(B, 5), labels())
    assert {"forward", "backward"} <= set(calls)
