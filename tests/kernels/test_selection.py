"""``select_blocks`` and block representatives against plain loops in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from mask_cases import causal
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.selection import AGGREGATES, QUERIES, budget_in_blocks, select_blocks_reference, summarize_blocks

BLOCK = 16


@dataclass(frozen=True)
class Rule:
    """Everything of a selection but its tensors."""

    query: str = "first"
    aggregate: str = "max"
    heads: str = "own"
    joint: bool = False
    sink: int = 1
    recent: int = 2
    tokens: int = 48
    share: float = 0.0
    floor: int = 0
    min_context: int = 0


@dataclass
class Case:
    """Two batch rows of different length; the first is padded on the left."""

    q: Tensor
    k: Tensor
    summary: Tensor
    lists: tuple[Tensor, Tensor, Tensor]
    position: Tensor
    scores: Tensor | None = None


def case(representative: str = "mean", slots: int = 300, rows: int = 5, heads: int = 6, kv_heads: int = 2, dim: int = 8) -> Case:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, rows, dim, generator=generator)
    k = torch.randn(2, kv_heads, slots, dim, generator=generator)
    starts = (250, 170)
    mask = torch.cat([causal(start, rows, slots) for start in starts])
    mask[0, ..., :40] = False
    summary = summarize_blocks(k, BLOCK, representative)
    return Case(q, k, summary, library.live_blocks(mask, BLOCK), torch.tensor(starts))


def arguments(c: Case, rule: Rule, block_size: int, scale: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and the rest."""
    words = {name: value for name, value in vars(rule).items() if name != "min_context"}
    gate = torch.tensor([rule.min_context])
    scores = None if c.scores is None else c.scores
    return (c.q, None if scores is not None else c.summary, scores, *c.lists, c.position, gate), (
        block_size,
        scale,
        *words.values(),
    )


def select(c: Case, rule: Rule, kernel: str = "reference", block_size: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """By the reference, or by the Triton kernels (in the interpreter where there is no GPU)."""
    operands, rest = arguments(c, rule, block_size, c.q.shape[3] ** -0.5)
    if kernel == "reference":
        return select_blocks_reference(*operands, *rest)
    pytest.importorskip("triton")
    from spec_compile.kernels import block_scores_triton as score_file
    from spec_compile.kernels import select_blocks_triton as kernel_file
    from spec_compile.kernels.block_scores_triton import why_not
    from spec_compile.kernels.select_blocks_triton import select_blocks_triton
    from spec_compile.kernels.tiling import Device

    reason = None if c.scores is not None else why_not(c.q, c.summary, rule.query, rule.aggregate)
    if reason is not None:
        pytest.skip(reason)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = tuple(x if x is None else x.to(device) for x in operands)
    ids, count, full = select_blocks_triton(*operands, *rest)
    if 128 < ids.shape[2] < 1000 and not rule.joint:
        # Programs that list few places each give the same lists.
        many = Device(capability=0, processors=1 << 20, shared_bytes=100 << 10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel_file, "_PART", 128)
            if device == "cpu":
                for file in (kernel_file, score_file):
                    patch.setattr(file, "device_of", lambda device: many)
            for found, same in zip(select_blocks_triton(*operands, *rest), (ids, count, full), strict=True):
                assert torch.equal(found, same)
    return ids.cpu(), count.cpu(), full.cpu()


def expected(c: Case, rule: Rule) -> list[list[list[int]]]:
    """Chosen blocks ``[b][head]`` by loops over blocks."""
    batch, heads, rows, dim = c.q.shape
    kv_heads, group = c.k.shape[1], heads // c.k.shape[1]
    scale = dim**-0.5
    ids, count, _ = c.lists
    result = []
    for b in range(batch):
        live = ids[b, 0, : int(count[b, 0])].tolist()
        position = int(c.position[b])
        contest = [
            block for at, block in enumerate(live)
            if rule.sink <= at < len(live) - rule.recent and (block + 1) * BLOCK <= position
        ]  # fmt: skip
        scores: dict[tuple[int, int], float] = {}
        for head in range(kv_heads):
            picked = {"first": [0], "first_last": [0, rows - 1], "all": list(range(rows)), "mean": [-1]}[rule.query]
            queries = [
                c.q[b, h, row].double() if row >= 0 else c.q[b, h].double().mean(0)
                for h in range(head * group, (head + 1) * group) for row in picked
            ]  # fmt: skip
            table = []
            for query in queries:
                line = []
                for block in contest:
                    parts = c.summary[b, head, block].double()
                    if len(parts) == 1:
                        line.append(float(query @ parts[0]) * scale)
                    else:
                        line.append(float(torch.maximum(query * parts[0], query * parts[1]).sum()) * scale)
                table.append(line)
            for at, block in enumerate(contest):
                column = [line[at] for line in table]
                if rule.aggregate == "softmax":
                    column = [math.exp(line[at]) / sum(math.exp(x) for x in line) for line in table]
                scores[head, block] = max(column) if rule.aggregate == "max" else sum(column) / len(column)
        if rule.heads == "pooled":
            for block in contest:
                mean = sum(scores[head, block] for head in range(kv_heads)) / kv_heads
                scores.update({(head, block): mean for head in range(kv_heads)})
        length = len(live) * BLOCK
        if length < rule.min_context or (not rule.tokens and length <= rule.floor):
            budget = len(live)
        elif rule.tokens:
            budget = rule.tokens // BLOCK
        else:
            budget = max(0, math.floor((length - rule.floor) * rule.share + rule.floor) // BLOCK)
        order = sorted(scores, key=lambda key: (-scores[key], key))
        if rule.joint:
            won = set(order[: budget * kv_heads])
        else:
            won = {key for head in range(kv_heads) for key in [o for o in order if o[0] == head][:budget]}
        result.append([[block for block in live if block not in contest or (head, block) in won] for head in range(kv_heads)])
    return result


def chosen(found: tuple[Tensor, Tensor, Tensor]) -> list[list[list[int]]]:
    """Lists after checking order, padding and dtypes."""
    ids, count, full = found
    assert (ids.dtype, count.dtype, full.dtype) == (torch.int32, torch.int32, torch.uint8)
    assert ids.shape == full.shape and count.shape == ids.shape[:2]
    result = []
    for b, head in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        used = int(count[b, head])
        line = ids[b, head].tolist()
        assert line[used:] == [-1] * (len(line) - used) and not full[b, head, used:].any()
        assert line[:used] == sorted(set(line[:used]))
        result.append(line[:used])
    return [result[i : i + ids.shape[1]] for i in range(0, len(result), ids.shape[1])]


kernels = pytest.mark.parametrize("kernel", ["reference", "triton"])


@kernels
@pytest.mark.parametrize("representative", ["mean", "min_max"])
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize(("heads", "joint"), [("own", False), ("pooled", False), ("own", True), ("pooled", True)])
def test_equals_loops(representative: str, query: str, aggregate: str, heads: str, joint: bool, kernel: str) -> None:
    c, rule = case(representative), Rule(query, aggregate, heads, joint)
    found = chosen(select(c, rule, kernel))
    assert found == expected(c, rule)
    if heads == "pooled" and not joint:
        assert all(line == lines[0] for lines in found for line in lines)


BUDGETS = [
    Rule(tokens=0, share=0.25), Rule(tokens=0, share=0.3, floor=100), Rule(tokens=0, share=0.5, floor=200),
    Rule(tokens=16), Rule(tokens=15), Rule(sink=0, recent=0), Rule(sink=3, recent=5), Rule(sink=50, recent=0),
    Rule(sink=0, recent=50), Rule(min_context=200), Rule(min_context=10_000), Rule(tokens=100_000),
]  # fmt: skip


@pytest.mark.parametrize("rule", BUDGETS, ids=lambda rule: ",".join(f"{k}={v}" for k, v in vars(rule).items() if v)[-60:])
@pytest.mark.parametrize("joint", [False, True])
@kernels
def test_budgets_and_ends(rule: Rule, joint: bool, kernel: str) -> None:
    c, rule = case(), replace(rule, joint=joint)
    assert chosen(select(c, rule, kernel)) == expected(c, rule)


@pytest.mark.parametrize("rule", [Rule(tokens=100_000), Rule(min_context=10_000), Rule(tokens=0, share=0.1, floor=10_000)])
@kernels
def test_a_budget_that_covers_the_context_gives_the_live_lists(rule: Rule, kernel: str) -> None:
    c = case()
    for found, live in zip(select(c, rule, kernel), c.lists):
        assert torch.equal(found, live.expand(found.shape))


def test_the_law_of_the_paper() -> None:
    live = torch.tensor([10, 64, 100, 1000])
    found = budget_in_blocks(live, 64, 0, 0.1, 4096, torch.zeros(1))
    wanted = [10, 64, math.floor((6400 - 4096) * 0.1 + 4096) // 64, math.floor((64000 - 4096) * 0.1 + 4096) // 64]
    assert found.tolist() == wanted


@kernels
@pytest.mark.parametrize("value", [0.5, 0.0, torch.nan, -torch.inf])
@pytest.mark.parametrize("joint", [False, True])
def test_ties_go_to_the_lowest_block_every_time(value: float, joint: bool, kernel: str) -> None:
    c, rule = case(), Rule(joint=joint)
    c.summary.fill_(value)
    c.q.abs_()
    first = select(c, rule, kernel)
    # The first batch row is padded up to block 2, the sink; the last two live blocks are kept.
    heads = chosen(first)[0]
    assert heads == ([[2, 3, 4, 5, 6, 7, 8, 14, 15], [2, 14, 15]] if joint else [[2, 3, 4, 5, 14, 15]] * 2)
    for _ in range(100 if kernel == "reference" or torch.cuda.is_available() else 2):
        assert all(torch.equal(a, b) for a, b in zip(select(c, rule, kernel), first))


@kernels
def test_zeros_of_either_sign_tie(kernel: str) -> None:
    c = case()
    c.summary.zero_()
    c.summary[:, :, 3:5] = -0.0
    c.q.abs_()
    assert chosen(select(c, Rule(), kernel))[0] == [[2, 3, 4, 5, 14, 15]] * 2


@kernels
@pytest.mark.parametrize("blocks", [2048, 5000, 16_384] if torch.cuda.is_available() else [5000])
def test_many_blocks(blocks: int, kernel: str) -> None:
    """More than one chunk of the contest, with many ties among scores of few values."""
    generator = torch.Generator().manual_seed(3)
    q = torch.ones(1, 4, 2, 8)
    summary = torch.randint(-20, 20, (1, 2, blocks, 1, 1), generator=generator).float().expand(-1, -1, -1, -1, 8).contiguous()
    mask = causal(8 * blocks - 2, 2, 8 * blocks)
    mask[..., : 8 * 700] = False
    c = Case(q, torch.empty(1, 2, 0, 8), summary, library.live_blocks(mask, 8), torch.tensor([8 * blocks - 2]))
    ids, count, _ = select(c, Rule(tokens=8 * 1000), kernel, 8)
    for head in range(2):
        value = summary[0, head, :, 0, 0]
        contest = list(range(701, blocks - 2))
        order = sorted(contest, key=lambda block: (-value[block].item(), block))
        wanted = sorted([700, *order[:1000], blocks - 2, blocks - 1])
        assert ids[0, head, : int(count[0, head])].tolist() == wanted


def given_scores(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Scores that are hard to search among."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator)
    odd = torch.rand(shape, generator=generator)
    if kind == "ties":
        return (4 * x).round()
    if kind == "equal":
        return torch.full(shape, -3.0)
    if kind == "wide":
        # From denormals to the largest numbers.
        return x * torch.exp2(torch.randint(-148, 127, shape, generator=generator).float())
    if kind == "infinite":
        x = torch.where(odd < 0.3, -torch.inf, x)
        x = torch.where((odd > 0.3) & (odd < 0.35), torch.inf, x)
        return torch.where(odd > 0.9, torch.where(odd > 0.95, torch.nan, -torch.tensor(torch.nan)), x)
    if kind == "zeros":
        return torch.where(odd < 0.5, 0.0, -0.0) + torch.where(odd > 0.9, x, 0.0)
    assert kind == "mass"
    return torch.softmax(4 * x, -1)


@pytest.mark.parametrize("kind", ["ties", "equal", "wide", "infinite", "zeros", "mass"])
@pytest.mark.parametrize(("heads", "joint"), [("own", False), ("pooled", False), ("own", True)])
@pytest.mark.parametrize("blocks", [1, 37, 600, 2048, 16_384, 16_500] if torch.cuda.is_available() else [1, 37, 600, 16_500])
def test_the_search_agrees_with_sorting(blocks: int, heads: str, joint: bool, kind: str) -> None:
    """Given scores, few and many blocks: keys in registers, and in memory where heads compete or blocks are very many."""
    if heads == "pooled" and kind == "infinite":
        pytest.skip("a mean of infinities is no number")
    scores = given_scores(kind, (2, 2, blocks))
    start = 8 * blocks - 12
    mask = torch.cat([causal(max(start - shift, 0), 2, 8 * blocks) for shift in (0, 9)])
    mask[1, ..., : 2 * blocks] = False
    mask[0, ..., 40:48] = False
    lists, position = library.live_blocks(mask, 8), torch.tensor([max(start, 0), max(start - 9, 0)])
    c = Case(torch.ones(2, 4, 2, 8), torch.empty(2, 2, 0, 8), torch.empty(0), lists, position, scores)
    some, most = 8 * (blocks // 7), 8 * (blocks - 9)
    for tokens in (0, 8, some, most, 8 * blocks) if blocks < 100 else (some, most) if blocks < 1000 else (0, some):
        rule = Rule(heads=heads, joint=joint, tokens=tokens, share=0.0 if tokens else 1e-9)
        wanted = select(c, rule, "reference", 8)
        for found, same in zip(select(c, rule, "triton", 8), wanted, strict=True):
            assert torch.equal(found, same)


@pytest.mark.parametrize("rule", [Rule(min_context=10_000), Rule(tokens=100_000), Rule(tokens=0, share=0.1, floor=10_000)])
@pytest.mark.parametrize("pooled", [False, True])
def test_steps_that_keep_everything_are_not_scored(rule: Rule, pooled: bool) -> None:
    pytest.importorskip("triton")
    from spec_compile.kernels import block_scores_triton as kernel

    c, written = case(), []

    class Spy:
        """The score kernel, with a look at what it leaves in its output."""

        def __getitem__(self, grid: Any) -> Any:
            def launch(*operands: Any, **constants: Any) -> None:
                untouched = torch.full_like(operands[6].view(torch.int32), 7)
                operands[6].view(torch.int32).copy_(untouched)
                score[grid](*operands, **constants)
                written.append(not torch.equal(operands[6].view(torch.int32), untouched))

            return launch

    score = kernel._score_kernel
    try:
        kernel._score_kernel = Spy()
        for one in (rule, Rule()):
            one = replace(one, heads="pooled" if pooled else "own")
            assert chosen(select(c, one, "triton")) == expected(c, one)
    finally:
        kernel._score_kernel = score
    assert written == [False, True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("query", ["first", "all"])
def test_odd_scores_in_softmaxes(query: str, value: float) -> None:
    """One odd key, one key odd for some rows only, and a head of nothing but odd keys: as in the reference."""
    c = case()
    c.q.abs_().add_(0.1)
    c.summary[:, 0, 4] = value
    c.summary[:, 0, 6, ..., 1:] = 0.0
    c.summary[:, 0, 6, ..., 0] = value
    c.q[:, :, 0, 0] = 0.0
    c.summary[:, 1] = value
    for heads in ("own", "pooled"):
        rule = Rule(query=query, aggregate="softmax", heads=heads)
        for found, wanted in zip(select(c, rule, "triton"), select(c, rule), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("query", ["all", "mean"])
def test_softmaxes_over_many_tiles(query: str, odd: bool) -> None:
    """Sums of rows by one program over several tiles, and by several programs (see :func:`select`)."""
    c = case(slots=600 * BLOCK, dim=16)
    # Rows whose scores differ much in size and rise along the list: running maxima change in every tile.
    c.k += torch.linspace(0, 1, c.k.shape[2])[:, None]
    c.q[:, :, 0] *= 20
    c.summary = summarize_blocks(c.k, BLOCK, "mean")
    starts = (600 * BLOCK - 30, 511 * BLOCK)
    mask = torch.cat([causal(start, 5, 600 * BLOCK) for start in starts])
    mask[0, ..., : 40 * BLOCK] = False
    c.lists, c.position = library.live_blocks(mask, BLOCK), torch.tensor(starts)
    if odd:
        c.summary[0, 0, 100:300:7] = torch.nan
        c.summary[1, 0, 5] = torch.inf
        c.summary[1, 1, 450] = -torch.inf
    rule = Rule(query=query, aggregate="softmax", tokens=90 * BLOCK)
    for found, wanted in zip(select(c, rule, "triton"), select(c, rule), strict=True):
        assert torch.equal(found, wanted)


@kernels
def test_nan_scores_lose(kernel: str) -> None:
    c = case()
    plain = chosen(select(c, Rule(), kernel))
    best = next(block for block in plain[1][0][1:] if block in plain[1][0])
    c.summary[1, 0, best] = torch.nan
    found = chosen(select(c, Rule(), kernel))
    assert best not in found[1][0]
    assert len(found[1][0]) == len(plain[1][0])
    assert found[0] == plain[0] and found[1][1] == plain[1][1]


@kernels
def test_entries_that_are_not_committed_never_count(kernel: str) -> None:
    """Blocks with drafts, hidden blocks and blocks past the end hold garbage."""
    c = case()
    wanted = select(c, Rule(), kernel)
    for b, position in enumerate(c.position.tolist()):
        c.summary[b, :, position // BLOCK :] = torch.nan
        hidden = set(range(c.summary.shape[2])) - set(c.lists[0][b, 0].tolist())
        c.summary[b, :, sorted(hidden)] = 1e30
    for found, same in zip(select(c, Rule(), kernel), wanted):
        assert torch.equal(found, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 65, 79, 5])
def test_representatives(length: int, dtype: torch.dtype) -> None:
    k = torch.randn(2, 3, length, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    mean, bounds = summarize_blocks(k, BLOCK, "mean"), summarize_blocks(k, BLOCK, "min_max")
    assert mean.shape == (2, 3, -(-length // BLOCK), 1, 4) and bounds.shape[3] == 2 and mean.dtype == bounds.dtype == dtype
    for block in range(mean.shape[2]):
        part = k[:, :, block * BLOCK : (block + 1) * BLOCK]
        assert (mean[:, :, block, 0].double() - part.double().mean(2)).abs().max() < {2: 5e-3, 4: 1e-6}[dtype.itemsize]
        assert torch.equal(bounds[:, :, block, 0], part.amin(2)) and torch.equal(bounds[:, :, block, 1], part.amax(2))


def test_min_max_scores_bound_every_key() -> None:
    c = case("min_max")
    low, high = c.summary[:, :, :, 0], c.summary[:, :, :, 1]
    for b, head in itertools.product(range(2), range(2)):
        query = c.q[b, head * 3, 0]
        bound = torch.maximum(query * low[b, head], query * high[b, head]).sum(-1)
        exact = (c.k[b, head] @ query)[:288].view(-1, BLOCK).amax(1)
        assert (bound[:18] >= exact - 1e-5).all()


def test_opcheck() -> None:
    c = case()
    for rule in (Rule(), Rule(joint=True, query="all", aggregate="softmax"), Rule(heads="pooled")):
        operands, rest = arguments(c, rule, BLOCK, 0.3)
        torch.library.opcheck(library.select_blocks, (*operands, *rest))


@pytest.mark.parametrize(
    ("change", "text"), [({"query": "last"}, "query"), ({"aggregate": "sum"}, "aggregate"), ({"heads": "all"}, "heads")]
)
def test_bad_words_fail_while_tracing(change: dict[str, Any], text: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    c = case()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=text):
        rule = replace(Rule(), **change)
        operands, rest = arguments(c, rule, BLOCK, 0.3)
        library.select_blocks(*operands, *rest)


def test_what_the_kernels_leave_to_the_reference() -> None:
    pytest.importorskip("triton")
    from spec_compile.kernels.block_scores_triton import why_not

    c = case()
    assert why_not(c.q, c.summary, "all", "max") is None
    assert "dtypes" in str(why_not(c.q.half(), c.summary, "all", "max"))
    assert "more than 128" in str(why_not(torch.zeros(1, 60, 5, 8), c.summary, "all", "max"))
    assert "head dim 512" in str(why_not(torch.zeros(1, 6, 5, 512), c.summary, "all", "max"))


@pytest.mark.parametrize("recent", [0, 1])
@pytest.mark.parametrize("heads", ["own", "pooled"])
def test_blocks_without_a_representative_stay_out_of_a_contest_over_given_scores(heads: str, recent: int) -> None:
    """Also in a list that leaves no block out: the draft rows' own block is kept, whatever it is given."""
    c = case()
    scores = torch.randn(2, 2, 19, generator=torch.Generator().manual_seed(1))
    # Of the second sequence, which has no padding, blocks 0..10 are live, and rows begin in block 10.
    scores[1, :, 10] = -100.0
    scores[1, :, 9] = 100.0
    rule = Rule(heads=heads, sink=0, recent=recent)
    found, wanted = (select(replace(c, scores=scores), rule, kernel) for kernel in ("triton", "reference"))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    for ids, count in zip(found[0][1], found[1][1]):
        kept = ids[: int(count)].tolist()
        assert len(kept) == 4 and kept[-2:] == [9, 10]
