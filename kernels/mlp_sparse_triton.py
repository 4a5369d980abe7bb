"""A feed-forward layer in Triton that reads, past the activation, only the channels that some draft row keeps.

Four launches and no host reads: the activation of all channels, with a list of those that each tile keeps; the other first
product of the kept channels, which are laid side by side; the last product over them; an ordered sum. A budget adds the contest
for it. The number of channels is known on the device alone: the parts of the last product take about as many of them each.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.contest_triton import running_sum
from spec_compile.kernels.mlp_tiling import MlpTiling, choose_mlp_tiling
from spec_compile.kernels.mlp_triton import Launches, activated, common_options, contiguous_bias, flat_rows, ordered_sum
from spec_compile.kernels.moe_experts_triton import product
from spec_compile.kernels.prefetch_triton import prefetch

# Kept channels that lie together: parts of the last product take so many in turn.
GROUP = tl.constexpr(16)
# Tiles whose counts are looked at together.
TOGETHER = 256


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
def _mlp_contest_kernel(SCORE, LIST, COUNT, SWITCH, keep, inner, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The ``keep`` channels with the largest scores, ties to the lowest, as lists of tiles; all in an exact step."""
    n = tl.arange(0, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    budget = tl.where(tl.load(SWITCH) == 0, inner, keep)
    # Bits of numbers that are not negative keep their order; NaN, whose sign is dropped, comes first.
    bits = tl.load(SCORE + n, mask=n < inner, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(n < inner, bits, -1)
    top = 1 << 30
    reach = tl.sum((bits >= top).to(tl.int32), 0)
    bound = tl.where(reach >= budget, top, 0)
    reach = tl.where(reach >= budget, reach, inner)
    unit = 1 << 28
    # Once as many reach the bound as there is room for, its lower bits do not matter.
    while (unit > 0) & (reach != budget):
        # Two bits at a time: three counts in one sum, of 32 channels in 32 bits, of all in 64.
        low = (bits >= bound + unit).to(tl.int32)
        mid = (bits >= bound + 2 * unit).to(tl.int32)
        high = (bits >= bound + 3 * unit).to(tl.int32)
        sums = tl.sum(tl.reshape(low + (mid << 10) + (high << 20), [CHUNK // 32, 32]), 1).to(tl.int64)
        counts = tl.sum((sums & 0x3FF) + ((sums >> 10 & 0x3FF) << 20) + (sums >> 20 << 40), 0)
        one = (counts & 0xFFFFF).to(tl.int32)
        two = (counts >> 20 & 0xFFFFF).to(tl.int32)
        three = (counts >> 40).to(tl.int32)
        bound += ((one >= budget).to(tl.int32) + (two >= budget).to(tl.int32) + (three >= budget).to(tl.int32)) * unit
        reach = tl.where(three >= budget, three, tl.where(two >= budget, two, tl.where(one >= budget, one, reach)))
        unit = unit >> 2
    above = (bits > bound).to(tl.int32)
    tied = ((bits == bound) & (n < inner)).to(tl.int32)
    left = budget - tl.sum(above, 0)
    chosen = tl.where((above > 0) | ((tied > 0) & (running_sum(tied, CHUNK) <= left)), 1, 0)
    by_tile = tl.reshape(chosen, [CHUNK // WIDTH, WIDTH])
    channel = tl.reshape(n, [CHUNK // WIDTH, WIDTH])
    tl.store(LIST + channel // WIDTH * WIDTH + tl.cumsum(by_tile, 1) - 1, channel, mask=by_tile > 0)
    tile = tl.arange(0, CHUNK // WIDTH)
    tl.store(COUNT + tile, tl.sum(by_tile, 1), mask=tile * WIDTH < inner)


@triton.jit
def _tile_of(COUNT, place, tiles, CHUNK: tl.constexpr):
    """The tile whose list holds the ``place``-th channel of all lists, and how many the lists before it hold."""
    tile = tl.zeros(place.shape, tl.int32)
    before = tl.zeros(place.shape, tl.int32)
    base = 0
    for start in tl.range(0, tiles, CHUNK):
        t = start + tl.arange(0, CHUNK)
        counts = tl.load(COUNT + t, mask=t < tiles, other=0)
        ends = base + tl.cumsum(counts, 0)
        past = ends[None, :] <= place[:, None]
        tile += tl.sum(past.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(past, ends[None, :], 0), 1))
        base += tl.sum(counts, 0)
    return tile, before


@triton.jit
def _spread(place, cap, SPLITS: tl.constexpr):
    """Where the ``place``-th kept channel lies among the parts of the last product."""
    return place // GROUP % SPLITS * cap + place // (GROUP * SPLITS) * GROUP + place % GROUP


@triton.jit
def _kept_part(
    X, W, BIAS, ACT, COUNT, KEPT, INNER, x_m, w_n, h_m, cap, rows, hidden, inner, tile, channel, used, place,
    BY_TILE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``act * up`` of up to ``BN`` channels, and their ids, where the parts of the last product look for them. ``place`` is
    theirs in the list of all, or, ``BY_TILE``, in that of their tile."""
    k = tl.arange(0, BK)
    w_at = W + channel.to(tl.int64)[:, None] * w_n + k[None, :]
    for start in tl.range(0, rows, M):
        m = start + tl.arange(0, M)
        real = (m < rows)[:, None] & used[None, :]
        h = tl.load(ACT + m.to(tl.int64)[:, None] * inner + channel[None, :], mask=real, other=0.0)
        if GATED:
            x_at = X + m.to(tl.int64)[:, None] * x_m + k[None, :]
            acc = tl.zeros([M, BN], tl.float32)
            for step in tl.range(0, hidden, BK, num_stages=STAGES):
                if EVEN:
                    w = tl.load(w_at + step, mask=used[:, None], other=0.0)
                    x = tl.load(x_at + step, mask=(m < rows)[:, None], other=0.0)
                else:
                    inside = (step + k < hidden)[None, :]
                    w = tl.load(w_at + step, mask=used[:, None] & inside, other=0.0)
                    x = tl.load(x_at + step, mask=(m < rows)[:, None] & inside, other=0.0)
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
            if HAS_BIAS:
                acc += tl.load(BIAS + channel, mask=used, other=0.0).to(tl.float32)[None, :]
            h = h * acc
        at = place
        if BY_TILE:
            # Summed behind the product: before it, the weights would wait.
            for begin in tl.range(0, tile, CHUNK):
                t = begin + tl.arange(0, CHUNK)
                at += tl.sum(tl.load(COUNT + t, mask=t < tile, other=0), 0)
        at = _spread(at, cap, SPLITS)
        tl.store(INNER + m.to(tl.int64)[:, None] * h_m + at[None, :], h.to(INNER.dtype.element_ty), mask=real)
        tl.store(KEPT + at, channel, mask=used)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _mlp_kept_kernel(
    X, W, BIAS, ACT, LIST, COUNT, KEPT, TOTAL, INNER, x_m, w_n, h_m, cap, rows, hidden, inner, tiles,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
    WIDTHS: tl.constexpr, DEPTHS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``act * up`` of the kept channels, laid out for the parts of the last product, and how many there are.

    Where no tile kept many, a program takes one tile's: their ids are known at once. Otherwise each takes an equal share of all.
    The product is as wide as that needs: a wide one that is mostly empty would leave the pipeline short.
    """
    KINDS: tl.constexpr = len(WIDTHS)
    WIDTH: tl.constexpr = WIDTHS[KINDS - 1]
    program = tl.program_id(0)
    own = tl.minimum(program, tiles - 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = tl.load(COUNT + own)
    # How many in all, in the low 17 bits, and tiles with many, in one sum.
    sums = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, tiles, CHUNK):
        t = start + tl.arange(0, CHUNK)
        counts = tl.load(COUNT + t, mask=t < tiles, other=0)
        sums += counts + ((counts > WIDTHS[KINDS - 2]).to(tl.int32) << 17)
    packed = tl.sum(sums, 0)
    total = packed & 0x1FFFF
    share = tl.cdiv(total, tl.num_programs(0))
    for which in tl.static_range(KINDS):
        i = tl.arange(0, WIDTHS[which])
        if which < KINDS - 1:
            # Places that hold nothing are read, too: waiting for the count would take longer.
            listed = tl.load(LIST + own * WIDTH + i)
            if (
                (packed >> 17 == 0)
                & (program < tiles)
                & (mine > (WIDTHS[which - 1] if which > 0 else 0))
                & (mine <= WIDTHS[which])
            ):
                _kept_part(
                    X, W, BIAS, ACT, COUNT, KEPT, INNER, x_m, w_n, h_m, cap, rows, hidden, inner, own,
                    tl.where(i < mine, listed, 0), i < mine, i, True, GATED, HAS_BIAS, CHUNK, SPLITS, M, WIDTHS[which],
                    DEPTHS[which], STAGES[which], EVEN, PRECISION,
                )  # fmt: skip
        if which > 0:
            fits = (share > (WIDTHS[which - 1] if which > 1 else 0)) & (share <= WIDTHS[which])
            if (packed >> 17 > 0) & fits & (program * share < total):
                place = program * share + i
                used = (i < share) & (place < total)
                tile, before = _tile_of(COUNT, place, tiles, CHUNK)
                channel = tl.load(LIST + tile * WIDTH + place - before, mask=used, other=0)
                _kept_part(
                    X, W, BIAS, ACT, COUNT, KEPT, INNER, x_m, w_n, h_m, cap, rows, hidden, inner, 0, channel, used, place,
                    False, GATED, HAS_BIAS, CHUNK, SPLITS, M, WIDTHS[which], DEPTHS[which], STAGES[which], EVEN, PRECISION,
                )  # fmt: skip
    if program == 0:
        tl.store(TOTAL, total)
        # Zeros up to a whole group: masks of the last product end there, as wide loads need.
        place = total + tl.arange(0, GROUP)
        for row in tl.range(0, rows):
            row_at = INNER + tl.cast(row, tl.int64) * h_m + _spread(place, cap, SPLITS)
            tl.store(row_at, tl.zeros([GROUP], INNER.dtype.element_ty), mask=place < tl.cdiv(total, GROUP) * GROUP)


@triton.jit(do_not_specialize=["rows"])
def _mlp_sparse_down_kernel(
    INNER, W, KEPT, TOTAL, PARTS, w_f, h_m, cap, rows, out,
    M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last product over the kept channels, float32 ``[SPLITS, rows, out]``; ``w_f`` is the stride of channels."""
    split = tl.program_id(0) % SPLITS
    n = tl.program_id(0) // SPLITS * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    ids = KEPT + split * cap + k
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Before anything is known of how many there are: one wait for both.
    first = tl.load(ids)
    total = tl.load(TOTAL)
    part = tl.minimum(tl.maximum(total % (GROUP * SPLITS) - split * GROUP, 0), GROUP)
    count = total // (GROUP * SPLITS) * GROUP + part
    filled = tl.cdiv(count, GROUP) * GROUP
    for begin in tl.range(0, rows, M):
        m = begin + tl.arange(0, M)
        h_at = INNER + m.to(tl.int64)[:, None] * h_m + split * cap + k[None, :]
        acc = tl.zeros([M, BN], tl.float32)
        # Ids are loaded a step ahead: fetched in the same step, they would take the pipeline's buffers.
        channel = tl.where(k < count, first, 0)
        for start in tl.range(0, count, BK):
            ahead = tl.load(ids + start + BK, mask=start + BK + k < count, other=0)
            w_at = W + channel.to(tl.int64)[:, None] * w_f + n[None, :]
            w = tl.load(w_at, mask=(start + k < count)[:, None] & (n < out)[None, :], other=0.0)
            h = tl.load(h_at + start, mask=(m < rows)[:, None] & (start + k < filled)[None, :], other=0.0)
            acc = tl.dot(h, w, acc, input_precision=PRECISION)
            channel = ahead
        out_at = PARTS + (split * rows + m).to(tl.int64)[:, None] * out + n[None, :]
        tl.store(out_at, acc, mask=(m < rows)[:, None] & (n < out)[None, :])


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
    g, dn, splits = tiling.gate, tiling.sparse_down, tiling.sparse_splits
    tiles, budget = triton.cdiv(inner, g.width), keep > 0
    acts = x.new_empty(rows, inner, dtype=torch.float32)
    score = acts.new_empty(inner if budget else 0)
    # Room of a part of the last product: its share of whole turns, in steps that stay inside.
    cap = triton.cdiv(triton.cdiv(inner, GROUP.value * splits) * GROUP.value, dn.depth) * dn.depth
    # Lists of the tiles, their counts, lists of the parts.
    listed, count, kept = x.new_empty(tiles * (g.width + 1) + splits * cap, dtype=torch.int32).split(
        [tiles * g.width, tiles, splits * cap]
    )
    total = listed.new_empty(1) if total is None else total
    between = x.new_empty(rows, splits * cap)
    parts = x.new_empty(splits, rows, out, dtype=torch.float32)
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
            score, listed, count, switch, keep, inner, WIDTH=g.width, CHUNK=chunk, num_warps=contest_warps(chunk), **pdl,
        )))  # fmt: skip
    launches.append(("kept", bind(
        _mlp_kept_kernel[(max(tiles, tiling.fill),)],
        flat, up, x if up_bias is None else up_bias, acts, listed, count, kept, total, between, flat.stride(0), up.stride(0),
        between.stride(0), cap, rows, hidden, inner, tiles, GATED=gate is not None, HAS_BIAS=up_bias is not None,
        CHUNK=min(TOGETHER, max(32, triton.next_power_of_2(tiles))), SPLITS=splits,
        WIDTHS=tuple(part.width for part in tiling.kept),
        DEPTHS=tuple(part.depth for part in tiling.kept), STAGES=tuple(part.stages for part in tiling.kept),
        EVEN=hidden % max(part.depth for part in tiling.kept) == 0, num_warps=tiling.kept[0].warps, **common,
    )))  # fmt: skip
    launches.append(("down", bind(
        _mlp_sparse_down_kernel[(triton.cdiv(out, dn.width) * splits,)],
        between, down, kept, total, parts, down.stride(1), between.stride(0), cap, rows, out, BN=dn.width, BK=dn.depth,
        SPLITS=splits, num_warps=dn.warps, num_stages=dn.stages, **common,
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
