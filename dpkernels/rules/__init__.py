"""Per-sample gradients op by op: one file for each family of ops, `fallback` for all others.

A rule gets an op's arguments, at least one of them a `Tracked` parameter and at least one a tensor that holds
samples. It runs the op on plain tensors and taps its output: the tap turns the output's gradient into terms.
"""

from dpkernels.rules import attention, broadcast, conv, embedding, linear, norm, recurrent  # noqa: F401
from dpkernels.rules.registry import RULES

__all__ = ["RULES"]
