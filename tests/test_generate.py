"""transformers' own generate(), unchanged, through ``model.compile(backend="spec_compile")`` and VerifyCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile.models import zoo
from spec_compile.report import RewriteReport, recorded

NEW_TOKENS = 40


class Sink(list[RewriteReport]):
    def __call__(self, report: RewriteReport) -> None:
        self.append(report)


def ready(family: str, attention: str = "sdpa") -> Any:
    model = zoo.build(family, attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(length: int) -> Tensor:
    """A repeating prompt, so that prompt lookup finds drafts."""
    return torch.randint(1, 100, (1, 7)).repeat(1, -(-length // 7))[:, :length]


def generate(model: Any, ids: Tensor, **extra: Any) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, **extra)


def cache_for(model: Any, ids: Tensor) -> sc.VerifyCache:
    return sc.VerifyCache(model, max_len=ids.shape[1] + NEW_TOKENS)


@pytest.mark.parametrize(
    "family, attention",
    [("llama", "sdpa"), ("llama", "eager"), ("qwen3_moe", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gemma3", "sdpa"),
     ("gpt_oss", "eager"), ("opt", "sdpa"), ("gpt2", "sdpa"), ("deepseek_v3", "sdpa")],
)  # fmt: skip
def test_prompt_lookup_equals_greedy(family: str, attention: str) -> None:
    """Windows of the sliding families are shorter than the prompt, so that a rejected draft would lose what slid out."""
    model, ids = ready(family, attention), prompt(50)
    expected = generate(model, ids)
    sink = Sink()
    model.compile(backend="spec_compile", options={"codegen": "eager", "on_report": sink})
    found = generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=cache_for(model, ids))
    assert torch.equal(expected, found)
    verify = [report for report in sink if report.kind == "verify"]
    assert 1 <= len(verify) <= 3
    layers = len(cache_for(model, ids).layers)
    for report in verify:
        assert len(report.refused if family == "deepseek_v3" else report.rewritten) == layers


@pytest.mark.parametrize("length", [6, 7, 8, 9, 40])
def test_prompts_around_the_window(length: int) -> None:
    model, ids = ready("gemma2", "eager"), prompt(length)
    expected = generate(model, ids)
    model.compile(backend="spec_compile", options={"codegen": "eager"})
    assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=4, past_key_values=cache_for(model, ids)))


def test_assistant_model() -> None:
    model, assistant, ids = ready("llama"), ready("llama"), prompt(40)
    # A noisy copy drafts well but not perfectly.
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.02)
    expected = generate(model, ids)
    sink = Sink()
    model.compile(backend="spec_compile", options={"codegen": "eager", "on_report": sink})
    found = generate(model, ids, assistant_model=assistant, past_key_values=cache_for(model, ids))
    assert torch.equal(expected, found)
    assert 1 <= sum(report.kind == "verify" for report in sink) <= 3


def test_early_exit() -> None:
    model, ids = ready("llama"), prompt(30)
    expected = generate(model, ids)
    model.compile(backend="spec_compile", options={"codegen": "eager"})
    found = generate(model, ids, assistant_early_exit=1, past_key_values=cache_for(model, ids))
    assert torch.equal(expected, found)


def test_sampling_keeps_the_seeded_stream() -> None:
    model, ids = ready("llama"), prompt(30)

    def sample() -> Tensor:
        torch.manual_seed(1)
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True, prompt_lookup_num_tokens=8,
            past_key_values=cache_for(model, ids),
        )  # fmt: skip

    expected = sample()
    model.compile(backend="spec_compile", options={"codegen": "eager"})
    assert torch.equal(expected, sample())


def test_compile_config() -> None:
    """Plain decoding with transformers' CompileConfig: T = 1 steps over a static cache."""
    from transformers import CompileConfig, GenerationConfig

    model, ids = ready("llama"), prompt(30)
    expected = generate(model, ids)
    config = CompileConfig(backend="spec_compile", mode=None, options={"codegen": "eager"})
    config._compile_all_devices = True
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, compile_config=config)
    with recorded() as reports:
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, past_key_values=cache_for(model, ids)
        )
    assert torch.equal(expected, found)
    assert any(report.kind == "verify" and report.q_len == 1 for report in reports)


def test_growing_cache_works_exactly() -> None:
    model, ids = ready("llama"), prompt(30)
    expected = generate(model, ids)
    sink = Sink()
    model.compile(backend="spec_compile", options={"codegen": "eager", "on_report": sink})
    assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8))
    rewritten = [entry for report in sink for entry in report.rewritten]
    assert rewritten and {entry.cache for entry in rewritten} == {"growing"}


def test_prepared_model() -> None:
    model, ids = ready("gpt_oss", "eager"), prompt(30)
    expected = generate(model, ids)
    sc.prepare(model)
    sink = Sink()
    model.compile(backend="spec_compile", options={"codegen": "eager", "on_report": sink})
    assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=cache_for(model, ids)))
    assert {entry.anchor for report in sink for entry in report.rewritten} == {"marker"}


def test_second_sequence_in_the_same_cache() -> None:
    model = ready("llama")
    first, second = prompt(30), prompt(33)
    expected = generate(model, second)
    model.compile(backend="spec_compile", options={"codegen": "eager"})
    cache = cache_for(model, second)
    generate(model, first, prompt_lookup_num_tokens=8, past_key_values=cache)
    cache.reset()
    assert torch.equal(expected, generate(model, second, prompt_lookup_num_tokens=8, past_key_values=cache))


def test_cache_too_short_fails_before_it_writes_out_of_bounds() -> None:
    model, ids = ready("llama"), prompt(150)
    model.compile(backend="spec_compile", options={"codegen": "eager"})
    with pytest.raises(sc.errors.CacheError, match=r"too short.*max_len is 80.*VerifyCache\(model, max_len"):
        generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=sc.VerifyCache(model, max_len=80))


@pytest.mark.slow
def test_inductor_generation() -> None:
    model, ids = ready("llama"), prompt(50)
    expected = generate(model, ids)
    model.compile(backend="spec_compile")
    assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=cache_for(model, ids)))
