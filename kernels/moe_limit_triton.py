"""``moe_limit`` in Triton: one launch, no atomics, no host reads.

Rows are tiles of ``[rows, choices]``. With a budget one program holds all rows, and a matrix ``[rows, experts]`` of who keeps
what: votes are its column sums, and an expert's place is the number of experts before it. Without one, programs share the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.block_scores_triton import ordered_bits
from spec_compile.kernels.tiling import device_of

_KEPT, _TOP, _ROUTED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _before(flag, rank):
    """How many flagged entries of a row rank before each of its entries."""
    return tl.sum((flag[:, None, :] & (rank[:, None, :] < rank[:, :, None])).to(tl.int32), 2)


@triton.jit
def _column(x, j: tl.constexpr, KK: tl.constexpr):
    """Column ``j`` of ``[R, KK]``."""
    return tl.sum(tl.where(tl.arange(0, KK)[None, :] == j, x, 0), 1)


@triton.jit(do_not_specialize=["rows", "top_k", "skip", "beta", "ratio", "budget"])
def _limit_kernel(
    CHOICE, WEIGHT, LOGITS, BIAS, GATE, OUT_CHOICE, OUT_WEIGHT, l_n, rows, top_k, skip, beta, ratio, budget,
    K: tl.constexpr, EXPERTS: tl.constexpr, R: tl.constexpr, KK: tl.constexpr, E: tl.constexpr, BUDGET: tl.constexpr,
    SUBSTITUTE: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, KK)
    at = n[:, None] * K + k[None, :]
    there = (n < rows)[:, None] & (k < K)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(GATE)
    choice = tl.load(CHOICE + at, mask=there, other=-1)
    weight = tl.load(WEIGHT + at, mask=there, other=0.0)
    if gate == 0:
        tl.store(OUT_CHOICE + at, choice, mask=there)
        tl.store(OUT_WEIGHT + at, weight, mask=there)
        return

    routed = there & (choice >= 0) & (choice < EXPERTS)
    given = tl.where(routed, weight.to(tl.float32), 0.0)
    total = tl.sum(given, 1)
    w = tl.where((total == total)[:, None], given, 0.0)
    value = tl.where(routed, w, float("-inf"))
    mine, other = value[:, :, None], value[:, None, :]
    ahead = (other > mine) | ((other == mine) & (k[None, None, :] < k[None, :, None]))
    rank = tl.sum(ahead.to(tl.int32), 2)
    top = routed & (rank == 0)

    keep = routed & ((top_k <= 0) | (rank < top_k))
    low = routed & (rank >= (tl.sum(routed.to(tl.int32), 1) - tl.minimum(skip, K - 1))[:, None])
    share = tl.div_rn(tl.sum(tl.where(low, w, 0.0), 1), tl.sum(w, 1))
    keep = keep & ~(low & (share < beta)[:, None])
    keep = keep & ~(w < ratio * tl.max(w, 1)[:, None])
    keep = keep | top

    out = given
    ids = choice.to(tl.int32)
    if BUDGET:
        C: tl.constexpr = min(E, 64)
        e = tl.arange(0, E)
        flag = keep.to(tl.int32) * _KEPT + top.to(tl.int32) * _TOP + routed.to(tl.int32) * _ROUTED
        held_w = tl.zeros([R, E], tl.float32)
        held = tl.zeros([R, E], tl.int32)
        for j in tl.static_range(K):
            named = _column(ids, j, KK)[:, None] == e[None, :]
            held_w += tl.where(named, _column(tl.where(keep, tl.maximum(w, 0.0), 0.0), j, KK)[:, None], 0.0)
            held |= tl.where(named, _column(flag, j, KK)[:, None], 0)
        votes = tl.sum(held_w, 0)
        chosen = tl.max(held & _KEPT, 0)
        forced = tl.max(held & _TOP, 0)
        # Votes are not negative: their bits order like they do. Top choices are above all, experts that nobody keeps at 0.
        bits = (votes + 0.0).to(tl.uint32, bitcast=True)
        key = tl.where(forced != 0, bits | 2147483648, tl.where(chosen != 0, bits, 0)) + chosen.to(tl.uint32)
        place = tl.zeros([E], tl.int32)
        for part in tl.static_range(E // C):
            # In parts: all comparisons at once do not fit in registers.
            other_e = part * C + tl.arange(0, C)
            other_key = tl.gather(key, other_e, 0)
            before = (other_key[None, :] > key[:, None]) | (
                (other_key[None, :] == key[:, None]) & (other_e[None, :] < e[:, None])
            )
            place += tl.sum(before.to(tl.int32), 1)
        inside = ((chosen != 0) & (place < budget)) | (forced != 0)
        # What lies in the set, for each entry: looked up by expert.
        flat = tl.reshape(tl.where(routed, ids, 0), [R * KK])
        inside_of = tl.reshape(tl.gather(inside.to(tl.int32), flat, 0), [R, KK])
        outside = keep & (inside_of == 0)
        keep = keep & ~outside
        if SUBSTITUTE:
            real = (n < rows)[:, None] & (e < EXPERTS)[None, :]
            logits = tl.load(LOGITS + n.to(tl.int64)[:, None] * l_n + e[None, :], mask=real, other=float("-inf")).to(tl.float32)
            if SOFTMAX:
                power = tl.exp(logits - tl.max(tl.where(real, logits, float("-inf")), 1)[:, None])
                power = tl.where(real, power, 0.0)
                score = tl.div_rn(power, tl.sum(power, 1)[:, None].broadcast_to(power.shape))
            else:
                score = tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))
            contest = logits
            if HAS_BIAS:
                contest = score + tl.load(BIAS + e, mask=e < EXPERTS, other=0.0).to(tl.float32)[None, :]
            scored = tl.sum(tl.where((held & _ROUTED) != 0, score, 0.0), 1)
            # A row whose scores all underflow has no sum to share: its substitutes weigh nothing, too.
            scale = tl.where(scored == 0, 0.0, tl.div_rn(total, scored))
            free = tl.where(inside[None, :] & ((held & _KEPT) == 0), ordered_bits(contest), 0)
            missing = tl.sum(outside.to(tl.int32), 1)
            turn = _before(outside, rank)
            most = tl.max(missing, 0)
            t = 0
            while t < most:
                best = tl.max(free, 1)
                who = tl.min(tl.where(free == best[:, None], e[None, :], E), 1)
                new = outside & (turn == t) & (best != 0)[:, None]
                taken = e[None, :] == who[:, None]
                gained = tl.sum(tl.where(taken, score, 0.0), 1) * scale
                ids = tl.where(new, who[:, None], ids)
                out = tl.where(new, gained[:, None], out)
                keep = keep | new
                free = tl.where(taken, 0, free)
                t += 1
    out = tl.where(keep, out, 0.0)
    changed = tl.max((routed & (~keep | (ids != choice))).to(tl.int32), 1) != 0
    if RENORMALISE:
        left = tl.sum(out, 1)
        grown = tl.div_rn(total, tl.where(left > 0, left, 1.0))
        out = tl.where((changed & (left > 0))[:, None], out * grown[:, None], out)
    tl.store(OUT_CHOICE + at, tl.where(keep, ids.to(choice.dtype), tl.where(routed, -1, choice)), mask=there)
    tl.store(OUT_WEIGHT + at, tl.where(changed[:, None] & routed, out.to(weight.dtype), weight), mask=there)


def tile(rows: int, k: int, experts: int, budget: bool) -> tuple[int, int, int, int]:
    """Padded rows of a program, choices and experts, and warps."""
    wide, all_experts = triton.next_power_of_2(k), max(32, triton.next_power_of_2(experts))
    if not budget:
        return max(1, 32 // wide), wide, all_experts, 1
    warps = min(16, max(4, triton.next_power_of_2(rows) * all_experts // 1024))
    return triton.next_power_of_2(rows), wide, all_experts, warps


def moe_limit_triton(
    choice: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None, gate: Tensor, score: str, experts: int,
    top_k: int, skip: int, beta: float, ratio: float, expert_budget: int, substitute: bool, renormalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same arguments and results as :func:`spec_compile.kernels.library.moe_limit`, where
    :func:`spec_compile.kernels.moe_limit.why_no_limit_kernel` is None."""
    choice, weight = choice.contiguous(), weight.contiguous()
    out_choice, out_weight = torch.empty_like(choice), torch.empty_like(weight)
    rows, k = choice.shape
    if choice.numel() == 0:
        return out_choice, out_weight
    held, wide, all_experts, warps = tile(rows, k, experts, expert_budget > 0)
    if substitute and logits is not None and logits.stride(1) != 1:
        logits = logits.contiguous()
    pdl = device_of(choice.device).capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(choice):
        _limit_kernel[(triton.cdiv(rows, held),)](
            choice, weight, weight if logits is None else logits, weight if bias is None else bias.contiguous(), gate,
            out_choice, out_weight, 0 if logits is None else logits.stride(0), rows, top_k, skip, beta, ratio, expert_budget,
            K=k, EXPERTS=experts, R=held, KK=wide, E=all_experts, BUDGET=expert_budget > 0, SUBSTITUTE=substitute,
            SOFTMAX=score == "softmax", HAS_BIAS=bias is not None, RENORMALISE=renormalise, PDL=pdl, num_warps=warps, **options,
        )  # fmt: skip
    return out_choice, out_weight
