"""DetectAttention: each proven attention becomes ``live_blocks`` and ``attention``, which compute the same.

Before::

    k = index_copy_(k_cache, 2, pos, k_new)                       q (after RoPE)     mask
    sdpa(q, reshape(expand(unsqueeze(k, 2))), reshape(expand(unsqueeze(v, 2))), mask, scale=s)

After::

    ids, count, full = spec_compile.live_blocks(mask, 64)
    spec_compile.attention(q, k, v, mask, ids, count, full, 64, s)

Matching lives in ``attention_match``, ``scores``, ``cache_reads`` and ``axes``; this file only emits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.passes.attention_match import AttentionMatch, check_shared_outputs, find_anchors, match_attention
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, erase_unused, register_pass
from spec_compile.passes.cache_reads import CacheOperand
from spec_compile.passes.emit import Emitter
from spec_compile.passes.nodes import ancestors, aten, hint, same, shape, tensor, writes_by_root
from spec_compile.passes.scores import MaskTerm


@register_pass("detect_attention", Stage.DETECT)
class DetectAttention(Pass):
    """Collapse each attention core into one ``spec_compile.attention`` call."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        writes = writes_by_root(gm.graph)
        matches: list[AttentionMatch] = []
        for node, kind in find_anchors(gm.graph):
            # One after the other: the output of one attention may be the query or the mask of the next.
            found = match_attention(node, kind, writes, ctx)
            ctx.attentions.append(found)
            if isinstance(found, Rejection):
                report.rejections.append(found)
                continue
            matches.append(found)
            check_shared_outputs(matches)
            ctx.emitted.append(_replace(found, ctx.block_size))
            report.hits += 1
        return report


def _replace(match: AttentionMatch, block_size: int) -> Node:
    emit = Emitter(match.output)
    out = tensor(match.output)
    assert out is not None
    query = _query(emit, match)
    if query.meta["val"].dtype != out.dtype:
        query = emit.call(aten.to.dtype, query, out.dtype)
    mask = _mask(emit, match, out.dtype)
    blocks: tuple[Node | None, ...] = (None, None, None)
    if mask is not None:
        listed = emit.call(torch.ops.spec_compile.live_blocks_v2.default, mask, block_size)
        blocks = tuple(emit.call(operator.getitem, listed, i) for i in range(3))
    result = emit.call(
        torch.ops.spec_compile.attention_v1.default, query, _cache(emit, match.key), _cache(emit, match.value), mask,
        *blocks, block_size, match.scale, match.softcap, match.sinks,
    )  # fmt: skip
    call, result = result, _restore_layout(emit, result, match)
    upstream = list(ancestors(match.output, 96))
    match.output.replace_all_uses_with(result)
    erase_unused(upstream, proven=match.region)
    return call


def _query(emit: Emitter, match: AttentionMatch) -> Node:
    """q as ``[B, Hq, T, D]``, whatever leading dimensions the model's product had."""
    rank = len(shape(match.query))
    if rank == 3:
        return emit.call(aten.unflatten.int, match.query, 0, [-1, match.heads])
    if rank == 5:
        return emit.call(aten.flatten.using_ints, match.query, 1, 2)
    return match.query


def _cache(emit: Emitter, operand: CacheOperand) -> Node:
    if operand.order == (0, 1, 2, 3):
        return operand.base
    return emit.call(aten.permute.default, operand.base, list(operand.order))


def _mask(emit: Emitter, match: AttentionMatch, dtype: torch.dtype) -> Node | None:
    """One mask operand ``[B|1, 1|Hq, T|1, S]``: bool if every term is, else additive with -inf where hidden."""
    bools: list[Node] = []
    biases: list[Node] = []
    for term in match.terms:
        node = _four_d(emit, term, match)
        if term.kind == "hide":
            node = emit.call(aten.logical_not.default, node)
        (biases if term.kind == "add" else bools).append(node)
    keep, bias = _fold(emit, bools, aten.logical_and.default), _fold(emit, biases, aten.add.Tensor)
    if bias is None or keep is None:
        return bias if keep is None else keep
    hidden = emit.call(aten.scalar_tensor.default, float("-inf"))
    hidden = emit.call(aten.to.device, hidden, bias.meta["val"].device, bias.meta["val"].dtype)
    return emit.call(aten.where.self, keep, bias, hidden)


def _fold(emit: Emitter, nodes: list[Node], target: Any) -> Node | None:
    result: Node | None = None
    for node in nodes:
        result = node if result is None else emit.call(target, result, node)
    return result


def _four_d(emit: Emitter, term: MaskTerm, match: AttentionMatch) -> Node:
    """Bring a term that broadcasts against scores of ``term.rank`` dimensions to four dimensions."""
    node = term.node
    while len(shape(node)) < term.rank:
        node = emit.call(aten.unsqueeze.default, node, 0)
    sizes = shape(node)
    if term.rank == 3:
        if same(sizes[0], 1):
            return emit.call(aten.unsqueeze.default, node, 0)
        return emit.call(aten.unflatten.int, node, 0, [-1, match.heads])
    if term.rank == 5:
        if same(sizes[1], 1) and same(sizes[2], 1):
            return emit.call(aten.squeeze.dim, node, 1)
        node = emit.call(aten.expand.default, node, [-1, match.key.kv_heads, match.key.group, -1, -1])
        return emit.call(aten.flatten.using_ints, node, 1, 2)
    return node


def _restore_layout(emit: Emitter, result: Node, match: AttentionMatch) -> Node:
    """Give the result the shape, dtype and strides of the value it takes over: later views were traced against those."""
    out = tensor(match.output)
    assert out is not None
    rank = out.dim()
    if rank == 3:
        result = emit.call(aten.flatten.using_ints, result, 0, 1)
    elif rank == 5:
        result = emit.call(aten.unflatten.int, result, 1, [match.key.kv_heads, match.key.group])
    if not _same_strides(result.meta["val"], out):
        if out.is_contiguous():
            result = emit.call(aten.clone.default, result)
            result.kwargs = {"memory_format": torch.contiguous_format}
            result.meta["val"] = result.meta["val"].contiguous()
        else:
            order = sorted(range(rank), key=lambda d: -(hint(out.stride(d)) or 0))
            inverse = [order.index(d) for d in range(rank)]
            result = emit.call(aten.permute.default, result, order)
            result = emit.call(aten.contiguous.default, result)
            result = emit.call(aten.permute.default, result, inverse)
    return result


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(same(size, 1) or same(x, y) for size, x, y in zip(b.shape, a.stride(), b.stride()))
