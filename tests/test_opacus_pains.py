"""What goes wrong elsewhere: each pain of a private training loop is a test here, refused or done right."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.opacus import PrivacyEngine
from tests.opacus_loops import BATCH, N, data, fixed, mlp, private, train, truth


def test_two_backward_passes_before_a_step():
    """Gradient accumulation: both batches are in the sum, divided by both.

    Under Poisson sampling, and over the end of an epoch, a record could be in both: refused.
    """
    model, optimizer, loader, engine = fixed()
    plain = copy.deepcopy(model.to_standard_module())
    seen = []
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        seen.append((x, y))
        if len(seen) == 2:
            optimizer.step()
            break
    wanted = truth(plain, *(torch.cat(t) for t in zip(*seen, strict=True)), 0.5)
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g / (2 * BATCH), rtol=1e-9, atol=1e-12)
    assert len(engine.accountant) == 1
    for _ in range(2):
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="got backward passes of 2 batches"):
        optimizer.step()
    model, optimizer, loader, engine = private()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="got backward passes of 5 batches"):
        optimizer.step()
    assert len(engine.accountant) == 0


def test_a_second_backward_through_one_forward_is_refused():
    model, _, loader, _ = fixed()
    x, y = next(iter(loader))
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time through one forward"):
        loss.backward()


def test_parameters_replaced_after_wrapping_raise():
    model, optimizer, loader, engine = fixed()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    model.to_standard_module()[0] = nn.Linear(6, 5).double()  # as adding LoRA would
    with pytest.raises(ValueError, match=r"parameter 0.weight is new since make_private"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"parameter 0.weight is new"):
        model(x)
    assert len(engine.accountant) == 0
    model, optimizer, *_ = fixed()
    model.to_standard_module()[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameter 0.weight no longer trains"):
        model(x)


def test_the_normaliser_does_not_depend_on_the_data():
    """A record more or less changes nothing but the sum."""
    sizes = set()
    for n in (N - 1, N, N + 1):
        loader = DataLoader(TensorDataset(*data(n)), batch_size=BATCH)
        sizes.add(private(loader=loader)[1].expected_batch_size)
    assert sizes == {float(BATCH)}


def test_a_gradient_that_is_not_private_is_refused():
    model, optimizer, loader, engine = fixed()
    x, y = next(iter(loader))
    F.cross_entropy(model.to_standard_module()(x), y).backward()  # the model that was wrapped
    with pytest.raises(ValueError, match=r"has a .grad that is not private"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="no backward has gone through the private model"):
        optimizer.step()
    assert len(engine.accountant) == 0


def test_secure_mode():
    engine = PrivacyEngine(secure_mode=True)
    with pytest.raises(ValueError, match="loss_reduction: got 'mean', must be 'sum' in secure mode"):
        private(engine=engine, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="noise_generator"):
        private(engine=engine, loss_reduction="sum", noise_generator=torch.Generator())
    model, optimizer, loader, _ = private(engine=engine, loss_reduction="sum", noise_multiplier=1.0)
    step = optimizer._noise.lattice
    seen = []
    model.to_standard_module().register_forward_pre_hook(lambda m, inputs: seen.append(len(inputs[0])))
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            F.cross_entropy(model(x), y, reduction="sum").backward()
        else:
            model(x).sum().backward()
        optimizer.step()
        for p in model.parameters():
            assert torch.equal((p.grad / step).round() * step, p.grad)
    checking = {3, 5, 7, 11, 13, 2, 4, 0}  # the sizes of the self-check, and of nobody
    assert set(seen) - checking <= {BATCH}
    assert engine.get_epsilon(1e-5) > 0


def test_secure_mode_is_the_sum_of_the_parts():
    """The batch runs in parts of the same size, filled up; what comes out is the clipped sum of all samples."""
    engine = PrivacyEngine(secure_mode=True)
    loader = DataLoader(TensorDataset(*data()), batch_size=11)
    model, optimizer, loader, _ = private(
        engine=engine, loader=loader, loss_reduction="sum", noise_multiplier=1e-5, physical_batch_size=4,
        poisson_sampling=True, sample_rate=1.0,
    )  # fmt: skip
    plain = copy.deepcopy(model.to_standard_module())
    x, y = next(iter(loader))
    assert len(x) == N
    out = model(x)
    torch.testing.assert_close(out, plain(x))
    F.cross_entropy(out, y, reduction="sum").backward()
    optimizer.step()
    for p, g in zip(model.parameters(), truth(plain, x, y, 0.5), strict=True):
        torch.testing.assert_close(p.grad, g, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_first": False}, "batch_first: got False"),
        ({"clipping": "adaptive"}, "clipping: got 'adaptive', must be"),
        ({"clipping": "per_layer"}, "max_grad_norm: got 0.5, must be one number for each parameter"),
        ({"max_grad_norm": [1.0]}, r"max_grad_norm: got \[1.0\], must be one number"),
        ({"grad_sample_mode": "magic"}, "grad_sample_mode: got 'magic'"),
        ({"loss_reduction": "none"}, "loss_reduction: got 'none'"),
        ({"noise_multiplier": -1.0}, "noise_multiplier: got -1.0"),
        ({"wrap_model": False}, "wrap_model"),
        ({"sample_rate": 2.0}, "sample_rate: got 2"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        private(**arguments)


def test_more_that_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch_frist'"):
        private(batch_frist=True)
    with pytest.raises(ValueError, match="accountant: got 'gdp'"):
        PrivacyEngine(accountant="gdp")
    with pytest.raises(ValueError, match="data_loader: got a list"):
        private(loader=[1])
    model = mlp()
    some = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer: does not have parameter 2.weight, which trains"):
        private(model, optimizer=lambda *a, **k: some)
    with pytest.raises(ValueError, match="is not of the model"):
        private(model, optimizer=lambda *a, **k: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))]))


def test_batch_norm():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    assert not PrivacyEngine.is_compatible(module=model)
    with pytest.raises(ValueError, match="module: 1 is a BatchNorm1d, which mixes samples"):
        PrivacyEngine.validate(module=model)
    cured = PrivacyEngine.get_compatible_module(model)
    assert isinstance(cured[1], nn.GroupNorm)
    assert PrivacyEngine.is_compatible(module=cured)
    private_model, optimizer, loader, _ = private(cured.double())
    train(private_model, optimizer, loader)


class Two(nn.Module):
    """A second output that has not the sample in dim 0."""

    def __init__(self, second):
        super().__init__()
        self.a, self.b, self.second = nn.Linear(6, 20).double(), nn.Linear(20, 2).double(), second

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h), self.second(h)


@pytest.mark.parametrize("second", [lambda h: h.mean(0), lambda h: h.T @ h, lambda h: (h @ h.T).mean()])
def test_outputs_that_mix_samples_cannot_be_differentiated(second):
    model, optimizer, loader, _ = private(Two(second))
    for x, y in loader:
        out, mixed = model(x)
        if len(x):
            with pytest.raises(ValueError, match="whose dim 0 is not the sample"):
                mixed.sum().backward()
        optimizer.zero_grad()
        F.cross_entropy(out, y).backward()
        optimizer.step()


def test_outputs_that_mix_samples_in_dim_0_are_refused():
    model, _, loader, _ = private(Two(lambda h: h @ h.T))
    x = next(batch for batch, _ in loader if len(batch))
    with pytest.raises(ValueError, match="parameter a"):
        model(x)


@pytest.mark.parametrize("kept", [nn.Linear(6, 3).double(), nn.LayerNorm(6)])  # tapped, and with a backward of ours
def test_a_tensor_kept_on_the_side_is_refused(kept):
    class Side(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = kept, nn.Linear(6, 2).double()

        def forward(self, x):
            self.kept = self.a(x.to(kept.weight.dtype))
            return self.b(x)

    side = Side()
    model, _, loader, _ = fixed(model=side)
    x, y = next(iter(loader))
    out = model(x)
    with pytest.raises(ValueError, match="through a tensor that it made and did not return"):
        (F.cross_entropy(out, y) + side.kept.square().mean()).backward()


def test_gradients_of_inputs_leave_no_rows():
    """Adversarial examples by autograd.grad; a gradient of a gradient is refused."""
    model, optimizer, loader, _ = fixed()
    plain = copy.deepcopy(model.to_standard_module())
    x, y = next(iter(loader))
    noisy = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(noisy), y), noisy)
    moved = x + 0.1 * slope.sign()
    F.cross_entropy(model(moved), y).backward()
    optimizer.step()
    for p, g in zip(model.parameters(), truth(plain, moved, y, 0.5), strict=True):
        torch.testing.assert_close(p.grad, g / BATCH, rtol=1e-9, atol=1e-12)
    (slope,) = torch.autograd.grad(F.cross_entropy(model(noisy), y), noisy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_parts_of_a_fixed_size_with_a_mean():
    model, optimizer, loader, _ = fixed(physical_batch_size=3)
    plain = copy.deepcopy(model.to_standard_module())
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for p, g in zip(model.parameters(), truth(plain, x, y, 0.5), strict=True):
        torch.testing.assert_close(p.grad, g / BATCH, rtol=1e-9, atol=1e-12)


def test_eval_mode_and_lbfgs_are_refused_at_once():
    with pytest.raises(ValueError, match="module: is in eval mode"):
        private(mlp().eval())
    with pytest.raises(ValueError, match="optimizer: got an LBFGS"):
        private(optimizer=torch.optim.LBFGS)
