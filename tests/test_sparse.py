"""Sparse verify through a whole model: what is attended, when nothing changes, and what must never leak."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import AttentionPlan, SparsityPlan, VerifyCache, VerifyFunction, compile_verify
from spec_compile.errors import OptionsError, PlanError, StrictError
from spec_compile.kernels import library
from spec_compile.models.zoo import VOCAB, build
from spec_compile.state import BlockSummaries, _summaries

LAYERS = 5
ROWS = 5


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model_of(name: str = "llama", attention: str = "sdpa") -> Any:
    return build(name, attention, num_hidden_layers=LAYERS)


def tokens(rows: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def filled(length: int, max_len: int = 400, batch: int = 1, model: Any = None, **more: Any) -> VerifyCache:
    model = model or model_of()
    cache = VerifyCache(model, max_len, batch=batch)
    if length:
        model(input_ids=tokens(length, 1, batch), past_key_values=cache, use_cache=True, **more)
    return cache


def verifier(cache: VerifyCache, attention: AttentionPlan | None, model: Any = None, **options: Any) -> VerifyFunction:
    plan = None if attention is None else SparsityPlan(attention=attention)
    return compile_verify(model or model_of(), cache, draft_len=8, plan=plan, **{"codegen": "eager", **options})


def summaries_of(cache: VerifyCache) -> list[BlockSummaries]:
    return [found for layer in cache.layers for found in (_summaries.get(layer.keys) or {}).values()]


class Simulated:
    """The method once more, as a slow attention function inside the uncompiled model.

    Keeps, for every layer, the blocks it attended: ``chosen[layer]`` as ``[b][head]`` lists.
    """

    def __init__(self, plan: AttentionPlan, roles: str, position: int) -> None:
        self.plan, self.roles, self.position = plan, roles, position
        self.chosen: dict[int, list[list[list[int]]]] = {}

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        layer, group = module.layer_idx, module.num_key_value_groups
        seen = mask if mask.dtype == torch.bool else mask > -1e30
        role = self.roles[layer]
        if role != "d":
            if role == "S":
                self.chosen[layer] = self.select(q, k, seen, group, scaling)
            else:
                self.chosen[layer] = self.chosen[int(role)]
            seen = seen & self.listed(self.chosen[layer], k.shape[2]).repeat_interleave(group, 1)[:, :, None]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * scaling
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).contiguous(), None

    def listed(self, chosen: list[list[list[int]]], slots: int) -> Tensor:
        size = self.plan.block_size
        blocks = torch.zeros(len(chosen), len(chosen[0]), -(-slots // size), dtype=torch.bool)
        for b, heads in enumerate(chosen):
            for head, picked in enumerate(heads):
                blocks[b, head, picked] = True
        return blocks.repeat_interleave(size, 2)[..., :slots]

    def select(self, q: Tensor, k: Tensor, seen: Tensor, group: int, scaling: float) -> list[list[list[int]]]:
        plan, size = self.plan, self.plan.block_size
        result = []
        for b in range(q.shape[0]):
            visible = seen[b % seen.shape[0]].any(0).any(0)
            live = [i for i in range(-(-len(visible) // size)) if visible[i * size : (i + 1) * size].any()]
            contest = [
                block for place, block in enumerate(live)
                if plan.sink <= place < len(live) - plan.recent and (block + 1) * size <= self.position
            ]  # fmt: skip
            length = len(live) * size
            assert isinstance(plan.budget, int)
            budget = len(live) if length < plan.min_context else plan.budget // size
            heads = []
            for head in range(k.shape[1]):
                rows = {"first": q[b, :, :1], "all": q[b]}[plan.query][head * group : (head + 1) * group].flatten(0, 1)
                means = (
                    torch.stack([k[b, head, i * size : (i + 1) * size].mean(0) for i in contest])
                    if contest
                    else k.new_empty(0, 1)
                )
                scores = (rows @ means.T * scaling).amax(0) if contest else means
                best = sorted(range(len(contest)), key=lambda i: (-float(scores[i]), i))[:budget]
                heads.append(sorted({*live} - {*contest} | {contest[i] for i in best}))
            result.append(heads)
        return result


@pytest.fixture
def simulate() -> Iterator[Any]:
    """``simulate(plan, roles, cache, ids)``: logits and the simulation."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    model = model_of()
    AttentionMaskInterface.register("simulated", sdpa_mask)

    @torch.no_grad()
    def run(plan: AttentionPlan, roles: str, cache: VerifyCache, ids: Tensor, **more: Any) -> tuple[Tensor, Simulated]:
        sim = Simulated(plan, roles, cache.length)
        AttentionInterface.register("simulated", sim)  # type: ignore[arg-type]
        model.config._attn_implementation = "simulated"
        try:
            return model(input_ids=ids, past_key_values=cache, use_cache=True, **more).logits, sim
        finally:
            model.config._attn_implementation = "sdpa"

    yield run


PLANS = {
    "SSSSS": AttentionPlan(budget=48, block_size=16, query="first"),
    "S0S2S": AttentionPlan(budget=48, block_size=16, query="first", index_topk_freq=2),
    "S000S": AttentionPlan(budget=32, block_size=8, sink=2, recent=3, query="all", index_topk_pattern="FSSSF"),
    "dS1S3": AttentionPlan(budget=32, block_size=32, dense_first=1, anchors=(1, 3)),
    "dSd1d": AttentionPlan(budget=48, block_size=16, include=(1, 3), anchors=(1,)),
    "S0d0S": AttentionPlan(budget=40, block_size=8, exclude=(2,), index_topk_freq=4),
}


def distance(found: Tensor, wanted: Tensor) -> float:
    return (found - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize(
    ("roles", "lowering"), [*((roles, "auto") for roles in PLANS), ("S000S", "reference"), ("dS1S3", "reference")]
)
def test_steps_equal_a_simulation(roles: str, lowering: str, simulate: Any) -> None:
    plan = PLANS[roles]
    ours, theirs, dense = filled(150), filled(150), filled(150)
    verify, exact = verifier(ours, plan, lowering=lowering, strict=True), verifier(dense, None)
    for step in range(4):
        ids = tokens(ROWS + step, step)
        found, (wanted, _) = verify(ids), simulate(plan, roles, theirs, ids)
        assert distance(found, wanted) <= 1e-5
        assert distance(exact(ids), wanted) > 1e-3
        for cache in (ours, theirs, dense):
            cache.crop(-(step % 3))
    assert len(verify.reports) == 1


def test_a_batch_padded_on_the_left(simulate: Any) -> None:
    plan = PLANS["S0S2S"]
    padding = torch.ones(2, 150, dtype=torch.int64)
    padding[0, :70] = 0
    # The padded row's first live block is its sink.
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    caches = [filled(150, batch=2, attention_mask=padding, position_ids=positions) for _ in range(2)]
    mask = torch.cat([padding, torch.ones(2, ROWS, dtype=torch.int64)], 1)
    where = (mask.cumsum(-1) - 1)[:, -ROWS:]
    ids = tokens(ROWS, 9, 2)
    found = verifier(caches[0], plan)(ids, attention_mask=mask)
    full = torch.nn.functional.pad(mask, (0, caches[1].capacity - mask.shape[1]), value=1)
    wanted, sim = simulate(plan, "S0S2S", caches[1], ids, attention_mask=full, position_ids=where)
    assert distance(found, wanted) <= 1e-5
    assert {heads[0] for heads in sim.chosen[0][0]} == {70 // 16} and {heads[0] for heads in sim.chosen[0][1]} == {0}


COVERING = [
    AttentionPlan(budget=64, block_size=16), AttentionPlan(budget=64, block_size=8, query="all", index_topk_freq=2),
    AttentionPlan(budget=1.0, block_size=32), AttentionPlan(budget=0.1, budget_floor=70, block_size=16),
    AttentionPlan(budget=16, block_size=16, sink=3, recent=3), AttentionPlan(budget=8, block_size=8, min_context=128),
    AttentionPlan(budget=64, block_size=16, representative="exact"), AttentionPlan(budget=64, block_size=8, joint=True),
]  # fmt: skip


@functools.cache
def exact_steps() -> list[Tensor]:
    """Exact logits of four rows behind 0 to 64 tokens; each step keeps its first row."""
    exact, found = verifier(filled(0, 80), None), []
    for length in range(1, 66):
        found.append(exact(tokens(4, length)))
        exact.cache.crop(-3)
    assert len(exact.reports) == 1
    return found


@pytest.mark.parametrize("plan", COVERING, ids=lambda plan: f"{plan.budget}-{plan.block_size}-{plan.representative}-{plan.joint}")
def test_a_budget_that_covers_the_context_changes_no_bit(plan: AttentionPlan) -> None:
    """Contexts 1..65, in one cache, by one graph."""
    sparse = verifier(filled(0, 80), plan)
    for length, wanted in enumerate(exact_steps(), 1):
        assert torch.equal(sparse(tokens(4, length)), wanted), length
        sparse.cache.crop(-3)
    assert len(sparse.reports) == 1


@pytest.mark.parametrize("plan", [COVERING[1], COVERING[-1]], ids=["all", "joint"])
def test_left_padding_changes_no_bit_either(plan: AttentionPlan) -> None:
    plan = dataclasses.replace(plan, budget=400)
    verify, exact = (verifier(filled(0, batch=2), given) for given in (plan, None))
    for pad in (1, 5, 17, 70):
        padding = torch.ones(2, 150, dtype=torch.int64)
        padding[0, :pad] = 0
        given = {"attention_mask": padding, "position_ids": (padding.cumsum(-1) - 1).clamp(min=0)}
        verify.cache, exact.cache = (filled(150, batch=2, **given) for _ in range(2))
        mask = torch.cat([padding, torch.ones(2, ROWS, dtype=torch.int64)], 1)
        found, wanted = (step(tokens(ROWS, 9, 2), attention_mask=mask) for step in (verify, exact))
        assert torch.equal(found, wanted), pad
    assert len(verify.reports) == len(exact.reports) == 1


@pytest.mark.parametrize("length", [1000, 8000])
def test_long_contexts_change_no_bit_either(length: int) -> None:
    plan = AttentionPlan(budget=8192, block_size=64, query="all", index_topk_freq=4)
    caches = [filled(length, 8100) for _ in range(2)]
    ids = tokens(9)
    assert torch.equal(verifier(caches[0], plan)(ids), verifier(caches[1], None)(ids))


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_one_program_two_modes(codegen: str) -> None:
    """Sparse and exact steps alternate over one cache and one graph."""
    plan = AttentionPlan(budget=32, block_size=8, query="all")
    verify, exact = verifier(filled(200), plan, codegen=codegen), verifier(filled(200), None, codegen=codegen)
    wanted = [exact(tokens(6, seed)) for seed in range(4) if not exact.cache.crop(-6 * (seed > 0))]
    for mode in (True, False, None, False, True):
        for seed in range(4):
            found = verify(tokens(6, seed), sparse=mode)
            verify.cache.crop(-6)
            assert torch.equal(found, wanted[seed]) == (mode is False)
    assert len(verify.reports) == 1


def test_sparse_needs_a_plan() -> None:
    for plan in (None, AttentionPlan()):
        with pytest.raises(OptionsError, match="sparse=True needs a plan"):
            verifier(filled(20), plan)(tokens(4), sparse=True)


def selection_of(verify: VerifyFunction, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of a step, and every list that it selected."""
    lists: list[Tensor] = []
    select = library.select_blocks_reference

    def watched(*args: Any) -> tuple[Tensor, ...]:
        found = select(*args)
        lists.extend(found[:2])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "select_blocks_reference", watched)
        logits = verify(ids)
    return logits, lists


def test_rollback_leaves_nothing_behind() -> None:
    """Case 04: rejected drafts with extreme keys, 50 accept patterns, against a cache that never saw them."""
    plan = AttentionPlan(budget=24, block_size=8, query="all", index_topk_freq=2, recent=1)
    cache, accepted = filled(100, 700), tokens(100, 1)
    verify, clean = verifier(cache, plan), verifier(VerifyCache(model_of(), 700), plan)
    generator = torch.Generator().manual_seed(5)
    for step in range(50):
        drafts = tokens(9, 100 + step)
        verify(drafts)
        keep = int(torch.randint(1, 10, (), generator=generator))
        with torch.no_grad():
            # What the rejected drafts left in the cache is as bad as can be.
            for layer in cache.layers:
                layer.keys[:, :, cache.length - 9 + keep : cache.length] *= 1e4
        cache.crop(-(9 - keep))
        accepted = torch.cat([accepted, drafts[:, :keep]], 1)
        probe, fresh = tokens(6, 1000 + step), VerifyCache(model_of(), 700)
        for mine, theirs in zip(fresh.layers, cache.layers):
            for name in ("keys", "values"):
                getattr(mine, name)[:, :, : cache.length] = getattr(theirs, name)[:, :, : cache.length]
            mine.cumulative_length.fill_(cache.length)
        clean.cache = fresh
        found, lists = selection_of(verify, probe)
        wanted, same = selection_of(clean, probe)
        assert torch.equal(found, wanted)
        assert lists and all(torch.equal(a, b) for a, b in zip(lists, same))
        cache.crop(-6)
    assert cache.length == accepted.shape[1] and len(clean.reports) == 1


@pytest.mark.parametrize("how", ["first block", "middle", "prefill", "copy"])
def test_writes_by_others_are_noticed(how: str) -> None:
    """Between two sparse steps somebody else writes the cache: in place, by another forward, or from another cache."""
    plan = AttentionPlan(budget=24, block_size=8, query="all", sink=0, recent=1)
    cache, other = filled(120), filled(0)
    verify = verifier(cache, plan)
    verify(tokens(6, 2))
    cache.crop(-6)
    with torch.no_grad():
        if how == "prefill":
            cache.reset()
            model_of()(input_ids=tokens(120, 77), past_key_values=cache, use_cache=True)
        elif how == "copy":
            model_of()(input_ids=tokens(120, 78), past_key_values=other, use_cache=True)
            for mine, theirs in zip(cache.layers, other.layers):
                mine.keys.copy_(theirs.keys), mine.values.copy_(theirs.values)
        else:
            at = 0 if how == "first block" else 56
            for layer in cache.layers:
                layer.keys[:, :, at : at + 8] *= -3
    fresh = filled(0)
    for mine, theirs in zip(fresh.layers, cache.layers):
        mine.keys.copy_(theirs.keys), mine.values.copy_(theirs.values), mine.cumulative_length.fill_(120)
    found, lists = selection_of(verify, tokens(6, 3))
    wanted, same = selection_of(verifier(fresh, plan), tokens(6, 3))
    assert torch.equal(found, wanted) and all(torch.equal(a, b) for a, b in zip(lists, same))


def test_two_caches_through_one_graph(simulate: Any) -> None:
    """One compiled function, two caches in turn: each has summaries of its own."""
    plan, roles = PLANS["S0S2S"], "S0S2S"
    model = model_of()
    pairs = []
    for seed in (1, 2):
        pair = [VerifyCache(model, 400) for _ in range(2)]
        with torch.no_grad():
            for cache in pair:
                model(input_ids=tokens(150, seed), past_key_values=cache, use_cache=True)
        pairs.append(pair)
    verify = verifier(pairs[0][0], plan)
    for step in range(6):
        ours, theirs = pairs[step % 2]
        verify.cache = ours
        ids = tokens(6, step)
        assert distance(verify(ids), simulate(plan, roles, theirs, ids)[0]) <= 1e-5
    assert len(verify.reports) == 1
    assert all(len(summaries_of(pair[0])) == 1 for pair in pairs)


def test_graphs_of_one_row_and_of_many_share_summaries() -> None:
    plan = AttentionPlan(budget=24, block_size=8, query="all")
    cache = filled(100)
    verify = verifier(cache, plan)
    for rows in (4, 1, 7, 1):
        verify(tokens(rows, rows))
    assert len(verify.reports) == 2
    assert len(summaries_of(cache)) == 1


def test_summaries_go_with_their_cache() -> None:
    import gc

    cache = filled(100)
    verify = verifier(cache, AttentionPlan(budget=24, block_size=8))
    verify(tokens(4))
    (kept,) = summaries_of(cache)
    import weakref

    gone = weakref.ref(kept)
    del kept, cache, verify
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("value", [torch.nan, 1e4])
def test_unread_slots_never_reach_the_result(value: float) -> None:
    """Slots past the tokens, and blocks that nobody selected, hold anything."""
    plan = AttentionPlan(budget=24, block_size=8, index_topk_freq=10)
    clean, poisoned = filled(140), filled(140)
    with torch.no_grad():
        for layer in poisoned.layers:
            layer.keys[:, :, 140:] = value
            layer.values[:, :, 140:] = value
    ids = tokens(5)
    wanted, lists = selection_of(verifier(clean, plan), ids)
    assert torch.equal(selection_of(verifier(poisoned, plan), ids)[0], wanted)
    # The anchor's choice is fixed by its own keys: poison what it left out, in values and in followers.
    chosen = torch.zeros(2, 1 + clean.capacity // 8, dtype=torch.bool)
    for head in range(2):
        chosen[head, lists[0][0, head, : int(lists[1][0, head])].long()] = True
    again = filled(140)
    keep = chosen.repeat_interleave(8, 1)[:, : again.capacity]
    with torch.no_grad():
        for number, layer in enumerate(again.layers):
            for head in range(2):
                left = ~keep[head]
                left[140:] = False
                layer.values[0, head, left] = value
                if number:
                    layer.keys[0, head, left] = value
    assert torch.equal(selection_of(verifier(again, plan), ids)[0], wanted)


def test_equal_keys_give_equal_selections() -> None:
    """Ties everywhere, 100 times."""
    plan = AttentionPlan(budget=24, block_size=8, query="all")
    cache = filled(140)
    with torch.no_grad():
        for layer in cache.layers:
            layer.keys.fill_(0.5)
    verify = verifier(cache, plan)
    first = verify(tokens(5))
    for _ in range(100):
        cache.crop(-5)
        assert torch.equal(verify(tokens(5)), first)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"index_topk_pattern": "FSSF"}, "4 letters for 5 attention layers: layer 4 has no letter"),
        ({"index_topk_pattern": "FSSFSS"}, "6 letters for 5 attention layers: layer 5 does not exist"),
        ({"anchors": (7,)}, "layer 7 does not exist"),
        ({"exclude": (5,)}, "layer 5 does not exist"),
        ({"anchors": (0, 3), "dense_first": 1}, "layer 0 .* cannot select, it stays dense"),
    ],
)
def test_plans_that_do_not_fit_the_model_name_the_layer(change: dict[str, Any], text: str) -> None:
    plan = dataclasses.replace(AttentionPlan(budget=32, block_size=16), **change)
    with pytest.raises(PlanError, match=text):
        verifier(filled(60), plan)(tokens(4))
    with pytest.raises(PlanError, match=text):
        sc.explain(model_of(), filled(60), plan=SparsityPlan(attention=plan))


def test_layers_of_other_geometry_do_not_share() -> None:
    """Sliding and full layers alternate: each kind has its own anchor."""
    model = build("gemma2", "eager")
    plan = SparsityPlan(attention=AttentionPlan(budget=16, block_size=8, index_topk_freq=100))
    report = sc.explain(model, VerifyCache(model, 200), plan=plan)
    layers = len(report.attentions)
    assert [entry.role for entry in report.attentions] == ["anchor", "anchor"] + ["follower"] * (layers - 2)
    assert "no earlier selection has its KV heads, cache length and mask" in report.attentions[1].role_note


def test_a_plan_without_effect_is_said() -> None:
    plan = AttentionPlan(budget=32, block_size=16, dense_first=LAYERS)
    with pytest.raises(StrictError, match="no layer is sparse: among the first 5 layers"):
        verifier(filled(60), plan, strict=True)(tokens(4))


def test_what_explain_says() -> None:
    plan = AttentionPlan(budget=64, block_size=16, index_topk_freq=2, dense_first=1)
    cache = VerifyCache(model_of(), 1000)
    report = sc.explain(model_of(), cache, plan=SparsityPlan(attention=plan))
    blocks = -(-cache.capacity // 16)
    roles = [(entry.role, entry.follows.rsplit("layers.")[-1], entry.blocks, entry.live_blocks) for entry in report.attentions]
    kept = (64 // 16 + 3, blocks)
    assert [role[0] for role in roles] == ["dense", "anchor", "anchor", "follower", "anchor"]
    assert [role[2:] for role in roles] == [(0, 0), kept, kept, kept, kept]
    assert report.attentions[3].follows == report.attentions[2].layer
    each = report.attentions[0].kv_bytes
    sparse = each * kept[0] * 16 / cache.capacity
    assert report.attentions[3].sparse_bytes == pytest.approx(sparse, abs=1)
    assert report.attentions[1].sparse_bytes == pytest.approx(sparse + each / 2 / 16, abs=1)
    text = str(report)
    assert "layers.3.self_attn: follows model.layers.2.self_attn, 7 of" in text and "layers.0.self_attn: dense" in text
    assert report.to_dict()["attentions_sparse"] == 4


def test_through_torch_compile() -> None:
    """The other door: no VerifyFunction, so steps are sparse."""
    plan = AttentionPlan(budget=32, block_size=8, query="all")
    ours, theirs = filled(150), filled(150)
    run = torch.compile(
        model_of(), backend="spec_compile", options={"plan": {"attention": dataclasses.asdict(plan)}, "codegen": "eager"}
    )
    ids = tokens(6)
    with torch.no_grad():
        found = run(input_ids=ids, past_key_values=ours, use_cache=True).logits
    assert torch.equal(found, verifier(theirs, plan)(ids))


def test_inference_mode() -> None:
    plan = AttentionPlan(budget=32, block_size=8, query="all")
    ours, theirs = filled(150), filled(150)
    a, b = verifier(ours, plan), verifier(theirs, plan)
    for step in range(3):
        with torch.inference_mode():
            found = a(tokens(6, step))
        assert torch.equal(found, b(tokens(6, step)))


def test_caches_without_version_counters_are_never_trusted() -> None:
    """Inference tensors: a new prompt with the same tail leaves the newest block of layer 0 as it was."""
    from transformers import StaticCache

    plan = AttentionPlan(budget=24, block_size=8, query="all", sink=0, recent=1)
    first, second = tokens(120, 3), tokens(120, 4)
    second[:, 60:] = first[:, 60:]
    model = model_of()
    with torch.inference_mode():
        caches = [StaticCache(config=model.config, max_cache_len=200) for _ in range(2)]
        model(input_ids=first, past_key_values=caches[0])
        verify = verifier(caches[0], plan)
        verify(tokens(6, 2))
        for layer in caches[0].layers:
            layer.cumulative_length.zero_()
        for cache in caches:
            model(input_ids=second, past_key_values=cache)
        found, lists = selection_of(verify, tokens(6, 3))
        wanted, same = selection_of(verifier(caches[1], plan), tokens(6, 3))
    assert torch.equal(found, wanted) and all(torch.equal(a, b) for a, b in zip(lists, same))
