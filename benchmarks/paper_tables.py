"""The tables of arXiv 2512.21911 on models that run here: each sparse axis alone, and all that a model has together.

    python benchmarks/paper_tables.py [--tables attention ffn moe hybrid] [--smollm2 FOLDER] [--mixture FOLDER] [--relu2 FOLDER]
                                      [--prefix 7424] [--tokens 256] [--device cuda] [--json FILE]

The paper scores tasks with models of 8 to 671 billion parameters; here the measure is the distance from exact steps of the same
model over the same text: KL(exact || sparse) in nats, top-1 flips, dNLL of the true next token, and *agreeing*, the rows in front
of a step of 8 that choose the exact top token, which is what acceptance length depends on. Texts are prefilled exactly, then
steps of 8 rows are teacher-forced; K and V of sparse steps stay in the cache.

* attention (its Table 2): SmolLM2-135M-Instruct, budgets by the paper's law ``floor((L - L0) * rho + L0)``, blocks of 64 by mean
  key and first draft row, with and without reuse across layers;
* ffn (Table 3): SmolLM2 and, where ``--relu2`` names the folder that ``train_tiny_moe.py --model relu2`` made, a model with
  squared ReLU, tau in 0.01, 0.05, 0.1;
* moe (Table 4): benchmarks/assets/tiny-moe, the lowest m experts below the layer's median share;
* hybrid (Table 5): for each model the sections it has, alone and together.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ffn_quality import Channels, steps
from moe_quality import FILES, compare
from quality import texts as protocol_texts
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import spec_compile as sc
from spec_compile.kernels.mlp import watch_channels
from spec_compile.loading import load_model, smollm2_path

ROOT = Path(__file__).parent
TABLES = ("attention", "ffn", "moe", "hybrid")
ROWS = 8
_PAPER: dict[str, Any] = {"block_size": 64, "sink": 1, "recent": 2, "query": "first"}


@dataclass
class Subject:
    """A model, the texts it is measured on, and tokens that are prefilled."""

    name: str
    model: Any
    texts: list[Tensor]
    prefix: int


def subject(name: str, path: Path, raw: list[str], prefix: int, tokens: int, device: str) -> Subject:
    model, tokenizer = load_model(path)
    need = prefix + tokens + 1
    # Seven characters a token are more than any text has.
    ids = [tokenizer(text[: 7 * need], return_tensors="pt").input_ids[0] for text in raw]
    ids = [one[:need] for one in ids if len(one) >= need]
    if not ids:
        raise SystemExit(f"{name}: no text has {need} tokens; lower --prefix or --tokens")
    return Subject(name, model.to(device), [one.to(device) for one in ids], prefix)


def law(prefix: int, rho: float) -> dict[str, sc.AttentionPlan]:
    """The paper's L0 of 4,096, 2,048 and 1,024 tokens, as shares of its context and of ours."""
    found = {}
    for part in (2, 4, 8):
        floor = max(64, prefix // part)
        found[f"L0 {floor}, rho {rho:g}"] = sc.AttentionPlan(budget=rho, budget_floor=floor, **_PAPER)
    return found


def sections(subject: Subject, args: argparse.Namespace) -> dict[str, dict[str, sc.SparsityPlan]]:
    """Plans by table for one model."""
    found: dict[str, dict[str, sc.SparsityPlan]] = {}
    attention = law(subject.prefix, args.rho)
    middle = [*attention.values()][len(attention) // 2]
    parts: dict[str, Any] = {"attention": middle}
    if subject.name == "smollm2":
        plans = {name: sc.SparsityPlan(attention=plan) for name, plan in attention.items()}
        reused = sc.AttentionPlan(budget=args.rho, budget_floor=middle.budget_floor, index_topk_freq=2, **_PAPER)
        plans[f"L0 {middle.budget_floor}, rho {args.rho:g}, reuse 2"] = sc.SparsityPlan(attention=reused)
        found["attention"] = plans
    if subject.name in ("smollm2", "relu2"):
        found["ffn"] = {f"tau {tau:g}": sc.SparsityPlan(ffn=sc.FfnPlan(threshold=tau)) for tau in args.taus}
        parts["ffn"] = sc.FfnPlan(threshold=args.taus[len(args.taus) // 2])
    else:
        calibrated = [one[: subject.prefix] for one in subject.texts]
        plans = {}
        for m in (1, 2, 3):
            moe = sc.moe_calibrate(subject.model, calibrated, m, force=True, progress=False, window=min(512, subject.prefix))
            plans[f"m {m}"] = sc.SparsityPlan(moe=moe)
        found["moe"] = plans
        parts["moe"] = plans["m 2"].moe
    hybrid = {name: sc.SparsityPlan(**{name: part}) for name, part in parts.items()}
    hybrid[" + ".join(parts)] = sc.SparsityPlan(**parts)
    found["hybrid"] = hybrid
    return {table: plans for table, plans in found.items() if table in args.tables}


@torch.no_grad()
def measure(subject: Subject, plans: dict[str, dict[str, sc.SparsityPlan]], progress: Any) -> list[dict[str, Any]]:
    prefix, texts = subject.prefix, subject.texts
    cache = sc.VerifyCache(subject.model, max(map(len, texts)) + ROWS)
    given = {"exact": ("", None)} | {f"{table}/{name}": (table, p) for table, some in plans.items() for name, p in some.items()}
    found: dict[str, list[Tensor]] = {key: [] for key in given}
    channels = {key: Channels() for key in given}
    verifies: dict[str, Any] = {}
    task = progress.add_task(subject.name, total=len(given) * len(texts))
    for ids in texts:
        cache.reset()
        subject.model(ids[None, :prefix], past_key_values=cache)
        for key, (_, plan) in given.items():
            progress.update(task, description=f"{subject.name}: {key}")
            if key not in verifies:
                verifies[key] = sc.compile_verify(subject.model, cache, ROWS - 1, plan, codegen="eager")
            with watch_channels(channels[key].watch):
                found[key].append(steps(verifies[key], ids, prefix, ROWS).cpu())
            cache.crop(-len(found[key][-1]))
            progress.advance(task)
            if not sys.stderr.isatty():
                print(f"{subject.name}: {key}", file=sys.stderr, flush=True)
    rows = []
    for key, (table, _) in given.items():
        if not table:
            continue
        each = [compare([a], [b], [ids.cpu()], prefix, ROWS) for a, b, ids in zip(found["exact"], found[key], texts)]
        row = {"table": table, "model": subject.name, "plan": key.split("/", 1)[1]}
        row |= {name: sum(part[name] for part in each) / len(each) for name in each[0]}
        seen = channels[key]
        if seen.calls:
            row |= {"channels_kept": seen.kept / seen.calls, "channels_read": seen.read / seen.calls}
        rows.append(row)
    return rows


def shown(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for name in ("model", "plan", "KL", "flips %", "dNLL", "agreeing", "channels kept / read"):
        table.add_column(name, justify="left" if name in ("model", "plan") else "right")
    for row in rows:
        read = f"{row['channels_kept']:.2f} / {row['channels_read']:.2f}" if "channels_read" in row else ""
        table.add_row(
            row["model"], row["plan"], f"{row['kl']:.4f}", f"{100 * row['flips']:.1f}", f"{row['dnll']:+.3f}",
            f"{row['agreeing']:.2f}", read,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--smollm2", type=Path, help="model folder (default SmolLM2-135M-Instruct from PyPI)")
    parser.add_argument("--mixture", type=Path, default=ROOT / "assets" / "tiny-moe")
    parser.add_argument("--relu2", type=Path, help="folder of a model gated by squared ReLU")
    parser.add_argument("--prefix", type=int, default=7424, help="tokens of SmolLM2's prefill; small models take up to 1024")
    parser.add_argument("--tokens", type=int, default=256, help="teacher-forced tokens of each text")
    parser.add_argument("--rho", type=float, default=0.1, help="rho of the paper's law")
    parser.add_argument("--taus", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sources = [(ROOT.parent / name).read_text(encoding="utf-8") for name in FILES]
    wanted: list[tuple[str, Path, list[str], int]] = []
    if {"attention", "ffn", "hybrid"} & set(args.tables):
        wanted.append(("smollm2", args.smollm2 or smollm2_path(), [*protocol_texts().values()], args.prefix))
    if args.relu2 is not None and {"ffn", "hybrid"} & set(args.tables):
        wanted.append(("relu2", args.relu2, sources, min(args.prefix, 1024)))
    if {"moe", "hybrid"} & set(args.tables):
        wanted.append(("mixture", args.mixture, sources, min(args.prefix, 1024)))
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        for name, path, raw, prefix in wanted:
            one = subject(name, path, raw, prefix, args.tokens, args.device)
            plans = sections(one, args)
            if plans:
                rows += measure(one, plans, progress)
            if args.json:
                data = {"rows_of_a_step": ROWS, "tokens": args.tokens, "prefix": args.prefix, "rho": args.rho, "rows": rows}
                args.json.write_text(json.dumps(data, indent=2), encoding="utf-8")
    for table in args.tables:
        some = [row for row in rows if row["table"] == table]
        if some:
            Console().print(shown(some, f"{table}: {args.tokens} tokens of each text, T = {ROWS}"))


if __name__ == "__main__":
    main()
