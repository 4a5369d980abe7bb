"""The lossless mode: sparse steps run ahead, one dense step over what they produced checks it.

A dense step over the pending tokens is a verify step whose drafts are those tokens (and, behind them, what the drafter proposes
next): it writes their K and V anew in the same slots, keeps the longest run that the dense model agrees with, and adds the dense
model's own next token. Tokens are final, and streamed, only then. The idea of checking a sparse target by a dense one is that of
TriForce (arXiv 2404.11912) and MagicDec (arXiv 2408.11049), whose drafts come from sparse attention alone; here drafts are judged
by a sparse verify first, so that a dense read is spent on many steps' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from spec_compile.audit_window import AuditWindow
from spec_compile.decode_loop import DecodingLoop, kept_rows, narrowed
from spec_compile.drafters import Draft
from spec_compile.plan import AuditPlan
from spec_compile.sampling import Verdict


class FirstOf(Sequence[int]):
    """The first ``end`` items of a list, without a copy, which would take longer in every step the longer the context is."""

    def __init__(self, row: Sequence[int], end: int) -> None:
        self._row, self._places = row, range(end)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        places = self._places[at]
        return self._row[places] if isinstance(places, int) else [self._row[place] for place in places]


class AuditedLoop(DecodingLoop):
    """A :class:`DecodingLoop` whose ``tokens`` hold pending ones behind the ``final`` ones of each sequence."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.final = list(self.prompt_lengths)
        self.window = AuditWindow(self.plan.audit or AuditPlan())
        self._pauses: list[bool] = [False] * len(self.tokens)
        self._margins: list[list[float | None]] = [[] for _ in self.tokens]
        self._alive = [1.0] * len(self.tokens)
        self._proposals: list[list[Tensor]] = [[] for _ in self.tokens]
        self._forced = False
        self._dense_steps = 0

    def pending(self, sequence: int) -> int:
        """Tokens of a sequence that wait for an audit."""
        return len(self.tokens[sequence]) - self.final[sequence]

    def step(self) -> None:
        running = [end is None for end in self.finish]
        going = [on and not pause for on, pause in zip(running, self._pauses)]
        pending = max(self.pending(i) for i in range(len(self.tokens)))
        # Roles of layers, and with them bytes, are known after a step: where they decide, the first one is dense every time.
        first = self.window.plan.adapt and not any(self.metrics.forwards.values())
        if not self._forced and not first:
            costs = self._costs(going)
            alive = [chance for chance, on in zip(self._alive, going) if on]
            if self.window.goes_on(alive, pending, self.drafter.max_drafts, *costs):
                self._run_ahead(going, pending)
                return
        self._audit(running, pending)
        self._dense_steps += not pending and not first

    def _costs(self, going: Sequence[bool]) -> tuple[float, float]:
        """Bytes of a sparse and of a dense step."""
        bytes_read, rows = self.step_bytes(), self.drafter.max_drafts + 1
        starts = [held for held, on in zip(self.cache.lengths, going) if on]
        whole, all_rows = self.window.plan.cost == "all", rows * len(starts)
        sparse, dense = (bytes_read.weights(all_rows, kind) if whole else 0 for kind in (True, False))
        return sparse + bytes_read.kv(starts, rows, True), dense + bytes_read.kv(starts, rows, False)

    def _run_ahead(self, going: Sequence[bool], pending: int) -> None:
        """A sparse step: what it keeps is pending."""
        rooms = [self.stopping.room(i, len(row)) if on else 0 for i, (row, on) in enumerate(zip(self.tokens, going))]
        # All that a window takes in must fit the rows of the audit.
        draft = self.propose(min(max(rooms) - 1, self.window.limit - pending - 1), rooms)
        sampled = self.sampler.do_sample
        guard = self.window.plan.margin
        verdict = self.judge(draft, going, True, margins=not sampled or guard is not None, keep_probs=sampled)
        rows: list[Any] = [0] * len(self.tokens)
        runs: list[list[int]] = [[] for _ in self.tokens]
        for i, row in enumerate(self.tokens):
            if not going[i]:
                continue
            run, end = self.stopping.cut(i, row, verdict.kept[i])
            path = verdict.path[i]
            rows[i] = kept_rows(draft, path, len(run))
            runs[i], self._pauses[i] = run, end is not None
            self.metrics.requests[i].judge(draft.depths[: draft.counts[i]], min(len(run), len(path)))
            self._note(i, verdict, len(run))
        self.cache.commit(rows)
        for row, run in zip(self.tokens, runs):
            row.extend(run)
        self.window.saw_step(sum(map(len, runs)) / max(1, sum(going)))
        self.observe(rows)
        with self.metrics.timed("draft"):
            self.drafter.accept(runs, [min(len(run), len(path)) for run, path in zip(runs, verdict.path)])

    def _note(self, i: int, verdict: Verdict, kept: int) -> None:
        """Remember how sure the sparse model was of the tokens it kept."""
        sampled, guard = self.sampler.do_sample, self.window.plan.margin
        found: list[Any] = [None] * kept if verdict.margins is None else list(verdict.margins[i][:kept])
        self._forced = self._forced or (guard is not None and any(margin < guard for margin in found))
        for margin in found:
            known = None if sampled else margin
            self._margins[i].append(known)
            self._alive[i] *= self.window.survives(known)
        if verdict.probs is not None and sampled:
            self._proposals[i] += list(verdict.probs[i, verdict.rows(i)[:kept]])

    def _audit(self, running: Sequence[bool], pending: int) -> None:
        """A dense step over pending tokens and the next drafts."""
        counts = [self.pending(i) for i in range(len(self.tokens))]
        draft = self._behind(running, pending)
        tokens, widths = self._joined(draft, counts)
        joined = Draft(tokens, widths, self._parents(draft, counts), self._proposed(draft, counts, tokens))
        prefixes = [FirstOf(row, end) for row, end in zip(self.tokens, self.final)]
        self.cache.set_lengths(
            [len(prefix) - 1 if on else held for prefix, on, held in zip(prefixes, running, self.cache.lengths)]
        )
        phase = "audit" if pending else "verify"
        with self.metrics.timed(phase):
            logits = self.verify(
                [prefix[-1] for prefix in prefixes], tokens, [n if on else -1 for n, on in zip(widths, running)], joined.parents
            )
            self.count("audit" if pending else "exact", tokens.shape[1] + 1, running, False)
            judge = self.sampler.audit if pending else self.sampler.verify
            verdict = judge(logits, joined, prefixes)
        rows: list[Any] = [0] * len(self.tokens)
        runs: list[list[int]] = [[] for _ in self.tokens]
        new: list[list[int]] = [[] for _ in self.tokens]
        back, drafts, ends = [0] * len(self.tokens), [0] * len(self.tokens), list(self.finish)
        for i, prefix in enumerate(prefixes):
            if not running[i]:
                continue
            runs[i], ends[i] = self.stopping.cut(i, prefix, verdict.kept[i])
            kept, path = len(runs[i]), verdict.path[i]
            rows[i] = kept_rows(joined, path, kept)
            agreed = min(len(path), counts[i])
            stays = min(agreed, kept)
            back[i], drafts[i] = counts[i] - stays, max(0, min(kept, len(path)) - counts[i])
            new[i] = runs[i][stays:]
            self._count_audit(i, counts[i], agreed, draft, drafts[i])
        self.cache.commit(rows)
        with self.metrics.timed("draft"):
            if any(back):
                self.drafter.retract(back)
        for i, on in enumerate(running):
            if on:
                del self.tokens[i][self.final[i] :]
        self.append(runs, ends)
        self.final = [len(row) for row in self.tokens]
        # Sparse steps have told of all pending tokens but the last one; those that stay keep what was told.
        self.observe(rows, [min(n, n - gone + 1) for n, gone in zip(counts, back)])
        with self.metrics.timed("draft"):
            self.drafter.accept([run if end is None else [] for run, end in zip(new, ends)], drafts)
        if not pending:
            self._learn(running, new)
        self._forget()

    def _behind(self, running: Sequence[bool], pending: int) -> Draft:
        """Drafts to judge behind the pending tokens, none for sequences that pause."""
        rooms = [
            self.stopping.room(i, len(row)) if on and not pause else 0
            for i, (row, on, pause) in enumerate(zip(self.tokens, running, self._pauses))
        ]
        draft = self.propose(min(max(rooms) - 1, self.verify.sizes[-1] - 1 - pending), rooms)
        counts = [self.pending(i) for i, on in enumerate(running) if on]
        drawn = self.sampler.do_sample and pending > 0
        if draft.parents is not None and (len(set(counts)) > 1 or drawn):
            # One tree shape serves all sequences; behind runs of unequal length it would be several. And trees are judged given
            # their tokens, which keeps fewer of those that were drawn.
            return narrowed(draft, [0] * len(self.tokens))
        return draft

    def _joined(self, draft: Draft, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Pending tokens and drafts in one tensor ``[B, N]``, and how many each sequence has."""
        if not any(counts):
            return draft.tokens, list(draft.counts)
        widths = [pending + drafts for pending, drafts in zip(counts, draft.counts)]
        tokens = torch.zeros(len(counts), max(widths), dtype=torch.int64)
        for i, pending in enumerate(counts):
            tokens[i, :pending] = torch.tensor(self.tokens[i][self.final[i] :])
        tokens = tokens.to(draft.tokens.device)
        for i, (pending, width) in enumerate(zip(counts, widths)):
            tokens[i, pending:width] = draft.tokens[i, : width - pending]
        return tokens, widths

    def _parents(self, draft: Draft, counts: Sequence[int]) -> list[int] | None:
        if not draft.parents:
            # Also a tree that was narrowed to nothing: what is left is a chain.
            return None
        pending = max(counts)
        return [*range(-1, pending - 1), *(parent + pending for parent in draft.parents)]

    def _proposed(self, draft: Draft, counts: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Distributions that pending tokens were drawn from, and drafts behind them; None where nothing was drawn."""
        drawn = next((one for row in self._proposals for one in row), None)
        if drawn is None or not self.sampler.do_sample:
            return draft.probs if not any(counts) else None
        vocabulary = drawn.shape[-1]
        # Drafts that were chosen without chance are drawn from a distribution that holds nothing else.
        probs = torch.nn.functional.one_hot(tokens.to(drawn.device), vocabulary).float()
        for i, pending in enumerate(counts):
            if pending:
                probs[i, :pending] = torch.stack(self._proposals[i])
            if draft.probs is not None:
                probs[i, pending : pending + draft.counts[i]] = draft.probs[i, : draft.counts[i]].to(probs.device)
        return probs

    def _count_audit(self, i: int, pending: int, agreed: int, draft: Draft, accepted: int) -> None:
        request = self.metrics.requests[i]
        if agreed == pending and not self._pauses[i]:
            request.judge(draft.depths[: draft.counts[i]], accepted)
        if pending:
            request.audits += 1
            request.audited += pending
            request.agreed += agreed
            self.window.saw_audit(self._margins[i], agreed)

    def _forget(self) -> None:
        self._pauses = [False] * len(self.tokens)
        self._margins = [[] for _ in self.tokens]
        self._proposals = [[] for _ in self.tokens]
        self._alive = [1.0] * len(self.tokens)
        self._forced = False

    def _learn(self, running: Sequence[bool], new: Sequence[Sequence[int]]) -> None:
        """A dense step without pending tokens tells what a step adds, as sparse ones do."""
        self.window.saw_step(sum(map(len, new)) / max(1, sum(running)))

    def finish_metrics(self, seconds: float) -> None:
        # What no audit has seen is not part of the result.
        for row, end in zip(self.tokens, self.final):
            del row[end:]
        super().finish_metrics(seconds)
        if self._dense_steps:
            reason = f"estimated agreement {self.window.agreement:.2f}, {self.window.gain:.1f} tokens a step"
            if self.window.saves_nothing >= self._dense_steps:
                counted = "K and V" if self.window.plan.cost == "kv" else "weights, K and V"
                reason = f"sparse ones are not known to read fewer bytes ({counted}); AuditPlan(adapt=False) takes them anyway"
            steps = sum(self.metrics.forwards.values())
            self.metrics.notes.append(f"{self._dense_steps} of {steps} steps were dense without a sparse one before: {reason}")
