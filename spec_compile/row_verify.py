"""The verify step of the decoding loop: one compiled function from draft rows to logits, over a cache with a length per row.

Positions and masks are built on the device from the cache's lengths and the shape of the draft, so that chains, trees, rows
with fewer drafts and finished rows run through one graph, and a step is one replay of a CUDA graph where it is captured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from spec_compile.backend import compile_graph, switch_of
from spec_compile.captured_rows import CapturedRows
from spec_compile.classify import EXPERT_LOOP
from spec_compile.errors import CacheError, OptionsError, SpecCompileError
from spec_compile.logs import logger
from spec_compile.options import Options, disabled
from spec_compile.report import RewriteReport
from spec_compile.state import SparseSwitch
from spec_compile.step_graph import why_not_captured
from spec_compile.verify import (
    _mask_types,
    _takes_dicts,
    _text_config,
    _with_own_code,
    check_draft_len,
    has_expert_loop,
    store_for,
)  # fmt: skip

# A row's place among its ancestors is a bit of an int64.
MOST_ROWS = 32


@dataclass(eq=False)
class Compiled:
    """A model's step functions under one set of options, over caches of one shape; all generations share their graphs.

    Attributes:
        runs: the function for any number of rows from 2 (None), and one for each number that is captured.
        switch: between sparse and exact steps, of all of them.
    """

    options: Options
    switch: SparseSwitch | None
    reports: list[RewriteReport] = field(default_factory=list)
    runs: dict[int | None, Callable[..., Tensor]] = field(default_factory=dict)
    # Generations in several threads share the switch: a step is launched as it was set.
    lock: Any = field(default_factory=threading.RLock)

    def run(self, rows: int | None) -> Callable[..., Tensor]:
        if rows not in self.runs:
            found = _with_own_code(_run)
            if not disabled():
                settings = dataclasses.replace(self.options, on_report=self.reports.append, cudagraphs=False)
                backend = functools.partial(compile_graph, options=settings, switch=self.switch)
                found = torch.compile(found, backend=backend, fullgraph=True)
            self.runs[rows] = found
        return self.runs[rows]


_compiled: Any = WeakIdKeyDictionary()


def compiled_step(model: Any, cache: Any, options: Options, hidden: bool = False) -> Compiled:
    """The step functions of ``model`` over caches of this shape, perhaps from an earlier generation."""
    # What audits decide is not compiled; another shape under the same code would be compiled with symbolic sizes.
    layer = cache.layers[0]
    settled = dataclasses.replace(options, on_report=None, plan=dataclasses.replace(options.plan, audit=None))
    key = (settled, tuple(layer.keys.shape), layer.keys.dtype, layer.keys.device, hidden, disabled())
    known = _compiled.setdefault(model, {})
    if key not in known:
        known[key] = Compiled(settled, None if options.plan.exact else switch_of(options.plan))
    return known[key]


def _run(
    model: Any, ids: Tensor, counts: Tensor, shape: Tensor, cache: Any, kinds: tuple[str, ...], additive: Any, hidden: bool
) -> Any:
    """
    Args:
        ids: int64 ``[B, T]``, the last accepted token and the drafts.
        counts: int64 ``[B]``, drafts of each row; -1 for a finished row, which then reads a single key.
        shape: int64 ``[T, 2]``: which rows each row sees (bit i: row i) and its depth below the last accepted token.
        kinds: mask types of the model's layers.
        additive: dtype of additive masks, or None for bool.
        hidden: whether the last hidden states are wanted, too.

    Returns:
        Logits ``[B, T, V]``, or these and hidden states ``[B, T, H]`` as the output layer gets them.
    """
    rows = torch.arange(ids.shape[1], device=ids.device)
    # Rows past a row's drafts repeat its last one, position and mask included: a maximum over rows is what it was without them.
    own = torch.minimum(rows[None], counts.clamp(min=0)[:, None])
    start = cache.layers[0].cumulative_length
    seen, depth = shape[:, 0][own], shape[:, 1][own]
    positions = start[:, None] + depth
    slot = torch.arange(cache.layers[0].max_cache_len, device=ids.device)
    behind = slot[None] - start[:, None]
    drafted = (behind >= 0) & (behind < ids.shape[1])
    bits = (seen[:, :, None] >> behind.clamp(0, MOST_ROWS)[:, None]) & 1
    causal = (behind < 0)[:, None] | (drafted[:, None] & (bits == 1))
    # A forward over rows that see nothing is undefined; one key costs one block.
    causal = torch.where((counts >= 0)[:, None, None], causal, slot[None, None] == 0)
    masks = {}
    config = _text_config(model)
    for kind in kinds:
        visible = causal
        if kind != "full_attention":
            where = torch.where(drafted, start[:, None] + shape[:, 1][behind.clamp(0, ids.shape[1] - 1)], slot[None])
            if kind == "sliding_attention":
                near = where[:, None] > positions[:, :, None] - config.sliding_window
            else:
                near = where[:, None] // config.attention_chunk_size == positions[:, :, None] // config.attention_chunk_size
            visible = torch.where((counts >= 0)[:, None, None], causal & near, causal)
        visible = visible[:, None]
        if additive is not None:
            visible = torch.where(visible, 0.0, torch.finfo(additive).min).to(additive)
        masks[kind] = visible
    mask: Any = masks if _takes_dicts(model) and len(kinds) > 1 else masks[kinds[0]]
    more = {"output_hidden_states": True} if hidden else {}
    out = model(
        input_ids=ids.gather(1, own), position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True, **more
    )
    return (out.logits, out.hidden_states[-1]) if hidden else out.logits


class RowVerify:
    """Verify steps of a batch over a :class:`~spec_compile.models.row_cache.RowCache`.

    A call writes K and V behind each row's end and leaves the lengths: keep what was accepted with ``cache.commit``.

    Args:
        model: a transformers causal LM in eval mode whose forward takes ``position_ids``.
        cache: a ``RowCache``.
        options: of the backend. With ``cudagraphs`` steps on a CUDA device are captured once for each of ``sizes``; sparse ones
            in which the rows of a padding would weigh, once for each number of rows that is met.
        sizes: numbers of rows that captured steps run; a step of fewer is filled up.
        keep_hidden: leave the last hidden states of each step in ``hidden``, ``[B, T, H]``, overwritten by the next step.

    Raises:
        CacheError, OptionsError: a model or a cache that steps cannot run on.
    """

    def __init__(self, model: Any, cache: Any, options: Options, sizes: Sequence[int], keep_hidden: bool = False) -> None:
        from spec_compile.models.row_cache import RowCache

        if not isinstance(cache, RowCache):
            raise CacheError(f"steps of rows with lengths of their own need a RowCache, got {type(cache).__name__}")
        self._kinds, self._additive = mask_kinds(model)
        self.layer_kinds = _mask_types(model)
        # Prefills need no logits.
        takes = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.last_logits: dict[str, int] = {"logits_to_keep": 1} if takes else {}
        for rows in sizes:
            check_draft_len(rows - 1, min(options.max_q_len, MOST_ROWS))
        self.model, self.cache, self.sizes = model, cache, sorted(set(sizes))
        store_for(options.plan, model)
        self._step = compiled_step(model, cache, options, keep_hidden)
        self.keep_hidden, self.hidden = keep_hidden, torch.empty(0)
        self._device = cache.layers[0].device
        plan = options.plan
        attention = None if plan.attention is None or plan.attention.exact else plan.attention
        # Repeated rows change a mean over rows, and sums of votes for experts and channels; a maximum they leave as it is.
        weighs = attention is not None and (
            attention.query == "mean" or (attention.query == "all" and attention.aggregate != "max")
        )
        counts = (
            plan.moe is not None and plan.moe.expert_budget is not None,
            plan.ffn is not None and plan.ffn.budget is not None,
        )
        self.padding_votes = weighs or any(counts)
        # With the cache, so that the next generation over it need not capture again.
        self._captured: dict[tuple[int, bool], CapturedRows] = cache.captured.setdefault(self._step, {})
        self._capture = options.cudagraphs and not disabled()
        if self._capture and (reason := why_not_captured(model, cache)) is not None:
            logger.warning("cudagraphs=True: steps are compiled, but not captured: %s", reason)
            self._capture = False
        self._shapes: dict[Any, Tensor] = {}
        self._holding = False
        self._sink, self._told = options.on_report, len(self._step.reports)

    @property
    def switch(self) -> SparseSwitch | None:
        return self._step.switch

    @property
    def reports(self) -> list[RewriteReport]:
        return self._step.reports

    def __call__(
        self,
        last: Sequence[int],
        drafts: Tensor,
        counts: Sequence[int],
        parents: Sequence[int] | None = None,
        sparse: bool = False,
    ) -> Tensor:
        """Run one step.

        Args:
            last: the last accepted token of each row.
            drafts: int64 ``[B, N]``, on any device.
            counts: drafts of each row, 0..N; -1 for a row that is finished or pauses: it writes nothing that counts, and its
                logits mean nothing.
            parents: of each draft, as in :class:`~spec_compile.drafters.Draft`; None for a chain.
            sparse: whether the plan's approximations apply.

        Returns:
            Logits ``[B, T, V]``, T > N: of the last accepted token, of each draft, then of repeated rows. Overwritten by the next
            step.

        Raises:
            OptionsError: too many rows. CacheError: the cache is too short.
        """
        batch, columns = drafts.shape
        if batch != self.cache.batch or len(last) != batch or len(counts) != batch:
            raise OptionsError(f"a step takes {self.cache.batch} rows, as the cache; got {len(last)}, {batch} and {len(counts)}")
        rows = columns + 1
        if rows > self.sizes[-1]:
            raise OptionsError(f"a step of {rows} rows; this function was made for up to {self.sizes[-1]}")
        held = [n for n, count in zip(self.cache.lengths, counts) if count >= 0]
        full = next(size for size in self.sizes if size >= rows)
        if self.padding_votes and sparse and rows not in self.sizes:
            # A single row would be a graph of its own, and costs a step of two as much.
            full = max(2, rows)
        captured = self._capture and max(self.cache.lengths) + full <= self.cache.capacity
        if held and max(held) + rows > self.cache.capacity:
            self.cache.require_room(rows)
        try:
            with self._step.lock:
                if self.switch is not None:
                    self.switch.set(sparse)
                found = self._launch(last, drafts, counts, parents, full if captured else None)
        except Exception as error:
            self._raise(error)
            raise
        if self._sink is not None:
            for report in self._step.reports[self._told :]:
                self._sink(report)
            self._told = len(self._step.reports)
        return found

    @contextlib.contextmanager
    def steps_in_a_row(self) -> Iterator[None]:
        """While steps follow one another, captured ones compare the model's weights behind the device's back; weights that are
        replaced meanwhile are noticed as ever, and keep their memory until the end."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            for step in self._captured.values():
                step.release()

    def warm_up(self, kinds: Iterable[tuple[int, bool]]) -> None:
        """Compile, and capture where steps are captured, before anybody waits for a token.

        Args:
            kinds: numbers of rows, of ``sizes``, and whether a step is sparse. Sparse steps that are captured for each number of
                rows they meet (``padding_votes``) are compiled, and captured when they meet it.
        """
        batch = self.cache.batch
        for rows, sparse in kinds:
            if sparse and self.padding_votes and self._capture:
                self([0] * batch, torch.zeros(batch, 1, dtype=torch.int64), [-1] * batch, sparse=True)
            # Sequences that pause: nothing is written that counts.
            self([0] * batch, torch.zeros(batch, rows - 1, dtype=torch.int64), [-1] * batch, sparse=sparse)

    def _launch(
        self, last: Sequence[int], drafts: Tensor, counts: Sequence[int], parents: Sequence[int] | None, full: int | None
    ) -> Tensor:
        """A step as the switch stands, captured as one of ``full`` rows where that is given."""
        batch, columns = drafts.shape
        shape = self._shape(parents, columns, full or columns + 1)
        if full is not None:
            key = (full, self.switch is not None and self.switch.sparse and self._step.options.plan.two_captures)
            if key not in self._captured:
                symbolic = full not in self.sizes
                call = functools.partial(self._call, self._step.run(None if symbolic else full))
                self._captured[key] = CapturedRows(call, self.model, self.cache, batch, full, self.switch, symbolic)
            step = self._captured[key]
            step.holds = self._holding
            return self._logits(step(last, drafts, counts, shape))
        if not columns:
            drafts, shape = torch.zeros(batch, 1, dtype=torch.int64), self._shape(None, 1, 2)
        ids = torch.cat([torch.tensor(last)[:, None].to(self._device), drafts.to(self._device)], 1)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        torch._dynamo.maybe_mark_dynamic(shape, 0)
        return self._logits(self._call(self._step.run(None), ids, torch.tensor(list(counts)).to(self._device), shape))

    @torch.no_grad()
    def _call(self, run: Callable[..., Tensor], ids: Tensor, counts: Tensor, shape: Tensor) -> Any:
        return run(self.model, ids, counts, shape, self.cache, self._kinds, self._additive, self.keep_hidden)

    def _logits(self, found: Any) -> Tensor:
        if not self.keep_hidden:
            return found
        logits, self.hidden = found
        return logits

    def _shape(self, parents: Sequence[int] | None, columns: int, rows: int) -> Tensor:
        """Which rows each row sees, as bits, and depths: int64 ``[rows, 2]``; uploaded once for each shape."""
        key = (None if parents is None else tuple(parents), rows)
        if key not in self._shapes:
            if len(self._shapes) > 256:
                self._shapes.clear()
            line = list(range(-1, rows - 2)) if parents is None else [*parents, *[-1] * (rows - 1 - columns)]
            bits, depths = [1], [0]
            for place, parent in enumerate(line, 1):
                bits.append(bits[parent + 1] | 1 << place)
                depths.append(depths[parent + 1] + 1)
            with torch.inference_mode(False):
                self._shapes[key] = torch.tensor(list(zip(bits, depths))).to(self._device)
        return self._shapes[key]

    def _raise(self, error: Exception) -> None:
        inner = getattr(error, "inner_exception", None)
        if isinstance(inner, SpecCompileError):
            raise inner from None
        if not isinstance(error, torch._dynamo.exc.TorchDynamoException) or inner is not None:
            return
        if has_expert_loop(self.model):
            raise OptionsError(EXPERT_LOOP) from error
        if self.cache.batch > 1:
            raise OptionsError(
                f"{type(self.model).__name__} could not be traced over sequences of unequal lengths, perhaps because it reads "
                "one length for all of them: generate one sequence at a time"
            ) from error

    def report(self) -> RewriteReport | None:
        """Report of the newest compiled verify graph; None before the first step."""
        verify = [report for report in self.reports if report.kind == "verify"]
        return next(iter(reversed(verify or self.reports)), None)


def mask_kinds(model: Any) -> tuple[tuple[str, ...], torch.dtype | None]:
    """Mask types of the model's layers, and the dtype of its additive masks (None: bool).

    Raises:
        OptionsError: a model that takes no positions, or masks of another kind.
    """
    config = _text_config(model)
    name = type(model).__name__
    if config is None or not hasattr(model, "forward"):
        raise OptionsError(f"generate needs a transformers causal LM, got {name}")
    names = inspect.signature(model.forward).parameters
    if not {"past_key_values", "position_ids", "attention_mask"} <= names.keys():
        raise OptionsError(
            f"{name}.forward takes no position_ids: rows of unequal lengths cannot be told their positions. Use transformers' "
            "generate with model.compile(backend='spec_compile') instead"
        )
    kinds = tuple(dict.fromkeys(_mask_types(model))) or ("full_attention",)
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "chunked_attention")]
    if unknown:
        raise OptionsError(f"{name}: masks for layers of kind {unknown[0]!r} are not known; use transformers' generate")
    used = config._attn_implementation
    if used in ("sdpa", "spec_compile"):
        return kinds, None
    if used == "eager":
        return kinds, model.dtype
    raise OptionsError(
        f"{name} uses attn_implementation={used!r}, whose masks differ: load it with attn_implementation='sdpa' or 'eager'"
    )
