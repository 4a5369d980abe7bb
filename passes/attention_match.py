"""Match one attention: from an anchor (SDPA, softmax, or the hooks' marker) to proven operands, or a reason.

Matching changes no node; it may pin symbolic head counts, and lengths that must agree, which records guards. RoPE, qk-norm and
projections stay outside the region; what is matched is exactly ``softmax(scale * q k^T [softcap] + mask) v`` with K and V read,
un-repeated, from a cache this forward writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.passes.base import PassContext, Rejection
from spec_compile.passes.cache_reads import CacheOperand, read_cache
from spec_compile.passes.nodes import (
    alias_root,
    argument,
    aten,
    hint,
    is_call,
    layer_name,
    mutated_arguments,
    overlapping_inputs,
    packet,
    perhaps_mutated,
    same,
    same_or_guarded,
    scalar,
    shape,
    source_line,
    specialize,
    tensor,
)
from spec_compile.passes.scores import MaskTerm, ScoreChain, is_attention_softmax, walk_scores


@dataclass(frozen=True)
class AttentionMatch:
    """A proven attention.

    Attributes:
        anchor: the node detection started from.
        kind: ``sdpa``, ``softmax`` or ``marker``.
        output: the node whose value the rewritten attention takes over.
        query: node of q, ``[*lead, T, D]``.
        key, value: cache operands.
        terms: masks and biases, innermost last.
        scale, softcap, sinks: as in :func:`spec_compile.kernels.library.attention`.
        heads, q_len: query heads and draft rows.
        region: nodes that go away.
        layer: module path, if known.
    """

    anchor: Node
    kind: str
    output: Node
    query: Node
    key: CacheOperand
    value: CacheOperand
    terms: tuple[MaskTerm, ...]
    scale: float
    softcap: float
    sinks: Node | None
    heads: int
    q_len: Any
    region: tuple[Node, ...]
    layer: str | None


def _marker_packet() -> Any:
    return torch.ops.spec_compile.dense_attention_v1


def find_anchors(graph: Graph) -> list[tuple[Node, str]]:
    """Every attention of the graph as ``(node, kind)``, in graph order."""
    found = []
    for node in graph.nodes:
        if is_call(node, aten.scaled_dot_product_attention):
            found.append((node, "sdpa"))
        elif is_call(node, _marker_packet()):
            found.append((node, "marker"))
        elif is_attention_softmax(node):
            found.append((node, "softmax"))
    return found


def match_attention(anchor: Node, kind: str, writes: dict[Node, list[Node]], ctx: PassContext) -> AttentionMatch | Rejection:
    """Prove the attention around ``anchor``; a :class:`Rejection` carries layer and source line."""
    found = _match(anchor, kind, writes, ctx)
    if isinstance(found, Rejection):
        return Rejection(found.reason, found.node, layer_name(anchor), source_line(anchor))
    return found


def _match(anchor: Node, kind: str, writes: dict[Node, list[Node]], ctx: PassContext) -> AttentionMatch | Rejection:
    inside = _inside_autocast(anchor)
    if inside is not None:
        return inside
    found = _from_softmax(anchor, writes) if kind == "softmax" else _from_call(anchor, kind, writes)
    if isinstance(found, Rejection):
        return found
    for check in (_check_operands, _check_terms, _check_lengths, _check_closed, _check_order):
        problem = check(found, ctx, writes)
        if problem is not None:
            return problem
    return found


def _reject(node: Node, reason: str) -> Rejection:
    return Rejection(reason, node.name)


def _inside_autocast(anchor: Node) -> Rejection | None:
    depth = 0
    for node in anchor.graph.nodes:
        if node is anchor:
            break
        name = getattr(node.target, "__name__", "")
        depth += (name == "_enter_autocast") - (name == "_exit_autocast")
    return _reject(anchor, "inside an autocast region that opens within the graph") if depth > 0 else None


def _from_call(anchor: Node, kind: str, writes: dict[Node, list[Node]]) -> AttentionMatch | Rejection:
    """SDPA and the hooks' marker name their operands."""
    q, k, v = anchor.args[:3]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    mask = argument(anchor, "attn_mask" if kind == "sdpa" else "mask")
    if len(shape(q)) == len(shape(k)) == len(shape(v)) == 4:
        specialize(shape(q)[1], shape(q)[3], shape(k)[1], shape(v)[3])
    if len(shape(q)) != 4:
        return _reject(anchor, f"q has {len(shape(q))} dimensions; [B, H, T, D] is supported")
    gqa = False
    if kind == "sdpa":
        if argument(anchor, "dropout_p", 0.0):
            return _reject(anchor, "dropout is active (dropout_p > 0); call model.eval()")
        rows, keys = shape(q)[-2], shape(k)[-2]
        if argument(anchor, "is_causal", False) and not same(rows, 1):
            return _reject(
                anchor,
                f"is_causal=True with q_len {rows} and kv_len {keys}: PyTorch aligns that mask to the top left, "
                "which is not what a verify forward needs; pass an explicit mask",
            )
        if argument(anchor, "is_causal", False):
            return _reject(anchor, "is_causal=True with one row sees only the first key; pass an explicit mask")
        gqa = bool(argument(anchor, "enable_gqa", False))
    heads = shape(q)[1]
    grouped = heads if gqa or kind == "marker" else 0
    lead = shape(q)[:2] if not grouped else shape(k)[:2]
    if grouped and same(shape(k)[1], heads):
        grouped, lead = 0, shape(q)[:2]
    key = read_cache(k, writes, lead, False, "K", grouped)
    if isinstance(key, Rejection):
        return key
    value = read_cache(v, writes, lead, False, "V", grouped)
    if isinstance(value, Rejection):
        return value
    dim = shape(q)[-1]
    given = argument(anchor, "scale")
    if given is None:
        given = dim**-0.5 if isinstance(dim, int) else None
    if scalar(given) is None:
        return _reject(anchor, "the scale is not a constant")
    terms: tuple[MaskTerm, ...] = ()
    if isinstance(mask, Node):
        found = tensor(mask)
        is_bool = found is not None and not found.dtype.is_floating_point
        terms = (MaskTerm(mask, "keep" if is_bool else "add", 4),)
    softcap = float(argument(anchor, "softcap", 0.0)) if kind == "marker" else 0.0
    sinks = argument(anchor, "sinks") if kind == "marker" else None
    return AttentionMatch(
        anchor, kind, anchor, q, key, value, terms, float(given), softcap, sinks, heads, shape(q)[-2],
        (anchor,), layer_name(anchor),
    )  # fmt: skip


def _from_softmax(anchor: Node, writes: dict[Node, list[Node]]) -> AttentionMatch | Rejection:
    chain = walk_scores(anchor)
    if isinstance(chain, Rejection):
        return chain
    return _from_chain(anchor, chain, writes)


def _from_chain(anchor: Node, chain: ScoreChain, writes: dict[Node, list[Node]]) -> AttentionMatch | Rejection:
    assert chain.output is not None and chain.values is not None and chain.weights is not None
    specialize(*shape(chain.product)[1:-2], shape(chain.query)[-1], shape(chain.values)[-1])
    score_lead, rows = shape(chain.product)[:-2], shape(chain.product)[-2]
    out_lead = shape(chain.output)[:-2]
    if len(score_lead) not in (1, 2, 3) or len(out_lead) not in (1, 2, 3):
        return _reject(chain.product, f"scores with {len(score_lead) + 2} dimensions")
    if not _equal(shape(chain.query)[:-2], score_lead):
        return _reject(chain.product, "q is broadcast over batch or heads")
    key = read_cache(chain.key, writes, score_lead, True, "K")
    if isinstance(key, Rejection):
        return key
    value = read_cache(chain.values, writes, out_lead, False, "V")
    if isinstance(value, Rejection):
        return value
    if not isinstance(key.kv_heads, int):
        return _reject(chain.product, "the number of KV heads is symbolic")
    heads = key.kv_heads * key.group
    if len(score_lead) == 3 and not (same(score_lead[1], key.kv_heads) and same(score_lead[2], key.group)):
        return _reject(chain.product, "5-D scores that are not [B, Hkv, G, T, S]")
    if len(score_lead) == 2 and not same(score_lead[1], heads):
        return _reject(chain.product, "the second axis of the scores is not the query heads")
    for lead in (out_lead, *(term.lead for term in chain.terms)):
        if not _is_heads(lead, key):
            return _reject(chain.product, "the scores or weights are regrouped to axes that are not batch and heads")
    return AttentionMatch(
        anchor, "softmax", chain.output, chain.query, key, value, tuple(chain.terms), chain.scale, chain.softcap,
        chain.sinks, heads, rows, tuple(dict.fromkeys([*chain.region, chain.output])), layer_name(anchor),
    )  # fmt: skip


def _is_heads(lead: tuple[Any, ...], key: CacheOperand) -> bool:
    """Whether leading axes are ``[B * Hq]``, ``[B, Hq]`` or ``[B, Hkv, G]`` (or unknown)."""
    if len(lead) == 3:
        return same(lead[1], key.kv_heads) and same(lead[2], key.group)
    return len(lead) != 2 or same(lead[1], key.kv_heads * key.group)


def _equal(a: Iterable[Any], b: Iterable[Any]) -> bool:
    left, right = list(a), list(b)
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right))


def _check_operands(match: AttentionMatch, ctx: PassContext, writes: Any) -> Rejection | None:
    key, value = match.key, match.value
    if key.kv_heads != value.kv_heads or key.group != value.group or not same_or_guarded(key.kv_len, value.kv_len):
        return _reject(match.anchor, "K and V differ in KV heads or length")
    if not isinstance(match.heads, int) or match.heads != key.kv_heads * key.group:
        return _reject(match.anchor, f"{match.heads} query heads over {key.kv_heads} KV heads repeated {key.group} times")
    out, q = tensor(match.output), tensor(match.query)
    k, v = tensor(key.base), tensor(value.base)
    assert out is not None and q is not None and k is not None and v is not None
    if k.dtype != out.dtype or v.dtype != out.dtype:
        return _reject(match.anchor, f"the cache is {k.dtype}, attention computes in {out.dtype} (autocast or an upcast)")
    for node in match.region:
        given = tensor(node)
        if given is not None and _loses(given.dtype, out.dtype):
            return _reject(node, f"scores or weights are rounded to {given.dtype} in an attention in {out.dtype}")
    lead = math.prod(shape(match.query)[:-2])
    for cache, operand in ((k, key), (v, value)):
        if not same_or_guarded(lead, cache.shape[operand.order[0]] * match.heads):
            return _reject(match.anchor, "q is broadcast over batch or heads")
    if not (q.device == k.device == v.device):
        return _reject(match.anchor, f"q is on {q.device}, the cache on {k.device}")
    if match.sinks is not None and len(shape(match.sinks)) != 1:
        return _reject(match.anchor, "the sink logits are not one value per head")
    if ctx.need_static_cache and "growing" in (key.kind, value.kind):
        return _reject(
            key.base, "the cache grows by cat (DynamicCache), a static one is needed here: use spec_compile.VerifyCache"
        )
    return None


def _loses(dtype: torch.dtype, operand: torch.dtype) -> bool:
    """Whether values rounded to ``dtype`` keep less of precision or range than the operands have; the kernel rounds nothing."""
    if not (dtype.is_floating_point and operand.is_floating_point):
        return False
    return torch.finfo(dtype).eps > torch.finfo(operand).eps or torch.finfo(dtype).max < torch.finfo(operand).max


def _check_terms(match: AttentionMatch, ctx: PassContext, writes: Any) -> Rejection | None:
    for term in match.terms:
        sizes = shape(term.node)
        if not sizes or not same_or_guarded(sizes[-1], match.key.kv_len):
            return _reject(term.node, "a mask or bias does not have one value per key")
    return None


def _check_lengths(match: AttentionMatch, ctx: PassContext, writes: Any) -> Rejection | None:
    rows, keys = hint(match.q_len), hint(match.key.kv_len)
    if rows is None or keys is None:
        return _reject(match.anchor, "q_len or kv_len depends on data")
    if not 1 <= rows <= ctx.max_q_len:
        return _reject(match.anchor, f"q_len {rows} is outside 1..{ctx.max_q_len} (max_q_len)")
    if keys <= rows:
        return _reject(match.anchor, f"kv_len {keys} is not longer than q_len {rows}: no cache behind the drafts")
    return None


def _check_closed(match: AttentionMatch, ctx: PassContext, writes: Any) -> Rejection | None:
    inside = set(match.region)
    for node in match.region:
        if node is match.output:
            continue
        outside = [user for user in node.users if user not in inside]
        if outside:
            return _reject(node, f"{node.name} is also used by {outside[0].name}, outside the attention region")
    return None


def _check_order(match: AttentionMatch, ctx: PassContext, writes: Any) -> Rejection | None:
    """No operand may be overwritten between the first read of the region and the place of the rewritten op.

    A higher-order call (a Triton kernel, say) does not tell what it writes: it counts as a write to all that it is given.
    """
    operands = [match.query, match.key.base, match.value.base, *(term.node for term in match.terms)]
    operands += [match.sinks] if match.sinks is not None else []
    roots = {alias_root(node) for node in operands}
    sharing = overlapping_inputs(match.output.graph)
    roots.update(other for root in list(roots) for other in sharing.get(root, ()))
    # repeat_kv copies the cache: a write after that copy is seen by the rewritten op but not by the source.
    first, last = min([*match.region, *match.key.path, *match.value.path]), match.output
    node = first
    while node is not last:
        if any(alias_root(written) in roots for written in mutated_arguments(node)):
            return _reject(node, f"{packet(node)} writes an operand between the scores and the output")
        if any(alias_root(given) in roots for given in perhaps_mutated(node)):
            return _reject(node, f"{node.name} may write an operand that it is given between the scores and the output")
        node = node.next
    return None


def check_shared_outputs(matches: list[AttentionMatch]) -> None:
    """Two anchors can never claim the same node; a defect of ours if they do."""
    seen: set[Node] = set()
    for match in matches:
        assert not seen & set(match.region), f"{match.anchor.name} overlaps another attention"
        seen |= set(match.region)
