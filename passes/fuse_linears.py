"""FuseLinears: linear layers of one input, and those that cuBLAS serves badly at few rows, in one launch.

Before::

    q = aten.linear(x, wq); k = aten.linear(x, wk); v = aten.linear(x, wv)

After::

    q, k, v = spec_compile.linears(x, [wq, wk, wv], [None, None, None])

Exact up to the order of summation, like any choice of a product's kernel. Weights are read live, where they lie.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.kernels import library
from spec_compile.kernels.linears import MAX_WEIGHTS, pays, why_not
from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.nodes import (
    alias_root,
    aten,
    fake_mode,
    hint,
    is_call,
    mutated_arguments,
    overlapping_inputs,
    shape,
    tensor,
)

assert library.linears is not None  # importing it registers the operators
_LINEARS = torch.ops.spec_compile.linears_v1.default


@register_pass("fuse_linears", Stage.LOWER)
class FuseLinears(Pass):
    """Group linear calls by input and hand the groups that pay to the small-row kernel."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        if ctx.lowering not in ("auto", "triton"):
            return report
        for group in _groups(gm):
            for start in range(0, len(group), MAX_WEIGHTS):
                calls = group[start : start + MAX_WEIGHTS]
                rows = _rows(calls[0])
                sizes = [shape(call.args[1]) for call in calls]
                if rows is not None and pays(rows, [columns for columns, _ in sizes], sizes[0][1]):
                    _fuse(gm, calls)
                    report.hits += len(calls)
        return report


def _rows(call: Node) -> int | None:
    rows = 1
    for size in shape(call.args[0])[:-1]:
        known = hint(size)
        if known is None:
            return None
        rows *= known
    return rows


def _groups(gm: GraphModule) -> list[list[Node]]:
    """Eligible calls with the same input at the same state, in order."""
    written = {alias_root(node) for call in gm.graph.nodes for node in mutated_arguments(call)}
    sharing = overlapping_inputs(gm.graph)
    written.update(other for root in list(written) for other in sharing.get(root, ()))
    region = 0
    groups: dict[Any, list[Node]] = {}
    for node in gm.graph.nodes:
        region += _is_barrier(node)
        if not is_call(node, aten.linear):
            continue
        given: list[Any] = [*node.args, None]
        x, weight, bias = given[:3]
        # Later calls move up to the first one: their weights must exist there, and nothing may write them.
        parameters = [weight] if bias is None else [weight, bias]
        if any(p.op not in ("placeholder", "get_attr") or alias_root(p) in written for p in parameters):
            continue
        values = [tensor(given) for given in (x, *parameters)]
        if any(found is None for found in values) or why_not(*values) is not None:  # type: ignore[arg-type]
            continue
        groups.setdefault((x, region, bias is None), []).append(node)
    return list(groups.values())


def _is_barrier(node: Node) -> bool:
    """No call moves across a write, whatever it writes, nor across a call whose effects the schema does not tell."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(mutated_arguments(node))
    return node.target is not operator.getitem and isinstance(node.meta.get("val"), torch.Tensor | tuple | list | None)


def _fuse(gm: GraphModule, calls: list[Node]) -> None:
    weights: list[Any] = [call.args[1] for call in calls]
    biases: list[Any] = [call.args[2] if len(call.args) > 2 else None for call in calls]
    args = (calls[0].args[0], weights, biases)
    for parameter in (*weights, *biases):
        # Placed at its first use, which may be later.
        if parameter is not None and parameter.op == "get_attr" and calls[0] < parameter:
            calls[0].prepend(parameter)
    with gm.graph.inserting_before(calls[0]):
        fused = gm.graph.call_function(_LINEARS, args)
        parts = [gm.graph.call_function(operator.getitem, (fused, i)) for i in range(len(calls))]
    fused.meta.update({key: found for key, found in calls[0].meta.items() if key in ("nn_module_stack", "stack_trace")})
    with fake_mode(tensor(calls[0])):
        values = _LINEARS(*torch.fx.map_arg(args, lambda node: node.meta["val"]))
    fused.meta.update(val=values, spec_compile=True)
    for call, part, value in zip(calls, parts, values):
        part.meta.update(val=value, spec_compile=True)
        call.replace_all_uses_with(part)
        gm.graph.erase_node(call)
