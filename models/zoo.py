"""Tiny random Hugging Face models, one per family: small enough for CPU tests, shaped like the real ones.

Weights are drawn large enough that every term of the attention counts: a dropped mask, softcap, sink logit or ALiBi
bias shows in the logits. ``transformers`` is imported on use only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCAB, WINDOW = 128, 16
_HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP, _POSITIONS = 64, 4, 2, 16, 96, 512


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: key in :data:`FAMILIES`.
        config: makes the config.
        implementations: attention implementations that the family supports, of ``sdpa`` and ``eager``.
        layers: attention layers of the tiny model.
        outcome: ``rewritten`` or ``refused``, expected of every attention.
        reason: fragment of the expected refusal.
        padding_mask: whether forward needs a 2-D ``attention_mask`` over the whole cache to trace into one graph.
        positions: whether forward takes ``position_ids``.
        mlps: dense feed-forward layers and shared experts of the tiny model; default one a layer.
    """

    name: str
    config: Callable[[], Any]
    implementations: tuple[str, ...] = ("sdpa", "eager")
    layers: int = 2
    outcome: str = "rewritten"
    reason: str = ""
    padding_mask: bool = False
    positions: bool = True
    mlps: int = -1

    def __post_init__(self) -> None:
        if self.mlps < 0:
            object.__setattr__(self, "mlps", self.layers)


def _config(cls: str, /, layers: int = 2, **fields: Any) -> Callable[[], Any]:
    """Config factory with the sizes that most families share; a field given as None keeps the family's default."""
    common = {
        "vocab_size": VOCAB, "hidden_size": _HIDDEN, "intermediate_size": _MLP, "num_hidden_layers": layers,
        "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "max_position_embeddings": _POSITIONS,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    wanted = {key: value for key, value in {**common, **fields}.items() if value is not None}

    def make() -> Any:
        import transformers

        return getattr(transformers, cls)(**wanted)

    return make


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]


_MOE: dict[str, Any] = {"experts_implementation": "batched_mm", "num_experts_per_tok": 2}
_MHA: dict[str, Any] = {"num_key_value_heads": None}
_DIM: dict[str, Any] = {"head_dim": _HEAD_DIM}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": _HIDDEN, "n_layer": 2, "n_head": _HEADS, "n_positions": _POSITIONS, "n_inner": _MLP,
    "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "max_position_embeddings": None,
    "intermediate_size": None, "num_key_value_heads": None,
}  # fmt: skip
_OPT: dict[str, Any] = {
    "ffn_dim": _MLP, "word_embed_proj_dim": _HIDDEN, "intermediate_size": None, "num_key_value_heads": None,
}  # fmt: skip
_BLOOM: dict[str, Any] = {
    "n_layer": 2, "n_head": _HEADS, "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None,
    "num_key_value_heads": None, "max_position_embeddings": None,
}  # fmt: skip
# Latent ranks and head sizes that all differ, so that a mixed-up axis cannot pass.
_MLA: dict[str, Any] = {
    "num_key_value_heads": _HEADS, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": _POSITIONS // 4,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
_LLAMA4: dict[str, Any] = {
    "intermediate_size_mlp": _MLP, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW,
    "no_rope_layers": [1, 0, 1, 0], "floor_scale": 8, "interleave_moe_layer_step": 2,
}  # fmt: skip

_ALL = (
    Family("llama", _config("LlamaConfig", **_DIM)),
    Family("qwen2", _config("Qwen2Config")),
    Family("qwen3", _config("Qwen3Config", **_DIM)),
    Family("mistral", _config("MistralConfig", sliding_window=WINDOW, **_DIM)),
    Family("gemma2", _config(
        "Gemma2Config", sliding_window=WINDOW, layer_types=_alternating(2), attn_logit_softcapping=2.0,
        query_pre_attn_scalar=_HEAD_DIM, **_DIM,
    )),
    Family("gemma3", _config(
        "Gemma3TextConfig", layers=4, sliding_window=WINDOW, layer_types=_alternating(4),
        query_pre_attn_scalar=_HEAD_DIM, **_DIM,
    ), layers=4),
    Family("phi", _config("PhiConfig")),
    Family("phi3", _config("Phi3Config", sliding_window=WINDOW)),
    Family("gpt_neox", _config("GPTNeoXConfig", **_MHA)),
    Family("gpt2", _config("GPT2Config", **_GPT2)),
    Family("opt", _config("OPTConfig", **_OPT), padding_mask=True),
    Family(
        "bloom", _config("BloomConfig", **_BLOOM), implementations=("eager",), padding_mask=True, positions=False,
    ),
    Family("olmo2", _config("Olmo2Config")),
    Family("cohere", _config("CohereConfig", logit_scale=1.0)),
    Family("starcoder2", _config("Starcoder2Config", sliding_window=WINDOW)),
    Family("glm4", _config("Glm4Config", **_DIM)),
    Family("mixtral", _config("MixtralConfig", sliding_window=WINDOW, num_local_experts=4, **_DIM, **_MOE), mlps=0),
    Family("qwen3_moe", _config("Qwen3MoeConfig", num_experts=4, moe_intermediate_size=32, **_DIM, **_MOE), mlps=0),
    Family("olmoe", _config("OlmoeConfig", num_experts=4, **_MOE), mlps=0),
    Family("gpt_oss", _config(
        "GptOssConfig", sliding_window=WINDOW, layer_types=_alternating(2), num_local_experts=4, rope_parameters=_YARN,
        **_DIM, **_MOE,
    ), implementations=("eager",), mlps=0),
    Family("deepseek_v3", _config("DeepseekV3Config", **_MLA, **_MOE), outcome="refused", reason="MLA latent cache"),
    Family("llama4", _config("Llama4TextConfig", layers=4, **_DIM, **_LLAMA4), layers=4),
)  # fmt: skip

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def build(
    name: str, attn_implementation: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> torch.nn.Module:
    """A random model of the family in eval mode; the same arguments give the same weights.

    Args:
        name: key of :data:`FAMILIES`.
        attn_implementation: one of the family's ``implementations``.
        seed, dtype: of the weights.
        overrides: config fields to set afterwards, e.g. ``attn_logit_softcapping=None``.

    Raises:
        ValueError: the family does not support the implementation.
    """
    family = FAMILIES[name]
    if attn_implementation not in family.implementations:
        raise ValueError(f"{name} supports {family.implementations}, got {attn_implementation!r}")
    from transformers import AutoModelForCausalLM

    config = family.config()
    for key, setting in overrides.items():
        setattr(config, key, setting)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    _randomise(model, seed)
    return model.eval()


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for path, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        if path.endswith("sinks"):
            weight.copy_(noise)
        elif path.endswith("bias"):
            weight.copy_(noise * 0.1)
        elif weight.dim() >= 2:
            weight.copy_(noise * 0.2)
        else:
            # Norm weights keep their meaning (around 1, or around 0 for Gemma); biases get a small value.
            weight.add_(noise * 0.1)
