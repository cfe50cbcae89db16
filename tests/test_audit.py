import math
import random
from functools import partial

import numpy as np
import pytest
from scipy import stats

import dpkernels as dpk
from dpkernels import audit, noise
from dpkernels.bench import mechanisms
from tests import broken


@pytest.fixture(autouse=True)
def same_keys_in_every_run(monkeypatch):
    """What an audit finds is sure to 99.9 %, and good in 99 of 100: secure noise too must be the same tomorrow."""
    keys = random.Random(1)
    monkeypatch.setattr(noise, "_new_key", lambda: keys.getrandbits(64) - 2**63)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", mechanisms.OPS)
def test_every_rule_keeps_its_claim_and_not_by_far(name, secure):
    finding = mechanisms.OfOp(mechanisms.OPS[name], secure).told_apart()
    assert not finding.broken
    assert finding.lower > 0.5 * finding.claimed  # the attack is a good one


@pytest.mark.parametrize("build", broken.BUILDS)
@pytest.mark.parametrize("name", mechanisms.OPS)
def test_a_broken_build_of_every_rule_is_caught(name, build):
    with broken.BUILDS[build]():
        assert mechanisms.OfOp(mechanisms.OPS[name]).told_apart().broken


SECURE = {f"{name}, secure": partial(mechanisms.TRAINING[name], secure=True) for name in mechanisms.ALGORITHMS}


@pytest.mark.parametrize("make", {**mechanisms.TRAINING, **SECURE}.values(), ids=[*mechanisms.TRAINING, *SECURE])
def test_every_algorithm_keeps_its_claim_and_not_by_far(make):
    finding = make().told_apart(runs=600, gaussian=True)
    assert not finding.broken
    assert finding.lower > 0.5 * finding.claimed


@pytest.mark.parametrize("build", broken.BUILDS)
@pytest.mark.parametrize("name", mechanisms.TRAINING)
def test_a_broken_build_of_every_algorithm_is_caught(name, build):
    with broken.BUILDS[build]():
        mechanism = mechanisms.TRAINING[name]()
        # a gross breach shows in few runs
        assert any(mechanism.told_apart(runs=runs, gaussian=True).broken for runs in (200, 1200))


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("name", mechanisms.ALGORITHMS)
def test_one_run_with_canaries(name, rate):
    train, claimed = mechanisms.canaries(mechanisms.ALGORITHMS[name], rate=rate)
    finding = audit.one_run(train, claimed, canaries=1000, seed=1)
    assert 0.3 < finding.lower < finding.claimed


@pytest.mark.parametrize("name", mechanisms.ALGORITHMS)
def test_one_run_catches_a_build_with_hardly_any_noise(name):
    train, claimed = mechanisms.canaries(mechanisms.ALGORITHMS[name], multiplier=4.0)
    with broken.noise_halved(), broken.noise_halved(), broken.noise_halved():
        assert audit.one_run(train, claimed, canaries=1000, seed=1).broken


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_the_bound_is_below_the_truth_and_near(mu, gaussian):
    """Of the Gaussian mechanism, whose curve is known; over many audits it is above the truth as rarely as it says."""
    rng = np.random.default_rng(1)
    claimed = lambda delta: dpk.accounting.epsilon(dpk.accounting.gaussian(1 / mu), delta)  # noqa: E731

    def audited(claim=claimed, **options):
        here, there = rng.standard_normal, lambda: rng.standard_normal() + mu
        return audit.two_neighbours(here, there, claim, gaussian=gaussian, **options)

    findings = [audited(runs=2000, confidence=0.95) for _ in range(60)]
    assert sum(f.broken for f in findings) <= stats.binom.isf(1e-3, 60, 0.05)
    large = audited(runs=50_000)
    assert 0.7 * large.claimed < large.lower < large.claimed
    assert audited(lambda delta: claimed(delta) * 0.7, runs=50_000).broken


def test_one_run_on_randomised_response():
    """Each canary's bit is told truly with probability e^eps / (1 + e^eps): epsilon is known."""
    rng = np.random.default_rng(2)
    for epsilon in (0.5, 1.0, 3.0):
        true = 1 / (1 + math.exp(-epsilon))

        def train(included, true=true):
            return np.where(rng.random(len(included)) < true, included, ~included) + 1e-6 * rng.random(len(included))

        finding = audit.one_run(train, lambda delta, e=epsilon: e, canaries=20_000, guesses=20_000, delta=0.0, seed=1)
        assert 0.9 * epsilon < finding.lower < epsilon
        assert audit.one_run(train, lambda delta, e=epsilon: 0.8 * e, canaries=20_000, guesses=20_000, delta=0.0).broken


def test_scores_that_are_not_finite_do_not_hide_a_break():
    claimed = lambda delta: 1.0  # noqa: E731
    assert audit.two_neighbours(lambda: -math.inf, lambda: math.inf, claimed, runs=2000).broken
    with pytest.raises(ValueError, match="scores: one is NaN"):
        audit.two_neighbours(lambda: 0.0, lambda: math.nan, claimed, runs=100)


def test_delta_costs_confidence():
    """Of 100 guesses for 10,000 canaries all are right: with a chance of 1e-3 for each to fail that proves less."""
    chance = lambda delta: audit._chance(10_000, 100, 100, 3.0, delta)  # noqa: E731
    assert chance(0.0) == pytest.approx((1 / (1 + math.exp(-3))) ** 100)
    every = [stats.binom.pmf(np.arange(100 - i, 100), 100, 1 / (1 + math.exp(-3))).sum() / i for i in range(1, 101)]
    assert chance(1e-6) == pytest.approx(chance(0.0) + 2 * 10_000 * 1e-6 * max(every))
    assert chance(1e-3) > 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guesses": 11}, "guesses: got 11, must be at most canaries = 10"),
        ({"delta": -1.0}, "delta: got -1.0"),
        ({"confidence": -1.0}, "confidence: got -1.0"),
    ],
)
def test_mistakes_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        audit.one_run(lambda included: included, lambda d: 1.0, canaries=10, **options)
    with pytest.raises(ValueError, match="train: gave scores of shape"):
        audit.one_run(lambda included: [1.0], lambda d: 1.0, canaries=10)
    with pytest.raises(ValueError, match="deltas: is empty"):
        audit.two_neighbours(lambda: 0.0, lambda: 1.0, lambda d: 1.0, deltas=())


def test_a_finding_says_what_it_found():
    assert "claimed 1: the claim is BROKEN" in str(audit.Finding(2.0, 1.0, 1e-5, 0.99))
    assert "epsilon >= 0.5 at delta = 1e-05 (99.0% sure)" in str(audit.Finding(0.5, 1.0, 1e-5, 0.99))
    with pytest.raises(ValueError, match="canaries: got 1"):
        audit.one_run(lambda x: x, lambda d: 1.0, canaries=1)
    with pytest.raises(ValueError, match="runs: got 2"):
        audit.two_neighbours(lambda: 0.0, lambda: 1.0, lambda d: 1.0, runs=2)
