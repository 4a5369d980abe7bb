"""Where a forward writes its draft rows: the slot of the first one, read off the write of the K cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from spec_compile.passes.attention_match import AttentionMatch
from spec_compile.passes.base import Rejection
from spec_compile.passes.nodes import alias_parent, argument, aten, is_call, same, shape

# Emits calls: (target, *args) -> node.
Emit = Callable[..., Node]


def first_row(match: AttentionMatch, call: Node, writes: dict[Node, list[Node]]) -> Callable[[Emit], Node] | Rejection:
    """How to compute the slot of the first draft row, int64 ``[1]`` or ``[B]``, or why that cannot be told.

    Rows are written in ascending order: the first row's slot is taken for the lowest. ``call`` is the attention emitted for
    ``match``.
    """
    found = [write for write in dict.fromkeys(writes.get(match.key.storage, [])) if write < call]
    if len(found) != 1:
        return Rejection(f"K is written {len(found)} times before it is read: the first draft row's slot is unknown", call.name)
    write, axis = found[0], match.key.order[2]
    if is_call(write, aten.index_copy) and argument(write, "dim", 0) % 4 == axis:
        return _first_of(write.args[2], match, write)
    if is_call(write, aten.index_put, aten._index_put_impl):
        indices: Any = write.args[1]
        if len(indices) > axis and isinstance(indices[axis], Node):
            batch = indices[match.key.order[0]] if len(indices) > match.key.order[0] else None
            if len(shape(indices[axis])) == 1 or _counts_rows(batch, shape(match.key.storage)[match.key.order[0]]):
                return _first_of(indices[axis], match, write)
    return Rejection(f"the first draft row's slot cannot be read off {write.target}", write.name)


def _first_of(index: Any, match: AttentionMatch, write: Node) -> Callable[[Emit], Node] | Rejection:
    sizes = shape(index)
    if not sizes or len(sizes) > 2 or not same(sizes[-1], match.q_len):
        return Rejection(f"K is written at {list(sizes)} slots, {match.q_len} rows are read", write.name)
    if len(sizes) == 1:
        return lambda emit: emit(aten.slice.Tensor, index, 0, 0, 1)
    return lambda emit: emit(aten.select.int, index, 1, 0)


def _counts_rows(index: Any, batch: Any) -> bool:
    """Whether an index over the batch is 0, 1, 2, ... in a column."""
    if not isinstance(index, Node) or len(shape(index)) != 2 or not same(shape(index)[1], 1):
        return False
    node: Node | None = index
    while node is not None and not is_call(node, aten.arange):
        node = alias_parent(node)
    return node is not None and len(node.args) == 1 and same(node.args[0], batch) and same(shape(index)[0], batch)
