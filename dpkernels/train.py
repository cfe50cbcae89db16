"""`dpkernels train`: a private training run with progress, checkpoints and a record of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dpkernels
from dpkernels import checkpoint, checks, launch, plot, ranks

SHOWN = 20  # how often epsilon and the score are computed in a run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `dpkernels train` takes."""
    from dpkernels.algorithms.training import ALGORITHMS, DATA

    parser.add_argument("--algorithm", choices=ALGORITHMS, default="dp-sgd")
    parser.add_argument("--data", choices=DATA, default="digits", help="the digits need no files")
    parser.add_argument("--data-dir", type=Path, help="directory that has the data set's files, as published")
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget of all steps (default 3)")
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, help="steps, or rounds of a federated algorithm")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="a constant of the algorithm, such as lr=0.5"
    )
    parser.add_argument("--seed", type=int, help="make the run reproducible (not private from who knows it)")
    parser.add_argument("--out", type=Path, help="directory for what it leaves (default runs/DATA-ALGORITHM)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint there")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="train on N processes of this machine, as torchrun would"
    )
    parser.add_argument(
        "--rank-timeout", type=float, default=60.0, metavar="SECONDS", help="after which a silent rank ends the others"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON, and nothing else, to stdout")
    parser.add_argument(
        "--show-private-metrics", action="store_true", help="also the training loss, which is NOT private"
    )


def run(options: argparse.Namespace) -> int:
    """Train; the exit code."""
    from dpkernels.algorithms import training

    if options.ranks is not None and checks.whole("--ranks", options.ranks, low=1) > 1 and not ranks.started():
        return launch.run(options.ranks, ["-m", "dpkernels", *options.arguments])
    together = ranks.current(options.rank_timeout)
    if options.checkpoint_every < 1:
        raise ValueError(f"--checkpoint-every: got {options.checkpoint_every}, must be at least 1")
    task = training.task(options.data, options.data_dir, options.seed)
    private = training.Run(
        task,
        options.algorithm,
        epsilon=options.epsilon,
        delta=options.delta,
        steps=options.steps,
        seed=options.seed,
        **_constants(options.set),
    )
    out = options.out or Path("runs") / f"{options.data}-{options.algorithm}"
    out.mkdir(parents=True, exist_ok=True)
    saved = out / "checkpoint"
    history: list[dict[str, float]] = []
    if options.resume:
        with together.doing("the checkpoint"):
            state = together.from_rank(checkpoint.load(saved) if together.rank == 0 else None)
        history = state.pop("history")
        private.load_state_dict(state)
        if together.rank == 0:
            print(f"going on from step {private.done} of {private.steps}", file=sys.stderr)
    elif saved.exists():
        raise ValueError(f"--out: {out} has a checkpoint; use --resume to go on, or another directory")
    quiet = together.rank > 0  # one of them speaks and writes
    watch = _Watch(private, history, options.show_private_metrics, quiet)

    def save() -> None:
        state = private.state_dict()
        if not quiet:
            checkpoint.save(saved, {**state, "history": history})

    try:
        while private.done < private.steps:
            watch.step()
            if private.done % options.checkpoint_every == 0:
                save()
    except KeyboardInterrupt:
        watch.end_line()
        if quiet:
            return 130
        if together.size > 1:  # others may be elsewhere
            print(
                f"stopped; --resume goes on from what was saved last, every {options.checkpoint_every} steps,"
                f" in {saved}",
                file=sys.stderr,
            )
            return 130
        save()
        print(f"stopped at step {private.done}; the same command with --resume goes on", file=sys.stderr)
        return 130
    watch.end_line()
    if quiet:
        return 0
    saved.unlink(missing_ok=True)
    record = _record(private, options, history, watch.seconds)
    _leave(out, record, task)
    if options.json:
        print(json.dumps(record))
    else:
        print(_words(record, out))
    return 0


def _constants(given: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in given:
        name, _, number = item.partition("=")
        try:
            found[name] = int(number) if number.isdigit() else float(number)
        except ValueError:
            raise ValueError(f"--set: got {item!r}, must be NAME=NUMBER") from None
    return found


class _Watch:
    """Steps a run, and says how it goes on stderr: one line that moves on a terminal, else some lines in all.

    Shown are epsilon so far and the score on the public test set, both free of training data but through the weights.
    """

    def __init__(self, private: Any, history: list[dict[str, float]], show_loss: bool, quiet: bool) -> None:
        self._private, self._history, self._show_loss, self._quiet = private, history, show_loss, quiet
        self._every = max(1, private.steps // SHOWN)
        self._moves = sys.stderr.isatty()
        self.seconds = 0.0
        self._timed = 0

    def step(self) -> None:
        start = time.perf_counter()
        self._private.step()
        self.seconds += time.perf_counter() - start
        self._timed += 1
        private = self._private
        if private.done % self._every == 0 or private.done == private.steps:
            private.bring_together()
            if self._quiet:
                return
            entry = {"step": private.done, "epsilon": private.epsilon(), private.task.measure: private.task.score()}
            if self._show_loss:
                entry["training loss (NOT private)"] = private.task.train_loss()
            self._history.append(entry)
            words = "  ".join(f"{name} {_shown(name, value)}" for name, value in list(entry.items())[1:])
            filled = round(20 * private.done / private.steps)
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {private.done}/{private.steps}  {words}"
            print(f"\r{line}   " if self._moves else line, end="" if self._moves else "\n", file=sys.stderr, flush=True)

    def end_line(self) -> None:
        if self._moves and not self._quiet:
            print(file=sys.stderr)


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "accuracy" else f"{value:.3g}"


def _record(
    private: Any, options: argparse.Namespace, history: list[dict[str, float]], seconds: float
) -> dict[str, Any]:
    last = history[-1]
    return {
        "algorithm": private.name,
        "data": private.task.name,
        "steps": private.steps,
        "constants": private.constants,
        "epsilon": last["epsilon"],
        "delta": options.delta,
        "reproducible": options.seed is not None,
        "ranks": ranks.current().size,
        private.task.measure: last[private.task.measure],
        "seconds_per_step": seconds / max(private.steps, 1),
        "history": history,
        "versions": {
            "dpkernels": dpkernels.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _leave(out: Path, record: dict[str, Any], task: Any) -> None:
    """The record, the model and a plot of how it went."""
    part = out / "record.json.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, out / "record.json")
    torch.save(task.model.state_dict(), out / "model.pt")
    lines = {task.measure: [(entry["epsilon"], entry[task.measure]) for entry in record["history"]]}
    title = f"{record['data']}, {record['algorithm']}: {task.measure} on the public test set"
    plot.save(out / "plot.svg", title, "epsilon spent", task.measure, lines, logarithmic=(False, False))


def _words(record: dict[str, Any], out: Path) -> str:
    measure = "accuracy" if "accuracy" in record else "squared error"
    reproducible = "; reproducible: private only from who does not know the seed" if record["reproducible"] else ""
    return (
        f"{measure:<14}{_shown(measure, record[measure])} on the public test set\n"
        f"{'privacy':<14}epsilon = {record['epsilon']:.2f} at delta = {record['delta']:g}{reproducible}\n"
        f"{'time':<14}{1e3 * record['seconds_per_step']:.2f} ms per step\n"
        f"{'left in':<14}{out}: record.json, model.pt, plot.svg"
    )
