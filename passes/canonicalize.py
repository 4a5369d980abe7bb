"""Canonicalize: drop what does nothing and merge equal views, so that layers share operands by node identity.

0. ``x.max(-1)[1]`` that nobody reads (retracing emits every item)  ->  nothing
1. ``to(x, same dtype)``, ``slice(x, 0, end >= size)``, ``alias(x)``, inactive ``dropout(x)``  ->  ``x``
2. two equal views of one tensor (``slice(mask, 3, 0, n)`` once per layer)  ->  the first

Nothing numeric happens here.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from spec_compile.passes.axes import is_noop_cast, is_noop_slice
from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.nodes import alias_root, argument, aten, is_call, mutated_arguments, overlapping_inputs, tensor

_VIEW_OPS = (
    aten.slice, aten.view, aten.unsqueeze, aten.squeeze, aten.expand, aten.transpose, aten.permute, aten.select,
    aten._unsafe_view, aten.flatten, aten.unflatten, aten.t,
)  # fmt: skip


@register_pass("canonicalize", Stage.CANONICALIZE)
class Canonicalize(Pass):
    """Remove no-ops and merge equal views."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        for node in list(gm.graph.nodes):
            if node.target is operator.getitem and not node.users:
                gm.graph.erase_node(node)
                report.hits += 1
            elif _is_noop(node):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                report.hits += 1
        report.hits += merge_equal(gm.graph, _is_view)
        return report


def _is_noop(node: Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    if is_noop_cast(node) or is_noop_slice(node):
        return True
    if is_call(node, aten.alias, aten.detach):
        given = tensor(node.args[0])
        return given is not None and not given.requires_grad
    if is_call(node, aten.dropout) and not mutated_arguments(node):
        return not argument(node, "train", True) or argument(node, "p", 1.0) == 0
    return False


def _is_view(node: Node) -> bool:
    return is_call(node, *_VIEW_OPS) and not mutated_arguments(node)


def merge_equal(graph: Graph, admits: Any) -> int:
    """Replace every admitted call by an earlier one with the same target and arguments; returns how many went."""
    seen: dict[Any, Node] = {}
    merged = 0
    writes: Counter[Node] = Counter()
    sharing = overlapping_inputs(graph)
    for node in list(graph.nodes):
        for root in map(alias_root, mutated_arguments(node)):
            writes.update([root, *sharing.get(root, ())])
        if not admits(node):
            continue
        # A call that reads a tensor after a write differs from the same call before it.
        versions = tuple(writes[alias_root(given)] for given in node.all_input_nodes)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), versions)
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged += 1
    return merged


def _frozen(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return tuple(_frozen(item) for item in arg)
    if isinstance(arg, dict):
        return tuple(sorted((key, _frozen(item)) for key, item in arg.items()))
    if isinstance(arg, Node | torch.dtype | torch.device | str | bool | type(None)):
        return arg
    return (type(arg).__name__, str(arg))
