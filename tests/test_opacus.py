"""The drop-in: an ordinary training loop on our engine, against a loop over samples."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpkernels as dpk
from dpkernels.opacus import BatchMemoryManager, FusedDPOptimizer, PrivacyEngine
from tests.opacus_loops import BATCH, data, fixed, mlp, private, train, truth


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_a_loop_that_knows_nothing_of_privacy(kind, reduction):
    plain = mlp()
    other = kind(plain.parameters(), lr=0.1)
    model, optimizer, loader, _ = fixed(optimizer=kind, loss_reduction=reduction)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    for x, y in loader:
        other.zero_grad()
        for p, g in zip(plain.parameters(), truth(plain, x, y, 0.5), strict=True):
            p.grad = g / (BATCH if reduction == "mean" else 1)
        for group in other.param_groups:
            group["lr"] = optimizer.param_groups[0]["lr"]
        other.step()

        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


def test_it_is_what_opacus_does():
    from opacus import PrivacyEngine as Theirs

    ours, optimizer, loader, _ = fixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mlp()
        theirs, their_optimizer, _ = Theirs().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            poisson_sampling=False,
        )
        for x, y in loader:
            for m, o in ((ours, optimizer), (theirs, their_optimizer)):
                o.zero_grad()
                F.cross_entropy(m(x), y).backward()
                o.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)  # they add 1e-6 to norms


def test_noise_and_epsilon():
    """The noise has the std that was asked for, and what was spent is what is accounted."""
    engine = PrivacyEngine()
    generator = torch.Generator().manual_seed(3)
    big = nn.Linear(6, 2000).double()
    model, optimizer, loader, _ = private(big, engine=engine, noise_multiplier=2.0, noise_generator=generator)
    assert engine.get_epsilon(1e-5) == 0.0
    x, _ = next(iter(loader))
    (model(x).sum() * 0).backward()
    optimizer.step()
    spread = torch.cat([p.grad.flatten() for p in big.parameters()]).std()
    assert float(spread) == pytest.approx(2.0 * 0.5 / BATCH, rel=0.03)
    event = dpk.accounting.poisson_gaussian(2.0, 1 / 5, 1)
    assert engine.get_epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(event, 1e-5))
    assert len(engine.accountant) == 1
    (ledger,) = engine.accountant.ledgers
    assert ledger.sampling == "verified"
    assert ledger.reproducible


def test_with_epsilon():
    model = mlp()
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=BATCH, shuffle=True),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=4,
        max_grad_norm=1.0,
    )
    train(*made, epochs=4)
    assert 2.7 < engine.get_epsilon(1e-5) <= 3.0
    with pytest.raises(ValueError, match="must have none"):
        engine.make_private_with_epsilon(
            module=model, optimizer=made[1].original_optimizer, data_loader=made[2], target_epsilon=1.0,
            target_delta=1e-5, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_other_clip_rules(clipping):
    bound = [0.1, 0.2, 0.3, 0.4] if clipping == "per_layer" else 0.5
    model, optimizer, loader, _ = fixed(clipping=clipping, max_grad_norm=bound)
    rule = dpk.clipping.PerLayer(bound) if clipping == "per_layer" else dpk.clipping.Automatic(bound)
    x, y = next(iter(loader))
    loss = lambda out, target: F.cross_entropy(out, target, reduction="none")  # noqa: E731
    wanted = dpk.per_sample_gradients(model.to_standard_module(), loss, x, y).clip_sum(rule).sum
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for (name, p), (key, g) in zip(model.to_standard_module().named_parameters(), wanted.items(), strict=True):
        assert name == key
        torch.testing.assert_close(p.grad, g / BATCH, rtol=1e-9, atol=1e-12)
    assert optimizer.max_grad_norm == pytest.approx(rule.row_norm)


def test_virtual_batches():
    """Physical batches of three give what whole batches give."""
    whole, optimizer, loader, _ = fixed()
    train(whole, optimizer, loader)
    parts, optimizer, loader, engine = fixed()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        train(parts, optimizer, small)
    assert len(engine.accountant) == 5
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_virtual_batches_of_poisson_sampling():
    model, optimizer, loader, engine = private(noise_multiplier=1.0)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        assert len(small) >= len(loader)
        train(model, optimizer, small, epochs=2)
    assert len(engine.accountant) == 10


def test_a_loss_of_two_forwards():
    """Of one batch: a record's rows are added up before they are clipped, so that it counts once."""
    model, optimizer, loader, _ = fixed()
    plain = copy.deepcopy(model.to_standard_module())
    x, y = next(iter(loader))
    (F.cross_entropy(model(x), y) + F.cross_entropy(model(2 * x), y)).backward()
    optimizer.step()
    wanted = truth(plain, x, y, 0.5, lambda out, t: F.cross_entropy(out, t), also=lambda x: 2 * x)
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g / BATCH, rtol=1e-9, atol=1e-12)


def test_eval_mode_and_no_grad_are_the_model_itself():
    model, _, loader, _ = fixed()
    x, _ = next(iter(loader))
    with torch.no_grad():
        assert torch.equal(model(x), model.to_standard_module()(x))
    model.eval()
    assert not model.to_standard_module().training
    out = model(x)
    out.sum().backward()
    assert model.to_standard_module()[0].weight.grad is not None
    model.to_standard_module().words = "its own"
    assert model.words == "its own"  # what the model has, its wrapper has


def test_checkpoints(tmp_path):
    model, optimizer, loader, engine = private(optimizer=torch.optim.SGD, noise_multiplier=1.0)
    train(model, optimizer, loader)
    engine.save_checkpoint(tmp_path / "run", module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    other, other_optimizer, other_loader, other_engine = private(copy.deepcopy(mlp()), noise_multiplier=1.0)
    found = other_engine.load_checkpoint(tmp_path / "run", module=other, optimizer=other_optimizer)
    assert found == {"epoch": 1}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    assert other_engine.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
    train(other, other_optimizer, other_loader)
    assert len(other_engine.accountant) == 10


def test_noise_schedules():
    """As Opacus's, which set the multiplier: each release is entered with its own."""
    model, optimizer, loader, engine = private(noise_multiplier=2.0)
    x = iter(loader)
    for multiplier in (2.0, 1.0):
        optimizer.noise_multiplier = multiplier
        a, b = next(x)
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    (ledger,) = engine.accountant.ledgers
    wanted = dpk.accounting.compose(
        dpk.accounting.poisson_gaussian(2.0, 0.2, 1), dpk.accounting.poisson_gaussian(1.0, 0.2, 1)
    )
    assert ledger.epsilon(1e-5) == pytest.approx(dpk.accounting.epsilon(wanted, 1e-5))


def test_closures_and_hooks():
    model, optimizer, loader, _ = fixed()
    x, y = next(iter(loader))
    seen = []
    optimizer.attach_step_hook(lambda o: seen.append(o))

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert seen == [optimizer]


def test_ghost_mode_returns_the_criterion():
    model = mlp()
    criterion = nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=criterion,
        data_loader=DataLoader(TensorDataset(*data()), batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )  # fmt: skip
    assert made[2] is criterion
    train(made[0], made[1], made[3], loss=made[2])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_fused_optimizer_of_opacus_hooks():
    """Opacus's own model and loop, our clip and noise: what its optimizer gives, without noise; noise of the std."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    x, y = data(BATCH)
    found = []
    for kind, std in ((DPOptimizer, 0.0), (FusedDPOptimizer, 0.0), (FusedDPOptimizer, 1.0)):
        model = GradSampleModule(mlp())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = kind(sgd, noise_multiplier=std, max_grad_norm=0.5, expected_batch_size=BATCH)
        for part in ((x[:5], y[:5]), (x[5:], y[5:])):
            optimizer.signal_skip_step(do_skip=len(part[0]) == 5)
            F.cross_entropy(model(part[0]), part[1]).backward()
            optimizer.step()
            optimizer.zero_grad() if len(part[0]) == 5 else None
        found.append([p.grad.clone() for p in model.parameters()])
    for theirs, ours, noisy in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(noisy, ours)
