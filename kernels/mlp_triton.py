"""A feed-forward layer in Triton for a handful of rows: gate, up and activation in one launch, down, and an ordered sum.

At verify's row counts the layer costs the reading of its weights: each is read once for all rows, and results repeat bit for bit.
With dependent launches a product asks for its weights while the launch before it still runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.mlp_tiling import MlpTiling, choose_mlp_tiling
from spec_compile.kernels.moe_experts_triton import product
from spec_compile.kernels.prefetch_triton import prefetch
from spec_compile.kernels.tiling import device_of

Launches = list[tuple[str, Callable[[], Any]]]


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return y * y
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z.
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit(do_not_specialize=["rows"])
def _mlp_first_kernel(
    X, GATE, UP, GATE_BIAS, UP_BIAS, INNER, x_m, g_n, u_n, rows, hidden, inner,
    GATED: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, HAS_UP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``act(gate) * up`` ``[rows, inner]``: a tile holds ``BN`` rows, half of them of gate; or ``act(up)`` of ``BN`` rows."""
    CHANNELS: tl.constexpr = BN // 2 if GATED else BN
    first = tl.program_id(0) * CHANNELS
    r = tl.arange(0, BN)
    k = tl.arange(0, BK)
    n = first + r % CHANNELS
    if GATED:
        w_row = tl.where(r < CHANNELS, GATE + n.to(tl.int64) * g_n, UP + n.to(tl.int64) * u_n)
    else:
        w_row = UP + n.to(tl.int64) * u_n
    if PDL:
        if AHEAD > 0:
            LINE: tl.constexpr = 512 // X.dtype.element_ty.primitive_bitwidth
            i = tl.arange(0, BN * (AHEAD // LINE))
            row = i // (AHEAD // LINE)
            c = tl.minimum(first + row % CHANNELS, inner - 1).to(tl.int64)
            if GATED:
                at = tl.where(row < CHANNELS, GATE + c * g_n, UP + c * u_n)
            else:
                at = UP + c * u_n
            prefetch(at + i % (AHEAD // LINE) * LINE)
        gdc_wait()
        gdc_launch_dependents()
    w_at = w_row[:, None] + k[None, :]
    w_used = (n < inner)[:, None]
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
        acc = product(x_at, w_at, (m < rows)[:, None], w_used, 0, hidden, 0, BN, BK, M, EVEN, False, SWAP, PRECISION)
        if GATED:
            gate, up = tl.split(acc.reshape(M, 2, CHANNELS).permute(0, 2, 1))
        else:
            gate = acc
            up = acc
        col = first + tl.arange(0, CHANNELS)
        if HAS_UP_BIAS:
            up += tl.load(UP_BIAS + col, mask=col < inner, other=0.0).to(tl.float32)[None, :]
        if HAS_GATE_BIAS:
            gate += tl.load(GATE_BIAS + col, mask=col < inner, other=0.0).to(tl.float32)[None, :]
        if GATED:
            h = activated(gate, ACTIVATION) * up
        else:
            h = activated(up, ACTIVATION)
        h_at = INNER + m.to(tl.int64)[:, None] * inner + col[None, :]
        tl.store(h_at, h.to(INNER.dtype.element_ty), mask=(m < rows)[:, None] & (col < inner)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _mlp_down_kernel(
    INNER, W, PARTS, w_n, rows, inner, out,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last product, float32 ``[SPLITS, rows, out]``: parts of the sum over channels. ``w_n`` is the stride of the weight's
    rows: outputs, or channels where ``TRANSPOSED``."""
    first = tl.program_id(0) // SPLITS * BN
    split = tl.program_id(0) % SPLITS
    steps = tl.cdiv(inner, BK)
    k_lo = split * steps // SPLITS * BK
    k_hi = tl.minimum((split + 1) * steps // SPLITS * BK, inner)
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if TRANSPOSED:
        w_at = W + k.to(tl.int64)[:, None] * w_n + n[None, :]
        w_used = (n < out)[None, :]
    else:
        w_at = W + n.to(tl.int64)[:, None] * w_n + k[None, :]
        w_used = (n < out)[:, None]
    if PDL:
        if AHEAD > 0 and first + BN <= out and k_lo + AHEAD <= k_hi:
            LINE: tl.constexpr = 512 // W.dtype.element_ty.primitive_bitwidth
            if TRANSPOSED:
                i = tl.arange(0, AHEAD * (BN // LINE))
                prefetch(W + (k_lo + i // (BN // LINE)).to(tl.int64) * w_n + first + i % (BN // LINE) * LINE)
            else:
                i = tl.arange(0, BN * (AHEAD // LINE))
                prefetch(W + (first + i // (AHEAD // LINE)).to(tl.int64) * w_n + k_lo + i % (AHEAD // LINE) * LINE)
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        h_at = INNER + m.to(tl.int64)[:, None] * inner + k[None, :]
        acc = product(h_at, w_at, (m < rows)[:, None], w_used, k_lo, k_hi, w_n, BN, BK, M, EVEN, TRANSPOSED, SWAP, PRECISION)
        out_at = PARTS + (split * rows + m).to(tl.int64)[:, None] * out + n[None, :]
        tl.store(out_at, acc, mask=(m < rows)[:, None] & (n < out)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _mlp_sum_kernel(
    PARTS, BIAS, OUT, rows, out, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr
):
    """The parts of a row in order, and the bias."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BN], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(PARTS + (split * rows + row) * out + n, mask=n < out, other=0.0)
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < out, other=0.0).to(tl.float32)
    tl.store(OUT + row * out + n, acc.to(OUT.dtype.element_ty), mask=n < out)


def flat_rows(x: Tensor) -> Tensor:
    """``[..., H]`` to ``[N, H]`` with contiguous rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def common_options(x: Tensor, tiling: MlpTiling) -> dict[str, Any]:
    """Arguments that the products share."""
    pdl = device_of(x.device).capability >= 90
    precision = "ieee" if x.dtype == torch.float32 else None
    return {"M": tiling.rows, "PRECISION": precision, "PDL": pdl, **({"launch_pdl": True} if pdl else {})}


def ordered_sum(parts: Tensor, bias: Tensor | None, out: Tensor, tiling: MlpTiling, pdl: bool) -> None:
    """``out`` ``[N, H']`` from ``parts`` float32 ``[splits, N, H']``."""
    splits, rows, columns = parts.shape
    _mlp_sum_kernel[(triton.cdiv(columns, tiling.columns), rows)](
        parts, out if bias is None else bias, out, rows, columns, HAS_BIAS=bias is not None, SPLITS=splits, BN=tiling.columns,
        PDL=pdl, num_warps=max(1, min(4, tiling.columns // 128)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def contiguous_bias(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.stride(0) == 1 else bias.contiguous()


def dense_launches(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, tiling: MlpTiling | None = None,
) -> tuple[Tensor, Launches]:  # fmt: skip
    """Arguments of :func:`mlp_triton`; its result, and the launches that fill it, by name (for the benchmark)."""
    flat = flat_rows(x)
    (rows, hidden), (out, inner) = flat.shape, down.shape
    tiling = tiling or choose_mlp_tiling(x.device, x.dtype, rows, hidden, inner, out)
    first, dn = tiling.first, tiling.down
    gate_bias, up_bias, down_bias = (contiguous_bias(bias) for bias in (gate_bias, up_bias, down_bias))
    between = x.new_empty(rows, inner)
    parts = x.new_empty(tiling.splits, rows, out, dtype=torch.float32)
    result = x.new_empty(*x.shape[:-1], out)
    transposed = down.stride(1) != 1
    common = common_options(x, tiling)
    channels = first.width // 2 if gate is not None else first.width
    bind = functools.partial
    return result, [
        ("first", bind(
            _mlp_first_kernel[(triton.cdiv(inner, channels),)],
            flat, up if gate is None else gate, up, x if gate_bias is None else gate_bias, x if up_bias is None else up_bias,
            between, flat.stride(0), 0 if gate is None else gate.stride(0), up.stride(0), rows, hidden, inner,
            GATED=gate is not None, HAS_GATE_BIAS=gate_bias is not None, HAS_UP_BIAS=up_bias is not None, ACTIVATION=activation,
            BN=first.width, BK=first.depth, EVEN=hidden % first.depth == 0, SWAP=first.swap,
            AHEAD=first.ahead if first.ahead <= hidden else 0, num_warps=first.warps, num_stages=first.stages, **common,
        )),
        ("down", bind(
            _mlp_down_kernel[(triton.cdiv(out, dn.width) * tiling.splits,)],
            between, down, parts, down.stride(1) if transposed else down.stride(0), rows, inner, out,
            BN=dn.width, BK=dn.depth, EVEN=inner % dn.depth == 0, SPLITS=tiling.splits, TRANSPOSED=transposed, SWAP=dn.swap,
            AHEAD=dn.ahead if dn.ahead <= inner else 0, num_warps=dn.warps, num_stages=dn.stages, **common,
        )),
        ("sum", bind(ordered_sum, parts, down_bias, result.view(rows, out), tiling, common["PDL"])),
    ]  # fmt: skip


def mlp_triton(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, tiling: MlpTiling | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments and result as :func:`spec_compile.kernels.library.mlp`, where
    :func:`spec_compile.kernels.mlp.why_no_mlp_kernel` is None.

    ``tiling`` overrides the table of :mod:`spec_compile.kernels.mlp_tiling` (for the tuner).
    """
    with torch.cuda.device_of(x):
        result, launches = dense_launches(x, gate, up, down, gate_bias, up_bias, down_bias, activation, tiling)
        for _, launch in launches:
            launch()
    return result
