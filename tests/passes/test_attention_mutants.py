"""Look-alikes: whatever the detector decides about a random attention-like program, its result must not change.

A program is one attention with a cache, spelled at random, plus up to three mutations: steps that real or careless code
might contain and that an over-eager matcher would drop, move or misread. ``test_each_mutation_alone`` names
the step that breaks.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Sizes, cloned, compare, data, lower, repeat_kv, rewrite, trace
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

EXAMPLES = 650

SIZES = (
    Sizes(),
    Sizes(batch=1),
    Sizes(batch=1, rows=1),
    Sizes(kv_heads=4, group=1),
    Sizes(kv_heads=1, group=4),
    Sizes(batch=4, kv_heads=4, group=1, rows=4, slots=24, seen=15),
    Sizes(batch=4, kv_heads=2, group=2, rows=2, slots=24, seen=15),
    Sizes(slots=8, dim=8, v_dim=8, seen=4),
    Sizes(batch=2, kv_heads=2, group=1, slots=8, seen=4, rows=2),
    Sizes(kv_heads=2, group=3, dim=16, v_dim=8, slots=70, rows=5),
    Sizes(kv_heads=3, group=2, dim=4, v_dim=12, slots=33),
)
CORES = ("sdpa", "softmax", "softmax", "merged", "five", "bloom")
WRITES = ("index_copy", "index_put", "scatter", "slice", "functional", "cat")
LAYOUTS = ("bhsd", "bhsd", "bshd", "bhds")
REPEATS = ("expand", "interleave", "gqa")
MASKS = (
    "fill", "where", "min", "inf", "none", "alibi", "batch1", "two-d", "bias", "1e5", "per-row", "one-row", "per-head",
    "one-key", "zero-d",
)  # fmt: skip
SCALES = ("mul", "div", "pre-q", "none", "twice", "negative")
# Sinks and softcaps are an extra each; most programs have neither.
EXTRAS = ("", "", "", "", "softcap", "sinks", "softcap+sinks")


@dataclass(frozen=True)
class Spec:
    """Everything that a program is made from."""

    sizes: Sizes
    core: str
    write: str
    layout: str
    repeat: str
    mask: str
    scale: str
    extra: str
    mutations: tuple[str, ...]


@dataclass
class State:
    """Tensors of one run that mutations may look at."""

    spec: Spec
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keep: Tensor
    bias: Tensor
    noise: Tensor
    sinks: Tensor
    returned: list[Tensor]
    k: Tensor | None = None
    v: Tensor | None = None
    before_cap: Tensor | None = None

    @property
    def sizes(self) -> Sizes:
        return self.spec.sizes


Step = Callable[[State, Tensor], Tensor]
MUTATIONS: dict[str, tuple[str, Step]] = {}


def at(place: str, name: str, step: Step) -> None:
    """Register a mutation: ``step`` maps the tensor that passes ``place``."""
    assert name not in MUTATIONS
    MUTATIONS[name] = (place, step)


def apply(state: State, place: str, value: Tensor) -> Tensor:
    for name in state.spec.mutations:
        where, step = MUTATIONS[name]
        if where == place:
            value = step(state, value)
    return value


def says(state: State, name: str) -> bool:
    return name in state.spec.mutations


def flag(name: str) -> None:
    """A mutation that the program itself looks for."""
    at("flag", name, lambda state, x: x)


def keep_for(state: State, scores: Tensor) -> Tensor:
    """The mask at the rank of ``scores``."""
    keep = state.keep
    if scores.dim() == 3:
        return keep.expand(-1, state.sizes.heads, -1, -1).flatten(0, 1)
    return keep.unsqueeze(1) if scores.dim() == 5 else keep


def bias_for(state: State, scores: Tensor) -> Tensor:
    """The per-head bias at the rank of ``scores``."""
    s, bias = state.sizes, state.bias[..., : scores.shape[-1]]
    if scores.dim() == 3:
        return bias.repeat(s.batch, 1, 1, 1).flatten(0, 1)
    return bias.unflatten(1, (s.kv_heads, s.group)) if scores.dim() == 5 else bias


def written(run: Callable[[State], Any]) -> Step:
    """A step that writes somewhere and lets its tensor pass."""

    def step(state: State, x: Tensor) -> Tensor:
        run(state)
        return x

    return step


def row_max(x: Tensor, dim: int = -1) -> Tensor:
    return x.amax(dim, keepdim=True)


FLAGS = (
    "no-write", "no-v-write", "write-heads", "write-dims", "swap-caches", "slice-kv", "slice-start", "slice-mismatch",
    "five-from-four", "output-heads-merged", "two-layers", "mask-alias-between-layers",
)  # fmt: skip
for name in FLAGS:
    flag(name)

at("k-cache", "k-read-transposed", lambda c, k: k.transpose(2, 3))
at("v-cache", "v-read-transposed", lambda c, v: v.transpose(2, 3))
at("k-cache", "k-batch-heads", lambda c, k: k.transpose(0, 1))
at("v-cache", "v-batch-heads", lambda c, v: v.transpose(0, 1))
at("k-cache", "k-flipped", lambda c, k: k.flip(2))
at("k-cache", "k-rolled", lambda c, k: k.roll(1, 1))
at("v-cache", "v-rolled", lambda c, v: v.roll(1, 2))
at("k-cache", "k-scaled", lambda c, k: k * 0.5)
at("v-cache", "v-relu", lambda c, v: v.relu())
at("k-cache", "k-cloned", lambda c, k: k.clone())
at("k-cache", "k-there-and-back", lambda c, k: k.transpose(1, 2).contiguous().transpose(1, 2))
at("k-cache", "k-read-as-bshd", lambda c, k: k.reshape(k.shape[0], k.shape[2], k.shape[1], k.shape[3]).transpose(1, 2))
at("v-cache", "v-read-as-bshd", lambda c, v: v.reshape(v.shape[0], v.shape[2], v.shape[1], v.shape[3]).transpose(1, 2))
at("k-cache", "k-double-and-back", lambda c, k: k.double().to(k.dtype))
at("v-cache", "v-through-half", lambda c, v: v.half().to(v.dtype))
at("k-cache", "k-first-batch", lambda c, k: k[:1])
at("k-cache", "k-first-batch-expanded", lambda c, k: k[:1].expand_as(k))
at("v-cache", "v-first-batch", lambda c, v: v[:1])
at("k-cache", "k-first-head", lambda c, k: k[:, :1])
at("v-cache", "v-first-head-expanded", lambda c, v: v[:, :1].expand_as(v))
at("k-cache", "k-heads-gathered", lambda c, k: k[:, torch.arange(k.shape[1] - 1, -1, -1)])
at("k-cache", "k-index-selected", lambda c, k: k.index_select(2, torch.arange(k.shape[2])))
at("v-cache", "v-is-k", lambda c, v: c.k_cache if c.sizes.dim == c.sizes.v_dim else v)
at("k-cache", "k-slots-regrouped", lambda c, k: k.unflatten(2, (2, -1)).transpose(2, 3).flatten(2, 3))
at("k-cache", "k-slots-split-and-merged", lambda c, k: k.unflatten(2, (2, -1)).flatten(2, 3))
at("v-cache", "v-dims-regrouped", lambda c, v: v.unflatten(3, (2, -1)).transpose(3, 4).flatten(3, 4))
at("k-cache", "k-dims-heads-mixed", lambda c, k: k.transpose(1, 3).reshape(k.shape))
at("k-cache", "k-squeezed", lambda c, k: k.squeeze(0).unsqueeze(0) if k.shape[0] == 1 else k.unsqueeze(0).squeeze(0))


def tiled(state: State, x: Tensor) -> Tensor:
    group = state.sizes.group
    return x[:, None].expand(-1, group, -1, -1, -1).flatten(1, 2)


at("k-tile", "k-tiled", tiled)
at("v-tile", "v-tiled", tiled)
at("k-tile", "k-repeated", lambda c, k: k.repeat(1, c.sizes.group, 1, 1))
at("v-tile", "v-repeated", lambda c, v: v.repeat(1, c.sizes.group, 1, 1))

at("k-repeated", "k-cache-overwritten-after-repeat", written(lambda c: c.k_cache.mul_(0.5)))
at("k-repeated", "k-slot-cleared-after-repeat", written(lambda c: c.k_cache[:, :, 1].zero_()))
at("v-repeated", "v-repeat-then-relu", lambda c, v: v.relu())

at("q", "q-first-batch", lambda c, q: q[:1])
at("q", "q-first-head", lambda c, q: q[:, :1])
at("q", "q-flipped", lambda c, q: q.flip(1))
at("q", "q-strided", lambda c, q: q.transpose(1, 2).contiguous().transpose(1, 2))
at("q", "q-heads-first", lambda c, q: q.transpose(0, 1).contiguous().transpose(0, 1))
at("q", "q-batch-heads", lambda c, q: q.transpose(0, 1))
at("q", "q-cloned", lambda c, q: q.clone())
at("q", "q-half-and-back", lambda c, q: q.half().float())

for name in ("baddbmm-in-place", "baddbmm-beta", "baddbmm-beta-zero"):
    at("bloom", name, lambda state, x: x)
at("product", "scores-plus-scores", lambda c, s: s + s)
at("product", "scores-added-in-place", lambda c, s: s.add_(s))
at("product", "second-product-added", lambda c, s: s + (c.q @ c.q.transpose(-1, -2))[..., :1] if s.dim() == 4 else s)
at("product", "product-relu", lambda c, s: s.relu())
at("product", "product-negated", lambda c, s: -s)
at("product", "product-clamped", lambda c, s: s.clamp(-0.5, 0.5))
at("product", "product-returned", lambda c, s: (c.returned.append(s), s)[1])
at("product", "product-summed", lambda c, s: (c.returned.append(s.sum()), s)[1])
at("product", "product-detached", lambda c, s: s.detach())
at("product", "floor-divided", lambda c, s: torch.div(s, 0.5, rounding_mode="floor"))
at("product", "trunc-divided", lambda c, s: torch.div(s, 0.25, rounding_mode="trunc"))
at("product", "scaled-in-place", lambda c, s: s.mul_(0.7))
at("product", "scaled-through-view", lambda c, s: (s.view(-1).mul_(0.7), s)[1])
at("product", "scaled-by-zero-d", lambda c, s: s * torch.full((), 0.7))
at("product", "scaled-by-truncated-zero-d", lambda c, s: s * torch.full((), 1.7).to(torch.int64))
at("product", "scaled-by-size", lambda c, s: s / s.shape[-1])
at("product", "scaled-by-tensor", lambda c, s: s * c.sinks[:1])
at("product", "scaled-by-itself", lambda c, s: s * s)
at("product", "scaled-by-bias", lambda c, s: s * bias_for(c, s))
at("product", "divided-into", lambda c, s: 1.0 / (s + 10.0))
at("product", "transposed-twice", lambda c, s: s.transpose(-1, -2).transpose(-1, -2))
at("product", "through-half", lambda c, s: s.half().float())
at("product", "through-int", lambda c, s: s.to(torch.int32).float())
at("product", "through-double", lambda c, s: s.double().float())
at("product", "max-subtracted-early", lambda c, s: s - row_max(s))
at("product", "column-max-subtracted", lambda c, s: s - row_max(s, -2))
at("product", "mean-subtracted", lambda c, s: s - s.mean(-1, keepdim=True))
at("product", "max-of-negated-subtracted", lambda c, s: s - row_max(-s))
at("product", "max-subtracted-with-alpha", lambda c, s: torch.sub(s, row_max(s), alpha=2))
at(
    "product",
    "scores-lead-swapped",
    lambda c, s: s.reshape(s.shape[1], s.shape[0], *s.shape[2:]) if s.dim() == 4 else s,
)
at("product", "scores-cloned", lambda c, s: s.clone())
at("product", "k-cache-cleared-after-product", written(lambda c: c.k_cache.zero_()))
at("product", "v-cache-cleared-after-product", written(lambda c: c.v_cache.zero_()))
at("product", "q-cleared-after-product", written(lambda c: c.q.zero_()))


def lead_view(*lead: Callable[[Sizes], int]) -> Step:
    """Regroup the leading axes, add a bias that only makes sense in that grouping, and go back."""

    def step(state: State, scores: Tensor) -> Tensor:
        sizes = [size(state.sizes) for size in lead]
        view = scores.reshape(*sizes, *scores.shape[-2:])
        first = state.noise.flatten()[: sizes[0]].view(-1, *[1] * (view.dim() - 1))
        last = state.noise.flatten()[: sizes[-1]].view(-1, 1, 1)
        slots = torch.linspace(-1, 1, view.shape[-1])
        return (view + (first + last) * slots).reshape(scores.shape)

    return step


at("product", "bias-as-heads-batch", lead_view(lambda s: s.heads, lambda s: s.batch))
at("product", "bias-as-one-batch", lead_view(lambda s: 1, lambda s: s.batch * s.heads))
at("product", "bias-as-all-batch", lead_view(lambda s: s.batch * s.heads, lambda s: 1))
at("product", "bias-as-merged", lead_view(lambda s: s.batch * s.heads))
at("product", "bias-as-one-batch-heads", lead_view(lambda s: 1, lambda s: s.batch, lambda s: s.heads))
at("product", "bias-as-batch-heads-one", lead_view(lambda s: s.batch, lambda s: s.heads, lambda s: 1))
at("product", "bias-as-group-heads", lead_view(lambda s: s.batch, lambda s: s.group, lambda s: s.kv_heads))
at("product", "bias-as-heads-group", lead_view(lambda s: s.batch, lambda s: s.kv_heads, lambda s: s.group))
at("product", "bias-as-heads-batch-group", lead_view(lambda s: s.kv_heads, lambda s: s.batch, lambda s: s.group))


def capped_wrong(inner: float, outer: float, divide: bool = True) -> Step:
    def step(state: State, s: Tensor) -> Tensor:
        return torch.tanh(s / inner if divide else s * inner) * outer

    return step


at("scaled", "cap-that-differs", capped_wrong(2.0, 2.5))
at("scaled", "cap-that-multiplies", capped_wrong(2.0, 2.0, divide=False))
at("scaled", "cap-negative", capped_wrong(-2.0, -2.0))
at("scaled", "cap-floor", lambda c, s: torch.tanh(torch.div(s, 2.0, rounding_mode="floor")) * 2.0)
at("scaled", "cap-of-shifted", lambda c, s: torch.tanh((s - row_max(s)) / 2.0) * 2.0)
at("scaled", "cap-without-scale", lambda c, s: torch.tanh(s))
at("scaled", "cap-twice", lambda c, s: torch.tanh(torch.tanh(s / 2.0) * 2.0 / 3.0) * 3.0)
at("scaled", "sigmoid-cap", lambda c, s: torch.sigmoid(s / 2.0) * 2.0)
at("capped", "scaled-after-cap", lambda c, s: s * 0.6)
at("capped", "shifted-after-cap", lambda c, s: s - row_max(s))
at("capped", "constant-added", lambda c, s: s + 0.5)
at("capped", "bias-with-alpha", lambda c, s: torch.add(s, bias_for(c, s), alpha=2))
at("capped", "bias-subtracted", lambda c, s: s - bias_for(c, s))
at("capped", "bias-reversed-subtracted", lambda c, s: bias_for(c, s) - s)
at("capped", "bias-receives-scores", lambda c, s: c.noise.clone().add_(s) if s.dim() == 4 else s)
at("capped", "bias-input-receives-scores", lambda c, s: c.noise.add_(s) if s.dim() == 4 else s)
at("capped", "noise-added", lambda c, s: s + c.noise if s.dim() == 4 else s)
at("capped", "noise-added-left", lambda c, s: c.noise + s if s.dim() == 4 else s)
at("capped", "noise-added-in-place", lambda c, s: s.add_(c.noise) if s.dim() == 4 else s)
at("capped", "row-bias-added", lambda c, s: s + c.noise[0, 0, :, :1])
at("capped", "column-bias-added", lambda c, s: s + c.noise[0, 0, 0])
at("capped", "mask-as-batch-of-rows", lambda c, s: s + c.noise[0, :, :1].flatten()[: c.sizes.rows].view(-1, 1))
at("capped", "bool-added", lambda c, s: s + keep_for(c, s))
at("capped", "keep-multiplied", lambda c, s: s * keep_for(c, s))
at("capped", "keep-cast-and-added", lambda c, s: s + keep_for(c, s).to(s.dtype))
at("capped", "finite-fill", lambda c, s: s.masked_fill(~keep_for(c, s), -1e4))
at("capped", "small-fill", lambda c, s: s.masked_fill(~keep_for(c, s), 0.0))
at("capped", "inverted-fill", lambda c, s: s.masked_fill(keep_for(c, s).cumsum(-1) > 9, -torch.inf))
at("capped", "positive-fill", lambda c, s: s.masked_fill(~keep_for(c, s), 3.0))
at("capped", "nan-fill", lambda c, s: s.masked_fill(~keep_for(c, s), torch.nan))
at(
    "capped",
    "filled-twice",
    lambda c, s: s.masked_fill(~keep_for(c, s), -torch.inf).masked_fill(~keep_for(c, s), -torch.inf),
)
at("capped", "filled-in-place", lambda c, s: s.masked_fill_(~keep_for(c, s), -torch.inf))
at("capped", "where-of-two", lambda c, s: torch.where(keep_for(c, s), s, s - 5.0))
at("capped", "where-of-bias", lambda c, s: torch.where(keep_for(c, s), s, bias_for(c, s)))
at(
    "capped",
    "mask-over-wrong-axis",
    lambda c, s: s.masked_fill(~c.keep.transpose(0, 1), -torch.inf) if s.dim() == 4 else s,
)
at("capped", "mask-rows-for-heads", lambda c, s: s + c.noise[:1, :, 0, :1, None][:, :, 0])
at("capped", "scores-nan-to-num", lambda c, s: s.nan_to_num())
at("masked", "scaled-after-mask", lambda c, s: s * 0.6)
at("masked", "capped-after-mask", lambda c, s: torch.tanh(s / 2.0) * 2.0)
at("masked", "max-subtracted", lambda c, s: s - row_max(s))
at("masked", "max-values-subtracted", lambda c, s: s - s.max(-1, keepdim=True).values)
at("masked", "max-subtracted-twice", lambda c, s: s - row_max(s) - row_max(s - row_max(s)))
at("masked", "masked-returned", lambda c, s: (c.returned.append(s.sum(-1).isinf()), s)[1])
at("masked", "mask-cleared-after-use", written(lambda c: c.keep.fill_(True)))
at("masked", "bias-cleared-after-use", written(lambda c: c.bias.zero_()))
at("masked", "noise-cleared-after-use", written(lambda c: c.noise.zero_()))
at("masked", "masked-expanded", lambda c, s: s.expand(s.shape))
at("masked", "masked-exp-log", lambda c, s: s.exp().log())


def column(state: State, scores: Tensor) -> Tensor:
    return state.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)


def with_columns(first: bool, drop_first: bool, shift: bool = False) -> Step:
    def step(state: State, s: Tensor) -> Tensor:
        if s.dim() != 4:
            return s
        s = s - row_max(s) if shift else s
        both = torch.cat([column(state, s), s] if first else [s, column(state, s)], -1)
        weights = both.softmax(-1)[..., 1:] if drop_first else both.softmax(-1)[..., :-1]
        # Logarithms, because the program takes a softmax next.
        return weights.log()

    return step


at("masked", "sinks-first", with_columns(True, True))
at("masked", "sinks-first-last-dropped", with_columns(True, False))
at("masked", "sinks-last-first-dropped", with_columns(False, True))
at("masked", "sinks-of-shifted", with_columns(False, False, shift=True))
at("sunk", "sunk-scaled", lambda c, s: s * 0.5)
at("sunk", "sunk-shifted", lambda c, s: s - row_max(s))
at("sunk", "sunk-shifted-by-values", lambda c, s: s - s.max(-1, keepdim=True).values)
at("sunk", "sinks-cleared-after-use", written(lambda c: c.sinks.zero_()))
at("sunk", "sunk-rolled", lambda c, s: s.roll(1, -1))
at("sink-column", "sinks-per-row", lambda c, x: x.transpose(1, 2).expand(-1, -1, -1, -1).reshape(x.shape))
at("sink-column", "sinks-scaled", lambda c, x: x * 2.0)
at("sink-column", "sinks-two-columns", lambda c, x: x.expand(-1, -1, -1, 2))
at("sink-column", "sinks-flipped", lambda c, x: x.flip(1))
at("sink-column", "sinks-cloned", lambda c, x: x.clone())

at("weights", "weights-masked", lambda c, w: w * keep_for(c, w)[..., : w.shape[-1]])
at("weights", "weights-renormalised", lambda c, w: w / w.sum(-1, keepdim=True))
at("weights", "weights-scaled", lambda c, w: w * 0.5)
at("weights", "weights-returned", lambda c, w: (c.returned.append(w), w)[1])
at("weights", "weights-summed", lambda c, w: (c.returned.append(w.amax()), w)[1])
at("weights", "weights-dropout-off", lambda c, w: F.dropout(w, 0.3, training=False))
at("weights", "weights-dropout-zero", lambda c, w: F.dropout(w, 0.0, training=True))
at("weights", "weights-dropout-all", lambda c, w: F.dropout(w, 1.0, training=True))
at("weights", "weights-through-half", lambda c, w: w.half().float())
at("weights", "weights-through-int", lambda c, w: w.to(torch.int32).float())
at("weights", "weights-double", lambda c, w: w.double().float())
at("weights", "weights-softmaxed-again", lambda c, w: w.softmax(-1))
at("weights", "weights-flipped", lambda c, w: w.flip(-1))
at("weights", "weights-transposed-twice", lambda c, w: w.transpose(-1, -2).transpose(-1, -2))
at("weights", "weights-heads-flipped", lambda c, w: w.flip(1))
at("weights", "weights-lead-swapped", lambda c, w: w.transpose(0, 1).contiguous().transpose(0, 1))
at("weights", "last-slot-dropped", lambda c, w: F.pad(w[..., :-1], (0, 1)))
at("weights", "weights-cloned", lambda c, w: w.clone().contiguous())
at("weights", "v-cache-cleared-before-values", written(lambda c: c.v_cache.zero_()))
at("weights", "v-slot-written-before-values", written(lambda c: c.v_cache[:, :, 2].fill_(1.0)))
at("weights", "mask-cleared-before-values", written(lambda c: c.keep.fill_(True)))
at("out", "caches-cleared-afterwards", written(lambda c: (c.k_cache.zero_(), c.v_cache.zero_())))
at("out", "out-scaled-in-place", lambda c, o: o.mul_(0.5))
at("out", "out-transposed-in-place", lambda c, o: (o.transpose(-1, -2).mul_(0.5), o)[1])
at("out", "out-viewed", lambda c, o: o.view(-1))
at("softmax", "softmax-over-rows", lambda c, s: s.softmax(-2))
at("softmax", "softmax-over-heads", lambda c, s: s.softmax(1))
at("softmax", "log-softmax", lambda c, s: s.log_softmax(-1).exp())
at("softmax", "softmax-in-double", lambda c, s: s.softmax(-1, dtype=torch.float64).float())
at("softmax", "softmin", lambda c, s: F.softmin(s, -1))
at("softmax", "softmax-by-hand", lambda c, s: s.exp() / s.exp().sum(-1, keepdim=True))
at("sdpa", "sdpa-causal", lambda c, s: s)
at("sdpa", "sdpa-dropout", lambda c, s: s)
at("sdpa", "sdpa-negative-scale", lambda c, s: s)
at("sdpa", "sdpa-zero-scale", lambda c, s: s)


def write_cache(spec: Spec, cache: Tensor, pos: Tensor, new: Tensor, seq: int) -> Tensor:
    """Write ``new`` ``[B, Hkv, T, D]`` into ``cache``, whose slots lie along ``seq``; returns the cache to read."""
    s, kind = spec.sizes, spec.write
    new = new.transpose(2, seq) if seq == 3 else new.movedim(2, seq)
    if "write-heads" in spec.mutations:
        return cache.index_copy_(1, torch.arange(cache.shape[1]), cache.flip(1) * 0.5)
    if "write-dims" in spec.mutations:
        return cache.index_copy_(3, torch.arange(cache.shape[3]), cache.flip(3) * 0.5)
    if kind == "cat":
        return torch.cat([cache.narrow(seq, 0, s.slots - s.rows), new], seq)
    if kind == "index_copy":
        return cache.index_copy_(seq, pos, new)
    if kind == "functional":
        return torch.index_copy(cache, seq, pos, new)
    if kind == "scatter":
        shape = [1] * 4
        shape[seq] = -1
        return cache.scatter_(seq, pos.view(shape).expand(new.shape), new)
    if kind == "index_put":
        cache[tuple([slice(None)] * seq + [pos])] = new
        return cache
    cache.narrow(seq, s.seen, s.rows).copy_(new)
    return cache


def read_caches(state: State, k_new: Tensor, v_new: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Write the drafts and return K and V as ``[B, Hkv, S, D]`` views."""
    spec = state.spec
    k_seq = {"bhsd": 2, "bshd": 1, "bhds": 3}[spec.layout]
    v_seq = 1 if spec.layout == "bshd" else 2
    k, v = state.k_cache, state.v_cache
    if not says(state, "no-write"):
        k = write_cache(spec, k, pos, k_new, k_seq)
        if not says(state, "no-v-write"):
            v = write_cache(spec, v, pos, v_new, v_seq)
    if says(state, "swap-caches"):
        k, v = v, k
    k, v = (x if seq == 2 else x.transpose(2, seq) for x, seq in ((k, k_seq), (v, v_seq)))
    if says(state, "slice-kv"):
        k, v = k[:, :, : spec.sizes.seen + spec.sizes.rows], v[:, :, : spec.sizes.seen + spec.sizes.rows]
    if says(state, "slice-start"):
        k, v = k[:, :, 1:], v[:, :, 1:]
    if says(state, "slice-mismatch"):
        k, v = k[:, :, :-1], v[:, :, 1:]
    state.keep, state.noise = state.keep[..., : k.shape[2]], state.noise[..., : k.shape[2]]
    return apply(state, "k-cache", k), apply(state, "v-cache", v)


def repeat(state: State, x: Tensor, role: str) -> Tensor:
    spec = state.spec
    if any(MUTATIONS[name][0] == f"{role}-tile" for name in spec.mutations):
        return apply(state, f"{role}-tile", x)
    if spec.sizes.group == 1:
        return x
    return repeat_kv(x, spec.sizes.group) if spec.repeat != "interleave" else x.repeat_interleave(spec.sizes.group, 1)


def scale_of(spec: Spec) -> float:
    return {"none": 1.0, "negative": -0.4, "twice": 0.36}.get(spec.scale, 0.4)


def scaled(spec: Spec, scores: Tensor) -> Tensor:
    # baddbmm has its own scale; another one after its bias is worth a few programs only.
    if spec.core == "bloom" and spec.scale != "mul":
        return scores
    if spec.scale == "twice":
        return scores * 0.6 * 0.6
    if spec.scale == "div":
        return scores / 2.5
    return scores if spec.scale in ("none", "pre-q") else scores * scale_of(spec)


def mask_of(state: State, dtype: torch.dtype) -> Tensor | None:
    """The mask as SDPA takes it: bool or additive, of some rank."""
    kind, keep = state.spec.mask, state.keep
    slots = torch.arange(keep.shape[-1])
    hidden = torch.zeros(keep.shape, dtype=dtype)
    if kind == "none":
        return None
    if kind in ("fill", "where"):
        return keep
    if kind == "batch1":
        return keep[-1:]
    if kind == "two-d":
        return keep[-1, 0]
    if kind == "one-row":
        return keep[:, :, -1:]
    if kind == "per-head":
        return keep & (slots != torch.arange(state.sizes.heads)[:, None, None])
    if kind == "bias":
        return state.bias[..., : keep.shape[-1]] * 1.0
    if kind == "alibi":
        return hidden.masked_fill(~keep, torch.finfo(dtype).min) + state.bias[..., : keep.shape[-1]]
    if kind == "1e5":
        return hidden.masked_fill(~keep, -1e5)
    if kind == "per-row":
        return state.noise[:1, :1]
    if kind == "one-key":
        return state.noise[:, :, :, :1]
    if kind == "zero-d":
        return state.noise[0, 0, 0, 0]
    return hidden.masked_fill(~keep, torch.finfo(dtype).min if kind == "min" else -torch.inf)


def masked(state: State, scores: Tensor) -> Tensor:
    mask = mask_of(state, scores.dtype)
    if mask is None:
        return scores
    if scores.dim() == 3 and mask.dim() == 4:
        mask = mask.expand(state.sizes.batch, state.sizes.heads, -1, -1).flatten(0, 1)
    if scores.dim() == 5 and mask.dim() == 4:
        heads = (state.sizes.kv_heads, state.sizes.group)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, heads)
    if mask.dtype != torch.bool:
        return scores + mask
    return torch.where(mask, scores, -torch.inf) if state.spec.mask == "where" else scores.masked_fill(~mask, -torch.inf)


def bloom_product(state: State, q: Tensor, k: Tensor) -> Tensor:
    bias = state.noise.flatten(0, 1)
    if says(state, "baddbmm-in-place"):
        return bias.baddbmm_(q, k.transpose(1, 2), alpha=0.3)
    beta = 0.5 if says(state, "baddbmm-beta") else 0 if says(state, "baddbmm-beta-zero") else 1
    return torch.baddbmm(bias, q, k.transpose(1, 2), beta=beta, alpha=0.3)


def softmax_attention(state: State, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    spec, s = state.spec, state.sizes
    if spec.core == "five":
        q = q.unflatten(1, (s.kv_heads, s.group))
        k, v = k.unsqueeze(2), v.unsqueeze(2)
    else:
        k = apply(state, "k-repeated", repeat(state, k, "k"))
        v = apply(state, "v-repeated", repeat(state, v, "v"))
    if spec.core in ("merged", "bloom"):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    product = bloom_product(state, q, k) if spec.core == "bloom" else q @ k.transpose(-1, -2)
    scores = apply(state, "product", product)
    scores = apply(state, "scaled", scaled(spec, scores))
    if "softcap" in spec.extra:
        scores = torch.tanh(scores / 1.5) * 1.5
    if says(state, "five-from-four") and scores.dim() == 4:
        scores = scores.unflatten(1, (s.kv_heads, s.group))
    scores = apply(state, "masked", masked(state, apply(state, "capped", scores)))
    sinks = "sinks" in spec.extra and scores.dim() == 4
    if sinks:
        both = torch.cat([scores, apply(state, "sink-column", column(state, scores))], -1)
        scores = apply(state, "sunk", both)
    replaced = any(MUTATIONS[name][0] == "softmax" for name in spec.mutations)
    weights = apply(state, "softmax", scores) if replaced else scores.softmax(-1)
    weights = apply(state, "weights", weights[..., :-1] if sinks else weights)
    if weights.dim() == 5 and v.dim() == 4:
        weights = weights.flatten(1, 2)
    if says(state, "output-heads-merged") and weights.dim() == 4:
        return (weights.flatten(0, 1)[None] @ v.flatten(0, 1)[None]).view(*weights.shape[:3], -1)
    out = apply(state, "out", weights @ v)
    return out.flatten(1, 2) if out.dim() == 5 else out


def sdpa_attention(state: State, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    spec = state.spec
    gqa = spec.repeat == "gqa"
    if not gqa:
        k, v = repeat(state, k, "k"), repeat(state, v, "v")
    k, v = apply(state, "k-repeated", k), apply(state, "v-repeated", v)
    scale: float | None = None if spec.scale == "none" else 1.0 if spec.scale == "pre-q" else scale_of(spec)
    scale = -0.4 if says(state, "sdpa-negative-scale") else 0.0 if says(state, "sdpa-zero-scale") else scale
    causal = says(state, "sdpa-causal")
    mask = None if causal else mask_of(state, q.dtype)
    if mask is not None and mask.dim() == 0:
        mask = mask.view(1, 1, 1, 1)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=causal,
        dropout_p=1.0 if says(state, "sdpa-dropout") else 0.0,
        scale=scale,
        enable_gqa=gqa,
    )
    return apply(state, "out", out)


def program(spec: Spec) -> Callable[..., Any]:
    def once(state: State, k_new: Tensor, v_new: Tensor, pos: Tensor) -> Tensor:
        q = apply(state, "q", state.q)
        if spec.scale == "pre-q":
            q = q * 0.4
        k, v = read_caches(state, k_new, v_new, pos)
        return (sdpa_attention if spec.core == "sdpa" else softmax_attention)(state, q, k, v)

    def fn(q, k_new, v_new, k_cache, v_cache, pos, keep, bias, noise, sinks):  # type: ignore[no-untyped-def]
        view = keep.view(keep.shape)
        state = State(spec, q, k_cache, v_cache, view, bias, noise, sinks, [])
        out = once(state, k_new, v_new, pos)
        if "two-layers" in spec.mutations or "mask-alias-between-layers" in spec.mutations:
            if "mask-alias-between-layers" in spec.mutations:
                keep.fill_(True)
            second = State(spec, q + 1.0, k_cache, v_cache, view, bias, noise, sinks, state.returned)
            out = out + once(second, k_new, v_new, pos)
        flat = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1) if out.dim() == 4 else out
        return (flat, *state.returned)

    return fn


def inputs_of(spec: Spec) -> list[Tensor]:
    s = spec.sizes
    given_data = data(s, seed=len(spec.mutations))
    # At least the first slots are seen by all, so that no row is ever empty: such rows differ from eager by contract.
    given_data.keep[..., :4] = True
    if spec.layout == "bshd":
        given_data.k_cache, given_data.v_cache = (
            x.transpose(1, 2).contiguous() for x in (given_data.k_cache, given_data.v_cache)
        )
    elif spec.layout == "bhds":
        given_data.k_cache = given_data.k_cache.transpose(2, 3).contiguous()
    gen = torch.Generator().manual_seed(9)
    bias = -torch.rand(1, s.heads, 1, s.slots, generator=gen)
    noise = torch.randn(s.batch, s.heads, s.rows, s.slots, generator=gen)
    return [*given_data, bias, noise, torch.randn(s.heads, generator=gen)]


def relevant(core: str, extra: str) -> list[str]:
    """Mutations that such a program passes on its way."""
    both = {"flag", "q", "k-cache", "v-cache", "k-tile", "v-tile", "k-repeated", "v-repeated", "out"}
    score = {"product", "scaled", "capped", "masked", "softmax", "weights"}
    both |= {"bloom"} if core == "bloom" else set()
    places = both | ({"sdpa"} if core == "sdpa" else score | ({"sink-column", "sunk"} if "sinks" in extra else set()))
    return [name for name, (place, _) in MUTATIONS.items() if place in places]


class Discarded(Exception):
    """The program is no program: eager refuses it."""


@torch.no_grad()
def outcome(spec: Spec, device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """Check one program with both lowerings; returns ``rewritten``, ``refused`` or ``unseen``."""
    fn, inputs = program(spec), [moved(given, device, dtype) for given in inputs_of(spec)]
    expected_inputs = cloned(inputs)
    with torch.device(device):
        try:
            expected = fn(*expected_inputs)
        except Exception as error:
            raise Discarded from error
        gm, report = rewrite(trace(fn, inputs), "reference")
        # The rewrite computes in float32 what these programs round to half on the way.
        rounds = dtype != torch.float32 or any("half" in name for name in spec.mutations)
        tolerance = 6e-2 if dtype == torch.bfloat16 else 1e-2 if rounds else 1e-4
        for lowered in (False, True):
            actual_inputs = cloned(inputs)
            actual = (lower(gm) if lowered else gm)(*actual_inputs)
            compare(expected, actual, tolerance)
            compare(expected_inputs, actual_inputs, 0.0)
    if report.rewritten:
        return "rewritten"
    return "refused" if report.refused else "unseen"


def moved(given: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return given.to(device, dtype) if given.is_floating_point() and dtype != torch.float32 else given.to(device)


plain_outcome = functools.cache(outcome)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    core, extra = draw(st.sampled_from(CORES)), draw(st.sampled_from(EXTRAS))
    some = st.lists(st.sampled_from(relevant(core, extra)), max_size=3, unique=True)
    return Spec(
        draw(st.sampled_from(SIZES)),
        core,
        draw(st.sampled_from(WRITES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(REPEATS)),
        draw(st.sampled_from(MASKS)),
        draw(st.sampled_from(SCALES)),
        extra,
        tuple(sorted(draw(some))),
    )


@pytest.mark.slow
def test_whatever_is_decided_the_result_stays() -> None:
    outcomes: dict[Spec, str] = {}

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(specs())
    def check(spec: Spec) -> None:
        assume(spec not in outcomes)
        try:
            outcomes[spec] = outcome(spec)
        except Discarded:
            assume(False)

    check()
    counts = Counter(outcomes.values())
    print(f"{len(outcomes)} programs: {dict(counts)}")
    assert len(outcomes) >= 600
    assert counts["rewritten"] >= 50 and counts["refused"] >= 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard", range(8))
def test_whatever_is_decided_the_result_stays_on_cuda(shard: int, dtype: torch.dtype) -> None:
    """The programs of the test above, through the Triton kernels."""
    found: Counter[str] = Counter()
    seen: set[Spec] = set()

    @settings(max_examples=80, derandomize=False, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(shard)
    @given(specs())
    def check(spec: Spec) -> None:
        assume(spec not in seen)
        seen.add(spec)
        try:
            found[outcome(spec, "cuda", dtype)] += 1
        except Discarded:
            assume(False)

    check()
    assert found["rewritten"] >= 5, found


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_alone(name: str) -> None:
    """One program per mutation on the plainest program that it touches, so that a failure has a name."""
    place = MUTATIONS[name][0]
    core = place if place in ("sdpa", "bloom") else "softmax"
    extra = "sinks" if place in ("sink-column", "sunk") else "softcap" if name.startswith("cap-of") else ""
    for sizes in (SIZES[0], SIZES[5]):
        plain = Spec(sizes, core, "index_copy", "bhsd", "expand", "fill", "none", extra, ())
        assert plain_outcome(plain) == "rewritten"
        with contextlib.suppress(Discarded):
            outcome(replace(plain, mutations=(name,)))
