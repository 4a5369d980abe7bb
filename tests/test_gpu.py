"""On a CUDA device: the same exactness, and CUDA graphs over moving lengths."""

from __future__ import annotations

import copy
from typing import Any

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


def filled(model: Any, length: int, max_len: int = 400, batch: int = 1) -> tuple[sc.VerifyCache, sc.VerifyCache]:
    """Two caches that hold the same prompt."""
    prompt = torch.randint(0, 128, (batch, length), device="cuda")
    caches = sc.VerifyCache(model, max_len=max_len, batch=batch), sc.VerifyCache(model, max_len=max_len, batch=batch)
    with torch.no_grad():
        for cache in caches:
            model(prompt, past_key_values=cache)
    return caches


def eager_step(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


@pytest.mark.parametrize("batch", [1, 3])
def test_captured_steps_of_every_row_count(batch: int) -> None:
    model = zoo.build("llama", "sdpa").cuda()
    a, b = filled(model, 40, batch=batch)
    verify = sc.compile_verify(model, b, draft_len=8, cudagraphs=True, strict=True)
    kept = []
    for step in range(40):
        rows = (9, 4, 1, 9, 7)[step % 5]
        tokens = torch.randint(0, 128, (batch, rows), device="cuda")
        kept.append((eager_step(model, a, tokens), verify(tokens)))
        assert kept[-1][1].shape == (batch, rows, 128)
        for cache in (a, b):
            cache.crop(-(step % min(rows, 3)))
        assert a.length == b.length
    # Earlier results must not be overwritten by later replays.
    for expected, found in kept:
        assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert sum(report.kind == "verify" for report in verify.reports) == 1


def test_a_captured_step_after_reset_and_a_new_prompt() -> None:
    model = zoo.build("llama", "sdpa").cuda()
    a, b = filled(model, 40)
    verify = sc.compile_verify(model, b, draft_len=4, cudagraphs=True, strict=True)
    tokens = ids(5)
    for prompt in (ids(100), ids(7)):
        verify(tokens)
        with torch.no_grad():
            for cache in (a, b):
                cache.reset()
                model(prompt, past_key_values=cache)
        expected, found = eager_step(model, a, tokens), verify(tokens)
        assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_captured_steps_stop_before_the_end_of_the_cache() -> None:
    from spec_compile.errors import CacheError

    model = zoo.build("llama", "sdpa").cuda()
    _, cache = filled(model, 10, max_len=40)
    verify = sc.compile_verify(model, cache, draft_len=8, cudagraphs=True)
    for _ in range((cache.capacity - 10) // 9):
        verify(ids(9))
    held, left = cache.length, cache.capacity - cache.length
    assert 0 < left < 9
    # Too short for a padded step, long enough for its rows.
    assert verify(ids(1)).shape == (1, 1, 128)
    with pytest.raises(CacheError, match=f"holds {held + 1} tokens"):
        verify(ids(9))
    assert cache.length == held + 1
    # A writer that the graph knows nothing of.
    cache.crop(-10)
    with torch.no_grad():
        model(ids(8), past_key_values=cache)
    with pytest.raises(CacheError, match=f"holds {held - 1} tokens"):
        verify(ids(left + 2))


def test_replaced_weights_are_captured_anew() -> None:
    model = zoo.build("llama", "sdpa").cuda()
    a, b = filled(model, 30)
    verify = sc.compile_verify(model, b, draft_len=3, cudagraphs=True)
    verify(ids(4))
    a.reset(), b.reset()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    tokens = ids(4)
    expected, found = eager_step(model, a, tokens), verify(tokens)
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    # One layer in the middle: replaced as a parameter, then as a module, then by its data alone.
    attention = model.model.layers[-1].self_attn
    attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight.detach() * 0.5)
    expected, found = eager_step(model, a, tokens), verify(tokens)
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    attention.k_proj = copy.deepcopy(attention.k_proj)
    with torch.no_grad():
        attention.k_proj.weight.mul_(-1)
    expected, found = eager_step(model, a, tokens), verify(tokens)
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    attention.v_proj.weight.data = attention.v_proj.weight.data * 3
    for _ in range(len(list(model.parameters())) // 16 + 1):
        verify(tokens), eager_step(model, a, tokens)
    a.reset(), b.reset()
    expected, found = eager_step(model, a, tokens), verify(tokens)
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_several_caches_and_streams() -> None:
    model = zoo.build("llama", "sdpa").cuda()
    pairs = [filled(model, length) for length in (20, 90, 55)]
    verifies = [sc.compile_verify(model, b, draft_len=8, cudagraphs=True) for _, b in pairs]
    stream = torch.cuda.Stream()
    for step in range(6):
        for (a, _), verify in zip(pairs, verifies):
            tokens = ids(9)
            expected = eager_step(model, a, tokens)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
                found = verify(tokens)
            torch.cuda.synchronize()
            assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("plan", [None, sc.SparsityPlan(sc.AttentionPlan(budget=4096, block_size=16))])
def test_captured_steps_on_the_second_device(plan: sc.SparsityPlan | None) -> None:
    model = zoo.build("llama", "sdpa").to("cuda:1")
    a, b = (sc.VerifyCache(model, max_len=400) for _ in range(2))
    verify = sc.compile_verify(model, b, draft_len=8, cudagraphs=True, strict=True, plan=plan)
    assert torch.cuda.current_device() == 0
    for step in range(12):
        tokens = ids((9, 9, 4, 1)[step % 4]).to("cuda:1")
        expected = eager_step(model, a, tokens)
        # A step of a device that is not the current one.
        found = verify(tokens)
        assert found.device == expected.device == torch.device("cuda:1")
        assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
        for cache in (a, b):
            cache.crop(-(step % 2))


@pytest.mark.parametrize("door", ["verify", "torch.compile"])
def test_no_step_copies_the_cache(door: str) -> None:
    model = zoo.build("llama", "sdpa").cuda()
    _, cache = filled(model, 40, max_len=400_000)
    size = cache.layers[0].keys.numel() * cache.layers[0].keys.itemsize
    verify: Any
    if door == "verify":
        verify = sc.compile_verify(model, cache, draft_len=8, cudagraphs=True)
    else:
        run = torch.compile(model, backend="spec_compile", options={"strict": True, "cudagraphs": True})
        verify = torch.no_grad()(lambda tokens: run(tokens, past_key_values=cache).logits)
    for _ in range(4):
        verify(ids(9))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        verify(ids(9))
        torch.cuda.synchronize()
    copies = [event for event in profile.events() if "memcpy" in event.name.lower() and "dtod" in event.name.lower()]
    # Writing a cache of this size takes longer than any kernel of this small model.
    assert all(event.device_time < size / 4e12 * 1e6 for event in copies)
    assert not any("index_copy" in event.name.lower() and "clone" in event.name.lower() for event in profile.events())
    assert torch.cuda.max_memory_allocated() - before < size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family, attention", [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3", "sdpa")])
def test_families_in_half_precision(family: str, attention: str, dtype: torch.dtype) -> None:
    """Both paths round; ours must stay as near to a float32 model as the model's own half-precision run."""
    model = zoo.build(family, attention).cuda()
    exact_cache = sc.VerifyCache(model, max_len=200)
    prefill, tokens = ids(40), ids(9)
    with torch.no_grad():
        model(prefill, past_key_values=exact_cache)
        exact = model(tokens, past_key_values=exact_cache).logits
    model = model.to(dtype)
    a, b = (sc.VerifyCache(model, max_len=200) for _ in range(2))
    with torch.no_grad():
        for cache in (a, b):
            model(prefill, past_key_values=cache)
        theirs = model(tokens, past_key_values=a).logits.float()
    verify = sc.compile_verify(model, b, codegen="eager", strict=True)
    found = verify(tokens).float()
    assert any("triton" in note for record in verify.report().passes for note in record.notes)
    ours, reference = ((x - exact).norm() / exact.norm() for x in (found, theirs))
    assert ours <= 1.5 * reference + 1e-4, (ours, reference)


def test_a_cache_whose_layers_rebind_their_tensors_is_captured_anew() -> None:
    """Beam search and offloading of transformers replace ``layer.keys``; the graph must not read the old ones."""
    model = zoo.build("llama", "sdpa").cuda()
    a, b = filled(model, 30, batch=2)
    verify = sc.compile_verify(model, b, draft_len=3, cudagraphs=True)
    tokens = torch.randint(0, 128, (2, 4), device="cuda")
    eager_step(model, a, tokens), verify(tokens)
    order = torch.tensor([1, 0], device="cuda")
    for cache in (a, b):
        cache.reorder_cache(order)
    for layer in b.layers:
        layer.cumulative_length = layer.cumulative_length.clone()
    expected, found = eager_step(model, a, tokens), verify(tokens)
    assert (expected - found).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert a.length == b.length
