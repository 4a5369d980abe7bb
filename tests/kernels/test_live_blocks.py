"""``live_blocks``: which blocks are listed, which are full, and what counts as hidden."""

from __future__ import annotations

import pytest
import torch
from mask_cases import causal, grid
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.blocks import hidden_threshold, keys_in_blocks, visible

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def expected_lists(mask: Tensor, block_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Live and full blocks by plain loops; additive masks compare in float64."""
    batch, _, _, kv_len = mask.shape
    live: list[list[int]] = []
    full: list[list[int]] = []
    for row in range(batch):
        live.append([])
        full.append([])
        for block in range(-(-kv_len // block_size)):
            part = mask[row, :, :, block * block_size : (block + 1) * block_size]
            if mask.dtype == torch.bool:
                seen, plain = part, part
            else:
                seen, plain = part.double() > torch.finfo(mask.dtype).min / 2, part.double() == 0
            if seen.any():
                live[-1].append(block)
            if plain.all() and part.shape[-1] == block_size:
                full[-1].append(block)
    return live, full


def lists_of(mask: Tensor, block_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Live and full blocks as the operator says, after checking its layout and padding."""
    ids, count, full = library.live_blocks(mask, block_size)
    batch, blocks = mask.shape[0], -(-mask.shape[3] // block_size)
    assert (ids.dtype, count.dtype, full.dtype) == (torch.int32, torch.int32, torch.uint8)
    assert (ids.shape, count.shape, full.shape) == ((batch, 1, blocks), (batch, 1), (batch, 1, blocks))
    for row in range(batch):
        used = int(count[row, 0])
        assert (ids[row, 0, used:] == -1).all()
        assert (ids[row, 0, :used] >= 0).all()
        assert (full[row, 0, used:] == 0).all()
    live = [ids[row, 0, : int(count[row, 0])].tolist() for row in range(batch)]
    return live, [ids[row, 0][full[row, 0] != 0].tolist() for row in range(batch)]


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", grid())
def test_lists_equal_a_loop_over_blocks(name: str, block_size: int) -> None:
    mask = grid()[name]
    assert lists_of(mask, block_size) == expected_lists(mask, block_size)


@pytest.mark.parametrize("name", ["random sparse, per head and batch", "left padding", "additive bias per head"])
def test_strides_do_not_matter(name: str) -> None:
    mask = grid()[name]
    strided = mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous()
    assert lists_of(strided, 16) == lists_of(mask, 16)
    expanded = mask[:1, :1].expand(3, 4, -1, -1)
    assert lists_of(expanded, 16) == lists_of(expanded.contiguous(), 16)


def test_live_is_a_union_and_full_an_intersection_over_heads_and_rows() -> None:
    mask = torch.zeros(1, 2, 3, 48, dtype=torch.bool)
    mask[0, 0, 0, 5] = True
    mask[0, 1, 2, 40] = True
    mask[..., 16:32] = True
    assert lists_of(mask, 16) == ([[0, 1, 2]], [[1]])
    mask[0, 1, 1, 20] = False
    assert lists_of(mask, 16) == ([[0, 1, 2]], [[]])


def test_batch_rows_have_lists_of_their_own() -> None:
    mask = torch.zeros(3, 1, 1, 64, dtype=torch.bool)
    mask[0, ..., :16] = True
    mask[2, ..., 16:] = True
    assert lists_of(mask, 16) == ([[0], [], [1, 2, 3]], [[0], [], [1, 2, 3]])


@pytest.mark.parametrize(("kv_len", "full"), [(32, [0, 1]), (31, [0]), (33, [0, 1]), (1, []), (16, [0])])
def test_a_short_last_block_is_live_but_never_full(kv_len: int, full: list[int]) -> None:
    mask = torch.ones(1, 1, 2, kv_len, dtype=torch.bool)
    assert lists_of(mask, 16) == ([list(range(-(-kv_len // 16)))], [full])
    assert lists_of(torch.zeros(1, 1, 2, kv_len), 16) == ([list(range(-(-kv_len // 16)))], [full])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_additive_mask_hides(dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    hidden = [-torch.inf, lowest, lowest / 2]
    biases = [lowest / 4, -1.0, -0.0, 3.5] + ([-1e5] if dtype != torch.float16 else [-3e4])
    mask = torch.tensor(hidden + biases, dtype=dtype).view(1, 1, 1, -1)
    assert visible(mask).flatten().tolist() == [False] * len(hidden) + [True] * len(biases)
    assert hidden_threshold(dtype) == lowest / 2
    assert lists_of(mask, 8)[0] == [[0]]
    assert lists_of(mask[..., :3], 8) == ([[]], [[]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_makes_a_block_live_but_not_full(dtype: torch.dtype) -> None:
    mask = torch.zeros(1, 1, 2, 48, dtype=dtype)
    mask[0, 0, 1, 20] = -1.0
    mask[..., 32:] = torch.finfo(dtype).min
    assert lists_of(mask, 16) == ([[0, 1]], [[0]])


def test_no_result_aliases_the_mask() -> None:
    mask = causal(40, 5, 64)
    before = mask.clone()
    for result in library.live_blocks(mask, 16):
        result.zero_()
    assert torch.equal(mask, before)


@pytest.mark.parametrize("name", grid())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(library.live_blocks, (grid()[name], 16))


def test_opcheck_with_strides() -> None:
    torch.library.opcheck(library.live_blocks, (causal(4, 3, 40).expand(2, 4, 3, 40), 8))
    torch.library.opcheck(library.live_blocks, (torch.zeros(1, 2, 40, 3).transpose(2, 3), 8))


@pytest.mark.parametrize(("shape", "block_size", "text"), [((2, 3, 4), 16, "must be"), ((1, 1, 2, 32), 0, "positive")])
def test_bad_arguments_fail_while_tracing(shape: tuple[int, ...], block_size: int, text: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(RuntimeError, match=text):
        library.live_blocks(torch.ones(shape, dtype=torch.bool), block_size)


def test_symbolic_lengths() -> None:
    """One graph for every row count and cache length."""
    compiled = torch.compile(lambda mask: library.live_blocks(mask, 16), fullgraph=True, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, kv_len in ((5, 83), (3, 64), (7, 129)):
            mask = causal(40, rows, kv_len)
            for found, wanted in zip(compiled(mask), library.live_blocks(mask, 16), strict=True):
                assert torch.equal(found, wanted)
                assert found.stride() == wanted.stride()


def test_keys_in_blocks() -> None:
    ids = torch.tensor([[[0, 2, -1], [1, 2, 0]], [[-1, -1, -1], [2, -1, -1]]], dtype=torch.int32)
    count = torch.tensor([[2, 2], [0, 1]], dtype=torch.int32)
    member = keys_in_blocks(ids, count, 4, 10)
    assert member.shape == (2, 2, 10)
    assert member[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9]
    assert member[0, 1].nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9]
    assert not member[1, 0].any()
    assert member[1, 1].nonzero().flatten().tolist() == [8, 9]


def test_lists_survive_the_round_trip_to_keys() -> None:
    for mask in grid().values():
        ids, count, _ = library.live_blocks(mask, 16)
        keys = keys_in_blocks(ids, count, 16, mask.shape[3])
        seen = visible(mask).flatten(1, 2).any(1)
        assert (keys[:, 0] | ~seen).all()
