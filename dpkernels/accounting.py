"""Privacy accounting: events, their epsilon, the noise for a budget, and the ledger of what was released."""

from dpkernels.events import (
    Event,
    PublishedBound,
    Releases,
    calibrate,
    compose,
    epsilon,
    fixed_size_gaussian,
    gaussian,
    no_worse,
    poisson_gaussian,
)
from dpkernels.ledger import BudgetError, Ledger
from dpkernels.paper_events import bvr_l_sgd, diff2, prisma, sdm_dsgd, sdm_dsgd_published

__all__ = [
    "BudgetError",
    "Event",
    "Ledger",
    "PublishedBound",
    "Releases",
    "bvr_l_sgd",
    "calibrate",
    "compose",
    "diff2",
    "epsilon",
    "fixed_size_gaussian",
    "gaussian",
    "no_worse",
    "poisson_gaussian",
    "prisma",
    "sdm_dsgd",
    "sdm_dsgd_published",
]
