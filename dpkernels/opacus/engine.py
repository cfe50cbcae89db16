"""PrivacyEngine: Opacus's signatures on our engine.

What is done otherwise than there, because it would not be private or would fail in silence:

- parameters that are replaced, added or frozen after wrapping raise, as does one that no gradient was recorded for;
- sums are divided by the loader's batch size, a constant that you gave, not by a number made of the data's size;
- a sampler that Poisson sampling would replace is refused; without Poisson sampling none of its gain is counted, and a
  rate that the loader contradicts is refused; stepping on other batches than were handed out, or twice on one, is too;
- a loss that the model makes itself (Hugging Face's, over the tokens of a batch) is refused: it mixes samples;
- epsilon is counted by privacy loss distributions whatever accountant is asked for, from what was released;
- secure mode needs nothing to be installed.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpkernels import accounting, checkpoint, checks, clipping, events
from dpkernels.ledger import Ledger
from dpkernels.members import members_of
from dpkernels.noise import Gaussian, std_for
from dpkernels.opacus.loader import HandOuts, Noted, PoissonBatches, PrivateLoader, other_loader, poisson_loader
from dpkernels.opacus.module import PrivateModule, Reduction
from dpkernels.opacus.optimizer import PrivateOptimizer
from dpkernels.ranks import several

ACCOUNTANTS = ("prv", "rdp", "pld")
MODES = ("hooks", "functorch", "ew", "ghost", "no_op")


@dataclass
class _Made:
    """What one call of `make_private` made that a checkpoint needs."""

    noise: Gaussian
    loader: PrivateLoader

    @property
    def batches(self) -> PoissonBatches | None:
        noted: Any = self.loader.batch_sampler
        return noted.batches if isinstance(noted.batches, PoissonBatches) else None


class Accountant:
    """What a `PrivacyEngine` has spent, as its users ask for it."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sampling rate and number of steps of each kind of release."""
        return [
            (z, ledger.sampling_rate, count)
            for ledger in self.ledgers
            for z, _, count in ledger.state_dict()["releases"]
        ]

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Of everything released so far, by all that this engine made private."""
        if not self.ledgers:
            return 0.0
        return events.epsilon(events.compose(*(ledger.event() for ledger in self.ledgers)), delta)

    def __len__(self) -> int:
        return sum(len(ledger) for ledger in self.ledgers)


class PrivacyEngine:
    """Makes a model, its optimizer and its data loader private; then train as before.

    Args:
        accountant: "prv", "rdp" or "pld": all are counted by privacy loss distributions, which bound epsilon from
            above and are no looser. "gdp" is refused: it is an approximation, and may be below the true epsilon.
        secure_mode: noise whose low bits are safe too (see `dpkernels.Gaussian`); needs `loss_reduction="sum"`.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        if accountant not in ACCOUNTANTS:
            raise ValueError(f"accountant: got {accountant!r}, must be one of {', '.join(ACCOUNTANTS)}")
        self.accountant = Accountant()
        self.secure_mode = secure_mode
        self._made: list[_Made] = []

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: Reduction = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        sample_rate: float | None = None,
        max_bytes: int | None = None,
        physical_batch_size: int | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        """The model, optimizer and data loader to train with: as given, made private.

        Args as of Opacus; besides:
            clipping: "flat", "per_layer" (`max_grad_norm` is then one number for each parameter) or "automatic".
            grad_sample_mode: any of Opacus's; all are one engine here. With "ghost" the criterion is returned too, in
                the third place, as it was.
            sample_rate: the probability of a record to be in a batch, if it is not 1 / len(data_loader). The default
                is made of the data's size, which it takes for public.
            max_bytes: as in `dpkernels.per_sample_gradients`.
            physical_batch_size: run the model on exactly so many samples at a time, filled up with zeros, whatever the
                size of a batch; the loader's batch size in secure mode, else as the loop calls it.
        """
        _refuse_others(batch_first, grad_sample_mode, others)
        if several():
            raise ValueError(
                "ranks: there are several, must be one: a loop written for Opacus runs in one process here. "
                "Use dpkernels.algorithms.DPSGD, which runs on several"
            )
        if not isinstance(data_loader, DataLoader):
            raise ValueError(f"data_loader: got a {type(data_loader).__name__}, must be a torch DataLoader")
        if self.secure_mode and noise_generator is not None:
            raise ValueError("noise_generator: got one, must be None in secure mode: keys come from the OS")
        if self.secure_mode and loss_reduction != "sum":
            raise ValueError(
                f"loss_reduction: got {loss_reduction!r}, must be 'sum' in secure mode (and so must the loss): what is "
                "divided by the size of a batch has other last bits in another batch"
            )
        size = _batch_size(data_loader)
        if self.secure_mode:
            physical_batch_size = physical_batch_size or math.ceil(size)
            max_bytes = 1 << 30 if max_bytes is None else max_bytes
        if not module.training:
            raise ValueError("module: is in eval mode, must be in train mode: call module.train() first")
        if poisson_sampling:
            rate = 1 / len(data_loader) if sample_rate is None else checks.positive("sample_rate", sample_rate, high=1)
            private_loader = poisson_loader(data_loader, rate)
        else:
            private_loader, rate = other_loader(data_loader, sample_rate)
        ledger = Ledger(rate)
        rule = _rule(clipping, max_grad_norm)
        members = members_of(module)
        multiplier = checks.number("noise_multiplier", noise_multiplier, low=0)
        std = std_for(multiplier, rule.row_norm, members.width, secure=self.secure_mode)
        seed = None if noise_generator is None else _seed(noise_generator)
        noise = Gaussian(std, seed=seed, secure=self.secure_mode, ledger=ledger)
        _refuse_other_parameters(members.trainable, optimizer)
        private = PrivateModule(
            module,
            loss_reduction=loss_reduction,
            max_bytes=max_bytes,
            physical_batch_size=physical_batch_size,
            secure=self.secure_mode,
        )
        made = _Made(noise, private_loader)
        seed_of_batches = None if made.batches is None else made.batches.seed
        private.handed = private_loader.handed = HandOuts(ledger if made.batches else None, seed_of_batches)
        stepping = PrivateOptimizer(
            optimizer,
            private,
            noise=noise,
            noise_multiplier=multiplier,
            clip=rule,
            expected_batch_size=size,
            sample_rate=rate,
        )
        self.accountant.ledgers.append(ledger)
        self._made.append(made)
        if "ghost" in grad_sample_mode:
            return private, stepping, criterion if criterion is not None else nn.CrossEntropyLoss(), private_loader
        return private, stepping, private_loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """`make_private` with the least noise for which so many epochs spend at most (target_epsilon, target_delta)."""
        if len(self.accountant):
            raise ValueError(
                f"make_private_with_epsilon: this engine has {len(self.accountant)} releases, must have none: they "
                "would not be in the budget. Use a new PrivacyEngine"
            )
        steps = checks.whole("epochs", epochs, low=1) * len(data_loader)
        given = arguments.get("sample_rate")
        if arguments.get("poisson_sampling", True):
            rate = 1 / len(data_loader) if given is None else given
        else:
            rate = other_loader(data_loader, given)[1]
        multiplier = accounting.calibrate(
            lambda z: accounting.poisson_gaussian(z, rate, steps), target_epsilon, target_delta
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=multiplier,
            max_grad_norm=max_grad_norm,
            **arguments,
        )

    def get_epsilon(self, delta: float) -> float:
        """The epsilon at `delta` of everything released so far."""
        return self.accountant.get_epsilon(delta)

    @classmethod
    def is_compatible(cls, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Whether `validate` finds nothing."""
        try:
            cls.validate(module=module)
        except ValueError:
            return False
        return True

    @classmethod
    def validate(cls, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise for layers that mix samples; the rest is found at the first step, by trying."""
        for name, part in members_of(module).modules.items():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"module: {name or 'itself'} is a {type(part).__name__}, which mixes samples; must be a GroupNorm "
                    "or other: see PrivacyEngine.get_compatible_module"
                )

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy with GroupNorm in place of BatchNorm, on new weights of their own."""
        copied = copy.deepcopy(module)
        made: dict[int, nn.Module] = {}
        for name, part in list(copied.named_modules(remove_duplicate=False)):
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                like = next(copied.parameters())
                new = nn.GroupNorm(math.gcd(32, part.num_features), part.num_features, affine=part.affine)
                norm = made.setdefault(id(part), new.to(like.device, like.dtype))
                if not name:
                    return norm
                holder, _, last = name.rpartition(".")
                setattr(copied.get_submodule(holder), last, norm)
        return copied

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Weights, the optimizer's state and everything that was released; no key."""
        state = dict(checkpoint_dict or {})
        state["module_state_dict"] = _plain(module).state_dict()
        state["privacy_accountant_state_dict"] = [
            {**ledger.state_dict(), "noises": made.noise.releases, "batches": made.batches.drawn if made.batches else 0}
            for ledger, made in zip(self.accountant.ledgers, self._made, strict=True)
        ]
        if optimizer is not None:
            state["optimizer_state_dict"] = optimizer.state_dict()
        checkpoint.save(path, state)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Go on from there, after the same calls of `make_private` on a new engine.

        With generators noise and batches go on behind those of the saved run; without, they are new ones.
        """
        state = checkpoint.load(path)
        saved = state.pop("privacy_accountant_state_dict")
        if len(saved) != len(self.accountant.ledgers):
            raise ValueError(
                f"path: was saved after {len(saved)} calls of make_private, must be after the "
                f"{len(self.accountant.ledgers)} of this engine"
            )
        _plain(module).load_state_dict(state.pop("module_state_dict"))
        found = state.pop("optimizer_state_dict", None)
        if optimizer is not None and found is not None:
            optimizer.load_state_dict(found)
        for ledger, made, entries in zip(self.accountant.ledgers, self._made, saved, strict=True):
            ledger.load_state_dict(entries)
            made.noise.skip(entries["noises"])
            if made.batches is not None:
                made.batches.drawn = entries["batches"]
        return state


def _plain(module: nn.Module) -> nn.Module:
    return module.to_standard_module() if isinstance(module, PrivateModule) else module


def _batch_size(loader: DataLoader[Any]) -> float:
    """What sums are divided by: the batch size that the loader was made with."""
    batches: Any = loader.batch_sampler
    batches = batches.batches if isinstance(batches, Noted) else batches
    size = loader.batch_size or getattr(batches, "batch_size", None)
    if size is None and hasattr(batches, "sample_rate") and hasattr(batches, "num_samples"):
        size = batches.sample_rate * batches.num_samples
    if size is None:
        raise ValueError("data_loader: has no batch_size, must have one: sums are divided by it")
    return float(size)


def _rule(kind: str, max_grad_norm: float | Sequence[float]) -> clipping.Rule:
    if kind == "per_layer":
        if isinstance(max_grad_norm, int | float):
            raise ValueError(f"max_grad_norm: got {max_grad_norm!r}, must be one number for each parameter, in a list")
        return clipping.PerLayer(list(max_grad_norm))
    if not isinstance(max_grad_norm, int | float):
        raise ValueError(f"max_grad_norm: got {max_grad_norm!r}, must be one number with clipping={kind!r}")
    if kind == "flat":
        return clipping.Flat(checks.number("max_grad_norm", max_grad_norm, low=0))
    if kind == "automatic":
        return clipping.Automatic(checks.number("max_grad_norm", max_grad_norm, low=0))
    raise ValueError(f"clipping: got {kind!r}, must be 'flat', 'per_layer' or 'automatic'")


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (1,), generator=generator, device=generator.device))


def _refuse_others(batch_first: bool, mode: str, others: dict[str, Any]) -> None:
    if not batch_first:
        raise ValueError(
            "batch_first: got False, must be True: samples are dim 0 of what the model is given. Let the model "
            "transpose its input"
        )
    if mode.split("_fsdp")[0] not in MODES:
        raise ValueError(f"grad_sample_mode: got {mode!r}, must be one of {', '.join(MODES)}")
    unknown = sorted(set(others) - {"wrap_model", "rand_on_empty", "strict"})
    if unknown:
        raise TypeError(f"make_private() got an unexpected keyword argument {unknown[0]!r}")
    if others.get("wrap_model") is False:
        raise ValueError("wrap_model: got False, must be True: use the model that is returned")


def _refuse_other_parameters(trainable: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in trainable.items():
        if id(p) not in stepped:
            raise ValueError(
                f"optimizer: does not have parameter {name}, which trains; must have all that do. Give it to the "
                "optimizer, or freeze it with requires_grad_(False)"
            )
