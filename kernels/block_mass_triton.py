"""``block_mass`` in Triton: one launch reads every live key, a second turns sums into shares. No host reads, no float atomics.

The first cuts the list of live blocks into a fixed number of splits and stores the log-sum-exp of the scores (in base 2) per
block and row, and per split and row; the second normalizes those of the blocks by that of all splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.attention_triton import LOG2E, LOWEST, base2_scores, broadcast_strides
from spec_compile.kernels.block_tiles_triton import exist, tile_ids, tile_keys, tile_start
from spec_compile.kernels.blocks import hidden_threshold
from spec_compile.kernels.tiling import RESERVE, device_of

_QUERIES = {"first": 0, "first_last": 1, "all": 2, "mean": 3}
# Blocks of one program of the second launch.
_SHARES = 64


@triton.jit(do_not_specialize=["rows", "kv_len", "blocks", "picked"])
def _sum_kernel(
    Q, K, MASK, IDS, COUNT, GATE, BLOCK_SUMS, SPLIT_SUMS, MASS,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, m_b, m_h, m_t, m_s, i_b, c_b, rows, kv_len, blocks, picked, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, SUBS: tl.constexpr, SPLITS: tl.constexpr, SLICE: tl.constexpr, QUERY: tl.constexpr,
    MASK_KIND: tl.constexpr, HIDDEN: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, M)
    d = tl.arange(0, BD)
    n = tl.arange(0, BLOCK * SUBS)
    g = m // picked
    used = g < GROUP
    head = kv_head * GROUP + g
    t = m - g * picked
    if QUERY == 1:
        t = t * (rows - 1)
    if QUERY == 3:
        # The mean row sees what the last one sees.
        t = tl.full([M], 1, tl.int32) * (rows - 1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    lists = b * KV_HEADS + kv_head
    # The second launch writes live blocks only.
    lo = split * blocks // SPLITS
    slice_at = lo + tl.arange(0, SLICE)
    tl.store(MASS + lists * blocks + slice_at, 0.0, mask=slice_at < (split + 1) * blocks // SPLITS)
    live = tl.load(COUNT + b * c_b)
    if live * BLOCK < tl.load(GATE):
        return

    q_at = Q + b * q_b + head[:, None] * q_h + d[None, :] * q_d
    row_in = used[:, None] & (d < D)[None, :]
    if QUERY == 3:
        q = tl.zeros([M, BD], tl.float32)
        for row in tl.range(0, rows):
            q += tl.load(q_at + row * q_t, mask=row_in, other=0.0).to(tl.float32)
        q = q / rows
        if K.dtype.element_ty != tl.float32:
            # Tensor cores take the mean in two parts, which leave an error of 2**-17 of it (bfloat16) at most.
            rest = (q - q.to(K.dtype.element_ty).to(tl.float32)).to(K.dtype.element_ty)
            q = q.to(K.dtype.element_ty)
    else:
        q = tl.load(q_at + t[:, None] * q_t, mask=row_in, other=0.0)
    ids = IDS + b * i_b
    tiles = tl.cdiv(live, SUBS)
    lo = split * tiles // SPLITS
    hi = (split + 1) * tiles // SPLITS
    block = tile_ids(ids, lo, live, n, BLOCK, SUBS, True)
    slot = tl.zeros_like(n) if SUBS > 1 else n
    k_at = K + b * k_b + kv_head.to(tl.int64) * k_h + d[:, None] * k_d + slot[None, :] * k_s
    m_at = MASK + b * m_b + head.to(tl.int64)[:, None] * m_h + t.to(tl.int64)[:, None] * m_t
    sub = tl.arange(0, SUBS)
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    for j in tl.range(lo, hi):
        # The ids of the next tile travel with the loop: loaded inside, they would halve the depth of the pipeline.
        next_block = tile_ids(ids, j + 1, live, n, BLOCK, SUBS, True)
        key = tile_keys(block, n, BLOCK, SUBS)
        inside = exist(key, j, live, n, kv_len, BLOCK, SUBS)
        # Before the product: the layout of scores should be that of the tensor cores, which the compiler gives the last to come.
        wanted = used[:, None] & inside[None, :]
        if MASK_KIND == 1:
            keep = tl.load(m_at + key[None, :] * m_s, mask=wanted, other=0) != 0
        else:
            bias = tl.load(m_at + key[None, :] * m_s, mask=wanted, other=float("-inf")).to(tl.float32)
            keep = bias > HIDDEN
        k = tl.load(k_at + tile_start(block, key, 0, BLOCK, SUBS) * k_s, mask=inside[None, :] & (d < D)[:, None], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        if QUERY == 3:  # noqa: SIM102 (constants of the kernel)
            if K.dtype.element_ty != tl.float32:
                s = tl.dot(rest, k, s, input_precision=PRECISION)
        s = base2_scores(s * scale, softcap, HAS_CAP)
        if MASK_KIND == 2:
            s += tl.where(keep, bias, 0.0) * LOG2E
        s = tl.where(keep, s, float("-inf"))
        best = tl.maximum(tl.max(s, 1), LOWEST)
        p = tl.exp2(s - best[:, None])
        sums = tl.sum(p, 1)
        at = (lists * blocks + j * SUBS) * (GROUP * picked) + m
        if SUBS == 1:
            tl.store(BLOCK_SUMS + at, tl.where(sums > 0, best + tl.log2(sums), float("-inf")), mask=used)
        else:
            # Of blocks far below the tile's best nothing is left, as in a softmax.
            parts = tl.sum(tl.reshape(p, [M, SUBS, BLOCK]), 2)
            parts = tl.where(parts > 0, best[:, None] + tl.log2(parts), float("-inf"))
            listed = j * SUBS + sub < live
            at = at[:, None] + sub[None, :] * (GROUP * picked)
            tl.store(BLOCK_SUMS + at, parts, mask=used[:, None] & listed[None, :])
        new_top = tl.maximum(top, best)
        total = total * tl.exp2(top - new_top) + sums * tl.exp2(best - new_top)
        top = new_top
        block = next_block
    sums = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    tl.store(SPLIT_SUMS + (lists * SPLITS + split) * (GROUP * picked) + m, sums, mask=used)


@triton.jit(do_not_specialize=["blocks", "picked"])
def _share_kernel(
    BLOCK_SUMS, SPLIT_SUMS, IDS, COUNT, GATE, SINKS, MASS, i_b, c_b, blocks, picked,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    BSPLITS: tl.constexpr, BLOCKS: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    m = tl.arange(0, M)
    split = tl.arange(0, BSPLITS)
    used = m < GROUP * picked
    lists = b * KV_HEADS + kv_head
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = tl.load(COUNT + b * c_b)
    if (live * BLOCK < tl.load(GATE)) | (tl.program_id(0) * BLOCKS >= live):
        return
    block = tl.load(IDS + b * i_b + place, mask=place < live, other=0)
    at = (lists * SPLITS + split[:, None]) * (GROUP * picked) + m[None, :]
    parts = tl.load(SPLIT_SUMS + at, mask=(split < SPLITS)[:, None] & used[None, :], other=float("-inf"))
    top = tl.maximum(tl.max(parts, 0), LOWEST)
    if HAS_SINKS:
        sink = tl.load(SINKS + kv_head * GROUP + m // picked, mask=used, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    total = tl.sum(tl.exp2(parts - top[None, :]), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    # A row that sees nothing gives no block a share.
    norm = tl.where(used & (total > 0), top + tl.log2(total), float("inf"))
    at = (lists * blocks + place[:, None]) * (GROUP * picked) + m[None, :]
    sums = tl.load(BLOCK_SUMS + at, mask=(place < live)[:, None] & used[None, :], other=float("-inf"))
    mass = tl.sum(tl.exp2(sums - norm[None, :]), 1) / (GROUP * picked)
    tl.store(MASS + lists * blocks + block, mass, mask=place < live)


def _rows(q: Tensor, k: Tensor, query: str) -> int:
    """Rows that count, of all heads of a group."""
    return q.shape[1] // k.shape[1] * {"first": 1, "first_last": 2, "all": q.shape[2], "mean": 1}[query]


def _stages(q: Tensor, tall: int, block_size: int, query: str) -> int:
    """Buffers of K that fit; 0 if none does."""
    wide = max(16, triton.next_power_of_2(q.shape[3]))
    keys = max(64, block_size)
    itemsize = q.dtype.itemsize
    # Beside them the queries (a mean in two parts), and a mask on its way to the layout of the scores.
    fixed = tall * wide * itemsize * (2 if query == "mean" and itemsize == 2 else 1) + tall * keys * 4
    device = device_of(q.device)
    wanted = 4 if itemsize == 2 else 2
    return min(wanted, max(0, device.shared_bytes - RESERVE - fixed) // (keys * wide * itemsize))


def why_not(q: Tensor, k: Tensor, mask: Tensor, block_size: int, query: str) -> str | None:
    """Reason why the kernels cannot measure these blocks, or None."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or k.dtype != q.dtype:
        return f"dtypes {q.dtype} and {k.dtype}"
    if mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
        return f"mask dtype {mask.dtype}"
    if block_size & (block_size - 1) or not 8 <= block_size <= 128:
        return f"block_size {block_size} is not 8, 16, 32, 64 or 128"
    if q.shape[3] > 256:
        return f"head dim {q.shape[3]} is above 256"
    rows = _rows(q, k, query)
    # Exact products of float32 run on the ordinary arithmetic units: registers bound the rows.
    most = 32 if q.dtype == torch.float32 else 128
    if rows > most:
        return f"{rows} rows of a group are more than {most}"
    if _stages(q, max(16, triton.next_power_of_2(rows)), block_size, query) == 0:
        return f"{rows} rows of head dim {q.shape[3]} need more shared memory than the device has"
    return None


def block_mass_triton(
    q: Tensor,
    k: Tensor,
    mask: Tensor,
    ids: Tensor,
    count: Tensor,
    gate: Tensor,
    block_size: int,
    scale: float,
    query: str,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Same arguments and result as :func:`spec_compile.kernels.library.block_mass`, where :func:`why_not` is None.

    The number of splits depends on static shapes alone. Contexts below ``gate`` give zeros.
    """
    batch, heads, rows, dim = q.shape
    kv_heads, kv_len, blocks = k.shape[1], k.shape[2], ids.shape[2]
    group = heads // kv_heads
    counted = _rows(q, k, query)
    tall, wide = max(16, triton.next_power_of_2(counted)), max(16, triton.next_power_of_2(dim))
    subs = max(1, 64 // block_size)
    device = device_of(q.device)
    stages = _stages(q, tall, block_size, query)
    each = (stages * block_size * subs + tall) * wide * q.dtype.itemsize + 1024
    resident = max(1, min(3, device.shared_bytes // each))
    splits = max(1, min(64, device.processors * resident // (batch * kv_heads)))
    ids, count = ids.contiguous(), count.contiguous()
    mass = q.new_empty(batch, kv_heads, blocks, dtype=torch.float32)
    block_sums = q.new_empty(batch, kv_heads, blocks, counted, dtype=torch.float32)
    split_sums = q.new_empty(batch, kv_heads, splits, counted, dtype=torch.float32)
    steps = tuple(0 if x.shape[0] == 1 else x.stride(0) for x in (ids, count))
    is_bool = mask.dtype == torch.bool
    pdl = device.capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(q):
        _sum_kernel[(splits, kv_heads, batch)](
            q, k, mask.view(torch.uint8) if is_bool else mask, ids, count, gate, block_sums, split_sums, mass,
            *q.stride(), *k.stride(), *broadcast_strides(mask), *steps, rows, kv_len, blocks, counted // group,
            scale * (1.0 if softcap > 0 else LOG2E.value), softcap,
            KV_HEADS=kv_heads, GROUP=group, D=dim, BD=wide, M=tall, BLOCK=block_size, SUBS=subs, SPLITS=splits,
            SLICE=triton.next_power_of_2(triton.cdiv(blocks, splits)), QUERY=_QUERIES[query], MASK_KIND=1 if is_bool else 2,
            HIDDEN=0.0 if is_bool else hidden_threshold(mask.dtype), HAS_CAP=softcap > 0,
            PRECISION="ieee" if q.dtype == torch.float32 else None, PDL=pdl,
            num_warps=8 if tall > (16 if q.dtype == torch.float32 else 64) else 4, num_stages=stages, **options,
        )  # fmt: skip
        _share_kernel[(triton.cdiv(blocks, _SHARES), kv_heads, batch)](
            block_sums, split_sums, ids, count, gate, q if sinks is None else sinks.contiguous(), mass, *steps, blocks,
            counted // group,
            KV_HEADS=kv_heads, GROUP=group, M=tall, BLOCK=block_size, SPLITS=splits, BSPLITS=triton.next_power_of_2(splits),
            BLOCKS=_SHARES, HAS_SINKS=sinks is not None, PDL=pdl, **options,
        )  # fmt: skip
    return mass
