"""What the target's logits decide: which drafts are kept and which token follows, greedily or by exact speculative sampling.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the rule ``min(1, p/q)`` with its
residual; transformers' logits warpers for the order temperature, top-k, top-p.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.drafters import Draft
from spec_compile.errors import OptionsError

Prefixes = Sequence[Sequence[int]]
# Any odd constant far from small seeds.
_DRAFT_STREAM = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verify step.

    Attributes:
        path: per row the accepted drafts, as indices into ``Draft.tokens`` in order (of a chain 0..a-1).
        token: per row the target's own next token.
        kept: per row the tokens that the step appends: the drafts of ``path``, then ``token``.
        margins: per row, per token of ``kept``, the logit of the best token minus that of the second, after processors; None
            where not asked for.
        probs: float32 ``[B, N + 1, V]``, the target's distribution at the last accepted token and at each draft; None where
            tokens are chosen greedily without ``keep_probs``.
    """

    path: list[list[int]]
    token: list[int]
    kept: list[list[int]]
    margins: list[list[float]] | None = None
    probs: Tensor | None = None

    def rows(self, row: int) -> list[int]:
        """Rows of the logits (and of ``probs``) that the tokens ``kept[row]`` were drawn from."""
        return [0, *(index + 1 for index in self.path[row])]


class Sampler:
    """How the target's tokens are chosen.

    Args:
        do_sample: draw tokens; else the most likely one (the lowest id among equals).
        temperature: above 0; divides the logits.
        top_k: keep the k most likely tokens (and their equals); 0 keeps all.
        top_p: keep the fewest tokens whose probability reaches it, in (0, 1]; 1 keeps all.
        logits_processor: transformers' ``LogitsProcessorList`` (or a list of such callables ``f(ids [1, L], scores [1, V])``),
            called for every position with the tokens before it, padding left out; applies to greedy decoding, too.
        seed: of the sampler's own random generator, so that no global state is read or changed; None draws one.
        device: where logits will lie.

    Raises:
        OptionsError: a value out of range.
    """

    def __init__(
        self,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        logits_processor: Any = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not temperature > 0:
            raise OptionsError(f"temperature must be above 0, got {temperature!r}; for greedy decoding pass do_sample=False")
        if not isinstance(top_k, int) or top_k < 0:
            raise OptionsError(f"top_k must be a whole number of at least 0 (0 keeps all tokens), got {top_k!r}")
        if not 0 < top_p <= 1:
            raise OptionsError(f"top_p must lie in (0, 1], got {top_p!r}")
        processors = list(logits_processor or ())
        if not all(callable(processor) for processor in processors):
            raise OptionsError("logits_processor must be a transformers LogitsProcessorList or a list of f(input_ids, scores)")
        self.do_sample, self.temperature, self.top_k, self.top_p = do_sample, float(temperature), top_k, float(top_p)
        self.processors = processors
        self.generator = torch.Generator(device=device)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not -(1 << 63) <= seed < 1 << 64):
            raise OptionsError(f"seed must be an integer of 64 bits, got {seed!r}")
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self._end_tokens: list[int] = []
        self._least: list[int] = []

    def for_drafts(self) -> Sampler:
        """The same choice of tokens from a random stream of its own, for a drafter.

        Drafts must not be drawn from the numbers that judge them: samplers of one seed would share them.
        """
        twin = copy.copy(self)
        twin.generator = torch.Generator(device=self.generator.device)
        twin.generator.manual_seed((self.generator.initial_seed() + _DRAFT_STREAM) % (1 << 63))
        return twin

    def forbid_end_before(self, end_tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Ban ``end_tokens`` while row b holds fewer than ``lengths[b]`` tokens (prompt included): ``min_new_tokens``."""
        self._end_tokens, self._least = list(end_tokens), list(lengths)

    def scores(self, logits: Tensor, draft: Draft, prefixes: Prefixes) -> Tensor:
        """Logits after the ban on early ends and the processors, in their dtype where nothing applies.

        Args:
            logits: ``[B, N + 1, V]``, at the last accepted token and at each draft.
            draft: the tokens between.
            prefixes: tokens of each row up to the last accepted one, prompt included and padding left out.
        """
        depths = [0, *draft.depths]
        if self._end_tokens:
            short = [
                (row, at)
                for row, (prefix, least) in enumerate(zip(prefixes, self._least, strict=True))
                for at, depth in enumerate(depths)
                if len(prefix) + depth < least
            ]
            if short:
                rows, places = torch.tensor(short).to(logits.device, non_blocking=True).T
                ends = torch.tensor(self._end_tokens).to(logits.device, non_blocking=True)
                logits = logits.clone()
                logits[rows[:, None], places[:, None], ends[None, :]] = -torch.inf
        if not self.processors:
            return logits
        return torch.stack([self._process(logits[row], draft, row, list(prefix)) for row, prefix in enumerate(prefixes)])

    def _process(self, logits: Tensor, draft: Draft, row: int, prefix: list[int]) -> Tensor:
        """Processors on the positions ``[N + 1, V]`` of one row, each with its own prefix."""
        before = torch.tensor(prefix, dtype=torch.int64, device=logits.device)
        drafts = draft.tokens[row].to(logits.device)
        out = []
        for at, scores in enumerate(logits.float()):
            ids = torch.cat([before, drafts[_lineage(draft.parents, at - 1)]])[None]
            found = scores[None]
            for processor in self.processors:
                found = processor(ids, found)
            out.append(found[0])
        return torch.stack(out)

    def warp(self, scores: Tensor) -> Tensor:
        """float32 probabilities ``[..., V]`` of processed logits: greedy one-hot, else temperature, top-k, top-p, softmax."""
        if not self.do_sample:
            best = scores.argmax(-1, keepdim=True)
            return torch.zeros(scores.shape, dtype=torch.float32, device=scores.device).scatter_(-1, best, 1.0)
        scores = scores.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scores.sort(descending=False)
            drop = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[..., -1] = False
            scores = scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
        return scores.softmax(-1)

    def distribution(self, logits: Tensor, prefixes: Prefixes, draft: Draft | None = None) -> Tensor:
        """The target's distribution at each position.

        Args:
            logits: ``[B, T, V]``, at the last accepted token and at each draft.
            prefixes, draft: as of :meth:`scores`; without a draft T is 1.

        Returns:
            float32 ``[B, T, V]``.
        """
        if draft is None:
            draft = _no_draft(logits)
        return self.warp(self.scores(logits, draft, prefixes))

    def verify(
        self,
        logits: Tensor,
        draft: Draft,
        prefixes: Prefixes,
        *,
        margins: bool = False,
        keep_probs: bool = False,
        given_draft: bool = False,
    ) -> Verdict:
        """Decide one step; everything comes from the device in one transfer.

        Args:
            logits: ``[B, T, V]``, T > N: at the last accepted token, at each draft, and whatever pads the step.
            draft: what was proposed.
            prefixes: tokens of each row up to the last accepted one, prompt included; read where processors or a least length
                apply.
            margins: whether ``Verdict.margins`` is wanted.
            keep_probs: whether ``Verdict.probs`` is wanted (sparse steps that will be audited).
            given_draft: judge drawn drafts as if they had been chosen without chance. Exact as well, at a lower acceptance, and
                the only exact rule where the logits may depend on the drafts themselves; see :meth:`audit`.
        """
        columns = draft.tokens.shape[1]
        if logits.dim() != 3 or logits.shape[0] != draft.tokens.shape[0] or logits.shape[1] <= columns:
            raise OptionsError(
                f"logits must be [B, T, V] with B = {draft.tokens.shape[0]} and T > {columns} drafts, got {list(logits.shape)}"
            )
        scores = self.scores(logits[:, : columns + 1], draft, prefixes)
        best = scores.topk(2).values if margins else None
        gaps = None if best is None else (best[..., 0] - best[..., 1]).float()
        if not self.do_sample and not keep_probs:
            return _walk(draft, scores.argmax(-1), gaps, None)
        probs = self.warp(scores)
        if not self.do_sample:
            return _walk(draft, probs.argmax(-1), gaps, probs)
        # A tree of drawn drafts is judged given its drafts: also exact, and siblings need no rule of their own.
        if draft.probs is None or draft.parents is not None or given_draft or columns == 0:
            return _walk(draft, self.draw(probs), gaps, probs)
        return self._reject(draft, probs, gaps)

    def audit(self, logits: Tensor, pending: Draft, prefixes: Prefixes) -> Verdict:
        """Check tokens that sparse steps produced against the dense model; what remains is distributed as the dense model's own.

        Args:
            logits: dense ``[B, W + 1, V]``: at the last audited token and at each pending one.
            pending: the pending tokens, whether they were drafts or the sparse model's own, and drafts behind them. Where tokens
                are drawn it is a chain whose ``probs`` are, of a pending token, the *sparse* distribution that it was judged by
                (``Verdict.probs`` at ``Verdict.rows``), and of a draft, what it was drawn from.
            prefixes: tokens of each row up to the last audited one.

        Returns:
            A verdict whose ``path`` counts the pending tokens that stay and whose ``token`` is the dense model's next one.

        Why the output is the dense model's. Let p_i be the dense distribution after the first i - 1 output tokens and s_i the
        sparse one, and let F_i be all that is fixed when pending token y_i is chosen: earlier tokens, *the drafts of the
        step*, the blocks and experts selected, the KV that sparse layers wrote. The sparse step judges drafts with
        ``given_draft=True``: row i draws from s_i, and the draft is kept if it is what was drawn. So y_i, given F_i, has
        distribution s_i exactly, for an accepted draft as for the step's own token, and F_i determines s_i. The audit keeps
        y_i with probability min(1, p_i(y_i) / s_i(y_i)) and replaces the first token that is not kept by a draw from (p_i -
        s_i)+, normalised. Hence, given F_i and that the tokens before were kept, token z comes out with probability

            s_i(z) min(1, p_i(z) / s_i(z)) + (1 - sum_t min(p_i(t), s_i(t))) (p_i(z) - s_i(z))+ / sum_t (p_i(t) - s_i(t))+
            = min(p_i(z), s_i(z)) + (p_i(z) - s_i(z))+ = p_i(z),

        because 1 - sum min(p, s) = sum (p - s)+. The result does not depend on F_i, so it holds on average over drafts and
        selections, and by induction over i for the sequence. A window may end for any reason known once its last token is
        drawn (its size, a small margin, an end token), as that does not look ahead.

        Why drafts must be taken as given: sparse logits of *all* rows of a step depend on its drafts, since the rows select
        blocks together. The usual rule min(1, s/q) makes y_i a draw from s_i only on average over the drafts and only if s_i
        does not vary with them; given the drafts, y_i is not distributed as the s_i that the audit divides by, and p is
        missed.
        """
        if self.do_sample and (pending.probs is None or pending.parents is not None):
            raise OptionsError("audit: sampled tokens must be a chain with the sparse distributions they were drawn from: probs")
        return self.verify(logits, pending, prefixes)

    def _reject(self, draft: Draft, probs: Tensor, gaps: Tensor | None) -> Verdict:
        """Speculative sampling of drawn chains: keep x while u < p(x) / q(x), then draw from (p - q)+ or, at the end, from p."""
        assert draft.probs is not None
        tokens = draft.tokens.to(probs.device, non_blocking=True)
        columns = tokens.shape[1]
        q = draft.probs.to(probs.device)
        counts = torch.tensor(list(draft.counts)).to(probs.device, non_blocking=True)
        at = tokens[..., None]
        p_x, q_x = (x.gather(-1, at)[..., 0] for x in (probs[:, :-1], q))
        chance = torch.rand(tokens.shape, generator=self.generator, device=probs.device)
        keep = (chance * q_x < p_x) & (torch.arange(columns, device=probs.device) < counts[:, None])
        kept = keep.long().cumprod(1).sum(1)
        batch = torch.arange(len(tokens), device=probs.device)
        p_end = probs[batch, kept]
        # Past its last draft a row has no q.
        q_end = q[batch, kept.clamp(max=columns - 1)] * (kept < counts)[:, None]
        residual = (p_end - q_end).clamp_min(0)
        # Rounding can reject where p equals q: nothing remains, and p itself is right.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_end)
        host, margins = _fetch(torch.cat([kept[:, None], self.draw(residual)[:, None], tokens], 1), gaps)
        rows = host.tolist()
        path = [list(range(row[0])) for row in rows]
        run = [[*row[2 : 2 + row[0]], row[1]] for row in rows]
        return Verdict(path, [row[1] for row in rows], run, _along(margins, path), probs)

    def draw(self, probs: Tensor) -> Tensor:
        """One token ``[...]`` of each distribution ``[..., V]``; a token of probability 0 never.

        The largest of p_i / E_i with E_i exponential is distributed as p (an exponential race); unlike ``torch.multinomial`` it
        does not wait for the device.
        """
        times = torch.empty_like(probs).exponential_(generator=self.generator).clamp_min_(torch.finfo(probs.dtype).tiny)
        return (probs / times).argmax(-1)


def _no_draft(logits: Tensor) -> Draft:
    batch = logits.shape[0]
    return Draft(torch.zeros(batch, 0, dtype=torch.int64), [0] * batch)


def _lineage(parents: Sequence[int] | None, node: int) -> list[int]:
    """Drafts from the root down to ``node`` (itself included); none for -1."""
    if parents is None:
        return list(range(node + 1))
    line = []
    while node >= 0:
        line.append(node)
        node = parents[node]
    return line[::-1]


def _walk(draft: Draft, choice: Tensor, gaps: Tensor | None, probs: Tensor | None) -> Verdict:
    """Follow the target's choices ``[B, N + 1]`` down the drafts for as long as they meet one.

    Where choices are drawn from the target, this is exact speculative sampling for drafts chosen without chance: a draft x is
    accepted with probability p(x), and otherwise the choice is distributed as p without x.
    """
    columns = draft.tokens.shape[1]
    on_host = draft.tokens.device.type == "cpu"
    host, margins = _fetch(choice if on_host else torch.cat([choice, draft.tokens.to(choice.device)], 1), gaps)
    # The device waits from here to the next step: lists of a few numbers are faster than tensors.
    choices = host.tolist()
    tokens = draft.tokens.tolist() if on_host else [row[columns + 1 :] for row in choices]
    parents = range(-1, columns - 1) if draft.parents is None else draft.parents
    path = [_descend(parents, *row) for row in zip(choices, tokens, draft.counts)]
    # Every draft that was kept is what the target chose in its place.
    kept = [[row[0], *(row[i + 1] for i in line)] for row, line in zip(choices, path)]
    return Verdict(path, [run[-1] for run in kept], kept, _along(margins, path), probs)


def _descend(parents: Sequence[int], choices: list[int], tokens: list[int], count: int) -> list[int]:
    """Nodes of one row's tree that the target's choices meet; the first of equal siblings."""
    line: list[int] = []
    at = -1
    for node in range(count):
        if parents[node] == at and tokens[node] == choices[at + 1]:
            line.append(node)
            at = node
    return line


def _along(margins: Tensor | None, path: list[list[int]]) -> list[list[float]] | None:
    if margins is None:
        return None
    return [[row[0], *(row[i + 1] for i in line)] for row, line in zip(margins.tolist(), path)]


def _fetch(ids: Tensor, gaps: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both on the host after one transfer: the floats travel as the bits of integers."""
    if gaps is None:
        return ids.cpu(), None
    both = torch.cat([ids, gaps.double().view(torch.int64)], 1).cpu()
    return both[:, : ids.shape[1]], both[:, ids.shape[1] :].contiguous().view(torch.float64)
