"""Compile time of one verify graph of a real model: plain Inductor against this compiler (which ends in Inductor too).

    python benchmarks/compile_time.py [--json FILE]

Both compile the same forward (T = 9 over a static cache) from cold caches, one after the other, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def once(backend: str, model_path: Path | None) -> float:
    """Seconds from the call to the first result, minus those of a second call."""
    import torch

    import spec_compile as sc
    from spec_compile.loading import load_model, smollm2_path

    model, _ = load_model(model_path or smollm2_path())
    cache = sc.VerifyCache(model, max_len=1024)
    run = torch.compile(model, backend=backend)
    times = []
    with torch.no_grad():
        for _ in range(2):
            start = time.perf_counter()
            run(torch.zeros(1, 9, dtype=torch.int64), past_key_values=cache)
            times.append(time.perf_counter() - start)
    return times[0] - times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print("seconds", once(args.once, args.model))
        return
    result = {}
    for backend in ("inductor", "spec_compile"):
        with tempfile.TemporaryDirectory() as cold:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cold}
            command = [sys.executable, __file__, "--once", backend, *(["--model", str(args.model)] if args.model else [])]
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        result[backend] = float(done.stdout.rsplit("seconds", 1)[1])
        print(f"{backend:<13} {result[backend]:.1f} s", flush=True)
    result["ratio"] = result["spec_compile"] / result["inductor"]
    print(f"ratio {result['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
