"""What taking experts away costs: compiled sparse verify steps of a trained mixture against exact ones, teacher-forced.

    python benchmarks/moe_quality.py [--model FOLDER] [--tokens 384] [--rows 8] [--json FILE] [--plot FILE.png]

The model is benchmarks/assets/tiny-moe (16 experts, 4 a token), the texts are this repository's own sources, which it has not
seen. Each text is prefilled exactly, then its next tokens run through ``compile_verify`` in steps of ``--rows``; the cache keeps
the K and V that sparse steps wrote, so errors add up as they do in use. Rules: a static top-k', the paper's (m experts below the
median of each layer from ``moe_calibrate``) with m = 1, 2, 3, a ratio to the top weight, and a budget of distinct experts over
the rows, with and without substitution.

Measured: KL(exact || sparse) in nats, top-1 flips, dNLL of the true next token, experts a row keeps, distinct experts that a
layer reads in a step (counted from the ids that reach the experts), and *agreeing*: of a step's rows, how many in front choose
the exact top token, the acceptance length that exact drafts would reach.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import spec_compile as sc
from spec_compile.kernels import library

ROOT = Path(__file__).parent
FILES = (
    "spec_compile/plan.py",
    "passes/scores.py",
    "kernels/tiling.py",
    "models/cache.py",
    "tests/harness.py",
    "passes/nodes.py",
)


@dataclass
class Counter:
    """What reaches the experts, whichever way the graph was compiled."""

    calls: int = 0
    distinct: int = 0
    kept: int = 0
    rows: int = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        inner = library._moe_experts

        def counting(x: Tensor, choice: Tensor, *rest: Any) -> Tensor:
            routed = choice[choice >= 0]
            self.calls += 1
            self.distinct += routed.unique().numel()
            self.kept += routed.numel()
            self.rows += choice.shape[0]
            return inner(x, choice, *rest)

        with mock.patch.object(library, "_moe_experts", counting):
            yield


def plans(model: Any, texts: list[Tensor]) -> dict[str, sc.MoePlan | None]:
    found: dict[str, sc.MoePlan | None] = {"exact": None}
    for k in (3, 2, 1):
        found[f"top {k}"] = sc.MoePlan(top_k=k)
    for m in (1, 2, 3):
        found[f"median, m = {m}"] = sc.moe_calibrate(model, texts, m, force=True, progress=False)
    for ratio in (0.3, 0.5, 0.8):
        found[f"ratio {ratio}"] = sc.MoePlan(ratio=ratio)
    for budget in (10, 8, 6, 4):
        found[f"budget {budget}"] = sc.MoePlan(expert_budget=budget)
        found[f"budget {budget}, substitute"] = sc.MoePlan(expert_budget=budget, substitute=True)
    return found


@torch.no_grad()
def run(model: Any, texts: list[Tensor], plan: sc.MoePlan | None, prefix: int, rows: int) -> tuple[list[Tensor], Counter]:
    """Log-probabilities ``[steps * rows, V]`` of each text's steps, and what the experts were given."""
    counter, outputs = Counter(), []
    cache = sc.VerifyCache(model, max_len=max(ids.numel() for ids in texts) + rows)
    given = sc.SparsityPlan(moe=plan) if plan is not None else None
    verify = sc.compile_verify(model, cache, draft_len=rows - 1, plan=given, codegen="eager", strict=True)
    for ids in texts:
        cache.reset()
        model(ids[None, :prefix], past_key_values=cache)
        parts = []
        for start in range(prefix, ids.numel() - rows + 1, rows):
            with counter.watch():
                parts.append(verify(ids[None, start : start + rows])[0].double().log_softmax(-1))
        outputs.append(torch.cat(parts))
    return outputs, counter


def compare(exact: list[Tensor], found: list[Tensor], texts: list[Tensor], prefix: int, rows: int) -> dict[str, float]:
    kl, flips, dnll, agreeing, positions, steps = 0.0, 0, 0.0, 0, 0, 0
    for a, b, ids in zip(exact, found, texts):
        kl += float((a.exp() * (a - b)).sum())
        same = a.argmax(-1) == b.argmax(-1)
        flips += int((~same).sum())
        agreeing += int(same.view(-1, rows).long().cumprod(-1).sum())
        targets = ids[prefix + 1 : prefix + 1 + len(a)]
        dnll += float((a - b)[: len(targets)].gather(1, targets[:, None]).sum())
        positions, steps = positions + len(a), steps + len(a) // rows
    return {"kl": kl / positions, "flips": flips / positions, "dnll": dnll / positions, "agreeing": agreeing / steps}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for family, marker in (("top", "s"), ("median", "o"), ("ratio", "^"), ("budget", "D")):
        points = sorted((r["distinct"], 100 * r["flips"], r["plan"]) for r in rows if r["plan"].startswith(family))
        axes.plot([p[0] for p in points], [p[1] for p in points], marker=marker, linestyle="", label=family)
        for x, y, name in points:
            axes.annotate(name, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.set_xlabel("distinct experts a layer reads in a step")
    axes.set_ylabel("top-1 flips, %")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "tiny-moe")
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=384, help="teacher-forced tokens of each text")
    parser.add_argument("--rows", type=int, default=8, help="rows of a verify step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    whole = [tokenizer((ROOT.parent / name).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0] for name in FILES]
    need = args.prefix + args.tokens + 1
    if any(len(ids) < need for ids in whole):
        raise SystemExit(f"--prefix and --tokens ask for {need} tokens, the shortest text has {min(map(len, whole))}")
    texts = [ids[:need] for ids in whole]
    # Thresholds come from other parts of the same texts.
    rest = [ids[need : need + 1536] for ids in whole if len(ids) > need + 512]
    rows: list[dict[str, Any]] = []
    console = Console()
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("calibrating", total=None)
        given = plans(model, rest)
        progress.update(task, total=len(given))
        exact: list[Tensor] = []
        for name, plan in given.items():
            progress.update(task, description=name)
            began = time.perf_counter()
            found, counter = run(model, texts, plan, args.prefix, args.rows)
            exact = exact or found
            measured = compare(exact, found, texts, args.prefix, args.rows)
            row = {"plan": name, **measured, "kept": counter.kept / counter.rows, "distinct": counter.distinct / counter.calls}
            rows.append({**row, "seconds": round(time.perf_counter() - began, 1)})
            progress.advance(task)
            if not sys.stderr.isatty():
                print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"rows_of_a_step": args.rows, "plans": rows}, indent=2), encoding="utf-8")
    table = Table(title=f"{len(texts)} texts, {args.tokens} tokens each, T = {args.rows}")
    for name in ("plan", "KL", "flips %", "dNLL", "agreeing", "kept", "distinct"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for row in rows:
        table.add_row(
            row["plan"], f"{row['kl']:.4f}", f"{100 * row['flips']:.1f}", f"{row['dnll']:+.3f}", f"{row['agreeing']:.2f}",
            f"{row['kept']:.2f}", f"{row['distinct']:.1f}",
        )  # fmt: skip
    console.print(table)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
