"""``spec-compile demo``: one real model, three real prompts, five ways to decode them, compared token by token."""

from __future__ import annotations

import logging
import platform
import textwrap
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from spec_compile import generation
from spec_compile.devices import choose_device
from spec_compile.drafters import PromptLookup
from spec_compile.errors import OptionsError
from spec_compile.loading import load_model, smollm2_path, tiny_moe_path
from spec_compile.models.row_cache import RowCache
from spec_compile.plan import AttentionPlan, MoePlan, SparsityPlan
from spec_compile.report import recorded

METHODS = ("greedy", "prompt_lookup", "exact", "sparse", "audited")
LABELS = {"greedy": "HF greedy", "prompt_lookup": "HF lookup", "exact": "exact", "sparse": "sparse", "audited": "audited"}
# A fifth of the long prompt; the short ones are below the context from which a plan applies.
PLAN = SparsityPlan(attention=AttentionPlan(budget=384, block_size=16, min_context=1024, index_topk_freq=2))
# The small mixture was trained on 1,024 tokens. A step of its 16 experts reads ten of them.
TINY_MOE_CONTEXT = 1024
TINY_MOE_PLAN = SparsityPlan(
    attention=AttentionPlan(budget=192, block_size=16, min_context=512, index_topk_freq=2),
    moe=MoePlan(expert_budget=10, substitute=True),
)


@dataclass
class Run:
    """One generation: new tokens, time of each chunk's arrival, and chunk sizes (tokens per verify); of ours, its metrics."""

    tokens: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    metrics: dict[str, Any] | None = None

    @property
    def speed(self) -> float | None:
        """Tokens per second from the end of the prefill."""
        if self.metrics is not None:
            return self.metrics["total"]["tokens_per_second"]
        return self.decoded / self.seconds if self.seconds else None

    @property
    def acceptance(self) -> tuple[int, int]:
        """Tokens and the forwards of the target that judged them."""
        if self.metrics is not None:
            total = self.metrics["total"]
            return total["accepted"] + total["steps"], total["steps"]
        return sum(self.chunks), len(self.chunks)

    @property
    def seconds(self) -> float:
        """Decoding time, from the first chunk (end of prefill) on."""
        return self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0

    @property
    def decoded(self) -> int:
        return sum(self.chunks[1:])


class Clock(BaseStreamer):
    """Streamer that records how many tokens arrive when; the first call brings the prompt."""

    def __init__(self, run: Run) -> None:
        self.run, self.prompt_seen = run, False

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.run.chunks.append(value.numel())
        self.run.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def demo_prompts(tokenizer: Any, source_tokens: int) -> list[tuple[str, Tensor]]:
    """``(name, input_ids [1, T])``: a standard-library source to continue, and two short instructions."""
    source = Path(textwrap.__file__).read_text(encoding="utf-8")
    extra = Path(textwrap.__file__).with_name("shlex.py").read_text(encoding="utf-8")
    ids = tokenizer(source + extra, return_tensors="pt").input_ids[:, :source_tokens]
    prompts = [(f"python source, {ids.shape[1]} tokens", ids)]
    for text in (
        "Write the numbers from one to twenty as words, separated by commas.",
        "Explain in three sentences why the sky is blue, then repeat the first sentence.",
    ):
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
                "input_ids"
            ]
        else:
            ids = tokenizer(text, return_tensors="pt").input_ids
        prompts.append((text[:30] + "...", ids))
    return prompts


def generate(
    model: Any, ids: Tensor, new_tokens: int, method: str, drafts: int, cache: Any = None, plan: SparsityPlan = PLAN
) -> Run:
    """Generate greedily with one of :data:`METHODS`; ``cache`` is the ``RowCache`` of our own, ``plan`` for sparse steps."""
    run = Run()
    if method in generation.MODES:
        out = generation.generate(
            model, ids, attention_mask=torch.ones_like(ids), drafter=PromptLookup(drafts), mode=method,
            plan=None if method == "exact" else plan, max_new_tokens=new_tokens, cache=cache,
            codegen="inductor" if model.device.type == "cuda" else "eager",
        )  # fmt: skip
        run.tokens, run.metrics = out.tokens[0], out.metrics.to_dict()
        return run
    extra = {"prompt_lookup_num_tokens": drafts} if method == "prompt_lookup" else {}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, streamer=Clock(run), **extra
    )
    run.tokens = out[0, ids.shape[1] :].tolist()
    return run


def compare(model: Any, ids: Tensor, expected: list[int], found: list[int]) -> dict[str, Any]:
    """How far two continuations agree, and the top-1 margin at the first difference (a near tie is small).

    Returns:
        ``identical`` and ``total`` tokens, and ``difference`` (None, or position, the two tokens and the margin in logits).
    """
    total = max(len(expected), len(found))
    same = next((i for i, (a, b) in enumerate(zip(expected, found)) if a != b), min(len(expected), len(found)))
    if same == total:
        return {"identical": total, "total": total, "difference": None}
    prefix = torch.cat([ids, torch.tensor([expected[:same]], dtype=ids.dtype, device=ids.device)], dim=1)
    with torch.no_grad():
        logits = model.forward(input_ids=prefix, logits_to_keep=1).logits[0, -1].float()
    top = logits.topk(2).values
    agreeing = sum(a == b for a, b in zip(expected, found))
    return {
        "identical": agreeing,
        "total": total,
        "difference": {
            "position": same,
            "expected": expected[same] if same < len(expected) else None,
            "found": found[same] if same < len(found) else None,
            "top1_margin": float(top[0] - top[1]),
        },
    }


def run(model_path: Path | None, new_tokens: int, drafts: int, source_tokens: int, device_name: str = "auto") -> dict[str, Any]:
    """Run the demo, print the table, and return its numbers.

    Raises:
        OptionsError: bad arguments or no model.
    """
    for name, given, low, high in (
        ("--new-tokens", new_tokens, 2, 4096),
        ("--drafts", drafts, 1, 31),
        ("--source-tokens", source_tokens, 16, 7000),
    ):
        if not low <= given <= high:
            raise OptionsError(f"{name} must lie in {low}..{high}, got {given}")
    device = choose_device(device_name)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    console = Console()
    begin = time.perf_counter()
    path, plan = model_path or smollm2_path(), PLAN
    if str(model_path) == "moe":
        path, plan = tiny_moe_path(), TINY_MOE_PLAN
        source_tokens = max(16, min(source_tokens, TINY_MOE_CONTEXT - new_tokens - drafts))
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, recorded() as reports:
        task = progress.add_task(f"loading {path.name}", total=None)
        model, tokenizer = load_model(path)
        model.to(device)
        model.generation_config.pad_token_id = model.generation_config.pad_token_id or tokenizer.eos_token_id
        prompts = [(name, ids.to(device)) for name, ids in demo_prompts(tokenizer, source_tokens)]
        cache = RowCache(model, max_len=max(ids.shape[1] for _, ids in prompts) + new_tokens)
        progress.update(task, total=len(prompts) * len(METHODS) + 2)
        runs: dict[str, list[Run]] = {}
        for method in METHODS:
            runs[method] = []
            if method in ("exact", "sparse"):
                # Audited steps run the graphs of sparse ones.
                progress.update(task, description=f"{LABELS[method]}: compiling")
                generate(model, prompts[1][1], min(new_tokens, 24), method, drafts, cache, plan)
                progress.advance(task)
            for name, ids in prompts:
                progress.update(task, description=f"{LABELS[method]}: {name}")
                runs[method].append(generate(model, ids, new_tokens, method, drafts, cache, plan))
                progress.advance(task)
    result = _summarise(model, prompts, runs, reports)
    result["seconds_total"] = round(time.perf_counter() - begin, 1)
    _print(console, result, tokenizer)
    return result


def _summarise(model: Any, prompts: list[tuple[str, Tensor]], runs: dict[str, list[Run]], reports: list[Any]) -> dict[str, Any]:
    verify = [report for report in reports if report.kind == "verify"]
    methods = {}
    for method in METHODS:
        found = [compare(model, ids, a.tokens, b.tokens) for (_, ids), a, b in zip(prompts, runs["greedy"], runs[method])]
        accepted = [r.acceptance for r in runs[method]]
        timed = [r for r in runs[method] if r.speed]
        methods[method] = {
            "tokens_identical": sum(f["identical"] for f in found) / sum(f["total"] for f in found),
            "differences": [
                {"prompt": name, **f["difference"]} for (name, _), f in zip(prompts, found) if f["difference"] is not None
            ],
            "tokens_per_step": sum(tokens for tokens, _ in accepted) / sum(steps for _, steps in accepted),
            "tokens_per_second": sum(len(r.tokens) for r in timed) / sum(len(r.tokens) / r.speed for r in timed if r.speed),
            **_ours([r.metrics for r in runs[method] if r.metrics is not None]),
            "prompts": [
                {
                    "name": name, "prompt_tokens": ids.shape[1], "new_tokens": len(r.tokens), "tokens_per_second": r.speed,
                    "tokens_per_step": tokens / steps, "tokens_identical": f["identical"] / f["total"],
                    **_ours([r.metrics] if r.metrics is not None else []),
                }
                for (name, ids), r, (tokens, steps), f in zip(prompts, runs[method], accepted, found)
            ],
        }  # fmt: skip
    last = verify[-1] if verify else None
    return {
        "model": type(model).__name__,
        "methods": methods,
        "compile_seconds": sum(sum(r.seconds.values()) for r in verify),
        "graphs_compiled": len(verify),
        "attention_layers_rewritten": len(last.rewritten) if last else 0,
        "attention_layers_refused": len(last.refused) if last else 0,
        "moe_layers_rewritten": sum(entry.status == "rewritten" for entry in last.moes) if last else 0,
        "moe_layers_refused": sum(entry.status == "refused" for entry in last.moes) if last else 0,
        "refusals": sorted(
            {entry.reason for report in verify for entry in [*report.refused, *report.moes] if entry.status == "refused"}
        ),
        "plan": PLAN.to_dict(),
        "text": {name: runs["exact"][i].tokens for i, (name, _) in enumerate(prompts)},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
        "machine": platform.machine(),
    }


def _ours(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What our loop counts beyond tokens: bytes, audits."""
    if not metrics:
        return {}
    audited = sum(m["total"]["audited_tokens"] for m in metrics)
    agreed = sum((m["total"]["agreement"] or 0.0) * m["total"]["audited_tokens"] for m in metrics)
    read = sum(m["kv_bytes"] for m in metrics)
    return {
        "kv_bytes": read,
        "kv_bytes_per_token": read / sum(m["total"]["new_tokens"] for m in metrics),
        "audits": sum(m["total"]["audits"] for m in metrics),
        "agreement": agreed / audited if audited else None,
    }


def reading(methods: dict[str, dict[str, Any]]) -> str:
    """The table in a sentence.

    Args:
        methods: the result's entry of that name.
    """
    base, sparse = methods["greedy"]["tokens_per_second"], methods["sparse"]
    exact = methods["exact"]

    def lossless(name: str) -> str:
        m = methods[name]
        kept = "all" if m["tokens_identical"] == 1 else f"{m['tokens_identical']:.1%}"
        return f"{name} keeps {kept} of HF greedy's tokens at {m['tokens_per_second'] / base:.1f}x its speed"

    share = sparse["prompts"][0]["kv_bytes_per_token"] / exact["prompts"][0]["kv_bytes_per_token"]
    return (
        f"Reading: {lossless('exact')}, {lossless('audited')}; sparse reads {share:.0%} of exact's K and V on the source "
        f"and keeps {sparse['tokens_identical']:.0%} of the tokens."
    )


def _print(console: Console, result: dict[str, Any], tokenizer: Any) -> None:
    names = list(result["text"])
    for name in names[1:]:
        text = tokenizer.decode(result["text"][name], skip_special_tokens=True).strip().splitlines()
        console.print(f"[bold]{name}[/bold] {text[0][:100] if text else ''}", highlight=False)
    table = Table(title="greedy decoding, five ways", caption="tokens/s after the prefill; K+V: MB read per token of the source")
    table.add_column("", no_wrap=True)
    for column in ("same", "per step", "tokens/s", "source", "short 1", "short 2", "K+V"):
        table.add_column(column, justify="right", no_wrap=True)
    for method in METHODS:
        m = result["methods"][method]
        cells = [f"{p['tokens_per_second']:.1f}" if p["tokens_per_second"] else "-" for p in m["prompts"]]
        cells.append(f"{m['prompts'][0]['kv_bytes_per_token'] / 1e6:.1f}" if "kv_bytes" in m else "-")
        summary = (f"{m['tokens_identical']:.1%}", f"{m['tokens_per_step']:.2f}", f"{m['tokens_per_second']:.1f}")
        table.add_row(LABELS[method], *summary, *cells)
    console.print(table)
    console.print(reading(result["methods"]), highlight=False)
    layers = f"{result['attention_layers_rewritten']} attention layers rewritten, {result['attention_layers_refused']} refused"
    if result["moe_layers_rewritten"] + result["moe_layers_refused"]:
        layers += f", {result['moe_layers_rewritten']} MoE layers rewritten, {result['moe_layers_refused']} refused"
    compiled = f"{result['graphs_compiled']} graphs compiled in {result['compile_seconds']:.0f} s"
    console.print(f"{layers}; {compiled}; whole demo {result['seconds_total']:.0f} s", highlight=False)
    for reason in result["refusals"]:
        console.print(f"refused: {reason}", highlight=False)
    for method in METHODS[1:]:
        for d in result["methods"][method]["differences"]:
            margin = f"{d['top1_margin']:.2e} logits{' (a near tie)' if d['top1_margin'] < 1e-3 else ''}"
            where = f"token {d['position']} of '{d['prompt']}'"
            console.print(f"{LABELS[method]} differs from greedy at {where}; top-1 margin there: {margin}", highlight=False)
