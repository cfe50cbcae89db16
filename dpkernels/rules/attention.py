"""Multi-head attention: its op sees (T, B, E), so the projections are taken out of it, samples first."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpkernels.rules.registry import named, rule
from dpkernels.tape import RecordingError, Tape


@rule(F.multi_head_attention_forward)
def multi_head_attention(
    tape: Tape,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """The same in ops that have rules."""
    what = named("multi_head_attention_forward", in_proj_weight, q_proj_weight, out_proj_weight)
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise RecordingError(f"{what}: needs input with a sample dimension, and no static keys or values")
    if is_causal and attn_mask is None:
        raise RecordingError(f"{what}: is_causal is a hint about attn_mask, which must be given too")
    with tape.mode:
        if query is key and key is value and not use_separate_proj_weight:
            q, k, v = F.linear(query.transpose(0, 1), in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        else:
            own = q_proj_weight, k_proj_weight, v_proj_weight
            weights = own if use_separate_proj_weight else in_proj_weight.chunk(3)
            biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
            parts = zip((query, key, value), weights, biases, strict=True)
            q, k, v = (F.linear(t.transpose(0, 1), w, b) for t, w, b in parts)
        count, length, width = q.shape
        mask, causal = _mask(attn_mask, key_padding_mask, is_causal, need_weights, q, num_heads)
        if bias_k is not None:
            k = torch.cat([k, bias_k.expand(count, 1, -1)], dim=1)
            v = torch.cat([v, bias_v.expand(count, 1, -1)], dim=1)
        if add_zero_attn:
            k, v = (torch.cat([t, t.new_zeros(count, 1, width)], dim=1) for t in (k, v))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[1] - mask.shape[-1]))
        q, k, v = (t.reshape(count, -1, num_heads, width // num_heads).transpose(1, 2) for t in (q, k, v))
        p = dropout_p if training else 0.0
        scores = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
            scores = (scores if mask is None else scores + mask).softmax(-1)
            scores = F.dropout(scores, p) if p > 0 else scores
            y = scores @ v
            scores = scores.mean(1) if average_attn_weights else scores
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        y = F.linear(y.transpose(1, 2).reshape(count, length, width), out_proj_weight, out_proj_bias)
        return y.transpose(0, 1), scores


def _mask(
    attn_mask: Any, key_padding_mask: Any, is_causal: bool, need_weights: bool, q: Tensor, heads: int
) -> tuple[Tensor | None, bool]:
    """The masks as one that is added to scores [count, heads, T, S], and whether to say `causal` instead."""
    if is_causal and key_padding_mask is None and not need_weights:
        return None, True
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        mask = mask if mask.dim() == 2 else mask.reshape(q.shape[0], heads, *mask.shape[1:])
        mask = mask[None, None] if mask.dim() == 2 else mask
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask, False


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
    return mask.to(q.dtype)
