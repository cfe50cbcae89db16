"""Secure noise: known answers, distribution, the lattice, and three attacks that succeed on other noise."""

import math

import mpmath
import numpy as np
import pytest
import torch

import dpkernels as dpk
from dpkernels import ops, reference_noise
from tests import cases
from tests.test_noise import kolmogorov_smirnov

CPU = torch.device("cpu")
RFC_KEY = [int.from_bytes(bytes(range(8 * i, 8 * i + 8)), "little") for i in range(4)]
SOME_KEY = [-5, 2**62 + 11, 0, -(2**63)]


def stream(release=0, key=SOME_KEY):
    return torch.tensor([*key, release])


def std(value=1.0):
    return torch.tensor(value, dtype=torch.float64)


# RFC 8439: section 2.3.2, then the test vectors of appendix A.1. (key, block counter, nonce words, first words)
ZERO_KEY, ONE_KEY = [0] * 4, [0, 0, 0, 1 << 56]
VECTORS = {
    "2.3.2": (RFC_KEY, 1, (0x09000000, 0x4A000000, 0), "10f1e7e4d13b5915500fdd1fa32071c4"),
    "A.1 1": (ZERO_KEY, 0, (0, 0, 0), "76b8e0ada0f13d90405d6ae55386bd28"),
    "A.1 2": (ZERO_KEY, 1, (0, 0, 0), "9f07e7be5551387a98ba977c732d080d"),
    "A.1 3": (ONE_KEY, 1, (0, 0, 0), "3aeb5224ecf849929b9d828db1ced4dd"),
    "A.1 4": ([0xFF00, 0, 0, 0], 2, (0, 0, 0), "72d54dfbf12ec44b362692df94137f32"),
    "A.1 5": (ZERO_KEY, 0, (0, 0, 0x02000000), "c2c64d378cd536374ae204b9ef933fcd"),
}


@pytest.mark.parametrize("name", VECTORS)
def test_chacha20_known_answers(name, isa):
    key, counter, nonce, first = VECTORS[name]
    release, purpose = nonce[1] | nonce[2] << 32, nonce[0] >> 24
    words = ops.native.chacha20(key, release, purpose, counter, 1)[0]
    assert words.astype("<u4").tobytes()[:16].hex() == first
    true = reference_noise.chacha20(stream(release, key), purpose, torch.tensor([counter]))[0]
    assert words.tolist() == true.tolist()


def test_the_whole_block_of_section_2_3_2():
    words = ops.native.chacha20(RFC_KEY, 0x4A000000, 9, 1, 1)[0]
    assert words.astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("first", [0, 5, 2**32 - 7, 2**40 - 3])
def test_chacha20_blocks_equal_the_reference(first, isa):
    words = ops.native.chacha20(SOME_KEY, 2**40 + 7, 2, first, 150)
    true = reference_noise.chacha20(stream(2**40 + 7), 2, torch.arange(first, first + 150))
    assert (words == true.numpy()).all()


@pytest.mark.parametrize("first_group", [0, 3, 2**29 - 5, 2**50])
def test_normals_equal_the_reference(first_group, isa):
    got = ops.native.secure_normals(SOME_KEY, 9, first_group, 20_000)  # so many have tails
    true = reference_noise.secure_normals(stream(9), 20_000, CPU, first_group).numpy()
    assert (np.abs(got - true) <= 2e-15 * np.maximum(1, np.abs(true))).all()


def test_normals_are_exact_to_double_precision():
    got = ops.native.secure_normals(SOME_KEY, 9, 0, 30)
    blocks = reference_noise.chacha20(stream(9), reference_noise.NOISE, torch.arange(240)).tolist()
    tails = reference_noise.chacha20(stream(9), reference_noise.RADIUS_TAIL, torch.arange(240)).tolist()
    mpmath.mp.dps = 40
    for e in range(0, len(got), 16):
        for j in range(8):
            pair, block = e % 64 // 16, e // 64 * 8 + j
            low, high, angle_low, angle_high = blocks[block][4 * pair : 4 * pair + 4]
            word, angle = low | high << 32, angle_low | angle_high << 32
            extra = mpmath.mpf(tails[block][4 * pair] | tails[block][4 * pair + 1] << 32) + 0.5
            more = extra / 2**64 if word < 2**52 else mpmath.mpf(0.5)
            radius = mpmath.sqrt(-2 * mpmath.log((word + more) / 2**64))
            turn = 2 * mpmath.pi * angle / 2**64
            for z, true in ((got[e + j], radius * mpmath.cos(turn)), (got[e + 8 + j], radius * mpmath.sin(turn))):
                assert abs(z - true) <= 2e-15 * max(1, abs(true))


def test_distribution():
    draws = torch.from_numpy(ops.native.secure_normals(SOME_KEY, 0, 0, 4_000_000 // 64))
    assert kolmogorov_smirnov(draws) < 1.63  # 1 % level
    for lag in (1, 2, 7, 8, 9, 16, 64):
        assert abs((draws[:-lag] * draws[lag:]).mean()) < 4.5 / len(draws) ** 0.5
        assert abs(((draws[:-lag] ** 2 - 1) * (draws[lag:] ** 2 - 1)).mean()) < 9 / len(draws) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ops_equal_the_reference(dtype, isa):
    """Integers may differ by one where a normal lies next to the middle between two."""
    for name, lists, arguments in (
        ("clip_sum", [cases.vectors([(9, 63), (9, 500)], dtype)], (cases.bounds(1.0), None)),
        ("clamp_sum", [cases.vectors([(9, 563)], dtype)], (cases.bounds(0.5),)),
    ):
        got, _ = getattr(torch.ops.dpkernels, name)(*lists, *arguments, stream(3), std(0.7))
        true, _ = getattr(dpk.reference, name)(*lists, *arguments, stream(3), std(0.7))
        for a, b in zip(got, true, strict=True):
            assert (a - b).abs().max() <= reference_noise.lattice(0.7) + 1.2e-7 * (dtype == torch.float32) * 4
    sums = [[torch.zeros(40, 3, dtype=dtype), torch.zeros(700, dtype=dtype)] for _ in range(2)]
    rows = cases.vectors([(5, 40, 3), (5, 700)], dtype)
    weights = torch.rand(5, 1, dtype=torch.float64)
    for op, out in zip((torch.ops.dpkernels.weighted_sum_, dpk.reference.weighted_sum_), sums, strict=True):
        op(out, [False, False], rows, [0, 1], weights, stream(4), std(3.0), 0.125)
    for a, b in zip(*sums, strict=True):
        assert (a - b).abs().max() <= reference_noise.lattice(3.0) + 5e-7 * (dtype == torch.float32)


def test_releases_are_on_the_lattice_whatever_the_scale_and_sums_beyond_it_stay_at_its_end(isa):
    noise = dpk.Gaussian(3.0, secure=True)
    assert noise.lattice == 2.0**-29
    x = torch.rand(1000, dtype=torch.float64) * 100
    dpk.add_gaussian_(x, noise)
    steps = x / noise.lattice
    assert steps.eq(steps.round()).all()
    assert (steps % 2 == 1).float().mean() == pytest.approx(0.5, abs=0.1)
    ends = torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan], dtype=torch.float64)
    dpk.add_gaussian_(ends, noise)
    assert ends.div(2.0**22).abs().sub(1).abs().max() < 1e-4
    assert ends.sign().tolist() == [1, -1, 1, -1, 1]


def test_threads_do_not_change_a_bit(isa):
    def draw():
        x = torch.zeros(300_000)
        torch.ops.dpkernels.add_gaussian_([x], stream(1), std())
        return [x]

    cases.thread_invariant(draw)


def test_no_two_share_noise_and_every_key_is_new():
    one, other = dpk.Gaussian(1.0, secure=True), dpk.Gaussian(1.0, secure=True)
    drawn = [dpk.add_gaussian_(torch.zeros(100_000), noise) for noise in (one, one, other)]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(3)
    assert correlation.abs().max() < 5 / 100_000**0.5
    assert one.releases == 2
    assert "secure" in repr(one)
    keys = {int(word) for noise in (one, other) for word in noise.release()[0][:4]}
    assert len(keys) == 8


def test_roundings_are_in_the_sensitivity():
    noise = dpk.Gaussian(2.0, secure=True)
    flat = dpk.clipping.Flat(1.0)
    assert flat.sensitivity(noise=dpk.Gaussian(2.0), width=100) == 1.0
    widened = 1 + 2.0**-20 + 10 * 2.0**-29
    assert flat.sensitivity(noise=noise, width=100) == pytest.approx(widened, rel=1e-15)
    assert flat.sensitivity("replace-one", noise=noise, width=100) > 2 * (1 + 2.0**-20)
    ledger = dpk.accounting.Ledger()
    dpk.clip_sum(torch.ones(3, 100), 1.0, noise=dpk.Gaussian(2.0, secure=True, ledger=ledger))
    assert ledger.event().releases[0].noise_multiplier == 2.0 / widened


# The attacks. Two neighbours: a sum of 0 and a sum of 1 in the first coordinate. Each attack returns, for outputs of a
# mechanism run on the first, the shares of outputs it calls possible or typical for the first and for the second.

RUNS = 20_000


def secure_outputs(sums):
    torch.ops.dpkernels.add_gaussian_([sums], stream(17), std())
    return sums


def plain_outputs(sums):
    return dpk.add_gaussian_(sums, dpk.Gaussian(1.0, seed=17))


def reachable(outputs, neighbour):
    """Whether there is a normal that takes the neighbour's sum to the output."""
    z = outputs - neighbour
    if (outputs * 2.0**30).frac().any():  # not of the lattice: single-precision normals
        return z.float().double() == z
    return (z * 2.0**30).frac() == 0  # every integer is the rounding of some double-precision normal


def test_attack_1_an_output_that_noise_cannot_reach():
    zeros = torch.zeros(RUNS, dtype=torch.float64)
    outputs = plain_outputs(zeros.clone())
    assert reachable(outputs, 0.0).all()
    assert reachable(outputs, 1.0).double().mean() < 0.6  # the others give their neighbour away for certain
    outputs = secure_outputs(zeros.clone())
    assert reachable(outputs, 0.0).all()
    assert reachable(outputs, 1.0).all()


def odd_share(outputs, neighbour):
    """How often output - neighbour is an odd number of lattice steps."""
    steps = ((outputs - neighbour) / 2.0**-30).round().long()
    return (steps % 2 == 1).double().mean().item()


def test_attack_2_rounding_parity_of_single_precision_on_a_lattice():
    """The neighbour's sum is an odd number of steps: float normals above 2^-6 are even numbers of them."""
    neighbour = 1 + 2.0**-30
    step = lambda x: (x / 2.0**-30).round() * 2.0**-30  # noqa: E731
    outputs = step(plain_outputs(torch.zeros(RUNS)).double())
    assert odd_share(outputs, 0.0) < 0.02
    assert odd_share(outputs, neighbour) > 0.98
    outputs = secure_outputs(torch.zeros(RUNS, dtype=torch.float64))
    for x in (0.0, neighbour):
        assert odd_share(outputs, x) == pytest.approx(0.5, abs=4 * 0.5 / RUNS**0.5)


def grid_distance(z0, z1, bits):
    """How far uniforms exp(-radius^2 / 2) are from the grid that `bits` bits have: 1/4 if they know nothing of it."""
    uniform = np.exp(-(z0**2 + z1**2) / 2)
    uniform = uniform[uniform < 0.05] * 2.0**bits - 0.5  # small ones are exact enough
    return np.abs(uniform - np.round(uniform)).mean(), 4 * 0.15 / len(uniform) ** 0.5


@pytest.mark.parametrize("bits", [24, 32])
def test_attack_3_the_grid_of_a_short_radius(bits):
    pairs = 10 * RUNS
    words = np.random.default_rng(1).integers(0, 2**bits, pairs)
    angle = np.random.default_rng(2).uniform(0, 2 * math.pi, pairs)
    radius = np.sqrt(-2 * np.log((words + 0.5) / 2.0**bits))
    z0, z1 = (np.round(radius * f(angle) * 2.0**30) / 2.0**30 for f in (np.cos, np.sin))
    assert grid_distance(z0, z1, bits)[0] < 0.1
    assert grid_distance(z0 - 1, z1, bits)[0] > 0.24
    outputs = secure_outputs(torch.zeros(2 * pairs, dtype=torch.float64)).view(-1, 4, 2, 8)
    z0, z1 = (outputs[:, :, i].flatten().numpy() for i in range(2))  # pairs stand eight elements apart
    for neighbour in (0, 1):
        mean, noise = grid_distance(z0 - neighbour, z1, bits)
        assert mean == pytest.approx(0.25, abs=noise)
