"""``block_summary_`` over steps, rollbacks and foreign writes: always what a fresh computation from K gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.kernels import library
from spec_compile.kernels.block_summary import block_summary_reference
from spec_compile.kernels.selection import summarize_blocks

BLOCK, SLOTS, LAYERS = 16, 200, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class State:
    """K caches of two layers, their summaries and the count, kept by one of the two implementations."""

    def __init__(self, kernel: str, representative: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.kernel, self.representative = kernel, representative
        device = DEVICE if kernel == "triton" else "cpu"
        blocks, parts = -(-SLOTS // BLOCK), 2 if representative == "min_max" else 1
        self.keys = [torch.full((batch, 3, SLOTS, 8), torch.nan, dtype=dtype, device=device) for _ in range(LAYERS)]
        self.summaries = [torch.full((batch, 3, blocks, parts, 8), torch.nan, dtype=dtype, device=device) for _ in range(LAYERS)]
        self.valid = torch.zeros(batch, dtype=torch.int32, device=device)

    def write(self, b: int, start: int, end: int) -> None:
        for k in self.keys:
            k[b, :, start:end] = torch.randn(3, end - start, 8, generator=self.generator).to(k.dtype).to(k.device)

    def update(self, *positions: int) -> None:
        position = torch.tensor(positions, device=self.valid.device)
        operands = (self.keys, self.summaries, self.valid, position, BLOCK, self.representative)
        if self.kernel == "reference":
            block_summary_reference(*operands)
            return
        pytest.importorskip("triton")
        from spec_compile.kernels.block_summary_triton import block_summary_triton, why_not

        assert why_not(self.keys, self.summaries, BLOCK) is None
        block_summary_triton(*operands)

    def check(self, *positions: int) -> None:
        assert self.valid.tolist() == [position // BLOCK for position in positions]
        for k, summary in zip(self.keys, self.summaries):
            for b, position in enumerate(positions):
                done = position // BLOCK
                wanted = (
                    summarize_blocks(k[b : b + 1, :, : done * BLOCK].float(), BLOCK, self.representative)[0] if done else None
                )
                if wanted is not None:
                    tolerance = 1e-6 if k.dtype == torch.float32 else 1e-2
                    assert (summary[b, :, :done].float() - wanted).abs().max() < tolerance


kernels = pytest.mark.parametrize("kernel", ["reference", "triton"])
kinds = pytest.mark.parametrize("representative", ["mean", "min_max"])


@kernels
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else []))
def test_random_accepts_and_rollbacks(kernel: str, representative: str, dtype: torch.dtype) -> None:
    """Drafts are written past the position, some of them accepted; now and then committed tokens are taken back."""
    state = State(kernel, representative, dtype)
    lengths = [70, 37]
    for b, length in enumerate(lengths):
        state.write(b, 0, length)
    state.update(*lengths)
    state.check(*lengths)
    for step in range(50 if kernel == "reference" or DEVICE == "cuda" else 12):
        for b in range(2):
            accepted = int(torch.randint(0, 10, (), generator=state.generator))
            back = int(torch.randint(0, 40, (), generator=state.generator)) if step % 4 == 3 else 0
            lengths[b] = max(0, lengths[b] - back)
            state.write(b, lengths[b], min(SLOTS, lengths[b] + 9))
            lengths[b] = min(SLOTS - 9, lengths[b] + accepted)
        state.update(*lengths)
        state.check(*lengths)


@kernels
@kinds
def test_only_new_blocks_are_written(kernel: str, representative: str) -> None:
    state = State(kernel, representative)
    state.write(0, 0, 100), state.write(1, 0, 100)
    state.update(90, 33)
    for summary in state.summaries:
        assert summary[0, :, 5:].isnan().all() and summary[1, :, 2:].isnan().all()
        summary[0, :, :4] = 7.0  # not the witness, which is block 4
        summary[1, :, 0] = 7.0
    state.update(100, 50)
    for summary in state.summaries:
        assert (summary[0, :, :4] == 7.0).all() and (summary[1, :, 0] == 7.0).all()
        assert not summary[0, :, 4:6].isnan().any() and summary[0, :, 6:].isnan().all()


@kernels
@kinds
def test_a_cache_written_by_somebody_else_is_noticed(kernel: str, representative: str) -> None:
    state = State(kernel, representative)
    state.write(0, 0, 150), state.write(1, 0, 150)
    state.update(100, 120)
    state.write(1, 0, 150)
    state.update(101, 120)
    state.check(101, 120)
    # Rolled back, refilled and moved on without us.
    state.write(0, 40, 180)
    state.update(170, 121)
    state.check(170, 121)
    # Another sequence altogether, shorter than a block.
    state.write(0, 0, 10), state.write(1, 0, 200)
    state.update(10, 190)
    state.check(10, 190)


@kernels
def test_one_position_for_the_whole_batch(kernel: str) -> None:
    state = State(kernel, "mean")
    state.write(0, 0, 150), state.write(1, 0, 150)
    state.update(100)
    state.check(100, 100)


@kernels
def test_a_second_run_changes_nothing(kernel: str) -> None:
    state = State(kernel, "mean")
    state.write(0, 0, 150), state.write(1, 0, 150)
    state.update(100, 120)
    before = [summary.clone() for summary in state.summaries]
    state.update(100, 120)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(before, state.summaries))


def operands(**changes: Any) -> dict[str, Any]:
    keys = [torch.randn(2, 3, SLOTS, 8) for _ in range(2)]
    given: dict[str, Any] = {
        "keys": keys, "summaries": [summarize_blocks(k, BLOCK, "mean") for k in keys],
        "valid": torch.zeros(2, dtype=torch.int32), "position": torch.tensor([50, 70]), "block_size": BLOCK,
        "representative": "mean",
    }  # fmt: skip
    return {**given, **changes}


def test_opcheck() -> None:
    torch.library.opcheck(library.block_summary_, tuple(operands().values()), test_utils=("test_schema", "test_faketensor"))


def test_compiled() -> None:
    """The declared writes survive functionalisation."""
    given = operands(valid=torch.zeros(2, dtype=torch.int32))

    def step(keys: list[Tensor], summaries: list[Tensor], valid: Tensor, position: Tensor) -> Tensor:
        library.block_summary_(keys, summaries, valid, position, BLOCK, "mean")
        return summaries[0][:, :, 0] + valid.sum()

    for summary in given["summaries"]:
        summary.zero_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    args = [given[name] for name in ("keys", "summaries", "valid", "position")]
    found = compiled(*args)
    assert given["valid"].tolist() == [3, 4]
    assert torch.equal(found, summarize_blocks(given["keys"][0], BLOCK, "mean")[:, :, 0] + 7)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"representative": "median"}, "representative must be"),
        ({"representative": "min_max"}, "must be \\[B, Hkv, NB, 2, D\\]"),
        ({"summaries": []}, "one summary for each"),
    ],
)
def test_bad_operands_fail_while_tracing(change: dict[str, Any], text: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=text):
        library.block_summary_(**operands(**change))


def test_what_the_kernel_leaves_to_the_reference() -> None:
    pytest.importorskip("triton")
    from spec_compile.kernels.block_summary_triton import why_not

    given = operands()
    keys, summaries = given["keys"], given["summaries"]
    assert why_not(keys, summaries, BLOCK) is None
    assert "dtypes" in str(why_not([keys[0], keys[1].half()], summaries, BLOCK))
    assert "keys differ" in str(why_not([keys[0], keys[1][:, :, :100]], summaries, BLOCK))
    assert "summaries differ" in str(why_not(keys, [summaries[0], summaries[1][:, :, :3]], BLOCK))
    assert "block_size 12" in str(why_not(keys, summaries, 12))
