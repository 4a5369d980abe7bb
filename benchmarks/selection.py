"""The observations behind sparse verification (arXiv 2512.21911), measured on a real model: does the evidence hold here?

    python benchmarks/selection.py [--texts NAME ...] [--budget 1024] [--json FILE] [--plot FILE.png]

One exact forward per text (7,424 + 256 tokens of SmolLM2-135M-Instruct, float32, the texts of quality.py) records the queries
of the last 256 tokens and all keys. Windows of them stand for verify steps: nothing sparse is run, see quality.py for that.

* **overlap**: each row of a window chooses its own blocks; share of them that two rows have in common, by distance between
  the rows and by layer, for windows of 8 and 32 rows (the paper's Figure 2 has trees of 60 drafts). ``contest`` counts the
  blocks won, ``read`` also the sink and recent blocks that every row keeps.
* **layers**: Jaccard similarity of the selections of two layers 1..8 apart, same KV head, and what a layer that reuses
  the selection of an earlier one still covers of its attention mass, relative to its own selection.
* **recall**: share of the true attention mass of all rows in the blocks read, for every representative, block size, scoring
  query and budget. Sink and recent blocks are the same tokens at every block size.

Chance levels are those of uniformly random choices of as many blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quality import other_python, texts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from spec_compile.files import write_whole
from spec_compile.kernels.selection import block_scores, summarize_blocks
from spec_compile.loading import load_model, smollm2_path

SIZES = (8, 16, 64)
ROWS = (8, 32)
SINK_TOKENS, RECENT_TOKENS = 64, 128
DISTANCES = range(1, 9)
# Window every so many rows; also the length of the longest window.
STRIDE = 32

# Name: representative and aggregate; exact mass is averaged over rows and heads, as block_mass does.
SCORERS: dict[str, tuple[str, str]] = {
    "mean": ("mean", "max"),
    "mean, softmax": ("mean", "softmax"),
    "min_max": ("min_max", "max"),
    "min_max, softmax": ("min_max", "softmax"),
    "exact": ("exact", "mean"),
}


class Recording:
    """Attention function for transformers that keeps every layer's keys and last queries."""

    name = "spec_compile_recording"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.layers: list[tuple[Tensor, Tensor, float]] = []

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        scale = rest.get("scaling") or query.shape[-1] ** -0.5
        self.layers.append((query[:, :, -self.tokens :].clone(), key.contiguous(), scale))
        return sdpa_attention_forward(module, query, key, value, None, **rest)


@torch.no_grad()
def record(model: Any, ids: Tensor, tokens: int) -> list[tuple[Tensor, Tensor, float]]:
    """``(q [1, Hq, tokens, D], k [1, Hkv, S, D], scale)`` of every layer."""
    from transformers import AttentionInterface

    recording = Recording(tokens)
    AttentionInterface.register(Recording.name, recording)
    before = model.config._attn_implementation
    model.set_attn_implementation(Recording.name)
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return recording.layers


def contest(start: int, rows: int, size: int) -> Tensor:
    """bool [NB]: committed blocks between the sink and the recent ones, of a step whose first row has slot ``start``."""
    live = -(-(start + rows) // size)
    place = torch.arange(live)
    return (place >= SINK_TOKENS // size) & (place < min(start // size, live - RECENT_TOKENS // size))


def pick(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool like ``scores`` [..., NB]: the best ``count`` of the allowed blocks."""
    count = min(count, int(allowed.sum()))
    best = scores.masked_fill(~allowed, -torch.inf).topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def row_masses(q: Tensor, k: Tensor, scale: float, start: int) -> Tensor:
    """float32 [Hkv, G, T, NB]: attention mass of every row in blocks of the smallest size; NB covers whole largest blocks."""
    heads, rows, dim = q.shape[1:]
    kv_heads, length = k.shape[1], start + rows
    scores = (q[0].reshape(kv_heads, -1, dim) @ k[0, :, :length].transpose(1, 2)) * scale
    scores = scores.view(kv_heads, heads // kv_heads, rows, length)
    later = torch.arange(length) > start + torch.arange(rows)[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    weights = torch.nn.functional.pad(weights, (0, -length % SIZES[-1]))
    return weights.unflatten(-1, (-1, SIZES[0])).sum(-1)


def coarser(masses: Tensor, size: int, blocks: int) -> Tensor:
    """Masses in blocks of ``size`` from those in the smallest blocks."""
    return masses.unflatten(-1, (-1, size // SIZES[0])).sum(-1)[..., :blocks]


class Window:
    """One layer's view of one verify step."""

    def __init__(self, layer: tuple[Tensor, Tensor, float], first: int, start: int, rows: int) -> None:
        q, self.k, self.scale = layer
        self.q, self.start, self.rows = q[:, :, first : first + rows], start, rows
        self._summaries: dict[tuple[int, str], Tensor] = {}

    def allowed(self, size: int) -> Tensor:
        return contest(self.start, self.rows, size)

    def summary(self, size: int, representative: str) -> Tensor:
        if (size, representative) not in self._summaries:
            keys = self.k[:, :, : self.start + self.rows]
            self._summaries[size, representative] = summarize_blocks(keys, size, representative)
        return self._summaries[size, representative]

    def scores(self, size: int, representative: str, aggregate: str, query: str) -> Tensor:
        """[Hkv, NB]"""
        summary = self.summary(size, representative)
        return block_scores(self.q, summary, self.scale, query, self.allowed(size)[None], aggregate)[0]

    def scores_by_row(self, size: int) -> Tensor:
        """[T, Hkv, NB]: mean-key scores of each row for itself, its query heads united by their maximum."""
        alone = self.q[0].transpose(0, 1).unsqueeze(2)
        summary = self.summary(size, "mean").expand(self.rows, -1, -1, -1, -1)
        return block_scores(alone, summary, self.scale, "first", self.allowed(size).expand(self.rows, -1), "max")

    def masses(self) -> Tensor:
        return row_masses(self.q, self.k, self.scale, self.start)


def overlap_of(window: Window, size: int, budget: int) -> dict[str, list[float]]:
    """Shared part of two rows' own choices, by distance 0..T-1."""
    allowed = window.allowed(size)
    own = pick(window.scores_by_row(size), allowed, budget // size).float()
    won = own[0, 0].sum()
    common = torch.einsum("ihn,jhn->ij", own, own) / own.shape[1]
    always = (~allowed).sum()
    by_distance = [common.diagonal(offset).mean() for offset in range(window.rows)]
    return {
        "contest": [float(x / won) for x in by_distance],
        "read": [float((x + always) / (won + always)) for x in by_distance],
        "with_first_row": [float(x / won) for x in common[0]],
        "chance": [float(won / allowed.sum())],
    }


def jaccard(a: Tensor, b: Tensor) -> float:
    return float(((a & b).sum(-1) / (a | b).sum(-1)).mean())


def layers_of(chosen: list[Tensor], pooled: list[Tensor], masses: list[Tensor], allowed: Tensor) -> dict[str, Any]:
    """Similarity of layers' selections by distance and (earlier) layer, and mass covered under reuse."""
    total, found = len(chosen), {"jaccard": [], "jaccard_pooled": [], "reuse": []}  # type: ignore[var-annotated]
    covered = [_covered(masses[i], chosen[i], allowed) for i in range(total)]
    for distance in DISTANCES:
        pairs = [(i, i + distance) for i in range(total - distance)]
        found["jaccard"].append([jaccard(chosen[i], chosen[j]) for i, j in pairs])
        found["jaccard_pooled"].append([jaccard(pooled[i], pooled[j]) for i, j in pairs])
        found["reuse"].append([_covered(masses[j], chosen[i], allowed) / covered[j] for i, j in pairs])
    won, of = int(chosen[0][0].sum()), int(allowed.sum())
    # Two random sets share won * won / of blocks.
    return {**found, "chance": won / (2 * of - won), "own_recall": covered}


def _covered(masses: Tensor, chosen: Tensor, allowed: Tensor) -> float:
    return float((masses * (chosen | ~allowed)).sum(-1).mean())


def recall_of(window: Window, masses: Tensor, budgets: list[int]) -> dict[str, Any]:
    """Attention mass covered, by scorer, block size, query and budget."""
    found: dict[str, Any] = {}
    for size in SIZES:
        allowed = window.allowed(size)
        true = coarser(masses, size, allowed.numel()).mean((1, 2))
        found[f"kept only | {size}"] = _covered(true, torch.zeros_like(true, dtype=torch.bool), allowed)
    for name, (representative, aggregate) in SCORERS.items():
        for size in SIZES:
            allowed = window.allowed(size)
            by_row = coarser(masses, size, allowed.numel())
            true = by_row.mean((1, 2))
            for query in ("first", "all"):
                if representative == "exact":
                    scores = by_row[:, :, :1].mean((1, 2)) if query == "first" else true
                else:
                    scores = window.scores(size, representative, aggregate, query)
                for budget in budgets:
                    chosen = pick(scores, allowed, budget // size)
                    found[f"{name} | {size} | {query} | {budget}"] = _covered(true, chosen, allowed)
    return found


def analyse(
    layers: list[tuple[Tensor, Tensor, float]], prefix: int, tokens: int, budget: int, advance: Callable[[], None]
) -> dict[str, Any]:
    """All evidence of one text; every leaf is a mean over windows."""
    overlaps: dict[str, list[Any]] = {f"{rows} rows, blocks of {size}": [] for rows in ROWS for size in SIZES}
    between: dict[str, list[Any]] = {"blocks of 64, first row": [], "blocks of 8, all rows": []}
    recalls: list[Any] = []
    for first in range(0, tokens - STRIDE + 1, STRIDE):
        start = prefix + first
        by_layer: dict[str, list[Any]] = {name: [] for name in overlaps}
        chosen: dict[str, list[Any]] = {name: [] for name in between}
        recall = []
        for layer in layers:
            for rows in ROWS:
                window = Window(layer, first, start, rows)
                for size in SIZES:
                    by_layer[f"{rows} rows, blocks of {size}"].append(overlap_of(window, size, budget))
            window = Window(layer, first, start, ROWS[0])
            masses = window.masses()
            recall.append(recall_of(window, masses, [budget // 2, budget, 2 * budget]))
            for name, size, aggregate, query in zip(between, (64, 8), ("max", "softmax"), ("first", "all")):
                allowed, scores = window.allowed(size), window.scores(size, "mean", aggregate, query)
                pooled = scores.mean(0, keepdim=True)
                true = coarser(masses, size, allowed.numel()).mean((1, 2))
                chosen[name].append((pick(scores, allowed, budget // size), pick(pooled, allowed, budget // size), true, allowed))
        for name, found in by_layer.items():
            overlaps[name].append(found)
        for name, found in chosen.items():
            own, pooled, masses, allowed = zip(*found)
            between[name].append(layers_of(list(own), list(pooled), list(masses), allowed[0]))
        recalls.append(recall)
        advance()
    return {
        "overlap_by_layer": {name: average(found) for name, found in overlaps.items()},
        "layers": {name: average(found) for name, found in between.items()},
        "recall_by_layer": average(recalls),
    }


def average(items: list[Any]) -> Any:
    """Leaf-wise mean of equal structures of dicts, lists and numbers."""
    if isinstance(items[0], dict):
        return {key: average([item[key] for item in items]) for key in items[0]}
    if isinstance(items[0], list):
        return [average(list(parts)) for parts in zip(*items)]
    return statistics.fmean(items)


def thirds(values: list[float]) -> list[float]:
    """Means over the shallow, middle and deep third of the layers."""
    cut = [0, len(values) // 3, 2 * len(values) // 3, len(values)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(cut)]


def table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    shown = Table(title=title)
    for place, column in enumerate(columns):
        shown.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    # A pipe counts as 80 columns, which would cut the numbers off.
    (console if console.width >= 125 else Console(width=125)).print(shown)


def show(console: Console, mean: dict[str, Any], budget: int) -> None:
    rows = []
    for name, by_layer in mean["overlap_by_layer"].items():
        whole = average(by_layer)
        at = [d for d in (1, 2, 4, 7, 15, 31) if d < len(whole["contest"])]
        for kind in ("contest", "read"):
            above = sum(statistics.fmean(layer[kind][1:]) > 0.8 for layer in by_layer)
            cells = [f"{whole[kind][d]:.2f}" for d in at] + ["-"] * (6 - len(at))
            cells += [f"{statistics.fmean(whole[kind][1:]):.2f}", f"{above} of {len(by_layer)}"]
            rows.append(
                [f"{name}, {kind} (chance {whole['chance'][0]:.2f})" if kind == "contest" else "  with kept blocks", *cells]
            )
    columns = ["distance", "1", "2", "4", "7", "15", "31", "mean", "layers > .8"]
    table(console, f"overlap of rows' own choices, budget {budget} tokens", columns, rows)
    rows = []
    for name, found in mean["layers"].items():
        for key, label in (("jaccard", f"Jaccard (chance {found['chance']:.2f})"), ("jaccard_pooled", "Jaccard, heads pooled"),
                           ("reuse", "mass under reuse / own")):  # fmt: skip
            by_distance = [statistics.fmean(values) for values in found[key]]
            split = thirds(found[key][0])
            rows.append(
                [f"{name}: {label}", *(f"{by_distance[d - 1]:.2f}" for d in (1, 2, 3, 4, 8)), *(f"{x:.2f}" for x in split)]
            )
    columns = ["layers apart", "1", "2", "3", "4", "8", "1 shallow", "1 middle", "1 deep"]
    table(console, "selections of neighbouring layers", columns, rows)
    recall = average(mean["recall_by_layer"])
    kept = [f"{recall[f'kept only | {size}']:.3f}" for size in SIZES for _ in range(3)]
    rows = [["sink and recent blocks only", *kept]]
    for name in SCORERS:
        for query in ("first", "all"):
            cells = [
                f"{recall[f'{name} | {size} | {query} | {b}']:.3f}" for size in SIZES for b in (budget // 2, budget, 2 * budget)
            ]
            rows.append([f"{name}, {query}", *cells])
    columns = ["scores, query", *(f"{size}: {b}" for size in SIZES for b in (budget // 2, budget, 2 * budget))]
    table(console, "attention mass of all rows in the blocks read (block size: budget)", columns, rows)


def plot(mean: dict[str, Any], budget: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    overlap, heat, layers, bars = axes.flat
    for name, by_layer in mean["overlap_by_layer"].items():
        whole = average(by_layer)["contest"]
        overlap.plot(range(1, len(whole)), whole[1:], marker=".", label=name)
    overlap.set(
        xlabel="distance between rows", ylabel="blocks in common", title="rows' own choices, mean over layers", ylim=(0, 1)
    )
    overlap.legend(fontsize=7)
    by_layer = mean["overlap_by_layer"]["32 rows, blocks of 64"]
    image = heat.imshow(
        [layer["contest"][1:] for layer in by_layer], aspect="auto", vmin=0, vmax=1, extent=(1, 32, len(by_layer), 0)
    )
    heat.set(xlabel="distance between rows", ylabel="layer", title="the same by layer, 32 rows, blocks of 64")
    figure.colorbar(image, ax=heat)
    for name, found in mean["layers"].items():
        for key, style in (("jaccard", "-"), ("reuse", ":")):
            layers.plot(range(1, len(found[key][0]) + 1), found[key][0], style, label=f"{name}: {key}")
    layers.set(
        xlabel="layer (against the one before)", ylabel="similarity", title="neighbouring layers' selections", ylim=(0, 1.05)
    )
    layers.legend(fontsize=7)
    recall = average(mean["recall_by_layer"])
    for place, name in enumerate(SCORERS):
        for shift, query in ((-0.2, "first"), (0.2, "all")):
            values = [recall[f"{name} | {size} | {query} | {budget}"] for size in SIZES]
            at = [place + shift + 0.1 * (i - 1) for i in range(len(SIZES))]
            bars.bar(at, values, 0.09, color=["tab:blue", "tab:orange", "tab:green"], alpha=1.0 if query == "all" else 0.5)
    bars.set_xticks(range(len(SCORERS)), [*SCORERS], fontsize=7)
    bars.set(ylabel="attention mass read", title=f"budget {budget}; blocks of {SIZES}; pale: first row scores, full: all rows")
    bars.set_ylim(bottom=min(patch.get_height() for patch in bars.patches) - 0.05)
    figure.savefig(path, dpi=150)


def measure(args: argparse.Namespace, console: Console, result: dict[str, Any]) -> None:
    """Fill ``result["documents"]`` and ``result["mean"]`` text by text."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model, tokenizer = load_model(args.model or smollm2_path())
    sources = texts(args.texts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        windows = args.tokens // STRIDE
        task = progress.add_task("", total=len(sources) * (windows + 1))
        for name, text in sources.items():
            start = time.perf_counter()
            progress.update(task, description=f"{name}: forward")
            ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.prefix + args.tokens]
            if ids.shape[1] < args.prefix + args.tokens:
                raise SystemExit(f"{name} has only {ids.shape[1]} tokens, {args.prefix + args.tokens} are needed")
            layers = record(model, ids, args.tokens)
            progress.advance(task)
            progress.update(task, description=f"{name}: windows")
            found = analyse(layers, args.prefix, args.tokens, args.budget, lambda: progress.advance(task))
            result["documents"][name] = {**found, "seconds": time.perf_counter() - start}
            result["mean"] = average([*result["documents"].values()])
            if args.json:
                write_whole(args.json, json.dumps(result) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--texts", nargs="+", metavar="NAME")
    parser.add_argument("--prefix", type=int, default=7424)
    parser.add_argument("--tokens", type=int, default=256, help=f"recorded queries, a multiple of {STRIDE}")
    parser.add_argument("--budget", type=int, default=1024, help="tokens; recall is also measured at half and twice of it")
    parser.add_argument("--json", type=Path, help="written after every finished text")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.tokens < STRIDE or args.tokens % STRIDE or args.prefix < 512 or args.budget < 2 * SIZES[-1]:
        parser.error(f"--tokens must be a multiple of {STRIDE}, --prefix at least 512, --budget at least {2 * SIZES[-1]}")
    console = Console()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if (warning := other_python()) is not None:
        console.print(f"note: {warning}", highlight=False)
    result: dict[str, Any] = {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "python": ".".join(map(str, sys.version_info[:3])),
        "prefix": args.prefix, "tokens": args.tokens, "budget": args.budget, "documents": {}, "mean": {},
    }  # fmt: skip
    status = 0
    try:
        measure(args, console, result)
    except KeyboardInterrupt:
        status = 130
        console.print("interrupted; what is finished follows", highlight=False)
    if result["mean"]:
        show(console, result["mean"], args.budget)
        if args.plot:
            plot(result["mean"], args.budget, args.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
