"""DP-SGD against its definition, sample by sample, with the same noise."""

import copy

import pytest
import torch
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import DPSGD
from tests import models, truth

SIZE = 6.0


def make(model, loss_fn=truth.cross_entropy, optimizer=torch.optim.SGD, lr=0.1, **options):
    settings = {"max_norm": 0.5, "noise_multiplier": 1.3, "expected_batch_size": SIZE, "seed": 3} | options
    return DPSGD(model, loss_fn, optimizer=optimizer(model.parameters(), lr=lr), **settings)


def definition(model, loss_fn, batches, *, max_norm, noise_multiplier, optimizer, seed=3):
    """The algorithm by its words: loop over samples, clip, add, noise, divide, step."""
    noise = dpk.Gaussian(noise_multiplier * max_norm if noise_multiplier else 0.0, seed=seed)
    for x, y in batches:
        rows = truth.loop(model, loss_fn, x, y)
        scale = (max_norm / truth.flat(rows).norm(dim=1)).clamp(max=1).nan_to_num(1.0)
        sums = [torch.einsum("b,b...->...", scale, row.double()) for row in rows.values()]
        dpk.add_gaussian_(sums, noise)
        for p, s in zip(model.parameters(), sums, strict=True):
            p.grad = (s / SIZE).to(p.dtype)
        optimizer.step()
    return model


def batches_of(name, sizes, seed=0):
    torch.manual_seed(seed)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    chosen = [torch.randint(0, models.B, (n,)) for n in sizes]
    pick = lambda x, i: truth.map_tensors(lambda t: t[i], x)  # noqa: E731
    batches = [(pick(truth.as_double(inputs), i), pick(targets, i)) for i in chosen]
    return model.double(), loss_fn, batches


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm", "routed"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_equals_its_definition(name, optimizer):
    """Batches of changing sizes, an empty one among them."""
    model, loss_fn, batches = batches_of(name, [5, 0, 3, 6, 1])
    other = copy.deepcopy(model)
    algorithm = make(model, loss_fn, optimizer)
    for x, y in batches:
        algorithm.step(x, y)
    options = {"max_norm": 0.5, "noise_multiplier": 1.3, "optimizer": optimizer(other.parameters(), lr=0.1)}
    definition(other, loss_fn, batches, **options)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "gpt", "lstm"])
def test_without_clipping_and_noise_it_is_sgd(name):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    algorithm = DPSGD(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_norm=float("inf"),
        noise_multiplier=0.0,
        expected_batch_size=models.B,
    )
    for _ in range(10):
        algorithm.step(inputs, targets)
        optimizer.zero_grad()
        loss_fn(other(inputs), targets).mean().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert algorithm.epsilon(1e-5) == float("inf")


def check_micro_batches(make, size):
    """A batch in parts is the whole batch, with noise once; for any algorithm that `make` makes."""
    model, loss_fn, batches = batches_of("cnn", [6, 5])
    other = copy.deepcopy(model)
    whole, parts = make(model, loss_fn), make(other, loss_fn, micro_batch_size=size)
    for x, y in batches:
        whole.step(x, y)
        parts.step(x, y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert len(whole.ledger) == len(parts.ledger) == 2


@pytest.mark.parametrize("size", [1, 2, 4, 6, 100])
def test_micro_batches_have_noise_once(size):
    check_micro_batches(make, size)


def test_micro_batches_of_dicts_and_tuples():
    model, loss_fn, batches = batches_of("hugging_face_bert", [5])
    make(model, loss_fn, micro_batch_size=2).step(*batches[0])


def test_rules_other_than_flat():
    for rule in (dpk.clipping.Automatic(0.5), dpk.clipping.PerLayer([0.2] * 6)):
        model, loss_fn, batches = batches_of("cnn", [6])
        algorithm = make(model, loss_fn, clip=rule, noise_multiplier=0.0)
        rows = truth.loop(model, loss_fn, *batches[0])
        want = dpk.clip_sum(list(rows.values()), rule).sum
        algorithm.step(*batches[0])
        for p, s in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, s / SIZE)


def test_noise_is_relative_to_the_bound_and_counted():
    model = nn.Linear(300, 100)
    algorithm = make(model, max_norm=0.25, noise_multiplier=2.0, sampling_rate=0.1, seed=None, lr=0.0)
    for _ in range(4):
        algorithm.step(torch.zeros(0, 300), torch.zeros(0, dtype=torch.long))
    spread = float(model.weight.grad.std()) * SIZE
    assert abs(spread - 0.5) < 0.02
    event = dpk.accounting.poisson_gaussian(2.0, 0.1, 4)
    assert algorithm.epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(event, 1e-5))


def test_gradients_from_elsewhere_are_refused():
    model, loss_fn, batches = batches_of("cnn", [6])
    algorithm = make(model, loss_fn)
    algorithm.step(*batches[0])
    algorithm.step(*batches[0])  # the private gradient of the last step may stand there
    loss_fn(model(batches[0][0]), batches[0][1]).sum().backward()
    releases = len(algorithm.ledger)
    with pytest.raises(ValueError, match=r"parameter 0\.weight: has a \.grad that is not private"):
        algorithm.step(*batches[0])
    assert len(algorithm.ledger) == releases
    for to_none in (True, False):
        algorithm.optimizer.zero_grad(set_to_none=to_none)
        algorithm.step(*batches[0])


def test_parameters_that_would_be_stepped_without_noise_are_refused():
    model, head = nn.Linear(5, 4), nn.Linear(4, 3)
    loss_fn = lambda h, y: truth.cross_entropy(head(h), y)  # noqa: E731
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1.0)
    options = {"max_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
    with pytest.raises(ValueError, match=r"optimizer: has a parameter of shape \(3, 4\) that is not of the model"):
        DPSGD(model, loss_fn, optimizer=optimizer, **options)
    algorithm = make(model)
    algorithm.optimizer.add_param_group({"params": head.parameters()})
    with pytest.raises(ValueError, match="optimizer"):
        algorithm.step(torch.randn(4, 5), torch.randint(0, 3, (4,)))
    frozen = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    frozen[0].requires_grad_(False).weight.grad = torch.ones(4, 5)
    with pytest.raises(ValueError, match=r"0\.weight"):
        make(frozen)


def test_a_seed_makes_it_reproducible():
    finals = []
    for seed in (1, 1, 2, None):
        model, loss_fn, batches = batches_of("cnn", [6, 6])
        algorithm = make(model, loss_fn, seed=seed)
        for x, y in batches:
            algorithm.step(x, y)
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(finals[0], finals[1])
    assert not torch.equal(finals[0], finals[2])
    assert not torch.equal(finals[0], finals[3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": -1.0}, "max_norm"),
        ({"max_norm": float("inf")}, "max_norm"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"clip": dpk.clipping.Flat(2.0)}, "clip: its rows are up to 2 long, must be at most max_norm = 0.5"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make(nn.Linear(3, 2), **options)


def test_optimizer_must_be_one():
    with pytest.raises(ValueError, match="optimizer"):
        DPSGD(
            nn.Linear(3, 2),
            truth.cross_entropy,
            optimizer=None,
            max_norm=1.0,
            noise_multiplier=1.0,
            expected_batch_size=4,
        )


def test_an_interrupted_step_shows_no_sum_without_noise(monkeypatch):
    torch.manual_seed(0)
    model, _, x, y = models.ZOO["cnn"]()
    algorithm = make(model)
    algorithm.step(x, y)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.ops.dpkernels, "weighted_sum_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        algorithm.step(x, y)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_written_again_unless_let_go():
    torch.manual_seed(0)
    model, _, x, y = models.ZOO["cnn"]()
    algorithm = make(model)
    algorithm.step(x, y)
    first = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: grad.clone() for name, grad in first.items()}
    versions = {name: grad._version for name, grad in first.items()}
    algorithm.optimizer.zero_grad()
    algorithm.step(x, y)
    assert all(torch.equal(first[name], copy) for name, copy in copies.items())
    second = {name: p.grad for name, p in model.named_parameters()}
    algorithm.step(x, y)
    assert all(p.grad is second[name] for name, p in model.named_parameters())
    assert all(p.grad._version > versions[name] for name, p in model.named_parameters()), "autograd must see the write"


def test_a_parameter_that_begins_to_train_during_a_step_is_refused():
    """Frozen when the step began, it has no noise, so that its gradient must not reach the optimizer."""

    class Unfreezing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.stage = nn.Linear(3, 3), nn.Linear(3, 2), 0

        def forward(self, x):
            if self.stage == 1:  # a number, so that the model is not checked again
                self.first.requires_grad_(True)
            return self.last(self.first(x))

    model = Unfreezing()
    model.first.requires_grad_(False)
    training = DPSGD(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        max_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=4,
    )
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    training.step(x, y)
    before, model.stage = model.first.weight.detach().clone(), 1
    with pytest.raises(ValueError, match=r"first\.weight: got a gradient that bypasses"):
        training.step(x, y)
    assert torch.equal(model.first.weight, before)
    assert model.first.weight.grad is None
    model.first.requires_grad_(False)
    training._written.check()
    model.first.requires_grad_(True)
    with pytest.raises(ValueError, match=r"first\.weight: began to train during a step"):
        training._written.write({})
