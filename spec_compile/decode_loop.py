"""The decoding loop: draft, verify, keep, for a batch of sequences that advance by unequal steps over one cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.drafters import Draft, Drafter
from spec_compile.metrics import PHASES, DecodingMetrics, RequestMetrics, StepBytes
from spec_compile.row_verify import RowVerify
from spec_compile.sampling import Sampler, Verdict
from spec_compile.stopping import Stopping, Stream

# Most prompt tokens of one forward: bounds the activations of long prompts.
PREFILL_CHUNK = 16384


class DecodingLoop:
    """Sequences of a batch until each has ended; exact steps, or sparse ones throughout.

    Attributes:
        tokens: of each sequence, prompt included.
        finish: why each ended, or None.
    """

    def __init__(
        self,
        verify: RowVerify,
        drafter: Drafter,
        sampler: Sampler,
        stopping: Stopping,
        stream: Stream,
        metrics: DecodingMetrics,
        prompts: Sequence[Sequence[int]],
        plan: Any,
        told: Callable[[int], None] | None = None,
    ) -> None:
        self.verify, self.drafter, self.sampler, self.stopping, self.stream = verify, drafter, sampler, stopping, stream
        self.metrics, self.plan, self._told = metrics, plan, told
        self.model, self.cache = verify.model, verify.cache
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.finish: list[str | None] = [None] * len(prompts)
        self.sparse = metrics.mode == "sparse"
        metrics.requests = [RequestMetrics(prompt_tokens=len(prompt)) for prompt in prompts]
        self._bytes: StepBytes | None = None

    def run(self) -> None:
        """Prefill and decode; an interruption ends it, with what was generated until then."""
        start = time.perf_counter()
        try:
            with self.metrics.timed("prefill"):
                self.drafter.start([list(row) for row in self.tokens])
                self.prefill()
                self._wait()
            while None in self.finish:
                self.step()
        except KeyboardInterrupt:
            self.metrics.interrupted = True
        self.finish_metrics(time.perf_counter() - start)
        self.stream.end()

    def _wait(self) -> None:
        """Let the prefill end before decoding is timed."""
        device = self.cache.layers[0].keys.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @torch.no_grad()
    def prefill(self) -> None:
        """Write K and V of all prompt tokens but each last one, sequence by sequence, as the model itself would."""
        from spec_compile.models.row_cache import sequence_cache

        device = self.model.get_input_embeddings().weight.device
        keep, seen = self.verify.keep_hidden, []
        more: dict[str, Any] = {"output_hidden_states": True} if keep else {}
        for sequence, row in enumerate(self.tokens):
            past, parts = sequence_cache(self.cache, sequence), []
            for begin in range(0, len(row) - 1, PREFILL_CHUNK):
                ids = torch.tensor([row[begin : min(begin + PREFILL_CHUNK, len(row) - 1)]], device=device)
                positions = torch.arange(begin, begin + ids.shape[1], device=device)[None]
                # forward, not __call__: a model compiled in place would compile its prefill.
                out = self.model.forward(
                    input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, **self.verify.last_logits, **more
                )
                if keep:
                    parts.append(out.hidden_states[-1][0])
            empty = torch.zeros(
                0, self.model.config.get_text_config(decoder=True).hidden_size, dtype=self.model.dtype, device=device
            )
            seen.append(torch.cat([empty, *parts]))
        if keep:
            self._observe(seen)
        self.cache.set_lengths([len(row) - 1 for row in self.tokens])

    def step(self) -> None:
        """One verify step of all sequences that go on."""
        running = [end is None for end in self.finish]
        rooms = [self.stopping.room(i, len(row)) if on else 0 for i, (row, on) in enumerate(zip(self.tokens, running))]
        draft = self.propose(max(rooms) - 1, rooms)
        verdict = self.judge(draft, running, self.sparse)
        rows: list[Any] = [0] * len(self.tokens)
        runs: list[list[int]] = [[] for _ in self.tokens]
        ends: list[str | None] = list(self.finish)
        for i, row in enumerate(self.tokens):
            if running[i]:
                runs[i], ends[i] = self.stopping.cut(i, row, verdict.kept[i])
                rows[i] = kept_rows(draft, verdict.path[i], len(runs[i]))
                self.metrics.requests[i].judge(draft.depths[: draft.counts[i]], min(len(runs[i]), len(verdict.path[i])))
        self.cache.commit(rows)
        self.append(runs, ends)
        self.observe(rows)
        with self.metrics.timed("draft"):
            self.drafter.accept(
                [run if end is None else [] for run, end in zip(runs, ends)],
                [min(len(run), len(path)) for run, path in zip(runs, verdict.path)],
            )

    def observe(self, rows: Sequence[int | Sequence[int]], first: Sequence[int] | None = None) -> None:
        """Hand the hidden states of the committed ``rows`` of the last step, from ``first`` on, to a drafter that reads them."""
        if not self.verify.keep_hidden:
            return
        paths = [list(range(path)) if isinstance(path, int) else list(path) for path in rows]
        starts = first or [0] * len(paths)
        with self.metrics.timed("draft"):
            self._observe([self.verify.hidden[i, path[start:]] for i, (path, start) in enumerate(zip(paths, starts))])

    def _observe(self, hidden: Sequence[Tensor]) -> None:
        drafter: Any = self.drafter
        drafter.observe(hidden)

    def append(self, runs: Sequence[Sequence[int]], ends: Sequence[str | None]) -> None:
        """Final tokens of each sequence."""
        for i, run in enumerate(runs):
            self.tokens[i].extend(run)
            self.finish[i] = ends[i]
            self.metrics.requests[i].new_tokens += len(run)
        for run in runs:
            self.stream.run(run)
        if self._told is not None:
            self._told(sum(map(len, runs)))

    def propose(self, limit: int, rooms: Sequence[int]) -> Draft:
        """A draft of no more rows than a step takes; a row's drafts never pass the end that ``rooms`` leaves it."""
        with self.metrics.timed("draft"):
            draft = self.drafter.propose(max(0, min(limit, self.drafter.max_drafts)))
        counts = [max(0, min(count, room - 1)) for count, room in zip(draft.counts, rooms)]
        return narrowed(draft, counts)

    def judge(self, draft: Draft, running: Sequence[bool], sparse: bool, **wanted: Any) -> Verdict:
        """Verify and decide; the one place of a step that waits for the device."""
        with self.metrics.timed("verify"):
            logits = self.verify(
                [row[-1] for row in self.tokens],
                draft.tokens,
                [count if on else -1 for count, on in zip(draft.counts, running)],
                draft.parents,
                sparse,
            )
            # Books are kept while the device works.
            self.count("sparse" if sparse else "exact", draft.tokens.shape[1] + 1, running, sparse)
            # Where rows vote for what is read, a drawn draft has a part in the logits that judge it.
            wanted["given_draft"] = sparse and draft.probs is not None
            return self.sampler.verify(logits, draft, self.tokens, **wanted)

    def count(self, kind: str, rows: int, running: Sequence[bool], sparse: bool) -> None:
        """Count a forward and what it read."""
        bytes_read = self.step_bytes()
        starts = [held for held, on in zip(self.cache.lengths, running) if on]
        dense = bytes_read.kv(starts, rows, False)
        self.metrics.forwards[kind] += 1
        self.metrics.kv_bytes_dense += dense
        self.metrics.kv_bytes += bytes_read.kv(starts, rows, True) if sparse else dense
        self.metrics.weight_bytes += bytes_read.weights(rows * len(starts), sparse)

    def step_bytes(self) -> StepBytes:
        """Byte counts of this model; the roles of its layers are known once a step was compiled."""
        if self._bytes is None:
            report = self.verify.report()
            found = StepBytes(self.model, self.cache, self.plan, report, self.verify.layer_kinds)
            if report is None:
                return found
            self._bytes = found
        return self._bytes

    def finish_metrics(self, seconds: float) -> None:
        """Close the books: what is in no other phase is overhead; sequences cut short say so."""
        spent = self.metrics.seconds
        spent["overhead"] = max(0.0, seconds - sum(spent[phase] for phase in PHASES if phase != "overhead"))
        for request, end in zip(self.metrics.requests, self.finish):
            request.finish = end or "interrupted"


def narrowed(draft: Draft, counts: Sequence[int]) -> Draft:
    """The draft with at most ``counts`` drafts a row, without columns that no row needs."""
    columns = max(counts, default=0)
    if columns == draft.tokens.shape[1] and list(counts) == list(draft.counts):
        return draft
    parents = None if draft.parents is None else list(draft.parents)[:columns]
    probs = None if draft.probs is None else draft.probs[:, :columns]
    return Draft(draft.tokens[:, :columns], list(counts), parents, probs)


def kept_rows(draft: Draft, path: Sequence[int], kept: int) -> int | list[int]:
    """Rows of a step to commit where ``kept`` tokens were appended: the last one's K and V are written by the next step."""
    if draft.parents is None:
        return kept
    return [0, *(index + 1 for index in path)][:kept]
