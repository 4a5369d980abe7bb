"""A step of the decoding loop as one CUDA graph, over sequences with lengths of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_compile.state import SparseSwitch
from spec_compile.step_graph import StepGraph


class CapturedRows(StepGraph):
    """A step of a fixed number of rows, captured once and replayed; tokens and counts reach it in one copy.

    Attributes:
        holds: whether the memory of the model's weights shall not be freed before ``holds`` is false and :meth:`release` was
            called. They are then compared with those of the capture while the device works, and a step that has run over
            replaced ones runs again, over the same slots.
    """

    holds = False

    def __init__(
        self,
        call: Callable[..., Tensor],
        model: Any,
        cache: Any,
        batch: int,
        rows: int,
        switch: SparseSwitch | None,
        symbolic: bool = False,
    ) -> None:
        super().__init__(call, model, cache, batch, rows, switch, symbolic)
        with torch.inference_mode(False):
            self._staged = torch.zeros(batch, rows + 1, dtype=torch.int64, device=self._device)
            self._counts = torch.zeros(batch, dtype=torch.int64, device=self._device)
            self._shape = torch.zeros(rows, 2, dtype=torch.int64, device=self._device)
        if symbolic:
            torch._dynamo.maybe_mark_dynamic(self._shape, 0)
        self._shaped: Tensor | None = None
        self._storages: list[Any] = []

    def __call__(self, last: Sequence[int], drafts: Tensor, counts: Sequence[int], shape: Tensor) -> Tensor:  # type: ignore[override]
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(last, drafts, counts, shape)
        self._stage(last, drafts, counts, shape)
        return self.replay()

    def _stage(self, last: Sequence[int], drafts: Tensor, counts: Sequence[int], shape: Tensor) -> None:
        columns = drafts.shape[1]
        on_host = drafts.device.type == "cpu"
        known = drafts.tolist() if on_host else [[0] * columns] * len(last)
        rest = [0] * (self.rows - 1 - columns)
        lines = [[count, token, *line, *rest] for count, token, line in zip(counts, last, known, strict=True)]
        # Pinned and contiguous: other copies would wait for the device. New each time: an upload may still be under way.
        staged = torch.tensor(lines, pin_memory=self._device.type == "cuda")
        self._staged.copy_(staged, non_blocking=True)
        if not on_host:
            self._staged[:, 2 : columns + 2] = drafts
        if shape is not self._shaped:
            self._shape.copy_(shape)
            self._shaped = shape

    def replay(self) -> Tensor:
        if not self.holds:
            return super().replay()
        if self._storages and self._state_now() == self._state and not self._cache_moved():
            found = self._launch()
            if not self._moved():
                return found
        self._storages.clear()
        found = super().replay()
        self._storages = [weight.untyped_storage() for weight in self._weights]
        return found

    def release(self) -> None:
        """Let replaced weights go."""
        self.holds = False
        self._storages.clear()

    def _step(self) -> Tensor:
        self._counts.copy_(self._staged[:, 0])
        self._ids.copy_(self._staged[:, 1:])
        return self._run(self._ids, self._counts, self._shape)
