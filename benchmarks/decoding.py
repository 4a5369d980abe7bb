"""The decoding loop: is it lossless, what do audits read, what does a step cost?

    python benchmarks/decoding.py --part greedy  [--prompts 40] [--drafters ...] [--modes exact audited] [--json FILE]
    python benchmarks/decoding.py --part audited [--texts ...] [--bands ...] [--context 6000] [--plan PLAN.json] [--json FILE]
    python benchmarks/decoding.py --part system  [--points 1x32768 8x32768 1x131072] [--methods ...] [--json FILE]      (a GPU)

``greedy``: SmolLM2-135M-Instruct, CPU, float32: 20 questions of GSM8K in the chat template and 20 pieces of source and prose to
continue, 8 prompts of unequal length in a batch, against transformers' greedy decoding of each alone. Audits run with a plan
whose budget is far below the prompts, so that sparse steps do differ. Every difference is listed with the margin between the two
tokens in a forward of one row and in one of nine: they have opposite signs, or are tiny, where it is a near tie.

``audited``: the same model at long context. Drafters: prompt lookup, and scripts that propose the model's own continuation with a
set chance of error, which makes bands of acceptance. Windows end where K and V alone make it pay, or are filled
(``--fill``). Bytes are counted from lengths, plan and compiled graph.

``system``: the shape of Llama-3.1-8B with random weights, bfloat16; see decoding_system.py.

Results are saved after every row, so that a run may be cut into shards (``--drafters``, ``--texts``, ``--points``) or broken off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import shlex
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import decoding_system
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import spec_compile as sc
from spec_compile.drafters import Drafter, PromptLookup, Scripted
from spec_compile.drafters_model import AssistantModel, EarlyExit
from spec_compile.files import write_whole
from spec_compile.loading import load_model, smollm2_path

HERE = Path(__file__).parent
DRAFTERS = ("prompt_lookup", "tree", "early_exit", "assistant", "scripted")
TEXTS = ("prose", "sqlite-docs", "verse", "source")
BANDS = {"prompt_lookup": None, "scripted_0.3": 0.3, "scripted_0.6": 0.6, "scripted_0.9": 0.9}
# The budget is a handful of blocks: sparse steps must differ from dense ones even on prompts of a hundred tokens.
TIGHT = sc.SparsityPlan(
    attention=sc.AttentionPlan(budget=16, block_size=16, sink=1, recent=2, min_context=0, index_topk_freq=2),
    audit=sc.AuditPlan(window=8, adapt=False),
)
SIXTH = sc.SparsityPlan(
    attention=sc.AttentionPlan(budget=1024, block_size=16, min_context=2048, index_topk_freq=2, aggregate="softmax"),
)


class Book:
    """Rows of results, printed as they come and saved each time."""

    def __init__(self, path: Path | None, **about: Any) -> None:
        self.path, self.data = path, {**about, "rows": []}

    def add(self, row: dict[str, Any], line: str) -> None:
        self.data["rows"].append(row)
        print(line, flush=True)
        if self.path is not None:
            write_whole(self.path, json.dumps(self.data, indent=1) + "\n")


def scripted(references: list[tuple[list[int], list[int]]], chance: float, drafts: int = 8) -> Scripted:
    """Propose what the target is going to say, each token with ``1 - chance`` of being wrong; errors depend on the place alone.

    Args:
        references: prompts and what the target continues them with.
    """

    def propose(tokens: Sequence[int]) -> list[int]:
        known = next([*prompt, *rest] for prompt, rest in references if prompt == list(tokens[: len(prompt)]))
        found = known[len(tokens) : len(tokens) + drafts]
        places = range(len(tokens), len(tokens) + len(found))
        return [token if random.Random(place).random() < chance else token ^ 1 for place, token in zip(places, found)]

    return Scripted(propose, max_drafts=drafts)


def greedy_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Questions and pieces of texts by turns; pieces have 40 to 230 tokens."""
    prompts = []
    rows = [json.loads(line) for line in (HERE / "data" / "gsm8k_20.jsonl").read_text(encoding="utf-8").splitlines()]
    pieces = [Path(module.__file__).read_text(encoding="utf-8") for module in (textwrap, shlex)]
    pieces += [(HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS[:3]]
    for at in range(count):
        if at % 2 == 0:
            chat = [{"role": "user", "content": rows[at // 2 % len(rows)]["question"]}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            place = 1500 + 900 * (at // 10)
            ids = tokenizer(pieces[at // 2 % len(pieces)][place : place + 1200]).input_ids[: 40 + 10 * (at // 2)]
        prompts.append(list(ids))
    return prompts


@torch.no_grad()
def hf_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def margins(model: Any, prefix: list[int], expected: int, found: int) -> dict[str, float]:
    """Logit of ``expected`` minus that of ``found`` after ``prefix``, by a cached forward of one row and by one of nine."""
    from transformers import DynamicCache

    out = {}
    for name, rows in (("one_row", 1), ("nine_rows", 9)):
        cache, ids = DynamicCache(config=model.config), torch.tensor([prefix])
        model.forward(ids[:, :-rows], past_key_values=cache, logits_to_keep=1)
        logits = model.forward(ids[:, -rows:], past_key_values=cache).logits[0, -1]
        out[name] = float(logits[expected] - logits[found])
    return out


def greedy_drafter(name: str, model: Any, references: list[tuple[list[int], list[int]]], codegen: str) -> Drafter:
    if name == "tree":
        return PromptLookup(8, branches=3)
    if name == "early_exit":
        return EarlyExit(model, 10, 4, codegen=codegen)
    if name == "assistant":
        # The target itself: the longest runs there are.
        return AssistantModel(model, 4, codegen=codegen)
    return scripted(references, 0.7) if name == "scripted" else PromptLookup(8)


def part_greedy(args: argparse.Namespace, tick: Callable[[str], None]) -> None:
    model, tokenizer = load_model(args.model or smollm2_path())
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    prompts = greedy_prompts(tokenizer, args.prompts)
    plan = TIGHT if args.plan is None else sc.SparsityPlan.load(args.plan)
    expected = []
    for at, prompt in enumerate(prompts):
        tick(f"transformers, greedy: prompt {at + 1} of {len(prompts)}")
        expected.append(hf_greedy(model, prompt, args.new_tokens))
    book = Book(args.json, part="greedy", prompts=len(prompts), new_tokens=args.new_tokens, batch=args.batch,
                plan=plan.to_dict(), torch=torch.__version__, threads=torch.get_num_threads())  # fmt: skip
    # One cache length, one graph.
    cache_len = max(map(len, prompts)) + args.new_tokens
    for mode in args.modes:
        for name in args.drafters:
            differences, same, total, agreed, audited, accepted, steps = [], 0, 0, 0, 0, 0, 0
            begin = time.perf_counter()
            for start in range(0, len(prompts), args.batch):
                tick(f"{mode}, {name}: prompts {start + 1} to {min(start + args.batch, len(prompts))}")
                part = prompts[start : start + args.batch]
                known = list(zip(part, expected[start:]))
                cache = sc.RowCache(model, max_len=cache_len, batch=len(part))
                out = sc.generate(
                    model, part, drafter=greedy_drafter(name, model, known, args.codegen), mode=mode,
                    plan=None if mode == "exact" else plan, max_new_tokens=args.new_tokens, cache=cache, codegen=args.codegen,
                )  # fmt: skip
                numbers = out.metrics.to_dict()["total"]
                agreed += sum(r.agreed for r in out.metrics.requests)
                audited, accepted = audited + numbers["audited_tokens"], accepted + numbers["accepted"]
                steps += numbers["steps"]
                for i, (prompt, tokens) in enumerate(zip(part, out.tokens)):
                    wanted = expected[start + i]
                    total += max(len(wanted), len(tokens))
                    first = next((k for k, (a, b) in enumerate(zip(wanted, tokens)) if a != b), None)
                    same += sum(a == b for a, b in zip(wanted, tokens))
                    if first is not None:
                        ties = margins(model, [*prompt, *wanted[:first]], wanted[first], tokens[first])
                        differences.append({"prompt": start + i, "token": first, **ties})
                    elif len(wanted) != len(tokens):
                        differences.append({"prompt": start + i, "lengths": [len(wanted), len(tokens)]})
            row = {
                "mode": mode, "drafter": name, "tokens": total, "identical": same, "differences": differences,
                "tokens_per_step": 1 + accepted / steps, "audited_tokens": audited,
                "agreement": agreed / audited if audited else None, "seconds": time.perf_counter() - begin,
            }  # fmt: skip
            told = f", audits agree {row['agreement']:.1%} of {audited}" if audited else ""
            told += f", {row['seconds']:.0f} s; differences: {differences or 'none'}"
            length = f"{row['tokens_per_step']:.2f} tokens a step"
            book.add(row, f"{mode:<8} {name:<14} {same} of {total} tokens identical, {length}{told}")


def long_prompt(tokenizer: Any, name: str, tokens: int) -> list[int]:
    if name == "source":
        text = Path(textwrap.__file__).with_name("argparse.py").read_text(encoding="utf-8")
    else:
        text = (HERE / "texts" / f"{name}.txt").read_text(encoding="utf-8")
    return list(tokenizer(text).input_ids[:tokens])


def part_audited(args: argparse.Namespace, tick: Callable[[str], None]) -> None:
    model, tokenizer = load_model(args.model or smollm2_path())
    plan = SIXTH if args.plan is None else sc.SparsityPlan.load(args.plan)
    plan = dataclasses.replace(plan, audit=sc.AuditPlan(window=args.window, adapt=not args.fill, cost=args.cost))
    book = Book(args.json, part="audited", context=args.context, new_tokens=args.new_tokens, plan=plan.to_dict(),
                torch=torch.__version__, threads=torch.get_num_threads())  # fmt: skip
    cache = sc.RowCache(model, max_len=args.context + args.new_tokens)
    for name in args.texts:
        prompt = long_prompt(tokenizer, name, args.context)
        reference: list[int] = []
        if any(BANDS[band] is not None for band in args.bands):
            tick(f"{name}: what scripts propose")
            known = sc.generate(
                model, [prompt], drafter=PromptLookup(8), eos_token_id=[], max_new_tokens=args.new_tokens, cache=cache,
                codegen=args.codegen,
            )  # fmt: skip
            reference = known.tokens[0]
        for band in args.bands:
            chance = BANDS[band]
            runs: dict[str, Any] = {}
            for mode in ("exact", "audited"):
                tick(f"{name}, {band}: {mode}")
                drafter = PromptLookup(8) if chance is None else scripted([(prompt, reference)], chance)
                runs[mode] = sc.generate(
                    model, [prompt], drafter=drafter, mode=mode, plan=None if mode == "exact" else plan, eos_token_id=[],
                    max_new_tokens=args.new_tokens, cache=cache, codegen=args.codegen,
                )  # fmt: skip
            exact, audited = (runs[mode].metrics.to_dict() for mode in ("exact", "audited"))
            row = {
                "text": name, "band": band, "context": len(prompt), "identical": runs["exact"].tokens == runs["audited"].tokens,
                "acceptance_length_exact": exact["total"]["mean_acceptance_length"],
                "acceptance_length_audited": audited["total"]["mean_acceptance_length"],
                "tokens_per_step_exact": exact["total"]["tokens_per_step"],
                "tokens_per_step_audited": audited["total"]["tokens_per_step"],
                "kv_bytes_per_token_exact": exact["kv_bytes_per_token"],
                "kv_bytes_per_token_audited": audited["kv_bytes_per_token"],
                "kv_ratio": audited["kv_bytes_per_token"] / exact["kv_bytes_per_token"],
                "agreement": audited["total"]["agreement"],
                "tokens_per_window": audited["total"]["audited_tokens"] / max(audited["total"]["audits"], 1),
                "audits_per_100_tokens": audited["total"]["audits_per_100_tokens"],
                "forwards": audited["forwards"], "notes": audited["notes"],
            }  # fmt: skip
            agreement = "-" if row["agreement"] is None else f"{row['agreement']:.1%}"
            length = row["acceptance_length_exact"]
            book.add(row, f"{name:<12} {band:<14} acceptance length {'-' if length is None else format(length, '.2f')}, "
                     f"{row['tokens_per_step_exact']:.2f} tokens a step: K and V per token "
                     f"{row['kv_ratio']:.2f} of exact, {row['tokens_per_window']:.1f} tokens a window, {agreement} agreed, "
                     f"{row['audits_per_100_tokens']:.1f} audits per 100 tokens, forwards {row['forwards']}, "
                     f"identical {row['identical']}")  # fmt: skip


def part_system(args: argparse.Namespace, tick: Callable[[str], None]) -> None:
    device = "cpu" if args.tiny or not torch.cuda.is_available() else torch.cuda.get_device_name()
    book = Book(args.json, part="system", layers=args.layers, budget=args.budget, reuse=args.reuse, device=device,
                torch=torch.__version__)  # fmt: skip
    decoding_system.part_system(args, tick, book)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("greedy", "audited", "system"), required=True)
    parser.add_argument("--model", type=Path, help="default SmolLM2-135M-Instruct (greedy, audited)")
    parser.add_argument("--codegen", choices=("inductor", "eager"), help="default eager on the CPU, inductor for system")
    parser.add_argument("--new-tokens", type=int, help="default 32 (greedy), 128 (audited)")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--modes", nargs="+", choices=("exact", "audited"), default=["exact", "audited"])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--bands", nargs="+", choices=list(BANDS), default=list(BANDS))
    parser.add_argument("--context", type=int, default=6000)
    parser.add_argument("--plan", type=Path, help="default far too tight a one (greedy), a sixth of 6,000 tokens (audited)")
    parser.add_argument("--window", type=int, default=32, help="most pending tokens (audited)")
    parser.add_argument("--cost", choices=("kv", "all"), default="kv", help="bytes that windows are weighed by (audited)")
    parser.add_argument("--fill", action="store_true", help="fill windows; default ends them by agreement and bytes (audited)")
    system = parser.add_argument_group("system")
    system.add_argument("--points", nargs="+", default=["1x32768", "8x32768", "1x131072", "8x131072"], help="batch x context")
    system.add_argument("--methods", nargs="+", choices=decoding_system.METHODS, default=list(decoding_system.METHODS))
    system.add_argument("--accept", type=float, default=0.7, help="probability that a draft is accepted, given those before")
    system.add_argument("--agree", type=float, default=0.97, help="probability that an audit agrees with a pending token")
    system.add_argument("--budget", type=float, default=0.125, help="share of the live keys that sparse layers read")
    system.add_argument("--reuse", type=int, default=4, help="layers that share a selection (index_topk_freq)")
    system.add_argument("--layers", type=int, default=32)
    system.add_argument("--tiny", action="store_true", help="a toy on the CPU, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args.new_tokens = args.new_tokens or {"greedy": 32, "audited": 128, "system": 0}[args.part]
    args.codegen = args.codegen or ("inductor" if args.part == "system" else "eager")
    parts: dict[str, Any] = {"greedy": part_greedy, "audited": part_audited, "system": part_system}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task("", total=None)
        parts[args.part](args, lambda text: progress.update(task, description=text))


if __name__ == "__main__":
    main()
