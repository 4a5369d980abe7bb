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


def why_no_upkeep(k: Tensor) -> str | None:
    """Why block summaries of a K cache cannot be kept on its device, or None: the reference reads the host in every step."""
    if k.device.type != "cuda":
        return None
    if k.dtype not in (torch.float32, torch.float16, torch.bfloat16) or k.shape[3] > 256:
        return f"block summaries of {k.dtype} keys with head dim {int(k.shape[3])} have no kernel"
    return availability.why_no_triton()


def why_selection_in_torch(target: Any, arguments: tuple[Any, ...]) -> str | None:
    """Why ``select_blocks`` or ``block_mass`` runs its plain-torch reference on a CUDA device, or None.

    Args:
        target: the operator.
        arguments: its (fake) arguments.
    """
    q = arguments[0]
    if q.device.type != "cuda":
        return None
    missing = availability.why_no_triton()
    if missing is not None:
        return missing
    if target is torch.ops.spec_compile.block_mass_v1.default:
        from spec_compile.kernels import block_mass_triton

        return block_mass_triton.why_not(q, arguments[1], arguments[2], arguments[6], arguments[8])
    if arguments[1] is None:
        return None
    from spec_compile.kernels import block_scores_triton

    return block_scores_triton.why_not(q, arguments[1], arguments[10], arguments[11])


PROVIDERS = (
    Provider("triton", torch.ops.spec_compile.attention_triton_v1.default, _triton_supports),
    Provider("folded", torch.ops.spec_compile.attention_folded_v1.default, _folded_supports),
    Provider("gathered", torch.ops.spec_compile.attention_gathered_v1.default, _gathered_supports),
)

assert library.attention_folded is not None
