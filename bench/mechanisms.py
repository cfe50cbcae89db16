"""What is put under audit: each releases twice, on data without or with one record, and scores how much that shows.

A mechanism is made by calling its entry here; `run(record)` runs it afresh, `claimed(delta)` is the epsilon by the
ledger of the last run. Canary mechanisms train once with many records, each in a direction of its own.
"""

import itertools
from functools import partial

import numpy as np
import torch
from torch import nn

import dpkernels as dpk
from dpkernels import audit
from dpkernels.algorithms import DIFF2, DPLSGD, DPSGD, SDMDSGD, PriSMA

MULTIPLIER = 0.7  # of each of two releases
BACKGROUND = torch.zeros(2, 3)
RECORD = torch.tensor([[100.0, 0.0, 0.0]])


class Mechanism:
    ledger: dpk.accounting.Ledger

    def claimed(self, delta):
        return self.ledger.epsilon(delta)

    def told_apart(self, **options):
        """What an attack on its two neighbours proves."""
        return audit.two_neighbours(lambda: self.run(False), lambda: self.run(True), self.claimed, **options)


class OfOp(Mechanism):
    """An op on rows in memory: `release(rows, noise)` gives the sum of (n, 3) rows, of which one has at most norm 1."""

    def __init__(self, release, secure=False):
        self._release, self._secure = release, secure
        self._data = {False: BACKGROUND, True: torch.cat([BACKGROUND, RECORD])}
        self._seeds = itertools.repeat(None) if secure else itertools.count()

    def run(self, record):
        self.ledger = dpk.accounting.Ledger()
        noise = dpk.Gaussian(MULTIPLIER, next(self._seeds), self._secure, self.ledger)
        return sum(float(self._release(self._data[record], noise)[0]) for _ in range(2))


def _momentum(rows, noise):
    norms = {"gradient_norm": 2.0, "difference_norm": 0.8, "momentum": 1 / 6}  # 1/6 * 2 + 5/6 * 0.8 = 1
    return dpk.clip_momentum_sum(rows, -rows, **norms, noise=noise).sum


def _clamped(rows, noise):
    spread = rows[:, :1].expand(-1, 3)  # the worst record is large everywhere
    return dpk.clamp_sum(spread, 3**-0.5, noise=noise).sum.sum(0, keepdim=True) / 3**0.5


def _per_layer(rows, noise):
    first, second = dpk.clip_sum([rows, rows], dpk.clipping.PerLayer([0.6, 0.8]), noise=noise).sum
    return 0.6 * first + 0.8 * second


OPS = {
    "clip_sum, Flat": lambda rows, noise: dpk.clip_sum(rows, 1.0, noise=noise).sum,
    "clip_sum, Automatic": lambda rows, noise: dpk.clip_sum(rows, dpk.clipping.Automatic(1.0), noise=noise).sum,
    "clip_sum, PerLayer": _per_layer,
    "clip_difference_sum": lambda rows, noise: dpk.clip_difference_sum(rows, torch.zeros(3), 1.0, noise=noise).sum,
    "clip_momentum_sum": _momentum,
    "clamp_sum": _clamped,
}


def linear_loss(outputs, targets):
    """Its gradient is minus the input, wherever the weights are."""
    return -outputs.squeeze(1) * targets


class OfAlgorithm(Mechanism):
    """Two steps of an algorithm on a model without bias; weights move along the record."""

    def __init__(self, make, secure=False):
        self._model = nn.Linear(3, 1, bias=False)
        options = {"max_norm": 1.0, "noise_multiplier": MULTIPLIER, "expected_batch_size": 1.0}
        options |= {"secure": True, "micro_batch_size": 3} if secure else {"seed": 1}
        self._algorithm = make(self._model, linear_loss, **options)

    def run(self, record):
        self.ledger = self._algorithm.ledger = self._algorithm.noise.ledger = dpk.accounting.Ledger()
        with torch.no_grad():
            self._model.weight.zero_()
        x = torch.cat([BACKGROUND, RECORD]) if record else BACKGROUND
        for _ in range(2):
            self._algorithm.step(x, torch.ones(len(x)))
        return float(self._model.weight.detach()[0, 0])


def dp_sgd(model, loss_fn, **options):
    return DPSGD(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), **options)


def dp_lsgd(model, loss_fn, **options):
    return DPLSGD(model, loss_fn, local_steps=2, lr=0.5, **options)


ALGORITHMS = {"DPSGD": dp_sgd, "DPLSGD": dp_lsgd}


def canaries(make, *, steps=4, rate=1.0, multiplier=1.0):
    """For `one_run`: train(included) with an algorithm, and the claim.

    Canary j is an input along coordinate j, so its gradient has a direction of its own and the largest norm there is.
    """
    ledgers = []

    def train(included):
        m = len(included)
        model = nn.Linear(m, 1, bias=False)
        nn.init.zeros_(model.weight)
        options = {"max_norm": 1.0, "noise_multiplier": multiplier, "expected_batch_size": 1.0, "sampling_rate": rate}
        options |= {"seed": 1}
        algorithm = make(model, linear_loss, **options)
        ledgers.append(algorithm.ledger)
        x = 100.0 * torch.eye(m)[torch.from_numpy(included)]
        for indices in dpk.sampling.poisson(len(x), rate, steps, seed=1, ledger=algorithm.ledger):
            algorithm.step(x[indices], torch.ones(len(indices)))
        return model.weight.detach()[0].numpy().astype(np.float64)

    return train, lambda delta: ledgers[-1].epsilon(delta)


def turning_loss(outputs, targets):
    """Gradients are steep at 0, steep the other way elsewhere, and so are their differences; targets have the sign."""
    return targets * (-100.0 * outputs + 1e6 / 3 * outputs**3).squeeze(1)


class OfFederated(Mechanism):
    """Two rounds of an algorithm with one client that has one record, whose target is 1 or replaced by -1."""

    STD = 1.4

    def __init__(self):
        self._model = nn.Linear(1, 1, bias=False)
        self._algorithms = {t: self.make([(torch.ones(1, 1), torch.tensor([t]))]) for t in (-1.0, 1.0)}

    def run(self, record):
        algorithm = self._algorithms[1.0 if record else -1.0]
        self.ledger = dpk.accounting.Ledger(adjacency="replace-one")
        algorithm.round, algorithm.ledgers = 0, [self.ledger]
        for noise in self.noises(algorithm):
            noise.ledger = self.ledger
        with torch.no_grad():
            self._model.weight.zero_()
        return self.score(algorithm)


class OfDIFF2(OfFederated):
    def make(self, clients):
        norms = {"gradient_norm": 1.0, "difference_norm": 1.0}
        noises = {"gradient_noise": self.STD, "difference_noise": self.STD}
        return DIFF2(self._model, turning_loss, clients, lr=1.0, restart_every=2, **norms, **noises, seed=1)

    def noises(self, algorithm):
        return [algorithm._noise]

    def score(self, algorithm):
        algorithm.step()
        first, move = float(algorithm._estimate["weight"]), abs(float(self._model.weight.detach()))
        algorithm.step()
        return (float(algorithm._estimate["weight"]) - first) / move - first


class OfPriSMA(OfFederated):
    ROW = 0.2 * 1.0 + 0.8 * 0.5

    def make(self, clients):
        norms = {"momentum": 0.2, "gradient_norm": 1.0, "server_norm": None, "difference_norm": 0.5}
        noises = {"noise": self.STD * self.ROW, "initial_noise": self.STD}
        return PriSMA(self._model, turning_loss, clients, lr=1.0, batch_size=1, **norms, **noises, seed=1)

    def noises(self, algorithm):
        algorithm._estimates = [algorithm._zeros()]
        return algorithm._noises

    def score(self, algorithm):
        algorithm.step()
        first = float(algorithm._estimates[0]["weight"])
        algorithm.step()
        return (float(algorithm._estimates[0]["weight"]) - 0.8 * first) / self.ROW - first


class OfSDMDSGD(Mechanism):
    """Two rounds of one node that sends all of its coordinates; the worst record is large in each."""

    def __init__(self, secure=False):
        self._model = nn.Linear(3, 1, bias=False)
        options = {"secure": True, "micro_batch_size": 3} if secure else {"seed": 1}
        settings = {"lr": 1.0, "mixing": 1.0, "keep_probability": 1.0, "clamp": 1.0, "batch_size": 1.0}
        settings |= {"sampling_rate": 1.0, "noise_std": MULTIPLIER * 3**0.5, "topology": torch.ones(1, 1)}
        data = {False: BACKGROUND, True: torch.cat([BACKGROUND, torch.full((1, 3), 100.0)])}
        self._algorithms = {
            record: SDMDSGD(self._model, linear_loss, [(x, torch.ones(len(x)))], **settings, **options)
            for record, x in data.items()
        }

    def run(self, record):
        algorithm = self._algorithms[record]
        self.ledger = algorithm._noises[0].ledger = dpk.accounting.Ledger()
        algorithm.node_vectors.zero_()
        for _ in range(2):
            algorithm.step()
        return float(algorithm.node_vectors.sum())


TRAINING = {name: partial(OfAlgorithm, make) for name, make in ALGORITHMS.items()}
TRAINING |= {"DIFF2": OfDIFF2, "PriSMA": OfPriSMA, "SDMDSGD": OfSDMDSGD}
