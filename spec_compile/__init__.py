"""A graph compiler that makes the verify forward of speculative decoding fast, exactly.

``torch.compile(model, backend="spec_compile")`` needs no import of this package; see the README for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spec_compile._version import __version__

if TYPE_CHECKING:
    from spec_compile.attachment import attach
    from spec_compile.calibrate import moe_calibrate
    from spec_compile.calibrate_ffn import ffn_calibrate
    from spec_compile.drafters import Draft, Drafter, PromptLookup
    from spec_compile.drafters_model import AssistantModel, DraftHead, EarlyExit
    from spec_compile.explainer import explain
    from spec_compile.export_load import LoadedVerify, load
    from spec_compile.exporter import export
    from spec_compile.generation import GenerateOutput, generate
    from spec_compile.metrics import DecodingMetrics
    from spec_compile.models.cache import VerifyCache
    from spec_compile.models.hooks import prepare, restore
    from spec_compile.models.row_cache import RowCache
    from spec_compile.plan import AttentionPlan, AuditPlan, FfnCalibration, FfnPlan, MoeCalibration, MoePlan, SparsityPlan
    from spec_compile.report import RewriteReport
    from spec_compile.verify import VerifyFunction, compile_verify

# Loaded on first use: importing the package costs no more than importing torch, and needs nothing else.
_HOME = {
    "AssistantModel": "spec_compile.drafters_model",
    "AttentionPlan": "spec_compile.plan",
    "AuditPlan": "spec_compile.plan",
    "DecodingMetrics": "spec_compile.metrics",
    "Draft": "spec_compile.drafters",
    "DraftHead": "spec_compile.drafters_model",
    "Drafter": "spec_compile.drafters",
    "EarlyExit": "spec_compile.drafters_model",
    "FfnCalibration": "spec_compile.plan",
    "FfnPlan": "spec_compile.plan",
    "GenerateOutput": "spec_compile.generation",
    "LoadedVerify": "spec_compile.export_load",
    "MoeCalibration": "spec_compile.plan",
    "MoePlan": "spec_compile.plan",
    "PromptLookup": "spec_compile.drafters",
    "SparsityPlan": "spec_compile.plan",
    "RewriteReport": "spec_compile.report",
    "RowCache": "spec_compile.models.row_cache",
    "VerifyCache": "spec_compile.models.cache",
    "VerifyFunction": "spec_compile.verify",
    "attach": "spec_compile.attachment",
    "compile_verify": "spec_compile.verify",
    "explain": "spec_compile.explainer",
    "export": "spec_compile.exporter",
    "ffn_calibrate": "spec_compile.calibrate_ffn",
    "generate": "spec_compile.generation",
    "load": "spec_compile.export_load",
    "moe_calibrate": "spec_compile.calibrate",
    "prepare": "spec_compile.models.hooks",
    "restore": "spec_compile.models.hooks",
}

__all__ = [
    "AssistantModel",
    "AttentionPlan",
    "AuditPlan",
    "DecodingMetrics",
    "Draft",
    "DraftHead",
    "Drafter",
    "EarlyExit",
    "FfnCalibration",
    "FfnPlan",
    "GenerateOutput",
    "LoadedVerify",
    "MoeCalibration",
    "MoePlan",
    "PromptLookup",
    "RewriteReport",
    "RowCache",
    "SparsityPlan",
    "VerifyCache",
    "VerifyFunction",
    "__version__",
    "attach",
    "compile_verify",
    "explain",
    "export",
    "ffn_calibrate",
    "generate",
    "load",
    "moe_calibrate",
    "prepare",
    "restore",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'spec_compile' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
