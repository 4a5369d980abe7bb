"""``prepare`` and ``restore``: the marker hooks compute what the model's eager attention computes."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from spec_compile import VerifyCache, compile_verify, explain, prepare, restore
from spec_compile.errors import OptionsError
from spec_compile.models import hooks
from spec_compile.models.zoo import FAMILIES, VOCAB, build

FAMILY_NAMES = [name for name in FAMILIES if name != "bloom"]
MARKER = "dense_attention_v1"
EXPERTS_MARKER = "moe_experts_v1"
# Layers with experts that transformers dispatches; llama4 spells its own.
MOE_LAYERS = {"mixtral": 2, "qwen3_moe": 2, "olmoe": 2, "deepseek_v3": 1, "gpt_oss": 2, "llama4": 0}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts marker operators while it is entered, those of attention and those of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.markers = self.experts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.markers += MARKER in str(func)
        self.experts += EXPERTS_MARKER in str(func)
        return func(*args, **(kwargs or {}))


def tokens(rows: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


def mask_of(name: str, cache: VerifyCache | None, held: int, rows: int) -> dict[str, Any]:
    """OPT derives positions from a 2-D mask, so it is given one of its own length."""
    return {"attention_mask": torch.ones(1, held + rows, dtype=torch.int64)} if FAMILIES[name].padding_mask else {}


@torch.no_grad()
def two_steps(name: str, model: Any, prompt: int = 20) -> list[torch.Tensor]:
    """Logits of a prefill and of a verify forward behind it."""
    cache = VerifyCache(model, 120)
    return [
        model(input_ids=ids, past_key_values=cache, use_cache=True, **mask_of(name, cache, held, ids.shape[1])).logits
        for held, ids in ((0, tokens(prompt)), (prompt, tokens(5, 1)))
    ]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_hooks_equal_eager(name: str) -> None:
    """Gemma 2's softcap and gpt-oss's sinks included: transformers' own sdpa drops the former."""
    eager = two_steps(name, build(name, "eager"))
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    for found, wanted in zip(two_steps(name, model), eager, strict=True):
        assert close(found, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_zoo_is_reproducible(name: str) -> None:
    """Comparisons here and elsewhere build a model twice."""
    first, second = (build(name, FAMILIES[name].implementations[0]).state_dict() for _ in range(2))
    assert [path for path, weight in first.items() if not torch.equal(weight, second[path])] == []


def test_gemma2_sdpa_differs_from_eager() -> None:
    """Or else the comparison above would not see the softcap."""
    found, wanted = two_steps("gemma2", build("gemma2", "sdpa"))[1], two_steps("gemma2", build("gemma2", "eager"))[1]
    assert (found - wanted).abs().max().item() > 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "phi", "mixtral", "llama4"])
def test_round_trip(name: str) -> None:
    implementation = FAMILIES[name].implementations[0]
    model = build(name, implementation)
    weights = {path: weight.clone() for path, weight in model.state_dict().items()}
    attributes = set(vars(model))
    before = two_steps(name, model)
    assert prepare(model) is model
    assert model.config._attn_implementation == hooks.NAME
    assert list(model.state_dict()) == list(weights)
    two_steps(name, model)
    assert restore(model) is model
    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == attributes
    after = two_steps(name, model)
    assert all(torch.equal(a, b) for a, b in zip(after, before))
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(weight, weights[path]) for path, weight in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2", "mistral", "qwen3_moe"])
def test_one_marker_per_layer(name: str) -> None:
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    cache = VerifyCache(model, 40)
    with torch.no_grad(), Calls() as calls:
        model(input_ids=tokens(5), past_key_values=cache, use_cache=True)
    assert calls.markers == FAMILIES[name].layers
    restore(model)
    with torch.no_grad(), Calls() as calls:
        model(input_ids=tokens(5), past_key_values=cache, use_cache=True)
    assert calls.markers == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_detection_starts_at_the_marker(name: str) -> None:
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    report = explain(model, VerifyCache(model, 40), draft_len=4)
    assert [entry.status for entry in report.attentions] == ["rewritten"] * FAMILIES[name].layers
    assert {entry.anchor for entry in report.attentions} == {"marker"}
    assert all(entry.softcap == (2.0 if name == "gemma2" else 0.0) for entry in report.attentions)
    assert all(entry.sinks == (name == "gpt_oss") for entry in report.attentions)
    assert MARKER in report.code("before")
    assert MARKER not in report.code("after")
    assert "attention_folded_v1" in report.code("after")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_long_prefill(name: str) -> None:
    """Past 64 rows plain attention goes to PyTorch's SDPA; what SDPA cannot say stays with the marker."""
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    cache = VerifyCache(model, 100)
    with torch.no_grad(), Calls() as calls:
        found = model(input_ids=tokens(100), past_key_values=cache, use_cache=True).logits
    assert calls.markers == (FAMILIES[name].layers if name in ("gemma2", "gpt_oss") else 0)
    with torch.no_grad():
        assert close(found, build(name, "eager")(input_ids=tokens(100), use_cache=False).logits)


@pytest.mark.parametrize("rows", [63, 64, 65])
def test_around_the_row_limit(rows: int) -> None:
    model = prepare(build("llama", "sdpa"))
    with torch.no_grad(), Calls() as calls:
        found = model(input_ids=tokens(rows), use_cache=False).logits
    assert calls.markers == (2 if rows <= 64 else 0)
    with torch.no_grad():
        assert close(found, build("llama", "eager")(input_ids=tokens(rows), use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_left_padding(name: str) -> None:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    eager, model = build(name, "eager"), prepare(build(name, FAMILIES[name].implementations[0]))
    with torch.no_grad():
        found, wanted = (m(input_ids=tokens(12, 0, 2), attention_mask=mask, use_cache=False).logits for m in (model, eager))
    assert close(found[1], wanted[1])
    assert close(found[0, 5:], wanted[0, 5:])


@pytest.mark.parametrize("name", MOE_LAYERS)
def test_one_experts_call_per_moe_layer(name: str) -> None:
    """Verify-sized calls; longer ones go to transformers' grouped product."""
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    for rows, calls_wanted in ((5, MOE_LAYERS[name]), (64, MOE_LAYERS[name]), (65, 0)):
        with torch.no_grad(), Calls() as calls:
            model(input_ids=tokens(rows), use_cache=False)
        assert calls.experts == calls_wanted
    restore(model)
    with torch.no_grad(), Calls() as calls:
        model(input_ids=tokens(5), use_cache=False)
    assert calls.experts == 0


@pytest.mark.parametrize("before", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_restored(before: str) -> None:
    model, other = build("mixtral", "sdpa"), build("mixtral", "sdpa")
    model.set_experts_implementation(before)
    attributes = set(vars(model))
    prepare(model)
    assert model.config._experts_implementation == hooks.NAME
    assert other.config._experts_implementation == "batched_mm"
    restore(model)
    assert model.config._experts_implementation == before
    assert set(vars(model)) == attributes


def test_dense_models_keep_their_config() -> None:
    model = build("llama", "sdpa")
    before = model.config._experts_implementation
    assert prepare(model).config._experts_implementation == before
    restore(model)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_long_prefill_of_experts(name: str) -> None:
    model = prepare(build(name, FAMILIES[name].implementations[0]))
    with torch.no_grad():
        found = model(input_ids=tokens(100), use_cache=False).logits
        assert close(found, build(name, "eager")(input_ids=tokens(100), use_cache=False).logits)


def test_experts_with_another_activation_are_left_to_transformers() -> None:
    model, eager = prepare(build("mixtral", "sdpa")), build("mixtral", "eager")
    for held in (model, eager):
        held.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    with torch.no_grad(), Calls() as calls:
        found = model(input_ids=tokens(5), use_cache=False).logits
    assert calls.experts == 1
    with torch.no_grad():
        assert close(found, eager(input_ids=tokens(5), use_cache=False).logits)


def other_gate(experts: Any) -> None:
    experts._apply_gate = types.MethodType(lambda self, v: torch.tanh(v.chunk(2, -1)[0]) * v.chunk(2, -1)[1], experts)


OVERRIDES: dict[str, Callable[[Any], Any]] = {
    "gate": other_gate,
    "forward": lambda experts: setattr(experts.act_fn, "forward", torch.tanh),
    "hook": lambda experts: experts.act_fn.register_forward_hook(lambda module, args, out: 2 * out),
    "pre-hook": lambda experts: experts.act_fn.register_forward_pre_hook(lambda module, args: (-args[0],)),
}


@pytest.mark.parametrize("change", OVERRIDES)
def test_instances_with_a_gate_or_activation_of_their_own_are_left_to_transformers(change: str) -> None:
    """Eager and compiled: their class says another thing than they compute."""
    plain, wanted, model = (build("mixtral", "eager"), build("mixtral", "eager"), prepare(build("mixtral", "sdpa")))
    for held in (wanted, model):
        OVERRIDES[change](held.model.layers[1].mlp.experts)
    with torch.no_grad(), Calls() as calls:
        found = model(input_ids=tokens(5), use_cache=False).logits
    assert calls.experts == 1
    with torch.no_grad():
        right = wanted(input_ids=tokens(5), use_cache=False).logits
        assert close(found, right) and not close(right, plain(input_ids=tokens(5), use_cache=False).logits)
    verify = compile_verify(model, VerifyCache(model, 20), 4, codegen="eager")
    assert close(verify(tokens(5)), right)


@pytest.mark.parametrize("error", [ValueError("no such experts"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failed_switch_of_experts_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    model = build("mixtral", "sdpa")
    attributes, switch = set(vars(model)), type(model).set_experts_implementation

    def fail(self: Any, given: Any) -> None:
        switch(self, given)
        if given == hooks.NAME:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "set_experts_implementation", fail)
        with pytest.raises(type(error)):
            prepare(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == ("sdpa", "batched_mm")
    assert set(vars(model)) == attributes
    restore(prepare(model))


def test_experts_that_are_quantised_keep_their_implementation() -> None:
    """Their classes dispatch through an interface of their own, which does not know the hook."""
    model = build("mixtral", "sdpa")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    assert prepare(model).config._experts_implementation == "batched_mm"
    assert restore(model).config._experts_implementation == "batched_mm"


def test_generate_with_hooks() -> None:
    prompt = torch.cat([tokens(6)] * 4, 1)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    eager, model = build("llama", "eager"), prepare(build("llama", "sdpa"))
    with torch.no_grad():
        wanted = eager.generate(prompt, **options)
        assert torch.equal(model.generate(prompt, **options), wanted)
        cache = VerifyCache(model, 40)
        assert torch.equal(model.generate(prompt, past_key_values=cache, prompt_lookup_num_tokens=6, **options), wanted)


def test_prepare_twice_and_restore_unprepared() -> None:
    model = build("llama", "sdpa")
    with pytest.raises(OptionsError, match="not prepared; nothing to restore"):
        restore(model)
    prepare(model)
    with pytest.raises(OptionsError, match=r"prepared already; call spec_compile\.restore\(model\) first"):
        prepare(model)
    assert model.config._attn_implementation == hooks.NAME
    restore(model)
    with pytest.raises(OptionsError, match="not prepared"):
        restore(model)
    prepare(model)
    restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_not_a_transformers_model() -> None:
    with pytest.raises(OptionsError, match="needs a transformers model, got Linear"):
        prepare(torch.nn.Linear(2, 2))
    with pytest.raises(OptionsError, match="not prepared"):
        restore(torch.nn.Linear(2, 2))


def test_two_models_are_independent() -> None:
    first, second = build("llama", "sdpa"), build("llama", "eager")
    prepare(first)
    assert second.config._attn_implementation == "eager"
    prepare(second)
    restore(first)
    assert second.config._attn_implementation == hooks.NAME
    restore(second)
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("sdpa", "eager")


def test_bloom_has_no_attention_interface() -> None:
    """BLOOM spells its attention itself: ``prepare`` says so and changes nothing; the structural detector covers it."""
    model = build("bloom", "eager")
    with torch.no_grad():
        before = model(input_ids=tokens(5), use_cache=False).logits
    with pytest.raises(OptionsError, match="BloomForCausalLM does not accept attention hooks"):
        prepare(model)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(OptionsError, match="not prepared"):
        restore(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(5), use_cache=False).logits, before)


def test_disabled_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    model = build("llama", "sdpa")
    assert prepare(model) is model
    assert model.config._attn_implementation == "sdpa"
    assert restore(model) is model


def test_restore_works_after_the_switch_was_thrown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model prepared before SPEC_COMPILE_DISABLE was set can still be restored."""
    model = prepare(build("llama", "sdpa"))
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_training_with_dropout_is_refused_where_sdpa_cannot_stand_in() -> None:
    model = prepare(build("gpt_oss", "eager", attention_dropout=0.5)).train()
    with pytest.raises(OptionsError, match="for inference: call model"):
        model(input_ids=tokens(5), use_cache=False)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


def test_prepare_warns_about_nothing(logged: pytest.LogCaptureFixture) -> None:
    restore(prepare(build("llama", "sdpa")))
    assert [record.getMessage() for record in logged.records if record.name.startswith(("spec_compile", "transformers"))] == []
