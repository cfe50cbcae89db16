import copy
import math
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from scipy import stats

import dpkernels as dpk
from dpkernels import ops, reference_noise

CPU = torch.device("cpu")
DRAWS = 10_000_000


@pytest.fixture(scope="module")
def draws():
    return dpk.add_gaussian_(torch.zeros(DRAWS), dpk.Gaussian(1.0, seed=20261116))


def kolmogorov_smirnov(x):
    """sqrt(n) times the largest distance between the empirical and the normal distribution function."""
    x = np.sort(x.numpy().astype(np.float64))
    cdf = stats.norm.cdf(x)
    grid = np.arange(len(x) + 1) / len(x)
    return math.sqrt(len(x)) * max(np.abs(cdf - grid[1:]).max(), np.abs(cdf - grid[:-1]).max())


def test_distribution(draws):
    assert kolmogorov_smirnov(draws) < 1.63  # 1 % level


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_that_test_rejects_a_std_off_by_one_percent(draws, factor):
    assert kolmogorov_smirnov(draws * factor) > 5


def test_moments(draws):
    x = draws.double()
    assert abs(x.mean()) < 4 / DRAWS**0.5
    assert abs((x**2).mean() - 1) < 4 * (2 / DRAWS) ** 0.5
    assert abs((x**3).mean()) < 4 * (15 / DRAWS) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / DRAWS) ** 0.5


@pytest.mark.parametrize("sigmas", [3, 4, 5])
def test_tail_counts(draws, sigmas):
    expected = DRAWS * 2 * stats.norm.sf(sigmas)
    assert abs((draws.abs() > sigmas).sum().item() - expected) < 4 * expected**0.5


@pytest.mark.parametrize("lag", [1, 2, 8, 15, 16, 17, 32, 48, 63, 64, 1024])
def test_no_correlation_at_a_lag(draws, lag):
    a, b = draws[:-lag].double(), draws[lag:].double()
    limit = 4.5 / DRAWS**0.5
    assert abs((a * b).mean()) < limit
    assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 2 * limit
    assert abs((a * (b**2 - 1)).mean()) < 1.5 * limit


def test_beyond_what_32_bits_can_draw():
    """Block 997414057 of seed 0 has a radius word of 0: 32 bits would end at sqrt(66 ln 2) = 6.76 there."""
    block = 997_414_057
    words = reference_noise.philox(torch.tensor([0, 0]), reference_noise.NOISE, torch.tensor([block]))
    assert words[0].item() == 0
    for draw in (
        ops.native.normals(0, 0, block // 16, 1),
        reference_noise.normals(torch.tensor([0, 0]), 1, CPU, block // 16),
    ):
        radius = math.hypot(draw[block % 16], draw[16 + block % 16])
        extra = reference_noise.philox(torch.tensor([0, 0]), reference_noise.RADIUS_TAIL, torch.tensor([block]))[
            0
        ].item()
        assert radius == pytest.approx(math.sqrt(-2 * math.log((extra + 0.5) * 2.0**-64)), rel=1e-6)
        assert radius > 6.84


def test_philox_known_answers():
    """The published vectors of Philox4x32-10, through our layout of the counter."""

    def words(key, release, purpose, block):
        wrap = lambda x: x - 2**64 if x >= 2**63 else x  # noqa: E731
        stream = torch.tensor([wrap(key), wrap(release)])
        return [w.item() for w in reference_noise.philox(stream, purpose, torch.tensor([block]))]

    assert words(0, 0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(2**64 - 1, 2**64 - 1, 0xFF, 2**56 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert words(0x299F31D0A4093822, 0x0370734413198A2E, 0x85, 0xA308D3243F6A88) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


@pytest.mark.parametrize("first_group", [0, 3, 2**28 - 5, 7 * 2**28 - 3, 2**50])
@pytest.mark.parametrize("release", [0, 1, 2**40 + 7])
def test_kernel_equals_reference_anywhere_in_a_stream(first_group, release, isa):
    groups = 3000
    got = torch.from_numpy(ops.native.normals(-5, release, first_group, groups))
    true = reference_noise.normals(torch.tensor([-5, release]), groups, CPU, first_group)
    # pairs (z0, z1) stand 16 elements apart; their radius decides how exact they are (common/normal.h)
    radius = true.view(groups, 2, 2, 16).norm(dim=2, keepdim=True).expand(-1, -1, 2, -1).flatten()
    assert ((got - true).abs() <= 1e-6 + 1.2e-7 / radius).all()


def test_releases_and_seeds_do_not_share_noise():
    one = dpk.Gaussian(1.0, seed=1)
    first, second = (dpk.add_gaussian_(torch.zeros(500_000), one) for _ in range(2))
    other = dpk.add_gaussian_(torch.zeros(500_000), dpk.Gaussian(1.0, seed=2))
    unseeded = [dpk.add_gaussian_(torch.zeros(500_000), dpk.Gaussian(1.0)) for _ in range(2)]
    streams = torch.stack([first, second, other, *unseeded])
    correlation = torch.corrcoef(streams) - torch.eye(5)
    assert correlation.abs().max() < 5 / 500_000**0.5
    assert len(streams.flatten().unique()) > 0.85 * streams.numel()  # float32 values do coincide, streams do not


def test_a_seed_repeats_and_no_seed_does_not():
    draw = lambda seed: dpk.add_gaussian_(torch.zeros(100), dpk.Gaussian(1.0, seed=seed))  # noqa: E731
    assert torch.equal(draw(5), draw(5))
    torch.manual_seed(0)
    first = draw(None)
    torch.manual_seed(0)
    assert not torch.equal(first, draw(None))


def test_threads_take_different_release_numbers():
    noise = dpk.Gaussian(1.0, seed=0)
    taken = []
    workers = [
        threading.Thread(target=lambda: taken.extend(noise.release()[0][1].item() for _ in range(200)))
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == list(range(1600))


def test_another_std_goes_on_with_the_same_stream():
    noise = dpk.Gaussian(1.0, seed=1)
    double = noise.with_std(2.0)
    first, second, third = (dpk.add_gaussian_(torch.zeros(100), n) for n in (noise, double, noise))
    one = dpk.Gaussian(1.0, seed=1)
    expected = [dpk.add_gaussian_(torch.zeros(100), one) for _ in range(3)]
    torch.testing.assert_close(torch.stack([first, second / 2, third]), torch.stack(expected))
    assert (noise.releases, double.releases, double.std, double.reproducible) == (3, 3, 2.0, True)
    secure = dpk.Gaussian(1.0, secure=True)
    assert torch.equal(secure.with_std(3.0).release()[0][:4], secure.release()[0][:4])
    assert secure.releases == 2
    assert dpk.add_gaussian_(torch.zeros(5), secure.with_std(0.0)).eq(0).all()


def test_it_cannot_be_copied():
    noise = dpk.Gaussian(1.0, seed=1)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="release the same noise again"):
            duplicate(noise)


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("options", [{"seed": 1}, {}, {"secure": True}])
def test_a_forked_child_does_not_repeat_its_parents_noise(options):
    noise = dpk.Gaussian(1.0, **options).with_std(2.0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, noise.release()[0][0].item().to_bytes(8, "little", signed=True))
        os._exit(0)
    os.waitpid(child, 0)
    assert int.from_bytes(os.read(read, 8), "little", signed=True) != noise.release()[0][0].item()


def test_the_ledger_has_the_entry_before_the_release(monkeypatch):
    ledger = dpk.accounting.Ledger(sampling_rate=0.1)
    noise = dpk.Gaussian(2.0, seed=1, ledger=ledger)
    monkeypatch.setattr(noise, "_take", lambda: pytest.fail("released") if len(ledger) == 0 else torch.tensor([1, 0]))
    dpk.clip_sum(torch.ones(3, 4), 1.0, noise=noise)
    assert len(ledger) == 1
    assert ledger.reproducible


def test_a_ledger_needs_the_sensitivity():
    noise = dpk.Gaussian(2.0, ledger=dpk.accounting.Ledger())
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="sensitivity: got None"):
        dpk.add_gaussian_(x, noise)
    assert x.eq(0).all()
    dpk.add_gaussian_(x, noise, sensitivity=1.0)
    assert len(noise.ledger) == 1


def test_std_cannot_drift_from_what_is_drawn():
    noise = dpk.Gaussian(1.0)
    with pytest.raises(AttributeError):
        noise.std = 5.0
    with pytest.raises(AttributeError):
        noise.reproducible = False


@pytest.mark.filterwarnings("ignore:This process")
def test_inference_mode_and_default_devices_do_not_reach_the_stream():
    with torch.inference_mode():
        made_there = dpk.Gaussian(1.0, seed=1)
    with torch.device("meta"):
        made_elsewhere = dpk.Gaussian(1.0, seed=1)
        assert made_elsewhere.release()[0].device == CPU
    assert torch.equal(made_there.release()[0], torch.tensor([1, 0]))
    keys = []
    read, write = os.pipe()
    if os.fork() == 0:
        for noise in (made_there, made_elsewhere):
            os.write(write, noise.release()[0][0].item().to_bytes(8, "little", signed=True))
        os._exit(0)
    os.wait()
    keys = [int.from_bytes(os.read(read, 8), "little", signed=True) for _ in range(2)]
    assert 1 not in keys
    assert keys[0] != keys[1]
