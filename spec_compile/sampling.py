"""What the target's logits decide: which drafts are kept and which token follows, greedily or by exact speculative sampling.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the rule ``min(1, p/q)`` with its
residual; transformers' logits warpers for the order temperature, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.drafters import Draft
from spec_compile.errors import OptionsError

Prefixes = Sequence[Sequence[int]]


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
        logits_processor: transformers' ``LogitsProcessorList`` (or a list of such callables ``f(ids [1, L], scores [1, V])``), called
            for every position with the tokens before it, padding left out; applies to greedy decoding, too.
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
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self._end_tokens: list[int] = []
        self._least: list[int] = []

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
                rows, places = torch.tensor(short, device=logits.device).T
                ends = torch.tensor(self._end_tokens, device=logits.device)
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
        return _walk(draft, self._draw(probs), gaps, probs)

    def _draw(self, probs: Tensor) -> Tensor:
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
    batch, columns = draft.tokens.shape
    parts = [choice]
    if draft.tokens.device != choice.device or choice.device.type == "cpu":
        tokens = draft.tokens.tolist()
    else:
        parts.append(draft.tokens)
        tokens = []
    host, margins = _fetch(torch.cat(parts, 1), gaps)
    choices = [row[: columns + 1] for row in host]
    tokens = tokens or [row[columns + 1 :] for row in host]
    path, final, kept = [], [], []
    for wanted, proposed, count in zip(choices, tokens, draft.counts):
        line: list[int] = []
        at = -1
        while True:
            step = next((i for i in _children(draft.parents, at, count) if proposed[i] == wanted[at + 1]), None)
            if step is None:
                break
            line.append(step)
            at = step
        path.append(line)
        final.append(wanted[at + 1])
        kept.append([*(proposed[i] for i in line), wanted[at + 1]])
    chosen = None if margins is None else [[row[0], *(row[i + 1] for i in line)] for row, line in zip(margins, path)]
    return Verdict(path, final, kept, chosen, probs)


def _children(parents: Sequence[int] | None, node: int, count: int) -> Sequence[int]:
    if parents is None:
        return range(node + 1, min(node + 2, count))
    return [i for i in range(node + 1, count) if parents[i] == node]


def _fetch(ids: Tensor, gaps: Tensor | None) -> tuple[list[list[int]], list[list[float]] | None]:
    """Both on the host after one transfer: the floats travel as the bits of integers."""
    if gaps is None:
        return ids.tolist(), None
    width = ids.shape[1]
    both = torch.cat([ids, gaps.double().view(torch.int64)], 1).cpu()
    return both[:, :width].tolist(), both[:, width:].view(torch.float64).tolist()
