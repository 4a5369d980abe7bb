"""Size, time and error of every artefact of ``spec_compile.export``: SmolLM2-135M-Instruct, a model folder, or a tiny family.

    python benchmarks/export.py --json export.json
    python benchmarks/export.py --family gemma2
    python benchmarks/export.py --shape llama-8b --cases ops.pt2 ops.aoti.pt2 --device cuda --dtype bfloat16 --no-float64 \\
        --max-len 32768 --pasts 32000

Each artefact is written, loaded in a new process, and runs behind different numbers of tokens: five steps (T = 1, 2, 5, 16, 3)
that carry state, with a rollback, then every T from 1 to 16. Portable ones run once more where spec_compile cannot be imported.
*difference*: largest one of logits to the compiled verify; *relative*: to its largest logit, above 1. *error*: largest difference
to the same steps in float64, of exact steps; that of the compiled verify and of the uncompiled model stand beside. Step times
are medians at T = 9 behind the longest context; those of the compiled verify are taken in this one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from export_child import run_group, step_ms
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode
from verify_step import MODELS as SHAPES
from verify_step import build as build_shape

import spec_compile as sc
from spec_compile.demo import demo_prompts
from spec_compile.errors import ExportError
from spec_compile.loading import load_model, smollm2_path
from spec_compile.models.zoo import FAMILIES, VOCAB, build
from spec_compile.verify import call_model

ROWS = (1, 2, 5, 16, 3)
DRAFTS = max(ROWS) - 1
# Artefact: its plan, its flavour, and its format by its ending.
CASES = tuple(
    f"{plan}{kind}"
    for kind in ("ops.pt2", "portable.pt2", "ops.aoti.pt2", "portable.aoti.pt2", "portable.onnx")
    for plan in ("", "sparse_")
)
Logits = list[list[Tensor]]


class _InDouble(TorchFunctionMode):
    """Models cast to float32 on the way, in norms and angles: cast to float64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(given: Any) -> Any:
            return torch.float64 if given is torch.float32 else given

        return func(*map(wide, args), **{key: wide(given) for key, given in (kwargs or {}).items()})


def plan_of(name: str, budget: int) -> sc.SparsityPlan | None:
    attention = sc.AttentionPlan(budget=budget, block_size=16, index_topk_freq=2)
    return sc.SparsityPlan(attention=attention) if name.startswith("sparse") else None


def tokens(tokenizer: Any, count: int) -> Tensor:
    """The first ``count`` tokens of a source file, from its beginning again where it ends; random ones without a tokenizer."""
    if tokenizer is None:
        return torch.randint(3, VOCAB, (1, count), generator=torch.Generator().manual_seed(0))
    (_, ids), *_ = demo_prompts(tokenizer, 7000)
    return ids.repeat(1, -(-count // ids.shape[1]))[:, :count]


def uncompiled(model: Any, ids: Tensor, pasts: list[int], max_len: int) -> Logits:
    """The same steps by the model's own forward."""
    cache, forward = sc.VerifyCache(model, max_len), call_model(model)

    @torch.no_grad()
    def step(ids: Tensor, sparse: Any = None) -> Tensor:
        held = cache.length
        return forward(ids, torch.arange(held, held + ids.shape[1], device=ids.device)[None], None, cache)

    found = []
    for past in pasts:
        cache.reset()
        found.append(run_group(step, cache.crop, ids, past, ROWS, None))
    return found


def compiled(verify: Any, ids: Tensor, pasts: list[int], sparse: bool) -> Logits:
    found = []
    for past in pasts:
        verify.reset()
        found.append(run_group(verify, verify.cache.crop, ids, past, ROWS, False if sparse else None))
    return found


def distance(found: Logits, wanted: Logits) -> dict[str, Any]:
    pairs = [(a, b) for x, y in zip(found, wanted, strict=True) for a, b in zip(x, y, strict=True)]
    return {
        "largest": (largest := max(float((a.double() - b.double()).abs().max()) for a, b in pairs)),
        "relative": largest / max(1.0, *(float(b.abs().max()) for _, b in pairs)),
        "flipped": sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs),
        "rows": sum(a.shape[1] for a, _ in pairs),
        "nan": any(bool(a.isnan().any()) for a, _ in pairs),
    }


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {"python": platform.python_version(), "processor": _processor()}
    for package in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    """Name and vector units."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@contextmanager
def stage(console: Console, text: str) -> Iterator[None]:
    with console.status(text):
        yield


def in_child(kind: str, path: Path, given: Path, codegen: str) -> tuple[dict[str, Any], Logits]:
    """Times and logits of an artefact in a process of its own.

    Raises:
        SystemExit: it failed there.
    """
    command = [sys.executable, str(Path(__file__).with_name("export_child.py")), kind, str(path), str(given), codegen]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), torch.load(f"{path}.{kind}")


def table(results: dict[str, Any]) -> Table:
    made = Table(title="exported steps", caption="difference to the compiled verify; error against float64, exact steps only")
    made.add_column("", no_wrap=True)
    for column in ("MB", "export, s", "load, s", "step, ms", "difference", "relative", "error", "flipped", "elsewhere"):
        made.add_column(column, justify="right", no_wrap=True)
    for label, row in (("uncompiled", results["uncompiled"]), ("compiled", results["compiled"]),
                       ("compiled, sparse", results["compiled_sparse"])):  # fmt: skip
        if row:
            made.add_row(label, "", "", "", _number(row.get("step_ms"), ".0f"), "", "", _number(row.get("error"), ".1e"), "", "")
    for name, row in results["cases"].items():
        cells = (row["bytes"] / 1e6, sum(row["export_s"].values()), row["load_s"], row["step_ms"])
        flipped = f"{row['difference']['flipped']} of {row['difference']['rows']}"
        elsewhere = _number(row["elsewhere"]["largest"], ".1e") if "elsewhere" in row else "-"
        numbers = [f"{cell:.0f}" if cell >= 100 else f"{cell:.1f}" for cell in cells]
        differences = [f"{row['difference'][key]:.1e}" for key in ("largest", "relative")]
        made.add_row(name, *numbers, *differences, _number(row.get("error"), ".1e"), flipped, elsewhere)
    return made


def _number(found: float | None, how: str) -> str:
    return "-" if found is None else format(found, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default SmolLM2-135M-Instruct")
    parser.add_argument("--family", choices=FAMILIES, help="a tiny random model of that family instead")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of that shape instead, 8 layers of Llama-3.1-8B, say")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--pasts", type=int, nargs="+", default=[1, 17, 700], help="tokens held before the steps")
    parser.add_argument("--budget", type=int, default=128, help="of the sparse plan, tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="", help="of loaded .pt2; default by device")
    parser.add_argument("--reference", choices=("eager", "inductor"), default="inductor", help="of the compiled verify")
    parser.add_argument("--no-float64", action="store_true", help="leave the errors against float64 out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if min(args.pasts) < 1 or max(args.pasts) + sum(ROWS) > args.max_len:
        parser.error(f"--pasts must lie in 1..{args.max_len - sum(ROWS)} for --max-len {args.max_len}")
    console = Console(stderr=True)
    with stage(console, "load the model"):
        dtype = getattr(torch, args.dtype)
        if args.family:
            model, tokenizer = build(args.family, FAMILIES[args.family].implementations[-1], dtype=dtype), None
        elif args.shape:
            model, tokenizer = build_shape(args.shape, "sdpa", SHAPES[args.shape][1], args.device).to(dtype), None
        else:
            model, tokenizer = load_model(args.model or smollm2_path(), dtype)
        model.to(args.device)
    ids = tokens(tokenizer, max(args.pasts) + sum(ROWS))
    here, pasts = ids.to(args.device), args.pasts
    results: dict[str, Any] = {
        "versions": versions(), "max_len": args.max_len, "pasts": pasts, "rows": ROWS,
        "weights_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "uncompiled": {}, "compiled": {}, "compiled_sparse": {}, "cases": {}, "refused": {},
    }  # fmt: skip
    double: Logits = []
    if not args.no_float64:
        with stage(console, "the uncompiled model, and the same in float64"), torch.no_grad():
            wide = copy.deepcopy(model).double()
            if getattr(wide.config, "_experts_implementation", None) == "grouped_mm":
                # Grouped products take no float64.
                wide.set_experts_implementation("batched_mm")
            with _InDouble():
                double = uncompiled(wide, here, pasts, args.max_len)
            del wide
            results["uncompiled"] = {"error": distance(uncompiled(model, here, pasts, args.max_len), double)["largest"]}
            results["largest_logit"] = max(float(x.abs().max()) for group in double for x in group)
    expected: dict[bool, Logits] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "tokens"
        torch.save({"ids": ids, "pasts": pasts, "rows": ROWS}, given)
        for name in args.cases:
            plan = plan_of(name, args.budget)
            exact = plan is None
            verify = sc.compile_verify(model, sc.VerifyCache(model, args.max_len), DRAFTS, plan, codegen=args.reference)
            if exact not in expected:
                with stage(console, "compiled verify" if exact else "compiled verify, sparse"):
                    expected[exact] = compiled(verify, here, pasts, not exact)
                    held = results["compiled" if exact else "compiled_sparse"]
                    held["step_ms"] = step_ms(verify, verify.cache.crop, here, args.device)
                    if exact and double:
                        held["error"] = distance(expected[exact], double)["largest"]
                    if len(expected) == 2:
                        # Steps that were not sparse would agree with everything.
                        results["sparse_to_exact"] = distance(expected[False], expected[True])
            path, seconds = Path(folder) / name, dict[str, float]()
            flavour = "portable" if "portable" in name else "ops"
            try:
                with stage(console, f"export {name}"):
                    sc.export(verify, path, flavour=flavour, seconds=seconds)
            except ExportError as error:
                results["refused"][name] = str(error)
                console.print(f"{name}: refused: {error}", highlight=False, soft_wrap=True)
                continue
            row: dict[str, Any] = {"export_s": seconds, "bytes": sum(f.stat().st_size for f in path.parent.glob(f"{name}*"))}
            with stage(console, f"run {name}"):
                times, found = in_child("load", path, given, args.codegen if name.count(".") == 1 and ".pt2" in name else "")
            row.update(times, difference=distance(found, expected[exact]))
            if exact and double:
                row["error"] = distance(found, double)["largest"]
            if flavour == "portable" and args.device == "cpu":
                with stage(console, f"run {name} without spec_compile"):
                    _, found = in_child("elsewhere", path, given, "")
                row["elsewhere"] = distance(found, expected[exact])
            results["cases"][name] = row
            console.print(f"{name}: {json.dumps(row)}", highlight=False, soft_wrap=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            for made in path.parent.glob(f"{name}*"):
                made.unlink()
    Console(width=130).print(table(results))


if __name__ == "__main__":
    main()
