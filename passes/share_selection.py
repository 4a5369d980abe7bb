"""ShareSelection: followers attend the blocks that their anchor selected.

Before: ``attention(..., *live_blocks(mask, 64), 64, ...)``. After: ``attention(..., *selection of the anchor, 16, ...)``. The
edge from the anchor's ``select_blocks`` to its followers is the whole mechanism.
"""

from __future__ import annotations

from typing import cast

from torch.fx import GraphModule

from spec_compile.passes.base import Pass, PassContext, PassReport, Stage, register_pass
from spec_compile.passes.sparsify_attention import sites


@register_pass("share_selection", Stage.SHARE, exact=False)
class ShareSelection(Pass):
    """Rewire followers to their anchors' selections."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        found = {site.ordinal: site for site in sites(ctx)}
        for site in found.values():
            if site.role.kind == "follower":
                anchor = found[site.role.anchor].call.args
                site.use(anchor[4:7], cast(int, anchor[7]))
                report.hits += 1
        return report
