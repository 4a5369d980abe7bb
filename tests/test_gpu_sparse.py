"""Sparse steps on a CUDA device: Triton against the reference, CUDA graphs, both modes in one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spec_compile as sc
from spec_compile import AttentionPlan, SparsityPlan
from spec_compile.models import zoo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = {
    "64": AttentionPlan(budget=192, block_size=64, index_topk_freq=2),
    "16-all": AttentionPlan(budget=96, block_size=16, query="all"),
    "8-all": AttentionPlan(budget=96, block_size=8, query="all", sink=2, recent=5, index_topk_freq=2),
    "min-max": AttentionPlan(budget=96, block_size=32, representative="min_max"),
    "exact": AttentionPlan(budget=96, block_size=16, representative="exact"),
    "joint": AttentionPlan(budget=96, block_size=8, joint=True),
    "share": AttentionPlan(budget=0.2, block_size=16, budget_floor=64),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


@pytest.fixture(autouse=True)
def no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def ids(rows: int, seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 128, (batch, rows), generator=torch.Generator().manual_seed(seed)).cuda()


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return zoo.build("llama", "sdpa", num_hidden_layers=4, dtype=dtype).cuda()


def filled(model: Any, length: int = 900, batch: int = 1, seed: int = 0) -> sc.VerifyCache:
    cache = sc.VerifyCache(model, max_len=1200, batch=batch)
    with torch.no_grad():
        model(ids(length, seed, batch), past_key_values=cache)
    for layer in cache.layers:
        layer.keys[:, :, length:] = torch.nan
        layer.values[:, :, length:] = torch.nan
    return cache


def verifier(model: Any, cache: Any, plan: AttentionPlan | None, **options: Any) -> sc.VerifyFunction:
    return sc.compile_verify(model, cache, draft_len=8, plan=plan and SparsityPlan(attention=plan), strict=True, **options)


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float = 1e-5) -> bool:
    return bool((found - wanted).abs().max() <= bound * max(1.0, wanted.abs().max().item()))


@plans
@pytest.mark.parametrize("batch", [1, 3])
def test_triton_equals_the_reference(plan: AttentionPlan, batch: int) -> None:
    model = model_of()
    ours, theirs = filled(model, batch=batch), filled(model, batch=batch)
    a = verifier(model, ours, plan, codegen="eager")
    b = verifier(model, theirs, plan, codegen="eager", lowering="reference")
    for step in range(4):
        tokens = ids(9 - step, step + 1, batch)
        assert near(a(tokens), b(tokens))
        for cache in (ours, theirs):
            cache.crop(-step)
    assert any("triton 4" in note for record in a.report().passes for note in record.notes)


@plans
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(plan: AttentionPlan, dtype: torch.dtype) -> None:
    """A selection of everything is the exact program, bit for bit; a sparse one stays finite over NaN slots."""
    model = model_of(dtype)
    covering = AttentionPlan(**{**vars(plan), "budget": 4096, "budget_floor": None})
    outputs = [verifier(model, filled(model), p, codegen="eager")(ids(9, 1)) for p in (None, covering)]
    assert torch.equal(*outputs)
    found = verifier(model, filled(model), plan, codegen="eager")(ids(9, 1))
    assert found.isfinite().all() and not torch.equal(found, outputs[0])


@plans
def test_captured_steps_of_both_modes(plan: AttentionPlan) -> None:
    model = model_of()
    captured, plain, dense = (filled(model) for _ in range(3))
    a = verifier(model, captured, plan, cudagraphs=True)
    b, exact = verifier(model, plain, plan), verifier(model, dense, None)
    for step in range(12):
        tokens, mode = ids((9, 4, 1)[step % 3], step), (None, False, True)[step % 3 if step < 6 else 1]
        found = a(tokens, sparse=mode)
        assert near(found, b(tokens, sparse=mode))
        if mode is False:
            # The three caches hold the same keys as long as every earlier step was exact.
            for mine, theirs in zip(dense.layers, plain.layers):
                mine.keys.copy_(theirs.keys), mine.values.copy_(theirs.values)
                mine.cumulative_length.copy_(theirs.cumulative_length - tokens.shape[1])
            assert near(found, exact(tokens))
        for cache in (captured, plain):
            cache.crop(-(step % 2) * min(3, tokens.shape[1] - 1))
        assert captured.length == plain.length
    # One captured, two for the sparse steps of fewer rows.
    assert sum(report.kind == "verify" for report in a.reports) <= 3


@pytest.mark.parametrize("plan", [sc.FfnPlan(threshold=0.2), sc.FfnPlan(budget=0.1)], ids=["threshold", "budget"])
def test_captured_steps_that_skip_channels(plan: sc.FfnPlan) -> None:
    """Exact steps are a capture of their own, and those of a function without a plan."""
    model = model_of()
    caches = [filled(model) for _ in range(3)]
    both = SparsityPlan(attention=PLANS["16-all"], ffn=plan)
    a, b = (
        sc.compile_verify(model, cache, draft_len=8, plan=both, strict=True, cudagraphs=graphs)
        for cache, graphs in zip(caches, (True, False))
    )
    exact = verifier(model, caches[2], None)
    for step in range(9):
        tokens, sparse = ids((9, 4)[step % 2], step), step % 3 != 1
        found = a(tokens, sparse=sparse)
        assert near(found, b(tokens, sparse=sparse)) and near(found, exact(tokens)) != sparse
        for mine in caches[:2]:
            for layer, other in zip(mine.layers, caches[2].layers):
                layer.keys.copy_(other.keys), layer.values.copy_(other.values)
    sc.restore(model)


def test_captured_steps_notice_other_writers() -> None:
    plan = PLANS["8-all"]
    model = model_of()
    captured, plain = filled(model), filled(model)
    a = verifier(model, captured, plan, cudagraphs=True)
    b = verifier(model, plain, plan, lowering="reference", codegen="eager")
    for step in range(6):
        assert near(a(ids(9, step)), b(ids(9, step)))
        with torch.no_grad():
            for cache in (captured, plain):
                if step == 1:
                    cache.layers[0].keys[:, :, 80:160] *= -2
                if step == 3:
                    cache.reset()
                    model(ids(700, 50), past_key_values=cache)
                cache.crop(-4)


def test_replays_of_an_exact_function_are_noticed() -> None:
    """Two functions over one cache: an exact captured one rewrites what the sparse one has summarized, with the same tail."""
    model, plan = model_of(), PLANS["8-all"]
    cache, twin = filled(model), filled(model)
    sparse, exact = verifier(model, cache, plan, codegen="eager"), verifier(model, cache, None, cudagraphs=True)
    sparse(ids(9, 0))
    for seed in (1, 1, 2):
        exact(ids(9, seed))
    cache.crop(-27)
    for seed in (3, 1, 2):
        exact(ids(9, seed))
    for mine, theirs in zip(twin.layers, cache.layers):
        mine.keys.copy_(theirs.keys), mine.values.copy_(theirs.values), mine.cumulative_length.copy_(theirs.cumulative_length)
    assert torch.equal(sparse(ids(9, 5)), verifier(model, twin, plan, codegen="eager")(ids(9, 5)))


def test_several_caches_captured() -> None:
    plan = PLANS["16-all"]
    model = model_of()
    pairs = [(filled(model, length, seed=length), filled(model, length, seed=length)) for length in (300, 900)]
    made = [(verifier(model, a, plan, cudagraphs=True), verifier(model, b, plan, codegen="eager")) for a, b in pairs]
    for step in range(6):
        for a, b in made:
            assert near(a(ids(9, step)), b(ids(9, step)))


@pytest.mark.parametrize("position", [1_000, 50_000, 131_072, 200_000, 260_000])
def test_a_needle_anywhere_is_found(position: int) -> None:
    """One key of a 262k cache matches the query: its block is selected and attended."""
    from spec_compile.kernels import library

    slots, size, dim = 262_144, 8, 64
    q = torch.randn(1, 4, 8, dim, device="cuda")
    k, v = (torch.randn(1, 2, slots, dim, device="cuda") * 0.1 for _ in range(2))
    k[0, :, position] = 8 * q[0, ::2, 0]
    mask = (torch.arange(slots, device="cuda") <= slots - 8 + torch.arange(8, device="cuda")[:, None])[None, None]
    lists = library.live_blocks(mask, size)
    blocks = slots // size
    summary = k.new_zeros(1, 2, blocks, 1, dim)
    valid = torch.zeros(1, dtype=torch.int32, device="cuda")
    at = torch.full((1,), slots - 8, device="cuda")
    library.block_summary_([k], [summary], valid, at, size, "mean")
    gate = torch.zeros(1, dtype=torch.int64, device="cuda")
    ids_, count, full = library.select_blocks(
        q, summary, None, *lists, at, gate, size, dim**-0.5, "first", "max", "own", False, 1, 2, 256 * size, 0.0, 0
    )
    for head in range(2):
        assert position // size in ids_[0, head, : int(count[0, head])].tolist()
    found = library.attention_triton(q, k, v, mask, ids_, count, full, size, dim**-0.5)
    wanted = library.attention(q, k, v, mask, ids_, count, full, size, dim**-0.5)
    assert near(found, wanted, 1e-4)
