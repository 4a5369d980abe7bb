"""Which layers select blocks and which reuse another layer's selection: the plan's words applied to a graph's layers.

Reuse across layers is the observation of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv
2512.21911, section 3.3) and of IndexCache; the plan uses the names of vLLM and TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_compile.errors import PlanError


class ReusePlan(Protocol):
    """The fields of ``spec_compile.AttentionPlan`` that are read here; passes do not import the compiler on top of them."""

    @property
    def index_topk_freq(self) -> int | None: ...
    @property
    def index_skip_topk_offset(self) -> int | None: ...
    @property
    def index_topk_pattern(self) -> str | None: ...
    @property
    def anchors(self) -> tuple[int, ...] | None: ...
    @property
    def include(self) -> tuple[int, ...] | None: ...
    @property
    def exclude(self) -> tuple[int, ...]: ...
    @property
    def dense_first(self) -> int: ...


@dataclass(frozen=True)
class LayerKind:
    """An attention layer as far as reuse is concerned.

    Attributes:
        name: for messages.
        geometry: what must agree before a selection may be shared: KV heads, cache length, mask.
        rewritten: whether the detector proved it; others stay dense.
    """

    name: str
    geometry: Hashable
    rewritten: bool = True


@dataclass(frozen=True)
class Role:
    """``dense``, ``anchor`` (selects) or ``follower`` (reuses the selection of layer ``anchor``)."""

    kind: str
    anchor: int | None = None
    note: str = ""


def assign_roles(plan: ReusePlan, layers: Sequence[LayerKind]) -> list[Role]:
    """Role of every attention layer, in graph order.

    A layer is sparse if it was rewritten, is not excluded, is included where a list says so, and is not among the first
    ``dense_first``. Of the sparse ones ``index_topk_pattern`` (one letter a
    layer, F selects, S shares), ``anchors``, or ``index_topk_freq`` f with ``index_skip_topk_offset`` o (layer i where
    ``max(i - o + 1, 0) % f == 0``, o = 1 if not given) name those that select; without any of them all do.
    A layer that should follow selects itself where no earlier selection fits its geometry; its note says so.

    Raises:
        PlanError: the plan names a layer that the graph does not have, a pattern of another length, or an anchor that is dense.
    """
    total = len(layers)
    for field in ("anchors", "include", "exclude"):
        for layer in getattr(plan, field) or ():
            if layer >= total:
                raise PlanError(
                    f"plan.attention.{field}: layer {layer} does not exist, the model has attention layers 0..{total - 1}"
                )
    pattern = plan.index_topk_pattern
    if pattern is not None and len(pattern) != total:
        missing = f"layer {len(pattern)} has no letter" if len(pattern) < total else f"layer {total} does not exist"
        raise PlanError(f"plan.attention.index_topk_pattern: {len(pattern)} letters for {total} attention layers: {missing}")
    roles: list[Role] = []
    latest: dict[Hashable, int] = {}
    for index, layer in enumerate(layers):
        dense = _why_dense(plan, index, layer)
        if dense:
            if index in (plan.anchors or ()):
                raise PlanError(f"plan.attention.anchors: layer {index} ({layer.name}) cannot select, it stays dense: {dense}")
            roles.append(Role("dense", note=dense))
            continue
        fitting = latest.get(layer.geometry)
        if _selects(plan, index):
            roles.append(Role("anchor"))
        elif fitting is None:
            reason = (
                "the first sparse layer selects" if not latest else "no earlier selection has its KV heads, cache length and mask"
            )
            roles.append(Role("anchor", note=reason))
        else:
            roles.append(Role("follower", fitting))
            continue
        latest[layer.geometry] = index
    return roles


def _why_dense(plan: ReusePlan, index: int, layer: LayerKind) -> str:
    if not layer.rewritten:
        return "not rewritten"
    if index < plan.dense_first:
        return f"among the first {plan.dense_first} layers"
    if index in plan.exclude:
        return "excluded"
    return "not included" if plan.include is not None and index not in plan.include else ""


def _selects(plan: ReusePlan, index: int) -> bool:
    if plan.index_topk_pattern is not None:
        return plan.index_topk_pattern[index] == "F"
    if plan.anchors is not None:
        return index in plan.anchors
    offset = 1 if plan.index_skip_topk_offset is None else plan.index_skip_topk_offset
    return max(index - offset + 1, 0) % (plan.index_topk_freq or 1) == 0
