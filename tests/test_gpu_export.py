"""On a CUDA device: artefacts of each format against the compiled verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import spec_compile as sc
from spec_compile.errors import ExportError
from spec_compile.models.zoo import VOCAB, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=32, block_size=16, index_topk_freq=2))
BOTH = sc.SparsityPlan(attention=PLAN.attention, moe=sc.MoePlan(expert_budget=2))


def steps(verify: Any, sparse: bool) -> list[torch.Tensor]:
    """Behind a prompt in exact steps, five steps with a rollback, and the last one again, exact."""
    generator = torch.Generator().manual_seed(1)
    exact = False if sparse else None
    found = []
    for index, rows in enumerate((16,) * 9 + (1, 2, 5, 16, 3)):
        ids = torch.randint(3, VOCAB, (1, rows), generator=generator).cuda()
        found.append(verify(ids, sparse=exact if index < 9 else None))
        assert found[-1].shape == (1, rows, VOCAB)
        if index == 11:
            verify.cache.crop(-4)
    verify.cache.crop(-3)
    return [*found[9:], verify(ids, sparse=exact)]


@pytest.mark.parametrize("name", ["ops.pt2", "portable.pt2", "ops.aoti.pt2", "portable.aoti.pt2"])
@pytest.mark.parametrize(("family", "plan"), [("llama", None), ("llama", PLAN), ("qwen3_moe", None), ("qwen3_moe", BOTH)])
def test_loaded_steps_equal_the_compiled_verify(
    name: str, family: str, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_compile.exporter.SPARSE_FOR_CUDA_UNPROVEN", False)
    # The C++ compiler's time is most of an AOTInductor export's.
    monkeypatch.setattr(torch._inductor.config.aot_inductor, "compile_wrapper_opt_level", "O0")
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(family, "sdpa").cuda()
    verify = sc.compile_verify(model, sc.VerifyCache(model, 256), 15, plan, codegen="eager", strict=True)
    flavour = name.split(".")[0]
    manifest = sc.export(verify, tmp_path / name, flavour=flavour, batch=1, strict=True)
    assert manifest.device == "cuda" and bool(manifest.operators) == (flavour == "ops")
    wanted = steps(verify, plan is not None)
    assert (float((wanted[-2] - wanted[-1]).abs().max()) > 1e-3) == (plan is not None)
    run = sc.load(tmp_path / name)
    for found, exact in zip(steps(run, plan is not None), wanted):
        assert not found.isnan().any()
        assert torch.allclose(found, exact, atol=1e-4, rtol=1e-4), float((found - exact).abs().max())


@pytest.mark.parametrize("name", ["a.pt2", "a.aoti.pt2"])
def test_sparse_steps_are_refused(name: str, tmp_path: Path) -> None:
    model = build("llama", "sdpa").cuda()
    with pytest.raises(ExportError, match="sparse steps are not exported for CUDA"):
        sc.export(model, tmp_path / name, plan=PLAN, max_len=128)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.pt2", "a.aoti.pt2"])
def test_steps_that_skip_channels_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once other sparse steps are exported: the kernel needs weights that no artefact holds so."""
    monkeypatch.setattr("spec_compile.exporter.SPARSE_FOR_CUDA_UNPROVEN", False)
    model = build("llama", "sdpa").cuda()
    with pytest.raises(ExportError, match="export a plan without ffn"):
        sc.export(model, tmp_path / name, plan=sc.SparsityPlan(ffn=sc.FfnPlan(budget=0.1)), max_len=128)
    assert not list(tmp_path.iterdir())


def test_half_precision_and_any_batch(tmp_path: Path) -> None:
    """The Triton kernels serve the loaded program: bfloat16, two sequences, left padding."""
    model = build("llama", "sdpa", dtype=torch.bfloat16).cuda()
    verify = sc.compile_verify(model, sc.VerifyCache(model, 128, batch=2), 7, codegen="eager", strict=True)
    manifest = sc.export(verify, tmp_path / "a.pt2", strict=True)
    assert "spec_compile.attention_triton_v1" in manifest.operators
    run = sc.load(tmp_path / "a.pt2", batch=2)
    ids, mask = torch.randint(3, VOCAB, (2, 8)).cuda(), torch.ones(2, 8, dtype=torch.int64).cuda()
    mask[1, :3] = 0
    wanted, found = (verify(ids, attention_mask=mask), run(ids, attention_mask=mask))
    live = mask.bool().unsqueeze(-1)
    assert torch.allclose((found * live).float(), (wanted * live).float(), atol=0.05, rtol=0.05)
