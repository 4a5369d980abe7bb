"""The backend end to end: classification and its guards, static inputs, symbols, refusals that concern whole graphs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import report
from spec_compile.models import zoo
from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig
from spec_compile.report import RewriteReport, recorded


class Sink(list[RewriteReport]):
    """Collects reports; counts verify graphs."""

    def __call__(self, report: RewriteReport) -> None:
        self.append(report)

    @property
    def verify(self) -> list[RewriteReport]:
        return [report for report in self if report.kind == "verify"]


def compiled(model: nn.Module, sink: Sink, **options: Any) -> Any:
    return torch.compile(model, backend="spec_compile", options={"codegen": "eager", "on_report": sink, **options})


def ids(rows: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 128, (batch, rows))


def decoder(**config: Any) -> Decoder:
    return Decoder(DecoderConfig(**config)).eval()


def step_both(model: Any, run: Any, a: Any, b: Any, tokens: Tensor, key: str = "past_key_values") -> float:
    """Largest difference between the eager and the compiled step, each on a cache of its own."""
    with torch.no_grad():
        x, y = model(tokens, **{key: a}), run(tokens, **{key: b})
    x, y = (z if isinstance(z, Tensor) else z.logits for z in (x, y))
    return float((x - y).abs().max())


def test_one_model_through_prefill_verify_prefill_decode() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    a, b = (sc.VerifyCache(model, max_len=500) for _ in range(2))
    for rows, kind in ((100, "passed through"), (9, "verify"), (200, "passed through"), (1, "verify"), (5, "verify")):
        before = len(sink)
        assert step_both(model, run, a, b, ids(rows)) < 1e-5
        if len(sink) > before:
            assert sink[-1].kind == kind, (rows, sink[-1].reason)
    assert [r.q_len for r in sink.verify] == [9, 1]
    assert sink.verify[0].dynamic and "symbolic" not in sink.verify[0].reason
    assert all(len(r.rewritten) == 2 for r in sink.verify)


def test_a_verify_never_runs_through_a_graph_that_was_passed_through() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    a, b = (sc.VerifyCache(model, max_len=500) for _ in range(2))
    for rows in (100, 120):
        step_both(model, run, a, b, ids(rows))
    assert [r.kind for r in sink] == ["passed through"] * 2 and sink[-1].dynamic
    assert step_both(model, run, a, b, ids(9)) < 1e-5
    assert sink[-1].kind == "verify" and len(sink[-1].rewritten) == 2


def test_limit_of_rows_is_a_guard() -> None:
    model, sink = decoder(), Sink()
    run = compiled(model, sink, max_q_len=8)
    a, b = (DecoderCache(model.config, 200) for _ in range(2))
    kinds = []
    for rows in (5, 7, 8, 9, 40, 6):
        before = len(sink)
        assert step_both(model, run, a, b, ids(rows), "cache") < 1e-5
        kinds.append(sink[-1].kind if len(sink) > before else "reused")
    assert kinds == ["verify", "verify", "reused", "passed through", "reused", "reused"]


def test_short_prefill_into_an_empty_growing_cache_is_no_verify() -> None:
    from transformers import DynamicCache

    model, sink = zoo.build("llama", "sdpa"), Sink()
    with torch.no_grad():
        compiled(model, sink, strict=True)(ids(9), past_key_values=DynamicCache(config=model.config))
    assert sink[0].kind == "passed through" and "no cache behind" in sink[0].reason


def test_weights_and_caches_stay_static_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd must still see them as static after the retrace; under CUDA graphs everything else is copied each step."""
    from torch._inductor import compile_fx as module

    seen: list[tuple[int, int]] = []
    original = module.compile_fx

    def inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append((len(set(kwargs.get("static_input_idxs") or [])), len(inputs)))
        return gm

    monkeypatch.setattr(module, "compile_fx", lambda gm, inputs, config_patches=None: original(gm, inputs, inner_compile=inner))
    model, sink = zoo.build("llama", "sdpa"), Sink()
    cache = sc.VerifyCache(model, max_len=100)
    with torch.no_grad():
        compiled(model, sink, codegen="inductor")(ids(9), past_key_values=cache)
    static, total = seen[0]
    # K, V and the length of each layer; rotary tables may add a buffer, input_ids is the one that moves.
    assert static >= len(list(model.parameters())) + 3 * len(cache.layers)
    assert total - static == 1
    assert sink[0].static_inputs == static


def test_retracing_does_not_touch_the_cache() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    cache = sc.VerifyCache(model, max_len=100)
    with torch.no_grad():
        compiled(model, sink)(ids(9), past_key_values=cache)
    assert cache.length == 9
    assert int((cache.layers[0].keys.abs().sum((0, 1, 3)) > 0).sum()) == 9


def test_symbols_survive() -> None:
    model = decoder()

    class Keep(Sink):
        keep_code = True

    sink = Keep()
    run = compiled(model, sink)
    cache = DecoderCache(model.config, 200)
    with torch.no_grad():
        run(ids(5), cache=cache)
        run(ids(7), cache=cache)
    assert [r.dynamic for r in sink] == [False, True]
    assert "Sym(s" in sink[1].code("after") and "attention_folded_v1" in sink[1].code("after")
    assert "scaled_dot_product_attention" in sink[1].code("before")


def test_gradients_pass_through_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    with caplog.at_level(logging.WARNING, "spec_compile"):
        run(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))
    assert sink[-1].kind == "passed through" and "gradients are enabled" in sink[-1].reason
    assert "inference_mode" in caplog.text
    with torch.no_grad():
        run(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))
    assert sink[-1].kind == "verify"


def test_frozen_parameters_need_no_no_grad() -> None:
    model, sink = zoo.build("llama", "sdpa").requires_grad_(False), Sink()
    compiled(model, sink)(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))
    assert len(sink.verify[0].rewritten) == 2


def test_tensor_subclass_weights_pass_through() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, sink = decoder(), Sink()
    weight = model.head.weight.detach()
    model.head.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    with torch.no_grad():
        compiled(model, sink)(ids(5), cache=DecoderCache(model.config, 100))
    assert sink[-1].kind == "passed through" and "TwoTensor" in sink[-1].reason


def test_autocast_around_the_call() -> None:
    model, sink = decoder(repeat="grouped"), Sink()
    run = compiled(model, sink)
    a, b = (DecoderCache(model.config, 100, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert step_both(model, run, a, b, ids(9), "cache") < 0.05
    assert len(sink.verify[0].rewritten) == 4


def test_autocast_with_a_float_cache_is_refused_not_upcast() -> None:
    model, sink = decoder(), Sink()
    run = compiled(model, sink)
    a, b = (DecoderCache(model.config, 100) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert step_both(model, run, a, b, ids(9), "cache") == 0.0
    assert not sink.verify[0].rewritten and "autocast" in sink.verify[0].refused[0].reason


def test_autocast_region_inside_the_model_is_refused() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder()
            self.config = self.model.config

        def forward(self, input_ids: Tensor, cache: DecoderCache) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(input_ids, cache)

    model, sink = Inner().eval(), Sink()
    run = compiled(model, sink)
    a, b = (DecoderCache(model.config, 100, dtype=torch.bfloat16) for _ in range(2))
    assert step_both(model, run, a, b, ids(9), "cache") < 0.05
    assert sink[-1].kind == "passed through" and "autocast region" in sink[-1].reason


def test_autocast_region_around_one_layer_is_passed_through() -> None:
    """Retraced, the region's casts would be lost; nothing of the graph may be rewritten."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.extra = decoder(), nn.Linear(DecoderConfig().vocab, 8)
            self.config = self.model.config

        def forward(self, input_ids: Tensor, cache: DecoderCache) -> Tensor:
            logits = self.model(input_ids, cache)
            with torch.autocast("cpu", torch.bfloat16):
                return self.extra(logits)

    model, sink = Inner().eval(), Sink()
    run = compiled(model, sink)
    a, b = (DecoderCache(model.config, 100) for _ in range(2))
    assert step_both(model, run, a, b, ids(9), "cache") == 0.0
    assert sink[-1].kind == "passed through" and "autocast region" in sink[-1].reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lowering", ["auto", "reference"])
def test_dtypes(dtype: torch.dtype, lowering: str) -> None:
    """No worse than the eager model in the same dtype, both judged by the float64 model."""
    model, sink = zoo.build("llama", "sdpa", dtype=dtype), Sink()
    exact = zoo.build("llama", "sdpa", dtype=torch.float64)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    tokens = ids(37), ids(9)
    logits = []
    for run in (exact, model, compiled(model, sink, lowering=lowering)):
        cache = sc.VerifyCache(exact if run is exact else model, max_len=100)
        with torch.no_grad():
            (exact if run is exact else model)(tokens[0], past_key_values=cache)
            logits.append(run(tokens[1], past_key_values=cache).logits.double())
    eager, ours = ((found - logits[0]).abs().max() for found in logits[1:])
    assert len(sink.verify[0].rewritten) == 2
    assert ours <= 1.2 * eager + 1e-6


def test_one_compiled_model_serves_several_caches() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    caches = [[sc.VerifyCache(model, max_len=length) for _ in range(2)] for length in (100, 100, 150, 300)]
    for rows in (40, 9, 5, 1, 9):
        for a, b in caches:
            assert step_both(model, run, a, b, ids(rows)) < 1e-5
    assert all(len(r.rewritten) == 2 for r in sink.verify)
    # T = 9 and 1 at the first length, then T and S dynamic, and T = 1 with S dynamic.
    assert len(sink.verify) <= 5


def test_three_hundred_calls_compile_at_most_three_graphs() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    cache = sc.VerifyCache(model, max_len=2000)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for call in range(300):
            rows = (1, 3, 5, 9, 2)[call % 5]
            run(ids(rows), past_key_values=cache)
            cache.crop(-int(torch.randint(0, rows, (1,), generator=generator)))
    assert len(sink.verify) <= 3 and len(sink) == len(sink.verify)


def test_changing_batch_compiles_a_constant_number_of_graphs() -> None:
    model, sink = zoo.build("llama", "sdpa"), Sink()
    run = compiled(model, sink)
    caches = {batch: sc.VerifyCache(model, max_len=900, batch=batch) for batch in (1, 2)}
    with torch.no_grad():
        for call in range(60):
            batch = 2 if 20 <= call < 40 else 1
            run(ids((1, 3, 5)[call % 3], batch), past_key_values=caches[batch])
    assert len(sink.verify) <= 5


def test_recompile_limit_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = decoder(layers=1), Sink()
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False), torch.no_grad():
        run = compiled(model, sink)
        with caplog.at_level(logging.WARNING, "spec_compile"):
            for rows in (3, 4):
                run(ids(rows), cache=DecoderCache(model.config, 50))
        assert "recompile_limit" in caplog.text
        torch._dynamo.reset()
        strict = compiled(model, sink, strict=True)
        strict(ids(3), cache=DecoderCache(model.config, 50))
        with pytest.raises(Exception, match=r"StrictError.*recompile_limit"):
            strict(ids(4), cache=DecoderCache(model.config, 50))


def test_zero_rewrites_warn_and_strict_raises(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = zoo.build("deepseek_v3", "sdpa"), Sink()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "spec_compile"):
        compiled(model, sink)(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))
    assert "0 attentions rewritten (MoE layers: 1 of 1)" in caplog.text and "MLA" in caplog.text
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"StrictError.*MLA"):
        compiled(model, sink, strict=True)(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))


def test_refused_experts_raise_under_strict() -> None:
    model, sink = zoo.build("llama4", "sdpa"), Sink()
    with torch.no_grad(), pytest.raises(Exception, match=r"StrictError.*2 of 2 MoE layers refused.*feed_forward\.experts"):
        compiled(model, sink, strict=True)(ids(9), past_key_values=sc.VerifyCache(model, max_len=100))


def test_a_failing_rewrite_leaves_the_model_running(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from spec_compile.passes.check_rewrite import CheckRewrite, RewriteDefect

    def defect(self: Any, gm: Any, ctx: Any) -> Any:
        raise RewriteDefect("a cache write is gone")

    monkeypatch.setattr(CheckRewrite, "run", defect)
    model, sink = decoder(), Sink()
    a, b = (DecoderCache(model.config, 100) for _ in range(2))
    with caplog.at_level(logging.WARNING, "spec_compile"):
        assert step_both(model, compiled(model, sink), a, b, ids(5), "cache") == 0.0
    assert sink[0].kind == "passed through" and "a cache write is gone" in sink[0].reason
    assert "rewriting failed: RewriteDefect" in caplog.text
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"StrictError.*a cache write is gone"):
        compiled(model, sink, strict=True)(ids(5), cache=b)


def test_graph_without_attention_warns(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "spec_compile"):
        compiled(nn.Linear(4, 4), sink)(torch.randn(3, 4))
    assert "no attention in this graph" in caplog.text


def test_flex_attention_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v)

    sink = Sink()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "spec_compile"):
        compiled(Flex(), sink)(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16))
    assert sink[0].kind == "passed through" and "flex_attention" in sink[0].reason
    assert "flex_attention" in caplog.text


def test_multi_head_attention_module_is_refused_with_the_reason() -> None:
    class Mha(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.attention(x, memory, memory, need_weights=False)[0]

    model, sink = Mha().eval(), Sink()
    with torch.no_grad():
        x, memory = torch.randn(1, 5, 32), torch.randn(1, 64, 32)
        found = compiled(model, sink)(x, memory)
        assert torch.allclose(found, model(x, memory), atol=1e-6)
    assert "no cache read" in sink.verify[0].refused[0].reason


def test_direct_sdpa_call_on_a_dynamic_slice_of_the_cache() -> None:
    """Generation loops that slice the valid part: S is symbolic, the slice is what attention reads."""

    class Sliced(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, end: int) -> Tensor:
            rows = q.shape[2]
            cache_k[:, :, end - rows : end] = k
            cache_v[:, :, end - rows : end] = v
            mask = torch.arange(end) <= (end - rows + torch.arange(rows))[:, None]
            return F.scaled_dot_product_attention(q, cache_k[:, :, :end], cache_v[:, :, :end], attn_mask=mask)

    sink, model = Sink(), Sliced()
    run = torch.compile(model, backend="spec_compile", options={"codegen": "eager", "on_report": sink}, dynamic=True)
    with torch.no_grad():
        for end in (40, 47, 60):
            given = [torch.randn(1, 2, 5, 16) for _ in range(3)] + [torch.randn(1, 2, 128, 16) for _ in range(2)]
            expected = model(*[x.clone() for x in given], end)
            assert torch.allclose(run(*given, end), expected, atol=1e-6)
    assert len(sink.verify) == 1 and len(sink.verify[0].rewritten) == 1


def test_dump_writes_graphs(tmp_path: Path) -> None:
    model, sink = decoder(layers=1), Sink()
    with torch.no_grad():
        compiled(model, sink, dump=str(tmp_path / "graphs"))(ids(5), cache=DecoderCache(model.config, 50))
    names = [path.name for path in sorted((tmp_path / "graphs").iterdir())]
    assert any("before" in name for name in names) and any("detect_attention" in name for name in names)
    text = next(path for path in (tmp_path / "graphs").iterdir() if "lower_attention" in path.name).read_text()
    assert "attention_folded_v1" in text


def test_a_record_outlives_what_the_history_keeps() -> None:
    """The history drops its oldest report once it is full; a record of a piece of work misses none."""
    model, sink = Decoder(DecoderConfig(layers=1)).eval(), Sink()
    with torch.no_grad():
        compiled(model, sink)(ids(5), cache=DecoderCache(model.config, 50))
        with report.recorded() as every:
            for _ in range(300):
                report.remember(sink[0])
        with report.recorded() as last:
            compiled(model, sink)(ids(5, batch=2), cache=DecoderCache(model.config, 50, batch=2))
    assert len(every) == 300 and len(report.history()) == 256
    assert last == sink[1:] == report.history()[-len(last) :]


SCRIPT = """
import torch
from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig
model = Decoder(DecoderConfig(layers=1)).eval()
run = torch.compile(model, backend="spec_compile", options={"codegen": "eager"})
with torch.no_grad():
    print(tuple(run(torch.zeros(1, 5, dtype=torch.int64), cache=DecoderCache(model.config, 50)).shape))
import spec_compile.report as report
print("reports", len(report.history()))
"""


def run_script(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(sys.prefix),
    )


def test_torch_logs_switch_on_our_logger() -> None:
    quiet, loud = run_script(), run_script(TORCH_LOGS="+spec_compile")
    assert "detect_attention" not in quiet.stderr
    assert "detect_attention: 1 hits" in loud.stderr


def test_disable_switch() -> None:
    done = run_script(SPEC_COMPILE_DISABLE="1")
    assert "(1, 5, 128)" in done.stdout and "reports 0" in done.stdout


def test_inductor_runs_the_rewritten_graph_without_copying_caches() -> None:
    """Two steps through generated code: same logits as eager, cache written in place."""
    model, sink = decoder(layers=2), Sink()
    run = compiled(model, sink, codegen="inductor")
    a, b = (DecoderCache(model.config, 100) for _ in range(2))
    place = b.keys_0.data_ptr()
    for rows in (9, 4, 9):
        assert step_both(model, run, a, b, ids(rows), "cache") < 1e-5
    assert b.keys_0.data_ptr() == place and torch.allclose(a.keys_1, b.keys_1, atol=1e-6)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 1)


def _scaled_through_a_view() -> torch.Tensor:
    scale = torch.full((), 0.25)
    scale.view(1).mul_(2.0)
    return scale


def _scaled_through_an_index() -> torch.Tensor:
    scale = torch.tensor(0.25)
    scale[None].mul_(2.0)
    return scale


def _filled_through_a_view() -> torch.Tensor:
    fill = torch.full((), torch.finfo(torch.float32).min)
    fill.view(1).zero_()
    return fill


@pytest.mark.parametrize(
    ("scale", "fill"),
    [
        (_scaled_through_a_view, lambda: -torch.inf),
        (_scaled_through_an_index, lambda: -torch.inf),
        (lambda: 0.25, _filled_through_a_view),
    ],
    ids=["scale, view", "scale, index", "fill"],
)
def test_a_constant_written_under_another_name_is_no_constant(scale: Any, fill: Any) -> None:
    def fn(q: Any, k: Any, v: Any, keys: Any, values: Any, position: Any) -> Any:
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        seen = torch.arange(64) <= position[:, None]
        scores = torch.where(seen, q @ _repeated(keys).transpose(2, 3) * scale(), fill())
        return scores.softmax(-1) @ _repeated(values)

    run = torch.compile(fn, backend="spec_compile", options={"codegen": "eager"})
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    mine, theirs = ([torch.zeros(1, 2, 64, 16) for _ in range(2)] for _ in range(2))
    for step in range(3):
        position = torch.arange(5) + 5 * step
        torch.testing.assert_close(run(q, k, v, *mine, position), fn(q, k, v, *theirs, position), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("late", [True, False])
def test_a_cache_written_under_the_name_of_another_input(late: bool) -> None:
    """A flat view kept beside the cache; halves of one tensor that do not overlap stay apart."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("both", torch.zeros(2, 1, 2, 64, 16))
            self.keys, self.values = self.both[0], self.both[1]
            self.flat = self.keys.view(-1)

        def forward(self, q: Any, k: Any, v: Any, position: Any) -> Any:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
            repeated = _repeated(self.keys)
            if late:
                self.flat.mul_(0.5)
            seen = torch.arange(64) <= position[:, None]
            scores = (q @ repeated.transpose(2, 3) * 0.25).masked_fill(~seen, -torch.inf)
            return scores.softmax(-1) @ _repeated(self.values)

    ours, theirs = Attention(), Attention()
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    run = torch.compile(ours, backend="spec_compile", options={"codegen": "eager"})
    with torch.no_grad(), recorded() as reports:
        for step in range(3):
            position = torch.arange(5) + 5 * step
            torch.testing.assert_close(run(q, k, v, position), theirs(q, k, v, position), atol=1e-5, rtol=1e-5)
    [entry] = reports[0].attentions
    assert entry.status == ("refused" if late else "rewritten")
    assert not late or "writes an operand between the scores and the output" in entry.reason
