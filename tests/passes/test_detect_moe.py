"""DetectMoe on spelled-out layers: what is replaced, that it computes the same, and what is refused, reason by reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cloned, compare, trace
from torch import Tensor

from spec_compile.kernels import moe
from spec_compile.kernels.library import moe_experts
from spec_compile.passes import detect_moe
from spec_compile.passes.base import PassContext, Rejection
from spec_compile.passes.canonicalize import Canonicalize
from spec_compile.passes.check_rewrite import CheckRewrite
from spec_compile.passes.moe_experts_match import find_experts, match_experts
from spec_compile.passes.regions import writes_by_storage
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport

EXPERTS = torch.ops.spec_compile.moe_experts_v1.default
ROUTE = torch.ops.spec_compile.moe_route_v1.default
N, K, E, H, INNER = 5, 2, 4, 24, 8  # sizes that all differ, so that a mixed-up axis cannot pass


def gate_silu(value: Tensor) -> Tensor:
    gate, up = value.chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_oai(value: Tensor) -> Tensor:
    gate, up = value[..., ::2], value[..., 1::2]
    gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def flat_ids(choice: Tensor) -> Tensor:
    return choice.reshape(-1).clamp(0, E - 1)


@dataclass(frozen=True)
class Parts:
    """The pieces of an expert layer that a test may replace."""

    gate: Callable[[Tensor], Tensor] = gate_silu
    transposed: bool = False
    repeats: int = K
    ids: Callable[[Tensor], Tensor] = flat_ids
    down_ids: Callable[[Tensor], Tensor] | None = None
    inner: Callable[[Tensor], Tensor] = lambda value: value
    outer: Callable[[Tensor], Tensor] = lambda value: value
    weigh: Callable[[Tensor, Tensor], Tensor] = lambda value, weight: value * weight
    gather: Callable[[Tensor, Tensor], Tensor] = lambda x, order: x[order // K]
    inverse: Callable[[Tensor], Tensor] | None = None
    fill: float = 0.0
    finish: Callable[[Tensor], Tensor] = lambda value: value.view(-1, K, H).sum(dim=1)


@dataclass(frozen=True)
class Weights:
    """Stacked parameters; ``down`` is ``[E, H, I]`` unless ``transposed``."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def make_weights(bias: bool = False, transposed: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    gen = torch.Generator().manual_seed(seed)

    def rand(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=gen) * 0.25).to(dtype)

    gate_up, down = rand(E, 2 * INNER, H), rand(E, H, INNER)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return Weights(gate_up, down, *((rand(E, 2 * INNER), rand(E, H)) if bias else (None, None)))


def batched(x: Tensor, choice: Tensor, weight: Tensor, w: Weights, p: Parts) -> Tensor:
    """transformers' ``batched_mm``."""

    def linear(rows: Tensor, stack: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
        if p.transposed:
            out = torch.bmm(rows.unsqueeze(1), stack[ids]).squeeze(1)
        else:
            out = torch.bmm(stack[ids], rows.unsqueeze(-1)).squeeze(-1)
        return out if bias is None else out.add_(bias[ids])

    ids = p.ids(choice)
    value = p.inner(linear(x.repeat_interleave(p.repeats, dim=0), w.gate_up, w.gate_up_bias, ids))
    ids = ids if p.down_ids is None else p.down_ids(choice)
    value = p.outer(linear(p.gate(value), w.down, w.down_bias, ids))
    return p.finish(p.weigh(value, weight.reshape(-1).unsqueeze(-1))).to(x.dtype)


def grouped(x: Tensor, choice: Tensor, weight: Tensor, w: Weights, p: Parts) -> Tensor:
    """transformers' ``grouped_mm``: in place where that is."""
    ids, perm = torch.sort(choice.reshape(-1))
    rows, weights = p.gather(x, perm), weight.reshape(-1)[perm]
    offs = torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), dim=0, dtype=torch.int32)
    beyond = (ids >= E).unsqueeze(-1)
    ids.clamp_(max=E - 1)

    def linear(rows: Tensor, stack: Tensor, bias: Tensor | None) -> Tensor:
        stack = stack if p.transposed else stack.transpose(-2, -1)
        if rows.dtype == torch.bfloat16:
            out = torch._grouped_mm(rows, stack, offs=offs)
        else:
            out = torch.ops.transformers.grouped_mm_fallback(rows, stack, offs)
        return out if bias is None else out.add_(bias[ids])

    rows.masked_fill_(beyond, 0.0)
    value = p.gate(p.inner(linear(rows, w.gate_up, w.gate_up_bias)).masked_fill(beyond, p.fill))
    value = p.weigh(p.outer(linear(value, w.down, w.down_bias)).masked_fill(beyond, 0.0), weights.unsqueeze(-1))
    if p.inverse is None:
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0])
    else:
        inverse = p.inverse(perm)
    return p.finish(value[inverse]).to(x.dtype)


def gathered(x: Tensor, choice: Tensor, weight: Tensor, w: Weights, p: Parts) -> Tensor:
    """gpt-fast's spelling, with gate and up stacked."""
    value = p.inner(torch.einsum("ti,taoi -> tao", x, w.gate_up[choice]))
    value = p.outer(torch.einsum("tao, taio -> tai", p.gate(value), w.down[choice]))
    return torch.einsum("tai,ta -> ti", value, weight)


LAYERS = {"batched_mm": batched, "grouped_mm": grouped, "gather": gathered}


@pytest.fixture(scope="module", autouse=True)
def _fallback_operator() -> None:
    pytest.importorskip("transformers", minversion="5.17").integrations.moe  # noqa: B018  (registers the fallback operator)


def route_mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits.float(), dim=-1), K, dim=-1)
    weight /= weight.sum(dim=-1, keepdim=True)
    return choice, weight


def layer(
    form: str = "batched_mm", parts: Parts | None = None, route: Callable[[Tensor], tuple[Tensor, Tensor]] = route_mixtral,
    **shape: Any,
) -> tuple[Callable[..., Any], list[Tensor]]:  # fmt: skip
    """A program of ``(x, logits, *weights)`` and its inputs."""
    parts = parts or Parts(transposed=shape.get("transposed", False))
    w = make_weights(**shape)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(N, H, generator=gen).to(w.down.dtype)
    logits = torch.randn(N, E, generator=gen).to(w.down.dtype)

    def fn(x: Tensor, logits: Tensor, *given: Tensor) -> Any:
        choice, weight = route(logits)
        return LAYERS[form](x, choice, weight, Weights(*given), parts)

    return fn, [x, logits, *(t for t in vars(w).values() if t is not None)]


@dataclass
class Outcome:
    """A program beside its rewritten graph, after the comparison of both."""

    gm: torch.fx.GraphModule
    ctx: PassContext
    hits: int

    def count(self, target: Any) -> int:
        return len(self.gm.graph.find_nodes(op="call_function", target=target))

    @property
    def reasons(self) -> list[str]:
        return [found.reason for found in self.ctx.moes if isinstance(found, Rejection)]

    @property
    def found(self) -> Any:
        [found] = self.ctx.moes
        return found


@torch.no_grad()
def run(
    fn: Callable[..., Any], inputs: list[Tensor], atol: float = 1e-5, lowering: str = "reference", one_graph: bool = False,
    **given: Any,
) -> Outcome:  # fmt: skip
    """Rewrite ``fn`` and compare; inputs stay as they are."""
    gm = trace(fn, inputs, **given)
    ctx = PassContext(lowering=lowering, one_graph=one_graph)
    Canonicalize().run(gm, ctx)
    hits = detect_moe.DetectMoe().run(gm, ctx).hits
    CheckRewrite().run(gm, ctx)
    gm.graph.lint()
    gm.recompile()
    expected, actual = cloned(inputs), cloned(inputs)
    compare(fn(*expected), gm(*actual), atol)
    compare(expected, actual, 0.0)
    return Outcome(gm, ctx, hits)


def check_refused(fn: Callable[..., Any], inputs: list[Tensor], reason: str) -> None:
    outcome = run(fn, inputs, atol=0.0)
    assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (0, 0, 0), "it was rewritten"
    assert any(reason in found for found in outcome.reasons), outcome.reasons


def gate_of(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gate(value: Tensor) -> Tensor:
        first, second = value.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def gate_sliced(value: Tensor) -> Tensor:
    return value[..., INNER:] * F.relu(value[..., :INNER])


def gate_interleaved(value: Tensor) -> Tensor:
    return F.silu(value[..., ::2]) * value[..., 1::2]


GATES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, bool, float, float]]] = {
    "silu": (gate_silu, ("silu", False, 0.0, 0.0)),
    "gelu": (gate_of(F.gelu), ("gelu", False, 0.0, 0.0)),
    "gelu_tanh": (gate_of(lambda x: F.gelu(x, approximate="tanh")), ("gelu_tanh", False, 0.0, 0.0)),
    "relu, sliced, up first": (gate_sliced, ("relu", False, 0.0, 0.0)),
    "interleaved": (gate_interleaved, ("silu", True, 0.0, 0.0)),
    "gpt-oss": (gate_oai, ("swiglu_oai", True, 0.7, 1.702)),
}


@pytest.mark.parametrize(("form", "gate"), [*(("batched_mm", gate) for gate in GATES), *((form, "gpt-oss") for form in LAYERS)])
def test_forms_and_activations(form: str, gate: str) -> None:
    spelled, wanted = GATES[gate]
    fn, inputs = layer(form, Parts(gate=spelled))
    outcome = run(fn, inputs)
    assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1, 1), outcome.reasons
    experts = outcome.found.experts
    assert (experts.activation, experts.interleaved, experts.limit, experts.alpha) == wanted
    assert (experts.form, experts.experts, experts.top_k, experts.hidden, experts.inner) == (form, E, K, H, INNER)
    left = {str(node.target) for node in outcome.gm.graph.nodes if node.op == "call_function"}
    assert not left & {"aten.bmm.default", "aten.einsum.default", "aten.sort.default", "aten.index.Tensor", "aten.topk.default"}


@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layouts_and_biases(form: str, transposed: bool, bias: bool) -> None:
    fn, inputs = layer(form, transposed=transposed, bias=bias)
    experts = run(fn, inputs).found.experts
    assert experts.transposed == transposed
    assert (experts.gate_up_bias is not None, experts.down_bias is not None) == (bias, bias)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("batched_mm", torch.bfloat16),
        ("grouped_mm", torch.bfloat16),
        ("batched_mm", torch.float64),
        ("grouped_mm", torch.float64),
        ("gather", torch.float64),
    ],
)
def test_other_dtypes(form: str, dtype: torch.dtype) -> None:
    """In bfloat16 the operator rounds no more often than the source: its error against float64 is no larger."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weight, choice = torch.topk(F.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)), K)
        return choice, weight

    fn, inputs = layer(form, route=route, dtype=dtype)
    outcome = run(fn, inputs, atol=1e-9 if dtype == torch.float64 else 0.1)
    assert (outcome.hits, outcome.count(ROUTE)) == (1, 1), outcome.reasons
    if dtype == torch.bfloat16:
        exact = layer("batched_mm", route=route, dtype=torch.float64)[0](*[x.double() for x in inputs])
        ours, theirs = ((run_on(*inputs).double() - exact).abs().max().item() for run_on in (outcome.gm, fn))
        assert ours <= 1.2 * theirs


def test_rows_may_be_symbolic() -> None:
    for form in LAYERS:
        fn, inputs = layer(form)
        outcome = run(fn, inputs, dynamic=[(0, 0), (1, 0)])
        assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1, 1), outcome.reasons
        for rows in (1, 3, 9, 70):
            x, logits = torch.randn(rows, H), torch.randn(rows, E)
            compare(fn(x, logits, *inputs[2:]), outcome.gm(x, logits, *inputs[2:]), 1e-5)


@pytest.mark.parametrize("rows", [1, 2, K])
def test_few_rows(rows: int) -> None:
    for form in LAYERS:
        fn, inputs = layer(form)
        inputs[:2] = [x[:rows] for x in inputs[:2]]
        assert run(fn, inputs).hits == 1


class Module(torch.nn.Module):
    """A layer with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        held = make_weights()
        self.gate_up, self.down = torch.nn.Parameter(held.gate_up), torch.nn.Parameter(held.down)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return batched(x, *route_mixtral(logits), Weights(self.gate_up, self.down), Parts())


@torch.no_grad()
def test_weights_are_read_live() -> None:
    module, (_, inputs) = Module(), layer()
    outcome = run(module, inputs[:2])
    assert outcome.hits == 1
    before = outcome.gm(*inputs[:2])
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    after = outcome.gm(*inputs[:2])
    compare(module(*inputs[:2]), after, 1e-4)
    assert (after - before).abs().max() > 1e-2


@torch.no_grad()
def test_experts_that_nobody_chose_are_not_read() -> None:
    fn, inputs = layer()
    inputs[1][:, 0] = -100.0
    outcome = run(fn, inputs)
    expected = fn(*inputs)
    inputs[2][0] = float("nan")
    compare(expected, outcome.gm(*inputs), 1e-5)


def test_a_second_run_changes_nothing() -> None:
    fn, inputs = layer("grouped_mm")
    outcome = run(fn, inputs)
    code, ctx = outcome.gm.code, PassContext(lowering="reference")
    assert detect_moe.DetectMoe().run(outcome.gm, ctx).hits == 0
    outcome.gm.recompile()
    assert (outcome.gm.code, ctx.moes) == (code, [])


@torch.no_grad()
def test_the_rewritten_graph_can_be_exported() -> None:
    fn, inputs = layer("grouped_mm", bias=True)
    outcome = run(fn, inputs)
    program = torch.export.export(outcome.gm, tuple(inputs), strict=False)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(EXPERTS) == targets.count(ROUTE) == 1
    compare(fn(*inputs), program.module()(*inputs), 1e-5)
    functional = program.run_decompositions({})
    compare(fn(*inputs), functional.module()(*inputs), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
def test_exported_programs_are_matched_too(form: str) -> None:
    """Their in-place calls may have become functional."""
    fn, inputs = layer(form, bias=True)

    class Wrapped(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return fn(*given)

    program = torch.export.export(Wrapped(), tuple(inputs), strict=False)
    for graph in (program, program.run_decompositions({})):
        gm, ctx = graph.graph_module, PassContext(lowering="reference")
        Canonicalize().run(gm, ctx)
        assert detect_moe.DetectMoe().run(gm, ctx).hits == 1, ctx.moes
        assert len(gm.graph.find_nodes(op="call_function", target=ROUTE)) == 1


def test_two_layers_and_writes_to_their_own_values() -> None:
    """The pipeline knows which in-place calls went away with their regions."""
    fn, inputs = layer("grouped_mm", bias=True)
    other, _ = layer("batched_mm", bias=True)

    def both(x: Tensor, logits: Tensor, cache: Tensor, *given: Tensor) -> Any:
        cache.add_(1)
        return other(fn(x, logits, *given), logits, *given)

    given = [*inputs[:2], torch.zeros(3), *inputs[2:]]
    gm, report = trace(both, given), RewriteReport()
    run_passes(gm, PassContext(lowering="reference"), report)
    assert [(entry.status, entry.form) for entry in report.moes] == [("rewritten", "grouped_mm"), ("rewritten", "batched_mm")]
    expected, actual = cloned(given), cloned(given)
    with torch.no_grad():
        compare(both(*expected), gm(*actual), 1e-4)
    compare(expected, actual, 0.0)
    assert expected[2].sum() == 3
    text = str(report)
    assert "MoE rewritten 2 of 2" in text
    assert "1 x batched_mm, 4 experts of 24 x 8, silu, top 2 of softmax, renormalised" in text
    held = report.to_dict()
    assert (held["moes_rewritten"], held["moes_refused"]) == (2, 0)
    assert held["moes"][0]["expert_bytes"] == 3 * H * INNER * 4


def swap(gate: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def swapped(value: Tensor) -> Tensor:
        first, second = value.chunk(2, dim=-1)
        return gate(second, first)

    return swapped


def uneven(value: Tensor) -> Tensor:
    gate, up = value[..., :INNER], value[..., INNER - 1 : -1]
    return F.silu(gate) * up


def wrong_inverse(perm: Tensor) -> Tensor:
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0]).flip(0)
    return inverse


def scaled_sigmoid(value: Tensor) -> Tensor:
    return value * torch.sigmoid(value * 1.702)


MUTANTS: dict[str, tuple[str, Parts, str]] = {
    "gate and up swapped": ("batched_mm", Parts(gate=swap(lambda g, u: F.silu(g) * u)), "gate and up are swapped"),
    "odd gates": ("batched_mm", Parts(gate=lambda v: F.silu(v[..., 1::2]) * v[..., ::2]), "gate and up are swapped"),
    "gate twice": ("batched_mm", Parts(gate=lambda v: F.silu(v[..., :INNER]) * v[..., :INNER]), "first and the first half"),
    "shifted halves": ("batched_mm", Parts(gate=uneven), "none of silu, gelu, relu times up"),
    "unknown activation": ("batched_mm", Parts(gate=gate_of(torch.tanh)), "none of silu, gelu, relu times up"),
    "clamped silu": (
        "batched_mm", Parts(gate=lambda v: F.silu(v[..., :INNER].clamp(max=1.0)) * v[..., INNER:]), "none of silu, gelu, relu",
    ),
    "asymmetric clamp": (
        "batched_mm",
        Parts(gate=lambda v: (v[..., 1::2].clamp(-1, 2) + 1) * scaled_sigmoid(v[..., ::2].clamp(max=2))),
        "none of silu, gelu, relu times up",
    ),
    "no gate": ("batched_mm", Parts(gate=lambda v: F.silu(v[..., :INNER])), "not in a product of gate and up"),
    "something in between": ("batched_mm", Parts(inner=torch.tanh), "come from tanh"),
    "something behind": ("batched_mm", Parts(outer=torch.tanh), "tanh stands between the down product"),
    "weights twice": ("batched_mm", Parts(weigh=lambda v, w: v * w * w), "routing weights are applied twice"),
    "weights squared": ("batched_mm", Parts(weigh=lambda v, w: v * (w * w)), "routing weights are not [N, 2]"),
    "no weights": ("batched_mm", Parts(weigh=lambda v, w: v), "summed without a routing weight"),
    "a bias per value": ("batched_mm", Parts(outer=lambda v: v + torch.ones(H)), "not a bias picked by expert"),
    "clamped ids": ("batched_mm", Parts(ids=lambda c: c.reshape(-1).clamp(0, E - 2)), "ids are clamped to 0..2"),
    "shifted ids": ("batched_mm", Parts(ids=lambda c: (c.reshape(-1) + 1) % E), "the choices are not [N, 2]"),
    "down by other ids": ("batched_mm", Parts(down_ids=lambda c: c.flip(-1).reshape(-1)), "pick experts by different ids"),
    "max over choices": ("batched_mm", Parts(finish=lambda v: v.view(-1, K, H).amax(dim=1)), "no sum over the chosen experts"),
    "mean over choices": ("grouped_mm", Parts(finish=lambda v: v.view(-1, K, H).sum(dim=1) / K), ""),
    "x by rank": ("grouped_mm", Parts(gather=lambda x, order: x[order % N]), "not x in the order of the sorted pairs"),
    "x by another divisor": (
        "grouped_mm", Parts(gather=lambda x, order: x[order // (K + 1)]), "x is picked by perm // 3, there are 2 choices",
    ),
    "a wrong inverse": ("grouped_mm", Parts(inverse=wrong_inverse), "not the inverse of the sort"),
    "no inverse": ("grouped_mm", Parts(inverse=lambda perm: perm), "not the inverse of the sort"),
    "something behind a grouped product": ("grouped_mm", Parts(outer=lambda v: v.exp()), "exp stands between"),
    "weights twice, grouped": ("grouped_mm", Parts(weigh=lambda v, w: v * w * w), "applied twice"),
    "gathered, weights squared": ("gather", Parts(outer=lambda v: v * 2.0), "mul stands between"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, case in MUTANTS.items() if case[2]])
def test_mutants_are_refused(name: str) -> None:
    form, parts, reason = MUTANTS[name]
    check_refused(*layer(form, parts), reason)


def test_what_comes_after_the_sum_is_not_the_experts_business() -> None:
    form, parts, _ = MUTANTS["mean over choices"]
    assert run(*layer(form, parts)).hits == 1


def test_repeats_that_do_not_match_the_choices() -> None:
    fn, inputs = layer(parts=Parts(repeats=1))
    inputs[0] = inputs[0].repeat(K, 1)  # rows in another order: tiled, not repeated
    check_refused(fn, inputs, "x is repeated 1 times, there are 2 choices a row")


def test_expanded_rows_are_repeated_rows() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids = choice.reshape(-1)
        rows = x.unsqueeze(1).expand(-1, K, -1).reshape(-1, H)
        value = gate_silu(torch.bmm(gate_up[ids], rows.unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1).view(-1, K, H)
        return (value * weight.unsqueeze(-1)).sum(1)

    def tiled(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids = choice.reshape(-1)
        rows = x.unsqueeze(0).expand(K, -1, -1).reshape(-1, H)
        value = gate_silu(torch.bmm(gate_up[ids], rows.unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1).view(-1, K, H)
        return (value * weight.unsqueeze(-1)).sum(1)

    _, inputs = layer()
    assert run(fn, inputs).hits == 1
    check_refused(tiled, inputs, "not x with each row repeated once for each choice")


def test_batch_and_rows_may_be_flattened_late() -> None:
    """Choices and weights ``[B, T, K]``, flattened for the experts only."""

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        weight, choice = torch.topk(F.softmax(logits.view(1, N, E), -1), K)
        return batched(x, choice, weight, Weights(gate_up, down), Parts())

    _, inputs = layer()
    outcome = run(fn, inputs)
    assert (outcome.hits, outcome.count(ROUTE)) == (1, 0)
    assert "not the largest of [N, E] along E" in outcome.found.route.reason


def test_argsort_undoes_a_sort() -> None:
    assert run(*layer("grouped_mm", Parts(inverse=torch.argsort))).hits == 1
    check_refused(*layer("grouped_mm", Parts(inverse=lambda perm: perm.argsort(descending=True))), "not the inverse of the sort")


@pytest.mark.parametrize(("inner", "outer"), [(True, False), (False, True)])
def test_outside_users(inner: bool, outer: bool) -> None:
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    fn, inputs = layer(parts=replace(Parts(), **({"inner": keep} if inner else {}), **({"outer": keep} if outer else {})))

    def leaking(*given: Tensor) -> Any:
        kept.clear()
        return fn(*given), kept[0] + 1

    check_refused(leaking, inputs, "outside the region" if inner else "must have one reader each")


def test_an_outside_user_of_the_sort() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        orders: list[Tensor] = []

        def spy(x: Tensor, order: Tensor) -> Tensor:
            orders.append(order)
            return x[order // K]

        return grouped(x, choice, weight, Weights(gate_up, down), Parts(gather=spy)), orders[0] + 1

    check_refused(fn, layer()[1], "outside the region")


def test_softmax_without_a_top_k() -> None:
    """Every expert, weighted by the softmax: its choices come from an arange."""

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        weight = F.softmax(logits, -1)
        choice = torch.arange(E).expand(N, E)
        ids = choice.reshape(-1).clamp(0, E - 1)
        value = gate_silu(torch.bmm(gate_up[ids], x.repeat_interleave(E, 0).unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1) * weight.reshape(-1, 1)
        return value.view(-1, E, H).sum(1)

    _, inputs = layer()
    check_refused(fn, inputs, "do not come from a top-k over the experts")


def test_choices_from_an_input_are_not_proven() -> None:
    def fn(x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        return batched(x, choice, weight, Weights(gate_up, down), Parts())

    w = make_weights()
    check_refused(
        fn, [torch.randn(N, H), torch.randint(0, E, (N, K)), torch.rand(N, K), w.gate_up, w.down],
        "do not come from a top-k over the experts",
    )  # fmt: skip


def test_a_top_k_over_more_columns_than_experts() -> None:
    """Ids at or above E: clamped by this form, ignored by the operator."""
    fn, inputs = layer()
    inputs[1] = torch.randn(N, E + 2)
    check_refused(fn, inputs, "not over a last axis of at most 4 experts")


def test_dense_experts_with_weights_on_the_input() -> None:
    """Llama 4: every expert on every row, scaled before a nonlinear function."""

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        value, choice = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter_(1, choice, value).transpose(0, 1)
        rows = (x.repeat(E, 1) * torch.sigmoid(scores).reshape(-1, 1)).view(E, -1, H)
        return torch.bmm(gate_silu(torch.bmm(rows, gate_up)), down).reshape(E, -1, H).sum(0)

    check_refused(fn, layer(transposed=True)[1], "every expert runs on every row with the routing weight on its input")


def test_weights_that_are_computed() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        return batched(x, *route_mixtral(logits), Weights(gate_up * 2, down), Parts())

    check_refused(fn, layer()[1], "the experts' gate_up is computed in this graph")


def test_weights_without_a_contiguous_last_dimension() -> None:
    fn, inputs = layer()
    inputs[3] = inputs[3].transpose(1, 2).contiguous().transpose(1, 2)
    check_refused(fn, inputs, "the last dimension of the experts' down is not contiguous")


def test_values_rounded_on_the_way() -> None:
    check_refused(
        *layer(parts=Parts(outer=lambda v: v.bfloat16().float())), "a value of the experts is rounded to torch.bfloat16"
    )
    check_refused(
        *layer(parts=Parts(finish=lambda v: v.view(-1, K, H).sum(dim=1, dtype=torch.bfloat16))), "sum over experts is taken in",
    )  # fmt: skip


def test_a_sum_that_stays_in_float32() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids = flat_ids(choice)
        value = gate_silu(torch.bmm(gate_up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1)
        return (value * weight.reshape(-1, 1)).view(-1, K, H).sum(1)

    check_refused(fn, layer(dtype=torch.bfloat16)[1], "stays in torch.float32, the experts compute in torch.bfloat16")


def test_operands_written_in_between() -> None:
    """The rewritten call reads its operands where the sum was."""

    def late_x(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        def write(value: Tensor) -> Tensor:
            x.mul_(2)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    def late_weight(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        def write(value: Tensor) -> Tensor:
            gate_up.mul_(2)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    def late_ids(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)

        def write(value: Tensor) -> Tensor:
            choice.mul_(0)
            return value

        return batched(x, choice, weight, Weights(gate_up, down), Parts(ids=lambda c: c.view(-1), inner=write))

    check_refused(late_x, layer()[1], "writes the operand")
    check_refused(late_weight, layer()[1], "writes the operand")
    check_refused(late_ids, layer()[1], "before index_1 reads it")


def test_a_write_to_the_output_of_an_earlier_layer() -> None:
    """The value is the rewritten call's by then; writes to it still count."""

    def behind(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        first = batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts())
        first.add_(1)
        return batched(first, *route_mixtral(logits), Weights(gate_up, down), Parts())

    def within(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        first = batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts())

        def write(value: Tensor) -> Tensor:
            first.mul_(2)
            return value

        return batched(first, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    assert run(behind, layer()[1]).hits == 2
    outcome = run(within, layer()[1])
    assert outcome.hits == 1
    assert "writes the operand" in outcome.reasons[0]


def test_a_write_to_the_weights_of_a_rewritten_router() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        first = batched(x, choice, weight, Weights(gate_up, down), Parts())

        def write(value: Tensor) -> Tensor:
            weight.mul_(2)
            return value

        return batched(first, choice, weight, Weights(gate_up, down), Parts(weigh=lambda v, w: write(v * w)))

    outcome = run(fn, layer()[1])
    assert (outcome.hits, outcome.count(ROUTE)) == (1, 1)
    assert "writes the operand" in outcome.reasons[0]


def test_broadcast_weights() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        return gathered(x, choice, weight[:, :1], Weights(gate_up, down), Parts())

    check_refused(fn, layer()[1], "routing weights are broadcast over choices")


def test_a_write_into_an_input_is_no_part_of_a_region() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, held: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids, perm = torch.sort(choice.reshape(-1))
        offs = torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), dim=0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        value = product(gate_silu(product(x[perm // K], gate_up.mT, offs)), down.mT, offs) * weight.reshape(-1)[perm].unsqueeze(
            -1
        )
        inverse = held.zero_()
        inverse[perm] = torch.arange(perm.shape[0])
        return value[inverse].view(-1, K, H).sum(1)

    check_refused(fn, [*layer()[1], torch.zeros(N * K, dtype=torch.int64)], "not the inverse of the sort")


def cast_gate(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda v: F.silu(v[..., :INNER]) * v[..., INNER:].to(dtype)


CAST_MUTANTS: dict[str, tuple[str, Parts]] = {
    "outer": ("batched_mm", Parts(outer=lambda v: v.int().float())),
    "outer, grouped": ("grouped_mm", Parts(outer=lambda v: v.int().float())),
    "outer, gathered": ("gather", Parts(outer=lambda v: v.int().float())),
    "inner": ("batched_mm", Parts(inner=lambda v: v.int().float())),
    "inner, grouped": ("grouped_mm", Parts(inner=lambda v: v.long().float())),
    "up": ("batched_mm", Parts(gate=cast_gate(torch.int32))),
    "up to bool": ("batched_mm", Parts(gate=cast_gate(torch.bool))),
    "rows": ("grouped_mm", Parts(gather=lambda x, order: x[order // K].int().float())),
}


@pytest.mark.parametrize("name", CAST_MUTANTS)
def test_values_cast_to_integers_on_the_way(name: str) -> None:
    form, parts = CAST_MUTANTS[name]
    check_refused(*layer(form, parts), "is rounded to torch.")


def test_weights_that_are_not_floating() -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        choice, weight = route_mixtral(logits)
        return choice, (weight * 8).int()

    check_refused(*layer(route=route), "routing weights are torch.int32")


def test_a_view_regroups_the_halves() -> None:
    """Each row's gate is a whole product here, its up another one's."""

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, form: str) -> Any:
        choice, weight = route_mixtral(logits)
        ids, pairs = flat_ids(choice), N * K
        value = torch.bmm(gate_up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1).view(2 * pairs, INNER)
        first, second = value.chunk(2, -1)
        value = F.silu(first) * second
        rows = value.reshape(pairs, INNER, 1) if form == "at once" else value.reshape(pairs, INNER).unsqueeze(-1)
        return (torch.bmm(down[ids], rows).squeeze(-1) * weight.reshape(-1, 1)).view(-1, K, H).sum(1)

    check_refused(lambda *given: fn(*given, form="at once"), layer()[1], "ends in reshape, not in a product of gate and up")
    check_refused(lambda *given: fn(*given, form="in two"), layer()[1], "ends in reshape, not in a product of gate and up")

    def across(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        value = torch.einsum("ti,taoi->tao", x, gate_up[choice]).view(N, 2 * K, INNER)
        first, second = value[..., : INNER // 2], value[..., INNER // 2 :]
        value = torch.einsum("tao,taio->tai", (F.silu(first) * second).view(N, K, INNER), down[choice])
        return torch.einsum("tai,ta->ti", value, weight)

    check_refused(across, layer()[1], "ends in view, not in a product of gate and up")


def sorted_with_bias(pick: Callable[[Tensor, Tensor], Tensor], early: bool = False) -> Callable[..., Any]:
    """Grouped products whose second bias is picked by ``pick(choice, sorted ids)``, after the sort is undone or before."""

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids, perm = torch.sort(choice.reshape(-1))
        offs = torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), dim=0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        value = product(gate_silu(product(x[perm // K], gate_up.transpose(-2, -1), offs)), down.transpose(-2, -1), offs)
        picked = bias[pick(choice, ids)]
        value = (value + picked)[perm.argsort()] if early else value[perm.argsort()] + picked
        return (value * weight.reshape(-1, 1)).view(-1, K, H).sum(1)

    return fn


def test_biases_come_in_the_order_of_the_pairs() -> None:
    inputs = [*layer()[1], torch.randn(E, H)]
    for early in (False, True):
        by_sorted, by_choice = (sorted_with_bias(lambda c, s: s, early), sorted_with_bias(lambda c, s: c.reshape(-1), early))
        right, wrong = (by_sorted, by_choice) if early else (by_choice, by_sorted)
        assert run(right, inputs).hits == 1
        check_refused(wrong, inputs, "the bias is picked by other ids than the weights")


def test_views_as_another_dtype_are_no_views() -> None:
    def bits(value: Tensor) -> Tensor:
        return value.view(torch.float16).bfloat16()

    for parts in (Parts(inner=bits), Parts(outer=bits), Parts(gate=lambda v: gate_silu(bits(v)))):
        fn, inputs = layer(parts=parts, dtype=torch.bfloat16)
        check_refused(fn, inputs, "view")
    check_refused(*layer(parts=Parts(outer=lambda v: v.view(torch.int32))), "view stands between the down product")

    def bit_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
        choice, weight = route_mixtral(logits)
        return choice, weight.view(torch.int32)

    check_refused(*layer(route=bit_weights), "routing weights are torch.int32")


@pytest.mark.parametrize(
    ("of_scores", "of_weights", "proven"),
    [
        (lambda s: s.double().float(), lambda w: w.double().float(), True),
        (lambda s: s.half().float(), lambda w: w, False),
        (lambda s: s, lambda w: w.bfloat16().float(), False),
        (lambda s: s.half().view(torch.bfloat16).float(), lambda w: w, False),
        (lambda s: s, lambda w: w.half().view(torch.bfloat16).float(), False),
        (lambda s: s, lambda w: w.unsqueeze_(0).squeeze(0), False),
    ],
)
def test_attention_does_not_look_through_them_either(
    of_scores: Callable[[Tensor], Tensor], of_weights: Callable[[Tensor], Tensor], proven: bool
) -> None:
    def fn(q: Tensor, new: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        keys.index_copy_(2, at, new)
        values.index_copy_(2, at, new)
        return of_weights(of_scores(q @ keys.transpose(2, 3)).softmax(-1)) @ values

    given = [torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)]
    gm, ctx = trace(fn, [*given, torch.arange(3)]), PassContext()
    run_passes(gm, ctx, RewriteReport())
    [found] = ctx.attentions
    assert bool(found) == proven, found


@torch.no_grad()
def test_operands_whose_shape_is_changed_in_place() -> None:
    """The call that changes the shape stays where it is, whatever reads the operand."""

    def late(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        ids = flat_ids(choice)
        value = gate_silu(torch.bmm(gate_up[ids], x.repeat_interleave(K, 0).unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1).view(-1, K, H)
        return (value * weight.unsqueeze_(-1)).sum(1)

    def early(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        choice.unsqueeze_(0)
        weight.unsqueeze_(0)
        return batched(x, choice, weight, Weights(gate_up, down), Parts())

    check_refused(late, layer()[1], "the routing weights are not [N, 2]")
    check_refused(early, layer()[1], "do not come from a top-k over the experts")

    def weights_only(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        weight.unsqueeze_(0)
        return batched(x, choice, weight, Weights(gate_up, down), Parts())

    outcome = run(weights_only, layer()[1])
    assert (outcome.hits, outcome.count(ROUTE)) == (1, 0)

    def last(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        def transposed(value: Tensor) -> Tensor:
            x.unsqueeze_(0)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=transposed))

    gm, ctx = trace(last, layer()[1]), PassContext(lowering="reference")
    Canonicalize().run(gm, ctx)
    assert detect_moe.DetectMoe().run(gm, ctx).hits == 0
    assert "writes the operand x_1" in ctx.moes[0].reason


def test_writes_to_both_results_of_a_rewritten_router() -> None:
    """One is not forgotten over the other."""

    def program(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, at: int) -> Any:
        routed = route_mixtral(logits)
        first = batched(x, *routed, Weights(gate_up, down), Parts())

        def write(value: Tensor) -> Tensor:
            routed[at].mul_(0)
            return value

        out = batched(first, *routed, Weights(gate_up, down), Parts(weigh=lambda v, w: write(v * w)))
        routed[1 - at].mul_(2)
        return out, routed[1] + 0

    def choice_first(*given: Tensor) -> Any:
        return program(*given, at=0)

    def weight_first(*given: Tensor) -> Any:
        return program(*given, at=1)

    for fn in (choice_first, weight_first):
        outcome = run(fn, layer()[1])
        assert (outcome.hits, outcome.count(ROUTE)) == (1, 1)
        assert "writes the operand" in outcome.reasons[0]


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "atleast_2d": torch.atleast_2d, "atleast_3d": torch.atleast_3d, "atleast_3d of a list": lambda x: torch.atleast_3d([x])[0],
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 1)[0], "unsafe_split": lambda x: x.unsafe_split(2)[1],
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([2, 3])[1], "lift": torch.ops.aten.lift,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(torch.ones(1), x)[1],
    "select": lambda x: x[1], "view_as": lambda x: x.view_as(x), "dropout": lambda x: F.dropout(x, 0.5, False),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIASES)
def test_writes_through_aliases_of_an_operand(name: str) -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        alias = ALIASES[name](x)

        def write(value: Tensor) -> Tensor:
            alias.mul_(2)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    check_refused(fn, layer()[1], "writes the operand")


def test_a_storage_that_is_set() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        alias = torch.empty(0).set_(x)

        def write(value: Tensor) -> Tensor:
            alias.mul_(2)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    check_refused(fn, layer()[1], "gives a tensor the storage of another one")


def test_inputs_that_share_a_storage() -> None:
    def fn(x: Tensor, flat: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        def write(value: Tensor) -> Tensor:
            flat.mul_(2)
            return value

        return batched(x, *route_mixtral(logits), Weights(gate_up, down), Parts(outer=write))

    x, *others = layer()[1]
    gm, ctx = trace(fn, [x, x.view(-1), *others]), PassContext(lowering="reference")
    assert detect_moe.DetectMoe().run(gm, ctx).hits == 0
    assert "writes the operand x_1" in ctx.moes[0].reason
    assert run(fn, [x, x.flatten().clone(), *others]).hits == 1


@pytest.mark.parametrize(("behind", "hits"), [("repeat_interleave", 0), ("bmm_1", 0), ("topk", 1), ("sum_2", 1)])
def test_calls_that_may_write_what_they_are_given(behind: str, hits: int) -> None:
    """A Triton kernel of the user's: whatever it gets may change, so none may stand between the reads and the new call."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    gm, ctx = trace(*layer()), PassContext(lowering="reference")
    x = next(iter(gm.graph.nodes))
    [place] = [node for node in gm.graph.nodes if node.name == behind]
    with gm.graph.inserting_after(place):
        gm.graph.call_function(triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "grid": [(1, 1, 1)], "kwargs": {"out": x}})
    Canonicalize().run(gm, ctx)
    assert detect_moe.DetectMoe().run(gm, ctx).hits == hits, ctx.moes
    if not hits:
        assert "triton_kernel_wrapper_mutation may write what it is given" in ctx.moes[0].reason


@pytest.mark.parametrize("operand", ["x", "choice", "weight", "gate_up", "down"])
def test_operands_on_another_device(operand: str) -> None:
    """On fake tensors; the experts' call reads all of them on one device."""
    gm = trace(*layer())
    experts = match_experts(*find_one(gm))
    node = getattr(experts, operand)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")
    found = match_experts(*find_one(gm))
    assert isinstance(found, Rejection)
    assert "is on meta" in found.reason or "input on meta" in found.reason, found


def find_one(gm: torch.fx.GraphModule) -> tuple[Any, Any, Any]:
    [anchor], products = find_experts(gm.graph)
    return anchor, products, writes_by_storage(gm.graph)


def test_a_batched_product_by_an_input_is_not_taken_for_experts() -> None:
    """Attention over caches ``[B, S, D]``, and a product by a stack of weights, are no MoE layers."""

    def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(torch.bmm(q, keys.transpose(1, 2)) + mask, -1) @ values

    def activated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x.transpose(0, 1), w)), v)

    given = [torch.randn(3, 4, 6), torch.randn(3, 7, 6), torch.randn(3, 7, 6), torch.randn(4, 7)]
    assert run(attention, given).ctx.moes == []
    assert run(activated, [torch.randn(4, 3, 6), torch.randn(3, 6, 5), torch.randn(3, 5, 6)]).ctx.moes == []


@pytest.mark.parametrize("form", LAYERS)
@pytest.mark.parametrize("act", [lambda v: F.relu(v).square(), F.mish, lambda v: F.softplus(v) ** 2, F.hardswish])
def test_experts_without_a_gate_are_one_layer(form: str, act: Callable[[Tensor], Tensor]) -> None:
    """As Nemotron-H has them, with ``relu(x) ** 2``."""
    fn, inputs = layer(form, Parts(gate=act))
    inputs[2] = inputs[2][:, :INNER].contiguous()
    outcome = run(fn, inputs)
    [reason] = outcome.reasons
    assert "not in a product of gate and up" in reason, reason


def test_layers_of_one_choice_without_a_sum_are_two_layers() -> None:
    """Nothing but a residual stands between them."""

    def one(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weight, choice = torch.topk(F.softmax(logits, -1), 1)
        value = gate_silu(torch.einsum("ti,taoi->tao", x, gate_up[choice]))
        return torch.einsum("tao,taio->tai", value, down[choice]).squeeze(1) * weight

    def both(x: Tensor, logits: Tensor, other: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        x = x + one(x, logits, gate_up, down)
        return x + one(x, other, gate_up, down)

    x, logits, *weights = layer()[1]
    outcome = run(both, [x, logits, logits.flip(-1), *weights])
    first, second = outcome.reasons
    assert "must have one reader each" in first
    assert second.startswith("no sum over the chosen experts")


# Gate and up over stacks of their own


@dataclass(frozen=True)
class Apart:
    """The pieces of a layer of three stacks that a test may replace."""

    gate: Callable[[Tensor, Tensor], Tensor] = lambda gate, up: F.silu(gate) * up
    up: Callable[[Tensor], Tensor] = lambda value: value
    up_x: Callable[[Tensor], Tensor] = lambda x: x
    up_choice: Callable[[Tensor], Tensor] | None = None
    transposed: bool = False


Given = tuple[Tensor, Tensor, Tensor]


def gathered_apart(x: Tensor, choice: Tensor, weight: Tensor, w: Given, p: Apart) -> Tensor:
    """gpt-fast's mixture."""
    first, last = ("ti,taio->tao", "tao,taoi->tai") if p.transposed else ("ti,taoi -> tao", "tao, taio -> tai")
    gate = torch.einsum(first, x, w[0][choice])
    up = p.up(torch.einsum(first, p.up_x(x), w[2][p.up_choice(choice) if p.up_choice else choice]))
    return torch.einsum("tai,ta -> ti", torch.einsum(last, p.gate(gate, up), w[1][choice]), weight)


def batched_apart(x: Tensor, choice: Tensor, weight: Tensor, w: Given, p: Apart) -> Tensor:
    def product(rows: Tensor, stack: Tensor, choice: Tensor) -> Tensor:
        picked = stack[choice.reshape(-1)]
        if p.transposed:
            return torch.bmm(rows.unsqueeze(1), picked).squeeze(1)
        return torch.bmm(picked, rows.unsqueeze(-1)).squeeze(-1)

    gate = product(x.repeat_interleave(K, 0), w[0], choice)
    up = p.up(product(p.up_x(x).repeat_interleave(K, 0), w[2], p.up_choice(choice) if p.up_choice else choice))
    return (product(p.gate(gate, up), w[1], choice) * weight.reshape(-1, 1)).view(-1, K, H).sum(1)


def grouped_apart(x: Tensor, choice: Tensor, weight: Tensor, w: Given, p: Apart) -> Tensor:
    def ordered(choice: Tensor) -> tuple[Tensor, Tensor]:
        ids, perm = torch.sort(choice.reshape(-1))
        return torch.cumsum(torch.histc(ids.float(), bins=E, min=0, max=E - 1), dim=0, dtype=torch.int32), perm

    def product(rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows, stack if p.transposed else stack.transpose(-2, -1), offs)

    offs, perm = ordered(choice)
    up_offs = ordered(p.up_choice(choice))[0] if p.up_choice else offs
    value = p.gate(product(x[perm // K], w[0], offs), p.up(product(p.up_x(x)[perm // K], w[2], up_offs)))
    value = product(value, w[1], offs) * weight.reshape(-1)[perm].unsqueeze(-1)
    return value[perm.argsort()].view(-1, K, H).sum(1)


APART = {"batched_mm": batched_apart, "grouped_mm": grouped_apart, "gather": gathered_apart}


def apart(form: str, parts: Apart | None = None, **shape: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """A program of ``(x, logits, w1, w2, w3)``, gate, down and up, and its inputs."""
    parts = parts or Apart()
    w = make_weights(transposed=parts.transposed, **shape)
    gate, up = (half.contiguous() for half in w.gate_up.chunk(2, 2 if parts.transposed else 1))

    def fn(x: Tensor, logits: Tensor, *given: Tensor) -> Any:
        assert len(given) == 3
        return APART[form](x, *route_mixtral(logits), given, parts)

    return fn, [*layer(**shape)[1][:2], gate, w.down, up]


@pytest.mark.parametrize("form", APART)
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_of_two_stacks(form: str, transposed: bool) -> None:
    outcome = run(*apart(form, Apart(transposed=transposed)))
    assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1, 1), outcome.reasons
    found = outcome.found.experts
    assert (found.form, found.experts, found.top_k, found.hidden, found.inner) == (form, E, K, H, INNER)
    assert (found.transposed, found.interleaved, found.activation) == (transposed, False, "silu")
    inputs = outcome.gm.graph.find_nodes(op="placeholder")
    assert [found.gate_up, found.down, found.up] == inputs[2:]
    left = {str(node.target) for node in outcome.gm.graph.nodes if node.op == "call_function"}
    # No copy of a weight, above all.
    assert not left & {"aten.cat.default", "aten.bmm.default", "aten.einsum.default", "aten.sort.default", "aten.index.Tensor"}


@pytest.mark.parametrize("form", APART)
def test_the_activation_says_which_stack_is_the_gate(form: str) -> None:
    for gate in (lambda g, u: g * F.gelu(u), lambda g, u: F.gelu(u) * g):
        outcome = run(*apart(form, Apart(gate=gate)))
        inputs, found = outcome.gm.graph.find_nodes(op="placeholder"), outcome.found.experts
        assert [found.gate_up, found.down, found.up] == [inputs[4], inputs[3], inputs[2]]
        assert found.activation == "gelu"
    clamped = Apart(gate=lambda g, u: (u.clamp(-0.7, 0.7) + 1) * scaled_sigmoid(g.clamp(max=0.7)))
    found = run(*apart(form, clamped)).found.experts
    assert (found.activation, found.limit, found.alpha) == ("swiglu_oai", 0.7, 1.702)


@pytest.mark.parametrize("form", APART)
def test_rows_of_two_stacks_may_be_few_or_symbolic(form: str) -> None:
    fn, inputs = apart(form)
    outcome = run(fn, inputs, dynamic=[(0, 0), (1, 0)])
    assert outcome.hits == 1, outcome.reasons
    for rows in (1, 3, 70):
        x, logits = torch.randn(rows, H), torch.randn(rows, E)
        compare(fn(x, logits, *inputs[2:]), outcome.gm(x, logits, *inputs[2:]), 1e-5)
    for rows in (1, K):
        assert run(fn, [*(x[:rows] for x in inputs[:2]), *inputs[2:]]).hits == 1


class GptFast(torch.nn.Module):
    """What gpt-fast's MOEFeedForward computes, router included, for one block of rows ``[B, T, H]``."""

    def __init__(self) -> None:
        super().__init__()
        held = make_weights()
        self.router = torch.nn.Linear(H, E, bias=False)
        self.w1, self.w3 = (torch.nn.Parameter(half.clone()) for half in held.gate_up.chunk(2, 1))
        self.w2 = torch.nn.Parameter(held.down)

    def forward(self, block: Tensor) -> Tensor:
        x = block.view(-1, H)
        weight, choice = torch.topk(F.softmax(self.router(x), dim=-1), K, dim=-1)
        weight /= weight.sum(dim=-1, keepdim=True)
        return gathered_apart(x, choice, weight, (self.w1, self.w2, self.w3), Apart()).view(block.shape)


@torch.no_grad()
def test_the_mixture_of_gpt_fast() -> None:
    module = GptFast()
    block = torch.randn(1, N, H)
    outcome = run(module, [block])
    assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1, 1), outcome.reasons
    before = outcome.gm(block)
    module.w3.mul_(2)
    compare(module(block), outcome.gm(block), 1e-4)
    assert (outcome.gm(block) - before).abs().max() > 1e-2
    program = torch.export.export(outcome.gm, (block,), strict=False)
    compare(module(block), program.module()(block), 1e-4)
    ctx = PassContext(lowering="reference")
    assert detect_moe.DetectMoe().run(outcome.gm, ctx).hits == 0 and ctx.moes == []


@torch.no_grad()
def test_stacks_of_experts_that_nobody_chose_are_not_read() -> None:
    fn, inputs = apart("gather")
    inputs[1][:, 0] = -100.0
    outcome = run(fn, inputs)
    expected = fn(*inputs)
    for weight in inputs[2:]:
        weight[0] = float("nan")
    compare(expected, outcome.gm(*inputs), 1e-5)


def test_a_marker_with_two_stacks() -> None:
    def fn(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        return moe_experts(x, choice, weight, w1, w2, None, None, "silu", False, False, up=w3)

    outcome = run(fn, apart("gather")[1])
    assert (outcome.hits, outcome.count(EXPERTS)) == (1, 1)
    assert outcome.found.experts.up is outcome.gm.graph.find_nodes(op="placeholder")[4]


def other_router(choice: Tensor) -> Tensor:
    return torch.topk(choice.float() @ torch.ones(K, E) + torch.arange(E), K)[1]


APART_MUTANTS: dict[str, tuple[Apart, str]] = {
    "up of other experts": (Apart(up_choice=lambda c: (c + 1) % E), "products of one expert"),
    "up of another router": (Apart(up_choice=other_router), "products of one expert"),
    "up of another input": (Apart(up_x=lambda x: x * 2), "have different inputs"),
    "something behind up": (Apart(up=torch.tanh), "none of silu, gelu, relu times up"),
    "up rounded": (Apart(up=lambda v: v.half().float()), "is rounded to torch.float16"),
    "up as integers": (Apart(up=lambda v: v.int().float()), "is rounded to torch."),
    "gate alone": (Apart(gate=lambda g, u: F.silu(g) * g), "gate and up are one value"),
    "both activated": (Apart(gate=lambda g, u: F.silu(g) * F.silu(u)), "none of silu, gelu, relu times up"),
    "neither activated": (Apart(gate=lambda g, u: g * u), "none of silu, gelu, relu times up"),
    "gate plus up": (Apart(gate=lambda g, u: F.silu(g) + u), "not in a product of gate and up"),
    "a constant bias": (Apart(up=lambda v: v + torch.ones(INNER)), "not a bias picked by expert"),
}


@pytest.mark.parametrize("form", APART)
@pytest.mark.parametrize("name", APART_MUTANTS)
def test_mutants_of_two_stacks_are_refused(name: str, form: str) -> None:
    parts, reason = APART_MUTANTS[name]
    check_refused(*apart(form, parts), reason)


def test_parts_of_two_products() -> None:
    """Half of each, or half of one and the whole of another."""
    for gate, reason in (
        (lambda g, u: F.silu(g[..., : INNER // 2]) * u[..., INNER // 2 :], "of one the first, of the other the last"),
        (lambda g, u: F.silu(g[..., : INNER // 2]) * u, "of one the first, of the other the whole"),
        (lambda g, u: F.silu(g) * u[..., INNER // 2 :], "of one the whole, of the other the last"),
    ):
        fn, inputs = apart("gather", Apart(gate=gate))
        inputs[3] = inputs[3][..., : INNER // 2].contiguous()
        if "last" not in reason:
            inputs[4] = inputs[4][:, : INNER // 2].contiguous()
        if "first" not in reason:
            inputs[2] = inputs[2][:, : INNER // 2].contiguous()
        check_refused(fn, inputs, reason)


def test_biases_of_two_stacks() -> None:
    def fn(x: Tensor, logits: Tensor, *given: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        parts = Apart(up=lambda v: v + given[3][choice.reshape(-1)])
        return batched_apart(x, choice, weight, given[:3], parts)

    check_refused(fn, [*apart("batched_mm")[1], torch.randn(E, INNER)], "gate and up are two products with biases: stack")


def test_two_stacks_of_other_sizes() -> None:
    fn, inputs = apart("gather")
    check_refused(fn, [*inputs[:4], inputs[4][:, :1].contiguous()], "gate and up are two values of [5, 2, 8] and [5, 2, 1]")
    check_refused(fn, [*inputs[:4], torch.randn(E + 1, INNER, H)], "expert weights [5, 8, 24] and [4, 24, 8] do not fit")


def test_one_of_two_stacks_transposed() -> None:
    def fn(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        up = torch.einsum("ti,taio->tao", x, w3[choice])
        return gathered_apart(x, choice, weight, (w1, w2, w1), Apart(up=lambda v: up))

    inputs = apart("gather")[1]
    inputs[4] = inputs[4].transpose(1, 2).contiguous()
    check_refused(fn, inputs, "one of the expert weights is transposed, another is not")


def test_two_stacks_in_different_spellings() -> None:
    def fn(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Any:
        choice, weight = route_mixtral(logits)
        rows = x.repeat_interleave(K, 0).unsqueeze(-1)
        up = torch.bmm(w3[choice.reshape(-1)], rows).squeeze(-1).view(-1, K, INNER)
        return gathered_apart(x, choice, weight, (w1, w2, w1), Apart(up=lambda v: up))

    check_refused(fn, apart("gather")[1], "the first product is batched_mm, the down product gather")


@pytest.mark.parametrize("form", APART)
def test_outside_users_of_two_stacks(form: str) -> None:
    kept: list[Tensor] = []

    def keep(gate: Tensor, up: Tensor) -> Tensor:
        kept[:] = [gate, up]
        return F.silu(gate) * up

    fn, inputs = apart(form, Apart(gate=keep))
    check_refused(lambda *given: (fn(*given), kept[0] + 1), inputs, "outside the region")
    check_refused(lambda *given: (fn(*given), kept[1] + 1), inputs, "outside the region")


def test_weights_of_two_stacks() -> None:
    fn, inputs = apart("gather")
    check_refused(lambda *given: fn(*given[:4], given[4] * 2), inputs, "the experts' up is computed in this graph")
    check_refused(lambda x, logits, w1, *given: fn(x, logits, w1 * 2, *given), inputs, "the experts' gate is computed")
    strided = inputs[4].transpose(1, 2).contiguous().transpose(1, 2)
    check_refused(fn, [*inputs[:4], strided], "the last dimension of the experts' up is not contiguous")


@pytest.mark.parametrize("at", [0, 2, 4])
def test_writes_between_two_products(at: int) -> None:
    def fn(*given: Tensor) -> Any:
        def write(value: Tensor) -> Tensor:
            given[at].mul_(2)
            return value

        return apart("gather", Apart(up=write))[0](*given)

    check_refused(fn, apart("gather")[1], "writes the operand")


@pytest.mark.parametrize("operand", ["gate_up", "up"])
def test_two_stacks_on_two_devices(operand: str) -> None:
    gm = trace(*apart("gather"))
    node = getattr(match_experts(*find_one(gm)), operand)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")
    found = match_experts(*find_one(gm))
    assert isinstance(found, Rejection)
    assert "is on meta" in found.reason, found


def test_two_stacks_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_moe, "_on_gpu", lambda x: True)
    monkeypatch.setattr(moe, "_why_no_kernel", lambda x: None)
    fn, inputs = apart("gather")
    assert run(fn, inputs, lowering="auto").hits == 1
    inputs[4] = torch.stack([inputs[4]] * 2, 1)[:, 1]
    assert "different strides, (192, 24, 1) and (384, 24, 1)" in run(fn, inputs, lowering="auto").reasons[0]
    assert run(fn, inputs).hits == 1


# Routers


def route_olmoe(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits, dim=1, dtype=torch.float32), K, dim=-1)
    return choice, weight


def route_gpt_oss(logits: Tensor) -> tuple[Tensor, Tensor]:
    value, choice = torch.topk(logits, K, dim=-1)
    return choice, F.softmax(value, dim=1, dtype=value.dtype)


def route_deepseek(
    bias: Tensor, groups: int = 1, kept: int = 1, renormalise: bool = True, fill: float = float("-inf"), across: bool = False
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        contest = scores + bias
        sums = contest.view(-1, groups, E // groups).topk(2, dim=-1)[0].sum(dim=-1)
        chosen = torch.topk(sums, k=kept, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(sums).scatter_(1, chosen, 1)
        spread = (
            mask.unsqueeze(1).expand(-1, E // groups, groups) if across else mask.unsqueeze(-1).expand(-1, groups, E // groups)
        )
        contest = contest.masked_fill(~spread.reshape(-1, E).bool(), fill)
        choice = torch.topk(contest, k=K, dim=-1, sorted=False)[1]
        weight = scores.gather(1, choice)
        if renormalise:
            weight /= weight.sum(dim=-1, keepdim=True) + 1e-20
        return choice, weight * 2.5

    return route


BIAS = torch.tensor([0.3, -0.2, 0.1, 0.25])
ROUTERS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "mixtral": (route_mixtral, "top 2 of softmax, renormalised"),
    "olmoe": (route_olmoe, "top 2 of softmax"),
    "gpt-oss": (route_gpt_oss, "softmax of the top 2"),
    "deepseek": (route_deepseek(BIAS), "top 2 of sigmoid, bias for the choice, renormalised, times 2.5"),
    "deepseek, groups": (
        route_deepseek(BIAS, 2, 1, False), "top 2 of sigmoid, bias for the choice, 1 of 2 groups, times 2.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
def test_routers(name: str, form: str) -> None:
    route, words = ROUTERS[name]
    fn, inputs = layer(form, route=route)
    outcome = run(fn, inputs)
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1), outcome.found.route
    assert outcome.found.route.words() == words
    assert outcome.count(torch.ops.aten.topk.default) == 0


@torch.no_grad()
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights_of_routers(name: str) -> None:
    """Both are used outside as well; every row of a larger batch agrees."""
    route, _ = ROUTERS[name]

    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, weight = route(logits)
        order = choice.argsort(dim=-1)  # deepseek asks for no order
        return (
            batched(x, choice, weight, Weights(gate_up, down), Parts()), choice.gather(1, order), weight.gather(1, order),
        )  # fmt: skip

    _, inputs = layer()
    rows = 200
    inputs[:2] = [torch.randn(rows, H), torch.randn(rows, E)]
    outcome = run(fn, inputs)
    assert outcome.count(ROUTE) == 1, outcome.found.route


@torch.no_grad()
def test_weights_come_from_unbiased_scores() -> None:
    """Sigmoids near 1e-8 behind biases near 12 survive."""
    fn, inputs = layer(route=route_deepseek(torch.tensor([12.0, 11.0, 12.5, 11.5])))
    inputs[1] = torch.randn(N, E) - 18
    outcome = run(fn, inputs)
    assert outcome.count(ROUTE) == 1
    wide = [x.double() for x in inputs]
    exact = layer(route=route_deepseek(torch.tensor([12.0, 11.0, 12.5, 11.5]).double()), dtype=torch.float64)[0](*wide)
    assert ((outcome.gm(*inputs).double() - exact).abs().max() / exact.abs().max()).item() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (8, 1), (128, 8)])
def test_any_number_of_experts_and_choices(experts: int, top_k: int) -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        weight, choice = torch.topk(F.softmax(logits, -1), top_k)
        weight /= weight.sum(-1, keepdim=True)
        ids = choice.reshape(-1).clamp(0, experts - 1)
        value = gate_silu(torch.bmm(gate_up[ids], x.repeat_interleave(top_k, 0).unsqueeze(-1)).squeeze(-1))
        value = torch.bmm(down[ids], value.unsqueeze(-1)).squeeze(-1) * weight.reshape(-1).unsqueeze(-1)
        return value.view(-1, top_k, H).sum(1)

    given = [torch.randn(7, H), torch.randn(7, experts), torch.randn(experts, 2 * INNER, H), torch.randn(experts, H, INNER)]
    outcome = run(fn, given, atol=1e-4)
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1)
    assert (outcome.found.experts.experts, outcome.found.experts.top_k) == (experts, top_k)


def leaky_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, -1)
    weight, choice = torch.topk(scores, K)
    return choice, weight * (1 + 0 * scores.sum())


def divided_by_more(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits, -1), K)
    return choice, weight / weight.amax(-1, keepdim=True)


def other_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    choice = torch.topk(logits, K)[1]
    return choice, F.softmax(logits * 2, -1).gather(1, choice)


def masked_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, -1)
    weight, choice = torch.topk(scores.masked_fill(logits > 1, float("-inf")), K)
    return choice, weight


def smallest(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits, -1), K, largest=False)
    return choice, weight


def tanh_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(torch.tanh(logits), K)
    return choice, weight


def scaled_bias(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = torch.topk(scores + scores * 0.5, K)[1]
    return choice, scores.gather(1, choice)


def floored(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits, -1), K)
    return choice, torch.div(weight, 0.5, rounding_mode="floor")


def grouped_by(**how: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """DeepSeek's groups with a dtype of the sums or a reduction of the scatter."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        contest = scores + BIAS
        sums = contest.view(-1, 2, E // 2).topk(2, -1)[0].sum(-1, dtype=how.get("dtype"))
        chosen = torch.topk(sums, 1, -1)[1]
        mask = torch.zeros_like(sums)
        mask = mask.scatter_(1, chosen, 1, reduce=how["reduce"]) if "reduce" in how else mask.scatter_(1, chosen, 1)
        mask = mask.unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E).bool()
        choice = torch.topk(contest.masked_fill(~mask, float("-inf")), K)[1]
        return choice, scores.gather(1, choice)

    return route


def topk_first_in(dtype: torch.dtype) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        value, choice = torch.topk(logits, K)
        return choice, F.softmax(value, -1, dtype=dtype).float()

    return route


KEPT: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "weights of another router": (leaky_scores, "routing weights come from aten.mul"),
    "another normalisation": (divided_by_more, "divided by something other than their sum"),
    "a choice by other scores": (other_scores, "over other scores than those that the weights come from"),
    "masked scores": (masked_scores, "masked by something other than the choice of groups"),
    "the smallest": (smallest, "not the largest of [N, E]"),
    "an unknown score": (tanh_scores, "scores come from aten.tanh"),
    "a bias that is none": (scaled_bias, "not one bias for each expert"),
    "groups filled with zeros": (route_deepseek(BIAS, 2, 1, fill=0.0), "experts of other groups count as 0.0"),
    "a floored quotient": (floored, "divided by something other than their sum"),
    "groups summed in bfloat16": (grouped_by(dtype=torch.bfloat16), "a group's score is summed with dtype=torch.bfloat16"),
    "groups multiplied": (grouped_by(reduce="multiply"), "not zeros with ones at the chosen groups"),
    "top-k first in float64": (topk_first_in(torch.float64), "scores are computed in torch.float64"),
    "top-k first in bfloat16": (topk_first_in(torch.bfloat16), "the softmax over the chosen experts is taken in torch.bfloat16"),
    "tiled groups": (route_deepseek(BIAS, 2, 1, across=True), "not spread over the experts of each group"),
}


@pytest.mark.parametrize("name", KEPT)
def test_unproven_routers_stay_in_front_of_rewritten_experts(name: str) -> None:
    route, reason = KEPT[name]
    outcome = run(*layer(route=route))
    assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 1, 0)
    assert reason in outcome.found.route.reason


def test_a_router_whose_scores_are_an_output() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        scores = F.softmax(logits, -1)
        weight, choice = torch.topk(scores, K)
        return batched(x, choice, weight, Weights(gate_up, down), Parts()), scores

    outcome = run(fn, layer()[1])
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 0)
    assert "outside the region" in outcome.found.route.reason


def test_a_choice_from_another_router_than_the_weights() -> None:
    def fn(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Any:
        choice, _ = route_olmoe(logits.flip(-1))
        _, weight = route_mixtral(logits)
        return batched(x, choice, weight, Weights(gate_up, down), Parts())

    outcome = run(fn, layer()[1])
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 0)
    assert "not from the scores of the chosen experts" in outcome.found.route.reason


def test_scores_in_bfloat16_stay_as_traced() -> None:
    """Rounded scores tie where float32 ones do not."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weight, choice = torch.topk(F.softmax(logits, -1), K)
        return choice, weight

    outcome = run(*layer(route=route, dtype=torch.bfloat16), atol=0.1)
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 0)
    assert "scores are computed in torch.bfloat16" in outcome.found.route.reason


def test_on_cpu_a_proven_router_keeps_its_top_k() -> None:
    """All experts tie here, and PyTorch's top-k does not take the first ones on CPU: the rewritten forward must not differ."""
    fn, inputs = layer()
    inputs[1].zero_()
    outcome = run(fn, inputs, lowering="auto")
    assert (outcome.count(EXPERTS), outcome.count(ROUTE)) == (1, 0)
    assert "ties" in outcome.found.kept
    assert outcome.found.route.words() == "top 2 of softmax, renormalised"


def test_layers_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the operator would then run every expert on every row; the device is pretended."""
    monkeypatch.setattr(detect_moe, "_on_gpu", lambda x: True)
    monkeypatch.setattr(moe, "_why_no_kernel", lambda x: None)
    fn, inputs = layer()
    for rows, hits in ((moe.MAX_ROWS, 1), (moe.MAX_ROWS + 1, 0)):
        inputs[:2] = torch.randn(rows, H), torch.randn(rows, E)
        outcome = run(fn, inputs, lowering="auto")
        assert (outcome.hits, outcome.count(EXPERTS), outcome.count(ROUTE)) == (hits, hits, hits)
    assert "there are more than 64 rows" in outcome.reasons[0]
    monkeypatch.setattr(moe, "_why_no_kernel", lambda x: "no Triton")
    assert "no Triton" in run(*layer(), lowering="auto").reasons[0]


def test_an_export_asks_nothing_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_moe, "_on_gpu", lambda x: True)
    monkeypatch.setattr(moe, "_why_no_kernel", lambda x: None)
    fn, inputs = layer()
    outcome = run(fn, inputs, lowering="auto", dynamic=[(0, 0), (1, 0)], one_graph=True)
    rows = next(iter(outcome.gm.graph.nodes)).meta["val"].shape[0]
    assert outcome.hits == 1 and not rows.node.shape_env.guards


def test_a_guard_keeps_symbolic_rows_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_moe, "_on_gpu", lambda x: True)
    monkeypatch.setattr(moe, "_why_no_kernel", lambda x: None)
    fn, inputs = layer()
    outcome = run(fn, inputs, lowering="auto", dynamic=[(0, 0), (1, 0)])
    assert outcome.hits == 1
    rows = next(iter(outcome.gm.graph.nodes)).meta["val"].shape[0]
    guards = [str(guard.expr) for guard in rows.node.shape_env.guards]
    assert any("64" in guard for guard in guards), guards
