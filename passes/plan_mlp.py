"""What a plan makes of each feed-forward layer of a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spec_compile.errors import PlanError
from spec_compile.kernels.mlp import PAYS_BELOW, rows_of, why_no_sparse_kernel
from spec_compile.passes.base import Rejection
from spec_compile.passes.layer_filter import FilterPlan, require_layers, why_left_out
from spec_compile.passes.mlp_match import MlpMatch
from spec_compile.passes.nodes import hint, tensor


class ChannelPlan(FilterPlan, Protocol):
    """The fields of ``spec_compile.FfnPlan`` that are read here."""

    @property
    def threshold(self) -> float | str | None: ...
    @property
    def thresholds(self) -> tuple[float, ...] | None: ...
    @property
    def budget(self) -> float | None: ...
    @property
    def joint(self) -> bool: ...
    @property
    def calibration(self) -> Any: ...


@dataclass(frozen=True)
class ChannelRule:
    """Numbers as in :func:`spec_compile.kernels.library.mlp_sparse`; all are 0 where the layer stays exact, for the reason
    ``note``. ``union``: share of the channels that a step reads, 1 where that is not known. ``measured`` says what a calibration
    found, or that there was none."""

    threshold: float = 0.0
    keep: int = 0
    joint: bool = False
    note: str = ""
    measured: str = ""
    union: float = 1.0

    def words(self) -> str:
        """What a report says of it, "" for an exact layer."""
        if self.note:
            return ""
        if self.keep:
            text = f"keeps {self.keep} channels for all rows"
        else:
            text = f"skips channels below {self.threshold:g}" + (" in all rows" if self.joint else "")
        return text + (f", {self.measured}" if self.measured else "")


def assign_channels(plan: ChannelPlan, layers: Sequence[MlpMatch | Rejection]) -> list[ChannelRule]:
    """Rules of every feed-forward layer, in graph order.

    Raises:
        PlanError: the plan names a layer that the graph does not have, or has not one threshold for each.
    """
    total = len(layers)
    require_layers(plan, "ffn", ("include", "exclude"), "feed-forward", total)
    if plan.thresholds is not None and len(plan.thresholds) != total:
        given = len(plan.thresholds)
        missing = f"layer {given} has none" if given < total else f"layer {total} does not exist"
        raise PlanError(f"plan.ffn.thresholds: {given} thresholds for {total} feed-forward layers: {missing}")
    return [_rule(plan, index, layer) for index, layer in enumerate(layers)]


def _rule(plan: ChannelPlan, index: int, layer: MlpMatch | Rejection) -> ChannelRule:
    if isinstance(layer, Rejection):
        return ChannelRule(note=f"not rewritten: {layer.reason}")
    left_out = why_left_out(plan, index, "feed-forward")
    if left_out:
        return ChannelRule(note=left_out)
    x = tensor(layer.x)
    assert x is not None
    device, measured = x.device.type, _measured(plan, index)
    if plan.budget is not None:
        keep = max(1, math.ceil(plan.budget * layer.inner))
        if keep >= layer.inner:
            return ChannelRule(note=f"the budget covers its {layer.inner} channels")
        if device == "cuda" and plan.budget > PAYS_BELOW[device]:
            most = PAYS_BELOW[device]
            return ChannelRule(note=f"does not pay: skipping channels was measured to be faster up to {most:.0%} of them alone")
        rule = ChannelRule(keep=keep, joint=True, measured=measured, union=keep / layer.inner)
    else:
        threshold = plan.thresholds[index] if plan.thresholds is not None else plan.threshold
        assert threshold is not None and not isinstance(threshold, str)
        if threshold == 0:
            return ChannelRule(note=f"does not pay: {measured}" if measured else "its threshold is 0")
        if device == "cuda" and not measured:
            measured = "whether that pays was not measured (ffn_calibrate)"
        rule = ChannelRule(threshold=float(threshold), joint=plan.joint, measured=measured, union=_union(plan, index) or 1.0)
    refusal = _why_dense(layer)
    return ChannelRule(note=refusal) if refusal else rule


def _union(plan: ChannelPlan, index: int) -> float | None:
    found = plan.calibration
    return None if found is None or index >= len(found.unions) else found.unions[index]


def _measured(plan: ChannelPlan, index: int) -> str:
    union = _union(plan, index)
    return "" if union is None else f"{union:.1%} of its channels in the union of {plan.calibration.rows} rows"


def _why_dense(layer: MlpMatch) -> str:
    """Where a GPU has no kernel for it, skipping channels would copy weights: such layers stay as they are."""
    x, up, down = tensor(layer.x), tensor(layer.up.weight), tensor(layer.down.weight)
    assert x is not None and up is not None and down is not None
    if x.device.type != "cuda":
        return ""
    if hint(rows_of(x)) is None:
        return "its rows depend on data"
    up = up.t() if layer.up.transposed else up
    down = down.t() if layer.down.transposed else down
    return why_no_sparse_kernel(x, None, up, down) or ""
