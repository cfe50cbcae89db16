"""A hunt for a row whose clipped norm, in exact arithmetic, exceeds the bound of its rule.

A family makes batches of hostile rows and clips them. Each sample carries a probe, a coordinate of its own so small
that it does not count, in which the sum shows the coefficient that the sample was given. The true norm of the row is
taken in long double from the stored numbers, less what that may be off by: so a find is a find. `hunt` returns, for
each family, how many rows it tried and the largest clipped norm over the bound, which must not exceed 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import planner
from dpkernels.factors import Dense, Matrix, Outer, Rows
from dpkernels.placing import Part, Shape

BATCH = 256
PROBE = 2.0**-300
CPU = torch.device("cpu")
LONG = np.finfo(np.longdouble).eps
Clip = Callable[..., dpk.ClippedSum]


def exactly(t: Tensor) -> np.ndarray:
    return t.double().numpy().astype(np.longdouble)


def norm(rows: np.ndarray) -> np.ndarray:
    """Of each row, rounded down by more than its error; infinite if it has anything that is not finite."""
    largest = np.abs(rows).max(axis=1, initial=0)
    scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        found = scale[:, 0] * np.sqrt(((rows / scale) ** 2).sum(axis=1)) * (1 - (rows.shape[1] + 8) * LONG)
    return np.where(np.isfinite(largest), found, np.inf)


def over(coefficient: np.ndarray, norms: np.ndarray, bound: float) -> np.ndarray:
    """The clipped norm over the bound; a row that is not finite must have the coefficient 0."""
    product = coefficient * np.where(np.isfinite(norms), norms, 1)
    return np.where(np.isfinite(norms), product / bound, np.where(coefficient == 0, 0, np.inf))


def magnitudes(rng: np.random.Generator, *shape: int, digits: float) -> np.ndarray:
    return 10.0 ** rng.uniform(-digits, digits, shape)


def vectors(rng: np.random.Generator, dtype: torch.dtype, width: int) -> Tensor:
    """Normals of all sizes; in some rows each element has a size of its own, in some a few stand out."""
    digits = {torch.float16: 2, torch.float64: 60}.get(dtype, 15)
    values = rng.standard_normal((BATCH, width)) * magnitudes(rng, BATCH, 1, digits=digits)
    kind = rng.integers(0, 3, (BATCH, 1))
    values *= np.where(kind == 1, magnitudes(rng, BATCH, width, digits=digits / 2), 1.0)
    values *= np.where((kind == 2) & (rng.random((BATCH, width)) < 0.05), 10.0 ** (digits / 2), 1.0)
    limit = 6e4 if dtype == torch.float16 else 1e300
    return torch.from_numpy(values).clamp(-limit, limit).to(dtype)


def near(rng: np.random.Generator, t: Tensor, digits: tuple[float, float] = (-8, -1)) -> Tensor:
    """The same but for a small part of each row."""
    part = 10.0 ** rng.uniform(*digits, (BATCH, *[1] * (t.dim() - 1)))
    return (t.double() * (1 + torch.from_numpy(part * rng.standard_normal(t.shape)))).to(t.dtype)


def probes(columns: int = 1, at: int = 0) -> Tensor:
    """[B, columns * B]: PROBE in a coordinate of the sample's own."""
    found = torch.zeros(BATCH, columns * BATCH, dtype=torch.float64)
    found[:, at * BATCH : (at + 1) * BATCH].fill_diagonal_(PROBE)
    return found


def coefficients(probe: Tensor) -> np.ndarray:
    return exactly(probe) / np.longdouble(PROBE)


def bound_of(rng: np.random.Generator, norms: np.ndarray) -> float:
    """A threshold that many rows exceed: a row's own norm, or anything."""
    finite = norms[np.isfinite(norms) & (norms > 1e-30) & (norms < 1e30)]
    if len(finite) and rng.random() < 0.9:
        return float(rng.choice(finite)) * float(rng.choice([1.0, 1 - 1e-7, 0.5, 1e-3]))
    return float(10.0 ** rng.uniform(-3, 3))


def rule_of(rng: np.random.Generator, bound: float) -> dpk.clipping.Rule:
    return dpk.clipping.Automatic(bound, 0.01 * bound) if rng.random() < 0.2 else dpk.clipping.Flat(bound)


# Rows in memory.


def dense(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    x = vectors(rng, dtype, int(rng.choice([1, 7, 64, 300])))
    norms = norm(exactly(x))
    bound = bound_of(rng, norms)
    _, probe = clip_sum([x, probes()], rule_of(rng, bound)).sum
    return over(coefficients(probe), norms, bound)


def difference(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    now = vectors(rng, dtype, int(rng.choice([1, 7, 64])))
    before = near(rng, now)
    norms = norm(exactly(now) - exactly(before))
    bound = bound_of(rng, norms)
    _, probe = clip_sum([now, probes()], [before, torch.zeros_like(probes())], rule_of(rng, bound)).sum
    return over(coefficients(probe), norms, bound)


def momentum(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    now = vectors(rng, dtype, int(rng.choice([1, 7, 64])))
    before = near(rng, now) if rng.random() < 0.7 else vectors(rng, dtype, now.shape[1])
    a, b = exactly(now), exactly(before)
    c1, c3, gamma = bound_of(rng, norm(a)), bound_of(rng, norm(a - b)), float(10 ** rng.uniform(-3, 0))
    lists = [now, probes(2, 0)], [before, probes(2, 1)]
    _, probe = clip_sum(*lists, gradient_norm=c1, difference_norm=c3, momentum=gamma).sum
    alpha, beta = np.split(coefficients(probe)[:, None], 2)
    off = 2.0**-51 * (np.abs(alpha[:, 0]) * norm(a) + np.abs(beta[:, 0]) * norm(b))  # coefficients are float64
    return (norm(alpha * a + beta * b) - off) / (gamma * c1 + (1 - gamma) * c3)


# Rows as factors.


def per_sample(matrix: Matrix, dtype: torch.dtype = torch.float32) -> dpk.PerSample:
    size = torch.Size((matrix.height, matrix.width))
    return dpk.PerSample(matrix.batch, {"w": Shape(size, dtype, CPU)}, {"w": [Part(None, matrix)]})


def with_probe(rows: dpk.PerSample) -> dpk.PerSample:
    shapes = rows._shapes | {"probe": Shape(torch.Size((BATCH,)), torch.float64, CPU)}
    probe = Part(None, Matrix(BATCH, BATCH, 1, dense=Dense(probes().unsqueeze(2))))
    return dpk.PerSample(BATCH, shapes, {**rows.parts, "probe": [probe]})


def formed(rows: dpk.PerSample) -> tuple[np.ndarray, np.ndarray]:
    """The rows, and how far they may be off in norm."""
    parts, sizes = [], np.zeros(BATCH, dtype=np.longdouble)
    for (part,) in rows.parts.values():
        m = part.matrix
        total = np.zeros((BATCH, m.height, m.width), dtype=np.longdouble)  # of rows that overflow not finite
        if m.outer is not None:
            a, g = exactly(m.outer.a), exactly(m.outer.g)
            for t in range(a.shape[1]):
                total += g[:, t, :, None] * a[:, t, None, :]
            sizes += (np.sqrt((a**2).sum(2)) * np.sqrt((g**2).sum(2))).sum(1)
        if m.rows is not None:
            g = exactly(m.rows.g)
            for t in range(g.shape[1]):
                total[np.arange(BATCH), m.rows.ids[:, t].numpy()] += g[:, t]
            sizes += np.sqrt((g**2).sum(2)).sum(1)
        if m.dense is not None:
            total += exactly(m.dense.values)
        parts.append(total.reshape(BATCH, -1))
        sizes *= m.length + 4
    return np.concatenate(parts, axis=1), sizes * LONG


def clipped(rng: np.random.Generator, rows: dpk.PerSample) -> np.ndarray:
    true, off = formed(rows)
    norms = norm(true)
    norms = np.where(np.isfinite(norms), np.maximum(norms - np.where(np.isfinite(off), off, 0), 0), np.inf)
    bound = bound_of(rng, norms)
    way = rng.choice([None, planner.Way.GRAM, planner.Way.TILE])
    dtype = torch.float64 if rng.random() < 0.3 else None
    with contextlib.nullcontext() if way is None else planner.forced(way):
        found = with_probe(rows).clip_sum(rule_of(rng, bound), dtype=dtype).sum["probe"]
    return over(coefficients(found), norms, bound)


def sizes(rng: np.random.Generator) -> tuple[int, int, int]:
    """T, height, width."""
    return tuple(int(x) for x in (rng.choice([2, 4, 8, 32]), rng.choice([1, 3, 16]), rng.choice([1, 4, 9])))


def sequence(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    """Halves of a sequence that cancel but for a small part."""
    length, height, width = sizes(rng)
    scale = magnitudes(rng, BATCH, 1, 1, digits=3)
    a = torch.from_numpy(rng.standard_normal((BATCH, length // 2, width)) * scale).to(dtype)
    g = torch.from_numpy(rng.standard_normal((BATCH, length // 2, height))).to(dtype)
    outer = Outer(torch.cat([a, near(rng, a)], dim=1), torch.cat([g, -near(rng, g)], dim=1))
    return clipped(rng, per_sample(Matrix(BATCH, height, width, outer=outer), dtype))


def lookups(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    """The same row of a table looked up twice, with gradients that nearly cancel."""
    length, height, width = sizes(rng)
    ids = torch.from_numpy(rng.integers(0, height, (BATCH, length // 2)))
    g = torch.from_numpy(rng.standard_normal((BATCH, length // 2, width))).to(dtype)
    rows = Rows(torch.cat([ids, ids], dim=1), torch.cat([g, -near(rng, g)], dim=1))
    return clipped(rng, per_sample(Matrix(BATCH, height, width, rows=rows), dtype))


def tied(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    """A table that is also the last layer's weight, where the two uses nearly cancel."""
    length, height, width = sizes(rng)
    ids = torch.from_numpy(rng.integers(0, height, (BATCH, length)))
    g = torch.from_numpy(rng.standard_normal((BATCH, length, width))).to(dtype)
    outer = Outer(-near(rng, g), torch.nn.functional.one_hot(ids, height).to(dtype))
    return clipped(rng, per_sample(Matrix(BATCH, height, width, rows=Rows(ids, g), outer=outer), dtype))


def factor_difference(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    """Gradients at two points close to one another."""
    length, height, width = sizes(rng)
    a = torch.from_numpy(rng.standard_normal((BATCH, length, width))).to(dtype)
    g = torch.from_numpy(rng.standard_normal((BATCH, length, height))).to(dtype)
    now, before = (
        per_sample(Matrix(BATCH, height, width, outer=Outer(x, y)), dtype)
        for x, y in ((a, g), (near(rng, a), near(rng, g)))
    )
    return clipped(rng, now - before)


_STEPS = nn.Linear(6, 1, bias=False)
_TWO = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 1, bias=False))


def local_steps(rng: np.random.Generator, clip_sum: Clip, dtype: torch.dtype) -> np.ndarray:
    """A loss whose gradient turns around at each step: the way is long, the end near the start."""
    x = torch.from_numpy(rng.standard_normal((BATCH, 6))).float()
    model = (_STEPS if rng.random() < 0.5 else _TWO).float()
    lr, wobble = 0.1, torch.from_numpy(10.0 ** rng.uniform(-7, -1, BATCH)).float()
    curvature = (2 - wobble) / x.square().sum(1) / lr
    loss = lambda out, c: 0.5 * c * (out.squeeze(1) - 1).square()  # noqa: E731
    hold = rng.choice(list(planner.Hold))
    with planner.forced(hold):
        rows = dpk.local_updates(model, loss, x, curvature, steps=int(rng.choice([2, 4, 8])), lr=lr)
    return clipped(rng, rows)


Family = Callable[[np.random.Generator], np.ndarray]
WIDE, ALL = (torch.float32, torch.float64), (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MADE: list[tuple[Callable[..., np.ndarray], Clip | None, tuple[torch.dtype, ...]]] = [
    (dense, dpk.clip_sum, ALL),
    (difference, dpk.clip_difference_sum, ALL),
    (momentum, dpk.clip_momentum_sum, WIDE),
    (sequence, None, (*WIDE, torch.bfloat16)),
    (lookups, None, WIDE),
    (tied, None, WIDE),
    (factor_difference, None, WIDE),
    (local_steps, None, (torch.float32,)),
]
FAMILIES: dict[str, Family] = {
    f"{make.__name__}, {str(dtype).removeprefix('torch.')}": partial(make, clip_sum=clip, dtype=dtype)
    for make, clip, dtypes in MADE
    for dtype in dtypes
}


def hunt(rows: int, seed: int = 0) -> Iterator[tuple[str, int, float]]:
    """Each family's share of `rows`: its name, the rows tried, the largest clipped norm over the bound."""
    torch.manual_seed(0)
    rounds = -(-rows // (len(FAMILIES) * BATCH))
    for i, (name, family) in enumerate(FAMILIES.items()):
        rng = np.random.default_rng([seed, i])
        yield name, rounds * BATCH, max(float(family(rng).max()) for _ in range(rounds))
