"""Linear layers at verify's row counts: when the small-row kernel is used, and what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from spec_compile.kernels import availability

MAX_ROWS = 96
MAX_WEIGHTS = 4
_TILE = 64
# Columns up to which a weight is narrow.
NARROW = 256


def why_not(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Reason why the kernel cannot take this product, or None; looks at (fake) operands, never at data."""
    if x.device.type != "cuda" or weight.device != x.device:
        return f"device {x.device.type}"
    if availability.capability(x.device) // 10 != 9:
        return "measured on Hopper only"
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype:
        return f"dtypes {x.dtype} and {weight.dtype}"
    if bias is not None and (bias.dtype != x.dtype or bias.device != x.device or bias.dim() != 1 or bias.stride(0) != 1):
        return "the bias is no contiguous vector of the weight's dtype"
    if weight.dim() != 2 or weight.stride(1) != 1 or weight.shape[1] % 64 or weight.stride(0) % 8:
        return "rows of the weight are not contiguous multiples of 64 elements"
    return availability.why_no_triton()


def is_narrow(rows: int, columns: int, size: int) -> bool:
    """Whether ``narrow_linear_triton`` beats cuBLAS at one weight ``[columns, size]``: a router, say.

    Measured on an H200 for 8 to 256 columns and depths of up to 7168; other weights stay with cuBLAS.
    """
    return 8 <= columns <= NARROW and (size <= 7168 if rows <= 16 else rows <= 32 and size <= 2048)


def pays(rows: int, columns: Sequence[int], size: int) -> bool:
    """Whether one launch over weights ``[., size]`` beats cuBLAS (measured on an H200 at the layer sizes of Llama-3.1-8B).

    Up to 32 rows: several weights always, one if it is narrow or its tiles fill the device; from 32,768 columns on (output
    layers) cuBLAS reaches the memory limit by itself. Above, only what cuBLAS cuts into several launches: several weights, past
    64 rows small ones.
    """
    if rows <= 32:
        return rows >= 1 and (len(columns) > 1 or is_narrow(rows, columns[0], size) or 64 * _TILE <= columns[0] < 32768)
    return len(columns) > 1 and (rows <= 64 or (rows <= MAX_ROWS and sum(columns) <= 8192))


def fewest_launches(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """``linear(x, w, b)`` for each weight, in one launch where that pays."""
    rows = x.numel() // x.shape[-1]
    whole = all_or_none(biases) and all(why_not(x, w, b) is None for w, b in zip(weights, biases))
    if whole and pays(rows, [len(weight) for weight in weights], x.shape[-1]):
        return linears(x, weights, biases)
    return [linear(x, weight, bias) for weight, bias in zip(weights, biases)]


def all_or_none(biases: Sequence[Tensor | None]) -> bool:
    """Whether all weights have a bias, or none: what one launch serves."""
    return len({bias is None for bias in biases}) < 2


def linears(x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """See :func:`spec_compile.kernels.library.linears`."""
    given = [*biases] if biases else [None] * len(weights)
    served = all_or_none(given) and all(why_not(x, w, b) is None for w, b in zip(weights, given, strict=True))
    rows = x.numel() // x.shape[-1]
    if served and len(weights) == 1 and rows > 0 and is_narrow(rows, *weights[0].shape):
        from spec_compile.kernels.narrow_linear_triton import narrow_linear_triton

        return [narrow_linear_triton(x, weights[0], given[0])]
    if served and len(weights) <= MAX_WEIGHTS and 0 < rows <= MAX_ROWS:
        from spec_compile.kernels.linears_triton import linears_triton

        return linears_triton(x, weights, [bias for bias in given if bias is not None])
    return [linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True)]
