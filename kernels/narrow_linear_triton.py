"""A linear layer of a handful of rows and few columns in Triton: a router, say. Its time is latency, not bytes.

Tiles of the usual width would leave most of the device idle, and one sum over all of K is a chain of dependent products. Here
programs have 8 columns each, and the warps of a program share K: all loads are under way at once, and the chain is as many times
shorter. Weights do not depend on the launch before: they are loaded while it still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.tiling import device_of

# Columns of a program, its warps, and how much of K each of them takes at once, by rows of a tile (measured, H200).
_WIDTH, _WARPS = 8, 4
_DEPTH = {16: 256, 32: 128}


@triton.jit(do_not_specialize=["rows"])
def _narrow_linear_kernel(
    X, W, B, Y, n, x_m, w_n, rows, K,
    HAS_BIAS: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, M)
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, PARTS)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
    x_at = X + m[None, :, None] * x_m + k
    w_at = W + col.to(tl.int64)[None, :, None] * w_n + k
    used_rows = (m < rows)[None, :, None]
    used_cols = (col < n)[None, :, None]
    w = tl.load(w_at, mask=used_cols if EVEN else used_cols & (k < K), other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_at, mask=used_rows if EVEN else used_rows & (k < K), other=0.0)
    acc = tl.dot(x, w.permute(0, 2, 1))
    for start in tl.range(PARTS * BK, K, PARTS * BK):
        inside = start + k < K
        w = tl.load(w_at + start, mask=used_cols if EVEN else used_cols & inside, other=0.0)
        x = tl.load(x_at + start, mask=used_rows if EVEN else used_rows & inside, other=0.0)
        acc = tl.dot(x, w.permute(0, 2, 1), acc)
    y = tl.sum(acc, 0)
    if HAS_BIAS:
        y += tl.load(B + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    y_at = Y + m[:, None] * n + col[None, :]
    tl.store(y_at, y.to(Y.dtype.element_ty), mask=(m < rows)[:, None] & (col < n)[None, :])


def narrow_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, width: int = _WIDTH, warps: int = _WARPS, depth: int | None = None
) -> Tensor:
    """``x @ weight.T + bias`` with float32 accumulation, where :func:`spec_compile.kernels.linears.is_narrow`."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    rows, size = flat.shape
    columns = weight.shape[0]
    out = x.new_empty(*x.shape[:-1], columns)
    tall = max(16, triton.next_power_of_2(rows))
    depth = min(depth or _DEPTH[tall], max(16, triton.next_power_of_2(triton.cdiv(size, warps))))
    pdl = device_of(x.device).capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(x):
        _narrow_linear_kernel[(triton.cdiv(columns, width),)](
            flat, weight, x if bias is None else bias, out, columns, flat.stride(0), weight.stride(0), rows, size,
            HAS_BIAS=bias is not None, M=tall, BN=width, BK=depth, PARTS=warps,
            EVEN=size % (warps * depth) == 0, PDL=pdl, num_warps=warps, **options,
        )  # fmt: skip
    return out
