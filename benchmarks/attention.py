"""Verify attention on a CUDA device, one layer: spec_compile's kernel beside SDPA, FlexAttention and transformers' own path.

    python benchmarks/attention.py [--lengths 2048 8192 32768 65536 131072] [--rows 1 2 4 8 9 16 32] [--batches 1 8]
                                   [--peers ...] [--json FILE] [--plot FILE.png]

Llama-3.1-8B's attention (32 query and 8 KV heads, head dim 128) in bfloat16: T draft rows against a cache of S slots, all live.
Calls run inside one CUDA graph and rotate through at least 300 MB of K and V, so that no cache level holds them. ``limit`` is
the time to read K and V once at 4.3 TB/s (measured copy rate of an H200; --bandwidth sets another). Times are medians in
microseconds. The list of live blocks is made once per step for all layers; its time stands in a column of its own.

Peers: ``mask`` SDPA with a bool mask and enable_gqa; ``repeat_kv`` what transformers runs (K and V copied per query head);
``flash`` SDPA's flash backend with causal_lower_right; ``cudnn`` SDPA's cuDNN backend with the mask; ``flex`` compiled
FlexAttention with a BlockMask; ``xformers`` triton_splitk, where installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from spec_compile.kernels import library

HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK = 64
ROTATE = 300 << 20
Operands = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def make(batch: int, rows: int, slots: int, count: int) -> list[Operands]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return [
        (rand(batch, rows, HEADS, DIM).transpose(1, 2), *(rand(batch, KV_HEADS, slots, DIM) for _ in range(2)))
        for _ in range(count)
    ]  # fmt: skip


def causal(rows: int, slots: int, live: int) -> Tensor:
    positions = live - rows + torch.arange(rows, device="cuda")
    return (torch.arange(slots, device="cuda") <= positions[:, None])[None, None]


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 9, least: int = 12) -> float:
    """Median time of one call, ``least`` calls or more being replayed as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    rounds = max(1, least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[2:])


def repeat_kv(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    group = HEADS // heads
    return x[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, HEADS, length, dim)


def ours(mask: Tensor) -> Attend:
    lists = library.live_blocks(mask, BLOCK)
    return lambda q, k, v: library.attention_triton(q, k, v, mask, *lists, BLOCK, DIM**-0.5)


def flash(rows: int, slots: int) -> Attend:
    bias = causal_lower_right(rows, slots)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v, attn_mask=bias if rows > 1 else None, enable_gqa=True)

    return attend


def cudnn(mask: Tensor) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def flex(batch: int, rows: int, slots: int) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offset = slots - rows
    block_mask = create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, rows, slots, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)


def xformers(rows: int, slots: int) -> Attend:
    from xformers.ops import fmha
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    group = HEADS // KV_HEADS

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries = q.transpose(1, 2).unflatten(2, (KV_HEADS, group))
        keys, values = (x.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
        bias = LowerTriangularFromBottomRightMask()
        return fmha.memory_efficient_attention_forward(queries, keys, values, attn_bias=bias, op=fmha.triton_splitk.FwOp)

    return attend


def peer(name: str, batch: int, rows: int, slots: int) -> Attend:
    mask = causal(rows, slots, slots)
    if name == "mask":
        return lambda q, k, v: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
    if name == "repeat_kv":
        return lambda q, k, v: sdpa(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)
    if name == "flash":
        return flash(rows, slots)
    if name == "cudnn":
        return cudnn(mask)
    if name == "flex":
        return flex(batch, rows, slots)
    return xformers(rows, slots)


def relative_error(found: Tensor, operands: Operands, mask: Tensor) -> float:
    q, k, v = operands
    wanted = []
    for head in range(HEADS):
        scores = q[:, head].double() @ k[:, head // 4].double().transpose(1, 2) * DIM**-0.5
        wanted.append(scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1) @ v[:, head // 4].double())
    exact = torch.stack(wanted, 1)
    return float((found.double() - exact).norm() / exact.norm())


def measure(batch: int, rows: int, slots: int, peers: list[str], bandwidth: float) -> dict[str, Any]:
    size = 2 * batch * KV_HEADS * slots * DIM * 2
    sets = make(batch, rows, slots, max(2, -(-ROTATE // size)))
    mask = causal(rows, slots, slots)
    times: dict[str, float | None] = {}
    row: dict[str, Any] = {"B": batch, "T": rows, "S": slots, "limit_us": size / bandwidth * 1e6, "us": times}
    attend = ours(mask)
    times["ours"] = graph_us([lambda s=s: attend(*s) for s in sets])
    row["live_blocks_us"] = graph_us([lambda: library.live_blocks(mask, BLOCK)] * 4)
    if batch == 1:
        row["error"] = {"ours": relative_error(attend(*sets[0]), sets[0], mask)}
    for name in peers:
        try:
            other = peer(name, batch, rows, slots)
            if batch == 1 and name != "xformers":
                row["error"][name] = relative_error(other(*sets[0]), sets[0], mask)
            times[name] = graph_us([lambda s=s, other=other: other(*s) for s in sets], 5, 6)
        except Exception as error:
            times[name] = None
            row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return row


def measure_partly_filled() -> dict[str, float]:
    """8k live tokens in a cache of 128k slots, against a cache of 8k."""
    result = {}
    for slots in (8192, 131072):
        sets = make(1, 8, slots, max(2, -(-ROTATE // (2 * KV_HEADS * slots * DIM * 2))))
        if slots > 8192:
            sets = make(1, 8, slots, 12)
        mask = causal(8, slots, 8192)
        attend = ours(mask)
        result[f"8k live of {slots}"] = graph_us([lambda s=s, attend=attend: attend(*s) for s in sets])
    return result


def verdict(row: dict[str, Any]) -> str:
    others = {name: us for name, us in row["us"].items() if name != "ours" and us is not None}
    if not others:
        return ""
    best = min(others, key=lambda name: others[name])
    mine = row["us"]["ours"]
    lost = mine > max(others[best] * 1.03, others[best] + 1)
    return f"LOSS to {best}, {mine / others[best]:.2f}x its time" if lost else f"{others[best] / mine:.2f}x the best ({best})"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["B"] == rows[0]["B"]]
    counts = sorted({row["T"] for row in rows})
    figure, panels = pyplot.subplots(1, len(counts), figsize=(3.2 * len(counts), 3.6), layout="constrained", squeeze=False)
    for panel, count in zip(panels[0], counts):
        chosen = sorted((row for row in rows if row["T"] == count), key=lambda row: row["S"])
        for name in chosen[0]["us"]:
            points = [(row["S"], row["us"].get(name)) for row in chosen if row["us"].get(name)]
            panel.plot(*zip(*points), marker="o", label=name)
        panel.plot([row["S"] for row in chosen], [row["limit_us"] for row in chosen], "k--", label="limit")
        panel.set(title=f"T = {count}", xscale="log", yscale="log", xlabel="cache slots", ylabel="us per layer")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 65536, 131072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 9, 16, 32])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--peers", nargs="*", default=["mask", "flash", "cudnn", "repeat_kv", "flex", "xformers"])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second for the limit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 256
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, bfloat16, {HEADS}/{KV_HEADS} heads, head dim {DIM}; us per layer")
    print(f"{'B':>2} {'T':>3} {'S':>7} {'limit':>7} {'ours':>7} {'lists':>6} " + " ".join(f"{name:>9}" for name in args.peers))
    rows = []
    for batch in args.batches:
        for count in args.rows:
            for slots in args.lengths:
                row = measure(batch, count, slots, args.peers, args.bandwidth)
                rows.append(row)
                shown = (format(row["us"][name], "9.1f") if row["us"][name] else f"{'-':>9}" for name in args.peers)
                print(
                    f"{batch:>2} {count:>3} {slots:>7} {row['limit_us']:>7.1f} {row['us']['ours']:>7.1f} "
                    f"{row['live_blocks_us']:>6.1f} {' '.join(shown)}  {verdict(row)}",
                    flush=True,
                )
                torch.cuda.empty_cache()
    for row in rows:
        if row.get("error"):
            print(f"B=1 T={row['T']} S={row['S']} error against float64: {row['error']}")
            break
    for name, why in {name: why for row in rows for name, why in row.get("failed", {}).items()}.items():
        print(f"{name} failed: {why}")
    partly = measure_partly_filled()
    print(", ".join(f"{name}: {us:.1f} us" for name, us in partly.items()))
    if args.json:
        payload = {"card": card, "torch": torch.__version__, "rows": rows, "partly_filled_us": partly}
        args.json.write_text(json.dumps(payload, indent=2), encoding="utf-8")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
