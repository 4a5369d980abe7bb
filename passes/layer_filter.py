"""Which layers a section of a plan leaves out: the fields that sections for attention and for experts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spec_compile.errors import PlanError


class FilterPlan(Protocol):
    """The fields read here."""

    @property
    def include(self) -> tuple[int, ...] | None: ...
    @property
    def exclude(self) -> tuple[int, ...]: ...
    @property
    def dense_first(self) -> int: ...


def require_layers(plan: object, section: str, fields: Sequence[str], noun: str, total: int) -> None:
    """
    Raises:
        PlanError: one of ``fields`` names a layer past the ``total`` that the model has.
    """
    for field in fields:
        for layer in getattr(plan, field) or ():
            if layer >= total:
                raise PlanError(
                    f"plan.{section}.{field}: layer {layer} does not exist, the model has {noun} layers 0..{total - 1}"
                )


def why_left_out(plan: FilterPlan, index: int, noun: str = "") -> str:
    """Why the plan leaves layer ``index`` as it is, "" where it does not."""
    if index < plan.dense_first:
        return f"among the first {plan.dense_first} {noun + ' ' if noun else ''}layers"
    if index in plan.exclude:
        return "excluded"
    return "not included" if plan.include is not None and index not in plan.include else ""
