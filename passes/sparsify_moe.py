"""SparsifyMoe: experts that the plan lets rows do without are taken from their choices.

Before::

    moe_experts(x, choice, weight, gate_up, down, ...)

After::

    choice, weight = moe_limit(choice, weight, logits, bias, gate, "softmax", 128, 0, 3, 0.21, 0.0, 32, True, True)
    moe_experts(x, choice, weight, gate_up, down, ...)

``gate`` is an added input: where it is 0, the call gives back what it was given and the step is exact.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from spec_compile.errors import PlanError
from spec_compile.kernels import library
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, register_pass
from spec_compile.passes.emit import Emitter
from spec_compile.passes.layer_filter import FilterPlan, require_layers, why_left_out
from spec_compile.passes.moe_route_match import RouteMatch
from spec_compile.passes.nodes import aten, layer_name, shape, tensor
from spec_compile.passes.regions import storage, writes_by_storage
from spec_compile.passes.state_inputs import sparse_switch

assert library.moe_limit is not None  # importing it registers the operators
_EXPERTS = torch.ops.spec_compile.moe_experts_v1.default
_LIMIT = torch.ops.spec_compile.moe_limit_v1.default


class LimitPlan(FilterPlan, Protocol):
    """The fields of ``spec_compile.MoePlan`` that are read here."""

    @property
    def skip(self) -> int | None: ...
    @property
    def betas(self) -> tuple[float, ...] | None: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def expert_budget(self) -> int | None: ...
    @property
    def substitute(self) -> bool: ...
    @property
    def renormalize(self) -> bool | None: ...


@dataclass(frozen=True)
class LayerRouting:
    """A MoE layer as far as the plan is concerned.

    Attributes:
        name: for messages.
        experts, top_k: E and K.
        refusal: why the layer cannot be limited, whatever the plan says.
        renormalises: whether the model's weights of a row always have one sum; None where that is not known.
        unproven: why the router's logits are not known, "" where they are.
    """

    name: str
    experts: int = 0
    top_k: int = 0
    refusal: str = ""
    renormalises: bool | None = None
    unproven: str = ""


@dataclass(frozen=True)
class Limit:
    """What the plan makes of one MoE layer: numbers as in :func:`spec_compile.kernels.library.moe_limit`, 0 where a rule is off.

    All are off where the layer stays exact, for the reason ``note``.
    """

    top_k: int = 0
    skip: int = 0
    beta: float = 0.0
    ratio: float = 0.0
    expert_budget: int = 0
    substitute: bool = False
    renormalise: bool = False
    note: str = ""

    def words(self) -> str:
        """What a report says of it, "" for an exact layer."""
        if self.note:
            return ""
        parts = [f"top {self.top_k}"] if self.top_k else []
        parts += [f"skips the lowest {self.skip} below {self.beta:.3g} of the weight"] if self.skip else []
        parts += [f"skips below {self.ratio:g} of the top weight"] if self.ratio else []
        if self.expert_budget:
            parts.append(f"at most {self.expert_budget} experts a step" + (", others substituted" if self.substitute else ""))
        return ", ".join([*parts, "renormalised" if self.renormalise else "not renormalised"])


def assign_limits(plan: LimitPlan, layers: Sequence[LayerRouting]) -> list[Limit]:
    """Rules of every MoE layer, in graph order.

    Raises:
        PlanError: the plan names a layer that the graph does not have, has not one threshold for each, or would skip all
            experts of a row.
    """
    total = len(layers)
    require_layers(plan, "moe", ("include", "exclude"), "MoE", total)
    if plan.betas is not None and len(plan.betas) != total:
        given = len(plan.betas)
        missing = f"layer {given} has none" if given < total else f"layer {total} does not exist"
        raise PlanError(f"plan.moe.betas: {given} thresholds for {total} MoE layers: {missing}")
    return [_limit(plan, index, layer) for index, layer in enumerate(layers)]


def _limit(plan: LimitPlan, index: int, layer: LayerRouting) -> Limit:
    exact = layer.refusal or why_left_out(plan, index, "MoE")
    if exact:
        return Limit(note=exact)
    if plan.skip is not None and plan.skip >= layer.top_k:
        raise PlanError(
            f"plan.moe.skip: layer {index} ({layer.name}) has {layer.top_k} experts a row, of which at most {layer.top_k - 1} "
            f"can be skipped, got {plan.skip}"
        )
    beta = plan.betas[index] if plan.betas is not None else 0.0
    budget = plan.expert_budget or 0
    limit = Limit(
        top_k=plan.top_k if plan.top_k is not None and plan.top_k < layer.top_k else 0,
        skip=(plan.skip or 0) if beta > 0 else 0, beta=beta, ratio=plan.ratio or 0.0,
        expert_budget=budget if budget < layer.experts else 0, substitute=plan.substitute and budget < layer.experts,
    )  # fmt: skip
    if not (limit.top_k or limit.skip or limit.ratio or limit.expert_budget):
        return Limit(note=f"no rule takes one of its {layer.top_k} of {layer.experts} experts")
    if limit.substitute and layer.unproven:
        return Limit(note=f"plan.moe.substitute needs the router's logits: {layer.unproven}")
    renormalise = layer.renormalises if plan.renormalize is None else plan.renormalize
    if renormalise is None:
        return Limit(note=f"whether the router renormalises is not known, set plan.moe.renormalize: {layer.unproven}")
    return Limit(**{**vars(limit), "renormalise": renormalise})


@register_pass("sparsify_moe", Stage.SPARSIFY, exact=False)
class SparsifyMoe(Pass):
    """Put the plan's rules between each router and its experts."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        if ctx.moe_plan is None or not ctx.moes:
            return report
        calls, layers, found = iter(ctx.moe_calls), [], []
        writes = writes_by_storage(gm.graph)
        for place, moe in enumerate(ctx.moes):
            call = None if isinstance(moe, Rejection) else next(calls)
            found.append(call)
            if call is None:
                layers.append(LayerRouting(moe.layer or f"moe {place}", refusal=f"not rewritten: {moe.reason}"))
            else:
                layers.append(_routing(call, moe.route, writes, place))
        ctx.moe_limits = assign_limits(ctx.moe_plan, layers)
        for call, limit, moe in zip(found, ctx.moe_limits, ctx.moes):
            if call is None or limit.note or _limited(call):
                continue
            weight = tensor(call.args[2])
            assert weight is not None
            _insert(call, limit, moe.route, sparse_switch(gm, ctx.state, weight))
            report.hits += 1
        return report


def _routing(call: Node, route: RouteMatch | Rejection, writes: dict[Node, list[Node]], place: int) -> LayerRouting:
    name = layer_name(call) or f"moe {place}"
    experts, top_k = shape(call.args[3])[0], shape(call.args[1])[1]
    if not isinstance(route, RouteMatch):
        return LayerRouting(name, experts, top_k, unproven=route.reason)
    renormalises = route.renormalise or (route.order == "topk_first" and route.score == "softmax")
    return LayerRouting(name, experts, top_k, "", renormalises, _why_not_compared(call, route, writes, experts))


def _why_not_compared(call: Node, route: RouteMatch, writes: dict[Node, list[Node]], experts: int) -> str:
    """Reason why a proven router's logits cannot say which expert comes next, or ""."""
    if route.order == "topk_first" and route.bias is not None:
        return "a bias is added to the logits themselves"
    if shape(route.logits)[-1] != experts:
        return f"it has {shape(route.logits)[-1]} logits for {experts} experts"
    for value in (route.logits, route.bias):
        late = None if value is None else next((w for w in writes.get(storage(value), ()) if value < w < call), None)
        if late is not None:
            return f"{late.name} writes {storage(late).name} afterwards"
    return ""


def _limited(call: Node) -> bool:
    choice = call.args[1]
    return isinstance(choice, Node) and choice.target is operator.getitem and getattr(choice.args[0], "target", None) is _LIMIT


def _insert(call: Node, limit: Limit, route: Any, gate: Node) -> None:
    emit = Emitter(call)
    experts = shape(call.args[3])[0]
    logits = bias = None
    score = "softmax"
    if limit.substitute:
        logits, bias, score = route.logits, route.bias, route.score
        if len(shape(logits)) != 2:
            logits = emit.call(aten.reshape.default, logits, [-1, experts])
    made = emit.call(
        _LIMIT, call.args[1], call.args[2], logits, bias, gate, score, experts, limit.top_k, limit.skip, limit.beta, limit.ratio,
        limit.expert_budget, limit.substitute, limit.renormalise,
    )  # fmt: skip
    choice, weight = (emit.call(operator.getitem, made, place) for place in (0, 1))
    call.args = (call.args[0], choice, weight, *call.args[3:])
