"""CUDA graphs for :mod:`spec_compile.attachment`: which calls of transformers' loop a captured step can stand in for."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_compile.attach_calls import slots_of
from spec_compile.errors import CacheError, SpecCompileError
from spec_compile.kernels.blocks import visible
from spec_compile.logs import logger
from spec_compile.plan import SparsityPlan
from spec_compile.state import SparseSwitch
from spec_compile.step_graph import StepGraphs, why_not_captured


class _Handle(Protocol):
    model: Any
    plan: SparsityPlan
    switch: SparseSwitch | None
    draft_len: int

    def run_of(self, name: str) -> Any: ...


class CapturedSteps:
    """Replays one captured step for calls whose positions and masks say nothing new.

    A step is captured for one cache at a time; another cache takes its place.

    Args:
        handle: whose model is called, and which compiles.
    """

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle
        self._windows = mask_windows(handle.model)
        self._outputs: Any = None
        self._steps: StepGraphs | None = None
        self._cache: Any = None
        self._off = False
        self._lock = threading.Lock()

    def learn(self, outputs: Any) -> None:
        """Remember the kind of outputs that the model returns, if they hold nothing but logits and the cache."""
        if isinstance(outputs, dict) and set(outputs) == {"logits", "past_key_values"}:
            self._outputs = type(outputs)

    def replay(self, given: dict[str, Any]) -> Any:
        """The model's outputs, or None where the call has to run uncaptured.

        Args:
            given: arguments of a verify over a static cache, by name.

        Raises:
            CacheError: the cache is too short.
        """
        ids, cache = given["input_ids"], given["past_key_values"]
        rows, room = ids.shape[1], self._handle.draft_len + 1
        hidden = getattr(self._handle.model.config, "output_hidden_states", False)
        if self._off or self._outputs is None or rows > room or hidden:
            return None
        with self._lock:
            if cache is not self._cache:
                self._steps = self._new_steps(cache, ids.shape[0], room)
                self._cache = cache
            if self._steps is None:
                return None
            step = self._steps.of(rows)
            held = step.held()
            if not step.fits(held) or not is_plain_step(given, held, self._windows):
                return None
            try:
                logits = step(ids, held)
            except CacheError:
                raise
            except (SpecCompileError, torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                self._off, self._steps = True, None
                logger.warning("cudagraphs=True: steps are compiled, but not captured: %s", str(error).strip().split("\n", 1)[0])
                return None
        return self._outputs(logits=logits, past_key_values=cache)

    def _new_steps(self, cache: Any, batch: int, rows: int) -> StepGraphs | None:
        reason = why_not_captured(self._handle.model, cache)
        if reason is not None:
            logger.warning("cudagraphs=True: steps are compiled, but not captured: %s", reason)
            return None
        run = self._handle.run_of("captured")

        def logits_of(input_ids: Tensor, position_ids: None, attention_mask: None, cache: Any) -> Tensor:
            logits: Tensor = run(input_ids=input_ids, past_key_values=cache, use_cache=True).logits
            return logits

        return StepGraphs(logits_of, self._handle.model, cache, batch, rows, self._handle.switch, self._handle.plan)


def mask_windows(model: Any) -> dict[str, int | None]:
    """Window of the layers that each mask of a call is for, None where they see everything; "" is a mask for all layers."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    known: dict[str, int | None] = {"full_attention": None}
    if isinstance(window, int):
        known["sliding_attention"] = window
    if len(kinds) == 1 and kinds <= set(known):
        known[""] = known[kinds.pop()]
    return known


def is_plain_step(given: dict[str, Any], held: int, windows: dict[str, int | None]) -> bool:
    """Whether positions and masks say no more than the model would by itself: every row sees the cache up to itself.

    Args:
        given: arguments of a verify over a static cache; a mask is bool or additive ``[B|1, 1|H, T, S]``, 2-D, or a dict of
            such by layer type.
        held: tokens in the cache.
        windows: see :func:`mask_windows`.
    """
    if not set(given) <= {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}:
        return False
    if given.get("logits_to_keep", 0) < 0:
        # A slice from the front.
        return False
    ids, mask = given["input_ids"], given.get("attention_mask")
    rows, slots, device = ids.shape[1], slots_of(given["past_key_values"]), ids.device
    queries = torch.arange(held, held + rows, device=device)[:, None]
    verdicts = []
    if "position_ids" in given:
        if given["position_ids"].dim() != 2:
            return False
        verdicts.append((given["position_ids"] == queries[:, 0]).all())
    for kind, part in (mask if isinstance(mask, dict) else {"": mask}).items():
        if part is None:
            continue
        if part.dim() == 2 and part.shape[1] >= held + rows:
            verdicts.append((part[:, : held + rows] != 0).all())
        elif part.dim() == 4 and tuple(part.shape[2:]) == (rows, slots) and kind in windows:
            keys, window = torch.arange(slots, device=device), windows[kind]
            seen = keys <= queries
            if window is not None:
                seen = seen & (keys > queries - window)
            told = part if part.dtype == torch.bool else torch.where(seen, part == 0, visible(part))
            verdicts.append((told == seen).all())
        else:
            return False
    return bool(torch.stack(verdicts).all()) if verdicts else True
