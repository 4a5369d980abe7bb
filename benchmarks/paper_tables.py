"""The tables of arXiv 2512.21911 on models that run here: each sparse axis alone, and all that a model has together.

    python benchmarks/paper_tables.py [--tables attention ffn moe hybrid] [--models mixture relu2 smollm2]
                                      [--smollm2 FOLDER] [--mixture FOLDER] [--relu2 FOLDER]
                                      [--prefix 2048] [--tokens 64] [--new-tokens 24] [--prompts 3] [--texts 3]
                                      [--device cuda] [--json FILE] [--markdown FILE]

* attention (its Table 2): budgets by the paper's law ``floor((L - L0) * rho + L0)``, blocks of 64 by mean key and first draft
  row; SmolLM2-135M-Instruct with and without reuse across layers. The paper's L0 of 4,096, 2,048 and 1,024 are read as 1/2, 1/4
  and 1/8 of its context, and so of ours;
* ffn (Table 3): SmolLM2 and, where ``--relu2`` names the folder that ``train_tiny_moe.py --model relu2`` made, a model with
  squared ReLU;
* moe (Table 4): benchmarks/assets/tiny-moe, the lowest m experts below the layer's median share;
* hybrid (Table 5): all sections that a model has.

Decoding: ``--prompts`` prompts of each task of paper_tasks.py (SmolLM2; the models of source code continue texts, unscored),
greedy, drafts of up to 8 tokens by prompt lookup, every step by the plan, against the dense row's. The prefill is exact and made
once a prompt. *same tokens*: as in the dense row, by place. *MB a token*: weights, K and V that steps read, for each new token.

Teacher-forced: ``--texts`` texts, exact prefill, then steps of 8 rows that keep the K and V they wrote: KL(exact || sparse) in
nats, top-1 flips, and *next token*, how often the top token is the text's. FLOPs and bytes are those of these steps
(:func:`step_flops`, :func:`step_bytes`), each saved within the plan's axes and of the whole model.

The column *paper* is what others report of the paper, which we have not checked against it; verdicts follow :func:`verdict`.
Results are saved after every prompt and text; Ctrl-C keeps them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ffn_quality import Channels
from moe_quality import FILES, Counter, compare
from paper_tasks import Prompt, prompts, rouge1
from quality import texts as protocol_texts
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from train_tiny_moe import LENGTH

import spec_compile as sc
from spec_compile.decode_loop import DecodingLoop
from spec_compile.files import write_whole
from spec_compile.kernels.mlp import watch_channels
from spec_compile.loading import load_model, smollm2_path
from spec_compile.metrics import StepBytes
from spec_compile.models.row_cache import RowCache, sequence_cache
from spec_compile.options import Options
from spec_compile.row_verify import RowVerify

ROOT = Path(__file__).parent
TABLES = ("attention", "ffn", "moe", "hybrid")
TASKS = ("needle", "multi-needle", "summary", "maths")
ROWS = 8
# A score that fell by no more has held; so has an acceptance length that moved by no larger share.
POINT, STABLE = 0.01, 0.05
_PAPER: dict[str, Any] = {"block_size": 64, "sink": 1, "recent": 2, "query": "first"}
_OPTIONS: dict[str, Any] = {"codegen": "eager", "strict": True}


@dataclass(frozen=True)
class Case:
    """A row of the table: a plan, and what the paper is said to find: scores ``held`` or ``lower``, None without such a row."""

    table: str
    name: str
    plan: sc.SparsityPlan | None = None
    paper: str = ""
    score: str | None = None


@dataclass
class Subject:
    """A model, prompts to decode, texts to measure on, and how many of their tokens are prefilled."""

    name: str
    model: Any
    tokenizer: Any
    prompts: list[Prompt]
    texts: list[Tensor]
    prefix: int


@dataclass
class Tally:
    """What was measured of a case."""

    scores: dict[str, list[float]] = field(default_factory=dict)
    same: int = 0
    tokens: int = 0
    wanted: int = 0
    accepted: int = 0
    steps: int = 0
    read: float = 0.0
    forced: list[dict[str, float]] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)


def within(prefix: int, tokens: int, context: int) -> int:
    """The longest prefix that leaves ``tokens`` within the context that a model was trained on."""
    if tokens >= context:
        raise SystemExit(f"a model of context {context} has no room for {tokens} tokens: lower --tokens or --new-tokens")
    return min(prefix, context - tokens)


def subject(name: str, path: Path, raw: list[str], args: argparse.Namespace, context: int | None) -> Subject:
    model, tokenizer = load_model(path)
    prefix = args.prefix if context is None else within(args.prefix, max(args.tokens, 4 * args.new_tokens), context)
    need = prefix + args.tokens + 1
    # Seven characters a token are more than any text has.
    ids = [tokenizer(text[: 7 * need], return_tensors="pt").input_ids[0] for text in raw]
    ids = [one[:need] for one in ids if len(one) >= need][: args.texts]
    if not ids:
        raise SystemExit(f"{name}: no text has {need} tokens; lower --prefix or --tokens")
    if name == "smollm2":
        long = [*protocol_texts(["prose", "sqlite-docs", "verse"]).values()]
        asked = [*prompts(tokenizer, long, ROOT / "data" / "gsm8k_20.jsonl", args.prefix, args.new_tokens, args.prompts)]
    else:
        asked = [Prompt("source", one[:prefix].tolist(), 4 * args.new_tokens) for one in ids]
    return Subject(name, model.to(args.device), tokenizer, asked, [one.to(args.device) for one in ids], prefix)


def cases(subject: Subject, args: argparse.Namespace) -> list[Case]:
    """Dense first; all rows of the asked tables that the model can have."""
    small = subject.name != "smollm2"
    found, parts = [Case("", "dense")], {}
    said = {2: ("held", "L0 4K: 0.3 to 1.0 points"), 4: ("lower", "L0 2K: visible loss"), 8: ("lower", "L0 1K: visible loss")}
    for part, (score, words) in said.items():
        floor = max(64, subject.prefix // part)
        attention = sc.AttentionPlan(budget=args.rho, budget_floor=floor, **_PAPER)
        if part == 4:
            parts["attention"] = attention
        elif small:
            # Budgets are compared on one model; the others need the attention alone beside their hybrid.
            continue
        found.append(Case("attention", f"L0 {floor}", sc.SparsityPlan(attention=attention), words, score))
    if not small:
        floor = parts["attention"].budget_floor
        plan = sc.SparsityPlan(attention=sc.AttentionPlan(budget=args.rho, budget_floor=floor, index_topk_freq=2, **_PAPER))
        found.append(Case("attention", f"L0 {floor}, reuse 2", plan, "about as without reuse", "lower"))
    if subject.name == "mixture":
        calibrated = [one[: subject.prefix] for one in subject.texts]
        # The paper's 8 experts a token: m 3 leaves out 16 %, m 4 22 %; of our 4, m 1 and 2 leave out about as many.
        claims = {1: ("16 % of experts: lossless", "held"), 2: ("22 % of experts: maths -7", "lower"), 3: ("no such row", None)}
        for m, (words, claim) in claims.items():
            moe = sc.moe_calibrate(subject.model, calibrated, m, force=True, progress=False, window=min(512, subject.prefix))
            found.append(Case("moe", f"m {m}", sc.SparsityPlan(moe=moe), words, claim))
            parts |= {"moe": moe} if m == 2 else {}
    else:
        for tau in args.taus:
            plan = sc.SparsityPlan(ffn=sc.FfnPlan(threshold=tau))
            found.append(Case("ffn", f"tau {tau:g}", plan, "stable at all levels", "held"))
        parts["ffn"] = sc.FfnPlan(threshold=args.taus[len(args.taus) // 2])
    words = "scores at the strict baseline or above, acceptance length unchanged"
    found.append(Case("hybrid", " + ".join(parts), sc.SparsityPlan(**parts), words, "held"))
    return [case for case in found if case.table in ("", *args.tables)]


def step_flops(
    model: Any, report: Any, live: int, rows: int, keys: float | None = None, channels: float = 1.0, experts: float | None = None
) -> dict[str, float]:
    """FLOPs of a verify step of T = ``rows`` rows over ``live`` keys (its own included), two for each multiply-add, by axis.

    * attention, a layer: ``2 T heads (D + Dv) live``; in sparse layers ``keys`` instead of ``live``, and where a layer selects
      ``2 heads D live / 64`` more: one row scores a mean key of each block. No key is spared for being in a row's future.
    * ffn, a layer of three matrices: ``2 T H F 3``; where channels are skipped ``2 T H F (1 + 2 channels)``, the share that a
      row keeps on average: the activation needs its matrix whole.
    * moe, a layer: ``2 T 3 H I k``; where limited, the ``experts`` that a row keeps on average instead of k.
    * other: ``2 T`` for each weight of the other matrices, routers and output head included; norms and softmax count nothing.
    """
    attention = 0.0
    for layer in report.attentions:
        sparse = keys is not None and keys < live and layer.role in ("anchor", "follower")
        attention += 2 * rows * layer.heads * (layer.head_dim + layer.v_head_dim) * (keys if sparse else live)
        if sparse and layer.role == "anchor":
            attention += 2 * layer.heads * layer.head_dim * live / _PAPER["block_size"]
    ffn = held = 0.0
    for layer in report.mlps:
        others = 1 if layer.form == "plain" else 2
        held += (1 + others) * layer.hidden * layer.inner
        ffn += 2 * rows * layer.hidden * layer.inner * (1 + others * (channels if layer.rule else 1.0))
    moe = 0.0
    for layer in report.moes:
        kept = experts if experts is not None and layer.rule else layer.top_k
        moe += 2 * rows * 3 * layer.hidden * layer.inner * kept
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    into, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices -= 0 if into is out else into.numel()
    return {"attention": attention, "ffn": ffn, "moe": moe, "other": 2.0 * rows * (matrices - held)}


def step_bytes(
    counts: StepBytes, report: Any, start: int, rows: int, sparse: bool, union: float = 1.0, distinct: float = 0.0
) -> dict[str, float]:
    """Bytes that such a step reads, by axis, behind ``start`` tokens: K, V and summaries; feed-forward weights, of which the
    ``union`` of all rows' channels but for the first matrix; the ``distinct`` experts of a layer, as counted; all other weights.
    """
    ffn = held = moe = most = 0.0
    for layer in report.mlps:
        others = 1 if layer.form == "plain" else 2
        held += layer.weight_bytes
        ffn += layer.weight_bytes * (1 + others * (union if layer.rule else 1.0)) / (1 + others)
    for layer in report.moes:
        most += min(layer.experts, rows * layer.top_k) * layer.expert_bytes
        moe += distinct * layer.expert_bytes
    other = counts.weights(rows) - most - held
    return {"attention": counts.kv([start], rows, sparse), "ffn": ffn, "moe": moe, "other": other}


def saved(dense: dict[str, float], found: dict[str, float], axes: list[str]) -> tuple[float, float]:
    """Shares saved within the axes, and of the whole."""
    return 1 - sum(found[a] for a in axes) / sum(dense[a] for a in axes), 1 - sum(found.values()) / sum(dense.values())


def verdict(case: Case, dense: dict[str, Any], row: dict[str, Any]) -> str:
    """Whether the numbers go where the paper is said to go.

    Score: the mean over the model's tasks (next tokens where it has none), without those at which the dense row scores nothing,
    fell by at most a point (``held``) or by more (``lower``). Acceptance length: within 5 % of dense, in every row. FLOPs: the
    whole model's fell. The one that says nothing, for want of a dense score or of drafts, is named as undecided.
    """
    if case.score is None:
        return "-"
    names = [name for name in TASKS if dense["scores"].get(name)]
    if not any(name in dense["scores"] for name in TASKS):
        names = ["next token"] if dense["scores"].get("next token") else []
    wrong, open_ = [], []
    if names:
        change = sum(row["scores"][name] - dense["scores"][name] for name in names) / len(names)
        # Means of few scores differ by rounding.
        held = change >= -POINT - 1e-9
        wrong += [] if held == (case.score == "held") else [f"score {100 * change:+.1f}"]
    else:
        open_.append("score")
    if row.get("acceptance") and dense.get("acceptance"):
        moved = row["acceptance"] / dense["acceptance"] - 1
        wrong += [] if abs(moved) <= STABLE + 1e-9 else [f"acceptance {100 * moved:+.0f} %"]
    else:
        open_.append("acceptance")
    if "flops_saved" in row:
        wrong += [] if row["flops_saved"][1] > 0 else ["no FLOPs saved"]
    else:
        open_.append("FLOPs")
    said = f"disagree: {', '.join(wrong)}" if wrong else "agree"
    return said + (f"; undecided: {', '.join(open_)}" if open_ else "")


@contextmanager
def one_prefill() -> Iterator[None]:
    """Prefill a prompt once for all cases: it is exact, and decoding writes behind it. Another prompt is prefilled anew."""
    inner, held = DecodingLoop.prefill, {}

    def prefill(loop: DecodingLoop) -> None:
        if held.get("tokens") == loop.tokens and held.get("cache") is loop.cache:
            loop.cache.set_lengths([len(row) - 1 for row in loop.tokens])
            return
        inner(loop)
        held.update(tokens=[list(row) for row in loop.tokens], cache=loop.cache)

    with mock.patch.object(DecodingLoop, "prefill", prefill):
        yield


@dataclass
class Seen:
    """Channels and experts of the steps in between."""

    channels: Channels = field(default_factory=Channels)
    experts: Counter = field(default_factory=Counter)

    @contextmanager
    def watch(self) -> Iterator[None]:
        with watch_channels(self.channels.watch), self.experts.watch():
            yield

    def weights(self, report: Any, counts: StepBytes, forwards: int) -> float:
        """Bytes of weights that ``forwards`` steps read: each chosen expert once, no channels but those that some row keeps."""
        channels, spared = self.channels, 0.0
        if report.skipping:
            layer = report.skipping[0]
            spared = (channels.calls - channels.read) * layer.weight_bytes * (1 / 2 if layer.form == "plain" else 2 / 3)
        chosen = self.experts.distinct * report.moes[0].expert_bytes if report.moes else 0
        # Zero rows choose no expert.
        return forwards * counts.weights(0) - spared + chosen


def decode(subject: Subject, cache: RowCache, prompt: Prompt, case: Case) -> tuple[list[int], Any, float]:
    """New tokens, metrics and bytes read."""
    seen = Seen()
    with seen.watch():
        out = sc.generate(
            subject.model, [prompt.ids], plan=case.plan, mode="exact" if case.plan is None else "sparse", cache=cache,
            max_new_tokens=prompt.new_tokens, eos_token_id=[] if prompt.score is None else None, **_OPTIONS,
        )  # fmt: skip
    if out.metrics.interrupted:
        raise KeyboardInterrupt
    counts = StepBytes(subject.model, cache, case.plan or sc.SparsityPlan(), out.report, ())
    weights = seen.weights(out.report, counts, sum(out.metrics.forwards.values()))
    return out.tokens[0], out.metrics, out.metrics.kv_bytes + weights


@torch.no_grad()
def force(subject: Subject, cache: RowCache, ids: Tensor, case: Case) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """Log-probabilities of teacher-forced steps behind the prefix that the cache holds, their FLOPs and bytes by axis."""
    verify = RowVerify(subject.model, cache, Options.parse({**_OPTIONS, "plan": case.plan}), [ROWS])
    parts, starts, seen, sparse = [], [], Seen(), case.plan is not None
    cache.set_lengths([subject.prefix])
    with seen.watch():
        for start in range(subject.prefix, ids.numel() - ROWS, ROWS):
            logits = verify([int(ids[start])], ids[None, start + 1 : start + ROWS], [ROWS - 1], sparse=sparse)
            parts.append(logits[0].double().log_softmax(-1).cpu())
            cache.commit([ROWS])
            starts.append(start)
    report = verify.reports[-1]
    counts = StepBytes(subject.model, cache, case.plan or sc.SparsityPlan(), report, verify.layer_kinds)
    calls, experts = max(1, seen.channels.calls), seen.experts
    kept, union = (seen.channels.kept / calls, seen.channels.read / calls) if seen.channels.calls else (1.0, 1.0)
    flops, read = dict.fromkeys([*TABLES[:3], "other"], 0.0), dict.fromkeys([*TABLES[:3], "other"], 0.0)
    for start in starts:
        keys = float(counts.kept(start, ROWS)) if sparse else None
        one = step_flops(subject.model, report, start + ROWS, ROWS, keys, kept, experts.kept / max(1, experts.rows))
        two = step_bytes(counts, report, start, ROWS, sparse, union, experts.distinct / max(1, experts.calls))
        flops, read = {a: flops[a] + one[a] for a in flops}, {a: read[a] + two[a] for a in read}
    return torch.cat(parts), flops, read


def measure(subject: Subject, given: list[Case], tell: Any, save: Any) -> None:
    """Every case over a prompt or text before the next one; ``save`` gets what is complete."""
    longest = max([len(p.ids) + p.new_tokens for p in subject.prompts] + [max(map(len, subject.texts)) + ROWS])
    cache, tallies = RowCache(subject.model, longest), [Tally() for _ in given]
    for place, ids in enumerate(subject.texts, 1):
        cache.reset()
        with torch.no_grad():
            past = sequence_cache(cache, 0)
            subject.model.forward(input_ids=ids[None, : subject.prefix], past_key_values=past, use_cache=True, logits_to_keep=1)
        found = []
        for case in given:
            tell(f"{subject.name}: text {place} of {len(subject.texts)}, {case.name}")
            found.append(force(subject, cache, ids, case))
        for tally, (logs, flops, read) in zip(tallies, found):
            tally.forced.append(compare([found[0][0]], [logs], [ids.cpu()], subject.prefix, ROWS))
            right = logs.argmax(-1) == ids[subject.prefix + 1 : subject.prefix + 1 + len(logs)].cpu()
            tally.scores.setdefault("next token", []).append(float(right.float().mean()))
            tally.flops = {axis: tally.flops.get(axis, 0.0) + count for axis, count in flops.items()}
            tally.bytes = {axis: tally.bytes.get(axis, 0.0) + count for axis, count in read.items()}
        save(tallies)
    with one_prefill():
        for place, prompt in enumerate(subject.prompts, 1):
            outputs = []
            for case in given:
                tell(f"{subject.name}: {prompt.task}, prompt {place} of {len(subject.prompts)}, {case.name}")
                outputs.append(decode(subject, cache, prompt, case))
            dense, texts = outputs[0][0], [subject.tokenizer.decode(out[0], skip_special_tokens=True) for out in outputs]
            for tally, (tokens, metrics, read), text in zip(tallies, outputs, texts):
                tally.same += sum(a == b for a, b in zip(dense, tokens))
                tally.tokens, tally.wanted = tally.tokens + len(tokens), tally.wanted + max(len(dense), len(tokens))
                tally.accepted += sum(sum(request.accepted_at) for request in metrics.requests)
                tally.steps, tally.read = tally.steps + sum(request.steps for request in metrics.requests), tally.read + read
                if prompt.score is not None:
                    tally.scores.setdefault(prompt.task, []).append(prompt.score(text))
                if prompt.task == "summary":
                    tally.scores.setdefault("as dense", []).append(rouge1(text, texts[0]))
            save(tallies)


def rows_of(name: str, given: list[Case], tallies: list[Tally]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for case, tally in zip(given, tallies):
        row: dict[str, Any] = {"model": name, "table": case.table, "plan": case.name, "paper": case.paper}
        row["scores"] = {task: sum(each) / len(each) for task, each in tally.scores.items()}
        row["prompts"] = {task: len(each) for task, each in tally.scores.items()}
        if tally.steps:
            row |= {"same_tokens": tally.same / tally.wanted, "tokens": tally.wanted, "steps": tally.steps}
            row |= {"acceptance": 1 + tally.accepted / tally.steps, "bytes_per_token": tally.read / tally.tokens}
        if tally.forced:
            row |= {key: sum(part[key] for part in tally.forced) / len(tally.forced) for key in tally.forced[0]}
            if case.plan is not None:
                axes = [axis for axis in TABLES[:3] if getattr(case.plan, axis) is not None]
                row["flops_saved"] = saved(tallies[0].flops, tally.flops, axes)
                row["bytes_saved"] = saved(tallies[0].bytes, tally.bytes, axes)
        row["verdict"] = verdict(case, rows[0], row) if case.plan is not None else ""
        rows.append(row)
    return rows


COLUMNS = (
    "model", "axis", "plan", "needle", "multi-needle", "summary: lead", "as dense", "maths", "next token", "same tokens",
    "tokens a step", "FLOPs saved: axis, model", "bytes saved: axis, model", "MB a token", "KL", "flips", "paper", "verdict",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    def percent(share: float | None) -> str:
        return "" if share is None else f"{100 * share:.1f} %"

    scores = [percent(row["scores"].get(name)) for name in (*TASKS[:3], "as dense", "maths", "next token")]
    both = [", ".join(map(percent, row[name])) if name in row else "" for name in ("flops_saved", "bytes_saved")]
    return [
        row["model"], row["table"], row["plan"], *scores, percent(row.get("same_tokens")),
        f"{row['acceptance']:.2f}" if "acceptance" in row else "", *both,
        f"{row['bytes_per_token'] / 1e6:.1f}" if "bytes_per_token" in row else "",
        f"{row['kl']:.3f}" if "kl" in row else "", percent(row.get("flips")), row["paper"], row["verdict"],
    ]  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="decoding and teacher-forced steps; what the paper is said to find, and whether it is found here")
    for name in COLUMNS:
        table.add_column(name)
    for row in rows:
        table.add_row(*cells(row))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--models", nargs="+", choices=("mixture", "relu2", "smollm2"), default=["mixture", "relu2", "smollm2"])
    parser.add_argument("--smollm2", type=Path, help="model folder (default SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--mixture", type=Path, default=ROOT / "assets" / "tiny-moe")
    parser.add_argument("--relu2", type=Path, help="folder of a model gated by squared ReLU")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of tasks' texts and of teacher-forced prefills")
    parser.add_argument("--tokens", type=int, default=64, help="teacher-forced tokens of each text")
    parser.add_argument(
        "--new-tokens", type=int, default=24, help="of a needle's answer; twice for lists and summaries, 4x maths"
    )
    parser.add_argument("--prompts", type=int, default=3, help="of each task, up to 20")
    parser.add_argument("--texts", type=int, default=3, help="of each model: 5 of SmolLM2, 6 of the others at most")
    parser.add_argument("--rho", type=float, default=0.1, help="rho of the paper's law")
    parser.add_argument("--taus", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="where the table goes, too")
    args = parser.parse_args()
    sources = [(ROOT.parent / name).read_text(encoding="utf-8") for name in FILES]
    # The small models were trained at this context: behind it they are noise, whatever the plan.
    known: list[tuple[str, Path | None, list[str], int | None, set[str]]] = [
        ("mixture", args.mixture, sources, LENGTH, {"attention", "moe", "hybrid"}),
        ("relu2", args.relu2, sources, LENGTH, {"attention", "ffn", "hybrid"}),
        ("smollm2", args.smollm2, [*protocol_texts().values()], None, {"attention", "ffn", "hybrid"}),
    ]
    wanted = [one[:4] for one in known if one[0] in args.models and one[4] & set(args.tables) and (one[1] or one[0] != "relu2")]
    done: dict[str, list[dict[str, Any]]] = {}
    about = {"rows_of_a_step": ROWS, **{name: getattr(args, name) for name in ("tokens", "prefix", "new_tokens", "rho")}}

    def save(name: str, given: list[Case], tallies: list[Tally]) -> None:
        done[name] = rows_of(name, given, tallies)
        rows = [row for some in done.values() for row in some]
        if args.json:
            write_whole(args.json, json.dumps({**about, "rows": rows}, indent=2) + "\n")
        if args.markdown:
            write_whole(args.markdown, markdown(rows))

    columns = [*Progress.get_default_columns(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        try:
            for name, path, raw, context in wanted:
                task = progress.add_task(f"{name}: loading", total=None)
                one = subject(name, path or smollm2_path(), raw, args, context)
                given = cases(one, args)
                progress.update(task, total=len(given) * (len(one.prompts) + len(one.texts)))

                def tell(text: str, task: Any = task) -> None:
                    progress.update(task, description=text, advance=1)
                    if not sys.stderr.isatty():
                        print(text, file=sys.stderr, flush=True)

                measure(one, given, tell, lambda tallies, name=name, given=given: save(name, given, tallies))
        except KeyboardInterrupt:
            print("interrupted: what follows is of complete prompts and texts alone", file=sys.stderr)
    rows = [row for some in done.values() for row in some]
    # A table of 18 columns is cut to nothing at 80 characters.
    Console(width=None if sys.stdout.isatty() else 260).print(shown(rows))


if __name__ == "__main__":
    main()
