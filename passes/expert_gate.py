"""What an expert does in front of its down product: ``act(gate) * up``, or gpt-oss's clamped form, of the halves of one value
or of two values."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from spec_compile.passes.expert_products import is_fallback, is_view
from spec_compile.passes.nodes import argument, aten, is_call, packet, same, scalar, shape, value

CASTS = (aten.to, aten._to_copy)
_CLAMPS = (aten.clamp, aten.clamp_min, aten.clamp_max)
_PRODUCTS = (aten.einsum, aten.bmm, aten.matmul, aten._grouped_mm, aten.add, aten.masked_fill)
_PLAIN = {aten.silu: "silu", aten.relu: "relu"}


class Refusal(Exception):
    """A proof failed at ``node``."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class Gate:
    """``activation`` of the halves of ``source`` ``[..., 2I]``, or of ``source`` and ``up``, both ``[..., I]``; ``inner`` are the
    nodes in between."""

    source: Node
    interleaved: bool
    activation: str
    limit: float = 0.0
    alpha: float = 0.0
    inner: tuple[Node, ...] = ()
    up: Node | None = None


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
    if gate.source is up.source and gate.which == "whole":
        raise Refusal(node, "gate and up are one value")
    if gate.which == up.which == "whole":
        sizes = shape(gate.source), shape(up.source)
        if len(sizes[0]) != len(sizes[1]) or not all(same(a, b) for a, b in zip(*sizes)):
            raise Refusal(node, f"gate and up are two values of {list(sizes[0])} and {list(sizes[1])}")
        return Gate(gate.source, False, activation, limit, alpha, inner, up.source)
    if gate.source is not up.source:
        raise Refusal(node, f"gate and up are parts of two values, of one the {gate.which}, of the other the {up.which}")
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
    gate, up = _side(acted.args[0], inner), _side(right, inner)
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
        first, second = _side(gate.args[0], inner), _side(up.args[0], inner)
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


def _side(node: Any, inner: list[Node]) -> Half | None:
    """A half of one product, or a product of its own, as far as can be seen from here."""
    found = half(node, inner)
    node = uncast(node, [])
    if found is None and (is_view(node) or is_call(node, *_PRODUCTS) or is_fallback(node)):
        return Half(node, "whole", ())
    return found


def half(node: Any, inner: list[Node]) -> Half | None:
    """One half of the last dimension of a value: which, and the nodes that cut it."""
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
