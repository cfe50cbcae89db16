"""LSTM, GRU and plain recurrent layers and their cells, unrolled into linear layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels.rules.registry import rule
from dpkernels.tape import RecordingError, Tape

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Any, Any], State]  # (W_ih x + b_ih, state, W_hh, b_hh) -> state; state[0] is the output


def _lstm_step(projected: Tensor, state: State, w_hh: Any, b_hh: Any, w_hr: Any = None) -> State:
    h, c = state
    i, f, g, o = (projected + F.linear(h, w_hh, b_hh)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if w_hr is None else F.linear(h, w_hr), c)


def _gru_step(projected: Tensor, state: State, w_hh: Any, b_hh: Any) -> State:
    (h,) = state
    x_r, x_z, x_n = projected.chunk(3, dim=-1)
    h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, dim=-1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((1 - z) * n + z * h,)


def _rnn_step(nonlinearity: Callable[[Tensor], Tensor], projected: Tensor, state: State, w_hh: Any, b_hh: Any) -> State:
    return (nonlinearity(projected + F.linear(state[0], w_hh, b_hh)),)


def _layers(
    step: Step,
    states: int,
    tape: Tape,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: Any = None,
) -> Any:
    if batch_first is None or not isinstance(has_biases, bool):
        raise RecordingError(
            "recurrent layer on a packed sequence: it orders the samples' steps by time. Use padded input "
            "(batch_first=True) and mask the loss"
        )
    directions = 2 if bidirectional else 1
    first = hx if isinstance(hx, list | tuple) else (hx,)
    starts = [tuple(s[at] for s in first) for at in range(num_layers * directions)]  # of [layers, B, H]
    lines = tape.lines_of(input) if batch_first else None
    for s in (s for state in starts for s in state):
        tape.mark(s, True if lines is None else lines)
    weights = list(params)
    per_layer = len(weights) // (num_layers * directions)
    with tape.mode:
        x = input if batch_first else input.transpose(0, 1)
        finals: list[State] = []
        for layer in range(num_layers):
            if layer > 0 and dropout > 0 and train:
                x = F.dropout(x, dropout, train)
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                own = weights[at * per_layer : (at + 1) * per_layer]
                output, state = _one_direction(step, x, starts[at], own, has_biases, direction == 1)
                outputs.append(output)
                finals.append(state)
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        last = tuple(torch.stack([state[k] for state in finals]) for k in range(states))
        y = x if batch_first else x.transpose(0, 1)
    return (y, *last)


def _one_direction(
    step: Step, x: Tensor, state: State, weights: list[Any], has_biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    w_ih, w_hh, *more = weights
    b_ih, b_hh = more[:2] if has_biases else (None, None)
    rest = more[2:] if has_biases else more  # a projection
    projected = F.linear(x, w_ih, b_ih)
    steps = list(projected.unbind(1))
    outputs = []
    for part in reversed(steps) if backwards else steps:
        state = step(part, state, w_hh, b_hh, *rest)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, dim=1), state


def _cell(
    step: Step, tape: Tape, input: Tensor, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    state = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    for s in state:
        tape.mark(s, True)
    with tape.mode:
        result = step(F.linear(input, w_ih, b_ih), state, w_hh, b_hh)
    return result if isinstance(hx, list | tuple) else result[0]


_tanh_step, _relu_step = partial(_rnn_step, torch.tanh), partial(_rnn_step, torch.relu)
rule(torch.lstm)(partial(_layers, _lstm_step, 2))
rule(torch.gru)(partial(_layers, _gru_step, 1))
rule(torch.rnn_tanh)(partial(_layers, _tanh_step, 1))
rule(torch.rnn_relu)(partial(_layers, _relu_step, 1))
rule(torch.lstm_cell)(partial(_cell, _lstm_step))
rule(torch.gru_cell)(partial(_cell, _gru_step))
rule(torch.rnn_tanh_cell)(partial(_cell, _tanh_step))
rule(torch.rnn_relu_cell)(partial(_cell, _relu_step))
