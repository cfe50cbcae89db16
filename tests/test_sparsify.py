import pytest
import torch

import dpkernels as dpk
from dpkernels import dense, reference
from tests import cases


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 5_000, 100_003])
@pytest.mark.parametrize("keep", [1.0, 0.2, 1e-3])
def test_equals_reference(size, keep, dtype, isa):
    vector = cases.vectors([(size,)], dtype)[0]
    seed = torch.tensor([17])
    for stream in ((None, None), cases.noise()):
        values, indices = torch.ops.dpkernels.sparsify(vector, keep, seed, *stream)
        true_values, true_indices = reference.sparsify(vector, keep, seed, *stream)
        assert torch.equal(indices, true_indices)
        torch.testing.assert_close(values, true_values, rtol=2e-7, atol=0 if stream[0] is None else 3e-5 / keep)


def test_the_mask_depends_on_its_seed_alone():
    a, b = torch.randn(5000), torch.randn(5000)
    noise = dpk.Gaussian(1.0)
    kept = dpk.sparsify(a, 0.3, seed=1).indices
    assert torch.equal(kept, dpk.sparsify(b, 0.3, seed=1, noise=noise).indices)
    assert not torch.equal(kept, dpk.sparsify(a, 0.3, seed=2).indices)


def test_each_coordinate_is_kept_with_the_probability():
    n, keep = 4_000_000, 0.2
    kept = torch.zeros(n)
    kept[dpk.sparsify(torch.zeros(n), keep, seed=5).indices] = 1
    limit = 4 * (keep * (1 - keep) / n) ** 0.5
    assert abs(kept.mean() - keep) < limit
    assert abs(kept[1:][kept[:-1] == 1].mean() - keep) < 3 * limit  # neighbours are independent
    assert abs(kept.view(-1, 64).mean(0) - keep).max() < 8 * limit


def test_the_message_is_unbiased_and_p_1_is_the_vector():
    vector = torch.randn(300)
    assert torch.equal(dpk.sparsify(vector, 1.0, seed=0).to_dense(), vector)
    mean = torch.stack([dpk.sparsify(vector, 0.5, seed=seed).to_dense() for seed in range(4000)]).mean(0)
    assert (mean - vector).abs().max() < 5 * vector.abs().max() / 4000**0.5


def test_noise_and_mask_of_equal_seeds_are_unrelated():
    message = dpk.sparsify(torch.zeros(400_000), 0.5, seed=7, noise=dpk.Gaussian(1.0, seed=7))
    dense_noise = dpk.add_gaussian_(torch.zeros(400_000), dpk.Gaussian(1.0, seed=7))
    kept = torch.zeros(400_000)
    kept[message.indices] = 1
    correlation = torch.corrcoef(torch.stack([kept, dense_noise]))[0, 1]
    assert abs(correlation) < 4 / 400_000**0.5
    assert abs(torch.corrcoef(torch.stack([kept, dense_noise.abs()]))[0, 1]) < 4 / 400_000**0.5


def test_noise_is_on_the_kept_ones_before_the_division():
    noise = dpk.Gaussian(3.0, seed=1)
    values = dpk.sparsify(torch.zeros(1_000_000), 0.25, seed=0, noise=noise).values
    assert values.std().item() == pytest.approx(12.0, rel=0.01)


def test_threads_do_not_change_a_bit(isa):
    vector = cases.vectors([(200_003,)])[0]
    cases.thread_invariant(lambda: list(dpk.sparsify(vector, 0.2, seed=1, noise=dpk.Gaussian(1.0, seed=3))[:2]))


def test_strided_input(isa):
    vector = cases.vectors([(9_000,)])[0]
    assert torch.equal(
        dpk.sparsify(vector[::3], 0.4, seed=1).values, dpk.sparsify(vector[::3].clone(), 0.4, seed=1).values
    )


@pytest.mark.parametrize("size", [1, 64, 100, 40_000])
@pytest.mark.parametrize("keep", [1.0, 0.3])
@pytest.mark.usefixtures("isa")
def test_masks_are_those_of_each_seed(size, keep):
    seeds = [3, 0, 2**62, 3]
    indices, counts = dense.masks(seeds, size, keep)
    alone = [dpk.sparsify(torch.zeros(size), keep, seed=seed).indices for seed in seeds]
    assert counts == [len(kept) for kept in alone]
    assert torch.equal(indices, torch.cat([i * size + kept for i, kept in enumerate(alone)]))
    true_indices, true_counts = reference.masks(torch.tensor(seeds), size, keep, True)
    assert torch.equal(indices, true_indices)
    assert true_counts.tolist() == counts
    none, again = dense.masks(seeds, size, keep, with_indices=False)
    assert none.numel() == 0
    assert again == counts
    assert reference.masks(torch.tensor(seeds), size, keep, False)[1].tolist() == counts


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5, float("nan"), "x", None])
def test_masks_refuse_what_is_no_probability(keep):
    with pytest.raises(ValueError, match="keep_probability: got"):
        dense.masks([1], 10, keep)
