"""Drafters: what they propose, and that they follow verdicts, rollbacks and audits; trees against their linear verify."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.17")

from decoding_cases import endless, greedy_tokens

import spec_compile as sc
from spec_compile.drafters import Draft, Drafter, PromptLookup, Scripted, make_drafter
from spec_compile.drafters_model import AssistantModel, DraftHead, EarlyExit, first_layers
from spec_compile.errors import OptionsError
from spec_compile.models.row_cache import RowCache, sequence_cache
from spec_compile.models.zoo import VOCAB, build
from spec_compile.ngrams import NgramIndex
from spec_compile.options import Options
from spec_compile.row_verify import RowVerify
from spec_compile.sampling import Sampler
from spec_compile.token_tree import tree_draft

ROWS = [[5, 9, 11], [7] * 17, [3, 4, 5, 6] * 8]


@pytest.fixture(scope="module")
def target() -> Any:
    return build("llama", "sdpa", seed=1)


@pytest.fixture(scope="module")
def small() -> Any:
    return build("llama", "sdpa", seed=2)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of models run as they are: what is tested is which tokens they are given."""
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")


@torch.no_grad()
def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """What the model continues ``tokens`` with, without a cache."""
    row = list(tokens)
    for _ in range(count):
        row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(tokens) :]


def brute_force(tokens: list[int], low: int, high: int, length: int) -> list[int]:
    """Continuation of the newest earlier occurrence of the longest suffix, by a scan."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[-n:]:
                run = list(tokens)
                for place in range(length):
                    run.append(run[end + 1 + place])
                return run[len(tokens) :]
    return []


@pytest.mark.parametrize(("low", "high"), [(1, 3), (2, 2), (2, 5)])
def test_index_agrees_with_a_scan_through_growth_and_shrinkage(low: int, high: int) -> None:
    rng = random.Random(low * 10 + high)
    tokens = [rng.randrange(4) for _ in range(20)]
    index = NgramIndex(tokens, low, high)
    for _ in range(300):
        if rng.random() < 0.3 and len(tokens) > 3:
            count = rng.randrange(1, 4)
            index.shrink(count)
            del tokens[-count:]
        else:
            tokens += [rng.randrange(4) for _ in range(rng.randrange(4))]
            index.grow()
        found = index.continuations(6, 1)
        assert (found[0] if found else []) == brute_force(tokens, low, high, 6)


def test_index_holds_nothing_of_what_was_taken_back() -> None:
    tokens = [1, 2, 3]
    index = NgramIndex(tokens, 1, 3)
    before = {n: dict(held) for n, held in index._newest.items()}
    tokens += [1, 2, 9, 9, 1]
    index.grow()
    index.shrink(5)
    del tokens[-5:]
    assert index._newest == before


def test_prompt_lookup_of_a_batch() -> None:
    drafter = PromptLookup(max_drafts=4)
    drafter.start([[1, 2, 3, 4, 1, 2], [6, 7, 8], [9, 9]])
    draft = drafter.propose(8)
    assert (draft.tokens.tolist(), list(draft.counts)) == ([[3, 4, 1, 2], [0, 0, 0, 0], [9, 9, 9, 9]], [4, 0, 4])
    drafter.accept([[3, 4, 2], [6], []], [2, 0, 0])
    draft = drafter.propose(2)
    assert (draft.tokens.tolist(), list(draft.counts)) == ([[3, 4], [7, 8], [0, 0]], [2, 2, 0])
    drafter.retract([1, 1, 0])
    drafter.accept([[1], [8], []], [0, 0, 0])
    assert drafter.propose(2).tokens.tolist() == [[2, 3], [8, 8], [0, 0]]
    assert drafter.propose(0).tokens.shape == (3, 0)


def test_longer_matches_come_first() -> None:
    drafter = PromptLookup(max_drafts=1)
    drafter.start([[1, 2, 5, 9, 2, 6, 1, 2]])
    assert drafter.propose(1).tokens.tolist() == [[5]]


def test_tree_of_one_row() -> None:
    runs = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 9], [7, 7]]
    draft = tree_draft([runs], 8)
    assert draft.parents == [-1, 0, 1, 2, 3, 4, 1, -1]
    assert draft.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 9, 7]]
    assert draft.depths == [1, 2, 3, 4, 5, 6, 3, 1]
    assert list(draft.counts) == [8]


def test_trees_of_a_batch_share_a_shape() -> None:
    """Every real node is a prefix of one of its row's runs, siblings differ, and main lines survive whatever is cut."""
    rng = random.Random(0)
    for _ in range(200):
        room = rng.randrange(2, 12)
        runs = [[[rng.randrange(3) for _ in range(room)] for _ in range(rng.randrange(4))] for _ in range(rng.randrange(1, 5))]
        draft = tree_draft(runs, room)
        assert draft.parents is not None
        assert draft.tokens.shape[1] <= room
        for row, mine in enumerate(runs):
            tokens = draft.tokens[row].tolist()
            lines = [branch(draft.parents, node) for node in range(draft.counts[row])]
            prefixes = {tuple(run[:size]) for run in mine for size in range(1, room + 1)}
            real = {tuple(tokens[i] for i in line) for line in lines} & prefixes
            assert bool(real) == bool(mine)
            if mine:
                assert (mine[0][0],) in real
            if len(runs) == 1:
                assert len(real) == len(lines), "a node was filled, or two siblings hold one token"


def branch(parents: Sequence[int], node: int) -> list[int]:
    line = []
    while node >= 0:
        line.append(node)
        node = parents[node]
    return line[::-1]


def test_prompt_lookup_with_branches() -> None:
    drafter = PromptLookup(max_drafts=8, branches=3)
    drafter.start([[1, 2, 3, 4, 1, 2, 5, 6, 1, 2], [8]])
    draft = drafter.propose(8)
    assert draft.parents is not None
    tokens = draft.tokens[0].tolist()
    assert {(tokens[i]) for i, parent in enumerate(draft.parents) if parent < 0} == {5, 3}
    assert list(draft.counts) == [8, 0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_path_of_a_tree_equals_its_linear_verify(family: str) -> None:
    model = build(family, "sdpa")
    rows = [[1, 2, 3, 4, 1, 2, 5, 6, 1, 2] * 3, [4, 4, 7, 4, 4, 8, 9, 4, 4]]
    drafter = PromptLookup(max_drafts=7, branches=3)
    drafter.start(rows)
    draft = drafter.propose(7)
    assert draft.parents is not None
    assert len(set(draft.depths)) < len(draft.depths), "the tree is a chain"
    cache = RowCache(model, max_len=64, batch=2)
    verify = RowVerify(model, cache, Options.parse({"codegen": "eager"}), sizes=(8,))
    with torch.no_grad():
        for at, row in enumerate(rows):
            model(torch.tensor([row[:-1]]), past_key_values=sequence_cache(cache, at))
    cache.set_lengths([len(row) - 1 for row in rows])
    last, full = [row[-1] for row in rows], [draft.tokens.shape[1]] * 2
    whole = verify(last, draft.tokens, full, draft.parents).clone()
    leaves = set(range(len(draft.parents))) - set(draft.parents)
    assert len(leaves) > 1
    for leaf in leaves:
        line = branch(draft.parents, leaf)
        linear = verify(last, draft.tokens[:, line], [len(line)] * 2)
        torch.testing.assert_close(whole[:, [0, *(i + 1 for i in line)]], linear[:, : len(line) + 1], rtol=0, atol=2e-5)


def test_assistant_follows_verdicts_and_audits(small: Any, uncompiled: None) -> None:
    """After whatever was accepted, drafts are the assistant's own continuation of each row."""
    drafter = AssistantModel(small, max_drafts=3, codegen="eager")
    drafter.start(ROWS)

    def check() -> Draft:
        draft = drafter.propose(8)
        for row, active in enumerate(drafter.active):
            assert draft.counts[row] == (3 if active else 0)
            assert not active or draft.tokens[row].tolist() == greedy(small, drafter.rows[row], 3)
        return draft

    first = check().tokens
    # All, some and none accepted; a finished row; an audit that takes tokens back; more new tokens than fit a step.
    drafter.accept([[*first[0].tolist(), 3], [*first[1, :1].tolist(), 5], [11]], [3, 1, 0])
    check()
    drafter.accept([[1], [], [2]], [0, 0, 0])
    check()
    drafter.retract([3, 0, 1])
    drafter.accept([[3], [], [4]], [0, 0, 0])
    check()
    drafter.accept([[3, 4, 5, 6, 7], [6], [4, 1, 1]], [0, 0, 0])
    check()
    assert drafter.propose(0).tokens.shape == (3, 0)
    assert drafter.propose(2).tokens[2].tolist() == greedy(small, drafter.rows[2], 2)


def test_assistant_outgrows_its_cache(small: Any, uncompiled: None) -> None:
    drafter = AssistantModel(small, max_drafts=2, max_len=40, codegen="eager")
    drafter.start(ROWS[:2])
    drafter.propose(2)
    first = drafter._cache
    drafter.accept([[8] * 30, [9] * 30], [0, 0])
    assert drafter.propose(2).tokens.tolist() == [greedy(small, row, 2) for row in drafter.rows]
    assert drafter._cache is not first


def test_assistant_that_samples_tells_its_distributions(small: Any, uncompiled: None) -> None:
    sampler = Sampler(True, temperature=0.8, top_p=0.9, seed=1)
    drafter = AssistantModel(small, max_drafts=2, sampler=sampler, codegen="eager")
    drafter.start(ROWS)
    draft = drafter.propose(2)
    assert draft.probs is not None
    assert draft.probs.shape == (3, 2, VOCAB)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(3, 2))
    assert (draft.probs.gather(-1, draft.tokens[..., None]) > 0).all()
    with torch.no_grad():
        logits = small(torch.tensor([[*ROWS[0], int(draft.tokens[0, 0])]])).logits[:, -1:]
    torch.testing.assert_close(draft.probs[0, 1], sampler.distribution(logits, [[]])[0, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_first_layers_share_weights_and_agree(family: str) -> None:
    """Layers past the exit that add nothing make the whole model its own early exit."""
    model = build(family, "sdpa")
    base = getattr(model, model.base_model_prefix)
    stack = next(part for part in base.modules() if isinstance(part, nn.ModuleList) and len(part) == len(base_layers(model)))
    total = len(stack)
    short = first_layers(model, 1)
    ids = torch.tensor([ROWS[2]])
    with torch.no_grad():
        expected = short(ids).logits
        for layer in list(stack)[1:]:
            layer.forward = lambda hidden, *args, **kwargs: hidden
        torch.testing.assert_close(model(ids).logits, expected)
    assert short.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert (len(stack), model.config.num_hidden_layers) == (total, total)


def base_layers(model: Any) -> range:
    return range(model.config.num_hidden_layers)


def test_early_exit_drafts(target: Any) -> None:
    drafter = EarlyExit(target, layers=1, max_drafts=2, codegen="eager")
    drafter.start(ROWS)
    assert drafter.propose(2).tokens.tolist() == [greedy(first_layers(target, 1), row, 2) for row in ROWS]


class Head(nn.Module):
    """EAGLE-style head with random weights: a projection of feature and embedding, and attention over its own K and V."""

    def __init__(self, embed: nn.Module, size: int, slots: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.join = embed, nn.Linear(2 * size, size)
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.size, self.slots, self.read = size, slots, 0

    def forward(self, tokens: Tensor, hidden: Tensor, start: int, row: int) -> Tensor:
        x = self.join(torch.cat([self.embed(tokens), hidden], -1))[0]
        keys, values = self.kept.setdefault(row, (torch.zeros(self.slots, self.size), torch.zeros(self.slots, self.size)))
        end = start + len(x)
        keys[start:end], values[start:end] = self.k(x), self.v(x)
        self.read += len(x)
        places = torch.arange(start, end)
        scores = self.q(x) @ keys[1:end].T / self.size**0.5
        scores = scores.masked_fill(torch.arange(1, end)[None] > places[:, None], -torch.inf)
        return (x + scores.softmax(-1) @ values[1:end])[None]


class HeadLoop:
    """Runs a draft head beside a target without a cache: hands over features as a loop does."""

    def __init__(self, target: Any, drafter: DraftHead, rows: Sequence[Sequence[int]]) -> None:
        self.target, self.drafter = target, drafter
        drafter.start(rows)
        self.given = [0] * len(rows)
        self.observe()

    @torch.no_grad()
    def observe(self) -> None:
        hidden = []
        for at, row in enumerate(self.drafter.rows):
            found = self.target.model(torch.tensor([row])).last_hidden_state[0] if row else torch.zeros(0)
            hidden.append(found[self.given[at] : len(row) - 1])
            self.given[at] = max(self.given[at], len(row) - 1)
        self.drafter.observe(hidden)


def test_draft_head_reads_each_feature_once_and_forgets_what_was_rejected(target: Any) -> None:
    torch.manual_seed(0)
    size = target.config.hidden_size

    def fresh() -> tuple[Head, DraftHead]:
        head = Head(target.get_input_embeddings(), size)
        return head, DraftHead(head, target.get_output_embeddings(), max_drafts=3)

    head, drafter = fresh()
    assert isinstance(drafter, Drafter)
    loop = HeadLoop(target, drafter, ROWS)
    for new, kept, back in (
        (None, None, None),
        ([[4, 5], [6], [7, 8, 9]], [1, 0, 2], None),
        ([[1], [2, 3], [4]], [0, 1, 0], None),
        ([[9], [8], [7]], [0, 0, 0], [2, 0, 1]),
        ([[3, 3], [4], [5]], [1, 0, 0], None),
    ):
        if back is not None:
            drafter.retract(back)
            loop.given = [min(given, len(row)) for given, row in zip(loop.given, drafter.rows)]
        if new is not None and kept is not None:
            drafter.accept(new, kept)
            loop.observe()
        read = head.read
        draft = drafter.propose(3)
        _, other = fresh()
        HeadLoop(target, other, drafter.rows)
        assert draft.tokens.tolist() == other.propose(3).tokens.tolist()
        assert list(draft.counts) == [3, 3, 3]
        if new is not None and back is None:
            # New tokens of each row, and two of the three drafts.
            assert head.read - read == sum(len(run) + 2 for run in new)


def test_draft_head_that_knows_the_target(target: Any) -> None:
    """A head that returns the target's own features drafts what the target generates: features and tokens are aligned."""
    rows: list[list[int]] = []

    @torch.no_grad()
    def oracle(tokens: Tensor, hidden: Tensor, start: int, row: int) -> Tensor:
        rows[row][start:] = tokens[0].tolist()
        features = target.model(torch.tensor([rows[row]])).last_hidden_state
        if start < len(ROWS[row]):
            torch.testing.assert_close(hidden, features[:, start - 1 : start - 1 + tokens.shape[1]], rtol=0, atol=1e-5)
        return features[:, start:]

    rows += [list(row) for row in ROWS]
    drafter = DraftHead(oracle, target.get_output_embeddings(), max_drafts=3)
    HeadLoop(target, drafter, ROWS)
    assert drafter.propose(3).tokens.tolist() == [greedy(target, row, 3) for row in ROWS]


def test_draft_head_without_hidden_states_says_so(target: Any) -> None:
    drafter = DraftHead(Head(target.get_input_embeddings(), 64), target.get_output_embeddings())
    drafter.start(ROWS)
    with pytest.raises(OptionsError, match=r"row 0 has 3 tokens, and hidden states of 0.*observe\(\)"):
        drafter.propose(3)


def test_scripted() -> None:
    drafter = Scripted([[[1, 2], [3]], [[], [4, 5]]])
    drafter.start([[7], [8]])
    assert (drafter.propose(8).tokens.tolist(), drafter.max_drafts) == ([[1, 2], [0, 0]], 2)
    drafter.accept([[1], [2]], [1, 0])
    assert list(drafter.propose(1).counts) == [1, 1]
    assert drafter.propose(8).tokens.shape == (2, 0)
    called = Scripted(lambda row: [row[-1] + 1] * 3, max_drafts=2)
    called.start([[7], [8]])
    assert called.propose(8).tokens.tolist() == [[8, 8], [9, 9]]
    tree = Scripted(lambda row: [1, 2, 3], parents=[-1, -1, 0])
    tree.start([[7]])
    assert tree.propose(2).parents == [-1, -1]
    assert tree.propose(8).parents == [-1, -1, 0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model: PromptLookup(max_drafts=0), r"max_drafts must lie in 1\.\.31"),
        (lambda model: PromptLookup(min_ngram=4), "min_ngram <= max_ngram"),
        (lambda model: PromptLookup(branches=9), "branches must lie in"),
        (lambda model: EarlyExit(model, layers=2), r"layers must lie in 1\.\.1 \(the model has 2\)"),
        (lambda model: EarlyExit(nn.Linear(2, 2)), "needs a transformers causal LM"),
        (lambda model: AssistantModel(model, sampler="greedy"), "sampler must be a Sampler"),
        (lambda model: make_drafter("medusa"), "drafter must be 'prompt_lookup', 'early_exit'"),
        (lambda model: make_drafter(model), "an object with max_drafts, start, propose"),
        (lambda model: Draft(torch.zeros(1, 2), [2]), "must be int64"),
        (lambda model: Draft(torch.zeros(1, 2, dtype=torch.int64), [3]), "Draft.counts"),
        (lambda model: Draft(torch.zeros(1, 2, dtype=torch.int64), [2], parents=[0, -1]), "Draft.parents"),
        (lambda model: Draft(torch.zeros(1, 2, dtype=torch.int64), [2], probs=torch.zeros(1, 3, 4)), "Draft.probs"),
        (lambda model: Scripted([[[1]]]).start([[1], [2]]), "given for 1 rows, the batch has 2"),
    ],
)
def test_bad_arguments(target: Any, make: Any, text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        make(target)


def test_names() -> None:
    model = build("llama", "sdpa")
    assert isinstance(make_drafter("prompt_lookup"), PromptLookup)
    assert isinstance(make_drafter("early_exit", model), EarlyExit)
    given = Scripted([[[1]]])
    assert make_drafter(given) is given


@pytest.mark.parametrize("width", [VOCAB - 8, VOCAB + 8])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_assistant_with_padded_logits(target: Any, width: int, sampled: bool, uncompiled: None) -> None:
    """Models of one family pad their logits to different widths; what is drafted exists for the target."""
    assistant = build("llama", "sdpa", seed=2, vocab_size=width)
    if width > VOCAB:
        # Its favourites are tokens that the target does not have.
        assistant.lm_head.bias = nn.Parameter(torch.where(torch.arange(width) < VOCAB, 0.0, 100.0))
    drafter = AssistantModel(assistant, max_drafts=3, sampler=Sampler(True, seed=1) if sampled else None)
    drafter.vocabulary = VOCAB
    drafter.start(ROWS)
    draft = drafter.propose(3)
    assert int(draft.tokens.max()) < VOCAB
    if sampled:
        assert draft.probs is not None and draft.probs.shape[-1] == VOCAB
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(draft.probs.shape[:2]))


def test_first_layers_of_a_model_with_another_forward(target: Any) -> None:
    model = build("llama", "sdpa", seed=1)
    with sc.attach(model):
        short = first_layers(model, 1)
        assert "forward" not in short.__dict__
    model.forward = model.forward
    with pytest.raises(OptionsError, match="replaced on the instance"):
        first_layers(model, 1)


def test_a_head_waits_for_the_second_token(target: Any) -> None:
    drafter = DraftHead(Head(target.get_input_embeddings(), 64), target.get_output_embeddings())
    drafter.start([[5]])
    assert drafter.propose(3).counts == [0]


EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


@pytest.mark.parametrize("mode", ["exact", "audited"])
def test_the_head_of_the_docs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("draft_head")
    model = endless()
    prompts = [ROWS[0], [5, *ROWS[1], 7]]
    plan = sc.SparsityPlan(attention=sc.AttentionPlan(budget=16, block_size=8), audit=sc.AuditPlan(window=6, adapt=False))
    out = example.generate(model, prompts, 12, mode=mode, plan=plan, codegen="eager")
    assert out.tokens == greedy_tokens(model, prompts, 12)
    assert out.metrics.to_dict()["total"]["drafted"] > 0


def test_the_drafter_of_the_docs() -> None:
    """The code in docs/drafters.md, as it stands there."""
    text = (EXAMPLES.parent / "drafters.md").read_text(encoding="utf-8")
    code = next(part for part in text.split("```python\n")[1:] if "class LastTwo" in part).split("```")[0]
    model = endless()
    names = {"sc": sc, "model": model, "prompts": ROWS}
    exec(code.replace("max_new_tokens=64", "max_new_tokens=12, codegen='eager'"), names)
    out: Any = names["out"]
    assert out.tokens == greedy_tokens(model, ROWS, 12)
    assert out.metrics.to_dict()["total"]["drafted"] > 0
