"""The operators of ``spec_compile``: schema, fake implementation and meaning. This file is the contract.

Names carry a version: a changed meaning gets a new name, so that a compiled artefact on disk never meets a new body.
Operators whose name ends in ``_`` write what they declare and return nothing; the others write nothing, and no result aliases
an argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels import availability
from spec_compile.kernels.block_mass import block_mass_reference
from spec_compile.kernels.block_summary import block_summary_reference
from spec_compile.kernels.blocks import live_blocks_reference
from spec_compile.kernels.folded import attention_folded as _attention_folded
from spec_compile.kernels.folded import fold_mask as _fold_mask
from spec_compile.kernels.gathered import attention_gathered as _attention_gathered
from spec_compile.kernels.linears import linears as _linears
from spec_compile.kernels.mlp import ACTIVATIONS as MLP_ACTIVATIONS
from spec_compile.kernels.mlp import mlp as _mlp
from spec_compile.kernels.mlp import mlp_sparse as _mlp_sparse
from spec_compile.kernels.moe import ACTIVATIONS, ORDERS, SCORES, wide_dtype
from spec_compile.kernels.moe import moe_experts as _moe_experts
from spec_compile.kernels.moe import moe_route as _moe_route
from spec_compile.kernels.moe_limit import moe_limit as _moe_limit
from spec_compile.kernels.reference import allocate_output, attention_reference
from spec_compile.kernels.selection import AGGREGATES, QUERIES, select_blocks_reference

if __name__ != "spec_compile.kernels.library":
    raise ImportError("import spec_compile.kernels.library: under another name the operators would be registered twice")

DEFAULT_BLOCK_SIZE = 64


@torch.library.custom_op("spec_compile::live_blocks_v2", mutates_args=())
def live_blocks(mask: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the KV blocks that a verify forward has to read.

    Args:
        mask: ``[B|1, 1|Hq, T|1, S]``, bool (True = visible) or floating (added to the scores; values at or below half of
            the dtype's minimum hide the key, every other value is a bias).
        block_size: keys per block; the last block may be shorter.

    Returns:
        ``ids`` int32 ``[B|1, 1, NB]``: ascending blocks with a key that some head and row sees, padded with -1;
        ``count`` int32 ``[B|1, 1]``: how many; ``full`` uint8 ``[B|1, 1, NB]``, in the order of ``ids``: 1 where every mask
        entry of the listed block is exactly True or 0, so that a kernel may skip loading the mask (0 for a shorter last block
        and for padding).
    """
    if mask.is_cuda and availability.why_no_triton() is None:
        from spec_compile.kernels import live_blocks_triton

        if live_blocks_triton.why_not(mask, block_size) is None:
            return live_blocks_triton.live_blocks_triton(mask, block_size)
    return live_blocks_reference(mask, block_size)


@live_blocks.register_fake
def _(mask: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch._check(mask.dim() == 4, lambda: f"live_blocks: mask must be [B, H, T, S], got {tuple(mask.shape)}")
    torch._check(block_size > 0, lambda: f"live_blocks: block_size must be positive, got {block_size}")
    batch, num_blocks = mask.shape[0], (mask.shape[3] + block_size - 1) // block_size
    return (
        mask.new_empty(batch, 1, num_blocks, dtype=torch.int32),
        mask.new_empty(batch, 1, dtype=torch.int32),
        mask.new_empty(batch, 1, num_blocks, dtype=torch.uint8),
    )


@torch.library.custom_op("spec_compile::realize_mask_v1", mutates_args=())
def realize_mask(mask: Tensor) -> Tensor:
    """A contiguous copy of ``mask``: a fence that code generators cannot compute again in front of every layer."""
    return mask.clone(memory_format=torch.contiguous_format)


@realize_mask.register_fake
def _(mask: Tensor) -> Tensor:
    return torch.empty_like(mask, memory_format=torch.contiguous_format)


def _check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> None:
    torch._check(q.dim() == k.dim() == v.dim() == 4, lambda: "attention: q, k and v must be 4-D")
    torch._check(q.shape[3] == k.shape[3], lambda: f"attention: head dim of q {q.shape[3]} and of k {k.shape[3]} differ")
    torch._check(k.shape[1] == v.shape[1], lambda: f"attention: KV heads of k {k.shape[1]} and of v {v.shape[1]} differ")
    torch._check(
        q.shape[1] % k.shape[1] == 0,
        lambda: f"attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads",
    )
    torch._check(q.dtype == k.dtype == v.dtype, lambda: f"attention: dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None:
        torch._check(mask.dim() == 4, lambda: f"attention: mask must be [B, H, T, S], got {tuple(mask.shape)}")
    if sinks is not None:
        torch._check(sinks.dim() == 1, lambda: "attention: sinks must be [Hq]")


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    count: Tensor | None,
    full: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    _check_attention(q, k, v, mask, sinks)
    return allocate_output(q, v.shape[3])


@torch.library.custom_op("spec_compile::attention_v1", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    count: Tensor | None,
    full: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of T draft rows over the listed blocks of a KV cache.

    ``softmax(softcap * tanh(scale * q k^T / softcap) + mask) v`` in float32, restricted to visible keys of listed blocks.

    Args:
        q: ``[B, Hq, T, D]``, float32, float16, bfloat16 or float64, any strides.
        k, v: cache tensors ``[B, Hkv, S, D]`` and ``[B, Hkv, S, Dv]``, not repeated, real strides; query head ``h`` reads
            KV head ``h // (Hq / Hkv)``.
        mask: as for :func:`live_blocks`, or None where every row sees every key.
        ids, count, full: from :func:`live_blocks` (or a selection: ids and full ``[B|1, Hkv|1, K]``, count ``[B|1, Hkv|1]``);
            None means every block, none of them known to be full.
        block_size: keys per block of ``ids``.
        scale: multiplies the scores.
        softcap: cap of the scores (Gemma 2), 0 for none.
        sinks: ``[Hq]`` learned logits that take part in the softmax and are then dropped (gpt-oss), or None.

    Returns:
        ``[B, Hq, T, Dv]`` in q's dtype, laid out as ``[B, T, Hq, Dv]``. A row that sees no key is zero; slots that no row
        sees never reach the result, NaN included.
    """
    return attention_reference(q, k, v, mask, ids, count, full, block_size, scale, softcap, sinks)


attention.register_fake(_fake_attention)


@torch.library.custom_op("spec_compile::attention_folded_v1", mutates_args=())
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Lowering of :func:`attention` to PyTorch's SDPA with query heads folded into rows; exact lists only.

    ``mask`` may be the result of :func:`fold_mask`. ``ids`` and ``count`` must come from :func:`live_blocks` (one list for
    all heads): on CPU they bound the keys that are read, elsewhere they are ignored.
    """
    return _attention_folded(q, k, v, mask, ids, count, full, block_size, scale, softcap, sinks)


attention_folded.register_fake(_fake_attention)


@torch.library.custom_op("spec_compile::attention_triton_v1", mutates_args=())
def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    count: Tensor | None,
    full: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Lowering of :func:`attention` to the split-KV Triton kernel; any block list, float16, bfloat16 or float32."""
    from spec_compile.kernels.attention_triton import attention_triton as run

    return run(q, k, v, mask, ids, count, full, block_size, scale, softcap, sinks)


attention_triton.register_fake(_fake_attention)


@torch.library.custom_op("spec_compile::block_summary_v1_", mutates_args=("summaries", "valid"))
def block_summary_(
    keys: list[Tensor], summaries: list[Tensor], valid: Tensor, position: Tensor, block_size: int, representative: str
) -> None:
    """Bring the representatives of complete, committed blocks up to date, for all anchor layers at once.

    ``valid[b]`` becomes ``position[b] // block_size``: a rollback lowers it, new blocks are computed from K. The newest block
    that was valid before and still is serves as a witness: if its summary is not that of its keys any more, somebody else has
    written the cache, and all blocks of that layer and head are computed again.

    Args:
        keys: K caches ``[B, Hkv, S, D]``, one per anchor layer.
        summaries: ``[B, Hkv, NB, R, D]`` in K's dtype, one per anchor layer; written.
        valid: int32 ``[B]``, blocks whose summaries hold in every layer; written. 0 at first.
        position: int64 ``[B|1]``, slot of the first draft row.
        block_size: keys per block.
        representative: ``mean`` (R = 1) or ``min_max`` (R = 2).
    """
    if keys[0].is_cuda and availability.why_no_triton() is None:
        from spec_compile.kernels import block_summary_triton as kernel

        if kernel.why_not(keys, summaries, block_size) is None:
            return kernel.block_summary_triton(keys, summaries, valid, position, block_size, representative)
    return block_summary_reference(keys, summaries, valid, position, block_size, representative)


@block_summary_.register_fake
def _(keys: list[Tensor], summaries: list[Tensor], valid: Tensor, position: Tensor, block_size: int, representative: str) -> None:
    parts = {"mean": 1, "min_max": 2}
    torch._check(
        representative in parts, lambda: f"block_summary_: representative must be one of {[*parts]}, got {representative!r}"
    )
    torch._check(len(keys) == len(summaries) > 0, lambda: "block_summary_: one summary for each layer's keys")
    for k, summary in zip(keys, summaries):
        torch._check(
            summary.dim() == 5 and summary.shape[3] == parts[representative],
            lambda: f"block_summary_: a summary must be [B, Hkv, NB, {parts[representative]}, D]",
        )
        torch._check(k.dim() == 4, lambda: "block_summary_: keys must be [B, Hkv, S, D]")


@torch.library.custom_op("spec_compile::select_blocks_v2", mutates_args=())
def select_blocks(
    q: Tensor,
    summary: Tensor | None,
    scores: Tensor | None,
    ids: Tensor,
    count: Tensor,
    full: Tensor,
    position: Tensor,
    gate: Tensor,
    block_size: int,
    scale: float,
    query: str,
    aggregate: str,
    heads: str,
    joint: bool,
    sink: int,
    recent: int,
    tokens: int,
    share: float,
    floor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the KV blocks that a sparse verify forward reads, once for all draft rows.

    Blocks stand in the contest if they lie wholly below the first draft row and are neither among the first ``sink`` nor the
    last ``recent`` live ones; all others are kept. The best by score win, ties going to the lowest block (and head). A budget
    that covers the contest gives the live list itself.

    Args:
        q: ``[B, Hq, T, D]``; the first row belongs to the last accepted token.
        summary: ``[B, Hkv, NB, R, D]``, mean keys (R = 1) or minima and maxima (R = 2) of the blocks; entries of blocks that
            are not committed are never read into a score. None where ``scores`` are given.
        scores: float32 ``[B, Hkv, NB]`` of every block, from :func:`block_mass`, or None.
        ids, count, full: live blocks, from :func:`live_blocks`, one list for all heads.
        position: int64 ``[B|1]``, slot of the first draft row.
        gate: int64 ``[1]``; contexts below it, in tokens of live blocks, are kept whole.
        block_size, scale: as for :func:`attention`.
        query: rows that score: ``first``, ``first_last``, ``all``, or ``mean`` of all.
        aggregate: over rows and query heads of a group: ``max``, ``mean``, or ``softmax`` (mean of their softmaxes).
        heads: ``own`` lists per KV head, or one ``pooled`` over them.
        joint: one contest over (head, block) pairs: lists of unequal length.
        sink, recent: live blocks kept at either end.
        tokens: budget of the contest in tokens per KV head, or 0 for a share.
        share, floor: rho and L0: contexts up to ``floor`` tokens are kept whole, others to
            ``floor((L - L0) * rho + L0)`` tokens (arXiv 2512.21911).

    Returns:
        ids int32 and full uint8 ``[B, Hkv, NB]`` and count int32 ``[B, Hkv]``, for :func:`attention`.
    """
    run = select_blocks_reference
    if q.is_cuda and availability.why_no_triton() is None:
        from spec_compile.kernels.block_scores_triton import why_not
        from spec_compile.kernels.select_blocks_triton import select_blocks_triton

        if summary is None or why_not(q, summary, query, aggregate) is None:
            run = select_blocks_triton
    return run(
        q, summary, scores, ids, count, full, position, gate, block_size, scale, query, aggregate, heads, joint, sink, recent,
        tokens, share, floor,
    )  # fmt: skip


@select_blocks.register_fake
def _(
    q: Tensor, summary: Tensor | None, scores: Tensor | None, ids: Tensor, count: Tensor, full: Tensor, position: Tensor,
    gate: Tensor, block_size: int, scale: float, query: str, aggregate: str, heads: str, joint: bool, sink: int, recent: int,
    tokens: int, share: float, floor: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    torch._check(query in QUERIES, lambda: f"select_blocks: query must be one of {QUERIES}, got {query!r}")
    torch._check(aggregate in AGGREGATES, lambda: f"select_blocks: aggregate must be one of {AGGREGATES}, got {aggregate!r}")
    torch._check(heads in ("own", "pooled"), lambda: f"select_blocks: heads must be 'own' or 'pooled', got {heads!r}")
    torch._check((summary is None) != (scores is None), lambda: "select_blocks: give either summary or scores")
    torch._check(summary is None or summary.dim() == 5, lambda: "select_blocks: summary must be [B, Hkv, NB, R, D]")
    torch._check(scores is None or scores.dim() == 3, lambda: "select_blocks: scores must be [B, Hkv, NB]")
    torch._check(ids.shape[1] == 1, lambda: "select_blocks: the live list must be one for all heads")
    torch._check(gate.numel() == 1, lambda: "select_blocks: gate must be [1]")
    kv_heads = summary.shape[1] if summary is not None else scores.shape[1]  # type: ignore[union-attr]
    batch, blocks = q.shape[0], ids.shape[2]
    return (
        ids.new_empty(batch, kv_heads, blocks),
        count.new_empty(batch, kv_heads),
        full.new_empty(batch, kv_heads, blocks),
    )


@torch.library.custom_op("spec_compile::block_mass_v1", mutates_args=())
def block_mass(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    ids: Tensor,
    count: Tensor,
    gate: Tensor,
    block_size: int,
    scale: float,
    query: str,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Share of attention that falls on each KV block: scores for :func:`select_blocks` that read every key.

    Args:
        q, k, mask, block_size, scale, softcap, sinks: as for :func:`attention`.
        ids, count: live blocks, one list for all heads.
        gate: int64 ``[1]``; contexts below it, in tokens of live blocks, need no scores: they may be left out.
        query: rows whose softmax counts, as for :func:`select_blocks`.

    Returns:
        float32 ``[B, Hkv, NB]``: softmax weights summed over the keys of a block, mean over rows and heads of the group.
    """
    run = block_mass_reference
    if q.is_cuda and availability.why_no_triton() is None:
        from spec_compile.kernels import block_mass_triton as kernel

        if kernel.why_not(q, k, mask, block_size, query) is None:
            run = kernel.block_mass_triton
    return run(q, k, mask, ids, count, gate, block_size, scale, query, softcap, sinks)


@block_mass.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor, ids: Tensor, count: Tensor, gate: Tensor, block_size: int, scale: float, query: str,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    torch._check(query in QUERIES, lambda: f"block_mass: query must be one of {QUERIES}, got {query!r}")
    return q.new_empty(q.shape[0], k.shape[1], ids.shape[2], dtype=torch.float32)


@torch.library.custom_op("spec_compile::attention_gathered_v1", mutates_args=())
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Lowering of :func:`attention` over a selection to a gather and PyTorch's SDPA, for CPU.

    ``live_ids`` and ``live_count`` are the blocks that were selected from: where all of them are listed, the call is
    :func:`attention_folded`. ``mask`` may be the result of :func:`fold_mask`.
    """
    return _attention_gathered(q, k, v, mask, ids, count, full, live_ids, live_count, block_size, scale, softcap, sinks)


@attention_gathered.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ids: Tensor, count: Tensor, full: Tensor | None, live_ids: Tensor,
    live_count: Tensor, block_size: int, scale: float, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check_attention(q, k, v, mask, sinks)
    return allocate_output(q, v.shape[3])


@torch.library.custom_op("spec_compile::linears_v1", mutates_args=())
def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Linear layers of one input: ``[x @ w.T + b for w, b in zip(weights, biases)]``, float32 accumulation.

    Args:
        x: ``[..., K]``.
        weights: up to 4, each ``[N, K]``, x's dtype.
        biases: ``[N]`` or None for each weight, or no elements at all, which compiled artefacts cannot hold.

    Returns:
        a contiguous ``[..., N]`` for each weight.
    """
    return _linears(x, weights, biases)


@linears.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@torch.library.custom_op("spec_compile::fold_mask_v1", mutates_args=())
def fold_mask(mask: Tensor, heads: int, kv_heads: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Mask of :func:`attention_folded`, made once for all layers: what SDPA would derive from it in every call.

    Args:
        mask: ``[B|1, 1|Hq, T|1, S]``, bool (becomes 0 and -inf of ``dtype``) or floating (kept as it is).
        heads, kv_heads: Hq and Hkv, G = Hq / Hkv.
        rows: T.
        dtype: q's.

    Returns:
        ``[B|1, 1|Hkv, G * T, S]``.
    """
    return _fold_mask(mask, heads, kv_heads, rows, dtype)


@fold_mask.register_fake
def _(mask: Tensor, heads: int, kv_heads: int, rows: int, dtype: torch.dtype) -> Tensor:
    folded_heads = 1 if mask.shape[1] == 1 else kv_heads
    folded_dtype = dtype if mask.dtype == torch.bool else mask.dtype
    return mask.new_empty(mask.shape[0], folded_heads, heads // kv_heads * rows, mask.shape[3], dtype=folded_dtype)


@torch.library.custom_op("spec_compile::dense_attention_v1", mutates_args=())
def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Marker that the optional model hooks emit: dense attention with un-repeated K and V.

    The detector turns it into :func:`live_blocks` and :func:`attention`; left alone it computes the same.
    """
    return _attention_folded(q, k, v, mask, None, None, None, DEFAULT_BLOCK_SIZE, scale, softcap, sinks)


@dense_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    _check_attention(q, k, v, mask, sinks)
    return allocate_output(q, v.shape[3])


@torch.library.custom_op("spec_compile::moe_experts_v1", mutates_args=())
def moe_experts(
    x: Tensor,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
    limit: float = 0.0,
    alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:
    """Experts of a mixture, on the rows that chose them: ``sum_k weight[n, k] * expert(choice[n, k])(x[n])``.

    An expert is ``down(act(gate(x)) * up(x))``. Sums are kept in float32 (float64 for float64), that over ``k`` in order.

    Args:
        x: ``[N, H]``, floating.
        choice: int32 or int64 ``[N, K]``; entries outside 0..E-1 add nothing, an expert chosen twice counts twice.
        weight: ``[N, K]``, any floating dtype.
        gate_up: ``[E, 2I, H]``, x's dtype, or ``[E, H, 2I]`` where ``transposed``; any strides with a contiguous last dim.
        down: ``[E, H, I]``, or ``[E, I, H]`` where ``transposed``.
        gate_up_bias, down_bias: ``[E, 2I]`` and ``[E, H]``, or None.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``relu`` of the gate, times up; or ``swiglu_oai`` (gpt-oss):
            ``(u + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.
        interleaved: gate and up rows alternate; otherwise the first I rows are gate's.
        up: the weight of up where it is a tensor of its own: ``gate_up`` is then that of the gate alone, both are ``[E, I, H]``
            (``[E, H, I]``), without ``gate_up_bias`` and not interleaved. Neither is copied.

    Returns:
        ``[N, H]`` in x's dtype. Experts that no row chose never reach it, NaN included.
    """
    _check_up(gate_up, up, gate_up_bias, interleaved)
    return _moe_experts(
        x, choice, weight, gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha, up
    )


def _check_up(gate: Tensor, up: Tensor | None, bias: Tensor | None, interleaved: bool) -> None:
    """With real operands too: the kernel takes strides and sizes of ``up`` from the gate."""
    if up is None:
        return
    alike = up.shape == gate.shape and up.dtype == gate.dtype and up.device == gate.device
    torch._check(
        alike,
        lambda: (
            f"moe_experts: up must be {tuple(gate.shape)} in {gate.dtype} on {gate.device}, as the gate is, "
            f"got {tuple(up.shape)} in {up.dtype} on {up.device}"
        ),
    )
    torch._check(bias is None and not interleaved, lambda: "moe_experts: with up given, no gate_up_bias and not interleaved")


@moe_experts.register_fake
def _(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    torch._check(x.dim() == choice.dim() == weight.dim() == 2, lambda: "moe_experts: x, choice and weight must be 2-D")
    torch._check(gate_up.dim() == down.dim() == 3, lambda: "moe_experts: gate_up and down must be 3-D")
    torch._check(choice.dtype in (torch.int32, torch.int64), lambda: f"moe_experts: choice must be integer, got {choice.dtype}")
    torch._check(choice.shape == weight.shape, lambda: "moe_experts: choice and weight must have one shape")
    torch._check(choice.shape[0] == x.shape[0], lambda: "moe_experts: choice must have a row for each of x")
    torch._check(activation in ACTIVATIONS, lambda: f"moe_experts: activation must be one of {ACTIVATIONS}, got {activation!r}")
    torch._check(
        x.dtype == gate_up.dtype == down.dtype,
        lambda: f"moe_experts: dtypes differ: {x.dtype}, {gate_up.dtype}, {down.dtype}",
    )
    experts, hidden = gate_up.shape[0], x.shape[1]
    inner = down.shape[1 if transposed else 2]
    _check_up(gate_up, up, gate_up_bias, interleaved)
    wide = inner if up is not None else 2 * inner
    wanted = (experts, hidden, wide) if transposed else (experts, wide, hidden)
    torch._check(gate_up.shape == wanted, lambda: f"moe_experts: gate_up must be {wanted}, got {tuple(gate_up.shape)}")
    wanted = (experts, inner, hidden) if transposed else (experts, hidden, inner)
    torch._check(down.shape == wanted, lambda: f"moe_experts: down must be {wanted}, got {tuple(down.shape)}")
    fits = all(b is None or b.shape == (experts, size) for b, size in ((gate_up_bias, 2 * inner), (down_bias, hidden)))
    torch._check(fits, lambda: f"moe_experts: biases must be {(experts, 2 * inner)} and {(experts, hidden)}")
    return x.new_empty(x.shape[0], hidden)


@torch.library.custom_op("spec_compile::moe_route_v1", mutates_args=())
def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    score: str,
    k: int,
    renormalise: bool,
    epsilon: float,
    scale: float,
    groups: int,
    kept_groups: int,
    order: str,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Which experts each row chooses, and their weights. Computed in float32 (float64 for float64).

    Args:
        logits: ``[N, E]``, floating.
        bias: ``[E]``, added for the choice and not for the weights (DeepSeek-V3), or None.
        score: ``softmax`` or ``sigmoid``.
        k: experts a row.
        renormalise: divide weights by their sum plus ``epsilon``.
        scale: multiplies weights at the end.
        groups, kept_groups: above 1, experts stand in ``groups`` of equal size, and only the ``kept_groups`` whose two best
            (biased) scores have the largest sum take part: others count as -inf, as in DeepSeek-V3 (arXiv 2412.19437).
        order: ``score_first``: the k best of the scores; ``topk_first``: the scores of the k best logits (gpt-oss).
        dtype: what weights are rounded to at the end; default float32 (float64).

    Returns:
        choice int64 ``[N, k]`` in descending order of what was compared, ties (among groups too) to the lowest expert, NaN
        above all, as in ``topk``; weight ``[N, k]``.
    """
    return _moe_route(logits, bias, score, k, renormalise, epsilon, scale, groups, kept_groups, order, dtype)


@moe_route.register_fake
def _(
    logits: Tensor, bias: Tensor | None, score: str, k: int, renormalise: bool, epsilon: float, scale: float, groups: int,
    kept_groups: int, order: str, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    torch._check(logits.dim() == 2, lambda: f"moe_route: logits must be [N, E], got {tuple(logits.shape)}")
    rows, experts = logits.shape
    torch._check(score in SCORES, lambda: f"moe_route: score must be one of {SCORES}, got {score!r}")
    torch._check(order in ORDERS, lambda: f"moe_route: order must be one of {ORDERS}, got {order!r}")
    torch._check(0 < k <= experts, lambda: f"moe_route: k must be 1..{experts}, got {k}")
    torch._check(bias is None or bias.shape == (experts,), lambda: f"moe_route: bias must be [{experts}]")
    if groups > 1:
        torch._check(
            experts % groups == 0 and experts // groups >= 2 and 0 < kept_groups <= groups,
            lambda: f"moe_route: {kept_groups} of {groups} groups of {experts} experts",
        )
    torch._check(dtype is None or dtype.is_floating_point, lambda: f"moe_route: weights cannot be {dtype}")
    return logits.new_empty(rows, k, dtype=torch.int64), logits.new_empty(rows, k, dtype=dtype or wide_dtype(logits.dtype))


@torch.library.custom_op("spec_compile::moe_limit_v1", mutates_args=())
def moe_limit(
    choice: Tensor,
    weight: Tensor,
    logits: Tensor | None,
    bias: Tensor | None,
    gate: Tensor,
    score: str,
    experts: int,
    top_k: int,
    skip: int,
    beta: float,
    ratio: float,
    expert_budget: int,
    substitute: bool,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """Take experts away from rows, by rules for each row and then by a budget for all rows together.

    A row's choices are ranked by weight, ties to the first. It keeps its top choice under every rule, and loses each choice that

    1. is not among its ``top_k`` best;
    2. is among its ``skip`` lowest, if these together hold less than ``beta`` of the row's weight: all of them go or none
       (arXiv 2512.21911; a median ``beta`` then drops ``skip / 2`` of them on average, about the paper's figures);
    3. weighs less than ``ratio`` times the top choice;
    4. names an expert outside the set of the step: the top choices of all rows, filled up to ``expert_budget`` experts with
       those whose kept weights sum to the most over all rows, ties to the lowest expert. Top choices alone may exceed the
       budget, nothing else does.

    Rules 1 to 3 look at the choices as given, rule 4 at what these keep. A rule is off where its number is 0. All rows vote:
    rows that are padding must not be handed in together with a budget.

    Args:
        choice: int32 or int64 ``[N, K]`` in any order; entries outside 0..E-1 are left as they are and have no part.
        weight: ``[N, K]``, any floating dtype, not negative. A row with a NaN weight has no vote.
        logits, bias: ``[N, E]`` and ``[E]`` of the router, to substitute by; otherwise ignored.
        gate: int64 ``[1]``; 0 gives back all choices.
        score: ``softmax`` or ``sigmoid``: weights are proportional, in each row, to this of the logits.
        experts: E.
        substitute: each choice that rule 4 takes is replaced, the heaviest first, by the best expert of the set that the row
            does not keep, by logits (score plus bias where there is one, groups aside). It gets the weight that the router
            would have given it. Choices for which none is left are dropped.
        renormalise: rows that changed are scaled to the sum they had.

    Returns:
        choice with -1 for what was dropped, and weight with 0; of a row that nothing was taken from, the bits it had.
    """
    return _moe_limit(
        choice, weight, logits, bias, gate, score, experts, top_k, skip, beta, ratio, expert_budget, substitute, renormalise
    )


@moe_limit.register_fake
def _(
    choice: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None, gate: Tensor, score: str, experts: int,
    top_k: int, skip: int, beta: float, ratio: float, expert_budget: int, substitute: bool, renormalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    torch._check(choice.dim() == 2, lambda: f"moe_limit: choice must be [N, K], got {tuple(choice.shape)}")
    torch._check(choice.dtype in (torch.int32, torch.int64), lambda: f"moe_limit: choice must be integer, got {choice.dtype}")
    torch._check(choice.shape == weight.shape, lambda: "moe_limit: choice and weight must have one shape")
    torch._check(weight.dtype.is_floating_point, lambda: f"moe_limit: weight must be floating, got {weight.dtype}")
    torch._check(gate.numel() == 1, lambda: "moe_limit: gate must be [1]")
    torch._check(score in SCORES, lambda: f"moe_limit: score must be one of {SCORES}, got {score!r}")
    torch._check(
        min(top_k, skip, beta, ratio, expert_budget) >= 0 and experts > 0, lambda: "moe_limit: numbers must not be negative"
    )
    if substitute:
        torch._check(expert_budget > 0, lambda: "moe_limit: substitute needs expert_budget")
        torch._check(
            logits is not None and logits.shape == (choice.shape[0], experts),
            lambda: f"moe_limit: to substitute, logits must be [N, {experts}]",
        )
    return torch.empty_like(choice, memory_format=torch.contiguous_format), torch.empty_like(
        weight, memory_format=torch.contiguous_format
    )


def _check_mlp(
    name: str, x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    torch._check(up.dim() == down.dim() == 2, lambda: f"{name}: weights must be 2-D")
    channels, hidden = up.shape
    torch._check(x.shape[-1] == hidden, lambda: f"{name}: x has {x.shape[-1]} columns, up {hidden}")
    torch._check(gate is None or gate.shape == up.shape, lambda: f"{name}: gate must be {tuple(up.shape)}")
    torch._check(down.shape[1] == channels, lambda: f"{name}: down must be [H, {channels}], got {tuple(down.shape)}")
    torch._check(gate is not None or gate_bias is None, lambda: f"{name}: gate_bias without gate")
    fits = all(
        b is None or b.shape == (size,) for b, size in ((gate_bias, channels), (up_bias, channels), (down_bias, down.shape[0]))
    )
    torch._check(fits, lambda: f"{name}: biases must be [{channels}], [{channels}] and [{down.shape[0]}]")
    torch._check(
        activation in MLP_ACTIVATIONS, lambda: f"{name}: activation must be one of {MLP_ACTIVATIONS}, got {activation!r}"
    )
    torch._check(
        all(w is None or w.dtype == x.dtype for w in (gate, up, down)), lambda: f"{name}: weights must have x's dtype {x.dtype}"
    )
    return x.new_empty(*x.shape[:-1], down.shape[0])


@torch.library.custom_op("spec_compile::mlp_v1", mutates_args=())
def mlp(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """A feed-forward layer: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where ``gate`` is None.

    Args:
        x: ``[..., H]``, floating.
        gate, up: ``[F, H]``, x's dtype, any strides.
        down: ``[H', F]``, any strides.
        gate_bias, up_bias, down_bias: ``[F]``, ``[F]`` and ``[H']``, or None.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` or ``relu2`` (its square).

    Returns:
        ``[..., H']``, contiguous, in x's dtype. The kernels keep sums and activations in float32.
    """
    return _mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation)


@mlp.register_fake
def _(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    return _check_mlp("mlp", x, gate, up, down, gate_bias, up_bias, down_bias, activation)


@torch.library.custom_op("spec_compile::mlp_sparse_v1", mutates_args=())
def mlp_sparse(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    switch: Tensor,
    threshold: float,
    keep: int,
    joint: bool,
) -> Tensor:
    """:func:`mlp` over the channels that matter to the rows of this step.

    The activation (of ``gate``, or of ``up`` where there is no gate) is computed for all F channels. Rows of ``up`` (behind a
    gate) and columns of ``down`` are read for channels that some row keeps. On CPU, where copying those takes longer than
    computing all from a tenth of the channels on, the others count as 0. Weights must be finite: a row that skips a channel which
    another row keeps may multiply its 0 by them.

    Args:
        x .. activation: as for :func:`mlp`.
        switch: int64 ``[1]``; 0 keeps every channel.
        threshold: a row drops channels whose activation is smaller in absolute value (arXiv 2512.21911); compared in float32
            by the kernels. 0 drops none.
        keep: where above 0, the ``threshold`` is ignored and all rows keep the ``keep`` channels with the largest sums of squared
            activations over the rows, ties to the lowest channel. All rows vote: rows that are padding must not be handed in.
        joint: a channel that one row keeps is kept by all: the same bytes, and closer to the exact result.

    Returns:
        as :func:`mlp`. With ``switch`` 0, and where all rows keep all channels, the bits of :func:`mlp` on CPU.
    """
    return _mlp_sparse(x, gate, up, down, gate_bias, up_bias, down_bias, activation, switch, threshold, keep, joint)


@mlp_sparse.register_fake
def _(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
) -> Tensor:  # fmt: skip
    torch._check(switch.numel() == 1, lambda: "mlp_sparse: switch must be [1]")
    torch._check(threshold >= 0, lambda: f"mlp_sparse: threshold must not be negative, got {threshold}")
    torch._check(0 <= keep <= up.shape[0], lambda: f"mlp_sparse: keep must lie in 0..{up.shape[0]}, got {keep}")
    return _check_mlp("mlp_sparse", x, gate, up, down, gate_bias, up_bias, down_bias, activation)
