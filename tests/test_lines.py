"""Samples that were indexed, sorted, routed or joined: exact, or refused by form and not by values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from tests import truth
from tests.models import CLASSES, Function, labels


def put_back(x, mask, part):
    out = x.new_zeros(*mask.shape, part.shape[-1])
    out[mask] = part
    return out


def unpadded(m, x, mask):
    """Tokens that count, as one list."""
    return put_back(x, mask, m.body(x[mask])).tanh().sum(1)


def active(m, x, mask):
    rows = mask[:, 0].nonzero().squeeze(1)
    h = m.body(x[rows].reshape(-1, 5)).relu_().reshape(len(rows), x.shape[1], 4).sum(1)
    return torch.zeros(len(x), 4, dtype=x.dtype).index_add(0, rows, h)


def by_keyword(m, x, mask):
    order = x[:, 0, 0].argsort()
    return torch.index_select(m.body(torch.index_select(x, dim=0, index=order)), 0, order.argsort()).sum(1)


def split(m, x, mask):
    order = mask.sum(1).argsort(stable=True)
    count = int((mask.sum(1) > 2).sum())
    few, many = x[order].split([len(x) - count, count])
    return torch.cat([m.body(few), m.other(many)])[order.argsort()].sum(1)


def sliced(m, x, mask):
    return torch.cat([m.body(x[:1]), m.body(x[1:])]).sum(1)


def twins(m, x, mask):
    a, b = m.body(torch.cat([x, x.flip(1)])).tanh().chunk(2)
    return (a * b).sum(1)


def in_place(m, x, mask):
    rows = mask[:, 1]
    h = m.body(x)
    h[rows] = F.relu(m.other(x[rows]), inplace=True)
    return h.sum(1)


def top_two(m, x, mask):
    weight, choice = m.gate(x.mean(1)).softmax(-1).topk(2)
    out = torch.zeros(len(x), 4, dtype=x.dtype)
    for i, expert in enumerate((m.body, m.other)):
        rows, place = (choice == i).nonzero(as_tuple=True)
        out.index_add_(0, rows, weight[rows, place, None] * expert(x[rows].mean(1)))
    return out


EXACT = [unpadded, active, by_keyword, split, sliced, twins, in_place, top_two]


@pytest.mark.parametrize("forward", EXACT)
@pytest.mark.parametrize("batch", [1, 2, 4, 5])
@pytest.mark.parametrize("counts", ["all", "some", "none"])
def test_exact_whatever_the_counts(forward, batch, counts):
    torch.manual_seed(batch)
    parts = {"body": nn.Linear(5, 4), "other": nn.Linear(5, 4), "gate": nn.Linear(5, 3), "head": nn.Linear(4, CLASSES)}
    model = Function(lambda m, x, mask: m.head(forward(m, x, mask)), **parts)
    mask = {"all": torch.ones, "none": torch.zeros}.get(counts, lambda *s: torch.rand(*s) > 0.5)(batch, 4).bool()
    truth.check(model, truth.cross_entropy, (torch.randn(batch, 4, 5), mask), labels(batch))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, CLASSES, 4), nn.Sequential(nn.GroupNorm(1, 2), nn.Conv2d(2, CLASSES, 4))]
)
def test_a_convolution_that_no_sample_reaches(layer):
    def forward(m, x):
        rows = (x[:, 0, 0, 0] > 100).nonzero().squeeze(1)
        out = m.head(x.flatten(1))
        return out.index_add(0, rows, m.layer(x[rows]).flatten(1))

    model = Function(forward, layer=layer, head=nn.Linear(32, CLASSES))
    truth.check(model, truth.cross_entropy, torch.randn(4, 2, 4, 4), labels(4))


def test_other_reorderings_are_refused_in_the_check():
    """Data whose order is trivial get the same answer as any other."""
    forward = lambda m, x: m.head(torch.take_along_dim(m.body(x), x[:, :1].argsort(0), 0))  # noqa: E731
    model = Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"head.*order that was lost"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.arange(30.0).view(6, 5), labels())


def experts_sorted(m, x, like):
    """Sort by expert, run each on its part, write back by index."""
    choice = (m.gate(x)[:, 0] > 0).long()
    order = choice.argsort(stable=True)
    few, many = x[order].split([int((choice == 0).sum()), int((choice == 1).sum())])
    out = like(m, x, order)
    out[order] = torch.cat([m.body(few), m.other(many)])
    return m.mid(out.tanh())


WRITTEN = {
    "zeros": lambda m, x, order: torch.zeros(len(x), 4, dtype=x.dtype),
    "new": lambda m, x, order: x[order].new_zeros(len(x), 4),
    "like": lambda m, x, order: torch.empty_like(m.body(x[order])),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("seed", range(8))
def test_written_back_by_index(name, seed):
    """What is written into by index has samples in their places, whatever lines they came from."""
    torch.manual_seed(seed)
    layers = {part: nn.Linear(5, 4) for part in ("body", "other", "gate")}
    forward = lambda m, x: m.head(experts_sorted(m, x, WRITTEN[name]))  # noqa: E731
    model = Function(forward, **layers, mid=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))
    truth.check(model, truth.cross_entropy, torch.randn(4, 5), labels(4))


REORDERED = {
    "followed": lambda m, x, o: m.body(x[o])[o.argsort()],
    "by_array": lambda m, x, o: m.body(x[o.numpy()])[o.argsort()],
    "stacked": lambda m, x, o: m.body(torch.stack([x[i] for i in o.tolist()]))[o.argsort()],
    "time_major": lambda m, x, o: m.body(x.transpose(0, 1)[:, o]).transpose(0, 1)[o.argsort()],
    "in_place": lambda m, x, o: m.body(torch.zeros_like(x).copy_(x[o]))[o.argsort()],
    "looked_up": lambda m, x, o: m.body(F.embedding(o, x.flatten(1)).view(x.shape))[o.argsort()],
    "one_hot": lambda m, x, o: m.body(torch.einsum("ij,jtd->itd", F.one_hot(o, len(x)).to(x.dtype), x))[o.argsort()],
    "ragged": lambda m, x, o: m.body(x.repeat_interleave(o + 1, dim=0)).sum((0, 1)) + m.body(x),
    "left_sorted": lambda m, x, o: m.body(x)[o],
}


@pytest.mark.parametrize("name", REORDERED)
def test_an_order_that_is_trivial_at_first(name):
    """Full masks first, ragged ones later: exact or refused, and the same both times."""
    torch.manual_seed(0)
    forward = lambda m, x, mask: m.head(REORDERED[name](m, x, mask.sum(1).argsort(stable=True)).sum(1))  # noqa: E731
    model = Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    x, full = torch.randn(4, 6, 5), torch.ones(4, 6).bool()
    ragged = torch.arange(6) < torch.tensor([5, 2, 6, 3])[:, None]
    outcomes = []
    for mask in (full, ragged):
        try:
            truth.check(model, truth.cross_entropy, (x, mask), labels(4))
            outcomes.append("exact")
        except ValueError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == "exact" or name not in ("followed", "by_array", "in_place")


def test_samples_mixed_inside_an_expert_are_found():
    """Made-up samples may all go different ways; those that are nearly alike do not."""

    def forward(m, x):
        choice = m.gate(x).argmax(-1)
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(m.experts):
            rows = (choice == i).nonzero().squeeze(1)
            out[rows] = expert(x[rows]).softmax(0)
        return out

    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(16))
    model = Function(forward, gate=nn.Linear(5, 16), experts=experts)
    with pytest.raises(ValueError, match=r"sample|gradient"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(6, 5), labels())
