"""MoE families of transformers: experts and routers are found in every traceable form, and the numbers stay.

What is compared is the uncompiled model, whose experts run as transformers runs them.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from spec_compile import VerifyCache, explain, prepare, restore
from spec_compile.models.zoo import FAMILIES, VOCAB, build
from spec_compile.report import RewriteReport

EXPERTS = "moe_experts_v1"
NAMES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
FORMS = ("batched_mm", "grouped_mm", "marker")
ROUTERS = {
    "mixtral": "top 2 of softmax, renormalised",
    "qwen3_moe": "top 2 of softmax",
    "olmoe": "top 2 of softmax",
    "deepseek_v3": "top 2 of sigmoid, bias for the choice, renormalised, times 2.5",
    "gpt_oss": "softmax of the top 2",
}
# Tracing takes most of the time: one layer, but for deepseek, whose first one is dense.
ONE_LAYER: dict[str, dict[str, Any]] = {name: {"num_hidden_layers": 1} for name in NAMES}
ONE_LAYER["gpt_oss"]["layer_types"] = ["full_attention"]
ONE_LAYER["deepseek_v3"] = {}
PREFILL, ROWS = 20, 5


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(rows: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def model_and_cache(name: str, form: str = "batched_mm", **fields: Any) -> tuple[Any, VerifyCache]:
    """A model with one MoE layer whose experts run as ``form``, and a prefilled cache."""
    model = build(name, FAMILIES[name].implementations[0], **{**ONE_LAYER[name], **fields})
    cache = VerifyCache(model, 64)
    model(input_ids=tokens(PREFILL), past_key_values=cache, use_cache=True)
    if form == "marker":
        prepare(model)
    else:
        model.set_experts_implementation(form)
    return model, cache


@functools.cache
@torch.no_grad()
def wanted(name: str, form: str = "batched_mm") -> torch.Tensor:
    """Logits of the uncompiled model, with eager loops over experts: the definition."""
    model, cache = model_and_cache(name)
    model.set_experts_implementation("eager")
    return model(input_ids=tokens(ROWS, 1), past_key_values=cache, use_cache=True).logits


def compiled(model: Any, reports: list[RewriteReport], **options: Any) -> Any:
    dynamic = options.pop("dynamic", None)
    options = {"codegen": "eager", "on_report": reports.append, **options}
    return torch.compile(model, backend="spec_compile", fullgraph=True, dynamic=dynamic, options=options)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_families(name: str, form: str) -> None:
    model, cache = model_and_cache(name, form)
    reports: list[RewriteReport] = []
    # The specification rewrites routers on CPU too; experts are computed the same way under every lowering.
    run = compiled(model, reports, lowering="reference")
    logits = run(input_ids=tokens(ROWS, 1), past_key_values=cache, use_cache=True).logits
    assert close(logits, wanted(name))
    [report] = reports
    [entry] = report.moes
    assert entry.layer == ("model.layers.1.mlp.experts" if name == "deepseek_v3" else "model.layers.0.mlp.experts")
    assert (entry.status, entry.form, entry.reason, entry.router_note) == ("rewritten", form, "", "")
    assert (entry.experts, entry.top_k, entry.hidden) == (4, 2, 64)
    assert entry.activation == ("swiglu_oai" if name == "gpt_oss" else "silu")
    assert entry.router == ROUTERS[name]
    moe = next(p for p in report.passes if p.name == "detect_moe")
    assert (moe.hits, moe.notes, moe.exact) == (1, ["routers 1 of 1"], True)


VARIANTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("qwen3_moe", "grouped_mm", {"norm_topk_prob": True}, "top 2 of softmax, renormalised"),
    ("olmoe", "batched_mm", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "top 1 of softmax, renormalised"),
    (
        "deepseek_v3", "grouped_mm", {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        "top 2 of sigmoid, bias for the choice, 1 of 2 groups",
    ),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("name", "form", "fields", "router"), VARIANTS)
def test_variants_of_routers(name: str, form: str, fields: dict[str, Any], router: str) -> None:
    model, cache = model_and_cache(name, form, **fields)
    expected = model(input_ids=tokens(ROWS, 1), past_key_values=copy.deepcopy(cache), use_cache=True).logits
    reports: list[RewriteReport] = []
    run = compiled(model, reports, lowering="reference")
    assert close(run(input_ids=tokens(ROWS, 1), past_key_values=cache, use_cache=True).logits, expected)
    assert {entry.router for entry in reports[0].moes} == {router}
    assert {entry.router_note for entry in reports[0].moes} == {""}


@torch.no_grad()
def test_routers_keep_their_top_k_on_cpu() -> None:
    """With a router of zeros every choice is a tie, which PyTorch's top-k breaks in an order of its own."""
    model, cache = model_and_cache("mixtral")
    for path, weight in model.named_parameters():
        if path.endswith("mlp.gate.weight"):
            weight.zero_()
    expected = model(input_ids=tokens(ROWS, 1), past_key_values=copy.deepcopy(cache), use_cache=True).logits
    reports: list[RewriteReport] = []
    run = compiled(model, reports)
    assert close(run(input_ids=tokens(ROWS, 1), past_key_values=cache, use_cache=True).logits, expected)
    assert {(entry.status, entry.router) for entry in reports[0].moes} == {("rewritten", ROUTERS["mixtral"])}
    assert all("ties" in entry.router_note for entry in reports[0].moes)
    assert "router as traced: top-k breaks ties" in str(reports[0])


@torch.no_grad()
@pytest.mark.parametrize(("name", "form"), [("mixtral", "grouped_mm"), ("gpt_oss", "marker")])
def test_weights_are_read_live(name: str, form: str) -> None:
    model, cache = model_and_cache(name, form)
    reports: list[RewriteReport] = []
    run = compiled(model, reports)
    calls = {"input_ids": tokens(ROWS, 1), "use_cache": True}
    before = run(**calls, past_key_values=copy.deepcopy(cache)).logits
    other = build(name, FAMILIES[name].implementations[0], seed=3).state_dict()
    model.load_state_dict({path: other[path] if ".experts." in path else held for path, held in model.state_dict().items()})
    after = run(**calls, past_key_values=copy.deepcopy(cache)).logits
    assert len(reports) == 1, "it was compiled again"
    assert close(after, model(**calls, past_key_values=cache).logits)
    assert (after - before).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize(("name", "form"), [("gpt_oss", "batched_mm"), ("mixtral", "grouped_mm")])
def test_rows_may_vary(name: str, form: str) -> None:
    """Under ``dynamic=True`` gpt-oss's clamp limit is a symbol as well, and becomes a constant behind a guard."""
    model, cache = model_and_cache(name, form)
    reports: list[RewriteReport] = []
    run = compiled(model, reports, dynamic=True)

    def step(rows: int) -> torch.Tensor:
        calls = {"input_ids": tokens(rows, rows), "use_cache": True}
        expected = model(**calls, past_key_values=copy.deepcopy(cache)).logits
        found = run(**calls, past_key_values=copy.deepcopy(cache)).logits
        assert close(found, expected)
        return found

    before = [step(rows) for rows in (3, 8, 5)][-1]
    assert len(reports) == 1, "a number of rows was specialised"
    assert [entry.status for entry in reports[0].moes] == ["rewritten"]
    if name == "gpt_oss":
        for layer in model.model.layers:
            layer.mlp.experts.limit = 0.05
        assert (step(5) - before).abs().max() > 1e-3
        assert len(reports) == 2


def test_llama4_is_refused_with_a_reason() -> None:
    model = build(
        "llama4", "sdpa", num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]
    )
    report = explain(model, VerifyCache(model, 64), draft_len=4)
    assert {(entry.status, entry.reason) for entry in report.moes} == {
        ("refused", "every expert runs on every row with the routing weight on its input: not a gather over chosen experts")
    }
    assert report.moes[0].source


def test_eager_loops_are_reported_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    model, cache = model_and_cache("mixtral")
    model.set_experts_implementation("eager")
    with caplog.at_level(logging.WARNING, "spec_compile"):
        report = explain(model, cache, draft_len=4)
    assert [entry.status for entry in report.moes] == ["refused"], "one compiled frame serves every layer"
    assert "Python loop" in report.moes[0].reason
    assert "spec_compile.prepare(model), or model.set_experts_implementation('grouped_mm')" in report.moes[0].reason
    assert "MoE rewritten 0 of 1" in str(report)
    assert any("Python loop" in record.getMessage() for record in caplog.records)


@torch.no_grad()
def test_prepare_replaces_eager_loops() -> None:
    model, cache = model_and_cache("mixtral", num_hidden_layers=2)
    model.set_experts_implementation("eager")
    prepare(model)
    report = explain(model, cache, draft_len=4)
    assert [(entry.status, entry.form) for entry in report.moes] == [("rewritten", "marker")] * 2
    assert not any("graph breaks" in note for note in report.notes)
    restore(model)
    assert model.config._experts_implementation == "eager"


@torch.no_grad()
def test_shared_experts_stay_outside() -> None:
    model, cache = model_and_cache("deepseek_v3", "grouped_mm")
    report = explain(model, cache, draft_len=4)
    assert [entry.layer for entry in report.moes] == ["model.layers.1.mlp.experts"]
    after = report.code("after")
    assert after.count(f"torch.ops.spec_compile.{EXPERTS}.default(") == 1
    assert after.count("torch.ops.aten.silu.default(") == 2, "the dense layer's and the shared experts'"


@pytest.mark.parametrize("name", NAMES)
def test_cache_shapes_need_no_traceable_experts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The grouped product has no fake form in float32, and eager loops read data."""
    for form in ("grouped_mm", "eager"):
        model = build(name, FAMILIES[name].implementations[0])
        model.set_experts_implementation(form)
        with caplog.at_level(logging.WARNING):
            cache = VerifyCache(model, 8)
        assert len(cache.layers) == FAMILIES[name].layers
        assert model.config._experts_implementation == form
    assert not caplog.records
