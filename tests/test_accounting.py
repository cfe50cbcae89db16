import math

import pytest
import torch
from scipy import optimize, stats

from dpkernels import accounting


def gaussian_epsilon(mu, delta):
    """The exact curve of the Gaussian mechanism (Balle and Wang, 2018), mu = sensitivity / std."""

    def excess(eps):
        return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu) - delta

    return optimize.brentq(excess, 0, 100)


@pytest.mark.parametrize(("multiplier", "steps"), [(1.0, 1), (5.0, 10), (20.0, 400)])
def test_full_batches_follow_the_exact_gaussian_curve(multiplier, steps):
    event = accounting.poisson_gaussian(multiplier, 1.0, steps)
    exact = gaussian_epsilon(math.sqrt(steps) / multiplier, 1e-5)
    assert exact <= accounting.epsilon(event, 1e-5) * (1 + 1e-9)
    assert accounting.epsilon(event, 1e-5) == pytest.approx(exact, rel=2e-3)


def test_poisson_sampling_amplifies():
    sampled = accounting.epsilon(accounting.poisson_gaussian(1.0, 0.01, 1000), 1e-5)
    # below the RDP figure for DP-SGD at these settings (2.10), above the central-limit one (1.6)
    assert 1.6 < sampled < 2.1
    assert sampled < accounting.epsilon(accounting.poisson_gaussian(1.0, 0.02, 1000), 1e-5)


def test_ledger_counts_what_was_recorded():
    ledger = accounting.Ledger(sampling_rate=0.1)
    assert ledger.epsilon(1e-5) == 0.0
    for _ in range(7):
        ledger.record(std=3.0, sensitivity=1.5, reproducible=False)
    assert len(ledger) == 7
    assert ledger.epsilon(1e-5) == accounting.epsilon(accounting.poisson_gaussian(2.0, 0.1, 7), 1e-5)
    before = ledger.epsilon(1e-5)
    ledger.record(std=4.0, sensitivity=1.0, reproducible=True)
    assert ledger.epsilon(1e-5) > before
    assert ledger.reproducible


def test_a_ledger_first_used_in_inference_mode_goes_on_outside():
    ledger = accounting.Ledger()
    with torch.inference_mode():
        ledger.record(std=1.0, sensitivity=1.0, reproducible=False)
    ledger.record(std=1.0, sensitivity=1.0, reproducible=False)
    assert len(ledger) == 2


def test_ledger_without_noise_or_without_data():
    ledger = accounting.Ledger()
    ledger.record(std=1.0, sensitivity=0.0, reproducible=False)
    assert ledger.epsilon(1e-5) == 0.0
    ledger.record(std=0.0, sensitivity=1.0, reproducible=False)
    assert ledger.epsilon(1e-5) == math.inf


def test_an_unclipped_release_is_not_private():
    ledger = accounting.Ledger()
    ledger.record(std=1.0, sensitivity=math.inf, reproducible=False)
    assert ledger.epsilon(1e-5) == math.inf


@pytest.mark.parametrize(("rate", "steps", "target"), [(0.01, 100, 2.0), (1.0, 10, 0.5), (0.1, 1, 20.0)])
def test_calibrate_finds_the_smallest_noise(rate, steps, target):
    event = lambda z: accounting.poisson_gaussian(z, rate, steps)  # noqa: E731
    z = accounting.calibrate(event, target, 1e-5)
    assert accounting.epsilon(event(z), 1e-5) <= target
    assert accounting.epsilon(event(0.998 * z), 1e-5) > target


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accounting.poisson_gaussian(-1.0, 0.1), "noise_multiplier: got -1.0"),
        (lambda: accounting.poisson_gaussian(1.0, 1.1), "sampling_rate: got 1.1"),
        (lambda: accounting.poisson_gaussian(1.0, 0.1, -1), "steps: got -1"),
        (lambda: accounting.epsilon(accounting.poisson_gaussian(1.0, 0.1), 0.0), "delta: got 0.0"),
        (lambda: accounting.Ledger(sampling_rate=-0.1), "sampling_rate: got -0.1"),
        (lambda: accounting.calibrate(accounting.poisson_gaussian, -1.0, 1e-5), "epsilon: got -1.0"),
        (lambda: accounting.calibrate(lambda z: accounting.poisson_gaussian(z, 0.1), 0.0, 1e-5), "epsilon: got 0"),
        (lambda: accounting.calibrate(lambda z: accounting.poisson_gaussian(z, 0.1), 1.0, 2.0), "delta: got 2.0"),
        (lambda: accounting.calibrate(lambda z: accounting.poisson_gaussian(1.0, 0.5), 0.1, 1e-5), "make_event"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
