"""Mixture-of-experts blocks on a CUDA device: spec_compile's operators beside transformers' own paths, one layer.

    python benchmarks/moe.py [--shapes qwen3-30b mixtral] [--rows 1 2 4 8 16 32] [--experts N] [--compiled 8]
                             [--peers ...] [--json FILE]
    python benchmarks/moe.py --tune up down [--shapes ...] [--rows 8] [--experts N]

Whole blocks in bfloat16: router, choice, experts, weighted sum; random weights and random routing, or routing to N experts alone
(``--experts``). ``ours`` is ``linears``, ``moe_route`` and ``moe_experts``; the peers are Qwen3MoeSparseMoeBlock and
MixtralSparseMoeBlock of transformers with its three implementations, ``+`` compiled by torch.compile (at the rows of
``--compiled`` alone). Calls run inside one CUDA graph, which rotates through several layers, so that no cache level holds their
weights; the eager implementation reads the host and cannot be captured: it is timed from the host. ``limit`` is the time to read
the router and the distinct experts once at ``--bandwidth``. Times are medians in microseconds. Errors are relative, against
float64 on the same choices and weights.

``--tune`` times tilings that differ in one product from the table's own; what wins goes into kernels/moe_tiling.py by hand.
``--device cpu`` runs small layers, to see that everything works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attention import graph_us
from torch import Tensor, nn
from torch.func import functional_call

from spec_compile.kernels import library
from spec_compile.kernels.moe import moe_experts_reference

PEERS = ("eager", "batched_mm", "grouped_mm", "batched_mm+", "grouped_mm+")


@dataclass(frozen=True)
class Shape:
    """A model's block: experts, those of a row, hidden and inner size, and how many layers take turns."""

    experts: int
    k: int
    hidden: int
    inner: int
    layers: int
    model: str


SHAPES = {
    "qwen3-30b": Shape(128, 8, 2048, 768, 3, "qwen3_moe"),
    "mixtral": Shape(8, 2, 4096, 14336, 2, "mixtral"),
}
SMALL = {
    "qwen3-30b": Shape(16, 4, 64, 48, 2, "qwen3_moe"),
    "mixtral": Shape(8, 2, 64, 96, 2, "mixtral"),
}


class Layers:
    """Blocks of transformers and an input for each; experts past ``used`` are never chosen."""

    def __init__(self, shape: Shape, rows: int, used: int, device: str) -> None:
        self.shape, self.device = shape, device
        self.blocks = [self._block(used) for _ in range(shape.layers)]
        self.set_rows(rows)

    def _block(self, used: int) -> Any:
        shape = self.shape
        sizes = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.k}
        if shape.model == "mixtral":
            from transformers import MixtralConfig
            from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as block

            config = MixtralConfig(num_local_experts=shape.experts, intermediate_size=shape.inner, **sizes)
        else:
            from transformers import Qwen3MoeConfig
            from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as block

            config = Qwen3MoeConfig(
                num_experts=shape.experts, moe_intermediate_size=shape.inner, norm_topk_prob=True, **sizes
            )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            made: nn.Module = block(config)
        torch.set_default_dtype(default)
        for weight in made.parameters():
            weight.requires_grad_(False).normal_(0, weight.shape[-1] ** -0.5)
        # The first element of every row of x is 1.
        made.gate.weight[:, 0] = 0
        made.gate.weight[used:, 0] = -100
        return made.eval()

    def set_rows(self, rows: int) -> None:
        self.inputs = [torch.randn(1, rows, self.shape.hidden, device=self.device, dtype=torch.bfloat16) for _ in self.blocks]
        for x in self.inputs:
            x[..., 0] = 1

    def implementation(self, name: str) -> None:
        for block in self.blocks:
            block.experts.config._experts_implementation = name

    def route(self, block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        [logits] = library.linears(x, [block.gate.weight], [None])
        dtype = torch.float32 if self.shape.model == "mixtral" else x.dtype
        return library.moe_route(logits, None, "softmax", self.shape.k, True, 0.0, 1.0, 1, 1, "score_first", dtype)

    def experts(self, block: Any, x: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        experts = block.experts
        return library.moe_experts(
            x, choice, weight, experts.gate_up_proj, experts.down_proj, None, None, "silu", False, False
        )  # fmt: skip

    def ours(self, block: Any, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return self.experts(block, x, *self.route(block, x))

    def calls(self, function: Callable[[Any, Tensor], Any]) -> list[Callable[[], Any]]:
        return [lambda b=block, x=x: function(b, x) for block, x in zip(self.blocks, self.inputs)]

    def routed(self) -> list[tuple[Tensor, Tensor]]:
        return [self.route(block, x.flatten(0, 1)) for block, x in zip(self.blocks, self.inputs)]

    def distinct(self) -> float:
        """Mean number of experts that a layer reads."""
        return statistics.mean(choice.unique().numel() for choice, _ in self.routed())

    def bytes(self) -> float:
        shape = self.shape
        return 2 * (self.distinct() * 3 * shape.hidden * shape.inner + shape.experts * shape.hidden)


def host_us(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Median time of one call as the host sees it, work on the device included."""
    times = []
    cuda = torch.cuda.is_available()
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return statistics.median(times[2:])


def timed(layers: Layers, function: Callable[[Any, Tensor], Any], captured: bool = True) -> float:
    calls = layers.calls(function)
    return graph_us(calls, 5, 6) if captured and layers.device == "cuda" else host_us(calls)


def peer(layers: Layers, name: str) -> Callable[[Any, Tensor], Any]:
    layers.implementation(name.rstrip("+"))
    if not name.endswith("+"):
        return lambda block, x: block(x)
    # Weights as arguments: one compilation serves all layers.
    frame = layers.blocks[0]

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(frame, weights, (x,))

    compiled = torch.compile(run, dynamic=False)
    return lambda block, x: compiled({key: weight.detach() for key, weight in block.named_parameters()}, x)


def errors(layers: Layers) -> dict[str, float]:
    from transformers.integrations.moe import grouped_mm_experts_forward

    block, x = layers.blocks[0], layers.inputs[0].flatten(0, 1)
    choice, weight = layers.route(block, x)
    experts = block.experts
    exact = moe_experts_reference(
        x.double(), choice, weight.double(), experts.gate_up_proj, experts.down_proj, None, None, "silu", False, False
    )  # fmt: skip
    found = {
        "ours": layers.experts(block, x, choice, weight),
        "grouped_mm": grouped_mm_experts_forward(experts, x, choice, weight),
    }
    return {name: float((result.double() - exact).norm() / exact.norm()) for name, result in found.items()}


def measure(layers: Layers, rows: int, peers: Sequence[str], bandwidth: float) -> dict[str, Any]:
    layers.set_rows(rows)
    size = layers.bytes()
    times: dict[str, float | None] = {"ours": timed(layers, layers.ours)}
    row: dict[str, Any] = {
        "T": rows,
        "distinct": layers.distinct(),
        "bytes": size,
        "limit_us": size / bandwidth * 1e6,
        "us": times,
    }
    flat = [x.flatten(0, 1) for x in layers.inputs]
    parts = {
        "router": [lambda b=b, x=x: library.linears(x, [b.gate.weight], [None]) for b, x in zip(layers.blocks, flat)],
        "router, route": [lambda b=b, x=x: layers.route(b, x) for b, x in zip(layers.blocks, flat)],
        "experts": [
            lambda b=b, x=x, r=r: layers.experts(b, x, *r) for b, x, r in zip(layers.blocks, flat, layers.routed())
        ],
    }  # fmt: skip
    clock = graph_us if layers.device == "cuda" else host_us
    row["parts_us"] = {name: clock(calls, 5) for name, calls in parts.items()}
    for name in peers:
        try:
            times[name] = timed(layers, peer(layers, name), name != "eager")
        except Exception as failure:
            times[name] = None
            row.setdefault("failed", {})[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
    return row


def tilings(chosen: Any, which: str) -> list[Any]:
    """The table's tiling, and others that differ in one product, in the rows of a tile or in splits."""
    product = getattr(chosen, which)
    found = [chosen]
    for depth, stages, warps, swap in itertools.product((64, 128, 256), (3, 4, 5, 6), (4,), (True, False)):
        if 32 << 10 <= depth * 128 * stages <= 112 << 10 and (swap or stages in (3, 4)):
            found.append(replace(chosen, **{which: replace(product, depth=depth, stages=stages, warps=warps, swap=swap)}))
    for ahead, stages in itertools.product((0, 128, 256, 512), {product.stages, 3}):
        found.append(replace(chosen, **{which: replace(product, ahead=ahead, stages=stages)}))
    found.append(replace(chosen, **{which: replace(product, width=128, depth=64)}))
    found.append(replace(chosen, **{which: replace(product, width=128, warps=8)}))
    found.append(replace(chosen, **{which: replace(product, width=32, swap=False)}))
    found.append(replace(chosen, rows=8, **{which: replace(product, swap=False)}))
    if which == "down":
        found += [replace(chosen, splits=splits) for splits in (1, 2, 4)]
        found += [replace(chosen, columns=columns) for columns in (256, 512)]
    return list(dict.fromkeys(found))


def tune(layers: Layers, rows: int, which: str) -> list[dict[str, Any]]:
    from spec_compile.kernels.moe_experts_triton import moe_experts_triton
    from spec_compile.kernels.moe_tiling import choose_expert_tiling

    shape = layers.shape
    layers.set_rows(rows)
    x = layers.inputs[0]
    chosen = choose_expert_tiling(x.device, x.dtype, rows, shape.experts, shape.k, shape.hidden, shape.inner)
    operands = [
        (x.flatten(0, 1), choice, weight, block.experts.gate_up_proj, block.experts.down_proj, None, None, "silu", False, False)
        for block, x, (choice, weight) in zip(layers.blocks, layers.inputs, layers.routed())
    ]
    exact = moe_experts_reference(operands[0][0].double(), *operands[0][1:])
    results = []
    for tiling in tilings(chosen, which):
        try:
            found = moe_experts_triton(*operands[0], tiling=tiling)
            calls = [lambda o=o, t=tiling: moe_experts_triton(*o, tiling=t) for o in operands]
            us = graph_us(calls, 5, 6) if layers.device == "cuda" else host_us(calls, 1)
        except Exception as failure:
            print(f"    failed: {type(failure).__name__} {str(failure).splitlines()[0][:90]} {tiling}", flush=True)
            continue
        error = float((found.double() - exact).norm() / exact.norm())
        results.append({"us": us, "error": error, "chosen": tiling == chosen, "tiling": str(tiling)})
        other = f"rows {tiling.rows}, splits {tiling.splits}, columns {tiling.columns}"
        mark = "*" if tiling == chosen else " "
        print(f"  {mark} {us:8.1f} us  error {error:.1e}  {which} {getattr(tiling, which)}, {other}", flush=True)
    results.sort(key=lambda result: result["us"])
    print(f"  best: {results[0]['us']:.1f} us {results[0]['tiling']}", flush=True)
    return results


def shown(us: float | None) -> str:
    return f"{us:12.1f}" if us is not None else f"{'-':>12}"


def run(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    used = min(args.experts or shape.experts, shape.experts)
    layers = Layers(shape, args.rows[0], used, args.device)
    print(
        f"{name}: {shape.experts} experts, {shape.k} a row, {shape.hidden} x {shape.inner}, {shape.layers} layers in turn"
        + (f", routing to {used} experts" if used < shape.experts else ""),
        flush=True,
    )  # fmt: skip
    found = []
    if args.tune:
        for rows in args.rows:
            layers.set_rows(rows)
            print(
                f"  T={rows}: {layers.distinct():.1f} distinct, limit {layers.bytes() / args.bandwidth * 1e6:.1f} us", flush=True
            )
            found += [{"shape": name, "T": rows, "which": which, "results": tune(layers, rows, which)} for which in args.tune]
        return found
    print(f"{'T':>4} {'distinct':>9} {'limit':>8} {'ours':>12} " + " ".join(f"{peer:>12}" for peer in args.peers), flush=True)
    for rows in args.rows:
        peers = [peer for peer in args.peers if not peer.endswith("+") or rows in args.compiled]
        row = {"shape": name, "experts_used": used, **measure(layers, rows, peers, args.bandwidth)}
        us = row["us"]
        others = [us[peer] for peer in peers if us[peer] is not None]
        print(
            f"{rows:>4} {row['distinct']:>9.1f} {row['limit_us']:>8.1f} {shown(us['ours'])} "
            + " ".join(shown(us.get(peer)) for peer in args.peers)
            + (f"  {row['limit_us'] / us['ours']:.0%} of the limit's speed" if args.device == "cuda" else "")
            + (f", {min(others) / us['ours']:.2f}x the best peer" if others else ""),
            flush=True,
        )  # fmt: skip
        print("     parts: " + ", ".join(f"{part} {value:.1f}" for part, value in row["parts_us"].items()), flush=True)
        for peer_name, why in row.get("failed", {}).items():
            print(f"     {peer_name} failed: {why}", flush=True)
        found.append(row)
    layers.set_rows(8)
    wrong = errors(layers)
    print("     error at T = 8: " + ", ".join(f"{who} {value:.2e}" for who, value in wrong.items()), flush=True)
    found.append({"shape": name, "T": 8, "error": wrong})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="T (default 1 2 4 8 16 32; 8 with --tune)")
    parser.add_argument("--experts", type=int, help="route to this many experts only")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--compiled", type=int, nargs="*", default=[8], help="T at which compiled peers are timed")
    parser.add_argument("--tune", nargs="+", choices=("up", "down"), help="time tilings of these products instead")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second for the limit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rows = args.rows or ([8] if args.tune else [1, 2, 4, 8, 16, 32])
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs small layers")
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, small layers"
    print(f"{card}, torch {torch.__version__}, bfloat16; us per block", flush=True)
    shapes = SHAPES if args.device == "cuda" else SMALL
    found = []
    with torch.no_grad():
        for name in args.shapes:
            found += run(name, shapes[name], args)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
