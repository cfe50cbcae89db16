"""What three papers show, in small: `python -m bench papers DIRECTORY [diff2 | prisma | sdm]`.

DIRECTORY has california-housing and mnist as published. Each ends in under three minutes on two cores, with a table, a
plot and all records in results/. Settings come from a small search of ours over what each function lists; epsilons do
not count it. What is measured on training data is not private, and is shown because these are public data.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dpkernels import plot
from dpkernels.algorithms import DIFF2, SDMDSGD, PriSMA, datasets, federation, topologies
from dpkernels.algorithms import problems as p
from dpkernels.algorithms.federation import History
from dpkernels.columns import aligned

RESULTS = Path(__file__).parent.parent / "results"
Lines = dict[str, list[tuple[float, float]]]


def shown(name: str, what: str) -> Callable[[dict[str, float]], None]:
    def show(record: dict[str, float]) -> None:
        print(f"  {name}: round {record['round']:.0f}, {what} {record[what]:.4g}", file=sys.stderr, flush=True)

    return show


def loss_and_slope(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], data: datasets.Data) -> list[float]:
    """The mean loss over data, and the norm of its gradient."""
    loss = loss_fn(model(data[0]), data[1]).mean()
    slope = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    return [float(loss.detach()), float(slope)]


def finish(name: str, title: str, axes: tuple[str, str], lines: Lines, histories: dict[str, History]) -> None:
    RESULTS.mkdir(exist_ok=True)
    for kind, history in histories.items():
        history.to_json(RESULTS / f"papers-{name}-{kind.lower().replace(' ', '-')}.json")
    plot.save(RESULTS / f"papers-{name}.svg", title, *axes, lines, logarithmic=(False, False))
    print(f"saved to {RESULTS.name}/papers-{name}.svg and .json", flush=True)


def diff2(directory: Path) -> None:
    """DIFF2-GD against DP-GD: loss on California housing, epsilon 3, 2,000 rounds of 10 clients, three seeds.

    Searched, on an eighth of the records with the noise of all: for DP-GD step sizes 0.25 to 2 and thresholds 0.1 to 2;
    for DIFF2 some 300 combinations of those with restarts every 2 to 60 rounds, differences clipped to 0.5 to 10 and
    splits of 1.1 to 3. One seed each; six and eight of them then by their means over four.
    """
    train, test = datasets.california_housing(directory)
    clients = [(train[0][i], train[1][i]) for i in federation.iid(len(train[0]), 10)]
    settings = {
        "DP-GD": {"restart_every": 1, "lr": 0.25, "gradient_norm": 1.0, "difference_norm": 1.0, "split": 1.0},
        "DIFF2-GD": {"restart_every": 2, "lr": 0.5, "gradient_norm": 0.8, "difference_norm": 3.0, "split": 1.1},
    }
    measures = ("train loss", "train gradient norm", "test loss")
    rows = [("", *measures, "epsilon", "published", "seconds")]
    histories: dict[str, History] = {}
    lines: Lines = {}
    for name, chosen in settings.items():
        runs = []
        for seed in (1, 2, 3):
            model = p.softplus_regression(8, seed=1)
            algorithm = DIFF2.with_budget(
                model, p.squared_loss, clients, epsilon=3.0, delta=1e-5, rounds=2000, seed=seed, **chosen
            )
            run = federation.run(
                algorithm,
                2000,
                every=200,
                public={"test loss": lambda m=model: loss_and_slope(m, p.squared_loss, test)[0]},
                not_private={
                    "train loss": lambda m=model: loss_and_slope(m, p.squared_loss, train)[0],
                    "train gradient norm": lambda m=model: loss_and_slope(m, p.squared_loss, train)[1],
                },
            )
            last = run.records[-1]
            print(f"  {name}, seed {seed}: train loss {last['train loss']:.5f}", file=sys.stderr, flush=True)
            histories[f"{name} {seed}"] = run
            runs.append(run)
        published = algorithm.epsilon(1e-5, accounting="published")
        ends = [[run.records[-1][k] for run in runs] for k in measures]
        figures = [f"{statistics.fmean(end):.5f} ± {statistics.stdev(end):.5f}" for end in ends]
        rows.append((name, *figures, f"{last['epsilon']:.2f}", f"{published:.2f}", f"{last['seconds']:.0f}"))
        lines[name] = mean_line(runs, "round", "train loss")
    print("\n" + aligned(rows))
    finish("diff2", "California housing, epsilon 3", ("round", "train loss"), lines, histories)


def mean_line(runs: list[History], x: str, y: str) -> list[tuple[float, float]]:
    """The mean over runs, record by record."""
    together = zip(*(run.records for run in runs), strict=True)
    return [(same[0][x], statistics.fmean(record[y] for record in same)) for same in together]


def prisma(directory: Path) -> None:
    """PriSMA against DPSGD-GC: the gradient's norm on the problem of its Figure 1, epsilon 1, 500 rounds of 10 clients.

    Searched, at 2,000 records: step sizes 0.02 to 0.5, for PriSMA momentum 0.01 to 0.1, differences 0.005 to 0.02.
    """
    rounds = 500
    settings = {
        "DPSGD-GC": {"lr": 0.05, "momentum": 1.0, "server_norm": None, "difference_norm": None},
        "PriSMA": {"lr": 0.05, "momentum": 0.01, "server_norm": 1.0, "difference_norm": 0.01},
    }
    rows = [("records of a client", *settings, "epsilon")]
    lines: Lines = {name: [] for name in settings}
    histories: dict[str, History] = {}
    for copies in (1, 3, 6):
        clients = p.least_squares_clients(10, 2000, 10, copies=copies)
        everything = tuple(torch.cat(parts) for parts in zip(*clients, strict=True))
        found = []
        for name, chosen in settings.items():
            model = p.RegularisedLeastSquares()
            algorithm = PriSMA.with_budget(
                model,
                p.least_squares,
                clients,
                epsilon=1.0,
                delta=1e-4,
                rounds=rounds,
                gradient_norm=5.0,
                batch_size=200 * copies,
                seed=1,
                **chosen,
            )
            history = federation.run(
                algorithm,
                rounds,
                every=rounds // 25,
                delta=1e-4,
                not_private={"gradient norm": lambda m=model, d=everything: loss_and_slope(m, p.least_squares, d)[1]},
                show=shown(f"{name}, {2000 * copies} records", "gradient norm"),
            )
            histories[f"{name} {2000 * copies}"] = history
            norms = [r["gradient norm"] for r in history.records[-5:]]  # the last fifth: one value is a lottery
            found.append(statistics.fmean(norms))
            lines[name].append((2000 * copies, found[-1]))
            spent = history.records[-1]["epsilon"]
        rows.append((f"{2000 * copies}", *(f"{norm:.4f}" for norm in found), f"{spent:.2f}"))
    print("\nnorm of the gradient, mean over the last fifth of the rounds\n" + aligned(rows))
    title = "Non-convex least squares, epsilon 1"
    finish("prisma", title, ("records of a client", "gradient norm"), lines, histories)


def sdm(directory: Path) -> None:
    """SDM-DSGD against DC-DSGD and DSGD: MNIST accuracy at equal bytes and equal epsilon, 50 nodes.

    Searched for each, with one seed: step sizes 1, 4, 16 and clamps 0.01, 0.03, 0.1. Means of three seeds.
    """
    train, test = datasets.images(directory, "mnist")
    parts = federation.iid(len(train[0]), 50)
    nodes = [(train[0][i].flatten(1), train[1][i]) for i in parts]
    topology = topologies.erdos_renyi(50, 0.35, seed=1)
    settings = {
        "DSGD": (40, {"keep_probability": 1.0, "mixing": 1.0, "lr": 16.0, "clamp": 0.01}),
        "DC-DSGD": (80, {"keep_probability": 0.5, "mixing": 1.0, "lr": 16.0, "clamp": 0.01}),
        "SDM-DSGD": (200, {"keep_probability": 0.2, "mixing": 0.5, "lr": 4.0, "clamp": 0.03}),
    }
    rows = [("", "test accuracy", "rounds", "MB sent", "epsilon", "published", "seconds")]
    lines: Lines = {}
    histories: dict[str, History] = {}
    for name, (rounds, chosen) in settings.items():
        runs = []
        for seed in (1, 2, 3):
            model = p.logistic_regression()

            def accuracy(m: nn.Module = model) -> float:
                return float((m(test[0].flatten(1)).argmax(1) == test[1]).float().mean())

            algorithm = SDMDSGD.with_budget(
                model,
                p.cross_entropy,
                nodes,
                epsilon=4.0,
                delta=1e-5,
                rounds=rounds,
                topology=topology,
                batch_size=64,
                sampling_rate=64 / 1200,
                seed=seed,
                **chosen,
            )
            start = time.perf_counter()
            runs.append(federation.run(algorithm, rounds, every=rounds // 10, public={"accuracy": accuracy}))
            seconds = time.perf_counter() - start
            print(f"  {name}, seed {seed}: {runs[-1].records[-1]['accuracy']:.1%}", file=sys.stderr, flush=True)
            histories[f"{name} {seed}"] = runs[-1]
        ends = [run.records[-1]["accuracy"] for run in runs]
        published = algorithm.epsilon(1e-5, accounting="published")
        lines[name] = [(sent / 1e6, share) for sent, share in mean_line(runs, "bytes", "accuracy")]
        spread = f"{statistics.fmean(ends):.1%} ± {statistics.stdev(ends):.1%}"
        sent, spent = algorithm.bytes_sent / 1e6, runs[-1].records[-1]["epsilon"]
        rows.append(
            (
                name,
                spread,
                f"{rounds}",
                f"{sent:.0f}",
                f"{spent:.2f}",
                f"{published:.2g} (no guarantee)",
                f"{seconds:.0f}",
            )
        )
    print("\n" + aligned(rows))
    title = "MNIST, logistic regression, 50 nodes, epsilon 4"
    finish("sdm", title, ("MB sent", "test accuracy"), lines, histories)


KINDS = {"diff2": diff2, "prisma": prisma, "sdm": sdm}


def main(words: list[str]) -> None:
    if not words or not set(words[1:]) <= set(KINDS):
        sys.exit(f"bench papers: got {words}, must be a directory with data sets, and any of {', '.join(KINDS)}")
    for kind in words[1:] or KINDS:
        start = time.perf_counter()
        print(f"\n{kind}: {(KINDS[kind].__doc__ or '').splitlines()[0]}", flush=True)
        KINDS[kind](Path(words[0]))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
