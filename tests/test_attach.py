"""``attach``: stock ``generate`` over an attached model, and a model that looks and behaves as before in every other way."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import spec_compile as sc
from spec_compile import attach_capture, step_graph
from spec_compile.attach_calls import cache_kind
from spec_compile.attach_capture import is_plain_step, mask_windows
from spec_compile.errors import CacheError, OptionsError, PlanError, StrictError
from spec_compile.models import zoo

NEW_TOKENS = 40
# Where depth does not matter: half the time to trace.
SHALLOW = {"num_hidden_layers": 1}
PREFILL = "more than 32 rows: a prompt, or more drafts than max_q_len allows"


def ready(family: str = "llama", attention: str = "sdpa", **overrides: Any) -> Any:
    model = zoo.build(family, attention, **overrides)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def noisy(model: Any) -> Any:
    """A copy that drafts well but not perfectly."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.02)
    return twin


def prompt(length: int) -> Tensor:
    """A repeating prompt, so that prompt lookup finds drafts."""
    return torch.randint(1, 100, (1, 7)).repeat(1, -(-length // 7))[:, :length]


def generate(model: Any, ids: Tensor, **extra: Any) -> Any:
    torch.manual_seed(1)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids), **extra}
    return model.generate(ids, **settings)


def eager(model: Any, plan: Any = None, **options: Any) -> Any:
    return sc.attach(model, plan, codegen="eager", **options)


@torch.no_grad()
def filled(model: Any, cache: Any, length: int = 40) -> Any:
    """The cache with the same tokens in it every time."""
    model(input_ids=(torch.arange(length)[None] * 7) % 99 + 1, past_key_values=cache, use_cache=True)
    return cache


# What the model returns, and what becomes of its calls.


def test_prompt_lookup_over_both_kinds_of_cache() -> None:
    model, ids = ready(**SHALLOW), prompt(50)
    expected = generate(model, ids)
    with eager(model) as handle:
        # The second sequence compiles nothing.
        for cache, graphs in ((handle.new_cache(max_len=100), 2), (handle.new_cache(max_len=100), 2), (None, 6)):
            assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=cache))
            assert len(handle.reports) <= graphs
        assert handle.counters.passed_through == {PREFILL: 3}
        assert handle.counters.verify < 3 * NEW_TOKENS < handle.counters.rows
        report = handle.report()
    assert {entry.cache for found in handle.reports for entry in found.rewritten} == {"static", "growing"}
    assert all(len(found.rewritten) == 1 and found.rewritten[0].layer == "model.layers.0.self_attn" for found in handle.reports)
    assert report.notes[-1] == str(handle.counters) and PREFILL in report.notes[-1]


def test_assisted_generation_options() -> None:
    """All over the same two graphs: none of the options shows in what is compiled."""
    from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import MuseGlimmerAssistantConfig
    from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

    model, ids = ready(), prompt(50)
    draft = noisy(model)
    dflash = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=512, sliding_window=64, block_size=6, mask_token_id=3, target_layer_ids=[0, 1],
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    ).eval()  # fmt: skip

    def assistant(**settings: Any) -> Any:
        twin = copy.deepcopy(draft)
        for name, value in settings.items():
            setattr(twin.generation_config, name, value)
        return twin

    options: dict[str, Callable[[], dict[str, Any]]] = {
        "assistant": lambda: {"assistant_model": assistant(assistant_confidence_threshold=0.0)},
        "heuristic": lambda: {"assistant_model": assistant(num_assistant_tokens_schedule="heuristic")},
        "ensemble": lambda: {"assistant_model": assistant(), "assistant_ensemble_weight": 0.5},
        "early exit": lambda: {"assistant_early_exit": 1},
        "sampled lookup": lambda: {"do_sample": True, "prompt_lookup_num_tokens": 8},
        "sampled assistant": lambda: {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "assistant_model": assistant()},
        "sampled early exit": lambda: {"do_sample": True, "assistant_early_exit": 1},
        "penalty": lambda: {"prompt_lookup_num_tokens": 8, "repetition_penalty": 1.3, "min_new_tokens": 10},
        "dflash": lambda: {"assistant_model": dflash, "speculation_type": "dflash"},
    }
    wanted = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = {name: generate(model, ids, **wanted, **settings()) for name, settings in options.items()}
    with eager(model, strict=True) as handle:
        for name, settings in options.items():
            found = generate(model, ids, **wanted, **settings(), past_key_values=handle.new_cache(max_len=80))
            assert torch.equal(found.sequences, expected[name].sequences), name
            for ours, theirs in zip(found.scores + found.logits, expected[name].scores + expected[name].logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    # Hidden states, which DFlash asks for, make a graph of their own.
    assert len(handle.reports) <= 4
    assert set(handle.counters.passed_through) == {PREFILL, "draft: only the first layers run (early exit)"}


@pytest.mark.parametrize("growing", [False, True])
def test_further_options(growing: bool) -> None:
    model, ids = ready(**SHALLOW), prompt(50)
    draft = noisy(model)

    def scheduled(schedule: str) -> Any:
        draft.generation_config.num_assistant_tokens_schedule = schedule
        return draft

    def one_by_one(model: Any, input_ids: Tensor, **rest: Any) -> Tensor:
        cache = rest["past_key_values"] if rest.get("past_key_values") is not None else DynamicCache(config=model.config)
        step = input_ids
        for _ in range(8):
            step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, step], 1)
        return input_ids

    options: dict[str, Callable[[], dict[str, Any]]] = {
        "n-grams": lambda: {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3},
        "constant": lambda: {"assistant_model": scheduled("constant"), "num_assistant_tokens": 7},
        "transient": lambda: {"assistant_model": scheduled("heuristic_transient")},
        "guidance": lambda: {"prompt_lookup_num_tokens": 8, "guidance_scale": 1.5},
        "chunks": lambda: {"prompt_lookup_num_tokens": 8, "prefill_chunk_size": 16},
        "own loop": lambda: {"custom_generate": one_by_one},
        "beams": lambda: {"num_beams": 2},
        "plain": dict,
    }
    settings = {"max_new_tokens": 12}
    expected = {name: generate(model, ids, **settings, **more()) for name, more in options.items()}
    with eager(model) as handle, torch.no_grad():
        for name, more in options.items():
            cache = None if growing else handle.new_cache(max_len=80, batch=2 if name == "beams" else 1)
            before = handle.counters.verify
            assert torch.equal(generate(model, ids, **settings, **more(), past_key_values=cache), expected[name]), name
            assert handle.counters.verify > before, name


def test_hidden_states() -> None:
    model, ids = ready(**SHALLOW), torch.tensor([[5, 6, 7]])
    with torch.no_grad(), eager(model) as handle:
        ours, theirs = filled(model, handle.new_cache(max_len=60)), filled(model, handle.new_cache(max_len=60))
        expected = model.forward.__wrapped__(ids, past_key_values=theirs, output_hidden_states=True)
        found = model(ids, past_key_values=ours, output_hidden_states=True)
    assert handle.counters.verify == 1 and type(found) is type(expected) and found.past_key_values is ours
    for one, other in zip((found.logits, *found.hidden_states), (expected.logits, *expected.hidden_states), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family, attention, prepared", [("opt", "sdpa", False), ("llama", "sdpa", True)])
def test_families(family: str, attention: str, prepared: bool) -> None:
    model, ids = ready(family, attention, **SHALLOW), prompt(40)
    expected = generate(model, ids)
    if prepared:
        sc.prepare(model)
    with eager(model, strict=True) as handle:
        assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(90)))
    assert handle.counters.verify and len(handle.reports) <= 2
    assert {entry.anchor for found in handle.reports for entry in found.rewritten} == {"marker" if prepared else "sdpa"}


def test_a_call_that_is_no_verify_is_the_models_own() -> None:
    model, ids = ready(), prompt(5)
    plain = model.forward
    with torch.no_grad(), eager(model) as handle:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((ids,), {}),
            ((ids,), {"use_cache": False, "labels": ids}),
            ((), {"inputs_embeds": model.get_input_embeddings()(ids)}),
            ((), {"input_ids": ids, "output_attentions": True}),
            ((), {"input_ids": prompt(40), "logits_to_keep": 3}),
        ]
        for args, kwargs in calls:
            assert torch.equal(model(*args, **kwargs).logits, plain(*args, **kwargs).logits)
        # A short prompt is none either: nothing lies in the cache yet; nor is a turn of which only the end is asked for.
        ours, theirs = handle.new_cache(max_len=50), handle.new_cache(max_len=50)
        for extra in ({}, {"logits_to_keep": 1}):
            found, expected = (f(ids, past_key_values=c, **extra) for f, c in ((model, ours), (plain, theirs)))
            assert torch.equal(found.logits, expected.logits)
        with pytest.raises(TypeError, match=r"unexpected keyword|multiple values"):
            model(ids, input_ids=ids)
    assert handle.reports == [] and handle.counters.verify == 0
    assert handle.report().kind == "passed through" and "no verify call" in handle.report().reason


# How it refuses.


def sliding(model: Any, handle: Any) -> dict[str, Any]:
    return {"past_key_values": filled(model, DynamicCache(config=ready("mistral").config))}


REFUSALS: dict[str, tuple[str, Callable[[Any, Any], dict[str, Any]]]] = {
    "window": ("layers of kind DynamicSlidingWindowLayer", sliding),
    "attentions": ("output_attentions asks for attention weights", lambda *_: {"output_attentions": True}),
    "labels": ("called with labels", lambda *_: {"labels": torch.ones(1, 3, dtype=torch.int64)}),
    "kept": ("logits_to_keep is a tensor", lambda *_: {"logits_to_keep": torch.tensor([0, 2])}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_verify_that_cannot_be_compiled_passes_through(name: str, caplog: pytest.LogCaptureFixture) -> None:
    reason, extra = REFUSALS[name]
    model = ready(attention="eager")
    ids, plain = torch.tensor([[5, 6, 7]]), model.forward
    results = []
    for strict in (False, True):
        with torch.no_grad(), eager(model, strict=strict) as handle:
            kwargs = {"past_key_values": filled(model, handle.new_cache(max_len=80)), **extra(model, handle)}
            theirs = {**kwargs, "past_key_values": copy.deepcopy(kwargs["past_key_values"])}
            before = kwargs["past_key_values"].get_seq_length()
            if strict:
                with pytest.raises(StrictError, match=reason):
                    model(ids, **kwargs)
                assert kwargs["past_key_values"].get_seq_length() == before
                continue
            for _ in range(2):
                results.append(torch.equal(model(ids, **kwargs).logits, plain(ids, **theirs).logits))
            assert [count for text, count in handle.counters.passed_through.items() if reason in text] == [2]
        assert handle.reports == []
    assert results == [True, True]
    assert sum("a verify call passes through" in record.message for record in caplog.records) == 1


def test_kinds_of_caches() -> None:
    from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, QuantoQuantizedLayer, StaticCache, StaticLayer

    model = ready()
    full, unused = filled(model, DynamicCache(config=model.config)), StaticCache(config=model.config, max_cache_len=40)
    assert cache_kind(full) == ("growing", "") and cache_kind(sc.VerifyCache(model, max_len=40)) == ("static", "")
    assert "without storage" in cache_kind(unused)[1] and "no layers" in cache_kind(((), ()))[1]
    assert cache_kind(filled(model, unused, 20)) == ("static", "")
    for odd in (LinearAttentionLayer, QuantoQuantizedLayer, StaticLayer):
        mixed = DynamicCache(config=model.config)
        mixed.layers = [DynamicLayer(), object.__new__(odd)]
        kind, reason = cache_kind(mixed)
        assert not kind and odd.__name__ in reason and "handle.new_cache" in reason
    full.offloading = True
    assert "offloads" in cache_kind(full)[1]


def test_training_and_gradients_pass_through() -> None:
    model, ids = ready(), torch.tensor([[5, 6, 7]])
    with eager(model) as handle:
        cache = filled(model, handle.new_cache(max_len=80))
        assert model(ids, past_key_values=cache).logits.requires_grad
        model.train()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        model.eval()
    assert handle.reports == []
    assert [text.split(":")[0] for text in handle.counters.passed_through] == [
        "more than 32 rows", "gradients are enabled", "the model is in training mode",
    ]  # fmt: skip


def test_an_expert_loop_passes_through_with_the_remedy() -> None:
    model, ids = ready("qwen3_moe"), prompt(40)
    model.set_experts_implementation("eager")
    expected = generate(model, ids)
    with eager(model) as handle:
        assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8))
    assert any("spec_compile.prepare(model)" in reason for reason in handle.counters.passed_through)
    with eager(model, strict=True) as handle:
        # Also the second time, when nothing is tried any more.
        for _ in range(2):
            with pytest.raises(StrictError, match=r"spec_compile\.prepare\(model\)"):
                generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=90))


def test_past_the_recompile_limit_calls_pass_through() -> None:
    model, ids = ready(**SHALLOW), prompt(50)
    expected = generate(model, ids)
    with torch._dynamo.config.patch(recompile_limit=1), eager(model) as handle:
        found = generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=100))
    assert torch.equal(expected, found) and len(handle.reports) == 1 and handle.counters.verify
    assert any("recompile_limit is reached" in reason for reason in handle.counters.passed_through)


def test_cache_too_short() -> None:
    model = ready()
    with torch.no_grad(), eager(model) as handle:
        cache = filled(model, handle.new_cache(max_len=20), 20)
        for layer in cache.layers:
            layer.cumulative_length.fill_(cache.capacity - 2)
        with pytest.raises(CacheError, match=r"too short.*max_len is 20"):
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    assert handle.reports == [] and cache.length == cache.capacity - 2


class Wrapper(torch.nn.Module):
    """What a wrapper of a model looks like: its config and generate, and a forward of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config, self.generate = model, model.config, model.generate

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def tiny_t5(model: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).eval()


def tiny_mamba(model: Any) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)).eval()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda model: torch.nn.Linear(2, 2), "needs a transformers model, got Linear"),
        (lambda model: torch.compile(model), r"not torch\.compile\(model\)"),
        (in_place, r"compiled by model\.compile\(\)"),
        (Wrapper, "takes no past_key_values.*get_base_model"),
        (tiny_t5, "encoder-decoder"),
        (tiny_mamba, "takes no past_key_values"),
    ],
)
def test_models_that_cannot_be_attached(make: Callable[[Any], Any], message: str) -> None:
    model = make(ready())
    before = model.__dict__.get("forward")
    with pytest.raises(OptionsError, match=message):
        eager(model)
    assert model.__dict__.get("forward") is before


def test_bad_arguments_leave_the_model_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = ready()
    for wrong in ({"draft_len": 32}, {"lowering": "fast"}, {"cudagraph": True}, {"max_q_len": 4, "draft_len": 4}):
        with pytest.raises(OptionsError):
            sc.attach(model, **wrong)
    with pytest.raises(PlanError):
        sc.attach(model, {"atention": {}})
    assert "forward" not in model.__dict__
    with eager(model) as handle, pytest.raises(OptionsError, match="needs a plan that is not exact"):
        handle.sparse = True
    with eager(model, {"audit": {}}):
        assert "plan.audit has no effect here" in caplog.text


# What attached models look like, and how they are detached.


def test_an_attached_model_looks_like_itself() -> None:
    model, ids = ready(), prompt(5)
    own, keys, parts = model.forward, list(model.state_dict()), [name for name, _ in model.named_modules()]
    with torch.no_grad(), eager(model) as handle:
        assert inspect.signature(model.forward) == inspect.signature(own)
        assert (model.forward.__name__, model.forward.__doc__) == (own.__name__, own.__doc__)
        assert model.forward.__wrapped__ == own and model.forward.handle is handle
        assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == parts
        assert model._supports_logits_to_keep() and model.can_generate()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert twin.forward.__self__ is twin
            before = model(ids).logits
            twin.get_input_embeddings().weight.mul_(2)
            assert torch.equal(model(ids).logits, before) and not torch.equal(twin(ids).logits, before)
            # A copy is a model of its own.
            sc.attach(twin).detach()
        # Two calls of the model itself, no call of its copies.
        assert handle.counters.passed_through == {"no cache": 4}
    assert "forward" not in model.__dict__ and model.forward == own


def test_attach_twice_detach_twice() -> None:
    model, other = ready(), ready()
    handle = eager(model)
    with pytest.raises(OptionsError, match=r"attached already.*model\.forward\.handle"):
        eager(model)
    with eager(other) as second:
        assert second.attached and handle.attached
        handle.detach()
        assert second.attached and not handle.attached and "forward" in other.__dict__
    assert "forward" not in model.__dict__ and "forward" not in other.__dict__
    handle.detach()
    with pytest.raises(OptionsError, match="handle is detached"), handle:
        pass
    eager(model).detach()


def test_detached_after_an_interruption() -> None:
    model = ready(**SHALLOW)

    def interrupt(report: Any) -> None:
        raise KeyboardInterrupt

    own = model.forward
    with pytest.raises(KeyboardInterrupt), eager(model, on_report=interrupt):
        generate(model, prompt(50), prompt_lookup_num_tokens=8)
    assert model.forward == own and "forward" not in model.__dict__


def test_batches_are_refused_by_transformers_and_detach_cleanly() -> None:
    model, ids = ready(), prompt(50).repeat(2, 1)
    with pytest.raises(ValueError, match="batch_size = 1"), eager(model) as handle:
        generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=100, batch=2))
    assert "forward" not in model.__dict__
    with pytest.raises(CacheError, match=r"made for batch 1, the call has 3 sequences.*batch=3"), eager(model) as handle:
        generate(model, ids[:1], num_beams=3, past_key_values=handle.new_cache(max_len=100))
    assert "forward" not in model.__dict__


def test_a_forward_on_the_instance_comes_back() -> None:
    """As accelerate's hooks leave it."""
    model, ids = ready(), prompt(5)
    model.forward = functools.partial(type(model).forward, model)
    mine = model.forward
    with torch.no_grad(), eager(model):
        assert inspect.signature(model.forward) == inspect.signature(mine)
        model(ids)
    assert model.__dict__["forward"] is mine


def test_a_forward_replaced_after_attach_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = ready(), prompt(5)
    own = model.forward
    handle = eager(model)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    theirs = model.forward
    handle.detach()
    assert model.forward is theirs and "replaced after attach" in caplog.text
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own(ids).logits)
    assert handle.counters.passed_through == {}


def test_threads() -> None:
    model, ids = ready(**SHALLOW), prompt(50)
    expected = generate(model, ids)
    handles: list[Any] = []
    refused: list[OptionsError] = []
    start = threading.Barrier(4)

    def race() -> None:
        start.wait()
        try:
            handles.append(eager(model))
        except OptionsError as error:
            refused.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(handles) == 1 and len(refused) == 3
    handle, found = handles[0], []
    own, calls = model.forward.__wrapped__, []

    def detach_on_the_way(report: Any) -> None:
        thread = threading.Thread(target=handle.detach)
        thread.start()
        thread.join()
        calls.append(model.forward == own)

    handle._sink = detach_on_the_way
    found.append(generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=100)))
    # The call under way finished compiled, the rest ran as if never attached.
    assert torch.equal(found[0], expected) and calls == [True]
    assert handle.counters.verify == 1


def test_tracing_goes_past_attach() -> None:
    """transformers compiles the model's call itself where it decodes over a static cache on CUDA."""
    model, ids = ready(), prompt(5)
    with torch.no_grad(), eager(model) as handle:
        traced = torch.compile(model.__call__, backend="eager", fullgraph=True)
        assert torch.equal(traced(ids).logits, model.forward.__wrapped__(ids).logits)
    assert handle.counters.passed_through == {}


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    model, ids = ready(), prompt(50)
    expected = generate(model, ids)
    with eager(model, strict=True) as handle:
        assert torch.equal(expected, generate(model, ids, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(100)))
    assert set(handle.counters.passed_through) == {"SPEC_COMPILE_DISABLE is set"} and not handle.reports


# Captured steps: what they stand in for, on a CPU where nothing can be captured.


def masks(model: Any, cache: Any, rows: int, padded: int = 0) -> Any:
    """As transformers' loop makes them."""
    held = cache.length
    given = torch.ones(1, held + rows, dtype=torch.int64)
    given[:, :padded] = 0
    ids = torch.zeros(1, held + rows, dtype=torch.int64)
    return model.prepare_inputs_for_generation(
        ids, next_sequence_length=rows, past_key_values=cache, attention_mask=given, use_cache=True
    )


@pytest.mark.parametrize(
    "family, attention", [("llama", "sdpa"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "eager"), ("llama4", "sdpa")]
)
def test_plain_steps_are_told_from_others(family: str, attention: str) -> None:
    model = ready(family, attention, **({} if family.startswith("llama") else {"sliding_window": 8}))
    cache = sc.VerifyCache(model, max_len=40)
    for layer in cache.layers:
        layer.cumulative_length.fill_(21)
    windows = mask_windows(model)
    ids, positions = torch.zeros(1, 3, dtype=torch.int64), torch.arange(21, 24)[None]
    base = {"input_ids": ids, "past_key_values": cache}
    assert is_plain_step(base, 21, windows) and is_plain_step({**base, "position_ids": positions}, 21, windows)
    assert not is_plain_step({**base, "position_ids": positions + 1}, 21, windows)
    assert not is_plain_step({**base, "output_hidden_states": True}, 21, windows)
    assert is_plain_step({**base, "attention_mask": torch.ones(1, 24)}, 21, windows)
    assert not is_plain_step({**base, "attention_mask": torch.ones(1, 24).tril(-1)}, 21, windows)
    if family == "llama4":
        # A chunk is no window: such masks are not known.
        assert not is_plain_step({**base, "attention_mask": {"chunked_attention": torch.ones(1, 1, 3, 104)}}, 21, windows)
        return
    made = {**base, "attention_mask": masks(model, cache, 3)["attention_mask"]}
    assert is_plain_step(made, 21, windows) and not is_plain_step(made, 20, windows)
    # Padding inside the window shows in every mask, and so does a tree of drafts.
    assert not is_plain_step({**base, "attention_mask": masks(model, cache, 3, padded=18)["attention_mask"]}, 21, windows)
    parts = made["attention_mask"]
    for part in parts.values() if isinstance(parts, dict) else [parts]:
        part[..., 2, 22] = False if part.dtype == torch.bool else torch.finfo(part.dtype).min
        assert not is_plain_step(made, 21, windows)


def test_captured_steps_stand_in_for_plain_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the CUDA graph: the padded step it would replay, run as it is."""

    class Step:
        made = 0

        def __init__(self, run: Any, model: Any, cache: Any, batch: int, rows: int, switch: Any, symbolic: bool) -> None:
            assert not symbolic
            self.model, self.cache, self.rows = model, cache, rows
            Step.made += 1

        def held(self) -> int:
            return int(self.cache.length)

        def fits(self, held: int) -> bool:
            return held + self.rows <= self.cache.capacity

        def __call__(self, ids: Tensor, held: int) -> Tensor:
            padded = torch.cat([ids, ids[:, -1:].expand(-1, self.rows - ids.shape[1])], -1)
            logits = self.model.forward.__wrapped__(padded, past_key_values=self.cache).logits
            self.cache.crop(ids.shape[1] - self.rows)
            return logits[:, : ids.shape[1]]

    monkeypatch.setattr(step_graph, "StepGraph", Step)
    monkeypatch.setattr(attach_capture, "why_not_captured", lambda model, cache: None)
    model, ids = ready(**SHALLOW), prompt(50)
    expected = generate(model, ids, return_dict_in_generate=True, prompt_lookup_num_tokens=8)
    with eager(model, cudagraphs=True, draft_len=4) as handle:
        cache = handle.new_cache(max_len=100)
        found = generate(model, ids, return_dict_in_generate=True, prompt_lookup_num_tokens=8, past_key_values=cache)
        assert torch.equal(found.sequences, expected.sequences) and found.past_key_values is cache
        counters = handle.counters
        # Longer runs of drafts, and the first call of all, ran uncaptured.
        assert 0 < counters.captured < counters.verify and Step.made == 1
        before = counters.captured
        with torch.no_grad():
            model(torch.tensor([[5, 6]]), past_key_values=cache, position_ids=torch.tensor([[7, 8]]))
            assert model(torch.tensor([[5, 6]]), past_key_values=cache, logits_to_keep=-1).logits.shape[1] == 1
            model.config.output_hidden_states = True
            assert "hidden_states" in model(torch.tensor([[5, 6]]), past_key_values=cache)
        assert counters.captured == before


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_at_fault_spoils_no_other(strict: bool) -> None:
    """The model itself refuses positions that do not fit; what it accepts later is compiled."""
    model, ids = ready(**SHALLOW), torch.tensor([[5, 6, 7]])
    with torch.no_grad(), eager(model, strict=strict) as handle:
        cache = handle.new_cache(max_len=100)
        model(prompt(50), past_key_values=cache)

        def call(positions: int) -> Any:
            return model(ids, past_key_values=cache, position_ids=torch.arange(50, 50 + positions)[None])

        with pytest.raises(StrictError if strict else RuntimeError):
            call(5)
        cache.crop(50 - cache.length)
        assert call(3).logits.shape[1] == 3 and handle.counters.verify == 1


# Sparse plans.


def test_sparse_plan() -> None:
    model, ids = ready(**SHALLOW), torch.tensor([[5, 6, 7, 8]])
    sparse = sc.AttentionPlan(budget=16, block_size=8, sink=1, recent=1, min_context=0)
    long = prompt(150)

    def step(handle: Any, cache: Any) -> Tensor:
        with torch.no_grad():
            model(long, past_key_values=cache)
            return model(ids, past_key_values=cache).logits

    with eager(model) as handle:
        own = torch.cat([long, ids], -1)
        expected = model(own).logits[:, -4:].detach()
    with eager(model, sc.SparsityPlan(attention=sparse)) as handle:
        cache = handle.new_cache(max_len=200)
        assert handle.sparse and not torch.allclose(step(handle, cache), expected, atol=1e-2)
        handle.sparse = False
        cache.reset()
        torch.testing.assert_close(step(handle, cache), expected, rtol=0, atol=1e-4)
        assert len(handle.reports) == 1 and len(handle.report().sparse) == 1
        handle.sparse = True
        # A growing cache has no summaries: its steps are exact, and the report says why.
        torch.testing.assert_close(step(handle, DynamicCache(config=model.config)), expected, rtol=0, atol=1e-4)
        grown = handle.report()
        assert not grown.sparse and all("grow" in entry.role_note for entry in grown.rewritten), grown


# Cases that users of other projects ran into.


def test_case_06_ragged_batch_with_left_padding() -> None:
    """Rows of a batch accept different numbers of drafts; rejected slots are masked out, so no row waits for another."""
    model = ready(max_position_embeddings=2048)
    lengths, rounds, drafts = (1, 17, 300, 1025), 20, 3
    width, batch = max(lengths), len(lengths)
    prompts = [torch.randint(1, 100, (1, length)) for length in lengths]
    wanted = [generate(model, ids, max_new_tokens=rounds * (drafts + 1))[0, ids.shape[1] :] for ids in prompts]
    ids, mask = torch.zeros(batch, width, dtype=torch.int64), torch.zeros(batch, width, dtype=torch.int64)
    for row, given in enumerate(prompts):
        ids[row, width - lengths[row] :], mask[row, width - lengths[row] :] = given[0], 1
    with torch.no_grad(), eager(model, strict=True) as handle:
        cache = handle.new_cache(max_len=width + rounds * (drafts + 1), batch=batch)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        found = [[int(token)] for token in logits[:, -1].argmax(-1)]
        for turn in range(rounds):
            step = torch.zeros(batch, drafts + 1, dtype=torch.int64)
            for row in range(batch):
                done, right = len(found[row]), (row + turn) % (drafts + 1)
                step[row] = torch.tensor([found[row][-1], *wanted[row][done : done + drafts]])
                step[row, right + 1 :] = (step[row, right + 1 :] + 1) % 100
            mask = torch.cat([mask, torch.ones_like(step)], -1)
            positions = (mask.cumsum(-1) - 1)[:, -drafts - 1 :]
            chosen = model(input_ids=step, attention_mask=mask, position_ids=positions, past_key_values=cache).logits.argmax(-1)
            for row in range(batch):
                kept = int((chosen[row, :-1] == step[row, 1:]).cumprod(-1).sum())
                assert kept == (row + turn) % (drafts + 1)
                found[row] += chosen[row, : kept + 1].tolist()
                mask[row, mask.shape[1] - drafts + kept :] = 0
    assert handle.counters.verify == rounds and len(handle.reports) == 1
    for row in range(batch):
        assert found[row] == wanted[row][: len(found[row])].tolist()


@pytest.mark.parametrize("family, attention", [("gemma2", "eager"), ("gemma3", "sdpa")])
def test_case_11_windows_and_crops(family: str, attention: str) -> None:
    layers = ["sliding_attention", "full_attention"]
    model = ready(family, attention, sliding_window=8, num_hidden_layers=2, layer_types=layers)
    with eager(model) as handle:
        for length in (6, 7, 8, 9, 40):
            ids = prompt(length)
            expected = generate(model, ids, max_new_tokens=64)
            for cache in (handle.new_cache(max_len=110), None):
                found = generate(model, ids, max_new_tokens=64, prompt_lookup_num_tokens=4, past_key_values=cache)
                assert torch.equal(found, expected), (length, cache)
    # The windows of growing caches are left alone.
    assert any("DynamicSlidingWindowLayer" in reason for reason in handle.counters.passed_through)
    assert {entry.cache for found in handle.reports for entry in found.rewritten} == {"static"}


def test_case_14_outputs_survive_the_next_steps() -> None:
    model = ready(**SHALLOW)
    with torch.no_grad(), eager(model, cudagraphs=True) as handle:
        for cache in (filled(model, handle.new_cache(max_len=120)), filled(model, DynamicCache(config=model.config))):
            held, copies = [], []
            for _ in range(10):
                held.append(model(prompt(4), past_key_values=cache).logits)
                copies.append(held[-1].clone())
                cache.crop(-2)
            assert all(torch.equal(kept, then) for kept, then in zip(held, copies))
    assert handle.counters.verify == 20


def test_case_25_no_recompile_storm() -> None:
    model = ready(max_position_embeddings=2048, **SHALLOW)
    with torch.no_grad(), eager(model, strict=True) as handle:
        for batch in (1, 2, 1):
            cache = handle.new_cache(max_len=1024, batch=batch)
            model(prompt(40).repeat(batch, 1), past_key_values=cache)
            for call in range(100):
                rows = (1, 3, 5)[call % 3]
                model(prompt(rows).repeat(batch, 1), past_key_values=cache)
                cache.crop(-(call % rows))
    assert handle.counters.verify == 300 and handle.counters.passed_through == {PREFILL: 3}
    assert len(handle.reports) <= 4


class Streamed:
    """Streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_case_30_ends_inside_an_accepted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.candidate_generator import CandidateGenerator

    model, ids = ready(**SHALLOW), prompt(50)
    whole = generate(model, ids)[0]

    class Oracle(CandidateGenerator):
        """Drafts what the model alone would have said, so that every run is accepted."""

        def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            # As transformers' own generators: the model adds one token to the drafts.
            end = min(input_ids.shape[1] + 6, whole.shape[0] - 1)
            return torch.cat([input_ids, whole[None, input_ids.shape[1] : end]], -1), None

        def update_candidate_strategy(self, *args: Any) -> None:
            pass

    # A token that first shows up well inside a run of drafts.
    first = {int(token): place for place, token in reversed(list(enumerate(whole[50:].tolist())))}
    eos, place = next((token, place) for token, place in first.items() if place > 2 and place % 7 not in (0, 6))
    cases: list[dict[str, Any]] = [
        {"eos_token_id": eos}, {"max_new_tokens": 9}, {"eos_token_id": eos, "min_new_tokens": place + 3},
        {"max_new_tokens": 1}, {"max_new_tokens": 2},
    ]  # fmt: skip
    handle = eager(model, strict=True)
    for case in cases:
        expected = generate(model, ids, **case)
        streamer, cache = Streamed(), handle.new_cache(max_len=100)
        found = generate(model, ids, **case, prompt_lookup_num_tokens=8, past_key_values=cache, streamer=streamer)
        assert torch.equal(found, expected) and streamer.tokens == found[0].tolist() and streamer.ended == 1
        # The last token was read by no step, and nothing after it lies in the cache.
        assert cache.length <= found.shape[1] - 1
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **kwargs: Oracle())
    for case in cases[:3]:
        found = generate(model, ids, **case, prompt_lookup_num_tokens=8, past_key_values=handle.new_cache(max_len=100))
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", model.forward.__wrapped__)
            theirs = generate(model, ids, **case, prompt_lookup_num_tokens=8)
        assert torch.equal(found, theirs)
    handle.detach()
    assert handle.counters.verify
