"""``generate``: tokens of the model alone, row by row, and an end wherever it falls in an accepted run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from decoding_cases import endless, greedy_tokens, repeating

import spec_compile as sc
from spec_compile import generation
from spec_compile.decode_loop import DecodingLoop
from spec_compile.drafters import Draft, HostDrafter, PromptLookup, Scripted
from spec_compile.drafters_model import AssistantModel
from spec_compile.errors import CacheError, OptionsError, PlanError
from spec_compile.kernels.selection import select_blocks_reference
from spec_compile.metrics import DecodingMetrics, RequestMetrics, StepBytes
from spec_compile.models.zoo import VOCAB, build
from spec_compile.report import AttentionEntry, MoeEntry, RewriteReport

NEW = 24
LENGTHS = (40, 7, 1, 23, 55, 16, 33, 9)
PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=16, block_size=8, index_topk_freq=2))


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model_of(name: str = "llama") -> Any:
    return endless(name)


@functools.cache
def prompts() -> list[list[int]]:
    return repeating(LENGTHS)


@functools.cache
def greedy(name: str = "llama", new: int = NEW) -> list[list[int]]:
    return greedy_tokens(model_of(name), prompts(), new)


def generate(rows: Any = None, name: str = "llama", **more: Any) -> sc.GenerateOutput:
    given = prompts() if rows is None else rows
    return sc.generate(model_of(name), given, **{"max_new_tokens": NEW, "codegen": "eager", **more})


def oracle(
    wanted: Sequence[Sequence[int]], starts: Sequence[Sequence[int]], right: Callable[[int], int], size: int = 5
) -> Scripted:
    """Drafts the true continuation, wrong from position ``right(step)`` of each draft on."""
    known = [[*start, *tokens] for start, tokens in zip(starts, wanted)]
    calls = iter(range(1 << 30))

    def drafts(tokens: Sequence[int]) -> list[int]:
        text = next(text for text in known if text[: len(tokens)] == list(tokens))
        follows, good = text[len(tokens) : len(tokens) + size], right(next(calls))
        return [token if i < good else (token + 1) % VOCAB for i, token in enumerate(follows)]

    return Scripted(drafts, max_drafts=size)


@pytest.mark.parametrize("query", ["all", "mean"])
@pytest.mark.parametrize("mode", generation.MODES)
def test_warming_up_leaves_nothing_to_compile(mode: str, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are there before the prefill, and the cache is as it was."""
    torch._dynamo.reset()
    graphs, before = torch._dynamo.utils.counters["stats"], list[int]()
    prefill = DecodingLoop.prefill
    monkeypatch.setattr(DecodingLoop, "prefill", lambda self: (before.append(graphs["unique_graphs"]), prefill(self)))
    attention = sc.AttentionPlan(budget=16, block_size=8, index_topk_freq=2, query=query)
    plan = sc.SparsityPlan(attention=attention, audit=sc.AuditPlan(window=8, adapt=False))
    start, end = graphs["unique_graphs"], []
    for warm_up in (True, False):
        if not warm_up:
            torch._dynamo.reset()
        end.append(generate(plan=None if mode == "exact" else plan, mode=mode, warm_up=warm_up))
    assert start < before[0] and graphs["unique_graphs"] > before[1]
    assert before[1] == before[0], "a graph was compiled behind the warm-up"
    assert end[0].tokens == end[1].tokens


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_ragged_batch_equals_transformers_row_by_row(name: str) -> None:
    out = generate(name=name, drafter=oracle(greedy(name), prompts(), lambda call: call * 7 % 6))
    assert out.tokens == greedy(name)
    metrics = out.metrics.to_dict()
    assert 1.5 < metrics["total"]["mean_acceptance_length"] < 5
    assert metrics["forwards"]["exact"] < NEW * 0.7
    assert out.report is not None and len(out.report.rewritten) == 2
    assert out.sequences.shape == (8, max(LENGTHS) + NEW)
    for row, prompt, tokens in zip(out.sequences.tolist(), prompts(), out.tokens):
        assert row == [0] * (max(LENGTHS) - len(prompt)) + prompt + tokens


def test_one_at_a_time_equals_the_batch_and_padding_is_never_seen() -> None:
    """The same tensor, left-padded, with a pad token that the model would notice."""
    width = max(LENGTHS)
    padded = torch.tensor([[5] * (width - len(prompt)) + prompt for prompt in prompts()])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts()])
    out = generate(padded, attention_mask=mask)
    assert out.tokens == greedy()
    assert torch.equal(out.sequences[:, :width], padded)
    cache = sc.RowCache(model_of(), 128)
    for prompt, wanted in list(zip(prompts(), greedy()))[:3]:
        assert generate([prompt], cache=cache).tokens == [wanted]
        assert cache.lengths == [len(prompt) + NEW - 1]


def test_leading_pad_tokens_count_as_padding_as_in_transformers() -> None:
    width = max(LENGTHS)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts()])
    assert generate(padded).tokens == greedy()


class Branches(HostDrafter):
    """A tree whose right path leads through the second branch: the true tokens, beside wrong ones."""

    parents = (-1, -1, 1, 1, 3, 0)

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(6)
        self.texts = texts

    def propose(self, limit: int) -> Draft:
        rows = []
        for tokens in self.rows:
            text = next(text for text in self.texts if text[: len(tokens)] == tokens)
            true = [*text[len(tokens) : len(tokens) + 3], 3, 3, 3]
            wrong = [(token + 1) % VOCAB for token in true]
            rows.append([wrong[0], true[0], wrong[1], true[1], true[2], wrong[0]][:limit])
        columns = len(rows[0])
        return Draft(
            torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns), [columns] * len(rows), self.parents[:columns]
        )


def test_trees_keep_the_right_path() -> None:
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts(), greedy(new=NEW + 8))]
    out = generate(drafter=Branches(texts))
    assert out.tokens == greedy()
    # Three drafts are right in every step that has room for all nodes.
    assert out.metrics.to_dict()["total"]["mean_acceptance_length"] > 2.5
    assert out.metrics.to_dict()["total"]["acceptance_at"][:3] == pytest.approx([1, 1, 1], abs=0.35)


def test_lookup_trees_equal_greedy() -> None:
    assert generate(drafter=PromptLookup(max_drafts=5, branches=3)).tokens == greedy()


@pytest.mark.parametrize("place", [1, 2, 4, 5])
def test_an_end_token_inside_an_accepted_run(place: int) -> None:
    """All drafts are right, and one of them ends the text: nothing behind it stays, in the result or in the cache."""
    prompt, wanted = prompts()[0], greedy()[0]
    end = wanted[place]
    first = wanted.index(end)
    cache = sc.RowCache(model_of(), 128)
    out = generate([prompt], drafter=oracle([wanted], [prompt], lambda call: 5), eos_token_id=end, cache=cache)
    assert out.tokens == [wanted[: first + 1]]
    assert cache.lengths == [len(prompt) + first]
    assert out.metrics.requests[0].finish == "eos"
    assert out.metrics.requests[0].accepted_at[0] == 1


def test_rows_end_at_different_places_and_the_rest_goes_on() -> None:
    ends = [greedy()[0][3], greedy()[3][11]]
    out = generate(eos_token_id=ends, drafter=oracle(greedy(), prompts(), lambda call: call % 6))
    for found, wanted in zip(out.tokens, greedy()):
        stops = [i for i, token in enumerate(wanted) if token in ends]
        assert found == (wanted[: stops[0] + 1] if stops else wanted)
    assert {request.finish for request in out.metrics.requests} == {"eos", "length"}
    width = max(map(len, out.tokens))
    assert out.sequences.shape[1] == max(LENGTHS) + width


@pytest.mark.parametrize("new", [1, 2, 5])
def test_the_length_limit_inside_an_accepted_run(new: int) -> None:
    prompt, wanted = prompts()[0], greedy()[0]
    out = generate([prompt], drafter=oracle([wanted], [prompt], lambda call: 5), max_new_tokens=new)
    assert out.tokens == [wanted[:new]]
    assert out.metrics.forwards["exact"] == (1 if new < 7 else 2)


def test_a_least_length_bans_the_end_token_within_a_run() -> None:
    """As in transformers: the token does not come before, another one takes its place."""
    model, prompt = model_of(), prompts()[0]
    end, ids = greedy()[0][2], torch.tensor([prompt])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=6, do_sample=False, eos_token_id=end
    )[0, len(prompt) :].tolist()
    out = generate([prompt], drafter=oracle([wanted], [prompt], lambda call: 5), eos_token_id=end, min_new_tokens=6)
    assert out.tokens == [wanted] and len(wanted) >= 6


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.runs.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def test_streams_each_run_once_and_in_order() -> None:
    prompt, wanted, heard = prompts()[0], greedy()[0], Heard()
    generate([prompt], drafter=oracle([wanted], [prompt], lambda call: call % 6), streamer=heard)
    assert heard.runs[0] == prompt and heard.ended == 1
    assert [token for run in heard.runs[1:] for token in run] == wanted
    assert max(map(len, heard.runs[1:])) > 2


def test_an_interruption_returns_what_was_generated() -> None:
    prompt, wanted, heard = prompts()[0], greedy()[0], Heard()
    inner = oracle([wanted], [prompt], lambda call: 3)
    steps = iter(range(3))

    def drafts(tokens: Sequence[int]) -> Sequence[int]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return inner._drafts(tokens)  # type: ignore[operator]

    cache = sc.RowCache(model_of(), 128)
    out = generate([prompt], drafter=Scripted(drafts, max_drafts=5), streamer=heard, cache=cache)
    assert out.tokens == [wanted[:12]]
    assert out.metrics.interrupted and out.metrics.requests[0].finish == "interrupted"
    assert heard.ended == 1 and sum(map(len, heard.runs[1:])) == 12
    assert cache.lengths == [len(prompt) + 11]


def test_sampling_follows_its_seed() -> None:
    runs = [generate(do_sample=True, temperature=1.5, top_k=20, seed=seed).tokens for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != greedy()


def test_sparse_mode_changes_tokens_and_says_what_it_read() -> None:
    out = generate([prompts()[4]], plan=PLAN, mode="sparse", max_new_tokens=40)
    metrics = out.metrics.to_dict()
    assert metrics["forwards"]["exact"] == 0 and metrics["forwards"]["sparse"] > 0
    assert 0.3 < metrics["density"] < 0.95
    assert out.report is not None and len(out.report.sparse) == 2
    assert out.tokens[0] != greedy()[4]


def test_metrics_are_json_and_a_table() -> None:
    out = generate(drafter=oracle(greedy(), prompts(), lambda call: 2))
    metrics = json.loads(json.dumps(out.metrics.to_dict()))
    total = metrics["total"]
    assert total["new_tokens"] == 8 * NEW == sum(request["new_tokens"] for request in metrics["requests"])
    assert total["mean_acceptance_length"] == pytest.approx(1 + total["accepted"] / total["steps_with_drafts"])
    assert total["tokens_per_step"] == pytest.approx(1 + total["accepted"] / total["steps"])
    # Two of five drafts are right in every step, but for the end.
    assert total["acceptance_at"][:3] == pytest.approx([1, 1, 0], abs=0.01)
    assert total["accepted"] + total["steps"] == total["new_tokens"]
    seconds = metrics["seconds"]
    parts = ("draft", "verify", "audit", "overhead")
    assert seconds["decoding"] == pytest.approx(sum(seconds[part] for part in parts))
    assert metrics["density"] == 1 and metrics["weight_bytes"] > 0
    text = str(out.metrics)
    assert "tokens/s" in text and "all" in text and "length" in text


def test_acceptance_is_counted_as_vllm_counts_it() -> None:
    """Its ``num_drafts`` leaves out steps without drafts, and every position is divided by it."""
    request = RequestMetrics(prompt_tokens=3)
    request.judge([1, 2, 3], 2)
    request.judge([1, 1, 2], 0)
    request.judge([], 0)
    assert (request.steps, request.drafts, request.drafted_at, request.accepted_at) == (3, 2, [2, 2, 1], [1, 1, 0])
    total = DecodingMetrics(requests=[request, RequestMetrics(prompt_tokens=1)]).to_dict()["total"]
    assert (total["mean_acceptance_length"], total["tokens_per_step"]) == (1 + 2 / 2, 1 + 2 / 3)
    assert total["acceptance_at"] == [0.5, 0.5, 0.0]
    nothing = DecodingMetrics(requests=[RequestMetrics(prompt_tokens=1)]).to_dict()["total"]
    assert nothing["mean_acceptance_length"] is None and nothing["acceptance_at"] == []


@pytest.mark.parametrize(
    ("plan", "experts"),
    [
        (sc.MoePlan(expert_budget=3), 3), (sc.MoePlan(top_k=1), 5), (sc.MoePlan(top_k=1, expert_budget=4), 4),
        (sc.MoePlan(expert_budget=64), 8), (sc.MoePlan(ratio=0.3), 8),
        (sc.MoePlan(ratio=0.3, calibration=sc.MoeCalibration(distinct=3.0, distinct_exact=6.0)), 4.0),
    ],
)  # fmt: skip
def test_experts_counted_in_sparse_steps(plan: sc.MoePlan, experts: float) -> None:
    """Of 8 in two layers, one of which stays exact; five rows of two experts each."""
    entries = [MoeEntry("", "rewritten", experts=8, top_k=2, expert_bytes=100, rule=rule) for rule in ("some", "")]
    report = RewriteReport(moes=entries)
    counted = StepBytes(model_of(), sc.RowCache(model_of(), 128), sc.SparsityPlan(moe=plan), report, [])
    dense, sparse = counted.weights(5), counted.weights(5, sparse=True)
    assert dense - sparse == (8 - experts) * 100
    assert counted.weights(1) - counted.weights(1, sparse=True) >= 0


@pytest.mark.parametrize("budget", [16, 0.25, 64])
@pytest.mark.parametrize("start", [3, 8, 39, 40, 71])
def test_counted_blocks_are_those_that_are_selected(budget: int | float, start: int) -> None:
    plan = sc.SparsityPlan(attention=sc.AttentionPlan(budget=budget, block_size=8, sink=1, recent=2, min_context=24))
    assert plan.attention is not None
    report = RewriteReport(attentions=[AttentionEntry("", "rewritten", role=role) for role in ("anchor", "follower")])
    counted = StepBytes(model_of(), sc.RowCache(model_of(), 128), plan, report, [])
    rows, slots = 4, 96
    live = -(-(start + rows) // 8)
    ids = torch.full((1, 1, slots // 8), -1, dtype=torch.int32)
    ids[0, 0, :live] = torch.arange(live)
    gate = torch.tensor([24])
    tokens, share = (budget, 0.0) if isinstance(budget, int) else (0, budget)
    scores = torch.rand(1, 2, slots // 8)
    _, count, _ = select_blocks_reference(
        torch.zeros(1, 4, rows, 16), None, scores, ids, torch.tensor([[live]], dtype=torch.int32), ids.to(torch.uint8),
        torch.tensor([start]), gate, 8, 1.0, "all", "max", "own", False, 1, 2, tokens, share, 0,
    )  # fmt: skip
    kept = min(start + rows, int(count[0, 0]) * 8)
    assert counted.kept(start, rows) == kept
    # 2 layers, 2 heads of 16 dimensions, K and V of 4 bytes; the anchor reads a mean key for each block of 8.
    token = 2 * 16 * 2 * 4
    scored = token / 2 * (start + rows) / 8 if kept < start + rows else 0
    assert counted.kv([start], rows, True) == 2 * token * kept + scored
    assert counted.kv([start, start], rows, False) == 2 * 2 * token * (start + rows)


@pytest.mark.parametrize(
    ("rows", "more", "kind", "message"),
    [
        (None, {"mode": "fast"}, OptionsError, "mode must be one of"),
        (None, {"mode": "audited"}, OptionsError, "mode='audited' needs a plan that is not exact"),
        (None, {"drafter": "eagle"}, OptionsError, "drafter must be"),
        (None, {"max_new_tokens": 0}, OptionsError, "max_new_tokens"),
        (None, {"temprature": 1}, OptionsError, "unknown option 'temprature'"),
        (None, {"plan": {"attn": {}}}, PlanError, "unknown key 'attn'"),
        (None, {"streamer": Heard()}, OptionsError, "a streamer takes one sequence"),
        (None, {"stop_strings": "x"}, OptionsError, "stop_strings need the tokenizer"),
        ([[]], {}, OptionsError, "every prompt needs a token"),
        ([], {}, OptionsError, "every prompt needs a token"),
        ([[3]], {"attention_mask": torch.ones(1, 1)}, OptionsError, "a list of prompts has no padding"),
        (torch.ones(1, 3), {}, OptionsError, "input_ids must be int64"),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.tensor([[1, 1, 0]])}, OptionsError, "padding_side='left'"),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.ones(1, 2)}, OptionsError, "attention_mask must be"),
        ([[3]], {"cache": object()}, CacheError, "generate needs a RowCache"),
    ],
)
def test_bad_arguments_name_the_remedy(rows: Any, more: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        generate(rows, **more)


def test_a_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CacheError, match="the cache is too short: max_len is 20, prompt and new tokens reach 64"):
        generate([prompts()[0]], cache=sc.RowCache(model_of(), 20))
    with pytest.raises(CacheError, match="the cache was made for batch 1, there are 2 prompts"):
        generate(prompts()[:2], cache=sc.RowCache(model_of(), 128))


def test_training_models_are_refused() -> None:
    model = build("llama", "sdpa").train()
    with pytest.raises(OptionsError, match=r"call model.eval\(\)"):
        sc.generate(model, [[3]])


def test_reports_reach_their_sink() -> None:
    model, found = build("llama", "sdpa", seed=5), []
    sc.generate(model, prompts()[:1], max_new_tokens=4, codegen="eager", eos_token_id=[], on_report=found.append)
    assert [report.kind for report in found] == ["verify"]


def test_prefills_switch_nothing_that_others_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model compiled in place prefills by its own forward; the compiler's stance belongs to the whole process."""
    compiled: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    model = build("llama", "sdpa", seed=5)
    cache = sc.RowCache(model, 512, 2)
    settings = {"max_new_tokens": 4, "codegen": "eager", "eos_token_id": [], "cache": cache}
    expected = sc.generate(model, prompts()[:2], **settings).tokens
    model.compile(backend=backend)

    def refuse(stance: str) -> None:
        raise AssertionError(stance)

    monkeypatch.setattr(torch.compiler, "set_stance", refuse)
    assert sc.generate(model, prompts()[:2], **settings).tokens == expected
    assert not compiled


def test_prompts_are_read_in_linear_time_and_as_they_stand() -> None:
    padded = torch.tensor([[0, 0, 5, 0, 6], [7, 0, 0, 0, 8], [0, 0, 0, 0, 9]])
    found, same, pad = generation._prompts(padded, None, 0, torch.tensor([1, 2]), model_of())
    assert found == [[5, 0, 6], [7, 0, 0, 0, 8], [9]] and pad == 0 and torch.equal(same, padded)
    # A pad token that also ends texts hides nothing.
    assert generation._prompts(padded, None, 0, [0], model_of())[0] == padded.tolist()


def test_early_exit_by_name_takes_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = generation.make_drafter
    monkeypatch.setattr(generation, "make_drafter", lambda *args, **options: made.append(make(*args, **options)) or made[-1])
    out = sc.generate(model_of(), prompts()[:1], drafter="early_exit", max_new_tokens=6, codegen="eager")
    assert out.tokens == [greedy()[0][:6]]
    assert made[0]._options.codegen == "eager"


def test_a_drafter_of_the_users_is_left_as_it_is() -> None:
    class Mine(Scripted):
        vocabulary = property(lambda self: None)

    assert sc.generate(
        model_of(), prompts()[:1], drafter=Mine(lambda tokens: [], max_drafts=1), max_new_tokens=3, codegen="eager"
    )


def test_an_assistant_with_more_logits_than_the_target() -> None:
    assistant = build("llama", "sdpa", seed=2, vocab_size=VOCAB + 16)
    assistant.lm_head.bias = torch.nn.Parameter(torch.where(torch.arange(VOCAB + 16) < VOCAB, 0.0, 100.0))
    drafter = AssistantModel(assistant, max_drafts=2, codegen="eager")
    assert sc.generate(model_of(), prompts()[:2], drafter=drafter, max_new_tokens=6, codegen="eager").tokens == [
        row[:6] for row in greedy()[:2]
    ]
