"""Is a set of nodes replaceable by one call at its output? Closed, writing only what it owns, reading nothing that changes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from torch.fx import Graph, Node

from spec_compile.passes.base import Rejection
from spec_compile.passes.nodes import alias_parent, aten, is_call, mutated_arguments, packet

_SEPARATE_RESULTS = (aten.topk, aten.sort, aten.max, aten.min)


def storage(node: Node) -> Node:
    """The node that owns this value's storage; values and indices of a top-k or a sort are two storages."""
    while True:
        parent = alias_parent(node)
        if parent is None or (node.target is operator.getitem and is_call(parent, *_SEPARATE_RESULTS)):
            return node
        node = parent


def writes_by_storage(graph: Graph) -> dict[Node, list[Node]]:
    """For each storage owner, the calls that write it in place, in graph order."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for written in mutated_arguments(node):
            found.setdefault(storage(written), []).append(node)
    return found


def with_assertions(region: Iterable[Node]) -> tuple[Node, ...]:
    """The region and what only asserts the metadata of its values, as ``torch.export`` has it."""
    nodes = dict.fromkeys(region)
    for node in list(nodes):
        nodes.update(dict.fromkeys(user for user in node.users if is_call(user, aten._assert_tensor_metadata)))
    return tuple(nodes)


def why_open(region: Collection[Node], outputs: Collection[Node]) -> Rejection | None:
    """A value inside that something outside reads, or a write to what the region does not own."""
    for node in region:
        outside = None if node in outputs else next((user for user in node.users if user not in region), None)
        if outside is not None:
            return Rejection(f"{node.name} is also used by {outside.name}, outside the region", node.name)
        foreign = [written for written in mutated_arguments(node) if storage(written) not in region]
        if foreign:
            return Rejection(f"{packet(node)} writes {foreign[0].name}, which is not the region's own", node.name)
    return None


def why_stale(region: Collection[Node], operands: Iterable[Node], end: Node, writes: dict[Node, list[Node]]) -> Rejection | None:
    """A write between a value and its reader inside, or between the first read of an operand and ``end``."""
    for reader in region:
        for value in reader.all_input_nodes:
            late = next((w for w in writes.get(storage(value), ()) if value < w < reader), None)
            if late is not None:
                return Rejection(f"{packet(late)} writes {value.name} before {reader.name} reads it", late.name)
    for operand in operands:
        first = min((user for user in operand.users if user in region), default=end)
        late = next((w for w in writes.get(storage(operand), ()) if first < w < end), None)
        if late is not None:
            return Rejection(f"{packet(late)} writes the operand {operand.name} before the output", late.name)
    return None
