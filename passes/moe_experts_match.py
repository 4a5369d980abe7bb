"""Match the experts of one MoE layer: from the down product to the sum over choices, and back to x, choice and weight.

What is matched is exactly ``sum_k weight[n, k] * down(act(gate(x[n])) * up(x[n]))`` with the weights of expert ``choice[n, k]``;
gate and up are halves of one product, or two products over stacked weights.
Matching changes no node; it may pin symbolic numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.kernels import library
from spec_compile.passes.base import Rejection
from spec_compile.passes.expert_gate import CASTS, Refusal, match_gate, number
from spec_compile.passes.expert_pairs import Pairs, sizes_are
from spec_compile.passes.expert_products import INPUTS, Product, equation, find_products, is_view, last_products
from spec_compile.passes.nodes import argument, aten, is_call, layer_name, packet, same, shape, source_line, tensor
from spec_compile.passes.regions import why_open, why_stale, with_assertions

assert library.moe_experts is not None  # importing it registers the operators
EXPERTS = torch.ops.spec_compile.moe_experts_v1


@dataclass(frozen=True)
class ExpertsMatch:
    """Proven experts.

    Attributes:
        anchor: the down product, or the hooks' call.
        form: ``batched_mm``, ``grouped_mm``, ``gather`` or ``marker``.
        output: the node whose value the rewritten experts take over.
        x: ``[N, H]``. choice, weight: ``[..., K]`` with N rows in all.
        gate_up, down, gate_up_bias, down_bias: parameters, stacked by expert.
        up: that of up where ``gate_up`` is the gate's alone.
        activation, interleaved, transposed, limit, alpha: as in :func:`spec_compile.kernels.library.moe_experts`.
        experts, top_k, hidden, inner: sizes E, K, H, I.
        region: nodes that go away. views: views of operands, which go if nobody else reads them.
        casts: those of the region that cast values, not ids.
        layer: module path, if known.
    """

    anchor: Node
    form: str
    output: Node
    x: Node
    choice: Node
    weight: Node
    gate_up: Node
    down: Node
    gate_up_bias: Node | None
    down_bias: Node | None
    activation: str
    interleaved: bool
    transposed: bool
    limit: float
    alpha: float
    experts: int
    top_k: int
    hidden: int
    inner: int
    region: tuple[Node, ...] = ()
    views: tuple[Node, ...] = ()
    casts: tuple[Node, ...] = ()
    layer: str | None = None
    up: Node | None = None

    @property
    def parameters(self) -> dict[str, Node]:
        """Weights and biases by the names that reasons give them."""
        first = {"gate_up": self.gate_up} if self.up is None else {"gate": self.gate_up, "up": self.up}
        named = {**first, "down": self.down, "gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return {name: node for name, node in named.items() if node is not None}


def find_experts(graph: Graph) -> tuple[list[Node | Product], dict[Node, Product]]:
    """One anchor for each MoE layer, in graph order (a down product, or a call that the hooks made), and all products."""
    products = find_products(graph)
    marked = [node for node in graph.nodes if is_call(node, EXPERTS) and not node.meta.get("spec_compile")]
    anchors = sorted([*marked, *last_products(products)], key=lambda found: _call(found)._sort_key)
    return anchors, {product.call: product for product in products}


def _call(anchor: Node | Product) -> Node:
    return anchor.call if isinstance(anchor, Product) else anchor


def match_experts(
    anchor: Node | Product, products: dict[Node, Product], writes: dict[Node, list[Node]], problem: Rejection | None = None
) -> Any:
    """Prove the experts around ``anchor``: an :class:`ExpertsMatch`, or a :class:`Rejection` with layer and source line.

    ``problem`` is a reason to refuse that holds for the graph as a whole.
    """
    call = _call(anchor)
    try:
        found = (
            _Walk(anchor, products, Pairs(anchor.call, shape(anchor.weight)[0])).match()
            if isinstance(anchor, Product)
            else _marked(anchor)
        )
        _check_operands(found)
        _check_devices(found)
        if problem is None:
            problem = _why_not_replaceable(found, writes)
    except Refusal as refusal:
        problem = Rejection(refusal.reason, refusal.node.name)
    if problem is not None:
        return Rejection(problem.reason, problem.node, layer_name(call), source_line(call))
    return found


def _marked(call: Any) -> ExpertsMatch:
    x, choice, weight, gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed = call.args[:10]
    limit, alpha = (number(argument(call, name, 0.0)) for name in ("limit", "alpha"))
    if limit is None or alpha is None:
        raise Refusal(call, "the limit or alpha of the experts' activation is not a constant")
    sizes = shape(down)
    hidden, inner = (sizes[2], sizes[1]) if transposed else (sizes[1], sizes[2])
    return ExpertsMatch(
        call, "marker", call, x, choice, weight, gate_up, down, gate_up_bias, down_bias, activation, interleaved,
        transposed, limit, alpha, sizes[0], shape(choice)[1], hidden, inner,
        layer=layer_name(call), up=argument(call, "up"),
    )  # fmt: skip


@dataclass
class _Walk:
    """One match in progress."""

    down: Product
    products: dict[Node, Product]
    pairs: Pairs
    hidden: int = 0

    def match(self) -> ExpertsMatch:
        down = self.down
        if down.form == "dense":
            raise Refusal(
                down.call, "every expert runs on every row with the routing weight on its input: not a gather over chosen experts"
            )
        _check_plain(down.call)
        self._look_ahead()
        output, weight, down_bias = self._to_output()
        gate = match_gate(down.rows)
        self.pairs.take(*gate.inner)
        first, gate_up_bias = self._first_product(gate.source)
        up = None if gate.up is None else self._up_product(gate.up, first, gate_up_bias)
        x, choice = self._input(first), self.pairs.choice()
        if up is not None and self._input(up) is not x:
            raise Refusal(up.call, "the products of gate and up have different inputs")
        experts, inner = self._sizes(first, up)
        if up is None and not same(shape(gate.source)[-1], 2 * inner):
            raise Refusal(gate.source, f"gate and up are halves of {shape(gate.source)[-1]} values, expected {2 * inner}")
        if up is not None and not same(shape(gate.source)[-1], inner):
            raise Refusal(gate.source, f"gate and up are {shape(gate.source)[-1]} values each, expected {inner}")
        if gate_up_bias is not None and shape(gate_up_bias) != (experts, 2 * inner):
            raise Refusal(gate_up_bias, "the first bias is not [E, 2I]")
        if down_bias is not None and shape(down_bias) != (experts, self.hidden):
            raise Refusal(down_bias, "the second bias is not [E, H]")
        return ExpertsMatch(
            down.call, down.form, output, x, choice, weight, first.weight, down.weight, gate_up_bias, down_bias, gate.activation,
            gate.interleaved, down.transposed, gate.limit, gate.alpha, experts, self.pairs.top_k, self.hidden, inner,
            with_assertions(self.pairs.region), tuple(self.pairs.views), self._casts(), layer_name(down.call),
            None if up is None else up.weight,
        )  # fmt: skip

    def _casts(self) -> tuple[Node, ...]:
        return tuple(node for node in self.pairs.region if is_call(node, *CASTS) and node not in self.pairs.id_casts)

    def _only_user(self, node: Node) -> Any:
        users = list(node.users)
        if len(users) != 1:
            others = ", ".join(user.name for user in users) or "nobody"
            raise Refusal(node, f"{node.name} is used by {others}: the experts' values must have one reader each")
        return users[0]

    def _to_output(self) -> tuple[Node, Node, Node | None]:
        """From the down product to the sum over choices; returns the output, the routing weight and the bias."""
        self.pairs.take(self.down.call, *self.down.inner)
        for view in self.down.views:
            self.pairs.view(view)
        node: Any = self.down.call
        bias: Node | None = None
        weight: Node | None = None
        in_order = self.down.form != "grouped_mm"
        if self.down.form == "grouped_mm":
            self.pairs.sort_by(self.down.key)
        else:
            self.pairs.ids = self.down.key
        while True:
            user = self._only_user(node)
            other = self._other(user, node)
            if is_call(user, aten.einsum) and weight is None and in_order:
                self.pairs.take(user)
                weight = self._contracted(user, node)
                node = user
                break
            if is_call(user, aten.sum):
                self._check_sum(user, node)
                self.pairs.take(user)
                node = user
                break
            if is_call(user, aten.index) and user.args[0] is node and not in_order:
                self.pairs.undo_sort(user)
                in_order = True
            elif is_view(user):
                if len(shape(user)) == 3 and not in_order:
                    raise Refusal(user, "pairs are regrouped by row while they are still sorted by expert")
            elif is_call(user, aten.masked_fill) and user.args[0] is node:
                self.pairs.mask_nothing(user)
            elif is_call(user, aten.add) and other is not None and bias is None and weight is None:
                bias = self.pairs.bias(user, other, in_order)
            elif is_call(user, aten.mul) and other is not None:
                if weight is not None:
                    raise Refusal(user, "routing weights are applied twice")
                if len(shape(other)) != len(shape(node)) or not sizes_are(node, [*shape(other)[:-1], shape(node)[-1]]):
                    raise Refusal(user, "the factor on the experts' outputs is not one weight for each pair")
                weight = self.pairs.weights(other, in_order)
            elif not is_call(user, *CASTS):
                name = str(packet(user) or user.op).rsplit(".", 1)[-1]
                raise Refusal(user, f"{name} stands between the down product and the sum over chosen experts")
            self.pairs.take(user)
            node = user
        if weight is None:
            raise Refusal(node, "chosen experts are summed without a routing weight")
        return self._cast_back(node), weight, bias

    def _other(self, user: Any, node: Any) -> Node | None:
        """The other operand of a binary call."""
        if len(user.args) < 2 or argument(user, "alpha", 1) != 1:
            return None
        other = user.args[1] if user.args[0] is node else user.args[0]
        return other if isinstance(other, Node) and other is not node else None

    def _look_ahead(self) -> None:
        """N, K and H, from the sum over choices."""
        node: Any = self.down.call
        for _ in range(16):
            user = self._only_user(node)
            if user.op == "output":
                break
            if is_call(user, aten.sum, aten.einsum):
                sizes = shape(node)
                if len(sizes) != 3 or not isinstance(sizes[1], int) or not isinstance(sizes[2], int):
                    raise Refusal(user, f"the sum over choices is of {list(sizes)}, expected [N, K, H]")
                self.pairs.rows, self.pairs.top_k, self.hidden = sizes
                return
            node = user
        raise Refusal(self.down.call, "no sum over the chosen experts follows their outputs")

    def _check_sum(self, user: Any, node: Any) -> None:
        dims = user.args[1] if len(user.args) > 1 else None
        if len(shape(node)) != 3 or dims not in ([1], [-2]) or argument(user, "keepdim", False):
            raise Refusal(user, "the sum is not over the second axis of [N, K, H]")
        if not _holds(argument(user, "dtype", torch.float64), tensor(self.down.weight)):
            raise Refusal(user, f"the sum over experts is taken in {argument(user, 'dtype')}")

    def _contracted(self, user: Any, node: Any) -> Node:
        """``einsum("nkh,nk->nh", pairs, weight)``, operands in either order."""
        letters = equation(user)
        operands = list(user.args[1])
        if letters is None or len(operands) != 2 or len(shape(node)) != 3:
            raise Refusal(user, "an einsum that is not the weighted sum over choices")
        left, right, out = letters
        pairs, weights = (left, right) if operands[0] is node else (right, left)
        if len(pairs) != 3 or weights != pairs[:2] or out != pairs[0] + pairs[2]:
            raise Refusal(user, "an einsum that is not the weighted sum over choices")
        found = operands[1] if operands[0] is node else operands[0]
        if not sizes_are(found, [self.pairs.rows, self.pairs.top_k]):
            raise Refusal(user, "routing weights are broadcast over choices")
        return found

    def _cast_back(self, node: Any) -> Node:
        users = list(node.users)
        wanted, found = tensor(self.down.weight), tensor(node)
        assert wanted is not None and found is not None
        if found.dtype == wanted.dtype:
            return node
        if len(users) == 1 and is_call(users[0], *CASTS) and getattr(tensor(users[0]), "dtype", None) == wanted.dtype:
            self.pairs.take(users[0])
            return users[0]
        raise Refusal(node, f"the sum over experts stays in {found.dtype}, the experts compute in {wanted.dtype}")

    def _first_product(self, source: Node) -> tuple[Product, Node | None]:
        """The product that gate and up are halves of, or that one of them is, and its bias."""
        node: Any = source
        bias: Node | None = None
        while node not in self.products:
            if is_call(node, aten.masked_fill):
                self.pairs.mask_nothing(node)
            elif is_view(node) or is_call(node, *CASTS):
                self.pairs.take(node)
            elif is_call(node, aten.add) and bias is None and argument(node, "alpha", 1) == 1:
                left, right = node.args[:2]
                picked, rest = (left, right) if is_call(left, aten.index) else (right, left)
                bias = self.pairs.bias(node, picked, self.pairs.perm is None)
                node = rest
                continue
            else:
                name = str(packet(node) or node.op).rsplit(".", 1)[-1]
                raise Refusal(node, f"gate and up are not products over expert weights, nor halves of one, but come from {name}")
            node = node.args[0]
        first = self.products[node]
        _check_plain(first.call)
        if first.form != self.down.form:
            raise Refusal(first.call, f"the first product is {first.form}, the down product {self.down.form}")
        if self.pairs.perm is not None and first.key is not self.down.key:
            raise Refusal(first.call, "products of one expert have different offsets")
        if self.pairs.perm is None and not self.pairs.are_ids(first.key):
            raise Refusal(first.call, "products of one expert pick experts by different ids")
        self.pairs.take(first.call, *first.inner)
        for view in first.views:
            self.pairs.view(view)
        return first, bias

    def _up_product(self, source: Node, gate: Product, gate_bias: Node | None) -> Product:
        """The product that is up where the gate is another one."""
        up, up_bias = self._first_product(source)
        if up.call is gate.call:
            raise Refusal(up.call, "gate and up are one product")
        if gate_bias is not None or up_bias is not None:
            raise Refusal(
                up.call, "gate and up are two products with biases: stack their weights as one parameter [E, 2I, H] and biases "
                "as [E, 2I], gate rows first",
            )  # fmt: skip
        return up

    def _input(self, first: Product) -> Node:
        """x ``[N, H]`` behind the rows of a first product."""
        node: Any = first.rows
        while is_call(node, *CASTS) or is_call(node, aten.masked_fill):
            if is_call(node, aten.masked_fill):
                self.pairs.mask_nothing(node)
            self.pairs.take(node)
            node = node.args[0]
        if first.form == "grouped_mm":
            found = self.pairs.gathered_rows(node)
        elif first.form == "batched_mm":
            found = self.pairs.repeated_rows(node)
        else:
            found = node
        if len(shape(found)) != 2 or not same(shape(found)[0], self.pairs.rows):
            raise Refusal(found, f"the experts' input is {list(shape(found))}, expected [{self.pairs.rows}, H]")
        return found

    def _sizes(self, gate: Product, up: Product | None) -> tuple[int, int]:
        """``E, I`` with every size checked."""
        down = shape(self.down.weight)
        experts = down[0]
        hidden, inner = down[1:] if not self.down.transposed else down[:0:-1]
        for first in (gate,) if up is None else (gate, up):
            if first.transposed != self.down.transposed:
                raise Refusal(first.call, "one of the expert weights is transposed, another is not")
            sizes, wide = shape(first.weight), 2 * inner if up is None else inner
            wanted = (experts, hidden, wide) if first.transposed else (experts, wide, hidden)
            if not all(isinstance(size, int) for size in (*sizes, *down)) or sizes != wanted or hidden != self.hidden:
                raise Refusal(first.call, f"expert weights {list(sizes)} and {list(down)} do not fit each other")
        return experts, inner


def _check_plain(product: Node) -> None:
    if argument(product, "bias") is not None or argument(product, "out_dtype") is not None:
        raise Refusal(product, "a grouped product with a bias or a dtype of its own")


def _holds(dtype: torch.dtype, held: torch.Tensor | None) -> bool:
    """Whether ``dtype`` has every value of a tensor's dtype."""
    return held is not None and torch.promote_types(dtype, held.dtype) == dtype


def _check_operands(match: ExpertsMatch) -> None:
    x, out, weight = tensor(match.x), tensor(match.output), tensor(match.weight)
    assert x is not None and out is not None and weight is not None
    for name, node in match.parameters.items():
        held = tensor(node)
        assert held is not None
        if node.op not in INPUTS and match.form != "marker":
            raise Refusal(node, f"the experts' {name} is computed in this graph ({packet(node)}), not read from a parameter")
        if held.dtype != x.dtype:
            raise Refusal(node, f"the experts' {name} is {held.dtype}, their input {x.dtype}")
        if not same(held.stride(-1), 1):
            raise Refusal(node, f"the last dimension of the experts' {name} is not contiguous")
    if not weight.dtype.is_floating_point:
        raise Refusal(match.weight, f"routing weights are {weight.dtype}")
    chosen = tensor(match.choice)
    if chosen is None or chosen.dtype not in (torch.int32, torch.int64):
        raise Refusal(match.choice, f"choices are {chosen.dtype if chosen is not None else None}, expected int32 or int64")
    if not same(out.stride(1), 1) or not (same(out.stride(0), match.hidden) or same(out.shape[0], 1)):
        raise Refusal(match.output, "the experts' output is not contiguous")
    if out.dtype != x.dtype:
        raise Refusal(match.output, f"the experts' output is {out.dtype}, their input {x.dtype}")
    if torch.promote_types(weight.dtype, torch.float32) != torch.float32 and x.dtype != torch.float64:
        raise Refusal(match.weight, f"routing weights in {weight.dtype} on values in {x.dtype}")
    for node in match.casts:
        cast, given = tensor(node), tensor(node.args[0])
        if cast is None or given is None or not given.dtype.is_floating_point or not _holds(cast.dtype, x):
            raise Refusal(node, f"a value of the experts is rounded to {cast.dtype if cast is not None else None} on the way")
        if cast.device != given.device:
            raise Refusal(node, f"a value of the experts is moved to {cast.device} on the way")


def _check_devices(match: ExpertsMatch) -> None:
    x = tensor(match.x)
    assert x is not None
    named = {"choice": match.choice, "weight": match.weight, **match.parameters, "output": match.output}
    for name, node in named.items():
        held = tensor(node)
        if held is not None and held.device != x.device:
            raise Refusal(node, f"the experts' {name} is on {held.device}, their input on {x.device}")


def _why_not_replaceable(match: ExpertsMatch, writes: dict[Node, list[Node]]) -> Rejection | None:
    if match.form == "marker":
        return None
    region = set(match.region)
    given = [match.x, match.choice, match.weight, *match.parameters.values()]
    if region & set(given):
        return Rejection("an operand of the experts is one of their own values", match.anchor.name)
    problem = why_open(region, {match.output})
    return problem if problem is not None else why_stale(region | set(match.views), given, match.output, writes)
