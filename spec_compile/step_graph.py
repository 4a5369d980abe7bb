"""One verify step as one CUDA graph: fixed rows by padding, static buffers, one replay a step.

The compiled forward runs over ``rows`` = draft_len + 1 rows every time. A call with fewer rows repeats its last token; the
rows too many see only slots past the real ones, and the cache's lengths step back over them inside the graph, so that the
next step overwrites what they wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import CacheError, SpecCompileError
from spec_compile.logs import logger


class StepGraph:
    """Captures ``run(input_ids, None, None, cache)`` once and replays it.

    The graph reads the model's weights and the cache where they lie: values may change, storage may not. A changed storage of
    the cache, or of the first or last parameter, is noticed and captured anew.

    Args:
        run: compiled forward over ``rows`` rows.
        model, cache: on one CUDA device; the cache has static layers.
        batch, rows: shape of a step.
    """

    def __init__(self, run: Callable[..., Tensor], model: Any, cache: Any, batch: int, rows: int) -> None:
        self._run, self._model, self._cache, self.rows = run, model, cache, rows
        owners = [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]
        layers = cache.layers
        self._watched = [*owners[:1], *owners[-1:], (layers[0], "keys"), (layers[-1], "values")]
        self._lengths: list[Tensor] = [layer.cumulative_length for layer in layers]
        self._device, self._slots = layers[0].keys.device, int(layers[0].keys.shape[2])
        kind = self._lengths[0].dtype
        # Inference tensors could not be written outside inference mode.
        with torch.inference_mode(False):
            self._ids = torch.zeros(batch, rows, dtype=torch.int64, device=self._device)
            self._surplus = torch.zeros((), dtype=kind, device=self._device)
        self._filled = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: tuple[Any, ...] = ()
        self._logits: Tensor | None = None

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, T, V]`` of ``input_ids`` int ``[B, T]``; the cache advances by T.

        Raises:
            CacheError: too short for a whole step.
        """
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(input_ids)
        rows = input_ids.shape[1]
        held = self._require_room()
        self._fill(input_ids, rows)
        state = (self._model.training, *(getattr(owner, name).data_ptr() for owner, name in self._watched))
        if state != self._state:
            self._capture(state)
        assert self._graph is not None and self._logits is not None
        self._graph.replay()
        self._cache.known_length, self._cache.known_version = held + rows, self._lengths[0]._version
        # The graph's own output is overwritten by the next step.
        return (self._logits if rows == self.rows else self._logits[:, :rows]).clone()

    def _fill(self, input_ids: Tensor, rows: int) -> None:
        if rows == self.rows:
            self._ids.copy_(input_ids, non_blocking=True)
        else:
            self._ids[:, :rows] = input_ids
            self._ids[:, rows:] = input_ids[:, -1:]
        if rows != self._filled:
            self._surplus.fill_(rows - self.rows)
            self._filled = rows

    def _step(self) -> Tensor:
        logits = self._run(self._ids, None, None, self._cache)
        # By its full name: given a 0-d tensor, torch._foreach_add_ would read it on the host.
        torch.ops.aten._foreach_add_.Tensor(self._lengths, self._surplus)
        return logits

    def _capture(self, state: tuple[Any, ...]) -> None:
        self._graph = self._logits = None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        before = [length.clone() for length in self._lengths]
        with torch.cuda.stream(stream):
            # Compiles kernels and fills library workspaces; what it writes lies past the lengths, which are put back.
            for _ in range(2):
                self._step()
                torch._foreach_copy_(self._lengths, before)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._step()
        except Exception as error:
            raise SpecCompileError(
                f"cudagraphs=True: the step of {type(self._model).__name__} cannot be captured ({error}); pass cudagraphs=False"
            ) from error
        self._graph, self._state = graph, state
        logger.debug("captured a verify step of %d rows", self.rows)

    def _require_room(self) -> int:
        """Tokens held, after checking that a whole step fits.

        Replays and rollbacks keep count on the host; after any other write, which shows in the version counter, it waits for
        the device once.
        """
        known = getattr(self._cache, "known_version", -1) == self._lengths[0]._version
        held = self._cache.known_length if known else int(self._lengths[0])
        slots = self._slots
        if held + self.rows > slots:
            raise CacheError(
                f"the cache is too short: it holds {held} tokens in {slots} slots and a captured step writes {self.rows} rows. "
                "Make it longer: VerifyCache(model, max_len=...)"
            )
        return int(held)


def why_not_captured(model: Any, cache: Any) -> str | None:
    """Reason why steps of this model over this cache cannot be captured, or None."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(getattr(layer, "cumulative_length", None), Tensor) for layer in layers):
        return "the cache keeps its length on the host"
    devices = {x.device for x in model.parameters()} | {layer.keys.device for layer in layers}
    if len(devices) > 1:
        return f"model and cache lie on {len(devices)} devices"
    return None if next(iter(devices)).type == "cuda" else "CUDA graphs need a CUDA device"
