"""Softmax mass of every KV block: the exact score that representatives stand for, from a pass over all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels.blocks import keys_in_blocks, visible


def block_mass_reference(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    ids: Tensor,
    count: Tensor,
    gate: Tensor,
    block_size: int,
    scale: float,
    query: str,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """See :func:`spec_compile.kernels.library.block_mass`."""
    if q.device.type == "cpu" and bool((count.long() * block_size < gate).all()):
        return q.new_zeros(q.shape[0], k.shape[1], ids.shape[-1], dtype=torch.float32)
    return block_mass_without_host(q, k, mask, ids, count, block_size, scale, query, softcap, sinks)


def block_mass_without_host(
    q: Tensor, k: Tensor, mask: Tensor, ids: Tensor, count: Tensor, block_size: int, scale: float, query: str, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same without a look at data on the host: may be traced."""
    batch, heads, _, dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    group, blocks = heads // kv_heads, ids.shape[-1]

    def pick(x: Tensor) -> Tensor:
        """The rows that count; slices, since a list of indices would be copied to the device."""
        if x.shape[2] == 1 or query == "all":
            return x
        last = x[:, :, x.shape[2] - 1 :]
        return {"first": x[:, :, :1], "mean": last}[query] if query != "first_last" else torch.cat([x[:, :, :1], last], 2)

    bias = pick(mask)
    seen = visible(bias)
    q = q.float().mean(2, keepdim=True) if query == "mean" else pick(q)
    count_rows = q.shape[2]
    listed = keys_in_blocks(ids, count, block_size, kv_len)
    seen = (seen & listed.unsqueeze(2)).expand(batch, heads, count_rows, kv_len)
    used = seen.reshape(batch, kv_heads, -1, kv_len).any(2).unsqueeze(-1)
    keys = torch.where(used, k, 0).float()
    scores = (q.float().reshape(batch, kv_heads, group * count_rows, dim) @ keys.transpose(2, 3)) * scale
    scores = scores.view(batch, heads, count_rows, kv_len)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask.dtype != torch.bool:
        scores = scores + torch.where(visible(bias), bias, 0).float()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, 1).expand(batch, heads, count_rows, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0.0)
    weights = torch.nn.functional.pad(weights, (0, blocks * block_size - kv_len))
    return weights.view(batch, kv_heads, group * count_rows, blocks, block_size).sum(-1).mean(2)
