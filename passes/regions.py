"""Is a set of nodes replaceable by one call at its output? Closed, writing only what it owns, reading nothing that changes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch.fx import Graph, Node

from spec_compile.kernels import library
from spec_compile.passes.base import Rejection
from spec_compile.passes.nodes import alias_parent, aten, is_call, mutated_arguments, packet, perhaps_mutated, tensor

assert library.moe_limit is not None  # importing it registers the operators
_OURS = torch.ops.spec_compile
_SEPARATE_RESULTS = (aten.topk, aten.sort, aten.max, aten.min, _OURS.moe_route_v1, _OURS.moe_limit_v1)


def storage(node: Node) -> Node:
    """The node that owns this value's storage; values and indices of a top-k or a sort are two storages."""
    while True:
        parent = alias_parent(node)
        if parent is None or (node.target is operator.getitem and is_call(parent, *_SEPARATE_RESULTS)):
            return node
        node = parent


def writes_by_storage(graph: Graph) -> dict[Node, list[Node]]:
    """For each storage owner, the calls that write it in place, in graph order.

    A higher-order call (a Triton kernel, say) does not tell what it writes: it counts as a write to all that it is given.
    Inputs that share a storage share their writes.
    """
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for owner in dict.fromkeys(storage(written) for written in (mutated_arguments(node) or perhaps_mutated(node))):
            found.setdefault(owner, []).append(node)
    return _with_shared_inputs(graph, found)


def _with_shared_inputs(graph: Graph, found: dict[Node, list[Node]]) -> dict[Node, list[Node]]:
    inputs: dict[int, list[Node]] = {}
    for node in graph.nodes:
        held = tensor(node) if node.op in ("placeholder", "get_attr") else None
        if held is not None and held.layout == torch.strided:
            inputs.setdefault(held.untyped_storage()._cdata, []).append(node)
    for sharing in inputs.values():
        writes = {write for node in sharing for write in found.get(node, ())} if len(sharing) > 1 else ()
        if writes:
            found.update((node, sorted(writes)) for node in sharing)
    return found


def why_untraceable(graph: Graph) -> Rejection | None:
    """``set_`` gives a tensor another storage: no walk along aliases sees through that."""
    call = next((node for node in graph.nodes if is_call(node, aten.set)), None)
    return Rejection(f"{call.name} gives a tensor the storage of another one", call.name) if call is not None else None


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
    """A write between a value and its reader inside, or from the first read of an operand on and before ``end``."""
    given = dict.fromkeys(operands)
    for reader in region:
        for value in reader.all_input_nodes:
            late = next((w for w in writes.get(storage(value), ()) if value < w < reader and not _fills(w, value, given)), None)
            if late is not None:
                return Rejection(f"{_words(late)} writes {value.name} before {reader.name} reads it", late.name)
    for operand in given:
        first = min((user for user in operand.users if user in region), default=end)
        late = next((w for w in writes.get(storage(operand), ()) if first <= w < end), None)
        if late is not None:
            return Rejection(f"{_words(late)} writes the operand {operand.name} before the output", late.name)
    return None


def _fills(write: Node, value: Node, operands: Collection[Node]) -> bool:
    """A higher-order call fills operands that were allocated for it: no new node stands for their value, all reads follow."""
    return value in operands and packet(write) is None


def _words(write: Node) -> str:
    found = packet(write)
    return str(found) if found is not None else f"{write.name} may write what it is given, so it"
