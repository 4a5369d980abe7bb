"""Whether Triton kernels can run here, without importing Triton before it is needed."""

from __future__ import annotations

import functools
import importlib.util
import os


@functools.cache
def why_no_triton() -> str | None:
    """Reason why no Triton kernel can run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return None


def interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors (tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
