"""On a CUDA device: the same exactness, and CUDA graphs over moving lengths."""

from __future__ import annotations

import pytest
import torch

import spec_compile as sc
from spec_compile.models import zoo
from spec_compile.report import RewriteReport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 128, (1, rows), device="cuda")


@pytest.mark.parametrize("family, attention", [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("bloom", "eager")])
@pytest.mark.parametrize("lowering", ["auto", "reference"])
def test_families_in_float32(family: str, attention: str, lowering: str) -> None:
    model = zoo.build(family, attention).cuda()
    a, b = (sc.VerifyCache(model, max_len=200) for _ in range(2))
    verify = sc.compile_verify(model, b, codegen="eager", lowering=lowering, strict=True)
    with torch.no_grad():
        prefill = ids(40)
        # bloom builds its ALiBi bias from a mask over the whole cache.
        slots = torch.arange(a.capacity, device="cuda")[None]
        for cache in (a, b):
            model(prefill, past_key_values=cache, attention_mask=(slots < 40).long())
        tokens = ids(9)
        expected = model(tokens, past_key_values=a, attention_mask=(slots < 49).long()).logits
    found = verify(tokens, attention_mask=torch.ones(1, 49, device="cuda", dtype=torch.int64))
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert len(verify.report().rewritten) == len(b.layers)


@pytest.mark.parametrize("codegen_options", [{}, {"cudagraphs": True}])
def test_moving_lengths_through_inductor(codegen_options: dict[str, bool]) -> None:
    model = zoo.build("llama", "sdpa").cuda()
    reports: list[RewriteReport] = []
    run = torch.compile(model, backend="spec_compile", options={"strict": True, "on_report": reports.append, **codegen_options})
    a, b = (sc.VerifyCache(model, max_len=400) for _ in range(2))
    place = b.layers[0].keys.data_ptr()
    kept = []
    with torch.no_grad():
        for step in range(30):
            tokens = ids((9, 9, 4, 9, 1)[step % 5])
            torch.compiler.cudagraph_mark_step_begin()
            expected = model(tokens, past_key_values=a).logits
            found = run(tokens, past_key_values=b).logits.clone()
            kept.append((expected, found))
            for cache in (a, b):
                cache.crop(-(step % 2))
    for expected, found in kept:
        assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert b.layers[0].keys.data_ptr() == place
    assert sum(report.kind == "verify" for report in reports) <= 3
