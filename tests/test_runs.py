"""Gradients of runs of samples, each at weights of its own, against the model with those weights."""

import copy
import math

import pytest
import torch

import dpkernels as dpk
from dpkernels import each
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


@pytest.mark.parametrize("wide", [each.WIDE, 1])
@pytest.mark.parametrize("name", ["cnn", "gpt", "resnet20", "three_uses"])
def test_float32_is_as_close_as_float32_can_be(name, wide, monkeypatch):
    """With lines of any width by our kernel too."""
    monkeypatch.setattr(each, "WIDE", wide)
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


@pytest.mark.parametrize("wide", [each.WIDE, 1])
def test_a_row_that_is_not_finite_counts_as_zero_in_its_run_alone(wide, monkeypatch):
    monkeypatch.setattr(each, "WIDE", wide)
    model, loss_fn, inputs, targets, weights = made("cnn", double=False)
    bad = inputs.clone()
    bad[1] = math.nan
    where = torch.arange(B) != 1
    wanted = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights, where=where)
    got = dpk.per_sample_gradients(model, loss_fn, bad, targets, weights=weights)
    for a, b in zip(got.clamped_sums(0.01, 2).values(), wanted.clamped_sums(0.01, 2).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_row_that_is_not_finite_changes_no_bit_of_others():
    """It is left out by selection, in what rows are made of: by the same kernels, with the same bound."""
    model, loss_fn, inputs, targets, weights = made("cnn", double=False)
    bad, zero = inputs.clone(), inputs.clone()
    bad[1], zero[1] = math.nan, 0
    found = []
    for x in (bad, zero):
        rows = dpk.per_sample_gradients(model, loss_fn, x, targets, weights=weights)
        found.append([t[1] for t in rows.clamped_sums(1e-3, 2).values()])  # the sums of the other run
        rows = dpk.per_sample_gradients(model, loss_fn, x, targets, weights=weights, where=torch.arange(B) != 1)
        found[-1] += [t[0] for t in rows.clamped_sums(1e-3, 2).values()]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_where_the_input_of_a_wide_layer_is_not_finite_its_bias_gets_nothing_either():
    """The kernel that multiplies notes such lines: all of a sample's rows are then zero."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 4)
    inputs, targets = torch.randn(6, 2, 300), torch.randn(6)  # two lines a sample
    inputs[1, 1, 299], inputs[4, 0, 0] = math.nan, -math.inf
    weights = {"weight": torch.randn(2, 4, 300), "bias": torch.randn(2, 4)}

    def loss_fn(y, t):
        return (y.nan_to_num(0, 0, 0).sum((1, 2)) - t).square()  # gradients are finite

    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights)
    kept = torch.tensor([True, False, True, True, False, True])
    good = torch.where(kept[:, None, None], inputs, 0)
    wanted = dpk.per_sample_gradients(model, loss_fn, good, targets, weights=weights, where=kept)
    for name, total in rows.clamped_sums(0.01, 2).items():
        assert torch.equal(total, wanted.clamped_sums(0.01, 2)[name])
        assert torch.equal(total, rows.clamped_sums(0.01, 2, where=kept)[name])
    some = torch.tensor([True, True, False, True, True, True])
    fewer = wanted.clamped_sums(0.01, 2, where=some)
    for name, total in rows.clamped_sums(0.01, 2, where=some).items():
        assert torch.equal(total, fewer[name])
        assert not torch.equal(total, wanted.clamped_sums(0.01, 2)[name])


class Saturated(torch.nn.Module):
    """Where an infinite input leaves every gradient finite."""

    def __init__(self):
        super().__init__()
        self.wide, self.other = torch.nn.Linear(300, 6), torch.nn.Linear(4, 2)

    def forward(self, a, b):
        return torch.cat([torch.tanh(self.wide(a)), self.other(b)], 1)


def saturated():
    torch.manual_seed(0)
    model = Saturated()
    weights = {n: p.detach().abs() + 0.01 * torch.rand(2, *p.shape) for n, p in model.named_parameters()}
    inputs, targets = (torch.randn(10, 300).abs(), torch.randn(10, 4)), torch.randn(10, 8)
    return model, lambda y, t: (y - t).square().sum(1), inputs, targets, weights


def test_a_record_that_is_not_finite_is_found_where_its_gradients_are():
    model, loss_fn, inputs, targets, weights = saturated()
    inputs[0][7, 3] = math.inf
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights)
    assert rows.parts["wide.weight"][0].matrix.outer.g[7].isfinite().all()
    assert all(not total[7].any() and total[6].any() for total in rows.clamped_sums(0.05, 10).values())


def test_what_a_wide_layer_saw_of_its_input_is_not_used_once_that_has_changed():
    model, loss_fn, inputs, targets, weights = saturated()
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets, weights=weights)
    inputs[0][7, 3] = math.nan
    assert all(not total[7].any() and total[6].any() for total in rows.clamped_sums(0.05, 10).values())


def test_sequences_without_a_line_and_autocast_at_layers_of_any_width():
    for width in (200, 300):
        model, seen = torch.nn.Linear(width, 5), []
        weights = {n: torch.stack([p.detach()] * 2) for n, p in model.named_parameters()}

        def loss_fn(y, t, seen=seen):
            seen.append(y.dtype)
            return y.float().square().flatten(1).sum(1)

        rows = dpk.per_sample_gradients(model, loss_fn, torch.randn(4, 0, width), torch.randn(4), weights=weights)
        assert not any(total.any() for total in rows.clamped_sums(0.1, 2).values())
        with torch.autocast("cpu", torch.bfloat16):
            dpk.per_sample_gradients(model, loss_fn, torch.randn(4, width), torch.randn(4), weights=weights)
        assert seen[-1] == torch.bfloat16


class Halves(torch.nn.Module):
    """Uses two parts of one parameter."""

    def __init__(self):
        super().__init__()
        self.both = torch.nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return torch.tanh(x @ self.both[:3].T) @ self.both[3:]


def test_sums_are_added_to_views_of_parameters_too():
    torch.manual_seed(0)
    x, y = torch.randn(4, 4).double(), torch.randint(0, 4, (4,))
    rows = dpk.per_sample_gradients(Halves().double(), truth.cross_entropy, x, y)
    once = rows.clamped_sums(0.1, 2)
    twice = rows.clamped_sums(0.1, 2, onto={"both": once["both"].clone()})
    torch.testing.assert_close(twice["both"], 2 * once["both"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {"weights": {}}, "weights: got"),
        (lambda w: {"weights": {n: t[:, :1] for n, t in w.items()}}, r"weights\['.*'\]: has shape"),
        (lambda w: {"weights": {n: t.double() for n, t in w.items()}}, "of torch.float64, must be"),
        (lambda w: {"weights": {n: torch.cat([t, t]) for n, t in w.items()}}, f"where N divides the {B} samples"),
        (lambda w: {"where": torch.ones(B)}, "where: got .* must be a bool tensor"),
        (lambda w: {"weights": [1]}, "weights: got list, must have each parameter"),
        (lambda w: {"weights": {n: t[:0] for n, t in w.items()}}, "weights: must be tensors .* with N at least 1"),
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
    with pytest.raises(ValueError, match="onto: must have float64 sums"):
        rows.clamped_sums(0.1, 2, onto={n: t.float() for n, t in rows.clamped_sums(0.1, 2).items()})


def test_a_parameter_without_elements():
    model = torch.nn.Linear(3, 2)
    model.nothing = torch.nn.Parameter(torch.zeros(0, 3))
    rows = dpk.per_sample_gradients(model, truth.cross_entropy, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    assert rows.clamped_sums(0.1, 2)["nothing"].shape == (2, 0, 3)
