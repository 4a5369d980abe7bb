"""Options of the backend: ``torch.compile(model, backend="spec_compile", options={...})``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spec_compile.errors import OptionsError
from spec_compile.plan import SparsityPlan

MAX_ROWS = 64


def disabled() -> bool:
    """``SPEC_COMPILE_DISABLE=1`` turns everything off."""
    return os.environ.get("SPEC_COMPILE_DISABLE", "") not in ("", "0")


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        plan: None, a :class:`~spec_compile.plan.SparsityPlan`, its dict, or a path to its JSON; default exact.
        strict: errors instead of warnings: an attention or MoE layer of a verify forward that is not rewritten, a recompile
            limit about to be hit.
        cudagraphs: run the step under CUDA graphs (also chosen by ``mode="reduce-overhead"``); ignored on CPU.
        max_q_len: largest number of draft rows that counts as a verify forward, 1..64.
        block_size: keys per block of the live-block list.
        lowering: ``auto``, ``triton``, ``folded`` or ``reference`` (the specification; slow).
        codegen: ``inductor``, or ``eager`` to run the rewritten graph as it is, for debugging.
        dump: folder for graphs before and after each pass (also ``SPEC_COMPILE_DUMP``).
        on_report: called with each :class:`~spec_compile.report.RewriteReport`.
    """

    plan: SparsityPlan = field(default_factory=SparsityPlan)
    strict: bool = False
    cudagraphs: bool = False
    max_q_len: int = 32
    block_size: int = 64
    lowering: str = "auto"
    codegen: str = "inductor"
    dump: str | None = None
    on_report: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        for name in ("strict", "cudagraphs"):
            if not isinstance(getattr(self, name), bool):
                raise OptionsError(f"options[{name!r}] must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.max_q_len, int) or isinstance(self.max_q_len, bool) or not 1 <= self.max_q_len <= MAX_ROWS:
            raise OptionsError(f"options['max_q_len'] must lie in 1..{MAX_ROWS}, got {self.max_q_len!r}")
        if not isinstance(self.block_size, int) or self.block_size not in (8, 16, 32, 64, 128):
            raise OptionsError(f"options['block_size'] must be 8, 16, 32, 64 or 128, got {self.block_size!r}")
        for name, allowed in (("lowering", ("auto", "triton", "folded", "reference")), ("codegen", ("inductor", "eager"))):
            if getattr(self, name) not in allowed:
                raise OptionsError(f"options[{name!r}] must be one of {allowed}, got {getattr(self, name)!r}")

        if self.dump is not None and not isinstance(self.dump, str | os.PathLike):
            raise OptionsError(f"options['dump'] must be a folder, got {self.dump!r}")
        if self.on_report is not None and not callable(self.on_report):
            raise OptionsError(f"options['on_report'] must be callable, got {self.on_report!r}")

    @classmethod
    def parse(cls, options: dict[str, Any] | None, mode: str | None = None) -> Options:
        """From what ``torch.compile`` hands to a backend.

        Raises:
            OptionsError: unknown key, bad value or unknown mode.
            PlanError: a bad plan.
        """
        given = dict(options or {})
        known = {f.name for f in dataclasses.fields(cls)}
        for key in given:
            if key not in known:
                raise OptionsError(f"unknown option {key!r}; known options are {', '.join(sorted(known))}")
        if mode not in (None, "default", "reduce-overhead"):
            raise OptionsError(f"mode={mode!r} is not supported; use mode=None or 'reduce-overhead' (CUDA graphs)")
        if mode == "reduce-overhead":
            given.setdefault("cudagraphs", True)
        plan = SparsityPlan.coerce(given.pop("plan", None))
        plan.require_supported()
        given.setdefault("dump", os.environ.get("SPEC_COMPILE_DUMP") or None)
        return cls(plan=plan, **given)
