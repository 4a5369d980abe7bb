"""A whole verify step of an unmodified transformers model on a CUDA device, bfloat16: lm_head and 8 layers of Llama-3.1-8B, or 4
of Qwen3-30B-A3B.

    python benchmarks/verify_step.py [--points 1x32768 1x131072 8x32768] [--rows 9 8 1] [--peers sdpa flex] [--profile]
                                     [--budget 0.125] [--block-size 64] [--reuse 4] [--json FILE] [--plot FILE.png]
    python benchmarks/verify_step.py --model qwen3-30b --points 1x32768 --rows 8 --peers sdpa [--expert-budget 24] ...

Weights are random; the cache is full up to the rows of the step. ``ours`` is ``sc.compile_verify(model, cache,
cudagraphs=True)``; peers are ``torch.compile(model, mode="reduce-overhead")`` over a StaticCache with attn_implementation
``sdpa`` and ``flex_attention`` (the latter a peer in speed only: with a StaticCache its mask is wrong for T > 1). Times are
medians in milliseconds: ``step`` between two events around the call, ``wall`` on the host up to the finished step, ``host``
what the call costs the host besides the replay. ``limit`` is the time to read weights, K and V once at 4.3 TB/s; of experts,
those that rows choose on average if they choose at random. With ``--budget`` (tokens, or a share of the live keys) and
``--expert-budget`` (distinct experts a step) a path ``sparse`` runs the same model under that plan. Peers of a mixture run its
experts as ``grouped_mm``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, StaticCache

import spec_compile as sc

SLACK = 64


MODELS: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "llama-8b": (
        "Llama-3.1-8B", 8,
        functools.partial(
            LlamaConfig, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            vocab_size=128256, max_position_embeddings=1 << 18, rope_theta=500000.0, tie_word_embeddings=False,
        ),
    ),
    "qwen3-30b": (
        "Qwen3-30B-A3B", 4,
        functools.partial(
            Qwen3MoeConfig, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
            max_position_embeddings=1 << 18, rope_theta=1000000.0, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip


def build(name: str, attention: str, layers: int, device: str = "cuda") -> Any:
    config = MODELS[name][2](num_hidden_layers=layers, attn_implementation=attention)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if getattr(config, "num_experts", 0):
        model.set_experts_implementation("grouped_mm")
    return model


def fill(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(length)


def rewind(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def measure(step: Callable[[], Any], back: Callable[[], None], repeats: int = 30) -> dict[str, float]:
    events, walls = [], []
    for _ in range(repeats):
        back()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        step()
        end.record()
        end.synchronize()
        walls.append((time.perf_counter() - began) * 1e3)
        events.append(start.elapsed_time(end))
    return {"step_ms": statistics.median(events[5:]), "wall_ms": statistics.median(walls[5:])}


class TimedReplay:
    """Stands in for the captured graph and keeps the host time of the last replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.us = graph, 0.0

    def replay(self) -> None:
        began = time.perf_counter()
        self.graph.replay()
        self.us = (time.perf_counter() - began) * 1e6


def host_us(verify: sc.VerifyFunction, ids: Tensor, repeats: int = 100) -> float:
    """Host time of a call less that of the replay in it."""
    assert verify._steps is not None
    step = verify._steps.of(ids.shape[1])
    assert step._graph is not None
    graph = step._graph
    timed = TimedReplay(graph)
    step._graph = timed  # type: ignore[assignment]
    verify.cache.crop(-ids.shape[1])
    verify(ids)
    # Inductor's compile workers wind down beside the first calls.
    time.sleep(2)
    spent = []
    for _ in range(repeats):
        verify.cache.crop(-ids.shape[1])
        torch.cuda.synchronize()
        began = time.perf_counter()
        verify(ids)
        spent.append((time.perf_counter() - began) * 1e6 - timed.us)
    step._graph = graph
    return statistics.median(spent)


def kernels_us(step: Callable[[], Any], back: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Device time by kernel over one step: name, launches, microseconds."""
    back()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count[event.name] += 1
            spent[event.name] += event.device_time
    return [(name[:90], count[name], us) for name, us in spent.most_common()]


KINDS = (
    ("feed-forward", ("mlp_",)),
    ("selection", ("_score_kernel", "_contest_kernel", "_summary_kernel", "_row_sums_kernel", "_sum_kernel", "_share_kernel")),
    ("attention", ("_split_kernel", "_reduce_kernel")),
    ("experts", ("_gate_up_kernel", "_down_kernel", "_combine_kernel", "_route_kernel", "_limit_kernel")),
    ("projections", ("_linears_kernel", "_narrow_linear_kernel", "gemm", "nvjet", "cutlass", "cublas", "splitK")),
)


def shares(kernels: list[tuple[str, int, float]]) -> dict[str, float]:
    """Microseconds by kind of kernel."""
    found = dict.fromkeys([kind for kind, _ in KINDS] + ["rest"], 0.0)
    for name, _, us in kernels:
        found[next((kind for kind, words in KINDS if any(word in name for word in words)), "rest")] += us
    return found


def ours(model: Any, batch: int, rows: int, slots: int, profile: bool, plan: Any = None) -> dict[str, Any]:
    cache = sc.VerifyCache(model, max_len=slots - SLACK, batch=batch)
    length = slots - rows - SLACK
    fill(cache, length)
    verify = sc.compile_verify(model, cache, draft_len=rows - 1, plan=plan, cudagraphs=True, strict=True)
    ids = torch.randint(0, model.config.vocab_size, (batch, rows), device="cuda")

    def back() -> None:
        rewind(cache, length)

    began = time.perf_counter()
    verify(ids)
    torch.cuda.synchronize()
    result: dict[str, Any] = {"compile_s": time.perf_counter() - began}
    result |= measure(lambda: verify(ids), back)
    try:
        result["host_us"] = host_us(verify, ids)
    except Exception as error:
        # What was measured stands without it.
        print(f"host time: {type(error).__name__}: {error}", file=sys.stderr)
    if profile:
        result["kernels"] = kernels_us(lambda: verify(ids), back)
        result["shares_us"] = shares(result["kernels"])
    return result


def peer(model: Any, batch: int, rows: int, slots: int) -> dict[str, Any]:
    cache = StaticCache(config=model.config, max_cache_len=slots)
    cache.early_initialization(batch, model.config.num_key_value_heads, model.config.head_dim, torch.bfloat16, model.device)
    length = slots - rows - SLACK
    fill(cache, length)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    ids = torch.randint(0, model.config.vocab_size, (batch, rows), device="cuda")

    @torch.no_grad()
    def step() -> Any:
        return compiled(input_ids=ids, past_key_values=cache, use_cache=True).logits

    # transformers' flex path warns while it is traced, which fullgraph refuses; Dynamo guards on the function.
    with mock.patch("warnings.warn", lambda *arguments, **words: None):
        began = time.perf_counter()
        for _ in range(3):
            step()
            rewind(cache, length)
        torch.cuda.synchronize()
        result: dict[str, Any] = {"compile_s": time.perf_counter() - began}
        return result | measure(step, lambda: rewind(cache, length))


def limit_ms(model: Any, batch: int, rows: int, slots: int, bandwidth: float) -> float:
    config = model.config
    experts = getattr(config, "num_experts", 0)
    # Share of the experts that somebody chooses, if rows choose at random.
    read = 1 - (1 - config.num_experts_per_tok / experts) ** (batch * rows) if experts else 1.0
    weights = sum(
        p.numel() * (read if ".experts." in name else 1.0) for name, p in model.named_parameters() if "embed_tokens" not in name
    )
    kv = 2 * batch * slots * config.num_key_value_heads * config.head_dim
    return 2 * (weights + kv * config.num_hidden_layers) / bandwidth * 1e3


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    names = list(dict.fromkeys(row["path"] for row in rows))
    points = list(dict.fromkeys((row["B"], row["T"], row["S"]) for row in rows))
    for offset, name in enumerate(names):
        found = {(row["B"], row["T"], row["S"]): row["step_ms"] for row in rows if row["path"] == name}
        places = [i + (offset - len(names) / 2) * 0.8 / len(names) for i, point in enumerate(points) if point in found]
        axes.bar(places, [found[point] for point in points if point in found], 0.8 / len(names), label=name)
    limits = {(row["B"], row["T"], row["S"]): row["limit_ms"] for row in rows}
    axes.scatter(range(len(points)), [limits[point] for point in points], marker="_", color="black", s=400, label="limit")
    axes.set_xticks(range(len(points)), [f"B={b} T={t}\n{s // 1024}k" for b, t, s in points])
    axes.set(yscale="log", ylabel="ms per verify step")
    axes.legend()
    figure.savefig(path, dpi=150)


def _save(path: Path | None, card: str, model: str, layers: int, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        payload = {"card": card, "torch": torch.__version__, "model": model, "layers": layers, "rows": rows}
        path.write_text(json.dumps(payload, indent=2), encoding="utf-8")


def point(text: str) -> tuple[int, int]:
    batch, slots = text.split("x")
    return int(batch), int(slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=point, nargs="+", default=[(1, 32768), (1, 131072), (8, 32768)], metavar="BxS")
    parser.add_argument("--rows", type=int, nargs="+", default=[9, 8, 1])
    parser.add_argument("--peers", nargs="*", default=["sdpa", "flex"], choices=["sdpa", "flex"])
    parser.add_argument("--model", choices=[*MODELS], default="llama-8b")
    parser.add_argument("--layers", type=int, help="default 8 of llama-8b, 4 of qwen3-30b")
    parser.add_argument("--budget", type=lambda text: float(text) if "." in text else int(text), help="also run this sparse plan")
    parser.add_argument("--expert-budget", type=int, help="distinct experts that a step may read under the plan")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--reuse", type=int, default=4, help="layers that share one selection")
    parser.add_argument("--query", default="all", choices=["first", "first_last", "all", "mean"])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second for the limit")
    parser.add_argument("--profile", action="store_true", help="also list our kernels by time; slows down later points")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    card = torch.cuda.get_device_name()
    title, layers, _ = MODELS[args.model]
    layers = args.layers or layers
    print(f"{card}, torch {torch.__version__}, {layers} layers of {title} + lm_head, bfloat16")
    print(
        f"{'path':<6} {'B':>2} {'T':>3} {'S':>7} {'limit':>6} {'step':>7} {'wall':>7} {'share':>6} {'host us':>7} {'compile':>8}"
    )
    rows: list[dict[str, Any]] = []
    attention = args.budget and sc.AttentionPlan(
        budget=args.budget, block_size=args.block_size, query=args.query, index_topk_freq=args.reuse
    )
    moe = args.expert_budget and sc.MoePlan(expert_budget=args.expert_budget)
    plan = sc.SparsityPlan(attention=attention or None, moe=moe or None) if attention or moe else None
    for path in ["ours", *(["sparse"] if plan else []), *args.peers]:
        model = build(args.model, "flex_attention" if path == "flex" else "sdpa", layers)
        for batch, slots in args.points:
            for count in args.rows:
                try:
                    if path in ("ours", "sparse"):
                        found = ours(model, batch, count, slots, args.profile, plan if path == "sparse" else None)
                    else:
                        found = peer(model, batch, count, slots)
                except Exception as error:
                    print(
                        f"{path:<6} {batch:>2} {count:>3} {slots:>7} failed: {error!r:.150}",
                        flush=True,
                    )
                    continue
                limit = limit_ms(model, batch, count, slots - SLACK, args.bandwidth)
                rows.append({"path": path, "B": batch, "T": count, "S": slots, "limit_ms": limit, **found})
                host = f"{found['host_us']:>7.0f}" if "host_us" in found else f"{'-':>7}"
                print(
                    f"{path:<6} {batch:>2} {count:>3} {slots:>7} {limit:>6.2f} {found['step_ms']:>7.3f} {found['wall_ms']:>7.3f} "
                    f"{limit / found['step_ms']:>6.1%} {host} {found['compile_s']:>6.1f} s",
                    flush=True,
                )
                for name, launches, us in found.get("kernels", [])[:30]:
                    print(f"    {us:8.1f} us {launches:>4} x {name}")
                if "shares_us" in found:
                    print("    " + ", ".join(f"{kind} {us:.0f} us" for kind, us in found["shares_us"].items()))
                _save(args.json, card, args.model, layers, rows)
                torch._dynamo.reset()
                torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
