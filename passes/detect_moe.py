"""DetectMoe: the experts of each MoE layer become one call, and so does the router in front of them where it is proven.

Before::

    w, e = topk(softmax(logits), 2); w /= w.sum(-1, keepdim=True)
    h = bmm(gate_up[e.reshape(-1)], x.repeat_interleave(2, 0)[..., None])        (or sorted by expert, _grouped_mm)
    y = bmm(down[e.reshape(-1)], (silu(h[..., :I]) * h[..., I:])[..., None])
    (y * w.reshape(-1, 1)).view(N, 2, H).sum(1)

After::

    e, w = spec_compile.moe_route(logits, None, "softmax", 2, True, 0.0, 1.0, 1, 1, "score_first")
    spec_compile.moe_experts(x, e, w, gate_up, down, None, None, "silu", False, False)

Each expert that was chosen is then read once, whatever the number of rows. Where gate and up are two products over two stacks,
as in gpt-fast, the call takes the gate's in place of ``gate_up`` and up's as its last argument. Matching lives in
``moe_experts_match`` and ``moe_route_match``; this file only emits. Shared experts are ordinary layers and stay outside.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from spec_compile.kernels import moe
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, erase_unused, register_pass
from spec_compile.passes.emit import Emitter
from spec_compile.passes.expert_pairs import ROUTE
from spec_compile.passes.moe_experts_match import EXPERTS, ExpertsMatch, find_experts, match_experts
from spec_compile.passes.moe_route_match import RouteMatch, match_route
from spec_compile.passes.nodes import ancestors, aten, fake_mode, mutated_arguments, shape, source_line, tensor
from spec_compile.passes.regions import storage, why_untraceable, writes_by_storage


@dataclass(frozen=True)
class MoeFound:
    """One MoE layer whose experts were proven, and its router: proven as well, or why not.

    ``kept`` is the reason why a proven router stays as it was traced, "" where it was rewritten.
    """

    experts: ExpertsMatch
    route: RouteMatch | Rejection
    kept: str = ""


@register_pass("detect_moe", Stage.DETECT)
class DetectMoe(Pass):
    """Collapse the experts of each MoE layer, and its router, into one call each."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        anchors, products = find_experts(gm.graph)
        writes = writes_by_storage(gm.graph) if anchors else {}
        untraceable = why_untraceable(gm.graph) if anchors else None
        routers = 0
        for anchor in anchors:
            # One after the other: the output of one layer may be the input of the next.
            experts = match_experts(anchor, products, writes, untraceable)
            if isinstance(experts, ExpertsMatch):
                experts = _unless_slow(experts, ctx)
            if isinstance(experts, Rejection):
                report.rejections.append(experts)
                ctx.moes.append(experts)
                continue
            ctx.moe_calls.append(_replace_experts(experts, writes, ctx))
            route = match_route(experts, writes)
            kept = _why_kept(route, ctx) if isinstance(route, RouteMatch) else ""
            if isinstance(route, RouteMatch) and not kept:
                _replace_route(route, writes, ctx)
                routers += 1
            ctx.moes.append(MoeFound(experts, route, kept))
            report.hits += 1
        if report.hits:
            report.notes.append(f"routers {routers} of {report.hits}")
        return report


def _on_gpu(x: torch.Tensor) -> bool:
    return x.device.type == "cuda"


def _unless_slow(match: ExpertsMatch, ctx: PassContext) -> ExpertsMatch | Rejection:
    """On a GPU without the kernel the operator would run every expert on every row: leave such layers alone."""
    x, gate_up, down = tensor(match.x), tensor(match.gate_up), tensor(match.down)
    assert x is not None and gate_up is not None and down is not None
    if not _on_gpu(x) or ctx.lowering == "reference" or match.form == "marker":
        return match
    with fake_mode(x):
        # An export may ask nothing of its rows: its operator takes many in turns.
        x = x.new_empty(1, x.shape[1]) if ctx.one_graph else x
        choice = x.new_empty(x.shape[0], match.top_k, dtype=torch.int64)
    # Where the number of rows is symbolic, asking whether they are few enough installs the guard that keeps them so.
    reason = moe.why_no_experts_kernel(
        x, choice, gate_up, down, tensor(match.gate_up_bias), tensor(match.down_bias), tensor(match.up)
    )
    if reason is None:
        return match
    return Rejection(
        f"the kernel for experts does not take this: {reason}", match.anchor.name, match.layer, source_line(match.anchor)
    )


def _why_kept(match: RouteMatch, ctx: PassContext) -> str:
    """Ties: ``moe_route`` takes the lowest expert, as top-k does on CUDA; on CPU top-k has an order of its own."""
    logits = tensor(match.logits)
    assert logits is not None
    if ctx.lowering == "reference":
        return ""
    if not _on_gpu(logits):
        return "top-k breaks ties in an order of its own on CPU"
    return moe.why_no_route_kernel(logits, match.k) or ""


def _replace_experts(match: ExpertsMatch, writes: dict[Node, list[Node]], ctx: PassContext) -> Node:
    if match.form == "marker":
        match.anchor.args = (*match.anchor.args[:10], match.limit, match.alpha, match.up)
        match.anchor.kwargs = {}
        return match.anchor
    emit = Emitter(match.output)
    result = emit.call(
        EXPERTS.default, match.x, _two_d(emit, match.choice), _two_d(emit, match.weight), match.gate_up, match.down,
        match.gate_up_bias, match.down_bias, match.activation, match.interleaved, match.transposed, match.limit, match.alpha,
        match.up,
    )  # fmt: skip
    upstream = list(ancestors(match.output, 96))
    _take_over(match.output, result, writes)
    _erase(match.region, writes, ctx)
    erase_unused([node for node in upstream if node not in match.region])
    return result


def _two_d(emit: Emitter, node: Node) -> Node:
    """``[..., K]`` to ``[N, K]``."""
    if len(shape(node)) == 2:
        return node
    return emit.call(aten.reshape.default, node, [-1, shape(node)[-1]])


def _replace_route(match: RouteMatch, writes: dict[Node, list[Node]], ctx: PassContext) -> None:
    emit = Emitter(min(match.choice, match.weight))
    wanted = tensor(match.weight)
    assert wanted is not None
    routed = emit.call(
        ROUTE.default, match.logits, match.bias, match.score, match.k, match.renormalise, match.epsilon, match.scale,
        match.groups, match.kept_groups, match.order, wanted.dtype,
    )  # fmt: skip
    choice, weight = (emit.call(operator.getitem, routed, place) for place in (0, 1))
    _take_over(match.choice, choice, writes)
    _take_over(match.weight, weight, writes)
    _erase(match.region, writes, ctx)


def _take_over(old: Node, new: Node, writes: dict[Node, list[Node]]) -> None:
    """``new`` is read, and written, where ``old`` was."""
    found = writes.get(storage(old), [])
    later = [node for node in found if old < node]
    if later:
        writes[storage(old)] = [node for node in found if node <= old]
        writes[storage(new)] = sorted({*writes.get(storage(new), ()), *later})
    old.replace_all_uses_with(new)


def _erase(region: tuple[Node, ...], writes: dict[Node, list[Node]], ctx: PassContext) -> None:
    """Erase a proven region, its writes to its own values included."""
    for node in sorted(region, reverse=True):
        for written in mutated_arguments(node):
            writes[storage(written)].remove(node)  # later layers ask what is written between their own nodes
            ctx.released.add(node.name)
        node.graph.erase_node(node)
