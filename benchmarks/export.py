"""Size, time and error of every artefact of ``spec_compile.export``: SmolLM2-135M-Instruct, or a model folder.

    python benchmarks/export.py --json export.json
    python benchmarks/export.py --cases ops.pt2 sparse_ops.pt2 ops.aoti.pt2 --device cuda --dtype bfloat16 --max-len 32768

Each artefact is written, loaded in a new process, and runs three groups of five steps (T = 1, 2, 5, 16, 3, with a rollback)
behind different numbers of tokens. The error is the largest difference of logits to the compiled verify. Step times are
medians at T = 9 behind the longest prompt; those of the compiled verify are taken in the same kind of process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import spec_compile as sc
from spec_compile.loading import load_model, smollm2_path

ROWS, DRAFTS = (1, 2, 5, 16, 3), 15
# Artefact: format by its ending, then flavour, then whether it has the plan.
CASES = (
    "ops.pt2", "sparse_ops.pt2", "portable.pt2", "sparse_portable.pt2", "portable.onnx", "sparse_portable.onnx", "ops.aoti.pt2",
    "portable.aoti.pt2",
)  # fmt: skip
DEFAULT = CASES[:5]


def plan_of(name: str, budget: int) -> sc.SparsityPlan | None:
    attention = sc.AttentionPlan(budget=budget, block_size=16, index_topk_freq=2)
    return sc.SparsityPlan(attention=attention) if name.startswith("sparse") else None


def prompts(vocabulary: int, lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (1, length), generator=generator) for length in lengths]


def run_group(verify: Any, prompt: torch.Tensor, vocabulary: int, sparse: bool, device: str) -> list[torch.Tensor]:
    """Five steps behind a prompt; a rollback of 4 tokens after the third."""
    verify.reset()
    for part in prompt.split(DRAFTS + 1, 1):
        verify(part.to(device), sparse=False if sparse else None)
    generator, found = torch.Generator().manual_seed(prompt.shape[1]), []
    for rows in ROWS:
        found.append(verify(torch.randint(3, vocabulary, (1, rows), generator=generator).to(device)).cpu())
        if len(found) == 3:
            verify.cache.crop(-4)
    return found


def step_ms(verify: Any, vocabulary: int, device: str, repeats: int = 20) -> float:
    """Median over steps of 9 rows, each rolled back."""
    ids, times = torch.randint(3, vocabulary, (1, 9)).to(device), []
    for _ in range(repeats + 3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        verify(ids)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        verify.cache.crop(-9)
    return statistics.median(times[3:]) * 1e3


def child(path: str, lengths: list[int], vocabulary: int, codegen: str | None) -> None:
    """Load, run, and say so on standard output."""
    start = time.perf_counter()
    verify = sc.load(path, **({"codegen": codegen} if codegen and path.endswith(".pt2") and "aoti" not in path else {}))
    seconds = time.perf_counter() - start
    sparse, device = verify.manifest.sparse, verify.device.type
    logits = [run_group(verify, prompt, vocabulary, sparse, device) for prompt in prompts(vocabulary, lengths)]
    torch.save(logits, path + ".logits")
    print(json.dumps({"load_s": seconds, "step_ms": step_ms(verify, vocabulary, device)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default SmolLM2-135M-Instruct")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 17, 700], help="tokens held before the steps")
    parser.add_argument("--budget", type=int, default=128, help="of the sparse plan, tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codegen", choices=("eager", "inductor"), help="of loaded .pt2; default by device")
    parser.add_argument("--reference", choices=("eager", "inductor"), default="inductor", help="of the compiled verify")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.lengths, args.vocabulary, args.codegen)
        return
    console = Console(stderr=True)
    model, _ = load_model(args.model or smollm2_path(), getattr(torch, args.dtype))
    model, vocabulary = model.to(args.device), model.config.vocab_size
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    results: dict[str, Any] = {"torch": torch.__version__, "weights_bytes": weights, "max_len": args.max_len, "cases": {}}
    expected: dict[bool, list[list[torch.Tensor]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            plan = plan_of(name, args.budget)
            verify = sc.compile_verify(model, sc.VerifyCache(model, args.max_len), DRAFTS, plan, codegen=args.reference)
            if (plan is None) not in expected:
                with console.status(f"compiled verify for {name}"):
                    expected[plan is None] = [
                        run_group(verify, prompt, vocabulary, plan is not None, args.device)
                        for prompt in prompts(vocabulary, args.lengths)
                    ]
                    results["sparse_verify_ms" if plan else "verify_ms"] = step_ms(verify, vocabulary, args.device)
            path, seconds = Path(folder) / name, dict[str, float]()
            with console.status(f"export {name}"):
                sc.export(verify, path, flavour="portable" if "portable" in name else "ops", seconds=seconds)
            row: dict[str, Any] = {"export_s": seconds, "bytes": path.stat().st_size}
            command = [sys.executable, __file__, "--child", str(path), "--vocabulary", str(vocabulary), "--lengths"]
            command += [*map(str, args.lengths), *(["--codegen", args.codegen] if args.codegen else [])]
            with console.status(f"run {name}"):
                done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            row.update(json.loads(done.stdout.splitlines()[-1]))
            found = torch.load(str(path) + ".logits")
            pairs = [(a, b) for x, y in zip(found, expected[plan is None]) for a, b in zip(x, y)]
            row["difference"] = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
            row["flipped"] = sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs)
            row["nan"] = any(bool(a.isnan().any()) for a, _ in pairs)
            results["cases"][name] = row
            console.print(f"{name}: {json.dumps(row)}")
            if args.json:
                args.json.write_text(json.dumps(results, indent=2) + "\n")
            path.unlink()
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
