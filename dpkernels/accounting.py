"""Privacy accounting: events, their epsilon, the noise for a budget, and the ledger of what was released."""

from dpkernels.events import (
    Event,
    Releases,
    calibrate,
    compose,
    epsilon,
    fixed_size_gaussian,
    gaussian,
    poisson_gaussian,
)
from dpkernels.ledger import BudgetError, Ledger

__all__ = [
    "BudgetError",
    "Event",
    "Ledger",
    "Releases",
    "calibrate",
    "compose",
    "epsilon",
    "fixed_size_gaussian",
    "gaussian",
    "poisson_gaussian",
]
