"""Random ops held still, for two runs of a model that are to be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels.record import backward


class Still(torch.overrides.TorchFunctionMode):
    """Random ops held still."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:  # of a reentrant checkpoint, which runs the model again
            with self:
                return backward(*args, **(kwargs or {}))
        return STILL.get(func, func)(*args, **(kwargs or {}))


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    else:
        kwargs["dropout_p"] = 0.0
    return F.scaled_dot_product_attention(*args, **kwargs)


def _first_of(draw: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The same number everywhere, of those that may be drawn."""
    drawn = draw(*args, **kwargs)
    return drawn.fill_(int(drawn.min())) if drawn.numel() else drawn


def _recurrent(layer: Callable[..., Any], *args: Any) -> Any:
    dropout = 5 if isinstance(args[3], bool) else 6  # one later for a packed sequence
    return layer(*args[:dropout], 0.0, *args[dropout + 1 :])


def _constant(value: float, like: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("generator", None)
    return like(*args, **kwargs).fill_(value)


# What stands in for random ops: dropout does nothing, a coin shows heads, noise is a constant.
STILL: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout, torch.feature_dropout), _same),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout), _same),
    F.rrelu: lambda x, lower=1 / 8, upper=1 / 3, *_, **__: F.rrelu(x, lower, upper, False),
    F.gumbel_softmax: lambda logits, tau=1.0, hard=False, eps=0.0, dim=-1: (logits / tau).softmax(dim),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: lambda *a, **k: F.multi_head_attention_forward(*a, **{**k, "training": False}),
    **{layer: partial(_recurrent, layer) for layer in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    Tensor.bernoulli_: lambda x, *_, **__: x.fill_(1),
    Tensor.bernoulli: lambda x, *_, **__: torch.ones_like(x),
    torch.bernoulli: lambda x, *_, **__: torch.ones_like(x),
    Tensor.normal_: lambda x, *_, **__: x.fill_(0.5),
    Tensor.uniform_: lambda x, *_, **__: x.fill_(0.5),
    Tensor.exponential_: lambda x, *_, **__: x.fill_(0.5),
    torch.normal: lambda mean, std=1.0, *_, **__: mean + 0.5 * std,
    torch.randint: partial(_first_of, torch.randint),
    torch.randint_like: partial(_first_of, torch.randint_like),
    torch.multinomial: partial(_first_of, torch.multinomial),
    Tensor.multinomial: partial(_first_of, torch.multinomial),
    torch.poisson: _same,
    **dict.fromkeys((Tensor.geometric_, Tensor.log_normal_, Tensor.cauchy_), lambda x, *_, **__: x.fill_(1)),
    Tensor.random_: lambda x, *_, **__: x.zero_(),
    torch.rand: partial(_constant, 0.5, torch.zeros),
    torch.randn: partial(_constant, 0.5, torch.zeros),
    torch.rand_like: partial(_constant, 0.5, torch.zeros_like),
    torch.randn_like: partial(_constant, 0.5, torch.zeros_like),
}
