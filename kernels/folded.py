"""Exact attention by SDPA with the query heads of a group folded into rows.

``repeat_kv`` copies K and V once per query head before SDPA. Here the ``G = Hq / Hkv`` heads that share a KV head become
``G * T`` rows of one SDPA call instead, so the cache is read where it lies. On CPU the keys outside the live blocks are cut
off as well, in multiples of the block that PyTorch's CPU flash kernel works in, which leaves every partial sum as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from spec_compile.kernels.reference import allocate_output

# Key block of aten/src/ATen/native/cpu/FlashAttentionKernel.cpp; cuts at its multiples do not change a bit.
_CPU_KEY_BLOCK = 512


def _cpu_row_block(rows: int) -> int:
    """Row block that the CPU flash kernel picks for this many query rows."""
    return 256 if rows >= 768 else 64 if rows >= 192 else 32


def _padding(folded_rows: int, rows: int) -> int:
    """Rows to add so that the last row block is no shorter than ``rows``.

    BLAS switches to another kernel, with another summation order, for very short blocks; a last block at least as tall as
    the unfolded call stays on the kernel the unfolded call used.
    """
    block = _cpu_row_block(folded_rows)
    tail = folded_rows % block
    if folded_rows <= block or tail == 0 or tail >= rows:
        return 0
    extra = rows - tail
    return extra if _cpu_row_block(folded_rows + extra) == block else 0


def _live_range(ids: Tensor, count: Tensor, block_size: int, kv_len: int) -> tuple[int, int]:
    """First and last key any row can see, widened to whole CPU key blocks. Reads the counts: CPU tensors only."""
    counts = count[:, 0].tolist()
    spans = [(ids[b, 0, 0].item(), ids[b, 0, n - 1].item()) for b, n in enumerate(counts) if n > 0]
    if not spans:
        return 0, min(kv_len, _CPU_KEY_BLOCK)
    first = min(span[0] for span in spans) * block_size
    last = (max(span[1] for span in spans) + 1) * block_size
    first = int(first) // _CPU_KEY_BLOCK * _CPU_KEY_BLOCK
    last = -(-int(last) // _CPU_KEY_BLOCK) * _CPU_KEY_BLOCK
    return first, min(kv_len, last)


def fold_mask(mask: Tensor, heads: int, kv_heads: int, rows: int, dtype: torch.dtype) -> Tensor:
    """See :func:`spec_compile.kernels.library.fold_mask`."""
    batch, mask_heads, _, kv_len = mask.shape
    group = heads // kv_heads
    if mask_heads == 1:
        wide = mask.unsqueeze(2).expand(batch, 1, group, rows, kv_len)
    else:
        wide = mask.expand(batch, heads, rows, kv_len).unflatten(1, (kv_heads, group))
    if mask.dtype != torch.bool:
        dtype = mask.dtype
    folded = mask.new_empty(batch, wide.shape[1], group * rows, kv_len, dtype=dtype)
    target = folded.view(wide.shape)
    if dtype == mask.dtype:
        target.copy_(wide)
        return folded
    zero, hidden = folded.new_zeros(()), folded.new_full((), -torch.inf)
    torch.where(wide, zero, hidden, out=target)
    return folded


def attention_folded(
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
    """Same arguments and result as :func:`spec_compile.kernels.library.attention`, for block lists of ``live_blocks``.

    ``mask`` may have been folded once for all layers by :func:`fold_mask`.
    Rows that see nothing, and NaN in slots that are hidden but inside the live range, behave as in PyTorch's SDPA.
    """
    batch, heads, rows, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    if ids is not None and count is not None and ids.device.type == "cpu":
        first, last = _live_range(ids, count, block_size, kv_len)
        k, v = k[:, :, first:last], v[:, :, first:last]
        mask = None if mask is None else mask[..., first:last]
    folded = q.reshape(batch, kv_heads, group * rows, dim)
    # SDPA would round a bias that is wider than q.
    wide_bias = mask is not None and mask.dtype not in (torch.bool, q.dtype)
    plain = softcap == 0 and sinks is None and not wide_bias
    if mask is not None and mask.shape[2] != group * rows:
        mask = fold_mask(mask, heads, kv_heads, rows, q.dtype if plain else torch.bool)
    if not plain:
        mixed = _capped(folded, k, v, mask, scale, softcap, sinks)
    else:
        extra = _padding(group * rows, rows) if q.device.type == "cpu" else 0
        if extra:
            folded = pad(folded, (0, 0, 0, extra))
            if mask is not None:
                mask = torch.cat([mask, mask[:, :, -1:].expand(-1, -1, extra, -1)], dim=2)
        mixed = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)[:, :, : group * rows]
    out = allocate_output(q, v_dim)
    return out.copy_(mixed.reshape(batch, heads, rows, v_dim))


def _capped(
    folded: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Softmax attention over folded rows with score capping (gemma2) and learned sinks (gpt_oss), softmax in float32."""
    batch, kv_heads, folded_rows, _ = folded.shape
    wide = torch.float64 if folded.dtype == torch.float64 else torch.float32
    scores = (folded @ k.transpose(-1, -2)).to(wide) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        group = sinks.numel() // kv_heads
        sink = sinks.to(wide).view(1, kv_heads, group, 1).expand(batch, -1, -1, folded_rows // group)
        scores = torch.cat([scores, sink.reshape(batch, kv_heads, folded_rows, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    elif mask is not None and mask.dtype == torch.bool:
        # A row that sees nothing is zero, as in PyTorch's SDPA.
        weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0)
    return weights.to(v.dtype) @ v
