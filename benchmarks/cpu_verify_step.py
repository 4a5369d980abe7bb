"""A whole verify step of a real model on CPU, and what of it is attention.

    python benchmarks/cpu_verify_step.py [--live 8000] [--slots 8192] [--rows 9] [--json FILE]

The same T rows against the same static cache: transformers eager (repeat_kv + SDPA), the rewritten graph run eagerly, plain
Inductor, and the rewritten graph compiled by Inductor. Attention time is taken inside the running model, where repeat_kv's
copies meet the allocator as they do in use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import spec_compile as sc
from spec_compile.kernels import library
from spec_compile.loading import load_model, smollm2_path


class Stopwatch:
    """Wraps a function and sums the time spent in it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.seconds, self.calls = run, 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = self.run(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return out


def step_ms(run: Callable[[], Any], cache: Any, rows: int, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
        cache.crop(-rows)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--live", type=int, default=8000, help="tokens held")
    parser.add_argument("--slots", type=int, default=8192, help="cache length")
    parser.add_argument("--rows", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-inductor", action="store_true", help="skip the two compiled paths")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, _ = load_model(args.model or smollm2_path())
    cache = sc.VerifyCache(model, max_len=args.slots)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(args.live)
    ids = torch.randint(0, model.config.vocab_size, (1, args.rows))
    rows = []

    def note(name: str, ms: float, attention: float | None) -> None:
        rows.append({"path": name, "step_ms": ms, "attention_ms_per_layer": attention})
        inside = "" if attention is None else f"   attention {attention:6.2f} ms per layer"
        print(f"{name:<28} {ms:8.1f} ms{inside}", flush=True)

    print(f"T={args.rows}, {args.live} live of {args.slots} slots, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.no_grad():
        watch = Stopwatch(ALL_ATTENTION_FUNCTIONS["sdpa"])
        ALL_ATTENTION_FUNCTIONS["sdpa"] = watch
        ms = step_ms(lambda: model(ids, past_key_values=cache), cache, args.rows, args.repeats)
        ALL_ATTENTION_FUNCTIONS["sdpa"] = watch.run
        note("transformers, eager", ms, watch.seconds / watch.calls * 1e3)

        original = library._attention_folded
        for codegen in ("eager", "inductor"):
            if codegen == "inductor" and args.no_inductor:
                continue
            if codegen == "inductor":
                plain = torch.compile(model, backend="inductor")
                ms = step_ms(partial(plain, ids, past_key_values=cache), cache, args.rows, args.repeats)
                note("transformers, Inductor", ms, None)
                torch._dynamo.reset()
            watch = Stopwatch(original)
            library._attention_folded = watch
            verify = sc.compile_verify(model, cache, draft_len=args.rows - 1, codegen=codegen)
            ms = step_ms(partial(verify, ids), cache, args.rows, args.repeats)
            library._attention_folded = original
            note(f"spec_compile, {codegen}", ms, watch.seconds / watch.calls * 1e3)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, **vars(args), "rows": rows}, indent=2, default=str))


if __name__ == "__main__":
    main()
