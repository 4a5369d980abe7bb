"""``explain``: what the compiler would do to a model's verify forward, without running it or touching the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile import _compat
from spec_compile.backend import compile_graph
from spec_compile.errors import OptionsError, SpecCompileError
from spec_compile.options import Options
from spec_compile.passes.nodes import hint
from spec_compile.report import RewriteReport


def explain(model: Any, cache: Any, draft_len: int = 8, plan: Any = None, **options: Any) -> RewriteReport:
    """Trace one verify forward of ``draft_len + 1`` rows and report what would be rewritten.

    Weights are not read, nothing is compiled, and the cache keeps its contents; a model on the meta device will do.

    Args:
        model: a transformers model, or a module called as ``model(input_ids, cache=cache)``.
        cache: the cache it would run with, e.g. ``VerifyCache``.
        draft_len: drafts; the last accepted token leads, so the forward has one row more.
        plan, options: as for the backend.

    Raises:
        OptionsError, PlanError: bad arguments.
    """
    from spec_compile.verify import call_model, check_cache, check_draft_len

    settings = Options.parse({**options, "plan": plan})
    if settings.strict:
        raise OptionsError("explain reports instead of raising: drop strict=True")
    check_draft_len(draft_len, settings.max_q_len)
    check_cache(cache)
    reports: list[RewriteReport] = []
    collect = _Collector(reports)
    settings = Options(**{**_shallow(settings), "codegen": "eager", "on_report": collect})

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        compile_graph(gm, example_inputs, settings)
        return _zeros_like_outputs(gm)

    device = next(model.parameters()).device
    batch = cache.layers[0].keys.shape[0] if hasattr(cache, "layers") else 1
    ids = torch.zeros(batch, draft_len + 1, dtype=torch.int64, device=device)
    with torch.no_grad(), _compat.allow_real_constants():
        run = torch.compile(call_model(model), backend=backend, dynamic=False)
        try:
            run(ids, None, None, cache)
        except SpecCompileError:
            raise
        except Exception as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, SpecCompileError):
                raise inner from None
            # Some families (OPT, BLOOM) read positions off a padding mask.
            if not hasattr(cache, "layers"):
                raise
            reports.clear()
            positions = torch.arange(draft_len + 1, device=device).repeat(batch, 1)
            run(ids, positions, ids.new_ones(batch, cache.layers[0].keys.shape[2]), cache)
    return _merge(reports)


class _Collector:
    """Report sink that asks the pipeline to keep the graphs' code."""

    keep_code = True

    def __init__(self, reports: list[RewriteReport]) -> None:
        self.reports = reports

    def __call__(self, report: RewriteReport) -> None:
        self.reports.append(report)


def _shallow(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def _zeros_like_outputs(gm: GraphModule) -> Callable[..., Any]:
    """Stand in for the graph: zeros of the right shapes, so that Python around it runs on and no write is executed."""

    def zeros(arg: Any) -> Any:
        found = arg.meta.get("example_value", arg.meta.get("val")) if isinstance(arg, Node) else arg
        if isinstance(found, torch.Tensor):
            sizes = [hint(size) or 0 for size in found.shape]
            return torch.zeros(sizes, dtype=found.dtype, device=found.device)
        if isinstance(found, torch.SymInt):
            return hint(found)
        return found

    outputs = gm.graph.output_node().args[0]
    return lambda *inputs: torch.fx.node.map_aggregate(outputs, zeros)


def _merge(reports: list[RewriteReport]) -> RewriteReport:
    """One report for the whole forward; after graph breaks its pieces are joined."""
    verify = [report for report in reports if report.kind == "verify"]
    if not verify:
        if reports:
            return reports[-1]
        return RewriteReport(kind="passed through", reason="nothing was compiled (SPEC_COMPILE_DISABLE, or no tensor operation)")
    first = verify[0]
    first.moes = [entry for report in reports for entry in report.moes]
    first.mlps = [entry for report in reports for entry in report.mlps]
    for other in verify[1:]:
        first.attentions += other.attentions
        first.passes += other.passes
        first.inputs += other.inputs
        first.static_inputs += other.static_inputs
    if len(reports) > 1:
        first.notes.append(f"graph breaks split the forward into {len(reports)} graphs; TORCH_LOGS=graph_breaks says where")
    return first
