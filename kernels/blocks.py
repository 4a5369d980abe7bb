"""Which KV blocks are live: plain-torch semantics of ``live_blocks`` and the helpers that read a block list."""

from __future__ import annotations

import torch
from torch import Tensor


def hidden_threshold(dtype: torch.dtype) -> float:
    """Additive mask values at or below this hide their key; anything above is a bias (ALiBi, -1e5) and is added."""
    return torch.finfo(dtype).min / 2


def visible(mask: Tensor) -> Tensor:
    """Bool tensor of ``mask``'s shape, True where the key may be attended."""
    if mask.dtype == torch.bool:
        return mask
    return mask > hidden_threshold(mask.dtype)


def live_blocks_reference(mask: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`spec_compile.kernels.library.live_blocks`."""
    batch, _, _, kv_len = mask.shape
    num_blocks = -(-kv_len // block_size)
    tail = num_blocks * block_size - kv_len
    seen = visible(mask)
    plain = mask if mask.dtype == torch.bool else mask == 0
    seen_by_any = torch.nn.functional.pad(seen.flatten(1, 2).any(1), (0, tail))
    plain_for_all = torch.nn.functional.pad(plain.flatten(1, 2).all(1), (0, tail))
    live = seen_by_any.view(batch, num_blocks, block_size).any(-1)
    full = plain_for_all.view(batch, num_blocks, block_size).all(-1)
    order = torch.arange(num_blocks, device=mask.device, dtype=torch.int32).expand(batch, num_blocks)
    ids = torch.where(live, order, num_blocks).sort(-1).values
    listed = ids < num_blocks
    full = full.gather(-1, ids.clamp(max=num_blocks - 1).long()) & listed
    ids = torch.where(listed, ids, -1).to(torch.int32)
    count = live.sum(-1, dtype=torch.int32)
    return ids.unsqueeze(1), count.unsqueeze(1), full.to(torch.uint8).unsqueeze(1)


def keys_in_blocks(ids: Tensor, count: Tensor, block_size: int, kv_len: int) -> Tensor:
    """Bool ``[B, Hkv|1, S]``: True where a key lies in one of the first ``count`` listed blocks."""
    num_blocks = -(-kv_len // block_size)
    position = torch.arange(ids.shape[-1], device=ids.device)
    listed = (position < count.unsqueeze(-1)) & (ids >= 0)
    slots = torch.where(listed, ids, num_blocks).long()
    member = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device)
    member = member.scatter(-1, slots, True)[..., :num_blocks]
    return member.repeat_interleave(block_size, dim=-1)[..., :kv_len]
