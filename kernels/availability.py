"""Whether Triton kernels can run here, without importing Triton before it is needed."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def why_no_triton() -> str | None:
    """Reason why no Triton kernel can run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return None if torch.version.hip is None else "ROCm is not tested"


@functools.cache
def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device, major * 10 + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
