"""SparsifyMlp: feed-forward layers compute, in sparse steps, the channels that the plan keeps.

Before::

    mlp(x, gate, up, down, None, None, None, "silu")

After::

    mlp_sparse(x, gate, up, down, None, None, None, "silu", switch, 0.05, 0, False)

``switch`` is an added input: where it is 0, the call keeps every channel and the step is exact.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from spec_compile.kernels import library
from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.emit import Emitter
from spec_compile.passes.nodes import tensor
from spec_compile.passes.state_inputs import sparse_switch

assert library.mlp_sparse is not None  # importing it registers the operators
_SPARSE = torch.ops.spec_compile.mlp_sparse_v1.default


@register_pass("sparsify_mlp", Stage.SPARSIFY, exact=False)
class SparsifyMlp(Pass):
    """Hand layers that have a rule to the operator that skips channels."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        for place, rule in enumerate(ctx.ffn_rules):
            call = ctx.mlp_calls.get(place)
            if call is None or rule.note:
                continue
            value = tensor(call)
            assert value is not None
            switch = sparse_switch(gm, ctx.state, value)
            made = Emitter(call).call(_SPARSE, *call.args, switch, rule.threshold, rule.keep, rule.joint)
            call.replace_all_uses_with(made)
            call.graph.erase_node(call)
            ctx.mlp_calls[place] = made
            report.hits += 1
        return report
