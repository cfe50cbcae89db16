"""Bad input: a ValueError that names the argument, what it was and what it must be, before anything is written."""

import math

import pytest
import torch

import dpkernels as dpk

X = torch.ones(4, 3)
MOMENTUM = {"gradient_norm": 1.0, "difference_norm": 1.0, "momentum": 0.5}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: dpk.clip_sum(X, -1.0, noise=n), "clip: got -1.0, must be a number >= 0"),
        (lambda n: dpk.clip_sum(X, math.nan, noise=n), "clip: got nan"),
        (lambda n: dpk.clip_sum(X, None, noise=n), "clip: got None"),
        (lambda n: dpk.clip_sum([], 1.0, noise=n), "vectors: got a list, must be a tensor or a non-empty"),
        (lambda n: dpk.clip_sum(None, 1.0, noise=n), "vectors: got None"),
        (lambda n: dpk.clip_sum([X, "x"], 1.0, noise=n), r"vectors\[1\]: got 'x', must be a tensor"),
        (lambda n: dpk.clip_sum(X.int(), 1.0, noise=n), "vectors: got a tensor of torch.int32, must be float32"),
        (lambda n: dpk.clip_sum(X.to_sparse(), 1.0, noise=n), "vectors: got a tensor of layout torch.sparse_coo"),
        (lambda n: dpk.clip_sum([X, X.to("meta")], 1.0, noise=n), r"vectors\[1\]: is on meta, must be on cpu"),
        (lambda n: dpk.clip_sum([X, X[:3]], 1.0, noise=n), r"vectors\[1\]: has 3 samples \(dim 0\), must have 4"),
        (lambda n: dpk.clip_sum([X, torch.tensor(1.0)], 1.0, noise=n), r"vectors\[1\]: got a tensor without dim"),
        (lambda n: dpk.clip_sum(X, dpk.clipping.PerLayer([1.0, 2.0]), noise=n), "PerLayer has 2 bounds, must have 1"),
        (lambda n: dpk.clip_sum(X, dpk.clipping.RecursiveMomentum(1.0, 1.0, 0.5), noise=n), "clip: got Recursive"),
        (lambda n: dpk.clip_sum(X, 1.0, noise=0.5), "noise: got 0.5, must be a dpkernels.Gaussian"),
        (lambda n: dpk.clip_difference_sum(X, X[:2], 1.0, noise=n), r"before\[0\]: has shape \(2, 3\), must be"),
        (lambda n: dpk.clip_difference_sum([X], [X, X], 1.0, noise=n), "before: has 2 tensors, must have 1 like now"),
        (lambda n: dpk.clip_difference_sum(X, X.double(), 1.0, noise=n), r"before\[0\]: is torch.float64 on cpu"),
        (lambda n: dpk.clip_momentum_sum(X, X, **{**MOMENTUM, "momentum": 1.1}, noise=n), "momentum: got 1.1, must"),
        (lambda n: dpk.clip_momentum_sum(X, X, **{**MOMENTUM, "momentum": -0.1}, noise=n), "momentum: got -0.1"),
        (lambda n: dpk.clip_momentum_sum(X, X, **{**MOMENTUM, "gradient_norm": -1}, noise=n), "gradient_norm: got -1"),
        (
            lambda n: dpk.clip_momentum_sum(X, X, **{**MOMENTUM, "difference_norm": math.nan}, noise=n),
            "difference_norm",
        ),
        (lambda n: dpk.clamp_sum(X, -0.5, noise=n), "bound: got -0.5, must be a number >= 0"),
        (lambda n: dpk.clamp_sum(X, math.nan, noise=n), "bound: got nan"),
        (lambda n: dpk.sparsify(X[0], 0.0, seed=1, noise=n), "keep_probability: got 0.0, must be a finite number"),
        (lambda n: dpk.sparsify(X[0], 1.5, seed=1, noise=n), "keep_probability: got 1.5"),
        (lambda n: dpk.sparsify(X[0], math.nan, seed=1, noise=n), "keep_probability: got nan"),
        (lambda n: dpk.sparsify(X, 0.5, seed=1, noise=n), r"vector: has shape \(4, 3\), must be one-dimensional"),
        (lambda n: dpk.sparsify(X[0].long(), 0.5, seed=1, noise=n), "vector: got a tensor of torch.int64"),
        (lambda n: dpk.sparsify(X[0], 0.5, seed=-1, noise=n), "seed: got -1, must be an integer"),
        (lambda n: dpk.sparsify(X[0], 0.5, seed=1.5, noise=n), "seed: got 1.5"),
        (lambda n: dpk.add_gaussian_(X.int(), n), "tensors: got a tensor of torch.int32"),
        (lambda n: dpk.add_gaussian_(torch.ones(3).expand(4, 3), n), r"tensors\[0\]: is an expanded view"),
        (lambda n: dpk.add_gaussian_(X, None), "noise: got None"),
    ],
)
def test_bad_calls(call, message):
    ledger = dpk.accounting.Ledger()
    noise = dpk.Gaussian(1.0, seed=0, ledger=ledger)
    with pytest.raises(ValueError, match=message):
        call(noise)
    assert len(ledger) == 0
    assert noise._stream.tolist() == [0, 0]
    assert X.eq(1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpk.Gaussian(-1.0), "std: got -1.0, must be a finite number >= 0"),
        (lambda: dpk.Gaussian(math.nan), "std: got nan"),
        (lambda: dpk.Gaussian(math.inf), "std: got inf"),
        (lambda: dpk.Gaussian("1"), "std: got '1'"),
        (lambda: dpk.Gaussian(1.0, seed=-1), "seed: got -1, must be at least 0"),
        (lambda: dpk.Gaussian(1.0, seed=1.0), "seed: got 1.0, must be an integer or None"),
        (lambda: dpk.Gaussian(1.0, seed=1, secure=True), "seed: got 1, must be None with secure noise"),
        (lambda: dpk.Gaussian(0.0, secure=True), "std: got 0.0, must be from"),
    ],
)
def test_bad_noise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
