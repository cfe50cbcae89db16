"""Gradients of runs of samples, each at weights of its own, against the model with those weights."""

import copy
import math

import pytest
import torch

import dpkernels as dpk
from dpkernels.nested import map_tensors
from tests import truth
from tests.models import ZOO, B

RUNS = 2


def made(name, double=True):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = ZOO[name]()
    if double:
        model, inputs, targets = model.double(), truth.as_double(inputs), truth.as_double(targets)
    trainable = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    weights = {n: torch.stack([p + 0.1 * torch.randn_like(p) for _ in range(RUNS)]) for n, p in trainable.items()}
    return model, loss_fn, inputs, targets, weights


def by_run(model, loss_fn, inputs, targets, weights):
    """Rows of all samples, one run after the other."""
    found = []
    for i in range(RUNS):
        own = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in own.named_parameters():
                if name in weights:
                    p.copy_(weights[name][i])
        part = slice(i * B // RUNS, (i + 1) * B // RUNS)
        x, y = (map_tensors(lambda t, part=part: t[part] if t.dim() else t, z) for z in (inputs, targets))
        found.append(truth.loop(own, loss_fn, x, y))
    return {name: torch.cat([rows[name] for rows in found]) for name in weights}


@pytest.mark.parametrize("name", ZOO)
def test_rows_and_clamped_sums_are_those_at_the_weights_of_each_run(name):
    model, loss_fn, inputs, targets, weights = made(name)
    exact = by_run(model, loss_fn, inputs, targets, weights)
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights)
    got, wanted = truth.flat(rows.materialize()), truth.flat(exact)
    assert ((got - wanted).norm(dim=1) <= 1e-9 * wanted.norm(dim=1)).all()
    bound = float(wanted.abs().median()) + 1e-6
    sums = rows.clamped_sums(bound, RUNS)
    for parameter, row in exact.items():
        clamped = row.double().clamp(-bound, bound).unflatten(0, (RUNS, -1)).sum(1)
        torch.testing.assert_close(sums[parameter], clamped, rtol=0, atol=1e-9 * float(wanted.norm(dim=1).max()))


@pytest.mark.parametrize("name", ["cnn", "gpt", "resnet20"])
def test_float32_is_as_close_as_float32_can_be(name):
    model, loss_fn, inputs, targets, weights = made(name, double=False)
    doubles = {n: w.double() for n, w in weights.items()}
    exact = by_run(copy.deepcopy(model).double(), loss_fn, truth.as_double(inputs), truth.as_double(targets), doubles)
    got = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights).materialize()
    plain = by_run(model, loss_fn, inputs, targets, weights)
    wanted = truth.flat(exact)
    off, theirs = ((truth.flat(r) - wanted).norm(dim=1) / wanted.norm(dim=1) for r in (got, plain))
    assert float(off.max()) <= max(2 * float(theirs.max()), 2e-5)


def test_samples_that_do_not_count_have_rows_of_zeros():
    model, loss_fn, inputs, targets, weights = made("cnn")
    where = torch.arange(B) % 3 > 0
    every = truth.flat(dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights).materialize())
    some = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights, where=where).materialize()
    assert torch.equal(truth.flat(some), every * where[:, None])
    plain = dpk.per_sample_gradients(model, loss_fn, inputs, targets, where=where).materialize()
    assert (truth.flat(plain)[~where] == 0).all()


def test_a_row_that_is_not_finite_counts_as_zero_in_its_run_alone():
    model, loss_fn, inputs, targets, weights = made("cnn", double=False)
    bad = inputs.clone()
    bad[1] = math.nan
    where = torch.arange(B) != 1
    wanted = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights, where=where)
    got = dpk.per_sample_gradients(model, loss_fn, bad, targets, weights=weights)
    for a, b in zip(got.clamped_sums(0.01, 2).values(), wanted.clamped_sums(0.01, 2).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {"weights": {}}, "weights: got"),
        (lambda w: {"weights": {n: t[:, :1] for n, t in w.items()}}, r"weights\['.*'\]: has shape"),
        (lambda w: {"weights": {n: t.double() for n, t in w.items()}}, "of torch.float64, must be"),
        (lambda w: {"weights": {n: torch.cat([t, t]) for n, t in w.items()}}, f"where N divides the {B} samples"),
        (lambda w: {"where": torch.ones(B)}, "where: got .* must be a bool tensor"),
    ],
)
def test_mistakes_are_named(change, words):
    model, loss_fn, inputs, targets, weights = made("cnn", double=False)
    with pytest.raises(ValueError, match=words):
        dpk.per_sample_gradients(model, loss_fn, inputs, targets, **change(weights))


def test_runs_that_do_not_divide_the_batch_are_refused():
    model, loss_fn, inputs, targets, _ = made("cnn")
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    with pytest.raises(ValueError, match=f"runs: got 4, must divide the number of samples, {B}"):
        rows.clamped_sums(0.1, 4)
