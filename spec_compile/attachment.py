"""``attach``: transformers' own ``generate`` over a model whose verify calls are compiled, and whose other calls are not.

Assisted generation calls the model as a plain module, so it is enough to replace ``forward`` on the instance. A call is a
verify if it has 1..``max_q_len`` rows, wants logits of all of them, and comes with a cache that holds tokens; everything else
runs the model's own forward.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_compile import _compat
from spec_compile.attach_calls import CallReader, cache_kind
from spec_compile.attach_capture import CapturedSteps
from spec_compile.backend import compile_graph, switch_of
from spec_compile.classify import EXPERT_LOOP
from spec_compile.errors import OptionsError, SpecCompileError, StrictError
from spec_compile.logs import logger
from spec_compile.options import Options, disabled
from spec_compile.report import RewriteReport
from spec_compile.verify import _with_own_code, check_draft_len, has_expert_loop, store_for

_DISABLED = "SPEC_COMPILE_DISABLE is set"
# Guards what is attached, in all threads.
_lock = threading.RLock()
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attach(
    model: Any, plan: Any = None, *, draft_len: int = 8, strict: bool = False, cudagraphs: bool = False, **options: Any
) -> AttachHandle:
    """Send the verify calls of ``model`` to a compiled function until the handle is detached.

    Takes effect at once; the handle is a context manager that detaches at the end of its block::

        with sc.attach(model) as handle:
            model.generate(**inputs, past_key_values=handle.new_cache(max_len=8192), prompt_lookup_num_tokens=8)

    Args:
        model: a decoder-only transformers model with ``generate``.
        plan: sparsity plan; default exact. Under a sparse plan ``generate`` no longer returns the tokens of the model alone. As
            in :func:`~spec_compile.compile_verify`, ``plan.ffn`` has last weights stored by channels on a GPU, in place and also
            after the handle is detached; ``restore(model)`` undoes it.
        draft_len: with ``cudagraphs``, captured steps have ``draft_len + 1`` rows, and fewer are padded to that; longer ones
            run compiled, but not captured.
        strict: raise where a verify is refused or does not compile, instead of warning.
        cudagraphs: on a CUDA device, capture whole steps over a :meth:`~AttachHandle.new_cache` cache and replay them.
        options: further backend options (``max_q_len``, ``block_size``, ``lowering``, ``codegen``, ``dump``, ``on_report``).

    Raises:
        OptionsError: not such a model, wrapped or compiled already, attached already, or a bad option.
        PlanError: a bad plan.
    """
    _compat.check_installed("torch")
    _compat.check_installed("transformers")
    settings = Options.parse({**options, "plan": plan, "strict": strict, "cudagraphs": cudagraphs})
    check_draft_len(draft_len, settings.max_q_len)
    _check_model(model)
    if settings.plan.audit is not None:
        logger.warning("plan.audit has no effect here: transformers' loop does not audit steps; spec_compile.generate does")
    with _lock:
        if model in _attached:
            raise OptionsError(
                f"this {type(model).__name__} is attached already: detach() its handle first (model.forward.handle, unless "
                "forward was replaced since)"
            )
        return AttachHandle(model, draft_len, settings)


def _check_model(model: Any) -> None:
    name, config = type(model).__name__, getattr(model, "config", None)
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise OptionsError("attach compiles by itself: give it the model, not torch.compile(model)")
    if not isinstance(model, torch.nn.Module) or not hasattr(config, "get_text_config"):
        raise OptionsError(f"attach needs a transformers model, got {name}")
    if model._compiled_call_impl is not None:
        raise OptionsError(
            f"this {name} was compiled by model.compile(), which would trace past attach: load it anew, or use it as it is, "
            "without attach"
        )
    parameters = inspect.signature(model.forward).parameters
    if not hasattr(model, "generate") or not {"input_ids", "past_key_values"} <= parameters.keys():
        raise OptionsError(
            f"{name}.forward takes no past_key_values, or {name} has no generate(): attach the transformers causal LM itself "
            "(of a PEFT model: peft_model.get_base_model())"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise OptionsError(f"{name} is an encoder-decoder model: attach supports decoder-only models")


@dataclasses.dataclass
class CallCounters:
    """Calls of an attached model.

    Attributes:
        verify: calls that the compiled function served.
        captured: those of them that were replays of a CUDA graph.
        rows: rows of all of them.
        passed_through: calls that ran the model's own forward, by reason.
    """

    verify: int = 0
    captured: int = 0
    rows: int = 0
    passed_through: dict[str, int] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        passed = sum(self.passed_through.values())
        captured = f", {self.captured} of them captured" if self.captured else ""
        text = f"{self.verify} verify calls of {self.rows} rows{captured}; {passed} calls passed through"
        return text + "".join(f"; {count} x {reason}" for reason, count in self.passed_through.items())


@dataclasses.dataclass(frozen=True)
class _NotCompiled:
    """Why a verify did not run compiled; ``signature``: of calls that never will, if the model itself takes this one."""

    reason: str
    signature: Any = None


class AttachHandle:
    """Returned by :func:`attach`.

    Attributes:
        model: the attached model.
        plan, switch: of its sparse steps; the switch is None if the plan is exact.
        draft_len: drafts that a captured step has room for.
        counters: what became of its calls.
        reports: of every graph compiled, oldest first.
    """

    def __init__(self, model: Any, draft_len: int, options: Options) -> None:
        self.model, self.draft_len = model, draft_len
        self.counters = CallCounters()
        self.reports: list[RewriteReport] = []
        self.plan, self._sink = options.plan, options.on_report
        self.switch = None if options.plan.exact else switch_of(options.plan)
        store_for(options.plan, model)
        self._options = dataclasses.replace(options, on_report=self._keep, cudagraphs=False)
        self._refused: dict[Any, str] = {}
        self._warned: set[str] = set()
        self._reader = CallReader(model, model.forward, options.max_q_len)
        self._runs: dict[str, Callable[..., Any]] = {}
        self._steps = CapturedSteps(self) if options.cudagraphs and not disabled() else None
        self._forward = AttachedForward(self)
        self._active = True
        model.forward = self._forward
        _attached.add(model)

    @property
    def attached(self) -> bool:
        return self._active

    @property
    def sparse(self) -> bool:
        """Whether steps are sparse; may be set at any time, and compiles nothing anew."""
        return self.switch is not None and self.switch.sparse

    @sparse.setter
    def sparse(self, value: bool) -> None:
        if self.switch is not None:
            self.switch.set(bool(value))
        elif value:
            raise OptionsError("sparse=True needs a plan that is not exact: attach(model, SparsityPlan(...))")

    def new_cache(self, max_len: int, batch: int = 1, dtype: torch.dtype | None = None) -> Any:
        """A :class:`~spec_compile.VerifyCache` for ``generate(..., past_key_values=...)``.

        Each ``max_len`` and ``batch`` has graphs of its own, so let all sequences use one length.

        Raises:
            CacheError: bad sizes, or a model whose cache cannot be rolled back.
        """
        from spec_compile.models.cache import VerifyCache

        return VerifyCache(self.model, max_len=max_len, batch=batch, dtype=dtype)

    def report(self) -> RewriteReport:
        """Report of the newest compiled verify graph; what became of all calls is in its notes."""
        reports = list(self.reports)
        verify = [report for report in reports if report.kind == "verify"]
        nothing = RewriteReport(kind="passed through", reason="no verify call was compiled")
        newest = (verify or reports or [nothing])[-1]
        return dataclasses.replace(newest, notes=[*newest.notes, str(self.counters)])

    def detach(self) -> None:
        """Give the model its own forward back; calls under way finish. Does nothing the second time."""
        with _lock:
            if not self._active:
                return
            self._active = False
            _attached.discard(self.model)
            if self.model.__dict__.get("forward") is self._forward:
                if self._forward.previous is None:
                    del self.model.forward
                else:
                    self.model.forward = self._forward.previous
            else:
                logger.warning("forward was replaced after attach and stays so; the call within it is the model's own again")
            self._runs, self._steps = {}, None
        if self.counters.passed_through and not self.counters.verify:
            logger.warning("no call of %s was compiled: %s", type(self.model).__name__, self.counters)

    def __enter__(self) -> AttachHandle:
        if not self._active:
            raise OptionsError("this handle is detached: attach(model) again")
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "" if self._active else "detached, "
        return f"<AttachHandle of {type(self.model).__name__}: {state}{self.counters}>"

    def _keep(self, report: RewriteReport) -> None:
        self.reports.append(report)
        if self._sink is not None:
            self._sink(report)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._forward.__wrapped__
        given = self._reader.by_name(args, kwargs)
        if type(given.get("input_ids")) not in (Tensor, type(None)):
            # Traced with fake tensors, by us or by others.
            return own(*args, **kwargs)
        self._reader.check_batch(given)
        reason = _DISABLED if disabled() else self._reader.other_purpose(given)
        signature: Any = None
        if not reason:
            kind, unfit = cache_kind(given["past_key_values"])
            reason = self._reader.refusal(given) or unfit
            if reason:
                self._complain(reason)
            else:
                found = self._verify(given, kind)
                if not isinstance(found, _NotCompiled):
                    return found
                reason, signature = found.reason, found.signature
        with _lock:
            self.counters.passed_through[reason] = self.counters.passed_through.get(reason, 0) + 1
        outputs = own(*args, **kwargs)
        if signature is not None:
            # Not before: had the call been at fault, the model's own forward would have raised, and others like it may be right.
            self._refused[signature] = reason
        return outputs

    def _verify(self, given: dict[str, Any], kind: str) -> Any:
        """Outputs of the compiled model, or why there are none."""
        cache, rows = given["past_key_values"], given["input_ids"].shape[1]
        if hasattr(cache, "require_room"):
            cache.require_room(rows)
        steps = self._steps
        outputs = steps.replay(given) if steps is not None and kind == "static" else None
        captured = outputs is not None
        if not captured:
            call = self._reader.arguments(given, kind)
            signature = (kind, *call)
            if signature in self._refused:
                self._complain(self._refused[signature])
                return _NotCompiled(self._refused[signature])
            try:
                # Batches over growing caches, seen in plain decoding only, must not use up the compilations of single sequences.
                batched = kind == "growing" and call["input_ids"].shape[0] > 1
                outputs = self.run_of("growing batch" if batched else kind)(**call)
            except Exception as error:
                reason, final = self._why_not_compiled(error)
                self._complain(reason)
                return _NotCompiled(reason, signature if final else None)
            if steps is not None:
                steps.learn(outputs)
        with _lock:
            self.counters.verify += 1
            self.counters.captured += captured
            self.counters.rows += rows
        return outputs

    def run_of(self, name: str) -> Callable[..., Any]:
        """The compiled forward for one kind of calls; Dynamo counts its recompilations apart from those of others."""
        with _lock:
            if name not in self._runs:
                own, model = self._forward.__wrapped__, self.model
                function = getattr(own, "__func__", None) if getattr(own, "__self__", None) is model else None

                def run(**call: Any) -> Any:
                    # By way of the model, after which Dynamo names the layers.
                    return own(**call) if function is None else function(model, **call)

                def backend(gm: Any, example_inputs: list[Any]) -> Callable[..., Any]:
                    return compile_graph(gm, example_inputs, self._options, self.switch)

                self._runs[name] = torch.compile(_with_own_code(run), backend=backend, fullgraph=True)
            return self._runs[name]

    def _why_not_compiled(self, error: Exception) -> tuple[str, bool]:
        """Reason why Dynamo did not compile a call, and whether it never will. What failed in any other way is raised."""
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, SpecCompileError):
            raise inner from None
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            return "torch._dynamo.config.recompile_limit is reached: use one cache length and batch size, or raise it", False
        if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
            raise error
        if has_expert_loop(self.model):
            return EXPERT_LOOP, True
        logger.debug("a verify could not be compiled", exc_info=True)
        told = error if inner is None else inner
        first = str(told).strip().split("\n", 1)[0]
        return f"the forward does not compile into one graph: {type(told).__name__}: {first}", True

    def _complain(self, reason: str) -> None:
        if self._options.strict:
            raise StrictError(f"a verify call passes through: {reason}")
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("a verify call passes through: %s", reason)


class AttachedForward:
    """What ``model.forward`` is while attached; looks like the model's own forward, which is its ``__wrapped__``.

    A copied or unpickled model has the forward that it would have had without attach.

    Attributes:
        handle: see :class:`AttachHandle`.
        previous: what lay on the instance before, None if forward was the class's.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, handle: AttachHandle) -> None:
        functools.update_wrapper(self, handle.model.forward)
        self.handle, self.previous = handle, handle.model.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.handle.attached:
            return self.__wrapped__(*args, **kwargs)
        return self.handle._call(args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return _itself, (self.__wrapped__,)


def _itself(value: Any) -> Any:
    return value
