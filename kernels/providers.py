"""Which kernels can run an ``attention`` call, best first. A provider answers with a reason where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.kernels import library


@dataclass(frozen=True)
class AttentionCall:
    """What a provider may look at: (fake) operands, never data."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    softcap: float
    sinks: bool


@dataclass(frozen=True)
class Provider:
    """A kernel for ``attention``: ``target`` takes the same arguments; ``supports`` returns None or why not."""

    name: str
    target: Any
    supports: Callable[[AttentionCall], str | None]


def _folded_supports(call: AttentionCall) -> str | None:
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"dtype {call.q.dtype}"
    if call.q.device.type not in ("cpu", "cuda", "meta"):
        return f"device {call.q.device.type}"
    return None


# A Triton kernel for CUDA goes in front of this one.
PROVIDERS = (Provider("folded", torch.ops.spec_compile.attention_folded_v1.default, _folded_supports),)

assert library.attention_folded is not None
