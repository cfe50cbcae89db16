"""Differentially private training algorithms on dpkernels."""

from .dp_sgd import DPSGD

__all__ = ["DPSGD"]
