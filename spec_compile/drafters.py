"""Drafters: what proposes the tokens that a verify step checks.

One small protocol for chains and trees, for one row or a batch of unequal rows. A drafter never sees the target's KV cache and
never decides what is accepted; it only guesses, so a bad one costs time and never a token. Drafters that run a model are in
``drafters_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from spec_compile.errors import OptionsError
from spec_compile.ngrams import NgramIndex

MAX_DRAFTS = 31


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for each row of the batch.

    Attributes:
        tokens: int64 ``[B, N]``, on the target's device or, from drafters that work on the host, on the CPU; columns past a row's
            count hold any valid id. N may be 0.
        counts: drafts of each row, 0..N, on the host.
        parents: None for a chain. Else one tree shape for all rows: ``parents[i] < i`` is the node that i continues, -1 the last
            accepted token. A row whose own tree is smaller fills the shape with ordinary guesses.
        probs: float32 ``[B, N, V]``, the distribution that each token was drawn from; None if tokens were chosen without chance.
    """

    tokens: Tensor
    counts: Sequence[int]
    parents: Sequence[int] | None = None
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.dtype != torch.int64:
            raise OptionsError(f"Draft.tokens must be int64 [B, N], got {self.tokens.dtype} {list(self.tokens.shape)}")
        batch, columns = self.tokens.shape
        if len(self.counts) != batch or not all(0 <= count <= columns for count in self.counts):
            raise OptionsError(f"Draft.counts must hold {batch} numbers in 0..{columns}, got {list(self.counts)}")
        parents = self.parents
        if parents is not None and not (len(parents) == columns and all(-1 <= p < i for i, p in enumerate(parents))):
            raise OptionsError(f"Draft.parents must hold {columns} numbers with -1 <= parents[i] < i, got {list(parents)}")
        if self.probs is not None and tuple(self.probs.shape[:2]) != (batch, columns):
            raise OptionsError(f"Draft.probs must be [B, N, V] = [{batch}, {columns}, V], got {list(self.probs.shape)}")

    @property
    def depths(self) -> list[int]:
        """Tokens between each draft and the last accepted one, from 1."""
        if self.parents is None:
            return list(range(1, self.tokens.shape[1] + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


@runtime_checkable
class Drafter(Protocol):
    """What the decoding loop needs of a drafter.

    ``start`` once; then, step by step, ``propose`` and ``accept``. Where an audit takes back tokens that were accepted before,
    ``retract`` comes before ``accept``.
    """

    max_drafts: int

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        """A new generation.

        Args:
            tokens: prompts of the rows, without padding.
        """

    def propose(self, limit: int) -> Draft:
        """Guess what follows each row.

        Args:
            limit: most drafts (of a tree: nodes) that this step can take, at least 0.

        Returns:
            At most ``min(limit, max_drafts)`` columns; nothing (count 0) for rows whose last ``accept`` was empty.
        """

    def accept(self, tokens: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        """What the step appended.

        Args:
            tokens: per row the accepted drafts and the target's own last token; empty for finished rows.
            kept: per row how many of them were drafts.
        """

    def retract(self, counts: Sequence[int]) -> None:
        """Take the last ``counts[row]`` tokens of each row back."""


class HostDrafter:
    """Base of drafters that need no more than the tokens: keeps them as host lists.

    Attributes:
        rows: tokens of each row, prompt included.
        active: whether a row's last ``accept`` appended anything.
    """

    def __init__(self, max_drafts: int) -> None:
        check_drafts(type(self).__name__, max_drafts)
        self.max_drafts = max_drafts
        self.rows: list[list[int]] = []
        self.active: list[bool] = []

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        self.rows = [list(row) for row in tokens]
        self.active = [True] * len(self.rows)

    def accept(self, tokens: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        for row, new in zip(self.rows, tokens, strict=True):
            row.extend(new)
        self.active = [bool(new) for new in tokens]

    def retract(self, counts: Sequence[int]) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            if count:
                del row[-count:]


def check_drafts(name: str, max_drafts: Any) -> None:
    """
    Raises:
        OptionsError: not a number of drafts that a verify step can take.
    """
    if not isinstance(max_drafts, int) or isinstance(max_drafts, bool) or not 1 <= max_drafts <= MAX_DRAFTS:
        raise OptionsError(f"{name}: max_drafts must lie in 1..{MAX_DRAFTS}, got {max_drafts!r}")


def chain(rows: Sequence[Sequence[int]], fill: int = 0) -> Draft:
    """Draft of one chain per row, of unequal lengths; ``fill`` in the columns past a row's end."""
    width = max((len(row) for row in rows), default=0)
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return Draft(torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width), [len(row) for row in rows])


class PromptLookup(HostDrafter):
    """Continue the newest earlier occurrence of the last tokens (prompt lookup decoding, Saxena 2023; vLLM's ``ngram``).

    Args:
        max_drafts: drafts per step, 1..31; of a tree, its nodes.
        max_ngram, min_ngram: length of the suffix that is looked up, the longest match first.
        branches: above 1, continuations of several distinct earlier occurrences, merged into one tree.

    An occurrence that overlaps the end of the row is continued periodically. The index is kept per row and grows by the tokens of
    each step, so that a step costs the same at any context length.

    Raises:
        OptionsError: bad arguments.
    """

    def __init__(self, max_drafts: int = 8, max_ngram: int = 3, min_ngram: int = 1, branches: int = 1) -> None:
        super().__init__(max_drafts)
        if not 1 <= min_ngram <= max_ngram:
            raise OptionsError(f"PromptLookup: need 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        if not 1 <= branches <= max_drafts:
            raise OptionsError(f"PromptLookup: branches must lie in 1..max_drafts = {max_drafts}, got {branches!r}")
        self.max_ngram, self.min_ngram, self.branches = max_ngram, min_ngram, branches
        self._indices: list[NgramIndex] = []

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        super().start(tokens)
        self._indices = [NgramIndex(row, self.min_ngram, self.max_ngram) for row in self.rows]

    def accept(self, tokens: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        super().accept(tokens, kept)
        for index in self._indices:
            index.grow()

    def retract(self, counts: Sequence[int]) -> None:
        for index, count in zip(self._indices, counts, strict=True):
            index.shrink(count)
        super().retract(counts)

    def propose(self, limit: int) -> Draft:
        room = min(limit, self.max_drafts)
        if self.branches == 1 or room < 2:
            found = [
                index.continuations(room, 1) if active and room > 0 else [] for index, active in zip(self._indices, self.active)
            ]
            return chain([runs[0] if runs else [] for runs in found])
        from spec_compile.token_tree import tree_draft

        runs = [index.continuations(room, self.branches) if active else [] for index, active in zip(self._indices, self.active)]
        return tree_draft(runs, room)


class Scripted(HostDrafter):
    """Proposes what it was told to: for tests and for measurements at a set acceptance.

    Args:
        drafts: ``drafts[row][step]``, a list of tokens for each row and step (nothing after the last); or a function from a row's
            tokens (prompt included) to its drafts.
        parents: tree shape of every step; each list of tokens then has one token per node, or none.
        max_drafts: default the longest list, or 8 for a function.
    """

    def __init__(
        self,
        drafts: Sequence[Sequence[Sequence[int]]] | Callable[[Sequence[int]], Sequence[int]],
        parents: Sequence[int] | None = None,
        max_drafts: int | None = None,
    ) -> None:
        if max_drafts is None:
            if parents is not None:
                max_drafts = len(parents)
            elif callable(drafts):
                max_drafts = 8
            else:
                max_drafts = max((len(step) for row in drafts for step in row), default=1)
        super().__init__(max(max_drafts, 1))
        self._drafts, self.parents, self._step = drafts, parents, 0

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        super().start(tokens)
        self._step = 0
        if not callable(self._drafts) and len(self._drafts) != len(self.rows):
            raise OptionsError(f"Scripted: drafts are given for {len(self._drafts)} rows, the batch has {len(self.rows)}")

    def propose(self, limit: int) -> Draft:
        found = [self._row(row) if self.active[row] else [] for row in range(len(self.rows))]
        self._step += 1
        room = min(limit, self.max_drafts)
        if self.parents is None:
            return chain([drafts[:room] for drafts in found])
        nodes = len(self.parents)
        for drafts in found:
            if len(drafts) not in (0, nodes):
                raise OptionsError(f"Scripted: a tree of {nodes} nodes needs as many tokens, got {len(drafts)}")
        # Parents come before their children, so a prefix of the nodes is a tree.
        columns = min(room, nodes) if any(found) else 0
        filled = chain([drafts[:columns] for drafts in found])
        return Draft(filled.tokens, filled.counts, list(self.parents)[: filled.tokens.shape[1]])

    def _row(self, row: int) -> list[int]:
        if callable(self._drafts):
            return list(self._drafts(self.rows[row]))
        steps = self._drafts[row]
        return list(steps[self._step]) if self._step < len(steps) else []


def make_drafter(drafter: Drafter | str, model: Any = None, **options: Any) -> Drafter:
    """The drafter itself, or the default one of a name: ``"prompt_lookup"`` or ``"early_exit"`` (of ``model``, with backend
    ``options``).

    Raises:
        OptionsError: an unknown name, or an object without the methods of :class:`Drafter`.
    """
    if drafter == "prompt_lookup":
        return PromptLookup()
    if drafter == "early_exit":
        from spec_compile.drafters_model import EarlyExit

        return EarlyExit(model, **options)
    if isinstance(drafter, str) or not isinstance(drafter, Drafter):
        raise OptionsError(
            f"drafter must be 'prompt_lookup', 'early_exit' or an object with max_drafts, start, propose, accept and retract, "
            f"got {drafter!r}"
        )
    return drafter
