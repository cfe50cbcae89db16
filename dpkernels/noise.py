"""Gaussian noise: the one door through which the library adds any."""

from __future__ import annotations

import math
import os
import secrets
import threading
import weakref
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from dpkernels import checks
from dpkernels.reference_noise import LATTICE_BITS, lattice


class Book(Protocol):
    """What takes entries: a ledger, or what passes them on to several."""

    def record(self, *, std: float, sensitivity: float, reproducible: bool) -> None:
        """Enter a release, or refuse it by raising."""

    def check(self, *, std: float, sensitivity: float) -> None:
        """Raise if such a release would be refused; nothing is entered."""


_alive: weakref.WeakSet[Gaussian] = weakref.WeakSet()


class Gaussian:
    """Independent Gaussian noise of standard deviation `std` on each coordinate of a released sum.

    `std` is that of the noise on the SUM: noise multiplier times sensitivity. Each release takes the next
    release number, so no two releases of one Gaussian share noise. Draws are Philox4x32-10 in counter mode,
    single-precision Box-Muller with a radius right beyond 9 standard deviations; the same on every device up
    to rounding, whatever the number of threads.

    `seed=None` draws the key from the operating system; torch's global generator is never asked. With a seed
    the noise is reproducible, and nothing is private from whoever knows the seed. `ledger` gets an entry
    before each release. Threads may share a Gaussian, except inside a step compiled by `torch.compile`: there each
    thread needs its own.

    Formal guarantee: a sum of L2 sensitivity S plus this noise is the Gaussian mechanism with multiplier
    std / S, for noise of real-valued precision. It is drawn in floating point: an adversary who sees the low
    bits of a release can learn from them (Mironov, 2012), which `secure=True` is for.

    `secure=True` (about three times the cost): ChaCha20 with a key of 256 bits from the operating system, so no seed;
    normals in double precision from 64 and more bits; sum and noise are rounded to a lattice of
    2^(floor(log2 std) - 30) and added there as integers, so that the low bits of a release carry nothing. What the
    roundings add to the sensitivity is in `widened`, and in the ledger's entries. What it does not cover is in
    PRIVACY.md.
    """

    def __init__(self, std: float, seed: int | None = None, secure: bool = False, ledger: Book | None = None) -> None:
        self._std = host_tensor(checks.number("std", std, low=0), torch.float64)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ValueError(f"seed: got {seed!r}, must be an integer or None")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"seed: got {seed}, must be at least 0 and below 2**63")
        if secure and seed is not None:
            raise ValueError(f"seed: got {seed}, must be None with secure noise: its key comes from the OS")
        if secure and not 2.0**-500 <= std <= 2.0**500:
            raise ValueError(f"std: got {std!r}, must be from 2**-500 to 2**500 with secure noise")
        self._float_std = float(std)
        self._secure = bool(secure)
        self._reproducible = seed is not None
        self.ledger = ledger
        self._lock = threading.Lock()
        # (key, next release number): a tensor, so that a compiled step does not depend on its value
        self._stream = self._new_stream() if seed is None else host_tensor([seed, 0], torch.int64)
        _alive.add(self)

    def _new_stream(self) -> Tensor:
        return host_tensor([*(_new_key() for _ in range(4 if self._secure else 1)), 0], torch.int64)

    def with_std(self, std: float) -> Gaussian:
        """Noise of another std from the same stream: release numbers go on from here, whichever of the two takes them.

        For a plan whose noise differs from release to release. It must not be chosen by looking at private data.
        """
        other = Gaussian(std, secure=self.secure and std > 0, ledger=self.ledger)
        if std > 0 or not self.secure:  # nothing is drawn at std 0, so there a stream of another kind does
            other._stream, other._lock, other._reproducible = self._stream, self._lock, self._reproducible
        return other

    @property
    def std(self) -> float:
        """The standard deviation, fixed for good: another std is another Gaussian."""
        return self._float_std

    @property
    def reproducible(self) -> bool:
        """Whether the noise comes from a seed."""
        return self._reproducible

    @property
    def secure(self) -> bool:
        """Whether low bits are safe too."""
        return self._secure

    @property
    def lattice(self) -> float:
        """The step of the lattice that secure noise is rounded to; 0 for other noise."""
        return lattice(self.std) if self.secure else 0.0

    def widened(self, sensitivity: float, width: int | None) -> float:
        """The sensitivity of a sum of `width` coordinates once it has been rounded as this noise rounds it.

        Secure noise rounds to its lattice, which brings neighbours up to one step further apart in each coordinate. A
        part of 2^-20 is for the rounding of float64 sums: more than that of up to 65,536 rows that are stored, or
        factors of layers that see a sample once. (A sequence of T steps whose addends cancel to a part r of themselves
        rounds up to T / r times as much.)
        """
        if not self.secure:
            return sensitivity
        if width is None:
            raise ValueError("width: got None, must be the number of coordinates: secure noise rounds each of them")
        return sensitivity * (1 + 2.0**-20) + self.lattice * math.sqrt(width)

    @property
    def releases(self) -> int:
        """How many have been taken."""
        return int(self._stream[-1])

    def skip(self, releases: int) -> None:
        """Go on behind the first so many releases, those of a run that is resumed; numbers are never taken again."""
        with self._lock:
            if checks.whole("releases", releases, low=0) < self.releases:
                raise ValueError(f"releases: got {releases}, must be at least the {self.releases} that were taken here")
            self._stream[-1] = releases

    def release(self, sensitivity: float | None = None, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Take the next release number: the (key, release) stream and the std, as tensors for the kernels.

        `sensitivity`: how far, in L2 norm, one record added or removed can move what is released, a vector of `width`
        coordinates; needed when a ledger is attached, which then has the entry before this returns.
        """
        if self.ledger is not None:
            if sensitivity is None:
                raise ValueError(
                    "sensitivity: got None, must be the L2 sensitivity of what is released: "
                    "the ledger of this Gaussian cannot count it otherwise"
                )
            self.ledger.record(
                std=self.std, sensitivity=self.widened(sensitivity, width), reproducible=self.reproducible
            )
        if torch.compiler.is_compiling():
            return self._take(), self._std
        with self._lock:
            return self._take(), self._std

    def check(self, sensitivity: float, width: int) -> None:
        """Raise if `release` would be refused by the ledger; nothing is entered or taken."""
        if self.ledger is not None:
            self.ledger.check(std=self.std, sensitivity=self.widened(sensitivity, width))

    def follow(self, sensitivity: float, width: int) -> None:
        """Another rank makes this release: it is entered here too and its number taken, and nobody here draws it."""
        self.release(sensitivity, width)

    def _take(self) -> Tensor:
        stream = self._stream.clone()
        self._stream[-1].add_(1)
        return stream

    def _after_fork(self) -> None:
        # A child that went on with its parent's key would release the parent's noise again.
        self._lock = threading.Lock()
        self._stream.copy_(self._new_stream())  # in place: others may share it
        self._reproducible = False

    def _refuse_copy(self, *_: object) -> NoReturn:
        raise TypeError("a Gaussian cannot be copied or pickled: the copy would release the same noise again")

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy

    def __repr__(self) -> str:
        kind = "secure" if self.secure else "reproducible" if self.reproducible else "key from the OS"
        return f"Gaussian(std={self.std:g}, {kind})"


def std_for(noise_multiplier: float, sensitivity: float, width: int, *, secure: bool = False) -> float:
    """The std that is `noise_multiplier` times the sensitivity of a sum of `width` coordinates, roundings counted."""
    std = noise_multiplier * sensitivity if noise_multiplier else 0.0
    if not secure:
        return std
    if std == 0:
        raise ValueError("secure: got True without noise, must be False: there is nothing to make secure")
    step = noise_multiplier * math.sqrt(width) * 2.0**-LATTICE_BITS  # the lattice is at most std * 2^-bits
    if step >= 0.5:
        raise ValueError(
            f"noise_multiplier: got {noise_multiplier:g}, must be below 2^29 / sqrt({width}) with secure noise"
        )
    return std * (1 + 2.0**-20) / (1 - step) * (1 + 2.0**-50)


def host_tensor(value: object, dtype: torch.dtype) -> Tensor:
    """A plain CPU tensor, whatever default device or inference mode is on."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _new_key() -> int:
    return secrets.randbits(64) - 2**63


def _rekey_all() -> None:
    for gaussian in list(_alive):
        gaussian._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rekey_all)
