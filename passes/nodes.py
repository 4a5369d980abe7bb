"""Questions about single nodes of a pre-dispatch ATen graph: operator families, values, aliases, names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


def packet(node: Node) -> Any:
    """The overload packet a call runs (``aten.add``), in-place spellings folded into the functional one; else None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    found = node.target.overloadpacket
    name = node.target._schema.name.split("::")[-1]
    if node.target.namespace == "aten" and name.endswith("_") and not name.startswith("_"):
        return getattr(aten, name[:-1], found)
    return found


def is_call(node: Any, *packets: Any) -> bool:
    return isinstance(node, Node) and packet(node) in packets


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Argument of an ATen call by schema name, positional or keyword."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.kwargs.get(name, default)
    for position, entry in enumerate(node.target._schema.arguments):
        if entry.name == name:
            if position < len(node.args):
                return node.args[position]
            value = node.kwargs.get(name, entry.default_value if entry.has_default_value() else default)
            return default if value is None else value
    return default


def value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def tensor(node: Any) -> Tensor | None:
    found = value(node)
    return found if isinstance(found, Tensor) else None


def fake_mode(found: Tensor | None) -> Any:
    """Mode under which values of new nodes are computed."""
    assert isinstance(found, torch._subclasses.FakeTensor), "a graph node carries no fake value"
    return found.fake_mode


def shape(node: Any) -> tuple[Any, ...]:
    """Shape of a node's tensor value; entries may be SymInts. ``()`` where it has none."""
    found = tensor(node)
    return tuple(known(size) for size in found.shape) if found is not None else ()


def known(size: Any) -> Any:
    """A plain int where the symbol has been pinned to one, else the size itself."""
    if isinstance(size, int):
        return size
    pinned = size.node.maybe_as_int()
    return size if pinned is None else pinned


def specialize(*sizes: Any) -> None:
    """Pin symbolic sizes to the value met while tracing: head counts and head dimensions are part of the program."""
    for size in sizes:
        if not isinstance(size, int) and hint(size) is not None:
            int(size)


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every admissible value of their symbols; never adds a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def same_or_guarded(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; where that depends on the sizes met while tracing, it becomes a guard.

    Dynamo gives every cache tensor a length symbol of its own once it has seen caches of two lengths.
    """
    return same(a, b) or (hint(a) is not None and hint(a) == hint(b) and bool(a == b))


def hint(size: Any) -> int | None:
    """The size seen while tracing, without adding a guard; None where there is none."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    found = getattr(node, "hint", None)
    return int(found) if found is not None else None


def scalar(arg: Any) -> float | None:
    """A number known at compile time: a Python number or a 0-d ``aten.full`` / ``scalar_tensor``, rounded to its dtype."""
    found, held = _scalar(arg), tensor(arg)
    if found is None or held is None:
        return found
    return float(torch.tensor(found, dtype=torch.float64).to(held.dtype))


def _scalar(arg: Any) -> float | None:
    if isinstance(arg, bool):
        return None
    if isinstance(arg, int | float):
        return float(arg)
    if not isinstance(arg, Node) or not _stays(arg):
        return None
    if is_call(arg, aten.full) and arg.args[0] in ([], ()) and isinstance(arg.args[1], int | float):
        return float(arg.args[1])
    if is_call(arg, aten.scalar_tensor) and isinstance(arg.args[0], int | float):
        return float(arg.args[0])
    if is_call(arg, aten.to, aten._to_copy, aten.lift_fresh_copy, aten.detach, aten.alias) and shape(arg) == ():
        return scalar(arg.args[0])
    if arg.op == "get_attr" and isinstance(arg.target, str):
        owner = arg.graph.owning_module
        held = getattr(owner, arg.target, None) if owner is not None else None
        if isinstance(held, Tensor) and held.dim() == 0 and type(held) is Tensor and held.device.type == "cpu":
            return float(held)
    return None


def _stays(node: Node) -> bool:
    """Whether nothing writes this value, under any name."""
    names = [node, *overlapping_inputs(node.graph).get(node, ())] if node.op == "get_attr" else [node]
    while names:
        name = names.pop()
        for user in name.users:
            if name in mutated_arguments(user) or name in perhaps_mutated(user):
                return False
            if alias_parent(user) is name:
                names.append(user)
    return True


def overlapping_inputs(graph: Graph) -> dict[Node, tuple[Node, ...]]:
    """Inputs and constants whose memory may overlap, under the names of each other: a write to one is a write to all."""
    by_storage: dict[int, list[tuple[Node, int, int]]] = {}
    for node in graph.nodes:
        held = tensor(node) if node.op in ("placeholder", "get_attr") else None
        if held is None or held.layout != torch.strided:
            continue
        steps = [(hint(size), hint(stride)) for size, stride in zip(held.shape, held.stride())]
        start, spans = hint(held.storage_offset()), [(size - 1) * by for size, by in steps if size is not None and by is not None]
        first, last = 0, 1 << 62
        if start is not None and len(spans) == len(steps):
            first, last = start * held.element_size(), (start + sum(spans) + 1) * held.element_size()
        by_storage.setdefault(held.untyped_storage()._cdata, []).append((node, first, last))
    found: dict[Node, tuple[Node, ...]] = {}
    for sharing in by_storage.values():
        for node, first, last in sharing if len(sharing) > 1 else ():
            others = tuple(other for other, start, end in sharing if other is not node and start < last and first < end)
            if others:
                found[node] = others
    return found


def mutated_arguments(node: Node) -> list[Node]:
    """Nodes whose storage this call writes."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target is aten.detach_.default:  # writes no data
        return []
    found: list[Node] = []
    for position, entry in enumerate(node.target._schema.arguments):
        if entry.alias_info is None or not entry.alias_info.is_write:
            continue
        arg = node.args[position] if position < len(node.args) else node.kwargs.get(entry.name)
        for item in arg if isinstance(arg, list | tuple) else [arg]:
            if isinstance(item, Node):
                found.append(item)
    return found


_PURE_CALLS = ("flex_attention", "out_dtype", "triton_kernel_wrapper_functional")


def perhaps_mutated(node: Node) -> list[Node]:
    """What a call that does not tell its writes is given."""
    target: Any = node.target
    opaque = isinstance(target, torch._ops.HigherOrderOperator) and target.name() not in _PURE_CALLS
    return node.all_input_nodes if opaque else []


def keeps_values(node: Any) -> bool:
    """Whether a view or copy shows the values of its first argument: no other dtype over their bits, and not in place."""
    given, made = tensor(node.args[0]), tensor(node)
    return given is not None and made is not None and given.dtype == made.dtype and not mutated_arguments(node)


# Functional writes return the written tensor: a reader of the result reads the cache after the write.
FUNCTIONAL_WRITES = (aten.index_copy, aten.index_put, aten.scatter, aten.slice_scatter, aten.copy, aten._index_put_impl)
# Their schemas do not say that the result may be a view.
_MAYBE_VIEWS = (
    aten.reshape, aten.contiguous, aten.to, aten.flatten, aten.squeeze, aten.expand, aten.unflatten, aten.atleast_1d,
    aten.atleast_2d, aten.atleast_3d, aten.unsafe_chunk, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.lift,
)  # fmt: skip
_OF_EACH = (aten.atleast_1d, aten.atleast_2d, aten.atleast_3d, aten.broadcast_tensors, aten.meshgrid)  # given a list


def alias_parent(node: Node) -> Node | None:
    """The node whose storage this node's value shares (or continues, for a functional cache write)."""
    if node.op != "call_function":
        return None
    if not isinstance(node.target, torch._ops.OpOverload):
        whole: Any = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
        if is_call(whole, *_OF_EACH) and isinstance(whole.args[0], list | tuple):
            place: Any = node.args[1]
            each = whole.args[0][place]
            return each if isinstance(each, Node) else None
        return whole if isinstance(whole, Node) and tensor(whole) is None else None
    written = mutated_arguments(node)
    if written:
        return written[0]
    if packet(node) in FUNCTIONAL_WRITES:
        return node.args[0] if isinstance(node.args[0], Node) else None
    returns = node.target._schema.returns
    arguments = node.target._schema.arguments
    if returns and returns[0].alias_info is not None and arguments and arguments[0].alias_info is not None:
        return node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if is_call(node, *_MAYBE_VIEWS):
        return node.args[0] if isinstance(node.args[0], Node) else None
    return None


def alias_root(node: Node) -> Node:
    """Follow :func:`alias_parent` to the node that owns the storage (an input, or the call that allocated it)."""
    parent = alias_parent(node)
    while parent is not None:
        node, parent = parent, alias_parent(parent)
    return node


def writes_by_root(graph: Graph) -> dict[Node, list[Node]]:
    """For each storage owner, the calls that write it, in graph order; functional cache writes included, and writes to inputs
    that share its memory."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if packet(node) in FUNCTIONAL_WRITES and isinstance(node.args[0], Node):
            found.setdefault(alias_root(node.args[0]), []).append(node)
        for written in mutated_arguments(node):
            found.setdefault(alias_root(written), []).append(node)
    own = {node: list(calls) for node, calls in found.items()}
    for node, others in overlapping_inputs(graph).items():
        foreign = [call for other in others for call in own.get(other, ())]
        if foreign:
            found[node] = sorted({*own.get(node, ()), *foreign})
    return found


def ancestors(node: Node, limit: int) -> Iterator[Node]:
    """Up to ``limit`` nodes that ``node`` depends on, nearest first."""
    seen, queue = {node}, [node]
    while queue and limit > 0:
        for parent in queue.pop(0).all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
                limit -= 1
                yield parent


def layer_name(node: Node) -> str | None:
    """Module path of the call, e.g. ``model.layers.3.self_attn``; None outside any module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['\w+'\](\[\d+\])?\.?", "", path)
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path).replace("[", ".").replace("]", "")
    return path.strip(".") or None


def source_line(node: Node) -> str | None:
    """``file:line: code`` of the innermost frame that produced the call."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    frames = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.+)', trace)
    if not frames:
        return None
    file, line, code = frames[-1]
    return f"{'/'.join(file.rsplit('/', 2)[-2:])}:{line}: {code.strip()}"
