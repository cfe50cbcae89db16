"""Whole models against a loop over samples: rows, norms and clipped sums."""

import pytest
import torch

import dpkernels as dpk
from dpkernels import factors, planner
from tests import models, truth


@pytest.mark.parametrize("name", models.ZOO)
def test_equals_the_loop_over_samples(name):
    torch.manual_seed(0)
    truth.check(*models.ZOO[name]())


@pytest.mark.parametrize("way", planner.Way)
@pytest.mark.parametrize("name", models.ZOO)
def test_every_way_of_the_planner(name, way):
    torch.manual_seed(0)
    with planner.forced(way):
        truth.check(*models.ZOO[name]())


@pytest.mark.parametrize("name", ["gpt", "vit", "three_uses", "overlapping_views", "weight_norm", "lora_merged"])
def test_in_small_pieces(name, monkeypatch):
    """Chunks of samples and tiles of lines, as large models have them."""
    monkeypatch.setattr(factors, "PIECE", 50)
    torch.manual_seed(0)
    truth.check(*models.ZOO[name]())


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm", "hugging_face_bert", "routed", "time_major"])
@pytest.mark.parametrize("batch", [1, 2])
def test_small_batches(name, batch):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    inputs, targets = (truth.map_tensors(lambda t: t[:batch], x) for x in (inputs, targets))
    truth.check(model, loss_fn, inputs, targets)


@pytest.mark.parametrize("name", models.ZOO)
def test_an_empty_batch_has_no_rows_and_no_sum(name):
    torch.manual_seed(0)
    model, loss_fn, inputs, targets = models.ZOO[name]()
    inputs, targets = (truth.map_tensors(lambda t: t[:0], x) for x in (inputs, targets))
    rows = dpk.per_sample_gradients(model, loss_fn, inputs, targets)
    assert rows.norms().shape == (0,)
    assert all(not s.any() for s in rows.clip_sum(1.0).sum.values())
    assert all(s.all() for s in rows.clip_sum(1.0, dpk.Gaussian(1.0)).sum.values())
