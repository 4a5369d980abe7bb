"""Tiles of keys out of a block list, as the attention and block-mass kernels walk it.

A tile is one block, or where blocks are smaller than a tile (``SUBS`` > 1) consecutive entries of the list.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_ids(ids, tile, end, n, BLOCK: tl.constexpr, SUBS: tl.constexpr, LISTED: tl.constexpr):
    """The block of a tile, or where a tile holds ``SUBS`` of them that of each key; 0 past the ``end`` of the list's part."""
    if SUBS > 1:
        entry = tile * SUBS + n // BLOCK
        return tl.load(ids + entry, mask=entry < end, other=0)
    elif LISTED:
        return tl.load(ids + tile, mask=tile < end, other=0)
    else:
        return tile


@triton.jit
def tile_flags(
    ids, full, block, tile, end, kv_len,
    BLOCK: tl.constexpr, SUBS: tl.constexpr, FLAGGED: tl.constexpr, MASK_KIND: tl.constexpr,
):  # fmt: skip
    """For :func:`is_plain`: whether a block can be read whole, without its mask, or that of each entry of a tile."""
    if SUBS > 1:
        entry = tile * SUBS + tl.arange(0, SUBS)
        if FLAGGED:
            return tl.load(full + entry, mask=entry < end, other=0)
        else:
            block = tl.load(ids + entry, mask=entry < end, other=0)
            return ((entry < end) & ((block + 1) * BLOCK <= kv_len) & (MASK_KIND == 0)).to(tl.uint8)
    elif FLAGGED:
        return tl.load(full + tile, mask=tile < end, other=1) != 0
    else:
        return ((block + 1) * BLOCK <= kv_len) & (MASK_KIND == 0)


@triton.jit
def is_plain(flags, SUBS: tl.constexpr):
    if SUBS > 1:
        return tl.min(flags.to(tl.int32), 0) != 0
    else:
        return flags


@triton.jit
def plain_tiles(
    ids, full, tiles, end, kv_len,
    BLOCK: tl.constexpr, SUBS: tl.constexpr, LISTED: tl.constexpr, FLAGGED: tl.constexpr, MASK_KIND: tl.constexpr,
):  # fmt: skip
    """:func:`is_plain` of many tiles."""
    if SUBS == 1:
        block = tile_ids(ids, tiles, end, tiles, BLOCK, 1, LISTED)
        return tile_flags(ids, full, block, tiles, end, kv_len, BLOCK, 1, FLAGGED, MASK_KIND)
    else:
        plain = (tiles + 1) * SUBS <= end
        for sub in tl.static_range(SUBS):
            entry = tiles * SUBS + sub
            block = tile_ids(ids, entry, end, entry, BLOCK, 1, LISTED)
            plain = plain & tile_flags(ids, full, block, entry, end, kv_len, BLOCK, 1, FLAGGED, MASK_KIND)
        return plain


@triton.jit
def tile_keys(block, n, BLOCK: tl.constexpr, SUBS: tl.constexpr):
    """Slots of a tile's keys."""
    if SUBS > 1:
        # The compiler cannot see that the keys of a block lie side by side.
        return tl.max_contiguous(tl.multiple_of(block * BLOCK + n % BLOCK, BLOCK), BLOCK)
    else:
        return block * BLOCK + n


@triton.jit
def exist(key, tile, end, n, kv_len, BLOCK: tl.constexpr, SUBS: tl.constexpr):
    """Which keys of a tile there are: those of listed blocks, inside the cache."""
    if SUBS > 1:
        return (tile * SUBS + n // BLOCK < end) & (key < kv_len)
    else:
        return key < kv_len


@triton.jit
def tile_start(block, key, AXIS: tl.constexpr, BLOCK: tl.constexpr, SUBS: tl.constexpr):
    """What to add to the slots in a tile's pointers, in 64 bits: the block's first slot, or where blocks mix that of each key."""
    if SUBS > 1:
        return tl.expand_dims(key.to(tl.int64), AXIS)
    else:
        return block.to(tl.int64) * BLOCK
