"""SparsifyMoe: rules of a plan on small mixtures, what they compute, and which layers stay exact for which reason."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cloned, rewrite, trace
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.errors import PlanError
from spec_compile.kernels import library
from spec_compile.passes.base import PassContext, Rejection
from spec_compile.passes.sparsify_moe import LayerRouting, Limit, SparsifyMoe, assign_limits
from spec_compile.plan import MoePlan
from spec_compile.report import RewriteReport

LIMIT = torch.ops.spec_compile.moe_limit_v1.default
EXPERTS = torch.ops.spec_compile.moe_experts_v1.default
ROWS, E, K, H, INNER = 3, 6, 3, 8, 4


def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits.float(), -1), K, dim=-1)
    return choice, weight / weight.sum(-1, keepdim=True)


def olmoe(logits: Tensor) -> tuple[Tensor, Tensor]:
    weight, choice = torch.topk(F.softmax(logits.float(), -1), K, dim=-1)
    return choice, weight


def gpt_oss(logits: Tensor) -> tuple[Tensor, Tensor]:
    value, choice = torch.topk(logits, K, dim=-1)
    return choice, F.softmax(value, -1)


def deepseek(logits: Tensor) -> tuple[Tensor, Tensor]:
    score = logits.float().sigmoid()
    choice = torch.topk(score + torch.linspace(0.0, 0.5, E), K, dim=-1, sorted=False)[1]
    weight = score.gather(1, choice)
    return choice, weight / (weight.sum(-1, keepdim=True) + 1e-20) * 2.5


def odd(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A router of no known kind."""
    weight, choice = torch.topk(torch.tanh(logits), K, dim=-1)
    return choice, weight.abs()


Router = Callable[[Tensor], tuple[Tensor, Tensor]]


def stack(*routers: Router) -> Callable[..., Tensor]:
    """``fn(x, *[gate, gate_up, down] * layers)``: a residual mixture a router."""

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for place, router in enumerate(routers):
            gate, gate_up, down = weights[3 * place : 3 * place + 3]
            choice, weight = router(F.linear(x, gate))
            x = x + library.moe_experts(x, choice, weight, gate_up, down, None, None, "silu", False, False)
        return x

    return fn


def operands(layers: int, rows: int = ROWS) -> list[Tensor]:
    gen = torch.Generator().manual_seed(3)
    sizes = [(rows, H), *[(E, H), (E, 2 * INNER, H), (E, H, INNER)] * layers]
    return [torch.randn(*size, generator=gen) for size in sizes]


def limited(
    plan: MoePlan | None, *routers: Router, dynamic: Any = (), lowering: str = "auto"
) -> tuple[GraphModule, RewriteReport]:
    gm = trace(stack(*routers), operands(len(routers)), dynamic)
    return rewrite(gm, lowering, moe_plan=plan)


def calls(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=LIMIT)


def run(gm: GraphModule, given: list[Tensor], sparse: bool) -> Tensor:
    inputs = gm.graph.find_nodes(op="placeholder")
    gates = [torch.tensor([int(sparse)])] * (len(inputs) - len(given))
    with torch.no_grad():
        return gm(*cloned(given), *gates)


def wanted(plan: MoePlan, given: list[Tensor], renormalise: bool, *routers: Router) -> Tensor:
    """The stack with the rules applied to what each router says, and weights of new experts by the router's own rule."""
    x, scores = given[0], {mixtral: "softmax", olmoe: "softmax", gpt_oss: "softmax", deepseek: "sigmoid"}
    for place, router in enumerate(routers):
        gate, gate_up, down = given[1 + 3 * place : 4 + 3 * place]
        logits = F.linear(x, gate)
        choice, weight = router(logits)
        beta = plan.betas[place] if plan.betas else 0.0
        ids, out = library.moe_limit(
            choice, weight, logits, torch.linspace(0.0, 0.5, E) if router is deepseek else None, torch.ones(1, dtype=torch.int64),
            scores.get(router, "softmax"), E, plan.top_k or 0, plan.skip or 0, beta, plan.ratio or 0.0, plan.expert_budget or 0,
            plan.substitute, renormalise,
        )  # fmt: skip
        assert not torch.equal(ids, choice)
        x = x + library.moe_experts(x, ids, out, gate_up, down, None, None, "silu", False, False)
    return x


PLANS = [
    MoePlan(top_k=1),
    MoePlan(skip=1, betas=(0.5, 0.6)),
    MoePlan(ratio=0.9),
    MoePlan(expert_budget=2),
    MoePlan(expert_budget=3, substitute=True),
]


@pytest.mark.parametrize(("router", "renormalises"), [(mixtral, True), (olmoe, False), (gpt_oss, True), (deepseek, True)])
@pytest.mark.parametrize("plan", PLANS, ids=["top_k", "skip", "ratio", "budget", "substitute"])
def test_sparse_and_exact_steps_of_one_graph(router: Router, renormalises: bool, plan: MoePlan) -> None:
    gm, report = limited(plan, router, router)
    assert len(calls(gm)) == len(report.limited) == 2
    given = operands(2)
    exact, _ = limited(None, router, router)
    assert torch.equal(run(gm, given, False), run(exact, given, False))
    torch.testing.assert_close(run(gm, given, True), wanted(plan, given, renormalises, router, router), rtol=0.0, atol=1e-5)
    assert not torch.equal(run(gm, given, True), run(gm, given, False))


def test_experts_of_three_stacks_are_limited_as_those_of_two() -> None:
    def fn(x: Tensor, gate: Tensor, first: Tensor, down: Tensor, up: Tensor) -> Tensor:
        choice, weight = mixtral(F.linear(x, gate))
        return x + library.moe_experts(x, choice, weight, first, down, None, None, "silu", False, False, up=up)

    x, gate, gate_up, down = operands(1)
    first, up = (half.contiguous() for half in gate_up.chunk(2, 1))
    plan = MoePlan(top_k=1)
    gm, report = rewrite(trace(fn, [x, gate, first, down, up]), moe_plan=plan)
    assert len(calls(gm)) == len(report.limited) == 1
    given = [x, gate, first, down, up]
    torch.testing.assert_close(run(gm, given, True), wanted(plan, operands(1), True, mixtral), rtol=0.0, atol=1e-5)
    assert torch.equal(run(gm, given, False), fn(*given))


@pytest.mark.parametrize("router", [mixtral, deepseek])
def test_routers_that_were_rewritten(router: Router) -> None:
    plan = MoePlan(expert_budget=3, substitute=True)
    gm, _ = limited(plan, router, router, lowering="reference")
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.spec_compile.moe_route_v1.default)) == 2
    given = operands(2)
    torch.testing.assert_close(run(gm, given, True), wanted(plan, given, True, router, router), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
def test_renormalisation_on_request(renormalize: bool) -> None:
    for router in (mixtral, olmoe, odd):
        plan = MoePlan(top_k=2, renormalize=renormalize)
        gm, _ = limited(plan, router)
        given = operands(1)
        torch.testing.assert_close(run(gm, given, True), wanted(plan, given, renormalize, router), rtol=0.0, atol=1e-5)


def test_structure() -> None:
    """One added input for all layers, marked as of fixed address; thresholds by layer; experts read what the rules gave."""
    gm, report = limited(MoePlan(skip=2, betas=(0.125, 0.25, 0.5), expert_budget=4), mixtral, mixtral, mixtral)
    found = calls(gm)
    assert [node.args[9] for node in found] == [0.125, 0.25, 0.5] and {node.args[8] for node in found} == {2}
    (gate,) = {node.args[4] for node in found}
    assert isinstance(gate, Node) and gate.op == "placeholder"
    assert gate.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}
    for node, experts in zip(found, gm.graph.find_nodes(op="call_function", target=EXPERTS)):
        choice, weight = experts.args[1:3]
        assert choice.target is weight.target is operator.getitem and {choice.args, weight.args} == {(node, 0), (node, 1)}
        assert node.args[2:4] == (None, None) and node.args[10:] == (0.0, 4, False, True)
    assert {p.name: p.hits for p in report.passes}["sparsify_moe"] == 3
    assert [p.exact for p in report.passes if p.name == "sparsify_moe"] == [False]


def test_thresholds_stay_with_their_layers() -> None:
    """A layer that is not rewritten takes its threshold along."""
    gm = trace(stack(mixtral, mixtral), operands(2))
    unknown = Rejection("unknown", "x")
    ctx = PassContext(
        moe_plan=MoePlan(skip=1, betas=(0.25, 0.5, 0.75), renormalize=True),
        moes=[_Found(unknown), Rejection("its experts are a loop", "x", "layers.1"), _Found(unknown)],
        moe_calls=gm.graph.find_nodes(op="call_function", target=EXPERTS),
    )
    assert SparsifyMoe().run(gm, ctx).hits == 2
    assert [node.args[9] for node in calls(gm)] == [0.25, 0.75]
    assert ctx.moe_limits[1].note == "not rewritten: its experts are a loop"
    assert SparsifyMoe().run(gm, ctx).hits == 0 and len(calls(gm)) == 2


class _Found:
    def __init__(self, route: Any) -> None:
        self.route = route


def test_rows_stay_dynamic() -> None:
    plan = MoePlan(expert_budget=3, substitute=True)
    gm, _ = limited(plan, mixtral, dynamic=[(0, 0)])
    for rows in (2, 3, 7):
        given = operands(1, rows)
        torch.testing.assert_close(run(gm, given, True), wanted(plan, given, True, mixtral), rtol=0.0, atol=1e-5)


def test_without_a_plan_nothing_happens() -> None:
    gm, report = limited(None, mixtral)
    assert not calls(gm) and not report.limited and not report.moes[0].rule_note
    assert len(gm.graph.find_nodes(op="placeholder")) == 4


def test_the_report_names_each_layers_rule() -> None:
    plan = MoePlan(skip=2, betas=(0.25, 0.0, 0.5), exclude=(2,))
    _, report = limited(plan, mixtral, mixtral, mixtral)
    assert [entry.rule for entry in report.moes] == ["skips the lowest 2 below 0.25 of the weight, renormalised", "", ""]
    assert [entry.rule_note for entry in report.moes] == ["", "no rule takes one of its 3 of 6 experts", "excluded"]
    assert "in sparse steps 1 of 3 are limited" in str(report) and "exact (excluded)" in str(report)
    assert report.to_dict()["moes_limited"] == 1


@pytest.mark.parametrize(
    ("plan", "router", "reason"),
    [
        (MoePlan(top_k=1), odd, "whether the router renormalises is not known, set plan.moe.renormalize: "),
        (MoePlan(expert_budget=2, substitute=True, renormalize=True), odd, "plan.moe.substitute needs the router's logits: "),
        (MoePlan(expert_budget=E), mixtral, f"no rule takes one of its {K} of {E} experts"),
        (MoePlan(top_k=K), mixtral, f"no rule takes one of its {K} of {E} experts"),
        (MoePlan(top_k=1, dense_first=1), mixtral, "among the first 1 MoE layers"),
        (MoePlan(top_k=1, include=()), mixtral, "not included"),
    ],
)
def test_layers_that_stay_exact_say_why(plan: MoePlan, router: Router, reason: str) -> None:
    gm, report = limited(plan, router)
    assert not calls(gm) and reason in report.moes[0].rule_note
    given = operands(1)
    assert torch.equal(run(gm, given, True), run(limited(None, router)[0], given, False))


def test_logits_that_are_written_later_do_not_substitute() -> None:
    def fn(x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        logits = F.linear(x, gate)
        choice, weight = mixtral(logits)
        weight = weight + 0
        logits.mul_(2)
        return library.moe_experts(x, choice, weight, gate_up, down, None, None, "silu", False, False) + logits.sum()

    given = operands(1)
    gm, report = rewrite(trace(fn, given), moe_plan=MoePlan(expert_budget=2, substitute=True, renormalize=True))
    assert not calls(gm) and report.moes[0].rule_note.startswith("plan.moe.substitute needs the router's logits")


def layers(*top_k: int) -> list[LayerRouting]:
    return [LayerRouting(f"layers.{place}.mlp", 8, k, "", True) for place, k in enumerate(top_k)]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (MoePlan(top_k=1, include=(0, 3)), r"plan\.moe\.include: layer 3 does not exist, the model has MoE layers 0\.\.2"),
        (MoePlan(top_k=1, exclude=(4,)), r"plan\.moe\.exclude: layer 4 does not exist"),
        (MoePlan(skip=1, betas=(0.1, 0.2)), r"plan\.moe\.betas: 2 thresholds for 3 MoE layers: layer 2 has none"),
        (MoePlan(skip=1, betas=(0.1,) * 4), r"plan\.moe\.betas: 4 thresholds for 3 MoE layers: layer 3 does not exist"),
        (
            MoePlan(skip=2, betas=(0.1,) * 3),
            r"plan\.moe\.skip: layer 1 \(layers\.1\.mlp\) has 2 experts a row, of which at most 1",
        ),
    ],
)
def test_bad_plans_name_the_layer(plan: MoePlan, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        assign_limits(plan, layers(4, 2, 4))


def test_limits_of_layers() -> None:
    plan = MoePlan(skip=1, betas=(0.1, 0.2, 0.3), ratio=0.05, top_k=3, expert_budget=4, substitute=True, include=(1, 2))
    found = assign_limits(plan, layers(4, 2, 4))
    assert found[0] == Limit(note="not included")
    assert found[1] == Limit(0, 1, 0.2, 0.05, 4, True, True)
    assert found[2] == Limit(3, 1, 0.3, 0.05, 4, True, True)
    assert found[2].words() == (
        "top 3, skips the lowest 1 below 0.3 of the weight, skips below 0.05 of the top weight, at most 4 experts a step, "
        "others substituted, renormalised"
    )


def test_a_plan_for_a_model_without_mixtures(caplog: pytest.LogCaptureFixture) -> None:
    """As for attention: a warning, an error under strict."""
    from spec_compile import VerifyCache, compile_verify
    from spec_compile.errors import StrictError
    from spec_compile.models.zoo import build

    model = build("llama", "sdpa")
    plan = {"moe": {"skip": 1, "betas": [0.1, 0.2]}}
    with caplog.at_level(logging.WARNING, logger="spec_compile"):
        compile_verify(model, VerifyCache(model, 32), plan=plan, codegen="eager")(torch.tensor([[3, 4]]))
    assert "plan.moe: no layer is limited: no MoE layer was recognised" in caplog.text
    with pytest.raises(StrictError, match=r"plan\.moe: no layer is limited"):
        compile_verify(model, VerifyCache(model, 32), plan=plan, codegen="eager", strict=True)(torch.tensor([[3, 4]]))
