"""``compile_verify``: a model and its cache as one compiled function from draft rows to logits."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_compile import _compat
from spec_compile.backend import compile_graph, switch_of
from spec_compile.classify import EXPERT_LOOP
from spec_compile.errors import CacheError, OptionsError, SpecCompileError
from spec_compile.logs import logger
from spec_compile.options import Options, disabled
from spec_compile.plan import SparsityPlan
from spec_compile.report import RewriteReport
from spec_compile.step_graph import StepGraph, StepGraphs, why_not_captured

_numbers = itertools.count()


def compile_verify(
    model: Any,
    cache: Any,
    draft_len: int = 8,
    plan: Any = None,
    *,
    strict: bool = False,
    cudagraphs: bool = False,
    **options: Any,
) -> VerifyFunction:
    """Compile the verify forward of ``model`` over ``cache``.

    Args:
        model: a transformers causal LM in eval mode, or a module called as
            ``model(input_ids, cache=cache, position_ids=..., attention_mask=...)`` that returns logits.
        cache: :class:`~spec_compile.VerifyCache`, or another initialised static cache.
        draft_len: drafts per step, 0..31; a step has up to ``draft_len + 1`` rows (the last accepted token leads).
        plan: sparsity plan; default exact. In a sparse step an attention budget, ``moe.expert_budget`` and one set of channels
            for all rows (``ffn.budget``, ``ffn.joint``) are shared by all rows given, those of every sequence of a batch and a
            caller's own padding (drafts of unequal length) included. Where ``plan.ffn`` skips channels on a GPU, the last weights
            of feed-forward layers are stored by channels from here on: in place, ``restore(model)`` undoes it.
        strict: raise where an attention is refused, instead of warning.
        cudagraphs: on a CUDA device, capture the whole step and replay it: every call then runs ``draft_len + 1`` rows
            (fewer are padded) and costs one launch. Where padding would take part in a sparse step's selection, a step is
            captured for each number of rows, when first met. Calls with position_ids or attention_mask run compiled, but not
            captured.
        options: further backend options.

    Returns:
        A :class:`VerifyFunction`. Compilation happens at its first call.

    Raises:
        CacheError: a growing or uninitialised cache.
        OptionsError, PlanError: bad arguments.
    """
    _compat.check_installed("torch")
    settings = Options.parse({**options, "plan": plan, "strict": strict, "cudagraphs": cudagraphs})
    check_draft_len(draft_len, settings.max_q_len)
    check_cache(cache)
    return VerifyFunction(model, cache, draft_len, settings)


class VerifyFunction:
    """Callable returned by :func:`compile_verify`; one graph serves every number of rows from 2, a second one serves 1
    (on a GPU that takes the fused feed-forward kernel for few rows, more rows have a graph of their own).

    The cache advances by the rows of each call; after acceptance roll it back with ``cache.crop(-rejected)``.
    """

    def __init__(self, model: Any, cache: Any, draft_len: int, options: Options) -> None:
        self.model, self.cache, self.draft_len = model, cache, draft_len
        self.reports: list[RewriteReport] = []
        self._sink = options.on_report
        plan = options.plan
        self._switch = None if plan.exact else switch_of(plan)
        store_for(plan, model)
        self._steps: StepGraphs | None = None
        self._capture = options.cudagraphs and not disabled()
        if self._capture and (reason := why_not_captured(model, cache)) is not None:
            logger.warning("cudagraphs=True: steps are compiled, but not captured: %s", reason)
            self._capture = False
        self._options = dataclasses.replace(options, on_report=self._keep, cudagraphs=False)
        run = call_model(model)
        self._run: Callable[..., Tensor] = run
        if not disabled():
            self._run = torch.compile(run, backend=self._backend, fullgraph=True)

    def _backend(self, gm: Any, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, self._options, self._switch)

    def _keep(self, report: RewriteReport) -> None:
        self.reports.append(report)
        if self._sink is not None:
            self._sink(report)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        sparse: bool | None = None,
    ) -> Tensor:
        """Run one verify step.

        Args:
            input_ids: int64 ``[B, T]``, the last accepted token and T - 1 drafts, T <= draft_len + 1.
            position_ids: int64 ``[B, T]``; default continues the cache (per row, if a 2-D mask is given).
            attention_mask: None; 2-D ``[B, held + T]`` with 0 for padding; 4-D bool or additive
                ``[B|1, 1|Hq, T, S]`` over all S cache slots (trees); or a dict of 4-D masks by layer type.
            sparse: True or False picks the mode of this step; default: sparse if the plan is. Both modes run the same graphs
                over the same cache.

        Returns:
            Logits ``[B, T, V]``.

        Raises:
            OptionsError: wrong shapes, too many rows, or ``sparse=True`` without a sparse plan.
            CacheError: the cache is too short.
        """
        rows = self._check(input_ids, sparse)
        if self._switch is not None:
            self._switch.set(sparse is not False)
        if self._capture and position_ids is None and attention_mask is None:
            if self._steps is None:
                plan, most = self._options.plan, self.draft_len + 1
                self._steps = StepGraphs(self._run, self.model, self.cache, input_ids.shape[0], most, self._switch, plan)
            step = self._steps.of(rows)
            held = step.held()
            if step.fits(held):
                return self._replay(step, input_ids, held)
            step.require_slots(held, rows)
        return self._call(input_ids, position_ids, attention_mask)

    @torch.no_grad()
    def _call(self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Any) -> Tensor:
        """One step by a call of the compiled model; as a decorator of every replay, too, ``no_grad`` would take its time."""
        rows = input_ids.shape[1]
        if hasattr(self.cache, "require_room"):
            self.cache.require_room(rows)
        position_ids, attention_mask = self._complete(input_ids, position_ids, attention_mask)
        if rows > 1:
            for tensor, dim in ((input_ids, 1), (position_ids, 1), (attention_mask, 2)):
                if isinstance(tensor, Tensor) and tensor.dim() > dim:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        try:
            return self._run(input_ids, position_ids, attention_mask, self.cache)
        except Exception as error:
            self._raise(error, attention_mask)
            raise

    def _raise(self, error: Exception, attention_mask: Any) -> None:
        """Raise the error of ours behind a failed compilation, if there is one."""
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, SpecCompileError):
            raise inner from None
        untraced = isinstance(error, torch._dynamo.exc.TorchDynamoException) and inner is None
        if untraced and has_expert_loop(self.model):
            raise OptionsError(EXPERT_LOOP) from error
        if attention_mask is None and untraced:
            raise OptionsError(
                f"{type(self.model).__name__} could not be traced without an attention_mask; if it reads positions off a "
                "padding mask, pass attention_mask=torch.ones(B, held + T)"
            ) from error

    def _check(self, input_ids: Tensor, sparse: bool | None) -> int:
        if sparse and self._switch is None:
            plan = self._options.plan
            if plan == SparsityPlan():
                raise OptionsError(
                    "sparse=True needs a plan: compile_verify(model, cache, plan=SparsityPlan(attention=...)), "
                    "SparsityPlan(ffn=...) or SparsityPlan(moe=...)"
                )
            raise OptionsError(
                "sparse=True needs a plan that is not exact: give attention=AttentionPlan(...) a budget, ffn=FfnPlan(...) a "
                "threshold or a budget, or moe=MoePlan(...) a top_k, an expert_budget, a ratio or a beta above 0"
            )
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise OptionsError(f"input_ids must be int64 [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
        batch, rows = input_ids.shape
        if not 1 <= rows <= self.draft_len + 1:
            raise OptionsError(
                f"input_ids has {rows} rows; this function was made for 1..{self.draft_len + 1} (draft_len={self.draft_len})"
            )
        held = cache_batch(self.cache)
        if held is not None and held != batch:
            raise OptionsError(f"input_ids has batch {batch}, the cache was made for batch {held}")
        return rows

    def _replay(self, step: StepGraph, input_ids: Tensor, held: int) -> Tensor:
        if not input_ids.is_cuda:
            raise OptionsError(f"input_ids must lie on the model's device with cudagraphs=True, got {input_ids.device}")
        try:
            return step(input_ids, held)
        except Exception as error:
            self._raise(error, None)
            raise

    def _complete(self, input_ids: Tensor, position_ids: Tensor | None, attention_mask: Any) -> tuple[Tensor | None, Any]:
        """Pad a 2-D mask to the cache, so that its shape never changes, and derive positions from it."""
        batch, rows = input_ids.shape
        if position_ids is not None and tuple(position_ids.shape) not in ((1, rows), (batch, rows)):
            raise OptionsError(f"position_ids must be [B, T] = {[batch, rows]}, got {list(position_ids.shape)}")
        if isinstance(attention_mask, dict) and not _takes_dicts(self.model) and len(attention_mask) == 1:
            return position_ids, next(iter(attention_mask.values()))
        if not isinstance(attention_mask, Tensor):
            return position_ids, attention_mask
        held = int(self.cache.get_seq_length())
        slots = self.cache.layers[0].keys.shape[2]
        if attention_mask.dim() == 2:
            if tuple(attention_mask.shape) != (batch, held + rows):
                raise OptionsError(
                    f"a 2-D attention_mask must be [B, held + T] = {[batch, held + rows]}, got {list(attention_mask.shape)}"
                )
            if position_ids is None:
                # A slice keeps the strides of the whole, on which Dynamo would guard.
                position_ids = (
                    (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, held:].clone(memory_format=torch.contiguous_format)
                )
            padded = attention_mask.new_ones(batch, slots)
            padded[:, : held + rows] = attention_mask
            return position_ids, padded
        heads = _query_heads(self.model)
        fits = attention_mask.dim() == 4 and tuple(attention_mask.shape[2:]) == (rows, slots)
        if not fits or attention_mask.shape[0] not in (1, batch) or (heads and attention_mask.shape[1] not in (1, heads)):
            raise OptionsError(
                f"a 4-D attention_mask must be [B|1, 1|Hq, {rows}, {slots}] (rows, cache slots), got {list(attention_mask.shape)}"
            )
        types = set(_mask_types(self.model))
        if len(types) > 1 or types & {"sliding_attention", "chunked_attention"}:
            raise OptionsError(
                f"this model has {' and '.join(sorted(types))} layers: one 4-D mask would drop the window. Pass a dict "
                f"with a mask per layer type: {{{', '.join(repr(t) + ': ...' for t in sorted(types))}}}"
            )
        return position_ids, attention_mask

    def report(self) -> RewriteReport:
        """Report of the newest compiled verify graph; before the first call, what :func:`explain` says."""
        from spec_compile.explainer import explain

        verify = [report for report in self.reports if report.kind == "verify"]
        if verify:
            return verify[-1]
        if self.reports:
            return self.reports[-1]
        o = self._options
        return explain(
            self.model, self.cache, self.draft_len, o.plan, max_q_len=o.max_q_len, block_size=o.block_size, lowering=o.lowering
        )

    def reset(self) -> None:
        """Forget the sequence: the next call starts at position 0."""
        self.cache.reset()


def call_model(model: Any) -> Callable[..., Tensor]:
    """The model as ``f(input_ids, position_ids, attention_mask, cache) -> logits``."""
    names = inspect.signature(model.forward).parameters
    if "past_key_values" in names:

        def run_hf(input_ids: Tensor, position_ids: Any, attention_mask: Any, cache: Any) -> Tensor:
            return model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
            ).logits

        return _with_own_code(run_hf)
    if "cache" in names:

        def run_plain(input_ids: Tensor, position_ids: Any, attention_mask: Any, cache: Any) -> Tensor:
            return model(input_ids, cache=cache, position_ids=position_ids, attention_mask=attention_mask)

        return _with_own_code(run_plain)
    raise OptionsError(f"{type(model).__name__}.forward takes neither past_key_values nor cache: cannot verify with it")


def store_for(plan: SparsityPlan, model: Any) -> None:
    """Store weights as the kernels that ``plan`` needs read them; ``spec_compile.restore(model)`` undoes it."""
    if plan.ffn is None or plan.ffn.exact or disabled() or not isinstance(model, torch.nn.Module):
        return
    if not any(parameter.is_cuda for parameter in model.parameters()):
        return
    from spec_compile.models.down_weights import store_by_channels

    turned = store_by_channels(model, plan.ffn.thresholds)
    if turned:
        logger.info("%d weights are stored by channels now, for plan.ffn; spec_compile.restore(model) undoes it", turned)


def _with_own_code(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Dynamo's recompile limit counts per code object: functions for different models must not share one. Under one name they
    would share what Dynamo has seen of sizes, and a second batch or cache length would become a symbol.
    """
    code = run.__code__.replace(co_name=f"{run.__name__}_{next(_numbers)}")
    return types.FunctionType(code, run.__globals__, run.__name__, run.__defaults__, run.__closure__)


def has_expert_loop(model: Any) -> bool:
    """Whether experts of a transformers model run in its eager loop, which cannot be compiled as one graph."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    experts = (module for module in modules if hasattr(module, "has_gate") and hasattr(module, "is_transposed"))
    return any(getattr(getattr(e, "config", None), "_experts_implementation", "") in ("eager", None) for e in experts)


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def _query_heads(model: Any) -> int | None:
    return getattr(_text_config(model), "num_attention_heads", None)


def _takes_dicts(model: Any) -> bool:
    """Models with ``layer_types`` take a dict of masks; those with one window for all layers take one mask."""
    return getattr(_text_config(model), "layer_types", None) is not None


def _mask_types(model: Any) -> list[str]:
    config = _text_config(model)
    if _takes_dicts(model):
        return list(config.layer_types)
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"]
    return ["chunked_attention"] if getattr(config, "attention_chunk_size", None) is not None else []


def check_draft_len(draft_len: int, max_q_len: int) -> None:
    if not isinstance(draft_len, int) or isinstance(draft_len, bool) or not 0 <= draft_len < max_q_len:
        raise OptionsError(f"draft_len must lie in 0..{max_q_len - 1} (one row leads the drafts), got {draft_len!r}")


def check_cache(cache: Any) -> None:
    """
    Raises:
        CacheError: the cache grows, or has no storage yet.
    """
    if cache is None:
        raise CacheError("a cache is needed: VerifyCache(model, max_len=...)")
    layers = getattr(cache, "layers", None)
    if layers is None:
        return
    kind = type(cache).__name__
    if not layers or not all(getattr(layer, "is_compileable", False) for layer in layers):
        raise CacheError(
            f"{kind} grows with every token; a verify function needs a static cache: VerifyCache(model, max_len=...)"
        )
    if not all(getattr(layer, "is_initialized", True) for layer in layers):
        raise CacheError(f"{kind} has no storage yet: call early_initialization, or use VerifyCache(model, max_len=...)")


def cache_batch(cache: Any) -> int | None:
    layers = getattr(cache, "layers", None)
    return int(layers[0].keys.shape[0]) if layers else None
