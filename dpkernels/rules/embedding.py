"""Tables looked up by samples' ids: Rows terms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels.factors import Rows
from dpkernels.rules.fallback import fallback
from dpkernels.rules.registry import named, plain, rule, tracked
from dpkernels.tape import RecordingError, Tape, Tracked
from dpkernels.taps import is_whole_view


@rule(F.embedding, torch.embedding)
def embedding(
    tape: Tape,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """y = W[ids]. Rows: sum_t e_(id_t) g_t^T."""
    what = named("embedding", weight)
    if max_norm is not None:
        raise RecordingError(f"{what}: max_norm writes into the table during forward; use max_norm=None")
    if scale_grad_by_freq:
        raise RecordingError(
            f"{what}: scale_grad_by_freq counts ids over the whole batch; use scale_grad_by_freq=False"
        )
    if not isinstance(weight, Tracked) or tracked(input):
        return fallback(tape, F.embedding, (input, weight, padding_idx), {})
    layout = tape.layout(input, input.dim(), what)
    padding = None if padding_idx is None or padding_idx < -len(weight._value) else padding_idx % len(weight._value)

    def write(saved: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        (ids,), (g,) = saved, gradients
        assert g is not None
        if padding is not None:
            g = torch.where((ids == padding).unsqueeze(-1), torch.zeros((), dtype=g.dtype, device=g.device), g)
        tape.add(weight, Rows(tape.by_sample(ids.long(), layout, 0), tape.by_sample(g, layout, 1)))

    if weight._each is None:
        output = F.embedding(input, plain(weight))
    else:
        with torch.no_grad():
            lines = weight._each.lines(tape.by_sample(input.long(), layout, 0))
            output = layout.in_place(lines, (*input.shape, weight.shape[1]))
            output = output if output._base is None or is_whole_view(output) else output.clone()
    return tape.tap((output,), (input,), write)[0]


@rule(Tensor.__getitem__, torch.index_select, Tensor.index_select)
def lookup(tape: Tape, table: Any, *index: Any) -> Any:
    """W[ids] and index_select(W, 0, ids) are an embedding."""
    ids = index[-1]
    func = Tensor.__getitem__ if len(index) == 1 else torch.index_select
    simple = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) and (len(index) == 1 or index[0] == 0)
    if not tracked(table) or not simple or not tape.holds_samples(ids) or table.dim() == 0:
        return fallback(tape, func, (table, *index), {})
    with tape.mode:
        if ids.dim() == 0:  # one line for all samples, whoever chose it
            return table[int(ids)]
        lines = F.embedding(torch.where(ids < 0, ids + len(table), ids), table.reshape(len(table), -1))
        return lines.reshape([*ids.shape, *table.shape[1:]])
