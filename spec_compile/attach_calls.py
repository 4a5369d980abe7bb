"""What one call of a transformers model asks for: a verify over its cache, or anything else; read without running it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import CacheError

# What a verify may be called with, in the order in which the compiled function gets it.
_ARGUMENTS = (
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position", "logits_to_keep",
    "output_attentions", "output_hidden_states", "return_dict",
)  # fmt: skip


class CallReader:
    """Reads the arguments of a model's forward.

    Args:
        model: a transformers causal LM.
        forward: its own forward.
        max_q_len: largest number of rows that counts as a verify.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], max_q_len: int) -> None:
        self._model, self._max_q_len = model, max_q_len
        self._signature = inspect.signature(forward)
        keep = self._signature.parameters.get("logits_to_keep")
        self._zero_keeps_all = keep is not None and keep.default == 0
        # Early exit drafts by writing a smaller depth here; looking the config up takes longer than all else at every call.
        self._config = model.config.get_text_config(decoder=True)
        self._depth = getattr(self._config, "num_hidden_layers", None)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments that are not None, by name; of a call that forward will refuse, those passed by name."""
        given = dict(kwargs)
        if args:
            with contextlib.suppress(TypeError):
                given = dict(self._signature.bind(*args, **kwargs).arguments)
            for name, parameter in self._signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    given.update(given.pop(name, {}))
        return {name: value for name, value in given.items() if value is not None}

    def check_batch(self, given: dict[str, Any]) -> None:
        """
        Raises:
            CacheError: the cache is a ``VerifyCache`` made for another batch.
        """
        ids: Any = given.get("input_ids")
        cache: Any = given.get("past_key_values")
        if isinstance(ids, Tensor) and hasattr(cache, "require_room") and cache.layers[0].keys.shape[0] != ids.shape[0]:
            raise CacheError(
                f"the cache was made for batch {cache.layers[0].keys.shape[0]}, the call has {ids.shape[0]} sequences (beams "
                f"count, too): handle.new_cache(max_len=..., batch={ids.shape[0]})"
            )

    def other_purpose(self, given: dict[str, Any]) -> str:
        """Why the call is no verify, "" if it is one."""
        ids, cache = given.get("input_ids"), given.get("past_key_values")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return "prefill: called without input_ids [B, T]"
        if cache is None or not hasattr(cache, "get_seq_length"):
            return "no cache"
        if getattr(self._config, "num_hidden_layers", None) != self._depth:
            return "draft: only the first layers run (early exit)"
        if not 1 <= ids.shape[1] <= self._max_q_len:
            return f"more than {self._max_q_len} rows: a prompt, or more drafts than max_q_len allows"
        if int(cache.get_seq_length()) == 0:
            return "prefill: the cache is empty"
        keep = given.get("logits_to_keep")
        if isinstance(keep, int) and 0 < keep < ids.shape[1]:
            return "prefill: logits of the last rows only"
        return ""

    def refusal(self, given: dict[str, Any]) -> str:
        """Why a verify cannot be compiled over any cache, "" if it can."""
        if self._model.training:
            return "the model is in training mode: call model.eval()"
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in self._model.parameters()):
            return "gradients are enabled: call under torch.no_grad() or torch.inference_mode()"
        if given.get("output_attentions", getattr(self._model.config, "output_attentions", False)):
            return "output_attentions asks for attention weights, which the rewritten attention never holds: leave it out"
        odd = [name for name in given if name not in _ARGUMENTS]
        if odd:
            return f"called with {', '.join(sorted(odd))}, which a verify does not take"
        if isinstance(given.get("logits_to_keep"), Tensor):
            return "logits_to_keep is a tensor: pass a number, or leave it out"
        return ""

    def arguments(self, given: dict[str, Any], kind: str) -> dict[str, Any]:
        """What the compiled function gets; sizes that change from step to step are marked, so that few graphs serve all.

        ``kind`` is that of the cache (:func:`cache_kind`).
        """
        call = {name: given[name] for name in _ARGUMENTS if name in given}
        rows, cache = call["input_ids"].shape[1], call["past_key_values"]
        if self._zero_keeps_all and call.get("logits_to_keep", 0) >= rows:
            # A number would become part of the graph.
            call.pop("logits_to_keep", None)
        growing = kind == "growing"
        mask = call.get("attention_mask")
        for part in mask.values() if isinstance(mask, dict) else [mask]:
            if isinstance(part, Tensor) and part.dim() == 2 and (growing or part.shape[1] != slots_of(cache)):
                _mark(part, 1)
            elif isinstance(part, Tensor) and part.dim() == 4:
                _mark(part, 2, when=rows > 1)
                _mark(part, 3, when=growing)
        _mark(call["input_ids"], 1, when=rows > 1)
        if isinstance(call.get("position_ids"), Tensor):
            _mark(call["position_ids"], -1, when=rows > 1)
        if growing:
            for layer in cache.layers:
                _mark(layer.keys, 2)
                _mark(layer.values, 2)
        return call


def _mark(tensor: Tensor, dim: int, when: bool = True) -> None:
    if when:
        torch._dynamo.maybe_mark_dynamic(tensor, dim % tensor.dim())


def slots_of(cache: Any) -> int:
    """Slots of a static cache."""
    return int(cache.layers[0].keys.shape[2])


def cache_kind(cache: Any) -> tuple[str, str]:
    """``static`` or ``growing`` and "", or "" and the reason why a verify over this cache is left alone."""
    from transformers.cache_utils import DynamicLayer, StaticIndexedLayer, StaticLayer

    layers = getattr(cache, "layers", None)
    name = type(cache).__name__
    if not layers:
        return "", f"{name} has no layers of transformers' kind: use handle.new_cache(max_len=...)"
    if getattr(cache, "offloading", False):
        return "", f"{name} offloads its layers: use handle.new_cache(max_len=...)"
    if all(isinstance(layer, StaticLayer) and not isinstance(layer, StaticIndexedLayer) for layer in layers):
        if all(layer.is_initialized for layer in layers):
            return "static", ""
        return "", f"{name} has layers without storage: use handle.new_cache(max_len=...)"
    if all(type(layer) is DynamicLayer for layer in layers):
        return "growing", ""
    odd = next(type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer)
    return "", f"{name} has layers of kind {odd}, which do not compile into one graph: use handle.new_cache(max_len=...)"
