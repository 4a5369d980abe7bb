"""Sparse attention on CPU: the selected blocks of every KV head gathered into a short cache, then PyTorch's SDPA over it.

Where the selection is the whole live list the call is that of exact mode, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels.blocks import visible
from spec_compile.kernels.folded import attention_folded, fold_mask


def attention_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    ids: Tensor,
    count: Tensor,
    full: Tensor | None,
    live_ids: Tensor,
    live_count: Tensor,
    block_size: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Same arguments and result as :func:`spec_compile.kernels.library.attention_gathered`. Reads counts on the host."""
    batch, heads, rows, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if torch.equal(count.expand(batch, kv_heads), live_count.expand(batch, kv_heads)):
        return attention_folded(q, k, v, mask, live_ids, live_count, None, block_size, scale, softcap, sinks)
    width = int(count.max())
    ids = ids.expand(batch, kv_heads, -1)[:, :, :width].long()
    key = ids.unsqueeze(-1) * block_size + torch.arange(block_size, device=q.device)
    listed = ((ids >= 0).unsqueeze(-1) & (key < kv_len)).flatten(2)
    key = key.flatten(2).masked_fill(~listed, 0)
    if mask.shape[2] != group * rows:
        mask = fold_mask(mask, heads, kv_heads, rows, torch.bool if mask.dtype == torch.bool else mask.dtype)
    mask = mask.expand(batch, kv_heads, group * rows, kv_len)
    # Per head: a gather over the folded mask would expand its index to every row.
    short = torch.stack([torch.stack([mask[b, h].index_select(1, key[b, h]) for h in range(kv_heads)]) for b in range(batch)])
    seen = visible(short) & listed.unsqueeze(2)
    short = seen if short.dtype == torch.bool else short.masked_fill(~seen, -torch.inf)
    # Slots that no row sees may hold NaN, which SDPA would multiply by 0.
    unused = ~seen.any(2).unsqueeze(-1)
    k, v = (_rows(x, ids, key, block_size).masked_fill_(unused, 0) for x in (k, v))
    mixed = attention_folded(q, k, v, short, None, None, None, block_size, scale, softcap, sinks)
    # A softmax over nothing is NaN where a wide bias is added in float32.
    return mixed.masked_fill_(~seen.any(3).view(batch, heads, rows, 1), 0)


def _rows(x: Tensor, ids: Tensor, key: Tensor, block_size: int) -> Tensor:
    """``x[b, h, key[b, h]]``, whole blocks at a time where the cache is a multiple of them."""
    batch, heads, length, dim = x.shape
    if not x.is_contiguous():
        return x.gather(2, key.unsqueeze(-1).expand(-1, -1, -1, dim))
    unit = block_size if length % block_size == 0 else 1
    index = ids.clamp(min=0) if unit > 1 else key
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * (length // unit)
    found = x.view(-1, unit * dim).index_select(0, (index + first).flatten())
    return found.view(batch, heads, -1, dim)
