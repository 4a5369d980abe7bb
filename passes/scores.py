"""The softmax anchor: walk from ``softmax`` up to ``q k^T`` and down to ``weights v``, classifying every node on the way.

Up, from the softmax::

    [ x - max(x) ]  <-  [ cat(scores, sinks) ]  <-  masks and biases (add, where, masked_fill, baddbmm)
    <-  softcap * tanh(x / softcap)  <-  scale (mul, div, baddbmm alpha)  <-  matmul(q, k^T)

Down: casts, inactive dropout, ``[..., :-1]`` where there are sinks, ``matmul(weights, v)``. Nothing else may touch the
scores, and no node in between may have a user outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from spec_compile.kernels.blocks import hidden_threshold
from spec_compile.passes.axes import base_of, broadcast_to, replay
from spec_compile.passes.base import Rejection
from spec_compile.passes.nodes import argument, aten, is_call, keeps_values, packet, same, scalar, shape, tensor

SOFTMAXES = (aten.softmax, aten._softmax, aten._safe_softmax)
MATMULS = (aten.matmul, aten.bmm, aten.mm)
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
_COPIES = (aten.contiguous, aten.clone, aten.alias, aten.detach)
_CASTS = (aten.to, aten._to_copy, aten.type_as)


@dataclass(frozen=True)
class MaskTerm:
    """One thing added to the scores or hiding them.

    ``kind`` is ``"add"`` (floating, added), ``"keep"`` (bool, True = visible) or ``"hide"`` (bool, True = hidden);
    ``rank`` is the rank of the scores where the term enters.
    """

    node: Node
    kind: str
    rank: int
    lead: tuple[Any, ...] = ()


@dataclass
class ScoreChain:
    """Everything between the two matmuls of one attention."""

    product: Node
    query: Node
    key: Node
    scale: float = 1.0
    softcap: float = 0.0
    terms: list[MaskTerm] = field(default_factory=list)
    sinks: Node | None = None
    output: Node | None = None
    weights: Node | None = None
    values: Node | None = None
    region: list[Node] = field(default_factory=list)


def _reject(node: Node, reason: str) -> Rejection:
    return Rejection(reason, node.name)


def _short(node: Node) -> str:
    return str(packet(node)).rsplit(".", 1)[-1] if packet(node) else node.op


def is_attention_softmax(node: Node) -> bool:
    """Whether this softmax sits between two matmuls, so that it must be rewritten or refused (a router's does not)."""
    return is_call(node, *SOFTMAXES) and _feeds_matmul(node) and _comes_from_matmul(node)


def _feeds_matmul(node: Node) -> bool:
    seen, queue = {node}, [node]
    while queue:
        for user in queue.pop().users:
            if is_call(user, *MATMULS, aten.einsum):
                return True
            elementwise = is_call(
                user, *_VIEWS, *_COPIES, *_CASTS, aten.dropout, aten.native_dropout, aten.mul, aten.add, aten.where,
                aten.masked_fill, aten.slice, aten.transpose, aten.permute, aten.nan_to_num, aten.div, aten.expand,
            )  # fmt: skip
            if elementwise and user not in seen:
                seen.add(user)
                queue.append(user)
    return False


def _comes_from_matmul(node: Node) -> bool:
    seen, queue = {node}, [node]
    while queue:
        for parent in queue.pop().all_input_nodes:
            if is_call(parent, *MATMULS, aten.einsum, aten.baddbmm):
                return True
            elementwise = is_call(
                parent, *_VIEWS, *_COPIES, *_CASTS, aten.mul, aten.div, aten.add, aten.sub, aten.where, aten.cat,
                aten.masked_fill, aten.tanh, aten.transpose, aten.permute, aten.clamp, aten.expand, aten.slice, aten.neg,
            )  # fmt: skip
            if elementwise and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return False


def walk_scores(softmax: Node) -> ScoreChain | Rejection:
    """Classify the chain around one softmax; the result's ``region`` is checked to be closed by the caller."""
    scores = softmax.args[0]
    if not isinstance(scores, Node):
        return _reject(softmax, "softmax of a constant")
    rank = len(shape(scores))
    dim = argument(softmax, "dim")
    if not isinstance(dim, int) or dim % rank != rank - 1:
        return _reject(softmax, f"softmax over dimension {dim} of {rank}, not over the keys")
    down = _walk_down(softmax)
    if isinstance(down, Rejection):
        return down
    sliced, output, weights, values, below = down
    chain = _walk_up(scores, sliced)
    if isinstance(chain, Rejection):
        return chain
    chain.output, chain.weights, chain.values = output, weights, values
    chain.region = [*chain.region, softmax, *below]
    if sliced and chain.sinks is None:
        return _reject(softmax, "the last weight of every row is dropped, but no sink logit was appended")
    return chain


def _walk_down(softmax: Node) -> tuple[bool, Node, Node, Node, list[Node]] | Rejection:
    node, sliced = softmax, False
    below: list[Node] = []
    rank = len(shape(softmax))
    while True:
        users = list(node.users)
        if len(users) != 1:
            return _reject(
                node,
                f"the attention weights have {len(users)} users (output_attentions, or a value shared outside the region)",
            )
        user = users[0]
        if user.op == "output":
            return _reject(node, "the attention weights are returned (output_attentions)")
        if is_call(user, *_COPIES):
            pass
        elif is_call(user, *_CASTS):
            found = tensor(user)
            if found is None or not found.dtype.is_floating_point:
                return _reject(user, "the attention weights are cast to a non-floating dtype")
        elif is_call(user, aten.dropout, aten.native_dropout):
            if argument(user, "p", 0.0) != 0 and argument(user, "train", True):
                return _reject(user, "dropout is active on the attention weights; call model.eval()")
            if is_call(user, aten.native_dropout):
                return _reject(user, "native_dropout on the attention weights")
        elif is_call(user, *_VIEWS):
            if not _keeps_rows_and_keys(node, user):
                return _reject(user, f"{_short(user)} regroups the rows or keys of the attention weights")
        elif is_call(user, aten.slice) and not sliced and _drops_last(user, rank, shape(node)):
            sliced = True
        elif is_call(user, *MATMULS):
            if len(user.args) < 2 or user.args[0] is not node or not isinstance(user.args[1], Node):
                return _reject(user, "the attention weights are the right operand of the product, not the left")
            return sliced, user, node, user.args[1], below
        else:
            return _reject(user, f"the attention weights pass through {_short(user)} after the softmax (mask after softmax)")
        below.append(user)
        node, rank = user, len(shape(user))


def _drops_last(node: Node, rank: int, given: tuple[Any, ...]) -> bool:
    """``weights[..., :-1]``"""
    dim = argument(node, "dim", 0)
    start, step = argument(node, "start", 0), argument(node, "step", 1)
    kept = shape(node)
    return dim % rank == rank - 1 and start == 0 and step == 1 and same(kept[-1] + 1, given[-1])


def _keeps_rows_and_keys(before: Node, after: Node) -> bool:
    a, b = shape(before), shape(after)
    return keeps_values(after) and len(a) >= 2 and len(b) >= 2 and same(a[-1], b[-1]) and same(a[-2], b[-2])


def _walk_up(scores: Node, sliced: bool) -> ScoreChain | Rejection:
    """From the softmax's argument to the product. State: masks may be met until a softcap, a softcap until the scale."""
    node = scores
    region: list[Node] = []
    terms: list[MaskTerm] = []
    sinks: Node | None = None
    softcap = 0.0
    factor = 1.0
    shifted = False
    while True:
        region.append(node)
        before: Any
        if is_call(node, *MATMULS):
            left, right = node.args[0], node.args[1]
            if not isinstance(left, Node) or not isinstance(right, Node):
                return _reject(node, "the score product has a constant operand")
            return ScoreChain(node, left, right, factor, softcap, terms, sinks, region=region)
        if is_call(node, aten.baddbmm):
            return _from_baddbmm(node, factor, softcap, terms, sinks, region)
        if is_call(node, *_COPIES):
            before = node.args[0]
        elif is_call(node, *_CASTS):
            found, given = tensor(node), tensor(node.args[0])
            if found is None or given is None or not (found.dtype.is_floating_point and given.dtype.is_floating_point):
                return _reject(node, "the scores are cast to or from a non-floating dtype")
            before = node.args[0]
        elif is_call(node, *_VIEWS):
            if not isinstance(node.args[0], Node) or not _keeps_rows_and_keys(node.args[0], node):
                return _reject(node, f"{_short(node)} regroups the rows or keys of the scores")
            before = node.args[0]
        elif is_call(node, aten.sub) and not shifted and _is_row_max(node.args[1], node.args[0]):
            # softmax(x - max(x)) == softmax(x), but a cap or a sink column that follows would see the shift.
            if softcap or sinks is not None:
                return _reject(node, "the row maximum is subtracted before the softcap or the sinks")
            region.extend(_max_nodes(node.args[1]))
            shifted, before = True, node.args[0]
        elif is_call(node, aten.cat):
            if sinks is not None or not sliced or terms or softcap or factor != 1.0:
                return _reject(node, "something other than one column of sink logits is concatenated to the scores")
            found_sinks = _sink_vector(node)
            if isinstance(found_sinks, Rejection):
                return found_sinks
            sinks = found_sinks
            before = node.args[0][0]  # type: ignore[index]
        elif is_call(node, aten.div) and argument(node, "rounding_mode") is not None:
            return _reject(node, "the scores are divided with rounding")
        elif is_call(node, aten.mul, aten.div) and softcap == 0 and _is_softcap(node):
            tanh = node.args[0]
            inner = tanh.args[0]  # type: ignore[union-attr]
            softcap = scalar(node.args[1])  # type: ignore[assignment]
            if factor != 1.0:
                return _reject(node, "the scores are scaled after the softcap")
            region.extend([tanh, inner])  # type: ignore[list-item]
            before = inner.args[0]  # type: ignore[union-attr]
        elif is_call(node, aten.mul, aten.div):
            by, before = scalar(node.args[1]), node.args[0]
            if by is None and is_call(node, aten.mul):
                by, before = scalar(node.args[0]), node.args[1]
            if by is None or by == 0:
                return _reject(node, "the scores are multiplied by a tensor, not by a constant scale")
            factor = factor * by if is_call(node, aten.mul) else factor / by
        elif is_call(node, aten.add, aten.where, aten.masked_fill):
            if softcap:
                return _reject(node, "a mask or bias is added before the softcap")
            step = _mask_term(node)
            if isinstance(step, Rejection):
                return step
            term, before = step
            if factor != 1.0:
                return _reject(node, "the scores are scaled after a bias or mask was added")
            terms.append(term)
        else:
            return _reject(node, f"the scores pass through {_short(node)}, which the detector does not know")
        if not isinstance(before, Node):
            return _reject(node, "the scores come from a constant")
        node = before


def _from_baddbmm(
    node: Node, factor: float, softcap: float, terms: list[MaskTerm], sinks: Node | None, region: list[Node]
) -> ScoreChain | Rejection:
    bias, left, right = node.args[:3]
    beta, alpha = scalar(argument(node, "beta", 1)), scalar(argument(node, "alpha", 1))
    if not all(isinstance(arg, Node) for arg in (bias, left, right)) or alpha is None or beta is None:
        return _reject(node, "baddbmm with operands that are not tensors")
    if beta not in (0.0, 1.0):
        return _reject(node, f"baddbmm scales its bias by {beta}")
    if beta == 1.0:
        if factor != 1.0:
            return _reject(node, "the scores are scaled after a bias or mask was added")
        if softcap:
            return _reject(node, "a mask or bias is added before the softcap")
        terms = [*terms, MaskTerm(bias, "add", 3)]  # type: ignore[arg-type]
    return ScoreChain(node, left, right, factor * alpha, softcap, terms, sinks, region=region)  # type: ignore[arg-type]


def _is_row_max(arg: Any, scores: Any) -> bool:
    return bool(_max_nodes(arg)) and _max_nodes(arg)[-1].args[0] is scores


def _max_nodes(arg: Any) -> list[Node]:
    """The calls of ``x.amax(-1, keepdim=True)`` or ``x.max(-1, keepdim=True).values``; empty if ``arg`` is neither."""
    if is_call(arg, aten.amax):
        dims = argument(arg, "dim", [])
        dims = [dims] if isinstance(dims, int) else list(dims)
        last = len(shape(arg.args[0])) - 1
        return [arg] if [d % (last + 1) for d in dims] == [last] and argument(arg, "keepdim", False) else []
    if isinstance(arg, Node) and getattr(arg.target, "__name__", "") == "getitem" and arg.args[1] == 0:
        call = arg.args[0]
        if is_call(call, aten.max) and isinstance(call, Node) and len(call.args) >= 2:
            last = len(shape(call.args[0])) - 1
            dim = call.args[1]
            if isinstance(dim, int) and dim % (last + 1) == last and argument(call, "keepdim", False):
                return [arg, call]
    return []


def _is_softcap(node: Node) -> bool:
    """``tanh(x / cap) * cap`` (also ``tanh(x * (1 / cap)) * cap``)"""
    tanh = node.args[0]
    cap = scalar(node.args[1]) if len(node.args) > 1 else None
    if not is_call(node, aten.mul) or cap is None or cap <= 0 or not is_call(tanh, aten.tanh):
        return False
    inner = tanh.args[0]  # type: ignore[union-attr]
    if not is_call(inner, aten.div, aten.mul) or not isinstance(inner, Node) or argument(inner, "rounding_mode"):
        return False
    by = scalar(inner.args[1])
    if by is None or not isinstance(inner.args[0], Node):
        return False
    expected = cap if is_call(inner, aten.div) else 1.0 / cap
    return abs(by - expected) <= 1e-12 * abs(expected)


def _mask_term(node: Node) -> tuple[MaskTerm, Node] | Rejection:
    rank = len(shape(node))
    if is_call(node, aten.masked_fill):
        scores, cond = node.args[0], node.args[1]
        if not isinstance(scores, Node) or not isinstance(cond, Node) or not _same_shape(scores, node):
            return _reject(node, "masked_fill broadcasts the scores")
        return _hides(node, scores, cond, scalar(node.args[2]), "hide", rank)
    if is_call(node, aten.where):
        cond, yes, no = node.args[:3]
        if not isinstance(cond, Node):
            return _reject(node, "where with a constant condition")
        if isinstance(yes, Node) and scalar(yes) is None and scalar(no) is not None and _same_shape(yes, node):
            return _hides(node, yes, cond, scalar(no), "keep", rank)
        if isinstance(no, Node) and scalar(no) is None and scalar(yes) is not None and _same_shape(no, node):
            return _hides(node, no, cond, scalar(yes), "hide", rank)
        return _reject(node, "where mixes two score tensors")
    left, right = node.args[0], node.args[1]
    if argument(node, "alpha", 1) != 1:
        return _reject(node, "a bias is added with alpha")
    if not isinstance(left, Node) or not isinstance(right, Node):
        return _reject(node, "a constant is added to the scores")
    # The scores are the operand that spans rows and keys and leads to the product; try the left one first.
    candidates = [(s, b) for s, b in ((left, right), (right, left)) if _same_shape(s, node) and _leads_to_product(s)]
    if not candidates:
        return _reject(node, "neither operand of the addition leads to the product of q and k")
    scores, bias = candidates[0]
    found = tensor(bias)
    if found is None or not found.dtype.is_floating_point:
        return _reject(node, "a non-floating tensor is added to the scores")
    return MaskTerm(bias, "add", rank, shape(node)[:-2]), scores


def _leads_to_product(node: Node) -> bool:
    while True:
        if is_call(node, *MATMULS, aten.baddbmm):
            return True
        if is_call(node, aten.add, aten.mul, aten.where):
            return any(isinstance(arg, Node) and _same_shape(arg, node) and _leads_to_product(arg) for arg in node.args[:3])
        step = is_call(node, *_VIEWS, *_COPIES, *_CASTS, aten.div, aten.tanh, aten.masked_fill)
        if not step or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]


def _hides(node: Node, scores: Node, cond: Node, fill: float | None, kind: str, rank: int) -> tuple[MaskTerm, Node] | Rejection:
    found, given = tensor(node), tensor(cond)
    if found is None or given is None or given.dtype != torch.bool:
        return _reject(node, "the mask condition is not boolean")
    if fill is None or not fill <= hidden_threshold(found.dtype):
        return _reject(node, f"masked scores are set to {fill}, which does not hide a key in {found.dtype}")
    return MaskTerm(cond, kind, rank, shape(node)[:-2]), scores


def _same_shape(a: Node, b: Node) -> bool:
    left, right = shape(a), shape(b)
    return len(left) == len(right) and all(same(x, y) for x, y in zip(left, right))


def _sink_vector(node: Node) -> Node | Rejection:
    """The ``[Hq]`` parameter behind ``cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)], -1)``."""
    parts = node.args[0]
    rank = len(shape(node))
    dim = argument(node, "dim", 0)
    if not isinstance(parts, list | tuple) or len(parts) != 2 or dim % rank != rank - 1:
        return _reject(node, "something other than one column of sink logits is concatenated to the scores")
    column = parts[1]
    if not isinstance(column, Node) or rank != 4 or not same(shape(column)[-1], 1):
        return _reject(node, "the sink logits are not one column per head")
    base, path = base_of(column)
    if len(shape(base)) != 1:
        return _reject(node, "the sink logits are not one value per head")
    layout = replay(base, path)
    layout = None if layout is None else broadcast_to(layout, shape(column))
    if layout is None:
        return _reject(node, "the axes of the sink logits cannot be followed")
    owned = [(dim, atom) for dim, atoms in enumerate(layout) for atom in atoms if not atom.broadcast]
    heads = shape(column)[1]
    one_head = not owned and same(heads, 1)
    if not one_head and not (len(owned) == 1 and owned[0][0] == 1 and len(layout[1]) == 1 and not owned[0][1].part):
        return _reject(node, "the sink logits are not laid out by head")
    return base
