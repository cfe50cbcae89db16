"""What layers do for each sample, in plain torch: the truth for tests and the fallback on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.reference import row_squares


def outer_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's row g^T a, [B, d, p] from a [B, T, p] and g [B, T, d], and its norm^2 in float64."""
    rows = g.transpose(1, 2) @ a
    return rows, row_squares([rows])[:, 0]


def outer_squares(a: Tensor, g: Tensor) -> Tensor:
    """The norm^2 of each sample's row g^T a, formed in float32 in pieces that are dropped, [B] in float64."""
    return (
        torch.stack([outer_rows(a[i : i + 1], g[i : i + 1])[1][0] for i in range(len(a))])
        if len(a)
        else a.new_zeros(0, dtype=torch.float64)
    )


def outer_gram(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Norm^2 of each row g^T a by inner products of its addends, and the sum of their norms; [B] in float64."""
    a, g = a.double(), g.double()
    products = (a @ a.transpose(1, 2)) * (g @ g.transpose(1, 2))
    return products.sum((1, 2)), (a.norm(dim=2) * g.norm(dim=2)).sum(1)


def outer_sum(a: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    """sum_b weights_b g_b^T a_b, [d, p] from a [B, T, p], g [B, T, d] and weights [B]: one product of matrices."""
    return (g * weights[:, None, None]).flatten(0, 1).T @ a.flatten(0, 1)


def conv_rows(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Each sample's weight gradient, [N, O, C / groups, *kernel], and its norm^2 in float64.

    `padding` is what comes before x in each dimension; behind it there is as much as g asks for. All samples at once,
    as a convolution with a group for each group of each sample.
    """
    count, shape = x.shape[0], (g.shape[1], x.shape[1] // groups, *kernel)
    if count == 0:
        return g.new_zeros(0, *shape), g.new_zeros(0, dtype=torch.float64)
    x = _padded(x, g.shape[2:], kernel, stride, padding, dilation)
    _, rows, _ = torch.ops.aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]),
        x.reshape(1, -1, *x.shape[2:]),
        g.new_zeros(1).expand(count * shape[0], *shape[1:]),
        None,
        stride,
        [0] * len(kernel),
        dilation,
        False,
        [0] * len(kernel),
        groups * count,
        [False, True, False],
    )
    rows = rows.reshape(count, *shape)
    return rows, row_squares([rows])[:, 0]


def outer_rows_(rows: Tensor, a: Tensor, g: Tensor, scale: float) -> None:
    """rows += scale * sum_t g_t a_t^T, from rows [B, d, p], a [B, T, p] and g [B, T, d]."""
    rows.baddbmm_(g.transpose(1, 2), a, alpha=scale)


def conv_rows_(
    rows: Tensor,
    x: Tensor,
    g: Tensor,
    scale: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """rows += scale * each sample's weight gradient, see `conv_rows`."""
    rows.add_(conv_rows(x, g, rows.shape[3:], stride, padding, dilation, groups)[0], alpha=scale)


def clamp_sum_(sums: Tensor, rows: Tensor, bound: float) -> None:
    """sums [N, ...] += those over N equal runs of rows [B, ...], clamped to [-bound, bound]; in float64.

    What overflows to no number counts as the bound.
    """
    wide = rows.double().clamp(-bound, bound)
    runs = torch.where(wide.isnan(), bound, wide).view(len(sums), len(rows) // len(sums), *sums.shape[1:])
    sums.add_(runs.sum(1))


def selected(t: Tensor, live: Tensor | None) -> Tensor:
    """t [B, ...] with zeros for samples that are not live, by selection: 0 * Inf would be NaN."""
    if live is None:
        return t
    return torch.where(live.view(-1, *[1] * (t.dim() - 1)), t, torch.zeros((), dtype=t.dtype, device=t.device))


def outer_clamp_sum_(sums: Tensor, a: Tensor, g: Tensor, live: Tensor | None, bound: float) -> None:
    """`clamp_sum_` of rows sum_t g_t a_t^T, from a [B, T, p] and g [B, T, d], of the samples that are live (all)."""
    clamp_sum_(sums, selected(outer_rows(a, g)[0], live), bound)


def conv_clamp_sum_(
    sums: Tensor,
    x: Tensor,
    g: Tensor,
    bound: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> None:
    """`clamp_sum_` of each sample's weight gradient, see `conv_rows`."""
    clamp_sum_(sums, conv_rows(x, g, sums.shape[3:], stride, padding, dilation, groups)[0], bound)


def conv_each(
    x: Tensor,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The convolution of each image x_n [C, ...] with weights w_n [O, C / groups, ...], to outputs [O, *size].

    As in `conv_rows`: `padding` comes before, and all samples are groups of one image. With fewer weights than images,
    each is that of a run of images.
    """
    if x.shape[0] == 0:
        return x.new_zeros(0, w.shape[1], *size)
    w = w.repeat_interleave(len(x) // len(w), 0)
    x = _padded(x, size, w.shape[3:], stride, padding, dilation)
    zeros = [0] * len(size)
    images, weights = x.reshape(1, -1, *x.shape[2:]), w.reshape(-1, *w.shape[2:])
    y = torch.ops.aten.convolution(images, weights, None, stride, zeros, dilation, False, zeros, groups * x.shape[0])
    return torch.reshape(y, (x.shape[0], w.shape[1], *size))


def conv_each_input(
    g: Tensor,
    w: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of `conv_each` with respect to its images, of [*size], from that of its outputs."""
    count, channels = g.shape[0], w.shape[2] * groups
    if count == 0:
        return g.new_zeros(0, channels, *size)
    w = w.repeat_interleave(count // len(w), 0)
    sides = _sides(size, g.shape[2:], w.shape[3:], stride, padding, dilation)
    padded = [n + before + after for n, (before, after) in zip(size, sides, strict=True)]
    zeros = [0] * len(size)
    dx, _, _ = torch.ops.aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]),
        g.new_zeros(1).expand(1, count * channels, *padded),
        w.reshape(-1, *w.shape[2:]),
        None,
        stride,
        zeros,
        dilation,
        False,
        zeros,
        groups * count,
        [True, False, False],
    )
    cut = [n for before, after in reversed(sides) for n in (-before, -after)]
    return torch.nn.functional.pad(dx.reshape(count, channels, *padded), cut)


def _sides(
    size: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[tuple[int, int]]:
    """How much comes before and behind an image in each dimension; negative where its end is not looked at."""
    reaches = [(n - 1) * s + (k - 1) * d + 1 for n, k, s, d in zip(out, kernel, stride, dilation, strict=True)]
    return [(before, reach - n - before) for reach, n, before in zip(reaches, size, padding, strict=True)]


def _padded(
    x: Tensor,
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    sides = _sides(x.shape[2:], out, kernel, stride, padding, dilation)
    return torch.nn.functional.pad(x, [n for side in reversed(sides) for n in side])


def linear_runs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x w^T of each run, from x [N, lines, p] and w [N, d, p]; and for each line 0 if it is finite, else NaN."""
    return torch.bmm(x, w.transpose(1, 2)), (x * 0).sum(2)


def low_rank_(y: Tensor, x: Tensor, a: Tensor, g: Tensor) -> None:
    """y += (x a^T) g for each sample, from y [B, T, d], x [B, T, p], a [B, S, p] and g [B, S, d]."""
    y.baddbmm_(x @ a.transpose(1, 2), g)


def unfilled(like: Tensor, size: Sequence[int]) -> Tensor:
    """Memory of this type."""
    return like.new_empty(list(size))


def copies(shared: Tensor, batch: int) -> Tensor:
    """A copy for each sample, [B, *shape]."""
    return shared.expand(batch, *shared.shape).clone(memory_format=torch.contiguous_format)


def layer_norm_rows(
    x: Tensor, g: Tensor, w: Tensor | None, epsilon: float, input_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x; each sample's gradient of scale and shift, [B, d] from x and g [B, T, d]."""
    normalised = torch.nn.functional.layer_norm(x, x.shape[2:], eps=epsilon)
    dx = _normalised_backward(x[..., None], _scaled(g, w, 1)[..., None], normalised[..., None], epsilon)
    return (dx[..., 0] if input_gradient else x.new_empty(0)), (g * normalised).sum(1), g.sum(1)


def group_norm_rows(
    x: Tensor, g: Tensor, w: Tensor | None, groups: int, epsilon: float, input_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of x; each sample's gradient of scale and shift, [N, C] from x and g [N, C, places]."""
    normalised = torch.nn.functional.group_norm(x, groups, eps=epsilon)
    shape = (x.shape[0], groups, -1, x.shape[2])
    weighted = _scaled(g, w, 2)
    dx = _normalised_backward(x.reshape(shape), weighted.reshape(shape), normalised.reshape(shape), epsilon)
    return (dx.reshape(x.shape) if input_gradient else x.new_empty(0)), (g * normalised).sum(2), g.sum(2)


def _scaled(g: Tensor, w: Tensor | None, at: int) -> Tensor:
    """g [B, ...] times a scale, the same for all samples or one for each, [B, n], whose n is not dimension `at`."""
    if w is None:
        return g
    return g * (w if w.dim() == 2 else w[None]).unsqueeze(at)


def _normalised_backward(x: Tensor, g: Tensor, normalised: Tensor, epsilon: float) -> Tensor:
    """The gradient of x, normalised over its last two dimensions, from that of the result."""
    variance = (x - x.mean((2, 3), keepdim=True)).square().mean((2, 3), keepdim=True)
    inverse = (variance + epsilon).rsqrt()
    return inverse * (g - g.mean((2, 3), keepdim=True) - normalised * (g * normalised).mean((2, 3), keepdim=True))


def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], size: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The largest of each window of x [N, C, H, W], and which element of its window it is, row by row."""
    floors = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    arguments = (list(kernel), list(stride), list(padding), 1, list(size) != floors)
    y, index = torch.nn.functional.max_pool2d(x, *arguments, return_indices=True)
    rows, columns = (torch.arange(n, device=x.device) * s - p for n, s, p in zip(size, stride, padding, strict=True))
    row, column = index // x.shape[3] - rows[:, None], index % x.shape[3] - columns
    return y, (row * kernel[1] + column).to(torch.uint8)


def max_pool_input(
    g: Tensor, where: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], size: Sequence[int]
) -> Tensor:
    """The gradient of the input, [N, C, *size]: that of each window goes to its largest."""
    rows, columns = (
        torch.arange(n, device=g.device) * s - p for n, s, p in zip(g.shape[2:], stride, padding, strict=True)
    )
    code = where.long()
    index = (rows[:, None] + code // kernel[1]) * size[1] + columns + code % kernel[1]
    dx = g.new_zeros(*g.shape[:2], size[0] * size[1])
    return dx.scatter_add(2, index.flatten(2), g.flatten(2)).view(*g.shape[:2], *size)
