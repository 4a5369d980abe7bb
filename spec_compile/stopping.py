"""Where a generation ends: inside an accepted run, at the first end token, stop string or length limit; and streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import OptionsError


class Stopping:
    """Decides how much of a run is kept. Holds no state of the rows, so a run that an audit takes back leaves no trace.

    Args:
        prompt_lengths: tokens of each row's prompt, without padding.
        max_new_tokens: at least 1.
        min_new_tokens: end tokens do not count before as many were generated (:meth:`Sampler.forbid_end_before` bans them per
            position, so that another token comes in their place); stop strings do, as in transformers.
        eos_token_id: an end token, several, or None.
        stop_strings: a string or several; matched on tokens as transformers' ``StopStringCriteria`` does, so a string that ends
            inside a token counts, and one may begin in the prompt.
        tokenizer: needed for stop strings.

    Raises:
        OptionsError: a value out of range, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        eos_token_id: int | Sequence[int] | Tensor | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
    ) -> None:
        for name, value, low in (("max_new_tokens", max_new_tokens, 1), ("min_new_tokens", min_new_tokens, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionsError(f"{name} must be a whole number of at least {low}, got {value!r}")
        if min_new_tokens > max_new_tokens:
            raise OptionsError(f"min_new_tokens {min_new_tokens} is above max_new_tokens {max_new_tokens}")
        self.prompt_lengths = list(prompt_lengths)
        self.max_new_tokens, self.min_new_tokens = max_new_tokens, min_new_tokens
        self.end_tokens = end_tokens(eos_token_id)
        self._strings = None
        wanted = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
        if wanted:
            if tokenizer is None:
                raise OptionsError("stop_strings need the tokenizer: pass tokenizer=...")
            if not all(isinstance(text, str) and text for text in wanted):
                raise OptionsError(f"stop_strings must be strings that are not empty, got {wanted!r}")
            from transformers import StopStringCriteria

            self._strings = StopStringCriteria(tokenizer, wanted)

    def room(self, row: int, held: int) -> int:
        """New tokens that a row of ``held`` tokens (prompt included) may still get."""
        return self.prompt_lengths[row] + self.max_new_tokens - held

    def cut(self, row: int, held: Sequence[int], run: Sequence[int]) -> tuple[list[int], str | None]:
        """Keep of ``run``, which follows ``held`` (prompt included), what lies before the first end, itself included.

        Returns:
            The tokens kept and the reason to stop: ``"eos"``, ``"stop_string"``, ``"length"``, or None to go on. An end token or
            stop string at the last place that the limit leaves counts as such.
        """
        kept = list(run[: max(self.room(row, len(held)), 0)])
        least = self.prompt_lengths[row] + self.min_new_tokens - len(held)
        ends = [i + 1 for i, token in enumerate(kept) if token in self.end_tokens and i + 1 > least]
        first = min([*ends, *self._string_ends(held, kept)], default=None)
        if first is not None:
            return kept[:first], "eos" if first in ends else "stop_string"
        full = len(held) + len(kept) >= self.prompt_lengths[row] + self.max_new_tokens
        return kept, "length" if full else None

    def _string_ends(self, held: Sequence[int], run: Sequence[int]) -> list[int]:
        """Lengths of the prefixes of ``run`` that end in a stop string."""
        if self._strings is None:
            return []
        # The criteria look no further back than this many tokens.
        before = list(held[-self._strings.maximum_token_len :])
        found = []
        for size in range(1, len(run) + 1):
            ids = torch.tensor([[*before, *run[:size]]], dtype=torch.int64)
            if bool(self._strings(ids, None)):
                found.append(size)
        return found


def end_tokens(eos_token_id: int | Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """End tokens as a tuple; an id, several, a tensor, or None for none."""
    if eos_token_id is None:
        return ()
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.reshape(-1).tolist()
    if isinstance(eos_token_id, int):
        eos_token_id = [eos_token_id]
    return tuple(int(token) for token in eos_token_id)


class Stream:
    """Feeds a transformers streamer (``put`` and ``end``): the prompt first, then every run once and in order.

    Args:
        streamer: None for no stream.
        batch: rows; streamers take one.

    Raises:
        OptionsError: a streamer with a batch above 1, or an object without ``put`` and ``end``.
    """

    def __init__(self, streamer: Any, batch: int) -> None:
        if streamer is not None:
            if batch != 1:
                raise OptionsError(f"a streamer takes one sequence, the batch has {batch}; generate without streamer=")
            if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
                raise OptionsError(f"streamer must have put(tokens) and end(), got {type(streamer).__name__}")
        self._streamer = streamer

    def prompt(self, input_ids: Tensor) -> None:
        """Hand over the prompt ``[1, L]``."""
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def run(self, tokens: Sequence[int]) -> None:
        """Hand over a run of final tokens."""
        if self._streamer is not None and tokens:
            self._streamer.put(torch.tensor(list(tokens), dtype=torch.int64))

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
