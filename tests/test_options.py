"""Backend options, modes and the off switch."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F

from spec_compile.backend import spec_compile_backend
from spec_compile.errors import OptionsError, PlanError
from spec_compile.options import MAX_ROWS, Options, disabled
from spec_compile.plan import AttentionPlan, SparsityPlan
from spec_compile.report import RewriteReport


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)
    monkeypatch.delenv("SPEC_COMPILE_DUMP", raising=False)


def step(q: torch.Tensor, new: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A verify forward of one attention layer whose K is also its V."""
    cache.index_copy_(2, position, new)
    k = cache[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, 64, 16)
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def step_inputs() -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    q, new, cache = (torch.randn(1, heads, rows, 16, generator=gen) for heads, rows in ((4, 3), (2, 3), (2, 64)))
    position = torch.arange(30, 33)
    return q, new, cache, position, (torch.arange(64) <= position[:, None])[None, None]


def test_defaults() -> None:
    options = Options.parse(None)
    assert options == Options()
    assert options.plan == SparsityPlan()
    assert (options.strict, options.cudagraphs, options.max_q_len, options.block_size) == (False, False, 32, 64)
    assert Options.parse({}, "default") == options


def test_given_options_are_kept_and_not_changed() -> None:
    given = {
        "plan": {"attention": {"block_size": 32}},
        "strict": True,
        "max_q_len": 5,
        "lowering": "reference",
        "codegen": "eager",
    }
    kept = dict(given)
    options = Options.parse(given, "reduce-overhead")
    assert given == kept
    assert options.plan == SparsityPlan(AttentionPlan(block_size=32))
    assert (options.strict, options.max_q_len, options.lowering, options.codegen) == (True, 5, "reference", "eager")


def test_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(OptionsError) as caught:
        Options.parse({"stritc": True})
    assert "unknown option 'stritc'" in str(caught.value)
    for option in dataclasses.fields(Options):
        assert option.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("strict", 1), ("strict", "yes"), ("strict", None), ("cudagraphs", 0), ("cudagraphs", "auto"),
        ("max_q_len", 0), ("max_q_len", -1), ("max_q_len", MAX_ROWS + 1), ("max_q_len", "8"), ("max_q_len", 8.0),
        ("max_q_len", None), ("max_q_len", True), ("block_size", 0), ("block_size", 48), ("block_size", 256),
        ("block_size", "64"), ("block_size", None), ("block_size", 64.0), ("lowering", "cuda"),
        ("lowering", None), ("lowering", []),
        ("codegen", "aot_eager"), ("codegen", None), ("dump", 3), ("on_report", "print"),
    ],
)  # fmt: skip
def test_bad_values_name_the_option(name: str, bad: Any) -> None:
    with pytest.raises(OptionsError, match=rf"options\['{name}'\]"):
        Options.parse({name: bad})


@pytest.mark.parametrize(
    ("name", "good"), [("max_q_len", 1), ("max_q_len", MAX_ROWS), *(("block_size", b) for b in (8, 16, 32, 64, 128))]
)
def test_limits_are_inclusive(name: str, good: int) -> None:
    assert getattr(Options.parse({name: good}), name) == good


def test_modes() -> None:
    assert not Options.parse(None, None).cudagraphs
    assert Options.parse(None, "reduce-overhead").cudagraphs
    assert Options.parse({"cudagraphs": True}, "reduce-overhead").cudagraphs
    for mode in ("max-autotune", "max-autotune-no-cudagraphs", "fast"):
        with pytest.raises(OptionsError, match=f"mode='{mode}' is not supported; use mode=None or 'reduce-overhead'"):
            Options.parse(None, mode)


def test_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"attention": {"sink": 3}}))
    wanted = SparsityPlan(AttentionPlan(sink=3))
    for given in (wanted, wanted.to_dict(), path, str(path)):
        assert Options.parse({"plan": given}).plan == wanted
    assert Options.parse({"plan": None}).plan == SparsityPlan()
    with pytest.raises(PlanError, match=r"plan\.attention: unknown key"):
        Options.parse({"plan": {"attention": {"x": 1}}})
    with pytest.raises(PlanError, match=r"plan\.ffn\.threshold: \"auto\""):
        Options.parse({"plan": {"ffn": {"threshold": "auto"}}})


def test_dump_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DUMP", "graphs")
    assert Options.parse(None).dump == "graphs"
    assert Options.parse({"dump": "mine"}).dump == "mine"
    monkeypatch.setenv("SPEC_COMPILE_DUMP", "")
    assert Options.parse(None).dump is None


@pytest.mark.parametrize(("value", "off"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_disabled(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", value)
    assert disabled() is off


def compiled_reports(**options: Any) -> tuple[torch.Tensor, list[RewriteReport]]:
    reports: list[RewriteReport] = []
    options = {"codegen": "eager", "on_report": reports.append, **options}
    return torch.compile(step, backend="spec_compile", options=options)(*step_inputs()), reports


def test_the_backend_takes_the_options(tmp_path: Path) -> None:
    found, reports = compiled_reports(dump=str(tmp_path / "graphs"), block_size=16)
    assert torch.allclose(found, step(*step_inputs()), atol=1e-6)
    assert [report.kind for report in reports] == ["verify"]
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert any(name.endswith("_before.py") for name in names)
    assert any("detect" in name for name in names)


def test_max_q_len_decides_what_is_a_verify_forward() -> None:
    _, reports = compiled_reports(max_q_len=2)
    assert [report.kind for report in reports] == ["passed through"]
    assert "prefill: q_len 3 is above max_q_len 2" in reports[0].reason


def test_cudagraphs_on_cpu_is_noted_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    patches: list[Any] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: list[Any], config_patches: Any = None) -> Any:
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr(sys.modules["torch._inductor.compile_fx"], "compile_fx", compile_fx)
    _, reports = compiled_reports(codegen="inductor", cudagraphs=True)
    assert reports[0].notes == ["cudagraphs has no effect on CPU"]
    assert patches == [None]


def test_off_switch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    found, reports = compiled_reports()
    assert reports == []
    assert torch.equal(found, step(*step_inputs()))


def test_off_switch_ignores_even_bad_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off, the backend hands back the graph it was given."""
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert spec_compile_backend(gm, [torch.ones(1)], options={"nonsense": 1}) == gm.forward


@pytest.mark.parametrize("options", [{"nonsense": 1}, {"max_q_len": 0}])
def test_bad_options_reach_the_caller_of_the_compiled_function(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"unknown option|max_q_len"):
        torch.compile(step, backend="spec_compile", options=options)(*step_inputs())
