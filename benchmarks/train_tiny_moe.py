"""Train a small mixture of experts to judge MoE plans by: a Qwen3-MoE of 7 million parameters on this machine's Python sources.

    python benchmarks/train_tiny_moe.py [--minutes 6] [--out benchmarks/assets/tiny-moe] [--device cuda] [--json FILE]

Byte-level BPE of 4,096 tokens, 6 layers, 16 experts of which each token takes 4, renormalised as in Qwen3-30B-A3B. The corpus is
the standard library and the installed packages; one file in 50, by the hash of its text, is held out. bfloat16 weights with
float32 masters, AdamW, cosine over the minutes. The result is a folder that transformers loads: config.json, model.safetensors
(under 16 MiB), tokenizer.json and a model card with the held-out loss. Ctrl-C ends the training early and keeps what it reached.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY, LENGTH, HELD_OUT = 4096, 1024, 50
MOST_BYTES = 16 << 20
CARD = """---
license: apache-2.0
library_name: transformers
---

# tiny-moe

A Qwen3-MoE ({millions:.1f} million parameters, {layers} layers, {experts} experts, {chosen} for each token) that continues Python
source. It exists to measure what expert skipping costs, on a machine without a GPU; it is good for nothing else.

Made by `benchmarks/train_tiny_moe.py` on {date}: {tokens:.0f} million tokens in {minutes:.1f} minutes on {machine}
(torch {torch}), byte-level BPE of {vocabulary} tokens, context {length}. Corpus: {files} Python files ({megabytes:.0f} MB) of the
standard library and of the packages installed there, under their own licences (PSF, BSD, MIT, Apache-2.0); one in {held_out} was
held out.

| | held-out loss, nats a token | top-1 | experts in use, of {experts} (exp of the entropy), by layer |
|---|---|---|---|
| bfloat16, as saved | {loss:.3f} | {top1:.1%} | {used} |
"""


def sources(limit: int) -> list[str]:
    """Texts of the Python files found here, without copies, shortest paths first, at most ``limit`` bytes."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    found = sorted({path for root in roots for path in Path(root).rglob("*.py")}, key=lambda path: (len(path.parts), str(path)))
    texts, seen, total = [], set(), 0
    for path in found:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        mark = hashlib.sha256(text.encode()).digest()
        # Generated tables teach nothing.
        if not 200 <= len(text) <= 200_000 or mark in seen:
            continue
        seen.add(mark)
        total += len(text)
        if total > limit:
            break
        texts.append(text)
    return texts


def held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT == 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def encode(tokenizer: Any, texts: list[str]) -> Tensor:
    """All texts, each after an end-of-text token, as one row of int32."""
    eos = tokenizer.eos_token_id
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    return torch.tensor(list(itertools.chain.from_iterable([eos, *e.ids] for e in encoded)), dtype=torch.int32)


def model_config(vocabulary: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=192, intermediate_size=384, moe_intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        decoder_sparse_step=1, max_position_embeddings=4096, tie_word_embeddings=True, router_aux_loss_coef=0.01,
        output_router_logits=False, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def batches(tokens: Tensor, rows: int, length: int, device: torch.device, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens.to(device)
    offsets = torch.arange(length, device=device)
    while True:
        starts = torch.randint(0, tokens.numel() - length, (rows,), generator=generator).to(device)
        yield tokens[starts[:, None] + offsets].long()


def train(model: Any, tokens: Tensor, args: argparse.Namespace, device: torch.device) -> tuple[int, float]:
    """Steps taken and seconds spent; bfloat16 weights follow float32 masters."""
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in weights]
    matrices = [m for m in masters if m.dim() > 1]
    vectors = [m for m in masters if m.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.rate, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    began, budget, step = time.perf_counter(), args.minutes * 60, 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training", total=budget)
        try:
            for ids in batches(tokens, args.batch, LENGTH, device, seed=0):
                spent = time.perf_counter() - began
                if spent >= budget or (args.steps and step >= args.steps):
                    break
                rate = args.rate * min(1.0, (step + 1) / 200) * (0.55 + 0.45 * math.cos(math.pi * spent / budget))
                for group in optimizer.param_groups:
                    group["lr"] = rate
                loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss
                loss.backward()
                for master, weight in zip(masters, weights):
                    master.grad = weight.grad.float()
                    weight.grad = None
                torch.nn.utils.clip_grad_norm_(masters, 1.0)
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_copy_(weights, masters)
                step += 1
                if step % 50 == 0 or step == 1:
                    told = f"step {step}, loss {loss.item():.3f}"
                    progress.update(task, completed=spent, description=told)
                    if not sys.stderr.isatty():
                        print(f"{spent:6.1f} s {told}", flush=True)
        except KeyboardInterrupt:
            print(f"interrupted after {step} steps: saving what they reached", flush=True)
    return step, time.perf_counter() - began


@torch.no_grad()
def evaluate(model: Any, tokens: Tensor, device: torch.device, windows: int) -> tuple[float, float, list[float]]:
    """Loss, share of right top-1 tokens, and by layer the exponential of the entropy of how often experts are chosen."""
    model.eval()
    count = min(windows, tokens.numel() // LENGTH)
    layers, experts, chosen = (getattr(model.config, n) for n in ("num_hidden_layers", "num_experts", "num_experts_per_tok"))
    loss, right, total = 0.0, 0, 0
    used = torch.zeros(layers, experts)
    for i in range(count):
        ids = tokens[i * LENGTH : (i + 1) * LENGTH].to(device).long()[None]
        out = model(input_ids=ids, output_router_logits=True)
        logits, targets = out.logits[0, :-1].float(), ids[0, 1:]
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        total += targets.numel()
        for layer, routed in enumerate(out.router_logits):
            used[layer] += torch.bincount(routed.topk(chosen, -1).indices.flatten().cpu(), minlength=experts)
    share = used / used.sum(-1, keepdim=True)
    effective = torch.exp(-(share * share.clamp_min(1e-9).log()).sum(-1))
    return loss / total, right / total, effective.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps (0: when the minutes are over)")
    parser.add_argument("--batch", type=int, default=64, help=f"rows of {LENGTH} tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--corpus", type=float, default=90.0, help="MB of sources")
    parser.add_argument("--windows", type=int, default=200, help="held-out windows to evaluate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "assets" / "tiny-moe")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    began = time.perf_counter()
    texts = sources(int(args.corpus * 1e6))
    tokenizer = train_tokenizer([t for t in texts[::3] if not held_out(t)])
    learned = encode(tokenizer, [t for t in texts if not held_out(t)])
    unseen = encode(tokenizer, [t for t in texts if held_out(t)])
    print(f"{len(texts)} files, {learned.numel() / 1e6:.1f} + {unseen.numel() / 1e6:.2f} million tokens", flush=True)
    print(f"prepared in {time.perf_counter() - began:.0f} s", flush=True)

    config = model_config(len(tokenizer))
    model: Any = Qwen3MoeForCausalLM(config).to(device=device, dtype=torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    size = sum(p.numel() for p in model.parameters())
    if size * 2 > MOST_BYTES:
        raise SystemExit(f"{size} parameters are more than 16 MiB of bfloat16")
    model.train()
    steps, seconds = train(model, learned, args, device)
    loss, top1, used = evaluate(model, unseen, device, args.windows)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    result = {
        "steps": steps, "seconds": round(seconds, 1), "tokens": steps * args.batch * LENGTH, "parameters": size, "loss": loss,
        "top1": top1, "experts_used": used, "machine": machine, "torch": torch.__version__, "files": len(texts),
        "characters": sum(map(len, texts)),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    card = CARD.format(
        millions=size / 1e6, layers=config.num_hidden_layers, experts=config.num_experts, chosen=config.num_experts_per_tok,
        date=time.strftime("%Y-%m-%d"), tokens=result["tokens"] / 1e6, minutes=seconds / 60, machine=machine,
        torch=torch.__version__, vocabulary=len(tokenizer), length=LENGTH, files=len(texts),
        megabytes=result["characters"] / 1e6, held_out=HELD_OUT, loss=loss, top1=top1, used=" ".join(f"{u:.1f}" for u in used),
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
