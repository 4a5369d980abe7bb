"""Split-KV attention for verify forwards in Triton: the CUDA kernel behind ``attention``.

The rows of a KV head (T draft rows x G query heads of its group) share tiles of up to 64, and each K and V byte is read once a
tile. The block list is cut into a fixed number of splits; a second launch adds the partial results in split order, so that
results repeat bit for bit. Blocks that the list calls full are read without their mask; the few others follow in a loop of
their own. Blocks below 64 keys are read several at a time: consecutive entries of the list fill a tile of 64 keys, which
counts as full if all of them are there and full.

The split-KV scheme is that of FlashDecoding (https://pytorch.org/blog/flash-decoding/); the online softmax that of
FlashAttention-2 (arXiv 2307.08691), in base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.block_tiles_triton import exist, is_plain, plain_tiles, tile_flags, tile_ids, tile_keys, tile_start
from spec_compile.kernels.blocks import hidden_threshold
from spec_compile.kernels.reference import allocate_output
from spec_compile.kernels.tiling import Tiling, choose_tiling

LOG2E = tl.constexpr(math.log2(math.e))
# Start of the running maximum: finite, so that no difference is NaN, and below every score that a bias leaves visible.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def base2_scores(s, softcap, HAS_CAP: tl.constexpr):
    """Scaled scores in units of log 2: without a cap the scale has done that."""
    if HAS_CAP:
        # tanh: a series where 1 - 2 / (e + 1) would cancel; exp2 may overflow to inf, which gives 1.
        x = s / softcap
        square = x * x
        series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
        ratio = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        s = softcap * tl.where(tl.abs(x) < 0.25, series, ratio) * LOG2E
    return s


@triton.jit
def _scores(q, k, scale, softcap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    return base2_scores(tl.dot(q, k, input_precision=PRECISION) * scale, softcap, HAS_CAP)


@triton.jit
def _visible(m_at, wanted, MASK_KIND: tl.constexpr, HIDDEN: tl.constexpr):
    """Which keys rows see, and their bias. Loaded before the product, whose registers it would spill."""
    if MASK_KIND == 0:
        return wanted, 0.0
    elif MASK_KIND == 1:
        return tl.load(m_at, mask=wanted, other=0) != 0, 0.0
    else:
        bias = tl.load(m_at, mask=wanted, other=float("-inf")).to(tl.float32)
        return bias > HIDDEN, bias


@triton.jit
def _add_bias(s, bias):
    # Rounded one way only: left to choose, the compiler would fuse one product or the other, by the kernel's constants.
    return tl.fma(bias, tl.full(bias.shape, LOG2E, tl.float32), s)


@triton.jit
def _accumulate(s, v, top, total, acc, PRECISION: tl.constexpr):
    """One step of the online softmax."""
    new_top = tl.maximum(top, tl.max(s, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _part(tiles, split, SPLITS: tl.constexpr, LAST: tl.constexpr):
    """The tiles of a split: equal numbers, but ``LAST`` fewer in the last one, which mostly has a tile with a mask."""
    if SPLITS == 1 or LAST == 0:
        return split * tiles // SPLITS, (split + 1) * tiles // SPLITS
    else:
        others = tiles - tl.minimum(tiles, tl.maximum((tiles + LAST) // SPLITS - LAST, 1))
        lo = split * others // (SPLITS - 1)
        hi = (split + 1) * others // (SPLITS - 1)
        return lo, tl.where(split == SPLITS - 1, tiles, hi)


@triton.jit(do_not_specialize=["rows", "kv_len", "capacity"])
def _split_kernel(
    Q, K, V, MASK, IDS, COUNT, FULL, SINKS, TOP, TOTAL, PARTIAL, OUT,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d, m_b, m_h, m_t, m_s,
    i_b, i_h, f_b, f_h, c_b, c_h, o_b, o_h, o_t, o_d, rows, kv_len, capacity, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    M: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr, SPLITS: tl.constexpr, LAST: tl.constexpr,
    SCAN: tl.constexpr, MASK_KIND: tl.constexpr, HIDDEN: tl.constexpr, LISTED: tl.constexpr, FLAGGED: tl.constexpr,
    INLINE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    tile = tl.program_id(1) % TILES
    kv_head = tl.program_id(1) // TILES
    b = tl.program_id(2).to(tl.int64)
    r = tile * M + tl.arange(0, M)
    in_tile = r < GROUP * rows
    g = r // rows
    t = r - g * rows
    h = kv_head * GROUP + g
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    n = tl.arange(0, BLOCK * SUBS)
    if PDL:
        gdc_wait()

    ids = IDS + b * i_b + kv_head * i_h
    full = FULL + b * f_b + kv_head * f_h
    if LISTED:
        count = tl.load(COUNT + b * c_b + kv_head * c_h)
    else:
        count = capacity
    lo, hi = _part(tl.cdiv(count, SUBS), split, SPLITS, LAST)
    if SUBS > 1:
        end = count
        # Each key brings its own slot.
        slot = tl.zeros_like(n)
    else:
        end = hi
        slot = n
    block = tile_ids(ids, lo, end, n, BLOCK, SUBS, LISTED)
    flags = tile_flags(ids, full, block, lo, end, kv_len, BLOCK, SUBS, FLAGGED, MASK_KIND)
    q_at = Q + b * q_b + h[:, None] * q_h + t[:, None] * q_t + d[None, :] * q_d
    q = tl.load(q_at, mask=in_tile[:, None] & (d < D)[None, :], other=0.0)
    k_at = K + b * k_b + kv_head.to(tl.int64) * k_h + d[:, None] * k_d + slot[None, :] * k_s
    v_at = V + b * v_b + kv_head.to(tl.int64) * v_h + slot[:, None] * v_s + dv[None, :] * v_d
    m_at = MASK + b * m_b + h.to(tl.int64)[:, None] * m_h + t.to(tl.int64)[:, None] * m_t
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BDV], tl.float32)

    # The ids of the next tile travel with the loop: loaded inside, they would halve the depth of the pipeline.
    partial = 0
    first = 0
    for j in tl.range(lo, hi):
        next_block = tile_ids(ids, j + 1, end, n, BLOCK, SUBS, LISTED)
        next_flags = tile_flags(ids, full, next_block, j + 1, end, kv_len, BLOCK, SUBS, FLAGGED, MASK_KIND)
        plain = is_plain(flags, SUBS)
        key = tile_keys(block, n, BLOCK, SUBS)
        k_slot = tile_start(block, key, 0, BLOCK, SUBS)
        v_slot = tile_start(block, key, 1, BLOCK, SUBS)
        if INLINE:
            inside = exist(key, j, end, n, kv_len, BLOCK, SUBS)
            wanted = in_tile[:, None] & inside[None, :] & (plain == 0)
            keep, bias = _visible(m_at + key[None, :] * m_s, wanted, MASK_KIND, HIDDEN)
            k = tl.load(k_at + k_slot * k_s, mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_at + v_slot * v_s, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            s = _scores(q, k, scale, softcap, HAS_CAP, PRECISION)
            if MASK_KIND == 2:
                s = _add_bias(s, tl.where(keep, bias, 0.0))
            keep = keep | plain
            s = tl.where(keep, s, float("-inf"))
            v = tl.where((tl.max(keep.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        else:
            if BD == D:
                k = tl.load(k_at + k_slot * k_s, mask=plain, other=0.0)
            else:
                k = tl.load(k_at + k_slot * k_s, mask=plain & (d < D)[:, None], other=0.0)
            if BDV == DV:
                v = tl.load(v_at + v_slot * v_s, mask=plain, other=0.0)
            else:
                v = tl.load(v_at + v_slot * v_s, mask=plain & (dv < DV)[None, :], other=0.0)
            s = _scores(q, k, scale, softcap, HAS_CAP, PRECISION)
            s = tl.where(plain, s, float("-inf"))
            first = tl.where(plain | (partial > 0), first, j)
            partial += tl.where(plain, 0, 1)
        top, total, acc = _accumulate(s, v, top, total, acc, PRECISION)
        block = next_block
        flags = next_flags

    if not INLINE:
        j = first
        while partial > 0:
            block = tile_ids(ids, j, end, n, BLOCK, SUBS, LISTED)
            key = tile_keys(block, n, BLOCK, SUBS)
            k_slot = tile_start(block, key, 0, BLOCK, SUBS)
            v_slot = tile_start(block, key, 1, BLOCK, SUBS)
            inside = exist(key, j, end, n, kv_len, BLOCK, SUBS)
            wanted = in_tile[:, None] & inside[None, :]
            keep, bias = _visible(m_at + key[None, :] * m_s, wanted, MASK_KIND, HIDDEN)
            k = tl.load(k_at + k_slot * k_s, mask=inside[None, :] & (d < D)[:, None], other=0.0)
            v = tl.load(v_at + v_slot * v_s, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            s = _scores(q, k, scale, softcap, HAS_CAP, PRECISION)
            if MASK_KIND == 2:
                s = _add_bias(s, tl.where(keep, bias, 0.0))
            s = tl.where(keep, s, float("-inf"))
            v = tl.where((tl.max(keep.to(tl.int32), 0) > 0)[:, None], v, 0.0)
            top, total, acc = _accumulate(s, v, top, total, acc, PRECISION)
            partial -= 1
            if partial > 0:
                # Mostly there is one: only now look for the next.
                position = lo + tl.arange(0, SCAN)
                plains = plain_tiles(ids, full, position, end, kv_len, BLOCK, SUBS, LISTED, FLAGGED, MASK_KIND)
                j = tl.min(tl.where((position >= hi) | plains | (position <= j), 2147483647, position), 0)

    if PDL:
        gdc_launch_dependents()
    stored = in_tile[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(SINKS + h, mask=in_tile, other=0.0).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            acc *= tl.exp2(top - new_top)[:, None]
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        o_at = OUT + b * o_b + h[:, None] * o_h + t[:, None] * o_t + dv[None, :] * o_d
        tl.store(o_at, out.to(OUT.dtype.element_ty), mask=stored)
    else:
        slot = ((b * HEADS + h) * rows + t) * SPLITS + split
        tl.store(TOP + slot, top, mask=in_tile)
        tl.store(TOTAL + slot, total, mask=in_tile)
        tl.store(PARTIAL + slot[:, None] * DV + dv[None, :], acc, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def _reduce_kernel(
    TOP, TOTAL, PARTIAL, SINKS, OUT, o_b, o_h, o_t, o_d, rows,
    HEADS: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, SPLITS: tl.constexpr, BSPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    t = row % rows
    h = (row // rows) % HEADS
    b = (row // (rows * HEADS)).to(tl.int64)
    split = tl.arange(0, BSPLITS)
    dv = tl.arange(0, BDV)
    used = split < SPLITS
    slot = row.to(tl.int64) * SPLITS + split
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tops = tl.load(TOP + slot, mask=used, other=LOWEST)
    totals = tl.load(TOTAL + slot, mask=used, other=0.0)
    parts = tl.load(PARTIAL + slot[:, None] * DV + dv[None, :], mask=used[:, None] & (dv < DV)[None, :], other=0.0)
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(SINKS + h).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weight = tl.exp2(tops - top)
    total = tl.sum(weight * totals, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    o_at = OUT + b * o_b + h * o_h + t * o_t + dv * o_d
    tl.store(o_at, out.to(OUT.dtype.element_ty), mask=dv < DV)


def most_tiles(tiles: int, splits: int, last: int) -> int:
    """Upper bound of what :func:`_part` gives one split."""
    return triton.cdiv(tiles, max(1, splits - (last > 0)))


def _or(x: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if x is None else x


def broadcast_strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides with which a dimension of size 1 broadcasts."""
    if x is None:
        return (0, 0, 0, 0)
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride()))


def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    count: Tensor | None,
    full: Tensor | None,
    block_size: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Same arguments and result as :func:`spec_compile.kernels.library.attention`; float16, bfloat16 or float32.

    ``tiling`` overrides the table of :mod:`spec_compile.kernels.tiling` (for the tuner). The number of splits depends on
    static shapes alone, so the order of summation is that of the block list, whatever the cache's length.
    """
    batch, heads, rows, dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    group = heads // kv_heads
    out = allocate_output(q, v_dim)
    if out.numel() == 0:
        return out
    tiling = tiling or choose_tiling(q.device, q.dtype, batch, kv_heads, group * rows, dim, v_dim, block_size)
    subs = max(1, tiling.keys // block_size)
    if ids is None:
        # Without a list any blocks will do: a tile is one.
        block_size, subs = block_size * subs, 1
    tiles = triton.cdiv(group * rows, tiling.rows)
    splits = tiling.splits
    capacity = triton.cdiv(kv_len, block_size) if ids is None else ids.shape[-1]
    # The kernel walks these by position; block lists and sinks of ours are contiguous already.
    ids, full, count, sinks = (None if x is None else x.contiguous() for x in (ids, full, count, sinks))
    if splits > 1:
        tops, totals = (q.new_empty(batch * heads * rows * splits, dtype=torch.float32) for _ in range(2))
        partials = q.new_empty(batch * heads * rows * splits, v_dim, dtype=torch.float32)
    else:
        tops = totals = partials = out
    mask_kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    mask_operand = q if mask is None else mask.view(torch.uint8) if mask_kind == 1 else mask
    # A bias per head (ALiBi) leaves no block without mask work: then one pipelined loop that loads it beats two loops.
    inline = mask is not None and (full is None or (mask_kind == 2 and mask.shape[1] > 1))
    last = 0 if inline else tiling.last
    base2 = 1.0 if softcap > 0 else LOG2E.value
    pdl = tiling.pdl
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(q):
        _split_kernel[(splits, kv_heads * tiles, batch)](
            q, k, v, mask_operand, _or(ids, q), _or(count, q), _or(full, q), _or(sinks, q), tops, totals, partials, out,
            *q.stride(), *k.stride(), *v.stride(), *broadcast_strides(mask),
            *broadcast_strides(ids)[:2], *broadcast_strides(full)[:2], *broadcast_strides(count)[:2],
            *out.stride(), rows, kv_len, capacity, scale * base2, softcap,
            HEADS=heads, GROUP=group, D=dim, DV=v_dim,
            BD=max(16, triton.next_power_of_2(dim)), BDV=max(16, triton.next_power_of_2(v_dim)),
            M=tiling.rows, TILES=tiles, BLOCK=block_size, SUBS=subs, SPLITS=splits, LAST=last,
            SCAN=triton.next_power_of_2(most_tiles(triton.cdiv(capacity, subs), splits, last) + 1),
            MASK_KIND=mask_kind, HIDDEN=hidden_threshold(mask.dtype) if mask is not None and mask_kind == 2 else 0.0,
            LISTED=ids is not None, FLAGGED=full is not None, INLINE=inline,
            HAS_CAP=softcap > 0, HAS_SINKS=sinks is not None, PRECISION="ieee" if q.dtype == torch.float32 else None,
            PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages, **options,
        )  # fmt: skip
        if splits > 1:
            _reduce_kernel[(batch * heads * rows,)](
                tops, totals, partials, _or(sinks, q), out, *out.stride(), rows,
                HEADS=heads, DV=v_dim, BDV=max(16, triton.next_power_of_2(v_dim)), SPLITS=splits,
                BSPLITS=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None, PDL=pdl, num_warps=1, **options,
            )  # fmt: skip
    return out
