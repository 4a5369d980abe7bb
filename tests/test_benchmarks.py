"""The parts of the quality benchmarks that can be wrong without anybody noticing: densities, divergences, masses."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("rich")

import spec_compile as sc
from spec_compile import verify
from spec_compile.kernels.block_mass import block_mass_reference
from spec_compile.kernels.blocks import live_blocks_reference
from spec_compile.models.zoo import FAMILIES, VOCAB, build
from spec_compile.step_graph import StepGraph

PREFIX, TOKENS, ROWS = 96, 16, 8


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``quality`` and ``selection``, as they are when run as scripts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import quality
    import selection

    yield quality, selection
    for name in ("quality", "selection"):
        sys.modules.pop(name, None)


def prepared(quality: Any) -> tuple[Any, Any, Any]:
    model = build("llama", FAMILIES["llama"].implementations[0])
    cache = sc.VerifyCache(model, max_len=PREFIX + TOKENS)
    ids = torch.randint(3, VOCAB, (1, PREFIX + TOKENS + 1))
    document = quality.prefill(model, "random", ids, PREFIX)
    document.exact, _ = quality.exact_logits(quality.make_verify(model, cache, ROWS, None, "eager"), document, ROWS)
    return model, cache, document


def measured(quality: Any, model: Any, cache: Any, document: Any, **attention: Any) -> dict[str, Any]:
    verify = quality.make_verify(model, cache, ROWS, {"attention": attention}, "eager")
    return quality.evaluate(verify, document, ROWS)


def test_named_plans_are_plans(benchmarks: Any) -> None:
    quality, _ = benchmarks
    for fields in quality.PLANS.values():
        assert not sc.AttentionPlan(**fields).exact
    assert set(quality.DEFAULT_PLANS) <= set(quality.PLANS)
    assert {"prose", "sqlite-docs", "verse", "argparse", "typing"} == set(quality.texts())


def test_covering_budget_is_exact_and_reads_everything(benchmarks: Any) -> None:
    quality, _ = benchmarks
    row = measured(quality, *prepared(quality), budget=1024, block_size=8, query="all")
    assert row["bit_identical"] and row["kl"] == 0 and row["flips_percent"] == 0 and row["dnll"] == 0
    assert row["block_density"] == 1
    # One mean key of 8 keys, K only: a sixteenth of the blocks' K and V, and a last block that is never shorter here.
    assert row["total_density"] == pytest.approx(1 + 1 / 16)


def test_density_counts_dense_layers_followers_and_selection(benchmarks: Any) -> None:
    quality, _ = benchmarks
    model, cache, document = prepared(quality)
    layers = model.config.num_hidden_layers
    held = [PREFIX + ROWS, PREFIX + 2 * ROWS]
    # Budget of 4 blocks of 8, a sink block, the draft block and the one before it: 7 blocks of 8 keys.
    sparse = 7 * 8 * len(held) / sum(held)
    row = measured(quality, model, cache, document, budget=32, block_size=8, sink=1, recent=2)
    assert row["kl"] > 0 and not row["bit_identical"]
    assert row["block_density"] == pytest.approx(sparse)
    assert row["selected_density"] == pytest.approx(sparse * 4 / 7)
    assert row["total_density"] == pytest.approx(sparse + 1 / 16)
    fields = {"budget": 32, "block_size": 8, "sink": 1, "recent": 2}
    row = measured(quality, model, cache, document, **fields, anchors=(0,), representative="exact")
    assert row["total_density"] == pytest.approx(sparse + 0.5 / layers)
    row = measured(quality, model, cache, document, **fields, dense_first=1)
    assert row["block_density"] == pytest.approx((1 + (layers - 1) * sparse) / layers)


def test_divergence_against_its_definition(benchmarks: Any) -> None:
    quality, _ = benchmarks
    exact, found = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 3.0]]).log()
    # p = (1/2, 1/2), q = (0, 1) but for a finite logit.
    found[0, 0] = 0.0
    d = quality.divergence(exact, found, torch.tensor([1]))
    q = torch.tensor([0.25, 0.75]).double()
    assert d["kl"].item() == pytest.approx((0.5 * (0.5 / q).log()).sum().item(), rel=1e-6)
    assert d["flip"].item() is True
    assert d["dnll"].item() == pytest.approx((0.5 / q[1]).log().item(), rel=1e-6)


def test_masses_of_selection_are_those_of_the_operator(benchmarks: Any) -> None:
    _, selection = benchmarks
    start, rows = 150, 8
    q, k = torch.randn(1, 6, rows, 16), torch.randn(1, 2, 200, 16)
    length = start + rows
    mask = (torch.arange(length) <= start + torch.arange(rows)[:, None])[None, None]
    masses = selection.row_masses(q, k, 0.25, start)
    assert masses.sum(-1) == pytest.approx(torch.ones(2, 3, rows).numpy(), abs=1e-5)
    for size in (8, 16, 64):
        ids, count, _ = live_blocks_reference(mask, size)
        expected = block_mass_reference(q, k[:, :, :length], mask, ids, count, torch.zeros(1), size, 0.25, "all", 0.0, None)
        found = selection.coarser(masses, size, ids.shape[-1]).mean((1, 2))
        torch.testing.assert_close(found, expected[0])


def test_pick_stays_within_the_contest(benchmarks: Any) -> None:
    _, selection = benchmarks
    allowed = selection.contest(640, 8, 64)
    assert allowed.tolist() == [False] + [True] * 8 + [False] * 2
    chosen = selection.pick(torch.randn(5, 2, 11), allowed, 3)
    assert chosen.sum(-1).eq(3).all() and not chosen[..., ~allowed].any()
    assert selection.pick(torch.randn(2, 11), allowed, 99).sum(-1).eq(8).all()


@pytest.fixture
def moe_quality(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import moe_quality

    yield moe_quality
    sys.modules.pop("moe_quality", None)


def test_experts_are_counted_as_they_reach_the_kernel(moe_quality: Any) -> None:
    model = build("qwen3_moe", FAMILIES["qwen3_moe"].implementations[0])
    texts = [torch.randint(3, VOCAB, (40 + 2 * ROWS + 1,)) for _ in range(2)]
    exact, counter = moe_quality.run(model, texts, None, 40, ROWS)
    layers, chosen = model.config.num_hidden_layers, model.config.num_experts_per_tok
    assert [len(part) for part in exact] == [2 * ROWS] * 2
    assert (counter.calls, counter.rows, counter.kept) == (4 * layers, 4 * layers * ROWS, 4 * layers * ROWS * chosen)
    _, least = moe_quality.run(model, texts, sc.MoePlan(top_k=1), 40, ROWS)
    assert least.kept == least.rows == counter.rows and least.distinct < counter.distinct
    _, budgeted = moe_quality.run(model, texts, sc.MoePlan(expert_budget=2), 40, ROWS)
    # Only the rows' top experts may be more than the budget.
    assert least.distinct <= budgeted.distinct < counter.distinct
    assert moe_quality.compare(exact, exact, texts, 40, ROWS) == {"kl": 0.0, "flips": 0.0, "dnll": 0.0, "agreeing": ROWS}


def test_agreeing_rows_end_at_the_first_flip(moe_quality: Any) -> None:
    logits = torch.tensor([[2.0, 1.0]]).repeat(8, 1)
    flipped = logits.clone()
    flipped[[2, 3, 4]] = flipped[[2, 3, 4]].flip(-1)
    a, b = logits.double().log_softmax(-1), flipped.double().log_softmax(-1)
    found = moe_quality.compare([a], [b], [torch.zeros(10, dtype=torch.int64)], 1, 4)
    # Steps of four rows: two agree in front of the flip, then none.
    assert found["flips"] == 3 / 8 and found["agreeing"] == (2 + 0) / 2
    p = a[0].exp()
    assert found["kl"] == pytest.approx(3 / 8 * float((p * (p / p.flip(-1)).log()).sum()))
    assert found["dnll"] == pytest.approx(3 / 8)


def test_limits_of_a_verify_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the weights that a step reads and of the live cache, by hand."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import verify_step

    llama = verify_step.build("llama-8b", "sdpa", 8, "meta")
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096
    cache = 2 * 1024 * 32704
    wanted = 2 * (8 * (layer + cache) + 4096 + 128256 * 4096) / 4.3e12 * 1e3
    assert verify_step.limit_ms(llama, 1, 8, 32704, 4.3e12) == pytest.approx(wanted, rel=1e-12)
    assert verify_step.limit_ms(llama, 1, 1, 32704, 4.3e12) == pytest.approx(wanted, rel=1e-12)
    qwen = verify_step.build("qwen3-30b", "sdpa", 4, "meta")
    assert qwen.config._experts_implementation == "grouped_mm"
    experts = 128 * 3 * 2048 * 768 * (1 - (120 / 128) ** 16)
    layer = 2048 * (4096 * 2 + 512 * 2) + 2 * 128 + 2 * 2048 + 128 * 2048 + experts
    wanted = 2 * (4 * (layer + 2 * 2 * 512 * 100) + 2048 + 151936 * 2048) / 1e12 * 1e3
    assert verify_step.limit_ms(qwen, 2, 8, 100, 1e12) == pytest.approx(wanted, rel=1e-12)
    kernels = [("triton::_combine_kernel", 4, 3.0), ("_sum_kernel", 1, 2.0), ("_split_kernel", 8, 5.0), ("other", 1, 1.0)]
    kernels += [("_mlp_down_kernel", 1, 7.0), ("_mlp_sum_kernel", 1, 11.0), ("_narrow_linear_kernel", 1, 13.0)]
    found = verify_step.shares(kernels)
    assert (found["experts"], found["selection"], found["attention"], found["rest"]) == (3.0, 2.0, 5.0, 1.0)
    assert (found["feed-forward"], found["projections"]) == (18.0, 13.0)


def test_host_time_of_a_verify_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the replay in it: of 20 ms here, by a clock of the test's own, beside 3 ms of the host's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import verify_step

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    graph = SimpleNamespace(replay=lambda: spend(0.02))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(verify, "why_not_captured", lambda model, cache: None)
    monkeypatch.setattr(verify.VerifyFunction, "_replay", lambda self, step, ids, held: step(ids, held))

    def call(self: StepGraph, ids: Tensor, held: int) -> Tensor:
        self._graph = self._graph or graph
        self._graph.replay()
        spend(0.003)
        with torch.no_grad():
            return self._step()

    monkeypatch.setattr(StepGraph, "__call__", call)
    model = build("llama", "sdpa", num_hidden_layers=1)
    cache = sc.VerifyCache(model, 64)
    step = sc.compile_verify(model, cache, draft_len=3, codegen="eager", cudagraphs=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    step(ids)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert verify_step.host_us(step, ids, repeats=5) == pytest.approx(3000)
    # Five counted steps, one before them, and the first call of all.
    assert clock[0] == pytest.approx(7 * 0.023)
    assert cache.length == 4 and step._steps.of(4)._graph is graph


@pytest.fixture
def ffn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import ffn

    yield ffn
    for name in ("ffn", "attention"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("union", [0.5, 0.1])
def test_unions_of_the_feed_forward_benchmark_are_what_they_say(ffn: Any, union: float) -> None:
    """Threshold and budget find the channels that the layers were made to keep, and nothing else counts, or, of few, is read."""
    layers = ffn.Layers(ffn.SMALL["llama-8b"], "cpu")
    layers.set(8, union)
    layer = layers.all[0]
    assert int(layer.kept.sum()) == round(union * layers.shape.inner)
    wanted = ffn.wanted(layer, layer.kept)
    poison = 1e30 if union > 0.1 else torch.nan
    layer.up[~layer.kept] = poison
    layer.by_channels[:, ~layer.kept] = poison
    for keep in (0, int(layer.kept.sum())):
        assert ffn.error(ffn.sparse(layers, keep)(layer), wanted) < 1e-2
    layers.set(8, 1.0)
    for function in (ffn.exact, ffn.cublas, ffn.masked):
        assert ffn.error(function(layers.all[1]), ffn.wanted(layers.all[1], None)) < 1e-2
    assert layers.bytes(1.0) == 3 * layers.bytes(0.0)


def test_float64_steps_of_exports_stay_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and rotary angles of transformers cast to float32: an error against such a run would be its own."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import export

    model, x = build("llama", "sdpa", num_hidden_layers=1).double(), torch.randn(1, 3, 64, dtype=torch.float64)
    norm = next(module for module in model.modules() if isinstance(module, LlamaRMSNorm))
    rotary = next(module for module in model.modules() if isinstance(module, LlamaRotaryEmbedding))
    positions = torch.tensor([[100_003]])
    angles = torch.outer(positions[0].double(), rotary.inv_freq)
    wanted = norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    for mode, bound in ((export._InDouble(), 0.0), (contextlib.nullcontext(), 1e-9)):
        with mode, torch.no_grad():
            off = (norm(x) - wanted).abs().max(), (rotary(x, positions)[0][0, :, :8] - angles.cos()).abs().max()
        assert all(found > bound if bound else found < 1e-12 for found in map(float, off))
    sys.modules.pop("export"), sys.modules.pop("export_child")


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import reproduce

    yield reproduce
    sys.modules.pop("reproduce")


def test_runs_name_scripts_and_options_that_exist(reproduce: Any) -> None:
    assert len({run.name for run in reproduce.RUNS}) == len(reproduce.RUNS)
    for run in reproduce.RUNS:
        script, *arguments = run.command.split()
        source = (reproduce.HERE / script).read_text(encoding="utf-8")
        for option in ("--json", *(word for word in arguments if word.startswith("--"))):
            assert f'"{option}"' in source, (run.name, option)


def test_runs_are_repeated_until_they_end_well(reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_text(
        "import sys, pathlib; print('hello'); pathlib.Path(sys.argv[-1]).write_text('{}'); assert sys.argv[1] == '--x'"
    )
    (tmp_path / "bad.py").write_text("import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text('half'); raise SystemExit(3)")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    (tmp_path / "mute.py").write_text("")
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    runs = tuple(reproduce.Run(name, "cpu", f"{name}.py --x") for name in ("good", "bad", "slow", "mute"))
    monkeypatch.setattr(reproduce, "RUNS", (*runs, reproduce.Run("other", "cuda", "other.py")))
    out, said = tmp_path / "out", tmp_path / "said.json"
    arguments = ["--device", "cpu", "--out", str(out), "--json", str(said)]
    assert reproduce.main([*arguments, "--minutes", "0.05"]) == 1
    results = {name: found["result"] for name, found in json.loads(said.read_text()).items()}
    assert results["good"] == "done" and (out / "good.txt").read_text() == "hello\n"
    assert "exit code 3: see bad.txt" in results["bad"] and "out of time" in results["slow"]
    assert results["mute"] == "ended without a result"
    assert [found.name for found in sorted(out.glob("*.json")) if ".part" not in found.name] == ["good.json"]
    (tmp_path / "bad.py").write_text((tmp_path / "good.py").read_text())
    assert reproduce.main([*arguments, "--only", "good", "bad"]) == 0
    results = {name: found["result"] for name, found in json.loads(said.read_text()).items()}
    assert results == {"good": "done before", "bad": "done"}
