import gzip
import hashlib

import pytest
import torch

from dpkernels.algorithms import datasets


def put(folder, name, data, monkeypatch):
    """A file that counts as the published one."""
    packed = gzip.compress(data)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(packed)
    monkeypatch.setitem(datasets.HASHES, name, hashlib.sha256(packed).hexdigest())


def idx(t):
    return bytes([0, 0, 8, t.dim()]) + b"".join(n.to_bytes(4, "big") for n in t.shape) + bytes(t.flatten().tolist())


def test_images_are_read_and_scaled(tmp_path, monkeypatch):
    pixels, labels = torch.arange(3 * 28 * 28).remainder(256).view(3, 28, 28), torch.tensor([7, 0, 9])
    for kind in ("train", "t10k"):
        put(tmp_path, f"mnist/{kind}-images-idx3-ubyte.gz", idx(pixels), monkeypatch)
        put(tmp_path, f"mnist/{kind}-labels-idx1-ubyte.gz", idx(labels), monkeypatch)
    train, test = datasets.images(tmp_path, "mnist")
    torch.testing.assert_close(train[0], pixels[:, None] / 255)
    assert train[1].tolist() == test[1].tolist() == [7, 0, 9]


def test_houses_are_scaled_and_split(tmp_path, monkeypatch):
    lines = [",".join(str(float(i * j % 7 + i)) for j in range(1, 10)) for i in range(10)]
    put(tmp_path, "california-housing/cal_housing.data.gz", "\n".join(lines).encode(), monkeypatch)
    train, test = datasets.california_housing(tmp_path)
    assert [len(part) for part in (*train, *test)] == [8, 8, 2, 2]
    x, y = (torch.cat(parts) for parts in zip(train, test, strict=True))
    torch.testing.assert_close(x.mean(0), torch.zeros(8), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(8))
    assert float(y.max()) == 1.0


def test_letters_stand_upright_and_count_from_0(tmp_path, monkeypatch):
    pixels, labels = torch.arange(2 * 28 * 28).remainder(256).view(2, 28, 28), torch.tensor([1, 26])
    for kind in ("train", "test"):
        put(tmp_path, f"emnist-letters/emnist-letters-{kind}-images-idx3-ubyte.gz", idx(pixels), monkeypatch)
        put(tmp_path, f"emnist-letters/emnist-letters-{kind}-labels-idx1-ubyte.gz", idx(labels), monkeypatch)
    train, _ = datasets.images(tmp_path, "emnist-letters")
    torch.testing.assert_close(train[0], pixels.transpose(1, 2)[:, None] / 255)
    assert train[1].tolist() == [0, 25]


def test_tables(tmp_path, monkeypatch):
    lines = [",".join(str(i * j % 5) for j in range(1, 12)) for i in range(10)]
    for year in range(2011, 2016):
        put(tmp_path, f"gas-turbine/gt_{year}.csv.gz", "\n".join(["A,B", *lines]).encode(), monkeypatch)
    train, test = datasets.gas_turbine(tmp_path)
    assert train[0].shape == (40, 9)
    assert test[1].shape == (10,)
    lines = [",".join(["1"] * 54 + [str(1 + i % 7)]) for i in range(10)]
    put(tmp_path, "covtype/covtype.data.gz", "\n".join(lines).encode(), monkeypatch)
    train, test = datasets.covtype(tmp_path)
    assert set(torch.cat([train[1], test[1]]).tolist()) == set(range(7))
    assert bool(train[0].isfinite().all())  # a column that is the same for all


def test_a_file_that_is_missing_or_another_one_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"must have mnist/train-images-idx3-ubyte\.gz, which is published at https://"
    ):
        datasets.images(tmp_path, "mnist")
    file = tmp_path / "california-housing" / "cal_housing.data.gz"
    file.parent.mkdir()
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not the published file, whose SHA-256 begins with cdbc6f084852"):
        datasets.california_housing(tmp_path)
    with pytest.raises(ValueError, match="name: got 'cifar', must be one of mnist"):
        datasets.images(tmp_path, "cifar")
