"""The truth about per-sample gradients: the model on one sample at a time, by ordinary autograd."""

import copy

import torch
import torch.nn.functional as F

import dpkernels as dpk
from dpkernels.nested import map_tensors
from dpkernels.record import call


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def token_loss(outputs, targets):
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(1)


def as_double(x):
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, x)


def loop(model, loss_fn, inputs, targets):
    """Rows [B, ...] for each trainable parameter, one backward for each sample."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = {name: [] for name in parameters}
    for i in range(len(targets)):
        x, y = (map_tensors(lambda t, i=i: t[i : i + 1], z) for z in (inputs, targets))
        model.zero_grad()
        loss_fn(call(model, x), y).sum().backward()  # not autograd.grad: reentrant checkpoints refuse it
        for name, p in parameters.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad()
    empty = {name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}
    return {name: torch.stack(row).detach() if row else empty[name] for name, row in rows.items()}


def walk(model, loss_fn, inputs, targets, steps, lr):
    """Rows of K plain SGD steps with a copy of the model for each sample."""
    own = [copy.deepcopy(model) for _ in range(len(targets))]
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for i, copied in enumerate(own):
        x, y = (map_tensors(lambda t, i=i: t[i : i + 1], z) for z in (inputs, targets))
        optimizer = torch.optim.SGD(copied.parameters(), lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_fn(call(copied, x), y).sum().backward()
            optimizer.step()
    ends = [dict(copied.named_parameters()) for copied in own]
    return {name: torch.stack([end[name].detach() - p for end in ends]) for name, p in start.items()}


def flat(rows):
    return torch.cat(
        [row.double().reshape(len(row), -1) if len(row) else row.flatten(1) for row in rows.values()], dim=1
    )


def flat_sum(sums):
    return torch.cat([s.double().flatten() for s in sums.values()])


def clipped_sum(rows, clip):
    matrix = flat(rows)
    return (clip / matrix.norm(dim=1)).clamp(max=1).nan_to_num(1.0) @ matrix


def errors(rows, norms, total, exact, clip):
    """Largest errors of rows, norms and clipped sum, relative to the norms of whole rows and to the sum's."""
    exact_rows = flat(exact)
    size = exact_rows.norm(dim=1)
    bound = size.clamp(max=clip).sum()
    return (
        float(((flat(rows) - exact_rows).norm(dim=1) / size).max()),
        float(((norms.double() - size) / size).abs().max()),
        float((total - clipped_sum(exact, clip)).norm() / bound),
    )


def check(model, loss_fn, inputs, targets):
    """The engine against the loop: to 1e-10 in float64; in float32 within twice the error of plain float32, or 2e-5."""
    exact_model = copy.deepcopy(model).double()
    exact_inputs, exact_targets = as_double(inputs), as_double(targets)
    exact = loop(exact_model, loss_fn, exact_inputs, exact_targets)
    clip = float(flat(exact).norm(dim=1).median())

    def ours(m, x, y):
        rows = dpk.per_sample_gradients(m, loss_fn, x, y)
        return errors(rows.materialize(), rows.norms(), flat_sum(rows.clip_sum(clip).sum), exact, clip)

    assert max(ours(exact_model, exact_inputs, exact_targets)) < 1e-10
    plain = loop(model, loss_fn, inputs, targets)
    theirs = errors(plain, flat(plain).norm(dim=1), clipped_sum(plain, clip), exact, clip)
    for got, allowed in zip(ours(model, inputs, targets), theirs, strict=True):
        assert got <= max(2 * allowed, 2e-5)
