"""PlanReuse, SparsifyAttention and ShareSelection on hand-written programs: structure, numerics, refusals."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ATTENTION, LIVE_BLOCKS, Data, Sizes, additive, cloned, compare, count, data, repeat_kv, rewrite, trace
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from spec_compile.kernels import availability, tiling
from spec_compile.kernels.providers import why_no_upkeep, why_selection_in_torch
from spec_compile.passes.base import PassContext
from spec_compile.passes.canonicalize import Canonicalize
from spec_compile.passes.detect_attention import DetectAttention
from spec_compile.passes.lower_attention import LowerAttention, _realize_masks
from spec_compile.passes.nodes import known
from spec_compile.passes.plan_reuse import PlanReuse
from spec_compile.passes.share_selection import ShareSelection
from spec_compile.passes.sparsify_attention import SparsifyAttention
from spec_compile.passes.state_inputs import StateInput
from spec_compile.pipeline import run_passes
from spec_compile.plan import AttentionPlan
from spec_compile.report import RewriteReport

SELECT = torch.ops.spec_compile.select_blocks_v2.default
SUMMARY = torch.ops.spec_compile.block_summary_v1_.default
MASS = torch.ops.spec_compile.block_mass_v1.default
TRITON = torch.ops.spec_compile.attention_triton_v1.default
GATHERED = torch.ops.spec_compile.attention_gathered_v1.default
SIZES = Sizes(rows=3, slots=64, seen=45)
PLAN = AttentionPlan(budget=8, block_size=8, sink=0, recent=1, query="first")
Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def stack(layers: int, write: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """``layers`` attentions over caches of their own, one mask: ``fn(mask, pos, *[q, kn, vn, kc, vc] * layers)``."""

    def fn(mask: Tensor, pos: Tensor, *operands: Tensor) -> Tensor:
        outputs = []
        for at in range(0, 5 * layers, 5):
            q, kn, vn, kc, vc = operands[at : at + 5]
            k = kc.index_copy_(2, pos, kn) if write is None else write(kc, pos, kn)
            v = vc.index_copy_(2, pos, vn)
            outputs.append(F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask))
        return torch.stack(outputs)

    return fn


def operands(layers: int, sizes: Sizes = SIZES) -> list[Any]:
    made: list[Data] = [data(sizes, seed) for seed in range(layers)]
    found: list[Any] = [made[0].keep, made[0].pos]
    for d in made:
        found += [d.q, d.k_new, d.v_new, d.k_cache, d.v_cache]
    return found


def sparsified(layers: int, plan: AttentionPlan = PLAN, **options: Any) -> tuple[GraphModule, RewriteReport, PassContext]:
    gm = trace(stack(layers, options.pop("write", None)), operands(layers), options.pop("dynamic", ()))
    ctx = PassContext(block_size=16, sparsity=plan, **{"lowering": "reference", **options})
    report = RewriteReport()
    return run_passes(gm, ctx, report), report, ctx


def state_for(ctx: PassContext) -> list[Tensor]:
    return [torch.zeros(s.shape, dtype=s.dtype) for s in ctx.state]


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def selection_behind(call: Node) -> Any:
    parts = call.args[4:7]
    assert all(isinstance(part, Node) and part.target is operator.getitem for part in parts)
    assert [part.args[1] for part in parts] == [0, 1, 2]  # type: ignore[union-attr]
    return parts[0].args[0]  # type: ignore[union-attr]


def test_structure() -> None:
    """One upkeep for all anchors, one live list a block size, and followers read the very nodes of their anchor."""
    gm, report, ctx = sparsified(5, AttentionPlan(budget=8, block_size=8, index_topk_pattern="FSFSS", exclude=(4,)))
    attentions = calls(gm, ATTENTION)
    behind = [selection_behind(call) for call in attentions]
    assert [node.target for node in behind] == [SELECT] * 4 + [LIVE_BLOCKS]
    assert behind[0] is behind[1] and behind[2] is behind[3] and behind[0] is not behind[2]
    assert all(a is b for a, b in zip(attentions[0].args[4:7], attentions[1].args[4:7]))
    assert [call.args[7] for call in attentions] == [8, 8, 8, 8, 16]
    assert (count(gm, SELECT), count(gm, SUMMARY), count(gm, LIVE_BLOCKS)) == (2, 1, 2)
    (upkeep,) = calls(gm, SUMMARY)
    assert upkeep < behind[0] and len(upkeep.args[0]) == len(upkeep.args[1]) == 2  # type: ignore[arg-type]
    assert [s.kind for s in ctx.state] == ["summary", "summary", "valid", "gate"]
    places = gm.graph.find_nodes(op="placeholder")
    assert [places[i].name for i in ctx.state[0].caches] == [places[2 + 3].name, places[2 + 10 + 3].name]
    assert all(node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"} for node in places[-4:])
    hits = {p.name: p.hits for p in report.passes}
    assert (hits["plan_reuse"], hits["sparsify_attention"], hits["share_selection"]) == (4, 2, 2)


def wanted(layers: int, given: list[Any], plan: AttentionPlan, anchors: list[int]) -> Tensor:
    """Blocks by mean key and first row, in loops."""
    mask, pos, size = given[0], given[1], plan.block_size
    outputs, chosen = [], {}
    for layer in range(layers):
        q, kn, vn, kc, vc = given[2 + 5 * layer : 7 + 5 * layer]
        k, v = kc.index_copy(2, pos, kn), vc.index_copy(2, pos, vn)
        if anchors[layer] == layer:
            picked = torch.zeros(q.shape[0], k.shape[1], k.shape[2], dtype=torch.bool)
            for b in range(q.shape[0]):
                visible = mask[b].any(0).any(0)
                live = [i for i in range(k.shape[2] // size) if visible[i * size : (i + 1) * size].any()]
                contest = [i for i in live[plan.sink : len(live) - plan.recent] if (i + 1) * size <= int(pos[0])]
                for head in range(k.shape[1]):
                    score = {
                        i: max(
                            float(q[b, h, 0] @ k[b, head, i * size : (i + 1) * size].mean(0)) for h in (2 * head, 2 * head + 1)
                        )
                        for i in contest
                    }
                    best = sorted(contest, key=lambda i: (-score[i], i))[: int(plan.budget) // size]  # type: ignore[arg-type]
                    for i in {*live} - {*contest} | {*best}:
                        picked[b, head, i * size : (i + 1) * size] = True
            chosen[layer] = picked.repeat_interleave(2, 1).unsqueeze(2)
        seen = mask & chosen[anchors[layer]]
        outputs.append(F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), seen))
    return torch.stack(outputs)


@pytest.mark.parametrize("lowering", ["reference", "auto"])
@pytest.mark.parametrize("pattern", ["FFF", "FSS", "FSF"])
def test_numerics(pattern: str, lowering: str) -> None:
    plan = AttentionPlan(budget=8, block_size=8, sink=1, recent=1, query="first", index_topk_pattern=pattern)
    gm, _, ctx = sparsified(3, plan, lowering=lowering)
    assert count(gm, GATHERED) == (3 if lowering == "auto" else 0)
    anchors = [max(i for i in range(layer + 1) if pattern[i] == "F") for layer in range(3)]
    given = operands(3)
    compare(wanted(3, cloned(given), plan, anchors), gm(*cloned(given), *state_for(ctx)), 1e-5)


@pytest.mark.parametrize("lowering", ["reference", "auto"])
def test_the_gate_keeps_every_block(lowering: str) -> None:
    gm, _, ctx = sparsified(2, lowering=lowering)
    given = operands(2)
    state = [torch.full_like(x, 1 << 62) if s.kind == "gate" else x for s, x in zip(ctx.state, state_for(ctx))]
    exact, _ = rewrite(trace(stack(2), given), lowering)
    assert torch.equal(gm(*cloned(given), *state), exact(*cloned(given)))


def test_rows_stay_dynamic() -> None:
    given = operands(2)
    dynamic = [(0, 2), (1, 0), *((at, 2) for layer in range(2) for at in range(2 + 5 * layer, 5 + 5 * layer))]
    gm, report, ctx = sparsified(2, dynamic=dynamic, lowering="auto")
    assert len(report.sparse) == 2
    plan = PLAN
    for rows in (2, 3, 6):
        given = operands(2, Sizes(rows=rows, slots=64, seen=45))
        compare(wanted(2, cloned(given), plan, [0, 1]), gm(*cloned(given), *state_for(ctx)), 1e-5)


@pytest.mark.parametrize(
    "plan", [AttentionPlan(budget=8, block_size=8, query="all"), AttentionPlan(budget=8, block_size=8, representative="exact")]
)
def test_rows_stay_dynamic_on_cuda(plan: AttentionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that looks at the graph's sizes fixes them: exported code would take every step for one of the traced rows."""
    pytest.importorskip("triton")
    hopper = tiling.Device(capability=90, processors=132, shared_bytes=227 << 10)
    monkeypatch.setattr(availability, "capability", lambda device: 90)
    for module in ("tiling", "block_scores_triton", "block_mass_triton"):
        monkeypatch.setattr(f"spec_compile.kernels.{module}.device_of", lambda device: hopper)
    gm, _, _ = sparsified(1, plan, dynamic=[(0, 2), (1, 0), (2, 2), (3, 2), (4, 2)])
    for node in gm.graph.nodes:
        if isinstance(held := node.meta.get("val"), Tensor):
            with held.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="cuda")
    LowerAttention().run(gm, PassContext(block_size=16, sparsity=plan))
    assert count(gm, SELECT) == count(gm, TRITON) == 1
    rows = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[2]
    assert not isinstance(known(rows), int)


def test_passes_are_idempotent() -> None:
    gm, _, ctx = sparsified(3, AttentionPlan(budget=8, block_size=8, index_topk_freq=3))
    before = [(node.op, str(node.target)) for node in gm.graph.nodes]
    again = PassContext(block_size=16, sparsity=ctx.sparsity)
    assert [cls().run(gm, again).hits for cls in (PlanReuse, SparsifyAttention, ShareSelection)] == [0, 0, 0]
    assert before == [(node.op, str(node.target)) for node in gm.graph.nodes]


def test_lists_that_nobody_reads_any_more_are_gone() -> None:
    """Every layer sparse: the list of exact blocks goes, and only the one that is selected from stays."""
    gm, _, _ = sparsified(3, AttentionPlan(budget=8, block_size=8, index_topk_freq=3))
    (lists,) = calls(gm, LIVE_BLOCKS)
    assert lists.args[1] == 8
    assert all(node.users for node in gm.graph.find_nodes(op="call_function", target=operator.getitem))


@pytest.mark.parametrize("representative", ["mean", "exact"])
def test_masks_are_realized_once_for_selections_too(representative: str) -> None:
    """The lowering to Triton, by hand: every opaque call reads one mask that is computed once."""
    fn, given = stack(2), operands(2)
    gm = trace(lambda mask, *rest: fn(mask & mask.any(-1, keepdim=True), *rest), given)
    plan = AttentionPlan(budget=8, block_size=8, representative=representative, exclude=(1,))
    run_passes(gm, PassContext(block_size=16, sparsity=plan, lowering="reference"), RewriteReport())
    for node in calls(gm, ATTENTION):
        node.target = TRITON
    _realize_masks(gm)
    (realized,) = calls(gm, torch.ops.spec_compile.realize_mask_v1.default)
    readers = [*calls(gm, TRITON), *calls(gm, LIVE_BLOCKS), *calls(gm, MASS)]
    assert len(readers) == (5 if representative == "exact" else 4)
    assert set(realized.users) == set(readers) and realized < min(readers)
    gm.graph.lint()


def test_selections_in_plain_torch_on_cuda_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from spec_compile.kernels import block_scores_triton
    from spec_compile.kernels.tiling import Device

    monkeypatch.setattr(availability, "why_no_triton", lambda: None)
    monkeypatch.setattr(block_scores_triton, "device_of", lambda device: Device(90, 132, 232448))
    with FakeTensorMode():
        q, k, summary = (torch.empty(1, 4, 3, 8, device="cuda"), torch.empty(1, 2, 64, 8, device="cuda"),
                         torch.empty(1, 2, 8, 1, 8, device="cuda"))  # fmt: skip
        wide = torch.empty(1, 2, 64, 512, device="cuda")
    words: list[Any] = [q, summary, None, None, None, None, None, None, 8, 0.3, "all", "softmax"]
    assert why_selection_in_torch(SELECT, tuple(words)) is None
    assert "float64" in str(why_selection_in_torch(SELECT, (q.to(torch.float64), *words[1:])))
    assert why_selection_in_torch(SELECT, (q.to("cpu"), *words[1:])) is None
    assert "head dim 512 have no kernel" in str(why_no_upkeep(wide))
    assert why_no_upkeep(k) is None and why_no_upkeep(wide.to("cpu")) is None
    monkeypatch.setattr(availability, "why_no_triton", lambda: "Triton is not installed")
    assert why_no_upkeep(k) == why_selection_in_torch(MASS, tuple(words)) == "Triton is not installed"


def test_without_a_plan_nothing_happens() -> None:
    gm, report, ctx = sparsified(2, None)  # type: ignore[arg-type]
    assert not ctx.state and not ctx.roles and not report.sparse and count(gm, SELECT) == 0


def test_exact_scores_need_no_summaries() -> None:
    gm, _, ctx = sparsified(2, AttentionPlan(budget=8, block_size=8, representative="exact"))
    assert (count(gm, MASS), count(gm, SUMMARY), count(gm, SELECT)) == (2, 0, 2)
    assert [s.kind for s in ctx.state] == ["gate"]


def test_export_keeps_the_program() -> None:
    """The rewritten graph exports again: added inputs are ordinary ones there."""
    gm, _, ctx = sparsified(2, lowering="auto")
    given = [*operands(2), *state_for(ctx)]
    program = torch.export.export(gm, tuple(cloned(given)), strict=False)
    assert any("select_blocks" in str(node.target) for node in program.graph.nodes)
    compare(gm(*cloned(given)), program.module()(*cloned(given)), 0.0)


# Refusals: the layer stays dense, with a reason, and computes what it did.


def scattered(kc: Tensor, pos: Tensor, kn: Tensor) -> Tensor:
    return kc.scatter_(2, pos.view(1, 1, -1, 1).expand(kn.shape), kn)


def twice(kc: Tensor, pos: Tensor, kn: Tensor) -> Tensor:
    kc.index_copy_(2, pos[:1], kn[:, :, :1])
    return kc.index_copy_(2, pos[1:], kn[:, :, 1:])


def permuted_rows(kc: Tensor, pos: Tensor, kn: Tensor) -> Tensor:
    kc[torch.arange(kc.shape[0]).flip(0)[:, None], :, pos.expand(kc.shape[0], -1)] = kn.flip(0).transpose(1, 2)
    return kc


def per_row(kc: Tensor, pos: Tensor, kn: Tensor) -> Tensor:
    kc[torch.arange(kc.shape[0])[:, None], :, pos.expand(kc.shape[0], -1)] = kn.transpose(1, 2)
    return kc


def slots(kc: Tensor, pos: Tensor, kn: Tensor) -> Tensor:
    kc[:, :, pos] = kn
    return kc


@pytest.mark.parametrize(
    ("write", "reason"),
    [(scattered, "cannot be read off aten.scatter"), (twice, "K is written 2 times"), (permuted_rows, "cannot be read off")],
)
def test_writes_whose_place_is_unknown(write: Any, reason: str) -> None:
    gm, report, _ = sparsified(1, write=write, lowering="auto")
    assert len(report.rewritten) == 1 and not report.sparse
    assert reason in report.attentions[0].role_note, report.attentions[0].role_note
    assert any(reason in r.reason for p in report.passes if p.name == "plan_reuse" for r in p.rejections)
    given = operands(1)
    compare(stack(1, write)(*cloned(given)), gm(*cloned(given)), 1e-5)


@pytest.mark.parametrize("write", [per_row, slots])
def test_writes_by_rows_of_a_batch(write: Any) -> None:
    gm, report, ctx = sparsified(1, write=write, lowering="auto")
    assert len(report.sparse) == 1, report.attentions[0].role_note
    given = operands(1)
    compare(wanted(1, cloned(given), PLAN, [0]), gm(*cloned(given), *state_for(ctx)), 1e-5)


def refused(fn: Callable[..., Any], given: list[Any], dynamic: Any = (), **options: Any) -> str:
    gm, report = rewrite(trace(fn, given, dynamic), sparsity=PLAN, **options)
    assert len(report.rewritten) == 1 and not report.sparse
    compare(fn(*cloned(given)), gm(*cloned(given)), 1e-5)
    return report.attentions[0].role_note


def test_a_growing_cache() -> None:
    d = data(Sizes(rows=3, slots=24, seen=21))
    mask = torch.ones(1, 1, 3, 24, dtype=torch.bool)

    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        k, v = torch.cat([kc, kn], 2), torch.cat([vc, vn], 2)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask)

    assert "needs a static cache, this one is growing" in refused(
        fn, [d.q, d.k_new, d.v_new, d.k_cache[:, :, :21], d.v_cache[:, :, :21]]
    )


def one_layer(mask_of: Callable[[Tensor], Tensor | None]) -> Callable[..., Tensor]:
    def fn(mask: Tensor, pos: Tensor, q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        k, v = kc.index_copy_(2, pos, kn), vc.index_copy_(2, pos, vn)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask_of(mask))

    return fn


def test_a_kernel_that_may_write_the_cache() -> None:
    """A Triton kernel of the user's after the attention: the summary is of K as the step's own write left it."""
    gm = trace(stack(1), operands(1))
    for place, why in ((5, "may write the K cache"), (2, "")):
        given = [node for node in gm.graph.nodes if node.op == "placeholder"][place]
        changed = copy.deepcopy(gm)
        with changed.graph.inserting_before(changed.graph.output_node()):
            out = next(node for node in changed.graph.nodes if node.name == given.name)
            changed.graph.call_function(
                triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "grid": [(1, 1, 1)], "kwargs": {"out": out}}
            )
        ctx = PassContext(block_size=16, lowering="reference", sparsity=PLAN)
        assert Canonicalize().run(changed, ctx) and DetectAttention().run(changed, ctx).hits == 1
        assert PlanReuse().run(changed, ctx).hits == (0 if why else 1)
        assert why in ctx.roles[0].note


def test_no_mask() -> None:
    assert "no mask" in refused(one_layer(lambda mask: None), operands(1))


def test_a_bias_per_head() -> None:
    slopes = torch.linspace(0.1, 1, 4).view(1, 4, 1, 1) * torch.arange(64.0)
    assert "a bias per head" in refused(one_layer(lambda mask: additive(mask) + slopes), operands(1))


def test_a_bias_per_head_of_three_dimensions() -> None:
    slopes = torch.linspace(0.1, 1, 4).view(4, 1, 1) * torch.linspace(0, 1, 3).view(1, 3, 1) * torch.arange(64.0)

    def fn(mask: Tensor, pos: Tensor, q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        k, v = (repeat_kv(x, 2) for x in (kc.index_copy_(2, pos, kn), vc.index_copy_(2, pos, vn)))
        scores = (q @ k.transpose(2, 3) * 0.3 + slopes).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    assert "a bias per head" in refused(fn, operands(1))


def test_a_symbolic_cache_length() -> None:
    note = refused(stack(1), operands(1), [(0, 3), (5, 2), (6, 2)])
    assert "symbolic" in note


def test_a_cache_inside_a_larger_tensor() -> None:
    d = data(SIZES)
    both = torch.stack([d.k_cache, d.v_cache])

    def fn(mask: Tensor, pos: Tensor, q: Tensor, kn: Tensor, vn: Tensor, kv: Tensor) -> Tensor:
        k, v = kv[0].index_copy_(2, pos, kn), kv[1].index_copy_(2, pos, vn)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), mask)

    assert "part of a larger tensor" in refused(fn, [d.keep, d.pos, d.q, d.k_new, d.v_new, both])


def test_more_slots_written_than_rows_read() -> None:
    def fn(mask: Tensor, pos: Tensor, q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        k, v = kc.index_copy_(2, pos, kn), vc.index_copy_(2, pos, vn)
        return F.scaled_dot_product_attention(q[:, :, 1:], repeat_kv(k, 2), repeat_kv(v, 2), mask[:, :, 1:])

    assert "K is written at [3] slots, 2 rows are read" in refused(fn, operands(1))


def test_state_describes_the_caches() -> None:
    _, _, ctx = sparsified(2, AttentionPlan(budget=16, block_size=16, representative="min_max"))
    (first, second, valid, gate) = ctx.state
    assert first.shape == second.shape == (2, 2, 4, 2, 8) and valid.shape == (2,) and gate.shape == (1,)
    assert first == StateInput("summary", (5, 10), 0, 16, "min_max", (2, 2, 4, 2, 8), torch.float32, torch.device("cpu"))
    assert (first.layer, second.layer, first.caches) == (0, 1, valid.caches)
