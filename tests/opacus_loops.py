"""A loop as users of Opacus write it, on a small model, and the truth of its steps: for the tests of the drop-in."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.opacus import PrivacyEngine

N, BATCH = 40, 8


def data(n=N, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator, dtype=dtype)
    return x, (x[:, 0] > 0).long()


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def private(model=None, *, optimizer=torch.optim.SGD, loader=None, engine=None, **arguments):
    model = model or mlp()
    loader = loader or DataLoader(TensorDataset(*data()), batch_size=BATCH)
    engine = engine or PrivacyEngine()
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, **arguments}
    made = engine.make_private(
        module=model, optimizer=optimizer(model.parameters(), lr=0.1), data_loader=loader, **settings
    )
    return (*made, engine)


def fixed(**arguments):
    """Without Poisson sampling, so that batches are known."""
    with pytest.warns(UserWarning, match="counted as if each record were in it"):
        return private(poisson_sampling=False, **arguments)


def truth(model, x, y, bound, loss=F.cross_entropy, also=None):
    """The clipped sum, sample by sample; of two losses where there is another input to add."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        own = loss(model(x[i : i + 1]), y[i : i + 1])
        own = own if also is None else own + loss(model(also(x[i : i + 1])), y[i : i + 1])
        row = torch.autograd.grad(own, list(model.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in row))
        for t, g in zip(total, row, strict=True):
            t += g * min(1.0, bound / norm)
    return total


def train(model, optimizer, loader, epochs=1, loss=F.cross_entropy):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
