"""``block_summary_`` in Triton: two launches for all anchor layers, no host reads.

The first decides per layer, batch row and head from where on to summarize: someone else may have written the cache, so the
newest summary that is to be trusted is compared with its keys. The second does the work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from spec_compile.kernels.tiling import device_of

# Programs in all: a step completes at most a few blocks, a rebuild walks them all.
_PROGRAMS = 1024
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit(do_not_specialize=["heads", "kv_len"])
def _summary_kernel(
    TABLE, VALID, POSITION, START, p_b, k_b, k_h, k_s, k_d, s_b, s_h, s_n, s_r, s_d, heads, kv_len,
    D: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr, BOUNDS: tl.constexpr, TYPE: tl.constexpr, PROGRAMS: tl.constexpr,
    DECIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1)
    layer = tl.program_id(2)
    b = (lane // heads).to(tl.int64)
    head = (lane % heads).to(tl.int64)
    K = tl.load(TABLE + 2 * layer).to(tl.pointer_type(TYPE)) + b * k_b + head * k_h
    SUMMARY = tl.load(TABLE + 2 * layer + 1).to(tl.pointer_type(TYPE)) + b * s_b + head * s_h
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    committed = tl.minimum(tl.load(POSITION + b * p_b), kv_len).to(tl.int32) // BLOCK
    slot = START + layer * tl.num_programs(1) + lane
    d = tl.arange(0, BD)
    n = tl.arange(0, BLOCK)
    k_at = K + n[:, None] * k_s + d[None, :] * k_d
    s_at = SUMMARY + d * s_d
    if DECIDE:
        # One block: the newest one held. With none held its place counts as 0 and nothing is trusted.
        held = tl.minimum(tl.load(VALID + b), committed)
        first = tl.maximum(held - 1, 0)
        end = first + 1
    else:
        held = 0
        first = tl.load(slot) + tl.program_id(0)
        end = committed
    one = tl.full([], 1, tl.int64)
    for block in tl.range(first, end, PROGRAMS):
        wide = block * one
        inside = (block * BLOCK + n < kv_len)[:, None] & (d < D)[None, :]
        k = tl.load(k_at + wide * BLOCK * k_s, mask=inside, other=0.0)
        if BOUNDS:
            low = tl.min(k, 0)
            high = tl.max(k, 0)
        else:
            low = (tl.sum(k.to(tl.float32), 0) / BLOCK).to(TYPE)
            high = low
        at = s_at + wide * s_n
        if DECIDE:
            # Computed alike in both launches, equal keys give equal bits.
            wrong = tl.load(at, mask=d < D, other=0.0) != low
            if BOUNDS:
                wrong = wrong | (tl.load(at + s_r, mask=d < D, other=0.0) != high)
            stale = tl.max(((d < D) & wrong).to(tl.int32), 0)
            tl.store(slot, tl.where(stale > 0, 0, held))
        else:
            tl.store(at, low, mask=d < D)
            if BOUNDS:
                tl.store(at + s_r, high, mask=d < D)
    if not DECIDE:  # noqa: SIM102 (a constant of the kernel)
        if (tl.program_id(0) == 0) & (head == 0) & (layer == 0):
            tl.store(VALID + b, committed)


# Addresses of K and summaries by device; a table must outlive the CUDA graphs that read it.
_tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def _table(keys: list[Tensor], summaries: list[Tensor]) -> Tensor:
    places = tuple(x.data_ptr() for pair in zip(keys, summaries) for x in pair)
    found = _tables.get((keys[0].device, places))
    if found is None:
        if keys[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("block_summary_: run the step once before capturing it, so that its address table exists")
        found = torch.tensor(places, dtype=torch.int64).to(keys[0].device)
        _tables[keys[0].device, places] = found
    return found


def why_not(keys: list[Tensor], summaries: list[Tensor], block_size: int) -> str | None:
    """Reason why the kernel cannot keep these summaries, or None."""
    k, summary = keys[0], summaries[0]
    if k.dtype not in _TYPES or any(x.dtype != k.dtype for x in (*keys, *summaries)):
        return f"dtypes {sorted({str(x.dtype) for x in (*keys, *summaries)})}"
    if any(x.device != k.device for x in (*keys, *summaries)):
        return "the layers lie on several devices"
    if any(x.stride() != k.stride() or x.shape != k.shape for x in keys):
        return "the layers' keys differ in shape or strides"
    if any(x.stride() != summary.stride() or x.shape != summary.shape for x in summaries):
        return "the layers' summaries differ in shape or strides"
    if block_size & (block_size - 1) or k.shape[3] > 256:
        return f"block_size {block_size} or head dim {k.shape[3]}"
    return None


def block_summary_triton(
    keys: list[Tensor], summaries: list[Tensor], valid: Tensor, position: Tensor, block_size: int, representative: str
) -> None:
    """Same arguments and effect as :func:`spec_compile.kernels.library.block_summary_`, where :func:`why_not` is None."""
    k, summary = keys[0], summaries[0]
    batch, heads, _, dim = k.shape
    start = valid.new_empty(len(keys), batch * heads, dtype=torch.int32)
    operands = (
        _table(keys, summaries), valid, position, start, 0 if position.shape[0] == 1 else position.stride(0),
        *k.stride(), *summary.stride(), heads, k.shape[2],
    )  # fmt: skip
    pdl = device_of(k.device).capability >= 90
    with torch.cuda.device_of(k):
        for decide in (True, False):
            programs = 1 if decide else max(1, _PROGRAMS // max(1, batch * heads * len(keys))) if k.is_cuda else 2
            _summary_kernel[(programs, batch * heads, len(keys))](
                *operands, D=dim, BD=max(16, triton.next_power_of_2(dim)), BLOCK=block_size,
                BOUNDS=representative == "min_max", TYPE=_TYPES[k.dtype], PROGRAMS=programs, DECIDE=decide,
                PDL=pdl, **({"launch_pdl": True} if pdl else {}),
            )  # fmt: skip
