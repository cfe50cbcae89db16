"""The `dpkernels` command: train, bench, account, audit, info."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Sequence

import torch

import dpkernels
from dpkernels import accounting, ops, ranks, train

PEERS = {"opacus": "Opacus", "backpack": "BackPACK"}


def info() -> list[tuple[str, str]]:
    """What runs here and why, as (what, how) rows."""
    rows = [
        ("dpkernels", dpkernels.__version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("python", platform.python_version()),
    ]
    gpu = [
        ("Triton kernels", ops.gpu_status["triton"]),
        ("CUDA kernels", ops.gpu_status["cuda"]),
        ("GPU kernels", "checked without a GPU; never timed, never loaded, by those who wrote them"),
    ]
    if ops.native is None:
        return [
            *rows,
            ("native kernels", f"no: {ops.native_status}"),
            ("CPU ops run on", "the plain PyTorch reference: correct, but slow"),
            *gpu,
        ]
    return [
        *rows,
        ("native kernels", f"yes, {ops.native.compiler}"),
        ("CPU ops run on", f"{ops.native.active_isa()} kernels (of {', '.join(ops.native.available_isas())})"),
        *gpu,
    ]


def _info(_: argparse.Namespace) -> int:
    for what, how in info():
        print(f"{what:<16}{how}")
    return 0


def _account(options: argparse.Namespace) -> int:
    """Epsilon from the noise, or the noise from epsilon."""
    rate, steps, delta = options.sampling_rate, options.steps, options.delta
    if options.noise_multiplier is not None:
        multiplier = options.noise_multiplier
    else:
        multiplier = accounting.calibrate(lambda z: accounting.poisson_gaussian(z, rate, steps), options.epsilon, delta)
    epsilon = accounting.epsilon(accounting.poisson_gaussian(multiplier, rate, steps), delta)
    found = {
        "noise_multiplier": multiplier,
        "sampling_rate": rate,
        "steps": steps,
        "epsilon": epsilon,
        "delta": delta,
        "adjacency": "add-remove",
    }
    if options.json:
        print(json.dumps({**found, "epsilon": epsilon if math.isfinite(epsilon) else "infinite"}))
    else:
        print(
            f"epsilon = {epsilon:.4g} at delta = {delta:g}\nfor {steps} steps of DP-SGD with noise multiplier "
            f"{multiplier:.4g} and Poisson sampling at rate {rate:g}, add-remove adjacency"
        )
    return 0


def _bench(options: argparse.Namespace) -> int:
    from dpkernels.bench import compare

    missing = [name for module, name in PEERS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"not installed, so not compared: {', '.join(missing)}", file=sys.stderr)
    compare.main(options.models, quick=not options.full)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from dpkernels.bench import audit

    return int(audit.quick(options.algorithm, options.canaries))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpkernels", description=(dpkernels.__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    training = commands.add_parser("train", help="train privately, on digits unless said otherwise")
    train.add_arguments(training)
    training.set_defaults(run=train.run)
    account = commands.add_parser("account", help="epsilon from settings, or noise from epsilon")
    which = account.add_mutually_exclusive_group(required=True)
    which.add_argument("--noise-multiplier", type=float)
    which.add_argument("--epsilon", type=float)
    account.add_argument("--sampling-rate", type=float, required=True, help="probability of a record to be in a batch")
    account.add_argument("--steps", type=int, required=True)
    account.add_argument("--delta", type=float, default=1e-5)
    account.add_argument("--json", action="store_true")
    account.set_defaults(run=_account)
    bench = commands.add_parser("bench", help="a training step against other libraries that are installed")
    bench.add_argument("models", nargs="*", help="MLP, CNN, ResNet-20, GPT (default all)")
    bench.add_argument("--full", action="store_true", help="batch sizes over a range, memory, and a plot: half an hour")
    bench.set_defaults(run=_bench)
    audit = commands.add_parser("audit", help="attack a training run, to measure what it gives away")
    audit.add_argument("--algorithm", choices=("DP-SGD", "DP-LSGD"), default="DP-SGD")
    audit.add_argument("--canaries", type=int, default=1000)
    audit.set_defaults(run=_audit)
    commands.add_parser("info", help="which kernels are active, and why").set_defaults(run=_info)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.arguments = given
    try:
        return int(options.run(options))
    except (ValueError, OSError) as error:
        print(f"dpkernels {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except ranks.RankError as error:
        print(f"dpkernels {options.command}: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
