"""Feed-forward layers on a CUDA device: spec_compile's operators beside cuBLAS, Inductor and a masked dense layer, one layer.

    python benchmarks/ffn.py [--shapes llama-8b ...] [--rows 1 2 4 8 16 32] [--unions 1.0 0.9 ...] [--compiled 8] [--json FILE]
    python benchmarks/ffn.py --launches [--unions 1.0 0.5 0.1] [--rows 8]
    python benchmarks/ffn.py --tune up sparse_down gate first down [--unions 1.0 0.5 0.1] [--rows 8]

Layers in bfloat16 with random weights: ``down(silu(gate(x)) * up(x))``. ``exact`` is ``mlp`` with the last weight stored by
outputs, ``by channels`` the same with it transposed, as steps that skip channels need it; ``cublas`` is three linear calls,
``inductor`` the same under torch.compile (at the rows of ``--compiled`` alone), ``linears`` this project's small-row linear
calls, ``masked`` the dense layer with small activations set to 0. ``sparse`` is ``mlp_sparse`` with a threshold under which the
given share of channels is kept by every row, ``budget`` the same channels found by a budget. Calls run inside one CUDA graph,
which rotates through several layers, so that no cache level holds their weights. ``limit`` is the time to read the weights once
at ``--bandwidth``: all of them, or gate and the kept rows of the other two. Times are medians in microseconds, errors relative,
against float64.

``--launches`` times the first launch of a step, the first two, and so on: *adds* is what each one makes the step longer, which
is what counts where a launch begins before the one in front ends. *device* is its time by CUPTI, the waiting in it included.

``--tune`` times tilings that differ in one product from the table's own, at all ``--unions``, and goes on to the next product
with the best one in the mean (of the times relative to the first tiling's); what wins goes into kernels/mlp_tiling.py by hand.
``--device cpu`` runs small layers, to see that everything works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from attention import graph_us
from torch import Tensor
from torch.nn.functional import linear, silu

from spec_compile.kernels import library
from spec_compile.kernels.mlp import why_no_mlp_kernel

THRESHOLD = 0.5
PEERS = ("cublas", "inductor", "linears", "masked")
PARTS = ("first", "down", "gate", "kept", "sparse_down")


@dataclass(frozen=True)
class Shape:
    """H, F and how many layers take turns."""

    hidden: int
    inner: int
    layers: int = 3


SHAPES = {"llama-8b": Shape(4096, 14336), "llama-1b": Shape(2048, 8192, 8), "qwen-32b": Shape(5120, 25600, 2)}
SMALL = {"llama-8b": Shape(64, 160, 2), "llama-1b": Shape(48, 96, 2), "qwen-32b": Shape(40, 72, 2)}


@dataclass
class Layer:
    """Weights, the last one stored by outputs and by channels, and which channels the threshold keeps."""

    gate: Tensor
    up: Tensor
    down: Tensor
    by_channels: Tensor
    kept: Tensor
    x: Tensor


class Layers:
    """Layers in turn, with an input for each. Gate's first column meets a 1 in every row and decides which channels are kept."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.all = [self._layer() for _ in range(shape.layers)]
        self.switch = torch.ones(1, dtype=torch.int64, device=device)

    def _layer(self) -> Layer:
        hidden, inner = self.shape.hidden, self.shape.inner

        def rand(*size: int) -> Tensor:
            return torch.randn(*size, device=self.device, dtype=torch.bfloat16) * size[-1] ** -0.5

        down = rand(hidden, inner)
        none = torch.zeros(inner, dtype=torch.bool, device=self.device)
        return Layer(rand(inner, hidden), rand(inner, hidden), down, down.t().contiguous().t(), none, down)

    def set(self, rows: int, union: float) -> None:
        keep = round(union * self.shape.inner)
        for layer in self.all:
            layer.x = torch.randn(rows, self.shape.hidden, device=self.device, dtype=torch.bfloat16)
            layer.x[:, 0] = 1
            layer.kept = torch.zeros_like(layer.kept)
            layer.kept[torch.randperm(self.shape.inner, device=self.device)[:keep]] = True
            layer.gate[:, 0] = torch.where(layer.kept, 8.0, -40.0).bfloat16()

    def bytes(self, union: float) -> float:
        return 2 * self.shape.hidden * self.shape.inner * (1 + 2 * union)

    def calls(self, function: Callable[[Layer], Any]) -> list[Callable[[], Any]]:
        return [lambda one=layer: function(one) for layer in self.all]


def cublas(layer: Layer) -> Tensor:
    return linear(silu(linear(layer.x, layer.gate)) * linear(layer.x, layer.up), layer.down)


def masked(layer: Layer) -> Tensor:
    act = silu(linear(layer.x, layer.gate))
    act = torch.where(act.abs() < THRESHOLD, 0, act)
    return linear(act * linear(layer.x, layer.up), layer.down)


def linears(layer: Layer) -> Tensor:
    gate, up = library.linears(layer.x, [layer.gate, layer.up], [None, None])
    return library.linears(silu(gate) * up, [layer.down], [None])[0]


def inductor() -> Callable[[Layer], Tensor]:
    # Weights as arguments: one compilation serves all layers.
    compiled = torch.compile(lambda x, gate, up, down: linear(silu(linear(x, gate)) * linear(x, up), down), dynamic=False)
    return lambda layer: compiled(layer.x, layer.gate, layer.up, layer.down)


def exact(layer: Layer) -> Tensor:
    return library.mlp(layer.x, layer.gate, layer.up, layer.down, None, None, None, "silu")


def exact_by_channels(layer: Layer) -> Tensor:
    return library.mlp(layer.x, layer.gate, layer.up, layer.by_channels, None, None, None, "silu")


def sparse(layers: Layers, keep: int = 0) -> Callable[[Layer], Tensor]:
    def run(layer: Layer) -> Tensor:
        return library.mlp_sparse(
            layer.x, layer.gate, layer.up, layer.by_channels, None, None, None, "silu", layers.switch,
            0.0 if keep else THRESHOLD, keep, keep > 0,
        )  # fmt: skip

    return run


def host_us(calls: Sequence[Callable[[], Any]], repeats: int = 3) -> float:
    """Median time of one call as the host sees it: for CPU."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return statistics.median(times[1:])


def timed(layers: Layers, function: Callable[[Layer], Any]) -> float:
    calls = layers.calls(function)
    return graph_us(calls, 9, 12) if layers.device == "cuda" else host_us(calls)


def wanted(layer: Layer, kept: Tensor | None) -> Tensor:
    act = silu(layer.x.double() @ layer.gate.double().T)
    h = act * (layer.x.double() @ layer.up.double().T)
    return (h if kept is None else torch.where(kept, h, 0)) @ layer.down.double().T


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def measure(layers: Layers, rows: int, unions: Sequence[float], args: argparse.Namespace) -> list[dict[str, Any]]:
    layers.set(rows, 1.0)
    one = layers.all[0]
    peers: dict[str, Callable[[Layer], Tensor]] = {"cublas": cublas, "linears": linears, "masked": masked}
    if rows in args.compiled:
        peers["inductor"] = inductor()
    dense = {name: peers[name] for name in PEERS if name in peers and name in args.peers}
    dense |= {"exact": exact, "by channels": exact_by_channels}
    us: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    for name, function in dense.items():
        us[name] = attempt(layers, function, name, failed)
    right = wanted(one, None)
    errors = {name: error(function(one), right) for name, function in dense.items() if us[name] is not None and name != "masked"}
    row = {
        "T": rows, "union": 1.0, "kind": "exact", "limit_us": layers.bytes(1.0) / args.bandwidth * 1e6, "us": us,
        "error": errors, "failed": failed, "why_no_kernel": why_no_mlp_kernel(one.x, one.gate, one.up, one.down),
    }  # fmt: skip
    found = [row]
    print_row(row)
    for union in unions:
        layers.set(rows, union)
        keep = max(1, round(union * layers.shape.inner))
        functions = {"sparse": sparse(layers), "budget": sparse(layers, keep)}
        failed = {}
        us = {name: attempt(layers, function, name, failed) for name, function in functions.items()}
        right = wanted(one, one.kept)
        errors = {name: error(function(one), right) for name, function in functions.items() if us[name] is not None}
        row = {
            "T": rows, "union": union, "kind": "sparse", "limit_us": layers.bytes(union) / args.bandwidth * 1e6, "us": us,
            "error": errors, "failed": failed, "cublas_us": found[0]["us"].get("cublas"),
        }  # fmt: skip
        found.append(row)
        print_row(row)
    return found


def attempt(layers: Layers, function: Callable[[Layer], Any], name: str, failed: dict[str, str]) -> float | None:
    try:
        return timed(layers, function)
    except Exception as failure:
        failed[name] = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
        return None


def print_row(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {'-' if us is None else format(us, '.1f')}" for name, us in row["us"].items())
    tail = ""
    base, own = row.get("cublas_us") or row["us"].get("cublas"), row["us"].get("sparse") or row["us"].get("exact")
    if base and own:
        tail = f"  {row['limit_us'] / own:.0%} of the limit's speed, {base / own:.2f}x cublas"
    print(f"  T={row['T']:<3} union {row['union']:>5.0%}  limit {row['limit_us']:6.1f}  {times}{tail}", flush=True)
    if row["error"]:
        print("        errors " + ", ".join(f"{name} {value:.1e}" for name, value in row["error"].items()), flush=True)
    for name, why in row["failed"].items():
        print(f"        {name} failed: {why}", flush=True)


def tilings(chosen: Any, which: str) -> list[Any]:
    """The table's tiling, and others that differ in one product or in what goes with it."""
    found = [chosen]
    if which == "kept":
        for warps, stages, steps in itertools.product(
            (2, 4), (4, 5, 6), (((128, 5), (64, 8)), ((128, 8), (64, 8)), ((256, 3), (128, 4)))
        ):
            cut = [replace(chosen.kept[0], stages=stages, warps=warps)]
            cut += [replace(part, depth=k, stages=s, warps=warps) for part, (k, s) in zip(chosen.kept[1:], steps)]
            found.append(replace(chosen, kept=tuple(cut)))
        # One or two programs a processor (of 132), or more.
        found += [replace(chosen, fill=fill) for fill in (132, 264, 396)]
        return list(dict.fromkeys(found))
    product = getattr(chosen, which)

    def add(**changes: Any) -> None:
        found.append(replace(chosen, **{which: replace(product, **changes)}))

    if which in ("first", "gate"):
        for width, depth, stages, swap in itertools.product((32, 64, 128), (64, 128, 256), (2, 3, 4, 5, 6), (True, False)):
            if 32 << 10 <= width * depth * 2 * stages <= 112 << 10 and (width >= 64 or not swap):
                add(width=width, depth=depth, stages=stages, swap=swap)
        for ahead in (0, 128, 512):
            add(ahead=ahead)
        add(width=128, depth=128, stages=3, warps=8)
    else:
        key = "splits" if which == "down" else "sparse_splits"
        for width, depth, stages, swap in itertools.product(
            (64, 128, 256), (32, 64, 128), (3, 4, 5, 6), (which == "down", False)
        ):
            if 32 << 10 <= width * depth * 2 * stages <= 112 << 10:
                add(width=width, depth=depth, stages=stages, swap=swap, warps=8 if width == 256 else 4)
        for ahead in (0, 32, 64, 128) if which == "down" else ():
            add(ahead=ahead)
        for warps, stages in itertools.product((1, 2, 4), (2, 3, 4, 5)) if which == "sparse_down" else ():
            add(warps=warps, stages=stages)
        for splits, width in itertools.product((2, 4, 6, 8, 12, 16), (64, 128)):
            found.append(replace(chosen, **{key: splits, which: replace(product, width=width)}))
        found += [replace(chosen, columns=columns) for columns in (64, 256, 512)]
    return list(dict.fromkeys(found))


def tune(layers: Layers, rows: int, unions: Sequence[float], which: str, base: Any) -> tuple[list[dict[str, Any]], Any]:
    """Times of the tilings around ``base``, and the best one."""
    from spec_compile.kernels.mlp_sparse_triton import mlp_sparse_triton
    from spec_compile.kernels.mlp_triton import mlp_triton

    dense = which in ("first", "down")
    times: dict[Any, dict[float, float]] = {}
    for union in [1.0] if dense else unions:
        layers.set(rows, union)
        one = layers.all[0]
        right = wanted(one, None if dense else one.kept)
        for tiling in tilings(base, which):

            def run(layer: Layer, tiling: Any = tiling) -> Tensor:
                if dense:
                    return mlp_triton(layer.x, layer.gate, layer.up, layer.down, None, None, None, "silu", tiling)
                return mlp_sparse_triton(
                    layer.x, layer.gate, layer.up, layer.by_channels, None, None, None, "silu", layers.switch, THRESHOLD, 0,
                    False, tiling,
                )  # fmt: skip

            try:
                off = error(run(one), right)
                us = graph_us(layers.calls(run), 5, 6)
            except Exception as failure:
                print(f"    failed: {type(failure).__name__} {str(failure).splitlines()[0][:90]} {tiling}", flush=True)
                continue
            mark = "*" if tiling == base else " "
            wrong = "  WRONG" if off > 0.01 else ""
            print(f"  {mark} {us:8.1f} us  union {union:4.0%}  error {off:.1e}{wrong}  {differs(tiling, which)}", flush=True)
            if not wrong:
                times.setdefault(tiling, {})[union] = us
    whole = {tiling: found for tiling, found in times.items() if len(found) == (1 if dense else len(unions))}
    if not whole:
        return [], base
    first = whole.get(base) or next(iter(whole.values()))
    scores = {tiling: statistics.mean(us / first[union] for union, us in found.items()) for tiling, found in whole.items()}
    ordered = sorted(scores, key=scores.__getitem__)
    print(f"  best of {which} at T={rows}:", flush=True)
    for tiling in ordered[:5]:
        shown = " ".join(f"{union:.0%}: {us:.1f}" for union, us in whole[tiling].items())
        print(f"    {scores[tiling]:.3f}  {shown}  {differs(tiling, which)}", flush=True)
    results = [{"score": scores[tiling], "us": whole[tiling], "tiling": differs(tiling, which)} for tiling in ordered]
    return results, ordered[0]


def differs(tiling: Any, which: str) -> str:
    """A tiling in words: the product at hand, and what is no product."""
    rest = " ".join(f"{name}={value}" for name, value in vars(tiling).items() if name not in PARTS)
    return f"{getattr(tiling, which)} {rest}"


def by_launch(layers: Layers, rows: int, union: float, bandwidth: float) -> list[dict[str, Any]]:
    """What each launch of a step adds to it; the exact step at a union of 1 alone."""
    from spec_compile.kernels.mlp_sparse_triton import sparse_launches
    from spec_compile.kernels.mlp_triton import dense_launches

    layers.set(rows, union)
    keep = max(1, round(union * layers.shape.inner))

    def exact_of(layer: Layer) -> Any:
        return dense_launches(layer.x, layer.gate, layer.up, layer.down, None, None, None, "silu")

    def sparse_of(layer: Layer, budget: int) -> Any:
        return sparse_launches(
            layer.x, layer.gate, layer.up, layer.by_channels, None, None, None, "silu", layers.switch,
            0.0 if budget else THRESHOLD, budget, budget > 0,
        )  # fmt: skip

    kinds: dict[str, Callable[[Layer], Any]] = {"exact": exact_of} if union == 1 else {}
    kinds |= {"sparse": lambda layer: sparse_of(layer, 0), "budget": lambda layer: sparse_of(layer, keep)}
    weight = layers.shape.hidden * layers.shape.inner * 2 / bandwidth * 1e6
    found = []
    for kind, launches in kinds.items():
        names = [name for name, _ in launches(layers.all[0])[1]]
        limits = {"first": 2 * weight, "activation": weight, "kept": union * weight, "down": union * weight}
        upto = [0.0]
        for count in range(1, len(names) + 1):

            def run(layer: Layer, count: int = count, launches: Callable[[Layer], Any] = launches) -> None:
                for _, launch in launches(layer)[1][:count]:
                    launch()

            upto.append(timed(layers, run))
        device = kernel_us(layers, lambda layer, of=launches: [launch() for _, launch in of(layer)[1]], len(names))
        print(f"  T={rows} union {union:.0%} {kind}: {upto[-1]:.1f} us", flush=True)
        for place, name in enumerate(names):
            adds, limit = upto[place + 1] - upto[place], limits.get(name, 0.0)
            shown = f"{device[place]:8.1f}" if device else "       -"
            print(f"    {name:<11} adds {adds:6.1f}  limit {limit:5.1f}  device {shown}", flush=True)
            row = {"T": rows, "union": union, "kind": kind, "launch": name, "adds_us": adds, "limit_us": limit}
            found.append({**row, "device_us": device[place] if device else None})
    return found


def kernel_us(layers: Layers, function: Callable[[Layer], Any], kernels: int) -> list[float]:
    """Mean time of each of the ``kernels`` of a step on the device, in the order of their launches; [] where CUPTI is silent."""
    if layers.device != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in layers.calls(function):
            call()
    graph.replay()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(8):
                graph.replay()
            torch.cuda.synchronize()
        spans = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA and "kernel" in e.name]
    except Exception as failure:
        print(f"    no profile: {type(failure).__name__}: {failure}".splitlines()[0][:160], flush=True)
        return []
    if not spans or len(spans) % kernels:
        print(f"    no profile: {len(spans)} kernels were seen, not a multiple of {kernels}", flush=True)
        return []
    spans.sort(key=lambda e: e.time_range.start)
    return [statistics.mean(e.time_range.elapsed_us() for e in spans[place::kernels]) for place in range(kernels)]


def table(layers: Layers, rows: int) -> Any:
    from spec_compile.kernels.mlp_tiling import choose_mlp_tiling

    shape, gate = layers.shape, layers.all[0].gate
    return choose_mlp_tiling(gate.device, gate.dtype, rows, shape.hidden, shape.inner, shape.hidden)


def run(name: str, shape: Shape, args: argparse.Namespace) -> list[dict[str, Any]]:
    layers = Layers(shape, args.device)
    print(f"{name}: {shape.hidden} x {shape.inner}, {shape.layers} layers in turn", flush=True)
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        if args.tune:
            base = table(layers, rows)
            for which in args.tune:
                results, base = tune(layers, rows, args.unions, which, base)
                found.append({"shape": name, "T": rows, "which": which, "results": results})
            print(f"  all in all at T={rows}: {base}", flush=True)
        elif args.launches:
            for union in args.unions:
                found += [{"shape": name, **row} for row in by_launch(layers, rows, union, args.bandwidth)]
        else:
            found += [{"shape": name, **row} for row in measure(layers, rows, args.unions, args)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b"], choices=[*SHAPES])
    parser.add_argument("--rows", type=int, nargs="+", default=None, help="T (default 1 2 4 8 16 32, or 8)")
    parser.add_argument("--unions", type=float, nargs="+", default=None, help="shares (default 1 .9 .75 .5 .3 .1 .05)")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--compiled", type=int, nargs="*", default=[8], help="T at which Inductor is timed")
    parser.add_argument("--tune", nargs="+", choices=PARTS, help="time tilings of these products instead")
    parser.add_argument("--launches", action="store_true", help="time each launch of a step instead")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second for the limit")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    apart = args.tune or args.launches
    args.rows = args.rows or ([8] if apart else [1, 2, 4, 8, 16, 32])
    args.unions = args.unions or ([1.0, 0.5, 0.1] if apart else [1.0, 0.9, 0.75, 0.5, 0.3, 0.1, 0.05])
    if not all(0 < union <= 1 for union in args.unions):
        parser.error("--unions are shares of the channels in (0, 1]")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu runs small layers")
    if args.device == "cpu" and apart:
        parser.error("--tune and --launches need a CUDA device")
    torch.manual_seed(0)
    card = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, small layers"
    print(f"{card}, torch {torch.__version__}, bfloat16; us per layer", flush=True)
    shapes = SHAPES if args.device == "cuda" else SMALL
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.shapes:
            found += run(name, shapes[name], args)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"card": card, "torch": torch.__version__, "rows": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
