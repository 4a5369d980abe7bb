"""Optional exact hooks for transformers models: attention as one marker operator per layer.

``prepare(model)`` switches the model to an attention implementation that emits ``spec_compile::dense_attention`` for
verify-sized calls, with K and V un-repeated and with softcap, sinks and biases named, so that the detector has nothing to
infer. Longer calls (prefill) run PyTorch's SDPA. The structural detector does not need this.

The result is the model's *eager* semantics: transformers' ``sdpa`` implementation drops Gemma 2's softcap, this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import OptionsError
from spec_compile.kernels import library
from spec_compile.options import MAX_ROWS, disabled

NAME = "spec_compile"
_PREVIOUS = "_spec_compile_previous_attention"


def prepare(model: Any) -> Any:
    """Switch a transformers model to the marker hooks; :func:`restore` undoes it.

    Args:
        model: a ``PreTrainedModel``.

    Returns:
        The same model. With ``SPEC_COMPILE_DISABLE=1`` nothing is changed.

    Raises:
        OptionsError: not a transformers model, prepared already, or its class does not use transformers' attention
            interface (the structural detector still covers it).
    """
    if disabled():
        return model
    if not hasattr(model, "set_attn_implementation"):
        raise OptionsError(f"prepare needs a transformers model, got {type(model).__name__}")
    if hasattr(model, _PREVIOUS):
        raise OptionsError("this model is prepared already; call spec_compile.restore(model) first")
    _register()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError, ImportError) as error:
        model.config._attn_implementation = before
        raise OptionsError(f"{type(model).__name__} does not accept attention hooks: {error}") from error
    if model.config._attn_implementation != NAME:
        raise OptionsError(
            f"{type(model).__name__} does not accept attention hooks: it does not use transformers' attention interface"
        )
    setattr(model, _PREVIOUS, before)
    return model


def restore(model: Any) -> Any:
    """Undo :func:`prepare`.

    Raises:
        OptionsError: the model is not prepared.
    """
    if not hasattr(model, _PREVIOUS):
        if disabled():
            return model
        raise OptionsError("this model is not prepared; nothing to restore")
    model.set_attn_implementation(getattr(model, _PREVIOUS))
    delattr(model, _PREVIOUS)
    return model


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_hook)
    AttentionMaskInterface.register(NAME, _mask_hook)


def _mask_hook(*args: Any, **kwargs: Any) -> Tensor | None:
    """SDPA's boolean mask, never skipped: a missing mask would mean top-left causal, which no verify wants."""
    from transformers.masking_utils import sdpa_mask

    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def attention_hook(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q ``[B, Hq, T, D]``, k and v ``[B, Hkv, S, D]``; returns ``[B, T, Hq, Dv]``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = softcap is None and s_aux is None
    rows = query.shape[2]
    if plain and (rows > MAX_ROWS or dropout or attention_mask is None or position_bias is not None):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, position_bias=position_bias, **kwargs
        )
    if dropout:
        raise OptionsError("the spec_compile attention hook is for inference: call model.eval()")
    if position_bias is not None or (attention_mask is None and rows > 1):
        raise OptionsError(
            "attention with a softcap or sinks needs a mask and takes no position bias; spec_compile.restore(model)"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    out = library.dense_attention(query, key, value, attention_mask, scale, float(softcap or 0.0), sinks)
    return out.transpose(1, 2).contiguous(), None
