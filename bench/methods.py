"""One training step by each method, ours and its peers: each gives a function that takes a step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.algorithms import DPSGD
from dpkernels.bench.models import Task
from dpkernels.opacus import PrivacyEngine

CLIP, NOISE, RATE = 1.0, 1.0, 0.01
Step = Callable[[], object]


def plain(task: Task) -> Step:
    """Ordinary SGD on the mean loss: the limit."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        task.loss_fn(model(task.inputs), task.targets).mean().backward()
        optimizer.step()

    return step


def ours(task: Task) -> Step:
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batch = len(task.inputs)
    training = DPSGD(
        model, task.loss_fn, optimizer=optimizer, max_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=batch
    )
    return lambda: training.step(task.inputs, task.targets)


def drop_in(task: Task) -> Step:
    """An ordinary loop, as Opacus's users have it, on our engine."""
    model = copy.deepcopy(task.model)
    loader = DataLoader(TensorDataset(task.inputs, task.targets), batch_size=len(task.inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches are not sampled here
        private, optimizer, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            data_loader=loader,
            noise_multiplier=NOISE,
            max_grad_norm=CLIP,
            poisson_sampling=False,
        )

    def step() -> None:
        private.handed.give(len(task.inputs), True, None)  # as the loader would, which is not measured here
        optimizer.zero_grad()
        task.loss_fn(private(task.inputs), task.targets).mean().backward()
        optimizer.step()

    return step


def _opacus_optimizer(kind: Any, model: torch.nn.Module, task: Task) -> Any:
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # said at the first step
    return kind(
        torch.optim.SGD(model.parameters(), lr=RATE),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=len(task.inputs),
        loss_reduction="mean",
    )


def opacus_hooks(task: Task, functorch: bool = False) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(copy.deepcopy(task.model), loss_reduction="sum", force_functorch=functorch)
    optimizer = _opacus_optimizer(DPOptimizer, model, task)

    def step() -> None:
        optimizer.zero_grad()
        task.loss_fn(model(task.inputs), task.targets).sum().backward()
        optimizer.step()

    return step


def opacus_ghost(task: Task) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        copy.deepcopy(task.model), max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = _opacus_optimizer(DPOptimizerFastGradientClipping, model, task)

    def step() -> None:
        optimizer.zero_grad()
        losses = task.loss_fn(model(task.inputs), task.targets)
        DPTensorFastGradientClipping(model, optimizer, losses, "mean").backward()
        optimizer.step()

    return step


def backpack(task: Task) -> Step:
    """Per-sample gradients by BackPACK, clipped and summed in plain torch; it does not know all layers."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    if task.token_loss or any(type(m).__name__ in ("GroupNorm", "LayerNorm") for m in task.model.modules()):
        raise NotImplementedError("BackPACK has no per-sample gradients of its layers")
    model = extend(copy.deepcopy(task.model))
    loss_fn = extend(torch.nn.CrossEntropyLoss(reduction="sum"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batch = len(task.inputs)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def step() -> None:
        optimizer.zero_grad()
        with backpack(BatchGrad()):
            loss_fn(model(task.inputs), task.targets).backward()
        total = clipped_sum({name: p.grad_batch for name, p in model.named_parameters()}, CLIP)
        for name, p in model.named_parameters():
            p.grad = (total[name] + NOISE * CLIP * torch.randn_like(p)) / batch
        optimizer.step()

    return step


def by_vmap(task: Task) -> Step:
    """Per-sample gradients by torch.func, clipped and summed in plain torch."""
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batch = len(task.inputs)

    def step() -> None:
        total = vmap_sum(model, task, slice(None))
        for name, p in model.named_parameters():
            p.grad = (total[name] + NOISE * CLIP * torch.randn_like(p)) / batch
        optimizer.step()

    return step


def vmap_sum(model: torch.nn.Module, task: Task, samples: slice) -> dict[str, torch.Tensor]:
    """The clipped sum over some samples, without noise."""
    return clipped_sum(vmap_rows(model, task, samples), CLIP)


def vmap_rows(model: torch.nn.Module, task: Task, samples: slice = slice(None)) -> dict[str, torch.Tensor]:
    """Per-sample gradients by torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return task.loss_fn(functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that vmap runs one by one
        return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, task.inputs[samples], task.targets[samples])


def clipped_sum(rows: dict[str, torch.Tensor], bound: float) -> dict[str, torch.Tensor]:
    """In plain torch."""
    weights = clip_weights(rows, bound)
    return {name: torch.einsum("b,b...->...", weights, row) for name, row in rows.items()}


def clip_weights(rows: dict[str, torch.Tensor], bound: float) -> torch.Tensor:
    """What makes each row at most `bound` long."""
    norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()], dim=1).norm(dim=1)
    return (bound / norms.clamp(min=1e-30)).clamp(max=1.0)


METHODS: dict[str, Callable[[Task], Step]] = {
    "SGD": plain,
    "dpkernels": ours,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "vmap": by_vmap,
}
MORE: dict[str, Callable[[Task], Step]] = {
    "SGD": plain,
    "dpkernels": ours,
    "dpkernels drop-in": drop_in,
    "Opacus hooks": opacus_hooks,
    "Opacus functorch": partial(opacus_hooks, functorch=True),
    "Opacus ghost": opacus_ghost,
    "BackPACK": backpack,
    "vmap": by_vmap,
}
