"""Upkeep of block representatives: plain-torch meaning of ``block_summary_``.

Only complete blocks below the first draft row are summarized, each from its keys when it completes. A rollback therefore
lowers a number; nothing has to be undone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels.selection import summarize_blocks


def block_summary_reference(
    keys: list[Tensor], summaries: list[Tensor], valid: Tensor, position: Tensor, block_size: int, representative: str
) -> None:
    """See :func:`spec_compile.kernels.library.block_summary_`. Reads ``valid`` on the host."""
    batch = valid.shape[0]
    committed = (position.expand(batch).clamp(max=keys[0].shape[2]) // block_size).tolist()
    held = valid.tolist()
    for k, summary in zip(keys, summaries):
        for b in range(batch):
            trusted = min(held[b], committed[b])
            for head in range(k.shape[1]):
                start = trusted
                if start > 0:
                    last = k[b : b + 1, head : head + 1, (start - 1) * block_size : start * block_size]
                    fresh = summarize_blocks(last, block_size, representative)[0, 0, 0]
                    # Exact: the same keys give the same bits. NaN never equals itself and is computed again.
                    start = start if torch.equal(fresh, summary[b, head, start - 1]) else 0
                if start < committed[b]:
                    span = k[b : b + 1, head : head + 1, start * block_size : committed[b] * block_size]
                    summary[b, head, start : committed[b]] = summarize_blocks(span, block_size, representative)[0, 0]
    valid.copy_(torch.tensor(committed, dtype=valid.dtype))
