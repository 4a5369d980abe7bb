"""Plans with several sections in one graph: attention, feed-forward layers and experts of one model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import transformers
from decoding_cases import endless, greedy_tokens, repeating
from export_steps import DRAFTS, MAX_LEN, close, run_steps

import spec_compile as sc
from spec_compile import AttentionPlan, AuditPlan, FfnPlan, MoePlan, SparsityPlan, VerifyCache, compile_verify
from spec_compile.drafters import Scripted
from spec_compile.loading import load_model, tiny_moe_path
from spec_compile.metrics import StepBytes
from spec_compile.models.zoo import build

NEW = 16
SECTIONS: dict[str, Any] = {
    "attention": AttentionPlan(budget=8, block_size=8, recent=1), "ffn": FfnPlan(threshold=0.2), "moe": MoePlan(top_k=1),
}  # fmt: skip


def tokens(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, rows), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def qwen2_moe() -> Any:
    """Experts beside a shared one in every layer."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        experts_implementation="batched_mm", max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.eval()


@torch.no_grad()
def test_all_sections_of_a_plan_in_one_graph() -> None:
    model = qwen2_moe()
    cache = VerifyCache(model, 128)
    model(input_ids=tokens(90, 0), past_key_values=cache, use_cache=True)
    drafts = tokens(5, 1)

    def step(plan: SparsityPlan | None, *modes: bool) -> tuple[list[torch.Tensor], Any]:
        verify = compile_verify(model, cache, 8, plan, codegen="eager", strict=True)
        found = []
        for sparse in modes:
            found.append(verify(drafts, sparse=sparse))
            cache.crop(-5)
        return found, verify.report()

    [exact], _ = step(None, False)
    (sparse, switched_off, again), report = step(SparsityPlan(**SECTIONS), True, False, True)
    assert torch.equal(switched_off, exact) and torch.equal(sparse, again) and not torch.equal(sparse, exact)
    assert (len(report.sparse), len(report.skipping), len(report.limited)) == (1, 1, 1)


@torch.no_grad()
def test_exported_with_weights_stored_by_channels(tmp_path: Path) -> None:
    """After ``prepare`` turned the last weights."""
    model: Any = sc.prepare(build("llama", "sdpa", num_hidden_layers=1), ffn=True)
    down = model.model.layers[0].mlp.down_proj.weight
    assert not down.is_contiguous()
    plan = SparsityPlan(ffn=FfnPlan(budget=0.5))
    verify = compile_verify(model, VerifyCache(model, MAX_LEN), DRAFTS, plan, codegen="eager", strict=True)
    wanted = run_steps(verify, verify.cache, True, 20)
    [layer] = verify.report().mlps
    # Gate whole, and half of the other two.
    assert layer.sparse_bytes * 3 == layer.weight_bytes * 2 and "of their weights" in str(verify.report())
    read = StepBytes(model, verify.cache, plan, verify.report(), [])
    assert read.weights(3) - read.weights(3, sparse=True) == layer.weight_bytes - layer.sparse_bytes
    for flavour in ("ops", "portable"):
        manifest = sc.export(verify, tmp_path / "verify.pt2", flavour=flavour, batch=1, mask="causal", strict=True)
        assert manifest.report["skipping"] == 1 and manifest.rows_vote and not down.is_contiguous()
        assert ("spec_compile.mlp_sparse_v1" in manifest.operators) == (flavour == "ops")
        assert [value.role for value in manifest.inputs].count("sparse") == 1
    run = sc.load(tmp_path / "verify.pt2")
    close(run_steps(run, run.cache, True, 20), wanted)


@functools.cache
def repeated() -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, prompts, and what it makes of them by itself."""
    model, prompts = endless(), repeating((60, 7, 33))
    return model, prompts, greedy_tokens(model, prompts, NEW)


@pytest.mark.parametrize(
    "plan",
    [
        SparsityPlan(ffn=FfnPlan(threshold=0.3), audit=AuditPlan(adapt=False)),
        SparsityPlan(
            attention=AttentionPlan(budget=16, block_size=8, recent=1), ffn=FfnPlan(budget=0.3), audit=AuditPlan(adapt=False)
        ),
    ],
    ids=["threshold", "budget and attention"],
)
def test_audited_tokens_are_those_of_the_model(plan: SparsityPlan) -> None:
    model, prompts, wanted = repeated()
    found = {
        mode: sc.generate(model, prompts, mode=mode, plan=plan, max_new_tokens=NEW, codegen="eager")
        for mode in ("audited", "sparse")
    }
    assert found["audited"].tokens == wanted and found["sparse"].tokens != wanted
    forwards = found["audited"].metrics.forwards
    assert forwards["sparse"] > 0 and forwards["audit"] > 0
    report = found["audited"].report
    assert report is not None and len(report.skipping) == len(report.mlps) > 0


@torch.no_grad()
def test_attached() -> None:
    model, prompts, wanted = repeated()
    ids = torch.tensor([prompts[0]])
    with sc.attach(model, SparsityPlan(ffn=FfnPlan(threshold=0.3)), codegen="eager") as handle:

        def generate() -> list[int]:
            cache = handle.new_cache(max_len=256)
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=4, eos_token_id=None
            )
            return out[0, ids.shape[1] :].tolist()

        assert generate() != wanted[0] and len(handle.report().skipping) == len(handle.report().mlps)
        compiled = len(handle.reports)
        handle.sparse = False
        assert generate() == wanted[0] and len(handle.reports) == compiled


def test_which_plans_let_rows_vote() -> None:
    votes = {
        FfnPlan(threshold=0.1): False, FfnPlan(threshold=0.1, joint=True): True, FfnPlan(budget=0.5): True,
        FfnPlan(budget=0.5, joint=True): True, FfnPlan(threshold=0.0, joint=True): False, FfnPlan(): False,
    }  # fmt: skip
    assert all(SparsityPlan(ffn=ffn).rows_vote == wanted for ffn, wanted in votes.items())
    assert SparsityPlan(attention=AttentionPlan(budget=64)).rows_vote and SparsityPlan(moe=MoePlan(expert_budget=2)).rows_vote
    assert not SparsityPlan(attention=AttentionPlan(), moe=MoePlan(top_k=1)).rows_vote


@pytest.mark.parametrize("sections", [("moe",), ("attention", "ffn", "moe")], ids=["moe", "all"])
def test_audited_tokens_of_a_mixture(sections: tuple[str, ...]) -> None:
    model, prompts = qwen2_moe(), repeating((60, 7, 33))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    wanted = greedy_tokens(model, prompts, NEW)
    plan = SparsityPlan(**{name: SECTIONS[name] for name in sections}, audit=AuditPlan(adapt=False))
    out = sc.generate(model, prompts, mode="audited", plan=plan, max_new_tokens=NEW, codegen="eager")
    assert out.tokens == wanted and out.report is not None and len(out.report.limited) > 0
    assert out.metrics.forwards["sparse"] > 0


def test_experts_left_unread_make_sparse_steps_worth_taking() -> None:
    """The trained mixture of the repository; where the cache alone counts, a budget of experts saves nothing."""
    model, tokenizer = load_model(tiny_moe_path())
    model.generation_config.eos_token_id = None
    ids = tokenizer("def add(a, b):\n    return a + b\n", return_tensors="pt").input_ids
    wanted = greedy_tokens(model, ids.tolist(), 16)
    text = [*ids[0].tolist(), *wanted[0]]

    def drafts(tokens: Any) -> list[int]:
        """Eight, the first of them right: nine rows choose up to 16 experts, or six."""
        true = text[len(tokens) : len(tokens) + 8]
        return [token if i < 1 else (token + 1) % 4096 for i, token in enumerate(true)]

    found = {}
    for cost in ("all", "kv"):
        plan = SparsityPlan(moe=MoePlan(expert_budget=6, substitute=True), audit=AuditPlan(cost=cost))
        out = sc.generate(
            model, ids, drafter=Scripted(drafts, max_drafts=8), mode="audited", plan=plan, max_new_tokens=16, eos_token_id=[],
            codegen="eager",
        )  # fmt: skip
        assert out.tokens == wanted
        found[cost] = out.metrics
    assert found["all"].forwards["sparse"] > 0 == found["kv"].forwards["sparse"]
    assert "not known to read fewer bytes (K and V)" in found["kv"].notes[0]


def test_steps_that_save_nothing_are_said_to() -> None:
    model, prompts, wanted = repeated()
    plan = SparsityPlan(ffn=FfnPlan(threshold=0.3))
    out = sc.generate(model, prompts, mode="audited", plan=plan, max_new_tokens=NEW, codegen="eager")
    assert out.tokens == wanted and out.metrics.forwards["sparse"] == 0
    assert "not known to read fewer bytes (weights, K and V)" in out.metrics.notes[0]
