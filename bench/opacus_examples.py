"""Two training loops of Opacus's examples, run by Opacus and by the drop-in: `bench opacus_examples DIRECTORY`.

MNIST (the network and loop of its `mnist` example) and text classification (embedding, LSTM, linear layer: the loop of
its `imdb` and `char-lstm` examples; here, whether a stretch of Shakespeare has a speaker's name in it, for there is no
hub to download reviews from). The loops are the same code for all; only the class of the engine differs. DIRECTORY has
mnist/*.gz and tinyshakespeare/input.txt. Prints accuracy over seeds, epsilon and the time of training.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpkernels.algorithms import datasets
from dpkernels.algorithms.datasets import Data
from dpkernels.bench import harness
from dpkernels.columns import aligned

RESULTS_FILE = Path(__file__).parent / "results" / "opacus_examples.json"
SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SEEDS, DELTA = (1, 2), 1e-5
MODES = {"dpkernels": "hooks", "Opacus hooks": "hooks", "Opacus functorch": "functorch", "Opacus ghost": "ghost"}


class SampleConvNet(nn.Module):
    """The network of the MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.fc1, self.fc2 = nn.Linear(32 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 32 * 4 * 4))))


class TextNet(nn.Module):
    """Embedding, LSTM, linear layer."""

    def __init__(self, lstm: Callable[..., nn.Module], vocabulary: int = 128, width: int = 32) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(vocabulary, width), lstm(width, width), nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(ids))[0].mean(1))


def text(directory: Path, length: int = 64) -> tuple[Data, Data]:
    """Stretches of text as byte values, and whether a line in them is a speaker's name."""
    raw = (directory / "tinyshakespeare" / "input.txt").read_bytes()
    if hashlib.sha256(raw).hexdigest() != SHAKESPEARE:
        raise ValueError(f"{directory}/tinyshakespeare/input.txt: is not the published file")
    pieces = [raw[i : i + length] for i in range(0, len(raw) - length, length)]
    x = torch.tensor([list(piece) for piece in pieces])
    y = torch.tensor([bool(re.search(rb"\n[A-Z][A-Za-z ]+:\n", piece)) for piece in pieces]).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[order[2000:]], y[order[2000:]]), (x[order[:2000]], y[order[:2000]])


def train(
    name: str, model: nn.Module, data: Data, *, lr: float, batch: int, epochs: int, noise: float, bound: float
) -> tuple[nn.Module, float, float]:
    """The loop, by one engine: the model, epsilon, and the seconds of training."""
    loader: Any = DataLoader(TensorDataset(*data), batch_size=batch, shuffle=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=lr)
    engine: Any
    if name == "dpkernels":
        from dpkernels.opacus import PrivacyEngine

        engine = PrivacyEngine()
    else:
        from opacus import PrivacyEngine as Theirs

        engine = Theirs()
    criterion: Any = nn.CrossEntropyLoss()
    made = engine.make_private(
        module=model, optimizer=optimizer, criterion=criterion, data_loader=loader, noise_multiplier=noise,
        max_grad_norm=bound, grad_sample_mode=MODES[name],
    )  # fmt: skip
    if MODES[name] == "ghost":
        model, optimizer, criterion, loader = made
    else:
        model, optimizer, loader = made
    model.train()
    seconds = 0.0
    for _ in range(epochs):
        for x, y in loader:
            start = time.perf_counter()  # the loader is torch's own
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            seconds += time.perf_counter() - start
    return model, engine.get_epsilon(DELTA), seconds


def accuracy(model: nn.Module, data: Data) -> float:
    model.eval()
    with torch.no_grad():
        return statistics.fmean(
            float((model(x).argmax(1) == y).float().mean()) for x, y in zip(*(t.split(1000) for t in data), strict=True)
        )


def main(words: list[str]) -> None:
    if len(words) != 1:
        sys.exit(f"bench opacus_examples: got {words}, must be one directory with mnist and tinyshakespeare")
    warnings.simplefilter("ignore")
    directory = Path(words[0])
    (x, y), (u, v) = datasets.images(directory, "mnist")
    mnist = (((x - 0.1307) / 0.3081)[:12000], y[:12000]), ((u - 0.1307) / 0.3081, v)
    from opacus.layers import DPLSTM

    def lstm(name: str) -> Callable[..., nn.Module]:
        own = nn.LSTM if name in ("dpkernels", "Opacus functorch") else DPLSTM  # their hooks want their own layer
        return lambda a, b: own(a, b, batch_first=True)

    tasks: dict[str, tuple[tuple[Data, Data], Callable[[str], nn.Module], dict[str, Any]]] = {
        "MNIST": (mnist, lambda name: SampleConvNet(),
                  {"lr": 0.5, "batch": 256, "epochs": 2, "noise": 1.0, "bound": 1.0}),
        "text": (text(directory), lambda name: TextNet(lstm(name)),
                 {"lr": 1.0, "batch": 256, "epochs": 1, "noise": 0.8, "bound": 1.0}),
    }  # fmt: skip
    rows = [("example", "engine", "accuracy", "epsilon", "seconds", "of ours")]
    record: list[dict[str, Any]] = []
    for example, ((first, test), make, settings) in tasks.items():
        ours = 0.0
        for name in MODES:
            found = []
            try:
                for seed in SEEDS:
                    torch.manual_seed(seed)
                    model, epsilon, seconds = train(name, make(name), first, **settings)
                    found.append((accuracy(model, test), epsilon, seconds))
            except Exception as error:
                rows.append((example, name, f"does not run: {str(error).splitlines()[0][:60]}", "", "", ""))
                continue
            shares, seconds = [f[0] for f in found], statistics.fmean(f[2] for f in found)
            ours = seconds if name == "dpkernels" else ours
            line = (f"{statistics.fmean(shares):.1%} ± {statistics.stdev(shares):.1%}", f"{found[0][1]:.3f}")
            rows.append((example, name, *line, f"{seconds:.1f}", f"{seconds / ours:.2f}"))
            record.append({"example": example, "engine": name, "accuracy": shares, "epsilon": found[0][1],
                           "seconds": [f[2] for f in found], **settings})  # fmt: skip
            print("  " + "  ".join(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(f"{what}: {how}" for what, how in harness.machine().items()))
    print(aligned(rows))
    RESULTS_FILE.write_text(json.dumps({"machine": harness.machine(), "runs": record}, indent=1) + "\n")
