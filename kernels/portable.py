"""Every operator in plain ATen that can be traced at any number of rows: bodies for programs that run without this package.

They compute what :mod:`spec_compile.kernels.library` says, without a look at data on the host and without writing. What only
saves work there (cutting the cache to its live keys, reading selected blocks alone) has no traceable form: selections become
masks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from spec_compile.kernels import library
from spec_compile.kernels.block_mass import block_mass_without_host
from spec_compile.kernels.blocks import hidden_threshold, live_blocks_reference
from spec_compile.kernels.mlp import first_activations, kept_channels, masked, mlp_reference
from spec_compile.kernels.moe import gated, moe_route_reference, wide_dtype
from spec_compile.kernels.moe_limit import moe_limit_reference
from spec_compile.kernels.selection import select_blocks_without_host, summarize_blocks

ops = torch.ops.spec_compile


@torch.library.custom_op("spec_compile::summarize_v1", mutates_args=())
def summarize(k: Tensor, position: Tensor, block_size: int, representative: str) -> Tensor:
    """Summaries of all blocks of a K cache, from its keys alone: what ``block_summary_`` keeps, without anything to keep.

    Args:
        k: ``[B, Hkv, S, D]``.
        position: int64 ``[B|1]``, slot of the first draft row; slots from there on count as 0.

    Returns:
        ``[B, Hkv, NB, R, D]``; blocks that are not complete below ``position`` hold no meaning.
    """
    return _summarize(k, position, block_size, representative)


@summarize.register_fake
def _(k: Tensor, position: Tensor, block_size: int, representative: str) -> Tensor:
    batch, heads, slots, dim = k.shape
    parts = 1 if representative == "mean" else 2
    return k.new_empty(batch, heads, (slots + block_size - 1) // block_size, parts, dim)


def _summarize(k: Tensor, position: Tensor, block_size: int, representative: str) -> Tensor:
    # Slots that nobody wrote may hold NaN.
    held = torch.arange(k.shape[2], device=k.device) < position.view(-1, 1)
    return summarize_blocks(torch.where(held.view(-1, 1, k.shape[2], 1), k, 0), block_size, representative)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores. Hidden keys get the least finite number: a row without any key is then no NaN anywhere."""
    least = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, 0.0, least).to(dtype)
    return torch.where(mask > hidden_threshold(mask.dtype), mask, least).to(dtype)


def _by_group(mask: Tensor, heads: int, kv_heads: int, rows: Any) -> Tensor:
    """``[B|1, 1|Hq, T|1, S]`` as ``[B|1, 1|Hkv, G * T, S]``."""
    batch, mask_heads, _, kv_len = mask.shape
    group = heads // kv_heads
    if mask_heads == 1:
        wide = mask.unsqueeze(2).expand(batch, 1, group, rows, kv_len)
    else:
        wide = mask.expand(batch, heads, rows, kv_len).reshape(batch, kv_heads, group, rows, kv_len)
    return wide.reshape(batch, wide.shape[1], group * rows, kv_len)


def _fold_mask(mask: Tensor, heads: int, kv_heads: int, rows: Any, dtype: torch.dtype) -> Tensor:
    folded = _by_group(mask, heads, kv_heads, rows)
    return _additive(folded, dtype) if mask.dtype == torch.bool else folded


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seen: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with query heads folded into rows; ``mask`` may be folded, ``seen`` ``[B, Hkv, 1, S]`` hides more keys."""
    batch, heads, rows, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * rows, dim)
    wide = wide_dtype(q.dtype)
    # A bias wider than q is added in full.
    plain = softcap == 0 and sinks is None and (mask is None or mask.dtype in (torch.bool, q.dtype))
    if mask is not None:
        if mask.shape[2] != group * rows:
            mask = _by_group(mask, heads, kv_heads, rows)
        if seen is not None:
            # A slot that is not read may hold NaN, in a mask as well.
            mask = torch.where(seen, _additive(mask, q.dtype if plain else wide), torch.finfo(q.dtype if plain else wide).min)
        mask = _additive(mask, q.dtype if plain else wide)
    elif seen is not None:
        mask = _additive(seen.expand(batch, kv_heads, group * rows, kv_len), q.dtype if plain else wide)
    if plain:
        mixed = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        return _as_rows(mixed, heads, rows, v_dim)
    scores = (folded @ k.transpose(-1, -2)).to(wide) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return _as_rows(torch.softmax(scores, -1).to(v.dtype) @ v, heads, rows, v_dim)
    sink = sinks.to(wide).view(1, kv_heads, group, 1, 1).expand(batch, kv_heads, group, rows, 1)
    scores = torch.cat([scores, sink.reshape(batch, kv_heads, group * rows, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :kv_len]
    return _as_rows(weights.to(v.dtype) @ v, heads, rows, v_dim)


def _as_rows(mixed: Tensor, heads: int, rows: Any, v_dim: int) -> Tensor:
    """``[B, Hq, T, Dv]``, laid out as ``[B, T, Hq, Dv]``."""
    split = mixed.reshape(mixed.shape[0], heads, rows, v_dim)
    return split.transpose(1, 2).contiguous().transpose(1, 2)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ids: Tensor | None, count: Tensor | None, full: Tensor | None,
    block_size: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _attend(q, k, v, mask, None, scale, softcap, sinks)


def _listed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ids: Tensor | None, count: Tensor | None, full: Tensor | None,
    block_size: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if ids is None or count is None:
        return _attend(q, k, v, mask, None, scale, softcap, sinks)
    seen = _keys_in_blocks(ids, count, block_size, k.shape[2]).expand(q.shape[0], k.shape[1], -1).unsqueeze(2)
    unused = ~seen.transpose(2, 3)
    k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
    return _attend(q, k, v, mask, seen, scale, softcap, sinks)


def _keys_in_blocks(ids: Tensor, count: Tensor, block_size: int, kv_len: int) -> Tensor:
    """Bool ``[B, Hkv|1, S]``: keys of the first ``count`` listed blocks, by comparison with every block."""
    blocks = -(-kv_len // block_size)
    place = torch.arange(ids.shape[-1], device=ids.device)
    listed = torch.where((place < count.unsqueeze(-1)) & (ids >= 0), ids, blocks).long()
    number = torch.arange(blocks, device=ids.device)
    member = (listed.unsqueeze(-1) == number).any(2)
    return member.unsqueeze(-1).expand(*member.shape, block_size).flatten(2)[..., :kv_len]


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ids: Tensor, count: Tensor, full: Tensor | None, live_ids: Tensor,
    live_count: Tensor, block_size: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return _listed(q, k, v, mask, ids, count, full, block_size, scale, softcap, sinks)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    return _attend(q, k, v, mask, None, scale, softcap, sinks)


def _block_mass(
    q: Tensor, k: Tensor, mask: Tensor, ids: Tensor, count: Tensor, gate: Tensor, block_size: int, scale: float, query: str,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return block_mass_without_host(q, k, mask, ids, count, block_size, scale, query, softcap, sinks)


def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [linear(x, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]


def _experts(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Few experts compute all rows, each weight being read where it lies; of many, the chosen ones are gathered."""
    experts, top_k = gate_up.shape[0], choice.shape[1]
    routed = (choice >= 0) & (choice < experts)
    safe = torch.where(routed, choice, 0).long()
    if experts <= 8 * top_k:
        gate, other = _halves(x.unsqueeze(0), gate_up, up, gate_up_bias, interleaved, transposed)
        found = _product(gated(gate, other, activation, limit, alpha), down, down_bias, transposed)
        # [E, N, H] to [N, K, H]
        by_row = found.transpose(0, 1)
        pairs = by_row.gather(1, safe.unsqueeze(-1).expand(-1, -1, by_row.shape[2]))
    else:
        flat = safe.flatten()
        rows = x.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, 1, x.shape[1])
        chosen_up, first_bias, last_bias = (None if t is None else t[flat] for t in (up, gate_up_bias, down_bias))
        gate, other = _halves(rows, gate_up[flat], chosen_up, first_bias, interleaved, transposed)
        found = _product(gated(gate, other, activation, limit, alpha), down[flat], last_bias, transposed)
        pairs = found.view(-1, top_k, found.shape[2])
    wide = wide_dtype(x.dtype)
    terms = torch.where(routed.unsqueeze(-1), pairs.to(wide) * weight.to(wide).unsqueeze(-1), 0)
    return terms.sum(1).to(x.dtype)


def _halves(
    x: Tensor, gate_up: Tensor, up: Tensor | None, bias: Tensor | None, interleaved: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Gate and up of every expert, from one weight or from two."""
    inner = _product(x, gate_up, bias, transposed)
    if up is not None:
        return inner, _product(x, up, None, transposed)
    if interleaved:
        return inner[..., 0::2], inner[..., 1::2]
    gate, other = inner.chunk(2, -1)
    return gate, other


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """``[E|1, N, I]`` times ``[E, O, I]`` (``[E, I, O]`` where transposed)."""
    out = x @ (weight if transposed else weight.transpose(1, 2))
    return out if bias is None else out + bias.unsqueeze(1)


def _mlp_sparse(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
) -> Tensor:  # fmt: skip
    """Every channel is computed, and those not kept are zeroed: the bits of the dense layer in an exact step."""
    rows = x.reshape(-1, x.shape[-1])
    acted = first_activations(rows, gate, up, gate_bias, up_bias, activation)
    kept = kept_channels(acted.to(wide_dtype(x.dtype)), threshold, keep, joint) | (switch == 0)
    return masked(x, acted, kept, None if gate is None else linear(rows, up, up_bias), down, down_bias)


BODIES: dict[Any, Callable[..., Any]] = {
    ops.live_blocks_v2.default: live_blocks_reference,
    ops.realize_mask_v1.default: lambda mask: mask.clone(memory_format=torch.contiguous_format),
    ops.attention_v1.default: _listed,
    ops.attention_folded_v1.default: _exact,
    ops.attention_triton_v1.default: _listed,
    ops.attention_gathered_v1.default: _gathered,
    ops.dense_attention_v1.default: _dense,
    ops.fold_mask_v1.default: _fold_mask,
    ops.summarize_v1.default: _summarize,
    ops.select_blocks_v2.default: select_blocks_without_host,
    ops.block_mass_v1.default: _block_mass,
    ops.linears_v1.default: _linears,
    ops.moe_experts_v1.default: _experts,
    ops.moe_route_v1.default: moe_route_reference,
    ops.moe_limit_v1.default: moe_limit_reference,
    ops.mlp_v1.default: mlp_reference,
    ops.mlp_sparse_v1.default: _mlp_sparse,
}

assert library.attention is not None
