"""FuseLinears: which linear calls share a launch, and that nothing else changes. The op runs its plain form here (CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import compare, trace
from torch import Tensor

from spec_compile.kernels import linears
from spec_compile.passes import fuse_linears
from spec_compile.passes.base import PassContext

LINEARS = torch.ops.spec_compile.linears_v1.default
LINEAR = torch.ops.aten.linear.default


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_linears, "why_not", lambda *operands: None)


def weights(*columns: int, size: int = 64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, size, generator=generator) * size**-0.5 for n in columns]


def run(fn: Callable[..., Any], *inputs: Tensor, lowering: str = "auto") -> tuple[int, int, int]:
    """Hits, fused calls and linear calls left, after comparing both programs."""
    given = [x.clone() for x in inputs]
    gm = trace(fn, list(inputs))
    report = fuse_linears.FuseLinears().run(gm, PassContext(lowering=lowering))
    gm.graph.lint()
    gm.recompile()
    with torch.no_grad():
        compare(fn(*given), gm(*[x.clone() for x in inputs]), 0.0)
    for call in gm.graph.find_nodes(op="call_function", target=LINEARS):
        # AOTInductor's calls of operators fail at lists without elements.
        assert len(call.args[1]) == len(call.args[2])
    count = lambda target: len(gm.graph.find_nodes(op="call_function", target=target))  # noqa: E731
    return report.hits, count(LINEARS), count(LINEAR)


X = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))


def test_weights_of_one_input_share_a_launch() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b).relu(), F.linear(x, c) + 1

    assert run(fn, X, *weights(48, 16, 16)) == (3, 1, 0)


def test_biases_travel_along_and_are_kept_apart() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, u: Tensor, v: Tensor) -> Any:
        return F.linear(x, a, u), F.linear(x, b), F.linear(x, c, v), F.linear(x, d)

    biases = [torch.randn(n) for n in (48, 16)]
    assert run(fn, X, *weights(48, 24, 16, 8), *biases) == (4, 2, 0)


def test_more_weights_than_one_launch_takes() -> None:
    def fn(x: Tensor, *ws: Tensor) -> Any:
        return [F.linear(x, w) for w in ws]

    assert run(fn, X, *weights(*([16] * 6))) == (6, 2, 0)
    # The fifth is left alone: it would be a launch of its own either way.
    assert run(fn, X, *weights(*([300] * 5))) == (4, 1, 1)
    # Unless it is narrow, as a router is.
    assert run(fn, X, *weights(*([16] * 5))) == (5, 2, 0)


def test_different_inputs_are_not_mixed() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return F.linear(F.linear(x, a), b)

    assert run(fn, X, *weights(320), *weights(288, size=320)) == (0, 0, 2)


def test_an_input_written_in_between_is_not_shared() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        first = F.linear(x, a)
        x.mul_(2)
        return first, F.linear(x, b)

    assert run(fn, X.clone(), *weights(288, 288)) == (0, 0, 2)


def test_a_weight_that_is_written_or_computed_is_left_alone() -> None:
    def written(x: Tensor, a: Tensor, b: Tensor) -> Any:
        first = F.linear(x, a)
        b.mul_(2)
        return first, F.linear(x, b)

    def computed(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b * 2)

    assert run(written, X, *weights(288, 288)) == (0, 0, 2)
    assert run(computed, X, *weights(288, 288)) == (0, 0, 2)


@pytest.mark.parametrize(
    ("rows", "columns", "fused"),
    [
        (9, (4096,), True),
        (9, (1024,), False),
        (9, (128,), True),
        (17, (128,), True),
        (9, (1,), False),
        (33, (128,), False),
        (9, (65536,), False),
        (33, (4096,), False),
        (32, (64, 64), True),
        (64, (9000, 9000), True),
        (72, (9000, 9000), False),
        (72, (64, 64), True),
        (97, (64, 64), False),
    ],
)
def test_what_pays(rows: int, columns: tuple[int, ...], fused: bool) -> None:
    def fn(x: Tensor, *ws: Tensor) -> Any:
        return [F.linear(x, w) for w in ws]

    assert linears.pays(rows, columns, 8) == fused
    assert run(fn, torch.randn(1, rows, 8), *weights(*columns, size=8))[0] == (len(columns) if fused else 0)


@pytest.mark.parametrize("lowering", ["folded", "reference"])
def test_other_lowerings_keep_their_linears(lowering: str) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b)

    assert run(fn, X, *weights(32, 32), lowering=lowering) == (0, 0, 2)


def test_a_second_run_changes_nothing() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b)

    gm = trace(fn, [X, *weights(32, 32)])
    assert fuse_linears.FuseLinears().run(gm, PassContext()).hits == 2
    gm.recompile()
    code = gm.code
    assert "linears_v1" in code
    assert fuse_linears.FuseLinears().run(gm, PassContext()).hits == 0
    gm.recompile()
    assert gm.code == code


def test_rows_may_be_symbolic() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b)

    gm = trace(fn, [X, *weights(32, 32)], dynamic=[(0, 1)])
    assert fuse_linears.FuseLinears().run(gm, PassContext()).hits == 2
    gm.recompile()
    for rows in (9, 5, 100):
        x = torch.randn(1, rows, 64)
        given = weights(32, 32)
        for found, wanted in zip(gm(x, *given), fn(x, *given)):
            assert torch.equal(found, wanted)


def test_reasons_against_the_kernel() -> None:
    x, w = torch.zeros(1, 9, 64), torch.zeros(8, 64)
    assert "device cpu" in str(linears.why_not(x, w))
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        x, w = x.cuda().half(), w.cuda().half()
        assert linears.why_not(x, w) is None
        assert "dtypes" in str(linears.why_not(x.float(), w.float()))
        assert "no contiguous vector" in str(linears.why_not(x, w, torch.zeros(8, device="cuda")))
        assert "no contiguous vector" in str(linears.why_not(x, w, torch.zeros(16, device="cuda").half()[::2]))
        assert "contiguous multiples" in str(linears.why_not(x[..., :40], w[:, :40]))
        assert "contiguous multiples" in str(linears.why_not(x, w.t().contiguous().t()))


def test_nothing_moves_across_a_write_whatever_it_writes() -> None:
    """The input may be an alias that no schema tells of: einsum returns its operand here."""

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Any:
        same = torch.einsum("bij->bij", x)
        first = F.linear(same, a)
        x.mul_(2)
        return first, F.linear(same, b)

    assert run(fn, X.clone(), *weights(288, 288)) == (0, 0, 2)


def test_nothing_moves_into_or_out_of_an_autocast_region() -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        first = F.linear(x, a)
        torch.amp.autocast_mode._exit_autocast(torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, False, False))
        return first, F.linear(x, b), F.linear(x, c)

    gm = trace(fn, [X, *weights(288, 32, 32)])
    regions = [node for node in gm.graph.nodes if "autocast" in str(node.target)]
    assert regions, "the region left no trace"
    assert fuse_linears.FuseLinears().run(gm, PassContext()).hits == 2


def test_parameters_of_a_module_are_at_hand_when_needed() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 32), torch.nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Any:
            return self.a(x), self.b(x)

    assert run(Two(), X) == (2, 1, 0)


def test_the_op_takes_what_the_kernel_does_not() -> None:
    from spec_compile.kernels import library

    ws = weights(32, 16, 8, 8, 8)
    strided = torch.randn(64, 24).t()
    for given in (ws, [strided, *ws[:2]]):
        for found, weight in zip(library.linears(X, given, [None] * len(given)), given, strict=True):
            assert torch.equal(found, F.linear(X, weight))
    some = [None, torch.randn(16), None, torch.randn(8), None]
    for found, weight, bias in zip(library.linears(X, ws, some), ws, some, strict=True):
        assert torch.equal(found, F.linear(X, weight, bias))
    with pytest.raises(ValueError, match="zip"):
        library.linears(X, ws, some[:2])


def test_long_sums_of_many_rows_are_left_to_cublas() -> None:
    assert linears.pays(16, [256], 7168) and not linears.pays(17, [256], 7168)
    assert not linears.pays(1, [256], 8192)
