"""Which kernels can run an ``attention`` call, best first. A provider answers with a reason where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.kernels import availability, library
from spec_compile.kernels.tiling import why_not_tiled


@dataclass(frozen=True)
class AttentionCall:
    """What a provider may look at: (fake) operands, never data. ``selected``: the list comes from ``select_blocks``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    softcap: float
    sinks: bool
    block_size: int = 64
    selected: bool = False


@dataclass(frozen=True)
class Provider:
    """A kernel for ``attention``: ``target`` takes the same arguments; ``supports`` returns None or why not."""

    name: str
    target: Any
    supports: Callable[[AttentionCall], str | None]


def _folded_supports(call: AttentionCall) -> str | None:
    if call.selected:
        return "a selection of blocks"
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        return f"dtype {call.q.dtype}"
    if call.q.device.type not in ("cpu", "cuda", "meta"):
        return f"device {call.q.device.type}"
    return None


def _gathered_supports(call: AttentionCall) -> str | None:
    if not call.selected:
        return "every live block is read"
    return None if call.q.device.type in ("cpu", "meta") else f"device {call.q.device.type}"


def _triton_supports(call: AttentionCall) -> str | None:
    q, block_size = call.q, call.block_size
    if q.device.type != "cuda":
        return f"device {q.device.type}"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {q.dtype}"
    if call.mask is not None and call.mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
        return f"mask dtype {call.mask.dtype}"
    if block_size & (block_size - 1) or not 8 <= block_size <= 128:
        return f"block_size {block_size} is not 8, 16, 32, 64 or 128"
    dim, v_dim = q.shape[3], call.v.shape[3]
    if max(dim, v_dim) > 256:
        return f"head dim {max(dim, v_dim)} is above 256"
    missing = availability.why_no_triton()
    if missing is None and availability.capability(q.device) < 80:
        missing = "compute capability below 8.0 is not tested"
    return missing or why_not_tiled(q.device, q.dtype, int(dim), int(v_dim), block_size)


PROVIDERS = (
    Provider("triton", torch.ops.spec_compile.attention_triton_v1.default, _triton_supports),
    Provider("folded", torch.ops.spec_compile.attention_folded_v1.default, _folded_supports),
    Provider("gathered", torch.ops.spec_compile.attention_gathered_v1.default, _gathered_supports),
)

assert library.attention_folded is not None
