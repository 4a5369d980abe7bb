"""LowerAttention: choose the kernel behind each ``attention`` call.

Before: ``spec_compile.attention(...)`` (runs the reference). After: the first provider that supports the call, e.g.
``spec_compile.attention_folded(...)``. A call that no provider supports keeps the reference, with every reason noted.
Calls over a selection of blocks run gathered on CPU.
Layers that share a bool mask and run folded on CPU share its folded form too: ``fold_mask(mask, ...)``, once. A mask that
Triton kernels read is computed once, behind ``realize_mask(mask)``.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.kernels.providers import PROVIDERS, AttentionCall, why_selection_in_torch
from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.canonicalize import merge_equal
from spec_compile.passes.nodes import argument, fake_mode, hint, same, shape, tensor, value


@register_pass("lower_attention", Stage.LOWER)
class LowerAttention(Pass):
    """Retarget semantic attention calls to kernels."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        chosen: Counter[str] = Counter()
        unserved: Counter[str] = Counter()
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.spec_compile.attention_v1.default):
            q, k, v = (tensor(arg) for arg in node.args[:3])
            assert q is not None and k is not None and v is not None
            call = AttentionCall(
                q, k, v, tensor(argument(node, "mask")), argument(node, "softcap"), argument(node, "sinks") is not None,
                argument(node, "block_size"), _selection(node) is not None,
            )  # fmt: skip
            refusals = []
            for provider in PROVIDERS:
                if ctx.lowering not in ("auto", provider.name) and (ctx.lowering, provider.name) != ("folded", "gathered"):
                    continue
                reason = provider.supports(call)
                if reason is None:
                    node.target = provider.target
                    chosen[provider.name] += 1
                    report.hits += 1
                    if provider.name in ("folded", "gathered"):
                        _fold_mask(node, call)
                    if provider.name == "gathered":
                        _name_live_blocks(node)
                    break
                refusals.append(f"{provider.name}: {reason}")
            else:
                chosen["reference"] += 1
                unserved.update(["; ".join(refusals)] if refusals else [])
        merge_equal(gm.graph, _is_mask_work)
        _realize_masks(gm)
        report.notes = [f"{name} {count}" for name, count in sorted(chosen.items())]
        report.notes += [f"{count} on the reference because {reason}" for reason, count in unserved.items()]
        report.notes += _selection_in_torch(gm)
        return report


_SELECT = torch.ops.spec_compile.select_blocks_v2.default
_TRITON = torch.ops.spec_compile.attention_triton_v1.default
_REALIZE_MASK = torch.ops.spec_compile.realize_mask_v1.default
_FOLD_MASK = torch.ops.spec_compile.fold_mask_v1.default
_ROWS = torch.ops.aten.sym_size.int
_MASS = torch.ops.spec_compile.block_mass_v1.default
# Where calls on the way to a Triton kernel take their mask.
_MASK_OPERAND = {torch.ops.spec_compile.live_blocks_v2.default: 0, _MASS: 2, _TRITON: 3}


def _selection(node: Node) -> Node | None:
    """The ``select_blocks`` that a call's list comes from, or None."""
    ids = argument(node, "ids")
    made = ids.args[0] if isinstance(ids, Node) and ids.target is operator.getitem else None
    return made if isinstance(made, Node) and made.target is _SELECT else None


def _selection_in_torch(gm: GraphModule) -> list[str]:
    """Notes on selections that no Triton kernel serves on their CUDA device."""
    found: Counter[str] = Counter()
    for target in (_SELECT, _MASS):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            reason = why_selection_in_torch(node.target, torch.fx.map_arg(node.args, _as_traced))
            found.update([reason] if reason else [])
    return [f"{count} selections in plain torch because {reason}" for reason, count in found.items()]


def _as_traced(node: Node) -> Any:
    """The node's value, with the sizes seen while tracing: tiles computed from symbols would fix them for the whole graph."""
    held = tensor(node)
    if held is None:
        return value(node)
    with fake_mode(held):
        return torch.empty([hint(size) or 1 for size in held.shape], dtype=held.dtype, device=held.device)


def _name_live_blocks(node: Node) -> None:
    """Tell the call which blocks were selected from."""
    made = _selection(node)
    assert made is not None
    node.args = (*node.args[:7], argument(made, "ids"), argument(made, "count"), *node.args[7:])


def _realize_masks(gm: GraphModule) -> None:
    """Compute a mask once where Triton kernels read it: Inductor would recompute it for every opaque call."""
    uses: dict[Node, list[tuple[Node, int]]] = {}
    for node in gm.graph.nodes:
        position = _MASK_OPERAND.get(node.target)
        if position is not None and isinstance(node.args[position], Node):
            uses.setdefault(node.args[position], []).append((node, position))
    for mask, readers in uses.items():
        if mask.op == "placeholder" or not any(node.target is _TRITON for node, _ in readers):
            continue
        with gm.graph.inserting_before(readers[0][0]):
            realized = gm.graph.call_function(_REALIZE_MASK, (mask,))
        held = tensor(mask)
        with fake_mode(held):
            realized.meta.update(val=_REALIZE_MASK(held), spec_compile=True)
        for node, position in readers:
            node.update_arg(position, realized)


def _is_mask_work(node: Node) -> bool:
    return node.target in (_FOLD_MASK, _ROWS) and bool(node.meta.get("spec_compile"))


def _fold_mask(node: Node, call: AttentionCall) -> None:
    """Give the call a folded mask if its mask is bool; others are used as they are, or needed in the bool form."""
    if call.mask is None or call.mask.dtype != torch.bool or call.q.device.type != "cpu" or call.softcap > 0 or call.sinks:
        return
    mask, (_, heads, rows, _), kv_heads = argument(node, "mask"), shape(node.args[0]), shape(node.args[1])[1]
    if heads == kv_heads and same(shape(mask)[2], rows):
        return
    dtype, graph = call.q.dtype, node.graph
    with graph.inserting_before(node):
        count = rows
        if not isinstance(rows, int):
            count = graph.call_function(_ROWS, (mask if same(shape(mask)[2], rows) else node.args[0], 2))
            count.meta.update(val=rows, spec_compile=True)
        folded = graph.call_function(_FOLD_MASK, (mask, heads, kv_heads, count, dtype))
    with fake_mode(call.mask):
        folded.meta.update(val=_FOLD_MASK(call.mask, heads, kv_heads, rows, dtype), spec_compile=True)
    node.update_arg(3, folded)
