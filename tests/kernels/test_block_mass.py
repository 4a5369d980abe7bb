"""``block_mass`` in Triton against the reference: on a CUDA device as compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import Call, Spec, make
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.block_mass import block_mass_reference
from spec_compile.kernels.selection import QUERIES

pytest.importorskip("triton")

from spec_compile.kernels.block_mass_triton import block_mass_triton, why_not

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# Largest error of a share against the reference in float32 of the same operands; GPUs round exp2 and log2 further.
SMALL = 1e-5 if CUDA else 2e-6
TOLERANCE = {torch.float32: SMALL, torch.float16: SMALL, torch.bfloat16: 1e-4}


def operands(call: Call, block_size: int, query: str, gate: int = 0) -> tuple[Any, ...]:
    assert call.mask is not None
    ids, count, _ = library.live_blocks(call.mask, block_size)
    tensors = (call.q, call.k, call.mask, ids, count, torch.tensor([gate]))
    return (*tensors, block_size, call.scale, query, call.softcap, call.sinks)


def run(arguments: tuple[Any, ...]) -> Tensor:
    return block_mass_triton(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments)).cpu()


def check(spec: Spec, block_size: int, query: str) -> None:
    arguments = operands(make(spec), block_size, query)
    found, wanted = run(arguments), block_mass_reference(*arguments)
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert (found - wanted).abs().max() < TOLERANCE[spec.dtype]


SPECS = [
    Spec(),
    Spec(mask="additive"),
    Spec(mask="heads"),
    Spec(mask="bool_heads", layout="transposed"),
    Spec(mask="one_batch", batch=3),
    Spec(layout="sliced"),
    Spec(softcap=2.0, mask="causal", kv_len=170),
    Spec(sinks=True),
    Spec(sinks=True, softcap=2.0, mask="heads"),
    Spec(rows=1, batch=1),
    Spec(heads=9, kv_heads=3, rows=9, kv_len=150),
    Spec(heads=7, kv_heads=1, rows=4, dim=24),
    Spec(heads=4, kv_heads=4, mask="causal", kv_len=331),
    Spec(mask="causal", kv_len=3, rows=2),
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_the_reference(spec: Spec, query: str) -> None:
    check(spec, 16, query)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("kv_len", [7, 64, 203, 2000 if CUDA else 500])
def test_block_sizes_and_lengths(kv_len: int, block_size: int, dtype: torch.dtype) -> None:
    for mask in ("causal", "additive"):
        check(Spec(kv_len=kv_len, rows=3, mask=mask, dtype=dtype), block_size, "all")


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("dim", [16, 80, 128, 256] if CUDA else [80])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(32, 8, 8), (28, 4, 9), (71, 1, 1)])
def test_groups_and_head_dims(heads: int, kv_heads: int, rows: int, dim: int, query: str) -> None:
    check(Spec(batch=1, heads=heads, kv_heads=kv_heads, rows=rows, dim=dim, kv_len=150, dtype=DTYPES[-1]), 64, query)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("mask", ["bool", "additive"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_hidden_slots_never_reach_the_result(poison: float, mask: str, query: str) -> None:
    spec = Spec(mask=mask, kv_len=203)
    call = make(spec)
    assert call.mask is not None
    # Rows of one chain: what the first one does not see, but a later one does, must be a number.
    seen = call.mask if mask == "bool" else call.mask > torch.finfo(call.mask.dtype).min / 2
    wanted = run(operands(call, 16, query))
    assert not seen.flatten(1, 2).any(1).all()
    call.k.masked_fill_(~seen.flatten(1, 2).any(1)[:, None, :, None], poison)
    assert torch.equal(run(operands(call, 16, query)), wanted)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("query", QUERIES)
def test_rows_and_blocks_that_nothing_sees(query: str, sinks: bool) -> None:
    call = make(Spec(mask="bool", kv_len=203, sinks=sinks))
    assert call.mask is not None
    call.mask[1, :, [0, -1]] = False
    arguments = operands(call, 16, query)
    found = run(arguments)
    assert (found - block_mass_reference(*arguments)).abs().max() < SMALL
    ids, count = arguments[3:5]
    for b in range(2):
        dead = sorted(set(range(found.shape[2])) - set(ids[b, 0, : int(count[b, 0])].tolist()))
        assert dead and (found[b, :, dead] == 0).all()
    call.mask.fill_(False)
    assert (run(operands(call, 16, query)) == 0).all()


def test_contexts_below_the_gate_are_not_read() -> None:
    call = make(Spec(mask="causal", kv_len=331))
    assert call.mask is not None
    wanted = block_mass_reference(*operands(call, 16, "first"))
    count = library.live_blocks(call.mask, 16)[1][:, 0].tolist()
    assert count[0] < count[1]
    found = run(operands(call, 16, "first", gate=16 * count[1]))
    assert (found[0] == 0).all() and (found[1] - wanted[1]).abs().max() < SMALL


def test_a_list_for_all_batch_rows_and_strided_operands() -> None:
    call = make(Spec(mask="causal", kv_len=331, layout="sliced", sinks=True))
    assert call.mask is not None and call.sinks is not None
    wide = torch.stack([call.sinks, call.sinks + 1], 1)
    call = dataclasses.replace(call, mask=call.mask[1:], sinks=wide[:, 0])
    assert call.sinks is not None and call.sinks.stride() == (2,)
    arguments = operands(call, 16, "all")
    assert arguments[3].shape[0] == 1
    assert (run(arguments) - block_mass_reference(*arguments)).abs().max() < SMALL


def test_shares_of_a_row_sum_to_one_and_repeat() -> None:
    arguments = operands(make(Spec(mask="causal", kv_len=700, rows=2)), 8, "all")
    found = run(arguments)
    assert (found.sum(-1) - 1).abs().max() < 1e-5
    assert torch.equal(run(arguments), found)


@pytest.mark.parametrize("query", QUERIES)
def test_opcheck(query: str) -> None:
    for spec in (Spec(), Spec(mask="heads", sinks=True, softcap=2.0)):
        arguments = operands(make(spec), 16, query)
        torch.library.opcheck(
            library.block_mass, tuple(x.to(DEVICE) if isinstance(x, Tensor) else x for x in arguments)
        )  # fmt: skip


def test_what_the_kernel_leaves_to_the_reference() -> None:
    call = make(Spec())
    q, k, mask = call.q, call.k, call.mask
    assert mask is not None
    assert all(why_not(q, k, mask, 64, query) is None for query in QUERIES)
    assert "dtypes" in str(why_not(q.double(), k.double(), mask, 64, "all"))
    assert "dtypes" in str(why_not(q.half(), k, mask, 64, "all"))
    assert "mask dtype" in str(why_not(q, k, mask.double(), 64, "all"))
    assert "block_size 4" in str(why_not(q, k, mask, 4, "all"))
    assert "head dim 320" in str(why_not(torch.zeros(1, 4, 5, 320), torch.zeros(1, 2, 9, 320), mask, 64, "all"))
    assert "more than 32" in str(why_not(torch.zeros(1, 60, 5, 16), k, mask, 64, "all"))
    q, k = torch.zeros(1, 60, 5, 16).half(), k.half()
    assert "more than 128" in str(why_not(q, k, mask, 64, "all"))
    assert why_not(q, k, mask, 64, "first_last") is None
    if not CUDA:
        q, k = torch.zeros(1, 64, 2, 256).half(), torch.zeros(1, 1, 9, 256).half()
        assert "shared memory" in str(why_not(q, k, mask, 64, "all"))
