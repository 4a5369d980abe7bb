"""PlanReuse: which layers stay dense, which select blocks, and which reuse another layer's selection.

Reuse across layers is the observation of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv
2512.21911, section 3.3) and of IndexCache; the plan uses the names of vLLM and TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import GraphModule, Node

from spec_compile.errors import PlanError
from spec_compile.kernels.providers import why_no_upkeep
from spec_compile.passes.attention_match import AttentionMatch
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, register_pass
from spec_compile.passes.cache_writes import first_row
from spec_compile.passes.layer_filter import FilterPlan, require_layers, why_left_out
from spec_compile.passes.nodes import alias_root, overlapping_inputs, perhaps_mutated, shape, tensor, writes_by_root


class ReusePlan(FilterPlan, Protocol):
    """The fields of ``spec_compile.AttentionPlan`` that are read here; passes do not import the compiler on top of them."""

    @property
    def index_topk_freq(self) -> int | None: ...
    @property
    def index_skip_topk_offset(self) -> int | None: ...
    @property
    def index_topk_pattern(self) -> str | None: ...
    @property
    def anchors(self) -> tuple[int, ...] | None: ...


@register_pass("plan_reuse", Stage.PLAN)
class PlanReuse(Pass):
    """Give every attention its role under the plan; later passes act on it."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        if ctx.sparsity is None:
            return report
        writes = writes_by_root(gm.graph)
        kinds, calls = [], iter(ctx.emitted)
        for ordinal, found in enumerate(ctx.attentions):
            refused = found if isinstance(found, Rejection) else why_dense(found, next(calls), writes, ctx.batch_varies)
            name = found.layer or f"attention {ordinal}"
            if refused is None:
                kinds.append(LayerKind(name, _geometry(found)))
                continue
            kinds.append(LayerKind(name, None, refused.reason))
            if refused is not found:
                report.rejections.append(Rejection(refused.reason, refused.node, found.layer, refused.source))
        ctx.roles = assign_roles(ctx.sparsity, kinds)
        sparse = [role.kind for role in ctx.roles if role.kind != "dense"]
        report.hits = len(sparse)
        report.notes = [f"{count} {kind}" for kind in ("anchor", "follower") if (count := sparse.count(kind))]
        return report


def _geometry(match: AttentionMatch) -> Hashable:
    terms = tuple((term.node, term.kind, term.rank) for term in match.terms)
    return match.key.kv_heads, str(match.key.kv_len), terms


def why_dense(match: AttentionMatch, node: Node, writes: dict[Node, list[Node]], batch_varies: bool = False) -> Rejection | None:
    """Reason why a proven attention, now the call ``node``, cannot read a selection of its blocks, or None."""
    key = match.key
    if key.kind != "static":
        return Rejection(f"block selection needs a static cache, this one is {key.kind}: use spec_compile.VerifyCache", node.name)
    if key.storage.op != "placeholder" or len(shape(key.storage)) != 4:
        return Rejection("the K cache is part of a larger tensor, or held by the graph: it cannot be summarized", node.name)
    fixed = [size for axis, size in enumerate(shape(key.storage)) if not batch_varies or axis != key.order[0]]
    if not all(isinstance(size, int) for size in fixed):
        return Rejection("the length or batch of the cache is symbolic: use one cache length", node.name)
    held = tensor(node.args[1])
    missing = why_no_upkeep(held) if held is not None else None
    if missing is not None:
        return Rejection(missing, node.name)
    if not match.terms:
        return Rejection("no mask: which blocks hold tokens is unknown", node.name)
    for term in match.terms:
        if term.kind == "add" and _per_head(shape(term.node), term.rank):
            return Rejection("a bias per head (ALiBi) is added to the scores, which block scores would not see", term.node.name)
    names = {key.storage, *overlapping_inputs(node.graph).get(key.storage, ())}
    for call in node.graph.nodes:
        if any(alias_root(given) in names for given in perhaps_mutated(call)):
            return Rejection(f"{call.name} may write the K cache, which its summary would not see", call.name)
    found = first_row(match, node, writes)
    return found if isinstance(found, Rejection) else None


def _per_head(sizes: tuple[Any, ...], rank: int) -> bool:
    """Whether a term of ``sizes`` differs between heads of scores of ``rank`` dimensions."""
    lead = ((1,) * rank + sizes)[-rank:-2]
    return any(size != 1 for size in (lead if rank == 3 else lead[1:]))


@dataclass(frozen=True)
class LayerKind:
    """An attention layer as far as reuse is concerned.

    Attributes:
        name: for messages.
        geometry: what must agree before a selection may be shared: KV heads, cache length, mask.
        refusal: why the layer cannot be sparse, whatever the plan says.
    """

    name: str
    geometry: Hashable
    refusal: str = ""


@dataclass(frozen=True)
class Role:
    """``dense``, ``anchor`` (selects) or ``follower`` (reuses the selection of layer ``anchor``)."""

    kind: str
    anchor: int | None = None
    note: str = ""


def assign_roles(plan: ReusePlan, layers: Sequence[LayerKind]) -> list[Role]:
    """Role of every attention layer, in graph order.

    A layer is sparse if it can be, is not excluded, is included where a list says so, and is not among the first
    ``dense_first``. Of the sparse ones ``index_topk_pattern`` (one letter
    a layer, F selects, S shares), ``anchors``, or ``index_topk_freq`` f with ``index_skip_topk_offset`` o (layer i where
    ``max(i - o + 1, 0) % f == 0``, o = 1 if not given) name those that select; without any of them all do.
    A layer that should follow selects itself where no earlier selection fits its geometry; its note says so.

    Raises:
        PlanError: the plan names a layer that the graph does not have, a pattern of another length, or an anchor that is dense.
    """
    total = len(layers)
    require_layers(plan, "attention", ("anchors", "include", "exclude"), "attention", total)
    pattern = plan.index_topk_pattern
    if pattern is not None and len(pattern) != total:
        missing = f"layer {len(pattern)} has no letter" if len(pattern) < total else f"layer {total} does not exist"
        raise PlanError(f"plan.attention.index_topk_pattern: {len(pattern)} letters for {total} attention layers: {missing}")
    roles: list[Role] = []
    latest: dict[Hashable, int] = {}
    for index, layer in enumerate(layers):
        dense = layer.refusal or why_left_out(plan, index)
        if dense:
            if index in (plan.anchors or ()):
                raise PlanError(f"plan.attention.anchors: layer {index} ({layer.name}) cannot select, it stays dense: {dense}")
            roles.append(Role("dense", note=dense))
            continue
        fitting = latest.get(layer.geometry)
        if _selects(plan, index):
            roles.append(Role("anchor"))
        elif fitting is None:
            reason = (
                "the first sparse layer selects" if not latest else "no earlier selection has its KV heads, cache length and mask"
            )
            roles.append(Role("anchor", note=reason))
        else:
            roles.append(Role("follower", fitting))
            continue
        latest[layer.geometry] = index
    return roles


def _selects(plan: ReusePlan, index: int) -> bool:
    if plan.index_topk_pattern is not None:
        return plan.index_topk_pattern[index] == "F"
    if plan.anchors is not None:
        return index in plan.anchors
    offset = 1 if plan.index_skip_topk_offset is None else plan.index_skip_topk_offset
    return max(index - offset + 1, 0) % (plan.index_topk_freq or 1) == 0
