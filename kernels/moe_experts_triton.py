"""The experts of a mixture in Triton for a handful of rows: two products and an ordered sum, three launches, no host reads.

At verify's row counts an expert costs the reading of its weights, so each is read once, whatever rows chose it. Nothing is
sorted beforehand: every program finds the rows of its expert among the few hundred choices. Programs stand for choices, of
which the first that names an expert does the work, or for experts, where those are fewer. The products write a row for each
choice; the last launch adds those of a row in order, so that results repeat bit for bit.

With dependent launches the second product asks for its weights while the first still runs: choices are known by then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.moe_tiling import ExpertTiling, choose_expert_tiling
from spec_compile.kernels.prefetch_triton import prefetch
from spec_compile.kernels.tiling import device_of


@triton.jit
def _choices(CHOICE, pairs, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """All choices in order; -1 for those that name no expert."""
    p = tl.arange(0, PAIRS)
    e = tl.load(CHOICE + p, mask=p < pairs, other=-1)
    return tl.where((e >= 0) & (e < EXPERTS), e, -1).to(tl.int32)


@triton.jit
def _expert(CHOICE, place, chosen, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BY_PAIR: tl.constexpr):
    """The expert of a program, which choices are its, and how many: 0 where another program has it."""
    p = tl.arange(0, PAIRS)
    if BY_PAIR:
        e = tl.load(CHOICE + place)
        e = tl.where((e >= 0) & (e < EXPERTS), e, -2).to(tl.int32)
        mine = chosen == e
        count = tl.where(tl.min(tl.where(mine, p, PAIRS), 0) == place, tl.sum(mine.to(tl.int32), 0), 0)
    else:
        e = place
        mine = chosen == e
        count = tl.sum(mine.to(tl.int32), 0)
    return e, mine, count


@triton.jit
def _listed(mine, p, m):
    """Places ``p`` of those that are ``mine`` and have the ranks ``m`` among them, 0 where there are none."""
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    return tl.sum(tl.where(mine[None, :] & (rank[None, :] == m[:, None]), p[None, :], 0), 1)


@triton.jit
def _pairs_of(CHOICE, e, mine, start, pairs, M: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """Places of the next ``M`` choices of expert ``e``, from the ``start``-th on; unused ones are 0."""
    m = tl.arange(0, M) + start
    if CHUNK == PAIRS:
        return _listed(mine, tl.arange(0, PAIRS), m)
    else:
        # A table of all choices by all rows would not fit in registers.
        pair = tl.zeros([M], tl.int32)
        for first in tl.range(0, pairs, CHUNK, num_stages=1):
            p = first + tl.arange(0, CHUNK)
            some = tl.load(CHOICE + p, mask=p < pairs, other=-1) == e
            pair += _listed(some, p, m)
            m -= tl.sum(some.to(tl.int32), 0)
        return pair


@triton.jit
def _row(r, first, inner, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Row ``r`` of a tile of the first weight, which holds as many rows of gate as of up: its place in its half, which half
    (all are in half 0 where they alternate), and whether it exists."""
    if INTERLEAVED:
        n = first * 2 + r
        return n, r * 0, n < 2 * inner
    else:
        n = first + r % HALF
        return n, r // HALF, n < inner


@triton.jit
def product(
    x_at, w_at, x_used, w_used, k_lo, k_hi, w_k,
    BN: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``[M, BN]`` sums over k of rows of x times rows of a weight, or its columns where ``TRANSPOSED``."""
    k = tl.arange(0, BK)
    stride = tl.cast(w_k, tl.int64)
    if SWAP:
        acc = tl.zeros([BN, M], tl.float32)
    else:
        acc = tl.zeros([M, BN], tl.float32)
    for start in tl.range(k_lo, k_hi, BK):
        inside = start + k < k_hi
        if TRANSPOSED:
            w_from = w_at + start * stride
        else:
            w_from = w_at + start
        if EVEN:
            w = tl.load(w_from, mask=w_used, other=0.0)
            x = tl.load(x_at + start, mask=x_used, other=0.0)
        else:
            w = tl.load(w_from, mask=w_used & (inside[:, None] if TRANSPOSED else inside[None, :]), other=0.0)
            x = tl.load(x_at + start, mask=x_used & inside[None, :], other=0.0)
        if SWAP:
            acc = tl.dot(w.T if TRANSPOSED else w, x.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, w if TRANSPOSED else w.T, acc, input_precision=PRECISION)
    return acc.T if SWAP else acc


@triton.jit
def _activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL), -limit, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    elif ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "relu":
        return tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z.
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit(do_not_specialize=["pairs", "limit", "alpha"])
def _gate_up_kernel(
    X, CHOICE, W, BIAS, INNER, x_n, w_e, w_n, w_half: tl.int64, b_e, pairs, hidden, inner, limit, alpha,
    EXPERTS: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, BY_PAIR: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``act(gate) * up`` of each choice, ``[pairs, inner]``: a tile holds ``BN`` rows, half of gate and half of up.

    ``w_half`` elements lie between a row (column) of gate and that of up, which may be in another tensor of equal strides.
    """
    HALF: tl.constexpr = BN // 2
    first = tl.program_id(0) * HALF
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chosen = _choices(CHOICE, pairs, EXPERTS, PAIRS)
    e, mine, count = _expert(CHOICE, tl.program_id(1), chosen, EXPERTS, PAIRS, BY_PAIR)
    if count == 0:
        return

    n, half, used = _row(tl.arange(0, BN), first, inner, HALF, INTERLEAVED)
    w_from = half.to(tl.int64) * w_half
    k = tl.arange(0, BK)
    w = W + e.to(tl.int64) * w_e
    if PDL and AHEAD > 0 and first + HALF <= inner:
        # Bytes are under way while the rows are being looked up.
        LINE: tl.constexpr = 512 // W.dtype.element_ty.primitive_bitwidth
        if TRANSPOSED:
            i = tl.arange(0, AHEAD * (BN // LINE))
            col, side, _ = _row(i % (BN // LINE) * LINE, first, inner, HALF, INTERLEAVED)
            prefetch(w + (i // (BN // LINE)).to(tl.int64) * w_n + side.to(tl.int64) * w_half + col)
        else:
            i = tl.arange(0, BN * (AHEAD // LINE))
            row, side, _ = _row(i // (AHEAD // LINE), first, inner, HALF, INTERLEAVED)
            prefetch(w + row.to(tl.int64) * w_n + side.to(tl.int64) * w_half + i % (AHEAD // LINE) * LINE)
    if TRANSPOSED:
        w_at = w + k.to(tl.int64)[:, None] * w_n + n[None, :] + w_from[None, :]
        w_used = used[None, :]
    else:
        w_at = w + (w_from + n.to(tl.int64) * w_n)[:, None] + k[None, :]
        w_used = used[:, None]
    for start in tl.range(0, count, M):
        pair = _pairs_of(CHOICE, e, mine, start, pairs, M, PAIRS, CHUNK)
        real = tl.arange(0, M) + start < count
        x_at = X + (pair // K).to(tl.int64)[:, None] * x_n + k[None, :]
        acc = product(x_at, w_at, real[:, None], w_used, 0, hidden, w_n, BN, BK, M, EVEN, TRANSPOSED, SWAP, PRECISION)
        if HAS_BIAS:
            bias_at = BIAS + e.to(tl.int64) * b_e + half * inner + n
            acc += tl.load(bias_at, mask=used, other=0.0).to(tl.float32)[None, :]
        if INTERLEAVED:
            gate, up = tl.split(acc.reshape(M, HALF, 2))
        else:
            gate, up = tl.split(acc.reshape(M, 2, HALF).permute(0, 2, 1))
        h = _activated(gate, up, limit, alpha, ACTIVATION)
        col = first + tl.arange(0, HALF)
        h_at = INNER + pair.to(tl.int64)[:, None] * inner + col[None, :]
        tl.store(h_at, h.to(INNER.dtype.element_ty), mask=real[:, None] & (col < inner)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    INNER, CHOICE, W, BIAS, PARTS, w_e, w_n, b_e, pairs, hidden, inner,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, BY_PAIR: tl.constexpr, M: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The second product of each choice, float32 ``[SPLITS, pairs, hidden]``: parts of the sum over inner."""
    first = tl.program_id(0) // SPLITS * BN
    split = tl.program_id(0) % SPLITS
    steps = tl.cdiv(inner, BK)
    k_lo = split * steps // SPLITS * BK
    k_hi = tl.minimum((split + 1) * steps // SPLITS * BK, inner)
    # The first product starts its dependents after all before it is done: choices can be read at once.
    chosen = _choices(CHOICE, pairs, EXPERTS, PAIRS)
    e, mine, count = _expert(CHOICE, tl.program_id(1), chosen, EXPERTS, PAIRS, BY_PAIR)
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    w = W + tl.maximum(e, 0).to(tl.int64) * w_e
    if TRANSPOSED:
        w_at = w + k.to(tl.int64)[:, None] * w_n + n[None, :]
        w_used = (n < hidden)[None, :]
    else:
        w_at = w + n.to(tl.int64)[:, None] * w_n + k[None, :]
        w_used = (n < hidden)[:, None]
    if PDL:
        if AHEAD > 0 and count > 0 and first + BN <= hidden and k_lo + AHEAD <= k_hi:
            LINE: tl.constexpr = 512 // W.dtype.element_ty.primitive_bitwidth
            if TRANSPOSED:
                i = tl.arange(0, AHEAD * (BN // LINE))
                prefetch(w + (k_lo + i // (BN // LINE)).to(tl.int64) * w_n + first + i % (BN // LINE) * LINE)
            else:
                i = tl.arange(0, BN * (AHEAD // LINE))
                prefetch(w + (first + i // (AHEAD // LINE)).to(tl.int64) * w_n + k_lo + i % (AHEAD // LINE) * LINE)
        gdc_wait()
        gdc_launch_dependents()
    if count == 0:
        return

    for start in tl.range(0, count, M):
        pair = _pairs_of(CHOICE, e, mine, start, pairs, M, PAIRS, CHUNK)
        real = tl.arange(0, M) + start < count
        h_at = INNER + pair.to(tl.int64)[:, None] * inner + k[None, :]
        acc = product(h_at, w_at, real[:, None], w_used, k_lo, k_hi, w_n, BN, BK, M, EVEN, TRANSPOSED, SWAP, PRECISION)
        if HAS_BIAS and split == 0:
            acc += tl.load(BIAS + e.to(tl.int64) * b_e + n, mask=n < hidden, other=0.0).to(tl.float32)[None, :]
        out_at = PARTS + (split * pairs + pair).to(tl.int64)[:, None] * hidden + n[None, :]
        tl.store(out_at, acc, mask=real[:, None] & (n < hidden)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _combine_kernel(
    PARTS, CHOICE, WEIGHT, OUT, pairs, hidden,
    EXPERTS: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weighted sum of a row's choices in order."""
    row = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BN], tl.float32)
    for k in tl.static_range(K):
        pair = row * K + k
        e = tl.load(CHOICE + pair)
        routed = (e >= 0) & (e < EXPERTS)
        y = tl.zeros([BN], tl.float32)
        # What was never written is read too: waiting for the choice would take longer.
        for split in tl.static_range(SPLITS):
            at = (split * pairs + pair).to(tl.int64) * hidden + n
            y += tl.load(PARTS + at, mask=n < hidden, other=0.0)
        acc += tl.where(routed, tl.load(WEIGHT + pair).to(tl.float32) * y, 0.0)
    tl.store(OUT + row.to(tl.int64) * hidden + n, acc.to(OUT.dtype.element_ty), mask=n < hidden)


def moe_experts_triton(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None, tiling: ExpertTiling | None = None,
) -> Tensor:  # fmt: skip
    """Same arguments and result as :func:`spec_compile.kernels.library.moe_experts`, where
    :func:`spec_compile.kernels.moe.why_no_experts_kernel` is None.

    ``tiling`` overrides the table of :mod:`spec_compile.kernels.moe_tiling` (for the tuner).
    """
    rows, hidden = x.shape
    experts, inner = gate_up.shape[0], down.shape[1 if transposed else 2]
    pairs = choice.numel()
    out = x.new_empty(rows, hidden)
    if pairs == 0 or out.numel() == 0:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    choice, weight = choice.contiguous(), weight.contiguous()
    gate_up_bias, down_bias = (b if b is None or b.stride(1) == 1 else b.contiguous() for b in (gate_up_bias, down_bias))
    tiling = tiling or choose_expert_tiling(x.device, x.dtype, rows, experts, choice.shape[1], hidden, inner)
    first, second = tiling.up, tiling.down
    # Two tensors of equal strides: one is reached from the other, wherever the allocator put them.
    apart = inner * (1 if transposed else gate_up.stride(1))
    if up is not None:
        apart = (up.data_ptr() - gate_up.data_ptr()) // up.itemsize
    between = x.new_empty(pairs, inner)
    parts = x.new_empty(tiling.splits, pairs, hidden, dtype=torch.float32)
    by_pair = pairs < experts
    places = min(pairs, experts)
    listed = max(64, triton.next_power_of_2(pairs))
    precision = "ieee" if x.dtype == torch.float32 else None
    pdl = device_of(x.device).capability >= 90
    options = {"launch_pdl": True} if pdl else {}
    common = {
        "EXPERTS": experts, "PAIRS": listed, "CHUNK": min(listed, 4096 // tiling.rows), "BY_PAIR": by_pair, "M": tiling.rows,
        "TRANSPOSED": transposed, "PRECISION": precision, "PDL": pdl, **options,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        _gate_up_kernel[(triton.cdiv(inner, first.width // 2), places)](
            x, choice, gate_up, x if gate_up_bias is None else gate_up_bias, between, x.stride(0), *gate_up.stride()[:2], apart,
            0 if gate_up_bias is None else gate_up_bias.stride(0), pairs, hidden, inner, limit, alpha,
            K=choice.shape[1], BN=first.width, BK=first.depth, EVEN=hidden % first.depth == 0, ACTIVATION=activation,
            INTERLEAVED=interleaved, HAS_BIAS=gate_up_bias is not None, SWAP=first.swap,
            AHEAD=first.ahead if first.ahead <= hidden else 0, num_warps=first.warps, num_stages=first.stages, **common,
        )  # fmt: skip
        _down_kernel[(triton.cdiv(hidden, second.width) * tiling.splits, places)](
            between, choice, down, x if down_bias is None else down_bias, parts, *down.stride()[:2],
            0 if down_bias is None else down_bias.stride(0), pairs, hidden, inner,
            BN=second.width, BK=second.depth, EVEN=inner % second.depth == 0, SPLITS=tiling.splits,
            HAS_BIAS=down_bias is not None, SWAP=second.swap, AHEAD=second.ahead if second.ahead <= inner else 0,
            num_warps=second.warps, num_stages=second.stages, **common,
        )  # fmt: skip
        _combine_kernel[(triton.cdiv(hidden, tiling.columns), rows)](
            parts, choice, weight, out, pairs, hidden, EXPERTS=experts, K=choice.shape[1], BN=tiling.columns,
            SPLITS=tiling.splits, PDL=pdl, num_warps=max(1, min(4, tiling.columns // 128)), **options,
        )  # fmt: skip
    return out
