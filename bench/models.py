"""The four models that training is measured on, each with the size of its batch as an argument."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Task:
    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]  # one loss for each sample
    inputs: Tensor
    targets: Tensor
    token_loss: bool = False

    def in_float64(self) -> Task:
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def mlp(batch: int = 256, width: int = 1024) -> Task:
    """784-1024-1024-1024-10."""
    sizes = [784, width, width, width]
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Task(model, class_loss, torch.randn(batch, 784), torch.randint(0, 10, (batch,)))


def cnn(batch: int = 256) -> Task:
    """The small convolutional network of many DP-SGD papers, 26,010 parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    return Task(model, class_loss, torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,)))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(min(16, outside), outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(min(16, outside), outside)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet20(batch: int = 64) -> Task:
    """ResNet-20 for 32x32 images with GroupNorm."""
    blocks: list[nn.Module] = []
    inside = 16
    for i, width in enumerate([16] * 3 + [32] * 3 + [64] * 3):
        blocks.append(Residual(inside, width, 2 if i in (3, 6) else 1))
        inside = width
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(16, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return Task(model, class_loss, torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=2)
        q, k, v = (t.reshape(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, length: int, width: int = 256, layers: int = 4, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions(positions))))


def gpt(batch: int = 16, length: int = 128, width: int = 256) -> Task:
    """Four layers of width 256 over sequences of bytes."""
    ids = torch.randint(0, 256, (batch, length))
    return Task(GPT(length, width), token_loss, ids, ids.roll(-1, 1), token_loss=True)


MODELS: dict[str, Callable[..., Task]] = {"MLP": mlp, "CNN": cnn, "ResNet-20": resnet20, "GPT": gpt}
