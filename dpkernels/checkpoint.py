"""Checkpoints on disk: written whole or not at all, and refused if anything about them has changed.

    dpk.checkpoint.save("run.ckpt", algorithm.state_dict())
    algorithm.load_state_dict(dpk.checkpoint.load("run.ckpt"))

A state holds weights, counters and the ledger, never a key or a seed. A run with a seed that is resumed goes on as if
it had not been interrupted; one without draws fresh noise, and steps that are taken again are releases of their own.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

_MAGIC = b"dpkernels checkpoint 1\n"


def save(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state`; a file that is there stays usable until the new one is complete."""
    target = Path(path)
    packed = io.BytesIO()
    torch.save(state, packed)
    payload = packed.getvalue()
    handle, name = tempfile.mkstemp(prefix=target.name + ".", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` wrote there, or an error; nothing in the file is executed."""
    raw = Path(path).read_bytes()
    start = len(_MAGIC) + 32
    if not raw.startswith(_MAGIC) or len(raw) < start:
        raise ValueError(f"{path}: is no checkpoint of dpkernels, or was cut short")
    if hashlib.sha256(raw[start:]).digest() != raw[len(_MAGIC) : start]:
        raise ValueError(f"{path}: was cut short or changed after it was written; use an earlier checkpoint")
    state: dict[str, Any] = torch.load(io.BytesIO(raw[start:]), map_location="cpu", weights_only=True)
    return state
