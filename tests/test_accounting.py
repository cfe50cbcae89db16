import json
import math
import time

import pytest
import torch
from dp_accounting import SingleEpochTreeAggregationDpEvent, UnsupportedEventError, dp_event
from scipy import optimize, stats

import dpkernels as dpk
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


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_replacing_a_record_moves_the_sum_twice_as_far(adjacency):
    moves = 2 if adjacency == "replace-one" else 1
    exact = gaussian_epsilon(moves * math.sqrt(10) / 5.0, 1e-5)
    assert accounting.epsilon(accounting.gaussian(5.0, 10, adjacency=adjacency), 1e-5) == pytest.approx(exact, rel=1e-6)
    nearly_all = accounting.poisson_gaussian(5.0, 1 - 1e-9, 10, adjacency=adjacency)
    assert accounting.epsilon(nearly_all, 1e-5) == pytest.approx(exact, rel=2e-3)


def test_batches_of_fixed_size_amplify_and_are_counted_by_renyi_dp():
    event = accounting.fixed_size_gaussian(2.0, 10_000, 100, 500)
    assert event.adjacency == "replace-one"
    found = accounting.epsilon(event, 1e-5)
    assert found < accounting.epsilon(accounting.gaussian(2.0, 500, adjacency="replace-one"), 1e-5) / 10
    # all records in each batch: the exact curve, below what Renyi DP gives
    assert accounting.fixed_size_gaussian(2.0, 100, 100, 5) == accounting.gaussian(2.0, 5, adjacency="replace-one")
    # one sample of nearly all records is nearly as much as all, and no less than Renyi DP's own bound
    nearly = accounting.epsilon(accounting.fixed_size_gaussian(8.0, 10_000, 9_999), 1e-5)
    assert nearly >= accounting.epsilon(accounting.gaussian(8.0, adjacency="replace-one"), 1e-5) * 0.999


def test_events_add_up_and_those_nobody_counts_raise():
    one, two = accounting.poisson_gaussian(2.0, 0.1, 3), accounting.poisson_gaussian(3.0, 0.2, 4)
    both = accounting.epsilon(accounting.compose(one, two), 1e-5)
    assert both > max(accounting.epsilon(e, 1e-5) for e in (one, two))
    assert accounting.epsilon(accounting.compose(one, accounting.gaussian(3.0)), 1e-5) > 0
    assert accounting.epsilon(accounting.poisson_gaussian(0.0, 0.1), 1e-5) == math.inf
    assert accounting.epsilon(accounting.poisson_gaussian(1.0, 0.0, 5), 1e-5) == 0.0
    with pytest.raises(ValueError, match="different adjacencies"):
        accounting.compose(one, accounting.gaussian(1.0, adjacency="replace-one"))
    mixed = accounting.compose(
        accounting.fixed_size_gaussian(1.0, 10, 2), accounting.poisson_gaussian(1.0, 0.1, adjacency="replace-one")
    )
    with pytest.raises(ValueError, match="no accountant counts together"):
        accounting.epsilon(mixed, 1e-5)
    with pytest.raises(ValueError, match="event: got a int"):
        accounting.epsilon(3, 1e-5)
    with pytest.raises(UnsupportedEventError):
        accounting.epsilon(SingleEpochTreeAggregationDpEvent(1.0, 10), 1e-5)


def forever(function):
    while True:
        function()


@pytest.mark.parametrize(("rate", "multiplier", "limit"), [(1.0, 20.0, 1.0), (0.05, 3.0, 0.2)])
def test_a_budget_refuses_the_release_that_would_exceed_it(rate, multiplier, limit):
    ledger = accounting.Ledger(rate, budget=(limit, 1e-5))
    enter = lambda: ledger.record(std=multiplier, sensitivity=1.0, reproducible=False)  # noqa: E731
    with pytest.raises(accounting.BudgetError, match=f"more than the budget of epsilon = {limit:g}"):
        forever(enter)
    count = len(ledger)
    assert ledger.epsilon(1e-5) <= limit
    assert accounting.epsilon(accounting.poisson_gaussian(multiplier, rate, count + 1), 1e-5) > limit
    with pytest.raises(accounting.BudgetError):
        ledger.record(std=multiplier / 4, sensitivity=1.0, reproducible=False)
    assert len(ledger) == count
    ledger.record(std=1.0, sensitivity=0.0, reproducible=False)  # of nothing: costs nothing


def test_a_budget_counts_all_multipliers_together():
    ledger = accounting.Ledger(budget=(2.0, 1e-5))
    for z in (20.0, 30.0, 20.0, 30.0):
        ledger.record(std=z, sensitivity=1.0, reproducible=False)
    with pytest.raises(accounting.BudgetError):
        forever(lambda: ledger.record(std=10.0, sensitivity=1.0, reproducible=False))
    assert ledger.epsilon(1e-5) <= 2.0
    with pytest.raises(accounting.BudgetError):
        ledger.record(std=0.0, sensitivity=1.0, reproducible=False)


def test_a_refused_release_takes_no_noise():
    ledger = accounting.Ledger(budget=(1.0, 1e-5))
    noise = dpk.Gaussian(5.0, seed=1, ledger=ledger)
    first = dpk.clip_sum(torch.zeros(2, 3), 1.0, noise=noise).sum
    with pytest.raises(accounting.BudgetError):
        dpk.clip_sum(torch.zeros(2, 3), 1.0, noise=dpk.Gaussian(1.0, ledger=ledger))
    assert len(ledger) == 1
    assert not torch.equal(first, dpk.clip_sum(torch.zeros(2, 3), 0.1, noise=noise).sum)


def test_a_ledger_is_saved_in_plain_numbers_and_only_read_into_an_empty_one():
    ledger = accounting.Ledger(0.1)
    for std in (1.0, 1.0, 2.0):
        ledger.record(std=std, sensitivity=1.0, reproducible=True)
    state = json.loads(json.dumps(ledger.state_dict()))
    again = accounting.Ledger(0.1)
    again.load_state_dict(state)
    assert again.epsilon(1e-5) == ledger.epsilon(1e-5)
    assert again.reproducible
    again.record(std=1.0, sensitivity=1.0, reproducible=False)
    assert len(again) == 4
    with pytest.raises(ValueError, match="has 4 releases, must be empty"):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"sampling_rate: is 0\.1 in the saved ledger, must be 0\.2"):
        accounting.Ledger(0.2).load_state_dict(state)


def test_a_hundred_thousand_steps_are_counted_in_seconds():
    ledger = accounting.Ledger(0.001)
    ledger.load_state_dict(
        accounting.Ledger(0.001).state_dict() | {"releases": [[1.0, True, 60_000], [1.5, True, 40_000]]}
    )
    start = time.perf_counter()
    assert 0 < ledger.epsilon(1e-5) < 20
    assert time.perf_counter() - start < 30


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


@pytest.mark.parametrize(("rate", "steps", "target"), [(0.01, 100, 2.0), (1.0, 10, 0.5), (1.0, 1, 50.0), (0.2, 5, 4.0)])
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
        (lambda: accounting.calibrate(lambda z: accounting.poisson_gaussian(1.0, 1.0), 0.1, 1e-5), "make_event"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("adjacency", "z", "rate", "steps", "delta", "true"),
    [
        ("add-remove", 1.0, 0.01, 1000, 1e-12, 3.91430),
        ("add-remove", 1.0, 0.01, 1000, 1e-13, 4.22982),
        ("replace-one", 1.0, 0.001, 100_000, 1e-9, 4.08278),
    ],
)
def test_rounding_does_not_make_epsilon_too_small(adjacency, z, rate, steps, delta, true):
    """Where Fourier transforms round by as much as delta; the truth is by tilted ones, which do not."""
    assert accounting.epsilon(accounting.poisson_gaussian(z, rate, steps, adjacency=adjacency), delta) >= true - 1e-5


def test_a_delta_that_cannot_be_computed_is_refused():
    with pytest.raises(ValueError, match="delta: got 1e-14, must be at least"):
        accounting.epsilon(accounting.poisson_gaussian(2.0, 0.1, 500, adjacency="replace-one"), 1e-14)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize(("z", "steps"), [(0.7, 1), (3.0, 30), (40.0, 5000)])
def test_grids_are_never_below_the_exact_curve_and_not_far_above(z, steps, delta):
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(z), steps)
    exact = accounting.epsilon(accounting.gaussian(z, steps), delta)
    assert exact <= accounting.epsilon(event, delta) <= exact * (1 + 5e-3)
