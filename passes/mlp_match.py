"""Match one feed-forward layer: from its last projection back to its input.

What is matched is exactly ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))``, over weights that are inputs of the graph.
Matching changes no node; it may pin symbolic numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.passes.base import Rejection
from spec_compile.passes.expert_gate import CASTS, Refusal, half, uncast
from spec_compile.passes.mlp_activation import Activation, match_activation
from spec_compile.passes.nodes import argument, aten, is_call, keeps_values, layer_name, packet, same, shape, source_line, tensor
from spec_compile.passes.regions import why_open, why_stale, with_assertions

_INPUTS = ("placeholder", "get_attr")
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.contiguous, aten.squeeze, aten.unsqueeze)
_PRODUCTS = (aten.linear, aten.addmm, aten.mm, aten.matmul)


@dataclass(frozen=True)
class Projection:
    """``x @ weight.T + bias``, or ``x @ weight + bias`` where ``transposed`` (transformers' Conv1D)."""

    call: Node
    x: Node
    weight: Node
    bias: Node | None
    transposed: bool

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Outputs and inputs."""
        rows, columns = shape(self.weight)
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class MlpMatch:
    """A proven feed-forward layer.

    Attributes:
        anchor, output: the last projection's call.
        x: ``[..., H]``.
        gate, up: first projections; both the same where one weight holds both, of which ``gate_half`` and ``up_half`` then say
            which half each is (``first`` or ``last``). gate is None in a plain layer.
        down: last projection.
        activation: as in :func:`spec_compile.kernels.library.mlp`.
        hidden, inner, out: sizes H, F and H'.
        region: nodes that go away.
        layer: module path, if known.
    """

    anchor: Node
    output: Node
    x: Node
    gate: Projection | None
    up: Projection
    down: Projection
    gate_half: str
    up_half: str
    activation: str
    hidden: int
    inner: int
    out: int
    region: tuple[Node, ...] = ()
    layer: str | None = None

    @property
    def form(self) -> str:
        """``gated``, ``fused`` (gate and up in one weight) or ``plain``."""
        return "plain" if self.gate is None else "fused" if self.gate_half else "gated"

    @property
    def itemsize(self) -> int:
        held = tensor(self.down.weight)
        assert held is not None
        return held.element_size()

    @property
    def weight_bytes(self) -> int:
        return self.read_bytes(1.0)

    def read_bytes(self, union: float) -> int:
        """Bytes of weights that a step reads whose rows keep a share ``union`` of the channels together."""
        others = self.out + (0 if self.gate is None else self.hidden)
        return round((self.hidden + union * others) * self.inner * self.itemsize)


def projection(node: Any) -> Projection | None:
    """``node`` as a product with a 2-D weight, or None."""
    if is_call(node, aten.linear):
        bias = argument(node, "bias")
        found = Projection(node, node.args[0], node.args[1], bias, False)
    elif is_call(node, aten.addmm) and argument(node, "beta", 1) == 1 and argument(node, "alpha", 1) == 1:
        found = Projection(node, node.args[1], node.args[2], node.args[0], True)
    elif is_call(node, aten.mm, aten.matmul):
        found = Projection(node, node.args[0], node.args[1], None, True)
    else:
        return None
    operands = (found.x, found.weight, *(() if found.bias is None else (found.bias,)))
    if not all(isinstance(operand, Node) for operand in operands) or len(shape(found.weight)) != 2:
        return None
    return found


def find_mlps(graph: Graph) -> list[Projection]:
    """Projections whose input is an activation, or a product with one: the last ones of feed-forward layers, in graph order."""
    found = (projection(node) for node in graph.nodes)
    return [p for p in found if p is not None and _gated(_inner(p.x, [])) is not None]


def _inner(node: Any, passed: list[Node]) -> Any:
    """Behind views that keep rows and columns in order, and casts."""
    while True:
        if is_call(node, *CASTS):
            node = uncast(node, passed)
        elif is_call(node, *_VIEWS) and keeps_values(node) and same(shape(node)[-1], shape(node.args[0])[-1]):
            passed.append(node)
            node = node.args[0]
        else:
            return node


def _gated(node: Any) -> tuple[Activation, Any] | None:
    """The activation and the other factor (None in a plain layer)."""
    found = match_activation(node)
    if found is not None:
        return found, None
    if not is_call(node, aten.mul) or len(node.args) != 2:
        return None
    for left, right in (node.args, node.args[::-1]):
        found = match_activation(_inner(left, []))
        if found is not None and isinstance(right, Node):
            return found, right
    return None


def match_mlp(down: Projection, writes: dict[Node, list[Node]], problem: Rejection | None = None) -> Any:
    """Prove the layer that ends in ``down``: an :class:`MlpMatch`, or a :class:`Rejection` with layer and source line.

    ``problem`` is a reason to refuse that holds for the graph as a whole.
    """
    try:
        found = _match(down)
        _check_values(found)
        if problem is None:
            region, operands = set(found.region), _operands(found)
            if region & set(operands):
                raise Refusal(down.call, "an operand of the layer is one of its own values")
            problem = why_open(region, {found.output})
            if problem is None:
                problem = why_stale(region, operands, found.output, writes)
    except Refusal as refusal:
        problem = Rejection(refusal.reason, refusal.node.name)
    if problem is not None:
        return Rejection(problem.reason, problem.node, _layer(down, None), source_line(down.call))
    return found


def _match(down: Projection) -> MlpMatch:
    region: list[Node] = [down.call]
    product = _inner(down.x, region)
    gated = _gated(product)
    assert gated is not None
    acted, other = gated
    if other is None:
        region += acted.inner
        up, up_half = _branch(acted.source, region)
        if up_half:
            raise Refusal(acted.source, f"only the {up_half} half of a product is used")
        gate, gate_half = None, ""
    else:
        left, right = product.args
        _inner(left if other is right else right, region)
        region += [product, *acted.inner]
        if not _alike(shape(left), shape(right)):
            # Views keep the order of rows only as long as no factor is broadcast.
            raise Refusal(product, f"the factors {list(shape(left))} and {list(shape(right))} are broadcast against each other")
        if match_activation(_inner(other, [])) is not None:
            raise Refusal(product, "both factors are activations: the layer is not act(gate) * up")
        gate, gate_half = _branch(acted.source, region)
        up, up_half = _branch(other, region)
        if gate.x is not up.x:
            raise Refusal(product, f"gate and up have different inputs: {gate.x.name} and {up.x.name}")
        if {gate_half, up_half} not in ({""}, {"first", "last"}) or (gate_half and gate.call is not up.call):
            raise Refusal(product, f"gate and up are the {gate_half or 'whole'} and the {up_half or 'whole'} of their products")
        if not gate_half and gate.call is up.call:
            raise Refusal(product, "gate and up are one product: the layer is not gated by another branch")
    channels, hidden = up.sizes
    inner = channels // 2 if up_half else channels
    out, given = down.sizes
    sizes = (hidden, inner, out, given)
    if not all(isinstance(size, int) for size in sizes):
        raise Refusal(down.call, f"weights have symbolic sizes {sizes}")
    if given != inner or (gate is not None and gate.sizes != up.sizes):
        raise Refusal(down.call, f"the weights {up.sizes} and {down.sizes} do not fit each other")
    return MlpMatch(
        down.call, down.call, up.x, gate, up, down, gate_half, up_half, acted.name, hidden, inner, out,
        with_assertions(dict.fromkeys(region)), _layer(down, up),
    )  # fmt: skip


def _branch(node: Any, region: list[Node]) -> tuple[Projection, str]:
    """The projection that ``node`` is the value of, and which half of it."""
    node = _inner(node, region)
    halved, passed = half(node, []), ""
    if halved is not None:
        if halved.which not in ("first", "last"):
            raise Refusal(node, f"gate or up is the {halved.which} half of a product: only halves side by side are taken")
        region += halved.inner
        node, passed = _inner(halved.source, region), halved.which
    found = projection(node)
    if found is None:
        name = str(packet(node) or getattr(node, "op", node)).rsplit(".", 1)[-1]
        where = node if isinstance(node, Node) else region[0]
        raise Refusal(where, f"gate or up is not the value of a linear layer but comes from {name}")
    region.append(found.call)
    return found, passed


def _operands(match: MlpMatch) -> list[Node]:
    given = [match.x, match.up.weight, match.up.bias, match.down.weight, match.down.bias]
    if match.gate is not None:
        given += [match.gate.weight, match.gate.bias]
    return list(dict.fromkeys(node for node in given if node is not None))


def _check_values(match: MlpMatch) -> None:
    x, out = tensor(match.x), tensor(match.output)
    assert x is not None and out is not None
    for node in _operands(match)[1:]:
        held = tensor(node)
        if held is None or node.op not in _INPUTS:
            raise Refusal(node, f"a weight is computed in this graph ({packet(node)}), not read from a parameter")
        if held.dtype != x.dtype:
            raise Refusal(node, f"a weight is {held.dtype}, the layer's input {x.dtype}")
        if held.device != x.device:
            raise Refusal(node, f"a weight is on {held.device}, the layer's input on {x.device}")
    for product in (match.up, match.down, *(() if match.gate is None else (match.gate,))):
        if product.bias is not None and not _alike(shape(product.bias), product.sizes[:1]):
            raise Refusal(product.bias, f"a bias is {list(shape(product.bias))}, not a vector of {product.sizes[0]}")
    if out.dtype != x.dtype or not x.dtype.is_floating_point:
        raise Refusal(match.output, f"the layer's output is {out.dtype}, its input {x.dtype}")
    for node in match.region:
        value = tensor(node)
        if value is None or not is_call(node, *CASTS):
            continue
        if not value.dtype.is_floating_point or torch.promote_types(value.dtype, x.dtype) != value.dtype:
            raise Refusal(node, f"a value of the layer is rounded to {value.dtype} on the way")
        if value.device != x.device:
            raise Refusal(node, f"a value of the layer is moved to {value.device} on the way")
    if len(shape(match.output)) != 2 and not _alike(shape(match.output), (*shape(match.x)[:-1], match.out)):
        raise Refusal(match.output, f"the layer turns {list(shape(match.x))} into {list(shape(match.output))}")


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))


def _layer(down: Projection, up: Projection | None) -> str | None:
    """The module that holds the projections: what their paths have in common."""
    path = layer_name(down.call)
    if path is None:
        return None
    parts = path.split(".")
    other = layer_name(up.call) if up is not None else None
    if other is None:
        return ".".join(parts[:-1]) or path
    shared = []
    for mine, theirs in zip(parts, other.split(".")):
        if mine != theirs:
            break
        shared.append(mine)
    return ".".join(shared) or path
