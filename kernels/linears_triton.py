"""Linear layers for a handful of rows in Triton: several weights of one input in one launch.

At verify's row counts a linear layer costs the reading of its weight. Small weights (k_proj, v_proj of grouped-query models)
do not fill a device by themselves, and a split-K product needs a second launch; together they do, and need none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_compile.kernels.linears import MAX_WEIGHTS


@triton.jit(do_not_specialize=["rows"])
def _linears_kernel(
    X, W0, W1, W2, W3, B0, B1, B2, B3, Y0, Y1, Y2, Y3, n0, n1, n2, n3, x_m, w_n0, w_n1, w_n2, w_n3, rows, K,
    COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    W, B, Y, n, w_n = W0, B0, Y0, n0, w_n0
    if COUNT > 1:
        tiles = tl.cdiv(n0, BN)
        if tile >= tiles:
            tile -= tiles
            W, B, Y, n, w_n = W1, B1, Y1, n1, w_n1
            if COUNT > 2:
                tiles = tl.cdiv(n1, BN)
                if tile >= tiles:
                    tile -= tiles
                    W, B, Y, n, w_n = W2, B2, Y2, n2, w_n2
                    if COUNT > 3:
                        tiles = tl.cdiv(n2, BN)
                        if tile >= tiles:
                            tile -= tiles
                            W, B, Y, n, w_n = W3, B3, Y3, n3, w_n3
    m = tl.arange(0, M)
    col = tile * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = X + m[:, None] * x_m + k[None, :]
    w_at = W + col.to(tl.int64)[:, None] * w_n + k[None, :]
    used_rows = (m < rows)[:, None]
    used_cols = (col < n)[:, None]
    if SWAP:
        acc = tl.zeros([BN, M], tl.float32)
    else:
        acc = tl.zeros([M, BN], tl.float32)
    for start in tl.range(0, K, BK):
        if EVEN:
            w = tl.load(w_at + start, mask=used_cols, other=0.0)
            x = tl.load(x_at + start, mask=used_rows, other=0.0)
        else:
            inside = (start + k < K)[None, :]
            w = tl.load(w_at + start, mask=used_cols & inside, other=0.0)
            x = tl.load(x_at + start, mask=used_rows & inside, other=0.0)
        if SWAP:
            acc = tl.dot(w, x.T, acc)
        else:
            acc = tl.dot(x, w.T, acc)
    if SWAP:
        acc = acc.T
    if HAS_BIAS:
        acc += tl.load(B + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    y_at = Y + m[:, None] * n + col[None, :]
    tl.store(y_at, acc.to(Y.dtype.element_ty), mask=used_rows & (col < n)[None, :])


def linears_triton(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], config: tuple[int, ...] | None = None
) -> list[Tensor]:
    """``[x @ w.T + b for w, b in zip(weights, biases)]`` with float32 accumulation; no biases or one for each weight."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, size = flat.shape
    outputs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
    columns = sum(weight.shape[0] for weight in weights)
    width, depth, warps, stages, swap = config or choose(columns, rows)

    def four(items: Sequence[Tensor], stand_in: Tensor) -> list[Tensor]:
        return [*items, *[stand_in] * (MAX_WEIGHTS - len(items))]

    padded = four(weights, weights[0])
    grid = (sum(triton.cdiv(weight.shape[0], width) for weight in weights),)
    with torch.cuda.device_of(x):
        _linears_kernel[grid](
            flat, *padded, *four(biases, x), *four(outputs, x), *(w.shape[0] for w in padded), flat.stride(0),
            *(w.stride(0) for w in padded), rows, size,
            COUNT=len(weights), HAS_BIAS=len(biases) > 0, M=max(16, triton.next_power_of_2(rows)), BN=width, BK=depth,
            EVEN=size % depth == 0, SWAP=bool(swap), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return outputs


def choose(columns: int, rows: int) -> tuple[int, int, int, int, int]:
    """Columns a tile, depth of a step, warps, pipeline stages, whether the weight is the left operand (measured, H200)."""
    if rows > 64:
        return (64, 64, 8, 5, 1)
    if rows > 32:
        return (64, 64, 4, 6, 1) if columns >= 16384 else (64, 128, 4, 5, 1)
    return (64, 128, 4, 4, 1) if columns >= 16384 else (64, 128, 4, 6, 1)
