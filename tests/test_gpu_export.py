"""On a CUDA device: artefacts of each format against the compiled verify."""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize(
    ("family", "plan", "name"),
    [
        (family, plan, name)
        for family, plan in (("llama", None), ("llama", PLAN), ("qwen3_moe", None), ("qwen3_moe", BOTH))
        for name in ("ops.pt2", "portable.pt2", "ops.aoti.pt2", "portable.aoti.pt2")
        if (family, name) != ("qwen3_moe", "ops.aoti.pt2")
    ],
)
def test_loaded_steps_equal_the_compiled_verify(
    family: str, plan: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_packages_that_crash_at_load_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot hold spec_compile\.moe_experts_v1"):
        sc.export(build("qwen3_moe", "sdpa").cuda(), tmp_path / "a.aoti.pt2", max_len=128)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.pt2", "a.aoti.pt2"])
def test_steps_that_skip_channels_are_refused(name: str, tmp_path: Path) -> None:
    """The kernel needs weights that no artefact holds so."""
    model = build("llama", "sdpa").cuda()
    with pytest.raises(ExportError, match="export a plan without ffn"):
        sc.export(model, tmp_path / name, plan=sc.SparsityPlan(ffn=sc.FfnPlan(budget=0.1)), max_len=128)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.pt2", "a.aoti.pt2"])
def test_half_precision_and_any_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels serve the loaded program: bfloat16, two sequences, left padding."""
    monkeypatch.setattr(torch._inductor.config.aot_inductor, "compile_wrapper_opt_level", "O0")
    torch.manual_seed(1)
    model = build("llama", "sdpa", dtype=torch.bfloat16).cuda()
    verify = sc.compile_verify(model, sc.VerifyCache(model, 128, batch=2), 7, codegen="eager", strict=True)
    manifest = sc.export(verify, tmp_path / name, strict=True)
    assert {"spec_compile.attention_triton_v1", "spec_compile.linears_v1"} <= {*manifest.operators}
    run = sc.load(tmp_path / name, batch=2)
    ids, mask = torch.randint(3, VOCAB, (2, 8)).cuda(), torch.ones(2, 8, dtype=torch.int64).cuda()
    mask[1, :3] = 0
    full = copy.deepcopy(model).float()
    with torch.no_grad():
        right = full(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits
    live = mask.bool().unsqueeze(-1)
    errors = [float(((step(ids, attention_mask=mask) - right) * live).norm()) for step in (verify, run)]
    # Rounded at other places: as close to float32, not to each other.
    assert errors[1] < 1.3 * errors[0] and errors[0] < 0.03 * float((right * live).norm()), errors
