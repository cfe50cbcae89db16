import pytest

from dpkernels import accounting
from dpkernels.algorithms import digits


def test_a_short_run_learns_and_counts_its_privacy():
    result = digits.train(steps=40, noise_multiplier=2.0, seed=1, quiet=True)
    assert result["accuracy"] > 0.7
    event = accounting.poisson_gaussian(2.0, 256 / 1437, 40)
    assert result["epsilon"] == pytest.approx(accounting.epsilon(event, 1e-5))


def test_a_seed_makes_it_reproducible():
    runs = [digits.train(steps=3, seed=4, quiet=True)["accuracy"] for _ in range(2)]
    assert runs[0] == runs[1]
