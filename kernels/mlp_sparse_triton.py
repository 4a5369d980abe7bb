"""A feed-forward layer in Triton that reads, past the activation, only the channels that some draft row keeps.

Five launches and no host reads: the activation of all channels, with a list of those that each tile keeps; one list of them all
(with a budget, the contest for it); the other first product of the kept channels; the last product over them; an ordered sum.
The number of channels is known on the device alone: programs take equal shares of the list, so that few channels still keep the
whole device reading.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.contest_triton import running_sum
from spec_compile.kernels.mlp_compact_triton import compact_warps, mlp_compact_kernel
from spec_compile.kernels.mlp_tiling import MlpTiling, choose_mlp_tiling
from spec_compile.kernels.mlp_triton import Launches, activated, common_options, contiguous_bias, flat_rows, ordered_sum
from spec_compile.kernels.moe_experts_triton import product
from spec_compile.kernels.prefetch_triton import prefetch

# Columns past the last kept channel that hold zeros: masks of the last product end at a multiple of so many, as wide loads need.
PAD = tl.constexpr(16)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _mlp_activation_kernel(
    X, W, BIAS, ACT, LIST, COUNT, SCORE, SWITCH, x_m, w_n, threshold, rows, hidden, inner,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BUDGET: tl.constexpr, JOINT: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Activations float32 ``[rows, inner]``, 0 where a row skips a channel by itself, and the channels of each tile that some
    row keeps, in order; or, for a budget, sums of squares ``[inner]``."""
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    used = n < inner
    if PDL:
        if AHEAD > 0:
            LINE: tl.constexpr = 512 // X.dtype.element_ty.primitive_bitwidth
            i = tl.arange(0, BN * (AHEAD // LINE))
            row = tl.minimum(first + i // (AHEAD // LINE), inner - 1)
            prefetch(W + row.to(tl.int64) * w_n + i % (AHEAD // LINE) * LINE)
        gdc_wait()
        gdc_launch_dependents()
    exact = tl.load(SWITCH) == 0
    w_at = W + n.to(tl.int64)[:, None] * w_n + k[None, :]
    kept = tl.zeros([BN], tl.int32)
    score = tl.zeros([BN], tl.float32)
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
        acc = product(x_at, w_at, (m < rows)[:, None], used[:, None], 0, hidden, 0, BN, BK, M, EVEN, False, SWAP, PRECISION)
        if HAS_BIAS:
            acc += tl.load(BIAS + n, mask=used, other=0.0).to(tl.float32)[None, :]
        act = activated(acc, ACTIVATION)
        real = (m < rows)[:, None] & used[None, :]
        if BUDGET:
            score += tl.sum(tl.where(real, act * act, 0.0), 0)
        else:
            # A NaN stays, and in an exact step everything does.
            dropped = (tl.abs(act) < threshold) & (exact == 0)
            kept = tl.maximum(kept, tl.max((real & (dropped == 0)).to(tl.int32), 0))
            if not JOINT:
                act = tl.where(dropped, 0.0, act)
        tl.store(ACT + m.to(tl.int64)[:, None] * inner + n[None, :], act, mask=real)
    if BUDGET:
        tl.store(SCORE + n, score, mask=used)
    else:
        rank = tl.cumsum(kept, 0) - 1
        tl.store(LIST + first + rank, n, mask=kept > 0)
        tl.store(COUNT + tl.program_id(0), tl.sum(kept, 0))


@triton.jit(do_not_specialize=["keep"])
def _mlp_contest_kernel(SCORE, KEPT, TOTAL, SWITCH, keep, inner, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The ``keep`` channels with the largest scores, ties to the lowest, ascending; all in an exact step."""
    n = tl.arange(0, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    budget = tl.where(tl.load(SWITCH) == 0, inner, keep)
    # Bits of numbers that are not negative keep their order; NaN, whose sign is dropped, comes first.
    bits = tl.load(SCORE + n, mask=n < inner, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(n < inner, bits, -1)
    top = 1 << 30
    bound = tl.where(tl.sum((bits >= top).to(tl.int32), 0) >= budget, top, 0)
    for step in tl.range(0, 15):
        # Two bits at a time: three counts, each of less than 20 bits, in one sum.
        unit = 1 << (28 - 2 * step)
        low = (bits >= bound + unit).to(tl.int64)
        mid = (bits >= bound + 2 * unit).to(tl.int64)
        high = (bits >= bound + 3 * unit).to(tl.int64)
        counts = tl.sum(low + (mid << 20) + (high << 40), 0)
        reached = ((counts & 0xFFFFF) >= budget).to(tl.int32) + (((counts >> 20) & 0xFFFFF) >= budget).to(tl.int32)
        bound += (reached + ((counts >> 40) >= budget).to(tl.int32)) * unit
    above = (bits > bound).to(tl.int32)
    tied = ((bits == bound) & (n < inner)).to(tl.int32)
    left = budget - tl.sum(above, 0)
    chosen = tl.where((above > 0) | ((tied > 0) & (running_sum(tied, CHUNK) <= left)), 1, 0)
    tl.store(KEPT + running_sum(chosen, CHUNK) - 1, n, mask=chosen > 0)
    tl.store(TOTAL, budget)


@triton.jit(do_not_specialize=["rows"])
def _mlp_kept_kernel(
    X, W, BIAS, ACT, KEPT, TOTAL, INNER, x_m, w_n, h_m, rows, hidden, inner,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, FILL: tl.constexpr, LEAST: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``act * up`` of the kept channels side by side, ``TOTAL`` columns and zeros up to a multiple of ``PAD``."""
    if PDL:
        gdc_wait()
        # Not before: the next launch reads the list of channels without a wait of its own.
        gdc_launch_dependents()
    total = tl.load(TOTAL)
    share = tl.minimum(tl.maximum(tl.cdiv(total, FILL), LEAST), BN)
    first = tl.program_id(0) * share
    if first >= total:
        return
    j = tl.arange(0, BN)
    place = first + j
    used = (j < share) & (place < total)
    channel = tl.load(KEPT + place, mask=used, other=0)
    k = tl.arange(0, BK)
    w_at = W + channel.to(tl.int64)[:, None] * w_n + k[None, :]
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        real = (m < rows)[:, None] & used[None, :]
        h = tl.load(ACT + m.to(tl.int64)[:, None] * inner + channel[None, :], mask=real, other=0.0)
        if GATED:
            x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
            acc = product(x_at, w_at, (m < rows)[:, None], used[:, None], 0, hidden, 0, BN, BK, M, EVEN, False, SWAP, PRECISION)
            if HAS_BIAS:
                acc += tl.load(BIAS + channel, mask=used, other=0.0).to(tl.float32)[None, :]
            h = h * acc
        h_at = INNER + m.to(tl.int64)[:, None] * h_m
        tl.store(h_at + place[None, :], h.to(INNER.dtype.element_ty), mask=real)
        if first == 0:
            past = total + tl.arange(0, PAD)
            inside = (m < rows)[:, None] & (past < tl.cdiv(total, PAD) * PAD)[None, :]
            tl.store(h_at + past[None, :], tl.zeros([M, PAD], INNER.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _mlp_sparse_down_kernel(
    INNER, W, KEPT, TOTAL, PARTS, w_f, h_m, rows, out,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last product over the list of kept channels, float32 ``[SPLITS, rows, out]``; ``w_f`` is the stride of channels."""
    first = tl.program_id(0) // SPLITS * BN
    split = tl.program_id(0) % SPLITS
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # The list is whole before the launch that this one waits for begins to work; read past a cache that may still hold an older.
    total = tl.load(TOTAL, cache_modifier=".cg")
    steps = tl.cdiv(total, BK)
    k_lo = split * steps // SPLITS * BK
    k_hi = tl.minimum((split + 1) * steps // SPLITS * BK, total)
    if PDL:
        if AHEAD > 0:
            LINE: tl.constexpr = 512 // W.dtype.element_ty.primitive_bitwidth
            i = tl.arange(0, AHEAD * (BN // LINE))
            place = k_lo + i // (BN // LINE)
            row = tl.load(KEPT + place, mask=place < k_hi, other=0, cache_modifier=".cg")
            if k_lo < k_hi:
                prefetch(W + row.to(tl.int64) * w_f + tl.minimum(first + i % (BN // LINE) * LINE, out - 1))
        gdc_wait()
        gdc_launch_dependents()
    filled = tl.cdiv(total, PAD) * PAD
    for begin in tl.range(0, rows, M):
        m = begin + tl.arange(0, M)
        h_at = INNER + m.to(tl.int64)[:, None] * h_m + k[None, :]
        if SWAP:
            acc = tl.zeros([BN, M], tl.float32)
        else:
            acc = tl.zeros([M, BN], tl.float32)
        # Ids are loaded a step ahead: fetched in the same step, they would take the pipeline's buffers.
        channel = tl.load(KEPT + k_lo + k, mask=k_lo + k < k_hi, other=0)
        for start in tl.range(k_lo, k_hi, BK):
            following = start + BK + k
            ahead = tl.load(KEPT + following, mask=following < k_hi, other=0)
            inside = start + k < k_hi
            w = tl.load(
                W + channel.to(tl.int64)[:, None] * w_f + n[None, :], mask=inside[:, None] & (n < out)[None, :], other=0.0
            )
            h = tl.load(h_at + start, mask=(m < rows)[:, None] & (start + k < filled)[None, :], other=0.0)
            if SWAP:
                acc = tl.dot(w.T, h.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc, input_precision=PRECISION)
            channel = ahead
        result = acc.T if SWAP else acc
        out_at = PARTS + (split * rows + m).to(tl.int64)[:, None] * out + n[None, :]
        tl.store(out_at, result, mask=(m < rows)[:, None] & (n < out)[None, :])


def sparse_launches(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
    tiling: MlpTiling | None = None, total: Tensor | None = None,
) -> tuple[Tensor, Launches]:  # fmt: skip
    """Arguments of :func:`mlp_sparse_triton`; its result, and the launches that fill it, by name (for the benchmark)."""
    flat = flat_rows(x)
    (rows, hidden), (out, inner) = flat.shape, down.shape
    tiling = tiling or choose_mlp_tiling(x.device, x.dtype, rows, hidden, inner, out)
    gate_bias, up_bias, down_bias = (contiguous_bias(bias) for bias in (gate_bias, up_bias, down_bias))
    by, bias = (up, up_bias) if gate is None else (gate, gate_bias)
    g, u, dn = tiling.gate, tiling.up, tiling.sparse_down
    tiles, budget = triton.cdiv(inner, g.width), keep > 0
    acts = x.new_empty(rows, inner, dtype=torch.float32)
    score = acts.new_empty(inner if budget else 0)
    # Lists of the tiles, the list of all, counts of the tiles.
    ids = x.new_empty(tiles * g.width + inner + tiles, dtype=torch.int32)
    listed, kept, count = ids.split([tiles * g.width, inner, tiles])
    total = ids.new_empty(1) if total is None else total
    between = x.new_empty(rows, -(-inner // PAD.value) * PAD.value)
    parts = x.new_empty(tiling.sparse_splits, rows, out, dtype=torch.float32)
    result = x.new_empty(*x.shape[:-1], out)
    common = common_options(x, tiling)
    pdl = {name: common[name] for name in ("PDL", "launch_pdl") if name in common}
    bind = functools.partial
    launches: Launches = [("activation", bind(
        _mlp_activation_kernel[(tiles,)],
        flat, by, x if bias is None else bias, acts, listed, count, score, switch, flat.stride(0), by.stride(0), threshold,
        rows, hidden, inner, HAS_BIAS=bias is not None, ACTIVATION=activation, BUDGET=budget, JOINT=joint, BN=g.width, BK=g.depth,
        EVEN=hidden % g.depth == 0, SWAP=g.swap, AHEAD=g.ahead if g.ahead <= hidden else 0, num_warps=g.warps,
        num_stages=g.stages, **common,
    ))]  # fmt: skip
    if budget:
        chunk = max(1024, triton.next_power_of_2(inner))
        launches.append(("contest", bind(
            _mlp_contest_kernel[(1,)],
            score, kept, total, switch, keep, inner, CHUNK=chunk, num_warps=contest_warps(chunk), **pdl,
        )))  # fmt: skip
    else:
        launches.append(("compact", bind(
            mlp_compact_kernel[(tiles,)], listed, count, kept, total, tiles, WIDTH=g.width,
            TILES=max(32, triton.next_power_of_2(tiles)), num_warps=compact_warps(tiles), **pdl,
        )))  # fmt: skip
    programs = triton.cdiv(inner, u.width)
    launches.append(("kept", bind(
        _mlp_kept_kernel[(programs,)],
        flat, up, x if up_bias is None else up_bias, acts, kept, total, between, flat.stride(0), up.stride(0), between.stride(0),
        rows, hidden, inner, GATED=gate is not None, HAS_BIAS=up_bias is not None, FILL=min(tiling.fill, programs),
        LEAST=min(tiling.least, u.width), BN=u.width, BK=u.depth, EVEN=hidden % u.depth == 0, SWAP=u.swap, num_warps=u.warps,
        num_stages=u.stages, **common,
    )))  # fmt: skip
    launches.append(("down", bind(
        _mlp_sparse_down_kernel[(triton.cdiv(out, dn.width) * tiling.sparse_splits,)],
        between, down, kept, total, parts, down.stride(1), between.stride(0), rows, out, BN=dn.width, BK=dn.depth,
        SPLITS=tiling.sparse_splits, SWAP=dn.swap, AHEAD=dn.ahead, num_warps=dn.warps, num_stages=dn.stages, **common,
    )))  # fmt: skip
    launches.append(("sum", bind(ordered_sum, parts, down_bias, result.view(rows, out), tiling, common["PDL"])))
    return result, launches


def mlp_sparse_triton(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
    tiling: MlpTiling | None = None, total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments and result as :func:`spec_compile.kernels.library.mlp_sparse`, where
    :func:`spec_compile.kernels.mlp.why_no_sparse_kernel` is None.

    ``tiling`` overrides the table of :mod:`spec_compile.kernels.mlp_tiling` (for the tuner); ``total`` int32 ``[1]`` is given
    the number of channels that were read.
    """
    with torch.cuda.device_of(x):
        result, launches = sparse_launches(
            x, gate, up, down, gate_bias, up_bias, down_bias, activation, switch, threshold, keep, joint, tiling, total
        )
        for _, launch in launches:
            launch()
    return result


def contest_warps(chunk: int) -> int:
    return max(4, min(32, chunk // 1024))
