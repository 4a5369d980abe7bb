"""LowerAttention: choose the kernel behind each ``attention`` call.

Before: ``spec_compile.attention(...)`` (runs the reference). After: the first provider that supports the call, e.g.
``spec_compile.attention_folded(...)``. A call that no provider supports keeps the reference, with every reason noted.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import GraphModule

from spec_compile.kernels.providers import PROVIDERS, AttentionCall
from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.nodes import argument, tensor


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
                q, k, v, tensor(argument(node, "mask")), argument(node, "softcap"), argument(node, "sinks") is not None
            )
            refusals = []
            for provider in PROVIDERS:
                if ctx.lowering not in ("auto", provider.name):
                    continue
                reason = provider.supports(call)
                if reason is None:
                    node.target = provider.target
                    chosen[provider.name] += 1
                    report.hits += 1
                    break
                refusals.append(f"{provider.name}: {reason}")
            else:
                chosen["reference"] += 1
                unserved.update(["; ".join(refusals)] if refusals else [])
        report.notes = [f"{name} {count}" for name, count in sorted(chosen.items())]
        report.notes += [f"{count} on the reference because {reason}" for reason, count in unserved.items()]
        return report
