"""Optional exact hooks for transformers models: attention as one marker operator per layer, experts as another.

``prepare(model)`` switches the model to an attention implementation that emits ``spec_compile::dense_attention`` for
verify-sized calls, with K and V un-repeated and with softcap, sinks and biases named, so that the detector has nothing to
infer. Longer calls (prefill) run PyTorch's SDPA. The structural detector does not need this.

Experts become one ``spec_compile::moe_experts`` call per MoE layer for verify-sized calls, and transformers' ``grouped_mm`` for
longer ones, so that a model whose experts run in an eager loop (which breaks the graph) can be compiled as well.

With ``ffn=True`` the last projections of feed-forward layers are stored by channels, as the kernel that skips some reads them.

The result is the model's *eager* semantics: transformers' ``sdpa`` implementation drops Gemma 2's softcap, this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import OptionsError
from spec_compile.kernels import availability, library
from spec_compile.kernels.moe import MAX_PAIRS
from spec_compile.models.down_weights import store_by_channels, store_by_outputs
from spec_compile.options import MAX_ROWS, disabled

NAME = "spec_compile"
_PREVIOUS = "_spec_compile_previous_attention"
_PREVIOUS_EXPERTS = "_spec_compile_previous_experts"
# Activation modules whose value the experts' operator computes, by module path and class.
_ACTIVATIONS = {
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
}


def prepare(model: Any, ffn: bool = False) -> Any:
    """Switch a transformers model to the marker hooks; :func:`restore` undoes it.

    Args:
        model: a ``PreTrainedModel``.
        ffn: store the last weights of feed-forward layers by channels, for a plan that skips channels on a GPU: in place, and
            their values and shapes stay. :func:`~spec_compile.compile_verify` does so itself where its plan needs it.

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
    try:
        _prepare_experts(model)
        if ffn:
            store_by_channels(model)
    except BaseException:
        # Whole or not at all: attention is switched already.
        restore(model)
        raise
    return model


def _prepare_experts(model: Any) -> None:
    """Switch experts that transformers dispatches and that are plain tensors; others stay as they are."""
    experts = _experts(model)
    if not experts:
        return
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_hook)
    before = model.get_experts_implementation()
    if "deepgemm_megamoe" in before.values():  # holds its weights in a layout of its own
        return
    on_cuda = any(module.down_proj.is_cuda for module in experts)
    # First, so that a switch that stops half-way can be undone.
    setattr(model, _PREVIOUS_EXPERTS, before)
    model.set_experts_implementation("grouped_mm" if on_cuda and availability.why_no_triton() is not None else NAME)


def _experts(model: Any) -> list[Any]:
    """Modules of experts whose implementation can be switched; none if one of them is quantised."""
    found = [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "is_transposed")]
    for module in found:
        down = getattr(module, "down_proj", None)
        if not isinstance(down, Tensor) or not down.dtype.is_floating_point or down.element_size() < 2:
            return []
    return found


def restore(model: Any) -> Any:
    """Undo :func:`prepare`, and what :func:`~spec_compile.compile_verify` did to the storage of weights.

    Raises:
        OptionsError: the model is not prepared.
    """
    turned = store_by_outputs(model)
    if not hasattr(model, _PREVIOUS):
        if disabled() or turned:
            return model
        raise OptionsError("this model is not prepared; nothing to restore")
    model.set_attn_implementation(getattr(model, _PREVIOUS))
    delattr(model, _PREVIOUS)
    if hasattr(model, _PREVIOUS_EXPERTS):
        experts = getattr(model, _PREVIOUS_EXPERTS)
        delattr(model, _PREVIOUS_EXPERTS)
        model.set_experts_implementation(experts)
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


def experts_hook(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts function: x ``[N, H]``, choice and weight ``[N, K]``; returns ``[N, H]``.

    Choices at or above E (experts of other ranks) add nothing, as in transformers' own functions, which give them weight 0.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    activation = _activation(module)
    few = hidden_states.shape[0] <= MAX_ROWS and top_k_index.numel() <= MAX_PAIRS
    if not few or activation is None or module.down_proj.dtype != hidden_states.dtype:
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    clamped = activation == "swiglu_oai"
    limit, alpha = (float(module.limit), float(module.alpha)) if clamped else (0.0, 0.0)
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return library.moe_experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, *biases, activation, clamped,
        module.is_transposed, limit, alpha,
    )  # fmt: skip


def _activation(module: Any) -> str | None:
    """The operator's name for what the module does between its products, or None."""
    from transformers.integrations.moe import _default_apply_gate
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if not module.has_gate or "_apply_gate" in module.__dict__:
        return None
    gate = type(module)._apply_gate
    if gate is GptOssExperts._apply_gate:
        return "swiglu_oai"
    if gate is not _default_apply_gate:
        return None
    act = module.act_fn
    kind = type(act)
    # What its class computes says nothing where an instance was given another forward, or hooks.
    if isinstance(act, torch.nn.Module) and ("forward" in act.__dict__ or act._forward_hooks or act._forward_pre_hooks):
        return None
    return _ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}")
