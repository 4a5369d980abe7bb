"""Pairs of a row and an expert that it chose: their order, and the operands that come in that order.

Pairs stand in natural order (``n * K + k``) or, around grouped products, sorted by expert; the sort, its inverse, the offsets
of the products and whatever is picked by expert must all come from one choice. Choices are proven to lie in 0..E-1 (a top-k
over at most E columns), so clamps and masks of ids out of range do nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from spec_compile.kernels import library
from spec_compile.passes.expert_gate import CASTS, Refusal
from spec_compile.passes.expert_products import is_view
from spec_compile.passes.nodes import argument, aten, is_call, same, shape, tensor

assert library.moe_route is not None  # importing it registers the operators
ROUTE = torch.ops.spec_compile.moe_route_v1
_EXACT_IDS = (torch.int32, torch.int64, torch.float32, torch.float64)


@dataclass
class Pairs:
    """Pairs of one MoE layer while it is matched.

    Attributes:
        start: the node that the match started from.
        experts: E. rows, top_k: N and K. S = N * K.
        ids: flat ids of the pairs in the order of the products. perm: that order, None for the natural one.
        id_casts: casts of ids, not of values.
        region: nodes passed that belong to the experts alone. views: views of their operands.
    """

    start: Node
    experts: Any
    rows: Any = None
    top_k: int = 0
    ids: Node | None = None
    perm: Node | None = None
    id_casts: set[Node] = field(default_factory=set)
    region: dict[Node, None] = field(default_factory=dict)
    views: dict[Node, None] = field(default_factory=dict)

    def take(self, *nodes: Node) -> None:
        self.region.update(dict.fromkeys(nodes))

    def view(self, node: Any) -> None:
        self.views[node] = None

    def sort_by(self, offs: Any) -> None:
        """Offsets must count the very ids that were sorted: cumsum(histc(sorted ids))."""
        chain: list[Node] = []
        node = self._uncast_ids(offs, chain)
        for wanted in (aten.cumsum, aten.histc):
            if not is_call(node, wanted):
                raise Refusal(offs, "the offsets of the grouped product are not cumsum(histc(sorted ids))")
            chain.append(node)
            counted, node = node, self._uncast_ids(node.args[0], chain)
        asked = tuple(argument(counted, name, 0) for name in ("bins", "min", "max"))
        if asked != (self.experts, 0, self.experts - 1):
            raise Refusal(counted, f"histc counts {asked}, there are {self.experts} experts")
        sort = item(node, 0)
        if not is_call(sort, aten.sort):
            raise Refusal(offs, "the offsets of the grouped product do not count sorted ids")
        if len(shape(node)) != 1 or argument(sort, "descending", False):
            raise Refusal(sort, "ids are not sorted in ascending order of experts")
        self.take(*chain, node, sort)
        self.ids = node
        self.perm = next((user for user in sort.users if user.target is operator.getitem and user.args[1] == 1), None)
        if self.perm is None:
            raise Refusal(sort, "the order of the sort is not used")
        self.take(self.perm)
        for user in node.users:
            self._unclamped(user)

    def _is_id_cast(self, node: Any) -> bool:
        return is_call(node, *CASTS) and getattr(tensor(node), "dtype", None) in (torch.int32, torch.int64)

    def _uncast_ids(self, node: Any, chain: list[Node]) -> Any:
        while is_call(node, *CASTS) and getattr(tensor(node), "dtype", None) in _EXACT_IDS:
            chain.append(node)
            self.id_casts.add(node)
            node = node.args[0]
        return node

    def undo_sort(self, user: Any) -> None:
        """``pairs[inverse]`` must undo the sort."""
        inverse: Any = user.args[1][0] if len(user.args[1]) == 1 and sizes_are(user, list(shape(user.args[0]))) else None
        if is_call(inverse, aten.argsort) and inverse.args[0] is self.perm and not argument(inverse, "descending", False):
            self.take(inverse)
            return
        if is_call(inverse, aten.index_put) and not argument(inverse, "accumulate", False):
            empty, [index], places = inverse.args[:3]
            made = is_call(empty, aten.empty_like, aten.empty, aten.new_empty, aten.zeros_like)
            counted = is_call(places, aten.arange) and len(places.args) == 1 and _one_each(places, self.perm)
            if made and counted and index is self.perm and _one_each(empty, self.perm):
                self.take(inverse, empty, places)
                return
        raise Refusal(user, "pairs are reordered by something that is not the inverse of the sort")

    def are_ids(self, node: Any) -> bool:
        """Whether ``node`` is the pairs' ids, in the order of the products, clamps aside."""
        node = self._unclamped(node)
        if self.perm is not None:
            return node is self.ids
        wanted = self._unclamped(self.ids)
        return node is wanted or self._choice_of(node) is self._choice_of(wanted)

    def _unclamped(self, node: Any) -> Any:
        while is_call(node, aten.clamp, aten.clamp_min, aten.clamp_max):
            low, high = argument(node, "min"), argument(node, "max")
            if (low is not None and not _at_most(low, 0)) or (high is not None and not _at_most(self.experts - 1, high)):
                raise Refusal(node, f"ids are clamped to {low}..{high}, there are {self.experts} experts")
            self.take(node)
            node = node.args[0]
        return node

    def choice(self) -> Node:
        """The choice, proven to be in range."""
        found = self._choice_of(self.ids)
        node: Any = found
        while is_view(node) or self._is_id_cast(node):
            self.view(node)
            node = node.args[0]
        source, routed = item(node, 1), item(node, 0)
        if is_call(source, aten.topk):
            scores = shape(source.args[0])
            last = argument(source, "dim", -1) in (-1, len(scores) - 1)
            if last and _at_most(scores[-1], self.experts):
                return found
            raise Refusal(source, f"the top-k is not over a last axis of at most {self.experts} experts")
        if is_call(routed, ROUTE) and _at_most(shape(routed.args[0])[-1], self.experts):
            return found
        raise Refusal(
            node if isinstance(node, Node) else self.start,
            "the chosen experts do not come from a top-k over the experts, so nothing says that they are in range",
        )

    def _choice_of(self, node: Any) -> Node:
        """The choice ``[..., K]`` behind flat ids."""
        node = self._unclamped(node)
        return self._choice_behind(node if self.perm is None else node.args[0].args[0])

    def _choice_behind(self, node: Any) -> Node:
        """The choice behind flat ids in natural order."""
        node = self._unclamped(node)
        while True:
            before = node
            while self._is_id_cast(node):
                self.view(node)
                node = node.args[0]
            if len(shape(node)) < 2 and is_view(node):
                self.view(node)
                node = node.args[0]
            node = self._unclamped(node)
            if node is before:
                break
        return self._pairs_of(node, "choices")

    def _pairs_of(self, node: Any, what: str) -> Node:
        """The innermost value ``[..., K]`` of which ``node`` is a view; views keep the order of pairs."""
        found: Any = None
        while True:
            found = node if len(shape(node)) > 1 and same(shape(node)[-1], self.top_k) else found
            if not is_view(node):
                break
            self.view(node)
            node = node.args[0]
        if found is None:
            raise Refusal(node if isinstance(node, Node) else self.start, f"the {what} are not [N, {self.top_k}]")
        node = found
        lead: Any = 1
        for size in shape(node)[:-1]:
            lead = lead * size
        if not same(lead, self.rows):
            raise Refusal(node, f"the {what} have {lead} rows, the experts' outputs {self.rows}")
        return node

    def weights(self, node: Any, in_order: bool) -> Node:
        """Routing weights ``[..., K]`` behind the factor ``[S, 1]`` or ``[N, K, 1]``."""
        if not shape(node) or not same(shape(node)[-1], 1):
            raise Refusal(node, "the factor on the experts' outputs is not one weight for each pair")
        if in_order:
            return self._pairs_of(node, "routing weights")
        while is_view(node):
            self.take(node)
            node = node.args[0]
        if not is_call(node, aten.index) or list(node.args[1]) != [self.perm]:
            raise Refusal(node, "routing weights are not in the order of the sorted pairs")
        self.take(node)
        return self._pairs_of(node.args[0], "routing weights")

    def _are_ids_in_order(self, node: Any) -> bool:
        """Whether ``node`` is the pairs' ids in natural order, clamps aside."""
        if self.perm is None:
            return self.are_ids(node)
        return self._unclamped(node) is not self.ids and self._choice_behind(node) is self._choice_of(self.ids)

    def bias(self, node: Any, other: Any, in_order: bool) -> Node:
        """``[E, ...]`` of which ``other`` holds one row for each pair, in the order that the pairs have at ``node``."""
        picked: Any = other
        if not is_call(picked, aten.index) or len(picked.args[1]) != 1 or len(shape(picked.args[0])) != 2:
            raise Refusal(node, "what is added to the experts' values is not a bias picked by expert")
        ids = picked.args[1][0]
        if not (self._are_ids_in_order(ids) if in_order else self.are_ids(ids)):
            raise Refusal(node, "the bias is picked by other ids than the weights")
        if not sizes_are(node, list(shape(picked))):
            raise Refusal(node, "the bias is not one for each pair")
        self.take(node, picked)
        return picked.args[0]

    def mask_nothing(self, node: Any) -> None:
        """A mask of ids at or above E, which no pair has."""
        mask: Any = node.args[1]
        while is_view(mask):
            self.take(mask)
            mask = mask.args[0]
        if not is_call(mask, aten.ge) or not _at_most(self.experts, mask.args[1]) or not self.are_ids(mask.args[0]):
            raise Refusal(node, "experts' values are masked by something other than ids out of range")
        if not sizes_are(node, list(shape(node.args[0]))):
            raise Refusal(node, "a mask spreads the experts' values")
        self.take(node, mask)

    def gathered_rows(self, node: Any) -> Node:
        index: Any = node.args[1] if is_call(node, aten.index) else None
        row: Any = index[0] if isinstance(index, list | tuple) and len(index) == 1 else None
        divided = is_call(row, aten.floor_divide) or (is_call(row, aten.div) and argument(row, "rounding_mode") == "floor")
        if not divided or row.args[0] is not self.perm:
            raise Refusal(node, "the experts' input is not x in the order of the sorted pairs, x[perm // K]")
        if row.args[1] != self.top_k:
            raise Refusal(row, f"x is picked by perm // {row.args[1]}, there are {self.top_k} choices a row")
        self.take(node, row)
        return node.args[0]

    def repeated_rows(self, node: Any) -> Node:
        if is_call(node, aten.repeat_interleave) and argument(node, "dim") in (0, -2):
            times = argument(node, "repeats")
            if times != self.top_k:
                raise Refusal(node, f"x is repeated {times} times, there are {self.top_k} choices a row")
            self.take(node)
            return node.args[0]
        if is_view(node) and is_call(node.args[0], aten.expand):
            wide = node.args[0]
            narrow = wide.args[0]
            grown = [self.rows, self.top_k, shape(node)[-1]]
            if sizes_are(wide, grown) and sizes_are(narrow, [self.rows, 1, grown[2]]) and is_view(narrow):
                self.take(node, wide)
                self.view(narrow)
                return narrow.args[0]
        raise Refusal(node, "the experts' input is not x with each row repeated once for each choice")


def item(node: Any, place: int) -> Any:
    """The call of which ``node`` is result number ``place``, or None."""
    if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == place:
        return node.args[0]
    return None


def sizes_are(node: Any, sizes: list[Any]) -> bool:
    found = shape(node)
    return len(found) == len(sizes) and all(same(a, b) for a, b in zip(found, sizes))


def _at_most(a: Any, b: Any) -> bool:
    return isinstance(a, int | float) and isinstance(b, int | float) and a <= b


def _one_each(node: Any, like: Any) -> bool:
    return len(shape(node)) == 1 and same(shape(node)[0], shape(like)[0])
