"""The `dpkernels` command."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import torch

import dpkernels
from dpkernels import ops


def info() -> list[tuple[str, str]]:
    """What runs here and why, as (what, how) rows."""
    rows = [
        ("dpkernels", dpkernels.__version__),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("python", platform.python_version()),
    ]
    if ops.native is None:
        return [
            *rows,
            ("native kernels", f"no: {ops.native_status}"),
            ("CPU ops run on", "the plain PyTorch reference: correct, but slow"),
        ]
    return [
        *rows,
        ("native kernels", f"yes, {ops.native.compiler}"),
        ("CPU ops run on", f"{ops.native.active_isa()} kernels (of {', '.join(ops.native.available_isas())})"),
        ("GPU ops run on", "the plain PyTorch reference: there are no GPU kernels yet"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="dpkernels", description=dpkernels.__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("info", help="which kernels are active, and why")
    parser.parse_args(arguments)
    for what, how in info():
        print(f"{what:<16}{how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
