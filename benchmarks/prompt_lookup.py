"""Prompt-lookup decoding of a real model at long context: transformers' own cache and attention against this compiler.

    python benchmarks/prompt_lookup.py [--context 6000] [--new-tokens 64] [--json FILE]

Peers, all through the same ``model.generate(..., prompt_lookup_num_tokens=8)``: transformers with its DynamicCache, with its
static layout (VerifyCache, uncompiled), with plain ``torch.compile`` (Inductor), and with ``backend="spec_compile"``, its graph
run eagerly or compiled by Inductor. Tokens per second count decoding from the end of the prefill, after a warm-up generation.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import spec_compile as sc
from spec_compile.demo import Clock, Run, compare, demo_prompts
from spec_compile.loading import load_model, smollm2_path

PATHS = ["dynamic", "static", "inductor", "spec_compile_eager", "spec_compile"]


def decode(model: Any, ids: Tensor, args: argparse.Namespace, static: bool) -> Run:
    run = Run()
    extra: dict[str, Any] = {}
    if static:
        extra["past_key_values"] = sc.VerifyCache(model, max_len=args.max_len or ids.shape[1] + args.new_tokens)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False,
        prompt_lookup_num_tokens=args.drafts, streamer=Clock(run), **extra,
    )  # fmt: skip
    run.tokens = out[0, ids.shape[1] :].tolist()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--max-len", type=int, help="cache length; default context + new tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--skip", nargs="*", default=[], choices=PATHS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, tokenizer = load_model(args.model or smollm2_path())
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    ids = demo_prompts(tokenizer, args.context)[0][1]
    rows = []
    expected: Run | None = None
    for name in PATHS:
        if name in args.skip:
            continue
        warmups = 0
        if name in ("inductor", "spec_compile_eager", "spec_compile"):
            torch._dynamo.reset()
            if name == "inductor":
                model.compile(backend="inductor")
            else:
                model.compile(backend="spec_compile", options={"codegen": "eager" if name.endswith("eager") else "inductor"})
            warmups = 1
        for _ in range(warmups):
            decode(model, ids, args, name != "dynamic")
        run = decode(model, ids, args, name != "dynamic")
        expected = expected or run
        row = {
            "path": name, "context": ids.shape[1], "tokens_per_second": run.decoded / run.seconds,
            "ms_per_verify": run.seconds / len(run.chunks[1:]) * 1e3, "mean_acceptance_length": sum(run.chunks) / len(run.chunks),
            **{k: v for k, v in compare(model, ids, expected.tokens, run.tokens).items() if k != "total"},
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:<19} {row['tokens_per_second']:>7.2f} tokens/s {row['ms_per_verify']:>8.1f} ms per verify  acceptance length "
            f"{row['mean_acceptance_length']:.2f}  difference {row['difference']}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
