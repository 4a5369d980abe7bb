"""What a generation cost and how it went: acceptance, speed, time by phase, bytes read, audits.

Acceptance is counted as vLLM counts it, over the steps that had drafts: mean acceptance length = 1 + accepted drafts / such
steps, acceptance at position i = drafts accepted there / such steps. Tokens a step counts steps without drafts, too: it is what
speed follows from. Bytes follow from lengths, plan and the compiled graph's report; they are not measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PHASES = ("prefill", "draft", "verify", "audit", "overhead")


@dataclass
class RequestMetrics:
    """One sequence of the batch.

    Attributes:
        prompt_tokens, new_tokens: lengths.
        finish: ``eos``, ``stop_string``, ``length`` or ``interrupted``.
        steps: forwards that judged drafts of this sequence (also where there were none to judge), ``drafts`` of them some.
        drafted_at, accepted_at: drafts proposed and accepted by position (of a tree: by depth), from the first.
        audits: dense verifies over pending tokens; ``audited`` tokens were pending, ``agreed`` of them were kept.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    finish: str = ""
    steps: int = 0
    drafts: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    audits: int = 0
    audited: int = 0
    agreed: int = 0

    def judge(self, depths: Sequence[int], accepted: int) -> None:
        """Count a step: the depth of each draft proposed, from 1, and how many were accepted."""
        self.steps += 1
        self.drafts += bool(depths)
        for depth in set(depths):
            _raise_to(self.drafted_at, depth)
            self.drafted_at[depth - 1] += 1
        _raise_to(self.accepted_at, max(len(self.drafted_at), accepted))
        for place in range(accepted):
            self.accepted_at[place] += 1


def _raise_to(counts: list[int], size: int) -> None:
    counts.extend([0] * (size - len(counts)))


def _add(counts: Sequence[list[int]]) -> list[int]:
    size = max(map(len, counts), default=0)
    return [sum(row[i] for row in counts if i < len(row)) for i in range(size)]


def _of(requests: Sequence[RequestMetrics]) -> dict[str, Any]:
    steps, accepted_at = sum(r.steps for r in requests), _add([r.accepted_at for r in requests])
    drafted_at = _add([r.drafted_at for r in requests])
    new, audits = sum(r.new_tokens for r in requests), sum(r.audits for r in requests)
    audited, agreed = sum(r.audited for r in requests), sum(r.agreed for r in requests)
    drafts = sum(r.drafts for r in requests)
    return {
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "new_tokens": new,
        "steps": steps,
        "steps_with_drafts": drafts,
        "drafted": sum(drafted_at),
        "accepted": sum(accepted_at),
        "mean_acceptance_length": 1 + sum(accepted_at) / drafts if drafts else None,
        "tokens_per_step": 1 + sum(accepted_at) / steps if steps else None,
        "acceptance_at": [accepted / drafts for accepted in accepted_at] if drafts else [],
        "audits": audits,
        "audits_per_100_tokens": 100 * audits / new if new else None,
        "audited_tokens": audited,
        "agreement": agreed / audited if audited else None,
    }


@dataclass
class DecodingMetrics:
    """A whole generation.

    Attributes:
        mode: ``exact``, ``sparse`` or ``audited``.
        requests: one entry a sequence.
        forwards: verify forwards by kind: ``exact``, ``sparse``, ``audit``.
        seconds: wall time by phase. ``verify`` holds sparse and exact steps, ``audit`` dense verifies over pending tokens, each
            up to the transfer that brings the outcome; ``overhead`` is all the rest after the prefill.
        kv_bytes, weight_bytes: read by all verify forwards. kv_bytes_dense: what the same forwards would read without a plan.
        notes: decisions of the loop, such as dropping to exact steps.
        interrupted: whether the generation was broken off.
    """

    mode: str = "exact"
    requests: list[RequestMetrics] = field(default_factory=list)
    forwards: dict[str, int] = field(default_factory=lambda: {"exact": 0, "sparse": 0, "audit": 0})
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    kv_bytes: float = 0.0
    kv_bytes_dense: float = 0.0
    weight_bytes: float = 0.0
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of the block to ``phase``; synchronises nothing."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    @property
    def density(self) -> float | None:
        """Share of the live K and V that was read."""
        return self.kv_bytes / self.kv_bytes_dense if self.kv_bytes_dense else None

    @property
    def decoding_seconds(self) -> float:
        """From the end of the prefill on."""
        return sum(self.seconds[phase] for phase in PHASES if phase != "prefill")

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all sequences per second after the prefill."""
        new, seconds = sum(r.new_tokens for r in self.requests), self.decoding_seconds
        return new / seconds if new and seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: ``total``, ``requests``, ``forwards``, ``seconds`` and bytes."""
        total = _of(self.requests)
        new = total["new_tokens"]
        return {
            "mode": self.mode,
            "interrupted": self.interrupted,
            "total": {**total, "tokens_per_second": self.tokens_per_second},
            "forwards": dict(self.forwards),
            "tokens_per_forward": new / sum(self.forwards.values()) if sum(self.forwards.values()) else None,
            "seconds": {**self.seconds, "decoding": self.decoding_seconds},
            "kv_bytes": self.kv_bytes,
            "kv_bytes_per_token": self.kv_bytes / new if new else None,
            "weight_bytes": self.weight_bytes,
            "weight_bytes_per_token": self.weight_bytes / new if new else None,
            "density": self.density,
            "notes": list(self.notes),
            "requests": [{"finish": request.finish, **_of([request])} for request in self.requests],
        }

    def table(self) -> Any:
        """A ``rich`` table: one line a sequence, one for all."""
        from rich.table import Table

        columns = ("", "prompt", "new", "ends by", "acc. length", "by position", "tokens/step", "audits", "agreement")
        table = Table(title=self._title(), caption=self._caption())
        for column in columns:
            table.add_column(column, justify="left" if column in ("", "ends by", "by position") else "right")
        lines = [(str(i), request.finish, _of([request])) for i, request in enumerate(self.requests)]
        if len(lines) != 1:
            lines.append(("all", "", _of(self.requests)))
        for name, finish, m in lines:
            length, step, agreement = m["mean_acceptance_length"], m["tokens_per_step"], m["agreement"]
            table.add_row(
                name, str(m["prompt_tokens"]), str(m["new_tokens"]), finish,
                "-" if length is None else f"{length:.2f}", " ".join(f"{share:.2f}" for share in m["acceptance_at"][:8]) or "-",
                "-" if step is None else f"{step:.2f}", str(m["audits"]), "-" if agreement is None else f"{agreement:.1%}",
            )  # fmt: skip
        return table

    def _title(self) -> str:
        speed = self.tokens_per_second
        forwards = ", ".join(f"{count} {kind}" for kind, count in self.forwards.items() if count)
        return f"{self.mode}: {'-' if speed is None else f'{speed:.1f}'} tokens/s; forwards: {forwards or 'none'}"

    def _caption(self) -> str:
        seconds = ", ".join(f"{phase} {self.seconds[phase]:.2f} s" for phase in PHASES if self.seconds[phase])
        read = f"K and V read {self.kv_bytes / 1e9:.3f} GB, weights {self.weight_bytes / 1e9:.3f} GB"
        density = "" if self.density is None else f" (density {self.density:.3f})"
        return "\n".join([seconds, read + density, *self.notes])

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=110, force_terminal=False, color_system=None)
        with console.capture() as text:
            console.print(self.table())
        return text.get()


class StepBytes:
    """Bytes that a verify forward reads, from lengths, plan and layers.

    Args:
        model, cache: of the steps; the cache's layers give the size of a token.
        plan: as compiled.
        report: of the compiled graph, for the roles of its layers; without one no layer is sparse.
        kinds: mask type of each layer, or one for all.
    """

    def __init__(self, model: Any, cache: Any, plan: Any, report: Any, kinds: Sequence[str]) -> None:
        from spec_compile.passes.sparsify_attention import PARTS, budget_words

        attention = None if plan.attention is None or plan.attention.exact else plan.attention
        entries = [] if report is None else report.attentions
        roles = [entry.role or "dense" for entry in entries] if len(entries) == len(cache.layers) else []
        self._plan: Any = attention if roles and set(roles) != {"dense"} else None
        self._budget: tuple[int, float, int] = (0, 1.0, 0) if self._plan is None else budget_words(self._plan)
        # Bytes of summaries an anchor reads for each byte of its keys: an exact one reads the keys themselves.
        self._scored = 0.0
        if attention is not None:
            self._scored = PARTS[attention.representative] / attention.block_size if attention.representative in PARTS else 1.0
        config = model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        # (bytes a token, of K alone, role, window) -> number of such layers
        self._layers: dict[tuple[int, int, str, int | None], int] = {}
        for place, layer in enumerate(cache.layers):
            keys, values = (x.shape[1] * x.shape[3] * x.element_size() for x in (layer.keys, layer.values))
            kind = kinds[place] if len(kinds) > place else kinds[0] if kinds else "full_attention"
            role = roles[place] if roles else "dense"
            one = (keys + values, keys, role, None if kind == "full_attention" else window)
            self._layers[one] = self._layers.get(one, 0) + 1
        self._experts = [
            (m.experts, m.top_k, m.expert_bytes, bool(m.rule)) for m in ([] if report is None else report.moes) if m.expert_bytes
        ]
        self._moe: Any = plan.moe
        self._skipped = sum(m.weight_bytes - m.sparse_bytes for m in ([] if report is None else report.mlps))
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        embeddings, out = model.get_input_embeddings(), model.get_output_embeddings()
        if embeddings is not None and (out is None or out.weight is not embeddings.weight):
            held -= embeddings.weight.numel() * embeddings.weight.element_size()
        self._shared_weights = held - sum(count * size for count, _, size, _ in self._experts)

    def weights(self, rows: int, sparse: bool = False) -> float:
        """Weights read by ``rows`` rows of all sequences: of experts at most as many as these can choose; in sparse steps without
        channels of feed-forward layers that are known to be skipped, and without experts that the plan takes away: those above
        ``top_k`` and ``expert_budget``, and by its other rules the share that a calibration measured."""
        read: float = self._shared_weights - (self._skipped if sparse else 0)
        for count, top, size, limited in self._experts:
            few = sparse and limited
            read += size * (self._few(count, top, rows) if few else min(count, rows * top))
        return read

    def _few(self, count: int, top: int, rows: int) -> float:
        plan = self._moe
        kept: float = min(count, rows * min(top, plan.top_k or top))
        if plan.expert_budget is not None:
            kept = min(kept, plan.expert_budget)
        measured = plan.calibration
        if measured is not None and measured.distinct_exact and (plan.skip is not None or plan.ratio):
            kept = min(kept, min(count, rows * top) * measured.distinct / measured.distinct_exact)
        return kept

    def kv(self, starts: Sequence[int], rows: int, sparse: bool) -> float:
        """K and V (and summaries) read by a forward of ``rows`` rows behind ``starts`` tokens of each sequence."""
        total = 0.0
        for start in starts:
            live = start + rows
            kept = self.kept(start, rows) if sparse else live
            for (size, keys, role, window), count in self._layers.items():
                seen = live if window is None else min(live, window + rows)
                if role == "dense" or kept >= live:
                    total += count * size * seen
                    continue
                total += count * size * min(kept, seen)
                if role == "anchor":
                    total += count * keys * seen * self._scored
        return total

    def kept(self, start: int, rows: int) -> int:
        """Tokens that a sparse layer reads of a sequence, as :func:`~spec_compile.kernels.library.select_blocks` keeps them."""
        plan, live = self._plan, start + rows
        if plan is None:
            return live
        size = plan.block_size
        blocks = -(-live // size)
        if blocks * size < plan.min_context:
            return live
        contest = max(0, min(start // size, blocks - plan.recent) - plan.sink)
        tokens, share, floor = self._budget
        if tokens:
            budget = tokens // size
        elif blocks * size <= floor:
            budget = blocks
        else:
            budget = max(0, math.floor((blocks * size - floor) * share + floor) // size)
        return min(live, (blocks - contest + min(contest, budget)) * size)
