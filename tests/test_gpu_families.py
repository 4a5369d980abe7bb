"""On a CUDA device: every family of the zoo through the Triton kernels, in three precisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import spec_compile as sc
from spec_compile.models.zoo import FAMILIES, VOCAB, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HELD, ROWS = 90, 9
CASES = [
    (name, impl)
    for name, family in FAMILIES.items()
    for impl in family.implementations
    if family.outcome == "rewritten"
]  # fmt: skip


def step(model: Any, name: str, cache: Any, tokens: torch.Tensor, start: int) -> torch.Tensor:
    end = start + tokens.shape[1]
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens}
    if FAMILIES[name].positions:
        inputs["position_ids"] = torch.arange(start, end, device="cuda")[None]
    if FAMILIES[name].padding_mask:
        inputs["attention_mask"] = (torch.arange(cache.capacity, device="cuda") < end).long()[None]
    with torch.no_grad():
        return model(**inputs, past_key_values=cache, use_cache=True).logits


def prepared(name: str, impl: str, dtype: torch.dtype) -> tuple[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model and a cache that holds a prompt, drafts, and their logits by the uncompiled model: in float32, and in ``dtype``."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = torch.randint(3, VOCAB, (1, HELD + ROWS), generator=torch.Generator().manual_seed(1)).cuda()
    prompt, drafts = tokens[:, :HELD], tokens[:, HELD:]
    model = build(name, impl).cuda()
    exact_cache = sc.VerifyCache(model, max_len=200)
    step(model, name, exact_cache, prompt, 0)
    exact = step(model, name, exact_cache, drafts, HELD)
    model = model.to(dtype)
    theirs_cache, cache = (sc.VerifyCache(model, max_len=200) for _ in range(2))
    for held in (theirs_cache, cache):
        step(model, name, held, prompt, 0)
    return model, cache, drafts, exact, step(model, name, theirs_cache, drafts, HELD).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "impl"), CASES)
def test_verify_equals_the_uncompiled_model(name: str, impl: str, dtype: torch.dtype) -> None:
    """float32 agrees to rounding; in half precision ours stays as near to float32 as the model's own run does."""
    model, cache, drafts, exact, theirs = prepared(name, impl, dtype)

    reports: list[Any] = []
    # The experts of llama4 are refused, its attention is not.
    options = {"codegen": "eager", "strict": name != "llama4", "on_report": reports.append}
    compiled = torch.compile(model, backend="spec_compile", options=options)
    # One slot hidden from every row holds NaN: no kernel may let it through.
    for layer in cache.layers:
        layer.keys[:, :, HELD + ROWS :] = torch.nan
        layer.values[:, :, HELD + ROWS :] = torch.nan
    ours = step(compiled, name, cache, drafts, HELD).float()

    assert len(reports[0].rewritten) == FAMILIES[name].layers
    notes = [note for record in reports[0].passes if record.name == "lower_attention" for note in record.notes]
    assert notes == [f"triton {FAMILIES[name].layers}"]
    if dtype == torch.float32:
        assert (ours - exact).abs().max() <= 1e-5 * max(1.0, exact.abs().max().item())
        return
    mine, reference = ((x - exact).norm() / exact.norm() for x in (ours, theirs))
    assert mine <= 1.5 * reference + 1e-4, (mine, reference)


MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm", "marker"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_equal_the_uncompiled_model(name: str, form: str, dtype: torch.dtype) -> None:
    """Experts and routers run as kernels. In half precision the median row counts: rounding may send a row to another expert."""
    model, cache, drafts, exact, theirs = prepared(name, FAMILIES[name].implementations[0], dtype)
    if form == "marker":
        sc.prepare(model)
    else:
        model.set_experts_implementation(form)

    reports: list[Any] = []
    compiled = torch.compile(model, backend="spec_compile", options={"codegen": "eager", "on_report": reports.append})
    ours = step(compiled, name, cache, drafts, HELD).float()

    entries = [entry for report in reports for entry in report.moes]
    assert entries and {(entry.status, entry.form, entry.router_note) for entry in entries} == {("rewritten", form, "")}
    if dtype == torch.float32:
        assert (ours - exact).abs().max() <= 1e-5 * max(1.0, exact.abs().max().item())
        return
    mine, reference = (((x - exact).norm(dim=-1) / exact.norm(dim=-1)).median() for x in (ours, theirs))
    assert mine <= 1.5 * reference + 1e-3, (mine, reference)
