"""The Triton kernels: on a CUDA device as compiled, elsewhere in Triton's interpreter (which knows no bfloat16 dot)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import SELECTIONS, Call, Spec, einsum64, error, keys_of, listed, make, rms, sdpa
from mask_cases import causal, grid
from torch import Tensor

from spec_compile.kernels import library, tiling
from spec_compile.kernels.blocks import live_blocks_reference
from spec_compile.kernels.providers import PROVIDERS, AttentionCall

pytest.importorskip("triton")

import triton
import triton.language as tl

from spec_compile.kernels.attention_triton import _part, attention_triton, most_tiles
from spec_compile.kernels.linears_triton import linears_triton
from spec_compile.kernels.live_blocks_triton import live_blocks_triton, why_not
from spec_compile.kernels.narrow_linear_triton import narrow_linear_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BLOCK = 16
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# Largest error of one element against float64, for outputs of order 1.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def moved(call: Call) -> Call:
    place: Any = lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x  # noqa: E731
    return Call(*(place(getattr(call, f.name)) for f in dataclasses.fields(call)))


def run(call: Call, block_size: int = BLOCK, **options: Any) -> Tensor:
    lists = (None, None, None) if call.mask is None else live_blocks_reference(call.mask, block_size)
    return attention_triton(
        call.q, call.k, call.v, call.mask, *lists, block_size, call.scale, call.softcap, call.sinks, **options
    )  # fmt: skip


def check(spec: Spec, block_size: int = BLOCK) -> None:
    call = make(spec)
    found = run(moved(call), block_size)
    assert found.shape == (spec.batch, spec.heads, spec.rows, spec.v_dim)
    assert found.transpose(1, 2).is_contiguous()
    assert error(found.cpu(), einsum64(call)) < TOLERANCE[spec.dtype]


SPECS = [
    Spec(mask="none"),
    Spec(),
    Spec(mask="additive"),
    Spec(mask="heads"),
    Spec(mask="bool_heads", layout="transposed"),
    Spec(mask="one_batch", batch=3),
    Spec(layout="sliced"),
    Spec(v_dim=24, mask="additive"),
    Spec(softcap=2.0),
    Spec(softcap=2.0, sinks=True, mask="heads"),
    Spec(sinks=True),
    Spec(sinks=True, mask="none"),
    Spec(rows=1, batch=1),
    Spec(kv_len=64, rows=17),
    Spec(heads=9, kv_heads=3, rows=9),
    Spec(heads=7, kv_heads=1, rows=20),
    Spec(heads=4, kv_heads=4),
    Spec(mask="causal", kv_len=170),
    Spec(mask="causal", kv_len=170, batch=3, sinks=True, layout="transposed"),
    Spec(mask="causal", kv_len=130, rows=17, softcap=2.0, dim=24, v_dim=40),
]


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_float64(spec: Spec, dtype: torch.dtype, block_size: int) -> None:
    check(dataclasses.replace(spec, dtype=dtype), block_size)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 33, 64] if CUDA else [2, 33])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (12, 2), (28, 4), (14, 2), (71, 1), (4, 4)] if CUDA else [(12, 2)])
def test_rows_and_groups(heads: int, kv_heads: int, rows: int) -> None:
    check(Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=rows, kv_len=150, dtype=DTYPES[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(d, d) for d in ((16, 64, 72, 80, 96, 112, 128, 192, 256) if CUDA else (80,))] + [(192, 128), (24, 48)]
)
def test_head_dims(dim: int, v_dim: int, dtype: torch.dtype) -> None:
    check(Spec(batch=1, heads=4, kv_heads=2, rows=9, kv_len=150, dim=dim, v_dim=v_dim, dtype=dtype), 64 if CUDA else 32)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("kv_len", [1, 16, 65, 127, 500] if CUDA else [1, 65])
def test_cache_lengths_and_block_sizes(block_size: int, kv_len: int) -> None:
    call = make(Spec(rows=1, kv_len=kv_len, dtype=torch.float16), seen=kv_len)
    assert error(run(moved(call), block_size).cpu(), einsum64(call)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("spec", [Spec(), Spec(mask="none"), Spec(mask="heads"), Spec(sinks=True)], ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_selections(name: str, spec: Spec) -> None:
    chosen, call = SELECTIONS[name], make(spec)
    ids, count = (x.to(DEVICE) for x in listed(chosen))
    c = moved(call)
    found = attention_triton(c.q, c.k, c.v, c.mask, ids, count, None, BLOCK, c.scale, c.softcap, c.sinks)
    assert error(found.cpu(), einsum64(call, keys_of(chosen, BLOCK, spec.kv_len))) < 4e-6


def small_lists(call: Call, block_size: int, seed: int = 1) -> list[list[list[int]]]:
    """Half of the cache's blocks in lists of unequal length per batch row and KV head; the last one is empty."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_len = call.k.shape[:3]
    blocks = -(-kv_len // block_size)
    lists = [[torch.nonzero(torch.rand(blocks, generator=generator) < 0.5)[:, 0].tolist() for _ in range(heads)]
             for _ in range(batch)]  # fmt: skip
    lists[0][0] = [*range(max(1, blocks - 1))]
    lists[-1][-1] = []
    return lists


def flags_of(call: Call, ids: Tensor, block_size: int) -> Tensor:
    """``full`` of listed blocks."""
    batch, kv_len = call.k.shape[0], call.k.shape[2]
    plain = torch.ones(batch, kv_len, dtype=torch.bool)
    if call.mask is not None:
        plain = (call.mask if call.mask.dtype == torch.bool else call.mask == 0).flatten(1, 2).all(1).expand(batch, -1)
    plain = torch.nn.functional.pad(plain, (0, -kv_len % block_size)).unflatten(1, (-1, block_size)).all(2)
    flags = plain[:, None].expand(-1, ids.shape[1], -1).gather(2, ids.clamp(min=0).long())
    return (flags & (ids >= 0)).to(torch.uint8)


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(mask="none", kv_len=203), Spec(mask="causal", kv_len=331), Spec(mask="additive", kv_len=203),
        Spec(mask="heads", kv_len=203, sinks=True), Spec(mask="bool", kv_len=210, rows=3, dtype=torch.float16),
        Spec(mask="causal", kv_len=5, rows=2),
    ],
    ids=str,
)  # fmt: skip
def test_ragged_lists_of_every_block_size(spec: Spec, block_size: int, flagged: bool) -> None:
    call = make(spec)
    chosen = small_lists(call, block_size)
    ids, count = listed(chosen)
    full = flags_of(call, ids, block_size)
    keys = keys_of(chosen, block_size, spec.kv_len)
    wanted = einsum64(call, keys)
    # Slots that no list names, and the padding of the lists, are never touched.
    for x in (call.k, call.v):
        x.masked_fill_(~keys.unsqueeze(-1), torch.nan)
    ids = torch.where(ids < 0, 1 << 28, ids)
    c = moved(call)
    lists = (ids.to(DEVICE), count.to(DEVICE), full.to(DEVICE) if flagged else None)
    found = attention_triton(c.q, c.k, c.v, c.mask, *lists, block_size, c.scale, c.softcap, c.sinks).cpu()
    assert error(found, wanted) < TOLERANCE[spec.dtype]
    assert (found[-1, -(spec.heads // spec.kv_heads) :] == 0).all()


def tiling_of(call: Call, block_size: int) -> tiling.Tiling:
    batch, heads, rows, dim = call.q.shape
    kv_heads = call.k.shape[1]
    rows *= heads // kv_heads
    return tiling.choose_tiling(call.q.device, call.q.dtype, batch, kv_heads, rows, dim, call.v.shape[3], block_size)


@triton.jit
def _parts_kernel(OUT, tiles, SPLITS: tl.constexpr, LAST: tl.constexpr):
    split = tl.program_id(0)
    lo, hi = _part(tiles, split, SPLITS, LAST)
    tl.store(OUT + 2 * split, lo)
    tl.store(OUT + 2 * split + 1, hi)


@pytest.mark.parametrize("last", [0, 1, 4])
@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_splits_share_the_tiles(splits: int, last: int) -> None:
    """Every tile once and in order; the last split, which ends with a masked tile, has the fewest, but that one always."""
    for tiles in (0, 1, 2, 5, 16, 17, 33, 68, 512):
        found = torch.full((splits, 2), -1, dtype=torch.int32, device=DEVICE)
        _parts_kernel[(splits,)](found, tiles, SPLITS=splits, LAST=last)
        lo, hi = found.cpu().unbind(1)
        assert torch.equal(lo[1:], hi[:-1]) and lo[0] == 0 and hi[-1] == tiles
        sizes = hi - lo
        assert sizes.max() <= most_tiles(tiles, splits, last)
        if splits > 1 and last:
            assert sizes[:-1].max() - sizes[:-1].min() <= 1
            assert min(tiles, 1) <= sizes[-1] <= max(1, int(sizes[:-1].max()))
            assert sizes[-1] == 1 or tiles == 0 or 0 <= int(sizes[:-1].min()) - int(sizes[-1]) - last <= 1
        else:
            assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(mask="none", kv_len=270), Spec(mask="causal", kv_len=331), Spec(mask="causal", kv_len=448, dtype=DTYPES[-1]),
        Spec(mask="additive", kv_len=230), Spec(mask="heads", kv_len=230), Spec(mask="causal", kv_len=3, rows=1),
    ],
    ids=str,
)  # fmt: skip
def test_small_blocks_give_the_bits_of_whole_tiles(spec: Spec, flagged: bool) -> None:
    """Every live block listed, the live range starting at a multiple of 64 keys: the same sums in the same order."""
    call = make(spec)
    if call.mask is not None and spec.kv_len > 64:
        seen = call.mask if call.mask.dtype == torch.bool else call.mask > -1e4
        hidden = False if call.mask.dtype == torch.bool else torch.finfo(call.mask.dtype).min
        call.mask[~seen] = hidden
        # Whole blocks of 64 before the last rows, so that a finer list has no block less.
        first = torch.arange(spec.kv_len) < 64
        call.mask[0] = call.mask[0].masked_fill(first, hidden)
        if call.mask.dtype == torch.bool:
            call.mask[0, ..., 64:128] = True
        else:
            call.mask[0, ..., 64:128] = call.mask[1, ..., 64:128]
    mask = call.mask if call.mask is not None else torch.ones(1, 1, 1, spec.kv_len, dtype=torch.bool)
    c = moved(call)
    for splits in (1, 3):
        results = []
        for block_size in (64, 8, 16, 32) if splits == 3 else (64, 8):
            ids, count, full = (x.to(DEVICE) for x in live_blocks_reference(mask, block_size))
            operands = (c.q, c.k, c.v, c.mask, ids, count, full if flagged else None)
            cut = dataclasses.replace(tiling_of(c, block_size), splits=splits)
            results.append(attention_triton(*operands, block_size, c.scale, c.softcap, c.sinks, tiling=cut))
        assert all(torch.equal(found, results[0]) for found in results)
        assert error(results[0].cpu(), einsum64(call)) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("block_size", [8, 64])
def test_lists_without_a_block_give_zeros(block_size: int, sinks: bool) -> None:
    c = moved(make(Spec(mask="causal", kv_len=170, sinks=sinks)))
    c.k.fill_(torch.nan)
    c.v.fill_(torch.nan)
    ids = torch.full((2, 2, 22), -1, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    for full in (None, torch.zeros_like(ids, dtype=torch.uint8)):
        found = attention_triton(c.q, c.k, c.v, c.mask, ids, count, full, block_size, c.scale, 0.0, c.sinks)
        assert (found == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_do_not_depend_on_the_size_of_small_blocks(dtype: torch.dtype) -> None:
    for device in (tiling.Device(90, 132, 232448), tiling.Device(86, 84, 101376), tiling.INTERPRETER):
        for dim, rows in ((64, 8), (128, 36), (256, 128)):
            found = []
            for block_size in (8, 16, 32, 64):
                try:
                    found.append(tiling._choose(device, dtype.itemsize, 1, 8, rows, dim, dim, block_size))
                except ValueError:
                    assert block_size == 64
            # Where blocks of 64 do not fit, smaller ones take a smaller tile.
            assert found[0].keys == 64 or len(found) == 3
            assert all(x.splits == found[0].splits for x in found if x.keys == found[0].keys)


@pytest.mark.parametrize(
    "spec", [Spec(), Spec(mask="causal", kv_len=170), Spec(mask="additive"), Spec(mask="heads"), Spec(softcap=2.0)], ids=str
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(("lists", "block_size"), [(True, 8), (True, 64), (False, 64)])
def test_hidden_slots_never_reach_the_result(spec: Spec, poison: float, lists: bool, block_size: int) -> None:
    call = moved(make(spec))
    assert call.mask is not None

    def attend() -> Tensor:
        if lists:
            return run(call, block_size)
        return attention_triton(
            call.q, call.k, call.v, call.mask, None, None, None, block_size, call.scale, call.softcap, call.sinks
        )  # fmt: skip

    wanted = attend()
    seen = call.mask if call.mask.dtype == torch.bool else call.mask > torch.finfo(call.mask.dtype).min / 2
    group = spec.heads // spec.kv_heads
    used = seen.expand(spec.batch, spec.heads, spec.rows, spec.kv_len).unflatten(1, (spec.kv_heads, group)).flatten(2, 3).any(2)
    assert not used.all()
    call.k.masked_fill_(~used.unsqueeze(-1), poison)
    call.v.masked_fill_(~used.unsqueeze(-1), poison)
    assert torch.equal(attend(), wanted)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_that_see_nothing_are_zero(kind: str, sinks: bool) -> None:
    call = make(Spec(mask=kind, sinks=sinks))
    assert call.mask is not None
    call.mask[1, :, 2] = False if kind == "bool" else -torch.inf
    found = run(moved(call)).cpu()
    assert (found[1, :, 2] == 0).all()
    assert error(found, einsum64(call)) < 4e-6
    call.mask.fill_(False if kind == "bool" else -torch.inf)
    assert (run(moved(call)) == 0).all()


def test_strided_lists_and_sinks() -> None:
    """Operands cut out of larger tensors: every kernel argument must mean what the reference reads."""
    call = make(Spec(mask="causal", kv_len=170))
    assert call.mask is not None
    wide = [torch.full((*x.shape[:-1], 2 * x.shape[-1]), 1, dtype=x.dtype) for x in live_blocks_reference(call.mask, BLOCK)]
    lists = []
    for part, x in zip(wide, live_blocks_reference(call.mask, BLOCK)):
        part[..., ::2] = x
        lists.append(part.to(DEVICE)[..., ::2])
    sinks = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    call = dataclasses.replace(call, sinks=sinks[:, 1])
    c = moved(call)
    strided = sinks.to(DEVICE)[:, 1]
    assert strided.stride() == (3,)
    found = attention_triton(c.q, c.k, c.v, c.mask, *lists, BLOCK, c.scale, 0.0, strided)
    assert error(found.cpu(), einsum64(call)) < 4e-6


@pytest.mark.parametrize("bias", [-1e5, -1e30, -1e38])
def test_a_row_of_low_biases_is_not_hidden(bias: float) -> None:
    call = make(Spec(mask="additive"))
    assert call.mask is not None
    call.mask[1, :, 2] = torch.where(call.mask[1, :, 2] > -1e38, bias, call.mask[1, :, 2])
    found = run(moved(call)).cpu()
    # In float32 the scores vanish beside a bias of 1e30: what counts is that the row is a softmax, not zero.
    assert found[1, :, 2].abs().max() > 0.01
    reference = library.attention(*call.operands())
    assert (found - reference).abs().max() < (2e-2 if bias == -1e5 else 1e-5)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1000.0, 1e5])
def test_softcaps_far_above_and_below_the_scores(softcap: float) -> None:
    call = make(Spec(softcap=softcap, mask="causal", kv_len=170))
    assert error(run(moved(call)).cpu(), einsum64(call)) < 4e-6


def test_no_rows() -> None:
    call = moved(make(Spec()))
    assert call.mask is not None
    found = attention_triton(
        call.q[:, :, :0], call.k, call.v, call.mask[:, :, :0], None, None, None, BLOCK, call.scale, 0.0, None
    )  # fmt: skip
    assert found.shape == (2, 4, 0, 16)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_number_of_splits(splits: int, sinks: bool) -> None:
    call = make(Spec(batch=1, rows=3, sinks=sinks))
    chosen = tiling.Tiling(rows=16, splits=splits, warps=4, stages=2, pdl=CUDA and torch.cuda.get_device_capability()[0] >= 9)
    assert error(run(moved(call), tiling=chosen).cpu(), einsum64(call)) < 4e-6


def test_unused_capacity_changes_no_bit() -> None:
    """The split schedule depends on the live count alone: a long cache gives what a short one gives."""
    short = moved(make(Spec(batch=1, kv_len=96, mask="causal")))
    assert short.mask is not None
    pad = [torch.nn.functional.pad(x, (0, 0, 0, 400)) for x in (short.k, short.v)]
    long = dataclasses.replace(short, k=pad[0], v=pad[1], mask=torch.nn.functional.pad(short.mask, (0, 400)))
    assert torch.equal(run(short), run(long))


def test_full_flags_change_no_bit_beyond_rounding() -> None:
    call = moved(make(Spec(kv_len=160, mask="causal")))
    ids, count, full = live_blocks_reference(call.mask, BLOCK) if call.mask is not None else (None, None, None)
    assert full is not None and full.any()
    operands = (call.q, call.k, call.v, call.mask, ids, count)
    with_flags = attention_triton(*operands, full, BLOCK, call.scale, 0.0, None)
    without = attention_triton(*operands, torch.zeros_like(full), BLOCK, call.scale, 0.0, None)
    assert (with_flags - without).abs().max() < 2e-6


def test_a_second_run_gives_the_same_bits() -> None:
    call = moved(make(Spec(batch=2, heads=8, kv_heads=2, rows=9, kv_len=600 if CUDA else 100, dtype=DTYPES[-1])))
    assert torch.equal(run(call), run(call))


@pytest.mark.parametrize("spec", [Spec(), Spec(mask="none"), Spec(mask="heads", sinks=True), Spec(softcap=2.0)], ids=str)
def test_opcheck(spec: Spec) -> None:
    c = moved(make(spec))
    lists = (None, None, None) if c.mask is None else live_blocks_reference(c.mask, BLOCK)
    torch.library.opcheck(library.attention_triton, (c.q, c.k, c.v, c.mask, *lists, BLOCK, c.scale, c.softcap, c.sinks))


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("name", grid())
def test_live_blocks(name: str, block_size: int) -> None:
    for mask in (grid()[name], grid()[name].transpose(2, 3).contiguous().transpose(2, 3)):
        for found, wanted in zip(live_blocks_triton(mask.to(DEVICE), block_size), live_blocks_reference(mask, block_size)):
            assert found.dtype == wanted.dtype
            assert torch.equal(found.cpu(), wanted)


def test_live_blocks_of_a_long_cache() -> None:
    """More blocks than one chunk of the compaction holds."""
    mask = causal(20_000, 3, 8 * 3000)
    mask[..., 4_000:9_000] = False
    mask[:, :, 1, 12_345] = False
    for found, wanted in zip(live_blocks_triton(mask.to(DEVICE), 8), live_blocks_reference(mask, 8)):
        assert torch.equal(found.cpu(), wanted)


def test_providers_refuse_with_a_reason() -> None:
    provider = PROVIDERS[0]
    assert provider.name == "triton"

    def ask(dtype: torch.dtype = torch.float16, device: str = "cuda", dim: int = 64, **changes: Any) -> str | None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            x = torch.empty(1, 2, 3, dim, dtype=dtype, device=device)
            call = AttentionCall(x, x, x, None, 0.0, False)
            return provider.supports(dataclasses.replace(call, **changes))

    assert "device cpu" in str(ask(device="cpu"))
    assert "float64" in str(ask(torch.float64))
    assert "block_size 4" in str(ask(block_size=4))
    assert "block_size 256" in str(ask(block_size=256))
    assert "head dim 320" in str(ask(dim=320))
    assert "mask dtype torch.float64" in str(ask(mask=torch.zeros(1, 1, 1, 1, dtype=torch.float64)))
    if CUDA:
        assert ask() is None
        assert ask(dim=256) is None
        assert "shared memory" in str(ask(torch.float32, dim=256, block_size=128))
    assert "block_size 12" in str(why_not(torch.zeros(1, 1, 1, 1), 12))
    assert "float64" in str(why_not(torch.zeros(1, 1, 1, 1, dtype=torch.float64), 64))


def test_a_device_too_small_is_refused() -> None:
    small = tiling.Device(capability=75, processors=40, shared_bytes=16 << 10)
    with pytest.raises(ValueError, match="more shared memory than the device has"):
        tiling._choose(small, 2, 1, 8, 32, 128, 128, 128)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 192, 256])
def test_tiles_fit_shared_memory(dtype: torch.dtype, dim: int) -> None:
    for device in (tiling.Device(90, 132, 232448), tiling.Device(80, 108, 166912), tiling.Device(86, 84, 101376)):
        for rows in (1, 8, 36, 128, 256, 2272):
            dims = tiling.padded_dims(dim, dim)
            if tiling.shared_bytes(16, 64, dims, dtype.itemsize, 1) + tiling.RESERVE > device.shared_bytes:
                with pytest.raises(ValueError, match="shared memory"):
                    tiling._choose(device, dtype.itemsize, 1, 8, rows, dim, dim, 64)
                continue
            found = tiling._choose(device, dtype.itemsize, 1, 8, rows, dim, dim, 64)
            assert tiling.shared_bytes(found.rows, 64, dims, dtype.itemsize, found.stages) <= device.shared_bytes
            assert 1 <= found.splits <= 64 and found.rows <= 128


def test_head_dims_that_differ_count_by_the_larger() -> None:
    """Compiled for compute capability 9.0, bfloat16 with dims 256 and 16 and blocks of 128 needs 241,664 bytes in 3 stages."""
    device = tiling.Device(90, 132, 232448)
    assert tiling.shared_bytes(64, 128, (256, 16), 2, 3) > device.shared_bytes
    assert tiling._choose(device, 2, 1, 8, 36, 256, 16, 128).stages < 3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (71, 1, 64)])
def test_error_stays_near_that_of_sdpa(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    call = make(Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=9, kv_len=2000, dim=dim, v_dim=dim, dtype=dtype))
    wanted = einsum64(call)
    best = min(rms(sdpa(call), wanted), rms(sdpa(moved(call)).cpu(), wanted))
    assert rms(run(moved(call), 64).cpu(), wanted) <= 1.2 * best


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_offsets_past_two_to_the_31() -> None:
    heads, kv_len, rows, dim = 2, (1 << 23) + 640, 9, 128
    k, v = (torch.zeros(1, heads, kv_len, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert k.stride(1) * heads > 1 << 31
    q = torch.randn(1, heads, rows, dim, dtype=torch.bfloat16, device="cuda")
    live = slice(kv_len - 600, kv_len)
    k[:, :, live], v[:, :, live] = (torch.randn(1, heads, 600, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    mask = torch.zeros(1, 1, rows, kv_len, dtype=torch.bool, device="cuda")
    mask[..., live] = causal(600 - rows, rows, 600).cuda()
    found = run(Call(q, k, v, mask, dim**-0.5), 64)
    wanted = einsum64(Call(q.cpu(), k[:, :, live].cpu(), v[:, :, live].cpu(), mask[..., live].cpu(), dim**-0.5))
    assert error(found.cpu(), wanted) < 3e-2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_two_hundred_replays_with_moving_lengths() -> None:
    spec = Spec(batch=2, heads=8, kv_heads=2, rows=9, kv_len=3000, dim=64, v_dim=64, dtype=torch.bfloat16)
    call = moved(make(spec))
    assert call.mask is not None
    mask = call.mask

    def step() -> Tensor:
        lists = library.live_blocks(mask, 64)
        return library.attention_triton(call.q, call.k, call.v, mask, *lists, 64, call.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    starts = torch.randint(0, 2900, (200, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for pair in starts:
        mask.copy_(torch.cat([causal(start, 9, 3000) for start in pair]))
        call.q.normal_()
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, step())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_other_streams() -> None:
    call = moved(make(Spec(kv_len=500, dtype=torch.float16)))
    wanted = run(call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(call)
    stream.synchronize()
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device() -> None:
    call = make(Spec(kv_len=500, dtype=torch.float16))
    operands = [x.to("cuda:1") if isinstance(x, Tensor) else x for x in (call.q, call.k, call.v, call.mask)]
    found = library.attention_triton(*operands, *library.live_blocks(operands[3], 64), 64, call.scale)
    assert found.device == torch.device("cuda:1")
    assert error(found.cpu(), einsum64(call)) < 4e-3


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rows", [1, 9, 17, 32, 70])
@pytest.mark.parametrize(
    ("columns", "bias"), [((96,), True), ((70, 33), False), ((64, 16, 130), True), ((16, 16, 70, 200), True)]
)
@pytest.mark.parametrize("size", [192, 576] if CUDA else [192])
def test_linears(columns: tuple[int, ...], bias: bool, rows: int, size: int, dtype: torch.dtype) -> None:
    if not CUDA and rows > 17:
        pytest.skip("slow in the interpreter")
    x = torch.randn(1, rows, size).to(dtype)
    weights = [(torch.randn(n, size) * size**-0.5).to(dtype) for n in columns]
    biases = [torch.randn(n).to(dtype) for n in columns] if bias else []
    found = linears_triton(x.to(DEVICE), [w.to(DEVICE) for w in weights], [b.to(DEVICE) for b in biases])
    for i, (y, weight) in enumerate(zip(found, weights, strict=True)):
        wanted = torch.nn.functional.linear(x.double(), weight.double(), biases[i].double() if bias else None)
        theirs = torch.nn.functional.linear(x, weight, biases[i] if bias else None)
        assert y.shape == theirs.shape and y.is_contiguous()
        assert rms(y.cpu(), wanted) <= 1.2 * rms(theirs, wanted) + 1e-6


def check_narrow(rows: int, columns: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(1, rows, size).to(dtype)
    weight = (torch.randn(columns, size) * size**-0.5).to(dtype)
    for bias in (None, torch.randn(columns).to(dtype)):
        y = narrow_linear_triton(x.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)).cpu()
        wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        theirs = torch.nn.functional.linear(x, weight, bias)
        assert y.shape == theirs.shape and y.is_contiguous()
        assert rms(y, wanted) <= 1.2 * rms(theirs, wanted) + 1e-6


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("rows", "columns", "size"), [(1, 8, 64), (9, 60, 192), (16, 128, 2048), (17, 3, 2112), (32, 256, 4160)])
def test_narrow_linear(rows: int, columns: int, size: int, dtype: torch.dtype) -> None:
    check_narrow(rows, columns, size, dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "size"), [(128, 2048), (8, 4096), (256, 7168), (64, 576)])
def test_narrow_linear_at_the_sizes_of_routers(columns: int, size: int, dtype: torch.dtype) -> None:
    for rows in (1, 8, 9, 16, 17, 32):
        check_narrow(rows, columns, size, dtype)


def test_linears_of_a_strided_input_and_opcheck() -> None:
    x = torch.randn(2, 192, 5, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    weights = [torch.randn(n, 192, dtype=torch.float16, device=DEVICE) * 0.07 for n in (64, 48)]
    for y, weight in zip(linears_triton(x, weights, []), weights):
        assert (y - torch.nn.functional.linear(x, weight)).abs().max() < 1e-2
    torch.library.opcheck(library.linears, (x, weights, [None, None]))
    torch.library.opcheck(library.linears, (x, weights, [torch.zeros(n, dtype=torch.float16, device=DEVICE) for n in (64, 48)]))
