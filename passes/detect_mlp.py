"""DetectMlp: feed-forward layers become one call where that pays, and where a plan is to skip channels of them.

Before::

    linear(silu(linear(x, gate)) * linear(x, up), down)

After::

    spec_compile.mlp(x, gate, up, down, None, None, None, "silu")

All layers are found and reported; linear calls that cuBLAS serves well stay as they are, bit for bit. Matching lives in
``mlp_match``; this file only emits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.kernels import availability, library
from spec_compile.kernels.mlp import rows_of, why_no_mlp_kernel, why_not_faster
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, register_pass
from spec_compile.passes.check_rewrite import RewriteDefect, same_tensor
from spec_compile.passes.emit import Emitter
from spec_compile.passes.mlp_match import MlpMatch, Projection, find_mlps, match_mlp
from spec_compile.passes.nodes import aten, hint, mutated_arguments, shape, source_line, tensor
from spec_compile.passes.plan_mlp import assign_channels
from spec_compile.passes.regions import storage, why_untraceable, writes_by_storage

assert library.mlp is not None  # importing it registers the operators
MLP = torch.ops.spec_compile.mlp_v1.default


@dataclass(frozen=True)
class MlpFound:
    """A proven layer, and why its linear calls stay as they were traced, "" where they were replaced."""

    match: MlpMatch
    kept: str = ""


@register_pass("detect_mlp", Stage.DETECT)
class DetectMlp(Pass):
    """Find feed-forward layers; collapse those that a kernel computes faster, or that the plan makes sparse."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        anchors = find_mlps(gm.graph)
        writes = writes_by_storage(gm.graph) if anchors else {}
        untraceable = why_untraceable(gm.graph) if anchors else None
        matches = _apart([match_mlp(anchor, writes, untraceable) for anchor in anchors])
        report.rejections += [found for found in matches if isinstance(found, Rejection)]
        if ctx.ffn_plan is not None and matches:
            ctx.ffn_rules = assign_channels(ctx.ffn_plan, matches)
        moved: dict[Node, Node] = {}
        for place, match in enumerate(matches):
            if isinstance(match, Rejection):
                ctx.mlps.append(match)
                continue
            sparse = bool(ctx.ffn_rules) and not ctx.ffn_rules[place].note
            kept = "" if sparse or ctx.lowering == "reference" else _why_kept(match, ctx.one_graph)
            ctx.mlps.append(MlpFound(match, kept))
            if not kept:
                # The input of one layer may be the output of another that was replaced.
                call, result = _replace(match, moved.get(match.x, match.x), writes, ctx)
                ctx.mlp_calls[place], moved[match.output] = call, result
                report.hits += 1
        if matches:
            report.notes.append(f"found {sum(not isinstance(m, Rejection) for m in matches)} of {len(matches)}")
        return report


def _apart(matches: list[Any]) -> list[Any]:
    """Refuse a layer that shares a call with one before it."""
    taken: set[Node] = set()
    found = []
    for match in matches:
        shared = isinstance(match, MlpMatch) and next((node for node in match.region if node in taken), None)
        if isinstance(shared, Node):
            match = Rejection(f"{shared.name} belongs to the layer before as well", shared.name, match.layer, source_line(shared))
        elif isinstance(match, MlpMatch):
            taken.update(match.region)
        found.append(match)
    return found


def _why_kept(match: MlpMatch, one_graph: bool) -> str:
    x, up, down = tensor(match.x), tensor(match.up.weight), tensor(match.down.weight)
    assert x is not None and up is not None and down is not None
    if x.device.type != "cuda":
        return "on CPU the linear calls are as fast"
    if hint(rows_of(x)) is None:
        return "its rows depend on data"
    if one_graph and not isinstance(rows_of(x), int):
        return "an exported program serves every number of rows: which kernel is faster depends on it"
    # First what pays: asking the kernel about symbolic rows installs a guard.
    device, gated = availability.capability(x.device), match.gate is not None
    reason = why_not_faster(rows_of(x), match.inner, match.hidden, x.element_size(), device, gated)
    if reason is None:
        up = up.t() if match.up.transposed else up
        reason = why_no_mlp_kernel(x, None, up, down.t() if match.down.transposed else down)
    return reason or ""


def _replace(match: MlpMatch, x: Node, writes: dict[Node, list[Node]], ctx: PassContext) -> tuple[Node, Node]:
    emit = Emitter(match.output)
    gate, gate_bias = (None, None) if match.gate is None else _weights(emit, match.gate, match.gate_half)
    up, up_bias = _weights(emit, match.up, match.up_half)
    down, down_bias = _weights(emit, match.down, "")
    call = emit.call(MLP, x, gate, up, down, gate_bias, up_bias, down_bias, match.activation)
    result = call
    if len(shape(match.output)) == 2 and len(shape(call)) != 2:
        result = emit.call(aten.reshape.default, call, [-1, match.out])
    made, given = tensor(result), tensor(match.output)
    assert made is not None and given is not None
    if not same_tensor(made, given):
        raise RewriteDefect(f"{match.output.name} was {given.dtype} {list(given.shape)}, is {made.dtype} {list(made.shape)}")
    later = [node for node in writes.get(storage(match.output), []) if match.output < node]
    if later:
        writes[storage(result)] = later
    match.output.replace_all_uses_with(result)
    for node in sorted(match.region, reverse=True):
        for written in mutated_arguments(node):
            writes[storage(written)].remove(node)
            ctx.released.add(node.name)
        node.graph.erase_node(node)
    return call, result


def _weights(emit: Emitter, product: Projection, which: str) -> tuple[Node, Any]:
    """Weight ``[out, in]`` and bias of a projection, or of one half of it: views, nothing is copied."""
    weight, bias = product.weight, product.bias
    if product.transposed:
        weight = emit.call(aten.t.default, weight)
    if which:
        size = product.sizes[0]
        start, end = (0, size // 2) if which == "first" else (size // 2, size)
        weight = emit.call(aten.slice.Tensor, weight, 0, start, end)
        bias = None if bias is None else emit.call(aten.slice.Tensor, bias, 0, start, end)
    return weight, bias
