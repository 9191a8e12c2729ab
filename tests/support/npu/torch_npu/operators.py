"""Operators of torch_npu that a dense GPT under MindSpeed calls, as formulas of torch."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x (..., hidden), gamma (hidden): the normalized x in its dtype, and the reciprocal deviations in fp32."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(x.dtype) * gamma, reciprocal


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half along `dim`, through silu, times the second."""
    gate, up = x.chunk(2, dim=dim)
    return torch.nn.functional.silu(gate) * up


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """x (batch, heads, queries, keys); True in `mask` is left out. `fixed_triu_mask`: what lies ahead is, instead."""
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return (x.float() * scale).masked_fill(mask.bool(), -10000.0).softmax(-1).to(x.dtype)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor | int | None, ...]:
    """query, key, value (sequence, batch, heads * size): the attention in the same shape, and six unused results."""
    if input_layout != "SBH":
        raise NotImplementedError(f"npu_fusion_attention in layout {input_layout}")
    size = query.shape[-1] // head_num

    def by_head(x: Tensor) -> Tensor:
        found = x.reshape(*x.shape[:2], x.shape[-1] // size, size).permute(1, 2, 0, 3)
        return found.repeat_interleave(head_num // found.shape[1], dim=1)

    q, k, v = by_head(query), by_head(key), by_head(value)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if sparse_mode in (2, 3, 4):  # the mask is a compressed one, and means what lies ahead
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    elif atten_mask is not None:
        scores = scores.masked_fill(atten_mask.bool(), float("-inf"))
    weights = torch.nn.functional.dropout(scores.softmax(-1), 1 - keep_prob, keep_prob < 1).to(v.dtype)
    return (weights @ v).permute(2, 0, 1, 3).reshape(query.shape), None, None, None, 0, 0, 0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
    if mode:
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return x * cos + turned * sin


# By the name under which MindSpeed has torch compile them.
COMPILED = {"npu_rotary_position_embedding": types.SimpleNamespace(npu_rotary_position_embedding=_rotate)}
