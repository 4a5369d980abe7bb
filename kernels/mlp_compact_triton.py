"""The lists of channels that tiles kept, side by side in one list, for the launches behind it to read at any place.

A launch of its own: had every program of the next one to find its channels among the counts of all tiles, the search would take
longer than the reading of few channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tiles"])
def mlp_compact_kernel(LIST, COUNT, KEPT, TOTAL, tiles, WIDTH: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr):
    """Copy the first ``COUNT[t]`` ids of each tile's ``WIDTH`` places in ``LIST`` behind those of the tiles before it, and store
    how many there are; a program has one tile."""
    tile = tl.program_id(0)
    t = tl.arange(0, TILES)
    j = tl.arange(0, WIDTH)
    if PDL:
        # The next launch waits for this one, which does nothing before its own wait: it may come up while the tiles are computed.
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.load(COUNT + t, mask=t < tiles, other=0)
    # Places that hold nothing are read, too: waiting for the count would take longer.
    channel = tl.load(LIST + tile * WIDTH + j)
    before = tl.sum(tl.where(t < tile, counts, 0), 0)
    mine = tl.sum(tl.where(t == tile, counts, 0), 0)
    tl.store(KEPT + before + j, channel, mask=j < mine)
    if tile == tiles - 1:
        tl.store(TOTAL, before + mine)


def compact_warps(tiles: int) -> int:
    """Of a program that sums the counts of so many tiles."""
    return 1 if tiles <= 512 else 4
