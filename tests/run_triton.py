"""The Triton kernels in Triton's interpreter, against the reference: prints the largest error of each case, as JSON.

A process of its own, because TRITON_INTERPRET must be set before triton is imported; tests/test_triton.py reads it.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from dpkernels import reference_layers
from dpkernels.triton import gram, low_rank, rows, sums

OUTER = {  # batch, length, width, height
    "one": (1, 1, 1, 1),
    "edges": (3, 5, 17, 33),
    "tiles": (2, 70, 66, 65),
    "long": (9, 300, 5, 4),  # two pieces of a sum
    "no addends": (2, 0, 3, 4),
    "nobody": (0, 4, 3, 2),
}
CONV = {  # x, outputs, kernel, stride, padding, dilation, groups
    "1d": ((2, 3, 11), 4, (3,), (2,), (1,), (1,), 1),
    "2d": ((2, 4, 9, 8), 6, (3, 2), (1, 2), (1, 0), (2, 1), 2),
    "3d": ((1, 2, 5, 4, 6), 2, (2, 2, 3), (1, 1, 2), (0, 1, 1), (1, 1, 1), 1),
    "wide": ((2, 16, 6, 6), 20, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "depthwise": ((2, 6, 5, 5), 6, (3, 3), (1, 1), (1, 1), (1, 1), 6),
    "nobody": ((0, 2, 5, 5), 3, (3, 3), (1, 1), (1, 1), (1, 1), 1),
}
HALF = torch.bfloat16


def error(found, wanted, scale=None):
    """The largest one, over the largest number (at least `scale`)."""
    found, wanted = (t if isinstance(t, tuple) else (t,) for t in (found, wanted))
    worst = 0.0
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape, (got.shape, want.shape)
        if want.numel():
            size = max(float(want.double().abs().max()), scale or 1e-30)
            worst = max(worst, float((got.double() - want.double()).abs().max()) / size)
    return worst


def outer_cases(name, sizes, dtype):
    batch, length, width, height = sizes
    a, g = torch.randn(batch, length, width).to(dtype), torch.randn(batch, height, length).transpose(1, 2).to(dtype)
    wide_a, wide_g = a.float(), g.float()
    yield "outer_gram", error(gram.outer_gram(a, g), reference_layers.outer_gram(a, g))
    yield "outer_rows", error(rows.outer_rows(a, g), reference_layers.outer_rows(wide_a, wide_g))
    yield "outer_squares", error(rows.outer_squares(a, g), reference_layers.outer_squares(wide_a, wide_g))
    weights = torch.rand(batch, 2)[:, 1]  # a column
    yield "outer_sum", error(sums.outer_sum(a, g, weights), reference_layers.outer_sum(wide_a, wide_g, weights))
    for runs in {1, max(batch, 1)}:
        found = torch.randn(runs, height, width, dtype=torch.float64)
        wanted = found.clone()
        rows.outer_clamp_sum_(found, a, g, None, 0.3)
        reference_layers.outer_clamp_sum_(wanted, wide_a, wide_g, None, 0.3)
        yield f"outer_clamp_sum_, {runs} runs", error(found, wanted)
    found = torch.randn(batch, width, height).transpose(1, 2)  # not contiguous
    wanted = found.clone()
    rows.outer_rows_(found, a, g, -0.5)
    reference_layers.outer_rows_(wanted, wide_a, wide_g, -0.5)
    yield "outer_rows_", error(found, wanted)


def conv_cases(name, case, dtype):
    shape, outputs, kernel, *geometry = case
    x = torch.randn(shape).to(dtype)
    y = torch.nn.functional
    convolve = {1: y.conv1d, 2: y.conv2d, 3: y.conv3d}[len(kernel)]
    weight = torch.zeros(outputs, shape[1] // geometry[3], *kernel)
    like = convolve(torch.zeros(1, *shape[1:]), weight, None, *geometry)
    g = torch.randn(shape[0], *like.shape[1:]).to(dtype)
    wide = x.float(), g.float()
    yield (
        "conv_rows",
        error(rows.conv_rows(x, g, kernel, *geometry), reference_layers.conv_rows(*wide, kernel, *geometry)),
    )
    found = torch.randn(1, *weight.shape, dtype=torch.float64)
    wanted = found.clone()
    rows.conv_clamp_sum_(found, x, g, 0.3, *geometry)
    reference_layers.conv_clamp_sum_(wanted, *wide, 0.3, *geometry)
    yield "conv_clamp_sum_", error(found, wanted)
    found = torch.randn(shape[0], *weight.shape)
    wanted = found.clone()
    rows.conv_rows_(found, x, g, 2.0, *geometry)
    reference_layers.conv_rows_(wanted, *wide, 2.0, *geometry)
    yield "conv_rows_", error(found, wanted)


def low_rank_cases():
    for batch, length, width, height, rank in [(2, 1, 70, 130, 5), (3, 4, 8, 6, 40), (2, 20, 5, 4, 3), (0, 1, 2, 3, 4)]:
        y, x = torch.randn(batch, length, height), torch.randn(batch, length, width)
        a, g = torch.randn(batch, rank, width), torch.randn(batch, rank, height)
        wanted = y.clone()
        reference_layers.low_rank_(wanted, x, a, g)
        low_rank.low_rank_(y, x, a, g)
        yield f"low_rank_, {batch} x {length}", error(y, wanted)


def not_finite():
    """A sample that is not finite stays by itself; clamped, what is no number counts as the bound."""
    a, g = torch.randn(3, 2, 4), torch.randn(3, 2, 5)
    a[1, 0, 0] = float("nan")
    found = torch.zeros(3, 5, 4, dtype=torch.float64)
    rows.outer_clamp_sum_(found, a, g, None, 0.3)
    wanted = torch.zeros_like(found)
    reference_layers.outer_clamp_sum_(wanted, a, g, None, 0.3)
    yield "clamped, not finite", error(found, wanted)
    yield "squares, not finite", error(rows.outer_squares(a, g)[[0, 2]], reference_layers.outer_squares(a, g)[[0, 2]])


def split():
    """Errors of bfloat16 sums, over the sums of the products' absolute values."""
    a, g, weights = torch.randn(3, 5, 17).to(HALF), torch.randn(3, 5, 33).to(HALF), torch.rand(3)
    scaled = (g.float() * weights[:, None, None]).double().flatten(0, 1).T
    lines = a.double().flatten(0, 1)
    error = (sums.outer_sum(a, g, weights).double() - scaled @ lines).abs()
    yield "split over its size", float((error / (scaled.abs() @ lines.abs())).max())


def main():
    torch.manual_seed(0)
    errors = {}
    for name, sizes in OUTER.items():
        for op, worst in outer_cases(name, sizes, torch.float32):
            errors[f"{op}: {name}"] = worst
    for name, case in CONV.items():
        for op, worst in conv_cases(name, case, torch.float32):
            errors[f"{op}: {name}"] = worst
    for op, worst in outer_cases("bfloat16", OUTER["edges"], HALF):
        errors[f"{op}: bfloat16"] = worst
    for op, worst in conv_cases("bfloat16", CONV["2d"], HALF):
        errors[f"{op}: bfloat16"] = worst
    errors |= dict([*low_rank_cases(), *not_finite(), *split()])
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
