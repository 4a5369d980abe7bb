"""``moe_calibrate`` on tiny random mixtures, and plans for experts through whole models."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import MoePlan, SparsityPlan, VerifyCache, compile_verify, moe_calibrate
from spec_compile.calibrate import _counts, _routings, _share, divergence_sum, split_windows, token_windows
from spec_compile.errors import OptionsError, PlanError, QualityError
from spec_compile.models.zoo import VOCAB, build

ROWS = 5


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model_of(name: str = "qwen3_moe") -> Any:
    more: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 4, "norm_topk_prob": True} if name == "qwen3_moe" else {}
    return build(name, "eager" if name == "gpt_oss" else "sdpa", **more)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


TEXTS = [tokens(40, seed) for seed in range(4)]


def calibrate(skip: int | None = 2, model: Any = None, **more: Any) -> MoePlan:
    given: dict[str, Any] = {"draft_len": ROWS - 1, "force": True, "progress": False, **more}
    return moe_calibrate(model or model_of(), given.pop("texts", TEXTS), skip, **given)


def test_thresholds_are_the_medians_of_the_models_own_routers() -> None:
    """Against the routers' own outputs, on the texts that were not held out."""
    model, wanted = model_of(), []
    for layer in model.model.layers:
        shares: list[float] = []
        hook = layer.mlp.gate.register_forward_hook(
            lambda module, args, out, into=shares: into.extend(
                (out[1].sort(-1).values[:, :2].sum(-1) / out[1].sum(-1)).flatten().tolist()
            )
        )
        with torch.no_grad():
            for ids in TEXTS[:3]:
                model(input_ids=ids[None], use_cache=False)
        hook.remove()
        wanted.append(sorted(shares)[(len(shares) - 1) // 2])
    plan = calibrate()
    assert plan.skip == 2 and plan.betas == pytest.approx(wanted, rel=1e-6)
    assert len({*wanted}) == 2 and all(0.0 < beta < 0.5 for beta in wanted)


def test_what_is_measured() -> None:
    plan = calibrate(expert_budget=6)
    found = plan.calibration
    assert found is not None
    # Three texts of 40 tokens are calibrated on; of the last one, half in whole steps is measured.
    assert (found.tokens, found.held_out, found.chosen) == (120, 20, 4)
    assert found.kl > 1e-4 and 0.0 <= found.flips <= 1.0
    assert 1.0 <= found.kept < 4.0 and found.distinct <= 6.0 < found.distinct_exact
    assert found.baseline_top_k == round(found.kept) and found.baseline_kl and found.baseline_kl != found.kl
    assert found.forced == (found.kl > 0.05 or found.flips > 0.05)


def test_divergence_is_that_of_sparse_from_exact_steps() -> None:
    """By hand: all steps of the held-out text, each from an exact cache."""
    model = model_of()
    plan = calibrate(None, top_k=1)
    assert plan.betas is None and plan.calibration is not None and plan.calibration.baseline_top_k is None
    cache, ids = VerifyCache(model, 40), TEXTS[3][None]
    verify = compile_verify(model, cache, ROWS - 1, SparsityPlan(moe=plan), codegen="eager")
    total = flips = 0.0
    with torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache, use_cache=True)
        for start in range(20, 40, ROWS):
            sparse = verify(ids[:, start : start + ROWS], sparse=True).softmax(-1)
            cache.crop(-ROWS)
            exact = verify(ids[:, start : start + ROWS], sparse=False).softmax(-1)
            total += float((exact * (exact.log() - sparse.log())).sum())
            flips += int((exact.argmax(-1) != sparse.argmax(-1)).sum())
    assert plan.calibration.kl == pytest.approx(total / 20, rel=1e-3) and plan.calibration.flips == flips / 20


@pytest.mark.parametrize(("kl", "flips", "refused"), [(0.05, 0.05, False), (0.0501, 0.0, True), (0.0, 0.0501, True)])
def test_a_plan_past_its_limits_is_refused(monkeypatch: pytest.MonkeyPatch, kl: float, flips: float, refused: bool) -> None:
    monkeypatch.setattr("spec_compile.calibrate._divergence", lambda *_: (kl, flips, 20))
    forced = calibrate(None, top_k=1).calibration
    assert forced is not None and forced.forced == refused
    if not refused:
        assert calibrate(None, top_k=1, force=False).calibration == forced
        return
    with pytest.raises(QualityError, match=r"past its limits .* a row keeps 1\.00 of 4 experts.* force=True"):
        calibrate(None, top_k=1, force=False)
    accepted = calibrate(None, top_k=1, force=False, limit_kl=kl, limit_flips=flips).calibration
    assert accepted is not None and not accepted.forced


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_plan_without_a_finite_divergence_is_refused_even_if_forced(monkeypatch: pytest.MonkeyPatch, kl: float) -> None:
    """A plan file is strict JSON, which has no such numbers; of the baseline they are left out."""
    monkeypatch.setattr("spec_compile.calibrate._divergence", lambda *_: (kl, 0.0, 20))
    with pytest.raises(QualityError, match=f"is {kl}, with or without force: the logits of one of them are not finite"):
        calibrate(None, top_k=1)
    results = iter([(0.01, 0.0, 20), (kl, 0.5, 20)])
    monkeypatch.setattr("spec_compile.calibrate._divergence", lambda *_: next(results))
    found = calibrate(None, ratio=0.9).calibration
    assert found is not None and (found.kl, found.baseline_kl, found.baseline_flips) == (0.01, None, 0.5)


def test_tokens_that_an_exact_step_excludes_add_nothing_to_the_divergence() -> None:
    exact = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    assert divergence_sum(exact, torch.tensor([[0.25, 0.75, 0.0]]).double().log()) == pytest.approx(
        math.log(2) / 2 - math.log(1.5) / 2
    )
    assert divergence_sum(exact, torch.tensor([[0.25, 0.25, 0.5]]).double().log()) == pytest.approx(math.log(2))
    assert divergence_sum(exact, torch.tensor([[1.0, 0.0, 0.0]]).double().log()) == math.inf


def test_a_calibrated_plan_is_saved_and_runs(tmp_path: Path) -> None:
    plan = SparsityPlan(moe=calibrate(1))
    plan.save(tmp_path / "plan.json")
    assert SparsityPlan.load(tmp_path / "plan.json") == plan
    report = sc.explain(model_of(), VerifyCache(model_of(), 64), ROWS - 1, tmp_path / "plan.json")
    assert [entry.rule.split(" below")[0] for entry in report.moes] == ["skips the lowest 1"] * 2


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3", "gpt_oss"])
def test_routers_of_other_families(family: str) -> None:
    """Layers in the order of the forward, dense ones left out."""
    model = model_of(family)
    before = model.get_experts_implementation()
    with torch.no_grad():
        found = _routings(model, TEXTS[:2], lambda *_: None)
    assert len(found) == (1 if family == "deepseek_v3" else 2)
    for choice, weight in found.values():
        assert choice.shape == weight.shape == (80, 2) and 0 <= int(choice.min()) <= int(choice.max()) < 4
        assert (_share(weight, 1) <= 0.5).all()
    assert model.get_experts_implementation() == before
    assert not any(module._forward_pre_hooks for module in model.modules())


class Experts(torch.nn.Module):
    """As far as calibration looks."""

    has_gate, is_transposed = True, False

    def __init__(self, count: int) -> None:
        super().__init__()
        self.down_proj = torch.nn.Parameter(torch.zeros(count, 4, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None: ...


class Mixture(torch.nn.Module):
    """Two layers, which run in the reverse order of their registration: experts 6 and 7 of 8, then 1 and 0 of 2."""

    def __init__(self, implementation: str = "batched_mm") -> None:
        super().__init__()
        self.second, self.first, self.implementation = Experts(2), Experts(8), implementation

    def get_experts_implementation(self) -> dict[str, str]:
        if self.implementation == "unknown":
            raise KeyError(self.implementation)
        return {"": self.implementation}

    def set_experts_implementation(self, given: str | dict[str, str]) -> None:
        self.implementation = given if isinstance(given, str) else given[""]

    def forward(self, input_ids: Tensor, use_cache: bool) -> None:
        rows = input_ids.shape[1]
        weight = torch.tensor([0.75, 0.25]).expand(rows, 2)
        self.first(weight, torch.tensor([6, 7]).expand(rows, 2), weight)
        self.second(weight, top_k_index=torch.tensor([1, 0]).expand(rows, 2), top_k_weights=weight)


def test_layers_that_run_in_another_order_than_they_were_registered_in() -> None:
    """Each is counted among its own experts."""
    assert _counts(Mixture(), MoePlan(top_k=1), [torch.arange(10)], ROWS, lambda *_: None) == (1.0, 1.0, 2.0)
    plan = MoePlan(skip=1, betas=(0.5, 0.0))
    assert _counts(Mixture(), plan, [torch.arange(10)], ROWS, lambda *_: None) == (1.5, 1.5, 2.0)


def test_hooks_on_experts_go_whatever_fails() -> None:
    model = Mixture("unknown")
    with pytest.raises(KeyError):
        _routings(model, [torch.arange(10)], lambda *_: None)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_strings_need_a_tokenizer() -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    assert [len(w) for w in token_windows(["abcde", "", "xy", []], tokenizer, 3)] == [3, 2, 2]
    with pytest.raises(OptionsError, match="pass the model's tokenizer"):
        moe_calibrate(model_of(), ["abc"], 1)


def test_windows_are_split_without_overlap() -> None:
    for count, held in ((2, 1), (4, 1), (8, 2)):
        windows = [torch.full((20,), i) for i in range(count)]
        train, test = split_windows(windows, 0.25, 11)
        assert [int(w[0]) for w in train + test] == list(range(count)) and len(test) == held
    train, test = split_windows([torch.arange(40)], 0.25, 11)
    assert torch.equal(torch.cat([*train, *test]), torch.arange(40))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"skip": 4}, r"skip must lie in 1\.\.3"),
        ({"skip": None}, "nothing to calibrate"),
        ({"held_out": 1.0}, "held_out must lie between"),
        ({"draft_len": 30}, "at least two windows of 63 tokens"),
        ({"skip": 4, "window": 20}, r"skip must lie in 1\.\.3, a row has 4 experts, got 4"),
        ({"skip": None, "top_k": 4}, "limits no MoE layer: no rule takes one of its 4 of 8 experts"),
    ],
)
def test_bad_arguments(change: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        calibrate(**change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"skip": 0}, "skip must be None or an integer of at least 1, got 0"),
        ({"skip": 1.5}, "skip must be None or an integer of at least 1, got 1.5"),
        ({"skip": "2"}, "skip must be None or an integer of at least 1, got '2'"),
        ({"skip": True}, "skip must be None or an integer of at least 1, got True"),
        ({"limit_kl": math.nan}, "limit_kl must be a number of at least 0, got nan"),
        ({"limit_kl": None}, "limit_kl must be a number of at least 0, got None"),
        ({"limit_kl": -0.1}, "limit_kl must be a number of at least 0, got -0.1"),
        ({"limit_flips": "x"}, "limit_flips must be a number of at least 0, got 'x'"),
        ({"limit_flips": math.nan}, "limit_flips must be a number of at least 0, got nan"),
        ({"held_out": "a"}, "held_out must be a number"),
        ({"held_out": 0}, "held_out must lie between 0 and 1, got 0"),
        ({"held_out": math.nan}, "held_out must be a number"),
        ({"window": 0}, "window must be an integer of at least 11 tokens with draft_len=4, got 0"),
        ({"window": -1}, "window must be an integer of at least 11 tokens with draft_len=4, got -1"),
        ({"window": 10}, "window must be an integer of at least 11 tokens with draft_len=4, got 10"),
        ({"window": 64.0}, "window must be an integer of at least 11 tokens with draft_len=4, got 64.0"),
        ({"draft_len": -1}, r"draft_len must lie in 0\.\.31"),
        ({"draft_len": 1.5}, r"draft_len must lie in 0\.\.31"),
        ({"draft_len": "8"}, r"draft_len must lie in 0\.\.31"),
        ({"draft_len": 8, "max_q_len": 8}, r"draft_len must lie in 0\.\.7"),
        ({"max_q_len": 99}, r"options\['max_q_len'\] must lie in 1\.\.64"),
        ({"graphs": True}, "unknown option 'graphs'"),
        ({"plan": None}, "plan is what moe_calibrate makes"),
        ({"ratio": 2.0}, r"plan\.moe\.ratio: must lie in 0\.\.1"),
        ({"top_k": 0}, r"plan\.moe\.top_k: must be at least 1"),
        ({"substitute": True}, r"plan\.moe\.substitute: needs expert_budget"),
        ({"texts": []}, "texts must be a list of strings or of token ids, got none with tokens"),
        ({"texts": [[], torch.zeros(0)]}, "got none with tokens"),
        ({"texts": "abc"}, "texts must be a list of strings or of token ids, got str"),
        ({"texts": tokens(40)}, "texts must be a list of strings or of token ids, got Tensor"),
        ({"texts": 3}, "texts must be a list of strings or of token ids, got int"),
        ({"texts": [tokens(40), [1, "a"]]}, r"texts\[1\] is neither"),
        ({"texts": [tokens(40), None]}, r"texts\[1\] is neither"),
        ({"texts": [1, 2]}, r"token ids must be 1-D integers, got torch.int64 \[\] in texts\[0\]"),
        ({"texts": [tokens(40) > 9]}, r"token ids must be 1-D integers, got torch.bool \[40\] in texts\[0\]"),
        ({"texts": [tokens(40), [-1] * 40]}, rf"token ids must lie in 0\.\.{VOCAB - 1}, got -1 in texts\[1\]"),
        ({"texts": [tokens(40), [VOCAB] * 40]}, rf"token ids must lie in 0\.\.{VOCAB - 1}, got {VOCAB} in texts\[1\]"),
    ],
)
def test_bad_arguments_are_named_before_the_model_runs(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], text: str
) -> None:
    monkeypatch.setattr("spec_compile.calibrate._routings", never)
    with pytest.raises((OptionsError, PlanError), match=text):
        calibrate(**change)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        ([[1.0, 0.0, 0.0]], "nothing to skip: the lowest 2 experts hold no weight in half of the rows of every layer"),
        ([[0.6, 0.4]], r"skip must lie in 1\.\.1, a row has 2 experts, got 2"),
        ([[1.0]], "skip must be None where a row has one expert, got 2"),
        (None, "Qwen3MoeForCausalLM calls none of its experts"),
    ],
)
def test_routers_that_leave_nothing_to_skip(monkeypatch: pytest.MonkeyPatch, weight: Any, text: str) -> None:
    """The layer with the fewest choices decides."""
    layers = [torch.tensor(w) for w in ([[0.5, 0.5, 0.0, 0.0, 0.0]], weight)] if weight else []
    found = {layer: (torch.zeros(w.shape, dtype=torch.int64), w) for layer, w in enumerate(layers)}
    monkeypatch.setattr("spec_compile.calibrate._routings", lambda *_: found)
    with pytest.raises(OptionsError, match=text):
        calibrate(2)


def never(*args: Any) -> Any:
    raise AssertionError("the model ran")


def test_models_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_compile.calibrate._routings", never)
    with pytest.raises(OptionsError, match="has no MoE layer"):
        calibrate(1, model=build("llama", "sdpa"))
    with pytest.raises(OptionsError, match="model must be a transformers causal LM, got str"):
        calibrate(1, model="qwen3_moe")
    model = build("mixtral", "sdpa")
    with pytest.raises(OptionsError, match=r"model is in training mode: call model\.eval\(\)"):
        calibrate(1, model=model.train())
    model.eval().set_experts_implementation("eager")
    with pytest.raises(OptionsError, match=r"experts run in a Python loop .* call spec_compile\.prepare\(model\)"):
        calibrate(1, model=model)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_sparse_and_exact_steps_of_whole_models(family: str) -> None:
    """One graph serves both, and an exact step has the bits of a function without a plan."""
    model = model_of(family)
    plan = SparsityPlan(moe=MoePlan(expert_budget=1, substitute=True))
    logits = {}
    for name, given in (("plan", plan), ("none", None)):
        cache = VerifyCache(model, 64)
        verify = compile_verify(model, cache, ROWS - 1, given, codegen="eager")
        with torch.no_grad():
            model(input_ids=TEXTS[0][None, :20], past_key_values=cache, use_cache=True)
        for mode in (False, None, False) if given else (None,):
            logits[name, mode] = verify(TEXTS[0][None, 20 : 20 + ROWS], sparse=mode)
            cache.crop(-ROWS)
        assert len(verify.reports) == 1 and len(verify.report().limited) == (len(verify.report().moes) if given else 0)
    assert torch.equal(logits["plan", False], logits["none", None])
    assert not torch.allclose(logits["plan", None], logits["none", None], atol=1e-3)
