"""Run the registered passes over one graph: order, timing, lint, dumps and invariants live here, not in passes."""

from __future__ import annotations

import time
from pathlib import Path

from torch.fx import GraphModule

import spec_compile.passes  # noqa: F401  (registers the passes)
from spec_compile import _compat
from spec_compile.logs import logger
from spec_compile.passes.base import PassContext, PassReport, registered_passes
from spec_compile.passes.check_rewrite import RewriteDefect, mutations
from spec_compile.report import RewriteReport


def run_passes(
    gm: GraphModule, ctx: PassContext, report: RewriteReport, dump: str | None = None, keep_code: bool = False
) -> GraphModule:
    """Rewrite ``gm`` in place and fill ``report``.

    Raises:
        RewriteDefect: an invariant broke (a cache write is gone, a value changed shape); ``gm`` must not be used.
    """
    written = mutations(gm)
    if keep_code or dump:
        report.before = _code(gm)
    _dump(dump, "before", report.before, len(report.passes))
    for cls in registered_passes():
        start = time.perf_counter()
        outcome: PassReport = cls().run(gm, ctx)
        if outcome.changed:
            gm.graph.lint()
        outcome.ms = (time.perf_counter() - start) * 1e3
        report.passes.append(outcome)
        logger.debug("%s: %d hits, %d refused, %.1f ms", outcome.name, outcome.hits, len(outcome.rejections), outcome.ms)
        if outcome.changed and dump:
            _dump(dump, outcome.name, _code(gm), len(report.passes))
    gm.recompile()
    kept = mutations(gm)
    written = [write for write in written if write.split(":")[0] not in ctx.released]
    if kept != written:
        raise RewriteDefect(f"the rewrite changed the writes to inputs from {written} to {kept}")
    if keep_code or dump:
        report.after = _code(gm)
    report.add_attentions(ctx.attentions, ctx.roles, ctx.sparsity)
    report.add_moes(ctx.moes, ctx.moe_limits)
    report.add_mlps(ctx.mlps, ctx.ffn_rules)
    return gm


def _code(gm: GraphModule) -> str:
    return gm.print_readable(print_output=False, include_stride=False)


def _dump(folder: str | None, stage: str, text: str, position: int) -> None:
    if not folder:
        return
    run = _compat.compile_id()
    name = f"graph_{str(run).replace('/', '_') if run else 'export'}_{position:02d}_{stage}.py"
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / name).write_text(text, encoding="utf-8")
    _compat.trace_artifact(f"spec_compile_{stage}", text)
