"""What skipping feed-forward channels costs and saves: compiled sparse verify steps against exact ones, teacher-forced.

    python benchmarks/ffn_quality.py [--model FOLDER] [--thresholds 0.01 0.05 ...] [--budgets 0.9 ...] [--joint] [--json FILE]

The model is SmolLM2-135M-Instruct in float32 unless ``--model`` names another, the texts are those of benchmarks/quality.py. Each
is prefilled exactly, then its next tokens run through ``compile_verify`` in steps of ``--rows``; the cache keeps the K and V that
sparse steps wrote, so errors add up as they do in use. Rules: the paper's threshold for each row, the same with the union kept by
all rows (``--joint``), and one set of channels for all rows of a step.

Measured: KL(exact || sparse) in nats, top-1 flips, dNLL of the true next token, the share of channels that a row keeps and that a
step reads (the union), and *agreeing*: of a step's rows, how many in front choose the exact top token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from moe_quality import compare
from quality import texts as protocol_texts
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import spec_compile as sc
from spec_compile.kernels.mlp import watch_channels
from spec_compile.loading import load_model, smollm2_path


@dataclass
class Channels:
    """Shares of channels over the sparse calls of a run."""

    kept: float = 0.0
    read: float = 0.0
    calls: int = 0

    def watch(self, down: Tensor, kept: Tensor, read: Tensor) -> None:
        self.kept += float(kept.float().mean()) / down.shape[1]
        self.read += float(read) / down.shape[1]
        self.calls += 1


def plans(args: argparse.Namespace) -> dict[str, sc.FfnPlan | None]:
    found: dict[str, sc.FfnPlan | None] = {"exact": None}
    for threshold in args.thresholds:
        found[f"|act| >= {threshold:g}"] = sc.FfnPlan(threshold=threshold)
        if args.joint:
            found[f"|act| >= {threshold:g}, joint"] = sc.FfnPlan(threshold=threshold, joint=True)
    for budget in args.budgets:
        found[f"{budget:.0%} for all rows"] = sc.FfnPlan(budget=budget)
    return found


@torch.no_grad()
def steps(verify: Any, ids: Tensor, prefix: int, rows: int) -> Tensor:
    """Log-probabilities ``[steps * rows, V]``; the cache advances by all steps."""
    parts = []
    for start in range(prefix, ids.numel() - rows, rows):
        parts.append(verify(ids[None, start : start + rows])[0].double().log_softmax(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default SmolLM2-135M-Instruct)")
    parser.add_argument("--texts", nargs="+", type=Path, help="UTF-8 files (default those of benchmarks/quality.py)")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="teacher-forced tokens of each text")
    parser.add_argument("--rows", type=int, default=8, help="rows of a verify step")
    parser.add_argument("--thresholds", type=float, nargs="*", default=[0.01, 0.05, 0.1, 0.2])
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.9, 0.75, 0.5])
    parser.add_argument("--joint", action="store_true", help="thresholds with the union kept by all rows, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model or smollm2_path())
    raw = [path.read_text(encoding="utf-8") for path in args.texts] if args.texts else [*protocol_texts().values()]
    need = args.prefix + args.tokens + 1
    # Seven characters a token are more than any text has.
    ids = [tokenizer(text[: 7 * need], return_tensors="pt").input_ids[0] for text in raw]
    if any(len(one) < need for one in ids):
        raise SystemExit(f"--prefix and --tokens ask for {need} tokens, the shortest text has {min(map(len, ids))}")
    ids = [one[:need] for one in ids]
    cache = sc.VerifyCache(model, max_len=need + args.rows)
    given = plans(args)
    exact: list[Tensor] = []
    found: dict[str, list[Tensor]] = {name: [] for name in given}
    channels = {name: Channels() for name in given}
    verifies: dict[str, Any] = {}
    began = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress, torch.no_grad():
        task = progress.add_task("prefill", total=len(ids) * len(given))
        for one in ids:
            cache.reset()
            model(one[None, : args.prefix], past_key_values=cache)
            for name, plan in given.items():
                progress.update(task, description=name)
                if name not in verifies:
                    verifies[name] = sc.compile_verify(
                        model, cache, args.rows - 1, None if plan is None else sc.SparsityPlan(ffn=plan), codegen="eager"
                    )
                with watch_channels(channels[name].watch):
                    found[name].append(steps(verifies[name], one, args.prefix, args.rows))
                cache.crop(-len(found[name][-1]))
                progress.advance(task)
                if not sys.stderr.isatty():
                    print(f"{time.perf_counter() - began:7.0f} s  {name}", file=sys.stderr, flush=True)
    exact = found["exact"]
    rows: list[dict[str, Any]] = []
    for name in given:
        seen, count = channels[name], max(1, channels[name].calls)
        shares = {"kept": seen.kept / count, "union": seen.read / count} if seen.calls else {"kept": 1.0, "union": 1.0}
        each = [compare([a], [b], [one], args.prefix, args.rows) for a, b, one in zip(exact, found[name], ids)]
        means = {key: sum(part[key] for part in each) / len(each) for key in each[0]}
        rows.append({"plan": name, **means, **shares, "texts": each})
    table = Table(title=f"{len(ids)} texts, {args.tokens} tokens each after {args.prefix}, T = {args.rows}")
    for name in ("plan", "kept", "union", "KL", "flips %", "dNLL", "agreeing"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for row in rows:
        table.add_row(
            row["plan"], f"{row['kept']:.2f}", f"{row['union']:.2f}", f"{row['kl']:.4f}", f"{100 * row['flips']:.1f}",
            f"{row['dnll']:+.3f}", f"{row['agreeing']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        data = {"rows_of_a_step": args.rows, "prefix": args.prefix, "tokens": args.tokens, "plans": rows}
        args.json.write_text(json.dumps(data, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
