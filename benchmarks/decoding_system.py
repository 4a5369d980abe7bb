"""Part ``system`` of decoding.py: what the loop costs on a GPU, at a set acceptance and a set agreement of sparse and dense.

The shape of Llama-3.1-8B, 32 layers, random weights, bfloat16, a prompt of random tokens. Paths: transformers' assisted
generation with eight candidates a step (``hf``; a batch of 1, DynamicCache, sdpa), and our loop in its three modes. A random
model agrees with nobody, so outcomes are scripted: each draft is accepted with probability ``--accept`` until one is not, and
an audit agrees with each pending token with probability ``--agree``. All else is real: prefill, forwards, one transfer a
step, what follows from the outcome. For ``hf`` a logits processor raises the tokens that are to be accepted.

A generation compiles and captures first, warms up for 64 tokens, is timed for 192, and then profiled: ``outside`` is the wall
time of a step less the time in which any kernel ran, on average; ``median`` is that of a step's wall time, ``device`` that of its
graph from launch to end, of ours. In audited runs a step is a forward, sparse or dense.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import spec_compile as sc
from spec_compile.captured_rows import CapturedRows
from spec_compile.drafters import Draft, HostDrafter, chain
from spec_compile.sampling import Sampler, Verdict

METHODS = ("hf", "exact", "sparse", "audited")
DRAFTS, WARM, TIMED = 8, 64, 192
# Steps that are profiled, and tokens for them: no sequence of a batch may end before, which would make its steps cheap.
PROFILED, TAIL = 12, 160


class Watch:
    """Marks the steps of a generation by their tokens: warming up, timed, profiled."""

    def __init__(self, batch: int, cuda: bool) -> None:
        self.batch, self.cuda = batch, cuda
        self.start: tuple[float, int] | None = None
        self.stop: tuple[float, int] | None = None
        self.steps = self.profiled = 0
        self.marks: list[float] = []
        self.spans: list[tuple[Any, Any]] = []
        self.profiler: Any = None
        self.busy_us: float | None = None

    def mark(self, tokens: int) -> None:
        """A step begins; ``tokens`` were generated until now, of all rows."""
        if self.start is None:
            if tokens >= WARM * self.batch:
                self.start = (self.now(), tokens)
        elif self.stop is None:
            self.steps += 1
            # The tokens of the step before are here: no need to wait.
            self.marks.append(time.perf_counter())
            if tokens >= (WARM + TIMED) * self.batch:
                self.stop = (self.now(), tokens)
                if self.cuda:
                    self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                    self.profiler.__enter__()
        elif self.profiler is not None and self.busy_us is None:
            self.profiled += 1
            if self.profiled == PROFILED:
                self._read()

    def launch(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``own`` between two events, while steps are timed."""

        def launched(step: Any) -> Any:
            if self.start is None or self.stop is not None:
                return own(step)
            span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            span[0].record()
            found = own(step)
            span[1].record()
            self.spans.append(span)
            return found

        return launched

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _read(self) -> None:
        torch.cuda.synchronize()
        self.profiler.__exit__(None, None, None)
        spans = sorted(
            (e.time_range.start, e.time_range.end)
            for e in self.profiler.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
        )
        busy, end = 0.0, float("-inf")
        for first, last in spans:
            busy += max(0.0, last - max(first, end))
            end = max(end, last)
        self.busy_us = busy

    def numbers(self) -> dict[str, Any]:
        """
        Raises:
            RuntimeError: the generation ended before the timed part did, or the profiled one.
        """
        if self.start is None or self.stop is None or (self.cuda and self.busy_us is None):
            raise RuntimeError("the generation ended before what was to be measured")
        seconds, tokens = self.stop[0] - self.start[0], self.stop[1] - self.start[1]
        step = seconds / self.steps * 1e3
        median = statistics.median(b - a for a, b in itertools.pairwise([self.start[0], *self.marks])) * 1e3
        kernels = self.busy_us / PROFILED / 1e3 if self.busy_us is not None else None
        device = statistics.median(first.elapsed_time(last) for first, last in self.spans) if self.spans else None
        return {
            "device_ms": device, "tokens_per_second": tokens / seconds, "tokens_per_step": tokens / self.steps, "step_ms": step,
            "median_ms": median, "kernels_ms": kernels, "outside_ms": None if kernels is None else step - kernels,
        }  # fmt: skip


class RandomDrafts(HostDrafter):
    """Drafts that nobody asked for; marks the steps."""

    def __init__(self, watch: Watch, vocabulary: int) -> None:
        super().__init__(DRAFTS)
        self.watch, self.vocabulary, self._prompt = watch, vocabulary, 0
        self.random = random.Random(0)

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        super().start(tokens)
        self._prompt = sum(map(len, tokens))

    def propose(self, limit: int) -> Draft:
        self.watch.mark(sum(map(len, self.rows)) - self._prompt)
        count = min(limit, self.max_drafts)
        return chain([[self.random.randrange(self.vocabulary) for _ in range(count)] if on else [] for on in self.active])


class ScriptedSampler(Sampler):
    """Does what a greedy sampler does, transfer included, and then lets chance decide instead."""

    accept, agree = 0.7, 0.97

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.random = random.Random(1)
        self._pending: dict[int, int] = {}

    def verify(self, logits: Any, draft: Draft, prefixes: Any, **wanted: Any) -> Verdict:
        real = super().verify(logits, draft, prefixes, **wanted)
        # Sparse steps that run ahead ask for margins; whatever else is judged, an audit among it, does not.
        ahead = bool(wanted.get("margins"))
        path, kept = [], []
        for row, (count, own) in enumerate(zip(draft.counts, real.token)):
            pending = 0 if ahead else min(self._pending.pop(row, 0), count)
            line: list[int] = []
            for at in range(count):
                if self.random.random() >= (self.agree if at < pending else self.accept):
                    break
                line.append(at)
            path.append(line)
            kept.append([*draft.tokens[row, : len(line)].tolist(), own])
            if ahead:
                self._pending[row] = self._pending.get(row, 0) + len(kept[-1])
        margins = [[3.0] * len(run) for run in kept] if ahead else None
        return Verdict(path, real.token, kept, margins, real.probs)


def build(args: argparse.Namespace, device: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "num_hidden_layers": args.layers,
    }  # fmt: skip
    if args.tiny:
        shape = {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
            "num_hidden_layers": 2,
        }  # fmt: skip
    config = LlamaConfig(**shape, max_position_embeddings=1 << 18, rope_theta=500000.0, tie_word_embeddings=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.pad_token_id = 0
    return model


class Forced:
    """What transformers' assisted generation is made to propose and to accept: one token for each place."""

    def __init__(self, watch: Watch, accept: float, prompt: int, vocabulary: int) -> None:
        self.watch, self.accept, self.prompt, self.vocabulary = watch, accept, prompt, vocabulary

    def token(self, place: int) -> int:
        return random.Random(place).randrange(self.vocabulary)

    def candidates(self, ids: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        held = ids.shape[1]
        self.watch.mark(held - self.prompt)
        chance = random.Random(held)
        run = []
        for place in range(held, held + DRAFTS):
            right = chance.random() < self.accept
            run.append(self.token(place) if right else (self.token(place) + 1) % self.vocabulary)
        return torch.cat([ids, torch.tensor([run], device=ids.device)], 1), None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token(ids.shape[1])] = 1e4
        return scores


@torch.no_grad()
def run_hf(model: Any, prompt: torch.Tensor, args: argparse.Namespace, watch: Watch) -> None:
    from transformers import DynamicCache, LogitsProcessorList
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    cache = DynamicCache(config=model.config)
    for begin in range(0, prompt.shape[1] - 1, 8192):
        ids = prompt[:, begin : min(begin + 8192, prompt.shape[1] - 1)]
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    forced = Forced(watch, args.accept, prompt.shape[1], model.config.vocab_size)
    with mock.patch.object(PromptLookupCandidateGenerator, "get_candidates", lambda self, ids, *a, **k: forced.candidates(ids)):
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=WARM + TIMED + TAIL, do_sample=False,
            prompt_lookup_num_tokens=DRAFTS, past_key_values=cache, eos_token_id=None,
            logits_processor=LogitsProcessorList([forced]),
        )  # fmt: skip


def run_ours(model: Any, prompt: torch.Tensor, args: argparse.Namespace, watch: Watch, mode: str) -> dict[str, Any]:
    plan = sc.SparsityPlan(
        attention=sc.AttentionPlan(budget=args.budget, index_topk_freq=args.reuse, min_context=0), audit=sc.AuditPlan()
    )
    sampler = type("OneSampler", (ScriptedSampler,), {"accept": args.accept, "agree": args.agree})
    launch = watch.launch(CapturedRows._launch)
    with mock.patch("spec_compile.generation.Sampler", sampler), mock.patch.object(CapturedRows, "_launch", launch):
        out = sc.generate(
            model, prompt.tolist(), drafter=RandomDrafts(watch, model.config.vocab_size), mode=mode,
            plan=None if mode == "exact" else plan, max_new_tokens=WARM + TIMED + TAIL, eos_token_id=[], codegen=args.codegen,
            warm_up=True,
        )  # fmt: skip
    numbers = out.metrics.to_dict()
    return {name: numbers[name] for name in ("forwards", "density", "kv_bytes_per_token", "notes")}


def part_system(args: argparse.Namespace, tick: Callable[[str], None], book: Any) -> None:
    """One row for each point and method; on a GPU each in a process of its own.

    A profile slows down all launches of graphs that follow it in a process
    (https://github.com/pytorch/pytorch/issues/144455).
    """
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("--part system needs a CUDA device; --tiny tries the script without one")
    rows = [(point, method) for point in args.points for method in args.methods]
    model: Any = None
    for point, method in rows:
        tick(f"{point.replace('x', ' x ')}, {method}")
        if not args.tiny and len(rows) > 1:
            row, line = _elsewhere(args, point, method)
        else:
            model = model or build(args, "cpu" if args.tiny else "cuda")
            row, line = measure(model, args, point, method)
        book.add(row, line)


def _elsewhere(args: argparse.Namespace, point: str, method: str) -> tuple[dict[str, Any], str]:
    """The row and the line of :func:`measure`, run by another process.

    Raises:
        SystemExit: it failed there.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, str(Path(__file__).with_name("decoding.py")), "--part", "system", "--json", str(path)]
        given: dict[str, Any] = {"points": point, "methods": method}
        given |= {name: getattr(args, name) for name in ("accept", "agree", "budget", "reuse", "layers", "codegen")}
        for name, value in given.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise SystemExit(f"{point}, {method}: {done.stderr[-2000:]}")
        (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return row, done.stdout.strip().splitlines()[-1]


def measure(model: Any, args: argparse.Namespace, point: str, method: str) -> tuple[dict[str, Any], str]:
    """A row, and the line that says it."""
    batch, context = (int(part) for part in point.split("x"))
    cuda, name = not args.tiny, f"{batch} x {context}, {method}"
    config = model.config
    needed = batch * context * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    row: dict[str, Any] = {"batch": batch, "context": context, "method": method, "accept": args.accept, "agree": args.agree}
    if method == "hf" and batch > 1:
        return {**row, "skipped": "batch"}, f"{name}: transformers' assisted generation is limited to a batch of 1"
    free = torch.cuda.mem_get_info()[0] if cuda else needed * 2
    if needed * 1.05 > free:
        return {**row, "skipped": "memory"}, f"{name}: K and V take {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
    prompt = torch.randint(config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0)).to(model.device)
    watch = Watch(batch, cuda)
    try:
        more = run_hf(model, prompt, args, watch) if method == "hf" else run_ours(model, prompt, args, watch, method)
    except torch.OutOfMemoryError as error:
        return {**row, "skipped": str(error)[:200]}, f"{name}: out of memory"
    numbers = watch.numbers()
    said = f"{name}: {numbers['tokens_per_second']:.1f} tokens/s, {numbers['tokens_per_step']:.2f} tokens and "
    said += f"{numbers['step_ms']:.2f} ms a step (median {numbers['median_ms']:.2f})"
    if numbers["device_ms"] is not None:
        said += f", {numbers['device_ms']:.2f} ms from launch to end"
    if numbers["outside_ms"] is not None:
        said += f", {numbers['outside_ms']:.3f} ms of it outside kernels"
    return {**row, **numbers, **(more or {})}, said
