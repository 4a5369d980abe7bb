"""On a CUDA device: stock ``generate`` over an attached model, with and without captured steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import spec_compile as sc
from spec_compile.models import zoo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW_TOKENS = 60


@pytest.fixture(autouse=True)
def no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def ready(family: str, attention: str) -> Any:
    model: Any = zoo.build(family, attention).cuda()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(length: int) -> Tensor:
    return torch.randint(1, 100, (1, 7), device="cuda").repeat(1, -(-length // 7))[:, :length]


def generate(model: Any, ids: Tensor, **extra: Any) -> Tensor:
    torch.manual_seed(1)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids), **extra}
    found: Tensor = model.generate(ids, **settings)
    return found


@pytest.mark.parametrize(
    "family, attention",
    [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3_moe", "sdpa")],
)
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_prompt_lookup_equals_greedy(family: str, attention: str, cudagraphs: bool) -> None:
    model, ids = ready(family, attention), prompt(50)
    expected = generate(model, ids)
    with sc.attach(model, strict=True, cudagraphs=cudagraphs) as handle:
        for _ in range(2):
            found = generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=120))
            assert torch.equal(expected, found)
        assert handle.counters.verify and (handle.counters.captured > 0) == cudagraphs
        # A growing cache is never captured.
        captured = handle.counters.captured
        # Mixtures over growing caches take more graphs than Dynamo allows there.
        if family == "llama":
            assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8))
        assert handle.counters.captured == captured
    assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8))


def test_assistant_and_sampling_with_captured_steps() -> None:
    model, ids = ready("llama", "sdpa"), prompt(50)
    for extra in ({"assistant_model": ready("llama", "sdpa")}, {"assistant_early_exit": 1}, {"do_sample": True}):
        extra = extra if "do_sample" not in extra else {**extra, "prompt_lookup_num_tokens": 8}
        expected = generate(model, ids, **extra)
        with sc.attach(model, strict=True, cudagraphs=True, draft_len=20) as handle:
            found = generate(model, ids, **extra, past_key_values=handle.new_cache(max_len=120))
        assert handle.counters.captured and torch.equal(expected, found)


def test_case_14_outputs_of_replays_survive_the_next_steps() -> None:
    model = ready("llama", "sdpa")
    with torch.no_grad(), sc.attach(model, cudagraphs=True) as handle:
        for cache in (handle.new_cache(max_len=200), DynamicCache(config=model.config)):
            model(prompt(40), past_key_values=cache)
            held, copies = [], []
            for _ in range(10):
                held.append(model(prompt(4), past_key_values=cache).logits)
                copies.append(held[-1].clone())
                cache.crop(-2)
            assert all(torch.equal(kept, then) for kept, then in zip(held, copies))
    assert handle.counters.captured == 9


def test_a_model_that_cannot_be_captured_runs_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Bloom builds its ALiBi bias from the mask, which a captured step does not pass."""
    model, ids = ready("bloom", "eager"), prompt(50)
    expected = generate(model, ids)
    with caplog.at_level(logging.WARNING), sc.attach(model, cudagraphs=True) as handle:
        found = generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=120))
    assert torch.equal(expected, found) and handle.counters.verify and handle.counters.captured == 0
    assert "not captured" in caplog.text


def test_sparse_steps_with_captured_graphs() -> None:
    model, ids = ready("llama", "sdpa"), prompt(150)
    expected = generate(model, ids)
    plan = sc.SparsityPlan(attention=sc.AttentionPlan(budget=16, block_size=16, sink=1, recent=1, min_context=0))
    with sc.attach(model, plan, cudagraphs=True) as handle:
        generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=220))
        handle.sparse = False
        found = generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=220))
    assert torch.equal(expected, found) and len(handle.report().sparse) == 2
