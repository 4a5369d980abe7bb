"""Run the benchmarks behind RESULTS.md, each in a process of its own.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py --device cuda --out results [--only attention moe ...] [--minutes 10] [--again]
    python benchmarks/reproduce.py --device cpu --out results

What a run prints and its JSON go to ``OUT/NAME.txt`` and ``OUT/NAME.json``. A run that was interrupted, failed or ran out of time
is repeated by the next call; one that ended well is not, unless ``--again``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Run:
    """One command; each of them stays below ten minutes on the machines of RESULTS.md, unless ``long``."""

    name: str
    device: str
    command: str
    long: bool = False


RUNS = (
    Run("attention", "cuda", "attention.py --peers flash"),
    Run("attention-peers", "cuda", "attention.py --lengths 32768 131072 --rows 8 9 --batches 1"),
    Run("verify-step", "cuda", "verify_step.py"),
    Run("verify-step-sparse", "cuda", "verify_step.py --rows 8 --budget 0.125 --block-size 64 --profile"),
    Run("verify-step-moe", "cuda", "verify_step.py --model qwen3-30b --points 1x32768 --rows 8 --peers sdpa --expert-budget 24 "
        "--budget 0.125"),
    Run("sparse-attention", "cuda", "sparse_attention.py --blocks 64 16 8"),
    Run("moe", "cuda", "moe.py"),
    Run("moe-24", "cuda", "moe.py --shapes qwen3-30b --rows 8 9 --experts 24"),
    Run("ffn", "cuda", "ffn.py"),
    Run("ffn-launches", "cuda", "ffn.py --launches"),
    Run("decoding-system", "cuda", "decoding.py --part system"),
    Run("export-cuda", "cuda", "export.py --shape llama-8b --cases ops.pt2 ops.aoti.pt2 --device cuda --dtype bfloat16 "
        "--no-float64 --max-len 32768 --pasts 32000"),
    Run("cpu-attention", "cpu", "cpu_attention.py"),
    Run("cpu-verify-step", "cpu", "cpu_verify_step.py"),
    Run("compile-time", "cpu", "compile_time.py"),
    Run("prompt-lookup", "cpu", "prompt_lookup.py"),
    Run("quality", "cpu", "quality.py", long=True),
    Run("selection", "cpu", "selection.py", long=True),
    Run("moe-quality", "cpu", "moe_quality.py"),
    Run("ffn-quality", "cpu", "ffn_quality.py", long=True),
    Run("decoding-greedy", "cpu", "decoding.py --part greedy", long=True),
    Run("decoding-audited", "cpu", "decoding.py --part audited", long=True),
    Run("paper-tables", "cpu", "paper_tables.py --prefix 1536 --taus 0.05 0.1 --texts 5", long=True),
    Run("export", "cpu", "export.py", long=True),
)  # fmt: skip


def execute(run: Run, out: Path, seconds: float) -> tuple[str, float]:
    """What became of it, and how long it took. The JSON appears under its name once the run has ended well."""
    script, *arguments = run.command.split()
    part, began = out / f"{run.name}.part.json", time.perf_counter()
    command = [sys.executable, str(HERE / script), *arguments, "--json", str(part)]
    with (out / f"{run.name}.txt").open("w", encoding="utf-8") as shown:
        try:
            code = subprocess.run(command, stdout=shown, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return f"out of time after {seconds / 60:.0f} minutes", time.perf_counter() - began
    if code:
        return f"failed, exit code {code}: see {run.name}.txt", time.perf_counter() - began
    if not part.exists():
        return "ended without a result", time.perf_counter() - began
    part.replace(out / f"{run.name}.json")
    return "done", time.perf_counter() - began


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], help="by name, whatever the device")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder; default results")
    parser.add_argument("--minutes", type=float, help="most time of a run; default 10, 60 for those marked long")
    parser.add_argument("--again", action="store_true", help="repeat those that ended well")
    parser.add_argument("--list", action="store_true", help="show the runs")
    parser.add_argument("--json", type=Path, help="what became of each run")
    args = parser.parse_args(given)
    console = Console(stderr=True)
    chosen = [run for run in RUNS if (run.name in args.only if args.only else run.device == args.device)]
    if args.list:
        for run in RUNS:
            print(f"{run.name:<20}{run.device:<6}{'long  ' if run.long else '      '}python benchmarks/{run.command}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    try:
        for place, run in enumerate(chosen, 1):
            if (args.out / f"{run.name}.json").exists() and not args.again:
                results[run.name] = {"result": "done before", "seconds": 0.0}
                continue
            minutes = args.minutes or (60 if run.long else 10)
            with console.status(f"{place} of {len(chosen)}: {run.name}"):
                said, seconds = execute(run, args.out, minutes * 60)
            results[run.name] = {"result": said, "seconds": round(seconds, 1)}
            console.print(f"{run.name}: {said} ({seconds:.0f} s)", highlight=False)
    except KeyboardInterrupt:
        console.print("interrupted: call again with the same --out to go on")
    table = Table("run", "command", "result", "s")
    for run in chosen:
        found = results.setdefault(run.name, {"result": "not run", "seconds": 0.0})
        table.add_row(run.name, f"python benchmarks/{run.command}", str(found["result"]), f"{found['seconds']:.0f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(any(found["result"] not in ("done", "done before") for found in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
