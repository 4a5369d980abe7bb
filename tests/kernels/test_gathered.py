"""``attention_gathered``: a selection on CPU, against float64, and the exact call where it is everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import BLOCK, SELECTIONS, Call, Spec, einsum64, error, keys_of, listed, make
from torch import Tensor

from spec_compile.kernels import library

SPECS = [
    Spec(), Spec(mask="additive"), Spec(mask="bool_heads"), Spec(mask="one_batch"), Spec(heads=9, kv_heads=3, rows=1),
    Spec(heads=2, kv_heads=2), Spec(layout="transposed"), Spec(layout="sliced"), Spec(softcap=2.0), Spec(sinks=True),
    Spec(kv_len=80, dim=32, v_dim=16), Spec(kv_len=65), Spec(mask="additive", sinks=True, softcap=3.0),
]  # fmt: skip


def arguments(call: Call, ids: Tensor, count: Tensor, live: tuple[Tensor, Tensor], mask: Tensor | None = None) -> tuple[Any, ...]:
    mask = call.mask if mask is None else mask
    return (call.q, call.k, call.v, mask, ids, count, None, *live, BLOCK, call.scale, call.softcap, call.sinks)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_selections(spec: Spec, selection: str, folded: bool) -> None:
    call = make(spec)
    assert call.mask is not None
    kv_heads = call.k.shape[1]
    chosen = [heads if len(heads) == 1 else [heads[h % len(heads)] for h in range(kv_heads)] for heads in SELECTIONS[selection]]
    ids, count = listed(chosen)
    wanted = einsum64(call, keys_of(chosen, BLOCK, spec.kv_len))
    # Slots that no row may read hold NaN.
    allowed = keys_of(chosen, BLOCK, spec.kv_len).expand(spec.batch, kv_heads, -1)
    call.k.masked_fill_(~allowed.unsqueeze(-1), torch.nan), call.v.masked_fill_(~allowed.unsqueeze(-1), torch.nan)
    mask = None
    if folded and call.mask.dtype == torch.bool and call.softcap == 0 and call.sinks is None:
        mask = library.fold_mask(call.mask, spec.heads, kv_heads, spec.rows, call.q.dtype)
    # What was selected from: every block of the cache.
    blocks = -(-spec.kv_len // BLOCK)
    live = torch.arange(blocks, dtype=torch.int32).view(1, 1, -1), torch.full((1, 1), blocks, dtype=torch.int32)
    assert error(library.attention_gathered(*arguments(call, ids, count, live, mask)), wanted) <= 1e-5


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_everything_live_is_the_exact_call(spec: Spec) -> None:
    call = make(spec)
    assert call.mask is not None
    ids, count, full = library.live_blocks(call.mask, BLOCK)
    each = (ids.expand(-1, spec.kv_heads, -1).contiguous(), count.expand(-1, spec.kv_heads).contiguous())
    found = library.attention_gathered(*arguments(call, *each, (ids, count)))
    exact = (call.q, call.k, call.v, call.mask, ids, count, full, BLOCK, call.scale, call.softcap, call.sinks)
    assert torch.equal(found, library.attention_folded(*exact))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_wider_than_q_is_not_rounded(dtype: torch.dtype) -> None:
    """A float32 mask on a half-precision model: large smooth biases, and -1e5, which is a bias and hides nothing."""
    call = make(Spec(dtype=dtype))
    assert call.mask is not None
    bias = 700 + torch.linspace(-2, 2, 75).expand(call.mask.shape)
    bias = torch.where(torch.arange(5).view(1, 1, 5, 1) == 1, bias - 1e5, bias).masked_fill(~call.mask, -torch.inf)
    ids, count = listed([[[0, 2, 4], [1, 3]], [[0, 1, 4], [2]]])
    rest = (None, BLOCK, call.scale, 0.0, None)
    live = torch.arange(5, dtype=torch.int32).view(1, 1, 5), torch.full((1, 1), 5, dtype=torch.int32)
    found = library.attention_gathered(call.q, call.k, call.v, bias, ids, count, None, *live, *rest[1:])
    wanted = library.attention(call.q, call.k, call.v, bias, ids, count, *rest)
    assert error(found, wanted.double()) <= 2e-2


def test_no_block_at_all() -> None:
    call = make(Spec(batch=1))
    assert call.mask is not None
    ids, count = torch.full((1, 2, 5), -1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    live = library.live_blocks(call.mask, BLOCK)[:2]
    assert torch.equal(library.attention_gathered(*arguments(call, ids, count, live)), torch.zeros(1, 4, 5, 16))


def test_opcheck() -> None:
    for spec in (Spec(), Spec(mask="additive", sinks=True)):
        call = make(spec)
        assert call.mask is not None
        live = library.live_blocks(call.mask, BLOCK)[:2]
        torch.library.opcheck(library.attention_gathered, arguments(call, *listed([[[0, 2], [1, 4]]]), live))
