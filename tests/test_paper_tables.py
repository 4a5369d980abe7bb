"""The parts of the paper's tables that can be wrong unnoticed: scores, FLOPs and bytes by hand, one prefill for all, verdicts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("rich")

import spec_compile as sc
from spec_compile.models.row_cache import RowCache
from spec_compile.models.zoo import VOCAB, build

PREFIX, ROWS = 96, 8
PLAN = sc.AttentionPlan(budget=8, block_size=8, sink=1, recent=2, query="first")


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import paper_tables

    yield paper_tables
    for name in ("paper_tables", "paper_tasks", "ffn_quality", "moe_quality", "quality", "train_tiny_moe"):
        sys.modules.pop(name, None)


def subject(paper: Any, family: str) -> tuple[Any, RowCache]:
    """A random model of a family, one text of two steps, and a cache that holds its prefix."""
    model = build(family, "sdpa")
    ids = torch.randint(3, VOCAB, (PREFIX + 2 * ROWS + 1,), generator=torch.Generator().manual_seed(1))
    cache = RowCache(model, len(ids) + ROWS)
    with torch.no_grad():
        past = paper.sequence_cache(cache, 0)
        model.forward(input_ids=ids[None, :PREFIX], past_key_values=past, use_cache=True)
    return paper.Subject(family, model, None, [], [ids], PREFIX), cache


def test_scores(paper: Any) -> None:
    from paper_tasks import last_number, rouge1, share_found, with_needles

    assert share_found(" 48213.", [48213]) == 1 and share_found("148213", [48213]) == 0
    assert share_found("Oslo: 10,500 and 7", [10500, 8]) == 0.5
    assert last_number("16 - 3 = 13, so 1,300.00 dollars", 1300) == 1 and last_number("18 of 20", 18) == 0
    assert last_number("none", 18) == 0 and last_number("it is -5.", -5) == 1
    # Two words in common, "the" once: 2 * 2 / (3 + 4).
    assert rouge1("The cat. The", "the dog, a CAT") == pytest.approx(4 / 7) and rouge1("", "a") == 0
    assert with_needles([*"abcd"], ["x", "y"], [0.5, 0.0]) == "y\na\nb\nx\nc\nd"


def test_prompts_hold_their_needles(paper: Any) -> None:
    from paper_tasks import prompts
    from transformers import AutoTokenizer

    root = Path(__file__).parents[1] / "benchmarks"
    tokenizer = AutoTokenizer.from_pretrained(root / "assets" / "tiny-moe")
    tokenizer.chat_template = "{{ messages[0]['content'] }}\n"
    texts = [(root / "texts" / f"{name}.txt").read_text(encoding="utf-8") for name in ("prose", "verse")]
    found = [*prompts(tokenizer, texts, root / "data" / "gsm8k_20.jsonl", 1500, 5, 2)]
    assert [prompt.task for prompt in found] == ["needle", "multi-needle", "summary", "maths"] * 2
    again = [*prompts(tokenizer, texts, root / "data" / "gsm8k_20.jsonl", 1500, 5, 2)]
    assert [prompt.ids for prompt in again] == [prompt.ids for prompt in found]
    for prompt in found:
        told = tokenizer.decode(prompt.ids)
        hidden = [line for line in told.splitlines() if line.startswith("The magic number for") and line.endswith(".")]
        assert len(hidden) == {"needle": 1, "multi-needle": 3}.get(prompt.task, 0)
        if hidden:
            assert prompt.score("; ".join(line.split()[-1] for line in hidden)) == 1 and 1000 < len(prompt.ids) < 1700
    # 18 dollars: the first row of GSM8K.
    assert found[3].score("so 18") == 1 and found[3].score("so 19") == 0


def test_small_models_stay_within_their_context(paper: Any) -> None:
    assert paper.LENGTH == 1024
    assert paper.within(2048, 96, 1024) == 928 and paper.within(512, 96, 1024) == 512
    with pytest.raises(SystemExit, match="no room"):
        paper.within(2048, 1024, 1024)


def test_flops_and_bytes_of_a_dense_model_by_hand(paper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper._PAPER, "block_size", 8)
    one, cache = subject(paper, "llama")
    config, weight = one.model.config, 4
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    lives = [PREFIX + ROWS, PREFIX + 2 * ROWS]
    _, flops, read = paper.force(one, cache, one.texts[0], paper.Case("", "dense"))
    assert flops["attention"] == layers * 4 * ROWS * heads * dim * sum(lives)
    assert flops["ffn"] == 2 * layers * 6 * ROWS * hidden * inner and flops["moe"] == 0
    projections = layers * 2 * hidden * (heads + kv) * dim
    assert flops["other"] == 2 * 2 * ROWS * (projections + VOCAB * hidden)
    assert read["attention"] == layers * 2 * kv * dim * weight * sum(lives)
    assert read["ffn"] == 2 * layers * 3 * hidden * inner * weight
    assert read["other"] == 2 * weight * (projections + VOCAB * hidden + (2 * layers + 1) * hidden)

    plan = sc.SparsityPlan(attention=PLAN, ffn=sc.FfnPlan(budget=0.25))
    _, sparse, fewer = paper.force(one, cache, one.texts[0], paper.Case("hybrid", "", plan))
    # A sink block, one of the budget, and two at the end.
    assert sparse["attention"] == layers * sum(4 * ROWS * heads * dim * 32 + 2 * heads * dim * live / 8 for live in lives)
    assert fewer["attention"] == layers * sum(kv * dim * weight * (2 * 32 + live / 8) for live in lives)
    assert sparse["ffn"] == pytest.approx(flops["ffn"] * 1.5 / 3) and fewer["ffn"] == pytest.approx(read["ffn"] * 1.5 / 3)
    assert (sparse["other"], fewer["other"]) == (flops["other"], read["other"])
    axis, whole = paper.saved(flops, sparse, ["ffn"])
    assert axis == pytest.approx(0.5) and whole == pytest.approx(1 - sum(sparse.values()) / sum(flops.values()))


def test_experts_count_as_they_are_chosen(paper: Any) -> None:
    one, cache = subject(paper, "qwen3_moe")
    config = one.model.config
    plan = sc.SparsityPlan(moe=sc.MoePlan(top_k=1))
    found = [paper.force(one, cache, one.texts[0], case)[1:] for case in (paper.Case("", "dense"), paper.Case("moe", "", plan))]
    size = 3 * config.hidden_size * config.moe_intermediate_size * config.num_hidden_layers
    assert [flops["moe"] for flops, _ in found] == [2 * 2 * ROWS * size * k for k in (config.num_experts_per_tok, 1)]
    assert 2 * 4 * size <= found[1][1]["moe"] < found[0][1]["moe"] <= 2 * 4 * size * config.num_experts
    weights = sum(p.numel() for p in one.model.parameters()) - size * config.num_experts
    weights -= 0 if config.tie_word_embeddings else VOCAB * config.hidden_size
    assert found[0][1]["other"] == found[1][1]["other"] == 2 * 4 * weights

    # Of a generation: every step reads all other weights, and the experts that it chose.
    seen = paper.Seen()
    with seen.watch():
        out = sc.generate(one.model, one.texts[0][None, :PREFIX], max_new_tokens=4, eos_token_id=[], cache=cache, codegen="eager")
    forwards, layers = out.metrics.forwards["exact"], config.num_hidden_layers
    counts = paper.StepBytes(one.model, cache, sc.SparsityPlan(), out.report, ())
    chosen = seen.experts.distinct * 4 * size / layers
    assert seen.weights(out.report, counts, forwards) == forwards * 4 * weights + chosen
    assert forwards * layers * config.num_experts_per_tok <= seen.experts.distinct <= forwards * layers * config.num_experts


def test_a_shared_prefill_changes_nothing(paper: Any) -> None:
    one, _ = subject(paper, "llama")
    draw = torch.Generator().manual_seed(2)
    asked = [paper.Prompt("source", torch.randint(3, VOCAB, (PREFIX,), generator=draw).tolist(), 24) for _ in range(2)]
    given = [paper.Case("", "dense"), paper.Case("attention", "", sc.SparsityPlan(attention=PLAN)), paper.Case("", "dense")]

    def decoded(cache: Any) -> list[list[int]]:
        return [paper.decode(one, cache or RowCache(one.model, 128), prompt, case)[0] for prompt in asked for case in given]

    alone = decoded(None)
    with paper.one_prefill():
        assert decoded(RowCache(one.model, 128)) == alone
    assert alone[0] == alone[2] and alone[0] != alone[1]


def test_verdicts(paper: Any) -> None:
    def row(acceptance: float, saved: float, **scores: float) -> dict[str, Any]:
        return {"scores": scores, "acceptance": acceptance, "flops_saved": (0.5, saved)}

    held, lower = paper.Case("ffn", "", score="held"), paper.Case("attention", "", score="lower")
    dense = row(2.0, 0.0, needle=0.5, maths=0.0)
    assert paper.verdict(held, dense, row(2.1, 0.1, needle=0.49, maths=0.0)) == "agree"
    assert paper.verdict(lower, dense, row(2.0, 0.1, needle=0.49, maths=0.0)) == "disagree: score -1.0"
    assert paper.verdict(lower, dense, row(1.8, 0.0, needle=0.4)) == "disagree: acceptance -10 %, no FLOPs saved"
    # Where the dense row scores nothing, nothing can be lost.
    nothing = row(2.0, 0.0, needle=0.0)
    assert paper.verdict(held, nothing, row(2.0, 0.1, needle=0.0)) == "agree; undecided: score"
    assert paper.verdict(held, {"scores": {"next token": 0.6}}, {"scores": {"next token": 0.5}}).startswith(
        "disagree: score -10.0;"
    )
    assert paper.verdict(paper.Case("moe", ""), dense, dense) == "-"
