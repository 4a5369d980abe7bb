"""Prefetches into the L2 cache, for kernels that wait for a launch before them and know which weights they will read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(at):
    """Have the 64 bytes at each address brought into the L2 cache. Bulk prefetches would take one address a warp at a time."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip
