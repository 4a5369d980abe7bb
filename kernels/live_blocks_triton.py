"""``live_blocks`` in Triton: one launch looks at the mask, a second compacts the block list. No host reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_compile.kernels.blocks import hidden_threshold

_MAX_ROWS, _MAX_CHUNK = 32, 4096


# kv_len stays specialised: a multiple of 16 is what lets the mask be read 16 bytes at a time.
@triton.jit(do_not_specialize=["heads", "rows", "blocks"])
def _look_kernel(
    MASK, FLAGS, m_b, m_h, m_t, m_s, heads, rows, kv_len, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, IS_BOOL: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Flags of ``BLOCKS`` blocks: bit 0 live, bit 1 full."""
    b = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * (BLOCK * BLOCKS) + tl.arange(0, BLOCK * BLOCKS)
    inside = key < kv_len
    live = tl.zeros([BLOCK * BLOCKS], tl.int32)
    hidden = tl.zeros([BLOCK * BLOCKS], tl.int32)
    for start in tl.range(0, heads * rows, ROWS):
        r = start + tl.arange(0, ROWS)
        h = r // rows
        t = r - h * rows
        wanted = (r < heads * rows)[:, None] & inside[None, :]
        at = MASK + b * m_b + h[:, None].to(tl.int64) * m_h + t[:, None] * m_t + key[None, :] * m_s
        if IS_BOOL:
            entry = tl.load(at, mask=wanted, other=0) != 0
            plain = entry
        else:
            value = tl.load(at, mask=wanted, other=float("-inf"))
            entry = value > HIDDEN
            plain = value == 0.0
        live |= tl.max((entry & wanted).to(tl.int32), 0)
        hidden |= tl.max((wanted & (plain == 0)).to(tl.int32), 0)
    hidden |= (key >= kv_len).to(tl.int32)
    any_live = tl.max(tl.reshape(live, (BLOCKS, BLOCK)), 1)
    any_hidden = tl.max(tl.reshape(hidden, (BLOCKS, BLOCK)), 1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    flags = any_live + 2 * (1 - any_hidden)
    tl.store(FLAGS + b * blocks + block, flags.to(tl.uint8), mask=block < blocks)


@triton.jit(do_not_specialize=["blocks"])
def _compact_kernel(FLAGS, IDS, COUNT, FULL, blocks, CHUNK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    base = b * blocks
    count = 0
    for start in tl.range(0, blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        flags = tl.load(FLAGS + base + block, mask=block < blocks, other=0).to(tl.int32)
        live = flags & 1
        place = count + tl.cumsum(live, 0) - 1
        tl.store(IDS + base + place, block, mask=live != 0)
        tl.store(FULL + base + place, (flags >> 1).to(tl.uint8), mask=live != 0)
        count += tl.sum(live, 0)
    tl.store(COUNT + b, count)
    for start in tl.range(0, blocks, CHUNK):
        place = start + tl.arange(0, CHUNK)
        unused = (place >= count) & (place < blocks)
        tl.store(IDS + base + place, -1, mask=unused)
        tl.store(FULL + base + place, 0, mask=unused)


def live_blocks_triton(mask: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same arguments and results as :func:`spec_compile.kernels.library.live_blocks`; ``block_size`` a power of two."""
    batch, heads, rows, kv_len = mask.shape
    blocks = triton.cdiv(kv_len, block_size)
    flags = mask.new_empty(batch, blocks, dtype=torch.uint8)
    ids = mask.new_empty(batch, 1, blocks, dtype=torch.int32)
    count = mask.new_empty(batch, 1, dtype=torch.int32)
    full = mask.new_empty(batch, 1, blocks, dtype=torch.uint8)
    is_bool = mask.dtype == torch.bool
    per_program = max(1, 256 // block_size)
    with torch.cuda.device_of(mask):
        _look_kernel[(triton.cdiv(blocks, per_program), batch)](
            mask.view(torch.uint8) if is_bool else mask, flags, *mask.stride(), heads, rows, kv_len, blocks,
            BLOCK=block_size, BLOCKS=per_program, ROWS=min(_MAX_ROWS, triton.next_power_of_2(heads * rows)), IS_BOOL=is_bool,
            HIDDEN=0.0 if is_bool else hidden_threshold(mask.dtype),
        )  # fmt: skip
        chunk = min(_MAX_CHUNK, max(128, triton.next_power_of_2(blocks)))
        _compact_kernel[(batch,)](flags, ids, count, full, blocks, CHUNK=chunk, num_warps=8 if chunk > 1024 else 4)
    return ids, count, full


def why_not(mask: Tensor, block_size: int) -> str | None:
    """Reason why the kernel cannot list this mask's blocks, or None."""
    if block_size & (block_size - 1) or not 8 <= block_size <= 1024:
        return f"block_size {block_size} is not a power of two from 8 to 1024"
    if mask.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
        return f"mask dtype {mask.dtype}"
    return None
