"""A training run from a few words: algorithm, data set, epsilon. What `dpkernels train` runs.

Models, step sizes and bounds are chosen by hand for these public data sets; the epsilon of a run does not count how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import checks

from . import datasets, federation, problems, topologies
from .datasets import Data
from .diff2 import DIFF2
from .dp_lsgd import DPLSGD
from .dp_sgd import DPSGD
from .prisma import PriSMA
from .sdm_dsgd import SDMDSGD

ALGORITHMS = ("dp-sgd", "dp-lsgd", "diff2", "prisma", "sdm-dsgd")
DATA = ("digits", "mnist", "fashion-mnist", "emnist-letters", "california-housing", "gas-turbine", "covtype")


@dataclass(frozen=True)
class Task:
    """A public data set, a model for it, and how good that is."""

    name: str
    train: Data
    test: Data
    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    measure: str  # what `score` is

    def score(self) -> float:
        """On the test set, which is public."""
        with torch.no_grad():
            outputs = torch.cat([self.model(x) for x in self.test[0].split(1000)])
        if self.measure == "accuracy":
            return (outputs.argmax(1) == self.test[1]).float().mean().item()
        return self.loss_fn(outputs, self.test[1]).mean().item()

    def train_loss(self) -> float:
        """On the training set: NOT private."""
        with torch.no_grad():
            losses = [self.loss_fn(self.model(x), y) for x, y in zip(*(t.split(1000) for t in self.train), strict=True)]
        return torch.cat(losses).mean().item()


def task(name: str, directory: str | Path | None = None, seed: int | None = None) -> Task:
    """The data set of this name; others than the digits are read from a directory."""
    if name not in DATA:
        raise ValueError(f"data: got {name!r}, must be one of {', '.join(DATA)}")
    if name != "digits" and directory is None:
        raise ValueError(
            f"data_dir: got None, must be a directory that has {name}, as published at {datasets.ADDRESSES[name]}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.seed() if seed is None else torch.manual_seed(seed)
        if name == "digits":
            x, y, test_x, test_y = datasets.digits()
            model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.1, 0.1)
            return Task(name, (x, y), (test_x, test_y), model, problems.cross_entropy, "accuracy")
        if name in ("california-housing", "gas-turbine"):
            load = datasets.california_housing if name == "california-housing" else datasets.gas_turbine
            train, test = load(directory or "")
            model = problems.softplus_regression(train[0].shape[1])
            return Task(name, train, test, model, problems.squared_loss, "squared error")
        if name == "covtype":
            train, test = datasets.covtype(directory or "")
            model = nn.Sequential(nn.Linear(54, 64), nn.Tanh(), nn.Linear(64, 7))
            return Task(name, train, test, model, problems.cross_entropy, "accuracy")
        (train, test) = (((x - 0.3) / 0.35, y) for x, y in datasets.images(directory or "", name))
        classes = 26 if name == "emnist-letters" else 10
        return Task(name, train, test, problems.small_cnn(classes), problems.cross_entropy, "accuracy")


@dataclass(frozen=True)
class Settings:
    """Of an algorithm: how many steps, of what size, and the constants of its constructor."""

    steps: int
    batch_size: int
    parties: int
    constants: dict[str, Any]


def settings(algorithm: str) -> Settings:
    """What was chosen by hand for the digits; other data sets take the same."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got {algorithm!r}, must be one of {', '.join(ALGORITHMS)}")
    return {
        "dp-sgd": Settings(200, 256, 1, {"lr": 1.0, "max_norm": 1.0}),
        "dp-lsgd": Settings(100, 256, 1, {"local_steps": 10, "lr": 0.2, "max_norm": 1.0}),
        "diff2": Settings(
            60, 0, 2, {"lr": 0.5, "restart_every": 5, "gradient_norm": 1.0, "difference_norm": 0.5}
        ),
        "prisma": Settings(
            60, 128, 2,
            {"lr": 2.0, "momentum": 0.5, "gradient_norm": 1.0, "server_norm": 2.0, "difference_norm": 0.5},
        ),
        "sdm-dsgd": Settings(40, 128, 4, {"lr": 8.0, "mixing": 0.7, "keep_probability": 0.5, "clamp": 0.01}),
    }[algorithm]  # fmt: skip


class Run:
    """Training by one algorithm with the least noise for which all steps spend at most (epsilon, delta).

    Formal guarantee: that of the algorithm, under the adjacency its class states, for the weights after any number of
    steps; scores on the public test set are made of the weights alone.
    """

    def __init__(
        self,
        task: Task,
        algorithm: str,
        *,
        epsilon: float,
        delta: float,
        steps: int | None = None,
        seed: int | None = None,
        **constants: Any,
    ) -> None:
        chosen = settings(algorithm)
        unknown = sorted(set(constants) - set(chosen.constants))
        if unknown:
            raise ValueError(f"{unknown[0]}: is no constant of {algorithm}, must be one of {sorted(chosen.constants)}")
        self.task, self.name, self.delta, self.done = task, algorithm, delta, 0
        self.steps = chosen.steps if steps is None else checks.whole("steps", steps, low=1)
        self.constants = {**chosen.constants, **constants}
        self._seed = seed
        budget = {"epsilon": epsilon, "delta": delta}
        if chosen.parties == 1:
            self._rate = min(1.0, chosen.batch_size / len(task.train[0]))
            self.algorithm = self._of_batches(chosen.batch_size, budget)
        else:
            self.algorithm = self._of_parties(chosen, budget)
        self._batches: Iterator[Tensor] | None = None

    def _of_batches(self, size: int, budget: dict[str, float]) -> Any:
        common: dict[str, Any] = {"steps": self.steps, "seed": self._seed, **budget}
        common |= {"expected_batch_size": size, "sampling_rate": self._rate}
        if self.name == "dp-lsgd":
            return DPLSGD.with_budget(self.task.model, self.task.loss_fn, **common, **self.constants)
        constants = dict(self.constants)
        optimizer = torch.optim.SGD(self.task.model.parameters(), lr=constants.pop("lr"))
        return DPSGD.with_budget(self.task.model, self.task.loss_fn, optimizer=optimizer, **common, **constants)

    def _of_parties(self, chosen: Settings, budget: dict[str, float]) -> Any:
        x, y = self.task.train
        parts = federation.iid(len(x), chosen.parties)
        parties = [(x[part], y[part]) for part in parts]
        common = {**self.constants, **budget, "rounds": self.steps, "seed": self._seed}
        model, loss_fn = self.task.model, self.task.loss_fn
        if self.name == "diff2":
            return DIFF2.with_budget(model, loss_fn, parties, **common)
        smallest = min(len(part) for part in parts)
        size = min(chosen.batch_size, smallest)
        if self.name == "prisma":
            return PriSMA.with_budget(model, loss_fn, parties, batch_size=size, **common)
        return SDMDSGD.with_budget(
            model, loss_fn, parties, topology=topologies.ring(chosen.parties), batch_size=size,
            sampling_rate=size / smallest, **common,
        )  # fmt: skip

    def step(self) -> None:
        """One step, or round."""
        if self.name in ("dp-sgd", "dp-lsgd"):
            if self._batches is None:
                left, ledger = self.steps - self.done, self.algorithm.ledger
                n = len(self.task.train[0])
                start = self.done if self._seed is not None else 0
                self._batches = iter(dpk.sampling.poisson(n, self._rate, left, self._seed, start=start, ledger=ledger))
            batch = next(self._batches)
            self.algorithm.step(*(t[batch] for t in self.task.train))
        else:
            self.algorithm.step()
        self.done += 1

    def bring_together(self) -> None:
        """The model becomes that of all ranks, where each has nodes of its own. All of them must call it."""
        if isinstance(self.algorithm, SDMDSGD):
            self.algorithm.gathered()

    def epsilon(self) -> float:
        """Spent so far."""
        return float(self.algorithm.epsilon(self.delta))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; see `dpk.checkpoint`."""
        return {"name": self.name, "data": self.task.name, "steps": self.steps, "done": self.done,
                "constants": self.constants, "algorithm": self.algorithm.state_dict()}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run with the same words was."""
        for word, mine in (("name", self.name), ("data", self.task.name), ("steps", self.steps),
                           ("constants", self.constants)):  # fmt: skip
            if state[word] != mine:
                raise ValueError(f"checkpoint: has {word} = {state[word]!r}, must be {mine!r} as in this run")
        self.algorithm.load_state_dict(state["algorithm"])
        self.done = state["done"]
