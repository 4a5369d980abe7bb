"""Operands and float64 results of attention calls, for the tests of every kernel."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_compile.kernels import library

BLOCK = 16
GROUPS = [(9, 3), (12, 2), (28, 4), (14, 2), (71, 1)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Spec:
    """One call; ``mask`` is ``none``, ``bool``, ``causal``, ``additive``, ``heads`` or ``one_batch``; ``layout`` the strides."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    rows: int = 5
    kv_len: int = 75
    dim: int = 16
    v_dim: int = 16
    mask: str = "bool"
    layout: str = "plain"
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(changed) or "default"


@dataclass
class Call:
    """Operands of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def lists(self, block_size: int = BLOCK) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (None, None, None) if self.mask is None else library.live_blocks(self.mask, block_size)

    def operands(self, block_size: int = BLOCK) -> tuple[Any, ...]:
        """Arguments of ``attention`` with the exact block list."""
        return (
            self.q,
            self.k,
            self.v,
            self.mask,
            *self.lists(block_size),
            block_size,
            self.scale,
            self.softcap,
            self.sinks,
        )

    def untrimmed(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.mask, None, None, None, BLOCK, self.scale, self.softcap, self.sinks)

    def dense(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.mask, self.scale, self.softcap, self.sinks)


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if layout == "plain":
        return x
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    assert layout == "sliced"
    wide = torch.full((*x.shape[:3], 2 * x.shape[3] + 1), torch.nan, dtype=x.dtype)
    view = wide[..., 1 : 2 * x.shape[3] : 2]
    view.copy_(x)
    return view


def make(spec: Spec, seed: int = 0, seen: int | None = None) -> Call:
    """Random operands; the mask shows the first ``seen`` slots and a tree among the last ``rows`` of them."""
    gen = torch.Generator().manual_seed(seed)
    s = spec

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(s.dtype)

    q = strided(rand(s.batch, s.heads, s.rows, s.dim), s.layout)
    k = strided(rand(s.batch, s.kv_heads, s.kv_len, s.dim), s.layout)
    v = strided(rand(s.batch, s.kv_heads, s.kv_len, s.v_dim), s.layout)
    filled = max(s.rows, s.kv_len * 2 // 3 if seen is None else seen)
    heads = s.heads if s.mask in ("heads", "bool_heads") else 1
    keep = torch.zeros(1 if s.mask == "one_batch" else s.batch, heads, s.rows, s.kv_len, dtype=torch.bool)
    keep[..., :filled] = s.mask == "causal" or torch.rand(keep[..., :filled].shape, generator=gen) < 0.9
    keep[..., filled - s.rows : filled] = torch.ones(s.rows, s.rows, dtype=torch.bool).tril()
    keep[0, ..., : s.kv_len // 4] = False
    mask: Tensor | None = keep
    if s.mask == "none":
        mask = None
    elif s.mask in ("additive", "heads"):
        bias = rand(1, heads, 1, s.kv_len) if s.mask == "heads" else torch.zeros(1, 1, 1, s.kv_len, dtype=s.dtype)
        mask = bias.expand(keep.shape).masked_fill(~keep, torch.finfo(s.dtype).min)
    sinks = rand(s.heads) if s.sinks else None
    return Call(q, k, v, mask, s.dim**-0.5, s.softcap, sinks)


def einsum64(call: Call, allowed: Tensor | None = None) -> Tensor:
    """Attention in float64 over grouped heads; ``allowed`` ``[B|1, Hkv|1, S]`` restricts the keys further."""
    batch, heads, rows, _ = call.q.shape
    kv_heads, kv_len = call.k.shape[1], call.k.shape[2]
    q, k, v = call.q.double().unflatten(1, (kv_heads, heads // kv_heads)), call.k.double(), call.v.double()
    scores = torch.einsum("bhgtd,bhsd->bhgts", q, k) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if call.mask is not None:
        mask = call.mask.expand(batch, heads, rows, kv_len).reshape(scores.shape)
        if mask.dtype == torch.bool:
            seen = mask.clone()
        else:
            seen = mask.double() > torch.finfo(mask.dtype).min / 2
            scores = scores + mask.double().masked_fill(~seen, 0.0)
    if allowed is not None:
        seen = seen & allowed[:, :, None, None, :]
    if call.sinks is not None:
        sinks = call.sinks.double().view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, rows, 1)
        scores, seen = torch.cat([scores, sinks], -1), torch.cat([seen, torch.ones_like(sinks, dtype=torch.bool)], -1)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)[..., :kv_len]
    return torch.einsum("bhgts,bhsd->bhgtd", weights, v).flatten(1, 2)


def repeated(call: Call) -> tuple[Tensor, Tensor]:
    """K and V as Hugging Face models repeat them."""
    batch, kv_heads, kv_len, _ = call.k.shape
    group = call.q.shape[1] // kv_heads

    def repeat(x: Tensor) -> Tensor:
        return x[:, :, None].expand(batch, kv_heads, group, kv_len, x.shape[3]).reshape(batch, -1, kv_len, x.shape[3])

    return repeat(call.k), repeat(call.v)


def sdpa(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(call.q, *repeated(call), attn_mask=call.mask, scale=call.scale)


def error(found: Tensor, wanted: Tensor) -> float:
    return (found.double() - wanted).abs().max().item()


def rms(found: Tensor, wanted: Tensor) -> float:
    """Where two float32 implementations differ, the ratio of their single worst elements is chance; this one is not."""
    return (found.double() - wanted).square().mean().sqrt().item()


def listed(ids: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """Block lists ``[B, H, K]``, padded with -1, and their lengths."""
    width = max(len(row) for heads in ids for row in heads)
    padded = [[row + [-1] * (width - len(row)) for row in heads] for heads in ids]
    return torch.tensor(padded, dtype=torch.int32), torch.tensor([[len(r) for r in heads] for heads in ids], dtype=torch.int32)


def keys_of(ids: list[list[list[int]]], block_size: int, kv_len: int) -> Tensor:
    keys = torch.zeros(len(ids), len(ids[0]), kv_len, dtype=torch.bool)
    for b, heads in enumerate(ids):
        for h, row in enumerate(heads):
            for block in row:
                keys[b, h, block * block_size : (block + 1) * block_size] = True
    return keys


SELECTIONS = {
    "one list for all": [[[0, 2, 4]]],
    "a list per head": [[[0, 2, 4], [1, 4]]],
    "a list per batch row": [[[0, 2, 4]], [[3]]],
    "a list per batch row and head": [[[0, 2, 4], [1]], [[0, 1, 2, 3, 4], [2, 3]]],
    "an empty list": [[[0, 1], []], [[2], [4]]],
}
