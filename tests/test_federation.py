import csv
import json

import pytest
import torch

from dpkernels.algorithms import DIFF2, federation
from dpkernels.algorithms.problems import (
    cross_entropy,
    logistic_regression,
    small_cnn,
    softplus_regression,
    squared_loss,
)


def test_iid_parts_are_all_records_once_and_nearly_equal():
    parts = federation.iid(103, 10, seed=1)
    assert torch.cat(parts).sort().values.tolist() == list(range(103))
    assert {len(p) for p in parts} == {10, 11}
    assert [p.tolist() for p in federation.iid(103, 10, seed=1)] == [p.tolist() for p in parts]


@pytest.mark.parametrize(("alpha", "skew"), [(100.0, False), (0.05, True)])
def test_dirichlet_parts_are_skewed_by_label(alpha, skew):
    labels = torch.arange(1000) % 10
    parts = federation.dirichlet(labels, 10, alpha, seed=1)
    assert torch.cat(parts).sort().values.tolist() == list(range(1000))
    assert min(len(p) for p in parts) > 0
    most = [float(labels[p].bincount(minlength=10).max() / len(p)) for p in parts]
    assert (sum(most) / 10 > 0.5) == skew


def test_seeds_of_places_differ_and_none_stays_none():
    assert federation.seed_of(None, 1, 2) is None
    found = {federation.seed_of(s, *place) for s in (0, 1) for place in ((), (0,), (1,), (0, 1), (1, 0))}
    assert len(found) == 10
    assert all(0 <= seed < 2**63 for seed in found)


def test_joined_clients_have_all_records():
    parts = [({"a": torch.full((n, 2), n), "k": torch.tensor(3.0)}, torch.full((n,), n)) for n in (2, 3)]
    inputs = federation.joined([p[0] for p in parts])
    assert inputs["a"][:, 0].tolist() == [2, 2, 3, 3, 3]
    assert inputs["k"].item() == 3.0


def test_a_history_says_what_is_not_private(tmp_path):
    torch.manual_seed(0)
    model = softplus_regression(3)
    data = torch.randn(20, 3), torch.randn(20)
    norms = {"gradient_norm": 1.0, "difference_norm": 1.0, "gradient_noise": 0.5, "difference_noise": 0.5}
    algorithm = DIFF2(model, squared_loss, [data], lr=0.1, restart_every=2, **norms)
    shown = []
    history = federation.run(
        algorithm,
        5,
        every=2,
        public={"test loss": lambda: 1.0},
        not_private={"train loss": lambda: squared_loss(model(data[0]), data[1]).mean().item()},
        show=shown.append,
    )
    assert [r["round"] for r in history.records] == [2, 4, 5]
    assert [r["bytes"] for r in history.records] == [4 * 51 * n for n in (2, 4, 5)]
    assert shown == history.records
    assert history.records[0]["epsilon"] < history.records[-1]["epsilon"]
    history.to_json(tmp_path / "run.json")
    history.to_csv(tmp_path / "run.csv")
    assert json.loads((tmp_path / "run.json").read_text())["not_private"] == ["train loss"]
    rows = list(csv.reader((tmp_path / "run.csv").read_text().splitlines()))
    assert rows[0] == ["round", "epsilon", "bytes", "seconds", "test loss", "train loss*"]
    assert len(rows) == 4


def test_the_problems_give_one_loss_for_each_record():
    images, labels = torch.randn(5, 1, 28, 28), torch.randint(0, 10, (5,))
    assert cross_entropy(small_cnn()(images), labels).shape == (5,)
    assert cross_entropy(logistic_regression()(images.flatten(1)), labels).shape == (5,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: federation.iid(3, 4), "parties: got 4, must be at most records = 3"),
        (lambda: federation.dirichlet(torch.zeros(3), 4, 1.0), "parties: got 4, must be at most the 3 records"),
        (lambda: federation.dirichlet(torch.zeros(3), 2, 0.0), "alpha: got 0, must be > 0"),
        (lambda: federation.seed_of(-1), "seed: got -1"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
