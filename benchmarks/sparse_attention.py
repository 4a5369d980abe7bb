"""Sparse verify attention on a CUDA device: select once, attend in an anchor layer and its followers.

    python benchmarks/sparse_attention.py [--points 1x32768 1x65536 1x131072 8x32768] [--blocks 64 8] [--followers 3]
                                          [--aggregate max] [--share 16] [--rows 8] [--json FILE]

Llama-3.1-8B's attention (32 query and 8 KV heads, head dim 128) in bfloat16, 1/16 of the keys selected. Times are medians in
microseconds inside one CUDA graph over as many layer groups as hold 240 MB of *selected* blocks, each layer with a full cache
of its own. ``per layer``: selection by the anchor and attention in all layers of a group, over the layers; ``select``,
``attend``: one call of each; ``contest``: the top-k by itself, beside ``torch.topk``; ``upkeep``: ``block_summary_`` of eight
anchors in a step that completes no block. ``limit``: selected K and V (and the anchor's summaries) once at 4.3 TB/s. ``dense``:
the exact kernel over the whole cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention import DIM, HEADS, KV_HEADS, causal, graph_us
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.selection import summarize_blocks

ROTATE = 240 << 20
Lists = tuple[Tensor, Tensor, Tensor]
# Rows that score, and how their scores are aggregated.
Rule = tuple[str, str]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Group:
    """One anchor and its followers: caches, queries and the anchor's summaries."""

    def __init__(self, batch: int, rows: int, slots: int, layers: int, size: int) -> None:
        self.layers = [
            (rand(batch, rows, HEADS, DIM).transpose(1, 2), *(rand(batch, KV_HEADS, slots, DIM) for _ in range(2)))
            for _ in range(layers)
        ]
        self.summary = summarize_blocks(self.layers[0][1], size, "mean")


class Point:
    """A shape: what its calls share."""

    def __init__(self, batch: int, slots: int, rows: int, size: int, share: int, rule: Rule, followers: int) -> None:
        self.size, self.rule, self.tokens = size, rule, slots // share
        self.mask = causal(rows, slots, slots)
        self.live = library.live_blocks(self.mask, size)
        self.position = torch.full((1,), slots - rows, device="cuda")
        self.gate = torch.zeros(1, dtype=torch.int64, device="cuda")
        selected = 2 * batch * KV_HEADS * self.tokens * DIM * 2
        count = max(1, -(-ROTATE // (selected * (followers + 1))))
        self.groups = [Group(batch, rows, slots, followers + 1, size) for _ in range(count)]
        self.selected_bytes = selected
        self.summary_bytes = self.groups[0].summary.numel() * 2

    def select(self, q: Tensor, summary: Tensor | None, scores: Tensor | None = None) -> Lists:
        return library.select_blocks(
            q, summary, scores, *self.live, self.position, self.gate, self.size, DIM**-0.5, *self.rule, "own", False,
            1, 2, self.tokens, 0.0, 0,
        )  # fmt: skip

    def attend(self, layer: tuple[Tensor, Tensor, Tensor], lists: Lists) -> Tensor:
        return library.attention_triton(*layer, self.mask, *lists, self.size, DIM**-0.5)

    def group(self, group: Group) -> None:
        lists = self.select(group.layers[0][0], group.summary)
        for layer in group.layers:
            self.attend(layer, lists)


def measure(
    batch: int, slots: int, rows: int, size: int, share: int, rule: Rule, followers: int, bandwidth: float
) -> dict[str, Any]:
    point = Point(batch, slots, rows, size, share, rule, followers)
    layers = followers + 1
    chosen = [point.select(g.layers[0][0], g.summary) for g in point.groups]
    masses = [torch.rand(batch, KV_HEADS, slots // size, device="cuda") for _ in range(4)]
    first = point.groups[0].layers[0]

    def over(calls: list[Callable[[], Any]]) -> float:
        return graph_us(calls)

    attended = [(layer, lists) for g, lists in zip(point.groups, chosen) for layer in g.layers]
    anchors = [point.groups[0].layers[i % layers][1] for i in range(8)]
    summaries = [torch.zeros_like(point.groups[0].summary) for _ in anchors]
    valid = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def upkeep() -> None:
        library.block_summary_(anchors, summaries, valid, point.position, size, "mean")

    upkeep()
    exact = library.live_blocks(point.mask, 64)
    every = [layer for g in point.groups for layer in g.layers][:6]
    return {
        "B": batch, "S": slots, "T": rows, "block_size": size, "query": rule[0], "aggregate": rule[1],
        "followers": followers, "share": 1 / share,
        "limit_us": (layers * point.selected_bytes + point.summary_bytes) / layers / bandwidth * 1e6,
        "per_layer_us": over([lambda g=g: point.group(g) for g in point.groups]) / layers,
        "select_us": over([lambda g=g: point.select(g.layers[0][0], g.summary) for g in point.groups]),
        "attend_us": over([lambda a=a: point.attend(*a) for a in attended]),
        "contest_us": over([lambda m=m: point.select(first[0], None, m) for m in masses]),
        "topk_us": over([lambda m=m: m.topk(point.tokens // size, -1) for m in masses]),
        "upkeep_us": over([upkeep]),
        "dense_us": over([lambda x=x: library.attention_triton(*x, point.mask, *exact, 64, DIM**-0.5) for x in every]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="+", default=["1x32768", "1x65536", "1x131072", "8x32768"], metavar="BxS")
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--query", default="all", choices=["first", "first_last", "all", "mean"])
    parser.add_argument("--aggregate", default="max", choices=["max", "mean", "softmax"])
    parser.add_argument("--followers", type=int, default=3)
    parser.add_argument("--share", type=int, default=16, help="one key in so many is selected")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second for the limit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, bfloat16, {HEADS}/{KV_HEADS} heads, T = {args.rows}, 1/{args.share} selected; us")
    names = ["limit", "per layer", "select", "attend", "contest", "topk", "upkeep", "dense"]
    print(f"{'B':>2} {'S':>7} {'block':>5} " + " ".join(f"{name:>9}" for name in names))
    rows = []
    for text in args.points:
        batch, slots = (int(part) for part in text.split("x"))
        for size in args.blocks:
            row = measure(batch, slots, args.rows, size, args.share, (args.query, args.aggregate), args.followers, args.bandwidth)
            rows.append(row)
            values = " ".join(f"{row[name.replace(' ', '_') + '_us']:>9.1f}" for name in names)
            print(f"{batch:>2} {slots:>7} {size:>5} {values}", flush=True)
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(
                    json.dumps({"card": card, "torch": torch.__version__, "rows": rows}, indent=2), encoding="utf-8"
                )


if __name__ == "__main__":
    main()
