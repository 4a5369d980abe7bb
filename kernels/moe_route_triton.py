"""The router of a mixture of experts in Triton: score, choice and weights of a row in one program's registers. No host reads.

Scores become order-preserving bits. Up to 256 experts are ranked by comparing each with all; of more, each of the k best takes
one maximum and one minimum over the experts that reach it. Ties go to the lowest expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.tiling import device_of

_MOST_RANKED = 256


@triton.jit
def _ordered(x):
    """Bits that order like ``x``, never 0; all NaN are one value above infinity, zeros of both signs one value."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) | (-2147483647 - 1))).to(tl.uint32, bitcast=True)
    return tl.where(x == x, ordered, 4294967295)


@triton.jit
def _value(ordered):
    """What :func:`_ordered` was made from, 0 for 0."""
    bits = ordered.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ (-2147483647 - 1), ~bits)
    return tl.where(ordered == 0, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _computed_once(x):
    """``x``; keeps the compiler from computing it anew for every thread that compares with it."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@triton.jit
def _best(key, place, END: tl.constexpr):
    """Largest key and the lowest place that holds it."""
    top = tl.max(key, 0)
    return top, tl.min(tl.where(key == top, place, END), 0)


@triton.jit
def _scored(x, inside, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        top = tl.max(tl.where(inside, x, float("-inf")), 0)
        # NaN and infinite logits make every weight NaN through the sum, as softmax has it.
        power = tl.where(inside, tl.exp(x - top), 0.0)
        return tl.div_rn(power, tl.sum(power, 0).broadcast_to(power.shape))
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["epsilon", "scale"])
def _route_kernel(
    LOGITS, BIAS, CHOICE, WEIGHT, l_n, epsilon, scale,
    EXPERTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    SOFTMAX: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, RANKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. Places are experts in groups of ``S``, a power of two, of which the last are padding."""
    row = tl.program_id(0)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, G * S)
    e = place // S * SIZE + place % S
    inside = (place < GROUPS * S) & (place % S < SIZE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(LOGITS + row.to(tl.int64) * l_n + e, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE_FIRST:
        value = _scored(value, inside, SOFTMAX)
    contest = value
    if HAS_BIAS:
        contest += tl.load(BIAS + e, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, _ordered(contest), 0)

    if GROUPS > 1:
        grouped = key.reshape(G, S)
        first = tl.max(grouped, 1)
        at = tl.arange(0, S)[None, :]
        held = tl.min(tl.where(grouped == first[:, None], at, S), 1)
        second = tl.max(tl.where(at == held[:, None], 0, grouped), 1)
        g = tl.arange(0, G)
        group_key = tl.where(g < GROUPS, _ordered(_value(first) + _value(second)), 0)
        kept = tl.zeros([G], tl.int32)
        for _ in tl.static_range(KEPT):
            _, best = _best(group_key, g, G)
            kept = tl.where(g == best, 1, kept)
            group_key = tl.where(g == best, 0, group_key)
        keep = kept[:, None].broadcast_to(G, S).reshape(G * S)
        # Experts of the other groups count as -inf: they may still be chosen where too few are left.
        key = tl.where(inside & (keep == 0), _ordered(tl.full([G * S], float("-inf"), tl.float32)), key)

    if RANKED:
        # All places at once: how many come before each. Ties go to the lowest, and padding, 0, comes last.
        if PDL:
            key = _computed_once(key)
        ahead = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (place[None, :] < place[:, None]))
        rank = tl.sum(ahead.to(tl.int32), 1)
        chosen = rank < K
        weight = value if SCORE_FIRST else _scored(value, chosen, SOFTMAX)
        if RENORMALISE:
            total = tl.sum(tl.where(chosen, weight, 0.0), 0) + epsilon
            weight = tl.div_rn(weight, total.broadcast_to(weight.shape))
        at = row.to(tl.int64) * K + rank
        tl.store(CHOICE + at, e.to(tl.int64), mask=chosen)
        tl.store(WEIGHT + at, (weight * scale).to(WEIGHT.dtype.element_ty), mask=chosen)
    else:
        KK: tl.constexpr = triton.next_power_of_2(K)
        k = tl.arange(0, KK)
        choice = tl.zeros([KK], tl.int32)
        weight = tl.zeros([KK], tl.float32)
        for j in tl.static_range(K):
            _, best = _best(key, e, EXPERTS)
            choice = tl.where(k == j, best, choice)
            weight = tl.where(k == j, tl.sum(tl.where(inside & (e == best), value, 0.0), 0), weight)
            key = tl.where(e == best, 0, key)
        if not SCORE_FIRST:
            weight = _scored(weight, k < K, SOFTMAX)
        if RENORMALISE:
            total = tl.sum(tl.where(k < K, weight, 0.0), 0) + epsilon
            weight = tl.div_rn(weight, total.broadcast_to(weight.shape))
        tl.store(CHOICE + row.to(tl.int64) * K + k, choice.to(tl.int64), mask=k < K)
        tl.store(WEIGHT + row.to(tl.int64) * K + k, (weight * scale).to(WEIGHT.dtype.element_ty), mask=k < K)


def padded(experts: int, groups: int) -> tuple[int, int]:
    """Groups and experts a group in the kernel: powers of two, at least a place for each thread of a warp."""
    wide = triton.next_power_of_2(groups)
    return wide, max(triton.next_power_of_2(experts // groups), 32 // wide)


def moe_route_triton(
    logits: Tensor, bias: Tensor | None, score: str, k: int, renormalise: bool, epsilon: float, scale: float, groups: int,
    kept_groups: int, order: str, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same arguments and results as :func:`spec_compile.kernels.library.moe_route`, where
    :func:`spec_compile.kernels.moe.why_no_route_kernel` is None."""
    rows, experts = logits.shape
    choice = logits.new_empty(rows, k, dtype=torch.int64)
    weight = logits.new_empty(rows, k, dtype=dtype or torch.float32)
    if rows == 0:
        return choice, weight
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = None if bias is None else bias.contiguous()
    groups = max(1, groups)
    wide, size = padded(experts, groups)
    # Few experts are compared with one another; of many the best are taken one by one.
    ranked = wide * size <= _MOST_RANKED
    pdl = device_of(logits.device).capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    with torch.cuda.device_of(logits):
        _route_kernel[(rows,)](
            logits, logits if bias is None else bias, choice, weight, logits.stride(0), epsilon, scale,
            EXPERTS=experts, K=k, GROUPS=groups, KEPT=kept_groups, G=wide, S=size, SOFTMAX=score == "softmax",
            SCORE_FIRST=order == "score_first", RENORMALISE=renormalise, HAS_BIAS=bias is not None, RANKED=ranked, PDL=pdl,
            num_warps=4 if ranked or wide * size > 512 else 1, **options,
        )  # fmt: skip
    return choice, weight
