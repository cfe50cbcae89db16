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


def test_other_reorderings_are_refused_in_the_check():
    """Data whose order is trivial get the same answer as any other."""
    forward = lambda m, x: m.head(torch.take_along_dim(m.body(x), x[:, :1].argsort(0), 0))  # noqa: E731
    model = Function(forward, body=nn.Linear(5, 4), head=nn.Linear(4, CLASSES))
    with pytest.raises(ValueError, match=r"head.*order that was lost"):
        dpk.per_sample_gradients(model, truth.cross_entropy, torch.arange(30.0).view(6, 5), labels())
