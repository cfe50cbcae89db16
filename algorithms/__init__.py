"""Differentially private training algorithms on dpkernels."""

from . import datasets, federation, topologies
from .diff2 import BVRLSGD, DIFF2, GD
from .dp_lsgd import DPLSGD
from .dp_sgd import DPSGD
from .prisma import PriSMA
from .sdm_dsgd import SDMDSGD

__all__ = ["BVRLSGD", "DIFF2", "DPLSGD", "DPSGD", "GD", "SDMDSGD", "PriSMA", "datasets", "federation", "topologies"]
