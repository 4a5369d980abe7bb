"""Verify attention on CPU: query heads folded into rows against transformers' repeat_kv + SDPA, and the memory limit.

    python benchmarks/cpu_attention.py [--json FILE] [--plot FILE.png]

Each row is one attention layer of a verify step: T draft rows against a cache of S slots of which ``live`` hold tokens. The
limit is the time to read the live K and V once at the copy bandwidth measured in the same run.

How much repeat_kv costs hangs on where malloc takes its copies from, so both cases are measured: *fresh pages*, where the
kernel has to map and zero them in every layer (what happens inside a running model, see cpu_verify_step.py), and *reused
pages*, where the same warm heap block comes back each time (glibc only, through mallopt).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spec_compile.kernels import library

# (name, query heads, KV heads, head dim, cache slots, live tokens)
SHAPES = [
    ("SmolLM2-135M, 8k", 9, 3, 64, 8192, 8192),
    ("SmolLM2-135M, 2k live of 8k", 9, 3, 64, 8192, 2048),
    ("Qwen2.5-1.5B, 16k", 12, 2, 128, 16384, 16384),
    ("Llama-3.1-8B, 8k", 32, 8, 128, 8192, 8192),
    ("Llama-3.1-8B, 32k", 32, 8, 128, 32768, 32768),
    ("Llama-3.1-8B, 8k live of 32k", 32, 8, 128, 32768, 8192),
]

# Layers rotate through at least this many bytes of K and V, so that no cache holds them between calls.
ROTATE = 256 << 20


# mallopt parameters of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def set_allocator(fresh_pages: bool) -> bool:
    """Make large buffers come from fresh pages, or from a heap that is kept. False where the C library cannot be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    large = (1 << 31) - 1
    threshold = 128 << 10 if fresh_pages else 32 << 20  # glibc accepts no more than 32 MiB
    return bool(mallopt(M_MMAP_THRESHOLD, threshold) and mallopt(M_TRIM_THRESHOLD, threshold if fresh_pages else large))


def repeat_kv(x: Tensor, group: int) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, heads * group, length, dim)


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large copy, all threads."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (median_ms(lambda: target.copy_(source), 7) * 1e-3)


def measure(
    shape: tuple[str, int, int, int, int, int], rows: int, dtype: torch.dtype, bandwidth: float, repeats: int
) -> dict[str, Any]:
    name, heads, kv_heads, dim, slots, live = shape
    torch.manual_seed(0)
    q = torch.randn(1, rows, heads, dim, dtype=dtype).transpose(1, 2)
    layers = max(2, -(-ROTATE // (2 * kv_heads * slots * dim * dtype.itemsize)))
    caches = [tuple(torch.randn(1, kv_heads, slots, dim, dtype=dtype) for _ in range(2)) for _ in range(layers)]
    positions = live - rows + torch.arange(rows)
    mask = (torch.arange(slots) <= positions[:, None])[None, None]
    scale = dim**-0.5
    group = heads // kv_heads

    def source(k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, repeat_kv(k, group), repeat_kv(v, group), attn_mask=mask, scale=scale)

    def gqa(k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return library.attention_folded(q, k, v, folded, *blocks, 64, scale)

    def mask_work() -> tuple[Any, Tensor]:  # once per mask, shared by the layers
        return library.live_blocks(mask, 64), library.fold_mask(mask, heads, kv_heads, rows, dtype)

    def per_layer(attend: Callable[[Tensor, Tensor], Tensor], with_mask_work: bool = False) -> float:
        def step() -> None:
            if with_mask_work:
                mask_work()
            for k, v in caches:
                attend(k, v)

        return median_ms(step, repeats) / layers

    blocks, folded = mask_work()

    expected, found = source(*caches[0]), ours(*caches[0])
    limit = 2 * kv_heads * live * dim * dtype.itemsize / bandwidth * 1e3
    row: dict[str, Any] = {
        "shape": name, "T": rows, "dtype": str(dtype)[6:], "limit_ms": limit, "same_bits": torch.equal(expected, found),
        "max_difference": (expected - found).abs().max().item(),
    }  # fmt: skip
    for pages in ("fresh", "reused"):
        if not set_allocator(pages == "fresh"):
            pages = "default"
        row[pages] = {
            "repeat_kv_ms": per_layer(source),
            "enable_gqa_ms": per_layer(gqa),
            "spec_compile_ms": per_layer(ours, with_mask_work=True),
        }
        row[pages]["speedup"] = row[pages]["repeat_kv_ms"] / row[pages]["spec_compile_ms"]
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    labels = [f"{row['shape']}\nT={row['T']} {row['dtype']}" for row in rows]
    width = 0.25
    for offset, key in enumerate(("repeat_kv_ms", "enable_gqa_ms", "spec_compile_ms")):
        places = [i + (offset - 1) * width for i in range(len(rows))]
        axes.bar(places, [row.get("fresh", row.get("default"))[key] for row in rows], width, label=key.removesuffix("_ms"))
    axes.scatter(range(len(rows)), [row["limit_ms"] for row in rows], marker="_", color="black", label="memory limit")
    axes.set_yscale("log")
    axes.set_ylabel("ms per layer")
    axes.set_xticks(range(len(rows)), labels, fontsize=6, rotation=30)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9], help="draft rows T")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, copy {bandwidth / 1e9:.1f} GB/s; ms per layer")
    titles = f"{'pages':<8}{'repeat_kv':>10} {'enable_gqa':>11} {'ours':>8} {'speedup':>8}  same bits"
    print(f"{'shape':<30} {'T':>3} {'dtype':<9} {'limit':>7} {titles}")
    results = []
    for dtype in args.dtype:
        for shape in (shape for shape in SHAPES if args.shapes in shape[0]):
            for rows in args.rows:
                row = measure(shape, rows, getattr(torch, dtype), bandwidth, args.repeats)
                results.append(row)
                bits = "yes" if row["same_bits"] else format(row["max_difference"], ".0e")
                for pages in ("fresh", "reused", "default"):
                    if pages in row:
                        ms = row[pages]
                        print(
                            f"{row['shape']:<30} {rows:>3} {row['dtype']:<9} {row['limit_ms']:>7.2f} {pages:<8}"
                            f"{ms['repeat_kv_ms']:>10.2f} {ms['enable_gqa_ms']:>11.2f} {ms['spec_compile_ms']:>8.2f} "
                            f"{ms['speedup']:>7.1f}x  {bits}",
                            flush=True,
                        )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "copy_bytes_per_s": bandwidth, "rows": results}, indent=2))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
