"""Sparsity plans: what may be approximated, where, and by how much. The default plan is exact.

The vocabulary is the one serving engines use: ``budget``, ``block_size``, ``sink``, ``recent``, ``index_topk_freq``,
``index_skip_topk_offset`` and ``index_topk_pattern`` (vLLM, TensorRT-LLM), ``expert_budget``. The method is that of
"Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv 2512.21911).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_compile.errors import PlanError
from spec_compile.files import write_whole

SCHEMA_VERSION = 1


def _check(ok: bool, where: str, text: str) -> None:
    if not ok:
        raise PlanError(f"plan.{where}: {text}")


def _check_types(plan: Any, section: str = "") -> None:
    hints = typing.get_type_hints(type(plan))
    for name in (f.name for f in dataclasses.fields(plan)):
        value = getattr(plan, name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(plan, name, value)
        _check(_fits(value, hints[name]), section + name, f"expected {_spell(hints[name])}, got {value!r}")


def _layers(plan: Any, section: str, *names: str) -> None:
    for name in names:
        layers = getattr(plan, name) or ()
        _check(all(layer >= 0 for layer in layers), f"{section}.{name}", f"layers count from 0, got {layers}")


def _positive(value: int | None, where: str) -> None:
    _check(value is None or value >= 1, where, f"must be at least 1, got {value}")


def _fraction(value: float | None, where: str) -> None:
    _check(value is None or 0.0 <= value <= 1.0, where, f"must lie in 0..1, got {value}")


@dataclass(frozen=True)
class AttentionPlan:
    """Block-sparse attention over the KV cache.

    The defaults are the fastest of those measured on a GPU: blocks of 64, scored by all rows. ``block_size=16,
    aggregate="softmax", index_topk_freq=2`` lost least quality at equal bytes, for a slower selection (both in
    benchmarks/RESULTS.md). The paper's setting is ``block_size=64, query="first"``.

    Attributes:
        budget: keys read per KV head: an int counts tokens, at least one block; a float in (0, 1] is a fraction of the live
            keys, None reads all.
        budget_floor: L0 of the paper's law ``floor((L - L0) * rho + L0)``, with ``budget`` as rho; tokens.
        block_size: keys per block: 8, 16, 32, 64 or 128.
        sink, recent: leading and trailing blocks that are always kept.
        min_context: live keys below which every block is read; tokens.
        representative: what stands for a block: ``mean``, ``min_max`` or ``exact`` (softmax mass).
        query: which draft rows score: ``first``, ``first_last``, ``all`` or ``mean``.
        aggregate: over the scoring rows and the query heads of a group: ``max``, ``mean``, or ``softmax`` (mean of their
            softmaxes over the blocks).
        heads: ``own`` selection per KV head, or ``pooled`` over them.
        joint: one contest over (head, block) pairs instead of one per head.
        index_topk_freq, index_skip_topk_offset, index_topk_pattern, anchors: which layers select and which reuse; give
            at most one of frequency, pattern and explicit anchors. A pattern has one letter a layer, ``"FSSF"``: F selects
            (full), S reuses the last selection (shared), as in transformers; with a frequency f and an offset o, layer
            i selects where ``max(i - o + 1, 0) % f == 0`` (transformers' GLM-MoE-DSA), o = 1 by default: every f-th layer.
        include, exclude: layer indices; ``dense_first`` leading layers stay dense. Attentions are counted within a graph: after
            a graph break each piece starts at 0 (``compile_verify`` allows no break).
    """

    budget: int | float | None = None
    budget_floor: int | None = None
    block_size: int = 64
    sink: int = 1
    recent: int = 2
    min_context: int = 0
    representative: str = "mean"
    query: str = "all"
    aggregate: str = "max"
    heads: str = "own"
    joint: bool = False
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    index_topk_pattern: str | None = None
    anchors: tuple[int, ...] | None = None
    include: tuple[int, ...] | None = None
    exclude: tuple[int, ...] = ()
    dense_first: int = 0

    def __post_init__(self) -> None:
        _check_types(self, "attention.")
        if isinstance(self.budget, float):
            _check(0.0 < self.budget <= 1.0, "attention.budget", f"a fraction must lie in (0, 1], got {self.budget}")
        else:
            _positive(self.budget, "attention.budget")
        _positive(self.budget_floor, "attention.budget_floor")
        _check(
            self.budget_floor is None or isinstance(self.budget, float),
            "attention.budget_floor", "needs a fractional budget (rho)",
        )  # fmt: skip
        sizes = (8, 16, 32, 64, 128)
        _check(self.block_size in sizes, "attention.block_size", f"must be one of {sizes}, got {self.block_size}")
        _check(
            not isinstance(self.budget, int) or self.budget >= self.block_size,
            "attention.budget", f"{self.budget} tokens are less than a block of {self.block_size}; a share is a float (all: 1.0)",
        )  # fmt: skip
        for name in ("sink", "recent", "min_context", "dense_first"):
            _check(getattr(self, name) >= 0, f"attention.{name}", f"must not be negative, got {getattr(self, name)}")
        for name, allowed in (
            ("representative", ("mean", "min_max", "exact")),
            ("query", ("first", "first_last", "all", "mean")),
            ("aggregate", ("max", "mean", "softmax")),
            ("heads", ("own", "pooled")),
        ):
            found = getattr(self, name)
            _check(found in allowed, f"attention.{name}", f"must be one of {allowed}, got {found!r}")
        _positive(self.index_topk_freq, "attention.index_topk_freq")
        offset = self.index_skip_topk_offset
        _check(offset is None or offset >= 0, "attention.index_skip_topk_offset", f"must not be negative, got {offset}")
        pattern = self.index_topk_pattern
        if pattern is not None:
            _check(
                bool(pattern) and set(pattern) <= set("SF"),
                "attention.index_topk_pattern", f"must be a string of F and S, got {pattern!r}",
            )  # fmt: skip
            _check(pattern[0] == "F", "attention.index_topk_pattern", f"layer 0 must select (F), got {pattern!r}")
        given = [n for n in ("index_topk_freq", "index_topk_pattern", "anchors") if getattr(self, n) is not None]
        _check(len(given) <= 1, "attention", f"{' and '.join(given)} exclude each other")
        _layers(self, "attention", "anchors", "include", "exclude")

    @property
    def exact(self) -> bool:
        return self.budget is None


@dataclass(frozen=True)
class FfnCalibration:
    """What :func:`spec_compile.ffn_calibrate` measured: sparse steps against exact ones over the same held-out text.

    Attributes:
        rows: rows of a step.
        threshold: tried in every layer.
        unions: per layer, share of channels that a step of ``rows`` rows keeps, mean.
        kept: per layer, share of channels that a row keeps, mean.
        pays_below: union below which a layer was made sparse; the others stay exact.
        held_out: positions measured.
        kl: mean KL divergence of the sparse next-token distribution from the exact one, nats.
        flips: share of positions whose most likely token changed.
        forced: whether the plan is past the limits it was given.
    """

    rows: int = 0
    threshold: float = 0.0
    unions: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    pays_below: float = 1.0
    held_out: int = 0
    kl: float = 0.0
    flips: float = 0.0
    forced: bool = False

    def __post_init__(self) -> None:
        _check_types(self, "ffn.calibration.")
        for name in ("threshold", "pays_below", "kl", "flips"):
            value = getattr(self, name)
            _check(math.isfinite(value), f"ffn.calibration.{name}", f"must be finite, got {value}")


@dataclass(frozen=True)
class FfnPlan:
    """Feed-forward layers that skip channels in sparse steps: the activation is computed for all of them, rows of the other first
    weight and columns of the last one are read for those that are kept.

    Attributes:
        threshold: a row skips channels with ``|act| < threshold`` (the paper's tau). ``"auto"``: by layer, as
            :func:`spec_compile.ffn_calibrate` measured that it pays.
        thresholds: per feed-forward layer, instead of one for all; 0 keeps a layer exact.
        budget: fraction of the channels that all rows of a step keep: those with the largest sums of squared activations. All
            rows of a call vote: those of every sequence of a batch, and rows that a caller fills up. On a GPU layers stay exact
            under a budget that was not measured to pay, and the report says so.
        joint: with a threshold, a channel that one row keeps is kept by all rows: the same bytes, and closer to the exact step.
        include, exclude: feed-forward layers, counted from 0 among those of a graph, shared experts included; ``dense_first``
            leading ones stay exact.
        calibration: how far the plan was measured to be from the model, if it was.
    """

    threshold: float | str | None = None
    budget: float | None = None
    include: tuple[int, ...] | None = None
    exclude: tuple[int, ...] = ()
    thresholds: tuple[float, ...] | None = None
    joint: bool = False
    dense_first: int = 0
    calibration: FfnCalibration | None = None

    def __post_init__(self) -> None:
        _check_types(self, "ffn.")
        _check(self.dense_first >= 0, "ffn.dense_first", f"must not be negative, got {self.dense_first}")
        if self.thresholds is not None:
            _check(self.threshold in (None, "auto"), "ffn", "threshold and thresholds exclude each other")
            _check(self.budget is None, "ffn", "thresholds and budget exclude each other")
            for layer, threshold in enumerate(self.thresholds):
                ok = threshold >= 0 and math.isfinite(threshold)
                _check(ok, f"ffn.thresholds[{layer}]", f"must be finite and not negative, got {threshold}")
        if isinstance(self.threshold, str):
            _check(self.threshold == "auto", "ffn.threshold", f"must be a number or 'auto', got {self.threshold!r}")
        elif self.threshold is not None:
            ok = self.threshold >= 0 and math.isfinite(self.threshold)
            _check(ok, "ffn.threshold", f"must be finite and not negative, got {self.threshold}")
        _fraction(self.budget, "ffn.budget")
        _check(self.threshold is None or self.budget is None, "ffn", "threshold and budget exclude each other")
        _layers(self, "ffn", "include", "exclude")

    @property
    def rows_vote(self) -> bool:
        """Whether what one row keeps depends on the other rows of a step."""
        return not self.exact and (self.joint or self.budget is not None)

    @property
    def exact(self) -> bool:
        """Whether no channel can be skipped, whatever the model."""
        if self.thresholds is not None:
            return not any(self.thresholds)
        return self.budget is None and self.threshold in (None, 0, 0.0)


@dataclass(frozen=True)
class MoeCalibration:
    """What :func:`spec_compile.moe_calibrate` measured: sparse steps against exact ones over the same held-out text.

    Attributes:
        tokens: calibrated on. held_out: positions measured.
        kl: mean KL divergence of the sparse next-token distribution from the exact one, nats.
        flips: share of positions whose most likely token changed.
        kept: mean experts a row keeps, of ``chosen``; ``distinct`` experts a step and layer reads, of ``distinct_exact``.
        baseline_top_k, baseline_kl, baseline_flips: the static rule that keeps about as many, for comparison.
        forced: whether the plan is past the limits it was given.
    """

    tokens: int = 0
    held_out: int = 0
    kl: float = 0.0
    flips: float = 0.0
    kept: float = 0.0
    chosen: int = 0
    distinct: float = 0.0
    distinct_exact: float = 0.0
    baseline_top_k: int | None = None
    baseline_kl: float | None = None
    baseline_flips: float | None = None
    forced: bool = False

    def __post_init__(self) -> None:
        _check_types(self, "moe.calibration.")
        for name, value in vars(self).items():
            finite = not isinstance(value, float) or math.isfinite(value)
            _check(finite, f"moe.calibration.{name}", f"must be finite, got {value}")


@dataclass(frozen=True)
class MoePlan:
    """Expert skipping, in sparse steps. A row never loses its top expert; rules can be combined.

    Attributes:
        skip: how many of a row's lowest experts may be dropped (the paper's m): together, or none of them.
        betas: per MoE layer, the share of the row's weight that they must stay below (from :func:`spec_compile.moe_calibrate`;
            0 keeps a layer exact).
        ratio: drop experts whose weight is below this ratio to the row's top weight.
        top_k: static number of experts kept per row (the baseline).
        expert_budget: distinct experts over all draft rows. The rows' top experts come first and are kept even where they alone
            are more; the others by the sum of their kept weights. All rows of a call share it and vote: those of every sequence
            of a batch, and rows that a caller fills up (drafts of unequal length), which are not told from drafts.
        substitute: replace an expert that the budget drops by the row's best one within the budget.
        renormalize: whether weights of a row that lost experts are scaled to the sum they had; None follows the model.
        include, exclude: MoE layers, counted from 0 among the MoE layers of a graph; ``dense_first`` leading ones stay exact.
        calibration: how far the plan was measured to be from the model, if it was.
    """

    skip: int | None = None
    betas: tuple[float, ...] | None = None
    ratio: float | None = None
    top_k: int | None = None
    expert_budget: int | None = None
    substitute: bool = False
    renormalize: bool | None = None
    include: tuple[int, ...] | None = None
    exclude: tuple[int, ...] = ()
    dense_first: int = 0
    calibration: MoeCalibration | None = None

    def __post_init__(self) -> None:
        _check_types(self, "moe.")
        _layers(self, "moe", "include", "exclude")
        _check(self.dense_first >= 0, "moe.dense_first", f"must not be negative, got {self.dense_first}")
        for name in ("skip", "top_k", "expert_budget"):
            _positive(getattr(self, name), f"moe.{name}")
        _fraction(self.ratio, "moe.ratio")
        if self.betas is not None:
            _check(len(self.betas) > 0, "moe.betas", "needs a share for every MoE layer, got none")
            for layer, beta in enumerate(self.betas):
                _fraction(beta, f"moe.betas[{layer}]")
        _check((self.skip is None) == (self.betas is None), "moe.betas", "skip and betas go together")
        _check(not self.substitute or self.expert_budget is not None, "moe.substitute", "needs expert_budget")

    @property
    def exact(self) -> bool:
        """Whether no rule can take an expert away, whatever the model."""
        return not self.ratio and not any(self.betas or ()) and self.top_k is None and self.expert_budget is None


@dataclass(frozen=True)
class AuditPlan:
    """The lossless mode: sparse steps run ahead, one dense verify over the pending tokens checks them.

    Attributes:
        window: most pending tokens of a sequence, 2..32; an audit has 32 rows, so that 31 are in use at most.
        margin: top-1 logit margin of a sparse step below which a token forces an audit; None for none.
        adapt: end windows where the next sparse step is not worth its bytes by the agreement measured so far, and take dense
            steps where none is; otherwise windows are filled.
        cost: what such bytes are: ``all`` (weights and cache: the time of a step that is bound by memory) or ``kv`` (the cache
            alone: where it lies in slower memory, or weights are shared by many sequences).
    """

    window: int = 32
    margin: float | None = None
    adapt: bool = True
    cost: str = "all"

    def __post_init__(self) -> None:
        _check_types(self, "audit.")
        _check(2 <= self.window <= 32, "audit.window", f"must lie in 2..32, got {self.window}")
        _check(self.margin is None or self.margin >= 0, "audit.margin", f"must not be negative, got {self.margin}")
        _check(self.cost in ("all", "kv"), "audit.cost", f"must be 'all' or 'kv', got {self.cost!r}")


@dataclass(frozen=True)
class SparsityPlan:
    """A whole plan: one section per axis, each None where that axis is exact.

    JSON round trip by :meth:`save` and :meth:`load`; unknown keys are errors.
    """

    attention: AttentionPlan | None = None
    ffn: FfnPlan | None = None
    moe: MoePlan | None = None
    audit: AuditPlan | None = None
    version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        _check_types(self)
        _check(
            self.version == SCHEMA_VERSION,
            "version", f"this version reads schema {SCHEMA_VERSION}, the plan has {self.version}",
        )  # fmt: skip

    @property
    def exact(self) -> bool:
        """Whether the plan approximates nothing."""
        return all(part is None or part.exact for part in (self.attention, self.ffn, self.moe))

    @property
    def rows_vote(self) -> bool:
        """Whether rows of a step share a selection or a budget, so that a row that only fills it up would take part."""
        selects = self.attention is not None and not self.attention.exact
        limits = self.moe is not None and self.moe.expert_budget is not None
        return selects or limits or (self.ffn is not None and self.ffn.rows_vote)

    @property
    def two_captures(self) -> bool:
        """Whether exact steps launch other kernels than sparse ones, and not the same with a switch."""
        return self.ffn is not None and not self.ffn.exact

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; sections that are None are left out."""
        raw = dataclasses.asdict(self)
        for section in ("ffn", "moe"):
            if raw[section] is not None and raw[section]["calibration"] is None:
                del raw[section]["calibration"]
        return {key: value for key, value in raw.items() if value is not None}

    @classmethod
    def from_dict(cls, raw: Any) -> SparsityPlan:
        """Read :meth:`to_dict`'s form.

        Raises:
            PlanError: unknown key, wrong type or bad value; the message names the field.
        """
        return _read(cls, raw, "plan")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file is replaced whole or not at all."""
        write_whole(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SparsityPlan:
        """Read a plan file.

        Raises:
            PlanError: the file is missing, is not JSON, or is not a valid plan.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"plan file {os.fspath(path)}: {error.strerror or error}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanError(f"plan file {os.fspath(path)} is not JSON: {error}") from None
        return cls.from_dict(raw)

    @classmethod
    def coerce(cls, given: Any) -> SparsityPlan:
        """A plan from None (exact), a plan, a dict or a path."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, str | os.PathLike):
            return cls.load(given)
        return cls.from_dict(given)

    def require_supported(self) -> None:
        """
        Raises:
            PlanError: ``plan.ffn.threshold="auto"`` without the thresholds of a calibration.
        """
        if self.ffn is not None and self.ffn.threshold == "auto" and self.ffn.thresholds is None:
            raise PlanError(
                'plan.ffn.threshold: "auto" needs text to measure: spec_compile.ffn_calibrate(model, texts) makes the section; '
                "or give a number"
            )


_SECTIONS: dict[Any, dict[str, Any]] = {
    SparsityPlan: {"attention": AttentionPlan, "ffn": FfnPlan, "moe": MoePlan, "audit": AuditPlan},
    FfnPlan: {"calibration": FfnCalibration},
    MoePlan: {"calibration": MoeCalibration},
}


def _read(cls: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise PlanError(f"{where}: must be an object with keys, got {type(raw).__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = [key for key in raw if key not in fields]
    if unknown:
        raise PlanError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(fields)}")
    values: dict[str, Any] = {}
    for key, given in raw.items():
        if key in _SECTIONS.get(cls, {}) and isinstance(given, dict):
            given = _read(_SECTIONS[cls][key], given, f"{where}.{key}")
        values[key] = given
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    return str(hint).replace("<class '", "").replace("'>", "").replace("spec_compile.plan.", "").replace("NoneType", "None")
