"""From the terms on a tape to a PerSample over the leaf parameters.

Terms of a leaf, or of a view of it, stay factors: a view has a place in its leaf. Terms of other derived parameters
(an exponential, a normalised or merged weight) are pulled back to the leaves through autograd, sample by sample, and
become Dense: the row is what comes out, as rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dpkernels import factors
from dpkernels.each import Each
from dpkernels.per_sample import PerSample
from dpkernels.placing import Part, Place, Shape
from dpkernels.tape import Tape, Tracked


def assemble(tape: Tape, leaves: Mapping[str, Tensor], each: Mapping[str, Each]) -> PerSample:
    """The terms on the tape as rows over the leaf parameters; `each`, what these are for each sample."""
    batch = tape.batch
    shapes = {name: Shape(leaf.shape, leaf.dtype, leaf.device) for name, leaf in leaves.items()}
    grouped: dict[str, dict[tuple[Place | None, int, int], list[factors.Term]]] = {name: {} for name in leaves}

    def put(name: str, place: Place | None, m: factors.Matrix) -> None:
        grouped[name].setdefault((place, m.height, m.width), []).extend(m.terms)

    def put_dense(t: Tracked, rows: Iterable[tuple[int, Tensor]]) -> None:
        for leaf, values in rows:
            name = t._leaves[leaf]
            height, width = shapes[name].matrix
            dense = factors.Dense(values.reshape(batch, height, width))
            put(name, None, factors.merge(batch, height, width, [dense]))

    _resolve_lookups(tape)
    for t in tape.tracked:
        sources = [leaves[name] for name in t._leaves]
        for gradient in tape.aligned.get(id(t), ()):
            if t._each is None:
                put_dense(t, _pull_back_aligned(t, sources, gradient))
            else:
                lines = torch.diag_embed(gradient.movedim(0, -1), dim1=0, dim2=1)
                put_dense(t, _pull_back_each(t, each, lines))
        if id(t) not in tape.terms or not t._value.requires_grad:
            continue
        shape = Shape(t._value.shape, t._value.dtype, t._value.device)
        matrix = factors.merge(batch, *shape.matrix, tape.terms[id(t)])
        if t._value is sources[0]:
            put(t._leaves[0], None, matrix)
        elif _is_view(t._value, sources[0]):
            put(t._leaves[0], *_canonical(t._value, sources[0], matrix))
        elif t._each is None:
            put_dense(t, _pull_back(t, sources, matrix))
        else:
            lines = factors.block(matrix, slice(None), 0, matrix.height).reshape(batch, *t._value.shape)
            put_dense(t, _pull_back_each(t, each, lines.to(t._value.dtype)))
    parts = {
        name: [Part(place, factors.merge(batch, h, w, terms)) for (place, h, w), terms in places.items()]
        for name, places in grouped.items()
    }
    return PerSample(batch, shapes, parts)


def _resolve_lookups(tape: Tape) -> None:
    """Dense terms on lines looked up in a table by constant ids (positions, segments) are Rows of that table."""
    for t in tape.tracked:
        if t._lookup is None:
            continue
        table, ids = t._lookup
        width = t._value.shape[-1]
        for gradient in tape.aligned.pop(id(t), ()):
            lines = gradient.reshape(tape.batch, -1, width)
            tape.add(table, factors.Rows(ids.reshape(tape.batch, -1).long(), lines))
        if all(isinstance(term, factors.Dense) for term in tape.terms.get(id(t), ())):
            for term in tape.terms.pop(id(t), ()):
                assert isinstance(term, factors.Dense)
                lines = term.values.reshape(tape.batch, ids.numel(), width)
                tape.add(table, factors.Rows(ids.reshape(1, -1).long().expand(tape.batch, -1), lines))


def _is_view(value: Tensor, leaf: Tensor) -> bool:
    """Whether each element of `value` is a different element of the contiguous `leaf`."""
    if value._base is not leaf or value.dtype != leaf.dtype or not leaf.is_contiguous() or value.numel() == 0:
        return False
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def _canonical(value: Tensor, leaf: Tensor, matrix: factors.Matrix) -> tuple[Place | None, factors.Matrix]:
    """The place of a view and its matrix; a transposed view is turned back, so that it meets other uses."""
    if value.dim() == 2 and value.stride(0) < value.stride(1):
        turned = factors.transposed(matrix)
        if turned is not None:
            value, matrix = value.t(), turned
    offset = int(value.storage_offset() - leaf.storage_offset())
    if value.is_contiguous() and value.numel() == leaf.numel():
        return None, matrix
    return Place(tuple(value.shape), tuple(value.stride()), offset), matrix


def _pull_back(t: Tracked, leaves: list[Tensor], matrix: factors.Matrix) -> Iterator[tuple[int, Tensor]]:
    """Rows of a derived parameter as rows [B, *shape] of the leaves it is made of."""
    rows: list[list[Tensor]] = [[] for _ in leaves]
    largest = max(t._value.numel(), *(leaf.numel() for leaf in leaves))
    for samples in factors.chunks(matrix.batch, largest):
        lines = factors.block(matrix, samples, 0, matrix.height)
        lines = lines.reshape(-1, *t._value.shape).to(t._value.dtype)
        for row, leaf, grad in zip(rows, leaves, _vjps(t._value, leaves, lines), strict=True):
            row.append(torch.zeros_like(leaf).expand(len(lines), *leaf.shape) if grad is None else grad)
    for i, row in enumerate(rows):
        yield i, torch.cat(row)


def _pull_back_aligned(t: Tracked, leaves: list[Tensor], gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The same where sample i has a gradient in line i of the derived parameter alone."""
    rows: list[list[Tensor]] = [[] for _ in leaves]
    for i in range(len(gradient)):
        line = torch.zeros_like(t._value)
        line[i] = gradient[i]
        grads = torch.autograd.grad(t._value, leaves, line, retain_graph=True, allow_unused=True)
        for row, leaf, grad in zip(rows, leaves, grads, strict=True):
            row.append(torch.zeros_like(leaf) if grad is None else grad)
    for i, row in enumerate(rows):
        yield i, torch.stack(row)


def _pull_back_each(t: Tracked, each: Mapping[str, Each], lines: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The same where the derived parameter and its leaves have a value for each sample."""
    assert t._each is not None
    if not t._each.values.requires_grad:
        return
    leaves = [each[name].values for name in t._leaves]
    grads = torch.autograd.grad(t._each.values, leaves, lines, retain_graph=True, allow_unused=True)
    yield from ((i, grad) for i, grad in enumerate(grads) if grad is not None)


def _vjps(value: Tensor, leaves: list[Tensor], lines: Tensor) -> Sequence[Tensor | None]:
    options = {"retain_graph": True, "allow_unused": True}
    try:
        return torch.autograd.grad(value, leaves, lines, is_grads_batched=True, **options)
    except RuntimeError:  # an op without a batching rule: one sample after the other
        each = [torch.autograd.grad(value, leaves, line, **options) for line in lines]
        return [None if grads[0] is None else torch.stack(grads) for grads in zip(*each, strict=True)]
