"""A self-contained decoder in the style of gpt-fast: static KV cache as buffers, positions on the device, no transformers.

Used by tests, benchmarks and examples as the model that is *not* from transformers. It reads top to bottom: RMSNorm, RoPE,
grouped-query attention over the whole cache with an explicit mask, SwiGLU, and per-row cache writes, so that rows of a batch
may stand at different positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.errors import CacheError

DRAFT_ROOM = 64


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes; ``kv_heads`` divides ``heads``. ``repeat``: ``expand``, ``interleave``, ``gqa`` or ``grouped`` heads."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    vocab: int = 128
    rope_theta: float = 10000.0
    repeat: str = "interleave"


class DecoderCache(nn.Module):
    """K and V of every layer, ``[B, Hkv, S, D]`` each, and how many tokens each row holds (int64 ``[B]``)."""

    lengths: Tensor

    def __init__(self, config: DecoderConfig, max_len: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.max_len, self.capacity = max_len, max_len + DRAFT_ROOM
        for layer in range(config.layers):
            for name in ("keys", "values"):
                data = torch.zeros(batch, config.kv_heads, self.capacity, config.head_dim, dtype=dtype)
                self.register_buffer(f"{name}_{layer}", data, persistent=False)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int64), persistent=False)
        self.num_layers = config.layers
        for buffer in self.buffers():
            torch._dynamo.mark_static_address(buffer)

    @property
    def layers(self) -> list[Any]:
        """The view of the cache that ``compile_verify`` asks for."""
        return [
            SimpleNamespace(
                keys=getattr(self, f"keys_{i}"), values=getattr(self, f"values_{i}"), is_compileable=True, is_initialized=True
            )
            for i in range(self.num_layers)
        ]

    def get_seq_length(self) -> int:
        return int(self.lengths.max())

    def require_room(self, rows: int) -> None:
        """
        Raises:
            CacheError: ``rows`` more tokens do not fit.
        """
        if self.get_seq_length() + rows > self.capacity:
            raise CacheError(f"DecoderCache is too short: {self.get_seq_length()} + {rows} tokens, capacity {self.capacity}")

    def crop(self, rejected: int | Tensor) -> None:
        """Roll back ``|rejected|`` tokens, one number for all rows or int64 ``[B]``."""
        self.lengths.sub_(torch.as_tensor(rejected).abs())

    def reset(self) -> None:
        self.lengths.zero_()


class Attention(nn.Module):
    """Grouped-query attention over a static cache."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor, positions: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        c, (batch, rows, _) = self.config, x.shape
        q, k, v = self.qkv(x).split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1)
        q = rotate(q.view(batch, rows, c.heads, c.head_dim), rope).transpose(1, 2)
        k = rotate(k.view(batch, rows, c.kv_heads, c.head_dim), rope)
        v = v.view(batch, rows, c.kv_heads, c.head_dim)
        row = torch.arange(batch, device=x.device)[:, None]
        keys[row, :, positions] = k.to(keys.dtype)
        values[row, :, positions] = v.to(values.dtype)
        y = self._attend(q, keys, values, mask)
        return self.out(y.transpose(1, 2).reshape(batch, rows, -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        c = self.config
        group = c.heads // c.kv_heads
        if c.repeat == "gqa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        if c.repeat == "grouped":
            grouped = q.unflatten(1, (c.kv_heads, group))
            scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * c.head_dim**-0.5
            scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
            return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)
        if c.repeat == "interleave":
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        else:
            k, v = (t.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.hidden), nn.RMSNorm(config.hidden)
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor, positions: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, positions, mask, keys, values)
        h = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """``model(input_ids, cache=cache, position_ids=None, attention_mask=None) -> logits``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(
        self, input_ids: Tensor, cache: DecoderCache, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            input_ids: int64 ``[B, T]``.
            cache: advanced by T.
            position_ids: int64 ``[B, T]`` for RoPE; default the slots that are written.
            attention_mask: bool ``[B|1, 1, T, S]`` over all slots; default causal.
        """
        rows = input_ids.shape[1]
        slots = cache.lengths[:, None] + torch.arange(rows, device=input_ids.device)
        mask = attention_mask
        if mask is None:
            mask = torch.arange(cache.capacity, device=input_ids.device) <= slots[:, None, :, None]
        rope = rope_table(slots if position_ids is None else position_ids, self.config)
        x = self.embed(input_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, slots, mask, getattr(cache, f"keys_{i}"), getattr(cache, f"values_{i}"))
        cache.lengths.add_(rows)
        return self.head(self.norm(x))


def rope_table(positions: Tensor, config: DecoderConfig) -> Tensor:
    """``[B, T, 1, D / 2, 2]``: cosine and sine of every rotation."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device)
    angles = positions[..., None].float() * config.rope_theta ** (-steps.float() / config.head_dim)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).unsqueeze(2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate pairs of channels of ``[B, T, H, D]``."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(3).to(x.dtype)
