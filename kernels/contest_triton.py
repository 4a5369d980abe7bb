"""The contest of KV blocks for a budget, as both of its Triton kernels run it: an exact search among order-preserving bits.

Every step counts the keys above two probes, so that some 30 steps leave one value at the latest, whose ties go to the lowest
places. Equal inputs give equal lists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from spec_compile.kernels.block_scores_triton import contest_budget, ordered_bits


@triton.jit
def _score(key):
    """The score of ordered bits."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ (-2147483647 - 1), ~bits).to(tl.float32, bitcast=True)


@triton.jit
def contest_keys(scores, blocks, at, there, HEADS: tl.constexpr, POOLED: tl.constexpr):
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
def between(place, first, end):
    """``first <= place < end`` in one comparison."""
    return (place - first).to(tl.uint32, bitcast=True) < (end - first).to(tl.uint32, bitcast=True)


@triton.jit
def first_probes(lo, hi):
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
def probes(lo, hi, at_lo, at_hi, budget, step, EVEN_STEPS: tl.constexpr):
    """Two keys within the range: in the first steps close to where the budget lies if its keys lie evenly, then its thirds."""
    # Thirds end the search of a distribution that no line resembles.
    width = hi - lo
    third = tl.maximum(width // 3, 1)
    low = lo + third
    high = hi - third
    # Two conditions: where none interpolates, the compiler shall not meet the second.
    if EVEN_STEPS > 0:  # noqa: SIM102
        if step < EVEN_STEPS:
            share = 1.0 / (at_lo - at_hi).to(tl.float32)
            above = (budget - at_hi).to(tl.float32) * share
            # Half a standard deviation of a rank, and 2 % for the curve of the distribution: the fewest steps in simulations.
            margin = 0.5 * tl.sqrt(tl.maximum(above * (1.0 - above) * share, 0.25 * share * share)) + 0.02
            reach = tl.minimum(width.to(tl.float32), 4294967040.0)
            down = (reach * tl.minimum(above + margin, 1.0)).to(tl.uint32)
            up = (reach * tl.maximum(above - margin, 0.0)).to(tl.uint32)
            low = hi - tl.maximum(tl.minimum(down, width - 1), 1)
            high = hi - tl.maximum(tl.minimum(up, width - 1), 1)
    return low, high


@triton.jit
def narrow(lo, hi, at_lo, at_hi, low, high, at_low, at_high, budget):
    """The part of the range, cut at ``low`` and ``high``, whose ends count at least the budget and less than it."""
    above = at_high >= budget
    below = at_low < budget
    new_lo = tl.where(above, high, tl.where(below, lo, low))
    new_at_lo = tl.where(above, at_high, tl.where(below, at_lo, at_low))
    new_hi = tl.where(above, hi, tl.where(below, low, high))
    new_at_hi = tl.where(above, at_hi, tl.where(below, at_low, at_high))
    return new_lo, new_hi, new_at_lo, new_at_hi


@triton.jit
def running_sum(x, CHUNK: tl.constexpr):
    """Cumulative sum of a chunk: of rows of 32 and of their totals, which needs less exchange between warps."""
    rows = tl.reshape(x, [CHUNK // 32, 32])
    totals = tl.sum(rows, 1)
    before = tl.cumsum(totals, 0) - totals
    return tl.reshape(tl.cumsum(rows, 1) + before[:, None], [CHUNK])


@triton.jit
def contest_bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    end = tl.maximum(tl.minimum(committed, live - recent), sink)
    return end, tl.minimum(contest_budget(live, gate, tokens, floor, BLOCK, SHARE), end - sink)


@triton.jit
def contest_of_list(
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
    return contest_bounds(committed, live, gate, sink, recent, tokens, floor, BLOCK, SHARE)
