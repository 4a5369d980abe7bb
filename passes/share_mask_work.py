"""ShareMaskWork: what the detector emitted per layer for one and the same mask is computed once.

Before: ``live_blocks(mask, 64)`` (and the sum of mask and ALiBi bias) once per layer. After: once per distinct mask.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.canonicalize import merge_equal


@register_pass("share_mask_work", Stage.SHARE)
class ShareMaskWork(Pass):
    """Merge equal calls that the detector emitted, ``attention`` itself excepted."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        report.hits = merge_equal(gm.graph, _emitted)
        return report


def _emitted(node: Node) -> bool:
    if not node.meta.get("spec_compile"):
        return False
    # Copies of q and of the result belong to one layer; only mask work and block lists repeat.
    return node.target is operator.getitem or (
        isinstance(node.target, torch._ops.OpOverload) and node.target is not torch.ops.spec_compile.attention_v1.default
    )
