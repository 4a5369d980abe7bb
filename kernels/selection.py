"""Which KV blocks a sparse verify reads: plain-torch meaning of ``select_blocks`` and of the blocks' representatives.

The method is that of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv 2512.21911): a block's
representative scores it against the query of the first draft row, all rows share the chosen blocks, leading and trailing
blocks are kept in any case. Min/max representatives are those of Quest (arXiv 2406.10774).
"""

from __future__ import annotations

import torch
from torch import Tensor

QUERIES = ("first", "first_last", "all", "mean")
AGGREGATES = ("max", "mean", "softmax")


def summarize_blocks(k: Tensor, block_size: int, representative: str) -> Tensor:
    """Representatives of K's blocks.

    Args:
        k: ``[B, Hkv, S, D]``.
        block_size: keys per block; a shorter last block is summarized over the keys it has.
        representative: ``mean`` or ``min_max``.

    Returns:
        ``[B, Hkv, NB, R, D]`` in k's dtype: the mean key (R = 1, accumulated in float32), or elementwise minimum and maximum
        (R = 2).
    """
    batch, heads, length, dim = k.shape
    blocks = -(-length // block_size)
    tail = blocks * block_size - length
    if representative == "mean":
        sums = torch.nn.functional.pad(k.float(), (0, 0, 0, tail)).view(batch, heads, blocks, block_size, dim).sum(3)
        first = torch.arange(blocks, device=k.device).unsqueeze(1) * block_size
        return (sums / (length - first).clamp(max=block_size).float()).to(k.dtype).unsqueeze(3)
    low, high = (
        torch.nn.functional.pad(k, (0, 0, 0, tail), value=fill).view(batch, heads, blocks, block_size, dim)
        for fill in (torch.inf, -torch.inf)
    )
    return torch.stack([low.amin(3), high.amax(3)], dim=3)


def block_scores(q: Tensor, summary: Tensor, scale: float, query: str, candidates: Tensor, aggregate: str) -> Tensor:
    """Score of every block for every KV head, float32 ``[B, Hkv, NB]``; -inf outside ``candidates`` and for NaN.

    Args:
        q: ``[B, Hq, T, D]``.
        summary: from :func:`summarize_blocks`; with two entries a block's score is the upper bound
            ``sum_d max(q_d * min_d, q_d * max_d)``.
        scale: multiplies the scores.
        query: rows that score: ``first``, ``first_last``, ``all``, or ``mean`` of all.
        candidates: bool ``[B, NB]``.
        aggregate: over the rows and the query heads of a group: ``max``, ``mean``, or ``softmax`` (mean of the rows'
            softmax over the candidates, so that no row outvotes another by the size of its scores).
    """
    batch, _, rows, dim = q.shape
    kv_heads = summary.shape[1]
    chosen = {
        "first": q[:, :, :1], "first_last": torch.cat([q[:, :, :1], q[:, :, rows - 1 :]], 2), "all": q,
        "mean": q.float().mean(2, keepdim=True),
    }[query].float()  # fmt: skip
    folded = chosen.reshape(batch, kv_heads, -1, dim)
    parts = summary.float()
    if summary.shape[3] == 1:
        scores = folded @ parts[:, :, :, 0].transpose(2, 3)
    else:
        low, high = parts[:, :, :, 0].transpose(2, 3), parts[:, :, :, 1].transpose(2, 3)
        scores = folded.clamp(min=0) @ high + folded.clamp(max=0) @ low
    scores = scores * scale
    outside = ~candidates[:, None, None] | scores.isnan()
    scores = scores.masked_fill(outside, -torch.inf)
    if aggregate == "softmax":
        # Rows without any candidate have no softmax.
        return scores.softmax(-1).nan_to_num(0.0).mean(2).masked_fill(outside.all(2), -torch.inf)
    if aggregate == "mean":
        return scores.mean(2)
    return scores.amax(2)


def budget_in_blocks(live: Tensor, block_size: int, tokens: int, share: float, floor: int, gate: Tensor) -> Tensor:
    """Blocks that the contest may keep, int64 ``[B]``; the number of live blocks or more means all.

    Args:
        live: live blocks, ``[B]``; a context of L tokens counts as ``L = live * block_size``.
        tokens: a fixed budget, or 0 for ``share``.
        share, floor: rho and L0 of the paper's law: all up to L0 tokens, else ``floor((L - L0) * rho + L0)`` tokens.
        gate: int64 ``[1]``; all blocks where L is below it.
    """
    length = live.long() * block_size
    if tokens > 0:
        kept = torch.full_like(length, tokens // block_size)
    else:
        # In float64, where tokens * rho is exact enough for floor.
        kept = (((length - floor).double() * share + floor).floor().long() // block_size).clamp(min=0)
        kept = torch.where(length <= floor, live.long(), kept)
    return torch.where(length < gate, live.long(), kept)


def select_blocks_reference(
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
    """See :func:`spec_compile.kernels.library.select_blocks`."""
    if ids.device.type == "cpu" and bool((count.long() * block_size < gate).all()):
        given = summary if scores is None else scores
        assert given is not None
        every = [x.expand(q.shape[0], *x.shape[1:]).repeat(1, given.shape[1], *[1] * (x.dim() - 2)) for x in (ids, count, full)]
        return every[0], every[1], every[2]
    return select_blocks_without_host(
        q, summary, scores, ids, count, full, position, gate, block_size, scale, query, aggregate, heads, joint, sink, recent,
        tokens, share, floor,
    )  # fmt: skip


def select_blocks_without_host(
    q: Tensor, summary: Tensor | None, scores: Tensor | None, ids: Tensor, count: Tensor, full: Tensor, position: Tensor,
    gate: Tensor, block_size: int, scale: float, query: str, aggregate: str, heads: str, joint: bool, sink: int, recent: int,
    tokens: int, share: float, floor: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same without a look at data on the host: may be traced."""
    given = summary if scores is None else scores
    assert given is not None
    batch, kv_heads, blocks = q.shape[0], given.shape[1], ids.shape[-1]
    ids, full, live = (x.expand(batch, *x.shape[1:])[:, 0] for x in (ids, full, count))
    live = live.long()
    place = torch.arange(blocks, device=q.device)
    listed = place < live[:, None]
    # Only blocks that lie wholly below the first draft row have a representative; the others are kept.
    committed = (ids.long() + 1) * block_size <= position.expand(batch)[:, None]
    open_to_contest = listed & committed & (place >= sink) & (place < live[:, None] - recent)
    for_block = torch.zeros(batch, blocks + 1, dtype=torch.bool, device=q.device)
    for_block = for_block.scatter(1, torch.where(listed, ids.long(), blocks), open_to_contest)
    if scores is None:
        assert summary is not None
        scores = block_scores(q, summary, scale, query, for_block[:, :blocks], aggregate)
    else:
        scores = scores.masked_fill(~for_block[:, None, :blocks] | scores.isnan(), -torch.inf)
    if heads == "pooled":
        scores = scores.mean(1, keepdim=True).expand(-1, kv_heads, -1)
    by_place = scores.gather(2, ids.clamp(min=0).long()[:, None].expand(-1, kv_heads, -1))
    by_place = by_place.masked_fill(~open_to_contest[:, None], -torch.inf)
    budget = budget_in_blocks(live, block_size, tokens, share, floor, gate)
    won = _winners(by_place, open_to_contest, budget, joint)
    kept = won | (listed & ~open_to_contest)[:, None]
    return _pack(kept, ids, full)


def _winners(scores: Tensor, open_to_contest: Tensor, budget: Tensor, joint: bool) -> Tensor:
    """Best ``budget`` places of each head (or ``budget * Hkv`` of all heads together), ties to the lowest head and place."""
    batch, kv_heads, blocks = scores.shape
    contest = open_to_contest[:, None].expand(-1, kv_heads, -1)
    if joint:
        scores, contest = scores.reshape(batch, 1, -1), contest.reshape(batch, 1, -1)
        budget = budget * kv_heads
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.zeros_like(order).scatter(2, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    # Places outside the contest share the lowest score with hopeless ones: count only those inside.
    ahead = contest.gather(2, order).long().cumsum(-1).gather(2, rank)
    return ((ahead <= budget[:, None, None]) & contest).view(batch, kv_heads, blocks)


def _pack(kept: Tensor, ids: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of the kept places, ascending, padded with -1."""
    blocks = ids.shape[-1]
    place = torch.where(kept, torch.arange(blocks, device=ids.device), blocks).sort(-1).values
    used = place < blocks
    place = place.clamp(max=blocks - 1)
    chosen = ids[:, None].expand(-1, kept.shape[1], -1).gather(2, place)
    flags = full[:, None].expand(-1, kept.shape[1], -1).gather(2, place)
    return (
        torch.where(used, chosen, -1).to(torch.int32),
        kept.sum(-1, dtype=torch.int32),
        torch.where(used, flags, 0).to(torch.uint8),
    )
