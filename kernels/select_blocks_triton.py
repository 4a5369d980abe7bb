"""``select_blocks`` in Triton: ``block_scores_triton`` scores the blocks, one launch here runs the contest. No host reads.

A KV head's programs hold its keys in registers: each searches all of them, and lists its part of the winners. Where all heads
compete, or a cache has very many blocks, ``streamed_contest_triton`` runs instead. Where a step keeps every block, all launches
return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.block_scores_triton import batch_step, score_blocks
from spec_compile.kernels.contest_triton import (
    between,
    contest_bounds,
    contest_keys,
    contest_of_list,
    first_probes,
    narrow,
    probes,
    running_sum,
)
from spec_compile.kernels.streamed_contest_triton import streamed_contest_kernel
from spec_compile.kernels.tiling import device_of

# Blocks whose keys one program holds in registers, and those of one step where it does not.
_MOST_IN_REGISTERS, _CHUNK = 16_384, 4096
# Places that one program lists: listing takes 8 bytes of shared memory each.
_PART, _MOST_IN_PART = 512, 2048


@triton.jit
def _counts(key, low, high):
    """How many keys reach ``low``, and 2**16 times how many reach ``high``: fewer than 2**15 keys."""
    return tl.sum(tl.where(key >= high, 65537, tl.where(key >= low, 1, 0)), 0)


@triton.jit
def _scored_keys(scores, keys, place, blocks, live, sink, end, HEADS: tl.constexpr, POOLED: tl.constexpr):
    """Keys of some places that the score kernel has scored, 0 outside the contest."""
    if POOLED:
        inside = between(place, sink, end)
        return tl.where(inside, contest_keys(scores, blocks, place, inside, HEADS, POOLED), 0)
    else:
        # Loaded up to a constant end, so that loads are wide.
        key = tl.load(keys + place, mask=place < blocks, other=0)
        return tl.where(place < live, key, 0)


# blocks stays specialised: a multiple of 16 lets lists be read and written 16 bytes at a time.
@triton.jit(do_not_specialize=["sink", "recent", "tokens", "floor"])
def _contest_kernel(
    SCORES, IDS, COUNT, FULL, POSITION, GATE, KEYS, OUT_IDS, OUT_COUNT, OUT_FULL, i_b, c_b, f_b, p_b,
    blocks, sink, recent, tokens, floor,
    HEADS: tl.constexpr, POOLED: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, SCORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every head for itself, its keys in registers. Programs of a head search alike, and list the winners of their part each."""
    head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * PART
    ids = IDS + b * i_b
    full = FULL + b * f_b
    row = (b * HEADS + head) * blocks
    if PDL and not SCORED:
        gdc_wait()
    # The score kernel starts its dependents after all before it is done: what it does not write can be read at once.
    live = tl.load(COUNT + b * c_b)
    position = tl.load(POSITION + b * p_b)
    own = first + tl.arange(0, PART)
    block = tl.load(ids + own, mask=own < blocks, other=-1)
    flag = tl.load(full + own, mask=own < blocks, other=0)
    gate = tl.load(GATE)
    scores = SCORES + (b * HEADS * blocks if POOLED else row)
    place = tl.arange(0, CHUNK)
    if SCORED:
        end, budget = contest_of_list(ids, live, position, gate, sink, recent, tokens, floor, BLOCK, SHARE, CHUNK // 128)
    else:
        # Where no block is left out, places are ids: read by them without waiting for the list, whose last entry tells.
        key = contest_keys(scores, blocks, place, place < blocks, HEADS, POOLED)
        mine = contest_keys(scores, blocks, own, own < blocks, HEADS, POOLED)
        limit = position.to(tl.int32) // BLOCK
        committed = tl.minimum(live, limit)
        if tl.load(ids + live - 1, mask=live > 0, other=-1) != live - 1:
            # Entries that are not used, -1, are above every limit.
            listed = tl.load(ids + place, mask=place < blocks, other=-1)
            below = between(listed, 0, limit)
            key = contest_keys(scores, blocks, listed, below, HEADS, POOLED)
            mine = contest_keys(scores, blocks, block, between(block, 0, limit), HEADS, POOLED)
            committed = tl.sum(below.to(tl.int32), 0)
        end, budget = contest_bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK, SHARE)
        key = tl.where(between(place, sink, end), key, 0)
        mine = tl.where(between(own, sink, end), mine, 0)
    size = end - sink
    kept = live - size + budget
    if first == 0:
        tl.store(OUT_COUNT + b * HEADS + head, kept)
    unused = (own >= kept) & (own < blocks)
    tl.store(OUT_IDS + row + own, -1, mask=unused)
    tl.store(OUT_FULL + row + own, 0, mask=unused)
    if PDL and SCORED:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    if budget == size:
        tl.store(OUT_IDS + row + own, block, mask=own < live)
        tl.store(OUT_FULL + row + own, flag, mask=own < live)
        return

    if SCORED:
        key = _scored_keys(scores, KEYS + row, place, blocks, live, sink, end, HEADS, POOLED)
        mine = _scored_keys(scores, KEYS + row, own, blocks, live, sink, end, HEADS, POOLED)
    # at_lo keys are at least lo, which is no fewer than the budget; at_hi at least hi, which is fewer.
    lo = tl.min(key - 1, 0) + 1
    hi = tl.max(key, 0) + 1
    at_lo = size
    at_hi = 0
    step = 0
    low, high = first_probes(lo, hi)
    while (at_lo != budget) & (hi - lo > 1) & (budget > 0):
        counts = _counts(key, low, high)
        lo, hi, at_lo, at_hi = narrow(lo, hi, at_lo, at_hi, low, high, counts & 65535, counts >> 16, budget)
        step += 1
        # A step of few keys takes less time than interpolation does.
        low, high = probes(lo, hi, at_lo, at_hi, budget, step, 8 if CHUNK >= 4096 else 0)
    # From the edge on all win, and of those from lo to it, which are ties, the first ones. Keys of 0 lie outside the contest
    # and are kept: less one, they are above all.
    edge = tl.where(at_lo == budget, lo, hi)
    room = budget - at_hi
    counts = tl.where(key - 1 >= lo - 1, 1, 0) + tl.where(key - 1 >= edge - 1, 65536, 0)
    counts = tl.sum(tl.where(place < tl.minimum(first, live), counts, 0), 0)
    ties = (counts & 65535) - (counts >> 16)
    start = (counts >> 16) + tl.minimum(ties, room)
    keep = tl.where((own < live) & (mine - 1 >= edge - 1), 1, 0)
    if at_lo != budget:
        equal = tl.where((mine >= lo) & (mine < edge), 1, 0)
        keep = tl.where((equal != 0) & (ties + running_sum(equal, PART) <= room), 1, keep)
    target = start + running_sum(keep, PART) - 1
    tl.store(OUT_IDS + row + target, block, mask=keep != 0)
    tl.store(OUT_FULL + row + target, flag, mask=keep != 0)


def contest_warps(chunk: int) -> int:
    return 4 if chunk <= 2048 else 8


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
    """Same arguments and results as :func:`spec_compile.kernels.library.select_blocks`, where
    :func:`spec_compile.kernels.block_scores_triton.why_not` is None."""
    batch = q.shape[0]
    blocks = ids.shape[2]
    given = summary if scores is None else scores
    assert given is not None
    kv_heads = given.shape[1]
    ids, count, full, position = (x.contiguous() for x in (ids, count, full, position))
    out_ids = ids.new_empty(batch, kv_heads, blocks)
    out_count = count.new_empty(batch, kv_heads)
    out_full = full.new_empty(batch, kv_heads, blocks)
    if out_ids.numel() == 0:
        return out_ids, out_count.zero_(), out_full
    rule = (sink, recent, tokens, floor)
    scored, pooled = scores is None, heads == "pooled"
    streamed = joint or blocks > _MOST_IN_REGISTERS
    # Ordered scores, where they are not computed in registers.
    keys = (ids.new_empty(batch, kv_heads, blocks) if streamed or (scored and not pooled) else out_ids).view(torch.uint32)
    pdl = device_of(q.device).capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(q):
        if scores is None:
            assert summary is not None
            scores = q.new_empty(batch, kv_heads, blocks, dtype=torch.float32) if pooled else keys
            lists = (ids, count, position, gate)
            score_blocks(q, summary, scores, lists, rule, block_size, scale, query, aggregate, share, not pooled, options)
        operands = (
            scores.contiguous(), ids, count, full, position, gate, keys, out_ids, out_count, out_full,
            batch_step(ids), batch_step(count), batch_step(full), batch_step(position), blocks, *rule,
        )  # fmt: skip
        if streamed:
            streamed_contest_kernel[(1 if joint else kv_heads, batch)](
                *operands, HEADS=kv_heads, JOINT=joint, POOLED=pooled, CHUNK=_CHUNK,
                GROUPS=triton.next_power_of_2(triton.cdiv(blocks, 128)), BLOCK=block_size, SHARE=share, SCORED=scored, PDL=pdl,
                num_warps=16, **options,
            )  # fmt: skip
        else:
            chunk = max(256, triton.next_power_of_2(blocks))
            # As many programs as processors: searching again costs no time on an idle one.
            parts = max(1, min(chunk // _PART, device_of(q.device).processors // (kv_heads * batch)))
            part = min(_MOST_IN_PART, triton.next_power_of_2(triton.cdiv(chunk, parts)))
            _contest_kernel[(kv_heads, batch, chunk // part)](
                *operands, HEADS=kv_heads, POOLED=pooled, CHUNK=chunk, PART=part, BLOCK=block_size, SHARE=share,
                SCORED=scored, PDL=pdl, num_warps=contest_warps(chunk), **options,
            )  # fmt: skip
    return out_ids, out_count, out_full
