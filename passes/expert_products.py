"""Products over stacked expert weights ``[E, ., .]``, one row of input for each pair of a row and an expert it chose.

Spellings: ``bmm`` with weights gathered by expert (transformers' ``batched_mm``), ``_grouped_mm`` over rows sorted by expert
and its fallback operator (``grouped_mm``), and ``einsum`` with weights gathered by row and choice (gpt-fast).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from spec_compile.passes.nodes import argument, aten, is_call, packet, same, shape

VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
SWAPS = (aten.transpose, aten.swapaxes, aten.permute, aten.mT)
INPUTS = ("placeholder", "get_attr")
_BMM = (aten.bmm, aten.matmul)
# What may stand between the two products of an expert, in any spelling: enough to tell which products belong together.
_INNER = (
    *VIEWS, aten.silu, aten.gelu, aten.relu, aten.sigmoid, aten.tanh, aten.mul, aten.add, aten.sub, aten.div, aten.neg,
    aten.clamp, aten.clamp_min, aten.clamp_max, aten.minimum, aten.maximum, aten.pow, aten.slice, aten.select, aten.chunk,
    aten.split, aten.masked_fill, aten.to, aten._to_copy,
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        call: the product's node.
        form: ``batched_mm``, ``grouped_mm``, ``gather``, or ``dense`` (every expert meets every row: not a choice).
        rows: input ``[S, in]``, S = N * K pairs; ``[N, in]`` or ``[N, K, in]`` for ``gather``.
        weight: stacked ``[E, out, in]``, or ``[E, in, out]`` where ``transposed``.
        key: what picks the expert: ids ``[S]`` or ``[N, K]``, or offsets ``[E]`` into rows sorted by expert.
        inner: nodes between ``rows``, ``weight``, ``key`` and the call.
        views: views of the weight.
    """

    call: Node
    form: str
    rows: Node
    weight: Node
    transposed: bool
    key: Node
    inner: tuple[Node, ...] = ()
    views: tuple[Node, ...] = ()


def find_products(graph: Graph) -> list[Product]:
    """Every product over stacked expert weights, in graph order."""
    return [found for node in graph.nodes if (found := _product(node)) is not None]


def last_products(products: list[Product]) -> list[Product]:
    """Those that no other product is computed from within an expert: the down products, one for each MoE layer."""
    by_call = {product.call: product for product in products}
    first: set[Node] = set()
    for product in products:
        seen, queue = {product.rows}, [product.rows]
        while queue:
            node = queue.pop()
            if node in by_call:
                first.add(node)
            elif is_call(node, *_INNER) or getattr(node.target, "__name__", "") == "getitem":
                queue += [parent for parent in node.all_input_nodes if parent not in seen]
                seen.update(node.all_input_nodes)
    return [product for product in products if product.call not in first]


def _product(node: Node) -> Product | None:
    if is_call(node, *_BMM) and len(node.args) == 2:
        return _batched(node)
    if is_call(node, aten._grouped_mm) or _is_fallback(node):
        return _grouped(node)
    if is_call(node, aten.einsum):
        return _gathered(node)
    return None


def _is_fallback(node: Node) -> bool:
    """transformers' operator for dtypes that ``_grouped_mm`` does not take under compilation."""
    found = packet(node)
    return found is not None and str(found) == "transformers.grouped_mm_fallback"


def _is_stack(node: Any) -> bool:
    return isinstance(node, Node) and len(shape(node)) == 3


def _picked(node: Any, rank: int) -> tuple[Node, Node] | None:
    """``(weight, ids)`` of ``weight[ids]`` with a stacked weight and ids of ``rank`` dimensions."""
    if not is_call(node, aten.index) or not _is_stack(node.args[0]):
        return None
    ids = [index for index in node.args[1] if index is not None]
    if len(node.args[1]) != 1 or len(ids) != 1 or len(shape(ids[0])) != rank:
        return None
    return node.args[0], ids[0]


def _batched(node: Node) -> Product | None:
    left, right = node.args
    if not (_is_stack(left) and _is_stack(right)):
        return None
    assert isinstance(left, Node) and isinstance(right, Node)
    picked, transposed = _picked(left, 1), False
    pad, gathered = right, left
    if picked is None:
        picked, transposed, pad, gathered = _picked(right, 1), True, left, right
    if picked is None:
        if right.op in INPUTS and not same(shape(right)[0], 1) and same(shape(left)[0], shape(right)[0]):
            return Product(node, "dense", left, right, True, right)
        return None
    if not is_call(pad, *VIEWS) or len(shape(pad.args[0])) != 2 or not same(shape(pad)[1 if transposed else 2], 1):
        return None
    rows = pad.args[0]
    assert isinstance(rows, Node)
    return Product(node, "batched_mm", rows, picked[0], transposed, picked[1], (gathered, pad))


def _grouped(node: Node) -> Product | None:
    rows, weight, offs = argument(node, _first_name(node)), argument(node, _second_name(node)), argument(node, "offs")
    if not (isinstance(rows, Node) and len(shape(rows)) == 2 and _is_stack(weight) and isinstance(offs, Node)):
        return None
    if is_call(weight, *SWAPS) and _swaps_last_two(weight):
        return Product(node, "grouped_mm", rows, weight.args[0], False, offs, (), (weight,))
    return Product(node, "grouped_mm", rows, weight, True, offs)


def _first_name(node: Any) -> str:
    return str(node.target._schema.arguments[0].name)


def _second_name(node: Any) -> str:
    return str(node.target._schema.arguments[1].name)


def _swaps_last_two(node: Any) -> bool:
    if is_call(node, aten.mT):
        return True
    if is_call(node, aten.permute):
        return [dim % 3 for dim in node.args[1]] == [0, 2, 1]
    return {dim % 3 for dim in node.args[1:3]} == {1, 2}


def equation(node: Node) -> tuple[str, str, str] | None:
    """``(left, right, out)`` letters of an einsum of two operands without ellipsis."""
    text = str(node.args[0]).replace(" ", "")
    inputs, arrow, out = text.partition("->")
    parts = inputs.split(",")
    if not arrow or len(parts) != 2 or "." in text or any(len(set(part)) != len(part) for part in (*parts, out)):
        return None
    return parts[0], parts[1], out


def _gathered(node: Any) -> Product | None:
    letters = equation(node)
    operands = node.args[1]
    if letters is None or not isinstance(operands, list | tuple) or len(operands) != 2:
        return None
    left, right, out = letters
    rows, gathered = operands
    picked = _picked(gathered, 2)
    if picked is None:
        rows, gathered, left, right = gathered, rows, right, left
        picked = _picked(gathered, 2)
    if picked is None or len(right) != 4 or not isinstance(rows, Node):
        return None
    n, k = right[0], right[1]
    for inner, outer, transposed in ((right[3], right[2], False), (right[2], right[3], True)):
        if left in (n + inner, n + k + inner) and out == n + k + outer:
            return Product(node, "gather", rows, picked[0], transposed, picked[1], (gathered,))
    return None
