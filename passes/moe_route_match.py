"""Match a router: from the choice and the weights that experts use back to one value of logits ``[N, E]``.

Known rules: scores over all experts, then top-k (softmax: Mixtral, Qwen, OLMoE; sigmoid, a bias for the choice and groups:
DeepSeek-V3), or top-k of the logits, then their softmax (gpt-oss); weights renormalised or not, then scaled. What is not
proven stays as it was traced, in front of the rewritten experts. Matching changes no node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from spec_compile.passes.base import Rejection
from spec_compile.passes.expert_gate import CASTS, Refusal, number
from spec_compile.passes.expert_pairs import ROUTE, item, sizes_are
from spec_compile.passes.expert_products import is_view
from spec_compile.passes.moe_experts_match import ExpertsMatch
from spec_compile.passes.nodes import argument, aten, is_call, packet, same, shape, tensor
from spec_compile.passes.regions import why_open, why_stale, with_assertions


@dataclass(frozen=True)
class RouteMatch:
    """A proven router; names as in :func:`spec_compile.kernels.library.moe_route`.

    ``choice`` and ``weight`` are the nodes whose values the rewritten router takes over, ``region`` what goes away.
    """

    choice: Node
    weight: Node
    logits: Node
    bias: Node | None
    score: str
    k: int
    renormalise: bool
    epsilon: float
    scale: float
    groups: int
    kept_groups: int
    order: str
    region: tuple[Node, ...] = ()

    def words(self) -> str:
        """What a report says of it."""
        parts = [f"{self.score} of the top {self.k}" if self.order == "topk_first" else f"top {self.k} of {self.score}"]
        parts += ["bias for the choice"] if self.bias is not None else []
        parts += [f"{self.kept_groups} of {self.groups} groups"] if self.groups > 1 else []
        parts += ["renormalised"] if self.renormalise else []
        parts += [f"times {self.scale:g}"] if self.scale != 1.0 else []
        return ", ".join(parts)


def match_route(experts: ExpertsMatch, writes: dict[Node, list[Node]]) -> RouteMatch | Rejection:
    """Prove the router in front of ``experts``."""
    walk = _Walk(experts.experts, experts.top_k)
    try:
        found = walk.match(experts.choice, experts.weight)
    except Refusal as refusal:
        return Rejection(refusal.reason, refusal.node.name)
    region = set(found.region)
    outputs = {found.choice, found.weight}
    given = [node for node in (found.logits, found.bias) if node is not None]
    problem = why_open(region, outputs)
    if problem is None:
        problem = why_stale(region, given, min(outputs), writes)
    return found if problem is None else problem


@dataclass
class _Walk:
    """One match in progress."""

    experts: int
    top_k: int
    region: dict[Node, None] = field(default_factory=dict)

    def _take(self, *nodes: Node) -> None:
        self.region.update(dict.fromkeys(nodes))

    def match(self, choice: Any, weight: Any) -> RouteMatch:
        if is_call(choice.args[0] if choice.args else None, ROUTE):
            raise Refusal(choice, "the router is rewritten already")
        place = _uncast(choice)
        top = item(place, 1)
        if not is_call(top, aten.topk):
            raise Refusal(choice, "the choice is not the indices of a top-k")
        if len(shape(place)) != 2 or not argument(top, "largest", True) or argument(top, "dim", -1) not in (-1, 1):
            raise Refusal(top, "the choice is not the largest of [N, E] along E")
        if not same(shape(place)[1], self.top_k) or not same(shape(top.args[0])[1], self.experts):
            raise Refusal(top, f"the top-k is not {self.top_k} of {self.experts} experts")
        self._take(place, top)
        base, renormalise, epsilon, scale, output = self._weights(weight)
        if is_call(base, aten.softmax) and item(base.args[0], 0) is top:
            return self._topk_first(place, top, base, renormalise, epsilon, scale, output)
        scores = self._scores_behind(base, place, top)
        contested, groups, kept = self._grouped(top.args[0])
        contested, bias = self._biased(contested, scores)
        if contested is not scores:
            raise Refusal(top, "the top-k is over other scores than those that the weights come from")
        score, logits = self._score(scores)
        return self._found(
            place, output, logits, bias, score, renormalise, epsilon, scale, groups, kept, "score_first",
        )  # fmt: skip

    def _found(
        self, choice: Any, weight: Any, logits: Any, bias: Node | None, score: str, renormalise: bool, epsilon: float,
        scale: float, groups: int, kept: int, order: str,
    ) -> RouteMatch:  # fmt: skip
        held = tensor(logits)
        assert held is not None
        if len(shape(logits)) != 2 or not held.dtype.is_floating_point:
            raise Refusal(logits, f"the logits are {held.dtype} {list(shape(logits))}, expected [N, E]")
        found = tensor(weight)
        wide = torch.float64 if held.dtype == torch.float64 else torch.float32
        if found is None or (found.dtype != wide if order == "score_first" else torch.promote_types(found.dtype, wide) != wide):
            raise Refusal(weight, f"scores are computed in {found.dtype if found is not None else None}, not in {wide}")
        return RouteMatch(
            choice, weight, logits, bias, score, self.top_k, renormalise, epsilon, scale, groups, kept, order,
            with_assertions(self.region),
        )  # fmt: skip

    def _weights(self, node: Any) -> tuple[Node, bool, float, float, Node]:
        """``base, renormalise, epsilon, scale`` and the last value before casts."""
        node = _uncast(node)
        output, scale, renormalise, epsilon = node, 1.0, False, 0.0
        if is_call(node, aten.mul, aten.div) and argument(node, "rounding_mode") is None:
            factor = number(node.args[1])
            if factor is not None and (is_call(node, aten.mul) or factor in (0.25, 0.5, 2.0)):
                scale = factor if is_call(node, aten.mul) else 1.0 / factor
                self._take(node)
                node = node.args[0]
        if is_call(node, aten.div):
            node, epsilon = self._normalised(node)
            renormalise = True
        return node, renormalise, epsilon, scale, output

    def _normalised(self, node: Any) -> tuple[Node, float]:
        """``w / (sum(w, -1, keepdim=True) [+ epsilon])``."""
        base, total = node.args[0], node.args[1]
        epsilon = 0.0
        if argument(node, "rounding_mode") is not None or not isinstance(base, Node):
            raise Refusal(node, "routing weights are divided by something other than their sum")
        added = number(total.args[1]) if is_call(total, aten.add) and argument(total, "alpha", 1) == 1 else None
        if added is not None:
            epsilon = added
            self._take(total)
            total = total.args[0]
        summed = is_call(total, aten.sum) and len(total.args) > 1 and total.args[1] in ([-1], [1])
        if (
            not summed
            or not argument(total, "keepdim", False)
            or total.args[0] is not base
            or argument(total, "dtype") is not None
        ):
            raise Refusal(node, "routing weights are divided by something other than their sum")
        self._take(node, total)
        return base, epsilon

    def _topk_first(
        self, choice: Any, top: Any, base: Any, renormalise: bool, epsilon: float, scale: float, output: Node
    ) -> RouteMatch:
        if argument(base, "dim") not in (-1, 1) or not isinstance(top.args[0], Node):
            raise Refusal(base, "the softmax is not over the chosen experts")
        held = tensor(base)
        if (renormalise or scale != 1.0) and (held is None or held.dtype != torch.float32):
            raise Refusal(base, "weights are renormalised or scaled in less than float32")
        if held is None or not _narrower(tensor(top.args[0]), held):
            raise Refusal(base, f"the softmax over the chosen experts is taken in {held.dtype if held is not None else None}")
        self._take(base, base.args[0])
        return self._found(
            choice, output, top.args[0], None, "softmax", renormalise, epsilon, scale, 1, 1, "topk_first",
        )  # fmt: skip

    def _scores_behind(self, base: Any, choice: Any, top: Any) -> Node:
        """The scores that the weights are picked from: the values of the top-k, or a gather by the choice."""
        if item(base, 0) is top:
            self._take(base)
            return top.args[0]
        if is_call(base, aten.gather) and argument(base, "dim") in (-1, 1) and base.args[2] is choice:
            self._take(base)
            return base.args[0]
        where = base if isinstance(base, Node) else top
        raise Refusal(where, f"routing weights come from {packet(where) or where.op}, not from the scores of the chosen experts")

    def _score(self, scores: Any) -> tuple[str, Node]:
        """Softmax or sigmoid, and the logits behind it; casts to the dtype the operator computes in go along."""
        if is_call(scores, aten.softmax) and argument(scores, "dim") in (-1, 1):
            name = "softmax"
        elif is_call(scores, aten.sigmoid):
            name = "sigmoid"
        else:
            raise Refusal(scores, f"scores come from {packet(scores) or scores.op}, not from a softmax over experts or a sigmoid")
        self._take(scores)
        logits = scores.args[0]
        while is_call(logits, *CASTS) and len(logits.users) == 1:
            given, made = tensor(logits.args[0]), tensor(logits)
            assert given is not None and made is not None
            if made.dtype != torch.float32 or given.dtype not in (torch.bfloat16, torch.float16) or made.device != given.device:
                break
            self._take(logits)
            logits = logits.args[0]
        assert isinstance(logits, Node)
        return name, logits

    def _biased(self, node: Any, scores: Any) -> tuple[Any, Node | None]:
        """``scores + bias`` with one bias for each expert."""
        if node is scores or not is_call(node, aten.add) or argument(node, "alpha", 1) != 1:
            return node, None
        left, right = node.args[:2]
        base, bias = (left, right) if left is scores else (right, left)
        held, made, given = tensor(bias), tensor(node), tensor(scores)
        if base is not scores or held is None or len(shape(bias)) != 1 or not same(shape(bias)[0], self.experts):
            raise Refusal(node, "what is added to the scores is not one bias for each expert")
        if made is None or given is None or not held.dtype.is_floating_point or made.dtype != given.dtype:
            raise Refusal(node, "the bias changes the dtype of the scores")
        self._take(node)
        return base, bias

    def _grouped(self, node: Any) -> tuple[Any, int, int]:
        """Groups by the sum of their two best, as in DeepSeek-V3::

        masked_fill(s, ~expand(scatter(0, topk(sum(topk(s.view(N, G, E/G), 2)))[1], 1)).bool(), -inf)
        """
        if not is_call(node, aten.masked_fill):
            return node, 1, 1
        scores, mask, fill = node.args[:3]
        if number(fill) != float("-inf"):
            raise Refusal(node, f"experts of other groups count as {fill}, not as -inf")
        self._take(node)
        chosen: Any = mask.args[0] if is_call(mask, aten.bitwise_not, aten.logical_not) else None
        steps: list[Any] = [mask]
        while is_call(chosen, *CASTS, aten.expand) or is_view(chosen):
            steps.append(chosen)
            chosen = chosen.args[0]
        wide: list[Any] = [step for step in steps if is_call(step, aten.expand)]
        if not is_call(chosen, aten.scatter) or len(wide) != 1:
            raise Refusal(node, "scores are masked by something other than the choice of groups")
        zeros, dim, places, one = chosen.args[:4]
        blank = is_call(zeros, aten.zeros_like, aten.zeros, aten.new_zeros) and argument(chosen, "reduce") is None
        if not blank or dim not in (1, -1) or number(one) != 1.0:
            raise Refusal(chosen, "the mask of groups is not zeros with ones at the chosen groups")
        best = item(places, 1)
        if not is_call(best, aten.topk) or not argument(best, "largest", True) or argument(best, "dim", -1) not in (1, -1):
            raise Refusal(chosen, "groups are not chosen by a top-k")
        sums: Any = best.args[0]
        summed = is_call(sums, aten.sum) and len(sums.args) > 1 and sums.args[1] in ([-1], [2])
        if summed and (argument(sums, "keepdim", False) or argument(sums, "dtype") is not None):
            raise Refusal(sums, f"a group's score is summed with dtype={argument(sums, 'dtype')}")
        two: Any = sums.args[0] if summed else None
        pairs = item(two, 0)
        if not is_call(pairs, aten.topk) or pairs.args[1] != 2 or argument(pairs, "dim", -1) not in (2, -1):
            raise Refusal(best, "a group's score is not the sum of its two best")
        view = pairs.args[0]
        if not is_view(view) or view.args[0] is not scores or not argument(pairs, "largest", True):
            raise Refusal(pairs, "groups are not formed of the scores that are masked")
        groups, kept, size = shape(view)[1], shape(places)[1], shape(view)[2]
        fits = all(isinstance(found, int) for found in (groups, kept, size)) and groups * size == self.experts
        if not fits or kept * size < self.top_k:
            raise Refusal(view, f"{kept} of {groups} groups of {size} experts do not serve {self.top_k} choices")
        rows = shape(scores)[0]
        if not sizes_are(wide[0], [rows, groups, size]) or not sizes_are(wide[0].args[0], [rows, groups, 1]):
            raise Refusal(wide[0], "the mask of groups is not spread over the experts of each group")
        self._take(*steps, chosen, zeros, places, best, sums, two, pairs, view)
        return scores, groups, kept


def _narrower(given: torch.Tensor | None, made: torch.Tensor) -> bool:
    """Whether the dtype of ``made`` has every value of ``given``."""
    return given is not None and torch.promote_types(given.dtype, made.dtype) == made.dtype


def _uncast(node: Any) -> Any:
    while is_call(node, *CASTS):
        node = node.args[0]
    return node
