"""Products over stacked expert weights ``[E, ., .]``, one row of input for each pair of a row and an expert it chose.

Spellings: ``bmm`` with weights gathered by expert (transformers' ``batched_mm``), ``_grouped_mm`` over rows sorted by expert
and its fallback operator (``grouped_mm``), and ``einsum`` with weights gathered by row and choice (gpt-fast).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.passes.nodes import argument, aten, is_call, keeps_values, mutated_arguments, packet, same, shape

VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
SWAPS = (aten.transpose, aten.swapaxes, aten.permute, aten.mT)
INPUTS = ("placeholder", "get_attr")
_BMM = (aten.bmm, aten.matmul)
# What may stand between the two products of an expert besides elementwise calls, in any spelling.
_INNER = (
    *VIEWS, aten.slice, aten.select, aten.chunk, aten.split, aten.masked_fill, aten.to, aten._to_copy, aten.relu6,
    aten.hardswish, aten.celu, aten.selu,
)  # fmt: skip
_GATES = (aten.silu, aten.gelu, aten.relu, aten.sigmoid, aten.tanh)


def is_view(node: Any) -> bool:
    """Whether a call gives the values of its first argument another shape: not another dtype, and not in place."""
    return is_call(node, *VIEWS) and keeps_values(node)


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
    products = [found for node in graph.nodes if (found := _product(node)) is not None]
    if not any(product.form == "dense" for product in products):
        return products
    # A batched product by an input may be anything (a cache, say): only a gated pair of them is one of experts.
    by_call = {product.call: product for product in products if product.form == "dense"}
    gated: set[Node] = set()
    for product in by_call.values():
        gated.update(call for first in _gated_by(product, by_call) for call in (first.call, product.call))
    return [product for product in products if product.form != "dense" or product.call in gated]


def last_products(products: list[Product]) -> list[Product]:
    """Those that no other product is computed from within an expert: the down products, one for each MoE layer."""
    by_call = {product.call: product for product in products}
    first: set[Node] = set()
    for product in products:
        first.update(node for node in _inside(product, by_call) if node in by_call and _same_choice(by_call[node], product))
    return [product for product in products if product.call not in first]


def _inside(product: Product, by_call: dict[Node, Product]) -> set[Node]:
    """What stands between the rows of a product and the products in front of it, those included."""
    seen, queue = {product.rows}, [product.rows]
    while queue:
        node = queue.pop()
        if node not in by_call and _is_inner(node):
            queue += [parent for parent in node.all_input_nodes if parent not in seen]
            seen.update(node.all_input_nodes)
    return seen


def _is_inner(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.pointwise in node.target.tags or is_call(node, *_INNER, *_GATES)
    return getattr(node.target, "__name__", "") == "getitem"


def _gated_by(product: Product, by_call: dict[Node, Product]) -> list[Product]:
    """Dense products ``[E, ., 2I]`` whose activated halves are the rows of this one, ``[E, I, .]``."""
    inside = _inside(product, by_call)
    if not any(is_call(node, *_GATES) for node in inside) or not any(is_call(node, aten.mul) for node in inside):
        return []
    experts, inner = shape(product.weight)[:2]
    firsts = [by_call[node] for node in inside if node in by_call]
    return [
        first for first in firsts
        if first.call is not product.call and same(shape(first.weight)[0], experts) and same(shape(first.weight)[2], 2 * inner)
    ]  # fmt: skip


def _same_choice(first: Product, last: Product) -> bool:
    """Whether both pick experts by one top-k, however it was sorted, counted or shifted."""
    ours, theirs = _choices(first.key), _choices(last.key)
    return not ours or not theirs or bool(ours & theirs)


def _choices(key: Node) -> set[Node]:
    """The nearest top-k calls behind what picks the experts."""
    found: set[Node] = set()
    seen, queue = {key}, [key]
    while queue and len(seen) < 64:
        node = queue.pop()
        if is_call(node, aten.topk):
            found.add(node)
            continue
        queue += [parent for parent in node.all_input_nodes if parent not in seen]
        seen.update(node.all_input_nodes)
    return found


def _product(node: Node) -> Product | None:
    if is_call(node, *_BMM) and len(node.args) == 2:
        return _batched(node)
    if is_call(node, aten._grouped_mm) or is_fallback(node):
        return _grouped(node)
    if is_call(node, aten.einsum):
        return _gathered(node)
    return None


def is_fallback(node: Node) -> bool:
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
    if not is_view(pad) or len(shape(pad.args[0])) != 2 or not same(shape(pad)[1 if transposed else 2], 1):
        return None
    rows = pad.args[0]
    assert isinstance(rows, Node)
    if not all(same(a, b) for a, b in zip(shape(rows), (shape(pad)[0], shape(pad)[2 if transposed else 1]))):
        return Product(node, "batched_mm", pad, picked[0], transposed, picked[1], (gathered,))  # regroups the rows
    return Product(node, "batched_mm", rows, picked[0], transposed, picked[1], (gathered, pad))


def _grouped(node: Node) -> Product | None:
    rows, weight, offs = argument(node, _first_name(node)), argument(node, _second_name(node)), argument(node, "offs")
    if not (isinstance(rows, Node) and len(shape(rows)) == 2 and _is_stack(weight) and isinstance(offs, Node)):
        return None
    if is_call(weight, *SWAPS) and not mutated_arguments(weight) and _swaps_last_two(weight):
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
