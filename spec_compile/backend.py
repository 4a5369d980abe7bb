"""The ``torch.compile`` backend ``spec_compile``: classify, capture, rewrite, compile; pass through what is not ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile import _compat
from spec_compile.capture import dynamo_to_aten
from spec_compile.classify import EXPERT_LOOP, GraphKind, classify
from spec_compile.errors import SpecCompileError, StrictError
from spec_compile.logs import logger
from spec_compile.options import Options, disabled
from spec_compile.passes.base import PassContext, Rejection
from spec_compile.passes.nodes import hint
from spec_compile.passes.state_inputs import StateInput
from spec_compile.pipeline import run_passes
from spec_compile.plan import AttentionPlan, SparsityPlan
from spec_compile.report import RewriteReport, remember
from spec_compile.state import SparseSwitch, bind_state


def spec_compile_backend(
    gm: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Entry point of ``torch.compile(model, backend="spec_compile", options={...})``.

    Args:
        gm, example_inputs: from Dynamo.
        options: see :class:`spec_compile.options.Options`.
        mode: None, ``default`` or ``reduce-overhead`` (CUDA graphs).

    Raises:
        OptionsError, PlanError, StrictError: see there.
    """
    _compat.check_installed("torch")
    if disabled():
        return gm.forward
    return compile_graph(gm, example_inputs, Options.parse(options, mode))


def compile_graph(
    gm: GraphModule, example_inputs: list[Any], options: Options, switch: SparseSwitch | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph; always leaves a :class:`RewriteReport` behind.

    ``switch`` turns sparse steps on and off; by default they are on.
    """
    report = RewriteReport(inputs=len(example_inputs))
    try:
        return _compile(gm, example_inputs, options, report, switch)
    finally:
        remember(report)
        logger.debug("%s", report)
        if options.on_report is not None:
            options.on_report(report)


def _compile(
    gm: GraphModule, example_inputs: list[Any], options: Options, report: RewriteReport, switch: SparseSwitch | None
) -> Callable[..., Any]:
    kind = classify(gm, options.max_q_len)
    report.q_len, report.kv_len = hint(kind.q_len) or 0, hint(kind.kv_len) or 0
    report.dynamic = kind.q_len is not None and not isinstance(kind.q_len, int)
    refusal = _why_not(gm, kind, example_inputs)
    if kind.expert_loop:
        report.add_moes([Rejection(EXPERT_LOOP, kind.expert_loop)])
        _complain(EXPERT_LOOP, options)
    if refusal is not None:
        return _pass_through(gm, report, refusal, kind, options)
    _check_recompile_limit(options)
    try:
        rewritten, state = _rewrite(gm, example_inputs, options, report)
    except SpecCompileError:
        raise
    except Exception as error:
        # A construct that cannot be retraced, or a defect of ours: the model must still run, and the user must know.
        logger.debug("rewriting failed", exc_info=True)
        return _pass_through(gm, report, f"rewriting failed: {type(error).__name__}: {error}", kind, options)
    report.static_inputs = _count_static(rewritten, len(example_inputs))
    _say_what_happened(report, options)
    if options.codegen == "eager":
        run = rewritten.forward
    else:
        run = _inductor(rewritten, example_inputs, options, report)
    if not state:
        return run
    return bind_state(run, state, switch or switch_of(options.plan))


def _why_not(gm: GraphModule, kind: GraphKind, example_inputs: list[Any]) -> str | None:
    """Reason to run the graph as Dynamo gave it, or None."""
    if not kind.verify:
        return kind.reason
    if any(_opens_autocast(node) for node in gm.graph.nodes):
        return "an autocast region opens within the graph: put autocast around the whole call instead"
    tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
    odd = next((x for x in tensors if not _compat.is_plain_tensor(x)), None)
    if odd is not None:
        return f"an input is a {type(odd).__name__}: sharded or quantised tensors are not supported yet"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients are enabled and a parameter requires them: call under torch.inference_mode() or torch.no_grad()"
    return None


def _opens_autocast(node: Node) -> bool:
    """Retracing loses the dtypes inside a region; one that switches autocast off changes nothing unless it is on outside."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "_enter_autocast":
        return False
    enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
    return bool(enabled)


def _pass_through(gm: GraphModule, report: RewriteReport, reason: str, kind: GraphKind, options: Options) -> Callable[..., Any]:
    report.kind, report.reason = "passed through", reason
    if kind.verify:
        _complain(f"verify forward passed through: {reason}", options)
    elif kind.has_linear and not kind.attentions:
        _complain(f"0 attentions rewritten: {reason}. After a graph break each piece is compiled by itself.", options)
    else:
        logger.info("passed through: %s", reason)
    return gm.forward


def _rewrite(
    gm: GraphModule, example_inputs: list[Any], options: Options, report: RewriteReport
) -> tuple[GraphModule, list[StateInput]]:
    start = time.perf_counter()
    captured = dynamo_to_aten(gm, example_inputs)
    report.seconds["capture"] = time.perf_counter() - start
    start = time.perf_counter()
    ctx = PassContext(
        max_q_len=options.max_q_len,
        block_size=options.block_size,
        lowering=options.lowering,
        need_static_cache=options.cudagraphs and _on_cuda(example_inputs),
        sparsity=_sparsity(options),
        moe_plan=None if options.plan.moe is None or options.plan.moe.exact else options.plan.moe,
        ffn_plan=None if options.plan.ffn is None or options.plan.ffn.exact else options.plan.ffn,
    )
    keep_code = options.on_report is not None and getattr(options.on_report, "keep_code", False)
    rewritten = run_passes(captured, ctx, report, options.dump, keep_code)
    report.seconds["passes"] = time.perf_counter() - start
    summaries = [need for need in ctx.state if need.kind in ("summary", "valid")]
    if summaries:
        size = sum(math.prod(need.shape) * need.dtype.itemsize for need in summaries)
        report.notes.append(f"block summaries take {size / 1e6:.1f} MB for each cache")
    return rewritten, ctx.state


def _sparsity(options: Options) -> AttentionPlan | None:
    attention = options.plan.attention
    return None if attention is None or attention.exact else attention


def switch_of(plan: SparsityPlan) -> SparseSwitch:
    """A switch for the steps of a function compiled under ``plan``."""
    return SparseSwitch(0 if plan.attention is None or plan.attention.exact else plan.attention.min_context)


def _on_cuda(example_inputs: list[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs)


def _say_what_happened(report: RewriteReport, options: Options) -> None:
    refused, kept = report.refused, [moe for moe in report.moes if moe.status == "refused"]
    if not report.rewritten:
        reasons = "; ".join(dict.fromkeys(entry.reason for entry in refused)) or "no attention was recognised"
        others = len(report.moes) - len(kept)
        beside = f" (MoE layers: {others} of {len(report.moes)})" if others else ""
        _complain(f"0 attentions rewritten{beside}: {reasons}", options)
    elif refused and options.strict:
        raise StrictError(
            f"{len(refused)} of {len(report.attentions)} attentions refused: {refused[0].layer}: {refused[0].reason}"
        )
    if kept and options.strict:
        raise StrictError(f"{len(kept)} of {len(report.moes)} MoE layers refused: {kept[0].layer}: {kept[0].reason}")
    for layer, reason in [(entry.layer, entry.reason) for entry in refused] + [(moe.layer, moe.reason) for moe in kept]:
        logger.info("%s refused: %s", layer, reason)
    if report.rewritten and _sparsity(options) is not None and not report.sparse:
        reasons = "; ".join(dict.fromkeys(entry.role_note for entry in report.rewritten if entry.role_note))
        _complain(f"plan.attention: no layer is sparse: {reasons}", options)
    if options.plan.moe is not None and not options.plan.moe.exact and not report.limited:
        reasons = "; ".join(dict.fromkeys(entry.rule_note or entry.reason for entry in report.moes))
        _complain(f"plan.moe: no layer is limited: {reasons or 'no MoE layer was recognised'}", options)
    for mlp in report.mlps:
        if mlp.status == "refused":
            logger.info("%s refused: %s", mlp.layer, mlp.reason)
    if options.plan.ffn is not None and not options.plan.ffn.exact and not report.skipping:
        reasons = "; ".join(dict.fromkeys(entry.rule_note or entry.reason for entry in report.mlps))
        _complain(f"plan.ffn: no layer skips channels: {reasons or 'no feed-forward layer was recognised'}", options)


def _complain(text: str, options: Options) -> None:
    if options.strict:
        raise StrictError(text)
    logger.warning(text)


def _check_recompile_limit(options: Options) -> None:
    """Past Dynamo's limit calls run eagerly without us; say so at the last compilation before it."""
    found = _compat.compile_id()
    limit = torch._dynamo.config.recompile_limit
    attempt = getattr(found, "frame_compile_id", None)
    if attempt is not None and attempt + 1 >= limit:
        _complain(
            f"this is compilation {attempt + 1} of {limit} allowed by torch._dynamo.config.recompile_limit: further new "
            "shapes would run eagerly, without spec_compile. Use one cache length and a fixed batch, or raise the limit.",
            options,
        )


def _count_static(gm: GraphModule, inputs: int) -> int:
    marked = 0
    for node in gm.graph.find_nodes(op="placeholder")[:inputs]:
        marked += bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))
    return marked


def _inductor(gm: GraphModule, example_inputs: list[Any], options: Options, report: RewriteReport) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {}
    if options.cudagraphs:
        if _on_cuda(example_inputs):
            patches["triton.cudagraphs"] = True
        else:
            report.notes.append("cudagraphs has no effect on CPU")
    start = time.perf_counter()
    # Tensors of ours come last; what they look like is all that is needed here.
    added = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
    compiled: Any = compile_fx(gm, [*example_inputs, *added], config_patches=patches or None)
    report.seconds["codegen"] = time.perf_counter() - start
    return compiled
