"""Every family of the zoo: the rewritten verify forward equals the uncompiled one, logits and caches.

The outcome of each case is also compared with ``tests/data/hf_matrix.json``, so that a transformers upgrade which
changes what is recognised shows as a diff. Rewrite it with ``SPEC_COMPILE_UPDATE=1 pytest tests/test_hf_matrix.py``.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from spec_compile.backend import spec_compile_backend
from spec_compile.models.zoo import FAMILIES, VOCAB, WINDOW, build
from spec_compile.report import RewriteReport

SNAPSHOT = Path(__file__).parent / "data" / "hf_matrix.json"
UPDATE = os.environ.get("SPEC_COMPILE_UPDATE", "") not in ("", "0")
PREFILL, ROWS, CACHE = 37, 5, 128
LOWERINGS = ("reference", "auto")
CASES = [(name, impl) for name, family in FAMILIES.items() for impl in family.implementations]
OTHER_CACHES = [
    ("llama", "sdpa", "growing"), ("llama", "eager", "growing"), ("gemma2", "sdpa", "growing"),
    ("gemma2", "eager", "growing"), ("mistral", "sdpa", "full"), ("gemma2", "eager", "full"),
    ("gpt_oss", "eager", "full"), ("llama4", "sdpa", "full"),
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A model at the point of a verify forward, and what the uncompiled model makes of it."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    before: Cache
    logits: torch.Tensor
    after: Cache


@dataclass(frozen=True)
class Result:
    """What the compiled model makes of the same step."""

    logits: torch.Tensor
    after: Cache
    reports: list[RewriteReport]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def _inputs(name: str, ids: torch.Tensor, start: int, end: int) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": ids[:, start:end]}
    if FAMILIES[name].positions:
        inputs["position_ids"] = torch.arange(start, end).unsqueeze(0)
    if FAMILIES[name].padding_mask:
        inputs["attention_mask"] = (torch.arange(CACHE) < end).long().unsqueeze(0)
    return inputs


def _new_cache(config: Any, kind: str) -> Cache:
    """``static`` (window layers keep the window only), ``full`` (they keep everything and mask) or ``growing``."""
    if kind == "growing":
        return DynamicCache(config=config)
    cache = StaticCache(config=config, max_cache_len=CACHE)
    if kind == "full":
        cache.layers = [StaticLayer(max_cache_len=CACHE) for _ in cache.layers]
    return cache


@functools.cache
@torch.no_grad()
def _step(name: str, impl: str, kind: str = "static") -> Step:
    model = build(name, impl)
    ids = torch.randint(3, VOCAB, (1, PREFILL + ROWS), generator=torch.Generator().manual_seed(1))
    cache = _new_cache(model.config, kind)
    model(**_inputs(name, ids, 0, PREFILL), past_key_values=cache, use_cache=True)
    inputs = _inputs(name, ids, PREFILL, PREFILL + ROWS)
    after = copy.deepcopy(cache)
    logits = model(**inputs, past_key_values=after, use_cache=True).logits
    return Step(model, inputs, cache, logits, after)


@torch.no_grad()
def _run(step: Step, codegen: str) -> Result:
    reports: list[RewriteReport] = []
    options: dict[str, Any] = {"codegen": codegen, "on_report": reports.append}
    compiled = torch.compile(step.model, backend="spec_compile", options=options)
    cache = copy.deepcopy(step.before)
    logits = compiled(**step.inputs, past_key_values=cache, use_cache=True).logits
    return Result(logits, cache, reports)


@functools.cache
@torch.no_grad()
def _run_lowerings(name: str, impl: str) -> dict[str, Result]:
    """Both lowerings behind one Dynamo trace, which takes most of the time; the cache is rewound in between."""
    step = _step(name, impl)
    reports: dict[str, list[RewriteReport]] = {lowering: [] for lowering in LOWERINGS}
    chosen = LOWERINGS[0]

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        ready = {}
        for lowering in LOWERINGS:
            options = {"lowering": lowering, "codegen": "eager", "on_report": reports[lowering].append}
            ready[lowering] = spec_compile_backend(gm, example_inputs, options=options)
        return lambda *args: ready[chosen](*args)

    compiled = torch.compile(step.model, backend=backend)
    cache, results = copy.deepcopy(step.before), {}
    for chosen in LOWERINGS:
        _rewind(cache, step.before)
        logits = compiled(**step.inputs, past_key_values=cache, use_cache=True).logits
        results[chosen] = Result(logits, copy.deepcopy(cache), reports[chosen])
    return results


def _rewind(cache: Cache, to: Cache) -> None:
    """Bring ``cache`` back to the state of ``to`` without moving its tensors."""
    for mine, theirs in zip(cache.layers, to.layers):
        for key, state in vars(theirs).items():
            if isinstance(state, torch.Tensor):
                getattr(mine, key).copy_(state)
            else:
                setattr(mine, key, state)


def _assert_same(result: Result, step: Step) -> None:
    scale = max(1.0, step.logits.abs().max().item())
    assert (result.logits - step.logits).abs().max().item() <= 1e-5 * scale
    assert len(result.after.layers) == len(step.after.layers)
    pairs: list[tuple[Any, Any]] = list(zip(result.after.layers, step.after.layers))
    for layer, (mine, theirs) in enumerate(pairs):
        assert int(mine.get_seq_length()) == int(theirs.get_seq_length()), f"length of layer {layer}"
        for part in ("keys", "values"):
            found, wanted = getattr(mine, part), getattr(theirs, part)
            scale = max(1.0, wanted.abs().max().item())
            assert found.shape == wanted.shape, f"{part} of layer {layer}"
            assert (found - wanted).abs().max().item() <= 1e-5 * scale, f"{part} of layer {layer}"


def _check_report(name: str, reports: list[RewriteReport]) -> None:
    family = FAMILIES[name]
    assert [report.kind for report in reports] == ["verify"], _outcome(reports)
    found = reports[0].attentions
    assert [entry.status for entry in found] == [family.outcome] * family.layers, _outcome(reports)
    assert all(family.reason in entry.reason for entry in found), _outcome(reports)
    # On CPU they stay linear calls, but for the specification.
    layers = [entry.status for entry in reports[0].mlps]
    assert layers in (["rewritten"] * family.mlps, ["kept"] * family.mlps), reports[0]


def _outcome(reports: list[RewriteReport]) -> str:
    """One line per compiled forward: what the snapshot holds."""
    broken = [report.reason for report in reports if report.kind != "verify"]
    if len(reports) != 1 or broken:
        return f"{len(reports)} graphs, passed through: {'; '.join(dict.fromkeys(broken))}"
    report = reports[0]
    parts = []
    if report.rewritten:
        details = [f"{entry.cache} {entry.write}" for entry in report.rewritten]
        details += [what for what in ("softcap", "sinks") if any(getattr(entry, what) for entry in report.rewritten)]
        parts.append(f"rewritten {len(report.rewritten)} ({', '.join(dict.fromkeys(details))})")
    if report.refused:
        reasons = "; ".join(dict.fromkeys(entry.reason for entry in report.refused))
        parts.append(f"refused {len(report.refused)}: {reasons}")
    return "; ".join(parts) or "no attention found"


def _stored() -> dict[str, str]:
    return json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}


def _check_snapshot(key: str, reports: list[RewriteReport]) -> None:
    stored, outcome = _stored(), _outcome(reports)
    if UPDATE:
        stored[key] = outcome
        SNAPSHOT.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n", encoding="utf-8")
    assert outcome == stored.get(key)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("name", "impl"), CASES)
def test_verify_forward_equals_uncompiled(name: str, impl: str, lowering: str) -> None:
    result = _run_lowerings(name, impl)[lowering]
    _assert_same(result, _step(name, impl))
    _check_report(name, result.reports)
    _check_snapshot(f"{name} {impl} static", result.reports)


@pytest.mark.parametrize(("name", "impl", "kind"), OTHER_CACHES)
def test_other_caches(name: str, impl: str, kind: str) -> None:
    step = _step(name, impl, kind)
    result = _run(step, "eager")
    _assert_same(result, step)
    _check_report(name, result.reports)
    expected = "growing" if kind == "growing" else "static"
    assert {entry.cache for entry in result.reports[0].attentions} == {expected}
    _check_snapshot(f"{name} {impl} {kind}", result.reports)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_inductor(name: str, impl: str) -> None:
    step = _step(name, impl)
    result = _run(step, "inductor")
    _assert_same(result, step)
    _check_report(name, result.reports)


def test_snapshot_holds_exactly_these_cases() -> None:
    keys = {f"{name} {impl} static" for name, impl in CASES} | {" ".join(case) for case in OTHER_CACHES}
    assert set(_stored()) == keys


def _no_sinks(model: torch.nn.Module) -> None:
    for path, weight in model.named_parameters():
        if path.endswith("sinks"):
            weight.fill_(-1e4)


def _no_alibi(model: Any) -> None:
    original = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *args, **kwargs: torch.zeros_like(original(*args, **kwargs))


_WIDE: dict[str, Any] = {"sliding_window": 4 * WINDOW}
TERMS: list[tuple[str, dict[str, Any], Callable[[Any], None] | None]] = [
    ("gemma2", {"attn_logit_softcapping": None}, None), ("gpt_oss", {}, _no_sinks), ("bloom", {}, _no_alibi),
    ("llama4", {"attention_chunk_size": 4 * WINDOW}, None), ("mistral", _WIDE, None), ("gemma2", _WIDE, None),
    ("gemma3", _WIDE, None), ("phi3", _WIDE, None), ("starcoder2", _WIDE, None), ("mixtral", _WIDE, None),
    ("gpt_oss", _WIDE, None),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("name", "overrides", "change"), TERMS)
def test_each_term_counts_in_the_zoo(name: str, overrides: dict[str, Any], change: Callable[[Any], None] | None) -> None:
    """A rewrite that drops a softcap, sinks, ALiBi or a window cannot pass the comparison above."""
    ids = torch.randint(3, VOCAB, (1, PREFILL + ROWS), generator=torch.Generator().manual_seed(1))
    model, other = build(name, "eager"), build(name, "eager", **overrides)
    if change is not None:
        change(other)
    changed = (model(ids, use_cache=False).logits - other(ids, use_cache=False).logits)[:, PREFILL:]
    assert changed.abs().max().item() > 1e-3
