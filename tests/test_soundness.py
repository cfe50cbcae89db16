import numpy as np
import pytest
import torch

import dpkernels as dpk
from dpkernels import inner
from tests import soundness

ROWS = 100_000
SHARE = -(-ROWS // (len(soundness.FAMILIES) * soundness.BATCH))  # batches of each family


@pytest.mark.parametrize("name", soundness.FAMILIES)
def test_no_clipped_row_exceeds_its_bound(name):
    torch.manual_seed(0)
    rng = np.random.default_rng([1, list(soundness.FAMILIES).index(name)])
    found = np.concatenate([soundness.FAMILIES[name](rng) for _ in range(SHARE)])
    assert found.max() <= 1
    assert found.max() > 0.999  # it came close: rows were clipped, not zeroed


def plain_clip(lists, clip):
    """Clipping as one would write it, in the precision of the vectors."""
    norms = torch.stack([t.flatten(1).norm(dim=1).to(torch.float32) for t in lists]).norm(dim=0)
    scale = (clip.row_norm / norms).clamp(max=1)
    return dpk.ClippedSum([torch.einsum("b,bw->w", scale.to(t.dtype), t) for t in lists], norms)


@pytest.mark.parametrize("name", ["dense, float32", "dense, bfloat16"])
def test_the_hunt_finds_plain_clipping(name):
    rng = np.random.default_rng(1)
    found = [soundness.FAMILIES[name].func(rng, plain_clip, torch.float32) for _ in range(SHARE)]
    assert np.concatenate(found).max() > 1


@pytest.mark.parametrize("name", ["sequence, float32", "tied, float32", "lookups, float32"])
def test_the_hunt_finds_norms_by_inner_products_without_a_margin(name, monkeypatch):
    """|row|^2 by single-precision inner products of addends: right to six digits, unless they cancel."""

    def naive(matrices, *, rounded=False):
        found = []
        for m in matrices:
            rows = torch.zeros(m.batch)
            if m.dense is not None:
                rows = rows + m.dense.values.flatten(1).square().sum(1)
            terms = []
            if m.outer is not None:
                terms += [(m.outer.a.float(), m.outer.g.float())]
            if m.rows is not None:
                hot = torch.nn.functional.one_hot(m.rows.ids, m.height).float()
                terms += [(m.rows.g.float(), hot)]
            for a, g in terms:
                for b, h in terms:
                    rows = rows + ((a @ b.mT) * (g @ h.mT)).sum((1, 2))
            found.append(rows.double().clamp(min=0))
        squares = torch.stack(found, dim=1)
        return squares, squares

    monkeypatch.setattr(inner, "squared_norms", naive)
    rng = np.random.default_rng(1)
    found = np.concatenate([soundness.FAMILIES[name](rng) for _ in range(SHARE)])
    assert found.max() > 1.5
