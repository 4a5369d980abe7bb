"""Train small models to judge plans by, of about 7 million parameters, on this machine's Python sources.

    python benchmarks/train_tiny_moe.py [--minutes 6] [--out benchmarks/assets/tiny-moe] [--device cuda] [--json FILE]
    python benchmarks/train_tiny_moe.py --model relu2 [--sparsity 0.02] [--out benchmarks/assets/tiny-relu2]

A Qwen3-MoE of 6 layers, 16 experts of which each token takes 4, renormalised as in Qwen3-30B-A3B. Or, with ``--model relu2``, a
Llama of 6 layers whose feed-forward layers are gated by squared ReLU, for plans that skip channels: ``--sparsity`` weighs a
penalty on the mean activation, which keeps most of them at 0. Byte-level BPE of 4,096 tokens. The corpus is the standard library
and the installed packages; one file in 50, by the hash of its text, is held out. bfloat16 weights with float32 masters, AdamW,
cosine over the minutes. The result is a folder that transformers loads: config.json, model.safetensors (under 16 MiB),
tokenizer.json and a model card with the held-out loss. Ctrl-C ends the training early and keeps what it reached.
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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

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

RELU2_CARD = """---
license: apache-2.0
library_name: transformers
---

# tiny-relu2

A Llama ({millions:.1f} million parameters, {layers} layers, feed-forward layers of {inner} channels gated by squared ReLU) that
continues Python source. It exists to measure what skipping channels costs, and is good for nothing else.

Made by `benchmarks/train_tiny_moe.py --model relu2 --sparsity {sparsity:g}` on {date}: {tokens:.0f} million tokens in
{minutes:.1f} minutes on {machine} (torch {torch}), byte-level BPE of {vocabulary} tokens, context {length}. Corpus: {files}
Python files ({megabytes:.0f} MB) of the standard library and of the packages installed there, under their own licences (PSF, BSD,
MIT, Apache-2.0); one in {held_out} was held out.

| | held-out loss, nats a token | top-1 | channels above 0 in a row / in {rows} rows, by layer |
|---|---|---|---|
| bfloat16, as saved | {loss:.3f} | {top1:.1%} | {used} |
"""
# Rows of a step, whose channels are counted together.
ROWS = 8


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


def relu2_config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=192, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, hidden_act="relu2", max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip


def watch_activations(model: Any) -> list[Tensor]:
    """What the layers' activations are in each call, newest last; the caller empties the list."""
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda _, __, out: seen.append(out))
    return seen


def batches(tokens: Tensor, rows: int, length: int, device: torch.device, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens.to(device)
    offsets = torch.arange(length, device=device)
    while True:
        starts = torch.randint(0, tokens.numel() - length, (rows,), generator=generator).to(device)
        yield tokens[starts[:, None] + offsets].long()


def train(
    model: Any, tokens: Tensor, args: argparse.Namespace, device: torch.device, acts: list[Tensor] | None = None
) -> tuple[int, float]:
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
                if acts is None:
                    loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss
                    loss.backward()
                else:
                    loss = model(input_ids=ids, labels=ids).loss
                    # From nothing up: a penalty on what has not learnt anything yet kills channels. A root of the square is the
                    # ReLU itself, whose slope does not vanish towards 0.
                    weight = args.sparsity * min(1.0, 2 * spent / budget)
                    (loss + weight * sum(act.float().clamp_min(1e-6).sqrt().mean() for act in acts)).backward()
                    acts.clear()
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


@torch.no_grad()
def evaluate_relu2(
    model: Any, tokens: Tensor, device: torch.device, windows: int, acts: list[Tensor]
) -> tuple[float, float, Any]:
    """Loss, share of right top-1 tokens, and by layer the shares of channels above 0 in a row and in ``ROWS`` rows."""
    model.eval()
    count = min(windows, tokens.numel() // LENGTH)
    loss, right, total = 0.0, 0, 0
    used = torch.zeros(model.config.num_hidden_layers, 2)
    for i in range(count):
        ids = tokens[i * LENGTH : (i + 1) * LENGTH].to(device).long()[None]
        acts.clear()
        logits, targets = model(input_ids=ids).logits[0, :-1].float(), ids[0, 1:]
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        total += targets.numel()
        for layer, act in enumerate(acts):
            above = (act[0] > 0).view(-1, ROWS, act.shape[-1])
            used[layer] += torch.stack([above.float().mean(), above.any(1).float().mean()]).cpu()
    return loss / total, right / total, (used / count).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("moe", "relu2"), default="moe")
    parser.add_argument("--sparsity", type=float, default=0.02, help="weight of the penalty on activations (relu2)")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps (0: when the minutes are over)")
    parser.add_argument("--batch", type=int, default=64, help=f"rows of {LENGTH} tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--corpus", type=float, default=90.0, help="MB of sources")
    parser.add_argument("--windows", type=int, default=200, help="held-out windows to evaluate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder (default benchmarks/assets/tiny-MODEL)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.out = args.out or Path(__file__).parent / "assets" / f"tiny-{args.model}"
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

    config: Any = (relu2_config if args.model == "relu2" else model_config)(len(tokenizer))
    model: Any = AutoModelForCausalLM.from_config(config).to(device=device, dtype=torch.bfloat16)
    acts = watch_activations(model) if args.model == "relu2" else None
    if acts is None:
        model.set_experts_implementation("grouped_mm")
    size = sum(p.numel() for p in model.parameters())
    if size * 2 > MOST_BYTES:
        raise SystemExit(f"{size} parameters are more than 16 MiB of bfloat16")
    model.train()
    steps, seconds = train(model, learned, args, device, acts)
    used: Any
    if acts is None:
        loss, top1, used = evaluate(model, unseen, device, args.windows)
    else:
        loss, top1, used = evaluate_relu2(model, unseen, device, args.windows, acts)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    result = {
        "steps": steps, "seconds": round(seconds, 1), "tokens": steps * args.batch * LENGTH, "parameters": size, "loss": loss,
        "top1": top1, "experts_used" if acts is None else "channels_used": used, "machine": machine, "torch": torch.__version__,
        "files": len(texts), "characters": sum(map(len, texts)),
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if acts is None:
        card, told = CARD, {"experts": config.num_experts, "chosen": config.num_experts_per_tok}
        shares = " ".join(f"{u:.1f}" for u in used)
    else:
        card, told = RELU2_CARD, {"inner": config.intermediate_size, "sparsity": args.sparsity, "rows": ROWS}
        shares = ", ".join(f"{row:.1%} / {union:.1%}" for row, union in used)
    card = card.format(
        millions=size / 1e6, layers=config.num_hidden_layers, **told,
        date=time.strftime("%Y-%m-%d"), tokens=result["tokens"] / 1e6, minutes=seconds / 60, machine=machine,
        torch=torch.__version__, vocabulary=len(tokenizer), length=LENGTH, files=len(texts),
        megabytes=result["characters"] / 1e6, held_out=HELD_OUT, loss=loss, top1=top1, used=shares,
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
