"""``select_blocks`` in Triton: ``block_scores_triton`` scores the blocks, one launch here runs the contest. No host reads.

The contest is an exact search for the budget's last score among order-preserving bits: every step counts the keys above two
probes, so that some 20 steps leave one value at the latest, whose ties go to the lowest places. Equal inputs give equal lists.
A KV head's programs hold its keys in registers: each searches all of them, and lists its part of the winners. Where all heads
compete, or a cache has very many blocks, one program reads them in every step. Where a step keeps every block, all launches
return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.block_scores_triton import batch_step, contest_budget, ordered_bits, score_blocks
from spec_compile.kernels.tiling import device_of

# Blocks whose keys one program holds in registers, and those of one step where it does not.
_MOST_IN_REGISTERS, _CHUNK = 16_384, 4096
# Places that one program lists: listing takes 8 bytes of shared memory each.
_PART, _MOST_IN_PART = 512, 2048


@triton.jit
def _score(key):
    """The score of ordered bits."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ (-2147483647 - 1), ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _keys(scores, blocks, at, there, HEADS: tl.constexpr, POOLED: tl.constexpr):
    """Ordered bits of the scores of one head, or of the mean of all."""
    if POOLED:
        s = tl.zeros(at.shape, tl.float32)
        for head in tl.static_range(HEADS):
            s += tl.load(scores + head * blocks + at, mask=there, other=0.0)
        s = s / HEADS
    else:
        s = tl.load(scores + at, mask=there, other=0.0)
    return ordered_bits(s)


@triton.jit
def _between(place, first, end):
    """``first <= place < end`` in one comparison."""
    return (place - first).to(tl.uint32, bitcast=True) < (end - first).to(tl.uint32, bitcast=True)


@triton.jit
def _first_probes(lo, hi):
    """Two keys that cut the scores between ``lo`` and ``hi`` in three: their bits would waste probes around zero."""
    bottom = _score(lo)
    top = _score(hi - 1)
    low = bottom + (top - bottom) * (1.0 / 3)
    high = bottom + (top - bottom) * (2.0 / 3)
    # NaN where an end is infinite.
    low = tl.minimum(tl.where(low == low, low, bottom), top)
    high = tl.minimum(tl.where(high == high, high, bottom), top)
    return ordered_bits(low), ordered_bits(high)


@triton.jit
def _probes(lo, hi):
    """Two keys that cut the range between ``lo`` and ``hi`` in three."""
    third = tl.maximum((hi - lo) // 3, 1)
    return lo + third, hi - third


@triton.jit
def _counts(key, low, high):
    """How many keys reach ``low``, and 2**16 times how many reach ``high``: fewer than 2**15 keys."""
    return tl.sum(tl.where(key >= high, 65537, tl.where(key >= low, 1, 0)), 0)


@triton.jit
def _narrow(lo, hi, at_lo, at_hi, low, high, at_low, at_high, budget):
    """The part of the range, cut at ``low`` and ``high``, whose ends count at least the budget and less than it."""
    above = at_high >= budget
    below = at_low < budget
    new_lo = tl.where(above, high, tl.where(below, lo, low))
    new_at_lo = tl.where(above, at_high, tl.where(below, at_lo, at_low))
    new_hi = tl.where(above, hi, tl.where(below, low, high))
    new_at_hi = tl.where(above, at_hi, tl.where(below, at_low, at_high))
    return new_lo, new_hi, new_at_lo, new_at_hi


@triton.jit
def _running_sum(x, CHUNK: tl.constexpr):
    """Cumulative sum of a chunk: of rows of 32 and of their totals, which needs less exchange between warps."""
    rows = tl.reshape(x, [CHUNK // 32, 32])
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], [CHUNK])


@triton.jit
def _bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    end = tl.maximum(tl.minimum(committed, live - recent), sink)
    return end, tl.minimum(contest_budget(live, gate, tokens, floor, BLOCK, SHARE), end - sink)


@triton.jit
def _contest(
    ids, live, position, gate, sink, recent, tokens, floor, BLOCK: tl.constexpr, SHARE: tl.constexpr, GROUPS: tl.constexpr
):
    """Past-the-last place of the contest, which starts at ``sink``, and how many of its places win."""
    # Ids ascend: the blocks below the first draft row are the first ones of the list. Look for their end in groups of 128.
    limit = position.to(tl.int32) // BLOCK
    last = tl.arange(0, GROUPS) * 128 + 127
    below = tl.load(ids + last, mask=last < live, other=2147483647) < limit
    place = tl.sum(below.to(tl.int32), 0) * 128 + tl.arange(0, 128)
    below = tl.load(ids + place, mask=place < live, other=2147483647) < limit
    committed = tl.max(tl.where(below, place + 1, 0), 0)
    committed = tl.maximum(committed, tl.min(place, 0))
    return _bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK, SHARE)


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


@triton.jit
def _scored_keys(scores, keys, place, blocks, live, sink, end, HEADS: tl.constexpr, POOLED: tl.constexpr):
    """Keys of some places that the score kernel has scored, 0 outside the contest."""
    if POOLED:
        inside = _between(place, sink, end)
        return tl.where(inside, _keys(scores, blocks, place, inside, HEADS, POOLED), 0)
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
        end, budget = _contest(ids, live, position, gate, sink, recent, tokens, floor, BLOCK, SHARE, CHUNK // 128)
    else:
        # All that is needed is loaded at once. Entries that are not used, -1, are above every limit.
        listed = tl.load(ids + place, mask=place < blocks, other=-1)
        limit = position.to(tl.int32) // BLOCK
        below = _between(listed, 0, limit)
        key = _keys(scores, blocks, listed, below, HEADS, POOLED)
        mine = _keys(scores, blocks, block, _between(block, 0, limit), HEADS, POOLED)
        committed = tl.sum(below.to(tl.int32), 0)
        end, budget = _bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK, SHARE)
        key = tl.where(_between(place, sink, end), key, 0)
        mine = tl.where(_between(own, sink, end), mine, 0)
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
    low, high = _first_probes(lo, hi)
    while (at_lo != budget) & (hi - lo > 1) & (budget > 0):
        counts = _counts(key, low, high)
        lo, hi, at_lo, at_hi = _narrow(lo, hi, at_lo, at_hi, low, high, counts & 65535, counts >> 16, budget)
        low, high = _probes(lo, hi)
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
        keep = tl.where((equal != 0) & (ties + _running_sum(equal, PART) <= room), 1, keep)
    target = start + _running_sum(keep, PART) - 1
    tl.store(OUT_IDS + row + target, block, mask=keep != 0)
    tl.store(OUT_FULL + row + target, flag, mask=keep != 0)


@triton.jit(do_not_specialize=["sink", "recent", "tokens", "floor"])
def _streamed_contest_kernel(
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
    end, budget = _contest(
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
                inside = _between(place, sink, end)
                key = tl.where(inside, _keys(scores, blocks, at, inside, HEADS, POOLED), 0)
                tl.store(keys + place, key, mask=place < end)
            lowest = tl.minimum(lowest, key - 1)
            highest = tl.maximum(highest, key)
    lo = tl.min(lowest, 0) + 1
    hi = tl.max(highest, 0) + 1
    tl.debug_barrier()
    at_lo = size
    at_hi = 0
    low, high = _first_probes(lo, hi)
    while (at_lo != budget) & (hi - lo > 1) & (budget > 0):
        at_low = tl.zeros([CHUNK], tl.int32)
        at_high = tl.zeros([CHUNK], tl.int32)
        for head in tl.range(0, heads):
            keys = KEYS + row + head * blocks
            for start in tl.range(0, end, CHUNK):
                key = tl.load(keys + start + chunk, mask=start + chunk < end, other=0)
                at_low += (key >= low).to(tl.int32)
                at_high += (key >= high).to(tl.int32)
        lo, hi, at_lo, at_hi = _narrow(
            lo, hi, at_lo, at_hi, low, high, tl.sum(at_low, 0), tl.sum(at_high, 0), budget
        )  # fmt: skip
        low, high = _probes(lo, hi)

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
                rank = ties + _running_sum(equal, CHUNK)
                keep = tl.where(rank > budget - at_hi, keep - equal, keep)
                ties += tl.sum(equal, 0)
            target = count + _running_sum(keep, CHUNK) - 1
            tl.store(OUT_IDS + out + target, block, mask=keep != 0)
            tl.store(OUT_FULL + out + target, flag, mask=keep != 0)
            count += tl.sum(keep, 0)
        tl.store(OUT_COUNT + b * HEADS + own + head, count)
        _fill(OUT_IDS + out, OUT_FULL + out, count, blocks, CHUNK)


def contest_warps(chunk: int) -> int:
    return 4 if chunk < 1024 else 8 if chunk < 8192 else 16


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
            _streamed_contest_kernel[(1 if joint else kv_heads, batch)](
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
