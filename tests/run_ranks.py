"""What each rank runs for test_ranks.py: `python -m tests.run_ranks WHAT DIRECTORY [...]`; results go there by rank."""

import itertools
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dpkernels as dpk
from dpkernels.algorithms import BVRLSGD, DIFF2, DPLSGD, DPSGD, SDMDSGD, PriSMA, topologies
from tests.truth import cross_entropy

RECORDS, STEPS, RATE, SEED = 26, 6, 0.25, 7
ABSENT = object()  # an argument that is not given


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.twice, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(F.tanh(F.linear(F.tanh(self.twice(x)), self.twice.weight)))


def data(shape):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (RECORDS,), generator=generator)


def mlp():
    return Tied().double(), *data((5,))


def cnn():
    layers = nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).double(), *data((1, 6, 6))


def of_batches(make, dtype=torch.float64, seed=SEED, **options):
    """DP-SGD and DP-LSGD: (step, algorithm, what to compare)."""

    def build(made):
        model, x, y = made()
        model, x = model.to(dtype), x.to(dtype)
        settings = {"max_norm": 0.5, "noise_multiplier": 0.7, "expected_batch_size": 6.0, "sampling_rate": RATE}
        settings |= {"seed": seed, "micro_batch_size": 2, **options}
        algorithm = make(model, cross_entropy, **{n: value for n, value in settings.items() if value is not ABSENT})
        batches = None

        def step(number):
            nonlocal batches
            if batches is None:
                left = STEPS - number
                batches = iter(dpk.sampling.poisson(len(x), RATE, left, SEED, start=number, ledger=algorithm.ledger))
            indices = next(batches)
            algorithm.step(x[indices], y[indices])
            return len(indices)

        return algorithm, step, lambda: list(model.parameters())

    return build


def sgd(model, loss_fn, make=DPSGD, **options):
    return make(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), **options)


def of_clients(make, parties, **options):
    def build(made):
        model, x, y = made()
        cuts = {5: [0, 5, 9, 14, 20, 26], 4: [0, 7, 13, 20, 26], 13: range(0, RECORDS + 1, 2)}[parties]
        clients = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(cuts)]
        mine = dpk.ranks.current().share(len(clients))  # what is not of this rank need not be there
        clients = [client if i in mine else None for i, client in enumerate(clients)]
        algorithm = make(model, cross_entropy, clients, **{"seed": SEED, **options})

        def step(number):
            algorithm.step()
            return 1

        def result():
            return [algorithm.gathered()] if isinstance(algorithm, SDMDSGD) else list(model.parameters())

        return algorithm, step, result

    return build


NORMS = {"gradient_norm": 0.5, "difference_norm": 0.5}
NOISES = {"gradient_noise": 0.1, "difference_noise": 0.1}
diff2 = partial(of_clients, DIFF2, 5, **{"lr": 0.3, "restart_every": 3, **NORMS, **NOISES})
MOMENTUM = {"lr": 0.5, "momentum": 0.3, "server_norm": 1.0, "batch_size": 3, **NORMS}
prisma = partial(of_clients, PriSMA, **{"noise": 0.4, "initial_noise": 0.4, **MOMENTUM})
SPARSE = {"lr": 0.5, "mixing": 0.4, "keep_probability": 0.5, "clamp": 0.1, "batch_size": 2.0}
sdm = partial(of_clients, topology=topologies.ring(4), **SPARSE)
ALGORITHMS = {
    "DPSGD": of_batches(sgd),
    "DPSGD, one part": of_batches(sgd, micro_batch_size=None),
    "DPSGD, float32": of_batches(sgd, torch.float32),
    "DPSGD, float32, one part": of_batches(sgd, torch.float32, micro_batch_size=None),
    "DPSGD, key of the OS": of_batches(sgd, seed=None, noise_multiplier=1e-4),
    "DPSGD, secure": of_batches(sgd, seed=None, noise_multiplier=1e-4, secure=True),
    "DPLSGD": of_batches(partial(DPLSGD, local_steps=3, lr=0.3)),
    "DIFF2": diff2(),
    "DIFF2, BVRLSGD": diff2(routine=BVRLSGD(3, 2, 1.0, 1.0)),
    "PriSMA": prisma(5),
    "PriSMA, fixed-size": prisma(5, sampling="fixed-size"),
    "SDMDSGD": sdm(SDMDSGD, 4, noise_std=0.5, sampling_rate=0.3),
    "DIFF2, key of the OS": diff2(seed=None, gradient_noise=1e-5, difference_noise=1e-5),
    # their batches have other records in each run, unless all are in each
    "PriSMA, key of the OS": prisma(13, seed=None, noise=1e-5, initial_noise=1e-5, sampling="fixed-size", batch_size=2),
    "SDMDSGD, key of the OS": sdm(SDMDSGD, 4, seed=None, noise_std=1e-5, sampling_rate=1.0),
    "SDMDSGD, budget": sdm(SDMDSGD.with_budget, 4, epsilon=4.0, delta=1e-2, rounds=STEPS, sampling_rate=1.0),
}
# With next to no noise, for the sake of comparison.
UNSEEDED = [name for name in ALGORITHMS if "key" in name or "secure" in name]
MODELS = {"mlp": mlp, "cnn": cnn}
CASES = [f"{name}: {model}" for name in ALGORITHMS for model in MODELS]


def train(case, *, save=None, resume=None):
    """A run of a case: its weights, epsilon and so on in the end; `save` gets a checkpoint in the middle."""
    torch.manual_seed(1 + dpk.ranks.current().rank)  # ranks start from the first one's weights
    name, model = case.split(": ")
    algorithm, step, weights = ALGORITHMS[name](MODELS[model])
    first = 0
    if resume is not None:
        first = STEPS // 2
        algorithm.load_state_dict(dpk.checkpoint.load(resume))
    sizes = []
    for number in range(first, STEPS):
        if save is not None and number == STEPS // 2:
            state = algorithm.state_dict()
            if dpk.ranks.current().rank == 0:
                dpk.checkpoint.save(save, state)
        sizes.append(step(number))
    ledgers = getattr(algorithm, "ledgers", None) or [algorithm.ledger]
    counted = name not in (*UNSEEDED, "SDMDSGD") and resume is None  # that of samples of nodes takes seconds
    epsilon = algorithm.epsilon(1e-2) if counted else math.inf
    return {
        "weights": [t.detach().clone() for t in weights()],
        "epsilon": epsilon,  # of what was released, which is compared in any case
        "releases": [ledger.state_dict()["releases"] for ledger in ledgers],
        "sampling": [ledger.sampling for ledger in ledgers],
        "bytes": getattr(algorithm, "bytes_sent", 0),
        "sizes": sizes,
    }


def equal(directory, *others):
    """All cases; checkpoints of another number of ranks are gone on from, too."""
    found = {}
    for i, case in enumerate(CASES):
        before = dpk.ranks.current().bytes_sent
        found[case] = train(case, save=directory / f"{i}.ckpt")
        found[case]["wire"] = dpk.ranks.current().bytes_sent - before
        for other in others:
            found[case, "resumed"] = train(case, resume=Path(other) / f"{i}.ckpt")
    torch.save(found, directory / f"rank{dpk.ranks.current().rank}.pt")


def fault(directory, kind, case, rank, timeout):
    """One rank comes to grief in its third step."""
    ranks = dpk.ranks.start(float(timeout))
    dpk.ranks.current = lambda: ranks
    torch.manual_seed(1)
    name, model = case.split(": ")
    algorithm, step, _ = ALGORITHMS[name](MODELS[model])
    whole = algorithm.loss_fn

    def failing(outputs, targets):
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "stall":
            time.sleep(60)
        if kind == "error":
            raise ValueError("a disk is full")
        return whole(outputs, targets)

    for number in range(STEPS):
        if number == 2:
            state = algorithm.state_dict()
            if ranks.rank == 0:
                dpk.checkpoint.save(directory / "checkpoint", state)
            if ranks.rank == int(rank):
                algorithm.loss_fn = failing
            (directory / f"at{ranks.rank}").write_text(str(time.time()))
        step(number)


def differ(directory):
    """One rank has another version, seed, model or setting; then all go on with the same."""
    odd = dpk.ranks.current().rank == 1
    version = dpk.__version__

    def make(width=5, **options):
        model = nn.Linear(width, 3)
        return of_batches(sgd, torch.float32, **options)(lambda: (model, torch.zeros(4, width), torch.zeros(4).long()))

    def other_version():
        dpk.__version__ = "9.9" if odd else version
        make()

    tries = {
        "version": other_version,
        "seed": lambda: make(seed=8 if odd else 7),
        "model": lambda: make(6 if odd else 5),
        "setting": lambda: make(max_norm=0.6 if odd else 0.5),
        "unshared": lambda: make()[0].step(torch.zeros(2, 5), torch.zeros(2).long()),
    }
    words = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            words[name] = str(error)
        dpk.__version__ = version
    time.sleep(2.5 if odd else 0)  # what was caught does not matter to who has to wait now
    make()[1](0)
    torch.save(words, directory / f"rank{dpk.ranks.current().rank}.pt")


def budgets(directory):
    """Two steps are paid for; what the third one raises."""
    plan = {"epsilon": 2.0, "delta": 1e-2}
    tries = {
        "DPSGD": of_batches(partial(sgd, make=DPSGD.with_budget), **plan, steps=2, noise_multiplier=ABSENT),
        "DIFF2": of_clients(DIFF2.with_budget, 5, lr=0.3, restart_every=3, rounds=2, **NORMS, **plan),
        "BVRLSGD": diff2(routine=BVRLSGD(6, 2, 1.0, 1.0), budget=(6.0, 1e-2), gradient_noise=5.0),
        "PriSMA": of_clients(PriSMA.with_budget, 5, rounds=2, **MOMENTUM, **plan),
        "SDMDSGD": sdm(SDMDSGD.with_budget, 4, rounds=2, sampling_rate=1.0, **plan),
    }
    words = {}
    for name, build in tries.items():
        algorithm, step, weights = build(mlp)
        try:
            for number in range(3):
                step(number)
        except RuntimeError as error:
            words[name] = f"{type(error).__name__}: {error}"
        ledgers = getattr(algorithm, "ledgers", None) or [algorithm.ledger]
        words[name, "entries"] = [len(ledger) for ledger in ledgers]
        words[name, "weights"] = [t.detach().clone() for t in weights()]
    torch.save(words, directory / f"rank{dpk.ranks.current().rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, *more = sys.argv[1:]
    {"equal": equal, "fault": fault, "differ": differ, "budgets": budgets}[what](Path(where), *more)
