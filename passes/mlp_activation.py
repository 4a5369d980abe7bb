"""Recognise the activation of a feed-forward layer, spelled as one call or as arithmetic.

Every linear call of a graph is looked at: nothing here may pin a symbolic number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from spec_compile.passes.expert_gate import uncast
from spec_compile.passes.nodes import argument, aten, is_call, scalar

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Activation:
    """``name`` (as in :data:`spec_compile.kernels.mlp.ACTIVATIONS`) of ``source``; ``inner`` are the nodes that compute it."""

    name: str
    source: Node
    inner: tuple[Node, ...]


def match_activation(node: Any) -> Activation | None:
    """The activation that ``node`` is the value of, or None where it is none that is known."""
    inner: list[Node] = []
    node = uncast(node, inner)
    if is_call(node, aten.silu, aten.relu):
        name = "silu" if is_call(node, aten.silu) else "relu"
        return Activation(name, node.args[0], (*inner, node))
    if is_call(node, aten.gelu):
        kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(argument(node, "approximate", "none"))
        return Activation(kind, node.args[0], (*inner, node)) if kind else None
    for form in (_squared_relu, _spelled_silu, _spelled_gelu_tanh):
        found = form(node)
        if found is not None:
            return Activation(found.name, found.source, (*inner, *found.inner))
    return None


def _squared_relu(node: Any) -> Activation | None:
    squared = is_call(node, aten.square) or (is_call(node, aten.pow) and scalar(node.args[1]) == 2.0)
    doubled = is_call(node, aten.mul) and node.args[0] is node.args[1]
    if not squared and not doubled:
        return None
    inner: list[Node] = []
    rectified = uncast(node.args[0], inner)
    if not is_call(rectified, aten.relu):
        return None
    return Activation("relu2", rectified.args[0], (node, *inner, rectified))


def _spelled_silu(node: Any) -> Activation | None:
    """``x * sigmoid(x)``."""
    if not is_call(node, aten.mul):
        return None
    for x, factor in (node.args[:2], node.args[1::-1]):
        if is_call(factor, aten.sigmoid) and factor.args[0] is x and isinstance(x, Node):
            return Activation("silu", x, (node, factor))
    return None


@dataclass
class _Product:
    """A product, multiplied out: ``constant`` times ``factors``."""

    constant: float
    factors: list[Node]
    inner: list[Node]


def _multiplied_out(node: Any, depth: int = 8) -> _Product:
    known = scalar(node)
    if known is not None:
        return _Product(known, [], [])
    if depth and is_call(node, aten.mul) and len(node.args) == 2:
        left, right = (_multiplied_out(arg, depth - 1) for arg in node.args)
        return _Product(left.constant * right.constant, left.factors + right.factors, [node, *left.inner, *right.inner])
    if is_call(node, aten.pow) and scalar(node.args[1]) in (2.0, 3.0):
        base = node.args[0]
        return _Product(1.0, [base] * int(scalar(node.args[1]) or 0), [node])
    return _Product(1.0, [node], [])


def _sum_with(node: Any, wanted: Any) -> Any:
    """The other summand of ``node`` where one of two is ``wanted`` (a node, or the number 1)."""
    if not is_call(node, aten.add) or argument(node, "alpha", 1) != 1:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if one is wanted or (wanted == 1 and scalar(one) == 1.0):
            return other
    return None


def _near(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=1e-6)


def _spelled_gelu_tanh(node: Any) -> Activation | None:
    """``0.5 x (1 + tanh(c (x + 0.044715 x^3)))``, also as ``c x (1 + 0.044715 x^2)``, with c = sqrt(2 / pi)."""
    whole = _multiplied_out(node)
    if len(whole.factors) != 2 or not _near(whole.constant, 0.5):
        return None
    for x, shifted in (whole.factors, whole.factors[::-1]):
        tanh = _sum_with(shifted, 1)
        if not is_call(tanh, aten.tanh):
            continue
        argued = _multiplied_out(tanh.args[0])
        inner = [*whole.inner, shifted, tanh, *argued.inner]
        if not _near(argued.constant, _SQRT_2_OVER_PI):
            continue
        one: Any = x
        if len(argued.factors) == 1:
            total, powers = argued.factors[0], 3
        elif len(argued.factors) == 2 and x in argued.factors:
            first, second = argued.factors
            total, powers, one = (second if first is x else first), 2, 1
        else:
            continue
        cubic = _multiplied_out(_sum_with(total, one))
        if _near(cubic.constant, 0.044715) and cubic.factors == [x] * powers:
            return Activation("gelu_tanh", x, tuple(dict.fromkeys([*inner, total, *cubic.inner])))
    return None
