"""``RowCache`` and the steps over it: every row at its own length, trees, and what moves when a path is kept."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from spec_compile import AttentionPlan, RowCache, SparsityPlan
from spec_compile.errors import CacheError, OptionsError
from spec_compile.models.row_cache import sequence_cache
from spec_compile.models.zoo import FAMILIES, VOCAB, WINDOW, build
from spec_compile.options import Options
from spec_compile.row_verify import RowVerify, mask_kinds
from spec_compile.state import _summaries

# One shape for all tests, so that few graphs are compiled; rows that a test does not need pause.
MAX_LEN, BATCH = 96, 4
# Two branches below the first draft, one of which forks again: root-to-leaf paths of 3, 2 and 3 drafts, and one of a single one.
TREE = [-1, 0, 0, 1, 1, -1]
PLAN = SparsityPlan(attention=AttentionPlan(budget=16, block_size=8, index_topk_freq=2))


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPILE_DISABLE", raising=False)


@functools.cache
def model_of(name: str = "llama") -> Any:
    return build(name, FAMILIES[name].implementations[0])


def text(size: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def filled(prompts: Sequence[Sequence[int]], name: str = "llama") -> RowCache:
    model = model_of(name)
    prompts = [*prompts, *[[9, 8]] * (BATCH - len(prompts))]
    cache = RowCache(model, MAX_LEN, batch=BATCH)
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            if prompt:
                model(input_ids=torch.tensor([prompt]), past_key_values=sequence_cache(cache, i), use_cache=True)
    cache.set_lengths([len(prompt) for prompt in prompts])
    return cache


def step_of(cache: RowCache, name: str = "llama", plan: SparsityPlan | None = None) -> RowVerify:
    return RowVerify(model_of(name), cache, Options.parse({"codegen": "eager", "plan": plan}), [9])


def run(verify: RowVerify, last: Sequence[int], drafts: Sequence[Sequence[int]], counts: Sequence[int], **more: Any) -> Tensor:
    """A step of the first rows of the batch; a copy of its logits."""
    spare, width = BATCH - len(last), max(map(len, drafts))
    rows = [*([*row, *[3] * (width - len(row))] for row in drafts), *[[3] * width] * spare]
    given = torch.tensor(rows, dtype=torch.int64).reshape(BATCH, width)
    return verify([*last, *[3] * spare], given, [*counts, *[-1] * spare], **more).clone()


@torch.no_grad()
def alone(tokens: Sequence[int], name: str = "llama") -> Tensor:
    return model_of(name)(input_ids=torch.tensor([list(tokens)])).logits[0]


def close(found: Tensor, wanted: Tensor) -> bool:
    return (found - wanted).abs().max().item() <= 1e-5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_rows_of_unequal_lengths_and_drafts_equal_each_sequence_alone(name: str) -> None:
    """Prompts beyond the window, a row without drafts, a row that pauses: all in one step, twice."""
    prompts = [text(3 * WINDOW, 1), text(1, 2), text(WINDOW + 1, 3), text(5, 4)]
    cache = filled([prompt[:-1] for prompt in prompts], name)
    verify = step_of(cache, name)
    for counts, kept in (([4, 2, 0, -1], [3, 3, 1, 0]), ([1, 4, 3, 2], [2, 1, 4, 3])):
        drafts = torch.tensor([text(4, 10 + i) for i in range(4)])
        logits = verify([prompt[-1] for prompt in prompts], drafts, counts)
        for i, count in enumerate(counts):
            if count < 0:
                continue
            proposed = drafts[i, :count].tolist()
            assert close(logits[i, : count + 1], alone([*prompts[i], *proposed], name)[-count - 1 :])
            # Whatever the target's own token is: here one more of the text.
            prompts[i] += [*proposed, 7][: kept[i]]
        cache.commit(kept)
        assert cache.lengths == [len(prompt) - 1 for prompt in prompts]
    assert len(verify.reports) == 1
    assert len(verify.reports[0].rewritten) == len(cache.layers)


def test_a_model_that_reads_one_length_for_all_sequences_is_refused() -> None:
    """Llama 4's temperature tuning takes its positions from the cache's length."""
    cache = filled([text(9, 1), text(4, 2)], "llama4")
    with pytest.raises(OptionsError, match="Llama4ForCausalLM could not be traced over sequences of unequal lengths"):
        run(step_of(cache, "llama4"), [3, 4], [text(2), text(2)], [2, 2])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_path_of_a_tree_equals_its_linear_verify(name: str) -> None:
    prompts = [text(WINDOW + 9, 1), text(4, 2)]
    cache = filled([prompt[:-1] for prompt in prompts], name)
    nodes = [text(len(TREE), 5), text(len(TREE), 6)]
    # The second row has the first four nodes only.
    counts = [len(TREE), 4]
    logits = run(step_of(cache, name), [prompt[-1] for prompt in prompts], nodes, counts, parents=TREE)
    for row, prompt in enumerate(prompts):
        for node in range(counts[row]):
            line, at = [], node
            while at >= 0:
                line.insert(0, nodes[row][at])
                at = TREE[at]
            assert close(logits[row, node + 1], alone([*prompt, *line], name)[-1])


def test_a_committed_path_leaves_what_a_linear_run_would() -> None:
    prompts = [text(21, 1), text(4, 2), text(9, 3)]
    cache = filled([prompt[:-1] for prompt in prompts])
    verify = step_of(cache)
    nodes = [text(len(TREE), 5 + i) for i in range(3)]
    run(verify, [prompt[-1] for prompt in prompts], nodes, [6, 6, -1], parents=TREE)
    # Rows: the last accepted token, then drafts 0, 2 and drafts 5 of the tree; the third row keeps nothing.
    cache.commit([[0, 1, 3], [0, 6], [], 0])
    assert cache.lengths == [23, 5, 8, 2]
    kept = [[*prompts[0], nodes[0][0], nodes[0][2]], [*prompts[1], nodes[1][5]], prompts[2][:-1]]
    wanted = filled(kept)
    for mine, theirs in zip(cache.layers, wanted.layers):
        for i, tokens in enumerate(kept):
            assert close(mine.keys[i, :, : len(tokens)], theirs.keys[i, :, : len(tokens)])
            assert close(mine.values[i, :, : len(tokens)], theirs.values[i, :, : len(tokens)])
    logits = run(verify, [3, 4, prompts[2][-1]], [[], [], []], [0, 0, 0])
    for i, last in enumerate((3, 4, prompts[2][-1])):
        assert close(logits[i, 0], alone([*kept[i], last])[-1])


def test_moving_a_path_costs_no_summary() -> None:
    """Summaries cover blocks below the step; a commit writes behind them and must not make them be computed again."""
    cache = filled([text(40, 1)])
    verify = step_of(cache, plan=PLAN)
    run(verify, [5], [text(6, 2)], [6], parents=TREE, sparse=True)
    found = next(iter(_summaries[cache.layers[0].keys].values()))
    assert found.trusted
    cache.commit([[0, 6], 0, 0, 0])
    assert found.trusted
    with torch.no_grad():
        cache.layers[0].keys[0, 0, 0] += 1
    assert not found.trusted
    cache.commit([[0, 2], 0, 0, 0])
    assert not found.trusted


def test_a_sparse_row_is_the_same_in_any_batch() -> None:
    """Selections start at a sequence's first token, whatever stands in the other rows; repeated rows do not vote."""
    prompt = text(70, 1)
    one = filled([prompt[:-1]])
    drafts = text(3, 2)
    alone_logits = run(step_of(one, plan=PLAN), [prompt[-1]], [drafts], [3], sparse=True)
    dense_logits = run(step_of(one, plan=PLAN), [prompt[-1]], [drafts], [3], sparse=False)
    assert not close(alone_logits[0], dense_logits[0])
    assert close(dense_logits[0, :4], alone([*prompt, *drafts])[-4:])
    many = filled([text(9, 3)[:-1], prompt[:-1], text(81, 4)[:-1]])
    padded = [text(8, 5), [*drafts, *text(5, 6)], text(8, 7)]
    logits = run(step_of(many, plan=PLAN), [9, prompt[-1], 8], padded, [8, 3, 1], sparse=True)
    assert close(logits[1, :4], alone_logits[0, :4])
    assert close(logits[1, 4:], logits[1, 3:4].expand(5, -1))


def test_prefill_in_pieces_equals_a_forward() -> None:
    model, prompt = model_of("gemma2"), text(40, 1)
    cache = RowCache(model, MAX_LEN, batch=2)
    past = sequence_cache(cache, 1)
    with torch.no_grad():
        parts = [
            model(input_ids=torch.tensor([prompt[a:b]]), past_key_values=past, use_cache=True).logits[0]
            for a, b in ((0, 17), (17, 18), (18, 40))
        ]
    assert close(torch.cat(parts), alone(prompt, "gemma2"))
    assert cache.lengths == [0, 0]
    assert not cache.layers[0].keys[0].any()


def test_lengths_and_rollback() -> None:
    cache = RowCache(model_of(), MAX_LEN, batch=2)
    cache.set_lengths([5, 9])
    cache.crop([-2, 0])
    assert cache.lengths == [3, 9] and cache.length == 9
    cache.crop(-1)
    assert cache.lengths == [2, 8]
    assert all(layer.cumulative_length.tolist() == [2, 8] for layer in cache.layers)
    assert all(layer.cumulative_length is cache.layers[0].cumulative_length for layer in cache.layers)
    cache.check_static()
    cache.reset()
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.set_lengths([1]), "2 lengths of 0..160 are needed"),
        (lambda c: c.set_lengths([1, 161]), "2 lengths of 0..160 are needed"),
        (lambda c: c.crop([-4, 0]), "at most 0, got .* with .* held"),
        (lambda c: c.crop(1), "at most 0"),
        (lambda c: c.commit([1]), "2 sequences, 1 entries"),
        (lambda c: c.commit([[0, 2, 1], 0]), "rows of sequence 0 must ascend"),
        (lambda c: c.require_room(200), "RowCache is too short: its longest sequence holds 9"),
    ],
)
def test_bad_lengths_name_the_remedy(call: Any, message: str) -> None:
    cache = RowCache(model_of(), MAX_LEN, batch=2)
    cache.set_lengths([3, 9])
    with pytest.raises(CacheError, match=message):
        call(cache)
    assert cache.lengths == [3, 9]


def test_bad_steps_name_the_remedy() -> None:
    cache = RowCache(model_of(), MAX_LEN, batch=2)
    verify = step_of(cache)
    with pytest.raises(OptionsError, match="a step takes 2 rows, as the cache"):
        verify([1], torch.zeros(1, 2, dtype=torch.int64), [2])
    with pytest.raises(OptionsError, match="a step of 12 rows; this function was made for up to 9"):
        verify([1, 2], torch.zeros(2, 11, dtype=torch.int64), [11, 11])
    with pytest.raises(CacheError, match="need a RowCache, got"):
        RowVerify(model_of(), object(), Options(), [9])
    with pytest.raises(OptionsError, match=r"BloomForCausalLM\.forward takes no position_ids"):
        mask_kinds(build("bloom", "eager"))
    model = build("llama", "sdpa")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(OptionsError, match="load it with attn_implementation='sdpa' or 'eager'"):
        mask_kinds(model)
