"""Linear layers and products of matrices: Outer terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels import products
from dpkernels.factors import Faults
from dpkernels.layouts import Layout
from dpkernels.rules.broadcast import promote
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import apart, named, plain, reduced, rule, shared, tracked, values_of
from dpkernels.tape import Tape, Tracked


@rule(F.linear)
def linear(tape: Tape, input: Any, weight: Any, bias: Any = None) -> Any:
    """y = x W^T + b. Rows: sum_t g_t x_t^T for W, sum_t g_t for b."""
    if tracked(input) or not tape.holds_samples(input) or tape.holds_samples(weight) or tape.holds_samples(bias):
        return fallback(tape, F.linear, (input, weight, bias), {})
    layout = tape.layout(input, input.dim() - 1, named("linear", weight, bias))
    if apart(weight, bias):
        return _linear_apart(tape, input, weight, bias, layout)
    fixed = not input.requires_grad

    def write(x: Tensor, g: Tensor) -> None:
        if isinstance(weight, Tracked):
            tape.add_outer(weight, tape.by_sample(x.to(g.dtype), layout, 1), tape.by_sample(g, layout, 1), fixed)
        if isinstance(bias, Tracked):
            tape.add_dense(bias, reduced(tape, g, layout, 1))

    # A frozen weight would have its input saved for nothing, which a model may write into.
    if isinstance(weight, Tracked) and products.is_faster(input, shared(weight), shared(bias)):
        return _linear_by_ours(tape, input, plain(weight), plain(bias), write)

    output = F.linear(input, plain(weight), plain(bias))
    return tape.tap_one(output, input if tracked(weight) else None, write)


def _linear_by_ours(
    tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None, write: Callable[[Tensor, Tensor], None]
) -> Tensor:
    """The layer and its input's gradient by the faster library."""

    def backward(x: Tensor, g: Tensor, write_terms: bool, needed: bool) -> Tensor | None:
        if write_terms:
            write(x.detach(), g)
        return products.linear(g, weight.t()) if needed else None

    with torch.no_grad():
        output = products.linear(input, weight, bias)
    return tape.replace(output, input, backward, (weight,))


def _linear_apart(tape: Tape, input: Tensor, weight: Any, bias: Any, layout: Layout) -> Tensor:
    """The same where each sample has a weight or a bias of its own."""
    if not isinstance(weight, Tracked):
        line = (1,) * (input.dim() - 1) + (weight.shape[0],)
        return F.linear(input, weight) + promote(tape, bias, layout, line)
    each = weight._each
    assert each is not None, "where one parameter has a value for each sample, all have"
    shape = (*input.shape[:-1], each.shared.shape[0])
    fixed = not input.requires_grad
    with torch.no_grad():
        lines = tape.by_sample(input, layout, 1)
        y, seen = each.linear(lines)
        faults = None if seen is None or lines.is_inference() else Faults(seen, lines._version)
        if bias is not None:
            y += values_of(tape, bias).unsqueeze(1)

    def backward(x: Tensor, g: Tensor, write: bool, needed: bool) -> Tensor | None:
        lines_out = tape.by_sample(g, layout, 1)
        if write:
            tape.add_outer(weight, tape.by_sample(x.to(g.dtype), layout, 1), lines_out, fixed, faults)
        if write and isinstance(bias, Tracked):
            tape.add_dense(bias, reduced(tape, g, layout, 1))
        return layout.in_place(each.linear_input(lines_out), x.shape).to(x.dtype) if needed else None

    return tape.replace(layout.in_place(y, shape), input, backward)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv)
def matmul(tape: Tape, input: Any, other: Any) -> Any:
    """A product with a parameter of one or two dimensions is a linear layer."""
    with tape.mode:
        if tracked(other) and tape.holds_samples(input) and input.dim() >= 2:
            if other.dim() == 1:
                return F.linear(input, other.unsqueeze(0)).squeeze(-1)
            if other.dim() == 2:
                return F.linear(input, other.t())
        if tracked(input) and tape.holds_samples(other) and other.dim() >= 3:
            if input.dim() == 1:
                return F.linear(other.transpose(-1, -2), input.unsqueeze(0)).squeeze(-1)
            if input.dim() == 2:
                return F.linear(other.transpose(-1, -2), input).transpose(-1, -2)
    return fallback(tape, torch.matmul, (input, other), {})


@rule(Tensor.__rmatmul__)
def rmatmul(tape: Tape, other: Any, input: Any) -> Any:
    """input @ other."""
    return matmul(tape, input, other)


@rule(torch.addmm, Tensor.addmm)
def addmm(tape: Tape, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """beta input + alpha mat1 mat2."""
    with tape.mode:
        if beta == 1 and alpha == 1 and input.dim() == 1 and tracked(mat2) and tape.holds_samples(mat1):
            return F.linear(mat1, mat2.t(), input)
        return beta * input + alpha * (mat1 @ mat2)


@rule(torch.einsum)
def einsum(tape: Tape, equation: Any, *operands: Any) -> Any:
    """A contraction of samples with one parameter, where each letter is in two of (x, W, y), is a linear layer."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    plan = _as_linear(tape, equation, operands)
    if plan is None:
        return fallback(tape, torch.einsum, (equation, *operands), {})
    x, w, x_order, w_order, rest, free, y_order = plan
    with tape.mode:
        matrix = w.permute(w_order).reshape([w.shape[i] for i in w_order[:free]] + [-1])
        head = list(matrix.shape[:free])
        lines = x.permute(x_order)
        lines = lines.reshape([*lines.shape[:rest], -1])
        y = F.linear(lines, matrix.reshape(-1, lines.shape[-1]))
        return y.reshape([*y.shape[:-1], *head]).permute(y_order)


def _as_linear(tape: Tape, equation: Any, operands: tuple[Any, ...]) -> Any:
    if not isinstance(equation, str) or "..." in equation or "->" not in equation or len(operands) != 2:
        return None
    left, out = equation.replace(" ", "").split("->")
    subscripts = left.split(",")
    if any(len(set(s)) != len(s) for s in (*subscripts, out)):
        return None
    which = 1 if isinstance(operands[1], Tracked) else 0
    w, x = operands[which], operands[1 - which]
    if not isinstance(w, Tracked) or not tape.holds_samples(x):
        return None
    ws, xs = subscripts[which], subscripts[1 - which]
    contracted = [c for c in ws if c in xs and c not in out]
    free = [c for c in ws if c in out and c not in xs]
    rest = [c for c in xs if c in out and c not in ws]
    if len(contracted) + len(free) != len(ws) or len(contracted) + len(rest) != len(xs) or not rest or not contracted:
        return None
    order = [*rest, *free]
    return (
        x,
        w,
        [xs.index(c) for c in (*rest, *contracted)],
        [ws.index(c) for c in (*free, *contracted)],
        len(rest),
        len(free),
        [order.index(c) for c in out],
    )
