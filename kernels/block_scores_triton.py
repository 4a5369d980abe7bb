"""Scores of KV blocks in Triton: their representatives against the draft rows, in the order of the live list.

Where each row votes with its softmax, a launch of its own sums the rows' weights first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.tiling import RESERVE, device_of

LOG2E = tl.constexpr(math.log2(math.e))
_TILE = 64
# Programs of a head that sum its softmaxes, each with sums of its own, which every tile reads.
_MOST_PARTS = 16


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


@triton.jit
def _query_rows(
    Q, kv_head, q_h, q_t, q_d, rows,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, QUERY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The rows that score, ``[M, BD]``, and which of them there are."""
    d = tl.arange(0, BD)
    m = tl.arange(0, M)
    q_at = Q + d[None, :] * q_d
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
    if WIDE:
        q = q.to(tl.float32)
    return q, used


@triton.jit
def _raw_scores(
    q, SUMMARY, block, contest, scale, s_n, s_r, s_d,
    D: tl.constexpr, BD: tl.constexpr, BOUNDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores ``[M, BN]`` of some blocks, without looking for NaN."""
    d = tl.arange(0, BD)
    s_at = SUMMARY + block.to(tl.int64)[None, :] * s_n + d[:, None] * s_d
    there = contest[None, :] & (d < D)[:, None]
    low = tl.load(s_at, mask=there, other=0.0)
    if WIDE:
        low = low.to(tl.float32)
    if BOUNDS:
        high = tl.load(s_at + s_r, mask=there, other=0.0)
        zero = tl.zeros(q.shape, q.dtype)
        if WIDE:
            high = high.to(tl.float32)
        # Maxima of bfloat16 come out as float32.
        s = tl.dot(tl.maximum(q, zero).to(high.dtype), high, input_precision="ieee")
        s += tl.dot(tl.minimum(q, zero).to(low.dtype), low, input_precision="ieee")
    else:
        s = tl.dot(q, low, input_precision="ieee")
    return s * scale


@triton.jit
def _in_contest(place, block, live, position, sink, recent, BLOCK: tl.constexpr):
    """Only blocks below the first draft row have a representative."""
    return (place >= sink) & (place < live - recent) & (block < position // BLOCK)


@triton.jit
def _weights(s, top):
    """``exp(s - top)``: 0 for NaN scores and in rows without any score."""
    top = tl.where(top == float("-inf"), 0.0, top)
    return tl.where(s == s, tl.exp2((s - top[:, None]) * LOG2E), 0.0)


@triton.jit(do_not_specialize=["rows", "blocks", "sink", "recent", "tokens", "floor"])
def _row_sums_kernel(
    Q, SUMMARY, IDS, COUNT, POSITION, GATE, TOPS, SUMS, q_b, q_h, q_t, q_d, s_b, s_h, s_n, s_r, s_d, i_b, c_b, p_b,
    rows, blocks, scale, sink, recent, tokens, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    QUERY: tl.constexpr, BOUNDS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For softmaxes over the contest: each row's largest score and sum of weights, over every ``PARTS``-th tile of the list."""
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = tl.load(COUNT + b * c_b)
    position = tl.load(POSITION + b * p_b).to(tl.int32)
    if contest_budget(live, tl.load(GATE), tokens, floor, BLOCK, SHARE) >= live - sink - recent:
        return
    q, _ = _query_rows(Q + b * q_b, kv_head, q_h, q_t, q_d, rows, GROUP, D, BD, M, QUERY, WIDE)
    summary = SUMMARY + b * s_b + kv_head.to(tl.int64) * s_h
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for start in tl.range(part * BN, live, PARTS * BN):
        place = start + tl.arange(0, BN)
        block = tl.load(IDS + b * i_b + place, mask=place < blocks, other=0)
        contest = _in_contest(place, block, live, position, sink, recent, BLOCK)
        s = _raw_scores(q, summary, block, contest, scale, s_n, s_r, s_d, D, BD, BOUNDS, WIDE)
        s = tl.where((s == s) & contest[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp2((top - new_top) * LOG2E))
        total = total * shrink + tl.sum(_weights(s, new_top), 1)
        top = new_top
    at = ((b * KV_HEADS + kv_head) * PARTS + part) * M + tl.arange(0, M)
    tl.store(TOPS + at, top)
    tl.store(SUMS + at, total)


@triton.jit(do_not_specialize=["rows", "blocks", "sink", "recent", "tokens", "floor"])
def _score_kernel(
    Q, SUMMARY, IDS, COUNT, POSITION, GATE, SCORES, TOPS, SUMS, q_b, q_h, q_t, q_d, s_b, s_h, s_n, s_r, s_d, i_b, c_b, p_b,
    rows, blocks, scale, sink, recent, tokens, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
    QUERY: tl.constexpr, BOUNDS: tl.constexpr, AGGREGATE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
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
    contest = _in_contest(place, block, live, position, sink, recent, BLOCK)
    q, used = _query_rows(Q + b * q_b, kv_head, q_h, q_t, q_d, rows, GROUP, D, BD, M, QUERY, WIDE)
    summary = SUMMARY + b * s_b + kv_head.to(tl.int64) * s_h
    s = _raw_scores(q, summary, block, contest, scale, s_n, s_r, s_d, D, BD, BOUNDS, WIDE)
    if AGGREGATE == "softmax":
        part = tl.arange(0, PARTS)
        at = ((b * KV_HEADS + kv_head) * PARTS + part[:, None]) * M + tl.arange(0, M)[None, :]
        tops = tl.load(TOPS + at)
        top = tl.max(tops, 0)
        shrink = tl.where(tops == float("-inf"), 0.0, tl.exp2((tops - top[None, :]) * LOG2E))
        total = tl.sum(tl.load(SUMS + at) * shrink, 0)
        weight = _weights(s, top) / total[:, None]
        # Rows with an infinite score, or none, have no softmax.
        weight = tl.where(used[:, None] & (weight == weight), weight, 0.0)
        out = tl.sum(weight, 0) / tl.sum(used.to(tl.float32), 0)
        some = tl.max(((s == s) & used[:, None]).to(tl.int32), 0) > 0
        out = tl.where(some, out, float("-inf"))
    else:
        s = tl.where(s == s, s, float("-inf"))
        if AGGREGATE == "mean":
            out = tl.sum(tl.where(used[:, None], s, 0.0), 0) / tl.sum(used.to(tl.float32), 0)
        else:
            out = tl.max(tl.where(used[:, None], s, float("-inf")), 0)
    if ORDERED:
        out = tl.where(contest, ordered_bits(out), 0)
    tl.store(SCORES + (b * KV_HEADS + kv_head) * blocks + place, out, mask=place < live)


def why_not(q: Tensor, summary: Tensor, query: str, aggregate: str) -> str | None:
    """Reason why the kernels cannot run this selection, or None."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or summary.dtype != q.dtype:
        return f"dtypes {q.dtype} and {summary.dtype}"
    group = q.shape[1] // summary.shape[1]
    rows = {"first": 1, "first_last": 2, "all": q.shape[2], "mean": 1}[query]
    if group * rows > 128:
        return f"{group} heads a group x {rows} rows are more than 128"
    if q.shape[3] > 256:
        return f"head dim {q.shape[3]} is above 256"
    tall = max(16, 1 << (group * rows - 1).bit_length())
    if _shared_bytes(q, tall, query, aggregate, 1) + RESERVE > device_of(q.device).shared_bytes and q.device.type == "cuda":
        return f"{tall} rows of head dim {q.shape[3]} need more shared memory than the device has"
    return None


def _shared_bytes(q: Tensor, tall: int, query: str, aggregate: str, stages: int) -> int:
    """An upper bound, checked on compiled kernels: tiles of both bounds, and the queries (in two parts when tall or kept)."""
    itemsize = 4 if query == "mean" else q.dtype.itemsize
    keys = 2 * _TILE * stages + (2 if tall > 32 or aggregate == "softmax" else 1) * tall
    return keys * max(16, 1 << (q.shape[3] - 1).bit_length()) * itemsize


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
    """Launch the score kernel, after the sums of its rows for ``softmax``.

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
    height = max(16, triton.next_power_of_2(group * picked))
    tiles = triton.cdiv(blocks, _TILE)
    grid = (kv_heads, batch)
    strides = (*q.stride(), *summary.stride(), batch_step(ids), batch_step(count), batch_step(position))
    numbers = (rows, blocks, scale, *rule)
    constants = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "BD": max(16, triton.next_power_of_2(dim)), "M": height, "BN": _TILE,
        "QUERY": {"first": 0, "first_last": 1, "all": 2, "mean": 3}[query], "BOUNDS": summary.shape[3] == 2,
        "WIDE": query == "mean" and q.dtype != torch.float32, "BLOCK": block_size, "SHARE": share, "PDL": bool(options),
    }  # fmt: skip
    parts, tops, sums = 1, scores, scores
    if aggregate == "softmax":
        spare = max(1, device_of(q.device).processors // (kv_heads * batch))
        parts = 1 << (min(_MOST_PARTS, tiles, spare).bit_length() - 1)
        room = device_of(q.device).shared_bytes - RESERVE
        stages = next(n for n in (3, 2, 1) if n == 1 or _shared_bytes(q, height, query, aggregate, n) <= room)
        tops, sums = (q.new_empty(batch, kv_heads, parts, height, dtype=torch.float32) for _ in range(2))
        _row_sums_kernel[(parts, *grid)](
            q, summary, ids, count, position, gate, tops, sums, *strides, *numbers, PARTS=parts, num_stages=stages,
            **constants, **options,
        )  # fmt: skip
    _score_kernel[(tiles, *grid)](
        q, summary, ids, count, position, gate, scores, tops, sums, *strides, *numbers,
        AGGREGATE=aggregate, PARTS=parts, ORDERED=ordered, **constants, **options,
    )  # fmt: skip
