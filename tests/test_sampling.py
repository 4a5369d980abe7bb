"""Exact and audited speculative sampling on toy vocabularies: the tokens that come out are distributed as the target's own."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.drafters import Draft
from spec_compile.errors import OptionsError
from spec_compile.sampling import Sampler, Verdict

SAMPLES, VOCAB, DRAFTS, BANNED = 50_000, 6, 2, 4
SETTINGS = [(0.3, 1.0), (1.0, 1.0), (1.5, 1.0), (1.0, 0.9)]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Verdicts of 50,000 rows are many small lists: collecting in their midst takes longer than the rest."""
    gc.disable()
    yield
    gc.enable()


def table(seed: int, scale: float = 1.5) -> Tensor:
    """Logits ``[V, V]`` of a toy model that looks at the last token only."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def no_banned_token(ids: Tensor, scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[:, BANNED] = -torch.inf
    return scores


def warped(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """The law of the toy model by transformers' own warpers, after the ban: what tokens are held against."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, no_banned_token(logits, logits))
    return (TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores).double().softmax(-1)


def chi_square(found: Tensor, law: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom of counts against a law; cells of less than 5 expected are pooled."""
    expected = law * found.sum()
    assert found[law == 0].sum() == 0, "a token of probability 0 came out"
    small = expected < 5
    cells = [(float(f), float(e)) for f, e in zip(found[~small], expected[~small])]
    if expected[small].sum() > 0:
        cells.append((float(found[small].sum()), max(float(expected[small].sum()), 1.0)))
    return sum((f - e) ** 2 / e for f, e in cells), len(cells) - 1


def check_law(first: Tensor, second: Tensor, law: Tensor, root: Tensor) -> None:
    """Pairs ``(first, second)``, with -1 for no second token, against the chain that starts in ``root``."""
    pairs = torch.full((VOCAB + 1, VOCAB + 1), 0.0)
    pairs.view(-1).scatter_add_(0, first * (VOCAB + 1) + second.clamp(min=-1).remainder(VOCAB + 1), torch.ones(len(first)))
    value, freedom = chi_square(pairs.sum(1)[:VOCAB], root)
    assert value < critical(freedom), f"first token: chi-square {value:.1f} of {freedom} degrees of freedom"
    for token in range(VOCAB):
        counts = pairs[token, :VOCAB]
        if counts.sum() > 500:
            value, freedom = chi_square(counts, law[token])
            assert value < critical(freedom), f"after {token}: chi-square {value:.1f} of {freedom} degrees of freedom"


def critical(freedom: int) -> float:
    """Chi-square that a right law passes but once in 100,000 (Wilson and Hilferty's approximation)."""
    if freedom == 0:
        return 1e-9
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def followed(verdict: Verdict) -> tuple[Tensor, Tensor]:
    first = torch.tensor([run[0] for run in verdict.kept])
    second = torch.tensor([run[1] if len(run) > 1 else -1 for run in verdict.kept])
    return first, second


class Toy:
    """Target, drafter and sparse model as tables, over one batch of :data:`SAMPLES` rows that all end in token 0."""

    def __init__(self, temperature: float, top_p: float, seed: int = 1) -> None:
        self.target = no_banned_token(table(1), table(1))
        self.drafter = (table(2) * 0.5 + self.target.nan_to_num(neginf=0.0)).softmax(-1)
        # Sparse logits at each row depend on the last draft of the step, as a shared selection of blocks makes them.
        self.sparse = torch.stack([no_banned_token(t, t) for t in (self.target + table(10 + i, 1.0) for i in range(VOCAB))])
        self.law = warped(table(1), temperature, top_p)
        self.sampler = Sampler(True, temperature, 0, top_p, seed=seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.prefixes: Sequence[Sequence[int]] = [[0]] * SAMPLES

    def draft(self, drawn: bool) -> Draft:
        last = torch.zeros(SAMPLES, dtype=torch.int64)
        tokens, probs = [], []
        for _ in range(DRAFTS):
            law = self.drafter[last]
            last = torch.multinomial(law, 1, generator=self.gen)[:, 0] if drawn else law.argmax(-1)
            tokens.append(last)
            probs.append(law)
        counts = (torch.arange(SAMPLES) % (DRAFTS + 1)).tolist() if drawn else [DRAFTS] * SAMPLES
        return Draft(torch.stack(tokens, 1), counts, probs=torch.stack(probs, 1) if drawn else None)

    def logits(self, tokens: Tensor, model: Tensor | None = None) -> Tensor:
        """``[B, N + 1, V]`` at token 0 and after each of ``tokens``."""
        before = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.int64), tokens], 1)
        if model is None:
            return self.target[before]
        return model[tokens[:, -1:].expand_as(before), before]


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy_drafter", "sampling_drafter"])
@pytest.mark.parametrize("given_draft", [False, True])
def test_exact(temperature: float, top_p: float, drawn: bool, given_draft: bool) -> None:
    if given_draft and not drawn:
        pytest.skip("drafts chosen without chance are given anyway")
    toy = Toy(temperature, top_p)
    draft = toy.draft(drawn)
    verdict = toy.sampler.verify(toy.logits(draft.tokens), draft, toy.prefixes, given_draft=given_draft)
    check_law(*followed(verdict), toy.law, toy.law[0])
    assert max(len(path) for path in verdict.path) == DRAFTS
    assert all(len(path) <= count for path, count in zip(verdict.path, draft.counts))


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy_drafter", "sampling_drafter"])
def test_audited(temperature: float, top_p: float, drawn: bool) -> None:
    """A sparse step whose logits depend on its drafts, audited by the dense model."""
    toy = Toy(temperature, top_p)
    first, second = audited(toy, toy.draft(drawn), given_draft=True)
    check_law(first, second, toy.law, toy.law[0])


def audited(toy: Toy, draft: Draft, given_draft: bool) -> tuple[Tensor, Tensor]:
    logits = toy.logits(draft.tokens, toy.sparse)
    step = toy.sampler.verify(logits, draft, toy.prefixes, given_draft=given_draft)
    assert step.probs is not None
    counts = [len(run) for run in step.kept]
    tokens = torch.tensor([[*run, *[0] * (DRAFTS + 1 - len(run))] for run in step.kept])
    # Row i of a chain judged pending token i.
    verdict = toy.sampler.audit(toy.logits(tokens), Draft(tokens, counts, probs=step.probs), toy.prefixes)
    assert 0 < sum(len(path) < count for path, count in zip(verdict.path, counts)) < SAMPLES, "the audit never had to decide"
    return followed(verdict)


def test_audit_of_drafts_not_taken_as_given_is_not_exact() -> None:
    """The trap of the derivation: the usual rule for drawn drafts under sparse logits that depend on them misses the law."""
    toy = Toy(1.0, 1.0)
    with pytest.raises(AssertionError, match="chi-square"):
        check_law(*audited(toy, toy.draft(True), given_draft=False), toy.law, toy.law[0])


@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_tree(temperature: float, top_p: float) -> None:
    toy = Toy(temperature, top_p)
    order = toy.target[0].argsort(descending=True)
    tokens = torch.stack([order[0], order[1], toy.target[order[0]].argmax(), order[0], order[2]]).expand(SAMPLES, 5)
    draft = Draft(tokens, [5] * SAMPLES, parents=[-1, -1, 0, 1, -1])
    verdict = toy.sampler.verify(toy.logits(tokens), draft, toy.prefixes)
    check_law(*followed(verdict), toy.law, toy.law[0])
    paths = {tuple(path) for path in verdict.path}
    assert {(0,), (0, 2), (1,)} <= paths <= {(), (0,), (1,), (4,), (0, 2), (1, 3)}


def test_one_seed_for_drafter_and_target() -> None:
    """A drafter's stream is split off: it is not the one of the sampler that it was made from, and reproducible."""
    toy = Toy(1.0, 1.0, seed=7)
    sampler = toy.sampler.for_drafts()
    law = toy.drafter[torch.zeros(SAMPLES, dtype=torch.int64)]
    tokens = sampler.draw(law)
    assert torch.equal(tokens, Sampler(True, seed=7).for_drafts().draw(law))
    assert not torch.equal(tokens, Sampler(True, seed=7).draw(law))
    draft = Draft(tokens[:, None], [1] * SAMPLES, probs=law[:, None])
    verdict = toy.sampler.verify(toy.logits(draft.tokens), draft, toy.prefixes)
    check_law(*followed(verdict), toy.law, toy.law[0])


def test_a_wrong_law_is_caught() -> None:
    """The check itself: drafts taken unseen give the drafter's law."""
    toy = Toy(1.0, 1.0)
    toy.drafter[:, BANNED] = 0
    drawn = toy.draft(True).tokens
    with pytest.raises(AssertionError, match="chi-square"):
        check_law(drawn[:, 0], drawn[:, 1], toy.law, toy.law[0])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_banned_token_never_appears(do_sample: bool, drawn: bool) -> None:
    """A processor bans what the target wants most and the drafter always proposes; its prefix is right at each position."""
    seen = set()

    def ban(ids: Tensor, scores: Tensor) -> Tensor:
        seen.add(tuple(ids[0].tolist()))
        return no_banned_token(ids, scores)

    rows = 200
    sampler = Sampler(do_sample, 1.5, logits_processor=[ban], seed=0)
    logits = torch.zeros(rows, DRAFTS + 1, VOCAB)
    logits[..., BANNED] = 9.0
    tokens = torch.full((rows, DRAFTS), BANNED)
    tokens[: rows // 2, 0] = 1
    probs = torch.nn.functional.one_hot(tokens, VOCAB).float() if drawn else None
    verdict = sampler.verify(logits, Draft(tokens, [DRAFTS] * rows, probs=probs), [[7, row] for row in range(rows)])
    assert BANNED not in {token for run in verdict.kept for token in run}
    assert any(len(run) > 1 for run in verdict.kept) == do_sample
    assert seen >= {(7, 3), (7, 3, 1), (7, 3, 1, BANNED), (7, 150, BANNED)}


def test_processors_of_trees_see_their_own_branch() -> None:
    seen = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    draft = Draft(torch.tensor([[1, 2, 3, 4]]), [4], parents=[-1, 0, -1, 2])
    Sampler(logits_processor=[watch]).verify(torch.zeros(1, 5, VOCAB), draft, [[8, 9]])
    assert seen == [[8, 9], [8, 9, 1], [8, 9, 1, 2], [8, 9, 3], [8, 9, 3, 4]]


def test_end_tokens_are_banned_per_position() -> None:
    sampler = Sampler()
    sampler.forbid_end_before([5, 2], lengths=[5, 3])
    logits = torch.zeros(2, 4, VOCAB)
    logits[..., 5], logits[..., 2], logits[..., 1] = 3.0, 2.0, 1.0
    before = logits.clone()
    draft = Draft(torch.tensor([[1, 1, 5], [1, 1, 1]]), [3, 3])
    verdict = sampler.verify(logits, draft, [[0, 0, 0], [0, 0, 0]])
    assert verdict.kept == [[1, 1, 5, 5], [5]]
    assert torch.equal(logits, before), "the caller's logits were changed"


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.5), (4, 0.8), (VOCAB + 5, 0.999), (1, 1.0)])
def test_warpers_agree_with_transformers(top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0] = 0.0
    expected = TemperatureLogitsWarper(0.7)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    found = Sampler(True, 0.7, top_k, top_p, seed=0).distribution(logits[:, None], [[]] * 64)[:, 0]
    torch.testing.assert_close(found, expected.softmax(-1), rtol=0, atol=1e-6)


def test_greedy_chain_and_tree() -> None:
    logits = torch.zeros(2, 4, VOCAB)
    logits[:, 0, 3] = logits[:, 1, 1] = logits[:, 2, 5] = logits[:, 3, 2] = 1.0
    draft = Draft(torch.tensor([[3, 1, 0], [3, 1, 5]]), [3, 2])
    verdict = Sampler().verify(logits, draft, [[], []], margins=True)
    assert (verdict.path, verdict.token, verdict.kept) == ([[0, 1], [0, 1]], [5, 5], [[3, 1, 5], [3, 1, 5]])
    assert verdict.margins == [[1.0] * 3, [1.0] * 3]
    assert verdict.rows(0) == [0, 1, 2]
    # Nodes 0 and 1 hold the same token; the first child that meets the choice is taken.
    tree = Draft(torch.tensor([[3, 3, 1], [4, 3, 5]]), [3, 3], parents=[-1, -1, 1])
    verdict = Sampler().verify(logits, tree, [[], []])
    assert (verdict.path, verdict.kept) == ([[0], [1, 2]], [[3, 1], [3, 5, 2]])


def test_ties_go_to_the_lowest_id_and_padding_rows_are_ignored() -> None:
    logits = torch.zeros(1, 5, VOCAB)
    verdict = Sampler().verify(logits, Draft(torch.tensor([[0, 0]]), [2]), [[]])
    assert verdict.kept == [[0, 0, 0]]
    assert Sampler().distribution(logits[:, :1], [[]])[0, 0].tolist() == [1.0] + [0.0] * (VOCAB - 1)


def test_audit_of_greedy_tokens() -> None:
    logits = torch.zeros(2, 4, VOCAB)
    logits[:, 0, 3] = logits[:, 1, 1] = logits[:, 2, 5] = logits[:, 3, 2] = 1.0
    verdict = Sampler().audit(logits, Draft(torch.tensor([[3, 1, 5], [3, 2, 5]]), [3, 3]), [[], []])
    assert (verdict.path, verdict.token) == ([[0, 1, 2], [0]], [2, 1])


def test_seeds_reproduce_and_leave_the_global_generator_alone() -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0))
    draft = Draft(logits[:, :2].argmax(-1), [2] * 4, probs=logits[:, :2].softmax(-1))
    before = torch.random.get_rng_state()
    runs = []
    for seed in (5, 5, 6, None):
        sampler = Sampler(True, seed=seed)
        runs.append([sampler.verify(logits, draft, [[]] * 4).kept for _ in range(8)])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": 0.0}, "temperature must be above 0.*do_sample=False"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"logits_processor": [3]}, "LogitsProcessorList"),
    ],
)
def test_bad_settings(settings: dict[str, object], text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        Sampler(True, **settings)  # type: ignore[arg-type]


def test_bad_logits_and_audits() -> None:
    draft = Draft(torch.zeros(1, 2, dtype=torch.int64), [2])
    with pytest.raises(OptionsError, match=r"T > 2 drafts, got \[1, 2, 6\]"):
        Sampler().verify(torch.zeros(1, 2, VOCAB), draft, [[]])
    with pytest.raises(OptionsError, match="a chain with the sparse distributions"):
        Sampler(True).audit(torch.zeros(1, 3, VOCAB), draft, [[]])


@pytest.mark.parametrize("seed", ["a", 1 << 64, True, 1.5])
def test_seeds_that_no_generator_takes(seed: Any) -> None:
    with pytest.raises(OptionsError, match="seed must be an integer of 64 bits"):
        Sampler(True, 1.0, 0, 1.0, seed=seed)
