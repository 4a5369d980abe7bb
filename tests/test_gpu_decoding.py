"""The decoding loop on a CUDA device: captured steps give the model's tokens, and nothing is captured or compiled twice."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from decoding_cases import endless, greedy_tokens, repeating

import spec_compile as sc
from spec_compile.captured_rows import CapturedRows
from spec_compile.decode_loop import DecodingLoop
from spec_compile.drafters import PromptLookup, Scripted
from spec_compile.models import zoo
from spec_compile.models.row_cache import sequence_cache
from spec_compile.options import Options
from spec_compile.row_verify import RowVerify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEW = 40
LENGTHS = (300, 7, 1, 129)
PLAN = sc.SparsityPlan(
    attention=sc.AttentionPlan(budget=64, block_size=16, recent=1, index_topk_freq=2),
    audit=sc.AuditPlan(window=8, adapt=False),
)


@pytest.fixture(autouse=True)
def no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@functools.cache
def model_of(name: str = "llama") -> Any:
    return endless(name, "cuda")


@functools.cache
def prompts() -> list[list[int]]:
    return repeating(LENGTHS)


@functools.cache
def greedy(name: str = "llama") -> list[list[int]]:
    return greedy_tokens(model_of(name), prompts(), NEW)


def oracle(name: str = "llama") -> Scripted:
    """The true continuation, wrong from the third draft on."""
    known = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), greedy(name))]

    def drafts(tokens: Sequence[int]) -> list[int]:
        # A sparse step may have left the true text.
        text = next((text for text in known if text[: len(tokens)] == list(tokens)), [])
        return [token if i < 2 else (token + 1) % zoo.VOCAB for i, token in enumerate(text[len(tokens) : len(tokens) + 5])]

    return Scripted(drafts, max_drafts=5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_captured_steps_give_the_models_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []
    capture = CapturedRows._capture
    monkeypatch.setattr(CapturedRows, "_capture", lambda self, state: (captures.append(self.rows), capture(self, state))[1])
    out = sc.generate(model_of(name), prompts(), drafter=oracle(name), max_new_tokens=NEW)
    assert out.tokens == greedy(name)
    assert captures == [6]
    assert out.metrics.to_dict()["total"]["mean_acceptance_length"] > 2.5
    assert out.report is not None and len(out.report.rewritten) == 2


def test_one_row_equals_the_batch_and_uncaptured_steps() -> None:
    for captured in (True, False):
        out = sc.generate(model_of(), [prompts()[0]], drafter=oracle(), max_new_tokens=NEW, cudagraphs=captured)
        assert out.tokens == greedy()[:1]


@pytest.mark.parametrize("batch", [1, 4])
def test_audited_tokens_are_the_models(batch: int) -> None:
    rows = prompts()[:batch]
    out = sc.generate(model_of(), rows, drafter=oracle(), plan=PLAN, mode="audited", max_new_tokens=NEW)
    assert out.tokens == greedy()[:batch]
    assert out.metrics.forwards["sparse"] > 0 and out.metrics.forwards["audit"] > 0
    assert out.metrics.density is not None and out.metrics.density < 1


@pytest.mark.parametrize("mode", ["sparse", "audited"])
def test_rows_that_weigh_are_captured_by_their_number(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over rows knows repeated ones: steps of fewer rows are captured as they are, each once."""
    captures: list[int] = []
    capture = CapturedRows._capture
    monkeypatch.setattr(CapturedRows, "_capture", lambda self, state: (captures.append(self.rows), capture(self, state))[1])
    plan = dataclasses.replace(PLAN, attention=dataclasses.replace(PLAN.attention, query="mean"))
    drafter = PromptLookup(max_drafts=6)
    runs = [
        sc.generate(
            model_of(), [prompts()[0]], drafter=drafter, plan=plan, mode=mode, max_new_tokens=NEW, cudagraphs=captured
        ).tokens
        for captured in (False, True)
    ]
    assert runs[0] == runs[1]
    assert len(captures) == len(set(captures)) > 1
    if mode == "audited":
        assert runs[0] == greedy()[:1]


def test_trees_move_their_paths_between_captured_steps() -> None:
    out = sc.generate(model_of(), prompts(), drafter=PromptLookup(max_drafts=6, branches=3), max_new_tokens=NEW)
    assert out.tokens == greedy()


def test_sampling_follows_its_seed() -> None:
    runs = [
        sc.generate(model_of(), prompts(), do_sample=True, seed=seed, plan=PLAN, mode="audited", max_new_tokens=NEW).tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_cache_is_used_again_without_a_second_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = sc.RowCache(model_of(), 512, batch=4)
    first = sc.generate(model_of(), prompts(), drafter=oracle(), max_new_tokens=NEW, cache=cache)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    monkeypatch.setattr(CapturedRows, "_capture", lambda *args: pytest.fail("captured again"))
    again = sc.generate(model_of(), prompts(), drafter=oracle(), max_new_tokens=NEW, cache=cache)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert first.tokens == again.tokens == greedy()


def test_warming_up_leaves_nothing_to_compile_or_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    capture, prefilled = CapturedRows._capture, []
    monkeypatch.setattr(
        CapturedRows, "_capture", lambda self, state: pytest.fail("captured late") if prefilled else capture(self, state)
    )
    prefill = DecodingLoop.prefill
    graphs = torch._dynamo.utils.counters["stats"]
    monkeypatch.setattr(DecodingLoop, "prefill", lambda self: (prefilled.append(graphs["unique_graphs"]), prefill(self)))
    out = sc.generate(model_of(), prompts(), drafter=oracle(), plan=PLAN, mode="audited", max_new_tokens=NEW, warm_up=True)
    assert graphs["unique_graphs"] == prefilled[0] > 0
    assert out.tokens == greedy() and out.metrics.forwards["audit"] > 0


@pytest.mark.parametrize("freed", [False, True])
def test_weights_that_are_replaced_during_a_generation(freed: bool) -> None:
    """Noticed behind the step's launch; its memory lives until then, so that nothing reads what others were given."""
    model = copy.deepcopy(model_of())
    cache = sc.RowCache(model, 512)
    verify = RowVerify(model, cache, Options.parse({"cudagraphs": True}), [6])
    prompt, drafts = torch.tensor([prompts()[0]], device="cuda"), torch.arange(3, 8)[None]

    def near() -> bool:
        cache.reset()
        with torch.no_grad():
            model(prompt, past_key_values=sequence_cache(cache, 0))
            cache.set_lengths([prompt.shape[1]])
            ids = torch.cat([prompt, torch.tensor([[7]], device="cuda"), drafts.cuda()], 1)
            wanted = model(ids).logits[:, -6:]
        found = verify([7], drafts, [5])
        return bool((found - wanted).abs().max() <= 1e-4 * max(1.0, wanted.abs().max().item()))

    with verify.steps_in_a_row():
        assert near() and near()
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * 1.5
            if freed:
                torch.cuda.empty_cache()
        assert near() and near()


def test_one_transfer_a_step() -> None:
    """Of a chain in greedy decoding: the verdict; everything else goes to the device without waiting for it."""
    model = model_of()
    sc.generate(model, prompts(), drafter=oracle(), max_new_tokens=NEW)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as found:
        out = sc.generate(model, prompts(), drafter=oracle(), max_new_tokens=NEW)
    down = sum(event.count for event in found.key_averages() if "Memcpy DtoH" in event.key)
    steps = sum(out.metrics.forwards.values())
    # Besides the steps: the capture of the new cache's graph, and nothing that grows with the steps.
    assert down <= steps + 8
