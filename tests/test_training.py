"""Training runs from a few words: every algorithm learns the digits within its budget, and goes on where it was."""

import pytest
import torch

from dpkernels.algorithms import training


@pytest.mark.parametrize(
    ("algorithm", "steps", "least"),
    [("dp-sgd", 60, 0.8), ("dp-lsgd", 40, 0.6), ("diff2", 30, 0.7), ("prisma", 40, 0.5), ("sdm-dsgd", 20, 0.4)],
)
def test_every_algorithm_learns_within_its_budget(algorithm, steps, least):
    task = training.task("digits", seed=1)
    run = training.Run(task, algorithm, epsilon=4.0, delta=1e-5, steps=steps, seed=1)
    for _ in range(steps):
        run.step()
    assert 3.5 < run.epsilon() <= 4.0
    assert task.score() > least
    assert task.train_loss() < 2.3


@pytest.mark.parametrize("algorithm", ["dp-sgd", "diff2"])
def test_a_run_that_is_resumed_goes_on_as_it_would_have(algorithm):
    def new():
        return training.Run(training.task("digits", seed=2), algorithm, epsilon=1.0, delta=1e-5, steps=6, seed=2)

    whole = new()
    for _ in range(6):
        whole.step()
    first = new()
    for _ in range(3):
        first.step()
    second = new()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        second.step()
    for p, q in zip(whole.task.model.parameters(), second.task.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert second.epsilon() == whole.epsilon()
    other = training.Run(training.task("digits", seed=2), algorithm, epsilon=1.0, delta=1e-5, steps=7, seed=2)
    with pytest.raises(ValueError, match="checkpoint: has steps = 6, must be 7"):
        other.load_state_dict(first.state_dict())


def test_what_is_refused():
    with pytest.raises(ValueError, match="data: got 'cats', must be one of digits"):
        training.task("cats")
    with pytest.raises(ValueError, match="data_dir: got None, must be a directory that has mnist, as published at"):
        training.task("mnist")
    with pytest.raises(ValueError, match="algorithm: got 'sgd'"):
        training.settings("sgd")
    with pytest.raises(ValueError, match="rate: is no constant of dp-sgd, must be one of"):
        training.Run(training.task("digits"), "dp-sgd", epsilon=1.0, delta=1e-5, rate=1)
