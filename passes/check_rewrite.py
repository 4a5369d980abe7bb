"""CheckRewrite: what must hold of every rewritten graph before it is compiled.

Raises on a defect of ours (a lost cache write, a value whose shape, dtype or device changed); never on user input.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule

from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.nodes import hint, mutated_arguments, tensor


class RewriteDefect(AssertionError):
    """The rewritten graph breaks an invariant; the original graph must be used instead."""


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether shape (symbols by the sizes met while tracing), dtype and device agree."""
    met = [[hint(size) for size in value.shape] for value in (one, other)]
    return met[0] == met[1] and (one.dtype, one.device) == (other.dtype, other.device)


def mutations(gm: GraphModule) -> list[str]:
    """Names and targets of all calls that write an argument, in order: a rewrite must keep this list."""
    return [
        f"{node.name}: {node.target}" for node in gm.graph.nodes if mutated_arguments(node) and not node.meta.get("spec_compile")
    ]


@register_pass("check_rewrite", Stage.CHECK)
class CheckRewrite(Pass):
    """Every value of ours is a plain fake tensor on its operands' device, and all that was proven is in the graph."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        present = set(gm.graph.nodes)
        proven = sum(bool(found) for found in ctx.attentions)
        calls = [node for node in ctx.emitted if node in present and node.users]
        if len(calls) != proven:
            raise RewriteDefect(f"{proven} attentions were proven, {len(calls)} are in the graph")
        left = [found.anchor.name for found in ctx.attentions if found and found.anchor in present and not found.anchor.users]
        if left:
            raise RewriteDefect(f"replaced attentions still run: {', '.join(left)}")
        for node in calls:
            q, v, out = tensor(node.args[0]), tensor(node.args[2]), tensor(node)
            if q is None or v is None or out is None or out.device != v.device or out.dtype != q.dtype:
                raise RewriteDefect(f"{node.name} has lost its value, dtype or device")
        lost = [call.name for call in ctx.moe_calls if call not in present or not call.users]
        if lost:
            raise RewriteDefect(f"experts that were proven are not in the graph: {', '.join(lost)}")
        gone = [call.name for call in ctx.mlp_calls.values() if call not in present or not call.users]
        if gone:
            raise RewriteDefect(f"feed-forward layers that were proven are not in the graph: {', '.join(gone)}")
        for node in (*ctx.moe_calls, *ctx.mlp_calls.values()):
            x, out = tensor(node.args[0]), tensor(node)
            if x is None or out is None or (out.device, out.dtype) != (x.device, x.dtype):
                raise RewriteDefect(f"{node.name} has lost its value, dtype or device")
        return report
