"""Public data sets for experiments: scikit-learn's digits, and others from a directory that has them as published.

Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Data = tuple[Tensor, Tensor]  # inputs and targets

_LETTERS = "emnist-letters/emnist-letters"
HASHES = {
    "mnist/train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "mnist/train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist/t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist/t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "fashion-mnist/train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    f"{_LETTERS}-train-images-idx3-ubyte.gz": "9a432a8af72e64843944f81b7d0b1920e0588ff162ebbbb40730ea3022d5a589",
    f"{_LETTERS}-train-labels-idx1-ubyte.gz": "9759af91ea6bccdf07a6040fd085861f2ec88e37f7c3f5760f6feb57106fbe5c",
    f"{_LETTERS}-test-images-idx3-ubyte.gz": "0ff953ff9b40055e564b38607ad0f4fc75118181d9ad38bd065387c2ca171337",
    f"{_LETTERS}-test-labels-idx1-ubyte.gz": "924955c31fe7fd809b7303b5c0141282955f4b8390c74cdfd5d80435e0f4b4cb",
    "covtype/covtype.data.gz": "b22ca13b51814b12ef7fec2fc96a623903e35dab1469a4d1213fe9911d92912c",
    "gas-turbine/gt_2011.csv.gz": "d816200309b55b168b9470387323dc4fabbd2456412dd50dadf0976ec3776fcd",
    "gas-turbine/gt_2012.csv.gz": "2c75b6a779af12b85ef1bccf4c6469924fe6fa9760420a46d46b2126a86bac46",
    "gas-turbine/gt_2013.csv.gz": "9f538d03b335fc177b2563b2b5a28f6a127e46cfabcc8cfadfaade89812c26a1",
    "gas-turbine/gt_2014.csv.gz": "5c6827e29690826430751cfe568cf147fb51e9fd87c01e03a8f909b27cd06219",
    "gas-turbine/gt_2015.csv.gz": "73f24ca1c1688a2e87e7706d8b47037f697e66f65b4295f1112159b22af4690d",
    "california-housing/cal_housing.data.gz": "cdbc6f084852c03a4a55e6752938bb7d64c54b89813cbb8a21b0d25d1ade3e3c",
}
ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "emnist-letters": "https://www.nist.gov/itl/products-and-services/emnist-dataset",
    "covtype": "https://archive.ics.uci.edu/dataset/31/covertype",
    "gas-turbine": "https://archive.ics.uci.edu/dataset/551/gas+turbine+co+and+nox+emission+data+set",
    "california-housing": "https://www.dcc.fc.up.pt/~ltorgo/Regression/cal_housing.tgz",
}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test digits as (x, y, test_x, test_y): 8 by 8 pixels, scaled by their public range."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    return x[360:], y[360:], x[:360], y[:360]


def images(directory: str | Path, name: str) -> tuple[Data, Data]:
    """Training and test images of "mnist", "fashion-mnist" or "emnist-letters", [n, 1, 28, 28] from 0 to 1; classes."""
    prefixes = {"mnist": ("train", "t10k"), "fashion-mnist": ("train", "t10k")}
    prefixes["emnist-letters"] = ("emnist-letters-train", "emnist-letters-test")
    if name not in prefixes:
        raise ValueError(f"name: got {name!r}, must be one of {', '.join(prefixes)}")
    letters = name == "emnist-letters"  # images that lie on their sides, classes from 1 on
    train, test = (
        (
            (x.transpose(1, 2) if letters else x).float().unsqueeze(1) / 255,
            _idx(directory, f"{name}/{kind}-labels-idx1-ubyte.gz").long() - (1 if letters else 0),
        )
        for kind in prefixes[name]
        for x in [_idx(directory, f"{name}/{kind}-images-idx3-ubyte.gz")]
    )
    return train, test


def california_housing(directory: str | Path, seed: int = 0) -> tuple[Data, Data]:
    """House values from eight attributes; see `_split`. The target is divided by its largest value."""
    table = _table(directory, "california-housing/cal_housing.data.gz")
    return _split(table[:, :-1], table[:, -1] / table[:, -1].max(), seed)


def gas_turbine(directory: str | Path, seed: int = 0) -> tuple[Data, Data]:
    """NOX from nine attributes, five years; see `_split`. The target is divided by its largest value."""
    files = (f"gas-turbine/gt_{year}.csv.gz" for year in range(2011, 2016))
    table = torch.cat([_table(directory, file, header=True) for file in files])
    return _split(table[:, :-2], table[:, -1] / table[:, -1].max(), seed)


def covtype(directory: str | Path, seed: int = 0) -> tuple[Data, Data]:
    """The kind of forest, seven classes, from 54 attributes; see `_split`."""
    table = _table(directory, "covtype/covtype.data.gz")
    return _split(table[:, :-1], table[:, -1].long() - 1, seed)


def _split(x: Tensor, y: Tensor, seed: int) -> tuple[Data, Data]:
    """Four fifths of the records for training, the others for testing; attributes with mean 0 and deviation 1.

    These numbers, and what a target is divided by, come from all records: that is not private.
    """
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, rest = order.split([len(x) * 4 // 5, len(x) - len(x) * 4 // 5])
    return (x[first], y[first]), (x[rest], y[rest])


def _table(directory: str | Path, name: str, header: bool = False) -> Tensor:
    text = gzip.decompress(_file(directory, name)).decode()
    return torch.from_numpy(
        np.loadtxt(text.splitlines(), delimiter=",", dtype=np.float32, skiprows=int(header), ndmin=2)
    )


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
