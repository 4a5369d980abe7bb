"""DetectAttention on hand-written programs: what it rewrites, what it refuses and why, and what survives it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    ATTENTION,
    FOLDED,
    LIVE_BLOCKS,
    Case,
    Data,
    Sizes,
    additive,
    cloned,
    compare,
    count,
    data,
    lower,
    op_counts,
    repeat_kv,
    rewrite,
    run_case,
    trace,
)
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx import GraphModule

import spec_compile.passes
from spec_compile.passes.base import PassContext
from spec_compile.passes.detect_attention import DetectAttention

LOWERINGS = ("reference", "auto")
lowerings = pytest.mark.parametrize("lowering", LOWERINGS)
Built = tuple[Callable[..., Any], list[Any]]


def write(k_cache: Tensor, v_cache: Tensor, pos: Tensor, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
    return k_cache.index_copy_(2, pos, k_new), v_cache.index_copy_(2, pos, v_new)


def merge(out: Tensor) -> Tensor:
    """``[B, H, T, D]`` to ``[B, T, H * D]``, as before an output projection."""
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def eager_core(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    scores = (q @ k.transpose(2, 3)) * scale
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v


def sdpa_program(group: int, **options: Any) -> Callable[..., Tensor]:
    """Write, repeat, SDPA; the last argument is the mask."""

    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        return merge(F.scaled_dot_product_attention(q, repeat_kv(k, group), repeat_kv(v, group), mask, **options))

    return fn


def softmax_program(group: int, core: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Write, repeat, ``core(q, k, v, mask)``, or the usual eager attention."""

    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        k, v = repeat_kv(k, group), repeat_kv(v, group)
        return merge(eager_core(q, k, v, mask, q.shape[-1] ** -0.5) if core is None else core(q, k, v, mask))

    return fn


def scored(mask_step: Callable[[Tensor, Tensor], Tensor], scale: float = 0.3) -> Callable[..., Tensor]:
    """Core whose masking (or any other work on the scaled scores) is ``mask_step(scores, mask)``."""

    def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return mask_step((q @ k.transpose(2, 3)) * scale, mask).softmax(-1) @ v

    return core


# Masks of SDPA and of the softmax spelling


def per_head(keep: Tensor) -> Tensor:
    """``[..., H, T, S]``: each of four heads hides another slot of the prefix."""
    return keep & (torch.arange(40) != torch.tensor([1, 9, 12, 13])[:, None, None])


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool-4d": lambda keep: keep,
    "bool-4d-batch1": lambda keep: keep[1:],
    "bool-4d-per-head": per_head,
    "bool-4d-one-row": lambda keep: keep[:, :, -1:],
    "bool-3d": lambda keep: keep[1],
    "bool-3d-per-head": lambda keep: per_head(keep[1]),
    "bool-2d": lambda keep: keep[1, 0],
    "additive-4d": additive,
    "additive-4d-inf": lambda keep: additive(keep, -torch.inf),
    "additive-4d-batch1": lambda keep: additive(keep[1:]),
    "additive-4d-per-head": lambda keep: additive(keep) + torch.linspace(-2, 2, 160).view(1, 4, 1, 40),
    "additive-3d": lambda keep: additive(keep[1]),
    "additive-2d": lambda keep: additive(keep[1, 0]),
    "bias-1e5": lambda keep: additive(keep, -1e5),
}


@lowerings
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_masks(mask: str, lowering: str) -> None:
    given = data()
    given.keep = MASKS[mask](given.keep)
    case = run_case(sdpa_program(2), list(given), lowering).check_rewritten()
    assert count(case.graph, FOLDED if lowering == "auto" else ATTENTION) == 1
    assert count(case.graph, LIVE_BLOCKS) == 1
    assert count(case.graph, torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.expand.default) == 0


@lowerings
def test_sdpa_without_mask(lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2))

    case = run_case(fn, list(data()), lowering).check_rewritten()
    assert count(case.graph, LIVE_BLOCKS) == 0


def test_bias_of_1e5_is_added_and_not_taken_for_hiding() -> None:
    given = data()
    bias = torch.full(given.keep.shape, -1e5)
    bias[..., 5] = -1e5 + 1
    given.keep = bias
    run_case(sdpa_program(2), list(given), "reference").check_rewritten(atol=1e-4)
    run_case(sdpa_program(2), list(given), "auto").check_rewritten(atol=1e-4)


@lowerings
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "bias-1e5"])
def test_softmax_masks(mask: str, lowering: str) -> None:
    given = data()
    given.keep = MASKS[mask](given.keep)
    floating = given.keep.is_floating_point()
    step = (lambda s, m: s + m) if floating else (lambda s, m: s.masked_fill(~m, -torch.inf))
    run_case(softmax_program(2, scored(step)), list(given), lowering).check_rewritten()


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill-inf": lambda s, m: s.masked_fill(~m, -torch.inf),
    "masked_fill-min": lambda s, m: s.masked_fill(~m, torch.finfo(s.dtype).min),
    "masked_fill-tensor-value": lambda s, m: s.masked_fill(~m, torch.full((), -torch.inf)),
    "masked_fill-in-place": lambda s, m: s.masked_fill_(~m, -torch.inf),
    "where-keep": lambda s, m: torch.where(m, s, -torch.inf),
    "where-hide": lambda s, m: torch.where(~m, torch.finfo(s.dtype).min, s),
    "where-tensor-value": lambda s, m: torch.where(m, s, torch.full((), -torch.inf)),
    "add-left": lambda s, m: torch.where(m, 0.0, -torch.inf) + s,
    "two-masks": lambda s, m: s.masked_fill(~m, -torch.inf).masked_fill(torch.arange(40) == 11, -torch.inf),
    "mask-and-bias": lambda s, m: (s + torch.arange(40) * 0.01).masked_fill(~m, -torch.inf),
    "bias-after-mask": lambda s, m: s.masked_fill(~m, -torch.inf) + torch.arange(40) * 0.01,
    "two-biases": lambda s, m: s + torch.arange(40) * 0.01 + torch.where(m, 0.0, torch.finfo(s.dtype).min),
    "softcap": lambda s, m: (torch.tanh(s / 2.0) * 2.0).masked_fill(~m, -torch.inf),
    "softcap-reciprocal": lambda s, m: (torch.tanh(s * (1 / 2.0)) * 2.0).masked_fill(~m, -torch.inf),
    "max-subtracted": lambda s, m: (lambda x: x - x.amax(-1, keepdim=True))(s.masked_fill(~m, -torch.inf)),
    "max-values-subtracted": lambda s, m: (lambda x: x - x.max(-1, keepdim=True).values)(s.masked_fill(~m, -torch.inf)),
    "scaled-twice": lambda s, m: (s * 3.0 / 2.0).masked_fill(~m, -torch.inf),
    "negative-scale": lambda s, m: (-1.5 * s).masked_fill(~m, -torch.inf),
    "float-cast": lambda s, m: s.masked_fill(~m, -torch.inf).float(),
}


@lowerings
@pytest.mark.parametrize("step", STEPS)
def test_softmax_score_spellings(step: str, lowering: str) -> None:
    run_case(softmax_program(2, scored(STEPS[step])), list(data()), lowering).check_rewritten()


# Repeating KV heads


def _repeat_interleave(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, dim=1)
    return F.scaled_dot_product_attention(q, k, v, keep)


def _enable_gqa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)


def _five_d(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    q = q.view(batch, 2, 2, rows, dim)
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * dim**-0.5
    weights = scores.masked_fill(~keep.unsqueeze(1), -torch.inf).softmax(-1)
    return (weights @ v.unsqueeze(2)).reshape(batch, heads, rows, -1)


def _five_d_per_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    scores = q.view(batch, 2, 2, rows, dim) @ k.unsqueeze(2).transpose(-1, -2)
    scores = scores.where(keep.unsqueeze(1), -torch.inf) + torch.arange(2).view(1, 2, 1, 1, 1) * torch.arange(40) * 0.01
    return (scores.softmax(-1) @ v.unsqueeze(2)).reshape(batch, heads, rows, -1)


def _five_d_to_four_d(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    scores = q.view(batch, 2, 2, rows, dim) @ k.unsqueeze(2).transpose(-1, -2)
    scores = scores.view(batch, heads, rows, -1).masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ repeat_kv(v, 2)


def _merged_heads(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    k, v = repeat_kv(k, 2).flatten(0, 1), repeat_kv(v, 2).flatten(0, 1)
    scores = torch.bmm(q.reshape(batch * heads, rows, dim), k.transpose(1, 2)).view(batch, heads, rows, -1)
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.bmm(weights.view(batch * heads, rows, -1), v).view(batch, heads, rows, -1)


def _bloom(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    k, v = repeat_kv(k, 2).flatten(0, 1), repeat_kv(v, 2).flatten(0, 1)
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    alibi = (slopes[:, None, None] * torch.arange(k.shape[1])).repeat(batch, 1, 1)
    scores = alibi.baddbmm(q.reshape(batch * heads, rows, dim), k.transpose(1, 2), beta=1.0, alpha=dim**-0.5)
    scores = scores.view(batch, heads, rows, -1) + torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    weights = F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), 0.1, training=False)
    return torch.bmm(weights.view(batch * heads, rows, -1), v).view(batch, heads, rows, -1)


def _baddbmm_beta_0(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    batch, heads, rows, dim = q.shape
    k, v = repeat_kv(k, 2).flatten(0, 1), repeat_kv(v, 2).flatten(0, 1)
    unused = torch.full((batch * heads, rows, k.shape[1]), torch.nan)
    scores = torch.baddbmm(unused, q.reshape(batch * heads, rows, dim), k.transpose(1, 2), beta=0.0, alpha=0.3)
    weights = scores.view(batch, heads, rows, -1).masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.bmm(weights.view(batch * heads, rows, -1), v).view(batch, heads, rows, -1)


def _prescaled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q * 0.3, repeat_kv(k, 2), repeat_kv(v, 2), keep, scale=1.0)


def _prescaled_softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q * 0.3) @ repeat_kv(k, 2).transpose(2, 3)
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ repeat_kv(v, 2)


def _own_scale(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep, scale=0.25)


def _upcast(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) / 3.0
    weights = F.softmax(scores.masked_fill(~keep, -torch.inf), dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, p=0.0, training=True) @ repeat_kv(v, 2)


SPELLINGS = {
    "repeat_interleave": _repeat_interleave,
    "enable_gqa": _enable_gqa,
    "five-d": _five_d,
    "five-d-per-head-bias": _five_d_per_head,
    "five-d-to-four-d": _five_d_to_four_d,
    "merged-heads-bmm": _merged_heads,
    "bloom": _bloom,
    "baddbmm-beta-0": _baddbmm_beta_0,
    "prescaled-sdpa": _prescaled,
    "prescaled-softmax": _prescaled_softmax,
    "own-scale": _own_scale,
    "upcast-and-dropout": _upcast,
}


@lowerings
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        return merge(SPELLINGS[spelling](q, k, v, keep))

    run_case(fn, list(data()), lowering).check_rewritten()


@lowerings
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_multi_head_and_multi_query(batch: int, kv_heads: int, lowering: str) -> None:
    def mha(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        return F.scaled_dot_product_attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), keep)

    run_case(mha, list(data(Sizes(batch=batch, kv_heads=kv_heads, group=4 // kv_heads))), lowering).check_rewritten()


@lowerings
@pytest.mark.parametrize("order", ["expand", "repeat"])
def test_sinks(order: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        scores = q @ repeat_kv(k, 2).transpose(2, 3) * 0.3 + mask
        column = sinks.reshape(1, -1, 1, 1)
        column = column.expand(2, -1, 3, -1) if order == "expand" else column.repeat(2, 1, 3, 1)
        both = torch.cat([scores, column], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        weights = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
        return merge(F.dropout(weights, 0.5, training=False) @ repeat_kv(v, 2))

    given = data()
    given.keep = additive(given.keep)
    case = run_case(fn, [*given, torch.tensor([0.5, -1.0, 2.0, 0.0])], lowering).check_rewritten()
    assert case.report.rewritten[0].sinks


@lowerings
@pytest.mark.parametrize("split", ["split", "chunk", "slice", "unbind"])
def test_fused_qkv(split: str, lowering: str) -> None:
    def fn(qkv: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        if split == "split":
            q, kn, vn = qkv.split([32, 32, 32], dim=-1)
        elif split == "chunk":
            q, kn, vn = qkv.chunk(3, dim=-1)
        elif split == "slice":
            q, kn, vn = qkv[..., :32], qkv[..., 32:64], qkv[..., 64:]
        else:
            q, kn, vn = qkv.view(2, 3, 3, 32).unbind(2)
        q, kn, vn = (x.reshape(2, 3, 4, 8).transpose(1, 2) for x in (q, kn, vn))
        k, v = write(kc, vc, pos, kn, vn)
        return merge(F.scaled_dot_product_attention(q, k, v, keep))

    given = data(Sizes(kv_heads=4, group=1))
    qkv = torch.cat([x.transpose(1, 2).reshape(2, 3, 32) for x in (given.q, given.k_new, given.v_new)], -1)
    run_case(fn, [qkv, given.k_cache, given.v_cache, given.pos, given.keep], lowering).check_rewritten()


# Cache layouts and writes


@lowerings
@pytest.mark.parametrize("core", ["sdpa", "softmax"])
def test_cache_as_bshd(core: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        kc.index_copy_(1, pos, kn.transpose(1, 2))
        vc.index_copy_(1, pos, vn.transpose(1, 2))
        k, v = repeat_kv(kc.transpose(1, 2), 2), repeat_kv(vc.permute(0, 2, 1, 3), 2)
        if core == "sdpa":
            return merge(F.scaled_dot_product_attention(q, k, v, keep))
        return merge(eager_core(q, k, v, keep, 0.3))

    given = data()
    given.k_cache, given.v_cache = (x.transpose(1, 2).contiguous() for x in (given.k_cache, given.v_cache))
    run_case(fn, list(given), lowering).check_rewritten()


@lowerings
def test_k_stored_as_bhds(lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        kc.index_copy_(3, pos, kn.transpose(2, 3))
        vc.index_copy_(2, pos, vn)
        scores = q @ kc.repeat_interleave(2, 1) * 0.3
        return merge(scores.masked_fill(~keep, -torch.inf).softmax(-1) @ repeat_kv(vc, 2))

    given = data()
    given.k_cache = given.k_cache.transpose(2, 3).contiguous()
    run_case(fn, list(given), lowering).check_rewritten()


def _index_put(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    rows = torch.arange(2)[:, None]
    cache[rows, :, torch.stack([pos, pos + 1])] = new.transpose(1, 2)
    return cache


def _scatter(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    return cache.scatter_(2, pos.view(1, 1, -1, 1).expand(new.shape), new)


def _slice_copy(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    cache[:, :, 21:24].copy_(new)
    return cache


def _slice_assign(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    cache[:, :, 21:24] = new
    return cache


def _index_put_slots(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    cache[:, :, pos] = new
    return cache


def _functional(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    return torch.index_copy(cache, 2, pos, new)


def _functional_slice_scatter(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    return torch.slice_scatter(cache, new, 2, 21, 24)


def _functional_index_put(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    return cache.index_put((torch.arange(2)[:, None], torch.zeros((), dtype=torch.long), pos), new[:, 0]).index_put(
        (torch.arange(2)[:, None], torch.ones((), dtype=torch.long), pos), new[:, 1]
    )


def _whole_buffer(cache: Tensor, pos: Tensor, new: Tensor) -> Tensor:
    return cache.copy_(torch.index_copy(cache, 2, pos, new))


WRITES = {
    "index_copy_": lambda cache, pos, new: cache.index_copy_(2, pos, new),
    "index_put_-per-row": _index_put,
    "index_put_-slots": _index_put_slots,
    "scatter_": _scatter,
    "slice-copy_": _slice_copy,
    "slice-assign": _slice_assign,
    "index_copy": _functional,
    "slice_scatter": _functional_slice_scatter,
    "index_put": _functional_index_put,
    "copy_": _whole_buffer,
}


@lowerings
@pytest.mark.parametrize("kind", WRITES)
def test_writes(kind: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = WRITES[kind](kc, pos, kn), WRITES[kind](vc, pos, vn)
        return merge(F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep))

    run_case(fn, list(data()), lowering).check_rewritten()


@lowerings
def test_growing_cat(lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = torch.cat([kc, kn], 2), torch.cat([vc, vn], -2)
        return merge(eager_core(q, repeat_kv(k, 2), repeat_kv(v, 2), keep, 0.3)), k, v

    given = data(Sizes(slots=24))
    inputs = [given.q, given.k_new, given.v_new, given.k_cache[:, :, :21], given.v_cache[:, :, :21], given.keep]
    case = run_case(fn, inputs, lowering).check_rewritten()
    assert case.report.rewritten[0].cache == "growing"


@lowerings
@pytest.mark.parametrize("core", ["sdpa", "softmax"])
def test_part_of_the_cache_is_read(core: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn)
        k, v = repeat_kv(k[:, :, :33], 2), repeat_kv(v[:, :, :33], 2)
        mask = keep[..., :33]
        out = F.scaled_dot_product_attention(q, k, v, mask) if core == "sdpa" else eager_core(q, k, v, mask, 0.3)
        return merge(out)

    run_case(fn, list(data()), lowering).check_rewritten()


@lowerings
@pytest.mark.parametrize("kind", ["sliced", "transposed", "stacked"])
def test_non_contiguous_caches(kind: str, lowering: str) -> None:
    given = data()
    shape = given.k_cache.shape
    if kind == "sliced":
        wide = [torch.randn(2, 2, 50, 16) for _ in range(2)]
        caches = (given.k_cache, given.v_cache)
        given.k_cache, given.v_cache = (x[:, :, 5:45, 4:12].copy_(c) for x, c in zip(wide, caches))
    elif kind == "transposed":
        given.k_cache, given.v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (given.k_cache, given.v_cache))
    else:
        both = torch.stack([given.k_cache, given.v_cache], 1)
        given.k_cache, given.v_cache = both[:, 0], both[:, 1]
    assert given.k_cache.shape == shape and not given.k_cache.is_contiguous()
    run_case(sdpa_program(2), list(given), lowering).check_rewritten()
    run_case(softmax_program(2), list(given), lowering).check_rewritten()


# Sizes and dtypes


@pytest.mark.parametrize("rows", [*range(1, 18), 32])
def test_rows(rows: int) -> None:
    given = list(data(Sizes(rows=rows, slots=70, seen=30)))
    for program in (sdpa_program(2), softmax_program(2)):
        for lowering in LOWERINGS:
            run_case(program, given, lowering).check_rewritten()


@lowerings
@pytest.mark.parametrize("heads", [(9, 3), (12, 2), (28, 4), (14, 2), (71, 1), (4, 4)])
def test_head_pairs(heads: tuple[int, int], lowering: str) -> None:
    sizes = Sizes(kv_heads=heads[1], group=heads[0] // heads[1])
    case = run_case(sdpa_program(sizes.group), list(data(sizes)), lowering).check_rewritten()
    run_case(softmax_program(sizes.group), list(data(sizes)), lowering).check_rewritten()
    entry = case.report.rewritten[0]
    assert (entry.heads, entry.kv_heads) == heads


@lowerings
@pytest.mark.parametrize("dims", [64, 72, 80, 96, 112, 128, 256, (192, 128), (16, 24)])
def test_head_dims(dims: int | tuple[int, int], lowering: str) -> None:
    dim, v_dim = dims if isinstance(dims, tuple) else (dims, dims)
    given = list(data(Sizes(dim=dim, v_dim=v_dim)))
    case = run_case(sdpa_program(2), given, lowering).check_rewritten()
    run_case(softmax_program(2), given, lowering).check_rewritten()
    assert (case.report.rewritten[0].head_dim, case.report.rewritten[0].v_head_dim) == (dim, v_dim)


def _widened(fn: Callable[..., Tensor], inputs: list[Any]) -> Tensor:
    return fn(*[x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in cloned(inputs)])


def check_precision(fn: Callable[..., Tensor], inputs: list[Any], lowering: str, dtype: torch.dtype) -> None:
    """The rewritten error against float64 is at most 1.2 times eager's own, up to rounding of the result."""
    case = run_case(fn, inputs, lowering)
    assert case.hits == 1, case.reasons
    exact = _widened(fn, inputs)
    own, ours = (case.expected.double() - exact).abs().max(), (case.actual.double() - exact).abs().max()
    assert ours <= 1.2 * own + torch.finfo(dtype).eps, f"{ours:.2e} against {own:.2e} of eager"
    compare(case.expected_inputs, case.actual_inputs, 0.0)


@lowerings
@pytest.mark.parametrize("core", ["sdpa", "softmax", "gemma", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision(dtype: torch.dtype, core: str, lowering: str) -> None:
    def softmax(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3) * 64**-0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
        return F.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v

    def gemma(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.transpose(2, 3) * 64**-0.5 / 5.0) * 5.0
        scores = scores.masked_fill(~keep, torch.finfo(q.dtype).min)
        return F.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v

    def alibi(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        # The bias is wider than q, as in bloom and mpt with an upcast softmax.
        scores = (q @ k.transpose(2, 3) * 64**-0.5).to(torch.promote_types(q.dtype, torch.float32))
        bias = torch.arange(100) * 0.7
        return (scores + bias).masked_fill(~keep, -torch.inf).softmax(-1).to(q.dtype) @ v

    given = list(data(Sizes(dim=64, v_dim=64, slots=100, seen=60, dtype=dtype)))
    cores = {"softmax": softmax, "gemma": gemma, "alibi": alibi}
    fn = sdpa_program(2) if core == "sdpa" else softmax_program(2, cores[core])
    check_precision(fn, given, lowering, dtype)


# What the reference promises beyond eager


def test_nan_in_unused_slots_does_not_reach_the_output() -> None:
    given = data()
    clean = cloned(list(given))
    for cache in (given.k_cache, given.v_cache):
        cache[:, :, 30:] = torch.nan
        cache[0, :, :7] = torch.nan
    for program in (sdpa_program(2), softmax_program(2)):
        case = run_case(program, list(given), "reference")
        assert case.hits == 1
        compare(program(*cloned(clean)), case.actual, 1e-5)


@pytest.mark.parametrize("hidden", [None, -torch.inf])
@pytest.mark.parametrize("floating", [False, True])
def test_rows_that_see_nothing_are_zero_in_the_reference(floating: bool, hidden: float | None) -> None:
    given = data()
    given.keep[1, :, 2] = False
    keep = given.keep.clone()
    if floating:
        given.keep = additive(keep, hidden)
    case = run_case(sdpa_program(2), list(given), "reference")
    assert case.hits == 1
    assert torch.equal(case.actual[1, 2], torch.zeros_like(case.actual[1, 2]))
    compare(case.expected[0], case.actual[0], 1e-5)
    compare(case.expected[1, :2], case.actual[1, :2], 1e-5)


# Several attentions, idempotence, symbols, export


def two_layers(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
    for layer in range(2):
        k, v = write(kc[layer], vc[layer], pos, kn, vn)
        q = F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep[:, :, :, :40])
    return merge(q)


def two_layer_data() -> list[Any]:
    given = data()
    return [
        given.q, given.k_new, given.v_new, torch.stack([given.k_cache] * 2), torch.stack([given.v_cache] * 2),
        given.pos, given.keep,
    ]  # fmt: skip


@lowerings
def test_layers_share_the_block_list(lowering: str) -> None:
    case = run_case(two_layers, two_layer_data(), lowering).check_rewritten(hits=2)
    assert count(case.graph, LIVE_BLOCKS) == 1
    assert count(case.graph, torch.ops.spec_compile.fold_mask_v1.default) == (1 if lowering == "auto" else 0)


@lowerings
def test_mask_written_through_an_alias_between_layers_is_not_shared(lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        view = mask[:, :, :, :]
        for layer in range(2):
            k, v = write(kc[layer], vc[layer], pos, kn, vn)
            q = F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), view)
            mask.fill_(True)
        return q

    given = two_layer_data()
    given[-1][..., 12:] = False
    run_case(fn, given, lowering).check()


@lowerings
def test_running_the_passes_twice_changes_nothing(lowering: str) -> None:
    for program in (sdpa_program(2), softmax_program(2)):
        gm, first = rewrite(trace(program, list(data())), lowering)
        before = gm.code
        again, second = rewrite(gm, lowering)
        assert len(first.rewritten) == 1 and second.attentions == []
        assert again.code == before


@lowerings
@pytest.mark.parametrize("core", ["sdpa", "softmax", "five-d", "bloom"])
def test_symbolic_rows_survive(core: str, lowering: str) -> None:
    cores = {"five-d": _five_d, "bloom": _bloom}

    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        if core in cores:
            k, v = write(kc, vc, pos, kn, vn)
            return merge(cores[core](q, k, v, keep))
        return (sdpa_program(2) if core == "sdpa" else softmax_program(2))(q, kn, vn, kc, vc, pos, keep)

    gm = trace(fn, list(data()), dynamic=[(0, 2), (1, 2), (2, 2), (5, 0), (6, 2)])
    symbols = _free_symbols(gm)
    assert symbols, "tracing has specialised the rows"
    gm, report = rewrite(gm, lowering)
    assert len(report.rewritten) == 1, report.refused
    for rows in (1, 3, 5, 9):
        inputs = list(data(Sizes(rows=rows)))
        theirs, ours = cloned(inputs), cloned(inputs)
        compare(fn(*theirs), gm(*ours), 1e-5)
        compare(theirs, ours, 0.0)
    assert _free_symbols(gm) == symbols


def _free_symbols(gm: torch.fx.GraphModule) -> set[Any]:
    out = next(iter(gm.graph.find_nodes(op="output"))).args[0]
    return set(torch.fx.experimental.symbolic_shapes.free_symbols(out.meta["val"]))


PINNED = {
    "heads": [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)],
    "query-heads": [(0, 1)],
    "head-dim": [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)],
}


@lowerings
@pytest.mark.parametrize("core", ["sdpa", "softmax"])
@pytest.mark.parametrize("sizes", PINNED)
def test_symbolic_heads_and_dims_are_pinned(sizes: str, core: str, lowering: str) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = (x.expand(2, q.shape[1], 40, 8) for x in write(kc, vc, pos, kn, vn))
        return F.scaled_dot_product_attention(q, k, v, keep) if core == "sdpa" else eager_core(q, k, v, keep, 0.3)

    given = data(MHA if sizes == "heads" else Sizes(kv_heads=1, group=4))
    run_case(fn, list(given), lowering, dynamic=PINNED[sizes]).check_rewritten()


class Layer(torch.nn.Module):
    """Projections, a static cache in buffers, and one attention of either spelling."""

    def __init__(self, sdpa: bool) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(3)
        self.sdpa = sdpa
        self.qkv = torch.nn.Parameter(torch.randn(64, 32, generator=gen) * 0.1, requires_grad=False)
        self.register_buffer("k_cache", torch.randn(2, 2, 40, 8, generator=gen))
        self.register_buffer("v_cache", torch.randn(2, 2, 40, 8, generator=gen))

    def forward(self, x: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        q, kn, vn = F.linear(x, self.qkv).split([32, 16, 16], -1)
        q, kn, vn = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, kn, vn))
        k, v = write(self.k_cache, self.v_cache, pos, kn, vn)
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        if self.sdpa:
            return merge(F.scaled_dot_product_attention(q, k, v, keep))
        return merge(eager_core(q, k, v, keep, 8**-0.5))


def layer_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    given = data(Sizes(rows=rows))
    return torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(rows)), given.pos, given.keep


@lowerings
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sdpa", [False, True])
@torch.no_grad()
def test_export_rewrite_export_again(sdpa: bool, dynamic: bool, lowering: str) -> None:
    rows = torch.export.Dim("rows", min=2, max=16)
    shapes = {"x": {1: rows}, "pos": {0: rows}, "keep": {2: rows}} if dynamic else None
    program = torch.export.export(Layer(sdpa), layer_inputs(3), dynamic_shapes=shapes, strict=False)
    report = rewrite(program.graph_module, lowering)[1]
    assert len(report.rewritten) == 1, report.refused
    module = program.module()
    for sizes in (3, 5) if dynamic else (3,):
        eager, inputs = Layer(sdpa), layer_inputs(sizes)
        compare(eager(*inputs), module(*inputs), 1e-5)
        compare(eager.k_cache, module.k_cache, 1e-5)
        module.load_state_dict(Layer(sdpa).state_dict())
    again = torch.export.export(module, layer_inputs(3), dynamic_shapes=shapes, strict=False)
    assert op_counts(again.graph_module)[str(FOLDED if lowering == "auto" else ATTENTION)] == 1
    second = again.module()
    for sizes in (3, 5) if dynamic else (3,):
        eager, inputs = Layer(sdpa), layer_inputs(sizes)
        compare(eager(*inputs), second(*inputs), 1e-5)
        second.load_state_dict(Layer(sdpa).state_dict())


def test_inference_mode_and_no_grad_give_the_same_graph() -> None:
    with torch.inference_mode():
        run_case(sdpa_program(2), list(data())).check_rewritten()


def test_lowering_afterwards_is_the_same_as_lowering_at_once() -> None:
    given = list(data())
    gm, _ = rewrite(trace(sdpa_program(2), given), "reference")
    once = run_case(sdpa_program(2), given, "auto")
    assert torch.equal(lower(gm)(*cloned(given)), once.actual)


@pytest.mark.parametrize("written", [False, True])
def test_an_attention_whose_result_nobody_uses_is_no_defect(written: bool) -> None:
    def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
        k, v = write(kc, vc, pos, kn, vn) if written else (kc, vc)
        F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep)
        return q * 2

    run_case(fn, list(data())).check()


def test_a_router_softmax_is_no_attention() -> None:
    def fn(x: Tensor, experts: Tensor) -> Tensor:
        return torch.topk((x @ experts).softmax(-1), 2).values

    assert run_case(fn, [torch.randn(2, 3, 8), torch.randn(8, 4)]).report.attentions == []


# What must be refused, one program per reason


@dataclasses.dataclass(frozen=True)
class Negative:
    reason: str
    fn: Callable[..., Any]
    sizes: Sizes
    prepare: Callable[[Data], list[Any]]
    options: dict[str, Any]


NEGATIVES: dict[str, Negative] = {}


def refuses(
    reason: str, sizes: Sizes | None = None, prepare: Callable[[Data], list[Any]] = list, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a program that must be refused with ``reason``; its name is the test id."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        assert fn.__name__ not in NEGATIVES
        NEGATIVES[fn.__name__] = Negative(reason, fn, sizes or Sizes(), prepare, options)
        return fn

    return wrap


MHA = Sizes(kv_heads=4, group=1)
SQUARE = Sizes(kv_heads=4, group=1, slots=40, dim=40, v_dim=40)


def refuses_core(reason: str, sizes: Sizes = MHA, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like :func:`refuses` for ``core(q, k, v, keep)`` on caches that were written."""

    def wrap(core: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fn(q: Tensor, kn: Tensor, vn: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, keep: Tensor) -> Tensor:
            k, v = write(kc, vc, pos, kn, vn)
            return core(q, k, v, keep)

        fn.__name__ = core.__name__
        refuses(reason, sizes, **options)(fn)
        return core

    return wrap


@refuses_core("the scores pass through einsum, which the detector does not know")
def scores_by_einsum(q, k, v, keep):
    return torch.einsum("bhtd,bhsd->bhts", q, k).masked_fill(~keep, -torch.inf).softmax(-1) @ v


@refuses_core("pass through einsum after the softmax")
def values_by_einsum(q, k, v, keep):
    return torch.einsum("bhts,bhsd->bhtd", (q @ k.transpose(2, 3)).softmax(-1), v)


@refuses_core("inside an autocast region")
def autocast_inside(q, k, v, keep):
    with torch.autocast("cpu", torch.bfloat16):
        return eager_core(q, k, v, keep, 0.3)


@refuses_core("q has 3 dimensions; [B, H, T, D] is supported")
def sdpa_of_three_dimensions(q, k, v, keep):
    return F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))


@refuses_core("dropout is active (dropout_p > 0); call model.eval()")
def sdpa_dropout(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, keep, dropout_p=1.0) * 0


@refuses_core("is_causal=True with q_len 3 and kv_len 40")
def sdpa_causal(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@refuses_core("is_causal=True with one row sees only the first key", dataclasses.replace(MHA, rows=1))
def sdpa_causal_one_row(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@refuses_core("scores with 6 dimensions")
def six_dimensions(q, k, v, keep):
    q, k, v = (x[:, None, None] for x in (q, k, v))
    return eager_core_last(q, k, v, keep[:, None, None])


def eager_core_last(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).masked_fill(~keep, -torch.inf).softmax(-1) @ v


@refuses_core("q is broadcast over batch or heads")
def softmax_q_of_one_head(q, k, v, keep):
    return eager_core(q[:, :1], k, v, keep, 0.3)


@refuses_core("query heads over 4 KV heads repeated 1 times")
def sdpa_q_of_one_head(q, k, v, keep):
    return F.scaled_dot_product_attention(q[:, :1], k, v, keep)


@refuses_core("5-D scores that are not [B, Hkv, G, T, S]")
def five_dimensions_of_batch(q, k, v, keep):
    return eager_core_last(q[None], k[None], v[None], keep[None])


@refuses_core("the second axis of the scores is not the query heads")
def four_dimensions_of_merged_heads(q, k, v, keep):
    q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    return eager_core_last(q, k, v, keep[1:])


@refuses("K and V differ in KV heads or length", dataclasses.replace(MHA, group=2, kv_heads=2))
def v_of_fewer_heads(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc[:, :1], pos, kn, vn[:, :1])
    return eager_core(q, repeat_kv(k, 2), repeat_kv(v, 4), keep, 0.3)


@refuses("the cache is torch.bfloat16, attention computes in torch.float32")
def v_upcast_k_not(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    scores = (q @ repeat_kv(k, 2).transpose(2, 3)).float().masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ repeat_kv(v.float(), 2)


NEGATIVES["v_upcast_k_not"] = dataclasses.replace(NEGATIVES["v_upcast_k_not"], sizes=Sizes(dtype=torch.bfloat16))


@refuses("the cache grows by cat (DynamicCache)", Sizes(slots=24), need_static_cache=True)
def cat_where_a_static_cache_is_needed(q, kn, vn, kc, vc, pos, keep):
    k, v = torch.cat([kc[:, :, :21], kn], 2), torch.cat([vc[:, :, :21], vn], 2)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), keep)


@refuses_core("q_len 33 is outside 1..32 (max_q_len)", dataclasses.replace(MHA, rows=33, slots=70))
def too_many_rows(q, k, v, keep):
    return eager_core(q, k, v, keep, 0.3)


@refuses_core("q_len 3 is outside 1..2 (max_q_len)", max_q_len=2)
def more_rows_than_asked_for(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, keep)


@refuses_core("kv_len 3 is not longer than q_len 3", dataclasses.replace(MHA, slots=3, seen=0))
def no_cache_behind_the_rows(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k, v, keep)


@refuses_core("is also used by")
def scores_used_outside(q, k, v, keep):
    scores = q @ k.transpose(2, 3)
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v, scores.sum()


@refuses("writes an operand between the scores and the output", MHA)
def v_written_after_the_scores(q, kn, vn, kc, vc, pos, keep):
    k, v = kc.index_copy_(2, pos, kn), vc.index_copy_(2, pos, vn)
    scores = q @ k.transpose(2, 3)
    vc[:, :, 3].zero_()
    return scores.masked_fill(~keep, -torch.inf).softmax(-1) @ v


@refuses("writes an operand between the scores and the output")
def k_overwritten_after_repeat(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    k = repeat_kv(k, 2)
    kc.zero_()
    return F.scaled_dot_product_attention(q, k, repeat_kv(v, 2), keep)


@refuses("writes an operand between the scores and the output", MHA)
def mask_written_after_its_use(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    bias = keep.float()
    weights = (q @ k.transpose(2, 3) + bias[..., :]).softmax(-1)
    bias.zero_()
    return weights @ v


@refuses_core("softmax over dimension 2 of 4, not over the keys")
def softmax_over_rows(q, k, v, keep):
    return (q @ k.transpose(2, 3)).softmax(2) @ v


@refuses_core("the last weight of every row is dropped, but no sink logit was appended")
def last_weight_dropped(q, k, v, keep):
    return (q @ k.transpose(2, 3)).softmax(-1)[..., :-1] @ v[:, :, :-1]


@refuses_core("the attention weights have 2 users")
def weights_returned(q, k, v, keep):
    weights = (q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf).softmax(-1)
    return weights @ v, weights


@refuses_core("the attention weights are cast to a non-floating dtype")
def weights_cast_to_int(q, k, v, keep):
    return (q @ k.transpose(2, 3)).softmax(-1).to(torch.int32).to(q.dtype) @ v


@refuses_core("scores or weights are rounded to torch.float16 in an attention in torch.float32")
def scores_rounded(q, k, v, keep):
    return (q @ k.transpose(2, 3)).half().float().masked_fill(~keep, -torch.inf).softmax(-1) @ v


@refuses_core("scores or weights are rounded to torch.bfloat16 in an attention in torch.float32")
def softmax_rounded(q, k, v, keep):
    return (q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf).softmax(-1, dtype=torch.bfloat16).float() @ v


@refuses_core("dropout is active on the attention weights; call model.eval()")
def weights_dropout(q, k, v, keep):
    return F.dropout((q @ k.transpose(2, 3)).softmax(-1), 1.0, training=True) @ v


@refuses_core("regroups the rows or keys of the attention weights")
def weights_regrouped(q, k, v, keep):
    weights = (q @ k.transpose(2, 3)).softmax(-1)
    return weights.view(2, 2, 6, 40) @ v[:, :2]


@refuses_core("the attention weights are the right operand of the product", SQUARE)
def weights_on_the_right(q, k, v, keep):
    return v.transpose(2, 3)[..., :3] @ (q @ k.transpose(2, 3)).softmax(-1)


@refuses_core("(mask after softmax)")
def mask_after_softmax(q, k, v, keep):
    return ((q @ k.transpose(2, 3)).softmax(-1) * keep) @ v


@refuses_core("after the softmax (mask after softmax)")
def filled_after_softmax(q, k, v, keep):
    return (q @ k.transpose(2, 3)).softmax(-1).masked_fill(~keep, 0.0) @ v


@refuses_core("the scores are cast to or from a non-floating dtype")
def scores_cast_to_int(q, k, v, keep):
    return (q @ k.transpose(2, 3)).to(torch.int32).to(q.dtype).softmax(-1) @ v


@refuses_core("regroups the rows or keys of the scores")
def scores_regrouped(q, k, v, keep):
    scores = (q @ k.transpose(2, 3)).view(2, 2, 6, 40)
    return scores.softmax(-1) @ v[:, :2]


@refuses_core("something other than one column of sink logits is concatenated to the scores")
def scores_of_two_caches(q, k, v, keep):
    scores = torch.cat([q @ k.transpose(2, 3), q @ k[:, :, :8].transpose(2, 3)], -1)
    return scores.softmax(-1) @ torch.cat([v, v[:, :, :8]], 2)


@refuses_core("something other than one column of sink logits is concatenated to the scores")
def three_parts_and_one_dropped(q, k, v, keep):
    column = torch.zeros(2, 4, 3, 1)
    return torch.cat([q @ k.transpose(2, 3), column, column], -1).softmax(-1)[..., :-1] @ torch.cat([v, v[:, :, :1]], 2)


@refuses_core("something other than one column of sink logits is concatenated to the scores")
def mask_over_the_sinks(q, k, v, keep):
    sinks = torch.zeros(4).reshape(1, -1, 1, 1).expand(2, -1, 3, -1)
    scores = torch.cat([q @ k.transpose(2, 3), sinks], -1).masked_fill(torch.arange(41) == 40, -torch.inf)
    return scores.softmax(-1)[..., :-1] @ v


@refuses_core("the sink logits are not one column per head")
def sinks_first(q, k, v, keep):
    sinks = torch.zeros(4).reshape(1, -1, 1, 1).expand(2, -1, 3, -1)
    return torch.cat([sinks, q @ k.transpose(2, 3)], -1).softmax(-1)[..., :-1] @ v


@refuses_core("the sink logits are not one value per head")
def sinks_per_batch_and_head(q, k, v, keep):
    sinks = q[:, :, :1, :1].expand(-1, -1, 3, -1)
    return torch.cat([q @ k.transpose(2, 3), sinks], -1).softmax(-1)[..., :-1] @ v


@refuses_core("the axes of the sink logits cannot be followed")
def sinks_moved(q, k, v, keep):
    sinks = torch.zeros(4)[None, None, None].movedim(3, 1).expand(2, -1, 3, -1)
    return torch.cat([q @ k.transpose(2, 3), sinks], -1).softmax(-1)[..., :-1] @ v


@refuses_core("the sink logits are not laid out by head", dataclasses.replace(MHA, rows=4))
def sinks_per_row(q, k, v, keep):
    sinks = torch.zeros(4).reshape(1, 1, -1, 1).expand(2, 4, -1, -1)
    return torch.cat([q @ k.transpose(2, 3), sinks], -1).softmax(-1)[..., :-1] @ v


@refuses_core("the scores are scaled after the softcap")
def scaled_after_the_softcap(q, k, v, keep):
    return ((torch.tanh(q @ k.transpose(2, 3) / 5.0) * 5.0) * 0.3).softmax(-1) @ v


@refuses_core("the scores are multiplied by a tensor, not by a constant scale")
def scaled_by_a_tensor(q, k, v, keep):
    return ((q @ k.transpose(2, 3)) * keep[..., :1].float()).softmax(-1) @ v


@refuses_core("the scores are multiplied by a tensor, not by a constant scale")
def scaled_by_zero(q, k, v, keep):
    return ((q @ k.transpose(2, 3)) * 0.0).softmax(-1) @ v


@refuses_core("a mask or bias is added before the softcap")
def mask_before_the_softcap(q, k, v, keep):
    scores = (q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf)
    return (torch.tanh(scores / 5.0) * 5.0).softmax(-1) @ v


@refuses_core("a mask or bias is added before the softcap")
def baddbmm_before_the_softcap(q, k, v, keep):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.ones(1, 1, 40), q, k.transpose(1, 2))
    return (torch.tanh(scores / 5.0) * 5.0).softmax(-1) @ v


@refuses_core("the scores are scaled after a bias or mask was added")
def scaled_after_the_mask(q, k, v, keep):
    return ((q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf) * 0.3).softmax(-1) @ v


@refuses_core("the scores are scaled after a bias or mask was added")
def scaled_after_baddbmm(q, k, v, keep):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return (torch.baddbmm(torch.ones(1, 1, 40), q, k.transpose(1, 2)) * 0.3).softmax(-1) @ v


@refuses_core("the scores pass through clamp, which the detector does not know")
def scores_clamped(q, k, v, keep):
    return (q @ k.transpose(2, 3)).clamp(-1, 1).softmax(-1) @ v


@refuses_core("baddbmm scales its bias by 0.5")
def baddbmm_beta(q, k, v, keep):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.baddbmm(torch.ones(1, 1, 40), q, k.transpose(1, 2), beta=0.5).softmax(-1) @ v


@refuses_core("masked_fill broadcasts the scores", dataclasses.replace(MHA, batch=1))
def masked_fill_broadcasts(q, k, v, keep):
    keep = keep.expand(2, -1, -1, -1) & (torch.arange(40) != torch.tensor([3, 9]).view(2, 1, 1, 1))
    return (q @ k.transpose(2, 3)).masked_fill(~keep, -torch.inf).softmax(-1) @ v.expand(2, -1, -1, -1)


@refuses_core("where mixes two score tensors")
def where_of_two_scores(q, k, v, keep):
    scores = q @ k.transpose(2, 3)
    return torch.where(keep, scores, scores * 0.5).softmax(-1) @ v


@refuses_core("a bias is added with alpha")
def bias_with_alpha(q, k, v, keep):
    return torch.add(q @ k.transpose(2, 3), keep.float(), alpha=2).softmax(-1) @ v


@refuses_core("a constant is added to the scores")
def constant_added(q, k, v, keep):
    return (q @ k.transpose(2, 3) + 1.0).softmax(-1) @ v


@refuses_core("neither operand of the addition leads to the product of q and k")
def added_to_a_clamped_product(q, k, v, keep):
    return ((q @ k.transpose(2, 3)).clamp(-1, 1) + keep.float()).softmax(-1) @ v


@refuses_core("a non-floating tensor is added to the scores")
def bool_added(q, k, v, keep):
    return (q @ k.transpose(2, 3) + keep).softmax(-1) @ v


@refuses_core("masked scores are set to -10000.0, which does not hide a key in torch.float32")
def finite_fill(q, k, v, keep):
    return (q @ k.transpose(2, 3)).masked_fill(~keep, -1e4).softmax(-1) @ v


@refuses_core("masked scores are set to nan, which does not hide a key")
def nan_fill(q, k, v, keep):
    return (q @ k.transpose(2, 3)).masked_fill(~keep, torch.nan).softmax(-1) @ v


@refuses_core("the axes of K cannot be followed through movedim")
def k_moved(q, k, v, keep):
    return eager_core_last(q, k.movedim(1, 2).transpose(1, 2), v, keep)


@refuses_core("K is regrouped: the key axis or the head dimension is not one axis")
def k_slots_in_another_order(q, k, v, keep):
    k = k.view(2, 4, 4, 10, 8).transpose(2, 3).reshape(2, 4, 40, 8)
    return eager_core_last(q, k, v, keep)


@refuses_core("K is regrouped: its leading axes are not batch and heads", Sizes(batch=2, kv_heads=4, group=1))
def k_heads_regrouped(q, k, v, keep):
    k = k.view(2, 2, 2, 40, 8).transpose(1, 2).reshape(2, 4, 40, 8)
    return F.scaled_dot_product_attention(q, k, v, keep)


@refuses_core("permuted K: batch and heads are swapped", Sizes(batch=4, kv_heads=4, group=1))
def k_batch_and_heads_swapped(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k.transpose(0, 1), v, keep)


@refuses_core("permuted K: batch and heads are swapped", Sizes(kv_heads=1, group=4))
def k_batch_read_as_heads(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k.transpose(0, 1), v.expand(-1, 2, -1, -1), keep, enable_gqa=True)


@refuses_core("the heads of K are tiled", Sizes())
def k_heads_tiled(q, k, v, keep):
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), keep)


@refuses_core("the heads of V are tiled", Sizes())
def v_heads_tiled(q, k, v, keep):
    tiled = v[:, None].expand(2, 2, 2, 40, 8).reshape(2, 4, 40, 8)
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), tiled, keep)


@refuses("K is an input that this forward does not write: cross-attention or a read-only cache", MHA)
def cache_not_written(q, kn, vn, kc, vc, pos, keep):
    return F.scaled_dot_product_attention(q, kc, vc, keep)


@refuses("V is an input that this forward does not write", MHA)
def v_cache_not_written(q, kn, vn, kc, vc, pos, keep):
    kc.index_copy_(2, pos, kn)
    return F.scaled_dot_product_attention(q, kc, vc, keep)


@refuses("permuted K: the cache grows along axis 3, attention's key axis is 2", MHA)
def cat_along_the_head_dim(q, kn, vn, kc, vc, pos, keep):
    k = torch.cat([kc[..., :5], kc.new_zeros(2, 4, 40, 3)], 3)
    vc.index_copy_(2, pos, vn)
    return F.scaled_dot_product_attention(q, k, vc, keep)


@refuses("permuted K: the cache is written along axis 2, attention's key axis is 3", SQUARE)
def k_read_transposed(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    return eager_core_last(q, k.transpose(2, 3), v, keep)


@refuses("permuted V: the cache is written along axis 1, attention's key axis is 2", MHA)
def v_written_along_heads(q, kn, vn, kc, vc, pos, keep):
    kc.index_copy_(2, pos, kn)
    vc.index_copy_(1, pos - 21, vc[:, :3] * 0.5)
    return F.scaled_dot_product_attention(q, kc, vc, keep)


def _int8_caches(given: Data) -> list[Any]:
    given.k_cache, given.v_cache = ((x * 20).to(torch.int8) for x in (given.k_cache, given.v_cache))
    return list(given)


@refuses_core("is subtracted before the softcap or the sinks")
def shifted_before_the_softcap(q, k, v, keep):
    scores = q @ k.transpose(2, 3)
    return (torch.tanh((scores - scores.amax(-1, keepdim=True)) / 5.0) * 5.0).softmax(-1) @ v


@refuses_core("are divided with rounding")
def divided_with_rounding(q, k, v, keep):
    return torch.div(q @ k.transpose(2, 3), 0.5, rounding_mode="floor").softmax(-1) @ v


@refuses_core("does not have one value per key")
def bias_per_row(q, k, v, keep):
    return (q @ k.transpose(2, 3) + keep[..., :1].float()).softmax(-1) @ v


@refuses_core("are regrouped to axes that are not batch and heads")
def bias_on_merged_heads(q, k, v, keep):
    scores = (q @ k.transpose(2, 3)).view(1, 8, 3, 40) + torch.arange(8).view(1, 8, 1, 1) * torch.arange(40) * 0.01
    return scores.view(2, 4, 3, 40).softmax(-1) @ v


@refuses_core("q is broadcast over batch or heads", dataclasses.replace(MHA, batch=2))
def sdpa_q_of_one_batch(q, k, v, keep):
    return F.scaled_dot_product_attention(q[:1], k, v, keep[:1])


@refuses_core("writes an operand between the scores and the output")
def bias_receives_the_scores(q, k, v, keep):
    return torch.ones(2, 4, 3, 40).add_(q @ k.transpose(2, 3)).softmax(-1) @ v


@refuses("the cache is allocated inside the compiled forward (zeros), so it is copied each step", MHA)
def cache_allocated_inside(q, kn, vn, kc, vc, pos, keep):
    k, v = write(torch.zeros(2, 4, 40, 8), torch.zeros(2, 4, 40, 8), pos, kn, vn)
    return F.scaled_dot_product_attention(q, k, v, keep)


@refuses("K is dequantised from a torch.int8 cache", MHA, _int8_caches)
def int8_cache(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, (kn * 20).to(torch.int8), (vn * 20).to(torch.int8))
    return F.scaled_dot_product_attention(q, k * 0.05, v * 0.05, keep)


@refuses("K is computed from the cache by", MHA)
def latent_cache(q, kn, vn, kc, vc, pos, keep):
    kc.index_copy_(2, pos, kn)
    vc.index_copy_(2, pos, vn)
    return F.scaled_dot_product_attention(q, F.linear(kc, torch.eye(8)), vc, keep)


@refuses("K is computed from the cache by mul", MHA)
def k_scaled(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    return eager_core_last(q, k * 0.5, v, keep)


@refuses("no cache read: K comes from", MHA)
def no_cache(q, kn, vn, kc, vc, pos, keep):
    k, v = (torch.cat([x.relu(), x.sin()], 2) for x in (kn, vn))
    return F.scaled_dot_product_attention(q, k, v)


@refuses("K has more leading dimensions than the product it enters", Sizes(batch=1, kv_heads=4, group=1))
def sdpa_k_of_five_dimensions(q, kn, vn, kc, vc, pos, keep):
    k, v = write(kc, vc, pos, kn, vn)
    return F.scaled_dot_product_attention(q, k[None], v[None], keep)


DATA_DEPENDENT = "q_len or kv_len depends on data"


@refuses_core(DATA_DEPENDENT, dynamic=[(0, 2)])
def rows_that_depend_on_data(q, k, v, keep):
    rows = keep[0, 0, :, 21].nonzero()[:, 0]
    return eager_core(q[:, :, rows], k, v, keep[:, :, rows], 0.3)


@functools.cache
def refusal(name: str) -> Case:
    negative = NEGATIVES[name]
    return run_case(negative.fn, negative.prepare(data(negative.sizes)), **negative.options)


@pytest.mark.parametrize("name", NEGATIVES)
def test_refused(name: str) -> None:
    refusal(name).check_refused(NEGATIVES[name].reason)


def _kernel_behind(program: Callable[..., Tensor], behind: str, operand: int) -> GraphModule:
    """A trace with a Triton kernel of the user's that is given an input, behind the node of that name."""
    gm = trace(program, list(data()))
    given = [node for node in gm.graph.nodes if node.op == "placeholder"][operand]
    [place] = [node for node in gm.graph.nodes if node.name == behind]
    with gm.graph.inserting_after(place):
        gm.graph.call_function(
            triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "grid": [(1, 1, 1)], "kwargs": {"out": given}}
        )
    return gm


CALLS_BETWEEN = [("matmul", 4, 0), ("softmax", 0, 0), ("softmax", 6, 1), ("matmul_1", 4, 1), ("mul", 1, 1)]


@pytest.mark.parametrize(("behind", "operand", "hits"), CALLS_BETWEEN)
def test_a_kernel_that_may_write_what_it_is_given(behind: str, operand: int, hits: int) -> None:
    """Between scores and output it may get neither q nor a cache; new K, a mask already negated, and later calls are fine."""
    ctx = PassContext(lowering="reference")
    assert DetectAttention().run(_kernel_behind(softmax_program(2), behind, operand), ctx).hits == hits, ctx.attentions
    if not hits:
        assert "may write an operand that it is given between the scores and the output" in ctx.attentions[0].reason


# Reasons that no program reaches, and why; the detector keeps them as a second line of defence.
UNREACHABLE = {
    ".* may write an operand that it is given": "a Triton kernel of the user's, which has a test of its own",
    "q is on .*": "PyTorch refuses a product across devices",
    "the scale is not a constant": "a symbolic head dimension is pinned, and PyTorch pins a symbolic scale",
    "the number of KV heads is symbolic": "it is pinned",
    "enable_gqa with": "the number of KV heads is pinned, and PyTorch refuses one that does not divide the query heads",
    ".* is repeated a symbolic number of times": "the number of query heads is pinned",
    "softmax of a constant": "a softmax without a product above it is no anchor",
    "the attention weights are returned": "weights that feed a product as well have two users",
    "native_dropout on the attention weights": "its result reaches the product through getitem, so it is no anchor",
    "the score product has a constant operand": "products have two tensor operands",
    "the scores come from a constant": "an operator with a tensor result and constant scores is folded while tracing",
    "baddbmm with operands that are not tensors": "the schema refuses them",
    "where with a constant condition": "the schema refuses it",
    "the mask condition is not boolean": "PyTorch refuses such masked_fill and where on fake tensors",
    "the batch of .* is broadcast": "replay never loses an axis, and one that is broadcast is named before",
}


def _pattern(reason: ast.expr) -> str:
    """Regular expression of a reason: literals as they are, anything computed is ``.*``."""
    if isinstance(reason, ast.Constant):
        return re.escape(str(reason.value))
    pieces = reason.values if isinstance(reason, ast.JoinedStr) else []
    return "".join(_pattern(piece) if isinstance(piece, ast.Constant) else ".*" for piece in pieces)


def _reasons_in_the_sources() -> list[str]:
    found = []
    for name in ("attention_match", "cache_reads", "scores"):
        tree = ast.parse((Path(spec_compile.passes.__file__).parent / f"{name}.py").read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found += [_pattern(call.args[1]) for call in calls if getattr(call.func, "id", "") == "_reject"]
    return found


def test_every_reason_has_a_program() -> None:
    met = [reason for name in NEGATIVES for reason in refusal(name).reasons]
    missing = [
        pattern
        for pattern in _reasons_in_the_sources()
        if not any(re.fullmatch(pattern, reason) for reason in met)
        and not any(re.match(known, pattern.replace("\\", "")) for known in UNREACHABLE)
    ]
    assert not missing, f"no program is refused with: {missing}"
