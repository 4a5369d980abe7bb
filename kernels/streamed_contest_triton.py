"""The contest of ``select_blocks_triton`` where all heads compete, or a cache has more blocks than registers hold."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.contest_triton import between, contest_keys, contest_of_list, first_probes, narrow, probes, running_sum


@triton.jit
def _copy(ids, full, out_ids, out_full, live, blocks, CHUNK: tl.constexpr):
    """The whole live list."""
    for start in tl.range(0, live, CHUNK):
        place = start + tl.arange(0, CHUNK)
        block = tl.load(ids + place, mask=place < blocks, other=0)
        flag = tl.load(full + place, mask=place < blocks, other=0)
        tl.store(out_ids + place, block, mask=place < live)
        tl.store(out_full + place, flag, mask=place < live)


@triton.jit
def _fill(ids, full, count, blocks, CHUNK: tl.constexpr):
    """Mark the places of a list from ``count`` on as unused."""
    # Whole groups of 16, so that stores are wide.
    start = tl.cdiv(count, 16) * 16
    few = count + tl.arange(0, 16)
    odd = few < tl.minimum(start, blocks)
    tl.store(ids + few, -1, mask=odd)
    tl.store(full + few, 0, mask=odd)
    for at in tl.range(start, blocks, CHUNK):
        place = at + tl.arange(0, CHUNK)
        tl.store(ids + place, -1, mask=place < blocks)
        tl.store(full + place, 0, mask=place < blocks)


@triton.jit(do_not_specialize=["sink", "recent", "tokens", "floor"])
def streamed_contest_kernel(
    SCORES, IDS, COUNT, FULL, POSITION, GATE, KEYS, OUT_IDS, OUT_COUNT, OUT_FULL, i_b, c_b, f_b, p_b,
    blocks, sink, recent, tokens, floor,
    HEADS: tl.constexpr, JOINT: tl.constexpr, POOLED: tl.constexpr, CHUNK: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, SCORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One contest of all heads, or one of more blocks than registers hold: keys are read from memory in every step."""
    b = tl.program_id(1).to(tl.int64)
    own = 0 if JOINT else tl.program_id(0)
    heads = HEADS if JOINT else 1
    ids = IDS + b * i_b
    full = FULL + b * f_b
    row = (b * HEADS + own) * blocks
    chunk = tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = tl.load(COUNT + b * c_b)
    position = tl.load(POSITION + b * p_b)
    end, budget = contest_of_list(
        ids, live, position, tl.load(GATE), sink, recent, tokens, floor, BLOCK, SHARE, GROUPS
    )  # fmt: skip
    size = end - sink
    if budget == size:
        for head in tl.range(0, heads):
            out = row + head * blocks
            tl.store(OUT_COUNT + b * HEADS + own + head, live)
            _copy(ids, full, OUT_IDS + out, OUT_FULL + out, live, blocks, CHUNK)
            _fill(OUT_IDS + out, OUT_FULL + out, live, blocks, CHUNK)
        return

    size *= heads
    budget *= heads
    lowest = tl.full([CHUNK], 4294967295, tl.uint32)
    highest = tl.full([CHUNK], 0, tl.uint32)
    for head in tl.range(0, heads):
        keys = KEYS + row + head * blocks
        for start in tl.range(0, end, CHUNK):
            place = start + chunk
            if SCORED and not POOLED:
                key = tl.load(keys + place, mask=place < end, other=0)
            else:
                at = place
                if not SCORED:
                    at = tl.load(ids + place, mask=place < end, other=0)
                scores = SCORES + (b * HEADS * blocks if POOLED else row + head * blocks)
                inside = between(place, sink, end)
                key = tl.where(inside, contest_keys(scores, blocks, at, inside, HEADS, POOLED), 0)
                tl.store(keys + place, key, mask=place < end)
            lowest = tl.minimum(lowest, key - 1)
            highest = tl.maximum(highest, key)
    lo = tl.min(lowest, 0) + 1
    hi = tl.max(highest, 0) + 1
    tl.debug_barrier()
    at_lo = size
    at_hi = 0
    step = 0
    low, high = first_probes(lo, hi)
    while (at_lo != budget) & (hi - lo > 1) & (budget > 0):
        at_low = tl.zeros([CHUNK], tl.int32)
        at_high = tl.zeros([CHUNK], tl.int32)
        for head in tl.range(0, heads):
            keys = KEYS + row + head * blocks
            for start in tl.range(0, end, CHUNK):
                key = tl.load(keys + start + chunk, mask=start + chunk < end, other=0)
                at_low += (key >= low).to(tl.int32)
                at_high += (key >= high).to(tl.int32)
        lo, hi, at_lo, at_hi = narrow(
            lo, hi, at_lo, at_hi, low, high, tl.sum(at_low, 0), tl.sum(at_high, 0), budget
        )  # fmt: skip
        step += 1
        low, high = probes(lo, hi, at_lo, at_hi, budget, step, 8)

    ties = 0
    for head in tl.range(0, heads):
        out = row + head * blocks
        count = 0
        for start in tl.range(0, live, CHUNK):
            place = start + chunk
            block = tl.load(ids + place, mask=place < live, other=0)
            flag = tl.load(full + place, mask=place < live, other=0)
            key = tl.load(KEYS + out + place, mask=place < end, other=0)
            keep = tl.where((place < live) & (key - 1 >= lo - 1), 1, 0)
            if at_lo != budget:
                equal = tl.where((key >= lo) & (key < hi), 1, 0)
                rank = ties + running_sum(equal, CHUNK)
                keep = tl.where(rank > budget - at_hi, keep - equal, keep)
                ties += tl.sum(equal, 0)
            target = count + running_sum(keep, CHUNK) - 1
            tl.store(OUT_IDS + out + target, block, mask=keep != 0)
            tl.store(OUT_FULL + out + target, flag, mask=keep != 0)
            count += tl.sum(keep, 0)
        tl.store(OUT_COUNT + b * HEADS + own + head, count)
        _fill(OUT_IDS + out, OUT_FULL + out, count, blocks, CHUNK)
