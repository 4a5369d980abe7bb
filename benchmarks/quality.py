"""What a sparsity plan costs in quality: compiled sparse verify steps of a real model against exact ones, teacher-forced.

    python benchmarks/quality.py [--plans NAME ...] [--plan FILE.json ...] [--full] [--json FILE] [--plot FILE.png]
    python benchmarks/quality.py --list        # the named plans
    python benchmarks/quality.py --check       # a budget that covers the context, and sparse=False, give the exact bits

SmolLM2-135M-Instruct, float32. Each text is prefilled exactly (7,424 tokens), then its next 256 tokens (512 with --full) run
through ``compile_verify`` in steps of 8 rows. The cache advances with the true tokens and keeps the K and V that earlier sparse
steps wrote, so errors add up as they do in use. The reference is the same steps with the exact plan.

Measured per text, then averaged over texts: KL(exact || sparse) of the next-token distribution (mean and 95th percentile over
positions, in nats), top-1 flips (share of positions whose argmax differs), dNLL (sparse minus exact, of the true next token), and
three densities, each a share of the live K and V bytes of *all* layers, measured from the block lists of the run:

* selected: blocks that won the contest; dense layers read all;
* blocks: those and the sink, recent and unfinished blocks that are always read;
* total: those and what anchors read to select: one summary (two for min/max) for each live block, or every key for ``exact``.

Upkeep of summaries (rereading one block for each anchor and step, and each new key once) is in the JSON, apart from the total.

The five texts are three of benchmarks/texts and two sources of the standard library, fixed to Python 3.11.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import logging
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import spec_compile as sc
from spec_compile.errors import SpecCompileError
from spec_compile.files import write_whole
from spec_compile.kernels import library
from spec_compile.loading import load_model, smollm2_path

PROTOCOL_PYTHON = (3, 11)

_PAPER = {"budget": 1024, "block_size": 64, "sink": 1, "recent": 2, "query": "first"}
_SMALL = {"sink": 1, "recent": 2, "query": "all"}
_B8 = {**_SMALL, "budget": 1008, "block_size": 8}
_B16 = {**_SMALL, "budget": 1104, "block_size": 16}
_SOFTMAX = {"aggregate": "softmax"}
# 15 of 30 layers select, as with a frequency of 2, but all shallow ones, where reuse loses most mass: worse all the same.
_SHALLOW = {"index_topk_pattern": "FFFFFFFFSSSFSSFSSFSSFSFSFSSFSS"}

# Name: fields of AttentionPlan. "paper" is the method of arXiv 2512.21911 with mean keys; the budgets of "b" plans keep
# the total density of those that reuse selections below .17 at 7,680 tokens of context.
PLANS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "paper-mean": {**_PAPER, "aggregate": "mean"},
    "paper-softmax": {**_PAPER, **_SOFTMAX},
    "paper-reuse2": {**_PAPER, "index_topk_freq": 2},
    "paper-reuse4": {**_PAPER, "index_topk_freq": 4},
    "paper-mean-reuse2": {**_PAPER, "aggregate": "mean", "index_topk_freq": 2},
    "paper-all": {**_PAPER, "query": "all"},
    "paper-min-max": {**_PAPER, "representative": "min_max"},
    "paper-pooled": {**_PAPER, "heads": "pooled"},
    "paper-exact": {**_PAPER, "representative": "exact"},
    "b8-all": _B8,
    "b8-all-reuse2": {**_B8, "budget": 896, "sink": 2, "recent": 16, "index_topk_freq": 2},
    "b8-max-reuse2": {**_B8, "index_topk_freq": 2},
    "b8-softmax-reuse2": {**_B8, **_SOFTMAX, "index_topk_freq": 2},
    "b8-softmax-reuse2-640": {**_B8, **_SOFTMAX, "budget": 640, "index_topk_freq": 2},
    "b8-softmax-reuse4": {**_B8, **_SOFTMAX, "budget": 1120, "index_topk_freq": 4},
    "b8-softmax-shallow": {**_B8, **_SOFTMAX, **_SHALLOW},
    "b8-pooled-reuse2": {**_B8, **_SOFTMAX, "heads": "pooled", "index_topk_freq": 2},
    "b8-min-max-reuse4": {**_B8, **_SOFTMAX, "representative": "min_max", "index_topk_freq": 4},
    "b16-softmax": {**_B16, **_SOFTMAX},
    "b16-softmax-reuse2": {**_B16, **_SOFTMAX, "index_topk_freq": 2},
    "b16-softmax-reuse2-768": {**_B16, **_SOFTMAX, "budget": 768, "index_topk_freq": 2},
    "b16-softmax-reuse4": {**_B16, **_SOFTMAX, "budget": 1152, "index_topk_freq": 4},
    "b16-softmax-shallow": {**_B16, **_SOFTMAX, **_SHALLOW},
    "b16-min-max-reuse4": {**_B16, **_SOFTMAX, "representative": "min_max", "index_topk_freq": 4},
    "b16-exact": {**_B16, "representative": "exact"},
    "b32-softmax-reuse2": {**_SMALL, **_SOFTMAX, "budget": 1088, "block_size": 32, "index_topk_freq": 2},
}
DEFAULT_PLANS = ["paper", "paper-reuse2", "b8-softmax-reuse2", "b16-softmax-reuse2", "b16-softmax-reuse4"]


def texts(names: list[str] | None = None) -> dict[str, str]:
    """The protocol's texts by name."""
    paths = {path.stem: path for path in sorted((Path(__file__).parent / "texts").glob("*.txt"))}
    paths |= {module.__name__: Path(inspect.getfile(module)) for module in (argparse, typing)}
    for name in names or ():
        if name not in paths:
            raise SystemExit(f"--texts: no text {name!r}; there are {', '.join(paths)}")
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if not names or name in names}


def other_python() -> str | None:
    """What to tell a user whose standard library is not the protocol's."""
    if sys.version_info[:2] == PROTOCOL_PYTHON:
        return None
    protocol, here = ".".join(map(str, PROTOCOL_PYTHON)), ".".join(map(str, sys.version_info[:2]))
    return f"this is Python {here}: argparse and typing differ from those of Python {protocol}, which the published numbers use"


@dataclass
class Reads:
    """Bytes of K and V held and read over the steps of a run."""

    live: int = 0
    selected: int = 0
    kept: int = 0
    scoring: int = 0
    upkeep: int = 0

    def add(self, other: Reads) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def densities(self) -> dict[str, float]:
        live = max(1, self.live)
        return {
            "selected_density": self.selected / live, "block_density": self.kept / live,
            "total_density": (self.kept + self.scoring) / live, "upkeep_density": self.upkeep / live,
        }  # fmt: skip


@dataclass
class Recorder:
    """Every call of ``select_blocks`` of one step: the block lists it was given and those it chose."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls of the CPU operator, whichever way its graph was compiled."""
        inner = library.select_blocks_reference
        names = list(inspect.signature(inner).parameters)

        def recording(*args: Any) -> Any:
            chosen = inner(*args)
            self.calls.append({**dict(zip(names, args)), "chosen": chosen[0], "kept": chosen[1]})
            return chosen

        with mock.patch.object(library, "select_blocks_reference", recording):
            yield

    def reads(self, report: Any, held: int, rows: int, itemsize: int) -> Reads:
        """What the step that held ``held`` tokens before its ``rows`` rows read; forgets the calls."""
        calls, self.calls = self.calls, []
        anchors = [entry.layer for entry in report.attentions if entry.role == "anchor"]
        if len(calls) != len(anchors):
            raise SystemExit(f"{len(calls)} selections were seen in a step of {len(anchors)} anchors: nothing can be measured")
        of_anchor = dict(zip(anchors, calls))
        total, length = Reads(), held + rows
        for entry in report.attentions:
            pair = (entry.head_dim + entry.v_head_dim) * itemsize
            live = entry.kv_heads * length * pair
            call = of_anchor.get(entry.follows or entry.layer)
            if call is None:
                total.add(Reads(live, live, live))
                continue
            size = call["block_size"]
            kept, won = _keys_read(call["chosen"], call, length)
            total.add(Reads(live, won * pair, kept * pair))
            if entry.role != "anchor":
                continue
            key = entry.head_dim * itemsize
            if call["summary"] is None:
                total.scoring += entry.kv_heads * length * key
            else:
                new = held // size - max(0, held - rows) // size
                total.scoring += entry.kv_heads * int(call["count"]) * call["summary"].shape[3] * key
                total.upkeep += entry.kv_heads * (1 + new) * size * key
        return total


def _keys_read(chosen: Tensor, call: dict[str, Any], length: int) -> tuple[int, int]:
    """Live keys in the blocks read, summed over KV heads: all of them, and those of blocks that stood in the contest."""
    size, live, position = call["block_size"], int(call["count"]), int(call["position"])
    ids = chosen[0].long()
    keys = (length - ids * size).clamp(0, size).masked_fill(ids < 0, 0)
    # Live blocks are consecutive here, so a block's number is its place.
    contest = (ids >= call["sink"]) & (ids < live - call["recent"]) & ((ids + 1) * size <= position)
    return int(keys.sum()), int(keys[contest].sum())


@dataclass
class Document:
    """A text's tokens, and K and V of its prefix."""

    name: str
    ids: Tensor
    prefix: int
    held: list[tuple[Tensor, Tensor]]
    exact: Tensor | None = None

    def load(self, cache: Any) -> None:
        """Make ``cache`` hold the prefix and nothing else."""
        for layer, (keys, values) in zip(cache.layers, self.held):
            layer.keys[:, :, : self.prefix].copy_(keys)
            layer.values[:, :, : self.prefix].copy_(values)
            layer.cumulative_length.fill_(self.prefix)

    def steps(self, rows: int) -> list[int]:
        return list(range(self.prefix, self.ids.shape[1] - 1, rows))


@torch.no_grad()
def prefill(model: Any, name: str, ids: Tensor, prefix: int) -> Document:
    """``ids`` ends with the token after the last row, which is only predicted."""
    from transformers import DynamicCache

    # A growing cache spares the prefill a mask; its K and V are copied into the static one for each run.
    grown = DynamicCache(config=model.config)
    model(input_ids=ids[:, :prefix], past_key_values=grown, use_cache=True, logits_to_keep=1)
    return Document(name, ids, prefix, [(layer.keys, layer.values) for layer in grown.layers])


def run_steps(
    verify: Any, document: Document, rows: int, use: Callable[[int, Tensor], None], sparse: bool | None = None
) -> list[float]:
    """Teacher-force the document; ``use(slot, logits [rows, V])`` after each step. Returns the seconds of each step."""
    document.load(verify.cache)
    seconds = []
    for slot in document.steps(rows):
        start = time.perf_counter()
        logits = verify(document.ids[:, slot : slot + rows], sparse=sparse)
        seconds.append(time.perf_counter() - start)
        use(slot, logits[0].float())
    return seconds


def exact_logits(verify: Any, document: Document, rows: int, sparse: bool | None = None) -> tuple[Tensor, float]:
    """Logits of all positions, and the median milliseconds of a step."""
    found: list[Tensor] = []
    seconds = run_steps(verify, document, rows, lambda slot, logits: found.append(logits.clone()), sparse)
    return torch.cat(found), 1e3 * statistics.median(seconds)


def divergence(exact: Tensor, found: Tensor, following: Tensor) -> dict[str, Tensor]:
    """Per position: KL(exact || found) in nats, whether the argmax differs, and the change of the following token's NLL."""
    p, q = exact.double().log_softmax(-1), found.double().log_softmax(-1)
    taken = following.unsqueeze(-1)
    return {
        "kl": (p.exp() * (p - q)).sum(-1),
        "flip": exact.argmax(-1) != found.argmax(-1),
        "dnll": (p - q).gather(-1, taken).squeeze(-1),
    }


def evaluate(verify: Any, document: Document, rows: int, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One document under one plan."""
    assert document.exact is not None
    parts: list[dict[str, Tensor]] = []
    reads, recorder = Reads(), Recorder()
    same = True

    def use(slot: int, logits: Tensor) -> None:
        nonlocal same
        at = slot - document.prefix
        expected = document.exact[at : at + rows]  # type: ignore[index]
        same = same and torch.equal(expected, logits)
        parts.append(divergence(expected, logits, document.ids[0, slot + 1 : slot + 1 + rows]))
        reads.add(recorder.reads(verify.report(), slot, rows, verify.cache.layers[0].keys.element_size()))
        advance()

    start = time.perf_counter()
    with recorder.watch():
        seconds = run_steps(verify, document, rows, use)
    kl, flip, dnll = (torch.cat([part[name] for part in parts]) for name in ("kl", "flip", "dnll"))
    return {
        "tokens": kl.numel(), "kl": kl.mean().item(), "kl_p95": kl.quantile(0.95).item(),
        "flips_percent": 100 * flip.double().mean().item(), "dnll": dnll.mean().item(), "bit_identical": same,
        **reads.densities(), "ms_per_step": 1e3 * statistics.median(seconds), "seconds": time.perf_counter() - start,
    }  # fmt: skip


def mean_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over documents; seconds are added up."""
    keys = [key for key, value in rows[0].items() if isinstance(value, float)]
    mean = {key: statistics.fmean(row[key] for row in rows) for key in keys}
    return {**mean, "seconds": sum(row["seconds"] for row in rows)}


def make_verify(model: Any, cache: Any, rows: int, plan: Any, codegen: str) -> Any:
    return sc.compile_verify(model, cache, draft_len=rows - 1, plan=plan, strict=True, codegen=codegen)


def chosen_plans(args: argparse.Namespace) -> dict[str, sc.SparsityPlan]:
    names = args.plans if args.plans is not None else ([] if args.plan else DEFAULT_PLANS)
    found = {name: sc.SparsityPlan(attention=sc.AttentionPlan(**PLANS[name])) for name in names}
    for path in args.plan:
        found[path.stem] = sc.SparsityPlan.load(path)
        if found[path.stem].exact:
            raise SystemExit(f"{path}: the plan is exact, there is nothing to measure")
    return found


def show(console: Console, plans: dict[str, Any]) -> None:
    table = Table(title="mean over texts; densities are shares of all live K and V bytes")
    table.add_column("plan", no_wrap=True)
    for column in ("texts", "KL", "p95", "flips %", "dNLL", "selected", "blocks", "total", "ms/step", "s"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in plans.items():
        m = row["mean"]
        table.add_row(
            name, str(len(row["documents"])), f"{m['kl']:.4f}", f"{m['kl_p95']:.3f}", f"{m['flips_percent']:.2f}",
            f"{m['dnll']:+.4f}", f"{m['selected_density']:.3f}", f"{m['block_density']:.3f}", f"{m['total_density']:.3f}",
            f"{m['ms_per_step']:.0f}", f"{m['seconds']:.0f}",
        )  # fmt: skip
    # A pipe counts as 80 columns, which would cut the numbers off.
    (console if console.width >= 118 else Console(width=118)).print(table)


def plot(plans: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 5.5), layout="constrained")
    for axis, key, title in zip(axes, ("flips_percent", "kl"), ("top-1 flips, %", "KL(exact || sparse), nats")):
        front: list[tuple[float, float]] = []
        for number, (name, row) in enumerate(plans.items(), 1):
            x, y = row["mean"]["total_density"], row["mean"][key]
            # Names would cover each other: number the points, name them in the legend.
            label = f"{number} {name}" if axis is axes[0] else None
            axis.scatter(x, y, s=18, color="tab:orange" if name.startswith("paper") else "tab:blue", label=label)
            axis.annotate(str(number), (x, y), fontsize=8, xytext=(3, 3), textcoords="offset points")
        for x, y in sorted((row["mean"]["total_density"], row["mean"][key]) for row in plans.values()):
            if not front or y < front[-1][1]:
                front.append((x, y))
        axis.plot(*zip(*front), color="grey", linewidth=0.8)
        axis.set(xlabel="total density (bytes read / live bytes of K and V); line: Pareto front", ylabel=title)
        axis.set_ylim(0, 1.1 * max(row["mean"][key] for row in plans.values()) or 1)
    figure.legend(loc="outside right center", fontsize=7, handlelength=1)
    figure.savefig(path, dpi=150)


def check(model: Any, cache: Any, document: Document, args: argparse.Namespace, console: Console) -> int:
    """Exactness of the two ways to read everything. Returns the exit status."""
    failed = 0
    for name in ("paper", "b8-softmax-reuse2", "b16-exact"):
        fields = PLANS[name]
        covering = make_verify(model, cache, args.rows, {"attention": {**fields, "budget": document.ids.shape[1]}}, args.codegen)
        row = evaluate(covering, document, args.rows)
        switch = make_verify(model, cache, args.rows, {"attention": fields}, args.codegen)
        dense, _ = exact_logits(switch, document, args.rows, sparse=False)
        same = torch.equal(dense, document.exact)  # type: ignore[arg-type]
        ok = row["bit_identical"] and row["kl"] == 0 and row["flips_percent"] == 0 and row["block_density"] == 1 and same
        failed += not ok
        console.print(
            f"{name}: covering budget: KL {row['kl']:g}, flips {row['flips_percent']:g} %, same bits "
            f"{row['bit_identical']}, block density {row['block_density']:g}; sparse=False: same bits {same}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return min(1, failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=[*PLANS], metavar="NAME", help="named plans (see --list)")
    parser.add_argument("--plan", type=Path, action="append", default=[], metavar="FILE.json", help="a plan of yours; repeatable")
    parser.add_argument("--list", action="store_true", help="print the named plans and stop")
    parser.add_argument("--check", action="store_true", help="check exactness on the first text and stop")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", nargs="+", metavar="NAME")
    parser.add_argument("--prefix", type=int, default=7424)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--full", action="store_true", help="512 tokens")
    parser.add_argument("--rows", type=int, default=8, help="rows of a verify step (2..32)")
    parser.add_argument("--codegen", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--json", type=Path, help="written after every finished text")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.tokens = 512 if args.full else args.tokens
    if not 2 <= args.rows <= 32 or args.prefix < 1 or args.tokens < 1 or args.tokens % args.rows:
        parser.error("--rows must lie in 2..32, and --tokens must be a multiple of it")
    return args


def measure(args: argparse.Namespace, console: Console, result: dict[str, Any]) -> int:
    """Fill ``result["plans"]`` document by document."""
    plans = chosen_plans(args)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, tokenizer = load_model(args.model or smollm2_path())
    cache = sc.VerifyCache(model, max_len=args.prefix + args.tokens)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    sources = texts(args.texts)
    if args.check:
        sources = dict([next(iter(sources.items()))])
    documents: list[Document] = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("prefill", total=len(sources))
        exact = make_verify(model, cache, args.rows, None, args.codegen)
        for name, text in sources.items():
            progress.update(task, description=f"prefill and exact steps: {name}")
            ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.prefix + args.tokens + 1]
            if ids.shape[1] <= args.prefix + args.tokens:
                raise SystemExit(f"{name} has only {ids.shape[1]} tokens, {args.prefix + args.tokens + 1} are needed")
            document = prefill(model, name, ids, args.prefix)
            document.exact, result["exact_ms_per_step"][name] = exact_logits(exact, document, args.rows)
            documents.append(document)
            result["texts"][name] = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]
            progress.advance(task)
        exact_ms = statistics.fmean(result["exact_ms_per_step"].values())
        console.print(f"exact steps: {exact_ms:.0f} ms", highlight=False)
        if args.check:
            return check(model, cache, documents[0], args, console)
        task = progress.add_task("", total=len(plans) * len(documents) * (args.tokens // args.rows))
        for name, plan in plans.items():
            verify = make_verify(model, cache, args.rows, plan, args.codegen)
            row = {"plan": plan.to_dict(), "documents": {}, "mean": {}}
            for document in documents:
                progress.update(task, description=f"{name}: {document.name}")
                row["documents"][document.name] = evaluate(verify, document, args.rows, lambda: progress.advance(task))
                row["mean"] = mean_of([*row["documents"].values()])
                result["plans"][name] = row
                if args.json:
                    write_whole(args.json, json.dumps(result, indent=2) + "\n")
            m = row["mean"]
            console.print(
                f"{name}: KL {m['kl']:.4f}, flips {m['flips_percent']:.2f} %, total density {m['total_density']:.3f}",
                highlight=False,
            )
    return 0


def main() -> int:
    args = parse()
    console = Console()
    if args.list:
        for name, fields in PLANS.items():
            console.print(f"{name}: " + ", ".join(f"{key}={value}" for key, value in fields.items()), highlight=False)
        return 0
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if (warning := other_python()) is not None:
        console.print(f"note: {warning}", highlight=False)
    result: dict[str, Any] = {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "python": ".".join(map(str, sys.version_info[:3])),
        "prefix": args.prefix, "tokens": args.tokens, "rows": args.rows, "codegen": args.codegen, "texts": {},
        "exact_ms_per_step": {}, "plans": {},
    }  # fmt: skip
    try:
        status = measure(args, console, result)
    except KeyboardInterrupt:
        status = 130
        console.print("interrupted; what is finished follows", highlight=False)
    except SpecCompileError as error:
        raise SystemExit(f"error: {error}") from None
    if result["plans"]:
        show(console, result["plans"])
        if args.plot:
            plot(result["plans"], args.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
