"""``attention``, ``attention_folded`` and ``dense_attention`` against a float64 einsum and repeat_kv + SDPA."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import (
    BLOCK,
    DTYPES,
    GROUPS,
    SELECTIONS,
    Call,
    Spec,
    einsum64,
    error,
    keys_of,
    listed,
    make,
    repeated,
    rms,
    sdpa,
)  # fmt: skip
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.folded import _live_range, _padding
from spec_compile.kernels.providers import PROVIDERS, AttentionCall

LAYOUTS = [
    Spec(mask=mask, layout=layout)
    for mask in ("none", "bool", "additive", "heads", "one_batch")
    for layout in ("plain", "transposed")
]
FEATURES = [
    Spec(layout="sliced"),
    Spec(mask="bool_heads"),
    Spec(v_dim=24),
    Spec(v_dim=8, mask="additive"),
    Spec(softcap=2.0),
    Spec(softcap=2.0, mask="additive", v_dim=24),
    Spec(sinks=True),
    Spec(sinks=True, mask="none"),
    Spec(sinks=True, mask="heads", layout="transposed"),
    Spec(softcap=2.0, sinks=True, mask="one_batch", batch=3),
    Spec(batch=1, rows=1),
    Spec(batch=1, kv_heads=4, mask="additive"),
    Spec(kv_len=80),
    Spec(kv_len=64, rows=17, mask="heads"),
    Spec(dtype=torch.float64, mask="additive"),
]
ALL = LAYOUTS + FEATURES
OPS = {
    "attention": (library.attention, Call.operands),
    "attention without a list": (library.attention, Call.untrimmed),
    "attention_folded": (library.attention_folded, Call.operands),
    "attention_folded without a list": (library.attention_folded, Call.untrimmed),
    "dense_attention": (library.dense_attention, Call.dense),
}
ops = pytest.mark.parametrize("op", OPS)
specs = pytest.mark.parametrize("spec", ALL, ids=str)


@ops
@specs
def test_opcheck(op: str, spec: Spec) -> None:
    target, operands = OPS[op]
    torch.library.opcheck(target, operands(make(spec)), test_utils=("test_schema", "test_faketensor"))


@ops
@pytest.mark.parametrize(
    "spec", [Spec(mask="none"), Spec(layout="transposed"), Spec(sinks=True, mask="heads"), Spec(softcap=2.0)], ids=str
)
def test_opcheck_in_full(op: str, spec: Spec) -> None:
    target, operands = OPS[op]
    torch.library.opcheck(target, operands(make(spec)))


@ops
@specs
def test_equals_float64(op: str, spec: Spec) -> None:
    target, operands = OPS[op]
    call = make(spec)
    found = target(*operands(call))
    assert found.dtype == spec.dtype
    assert error(found, einsum64(call)) < (1e-12 if spec.dtype == torch.float64 else 3e-6)


@ops
@specs
def test_layout_and_freshness_of_the_result(op: str, spec: Spec) -> None:
    target, operands = OPS[op]
    call = make(spec)
    before = [x.clone() for x in (call.q, call.k, call.v)]
    out = target(*operands(call))
    assert out.shape == (spec.batch, spec.heads, spec.rows, spec.v_dim)
    assert out.transpose(1, 2).is_contiguous()
    out.zero_()
    assert all(torch.equal(x, kept) for x, kept in zip((call.q, call.k, call.v), before))


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 9, 17, 32])
def test_head_groups(heads: int, kv_heads: int, rows: int) -> None:
    call = make(Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=rows, kv_len=150))
    wanted = einsum64(call)
    assert error(library.attention(*call.operands()), wanted) < 3e-6
    assert error(library.attention_folded(*call.operands()), wanted) < 3e-6
    assert error(sdpa(call), wanted) < 3e-6


@pytest.mark.parametrize(("dim", "v_dim"), [(d, d) for d in (64, 72, 80, 96, 112, 128, 256)] + [(192, 128), (48, 96)])
def test_head_dims(dim: int, v_dim: int) -> None:
    call = make(Spec(batch=1, heads=6, kv_heads=2, rows=9, kv_len=150, dim=dim, v_dim=v_dim))
    wanted = einsum64(call)
    assert error(library.attention(*call.operands()), wanted) < 3e-6
    assert error(library.attention_folded(*call.operands()), wanted) < 3e-6


@pytest.mark.parametrize("rows", [*range(1, 18), 32])
def test_every_row_count(rows: int) -> None:
    call = make(Spec(heads=9, kv_heads=3, rows=rows, kv_len=100, mask="additive"))
    wanted = einsum64(call)
    assert error(library.attention(*call.operands()), wanted) < 3e-6
    assert error(library.attention_folded(*call.operands()), wanted) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (28, 4), (71, 1)])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_error_stays_near_that_of_sdpa(dtype: torch.dtype, heads: int, kv_heads: int, mask: str) -> None:
    """The bar: at most 1.2 times SDPA's own error against float64."""
    call = make(Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=9, kv_len=600, dim=64, v_dim=64, mask=mask, dtype=dtype))
    wanted = einsum64(call)
    theirs = sdpa(call)
    assert rms(library.attention(*call.operands(64)), wanted) <= 1.2 * rms(theirs, wanted)
    for found in (library.attention_folded(*call.operands(64)), library.dense_attention(*call.dense())):
        assert rms(found, wanted) <= 1.2 * rms(theirs, wanted)
        assert error(found, wanted) <= 1.2 * error(theirs, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["softcap", "sinks"])
def test_error_of_capped_scores_stays_near_that_of_eager(dtype: torch.dtype, feature: str) -> None:
    spec = Spec(batch=1, heads=8, kv_heads=2, rows=9, kv_len=600, dim=64, v_dim=64, dtype=dtype)
    call = make(dataclasses.replace(spec, **{feature: 5.0 if feature == "softcap" else True}))
    keys, values = repeated(call)
    scores = (call.q @ keys.transpose(2, 3)) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    assert call.mask is not None
    scores = scores + torch.zeros_like(scores).masked_fill(~call.mask, torch.finfo(dtype).min)
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.view(1, -1, 1, 1).expand(1, -1, 9, 1)], dim=-1)
    eager = scores.float().softmax(-1).to(dtype)[..., : spec.kv_len] @ values
    wanted = einsum64(call)
    limit = 1.2 * rms(eager, wanted)
    assert rms(library.attention(*call.operands(64)), wanted) <= limit
    assert rms(library.attention_folded(*call.operands(64)), wanted) <= limit


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000])
@pytest.mark.parametrize("block_size", [16, 64])
def test_any_cache_length(kv_len: int, block_size: int) -> None:
    call = make(Spec(batch=2, rows=1, kv_len=kv_len), seen=kv_len)
    wanted = einsum64(call)
    assert error(library.attention(*call.operands(block_size)), wanted) < 3e-6
    assert error(library.attention_folded(*call.operands(block_size)), wanted) < 3e-6


BITS = [(9, 3, 64), (32, 8, 128), (28, 4, 64), (71, 1, 64)]


def bit_call(heads: int, kv_heads: int, dim: int, rows: int, mask: str = "bool", kv_len: int = 1100) -> Call:
    spec = Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=rows, kv_len=kv_len, dim=dim, v_dim=dim, mask=mask)
    return make(spec, seed=rows)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), BITS)
@pytest.mark.parametrize("rows", range(6, 18))
def test_same_bits_as_repeat_kv_and_sdpa(heads: int, kv_heads: int, dim: int, rows: int) -> None:
    """Folding heads into rows changes nothing, with and without a list."""
    call = bit_call(heads, kv_heads, dim, rows)
    wanted = sdpa(call)
    assert torch.equal(library.attention_folded(*call.untrimmed()), wanted)
    assert torch.equal(library.attention_folded(*call.operands(64)), wanted)
    assert torch.equal(library.dense_attention(*call.dense()), wanted)


@pytest.mark.parametrize("mask", ["none", "additive", "heads"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), BITS)
def test_same_bits_for_every_kind_of_mask(heads: int, kv_heads: int, dim: int, mask: str) -> None:
    call = bit_call(heads, kv_heads, dim, 9, mask)
    assert torch.equal(library.attention_folded(*call.operands(64)), sdpa(call))


def test_same_bits_on_two_threads() -> None:
    call = bit_call(9, 3, 64, 9)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(library.attention_folded(*call.operands(64)), sdpa(call))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("first", "seen", "kv_len"), [(0, 200, 3000), (0, 512, 3000), (700, 1300, 3000), (1024, 2047, 2500)])
@pytest.mark.parametrize("features", [{}, {"mask": "additive"}, {"batch": 2, "heads": 8, "kv_heads": 2}])
def test_cutting_to_the_live_blocks_changes_no_bit(first: int, seen: int, kv_len: int, features: dict[str, Any]) -> None:
    call = make(
        dataclasses.replace(Spec(batch=1, heads=9, kv_heads=3, rows=9, dim=64, v_dim=64, kv_len=kv_len), **features),
        seen=seen,
    )
    assert call.mask is not None
    hidden = False if call.mask.dtype == torch.bool else torch.finfo(call.mask.dtype).min
    call.mask[0, ..., : kv_len // 4] = True if call.mask.dtype == torch.bool else 0.0
    call.mask[..., seen:] = hidden
    call.mask[..., :first] = hidden
    ids, count, _ = library.live_blocks(call.mask, 64)
    start, stop = _live_range(ids, count, 64, kv_len)
    assert (start, stop) == (first // 512 * 512, min(kv_len, -(-seen // 512) * 512))
    assert torch.equal(library.attention_folded(*call.operands(64)), library.attention_folded(*call.untrimmed()))


def test_cutting_covers_every_batch_row() -> None:
    call = make(Spec(batch=3, kv_len=2000))
    assert call.mask is not None
    call.mask[:] = False
    call.mask[0, ..., 1900:1910] = True
    call.mask[1, ..., 600:700] = True
    call.mask[2, ..., 1000:1001] = True
    ids, count, _ = library.live_blocks(call.mask, 64)
    assert _live_range(ids, count, 64, 2000) == (512, 2000)
    wanted = einsum64(call)
    assert error(library.attention_folded(*call.operands(64)), wanted) < 3e-6


def test_slots_outside_the_live_range_are_not_read() -> None:
    call = make(Spec(batch=1, kv_len=2000), seen=300)
    wanted = library.attention_folded(*call.operands(64))
    call.k[:, :, 512:], call.v[:, :, 512:] = torch.nan, torch.nan
    assert torch.equal(library.attention_folded(*call.operands(64)), wanted)


@pytest.mark.parametrize(
    ("folded_rows", "rows", "extra"), [(27, 9, 0), (64, 9, 0), (36, 9, 5), (63, 9, 0), (71, 17, 10), (192, 9, 0)]
)
def test_padding_of_the_last_row_block(folded_rows: int, rows: int, extra: int) -> None:
    assert _padding(folded_rows, rows) == extra


@pytest.mark.parametrize("group", range(1, 72))
def test_padding_never_leaves_a_short_last_block(group: int) -> None:
    """Or else it would have changed the row block, which is no improvement."""
    for rows in range(1, 33):
        total = group * rows + _padding(group * rows, rows)
        block = 256 if total >= 768 else 64 if total >= 192 else 32
        tail = total % block
        grown = group * rows + rows - (group * rows) % block
        crossed = (group * rows < 192 <= grown) or (group * rows < 768 <= grown)
        assert total <= block or tail == 0 or tail >= min(rows, block) or crossed


@pytest.mark.parametrize("spec", [Spec(), Spec(mask="none"), Spec(mask="heads"), Spec(softcap=2.0), Spec(sinks=True)], ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_restricts_the_reference(name: str, spec: Spec) -> None:
    chosen, call = SELECTIONS[name], make(spec)
    ids, count = listed(chosen)
    found = library.attention(call.q, call.k, call.v, call.mask, ids, count, None, BLOCK, call.scale, call.softcap, call.sinks)
    assert error(found, einsum64(call, keys_of(chosen, BLOCK, spec.kv_len))) < 3e-6
    everything = library.attention(*call.untrimmed())
    assert not torch.allclose(found, everything, atol=1e-3)


def test_ids_beyond_the_count_are_ignored() -> None:
    call = make(Spec())
    short = (torch.tensor([[[0, 3]]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32))
    stale = (torch.tensor([[[0, 3, 1, 2]]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32))
    results = [library.attention(call.q, call.k, call.v, call.mask, *lists, None, BLOCK, call.scale) for lists in (short, stale)]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "spec", [Spec(), Spec(mask="additive"), Spec(mask="heads"), Spec(softcap=2.0), Spec(sinks=True)], ids=str
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_unused_slots_never_reach_the_reference(spec: Spec, poison: float) -> None:
    call = make(spec)
    wanted = library.attention(*call.operands())
    assert call.mask is not None
    seen = call.mask if call.mask.dtype == torch.bool else call.mask > torch.finfo(call.mask.dtype).min / 2
    group = spec.heads // spec.kv_heads
    used = seen.expand(spec.batch, spec.heads, spec.rows, spec.kv_len).unflatten(1, (spec.kv_heads, group)).flatten(2, 3).any(2)
    assert not used.all()
    call.k.masked_fill_(~used.unsqueeze(-1), poison)
    call.v.masked_fill_(~used.unsqueeze(-1), poison)
    assert torch.equal(library.attention(*call.operands()), wanted)
    assert torch.equal(library.attention(*call.untrimmed()), wanted)


def test_unselected_slots_never_reach_the_reference() -> None:
    call = make(Spec(mask="none"))
    ids, count = listed([[[0, 2], [3]]])
    operands = (None, ids, count, None, BLOCK, call.scale)
    wanted = library.attention(call.q, call.k, call.v, *operands)
    dropped = ~keys_of([[[0, 2], [3]]], BLOCK, 75).unsqueeze(-1)
    found = library.attention(call.q, call.k.masked_fill(dropped, torch.nan), call.v.masked_fill(dropped, torch.nan), *operands)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_that_see_nothing_are_zero(kind: str, sinks: bool) -> None:
    call = make(Spec(mask=kind, sinks=sinks))
    assert call.mask is not None
    call.mask[1, :, 2] = False if kind == "bool" else -torch.inf
    found = library.attention(*call.operands())
    assert (found[1, :, 2] == 0).all()
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 2] = False
    assert found.transpose(1, 2)[others].abs().amax(-1).min() > 0
    assert error(found, einsum64(call)) < 3e-6


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_nothing_visible_at_all(kind: str) -> None:
    call = make(Spec(mask=kind))
    assert call.mask is not None
    call.mask.fill_(False if kind == "bool" else -torch.inf)
    assert (library.attention(*call.operands()) == 0).all()
    assert library.attention_folded(*call.operands()).shape == call.q.shape


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("hidden", ["inf", "min", "half"])
def test_low_values_hide(dtype: torch.dtype, hidden: str) -> None:
    lowest = torch.finfo(dtype).min
    value = {"inf": -math.inf, "min": lowest, "half": lowest / 2}[hidden]
    call = make(Spec(dtype=dtype))
    keep = call.mask
    assert keep is not None
    wanted = library.attention(*call.operands())
    call.mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, value)
    assert torch.equal(library.attention(*call.operands()), wanted)
    call.v.masked_fill_(~keep.any(1).any(1)[:, None, :, None], torch.nan)
    assert torch.equal(library.attention(*call.operands()), wanted)


@pytest.mark.parametrize("op", ["attention", "attention_folded"])
def test_a_bias_is_added_however_low(op: str) -> None:
    """A row whose keys all carry -1e5 attends as if they carried 0: it is a bias, not a mask."""
    target, operands = OPS[op]
    call = make(Spec(mask="none"))
    wanted = target(*operands(call))
    call.mask = torch.full((1, 1, 5, 75), -1e5)
    assert error(target(*operands(call)), einsum64(call)) < 2e-2
    assert error(target(*operands(call)), wanted.double()) < 2e-2
    call.mask = torch.full((1, 1, 5, 75), -3.0)
    call.mask[..., 40:] = 1.0
    assert error(target(*operands(call)), einsum64(call)) < 3e-6
    assert error(target(*operands(call)), wanted.double()) > 1e-2


@pytest.mark.parametrize("op", ["attention", "attention_folded"])
@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_masks_of_another_float_type(op: str, features: dict[str, Any]) -> None:
    """float32 masks over bfloat16 operands: the float32 minimum hides, although bfloat16 rounds it to -inf."""
    target, operands = OPS[op]
    call = make(Spec(dtype=torch.bfloat16, **features))
    keep = call.mask
    assert keep is not None
    wanted = target(*operands(call))
    call.mask = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    assert error(target(*operands(call)), wanted.double()) <= torch.finfo(torch.bfloat16).eps
    half = make(Spec(dtype=torch.float16, **features))
    half.mask = torch.zeros(keep.shape).masked_fill(~keep, -1e30)
    assert error(target(*operands(half)), einsum64(half)) < 5e-3


def test_mask_with_one_row_for_all() -> None:
    call = make(Spec())
    assert call.mask is not None
    call.mask = call.mask[:, :, -1:]
    assert error(library.attention(*call.operands()), einsum64(call)) < 3e-6
    assert error(library.attention_folded(*call.operands()), einsum64(call)) < 3e-6


def test_full_bits_do_not_change_the_reference() -> None:
    call = make(Spec())
    ids, count, full = call.lists()
    with_bits = library.attention(call.q, call.k, call.v, call.mask, ids, count, full, BLOCK, call.scale)
    assert torch.equal(with_bits, library.attention(call.q, call.k, call.v, call.mask, ids, count, None, BLOCK, call.scale))


COMPILED: dict[str, Callable[..., Tensor]] = {
    "attention": lambda q, k, v, mask, sinks: library.attention(
        q, k, v, mask, *library.live_blocks(mask, BLOCK), BLOCK, 0.25, 2.0, sinks
    ),
    "attention_folded": lambda q, k, v, mask, sinks: library.attention_folded(
        q, k, v, mask, *library.live_blocks(mask, BLOCK), BLOCK, 0.25, 0.0, None
    ),
    "dense_attention": lambda q, k, v, mask, sinks: library.dense_attention(q, k, v, mask, 0.25, 0.0, sinks),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced"])
def test_fake_strides_are_the_real_ones(name: str, layout: str) -> None:
    """Compiled code asserts the strides that the fake implementation promised; one dynamic graph serves all sizes."""
    # Every size differs, or else duck sizing ties them together.
    small = Spec(batch=3, heads=10, kv_heads=5, rows=7, kv_len=75, v_dim=24, layout=layout, sinks=True)
    large = dataclasses.replace(small, batch=4, rows=9, kv_len=91)
    seen: list[tuple[Any, ...]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        node = next(n for n in gm.graph.nodes if "attention" in str(n.target))
        value = node.meta["example_value"]
        seen.append((tuple(value.shape), value.stride()))
        return gm.forward

    compiled = torch.compile(COMPILED[name], fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for spec in (small, large):
            call = make(spec)
            args = (call.q, call.k, call.v, call.mask, call.sinks)
            found, wanted = compiled(*args), COMPILED[name](*args)
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride() == (spec.rows * 10 * 24, 24, 10 * 24, 1)
    shape, stride = seen[0]
    assert len(seen) == 1
    assert [str(s) for s in stride][1] == str(shape[3])


@pytest.mark.parametrize("name", COMPILED)
def test_aot_autograd_agrees_on_strides(name: str) -> None:
    """What Inductor relies on, without its code generation."""
    compiled = torch.compile(COMPILED[name], fullgraph=True, dynamic=True, backend="aot_eager")
    for spec in (Spec(sinks=True, layout="transposed"), Spec(sinks=True, layout="transposed", rows=7, kv_len=91)):
        call = make(spec)
        args = (call.q, call.k, call.v, call.mask, call.sinks)
        found, wanted = compiled(*args), COMPILED[name](*args)
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def broken(**changes: Any) -> tuple[Any, ...]:
    call = dataclasses.replace(make(Spec()), **changes)
    return call.dense()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.zeros(4, 5, 16)}, "4-D"),
        ({"q": torch.zeros(2, 4, 5, 8)}, "head dim of q 8 and of k 16 differ"),
        ({"v": torch.zeros(2, 4, 75, 16)}, "KV heads of k 2 and of v 4 differ"),
        ({"q": torch.zeros(2, 5, 5, 16)}, "5 query heads are not a multiple of 2 KV heads"),
        ({"k": torch.zeros(2, 2, 75, 16, dtype=torch.float16)}, "dtypes differ"),
        ({"mask": torch.ones(5, 75, dtype=torch.bool)}, "mask must be"),
        ({"sinks": torch.zeros(4, 1)}, "sinks must be"),
    ],
)
def test_bad_operands_fail_while_tracing(changes: dict[str, Any], text: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=text):
        library.dense_attention(*broken(**changes))


FOLDS = [Spec(), Spec(mask="bool_heads"), Spec(mask="additive"), Spec(mask="one_batch"), Spec(heads=9, kv_heads=3, rows=9)]


@pytest.mark.parametrize("spec", FOLDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_folded_once_gives_the_same_bits(spec: Spec, dtype: torch.dtype) -> None:
    call = make(dataclasses.replace(spec, dtype=dtype))
    assert call.mask is not None
    folded = library.fold_mask(call.mask, spec.heads, spec.kv_heads, spec.rows, dtype)
    assert folded.shape[1:] == (1 if call.mask.shape[1] == 1 else spec.kv_heads, spec.heads // spec.kv_heads * spec.rows, 75)
    for start, query_head in ((0, 0), (spec.rows, 1)):
        head = query_head if call.mask.shape[1] > 1 else 0
        kept = call.mask[:, head] if call.mask.dtype == torch.bool else call.mask[:, head] == 0
        assert torch.equal(folded[:, 0, start : start + spec.rows] == 0, kept)
    wanted = library.attention_folded(*call.operands())
    args = list(call.operands())
    args[3] = folded
    assert torch.equal(library.attention_folded(*args), wanted)


@pytest.mark.parametrize("spec", FOLDS, ids=str)
def test_opcheck_of_fold_mask(spec: Spec) -> None:
    call = make(spec)
    torch.library.opcheck(library.fold_mask, (call.mask, spec.heads, spec.kv_heads, spec.rows, torch.float16))


def test_names_carry_a_version() -> None:
    for name in (
        "live_blocks_v2",
        "attention_v1",
        "attention_folded_v1",
        "attention_triton_v1",
        "fold_mask_v1",
        "realize_mask_v1",
        "dense_attention_v1",
    ):
        schema = getattr(torch.ops.spec_compile, name).default._schema
        assert not schema.is_mutable
        assert all(value.alias_info is None for value in [*schema.arguments, *schema.returns])


def test_providers_answer_with_a_reason() -> None:
    call = make(Spec())

    def ask(x: Tensor) -> str | None:
        return folded.supports(AttentionCall(x, x, x, call.mask, 0.0, False))

    folded, gathered = PROVIDERS[-2:]
    assert (folded.name, gathered.name) == ("folded", "gathered")
    assert "every live block" in str(gathered.supports(AttentionCall(call.q, call.k, call.v, call.mask, 0.0, False)))
    selected = AttentionCall(call.q, call.k, call.v, call.mask, 0.0, False, selected=True)
    assert gathered.supports(selected) is None and "selection" in str(folded.supports(selected))
    assert ask(call.q) is None
    assert ask(call.q.to("meta")) is None
    assert "float8" in str(ask(torch.empty(1, 1, 1, 1, dtype=torch.float8_e4m3fn)))
