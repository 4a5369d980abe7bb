"""Audited decoding: the dense model's tokens, whatever the sparse steps say, and windows that follow what was measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from decoding_cases import endless, greedy_tokens, repeating
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_compile as sc
from spec_compile.audit import FirstOf
from spec_compile.audit_window import AuditWindow
from spec_compile.decode_loop import DecodingLoop
from spec_compile.drafters import PromptLookup, Scripted
from spec_compile.drafters_model import AssistantModel, DraftHead
from spec_compile.errors import PlanError
from spec_compile.models.zoo import build
from spec_compile.plan import AuditPlan
from spec_compile.sampling import Sampler

NEW = 32
LENGTHS = (90, 7, 41, 66)
# A fifth of the longest prompts: random models disagree with their sparse selves most of the time.
PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=16, block_size=8, recent=1, index_topk_freq=2))
# Nearly everything: most tokens agree, so that windows fill and are accepted.
MILD = sc.SparsityPlan(attention=sc.AttentionPlan(budget=0.8, block_size=8, recent=1))


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model() -> Any:
    return endless()


@functools.cache
def prompts() -> list[list[int]]:
    return repeating(LENGTHS)


@functools.cache
def greedy() -> list[list[int]]:
    return greedy_tokens(model(), prompts(), NEW)


def audited(plan: sc.SparsityPlan = PLAN, rows: Any = None, audit: AuditPlan | None = None, **more: Any) -> sc.GenerateOutput:
    plan = dataclasses.replace(plan, audit=audit)
    given = prompts() if rows is None else rows
    return sc.generate(model(), given, **{"mode": "audited", "plan": plan, "max_new_tokens": NEW, "codegen": "eager", **more})


@pytest.mark.parametrize(
    "audit",
    [AuditPlan(adapt=False), AuditPlan(window=2, adapt=False), AuditPlan(margin=0.5, adapt=False), AuditPlan(cost="kv"), None],
    ids=["whole windows", "windows of 2", "margin", "by kv bytes", "by all bytes"],
)
def test_greedy_tokens_are_those_of_the_model(audit: AuditPlan | None) -> None:
    out = audited(audit=audit)
    assert out.tokens == greedy()
    metrics = out.metrics.to_dict()
    assert metrics["forwards"]["sparse"] > 0
    assert metrics["total"]["agreement"] < 0.9
    assert metrics["density"] < 1
    for request in metrics["requests"]:
        assert request["audits"] == 0 or request["audited_tokens"] >= request["audits"]


def test_a_mild_plan_fills_windows() -> None:
    out = audited(MILD, audit=AuditPlan(window=8, adapt=False))
    assert out.tokens == greedy()
    metrics = out.metrics.to_dict()
    assert metrics["total"]["agreement"] > 0.5
    assert metrics["forwards"]["audit"] < metrics["forwards"]["sparse"]
    assert metrics["forwards"]["exact"] <= 1


@pytest.mark.parametrize("drafter", [PromptLookup(max_drafts=4, branches=2), Scripted(lambda tokens: [], max_drafts=1)])
def test_trees_and_no_drafts_at_all(drafter: Any) -> None:
    few = prompts()[:1] * 4
    assert audited(rows=few, drafter=drafter, audit=AuditPlan(window=6, adapt=False)).tokens == greedy()[:1] * 4
    assert audited(drafter=drafter, audit=AuditPlan(window=6, adapt=False)).tokens == greedy()


def test_a_head_on_hidden_states_gets_those_of_every_token_once() -> None:
    """The drafter raises where a token's hidden state is missing or told twice, also after audits took tokens back."""
    told: list[int] = []

    class Counting(DraftHead):
        def observe(self, hidden: Sequence[Tensor]) -> None:
            super().observe(hidden)
            told.append(len(hidden[0]))

    drafter = Counting(lambda tokens, hidden, start, row: -hidden, model().get_output_embeddings(), max_drafts=3)
    out = audited(MILD, drafter=drafter, audit=AuditPlan(window=8, adapt=False))
    assert out.tokens == greedy()
    assert out.metrics.forwards["audit"] > 0 and told[0] == LENGTHS[0] - 1
    # Of every token but the last, sequence by sequence.
    assert drafter._seen == [size + NEW - 1 for size in LENGTHS]


def test_ends_inside_a_window() -> None:
    """An end token of the sparse model pauses its row until the dense model agrees; one that only the dense model has counts."""
    ends = [greedy()[0][5], greedy()[2][20]]
    for plan in (PLAN, MILD):
        out = audited(plan, eos_token_id=ends, audit=AuditPlan(window=9, adapt=False))
        for found, wanted in zip(out.tokens, greedy()):
            stops = [i for i, token in enumerate(wanted) if token in ends]
            assert found == (wanted[: stops[0] + 1] if stops else wanted)


def test_a_least_length_is_audited_too() -> None:
    prompt, end = prompts()[0], greedy()[0][2]
    ids = torch.tensor([prompt])
    wanted = (
        model()
        .generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=9, do_sample=False, eos_token_id=end
        )[0, len(prompt) :]
        .tolist()
    )
    out = audited(rows=[prompt] * 4, eos_token_id=end, min_new_tokens=9, audit=AuditPlan(window=5, adapt=False))
    assert out.tokens == [wanted] * 4


def test_an_interruption_returns_audited_tokens_only() -> None:
    steps = iter(range(11))

    def drafts(tokens: Sequence[int]) -> Sequence[int]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return []

    out = audited(MILD, drafter=Scripted(drafts, max_drafts=1), audit=AuditPlan(window=4, adapt=False))
    assert out.metrics.interrupted
    assert all(found == wanted[: len(found)] for found, wanted in zip(out.tokens, greedy()))
    assert all(request.new_tokens == len(found) for request, found in zip(out.metrics.requests, out.tokens))


def test_sampling_follows_its_seed() -> None:
    runs = [
        audited(MILD, do_sample=True, temperature=1.3, seed=seed, audit=AuditPlan(window=6, adapt=False)).tokens
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_sampled_tokens_keep_the_models_distribution() -> None:
    """The second token, whose sparse proposal differs: frequencies within chance of the dense model's (chi-square, 1e-4)."""
    prompt, count = prompts()[0], 200
    cool = {"do_sample": True, "temperature": 4.0, "top_k": 4}
    with torch.no_grad():
        logits = model()(input_ids=torch.tensor([prompt])).logits[0, -1]
    first = logits.topk(4).indices
    shares = (logits[first] / 4.0).softmax(-1)
    pairs: dict[tuple[int, int], float] = {}
    for token, share in zip(first.tolist(), shares.tolist()):
        with torch.no_grad():
            after = model()(input_ids=torch.tensor([[*prompt, token]])).logits[0, -1]
        top = after.topk(4)
        for second, chance in zip(top.indices.tolist(), (top.values / 4.0).softmax(-1).tolist()):
            pairs[token, second] = share * chance
    seen: dict[tuple[int, int], int] = {}
    for batch in range(count // 4):
        out = audited(
            rows=[prompt] * 4, max_new_tokens=3, seed=batch, drafter=Scripted(lambda tokens: [5], max_drafts=1),
            audit=AuditPlan(window=3, adapt=False), **cool,
        )  # fmt: skip
        for row in out.tokens:
            seen[row[0], row[1]] = seen.get((row[0], row[1]), 0) + 1
    assert set(seen) <= set(pairs)
    chi = sum((seen.get(pair, 0) - count * share) ** 2 / (count * share) for pair, share in pairs.items())
    # 15 degrees of freedom.
    assert chi < 44.3


def test_the_same_length_of_text_needs_fewer_audits_where_more_agrees() -> None:
    window = AuditWindow(AuditPlan())
    for _ in range(40):
        window.saw_step(2)
        window.saw_audit([3.0] * 10, 10)
    careful = AuditWindow(AuditPlan())
    for _ in range(40):
        careful.saw_step(2)
        careful.saw_audit([3.0] * 10, 2)
    assert window.agreement > 0.95 > 0.75 > careful.agreement
    # Sparse steps of a tenth still pay where a token in three is taken back, steps of a third do not.
    assert window.best_rate(0.1, 1.0)[1] > careful.best_rate(0.1, 1.0)[1] >= 1
    assert window.best_rate(0.3, 1.0)[1] > careful.best_rate(0.3, 1.0)[1] == 0
    assert window.best_rate(0.3, 1.0)[0] > careful.best_rate(0.3, 1.0)[0] == pytest.approx(careful.gain)


def test_windows_end_at_tokens_that_seldom_agree() -> None:
    window = AuditWindow(AuditPlan())
    for _ in range(60):
        window.saw_step(2)
        window.saw_audit([5.0, 5.0, 5.0, 0.1], 3)
    sure, unsure = window.survives(5.0), window.survives(0.1)
    assert sure > 0.9 and unsure < 0.4
    assert window.goes_on([sure**2], 2, 8, 0.25, 1.0)
    assert not window.goes_on([sure * unsure], 2, 8, 0.25, 1.0)


def test_sparse_steps_are_dropped_where_they_do_not_pay_and_tried_again() -> None:
    window = AuditWindow(AuditPlan())
    for _ in range(60):
        window.saw_step(4)
        window.saw_audit([1.0] * 4, 0)
    choices = [window.goes_on([1.0], 0, 8, 0.9, 1.0) for _ in range(96)]
    assert sum(choices) == 3
    assert not window.goes_on([1.0], 0, 8, 1.0, 1.0)
    assert AuditWindow(AuditPlan()).goes_on([1.0], 0, 8, 0.2, 1.0)


@pytest.mark.parametrize("pending", [0, 5, 28, 31])
def test_a_window_never_outgrows_the_rows_of_an_audit(pending: int) -> None:
    window = AuditWindow(AuditPlan(window=32, adapt=False))
    goes_on = window.goes_on([1.0], pending, 8, 0.2, 1.0)
    assert goes_on == (pending < 29)
    assert not window.goes_on([], 0, 8, 0.2, 1.0)


def test_a_plan_says_what_is_wrong_with_its_audit() -> None:
    with pytest.raises(PlanError, match=r"plan.audit.cost: must be 'all' or 'kv', got 'time'"):
        AuditPlan(cost="time")
    assert sc.SparsityPlan.from_dict({"audit": {"cost": "kv", "adapt": False}}).audit == AuditPlan(cost="kv", adapt=False)


@pytest.mark.parametrize("drafter", [PromptLookup(max_drafts=4), PromptLookup(max_drafts=4, branches=2)], ids=["chain", "tree"])
def test_drawn_tokens_are_audited_by_their_law(drafter: Any) -> None:
    """A mild plan's draws stay, of trees as well: drawing the dense token anew would meet one of them in 30 by chance."""
    out = audited(MILD, drafter=drafter, do_sample=True, seed=0, max_new_tokens=48, audit=AuditPlan(window=8, adapt=False))
    total = out.metrics.to_dict()["total"]
    assert total["audits"] > 5 and total["agreement"] > 0.5


def test_a_seed_gives_the_first_generation_what_it_gives_later_ones() -> None:
    """What windows weigh is known after the first step alone."""
    fresh = build("llama", "sdpa", seed=7)
    plan = dataclasses.replace(PLAN, audit=AuditPlan(cost="kv"))
    runs = [
        sc.generate(
            fresh, prompts(), plan=plan, mode="audited", max_new_tokens=NEW, do_sample=True, seed=0, codegen="eager",
            eos_token_id=[],
        )
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].metrics.forwards == runs[1].metrics.forwards and runs[0].metrics.forwards["sparse"] > 0


def test_sparse_steps_judge_drawn_drafts_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of audits rests on it; see ``Sampler.audit``."""
    calls: list[tuple[bool, bool]] = []
    verify = Sampler.verify

    def spy(self: Sampler, logits: Tensor, draft: Any, prefixes: Any, **more: Any) -> Any:
        calls.append((draft.probs is not None, more.get("given_draft", False)))
        return verify(self, logits, draft, prefixes, **more)

    monkeypatch.setattr(Sampler, "verify", spy)
    assistant = AssistantModel(build("llama", "sdpa", seed=2), max_drafts=3, sampler=Sampler(True, seed=1), codegen="eager")
    out = audited(drafter=assistant, do_sample=True, seed=0, max_new_tokens=8, audit=AuditPlan(window=8, adapt=False))
    assert out.metrics.forwards["sparse"] > 0
    # The drafter's own draws do not pass here: drawn drafts of sparse steps are given, audits are not.
    assert (True, True) in calls and (True, False) in calls
    dense = out.metrics.forwards["audit"] + out.metrics.forwards["exact"]
    assert sum(drawn and not given for drawn, given in calls) <= dense


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(), max_size=12), st.integers(0, 12), st.data())
def test_first_of_a_list(row: list[int], end: int, data: st.DataObject) -> None:
    end = min(end, len(row))
    wanted, found = row[:end], FirstOf(row, end)
    bound = st.none() | st.integers(-15, 15)
    at = slice(data.draw(bound), data.draw(bound), data.draw(st.none() | st.integers(-3, 3).filter(bool)))
    assert len(found) == end and list(found) == wanted and found[at] == wanted[at]
    for place in range(-end, end):
        assert found[place] == wanted[place]
    for place in (end, -end - 1):
        with pytest.raises(IndexError):
            found[place]


def test_no_step_reads_a_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host work between two steps must not grow with the context."""

    class Context(list[int]):
        def __getitem__(self, at: Any) -> Any:
            assert not isinstance(at, slice) or len(range(*at.indices(len(self)))) < 40
            return super().__getitem__(at)

        def __iter__(self) -> Any:
            raise AssertionError("a context was walked")

    own = DecodingLoop.prefill

    def prefill(self: Any) -> None:
        own(self)
        self.tokens = [Context(row) for row in self.tokens]

    monkeypatch.setattr(DecodingLoop, "prefill", prefill)
    plan = dataclasses.replace(MILD, audit=AuditPlan(window=8, adapt=False))
    for mode in ("exact", "sparse", "audited"):
        out = sc.generate(
            model(), [prompts()[0]], plan=plan, mode=mode, drafter=PromptLookup(4), max_new_tokens=NEW, codegen="eager"
        )
        assert len(out.tokens[0]) == NEW
