"""Public data sets for experiments, read from a directory that has their files as published; nothing is downloaded."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Data = tuple[Tensor, Tensor]  # inputs and targets

HASHES = {
    "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "fashion-mnist/train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "california-housing/cal_housing.data.gz": "cdbc6f084852c03a4a55e6752938bb7d64c54b89813cbb8a21b0d25d1ade3e3c",
}
ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "california-housing": "https://www.dcc.fc.up.pt/~ltorgo/Regression/cal_housing.tgz",
}


def images(directory: str | Path, name: str) -> tuple[Data, Data]:
    """The training and test images of "mnist" or "fashion-mnist", [n, 1, 28, 28] from 0 to 1, and their classes."""
    if name not in ("mnist", "fashion-mnist"):
        raise ValueError(f"name: got {name!r}, must be 'mnist' or 'fashion-mnist'")
    train, test = (
        (
            _idx(directory, f"{name}/{kind}-images-idx3-ubyte.gz").float().unsqueeze(1) / 255,
            _idx(directory, f"{name}/{kind}-labels-idx1-ubyte.gz").long(),
        )
        for kind in ("train", "t10k")
    )
    return train, test


def california_housing(directory: str | Path, seed: int = 0) -> tuple[Data, Data]:
    """Four fifths of the records for training, the others for testing; attributes with mean 0 and deviation 1.

    The target is divided by its largest value. These numbers come from all records: that is not private.
    """
    text = gzip.decompress(_file(directory, "california-housing/cal_housing.data.gz")).decode()
    table = torch.tensor([[float(number) for number in line.split(",")] for line in text.splitlines()])
    x, y = table[:, :-1], table[:, -1] / table[:, -1].max()
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, rest = order.split([len(x) * 4 // 5, len(x) - len(x) * 4 // 5])
    return (x[first], y[first]), (x[rest], y[rest])


def _idx(directory: str | Path, name: str) -> Tensor:
    raw = gzip.decompress(_file(directory, name))
    dimensions = raw[3]
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())


def _file(directory: str | Path, name: str) -> bytes:
    """The bytes of a file, if it is the published one."""
    file, address = Path(directory) / name, ADDRESSES[name.split("/")[0]]
    if not file.exists():
        raise ValueError(f"directory: got {str(directory)!r}, must have {name}, which is published at {address}")
    packed = file.read_bytes()
    if hashlib.sha256(packed).hexdigest() != HASHES[name]:
        raise ValueError(
            f"{file}: is not the published file, whose SHA-256 begins with {HASHES[name][:12]} ({address})"
        )
    return packed
