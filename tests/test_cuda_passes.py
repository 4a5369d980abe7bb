"""What becomes of real models on an H200: which kernels serve them, and that no size is pinned on the way. Runs without one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fake_cuda import Compiled, backend_for, h200
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

import transformers

import spec_compile as sc
from spec_compile import AttentionPlan, FfnPlan, MoePlan, SparsityPlan, _compat
from spec_compile.verify import call_model

# A fixture of another module, made known to this one.
assert h200 is not None
pytestmark = pytest.mark.usefixtures("h200")

LAYERS = 2
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B, Qwen3-30B-A3B, Mixtral-8x7B, Gemma-2-9B, gpt-oss-20b
    "llama": {**HEADS, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
    "qwen3_moe": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "mixtral": {**HEADS, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000},
    "gemma2": {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "vocab_size": 256000,
    },
    "gpt_oss": {
        "hidden_size": 2880, "num_local_experts": 32, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088,
    },
}  # fmt: skip
SELECTS = AttentionPlan(budget=2048, index_topk_freq=2)


def selecting(**changes: Any) -> SparsityPlan:
    return SparsityPlan(attention=dataclasses.replace(SELECTS, **changes))


PLANS: dict[str, tuple[str, SparsityPlan]] = {
    "mean keys": ("llama", selecting()),
    "softmax": ("llama", selecting(block_size=16, aggregate="softmax")),
    "exact scores": ("llama", selecting(representative="exact")),
    "min max": ("llama", selecting(budget=0.125, block_size=32, representative="min_max")),
    "joint": ("gemma2", selecting(block_size=8, joint=True)),
    "channels of a row": ("llama", SparsityPlan(ffn=FfnPlan(threshold=0.05))),
    "channels of all rows": ("llama", SparsityPlan(ffn=FfnPlan(budget=0.1))),
    "expert budget": ("qwen3_moe", SparsityPlan(moe=MoePlan(expert_budget=24, substitute=True), attention=SELECTS)),
    "expert ratio": ("mixtral", SparsityPlan(moe=MoePlan(ratio=0.2))),
}


def model_of(family: str) -> Any:
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=LAYERS, **SHAPES[family])
    attention = "eager" if family in ("gpt_oss", "gemma2") else "sdpa"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.eval()


def compiled(family: str, rows: int, plan: SparsityPlan | None = None, slots: int = 32768) -> Compiled:
    """The verify graph of a step of so many rows, which serves any other number from 2 if it has more than one."""
    model, found = model_of(family), list[Compiled]()
    if plan is not None and plan.ffn is not None:
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight
            layer.mlp.down_proj.weight = torch.nn.Parameter(
                torch.empty(*weight.shape[::-1], dtype=weight.dtype, device="meta").t()
            )
    run = torch.compile(call_model(model), backend=backend_for(plan, found), fullgraph=True)
    ids: Tensor = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    if rows > 1:
        torch._dynamo.maybe_mark_dynamic(ids, 1)
    with torch.no_grad(), _compat.allow_real_constants():
        run(ids, None, None, sc.VerifyCache(model, slots))
    assert len(found) == 1
    return found[0]


def kernels(found: Compiled) -> set[str]:
    return {str(node.target).split(".")[1] for node in found.gm.graph.nodes if str(node.target).startswith("spec_compile.")}


@pytest.mark.parametrize("family", SHAPES)
def test_exact_steps_pin_no_number_of_rows(family: str) -> None:
    found = compiled(family, 9)
    assert isinstance(found.q_len, torch.SymInt) and not found.pinned
    assert found.guards == []
    assert len(found.report.rewritten) == LAYERS
    assert "attention_triton_v1" in kernels(found) and "attention_v1" not in kernels(found)
    if found.report.moes:
        assert {moe.status for moe in found.report.moes} == {"rewritten"} and len(found.report.moes) == LAYERS
        assert "moe_experts_v1" in kernels(found)


@pytest.mark.parametrize(("family", "plan"), PLANS.values(), ids=PLANS)
def test_steps_under_a_plan_pin_no_number_of_rows(family: str, plan: SparsityPlan) -> None:
    found = compiled(family, 9, plan)
    assert isinstance(found.q_len, torch.SymInt) and not found.pinned
    assert found.guards == []
    report = found.report
    assert (len(report.sparse) > 0) == (plan.attention is not None)
    assert (len(report.limited) > 0) == (plan.moe is not None)
    assert (len(report.skipping) > 0) == (plan.ffn is not None)
    notes = [note for record in report.passes for note in record.notes]
    assert f"triton {LAYERS}" in notes and not any("plain torch" in note for note in notes)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_growing_caches_pin_neither_rows_nor_keys(family: str) -> None:
    model, found = model_of(family), list[Compiled]()
    cache = transformers.DynamicCache(config=model.config)
    run = torch.compile(call_model(model), backend=backend_for(None, found), fullgraph=True)
    with torch.no_grad(), _compat.allow_real_constants():
        model(torch.zeros(1, 300, dtype=torch.int64, device="meta"), past_key_values=cache)
        for rows in (9, 12, 16):
            run(torch.zeros(1, rows, dtype=torch.int64, device="meta"), None, None, cache)
    # The first step sees numbers; what the second one makes of them serves all others.
    first, others = found
    assert isinstance(first.q_len, int) and isinstance(others.q_len, torch.SymInt)
    assert not others.pinned and others.guards == []
    assert len(others.report.rewritten) == LAYERS and "attention_triton_v1" in kernels(others)


@pytest.mark.parametrize("rows", [1, 9])
def test_the_fused_feed_forward_layer_serves_all_steps_of_one_graph(rows: int) -> None:
    found = compiled("llama", rows)
    assert "mlp_v1" in kernels(found) and not found.guards and not found.pinned
