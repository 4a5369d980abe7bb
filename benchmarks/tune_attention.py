"""Measure tilings of the Triton attention kernel; what wins goes into kernels/tiling.py by hand.

    python benchmarks/tune_attention.py [--heads 32x8] [--dim 128] [--dtype bfloat16] [--points 1x8x32768 8x9x32768] [--json FILE]

For each point (B x T x S) every candidate is checked against float64 on one head and timed in a CUDA graph over operands that
rotate past the L2 cache. The table's own choice is marked. Nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from attention import BLOCK, ROTATE, causal, graph_us
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.attention_triton import attention_triton
from spec_compile.kernels.tiling import Tiling, choose_tiling, device_of


def candidates(processors: int, batch: int, kv_heads: int, rows: int, pdl: bool) -> list[Tiling]:
    found = set()
    for tile, warps, stages, share in itertools.product((16, 32, 64, 128), (4, 8), (2, 3, 4), (0.5, 1, 1.5, 2, 3)):
        if tile > 2 * rows and tile > 64:
            continue
        splits = int(processors * share) // (batch * kv_heads * -(-rows // tile))
        found.add(Tiling(tile, max(1, min(64, splits)), warps, stages, pdl))
    return sorted(found, key=repr)


def first_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q[:1, 0].double() @ k[:1, 0].double().transpose(1, 2) * q.shape[3] ** -0.5
    return scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1) @ v[:1, 0].double()


def tune(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, batch: int, rows: int, slots: int) -> dict[str, Any]:
    size = 2 * batch * kv_heads * slots * dim * dtype.itemsize

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    sets = [
        (rand(batch, rows, heads, dim).transpose(1, 2), *(rand(batch, kv_heads, slots, dim) for _ in range(2)))
        for _ in range(max(2, -(-ROTATE // size)))
    ]  # fmt: skip
    mask = causal(rows, slots, slots)
    lists = library.live_blocks(mask, BLOCK)
    wanted = first_head(*sets[0], mask)
    device = sets[0][0].device
    group_rows = heads // kv_heads * rows
    chosen = choose_tiling(device, dtype, batch, kv_heads, group_rows, dim, dim, BLOCK)
    results = []
    for tiling in {chosen, *candidates(device_of(device).processors, batch, kv_heads, group_rows, chosen.pdl)}:

        def attend(operands: tuple[Tensor, Tensor, Tensor], tiling: Tiling = tiling) -> Tensor:
            return attention_triton(*operands, mask, *lists, BLOCK, dim**-0.5, 0.0, None, tiling)

        try:
            error = float((attend(sets[0])[:1, 0].double() - wanted).norm() / wanted.norm())
            us = graph_us([lambda s=s, attend=attend: attend(s) for s in sets], 5)
        except Exception as failure:
            if "out of resource" not in str(failure).lower():
                raise
            continue
        results.append({"us": us, "error": error, "chosen": tiling == chosen, **vars(tiling)})
    results.sort(key=lambda result: result["us"])
    return {"B": batch, "T": rows, "S": slots, "limit_us": size / 4.3e12 * 1e6, "results": results}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=numbers, default=(32, 8), metavar="HQxHKV")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--points", type=numbers, nargs="+", default=[(1, 8, 32768)], metavar="BxTxS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for batch, rows, slots in args.points:
        point = tune(*args.heads, args.dim, getattr(torch, args.dtype), batch, rows, slots)
        found.append(point)
        print(f"B={batch} T={rows} S={slots}: limit {point['limit_us']:.1f} us, {len(point['results'])} tilings ran")
        for place, result in enumerate(point["results"]):
            if place < 6 or result["chosen"]:
                mark = "*" if result["chosen"] else " "
                shape = "rows {rows}, splits {splits}, warps {warps}, stages {stages}".format(**result)
                print(f"  {mark} {result['us']:8.1f} us  {shape}  error {result['error']:.1e}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
