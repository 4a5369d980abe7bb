"""A feed-forward layer in Triton that reads, past the activation, only the channels that some draft row keeps.

Four launches and no host reads: the activation of all channels, with a list of those that each tile keeps; the other first
product of the kept ones, which a program finds by rank among the tiles' counts; the last product over the compacted list; an
ordered sum. A budget adds one launch after the first, the contest for the list. The number of channels is known on the device
alone: every program takes an equal share of them, so that few channels still keep the whole device reading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.contest_triton import running_sum
from spec_compile.kernels.mlp_tiling import MlpTiling, choose_mlp_tiling
from spec_compile.kernels.mlp_triton import activated, common_options, contiguous_bias, flat_rows, ordered_sum
from spec_compile.kernels.moe_experts_triton import product
from spec_compile.kernels.prefetch_triton import prefetch

# Counts of this many tiles are compared with ranks at a time.
_TILES_AT_ONCE = 64


@triton.jit
def _dropped(act, threshold, exact):
    """Channels that a row skips: a NaN stays, and in an exact step all do."""
    return (tl.abs(act) < threshold) & (exact == 0)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _activation_kernel(
    X, W, BIAS, ACT, LIST, COUNT, SCORE, SWITCH, x_m, w_n, threshold, rows, hidden, inner,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BUDGET: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Activations float32 ``[rows, inner]``, and the channels of each tile that some row keeps, in order; or, for a budget, sums
    of squares ``[inner]``."""
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
        tl.store(ACT + m.to(tl.int64)[:, None] * inner + n[None, :], act, mask=real)
        if BUDGET:
            score += tl.sum(tl.where(real, act * act, 0.0), 0)
        else:
            kept = tl.maximum(kept, tl.max((real & (_dropped(act, threshold, exact) == 0)).to(tl.int32), 0))
    if BUDGET:
        tl.store(SCORE + n, score, mask=used)
    else:
        rank = tl.cumsum(kept, 0) - 1
        tl.store(LIST + first + rank, n, mask=kept > 0)
        tl.store(COUNT + tl.program_id(0), tl.sum(kept, 0))


@triton.jit(do_not_specialize=["keep"])
def _contest_kernel(SCORE, LIST, TOTAL, SWITCH, keep, inner, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The ``keep`` channels with the largest scores, ties to the lowest, ascending; all in an exact step."""
    n = tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    budget = tl.where(tl.load(SWITCH) == 0, inner, keep)
    # Bits of numbers that are not negative keep their order; NaN, whose sign is dropped, comes first.
    bits = tl.load(SCORE + n, mask=n < inner, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(n < inner, bits, -1)
    bound = tl.zeros([], tl.int32)
    for step in tl.range(0, 31):
        probe = bound | (1 << (30 - step))
        bound = tl.where(tl.sum((bits >= probe).to(tl.int32), 0) >= budget, probe, bound)
    above = (bits > bound).to(tl.int32)
    tied = ((bits == bound) & (n < inner)).to(tl.int32)
    left = budget - tl.sum(above, 0)
    chosen = tl.where((above > 0) | ((tied > 0) & (running_sum(tied, CHUNK) <= left)), 1, 0)
    tl.store(LIST + running_sum(chosen, CHUNK) - 1, n, mask=chosen > 0)
    tl.store(TOTAL, budget)


@triton.jit
def _channels(LIST, COUNT, rank, tiles, WIDTH: tl.constexpr, TILES: tl.constexpr, SOME: tl.constexpr):
    """Channels of the given ranks among all that tiles of ``WIDTH`` listed."""
    tile = tl.zeros(rank.shape, tl.int32)
    before = tl.zeros(rank.shape, tl.int32)
    ahead = 0
    for first in tl.static_range(0, TILES, SOME):
        t = first + tl.arange(0, SOME)
        count = tl.load(COUNT + t, mask=t < tiles, other=0)
        upto = ahead + tl.cumsum(count, 0)
        passed = (upto[None, :] <= rank[:, None]) & (t < tiles)[None, :]
        tile += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, upto[None, :], 0), 1))
        ahead += tl.sum(count, 0)
    return tile * WIDTH + rank - before


@triton.jit
def _counted(COUNT, tiles, TILES: tl.constexpr):
    t = tl.arange(0, TILES)
    return tl.sum(tl.load(COUNT + t, mask=t < tiles, other=0), 0)


@triton.jit(do_not_specialize=["rows", "threshold", "tiles"])
def _kept_kernel(
    X, W, BIAS, ACT, LIST, COUNT, TOTAL, KEPT, INNER, SWITCH, x_m, w_n, threshold, rows, hidden, inner, tiles,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, BUDGET: tl.constexpr, JOINT: tl.constexpr, WIDTH: tl.constexpr,
    TILES: tl.constexpr, SOME: tl.constexpr, LEAST: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``act * up`` of the kept channels side by side ``[rows, inner]`` (the first ``TOTAL`` columns), and the list of them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    exact = tl.load(SWITCH) == 0
    if BUDGET:
        total = tl.load(TOTAL)
    else:
        total = _counted(COUNT, tiles, TILES)
        if tl.program_id(0) == 0:
            tl.store(TOTAL, total)
    share = tl.minimum(tl.maximum(tl.cdiv(total, tl.num_programs(0)), LEAST), BN)
    first = tl.program_id(0) * share
    if first >= total:
        return
    j = tl.arange(0, BN)
    place = first + j
    used = (j < share) & (place < total)
    if BUDGET:
        channel = tl.load(LIST + place, mask=used, other=0)
    else:
        at = _channels(LIST, COUNT, tl.minimum(place, total - 1), tiles, WIDTH, TILES, SOME)
        channel = tl.load(LIST + at, mask=used, other=0)
    tl.store(KEPT + place, channel, mask=used)
    k = tl.arange(0, BK)
    w_at = W + channel.to(tl.int64)[:, None] * w_n + k[None, :]
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        real = (m < rows)[:, None] & used[None, :]
        act = tl.load(ACT + m.to(tl.int64)[:, None] * inner + channel[None, :], mask=real, other=0.0)
        h = act
        if GATED:
            x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
            acc = product(x_at, w_at, (m < rows)[:, None], used[:, None], 0, hidden, 0, BN, BK, M, EVEN, False, SWAP, PRECISION)
            if HAS_BIAS:
                acc += tl.load(BIAS + channel, mask=used, other=0.0).to(tl.float32)[None, :]
            h = act * acc
        if not BUDGET and not JOINT:
            h = tl.where(_dropped(act, threshold, exact), 0.0, h)
        tl.store(INNER + m.to(tl.int64)[:, None] * inner + place[None, :], h.to(INNER.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _sparse_down_kernel(
    INNER, W, KEPT, TOTAL, PARTS, w_f, rows, inner, out,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The last product over the list of kept channels, float32 ``[SPLITS, rows, out]``; ``w_f`` is the stride of channels."""
    first = tl.program_id(0) // SPLITS * BN
    split = tl.program_id(0) % SPLITS
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(TOTAL)
    steps = tl.cdiv(total, BK)
    k_lo = split * steps // SPLITS * BK
    k_hi = tl.minimum((split + 1) * steps // SPLITS * BK, total)
    for begin in tl.range(0, rows, M):
        m = begin + tl.arange(0, M)
        h_at = INNER + m.to(tl.int64)[:, None] * inner + k[None, :]
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
            h = tl.load(h_at + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
            if SWAP:
                acc = tl.dot(w.T, h.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(h, w, acc, input_precision=PRECISION)
            channel = ahead
        result = acc.T if SWAP else acc
        out_at = PARTS + (split * rows + m).to(tl.int64)[:, None] * out + n[None, :]
        tl.store(out_at, result, mask=(m < rows)[:, None] & (n < out)[None, :])


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
    flat = flat_rows(x)
    (rows, hidden), (out, inner) = flat.shape, down.shape
    tiling = tiling or choose_mlp_tiling(x.device, x.dtype, rows, hidden, inner, out)
    gate_bias, up_bias, down_bias = (contiguous_bias(bias) for bias in (gate_bias, up_bias, down_bias))
    by, bias = (up, up_bias) if gate is None else (gate, gate_bias)
    g, u, dn = tiling.gate, tiling.up, tiling.sparse_down
    tiles = triton.cdiv(inner, g.width)
    acts = x.new_empty(rows, inner, dtype=torch.float32)
    score = acts.new_empty(inner)
    # Lists of the tiles, the list of all, counts of the tiles.
    ids = x.new_empty(tiles * g.width + inner + tiles, dtype=torch.int32)
    listed, kept, count = ids.split([tiles * g.width, inner, tiles])
    total = ids.new_empty(1) if total is None else total
    between = x.new_empty(rows, inner)
    parts = x.new_empty(tiling.sparse_splits, rows, out, dtype=torch.float32)
    result = x.new_empty(*x.shape[:-1], out)
    common = common_options(x, tiling)
    launch = {name: common[name] for name in ("launch_pdl",) if name in common}
    budget = keep > 0
    padded = max(32, triton.next_power_of_2(tiles))
    with torch.cuda.device_of(x):
        _activation_kernel[(tiles,)](
            flat, by, x if bias is None else bias, acts, listed, count, score, switch, flat.stride(0), by.stride(0), threshold,
            rows, hidden, inner, HAS_BIAS=bias is not None, ACTIVATION=activation, BUDGET=budget, BN=g.width, BK=g.depth,
            EVEN=hidden % g.depth == 0, SWAP=g.swap, AHEAD=g.ahead if g.ahead <= hidden else 0, num_warps=g.warps,
            num_stages=g.stages, **common,
        )  # fmt: skip
        if budget:
            chunk = max(1024, triton.next_power_of_2(inner))
            _contest_kernel[(1,)](
                score,
                listed,
                total,
                switch,
                keep,
                inner,
                CHUNK=chunk,
                PDL=common["PDL"],
                num_warps=contest_warps(chunk),
                **launch,
            )
        _kept_kernel[(triton.cdiv(inner, u.width),)](
            flat, up, x if up_bias is None else up_bias, acts, listed, count, total, kept, between, switch, flat.stride(0),
            up.stride(0), threshold, rows, hidden, inner, tiles, GATED=gate is not None, HAS_BIAS=up_bias is not None,
            BUDGET=budget, JOINT=joint, WIDTH=g.width, TILES=padded, SOME=min(padded, _TILES_AT_ONCE), LEAST=tiling.least,
            BN=u.width, BK=u.depth, EVEN=hidden % u.depth == 0, SWAP=u.swap, num_warps=u.warps, num_stages=u.stages, **common,
        )  # fmt: skip
        _sparse_down_kernel[(triton.cdiv(out, dn.width) * tiling.sparse_splits,)](
            between, down, kept, total, parts, down.stride(1), rows, inner, out, BN=dn.width, BK=dn.depth,
            SPLITS=tiling.sparse_splits, SWAP=dn.swap, num_warps=dn.warps, num_stages=dn.stages, **common,
        )  # fmt: skip
        ordered_sum(parts, down_bias, result.view(rows, out), tiling, common["PDL"])
    return result


def contest_warps(chunk: int) -> int:
    return max(4, min(32, chunk // 1024))
