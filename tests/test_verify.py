"""``compile_verify`` and ``explain``: equal to eager over steps, few graphs, errors that name a remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers import DynamicCache, StaticCache

from spec_compile import AttentionPlan, MoePlan, SparsityPlan, VerifyCache, VerifyFunction, compile_verify, explain
from spec_compile.classify import EXPERT_LOOP
from spec_compile.errors import CacheError, OptionsError, PlanError, StrictError
from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig
from spec_compile.models.zoo import FAMILIES, VOCAB, WINDOW, build
from spec_compile.options import MAX_ROWS
from spec_compile.report import RewriteReport

STEPS = ((9, 5), (4, 0), (1, 0), (9, 9), (2, 1))
MAX_LEN = 60
SLOTS = MAX_LEN + MAX_ROWS


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model_of(name: str) -> Any:
    return build(name, FAMILIES[name].implementations[0])


@functools.cache
def decoder(repeat: str = "interleave", layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(layers=layers, repeat=repeat)).eval()


def tokens(rows: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


def verifier(model: Any, cache: Any, **options: Any) -> VerifyFunction:
    return compile_verify(model, cache, **{"draft_len": 8, "codegen": "eager", **options})


@torch.no_grad()
def eager(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits


@torch.no_grad()
def eager_decoder(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    return model(ids, cache=cache, **more)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return (found - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())


def kinds(verify: VerifyFunction) -> list[tuple[str, bool]]:
    return [(report.kind, report.dynamic) for report in verify.reports]


def follow(verify: VerifyFunction, wanted: Callable[..., torch.Tensor], twin: Any) -> None:
    """Run the steps on both caches, rolling both back by the same number of rejected rows."""
    for number, (rows, rejected) in enumerate(STEPS):
        ids = tokens(rows, number)
        assert distance(verify(ids), wanted(verify.model, twin, ids)) <= 1e-5
        verify.cache.crop(-rejected)
        twin.crop(-rejected)


def test_steps_equal_eager_with_two_graphs() -> None:
    """One graph serves every row count from 2, a second one serves 1, whatever was rolled back."""
    model = model_of("llama")
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    follow(verify, eager, VerifyCache(model, MAX_LEN))
    assert kinds(verify) == [("verify", True), ("verify", False)]
    assert all(len(report.rewritten) == 2 and not report.refused for report in verify.reports)
    assert verify.report() is verify.reports[-1]
    verify.reset()
    assert verify.cache.length == 0
    follow(verify, eager, VerifyCache(model, MAX_LEN))
    assert len(verify.reports) == 2


def test_a_model_with_windows_and_softcap_over_steps() -> None:
    model = model_of("gemma2")
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    twin = VerifyCache(model, MAX_LEN)
    for cache in (verify.cache, twin):
        eager(model, cache, tokens(2 * WINDOW, 9))
    follow(verify, eager, twin)
    assert kinds(verify) == [("verify", True), ("verify", False)]


@pytest.mark.parametrize("repeat", ["gqa", "grouped"])
def test_reference_decoder_over_steps(repeat: str) -> None:
    model = decoder(repeat, layers=1)
    verify = verifier(model, DecoderCache(model.config, MAX_LEN))
    follow(verify, eager_decoder, DecoderCache(model.config, MAX_LEN))
    assert kinds(verify) == [("verify", True), ("verify", False)]
    assert all(len(report.rewritten) == 1 for report in verify.reports)


def test_one_row_first() -> None:
    """The order of row counts does not matter for the number of graphs."""
    model = decoder(layers=1)
    verify, twin = verifier(model, DecoderCache(model.config, MAX_LEN)), DecoderCache(model.config, MAX_LEN)
    for number, rows in enumerate((1, 3, 1, 9, 2)):
        assert distance(verify(tokens(rows, number)), eager_decoder(model, twin, tokens(rows, number))) <= 1e-5
    assert kinds(verify) == [("verify", False), ("verify", True)]


def test_rows_of_a_batch_at_different_positions() -> None:
    model = decoder(layers=1)
    verify, twin = (
        verifier(model, DecoderCache(model.config, MAX_LEN, batch=3)), DecoderCache(model.config, MAX_LEN, batch=3),
    )  # fmt: skip
    for number, rejected in enumerate(([0, 3, 5], [2, 0, 1], [4, 4, 0])):
        ids = tokens(6, number, 3)
        assert distance(verify(ids), eager_decoder(model, twin, ids)) <= 1e-5
        for cache in (verify.cache, twin):
            cache.crop(torch.tensor(rejected))
    assert len(verify.reports) == 1


def test_many_verify_functions_in_one_process() -> None:
    """Dynamo's recompile limit belongs to one function, not to all verify functions together."""
    model = decoder(layers=1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(2):
            verify = verifier(model, DecoderCache(model.config, MAX_LEN + number))
            for rows in (3, 1):
                verify(tokens(rows))
            assert kinds(verify) == [("verify", True), ("verify", False)]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_left_padded_batch_equals_single_runs(name: str) -> None:
    model, pads, prompt = model_of(name), (5, 0), 20
    verify = verifier(model, VerifyCache(model, MAX_LEN, batch=2))
    ids = tokens(prompt, 7, 2)
    mask = torch.ones(2, prompt, dtype=torch.int64)
    mask[0, : pads[0]] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    eager(model, verify.cache, ids, attention_mask=mask, position_ids=positions)
    singles = []
    for row, pad in enumerate(pads):
        singles.append(VerifyCache(model, MAX_LEN))
        eager(model, singles[row], ids[row : row + 1, pad:])
    for number, rows in enumerate((6, 4, 6)):
        step = tokens(rows, number, 2)
        mask = torch.cat([mask, torch.ones(2, rows, dtype=torch.int64)], 1)
        found = verify(step, attention_mask=mask)
        for row, single in enumerate(singles):
            assert distance(found[row : row + 1], eager(model, single, step[row : row + 1])) <= 2e-5
        for cache in (verify.cache, *singles):
            cache.crop(-1)
        mask = mask[:, :-1]
    assert kinds(verify) == [("verify", True)]


def test_boolean_padding_masks() -> None:
    model = model_of("llama")
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    found = verify(tokens(5), attention_mask=torch.ones(1, 5, dtype=torch.bool))
    assert distance(found, eager(model, twin, tokens(5))) <= 1e-5


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.padding_mask])
def test_families_that_need_a_padding_mask(name: str) -> None:
    """OPT and BLOOM read positions off a 2-D mask."""
    model = model_of(name)
    verify, held = verifier(model, VerifyCache(model, MAX_LEN)), 0
    sequence = tokens(30, 3)
    with torch.no_grad():
        wanted = model(input_ids=sequence, attention_mask=torch.ones(1, 30, dtype=torch.int64), use_cache=False).logits
    for rows in (9, 4, 9, 7):
        found = verify(sequence[:, held : held + rows], attention_mask=torch.ones(1, held + rows, dtype=torch.int64))
        assert distance(found, wanted[:, held : held + rows]) <= 2e-5
        held += rows
    assert kinds(verify) == [("verify", True)]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.padding_mask])
def test_a_missing_padding_mask_is_named(name: str) -> None:
    model = model_of(name)
    with pytest.raises(OptionsError, match="attention_mask"):
        verifier(model, VerifyCache(model, MAX_LEN))(tokens(5))


def tree_mask(held: int, parents: list[int], slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool ``[1, 1, T, S]`` of a draft tree behind ``held`` tokens, and each row's position."""
    mask = torch.zeros(1, 1, len(parents), slots, dtype=torch.bool)
    mask[..., :held] = True
    positions = torch.zeros(1, len(parents), dtype=torch.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[0, 0, row] |= mask[0, 0, parent]
            positions[0, row] = positions[0, parent] + 1
        else:
            positions[0, row] = held
        mask[0, 0, row, held + row] = True
    return mask, positions


TREES = ([-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4, 4], [-1, 0, 0])


@pytest.mark.parametrize(("name", "additive"), [("llama", False), ("gpt2", True)])
def test_trees_equal_eager(name: str, additive: bool) -> None:
    model = model_of(name)
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    for cache in (verify.cache, twin):
        eager(model, cache, tokens(12, 5))
    for number, parents in enumerate(TREES):
        mask, positions = tree_mask(12, parents, SLOTS)
        if additive:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        ids = tokens(len(parents), number)
        found = verify(ids, position_ids=positions, attention_mask=mask)
        assert distance(found, eager(model, twin, ids, position_ids=positions, attention_mask=mask)) <= 1e-5
        for cache in (verify.cache, twin):
            cache.crop(-len(parents))
    assert kinds(verify) == [("verify", True)]


def test_each_path_of_a_tree_equals_a_straight_run() -> None:
    model, parents = model_of("llama"), TREES[0]
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    prompt, ids = tokens(12, 5), tokens(6, 1)
    eager(model, verify.cache, prompt)
    mask, positions = tree_mask(12, parents, SLOTS)
    found = verify(ids, position_ids=positions, attention_mask=mask)
    for leaf in (3, 4, 5):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        straight = eager(model, None, torch.cat([prompt, ids[:, path]], 1))[:, -1]
        assert distance(found[:, leaf], straight) <= 1e-5


def test_trees_with_the_reference_decoder() -> None:
    model = decoder()
    verify, twin = verifier(model, DecoderCache(model.config, MAX_LEN)), DecoderCache(model.config, MAX_LEN)
    for cache in (verify.cache, twin):
        eager_decoder(model, cache, tokens(12, 5))
    mask, positions = tree_mask(12, TREES[0], verify.cache.capacity)
    found = verify(tokens(6), position_ids=positions, attention_mask=mask)
    assert distance(found, eager_decoder(model, twin, tokens(6), position_ids=positions, attention_mask=mask)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("gemma2", "full_attention and sliding_attention"),
        ("gpt_oss", "full_attention"),
        ("llama4", "chunked_attention"),
    ],
)
def test_one_4d_mask_for_a_windowed_model_is_refused(name: str, types: str) -> None:
    model = model_of(name)
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    mask, positions = tree_mask(0, [-1, 0, 0], SLOTS)
    with pytest.raises(OptionsError) as caught:
        verify(tokens(3), position_ids=positions, attention_mask=mask)
    assert types in str(caught.value)
    assert "one 4-D mask would drop the window. Pass a dict with a mask per layer type" in str(caught.value)
    assert verify.cache.length == 0


@pytest.mark.parametrize("name", ["mistral", "phi3", "starcoder2", "mixtral"])
def test_a_4d_mask_for_a_model_of_window_layers_only_is_refused(name: str) -> None:
    """These configs spell the window as ``sliding_window`` without ``layer_types``; a 4-D mask drops it as well."""
    model = model_of(name)
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    eager(model, verify.cache, tokens(2 * WINDOW))
    mask, positions = tree_mask(2 * WINDOW, [-1, 0, 0], SLOTS)
    with pytest.raises(OptionsError, match="would drop the window"):
        verify(tokens(3), position_ids=positions, attention_mask=mask)
    assert verify.cache.length == 2 * WINDOW


def test_the_remedy_for_a_model_of_window_layers_only() -> None:
    """A dict says that the window is in the mask."""
    model = model_of("mistral")
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    for cache in (verify.cache, twin):
        eager(model, cache, tokens(2 * WINDOW))
    mask, positions = tree_mask(2 * WINDOW, [-1, 0, 0], SLOTS)
    mask = mask & (positions[0, :, None] - torch.arange(SLOTS) < WINDOW)
    found = verify(tokens(3), position_ids=positions, attention_mask={"sliding_attention": mask})
    assert distance(found, eager(model, twin, tokens(3), position_ids=positions, attention_mask=mask)) <= 1e-5


def test_a_dict_of_masks_by_layer_type() -> None:
    model = model_of("gemma2")
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    held = 2 * WINDOW
    for cache in (verify.cache, twin):
        eager(model, cache, tokens(held, 5))
    full, positions = tree_mask(held, [-1, 0, 0, 1], SLOTS)
    near = positions[0, :, None] - torch.arange(SLOTS) < WINDOW
    masks = {"full_attention": full, "sliding_attention": full & near}
    found = verify(tokens(4), position_ids=positions, attention_mask=masks)
    assert distance(found, eager(model, twin, tokens(4), position_ids=positions, attention_mask=masks)) <= 1e-5


def llama_verify(**options: Any) -> VerifyFunction:
    model = model_of("llama")
    return verifier(model, VerifyCache(model, MAX_LEN, batch=2), draft_len=4, **options)


@pytest.mark.parametrize(
    ("ids", "more", "text"),
    [
        (tokens(6, 0, 2), {}, r"input_ids has 6 rows; this function was made for 1..5 \(draft_len=4\)"),
        (tokens(1, 0, 2)[:, :0], {}, "input_ids has 0 rows"),
        (tokens(5)[0], {}, r"input_ids must be int64 \[B, T\], got torch.int64 \[5\]"),
        (tokens(5, 0, 2).float(), {}, r"input_ids must be int64 \[B, T\], got torch.float32 \[2, 5\]"),
        (tokens(5, 0, 3), {}, "input_ids has batch 3, the cache was made for batch 2"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(2, 4)}, r"must be \[B, held \+ T\] = \[2, 5\], got \[2, 4\]"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(1, 5)}, r"must be \[B, held \+ T\] = \[2, 5\], got \[1, 5\]"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(2, SLOTS)}, r"must be \[B, held \+ T\]"),
        (
            tokens(5, 0, 2), {"attention_mask": torch.ones(1, 1, 5, 60)},
            r"4-D attention_mask must be \[B\|1, 1\|Hq, 5, 124\] \(rows, cache slots\), got",
        ),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(1, 1, 4, SLOTS)}, "4-D attention_mask must be"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(2, 5, SLOTS)}, "attention_mask must be"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(3, 1, 5, SLOTS, dtype=torch.bool)}, "attention_mask must be"),
        (tokens(5, 0, 2), {"attention_mask": torch.ones(1, 3, 5, SLOTS, dtype=torch.bool)}, "attention_mask must be"),
        (tokens(5, 0, 2), {"position_ids": torch.zeros(2, 4, dtype=torch.int64)}, "position_ids must be"),
    ],
)  # fmt: skip
def test_bad_calls_name_the_argument_and_change_nothing(ids: torch.Tensor, more: dict[str, Any], text: str) -> None:
    verify = llama_verify()
    with pytest.raises(OptionsError, match=text):
        verify(ids, **more)
    assert verify.cache.length == 0
    assert verify.reports == []


def test_sparse_steps_need_a_plan() -> None:
    verify = llama_verify()
    with pytest.raises(OptionsError, match="sparse=True needs a plan"):
        verify(tokens(5, 0, 2), sparse=True)
    verify(tokens(5, 0, 2), sparse=False)
    assert verify.cache.length == 5


@pytest.mark.parametrize(
    "plan", [SparsityPlan(AttentionPlan()), SparsityPlan(moe=MoePlan(skip=1, betas=(0, 0))), SparsityPlan(moe=MoePlan(ratio=0))]
)
def test_sparse_steps_of_an_exact_plan(plan: SparsityPlan) -> None:
    """It is given, but takes nothing away: another message than for no plan."""
    with pytest.raises(
        OptionsError,
        match=r"sparse=True needs a plan that is not exact: .* moe=MoePlan\(\.\.\.\) a top_k, .* or a beta above 0",
    ):
        llama_verify(plan=plan)(tokens(5, 0, 2), sparse=True)


@pytest.mark.parametrize("masked", [False, True])
def test_experts_in_an_eager_loop_are_named(masked: bool) -> None:
    """Not the padding mask, which would not help."""
    model = build("qwen3_moe", "sdpa")
    model.set_experts_implementation("eager")
    verify = verifier(model, VerifyCache(model, MAX_LEN))
    with pytest.raises(OptionsError) as caught:
        verify(tokens(5), attention_mask=torch.ones(1, 5, dtype=torch.int64) if masked else None)
    assert str(caught.value) == EXPERT_LOOP


def test_a_full_cache_fails_before_the_write() -> None:
    model = model_of("llama")
    verify = verifier(model, VerifyCache(model, 1))
    eager(model, verify.cache, tokens(60))
    verify(tokens(5))
    before = [layer.keys.clone() for layer in verify.cache.layers]
    with pytest.raises(CacheError, match=r"holds 65 tokens and 2 more.*VerifyCache\(model, max_len"):
        verify(tokens(2))
    assert all(torch.equal(layer.keys, kept) for layer, kept in zip(verify.cache.layers, before))
    verify.cache.crop(-2)
    verify(tokens(2))


def test_a_full_decoder_cache() -> None:
    model = decoder()
    verify = verifier(model, DecoderCache(model.config, 1))
    eager_decoder(model, verify.cache, tokens(63))
    with pytest.raises(CacheError, match="DecoderCache is too short"):
        verify(tokens(3))


@pytest.mark.parametrize("draft_len", [-1, 32, 64, 2.0, True, None, "8"])
def test_bad_draft_len(draft_len: Any) -> None:
    model = model_of("llama")
    cache = VerifyCache(model, MAX_LEN)
    for call in (compile_verify, explain):
        with pytest.raises(OptionsError, match=r"draft_len must lie in 0..31 \(one row leads the drafts\)"):
            call(model, cache, draft_len=draft_len)


def test_draft_len_follows_max_q_len() -> None:
    model = decoder(layers=1)
    cache = DecoderCache(model.config, MAX_LEN)
    with pytest.raises(OptionsError, match=r"0..39"):
        compile_verify(model, cache, draft_len=40, max_q_len=40)
    verify = verifier(model, cache, draft_len=39, max_q_len=40)
    verify(tokens(40))
    assert kinds(verify) == [("verify", True)]


def test_caches_that_will_not_do() -> None:
    model = model_of("llama")
    growing, lazy = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)
    for call in (compile_verify, explain):
        with pytest.raises(CacheError, match=r"DynamicCache grows with every token.*VerifyCache\(model, max_len=\.\.\.\)"):
            call(model, growing)
        with pytest.raises(CacheError, match=r"DynamicCache grows"):
            call(model, DynamicCache())
        with pytest.raises(CacheError, match="StaticCache has no storage yet: call early_initialization, or use VerifyCache"):
            call(model, lazy)
        with pytest.raises(CacheError, match=r"a cache is needed: VerifyCache\(model, max_len=\.\.\.\)"):
            call(model, None)


def test_an_initialised_static_cache_will_do() -> None:
    model = model_of("llama")
    cache, twin = (StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    cache.early_initialization(batch_size=1, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
    verify = verifier(model, cache)
    for number, rows in enumerate((5, 3)):
        assert distance(verify(tokens(rows, number)), eager(model, twin, tokens(rows, number))) <= 1e-5
    assert kinds(verify) == [("verify", True)]


def test_a_model_without_a_cache_argument() -> None:
    model = model_of("llama")
    for call in (compile_verify, explain):
        with pytest.raises(OptionsError, match=r"Linear\.forward takes neither past_key_values nor cache"):
            call(torch.nn.Linear(2, 2), VerifyCache(model, MAX_LEN))


def test_bad_options_and_plans() -> None:
    model = model_of("llama")
    cache = VerifyCache(model, MAX_LEN)
    for call in (compile_verify, explain):
        with pytest.raises(OptionsError, match="unknown option 'graphs'"):
            call(model, cache, graphs=True)
        with pytest.raises(PlanError, match=r"plan\.attention: unknown key"):
            call(model, cache, plan={"attention": {"x": 1}})
        with pytest.raises(PlanError, match=r"plan\.ffn\.threshold: \"auto\""):
            call(model, cache, plan={"ffn": {"threshold": "auto"}})
    assert compile_verify(model, cache, plan=SparsityPlan())._options.plan.exact
    with pytest.raises(OptionsError, match="drop strict=True"):
        explain(model, cache, strict=True)


def test_strict_refuses_what_is_refused() -> None:
    """MLA caches a latent, which stays dense; under strict the call raises, and nothing was written."""
    model = model_of("deepseek_v3")
    verify = verifier(model, VerifyCache(model, MAX_LEN), strict=True)
    with pytest.raises(StrictError, match="MLA latent cache"):
        verify(tokens(5))
    assert verify.cache.length == 0


def test_without_strict_refused_layers_stay_dense() -> None:
    model = model_of("deepseek_v3")
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    assert distance(verify(tokens(5)), eager(model, twin, tokens(5))) <= 1e-5
    assert [entry.status for entry in verify.report().attentions] == ["refused"] * 2


def test_on_report_hears_of_every_graph() -> None:
    heard: list[RewriteReport] = []
    model = decoder(layers=1)
    verify = verifier(model, DecoderCache(model.config, MAX_LEN), on_report=heard.append)
    verify(tokens(3))
    verify(tokens(1))
    assert heard == verify.reports
    assert len(heard) == 2


def test_the_off_switch_runs_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    model = model_of("llama")
    verify, twin = verifier(model, VerifyCache(model, MAX_LEN)), VerifyCache(model, MAX_LEN)
    assert torch.equal(verify(tokens(5)), eager(model, twin, tokens(5)))
    assert verify.reports == []


def test_works_under_inference_mode_and_outside() -> None:
    model = decoder(layers=1)
    verify, twin = verifier(model, DecoderCache(model.config, MAX_LEN)), DecoderCache(model.config, MAX_LEN)
    with torch.inference_mode():
        assert distance(verify(tokens(5)), eager_decoder(model, twin, tokens(5))) <= 1e-5
    assert distance(verify(tokens(5, 1)), eager_decoder(model, twin, tokens(5, 1))) <= 1e-5
    assert not verify(tokens(5, 2)).requires_grad


def test_two_functions_over_one_model_do_not_mix() -> None:
    model = decoder(layers=1)
    pairs = [(verifier(model, DecoderCache(model.config, size)), DecoderCache(model.config, size)) for size in (40, 60)]
    for number in range(3):
        for verify, twin in pairs:
            ids = tokens(4 + number, number)
            assert distance(verify(ids), eager_decoder(model, twin, ids)) <= 1e-5
    assert [len(verify.reports) for verify, _ in pairs] == [1, 1]


def contents(cache: Any) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]


def same(report: RewriteReport, other: RewriteReport) -> bool:
    """Equal but for timings."""
    pair = [{k: v for k, v in r.to_dict().items() if k not in ("passes", "seconds")} for r in (report, other)]
    return pair[0] == pair[1]


def test_report_before_the_first_call_is_what_explain_says() -> None:
    model = decoder(layers=1)
    cache = DecoderCache(model.config, MAX_LEN)
    verify = verifier(model, cache, draft_len=4)
    report = verify.report()
    assert same(report, explain(model, cache, 4))
    assert (report.kind, report.q_len, report.kv_len) == ("verify", 5, cache.capacity)
    assert verify.reports == []
    verify(tokens(5))
    assert verify.report() is verify.reports[0]


def test_report_before_the_first_call_knows_the_options() -> None:
    """max_q_len is an option of the function; its report must not fall back to the default."""
    model = decoder(layers=1)
    verify = verifier(model, DecoderCache(model.config, MAX_LEN), draft_len=39, max_q_len=40)
    assert (verify.report().kind, verify.report().q_len) == ("verify", 40)


def test_explain_touches_nothing() -> None:
    model = model_of("llama")
    cache = VerifyCache(model, MAX_LEN)
    eager(model, cache, tokens(12))
    before, weights = contents(cache), {name: w.clone() for name, w in model.state_dict().items()}
    assert len(explain(model, cache, 4).rewritten) == 2
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before))
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    cache.check_static()


def test_explain_runs_no_attention_and_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_compile.kernels import library

    def never(*args: Any) -> torch.Tensor:
        raise AssertionError("an attention kernel ran")

    monkeypatch.setattr(library, "_attention_folded", never)
    model = decoder()
    cache = DecoderCache(model.config, MAX_LEN)
    for buffer in cache.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    report = explain(model, cache, 4)
    assert len(report.rewritten) == 2
    assert int(cache.lengths) == 0
    assert all(buffer.isnan().all() for buffer in cache.buffers() if buffer.is_floating_point())


def test_explain_works_for_a_nearly_full_cache() -> None:
    """Nothing is written, so room for the rows is not needed."""
    model = model_of("llama")
    cache = VerifyCache(model, 10)
    eager(model, cache, tokens(cache.capacity - 2))
    assert explain(model, cache, 8).kind == "verify"
    assert cache.length == cache.capacity - 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "opt", "bloom"])
def test_explain_families(name: str) -> None:
    """Also those that read positions off a 2-D mask, which the caller of explain has no way to pass."""
    model = model_of(name)
    cache = VerifyCache(model, MAX_LEN)
    before = contents(cache)
    report = explain(model, cache, 4)
    assert [entry.status for entry in report.attentions] == [FAMILIES[name].outcome] * FAMILIES[name].layers
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before))


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_explain_on_the_meta_device(name: str, implementation: str) -> None:
    """Enough to explain a model of any size."""
    model = build(name, implementation, dtype=torch.bfloat16).to("meta")
    report = explain(model, VerifyCache(model, 8192), 8)
    assert [entry.status for entry in report.attentions] == ["rewritten"] * 2
    assert report.kv_len == 8192 + MAX_ROWS


def test_explain_keeps_both_graphs() -> None:
    model = decoder()
    report = explain(model, DecoderCache(model.config, MAX_LEN), 4)
    assert "scaled_dot_product_attention.default" in report.code("before")
    assert "attention_folded_v1" in report.code("after")
    assert "scaled_dot_product_attention.default" not in report.code("after")
    with pytest.raises(ValueError, match="'before' or 'after', got 'middle'"):
        report.code("middle")


def test_explain_many_times() -> None:
    """Explaining is not limited by Dynamo's recompile limit either."""
    model = decoder(layers=1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            assert explain(model, DecoderCache(model.config, MAX_LEN + number), 4).kind == "verify"


def test_explain_then_verify() -> None:
    """The stand-in graph of explain, which returns zeros, is never the one that a verify function runs."""
    model = decoder(layers=1)
    verify, twin = (
        verifier(model, DecoderCache(model.config, MAX_LEN), draft_len=4),
        DecoderCache(model.config, MAX_LEN),
    )
    for number in range(2):
        explain(model, verify.cache, 4)
        assert distance(verify(tokens(5, number)), eager_decoder(model, twin, tokens(5, number))) <= 1e-5
    assert len(verify.reports) == 1


def test_explain_of_a_switched_off_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it reports, explain still touches nothing."""
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")
    model = model_of("llama")
    cache = VerifyCache(model, MAX_LEN)
    before = contents(cache)
    explain(model, cache, 4)
    assert all(torch.equal(a, b) for a, b in zip(contents(cache), before))


@pytest.mark.slow
def test_inductor_over_steps() -> None:
    model = decoder(layers=1)
    verify = verifier(model, DecoderCache(model.config, MAX_LEN), codegen="inductor")
    twin = DecoderCache(model.config, MAX_LEN)
    for number, rows in enumerate((9, 4, 6)):
        assert distance(verify(tokens(rows, number)), eager_decoder(model, twin, tokens(rows, number))) <= 1e-5
        for cache in (verify.cache, twin):
            cache.crop(-2)
    assert kinds(verify) == [("verify", True)]
    assert all("codegen" in report.seconds for report in verify.reports)
