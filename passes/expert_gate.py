"""What an expert does between its two products: ``act(gate) * up``, or gpt-oss's clamped form, on the halves of one value."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from spec_compile.passes.nodes import argument, aten, is_call, packet, scalar, shape, value

CASTS = (aten.to, aten._to_copy)
_CLAMPS = (aten.clamp, aten.clamp_min, aten.clamp_max)
_PRODUCTS = (aten.einsum, aten.bmm, aten.matmul, aten._grouped_mm, aten.squeeze, aten.add, aten.masked_fill)
_TWO_PRODUCTS = "gate and up are two products: stack their weights as one parameter [E, 2I, H], gate rows first"
_PLAIN = {aten.silu: "silu", aten.relu: "relu"}


class Refusal(Exception):
    """A proof failed at ``node``."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Gate:
    """``activation`` of the halves of ``source`` ``[..., 2I]``; ``inner`` are the nodes in between."""

    source: Node
    interleaved: bool
    activation: str
    limit: float = 0.0
    alpha: float = 0.0
    inner: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Half:
    source: Node
    which: str
    inner: tuple[Node, ...]


def match_gate(node: Node) -> Gate:
    """Walk from the input of the down product to the output of the first.

    Raises:
        Refusal: not a gated activation that is known.
    """
    inner: list[Node] = []
    product = uncast(node, inner)
    if not is_call(product, aten.mul):
        raise Refusal(product, f"the experts' activation ends in {_name(product)}, not in a product of gate and up")
    inner.append(product)
    for left, right in (product.args[:2], product.args[1::-1]):
        for form in (_plain, _clamped):
            found = form(left, right)
            if found is not None:
                activation, limit, alpha, gate, up, nodes = found
                return _joined(product, gate, up, activation, limit, alpha, (*inner, *nodes))
    raise Refusal(product, "the experts' activation is none of silu, gelu, relu times up, or gpt-oss's clamped form")


def _joined(node: Node, gate: Half, up: Half, activation: str, limit: float, alpha: float, inner: tuple[Node, ...]) -> Gate:
    if gate.source is not up.source:
        raise Refusal(node, _TWO_PRODUCTS)
    if (gate.which, up.which) in (("last", "first"), ("odd", "even")):
        raise Refusal(node, "gate and up are swapped: the activation is taken of the second half")
    if (gate.which, up.which) not in (("first", "last"), ("even", "odd")):
        raise Refusal(node, f"gate and up are the {gate.which} and the {up.which} half of one product")
    return Gate(gate.source, gate.which == "even", activation, limit, alpha, (*inner, *gate.inner, *up.inner))


_Found = tuple[str, float, float, Half, Half, tuple[Node, ...]]


def _plain(left: Any, right: Any) -> _Found | None:
    """``act(gate) * up``."""
    inner: list[Node] = []
    acted = uncast(left, inner)
    activation = _PLAIN.get(packet(acted)) if isinstance(acted, Node) else None
    if is_call(acted, aten.gelu):
        activation = {"none": "gelu", "tanh": "gelu_tanh"}.get(argument(acted, "approximate", "none"))
    if activation is None:
        return None
    inner.append(acted)
    gate, up = half(acted.args[0], inner), half(right, inner)
    if gate is None and up is None and is_call(acted.args[0], *_PRODUCTS) and is_call(right, *_PRODUCTS):
        raise Refusal(acted, _TWO_PRODUCTS)
    return (activation, 0.0, 0.0, gate, up, tuple(inner)) if gate and up else None


def _clamped(left: Any, right: Any) -> _Found | None:
    """``(clamp(up, -L, L) + 1) * (g * sigmoid(alpha * g))`` with ``g = min(gate, L)``."""
    inner: list[Node] = []
    shifted, glu = uncast(left, inner), uncast(right, inner)
    up = next((a for a, b in pairs(shifted, aten.add) if number(b) == 1.0), None)
    if up is None or argument(shifted, "alpha", 1) != 1:
        return None
    for gate, sigmoid in pairs(glu, aten.mul):
        scaled = sigmoid.args[0] if is_call(sigmoid, aten.sigmoid) else None
        alpha = next((number(b) for a, b in pairs(scaled, aten.mul) if a is gate), None)
        gate_limits, up_limits = _clamp(gate), _clamp(up)
        if alpha is None or gate_limits is None or up_limits is None:
            continue
        limit = gate_limits[1]
        if gate_limits[0] is not None or limit is None or up_limits != (-limit, limit):
            continue
        first, second = half(gate.args[0], inner), half(up.args[0], inner)
        if first is None or second is None:
            continue
        return ("swiglu_oai", limit, alpha, first, second, (*inner, shifted, glu, sigmoid, scaled, gate, up))
    return None


def pairs(node: Any, *packets: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of the operands of a commutative call."""
    if is_call(node, *packets) and len(node.args) >= 2:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _clamp(node: Any) -> tuple[float | None, float | None] | None:
    """``(min, max)`` of a clamp by numbers, None for an open end."""
    if not is_call(node, *_CLAMPS):
        return None
    low, high = argument(node, "min"), argument(node, "max")
    ends = (number(low), number(high))
    known = (low is None or ends[0] is not None) and (high is None or ends[1] is not None)
    return ends if known else None


def number(arg: Any) -> float | None:
    """A number; a symbolic one (a module's attribute under ``dynamic=True``) is pinned to its value by a guard."""
    found = scalar(arg)
    held = value(arg)
    if found is None and isinstance(held, torch.SymFloat | torch.SymInt) and held.node.hint is not None:
        return float(held)
    return found


def half(node: Any, inner: list[Node]) -> Half | None:
    node = uncast(node, inner)
    if not isinstance(node, Node):
        return None
    if node.target is operator.getitem and is_call(node.args[0], aten.chunk, aten.split):
        whole: Any = node.args[0]
        place: Any = node.args[1]
        source, size = whole.args[0], shape(whole.args[0])
        last = argument(whole, "dim", 0) in (-1, len(size) - 1)
        parts = whole.meta["val"]
        if not last or len(parts) != 2 or not isinstance(source, Node) or not _even(size):
            return None
        halved = parts[0].shape[-1] == parts[1].shape[-1]
        which = ("first", "last")[place] if halved else f"{place}th uneven"
        return Half(source, which, (node, whole))
    if is_call(node, aten.slice) and isinstance(node.args[0], Node):
        return _sliced(node, node.args[0])
    return None


def _sliced(node: Node, source: Node) -> Half | None:
    sizes = shape(source)
    dim, step = argument(node, "dim", 0), argument(node, "step", 1)
    start, end = argument(node, "start", 0), argument(node, "end", sizes[-1])
    if dim not in (-1, len(sizes) - 1) or not _even(sizes) or not all(isinstance(x, int) for x in (start, end, step)):
        return None
    width = sizes[-1]
    start, end = slice(start, end).indices(width)[:2]
    found = {
        (0, width // 2, 1): "first", (width // 2, width, 1): "last", (0, width, 2): "even", (1, width, 2): "odd",
    }.get((start, end, step))  # fmt: skip
    return Half(source, found, (node,)) if found else None


def _even(sizes: tuple[Any, ...]) -> bool:
    return bool(sizes) and isinstance(sizes[-1], int) and sizes[-1] % 2 == 0


def uncast(node: Any, inner: list[Node]) -> Any:
    while is_call(node, *CASTS):
        inner.append(node)
        node = node.args[0]
    return node


def _name(node: Any) -> str:
    found = packet(node) if isinstance(node, Node) else None
    return str(found).rsplit(".", 1)[-1] if found is not None else str(getattr(node, "op", node))
