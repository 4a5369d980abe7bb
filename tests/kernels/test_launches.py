"""How many launches a sparse layer takes: each costs a step about a microsecond, whatever it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mask_cases import causal

pytest.importorskip("triton")

from spec_compile.kernels import library
from spec_compile.kernels.attention_triton import attention_triton
from spec_compile.kernels.block_summary_triton import block_summary_triton
from spec_compile.kernels.select_blocks_triton import _contest_kernel, select_blocks_triton
from spec_compile.kernels.selection import summarize_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu), "any"])
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    names: list[str] = []
    kind = type(_contest_kernel)
    run = kind.run
    monkeypatch.setattr(kind, "run", lambda self, *args, **more: (names.append(self.fn.__name__), run(self, *args, **more))[1])
    return names


def layer(slots: int = 320, rows: int = 4) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, rows, 16, generator=generator).to(DEVICE)
    k = torch.randn(1, 2, slots, 16, generator=generator).to(DEVICE)
    mask = causal(slots - rows, rows, slots).to(DEVICE)
    return q, k, mask, library.live_blocks(mask, BLOCK), torch.tensor([slots - rows], device=DEVICE)


@pytest.mark.parametrize(
    "aggregate, joint, wanted",
    [
        ("max", False, ["_score_kernel", "_contest_kernel"]),
        ("mean", False, ["_score_kernel", "_contest_kernel"]),
        ("max", True, ["_score_kernel", "streamed_contest_kernel"]),
        # A softmax needs the sums of its rows first.
        ("softmax", False, ["_row_sums_kernel", "_score_kernel", "_contest_kernel"]),
    ],
)
def test_launches_of_a_selection(aggregate: str, joint: bool, wanted: list[str], launched: list[str]) -> None:
    q, k, _, lists, position = layer()
    gate = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    summary = summarize_blocks(k, BLOCK, "mean")
    launched.clear()
    ids, count, _ = select_blocks_triton(
        q, summary, None, *lists, position, gate, BLOCK, 0.25, "all", aggregate, "own", joint, 1, 2, 64, 0.0, 0
    )
    assert launched == wanted
    assert ids.shape == (1, 2, 20) and 0 < int(count.sum()) < 40


def test_a_follower_takes_a_launch_and_its_reduction(launched: list[str]) -> None:
    q, k, mask, lists, _ = layer()
    launched.clear()
    attention_triton(q, k, k, mask, *lists, BLOCK, 0.25, 0.0, None)
    assert launched == ["_split_kernel", "_reduce_kernel"]


@pytest.mark.parametrize("anchors", [1, 5])
def test_summaries_of_all_anchors_take_two(anchors: int, launched: list[str]) -> None:
    """The first looks whether somebody else has written the cache."""
    _, k, _, _, position = layer()
    keys = [k + i for i in range(anchors)]
    summaries = [torch.zeros_like(summarize_blocks(k, BLOCK, "mean")) for _ in keys]
    valid = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launched.clear()
    block_summary_triton(keys, summaries, valid, position, BLOCK, "mean")
    assert launched == ["_summary_kernel"] * 2
    assert all(bool(summary.any()) for summary in summaries)
