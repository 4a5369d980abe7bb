"""Rules that take experts away: the operator, its reference and its kernel against plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_compile.kernels import library
from spec_compile.kernels.moe_limit import moe_limit_reference, why_no_limit_kernel

IMPLEMENTATIONS: dict[str, Any] = {"reference": moe_limit_reference, "operator": torch.ops.spec_compile.moe_limit_v1.default}
if find_spec("triton"):
    from spec_compile.kernels.moe_limit_triton import moe_limit_triton

    IMPLEMENTATIONS["triton"] = moe_limit_triton
CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Rules:
    """Numbers of the operator, in its order."""

    top_k: int = 0
    skip: int = 0
    beta: float = 0.0
    ratio: float = 0.0
    expert_budget: int = 0
    substitute: bool = False
    renormalise: bool = False


Row = tuple[list[int], list[float]]


def expected(
    rows: list[Row], rules: Rules, experts: int, logits: Any = None, bias: Any = None, score: str = "softmax"
) -> list[Row]:
    """The rules, one entry after the other."""
    kept: list[dict[int, int]] = []  # of each row, rank by kept place
    for choice, weight in rows:
        order = sorted((i for i, e in enumerate(choice) if 0 <= e < experts), key=lambda i: (-weight[i], i))
        total = sum(weight[i] for i in order)
        skip = min(rules.skip, len(choice) - 1)
        low = order[max(0, len(order) - skip) :]
        share = sum(weight[i] for i in low) / total if total else math.nan
        drop = {*low} if share < rules.beta else set()
        drop |= {*order[rules.top_k :]} if rules.top_k else set()
        drop |= {i for i in order if weight[i] < rules.ratio * weight[order[0]]}
        kept.append({i: rank for rank, i in enumerate(order) if i not in drop or rank == 0})
    held = set(range(experts))
    if rules.expert_budget:
        votes: dict[int, float] = {}
        for (choice, weight), mine in zip(rows, kept):
            for i in mine:
                votes[choice[i]] = votes.get(choice[i], 0.0) + weight[i]
        held = {choice[i] for (choice, _), mine in zip(rows, kept) for i, rank in mine.items() if rank == 0}
        for e in sorted(votes, key=lambda e: (-votes[e], e)):
            if len(held) < rules.expert_budget:
                held.add(e)
    result = []
    for n, ((choice, weight), mine) in enumerate(zip(rows, kept)):
        new_choice = [e if not 0 <= e < experts else -1 for e in choice]
        new_weight = [w if not 0 <= e < experts else 0.0 for e, w in zip(choice, weight)]
        taken = {choice[i] for i in mine}
        for i in sorted(mine, key=mine.__getitem__):
            if choice[i] in held:
                new_choice[i], new_weight[i] = choice[i], weight[i]
            elif rules.substitute:
                powers = [math.exp(x - max(logits[n])) if score == "softmax" else 1 / (1 + math.exp(-x)) for x in logits[n]]
                if score == "softmax":
                    powers = [p / sum(powers) for p in powers]
                contest = logits[n] if bias is None else [p + b for p, b in zip(powers, bias)]
                free = sorted(held - taken, key=lambda e: (-contest[e], e))
                if free:
                    taken.add(free[0])
                    routed = [j for j, e in enumerate(choice) if 0 <= e < experts]
                    scale = sum(weight[j] for j in routed) / sum(powers[choice[j]] for j in routed)
                    new_choice[i], new_weight[i] = free[0], powers[free[0]] * scale
        left = sum(w for e, w in zip(new_choice, new_weight) if 0 <= e < experts)
        if rules.renormalise and new_choice != choice and left > 0:
            total = sum(w for e, w in zip(choice, weight) if 0 <= e < experts)
            new_weight = [w * total / left if 0 <= e < experts else w for e, w in zip(new_choice, new_weight)]
        result.append((new_choice, new_weight))
    return result


def run(
    rows: list[Row], rules: Rules, experts: int, name: str = "reference", gate: int = 1, logits: Any = None, bias: Any = None,
    score: str = "softmax", kind: torch.dtype = torch.int64,
) -> list[Row]:  # fmt: skip
    device = "cuda" if CUDA and name != "reference" else "cpu"

    def on(x: Any, dtype: torch.dtype = torch.float32) -> Any:
        return None if x is None else torch.tensor(x, dtype=dtype, device=device)

    choice, weight = on([c for c, _ in rows], kind), on([w for _, w in rows])
    words = (choice, weight, on(logits), on(bias), on([gate], torch.int64), score, experts, *vars(rules).values())
    ids, out = IMPLEMENTATIONS[name](*words)
    assert (ids.dtype, out.dtype, ids.shape, out.shape) == (kind, torch.float32, choice.shape, choice.shape)
    return list(zip(ids.tolist(), out.tolist()))


def check(rows: list[Row], rules: Rules, experts: int, name: str = "reference", **more: Any) -> list[Row]:
    found = run(rows, rules, experts, name, **more)
    more.pop("kind", None)
    for (choice, weight), (wanted_choice, wanted_weight) in zip(found, expected(rows, rules, experts, **more)):
        assert choice == wanted_choice
        assert weight == pytest.approx(wanted_weight, rel=1e-5, abs=1e-7)
    return found


each = pytest.mark.parametrize("name", list(IMPLEMENTATIONS))
# Weights in sixteenths: sums and shares are exact, and so are comparisons at the edge.
ROW: Row = ([7, 2, 5, 0], [0.5, 0.25, 0.1875, 0.0625])


def choices(found: list[Row]) -> list[list[int]]:
    return [choice for choice, _ in found]


@each
@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (Rules(top_k=1), [7, -1, -1, -1]),
        (Rules(top_k=3), [7, 2, 5, -1]),
        (Rules(top_k=4), [7, 2, 5, 0]),
        (Rules(top_k=9), [7, 2, 5, 0]),
        # The two lowest hold exactly a quarter: dropped only below it, and both or none.
        (Rules(skip=2, beta=0.25), [7, 2, 5, 0]),
        (Rules(skip=2, beta=0.2500001), [7, 2, -1, -1]),
        (Rules(skip=1, beta=0.2500001), [7, 2, 5, -1]),
        (Rules(skip=3, beta=0.5), [7, 2, 5, 0]),
        (Rules(skip=3, beta=0.51), [7, -1, -1, -1]),
        (Rules(skip=4, beta=0.51), [7, -1, -1, -1]),
        (Rules(skip=0, beta=1.0), [7, 2, 5, 0]),
        (Rules(ratio=0.5), [7, 2, -1, -1]),
        (Rules(ratio=0.5000001), [7, -1, -1, -1]),
        (Rules(ratio=0.125), [7, 2, 5, 0]),
        (Rules(ratio=1.0), [7, -1, -1, -1]),
        (Rules(ratio=2.0), [7, -1, -1, -1]),
        # Rules for rows look at what the model chose, not at what another rule left.
        (Rules(top_k=3, skip=2, beta=0.25), [7, 2, 5, -1]),
        (Rules(top_k=2, skip=1, beta=0.0624), [7, 2, -1, -1]),
        (Rules(expert_budget=2), [7, 2, -1, -1]),
        (Rules(expert_budget=3, ratio=0.2), [7, 2, 5, -1]),
        (Rules(expert_budget=4), [7, 2, 5, 0]),
    ],
    ids=str,
)
def test_one_row(name: str, rules: Rules, wanted: list[int]) -> None:
    for renormalise in (False, True):
        found = check([ROW], replace(rules, renormalise=renormalise), 8, name)
        assert choices(found) == [wanted]
        assert (
            sum(found[0][1]) == pytest.approx(1.0)
            if renormalise
            else found[0][1] == [w if e >= 0 else 0.0 for e, w in zip(wanted, ROW[1])]
        )


@each
def test_weights_in_any_order_and_ties(name: str) -> None:
    """DeepSeek's choices come in the order of biased scores: what counts is weights, ties going to the first."""
    rows = [([3, 1, 2, 0], [0.25, 0.375, 0.25, 0.125]), ([4, 5, 6, 7], [0.25, 0.25, 0.25, 0.25])]
    found = check(rows, Rules(top_k=2), 8, name)
    assert choices(found) == [[3, 1, -1, -1], [4, 5, -1, -1]]
    assert choices(check(rows, Rules(skip=2, beta=0.51), 8, name)) == [[3, 1, -1, -1], [4, 5, -1, -1]]
    assert choices(check(rows, Rules(top_k=1), 8, name)) == [[-1, 1, -1, -1], [4, -1, -1, -1]]


@each
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_the_budget_is_one_set_for_all_rows(name: str, kind: torch.dtype) -> None:
    rows = [
        ([0, 1, 2], [0.5, 0.375, 0.125]),
        ([0, 3, 2], [0.5, 0.25, 0.25]),
        ([0, 3, 4], [0.625, 0.25, 0.125]),
    ]
    # Sums: 0 has 1.625, 3 has 0.5, 1 and 2 have 0.375 each (the tie goes to 1), 4 has 0.125.
    assert choices(check(rows, Rules(expert_budget=1), 8, name, kind=kind)) == [[0, -1, -1]] * 3
    assert choices(check(rows, Rules(expert_budget=2), 8, name, kind=kind)) == [[0, -1, -1], [0, 3, -1], [0, 3, -1]]
    assert choices(check(rows, Rules(expert_budget=3), 8, name, kind=kind)) == [[0, 1, -1], [0, 3, -1], [0, 3, -1]]
    assert choices(check(rows, Rules(expert_budget=4), 8, name, kind=kind)) == [[0, 1, 2], [0, 3, 2], [0, 3, -1]]
    assert run(rows, Rules(expert_budget=5, renormalise=True), 8, name, kind=kind) == rows


@each
def test_top_choices_stay_and_count(name: str) -> None:
    """Experts 4 and 5 are weak top choices: they enter first, and only top choices may pass the budget."""
    rows = [
        ([0, 1], [0.75, 0.25]),
        ([4, 1], [0.25, 0.1875]),
        ([5, 1], [0.25, 0.1875]),
    ]
    assert choices(check(rows, Rules(expert_budget=2), 8, name)) == [[0, -1], [4, -1], [5, -1]]
    assert choices(check(rows, Rules(expert_budget=3), 8, name)) == [[0, -1], [4, -1], [5, -1]]
    assert choices(check(rows, Rules(expert_budget=4), 8, name)) == [[0, 1], [4, 1], [5, 1]]


@each
def test_only_kept_choices_vote(name: str) -> None:
    """Expert 1 has the larger sum, but rows drop it by ratio; it leaves its place to 2."""
    rows = [([0, 1], [0.625, 0.25]), ([0, 1], [0.625, 0.25]), ([0, 2], [0.375, 0.3125])]
    rules = Rules(expert_budget=2, ratio=0.5)
    assert choices(check(rows, rules, 4, name)) == [[0, -1], [0, -1], [0, 2]]
    assert choices(check(rows, replace(rules, ratio=0.0), 4, name)) == [[0, 1], [0, 1], [0, -1]]


SUBSTITUTED = [
    ([0, 1, 2], [0.5, 0.25, 0.25]),
    ([0, 3, 4], [0.5, 0.3125, 0.1875]),
    ([0, 3, 5], [0.5, 0.4375, 0.0625]),
]
LOGITS = [
    [3.0, 2.0, 2.0, 1.0, 0.5, 0.0, -1.0, -1.0],
    [3.0, 0.5, 1.0, 2.5, 2.0, 0.0, 0.0, 0.0],
    [3.0, 1.0, 1.0, 2.0, 0.0, 1.5, 0.0, 0.0],
]


@each
@pytest.mark.parametrize("renormalise", [False, True])
def test_substitutes(name: str, renormalise: bool) -> None:
    rules = Rules(expert_budget=2, substitute=True, renormalise=renormalise)
    found = check(SUBSTITUTED, rules, 8, name, logits=LOGITS)
    # 0 and 3 are in: the first row's 1 becomes 3, its 2 finds nothing more; 3 is not chosen twice by the others.
    assert choices(found) == [[0, 3, -1], [0, 3, -1], [0, 3, -1]]
    found = check(SUBSTITUTED, replace(rules, expert_budget=3), 8, name, logits=LOGITS)
    # 1 comes third (a tie with 2): the other rows take it instead of what they lost.
    assert choices(found) == [[0, 1, 3], [0, 3, 1], [0, 3, 1]]


@each
def test_the_heaviest_loss_is_substituted_first(name: str) -> None:
    rows = [([0, 1, 2], [0.5, 0.1875, 0.3125]), ([0, 3, 4], [0.5, 0.5, 0.5]), ([0, 3, 4], [0.5, 0.5, 0.5])]
    logits = [[3.0, 2.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 2.0, 2.0], [3.0, 0.0, 0.0, 2.0, 2.0]]
    found = check(rows, Rules(expert_budget=3, substitute=True), 5, name, logits=logits)
    assert choices(found)[0] == [0, 3, 4]


@each
def test_choices_dropped_by_a_row_are_not_substituted(name: str) -> None:
    """Entries too light for a row stay out; only what the budget takes is replaced, also by such an expert."""
    rows = [([0, 1, 2], [0.5, 0.375, 0.125]), ([0, 2, 3], [0.5, 0.375, 0.25])]
    logits = [[2.0, 1.5, 1.0, 0.0], [2.0, 0.0, 1.5, 1.0]]
    found = check(rows, Rules(ratio=0.3, expert_budget=2, substitute=True), 4, name, logits=logits)
    assert choices(found) == [[0, 1, -1], [0, 1, -1]]
    rows[1] = ([0, 2, 3], [0.5, 0.4375, 0.25])
    found = check(rows, Rules(ratio=0.3, expert_budget=2, substitute=True), 4, name, logits=logits)
    assert choices(found) == [[0, 2, -1], [0, 2, -1]]


@each
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_substitutes_by_biased_score_weigh_without_it(name: str, score: str) -> None:
    bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0]
    rows = [([0, 1], [0.5, 0.25]), ([7, 3], [0.5, 0.25])]
    logits = [[3.0, 2.0, 1.0, 1.5, 0.0, 0.0, 0.0, -2.0], LOGITS[1]]
    found = check(rows, Rules(expert_budget=3, substitute=True), 8, name, logits=logits, bias=bias, score=score)
    assert choices(found) == [[0, 1], [7, 0]]
    rows[1] = ([7, 3], [0.5, 0.375])
    found = check(rows, Rules(expert_budget=3, substitute=True), 8, name, logits=logits, bias=bias, score=score)
    assert choices(found) == [[0, 7], [7, 3]]
    assert found[0][1][1] < 0.1
    assert choices(check(rows, Rules(expert_budget=3, substitute=True), 8, name, logits=logits, score=score))[0] == [0, 3]


@each
@pytest.mark.parametrize(("score", "low"), [("sigmoid", [-200.0] * 4), ("softmax", [0.0, 0.0, -200.0, -200.0])])
def test_substitutes_of_a_row_whose_scores_underflow_weigh_nothing(name: str, score: str, low: list[float]) -> None:
    """Chosen by the bias: neither weights nor scores have a sum to share."""
    rows, logits = [([2, 3], [0.0, 0.0]), ([0, 1], [0.75, 0.25])], [low, [3.0, 2.0, 1.0, 0.0]]
    for renormalise in (False, True):
        rules = Rules(expert_budget=2, substitute=True, renormalise=renormalise)
        found = check(rows, rules, 4, name, logits=logits, bias=[0.0, 0.0, 1.0, 2.0], score=score)
        assert found[0] == ([2, 0], [0.0, 0.0]) and found[1][0] == [0, 2]


ALL = Rules(1, 2, 1.0, 1.0, 1, True, True)


@each
def test_an_exact_step_gives_back_the_bits(name: str) -> None:
    rows = [([0, 9, -1], [0.3, math.nan, 0.1]), ([2, 2, 1], [0.7, 0.2, -0.0])]
    found = run(rows, ALL, 4, name, gate=0, logits=[[0.0] * 4] * 2)
    assert repr(found) == repr([(c, torch.tensor(w).tolist()) for c, w in rows])


@each
@pytest.mark.parametrize("rules", [Rules(3, 1, 0.05, 0.1, 3, True, True), Rules(renormalise=True)], ids=str)
def test_rows_that_lose_nothing_keep_their_bits(name: str, rules: Rules) -> None:
    rows = [([2, 0, 1], [0.3, 0.3, 0.1]), ([0, 1, 2], [0.7, 0.2, 0.1])]
    assert run(rows, rules, 4, name, logits=[[0.0] * 4] * 2) == [(c, torch.tensor(w).tolist()) for c, w in rows]


@each
def test_entries_without_an_expert_have_no_part(name: str) -> None:
    rows = [([0, 8, 3, -1], [0.25, 9.0, 0.5, 8.0]), ([-1, -5, 99, 8], [1.0, 2.0, 3.0, 4.0])]
    assert choices(check(rows, Rules(top_k=1, renormalise=True), 8, name)) == [[-1, 8, 3, -1], [-1, -5, 99, 8]]
    check(rows, Rules(skip=1, beta=0.4), 8, name)
    check(rows, Rules(expert_budget=1), 8, name)


@each
def test_a_row_without_numbers_has_no_vote_and_hides_nothing(name: str) -> None:
    rows = [([1, 0], [math.nan, math.nan]), ([2, 3], [0.5, 0.25]), ([2, 0], [0.5, 0.125])]
    found = run(rows, Rules(expert_budget=3, renormalise=True), 4, name)
    assert choices(found) == [[1, -1], [2, 3], [2, -1]]
    assert math.isnan(found[0][1][0]) and found[1][1] == [0.5, 0.25] and found[2][1] == [0.625, 0.0]


@st.composite
def cases(draw: st.DrawFn, most_rows: int, most_experts: int) -> tuple[list[Row], Rules, int, Any, Any, str]:
    experts = draw(st.integers(2, most_experts))
    k = draw(st.integers(1, min(experts, 6)))
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        choice = draw(st.lists(st.integers(0, experts - 1), min_size=k, max_size=k, unique=True))
        if draw(st.booleans()):
            choice[draw(st.integers(0, k - 1))] = draw(st.sampled_from([-1, experts]))
        rows.append((choice, [draw(st.integers(0, 16)) / 16 for _ in range(k)]))
    sixteenths = st.integers(0, 16).map(lambda x: x / 16)
    substitute = draw(st.booleans())
    rules = Rules(
        draw(st.integers(0, k + 1)), draw(st.integers(0, k)), draw(sixteenths), draw(sixteenths),
        draw(st.integers(1 if substitute else 0, experts)), substitute, draw(st.booleans()),
    )  # fmt: skip
    quarters = st.integers(-8, 8).map(lambda x: x / 4)
    logits = [draw(st.lists(quarters, min_size=experts, max_size=experts)) for _ in rows]
    bias = draw(st.none() | st.lists(st.sampled_from([0.0, 8.0, 64.0]), min_size=experts, max_size=experts))
    return rows, rules, experts, logits, bias, draw(st.sampled_from(["softmax", "sigmoid"]))


QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


def check_case(case: Any, name: str) -> None:
    rows, rules, experts, logits, bias, score = case
    if bias is not None:
        # Scores of equal logits are equal; others differ by more than rounding.
        bias = [b + e / 1024 for e, b in enumerate(bias)]
    found = check(rows, rules, experts, name, logits=logits, bias=bias, score=score)
    distinct = {e for choice, _ in found for e in choice if 0 <= e < experts}
    if rules.expert_budget:
        tops = {c[max(r, key=lambda i: (w[i], -i))] for c, w in rows if (r := [i for i, e in enumerate(c) if 0 <= e < experts])}
        assert len(distinct) <= max(rules.expert_budget, len(tops)) and tops <= distinct
    assert distinct <= {e for choice, _ in rows for e in choice}


@settings(QUICK, max_examples=150)
@given(cases(6, 12))
def test_any_rules_on_any_rows(case: Any) -> None:
    check_case(case, "reference")


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="Triton is not installed")
@settings(QUICK, max_examples=200 if CUDA else 40, phases=[Phase.explicit, Phase.generate])
@given(cases(9, 40))
def test_any_rules_on_any_rows_in_the_kernel(case: Any) -> None:
    check_case(case, "triton")


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="Triton is not installed")
@pytest.mark.parametrize(("rows", "experts", "k"), [(64, 256, 16), (17, 128, 8), (1, 100, 3)])
def test_the_kernel_at_real_sizes(rows: int, experts: int, k: int) -> None:
    gen = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts, generator=gen)
    weight, choice = logits.softmax(-1).topk(k)
    rules = Rules(0, k // 2, 0.3, 0.1, experts // 4, True, True)
    wanted = IMPLEMENTATIONS["reference"](
        choice, weight, logits, None, torch.ones(1, dtype=torch.int64), "softmax", experts, *vars(rules).values()
    )
    place = "cuda" if CUDA else "cpu"
    words = [x.to(place) for x in (choice, weight, logits)]
    found = IMPLEMENTATIONS["triton"](
        *words, None, torch.ones(1, dtype=torch.int64, device=place), "softmax", experts, *vars(rules).values()
    )
    assert torch.equal(found[0].cpu(), wanted[0])
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-5, atol=1e-7)
    assert 0 < int((wanted[0] < 0).sum()) < wanted[0].numel()


def tensors(rows: int = 3, experts: int = 8, k: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    logits = torch.randn(rows, experts)
    weight, choice = logits.softmax(-1).topk(k)
    return [choice, weight.to(dtype), logits]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    choice, weight, _ = tensors(dtype=dtype)
    gate = torch.ones(1, dtype=torch.int64)
    ids, out = library.moe_limit(choice, weight, None, None, gate, "softmax", 8, 2, 0, 0.0, 0.0, 0, False, True)
    assert out.dtype == dtype and (ids[:, 2] == -1).all() and (out[:, 2] == 0).all()
    torch.testing.assert_close(out.double().sum(-1), weight.double().sum(-1), rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@each
def test_nothing_in(name: str) -> None:
    place = "cuda" if CUDA and name != "reference" else "cpu"
    empty = torch.zeros(0, 2, dtype=torch.int64, device=place)
    gate = torch.ones(1, dtype=torch.int64, device=place)
    ids, out = IMPLEMENTATIONS[name](empty, empty.float(), None, None, gate, "softmax", 4, *vars(Rules(1)).values())
    assert ids.shape == out.shape == (0, 2)


@pytest.mark.parametrize("rules", [Rules(skip=1, beta=0.2), Rules(expert_budget=2, substitute=True, renormalise=True)], ids=str)
def test_opcheck(rules: Rules) -> None:
    gate = torch.ones(1, dtype=torch.int64)
    torch.library.opcheck(library.moe_limit, (*tensors(), torch.randn(8), gate, "sigmoid", 8, *vars(rules).values()))


def test_the_reference_never_looks_at_data() -> None:
    with FakeTensorMode():
        gate = torch.ones(1, dtype=torch.int64)
        ids, out = moe_limit_reference(*tensors(), torch.randn(8), gate, "sigmoid", 8, *vars(ALL).values())
        assert ids.shape == out.shape == (3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "tanh"}, "score must be one of"),
        ({"skip": -1}, "must not be negative"),
        ({"substitute": True}, "substitute needs expert_budget"),
        ({"substitute": True, "expert_budget": 2, "logits": None}, r"logits must be \[N, 8\]"),
        ({"substitute": True, "expert_budget": 2, "experts": 9}, r"logits must be \[N, 9\]"),
        ({"weight": torch.ones(3, 2)}, "one shape"),
        ({"choice": torch.ones(3, 3)}, "must be integer"),
    ],
)
def test_bad_calls(change: dict[str, Any], message: str) -> None:
    choice, weight, logits = tensors()
    words: dict[str, Any] = {
        "choice": choice, "weight": weight, "logits": logits, "bias": None, "gate": torch.ones(1, dtype=torch.int64),
        "score": "softmax", "experts": 8, **vars(Rules()),
    }  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match=message):
        library.moe_limit(*{**words, **change}.values())


def test_experts_that_nobody_keeps_are_not_read() -> None:
    """NaN in the weights of a dropped expert does not reach the output of the experts."""
    gate_up, down = torch.randn(4, 6, 5), torch.randn(4, 5, 3)
    gate_up[2] = down[2] = math.nan
    choice, weight = torch.tensor([[0, 2], [1, 2]]), torch.tensor([[0.75, 0.25], [0.625, 0.375]])
    gate = torch.ones(1, dtype=torch.int64)
    ids, out = library.moe_limit(choice, weight, None, None, gate, "softmax", 4, *vars(Rules(expert_budget=2)).values())
    x = torch.randn(2, 5)
    found = library.moe_experts(x, ids, out, gate_up, down, None, None, "silu", False, False)
    wanted = library.moe_experts(x, choice[:, :1], weight[:, :1], gate_up, down, None, None, "silu", False, False)
    assert torch.equal(found, wanted) and not found.isnan().any()


def test_why_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_compile.kernels import availability

    monkeypatch.setattr(availability, "why_no_triton", lambda: None)
    monkeypatch.setattr(availability, "capability", lambda device: 90)
    with FakeTensorMode():

        def on_cuda(rows: int, dtype: torch.dtype = torch.float32) -> list[Any]:
            return [
                torch.empty(rows, size, dtype=kind, device="cuda") for size, kind in ((3, torch.int64), (3, dtype), (8, dtype))
            ]

        assert why_no_limit_kernel(*on_cuda(65), 8, 0) is None
        assert "more than 64 rows share a budget" in str(why_no_limit_kernel(*on_cuda(65), 8, 4))
        assert why_no_limit_kernel(*on_cuda(64), 8, 4) is None
        assert "3 of 257 experts" in str(why_no_limit_kernel(*on_cuda(3)[:2], None, 257, 0))
        assert "float64" in str(why_no_limit_kernel(*on_cuda(3, torch.float64), 8, 0))
        assert "device" in str(why_no_limit_kernel(*on_cuda(3)[:2], torch.empty(3, 8), 8, 0))
    assert why_no_limit_kernel(*tensors(), 8, 0) == "device cpu"  # type: ignore[call-arg]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_one_captured_call_serves_both_modes() -> None:
    """The gate is read on the device: a replay follows it, and an exact step gives back the bits."""
    choice, weight, logits = (x.cuda() for x in tensors(9, 128, 8))
    gate = torch.ones(1, dtype=torch.int64, device="cuda")
    rules = Rules(0, 3, 0.2, 0.0, 24, True, True)
    words = (choice, weight, logits, None, gate, "softmax", 128, *vars(rules).values())
    sparse = [x.clone() for x in library.moe_limit(*words)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = library.moe_limit(*words)
    for _ in range(3):
        gate.fill_(0)
        graph.replay()
        assert torch.equal(found[0], choice) and torch.equal(found[1], weight)
        gate.fill_(1)
        graph.replay()
        assert torch.equal(found[0], sparse[0]) and torch.equal(found[1], sparse[1])
    assert int((sparse[0] != choice).sum()) > 0
