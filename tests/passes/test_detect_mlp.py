"""DetectMlp on spelled-out layers: what is found, that it computes the same, and what is refused, reason by reason.

The layers of transformers' models are in tests/test_hf_matrix.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cloned, compare, trace
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from spec_compile.kernels.mlp import FUSED_ROWS
from spec_compile.passes import detect_mlp
from spec_compile.passes.base import PassContext, Rejection
from spec_compile.passes.canonicalize import Canonicalize
from spec_compile.passes.check_rewrite import RewriteDefect
from spec_compile.passes.detect_mlp import MLP, MlpFound
from spec_compile.passes.mlp_match import MlpMatch
from spec_compile.passes.nodes import known
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport

B, T, H, INNER, OUT = 2, 3, 12, 20, 8  # sizes that all differ, so that a mixed-up axis cannot pass
Act = Callable[[Tensor], Tensor]


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def bloom_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


ACTS: dict[str, tuple[Act, str]] = {
    "silu": (F.silu, "silu"),
    "x * sigmoid(x)": (lambda x: x * torch.sigmoid(x), "silu"),
    "gelu": (F.gelu, "gelu"),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
    "gelu_new": (gelu_new, "gelu_tanh"),
    "bloom": (bloom_gelu, "gelu_tanh"),
    "relu": (F.relu, "relu"),
    "relu in place": (lambda x: F.relu(x, inplace=True), "relu"),
    "square": (lambda x: F.relu(x).square(), "relu2"),
    "pow": (lambda x: torch.pow(F.relu(x), 2), "relu2"),
    "times itself": (lambda x: (h := F.relu(x)) * h, "relu2"),
    "in float32": (lambda x: F.silu(x.float()).to(x.dtype), "silu"),
}


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(*shape, generator=generator).mul(0.3).to(dtype) for shape in shapes]


GATED, PLAIN = ((INNER, H), (INNER, H), (OUT, INNER)), ((INNER, H), (OUT, INNER))
X = (B, T, H)


def gated(act: Act) -> Callable[..., Tensor]:
    return lambda x, gate, up, down: F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)


def plain(act: Act) -> Callable[..., Tensor]:
    return lambda x, up, down: F.linear(act(F.linear(x, up)), down)


class Outcome:
    """A program beside its rewritten graph, after the comparison of both."""

    def __init__(self, gm: torch.fx.GraphModule, ctx: PassContext, hits: int) -> None:
        self.gm, self.ctx, self.hits = gm, ctx, hits

    @property
    def calls(self) -> list[torch.fx.Node]:
        return self.gm.graph.find_nodes(op="call_function", target=MLP)

    @property
    def reasons(self) -> list[str]:
        return [found.reason for found in self.ctx.mlps if isinstance(found, Rejection)]

    @property
    def found(self) -> MlpMatch:
        [found] = self.ctx.mlps
        assert isinstance(found, MlpFound), found
        return found.match


@torch.no_grad()
def run(fn: Callable[..., Any], inputs: list[Tensor], atol: float = 1e-5, lowering: str = "reference", **given: Any) -> Outcome:
    """Rewrite ``fn`` and compare; inputs stay as they are, or are written alike."""
    gm = trace(fn, inputs, **given)
    ctx = PassContext(lowering=lowering)
    Canonicalize().run(gm, ctx)
    hits = detect_mlp.DetectMlp().run(gm, ctx).hits
    gm.graph.lint()
    gm.recompile()
    expected, actual = cloned(inputs), cloned(inputs)
    compare(fn(*expected), gm(*actual), atol)
    compare(expected, actual, 0.0)
    return Outcome(gm, ctx, hits)


def check_found(
    fn: Callable[..., Any], inputs: list[Tensor], activation: str = "silu", form: str = "gated", **given: Any
) -> Outcome:
    outcome = run(fn, inputs, **given)
    assert (outcome.hits, len(outcome.calls), outcome.reasons) == (1, 1, []), outcome.reasons
    assert (outcome.found.activation, outcome.found.form) == (activation, form)
    left = {str(node.target) for node in outcome.gm.graph.nodes if node.op == "call_function"}
    assert not left & {"aten.linear.default", "aten.addmm.default", "aten.mul.Tensor", "aten.silu.default", "aten.tanh.default"}
    return outcome


def check_refused(fn: Callable[..., Any], inputs: list[Tensor], reason: str) -> None:
    outcome = run(fn, inputs, atol=0.0)
    assert (outcome.hits, outcome.calls) == (0, []), "it was rewritten"
    assert any(reason in found for found in outcome.reasons), outcome.reasons


@pytest.mark.parametrize("name", ACTS)
def test_activations(name: str) -> None:
    act, wanted = ACTS[name]
    outcome = check_found(gated(act), weights(X, *GATED), wanted)
    match = outcome.found
    assert (match.hidden, match.inner, match.out, match.weight_bytes) == (H, INNER, OUT, (2 * H + OUT) * INNER * 4)
    check_found(plain(act), weights(X, *PLAIN), wanted, "plain")


def with_biases(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, b0: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.linear(x, up, b1) * F.silu(F.linear(x, gate, b0)), down, b2)


def conv1d(x: Tensor, up: Tensor, b1: Tensor, down: Tensor, b2: Tensor) -> Tensor:
    """transformers' Conv1D: GPT-2."""
    h = torch.addmm(b1, x.view(-1, H), up).view(B, T, INNER)
    return torch.addmm(b2, gelu_new(h).view(-1, INNER), down).view(B, T, OUT) + 1


def flattened(x: Tensor, up: Tensor, b1: Tensor, down: Tensor, b2: Tensor) -> Tensor:
    """OPT."""
    rows = x.reshape(-1, H)
    return F.linear(F.relu(F.linear(rows, up, b1)), down, b2).view(B, T, OUT)


def flattened_inside(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up)).flatten(0, 1), down)


def matmuls(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def test_biases_and_spellings() -> None:
    outcome = check_found(with_biases, weights(X, *GATED, (INNER,), (INNER,), (OUT,)))
    assert [arg is not None for arg in outcome.calls[0].args[4:7]] == [True] * 3
    conv = [(H, INNER), (INNER,), (INNER, OUT), (OUT,)]
    check = run(conv1d, weights(X, *conv))
    assert (check.hits, check.found.activation, check.found.form) == (1, "gelu_tanh", "plain")
    check_found(flattened, weights(X, (INNER, H), (INNER,), (OUT, INNER), (OUT,)), "relu", "plain")
    check_found(flattened_inside, weights(X, *PLAIN), "relu", "plain")
    check_found(matmuls, weights(X, (H, INNER), (H, INNER), (INNER, OUT)))


def chunked(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Phi-3, GLM-4."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(up * F.silu(gate), down)


def chunked_last(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    up, gate = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(up * F.silu(gate), down)


def sliced(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    h = F.linear(x, gate_up, bias)
    return F.linear(F.gelu(h[..., :INNER]) * h[..., INNER:], down)


FUSED = ((2 * INNER, H), (OUT, INNER))


def test_gate_and_up_in_one_weight() -> None:
    """The branch that the activation is taken of is the gate, whichever half it is."""
    for fn, halves in ((chunked, ("first", "last")), (chunked_last, ("last", "first"))):
        outcome = check_found(fn, weights(X, *FUSED), form="fused")
        assert (outcome.found.gate_half, outcome.found.up_half) == halves
    check_found(sliced, weights(X, (2 * INNER, H), (2 * INNER,), (OUT, INNER)), "gelu", "fused")


def test_several_layers_and_a_dynamic_number_of_rows() -> None:
    def fn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(2):
            x = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return x

    inputs = weights(X, (INNER, H), (INNER, H), (H, INNER))
    for dynamic in ((), ((0, 1),)):
        outcome = run(fn, inputs, dynamic=dynamic)
        assert (outcome.hits, len(outcome.calls)) == (2, 2)
        assert outcome.calls[1].args[0] is outcome.calls[0]


def test_low_precision_and_layers_without_activations() -> None:
    outcome = run(gated(F.silu), weights(X, *GATED, dtype=torch.bfloat16), atol=2e-2)
    assert outcome.hits == 1
    outcome = run(lambda x, a, b: F.linear(F.linear(x, a), b), weights(X, *PLAIN), atol=0.0)
    assert (outcome.hits, outcome.ctx.mlps) == (0, [])


def test_on_cpu_linear_calls_stay_bit_for_bit() -> None:
    outcome = run(gated(F.silu), weights(X, *GATED), atol=0.0, lowering="auto")
    assert (outcome.hits, outcome.calls) == (0, [])
    [found] = outcome.ctx.mlps
    assert isinstance(found, MlpFound) and "on CPU" in found.kept


def gate_used_outside(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    g = F.linear(x, gate)
    return F.linear(F.silu(g) * F.linear(x, up), down), g.sum()


def inner_used_outside(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    h = F.silu(F.linear(x, gate)) * F.linear(x, up)
    return F.linear(h, down), h


def half_used_outside(x: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(up * F.silu(gate), down), up


def interleaved(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    h = F.linear(x, gate_up)
    return F.linear(F.silu(h[..., ::2]) * h[..., 1::2], down)


def one_half_only(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate_up).chunk(2, dim=-1)[0]), down)


def written_between(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = F.linear(x, gate)
    x.mul_(2)
    return F.linear(F.silu(g) * F.linear(x, up), down)


def weight_written(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = F.silu(F.linear(x, gate)) * F.linear(x, up)
    gate.mul_(2)
    return F.linear(h, down)


def two_inputs(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x + 1, up), down)


def other_half(x: Tensor, gate_up: Tensor, other: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate_up)[..., :INNER]) * F.linear(x, other)[..., INNER:], down)


def lora(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate) + F.linear(F.linear(x, a), b)) * F.linear(x, up), down)


def reordered(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up)).transpose(0, 1), down)


def outer_product(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every row of one branch with every row of the other: views and the last dimension alone do not show it."""
    return F.linear(F.silu(F.linear(x, gate)).reshape(B, T, 1, INNER) * F.linear(x, up).reshape(B, 1, T, INNER), down)


def broadcast_rows(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same with a result of the layer's own rank, over one sequence."""
    acted = F.silu(F.linear(x, gate)).flatten(0, 1)
    return F.linear(acted.unsqueeze(1) * F.linear(x, up).reshape(1, B * T, INNER), down)


def regrouped(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up)).reshape(T, B, INNER), down).transpose(0, 1)


def regrouped_gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear((F.silu(F.linear(x, gate)) * F.linear(x, up)).reshape(T, B, INNER).reshape(1, B * T, INNER), down)


REFUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "activation of the product": (
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate) * F.linear(x, up)), down), GATED, "comes from mul",
    ),
    "activation on both branches": (
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.silu(F.linear(x, up)), down), GATED, "both factors",
    ),
    "gate used outside": (gate_used_outside, GATED, "also used by"),
    "inner used outside": (inner_used_outside, GATED, "also used by"),
    "half used outside": (half_used_outside, FUSED, "also used by"),
    "interleaved": (interleaved, FUSED, "even half"),
    "one half only": (one_half_only, FUSED, "only the first half"),
    "input written between": (written_between, GATED, "different inputs"),
    "weight written between": (weight_written, GATED, "writes"),
    "two inputs": (two_inputs, GATED, "different inputs"),
    "halves of two products": (other_half, ((2 * INNER, H), (2 * INNER, H), (OUT, INNER)), "of their products"),
    "gated by itself": (
        lambda x, up, down: F.linear(F.silu(h := F.linear(x, up)) * h, down), PLAIN, "one product",
    ),
    "scaled branch": (
        lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * (F.linear(x, up) * 2), down), GATED, "from mul",
    ),
    "lora": (lora, (*GATED, (4, H), (INNER, 4)), "comes from add"),
    "computed weight": (lambda x, gate, up, down: gated(F.silu)(x, gate * 2, up, down), GATED, "computed in this graph"),
    "rows of one branch with all of the other": (outer_product, GATED, "are broadcast against each other"),
    "broadcast to the rank of x": (broadcast_rows, GATED, "are broadcast against each other"),
    "rows regrouped": (regrouped, PLAIN, f"the layer turns [{B}, {T}, {H}] into [{T}, {B}, {OUT}]"),
    "rows regrouped twice": (regrouped_gated, GATED, "the layer turns"),
    "a bias for all outputs": (
        lambda x, up, down, bias: F.linear(F.relu(F.linear(x, up)), down, bias), (*PLAIN, (1,)), f"[1], not a vector of {OUT}",
    ),
    "a bias for all channels": (
        lambda x, up, bias, down: F.linear(F.relu(torch.addmm(bias, x.view(-1, H), up)), down),
        ((H, INNER), (1,), (OUT, INNER)), f"[1], not a vector of {INNER}",
    ),
    "rounded on the way": (
        lambda x, gate, up, down: F.linear((F.silu(F.linear(x, gate)).half().float()) * F.linear(x, up), down), GATED, "rounded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    fn, shapes, reason = REFUSED[name]
    check_refused(fn, weights(X, *shapes), reason)


def test_reordered_rows_are_no_layer() -> None:
    outcome = run(reordered, weights(X, *PLAIN), atol=0.0)
    assert (outcome.hits, outcome.ctx.mlps) == (0, [])


def test_a_layer_within_a_layer() -> None:
    """The last projection of one is the first of the next: one of them is rewritten, the other says why not."""
    outcome = run(
        lambda x, a, b, c: F.linear(F.relu(F.linear(F.relu(F.linear(x, a)), b)), c),
        weights(X, (INNER, H), (INNER, INNER), (OUT, INNER)),
    )
    assert outcome.hits == 1 and len(outcome.reasons) == 1
    assert "belongs to the layer before as well" in outcome.reasons[0]


@pytest.mark.parametrize("fn", [lambda x, w: F.linear(x * x.shape[1], w), lambda x, w: F.linear(torch.pow(x, x.shape[1]), w)])
def test_looking_for_layers_pins_no_size(fn: Callable[..., Tensor]) -> None:
    """Every linear call of a graph is looked at, layers or not."""
    gm = trace(fn, weights(X, (OUT, H)), ((0, 1),))
    assert detect_mlp.DetectMlp().run(gm, PassContext(lowering="reference")).hits == 0
    rows = next(iter(gm.graph.nodes)).meta["val"].shape[1]
    assert not isinstance(known(rows), int)


def on_cuda(monkeypatch: pytest.MonkeyPatch, rows: Any) -> Any:
    """A match whose operands pretend to lie on a Hopper card."""
    held = SimpleNamespace(device=torch.device("cuda"), shape=(1, rows, 4096), element_size=lambda: 2)
    monkeypatch.setattr(detect_mlp, "tensor", lambda node: held)
    monkeypatch.setattr(detect_mlp, "why_no_mlp_kernel", lambda *args: None)
    monkeypatch.setattr(detect_mlp.availability, "capability", lambda device: 90)
    side = SimpleNamespace(weight=None, transposed=False)
    return SimpleNamespace(x=None, gate=side, up=side, down=side, inner=14336, hidden=4096)


def test_exports_bound_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of the compiler is made for few rows, a program that is exported must serve all."""
    gm = trace(plain(F.relu), weights(X, *PLAIN), ((0, 1),))
    rows = next(iter(gm.graph.nodes)).meta["val"].shape[1]
    match = on_cuda(monkeypatch, rows)
    assert "serves every number of rows" in detect_mlp._why_kept(match, one_graph=True)
    bounds = rows.node.shape_env.bound_sympy(rows.node.expr)
    assert detect_mlp._why_kept(match, one_graph=False) == ""
    assert rows.node.shape_env.bound_sympy(rows.node.expr).upper == FUSED_ROWS < bounds.upper
    assert detect_mlp._why_kept(on_cuda(monkeypatch, FUSED_ROWS), one_graph=True) == ""
    assert f"{FUSED_ROWS} rows only" in detect_mlp._why_kept(on_cuda(monkeypatch, FUSED_ROWS + 1), one_graph=True)


def test_rows_that_depend_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    match = on_cuda(monkeypatch, ShapeEnv().create_unbacked_symint())
    assert detect_mlp._why_kept(match, one_graph=False) == "its rows depend on data"


def test_a_result_of_another_shape_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever matching lets through, no value changes its shape."""
    monkeypatch.setattr("spec_compile.passes.mlp_match._alike", lambda one, other: True)
    for fn, shapes in ((broadcast_rows, GATED), (regrouped, PLAIN)):
        gm = trace(fn, weights(X, *shapes))
        with pytest.raises(RewriteDefect, match=r"was torch.float32 \["):
            detect_mlp.DetectMlp().run(gm, PassContext(lowering="reference"))


def near_misses(c: float = math.sqrt(2 / math.pi), cubic: float = 0.044715, power: float = 3.0, one: float = 1.0) -> Act:
    return lambda x: 0.5 * x * (one + torch.tanh(c * (x + cubic * torch.pow(x, power))))


@pytest.mark.parametrize(
    "act",
    [
        near_misses(c=0.79), near_misses(cubic=0.0447), near_misses(power=2.0), near_misses(one=1.1),
        lambda x: x * torch.sigmoid(1.702 * x), torch.tanh, F.mish, lambda x: F.relu(x) ** 3, lambda x: x.square(),
    ],
)  # fmt: skip
def test_other_activations_are_no_layers_of_ours(act: Act) -> None:
    for fn, shapes in ((gated(act), GATED), (plain(act), PLAIN)):
        outcome = run(fn, weights(X, *shapes), atol=0.0)
        assert (outcome.hits, outcome.calls) == (0, [])


def test_the_report_names_layers_and_keeps_numbers() -> None:
    report = RewriteReport()
    gm = trace(gated(F.silu), weights(X, *GATED))
    run_passes(gm, PassContext(), report)
    [entry] = report.mlps
    assert (entry.status, entry.form, entry.hidden, entry.inner, entry.activation) == ("kept", "gated", H, INNER, "silu")
    assert "feed-forward layers found 1 of 1, rewritten 0" in str(report) and "linear calls stay: on CPU" in str(report)
    told = report.to_dict()
    assert (told["mlps_kept"], told["mlps_rewritten"], told["mlps_refused"]) == (1, 0, 0)
