"""Plain-torch meaning of ``attention``: the specification that every kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels.blocks import keys_in_blocks, visible


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    count: Tensor | None,
    full: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See :func:`spec_compile.kernels.library.attention`; accumulates in float32 (float64 for float64 inputs)."""
    batch, heads, rows, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32

    seen = torch.ones(1, 1, 1, kv_len, dtype=torch.bool, device=q.device) if mask is None else visible(mask)
    if ids is not None and count is not None:
        listed = keys_in_blocks(ids, count, block_size, kv_len)
        seen = seen & listed.repeat_interleave(heads // listed.shape[1], dim=1).unsqueeze(2)
    seen = seen.expand(batch, heads, rows, kv_len)

    # Slots that no row sees may hold NaN: 0 * NaN would reach the output through P @ V.
    used = seen.reshape(batch, kv_heads, group * rows, kv_len).any(2).unsqueeze(-1)
    keys = torch.where(used, k, 0).to(wide)
    values = torch.where(used, v, 0).to(wide)

    folded = q.reshape(batch, kv_heads, group * rows, dim).to(wide)
    scores = (folded @ keys.transpose(-1, -2) * scale).view(batch, heads, rows, kv_len)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + torch.where(visible(mask), mask, 0).to(wide)
    scores = torch.where(seen, scores, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(wide).view(1, heads, 1, 1)
        top = torch.maximum(top, sink)
    # A row that sees nothing has top = -inf: a finite stand-in keeps exp() at 0 instead of NaN.
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = weights / torch.where(total == 0, 1, total)
    mixed = weights.view(batch, kv_heads, group * rows, kv_len) @ values
    out = allocate_output(q, v_dim)
    return out.copy_(mixed.view(batch, heads, rows, v_dim))


def allocate_output(q: Tensor, v_dim: int) -> Tensor:
    """Empty ``[B, Hq, T, Dv]`` laid out as ``[B, T, Hq, Dv]``, so that the output projection reads it without a copy."""
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, rows, heads, v_dim).transpose(1, 2)
