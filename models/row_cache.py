"""``RowCache``: a static KV cache whose sequences have lengths of their own, for speculative decoding of a batch.

Every sequence starts at slot 0 of its row: prompts are stored without their padding, so that positions are slots, padding can
neither be attended nor selected, and a sequence looks the same in every batch. A verify forward writes its rows behind each
sequence's end and moves no length; :meth:`RowCache.commit` then keeps the accepted ones, a path through a draft tree too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import CacheError
from spec_compile.models.cache import StaticLayer, VerifyCache


class RowLayer(StaticLayer):
    """A static layer written per row: draft row t of sequence b goes to slot ``cumulative_length[b] + t``.

    ``cumulative_length`` is int64 ``[B]``, one tensor for all layers of a device, and is not moved by :meth:`update`.
    """

    keys: Any
    values: Any
    cumulative_length: Any

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        batch, rows = key_states.shape[0], key_states.shape[2]
        places = torch.arange(batch, device=self.device)[:, None]
        slots = self.cumulative_length[:, None] + torch.arange(rows, device=self.device)
        self.keys[places, :, slots] = key_states.transpose(1, 2)
        self.values[places, :, slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        # [B, 1]: a model that reads one length for all sequences fails to trace instead of taking a wrong one.
        return self.cumulative_length[:, None]


class RowCache(VerifyCache):
    """Static KV cache with a length per sequence.

    Args:
        model: a transformers model; only its config, dtype and devices are used.
        max_len: tokens that the longest sequence may reach (prompt and new tokens). Room for 64 draft rows is added.
        batch: sequences.
        dtype: of K and V; default the model's.

    Raises:
        CacheError: as :class:`~spec_compile.VerifyCache`.
    """

    def __init__(self, model: Any, max_len: int, batch: int = 1, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, max_len, batch, dtype)
        self.batch = batch
        # Captured steps over this cache, by the compiled functions that they replay.
        self.captured: dict[Any, Any] = {}
        with torch.inference_mode(False):
            layers = [_row_layer(layer) for layer in self.layers]
            self._counts = {layer.device: torch.zeros(batch, dtype=torch.int64, device=layer.device) for layer in layers}
            self._pinned = any(device.type == "cuda" for device in self._counts)
        for counts in self._counts.values():
            torch._dynamo.mark_static_address(counts)
        for layer in layers:
            layer.cumulative_length = self._counts[layer.device]
        self.layers = layers
        self._held = [0] * batch

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each sequence, as the host counts them; waits for nothing."""
        return list(self._held)

    @property
    def length(self) -> int:
        """Tokens held of the longest sequence."""
        return max(self._held)

    def require_room(self, rows: int, drafts: bool = True) -> None:
        """See :meth:`VerifyCache.require_room`; of the longest sequence."""
        limit = self.capacity if drafts else self.max_len
        if self.length + rows > limit:
            raise CacheError(
                f"RowCache is too short: its longest sequence holds {self.length} tokens and {rows} more are to be written, "
                f"but max_len is {self.max_len} (plus {self.capacity - self.max_len} slots for drafts). Make it at least "
                "prompt + new tokens long: RowCache(model, max_len=...)"
            )

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Say how many tokens each sequence holds: what lies behind is forgotten, what lies before must have been written.

        Raises:
            CacheError: one count for each sequence, 0..capacity.
        """
        if len(lengths) != self.batch or not all(0 <= n <= self.capacity for n in lengths):
            raise CacheError(f"RowCache: {self.batch} lengths of 0..{self.capacity} are needed, got {list(lengths)}")
        if list(lengths) == self._held:
            return
        self._held = [int(n) for n in lengths]
        # A new tensor each time: an upload may still be under way.
        staged = torch.tensor(self._held, pin_memory=self._pinned)
        for counts in self._counts.values():
            counts.copy_(staged, non_blocking=True)

    def crop(self, tokens_to_remove: Any) -> None:
        """Roll back tokens: one number for all sequences or one for each, at most 0 as for :meth:`VerifyCache.crop`."""
        given = tokens_to_remove if isinstance(tokens_to_remove, list | tuple) else [int(tokens_to_remove)] * self.batch
        if len(given) != self.batch or any(n > 0 or -n > held for n, held in zip(given, self._held)):
            raise CacheError(f"RowCache.crop takes numbers of tokens to remove, at most 0, got {given} with {self._held} held")
        self.set_lengths([held + int(n) for n, held in zip(given, self._held)])

    def commit(self, rows: Sequence[int | Sequence[int]]) -> None:
        """Keep rows of the last forward, and forget its others.

        Args:
            rows: for each sequence, the number of leading rows to keep, or which rows (ascending; row 0 is the last accepted
                token, row i + 1 is draft i of a tree). Their K and V are moved together; all of a layer's in one gather and
                one scatter. Block summaries cover nothing behind the old lengths and stay valid.

        Raises:
            CacheError: one entry for each sequence; rows ascend.
        """
        if len(rows) != self.batch:
            raise CacheError(f"RowCache.commit: {self.batch} sequences, {len(rows)} entries")
        counts = [path for path in rows if isinstance(path, int)]
        if len(counts) == self.batch:
            self.set_lengths([held + max(0, count) for held, count in zip(self._held, counts)])
            return
        paths = [list(range(path)) if isinstance(path, int) else [int(row) for row in path] for path in rows]
        for sequence, path in enumerate(paths):
            if any(b <= a for a, b in zip([-1, *path], path)):
                raise CacheError(f"RowCache.commit: rows of sequence {sequence} must ascend, got {path}")
        if any(path != list(range(len(path))) for path in paths):
            self._move(paths)
        self.set_lengths([held + len(path) for held, path in zip(self._held, paths)])

    def _move(self, paths: list[list[int]]) -> None:
        from spec_compile.state import keep_trust

        longest = max(map(len, paths))
        # Sequences with shorter paths copy slots onto themselves.
        source = [[held + row for row in [*path, *range(len(path), longest)]] for held, path in zip(self._held, paths)]
        target = [[held + place for place in range(longest)] for held in self._held]
        staged = torch.tensor([source, target], pin_memory=self._pinned)
        moved = {device: staged.to(device, non_blocking=True) for device in self._counts}
        with torch.no_grad(), keep_trust([layer.keys for layer in self.layers]):
            for layer in self.layers:
                taken, put = moved[layer.device]
                places = torch.arange(self.batch, device=layer.device)[:, None]
                for cached in (layer.keys, layer.values):
                    cached[places, :, put] = cached[places, :, taken]

    def reset(self) -> None:
        """Forget every token; K and V keep their place and are overwritten."""
        self.set_lengths([0] * self.batch)


def _row_layer(static: Any) -> RowLayer:
    layer = RowLayer(static.max_cache_len)
    for name in ("dtype", "device", "batch_size", "num_heads", "k_head_dim", "v_head_dim", "keys", "values", "is_initialized"):
        setattr(layer, name, getattr(static, name))
    return layer


class _SequenceLayer(StaticLayer):
    """One sequence of a :class:`RowLayer` as a layer that grows: a forward appends to it and reads no slot past its end."""

    is_compileable = False

    def __init__(self, whole: RowLayer, sequence: int, held: int) -> None:
        super().__init__(whole.max_cache_len)
        self.dtype, self.device, self.is_initialized = whole.dtype, whole.device, True
        self._slots = whole.keys[sequence : sequence + 1], whole.values[sequence : sequence + 1]
        self.keys, self.values = (cached[:, :, :held] for cached in self._slots)
        self.held = held

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.held + key_states.shape[2]
        for cached, new in zip(self._slots, (key_states, value_states)):
            cached[:, :, self.held : end] = new
        self.held = end
        self.keys, self.values = (cached[:, :, :end] for cached in self._slots)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held + query_length, 0

    def get_seq_length(self) -> int:
        return self.held


def sequence_cache(cache: RowCache, sequence: int) -> Any:
    """One sequence of the cache as a transformers cache of batch 1, for its prefill: what a forward appends lands in its row.

    The lengths of ``cache`` stay: :meth:`RowCache.set_lengths` when the prefill is done.
    """
    from transformers import Cache

    held = cache.lengths[sequence]
    return Cache(layers=[_SequenceLayer(layer, sequence, held) for layer in cache.layers])
