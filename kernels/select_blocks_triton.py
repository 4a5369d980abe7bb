"""``select_blocks`` in Triton: one launch scores the blocks, a second runs the contest. No host reads, no float atomics.

The contest is an exact radix select on order-preserving bits of the scores, 8 bits a pass, ties to the lowest place, so that
equal inputs give equal lists. It takes one program per KV head (or per batch row where all heads compete).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_compile.kernels.tiling import RESERVE, device_of

_MAX_CHUNK = 4096


@triton.jit(do_not_specialize=["rows", "blocks"])
def _score_kernel(
    Q, SUMMARY, SCORES, q_b, q_h, q_t, q_d, s_b, s_h, s_n, s_r, s_d, rows, blocks, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    QUERY: tl.constexpr, BOUNDS: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    m = tl.arange(0, M)
    q_at = Q + b * q_b + d[None, :] * q_d
    if QUERY == 3:
        # The mean row of each head of the group.
        used = m < GROUP
        head = kv_head * GROUP + m
        q = tl.zeros([M, BD], tl.float32)
        for t in tl.range(0, rows):
            at = q_at + head[:, None] * q_h + t * q_t
            q += tl.load(at, mask=used[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        q = q / rows
    else:
        picked = 1 if QUERY == 0 else (2 if QUERY == 1 else rows)
        g = m // picked
        t = m - g * picked
        if QUERY == 1:
            t = t * (rows - 1)
        used = g < GROUP
        head = kv_head * GROUP + g
        at = q_at + head[:, None] * q_h + t[:, None] * q_t
        q = tl.load(at, mask=used[:, None] & (d < D)[None, :], other=0.0)
    s_at = SUMMARY + b * s_b + kv_head.to(tl.int64) * s_h + block.to(tl.int64)[None, :] * s_n + d[:, None] * s_d
    there = (block < blocks)[None, :] & (d < D)[:, None]
    low = tl.load(s_at, mask=there, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        low = low.to(tl.float32)
    if BOUNDS:
        high = tl.load(s_at + s_r, mask=there, other=0.0)
        zero = tl.zeros([M, BD], q.dtype)
        if WIDE:
            high = high.to(tl.float32)
        # Maxima of bfloat16 come out as float32.
        s = tl.dot(tl.maximum(q, zero).to(high.dtype), high, input_precision="ieee")
        s += tl.dot(tl.minimum(q, zero).to(low.dtype), low, input_precision="ieee")
    else:
        s = tl.dot(q, low, input_precision="ieee")
    s = s * scale
    s = tl.where(s == s, s, float("-inf"))
    if MEAN:
        many = tl.sum(used.to(tl.float32), 0)
        out = tl.sum(tl.where(used[:, None], s, 0.0), 0) / many
    else:
        out = tl.max(tl.where(used[:, None], s, float("-inf")), 0)
    tl.store(SCORES + (b * KV_HEADS + kv_head) * blocks + block, out, mask=block < blocks)


@triton.jit
def _keys(SCORES, head_base, blocks, ids, place, first, end, HEADS: tl.constexpr, POOLED: tl.constexpr):
    """Bits that order like the scores of the listed blocks, 0 outside the contest."""
    inside = (place >= first) & (place < end)
    if POOLED:
        s = tl.zeros(place.shape, tl.float32)
        for head in tl.static_range(HEADS):
            s += tl.load(SCORES + head_base + head * blocks + ids, mask=inside, other=0.0)
        s = s / HEADS
    else:
        s = tl.load(SCORES + head_base + ids, mask=inside, other=0.0)
    s = tl.where(s == s, s, float("-inf")) + 0.0
    bits = s.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | (-2147483647 - 1))
    return ordered.to(tl.uint32, bitcast=True), inside


@triton.jit(do_not_specialize=["blocks", "sink", "recent", "tokens", "floor"])
def _contest_kernel(
    SCORES, IDS, COUNT, FULL, POSITION, GATE, OUT_IDS, OUT_COUNT, OUT_FULL, i_b, c_b, f_b, p_b,
    blocks, block_size, sink, recent, tokens, floor,
    HEADS: tl.constexpr, JOINT: tl.constexpr, POOLED: tl.constexpr, CHUNK: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    live = tl.load(COUNT + b * c_b)
    position = tl.load(POSITION + b * p_b)
    ids = IDS + b * i_b
    full = FULL + b * f_b
    chunk = tl.arange(0, CHUNK)

    # Ids ascend, so the blocks below the first draft row are the first ones of the list.
    committed = 0
    for start in tl.range(0, live, CHUNK):
        place = start + chunk
        block = tl.load(ids + place, mask=place < live, other=0)
        below = (place < live) & ((block.to(tl.int64) + 1) * block_size <= position)
        committed += tl.sum(below.to(tl.int32), 0)
    first = sink
    end = tl.minimum(committed, live - recent)
    size = tl.maximum(end - first, 0)
    length = live * block_size
    if tokens > 0:
        budget = tokens // block_size
    else:
        kept = tl.floor((length - floor).to(tl.float64) * SHARE + floor).to(tl.int32)
        budget = tl.where(length <= floor, live, tl.maximum(kept // block_size, 0))
    budget = tl.where(length < tl.load(GATE), live, budget)
    if JOINT:
        own = 0
        heads = HEADS
        budget = tl.minimum(budget, live) * HEADS
        size = size * HEADS
    else:
        own = tl.program_id(0)
        heads = 1
    budget = tl.minimum(budget, size)
    base = b * HEADS * blocks
    if not POOLED:  # noqa: SIM102 (constants of the kernel)
        if not JOINT:
            base += tl.program_id(0).to(tl.int64) * blocks

    threshold = tl.zeros([1], tl.uint32)
    left = budget
    bins = tl.arange(0, 256)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for head in tl.range(0, heads):
            for start in tl.range(0, live, CHUNK):
                place = start + chunk
                block = tl.load(ids + place, mask=place < live, other=0)
                at = base if POOLED else base + head * blocks
                key, inside = _keys(SCORES, at, blocks, block, place, first, end, HEADS, POOLED)
                if step > 0:
                    # Two shifts: by 32 at once would be undefined.
                    inside = inside & (((key >> shift) >> 8) == ((threshold >> shift) >> 8))
                bucket = ((key >> shift) & 255).to(tl.int32)
                counts += tl.histogram(tl.where(inside, bucket, 0), 256)
                outside = CHUNK - tl.sum(inside.to(tl.int32), 0)
                counts -= tl.where(bins == 0, outside, 0)
        # Keys whose digit is at least that of the bin.
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(at_least >= left, bins, -1), 0)
        above = tl.sum(tl.where(bins > digit, counts, 0), 0)
        left -= above
        threshold += tl.maximum(digit, 0).to(tl.uint32) << shift

    ties = 0
    for head in tl.range(0, heads):
        out = b * HEADS * blocks + (own + head) * blocks
        count = 0
        for start in tl.range(0, live, CHUNK):
            place = start + chunk
            listed = place < live
            block = tl.load(ids + place, mask=listed, other=0)
            flag = tl.load(full + place, mask=listed, other=0)
            at = base if POOLED else base + head * blocks
            key, inside = _keys(SCORES, at, blocks, block, place, first, end, HEADS, POOLED)
            equal = inside & (key == threshold)
            rank = ties + tl.cumsum(equal.to(tl.int32), 0) - 1
            won = inside & ((key > threshold) | (equal & (rank < left)))
            won = won & (budget > 0)
            ties += tl.sum(equal.to(tl.int32), 0)
            keep = (listed & (inside == 0)) | won
            target = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(OUT_IDS + out + target, block, mask=keep)
            tl.store(OUT_FULL + out + target, flag, mask=keep)
            count += tl.sum(keep.to(tl.int32), 0)
        tl.store(OUT_COUNT + b * HEADS + own + head, count)
        for start in tl.range(0, blocks, CHUNK):
            place = start + chunk
            unused = (place >= count) & (place < blocks)
            tl.store(OUT_IDS + out + place, -1, mask=unused)
            tl.store(OUT_FULL + out + place, 0, mask=unused)


def why_not(q: Tensor, summary: Tensor, query: str, aggregate: str) -> str | None:
    """Reason why the kernels cannot run this selection, or None."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or summary.dtype != q.dtype:
        return f"dtypes {q.dtype} and {summary.dtype}"
    if aggregate == "softmax":
        return "aggregate 'softmax' needs the scores of all blocks at once"
    group = q.shape[1] // summary.shape[1]
    rows = {"first": 1, "first_last": 2, "all": q.shape[2], "mean": 1}[query]
    if group * rows > 128:
        return f"{group} heads a group x {rows} rows are more than 128"
    if q.shape[3] > 256:
        return f"head dim {q.shape[3]} is above 256"
    itemsize = 4 if query == "mean" else q.dtype.itemsize
    tall = max(16, 1 << (group * rows - 1).bit_length())
    # Measured on compiled kernels: tiles of both bounds, and the queries (their positive and negative parts when tall).
    needed = (2 * 64 + (2 if tall > 32 else 1) * tall) * max(16, 1 << (q.shape[3] - 1).bit_length()) * itemsize
    if needed + RESERVE > device_of(q.device).shared_bytes and q.device.type == "cuda":
        return f"{tall} rows of head dim {q.shape[3]} need more shared memory than the device has"
    return None


def _scores(q: Tensor, summary: Tensor, blocks: int, scale: float, query: str, aggregate: str) -> Tensor:
    """Score of every block, float32 ``[B, Hkv, NB]``; those of blocks outside the contest mean nothing."""
    batch, heads, rows, dim = q.shape
    kv_heads = summary.shape[1]
    group = heads // kv_heads
    picked = {"first": 1, "first_last": 2, "all": rows, "mean": 1}[query]
    tile = 64
    scores = q.new_empty(batch, kv_heads, blocks, dtype=torch.float32)
    _score_kernel[(triton.cdiv(blocks, tile), kv_heads, batch)](
        q, summary, scores, *q.stride(), *summary.stride(), rows, blocks, scale,
        KV_HEADS=kv_heads, GROUP=group, D=dim, BD=max(16, triton.next_power_of_2(dim)),
        M=max(16, triton.next_power_of_2(group * picked)), BN=tile,
        QUERY={"first": 0, "first_last": 1, "all": 2, "mean": 3}[query], BOUNDS=summary.shape[3] == 2,
        MEAN=aggregate == "mean", WIDE=query == "mean" and q.dtype != torch.float32,
    )  # fmt: skip
    return scores


def select_blocks_triton(
    q: Tensor,
    summary: Tensor | None,
    scores: Tensor | None,
    ids: Tensor,
    count: Tensor,
    full: Tensor,
    position: Tensor,
    gate: Tensor,
    block_size: int,
    scale: float,
    query: str,
    aggregate: str,
    heads: str,
    joint: bool,
    sink: int,
    recent: int,
    tokens: int,
    share: float,
    floor: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same arguments and results as :func:`spec_compile.kernels.library.select_blocks`, where :func:`why_not` is None."""
    batch, blocks = q.shape[0], ids.shape[2]
    given = summary if scores is None else scores
    assert given is not None
    kv_heads = given.shape[1]
    ids, count, full, position = (x.contiguous() for x in (ids, count, full, position))
    out_ids = ids.new_empty(batch, kv_heads, blocks)
    out_count = count.new_empty(batch, kv_heads)
    out_full = full.new_empty(batch, kv_heads, blocks)
    chunk = min(_MAX_CHUNK, max(256, triton.next_power_of_2(blocks)))

    def step(x: Tensor) -> int:
        return 0 if x.shape[0] == 1 else x.stride(0)

    with torch.cuda.device_of(q):
        if scores is None:
            assert summary is not None
            scores = _scores(q, summary, blocks, scale, query, aggregate)
        _contest_kernel[(1 if joint else kv_heads, batch)](
            scores.contiguous(), ids, count, full, position, gate, out_ids, out_count, out_full, step(ids), step(count), step(full), step(position),
            blocks, block_size, sink, recent, tokens, floor,
            HEADS=kv_heads, JOINT=joint, POOLED=heads == "pooled", CHUNK=chunk, SHARE=share, num_warps=8 if chunk > 1024 else 4,
        )  # fmt: skip
    return out_ids, out_count, out_full
