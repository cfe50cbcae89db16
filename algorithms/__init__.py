"""Differentially private training algorithms on dpkernels."""

from .dp_lsgd import DPLSGD
from .dp_sgd import DPSGD

__all__ = ["DPLSGD", "DPSGD"]
