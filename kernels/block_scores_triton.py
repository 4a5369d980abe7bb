"""Scores of KV blocks in Triton: their representatives against the draft rows, in the order of the live list."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.tiling import RESERVE, device_of

_TILE = 64


@triton.jit
def contest_budget(live, gate, tokens, floor, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    """Blocks that the contest may keep."""
    length = live * BLOCK
    if tokens > 0:
        budget = tokens // BLOCK
    else:
        kept = tl.floor((length - floor).to(tl.float64) * SHARE + floor).to(tl.int32)
        budget = tl.where(length <= floor, live, tl.maximum(kept // BLOCK, 0))
    return tl.where(length < gate, live, budget)


@triton.jit
def ordered_bits(s):
    """Bits that order like scores; the lowest are those of -inf and NaN, and above 0."""
    s = tl.where(s == s, s, float("-inf")) + 0.0
    bits = s.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | (-2147483647 - 1))).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "blocks", "sink", "recent", "tokens", "floor"])
def _score_kernel(
    Q, SUMMARY, IDS, COUNT, POSITION, GATE, SCORES, q_b, q_h, q_t, q_d, s_b, s_h, s_n, s_r, s_d, i_b, c_b, p_b,
    rows, blocks, scale, sink, recent, tokens, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    QUERY: tl.constexpr, BOUNDS: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of the live blocks in the order of the list, or their ordered bits, 0 for blocks outside the contest."""
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BN + tl.arange(0, BN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = tl.load(COUNT + b * c_b)
    position = tl.load(POSITION + b * p_b).to(tl.int32)
    gate = tl.load(GATE)
    block = tl.load(IDS + b * i_b + place, mask=place < blocks, other=0)
    if tl.program_id(0) * BN >= live:
        return
    if contest_budget(live, gate, tokens, floor, BLOCK, SHARE) >= live - sink - recent:
        return
    # Only blocks below the first draft row have a representative.
    contest = (place >= sink) & (place < live - recent) & (block < position // BLOCK)
    d = tl.arange(0, BD)
    m = tl.arange(0, M)
    q_at = Q + b * q_b + d[None, :] * q_d
    if QUERY == 3:
        # The mean row of each head of the group.
        used = m < GROUP
        head = kv_head * GROUP + m
        q = tl.zeros([M, BD], tl.float32)
        for t in tl.range(0, rows):
            at = q_at + head[:, None] * q_h + t * q_t
            q += tl.load(at, mask=used[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        q = q / rows
    else:
        picked = 1 if QUERY == 0 else (2 if QUERY == 1 else rows)
        g = m // picked
        t = m - g * picked
        if QUERY == 1:
            t = t * (rows - 1)
        used = g < GROUP
        head = kv_head * GROUP + g
        at = q_at + head[:, None] * q_h + t[:, None] * q_t
        q = tl.load(at, mask=used[:, None] & (d < D)[None, :], other=0.0)
    s_at = SUMMARY + b * s_b + kv_head.to(tl.int64) * s_h + block.to(tl.int64)[None, :] * s_n + d[:, None] * s_d
    there = contest[None, :] & (d < D)[:, None]
    low = tl.load(s_at, mask=there, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        low = low.to(tl.float32)
    if BOUNDS:
        high = tl.load(s_at + s_r, mask=there, other=0.0)
        zero = tl.zeros([M, BD], q.dtype)
        if WIDE:
            high = high.to(tl.float32)
        # Maxima of bfloat16 come out as float32.
        s = tl.dot(tl.maximum(q, zero).to(high.dtype), high, input_precision="ieee")
        s += tl.dot(tl.minimum(q, zero).to(low.dtype), low, input_precision="ieee")
    else:
        s = tl.dot(q, low, input_precision="ieee")
    s = s * scale
    s = tl.where(s == s, s, float("-inf"))
    if MEAN:
        many = tl.sum(used.to(tl.float32), 0)
        out = tl.sum(tl.where(used[:, None], s, 0.0), 0) / many
    else:
        out = tl.max(tl.where(used[:, None], s, float("-inf")), 0)
    if ORDERED:
        out = tl.where(contest, ordered_bits(out), 0)
    tl.store(SCORES + (b * KV_HEADS + kv_head) * blocks + place, out, mask=place < live)


def why_not(q: Tensor, summary: Tensor, query: str, aggregate: str) -> str | None:
    """Reason why the kernels cannot run this selection, or None."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or summary.dtype != q.dtype:
        return f"dtypes {q.dtype} and {summary.dtype}"
    if aggregate == "softmax":
        return "aggregate 'softmax' needs the scores of all blocks at once"
    group = q.shape[1] // summary.shape[1]
    rows = {"first": 1, "first_last": 2, "all": q.shape[2], "mean": 1}[query]
    if group * rows > 128:
        return f"{group} heads a group x {rows} rows are more than 128"
    if q.shape[3] > 256:
        return f"head dim {q.shape[3]} is above 256"
    itemsize = 4 if query == "mean" else q.dtype.itemsize
    tall = max(16, 1 << (group * rows - 1).bit_length())
    # Measured on compiled kernels: tiles of both bounds, and the queries (their positive and negative parts when tall).
    needed = (2 * 64 + (2 if tall > 32 else 1) * tall) * max(16, 1 << (q.shape[3] - 1).bit_length()) * itemsize
    if needed + RESERVE > device_of(q.device).shared_bytes and q.device.type == "cuda":
        return f"{tall} rows of head dim {q.shape[3]} need more shared memory than the device has"
    return None


def batch_step(x: Tensor) -> int:
    """Stride of the batch, with which one row serves all."""
    return 0 if x.shape[0] == 1 else x.stride(0)


def score_blocks(
    q: Tensor,
    summary: Tensor,
    scores: Tensor,
    lists: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: tuple[int, int, int, int],
    block_size: int,
    scale: float,
    query: str,
    aggregate: str,
    share: float,
    ordered: bool,
    options: dict[str, Any],
) -> None:
    """Launch the score kernel.

    Args:
        q, summary, block_size, scale, query, aggregate, share: as for :func:`spec_compile.kernels.library.select_blocks`.
        scores: ``[B, Hkv, NB]``, float32, or uint32 if ``ordered``; written for live blocks where there is a contest.
        lists: ids, count, position and gate.
        rule: sink, recent, tokens and floor.
        ordered: write bits that order like scores, 0 outside the contest.
        options: ``launch_pdl``, or none.
    """
    ids, count, position, gate = lists
    batch, heads, rows, dim = q.shape
    kv_heads, blocks = scores.shape[1:]
    group = heads // kv_heads
    picked = {"first": 1, "first_last": 2, "all": rows, "mean": 1}[query]
    _score_kernel[(triton.cdiv(blocks, _TILE), kv_heads, batch)](
        q, summary, ids, count, position, gate, scores, *q.stride(), *summary.stride(),
        batch_step(ids), batch_step(count), batch_step(position), rows, blocks, scale, *rule,
        KV_HEADS=kv_heads, GROUP=group, D=dim, BD=max(16, triton.next_power_of_2(dim)),
        M=max(16, triton.next_power_of_2(group * picked)), BN=_TILE,
        QUERY={"first": 0, "first_last": 1, "all": 2, "mean": 3}[query], BOUNDS=summary.shape[3] == 2,
        MEAN=aggregate == "mean", WIDE=query == "mean" and q.dtype != torch.float32,
        BLOCK=block_size, SHARE=share, ORDERED=ordered, PDL=bool(options), **options,
    )  # fmt: skip
