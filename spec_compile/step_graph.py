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
from spec_compile.plan import SparsityPlan
from spec_compile.state import BlockSummaries, SparseSwitch, any_summaries

_EXACT = SparsityPlan()


class _Registrations:
    """Counts modules, parameters and buffers registered in this process, once watched."""

    count = 0
    watched = False


def _watch_registrations() -> None:
    if _Registrations.watched:
        return
    _Registrations.watched = True

    def count(module: Any, name: str, value: Any) -> None:
        # Models that slice a module list in forward run this inside Dynamo's trace, which knows no class attributes.
        if not torch.compiler.is_compiling():
            _Registrations.count += 1

    hooks = torch.nn.modules.module
    hooks.register_module_parameter_registration_hook(count)
    hooks.register_module_module_registration_hook(count)
    hooks.register_module_buffer_registration_hook(count)


class StepGraph:
    """Captures ``run(input_ids, None, None, cache)`` once and replays it.

    The graph reads the model's weights and the cache where they lie: their values may change. New storage, replaced or added
    modules, parameters and buffers, autocast, float32 precision and train mode are noticed, and the step is captured anew.
    Other Python attributes of modules count as they were at the capture, and so does a module list that lost an entry.

    Args:
        run: compiled forward over ``rows`` rows.
        model, cache: on one CUDA device; the cache has static layers.
        batch, rows: shape of a step.
        switch: of a sparse plan.
        symbolic: whether to share a compiled graph with other numbers of rows from 2, instead of one for ``rows`` alone.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        model: Any,
        cache: Any,
        batch: int,
        rows: int,
        switch: SparseSwitch | None = None,
        symbolic: bool = False,
    ) -> None:
        self._run, self._model, self._cache, self.rows = run, model, cache, rows
        layers = cache.layers
        _watch_registrations()
        self._lengths: list[Tensor] = [layer.cumulative_length for layer in layers]
        self._device = layers[0].keys.device
        config: Any = getattr(model, "config", None)
        config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        # Padding must not run past a table of positions.
        positions = getattr(config, "max_position_embeddings", None) or 1 << 62
        self._limit = min(int(layers[0].keys.shape[2]), positions)
        kind = self._lengths[0].dtype
        # Inference tensors could not be written outside inference mode.
        with torch.inference_mode(False):
            self._ids = torch.zeros(batch, rows, dtype=torch.int64, device=self._device)
            self._surplus = torch.zeros((), dtype=kind, device=self._device)
        if symbolic and rows > 1:
            torch._dynamo.maybe_mark_dynamic(self._ids, 1)
        self._filled, self._told = 0, False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._state: tuple[Any, ...] = ()
        self._registrations = -1
        self._modules: list[int] = []
        self._weights: list[Tensor] = []
        self._places: list[int] = []
        self._cache_places: list[int] = []
        self._logits: Tensor | None = None
        self._switch = switch
        self._summaries: list[BlockSummaries] = []
        self._keys: list[Tensor] = []

    def __call__(self, input_ids: Tensor, held: int) -> Tensor:
        """Logits ``[B, T, V]`` of ``input_ids`` int ``[B, T]``; the cache, which holds ``held`` tokens, advances by T.

        Only where :meth:`fits`.
        """
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self(input_ids, held)
        rows = input_ids.shape[1]
        self._fill(input_ids, rows)
        logits = self.replay()
        counted = getattr(self._cache, "host_length", None)
        if counted is not None:
            counted.tokens, counted.version = held + rows, self._lengths[0]._version
        # The graph's own output is overwritten by the next step.
        return (logits if rows == self.rows else logits[:, :rows]).clone()

    def replay(self) -> Tensor:
        """Run the step on what its buffers hold, captured anew where that is due; the graph's own output."""
        state = self._state_now()
        if self._graph is None or state != self._state or self._moved():
            self._capture(state)
        return self._launch()

    def _launch(self) -> Tensor:
        assert self._graph is not None
        for found in self._summaries:
            found.distrust_if_written()
        self._graph.replay()
        # A replay writes the caches without a word to their version counters, by which summaries of others notice.
        if any_summaries():
            torch.autograd.graph.increment_version(self._keys)
        for found in self._summaries:
            found.trust()
        assert self._logits is not None
        return self._logits

    def _state_now(self) -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return self._model.training, autocast, torch.get_float32_matmul_precision()

    def _moved(self) -> bool:
        """Whether the model or the cache is another, or lies elsewhere, than when the step was captured."""
        if self._registrations != _Registrations.count:
            if [id(module) for module in self._model.modules()] != self._modules:
                return True
            self._weights = [*self._model.parameters(), *self._model.buffers()]
            self._registrations = _Registrations.count
        # Hundreds of tensors at every step: nothing in Python is faster.
        return self._cache_moved() or list(map(torch.Tensor.data_ptr, self._weights)) != self._places

    def _cache_moved(self) -> bool:
        return self._cache_places_now() != self._cache_places

    def _cache_places_now(self) -> list[int]:
        """Layers of a cache may rebind their tensors at any time."""
        parts = [part for layer in self._cache.layers for part in (layer.keys, layer.values, layer.cumulative_length)]
        return list(map(torch.Tensor.data_ptr, parts))

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

    @torch.no_grad()
    def _capture(self, state: tuple[Any, ...]) -> None:
        self._graph = self._logits = None
        self._lengths = [layer.cumulative_length for layer in self._cache.layers]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        before = [length.clone() for length in self._lengths]
        try:
            with torch.cuda.stream(stream):
                # Compiles kernels and fills library workspaces; what it writes lies past the lengths, which are put back.
                for _ in range(2):
                    self._step()
                    torch._foreach_copy_(self._lengths, before)
        except Exception:
            torch.cuda.current_stream().wait_stream(stream)
            torch._foreach_copy_(self._lengths, before)
            raise
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # With its own stream: the default one belongs to the device of the process's first capture.
            with torch.cuda.graph(graph, stream=stream):
                self._logits = self._step()
        except Exception as error:
            raise SpecCompileError(
                f"cudagraphs=True: the step of {type(self._model).__name__} cannot be captured ({error}); pass cudagraphs=False"
            ) from error
        self._graph, self._state, self._registrations = graph, state, _Registrations.count
        self._modules = [id(module) for module in self._model.modules()]
        self._weights = [*self._model.parameters(), *self._model.buffers()]
        self._places = list(map(torch.Tensor.data_ptr, self._weights))
        self._cache_places = self._cache_places_now()
        self._summaries = [] if self._switch is None else self._switch.summaries
        self._keys = [layer.keys for layer in self._cache.layers]
        logger.debug("captured a verify step of %d rows", self.rows)

    def fits(self, held: int) -> bool:
        """Whether a whole step fits the cache's slots and the model's positions; a shorter one may still fit uncaptured."""
        return held + self.rows <= self._limit

    def require_slots(self, held: int, rows: int) -> None:
        """
        Raises:
            CacheError: ``rows`` do not fit the cache's slots.
        """
        slots = int(self._cache.layers[0].keys.shape[2])
        if held + rows > slots:
            raise CacheError(
                f"{type(self._cache).__name__} is too short: it holds {held} tokens in {slots} slots and {rows} more are to be "
                "written. Make a longer one"
            )
        if not self._told:
            self._told = True
            logger.info(
                "%d tokens held: a padded step of %d rows passes slots or positions (%d), steps run uncaptured", held, self.rows,
                self._limit,
            )  # fmt: skip

    def held(self) -> int:
        """Tokens in the cache. Replays and rollbacks keep count on the host; after a write by anything else, which shows in
        the version counter, this waits for the device once.
        """
        length = self._cache.layers[0].cumulative_length
        counted = getattr(self._cache, "host_length", None)
        if counted is not None and length is self._lengths[0] and counted.version == length._version:
            return int(counted.tokens)
        return int(length)


class StepGraphs:
    """Captured steps over one cache: one for all numbers of rows, by padding, and where the rows of a padding would take part in
    what a sparse step reads, one for each number of rows, captured when first met. Exact and sparse steps share one, which reads
    the switch, unless exact ones launch other kernels.

    Args:
        run, model, cache, batch, switch: see :class:`StepGraph`.
        rows: most rows of a step.
        plan: what sparse steps leave out.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        model: Any,
        cache: Any,
        batch: int,
        rows: int,
        switch: SparseSwitch | None = None,
        plan: SparsityPlan = _EXACT,
    ) -> None:
        self._run, self._model, self._cache, self._batch, self._rows, self._switch = run, model, cache, batch, rows, switch
        self._plan = plan
        self._steps: dict[tuple[int, bool], StepGraph] = {}

    def of(self, rows: int) -> StepGraph:
        """The step that ``rows`` rows run as, in the mode that the switch says."""
        sparse = self._switch is not None and self._switch.sparse
        size = rows if sparse and self._plan.rows_vote else self._rows
        key = (size, sparse and self._plan.two_captures)
        if key not in self._steps:
            self._steps[key] = StepGraph(self._run, self._model, self._cache, self._batch, size, self._switch, size < self._rows)
        return self._steps[key]


def why_not_captured(model: Any, cache: Any) -> str | None:
    """Reason why steps of this model over this cache cannot be captured, or None."""
    from spec_compile.models.cache import StaticLayer
    from spec_compile.models.row_cache import RowLayer

    layers = getattr(cache, "layers", None)
    if not layers:
        return f"{type(cache).__name__} has no layers of transformers' kind"
    odd = next((type(layer).__name__ for layer in layers if type(layer) not in (StaticLayer, RowLayer)), None)
    if odd is not None:
        return f"a layer of kind {odd} may keep state on the host, which a replay would not see: use VerifyCache"
    if any(layer.cumulative_length.is_inference() for layer in layers):
        return "the cache was made under torch.inference_mode()"
    devices = {x.device for x in model.parameters()} | {layer.keys.device for layer in layers}
    if len(devices) > 1:
        return f"model and cache lie on {len(devices)} devices"
    return None if next(iter(devices)).type == "cuda" else "CUDA graphs need a CUDA device"
