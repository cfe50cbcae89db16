"""Train privately on scikit-learn's handwritten digits: `make train`, or `python -m dpkernels.algorithms.digits`.

DP-SGD on a small network. Prints the accuracy on held-out digits (which are public here), the privacy spent, and
the time a step takes.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import dpkernels as dpk

from .dp_sgd import DPSGD


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test digits as (x, y, test_x, test_y): 8 by 8 pixels, scaled by their public range."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    return x[360:], y[360:], x[:360], y[:360]


def train(
    *,
    steps: int = 200,
    expected_batch_size: int = 256,
    max_norm: float = 1.0,
    noise_multiplier: float = 4.0,
    lr: float = 1.0,
    delta: float = 1e-5,
    seed: int | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Run DP-SGD; returns accuracy, epsilon, delta and seconds per step.

    Guarantee: (epsilon, delta)-DP for the trained weights under add-remove adjacency, one digit being one record,
    each in a step's batch independently with probability expected_batch_size / 1437. With a `seed` the run is
    reproducible, and private only from those who do not know the seed.
    """
    x, y, test_x, test_y = load_digits()
    rate = expected_batch_size / len(x)  # the size of this data set is public
    init = torch.Generator()
    if seed is None:
        init.seed()
    else:
        init.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=init)

    def accuracy() -> float:
        with torch.no_grad():
            correct: Tensor = model(test_x).argmax(1) == test_y
        return correct.float().mean().item()

    algorithm = DPSGD(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        max_norm=max_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        sampling_rate=rate,
        seed=seed,
    )
    start = time.perf_counter()
    for step, batch in enumerate(dpk.sampling.poisson(len(x), rate, steps, seed, ledger=algorithm.ledger), 1):
        algorithm.step(x[batch], y[batch])
        if not quiet and step % max(1, steps // 10) == 0:
            print(f"step {step:4d}/{steps}   test accuracy {accuracy():.1%}", flush=True)
    seconds = (time.perf_counter() - start) / steps
    return {
        "accuracy": accuracy(),
        "epsilon": algorithm.epsilon(delta),
        "delta": delta,
        "seconds_per_step": seconds,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train privately on scikit-learn's digits.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--noise-multiplier", type=float, default=4.0)
    parser.add_argument("--seed", type=int, help="make the run reproducible (not private from who knows it)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: got {options.steps}, must be at least 1")
    try:
        result = train(steps=options.steps, noise_multiplier=options.noise_multiplier, seed=options.seed)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"\naccuracy {result['accuracy']:.1%} on held-out digits"
        f"\nprivacy  epsilon = {result['epsilon']:.2f} at delta = {result['delta']:g} (add-remove, Poisson sampling)"
        f"\ntime     {1e3 * result['seconds_per_step']:.2f} ms per step"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
