"""Each rule and the fallback, over odd shapes, against a loop over samples."""

import warnings

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

import dpkernels as dpk
from dpkernels import forming
from dpkernels.rules import RULES, conv
from dpkernels.rules.fallback import fallback
from tests import truth
from tests.models import Function

few = settings(max_examples=10, deadline=None, derandomize=True)
size = st.integers(1, 5)
batch = st.integers(0, 4)


def weighing(outputs, targets):
    """A loss that sees every output with another weight."""
    flat = outputs.flatten(1)
    return (flat * torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype) + flat.square()).sum(1) * targets


def check(model, *inputs):
    """The engine against the loop, for a model that returns samples first."""
    torch.manual_seed(0)
    count = len(inputs[0])
    targets = torch.rand(count) + 0.5
    if count:
        truth.check(model, weighing, inputs, targets)
    else:
        rows = dpk.per_sample_gradients(model, weighing, inputs, targets).materialize()
        assert {n: r.shape for n, r in rows.items()} == {n: (0, *p.shape) for n, p in model.named_parameters()}


@few
@given(batch, size, size, st.lists(size, max_size=2), st.booleans())
def test_linear(n, inside, outside, between, bias):
    check(nn.Linear(inside, outside, bias), torch.randn(n, *between, inside))


@few
@given(batch, size, size, size)
def test_matmul(n, inside, outside, length):
    right = Function(lambda m, x: x @ m.w, w=torch.randn(inside, outside))
    left = Function(lambda m, x: m.w @ x, w=torch.randn(outside, inside))
    vector = Function(lambda m, x: torch.matmul(x, m.w), w=torch.randn(inside))
    left_vector = Function(lambda m, x: torch.matmul(m.w, x), w=torch.randn(inside))
    check(right, torch.randn(n, length, inside))
    check(right, torch.randn(n, inside))
    check(left, torch.randn(n, inside, length))
    check(vector, torch.randn(n, length, inside))
    check(left_vector, torch.randn(n, inside, length))


@few
@given(batch, size, size, st.sampled_from([(1, 1), (0.5, 2)]))
def test_addmm(n, inside, outside, scales):
    beta, alpha = scales
    model = Function(
        lambda m, x: torch.addmm(m.b, x, m.w, beta=beta, alpha=alpha),
        b=torch.randn(outside),
        w=torch.randn(inside, outside),
    )
    check(model, torch.randn(n, inside))


EQUATIONS = ["bi,oi->bo", "io,bti->bto", "bti,hid->bhtd", "bhtd,ohd->bto", "bti,i->bt", "bti,tio->bo", "bti,tij->btj"]


@pytest.mark.parametrize("equation", EQUATIONS)
@few
@given(n=batch, sizes=st.lists(size, min_size=6, max_size=6))
def test_einsum(equation, n, sizes):
    lengths = dict(zip("iothdj", sizes, strict=True)) | {"b": n}
    left, right = equation.split("->")[0].split(",")
    shapes = [tuple(lengths[c] for c in part) for part in (left, right)]
    first = "b" in left
    weight, x = (torch.randn(s) for s in (shapes[::-1] if first else shapes))
    forward = lambda m, x: torch.einsum(equation, *((x, m.w) if first else (m.w, x)))  # noqa: E731
    check(Function(forward, w=weight), x)


@pytest.mark.parametrize("dims", [1, 2, 3])
@few
@given(n=batch, groups=st.integers(1, 2), inside=st.integers(1, 2), outside=st.integers(1, 2), data=st.data())
def test_convolution(dims, n, groups, inside, outside, data):
    kernel, stride, dilation = (data.draw(st.tuples(*[st.integers(1, 2)] * dims)) for _ in range(3))
    padding = data.draw(st.sampled_from(["valid", "same", 0, 1, 2]))
    stride = 1 if padding == "same" else stride
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    mode = data.draw(st.sampled_from(["zeros", "circular"])) if padding != "valid" else "zeros"
    layer = kind(groups * inside, groups * outside, kernel, stride, padding, dilation, groups, padding_mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about padding="same" with an even kernel
        check(layer, torch.randn(n, groups * inside, *[data.draw(st.integers(4, 6)) for _ in range(dims)]))


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.Sequential(nn.Conv1d(3, 5, 4, padding=2), nn.Conv1d(5, 16, 3, bias=False)), (600,)),
        (lambda: nn.Sequential(nn.Conv2d(1, 7, 3, padding="same", dilation=2), nn.Conv2d(7, 2, 2)), (25, 24)),
        (lambda: nn.Conv3d(2, 3, (1, 2, 3), padding=(0, 1, 1)), (8, 9, 10)),
    ],
)
def test_convolution_of_large_images(make, size, monkeypatch):
    """By kernels of ours, also where samples share their weights."""
    used = []
    monkeypatch.setattr(conv, "conv_each", lambda *a: used.append(a) or forming.conv_each(*a))
    model = make()
    inside = next(model.parameters()).shape[1]
    check(model, torch.randn(3, inside, *size))
    assert any(len(w) == 1 for _, w, *_ in used)  # one weight for all


@pytest.mark.parametrize(
    "wrong",
    [{"padding": (-1, -1)}, {"dilation": (20, 20)}, {"dilation": (0, 0)}, {"stride": (0, 0)}, {"padding": (1, 1, 1)}],
)
def test_what_torch_refuses_is_refused_after_the_check_too(wrong):
    model, x = nn.Conv2d(2, 3, 3), torch.randn(3, 2, 24, 25)
    dpk.per_sample_gradients(model, weighing, x, torch.ones(3))
    vars(model).update(wrong)
    with pytest.raises(RuntimeError):
        dpk.per_sample_gradients(model, weighing, x, torch.ones(3))


def test_convolutions_obey_autocast():
    model, seen = nn.Conv2d(2, 3, 3), []

    def forward(m, x):
        y = m.conv(x)
        seen.append(y.dtype)
        return y.float()

    with torch.autocast("cpu", torch.bfloat16):
        dpk.per_sample_gradients(Function(forward, conv=model), weighing, torch.randn(3, 2, 24, 24), torch.ones(3))
    assert set(seen) == {torch.bfloat16}


def test_convolution_over_frames_of_large_images():
    forward = lambda m, x: m.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # noqa: E731
    check(Function(forward, conv=nn.Conv2d(2, 3, 3)), torch.randn(4, 3, 2, 24, 24))


def test_convolution_over_frames_of_a_sample():
    forward = lambda m, x: m.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])  # noqa: E731
    check(Function(forward, conv=nn.Conv2d(2, 3, 3)), torch.randn(4, 3, 2, 5, 5))


@few
@given(batch, st.lists(size, max_size=2), st.lists(st.integers(2, 4), min_size=1, max_size=2), st.booleans())
def test_layer_and_rms_norm(n, between, shape, bias):
    x = torch.randn(n, *between, *shape)
    check(nn.LayerNorm(shape, bias=bias), x)
    check(nn.RMSNorm(shape), x)


@few
@given(batch, st.integers(1, 2), st.integers(1, 2), st.lists(st.integers(2, 3), min_size=1, max_size=3))
def test_group_and_instance_norm(n, groups, width, spatial):
    channels = groups * width
    x = torch.randn(n, channels, *spatial)
    check(nn.GroupNorm(groups, channels), x)
    check((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(spatial) - 1](channels, affine=True), x)


def test_batch_norm_in_eval_mode():
    layer = nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 4, 4))
    check(layer.eval(), torch.randn(4, 3, 4, 4))
    check(nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), torch.randn(4, 3, 5))


@few
@given(batch, st.lists(size, max_size=2), size, st.booleans())
def test_embedding(n, between, width, padded):
    ids = torch.randint(0, 5, (n, *between))
    check(nn.Embedding(5, width, padding_idx=1 if padded else None), ids)


def test_lookup_by_index():
    ids = torch.randint(0, 5, (4, 3))
    check(Function(lambda m, i: m.w[i], w=torch.randn(5, 2)), ids)
    check(Function(lambda m, i: m.w[i], w=torch.randn(5)), ids)
    check(Function(lambda m, i: m.w[i - 5], w=torch.randn(5, 2, 3)), ids)
    check(Function(lambda m, i: m.w.index_select(0, i), w=torch.randn(5, 2)), ids[:, 0])


@pytest.mark.parametrize("options", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}, {"kdim": 3, "vdim": 5}])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention(options, need_weights, batch_first):
    def forward(m, q, k, v):
        q, k, v = (t if batch_first else t.transpose(0, 1) for t in (q, k, v))
        y, weights = m.layer(q, k, v, need_weights=need_weights, attn_mask=torch.ones(3, 4).triu(2).bool())
        y = y if batch_first else y.transpose(0, 1)
        return y if weights is None else torch.cat([y.flatten(1), weights.flatten(1)], dim=1)

    layer = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)
    shapes = [(3, 6), (4, options.get("kdim", 6)), (4, options.get("vdim", 6))]
    check(Function(forward, layer=layer), *(torch.randn(5, *s) for s in shapes))


@pytest.mark.parametrize("padding", [torch.bool, torch.float32])
def test_attention_with_padding(padding):
    def forward(m, x, mask):
        return m.layer(x, x, x, key_padding_mask=mask if padding == torch.bool else mask * -1e4, need_weights=False)[0]

    mask = torch.zeros(5, 4, dtype=padding)
    mask[1, 2:] = 1
    check(Function(forward, layer=nn.MultiheadAttention(6, 2, batch_first=True)), torch.randn(5, 4, 6), mask)


ELEMENTWISE = {
    "add": lambda m, x: x + m.p,
    "radd": lambda m, x: m.p + x,
    "sub": lambda m, x: x - m.p,
    "rsub": lambda m, x: m.p - x,
    "mul": lambda m, x: m.p * x,
    "div": lambda m, x: x / (m.p.exp() + 1),
    "rdiv": lambda m, x: m.p / (x.square() + 1),
    "pow": lambda m, x: (x.square() + 1) ** m.p,
    "in_place": lambda m, x: x.clone().add_(m.p).mul_(m.p),
    "augmented": lambda m, x: x.clone().__iadd__(m.p),
    "where": lambda m, x: torch.where(x > 0, x, m.p),
    "maximum": lambda m, x: torch.maximum(x, m.p),
    "addcmul": lambda m, x: torch.addcmul(x, x, m.p),
    "lerp": lambda m, x: torch.lerp(x, m.p, 0.3),
    "sigmoid_of_parameter": lambda m, x: x * m.p.sigmoid(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3), (1, 2, 3), (1, 1, 3)])
def test_broadcasting(name, shape):
    check(Function(ELEMENTWISE[name], p=torch.randn(shape)), torch.randn(5, 2, 3))


EXPANDS = {
    "expand": lambda m, x: torch.cat([m.p.expand(x.shape[0], -1, -1), x], dim=1),
    "expand_as": lambda m, x: m.p.expand_as(x) * x,
    "repeat": lambda m, x: torch.cat([m.p.repeat(x.shape[0], 1, 1), x], dim=1),
    "repeat_more": lambda m, x: m.p.repeat(x.shape[0], 2, 1) * x,
    "broadcast_to": lambda m, x: torch.broadcast_to(m.p, x.shape) + x,
    "new_dimension": lambda m, x: torch.cat([m.p[0, 0].expand(x.shape[0], 1, 3), x], dim=1),
    "stack": lambda m, x: torch.stack([m.p.expand_as(x), x]).sum(0),
}


@pytest.mark.parametrize("name", EXPANDS)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_one_copy_for_each_sample(name, count):
    check(Function(EXPANDS[name], p=torch.randn(1, 1, 3)), torch.randn(count, 2, 3))


FALLBACK = {
    "prelu": (lambda m, x: F.prelu(x, m.p), (4,), (4, 3)),
    "conv_transpose1d": (lambda m, x: F.conv_transpose1d(x, m.p, stride=2), (4, 2, 3), (4, 3)),
    "conv_transpose2d": (lambda m, x: F.conv_transpose2d(x, m.p), (4, 2, 2, 2), (4, 3, 3)),
    "conv_transpose3d": (lambda m, x: F.conv_transpose3d(x, m.p), (2, 2, 1, 2, 2), (2, 2, 3, 3)),
    "bilinear": (lambda m, x: F.bilinear(x, x, m.p), (2, 3, 3), (3,)),
    "tensordot": (lambda m, x: torch.tensordot(x, m.p, dims=1), (3, 2, 2), (4, 3)),
    "batched_matmul": (lambda m, x: x @ m.p, (4, 3, 2), (4, 2, 3)),
    "cdist": (lambda m, x: torch.cdist(x, m.p.expand(1, -1, -1)[0]), (2, 3), (4, 3)),
    "cosine_similarity": (lambda m, x: F.cosine_similarity(x, m.p, dim=-1), (3,), (4, 3)),
    "kron": (lambda m, x: torch.kron(x, m.p), (2, 2), (4, 3)),
    "scaled_dot_product": (lambda m, x: F.scaled_dot_product_attention(x, m.p, m.p), (1, 5, 3), (4, 3)),
    "embedding_bag": (lambda m, x: F.embedding_bag((x * 10).long().abs() % 5, m.p), (5, 3), (4,)),
    "bucket_weights": (lambda m, x: torch.gather(m.p.expand(4, 3), 1, (x > 0).long()[0]) + x, (1, 3), (4, 3)),
    "linear_on_parameter": (lambda m, x: F.linear(m.p, x[0]).sum() + x @ m.p.t(), (2, 3), (4, 3)),
    "logsumexp_pair": (lambda m, x: torch.logaddexp(x, m.p), (3,), (4, 3)),
    "threshold": (lambda m, x: torch.clamp(x, min=m.p), (3,), (4, 3)),
    "dist": (lambda m, x: torch.renorm(m.p, 2, 0, 1.0) * x, (4, 3), (4, 3)),
}
BROKEN = {"bucket_weights", "linear_on_parameter"}  # these mix or misplace samples


@pytest.mark.parametrize("name", sorted(set(FALLBACK) - BROKEN))
@pytest.mark.parametrize("count", [0, 1, 5])
def test_ops_without_a_rule(name, count):
    forward, parameter, sample = FALLBACK[name]
    check(Function(forward, p=torch.randn(parameter)), torch.randn(count, *sample))


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_ops_that_mix_samples_are_refused(name):
    forward, parameter, sample = FALLBACK[name]
    model = Function(forward, p=torch.randn(parameter))
    with pytest.raises(ValueError, match="p"):
        dpk.per_sample_gradients(model, weighing, (torch.randn(5, *sample),), torch.rand(5))


def test_every_rule_is_the_fallback_but_faster(monkeypatch):
    """Ops with a rule of their own give the same through the fallback."""
    torch.manual_seed(0)
    for func, layer, x in (
        (F.linear, nn.Linear(3, 4), torch.randn(5, 3)),
        (F.conv2d, nn.Conv2d(2, 3, 2), torch.randn(5, 2, 4, 4)),
        (F.layer_norm, nn.LayerNorm(3), torch.randn(5, 2, 3)),
        (F.embedding, nn.Embedding(7, 3), torch.randint(0, 7, (5, 4))),
        (F.group_norm, nn.GroupNorm(2, 4), torch.randn(5, 4, 3)),
    ):
        monkeypatch.setitem(RULES, func, lambda tape, *args, func=func, **kwargs: fallback(tape, func, args, kwargs))
        check(layer, x)


def test_the_fallback_says_so_once(monkeypatch):
    monkeypatch.setattr("dpkernels.rules.fallback._said", set())
    model, x = nn.PReLU(), torch.randn(3, 2)
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dpk.per_sample_gradients(model, weighing, x, torch.rand(3))
        assert sum("prelu has no rule of its own" in str(w.message) for w in said) == expected


def test_group_norm_without_places():
    """Of [B, C], and of [B * T, C]: a channel is one number."""
    truth.check(
        nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8)),
        lambda y, t: y.pow(3).sum(1),
        torch.randn(5, 6),
        torch.zeros(5),
    )
    model = Function(lambda m, x: m.norm(x.reshape(-1, 8)).view(x.shape), norm=nn.GroupNorm(4, 8))
    truth.check(model, lambda y, t: y.pow(3).sum((1, 2)), torch.randn(5, 3, 8), torch.zeros(5))
