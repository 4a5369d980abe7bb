"""A graph compiler that makes the verify forward of speculative decoding fast, exactly.

``torch.compile(model, backend="spec_compile")`` needs no import of this package; see the README for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spec_compile._version import __version__

if TYPE_CHECKING:
    from spec_compile.calibrate import moe_calibrate
    from spec_compile.calibrate_ffn import ffn_calibrate
    from spec_compile.explainer import explain
    from spec_compile.models.cache import VerifyCache
    from spec_compile.models.hooks import prepare, restore
    from spec_compile.plan import AttentionPlan, AuditPlan, FfnCalibration, FfnPlan, MoeCalibration, MoePlan, SparsityPlan
    from spec_compile.report import RewriteReport
    from spec_compile.verify import VerifyFunction, compile_verify

# Loaded on first use: importing the package costs no more than importing torch, and needs nothing else.
_HOME = {
    "AttentionPlan": "spec_compile.plan",
    "AuditPlan": "spec_compile.plan",
    "FfnCalibration": "spec_compile.plan",
    "FfnPlan": "spec_compile.plan",
    "MoeCalibration": "spec_compile.plan",
    "MoePlan": "spec_compile.plan",
    "SparsityPlan": "spec_compile.plan",
    "RewriteReport": "spec_compile.report",
    "VerifyCache": "spec_compile.models.cache",
    "VerifyFunction": "spec_compile.verify",
    "compile_verify": "spec_compile.verify",
    "explain": "spec_compile.explainer",
    "ffn_calibrate": "spec_compile.calibrate_ffn",
    "moe_calibrate": "spec_compile.calibrate",
    "prepare": "spec_compile.models.hooks",
    "restore": "spec_compile.models.hooks",
}

__all__ = [
    "AttentionPlan", "AuditPlan", "FfnCalibration", "FfnPlan", "MoeCalibration", "MoePlan", "RewriteReport", "SparsityPlan",
    "VerifyCache", "VerifyFunction", "__version__", "compile_verify", "explain", "ffn_calibrate", "moe_calibrate", "prepare",
    "restore",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spec_compile' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
