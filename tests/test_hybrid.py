"""Plans with several sections in one graph: attention, feed-forward layers and experts of one model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from spec_compile import AttentionPlan, FfnPlan, MoePlan, SparsityPlan, VerifyCache, compile_verify

transformers = pytest.importorskip("transformers", minversion="5.17")

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
    found = {}
    for names in (*itertools.combinations(SECTIONS, 1), tuple(SECTIONS)):
        plan = SparsityPlan(**{name: SECTIONS[name] for name in names})
        (sparse, switched_off, again), report = step(plan, True, False, True)
        assert torch.equal(switched_off, exact) and torch.equal(sparse, again), names
        counts = {"attention": len(report.sparse), "ffn": len(report.skipping), "moe": len(report.limited)}
        assert counts == {name: int(name in names) for name in SECTIONS}, names
        found["+".join(names)] = sparse
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([exact, *found.values()], 2))
