"""The problems of the papers, small: models and made-up data for tests and demonstrations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .federation import Client


class RegularisedLeastSquares(nn.Module):
    """f(x) = (a^T x - b)^2 / 2 + lambda / 2 sum_k x_k^2 / (1 + x_k^2), of PriSMA (its equation 22).

    Called with [B, d] vectors a it gives [B, 2]: a^T x, and the regulariser; `least_squares` makes the loss of them.
    """

    def __init__(self, width: int = 10, regularisation: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.regularisation = regularisation

    def forward(self, a: Tensor) -> Tensor:
        """Predictions and regulariser, one line for each record."""
        square = self.weight.square()
        penalty = 0.5 * self.regularisation * (square / (1 + square)).sum()
        return torch.stack([a @ self.weight, penalty.expand(len(a))], dim=1)


def least_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of `RegularisedLeastSquares`."""
    return 0.5 * (outputs[:, 0] - targets).square() + outputs[:, 1]


def least_squares_clients(
    clients: int = 10, records: int = 2000, width: int = 10, copies: int = 1, seed: int = 0
) -> list[Client]:
    """The data of PriSMA's Figure 1: a uniform in [-1, 1]^d, b = a^T x* + N(0, 2), each record `copies` times."""
    generator = torch.Generator().manual_seed(seed)
    true = torch.randn(width, generator=generator)
    found = []
    for _ in range(clients):
        a = torch.rand(records, width, generator=generator) * 2 - 1
        b = a @ true + 2**0.5 * torch.randn(records, generator=generator)
        found.append((a.repeat(copies, 1), b.repeat(copies)))
    return found


def softplus_regression(width: int, hidden: int = 10, seed: int = 0) -> nn.Module:
    """One hidden layer of softplus units, of DIFF2; weights uniform within 1 / sqrt(inputs of the layer)."""
    generator = torch.Generator().manual_seed(seed)
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, 1)
    for layer in (first, last):
        bound = float(layer.in_features) ** -0.5
        for p in layer.parameters():
            nn.init.uniform_(p, -bound, bound, generator=generator)
    return nn.Sequential(first, nn.Softplus(), last)


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error of one number for each record."""
    return 0.5 * (outputs.squeeze(1) - targets).square()


def logistic_regression(width: int = 784, classes: int = 10) -> nn.Module:
    """A linear layer from zero, of SDM-DSGD."""
    model = nn.Linear(width, classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def small_cnn(classes: int = 10) -> nn.Module:
    """Two convolutions and two linear layers for 28 by 28 images, of SDM-DSGD."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss for each record."""
    return functional.cross_entropy(outputs, targets, reduction="none")
