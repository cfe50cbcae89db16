"""Models on which samples' own weights are easily got wrong: each against copies of the model, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels import planner
from dpkernels.tape import RecordingError
from tests import truth
from tests.models import CLASSES, B, Function, labels
from tests.test_local import off, ours


def check(model, inputs, loss_fn=truth.cross_entropy, targets=None, steps=4, lr=0.1, tolerance=1e-9):
    targets = labels(len(inputs)) if targets is None else targets
    wanted = truth.walk(model, loss_fn, inputs, targets, steps, lr)
    for hold in planner.Hold:
        rows = ours(model, loss_fn, inputs, targets, hold, steps=steps, lr=lr)
        assert off(rows.materialize(), wanted) < tolerance


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_an_id_beyond_the_table_is_not_the_next_samples():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.w = nn.Embedding(4, 3), nn.Parameter(torch.ones(1))

        def forward(self, x):
            h = x * self.w
            return (self.table(h.detach().long()) * h.unsqueeze(2)).sum(1)

    model = Model()
    x = 3.9 * torch.rand(4, 64)
    x[1:] *= 0.5
    loss = lambda out, _: (out + 100).square().mean(1)  # noqa: E731
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        ours(model, loss, x, torch.zeros(4), planner.Hold.VALUES, steps=3, lr=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_used_as_it_is_and_in_another_shape(dtype):
    def forward(m, x):
        with torch.no_grad():
            gate = 1 + torch.relu(F.linear(x, m.w).sum(1, keepdim=True).abs() - 20)
        return gate * (x[:, :4] @ m.w.view(6, 4).t())[:, :3]

    model = Function(forward, w=torch.randn(4, 6)).to(dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    loss = lambda out, t: (out / 1000 - t.unsqueeze(1)).square().mean(1)  # noqa: E731
    check(model, 60 * torch.randn(B, 6, dtype=dtype), loss, steps=3, lr=1e-4, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("leaf", [(3, 18), (54,), (6, 3, 3), (3, 1, 18)])
def test_a_convolution_whose_weight_is_a_view(leaf, dtype):
    model = Function(lambda m, x: F.conv2d(x, m.w.view(3, 2, 3, 3)).mean((2, 3)), w=torch.randn(leaf)).to(dtype)
    check(model, torch.randn(B, 2, 6, 6, dtype=dtype), tolerance=1e-9 if dtype == torch.float64 else 1e-5)


def test_writing_into_copies_of_a_parameter():
    def forward(m, x):
        y = (m.c.repeat(len(x), 1) + x) @ m.h
        with torch.no_grad():
            gate = m.c.repeat(len(x), 1)
            gate.mul_(x)
        return y * gate.sum(1, keepdim=True).sigmoid()

    check(Function(forward, c=torch.randn(5), h=torch.randn(5, CLASSES)).double(), torch.randn(B, 5).double())


@pytest.mark.parametrize(
    "read", [lambda s: float(s) < 0.5, lambda s: s.item() < 0.5, lambda s: bool(s < 0.5), lambda s: s.tolist() < 0.5]
)
def test_a_parameter_whose_value_is_read_is_refused(read):
    def forward(m, x):
        return x @ m.w.t() * (1 + m.s) * (1.0 if read(m.s) else 3.0)

    model = Function(forward, w=torch.randn(CLASSES, 5), s=torch.tensor(0.4))
    dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(B, 5), labels())
    with pytest.raises(RecordingError, match="reads its value, which differs between samples"):
        dpk.local_updates(model, truth.cross_entropy, torch.randn(B, 5), labels(), steps=2, lr=0.1)


def test_an_expert_that_gets_no_sample():
    def forward(m, x):
        out = x.new_zeros(len(x), CLASSES)
        for i, w in enumerate((m.a, m.b)):
            mine = ((x[:, 0] > 0).long() == i).nonzero().squeeze(1)
            out[mine] = F.bilinear(x[mine], x[mine], w)
        return out

    model = Function(forward, a=torch.randn(CLASSES, 5, 5), b=torch.randn(CLASSES, 5, 5)).double()
    x = torch.randn(B, 5).double()
    check(model, x, lr=0.01)
    check(model, torch.cat([x[:, :1].abs(), x[:, 1:]], dim=1), lr=0.01)


@pytest.mark.parametrize("length", [7, B])
def test_time_major_embeddings(length):
    def forward(m, ids):
        return m.head(torch.tanh(m.body(F.embedding(ids.t(), m.table))).mean(0))

    parts = {"table": torch.randn(9, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, CLASSES)}
    check(Function(forward, **parts).double(), torch.randint(0, 9, (B, length)))


@pytest.mark.parametrize("length", [7, B])
def test_what_carries_no_gradient_has_a_plan_too(length):
    def forward(m, x):
        with torch.no_grad():
            gate = (x @ m.v.t()).sigmoid()
        shift = m.h.detach().expand(len(x), -1)
        return ((gate * (x @ m.w.t())).mean(1) + shift) @ m.head + m.v.sum() + m.h.sum()

    parts = {"v": torch.randn(4, 5), "w": torch.randn(4, 5), "h": torch.randn(4), "head": torch.randn(4, CLASSES)}
    check(Function(forward, **parts).double(), torch.randn(B, length, 5).double())


def test_a_small_parameter_beside_a_large_table():
    def forward(m, ids):
        return m.head(m.table(ids).mean(1)) / m.variance.sqrt()

    parts = {"table": nn.Embedding(10_000, 16), "head": nn.Linear(16, CLASSES), "variance": torch.tensor(0.5)}
    check(Function(forward, **parts).double(), torch.randint(0, 10_000, (B, 5)), lr=0.01)


def test_masks_of_weights_and_their_maxima():
    def forward(m, x):
        pruned = m.w * (m.w.abs() > 0.1)
        rectified = torch.where(m.v > 0, m.v, 0.1 * m.v)
        return x @ pruned.t() + x[:, :CLASSES] * m.w.max(1).values + x @ rectified.t() + m.w.sort().values[:, 0]

    check(Function(forward, w=torch.randn(CLASSES, 5), v=torch.randn(CLASSES, 5)).double(), torch.randn(B, 5).double())


def test_a_mask_of_weights_that_meets_samples_is_refused():
    model = Function(lambda m, x: torch.where(m.w > 0, x[:, :CLASSES], 0.0) * m.w, w=torch.randn(CLASSES))
    with pytest.raises(RecordingError, match="whole numbers or truth values"):
        dpk.local_updates(model, truth.cross_entropy, torch.randn(B, 5), labels(), steps=2, lr=0.1)


def test_a_frozen_weight_with_a_bias_that_trains_before_a_write():
    def forward(m, x):
        x = m.first(x)
        x += m.second(x)
        return m.head(x)

    parts = {"first": nn.Linear(5, 4), "second": nn.Linear(4, 4), "head": nn.Linear(4, CLASSES)}
    model = Function(forward, **parts).double()
    model.second.weight.requires_grad_(False)
    check(model, torch.randn(B, 5).double())


def test_where_values_do_not_fit_the_smaller_is_held():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    x, y = torch.randn(4, 512, 64), labels(4)
    loss = lambda out, t: truth.cross_entropy(out.mean(1), t)  # noqa: E731
    rows = dpk.local_updates(model, loss, x, y, steps=10, lr=0.1, max_bytes=0)
    assert all(part.matrix.outer is None for parts in rows.parts.values() for part in parts)


def test_layers_without_elements():
    sizes = {"a": (0, 4), "b": (0, 0), "c": (CLASSES, 0), "d": (CLASSES,)}
    forward = lambda m, x: F.linear(F.linear(F.linear(x, m.a), m.b), m.c, m.d)  # noqa: E731
    model = Function(forward, **{name: torch.zeros(size) for name, size in sizes.items()})
    rows = ours(model, truth.cross_entropy, torch.randn(B, 4), labels(), planner.Hold.FACTORS, steps=3, lr=0.1)
    assert rows.batch_size == B


def test_one_step_of_convolutions_within_no_memory():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, CLASSES))
    x, y = torch.randn(B, 2, 6, 6), labels()
    rows = dpk.local_updates(model, truth.cross_entropy, x, y, steps=1, lr=0.3, max_bytes=0)
    wanted = dpk.local_updates(model, truth.cross_entropy, x, y, steps=1, lr=0.3, max_bytes=10**9)
    assert off(rows.materialize(), wanted.materialize()) < 1e-6
    torch.testing.assert_close(rows.norms(), wanted.norms())
