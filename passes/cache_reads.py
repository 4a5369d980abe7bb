"""Where K and V come from: the cache tensor, the write that precedes the read, and the axes that attention uses.

Known spellings: ``index_copy_`` at positions (HF static caches), ``index_put_`` or ``scatter_`` per row, ``copy_`` into a
slice, the functional forms of these after export, ``cat`` of a growing cache, and ``cat`` with a copy back (HF's static
sliding-window layer once its window is full).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from spec_compile.passes.axes import Atom, Layout, base_of, broadcast_to, replay
from spec_compile.passes.base import Rejection
from spec_compile.passes.nodes import (
    alias_parent,
    alias_root,
    ancestors,
    argument,
    aten,
    is_call,
    mutated_arguments,
    packet,
    same,
    shape,
    tensor,
)

_INPUTS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class CacheOperand:
    """K or V as attention reads it.

    Attributes:
        base: node whose value is the un-repeated 4-D cache (or its growing replacement).
        order: permutation that brings ``base`` to ``[B, Hkv, S, D]``.
        kv_heads, kv_len, head_dim: sizes; ``kv_len`` may be symbolic.
        group: query heads per KV head.
        kind: ``static`` (written in place), ``growing`` (``cat``), or ``rolling`` (a full window: ``cat``, then copied back).
        write: operator of the cache write, e.g. ``index_copy``.
        storage: node that owns the cache's storage.
        path: views and copies between ``base`` and the product.
    """

    base: Node
    order: tuple[int, ...]
    kv_heads: Any
    kv_len: Any
    head_dim: Any
    group: int
    kind: str
    write: str
    storage: Node
    path: tuple[Node, ...]


def _reject(node: Node, reason: str) -> Rejection:
    return Rejection(reason, node.name)


def read_cache(
    operand: Node,
    writes: dict[Node, list[Node]],
    lead: tuple[Any, ...],
    keys_last: bool,
    role: str,
    grouped_sdpa: int = 0,
) -> CacheOperand | Rejection:
    """Prove that ``operand`` is an un-repeated cache seen through views.

    Args:
        operand: matmul operand ``[*lead, S, D]`` (``[*lead, D, S]`` with ``keys_last``), or the K or V of an SDPA call.
        writes: from :func:`spec_compile.passes.nodes.writes_by_root`.
        lead: leading sizes of the product, batch first, after broadcasting.
        keys_last: whether the key axis is the last one.
        role: ``"K"`` or ``"V"``, for messages.
        grouped_sdpa: query heads of an SDPA call with ``enable_gqa``, which repeats inside the call; else 0.
    """
    base, path = base_of(operand)
    if tensor(base) is None or len(shape(base)) != 4:
        written = _written_below(base, writes)
        if written is not None:
            return _latent(base, role, written)
        return _no_cache(base, role)
    layout = replay(base, path)
    if layout is None:
        return _reject(operand, f"the axes of {role} cannot be followed through {_names(path)}")
    layout = broadcast_to(layout, (*lead, *shape(operand)[-2:]))
    if layout is None:
        return _reject(operand, f"{role} has more leading dimensions than the product it enters")
    axes = _axes(layout, base, operand, keys_last, role)
    if isinstance(axes, Rejection):
        return axes
    order, group = axes
    if grouped_sdpa:
        kv_heads = shape(base)[order[1]]
        if not isinstance(kv_heads, int) or grouped_sdpa % kv_heads:
            return _reject(operand, f"enable_gqa with {grouped_sdpa} query heads over {kv_heads} KV heads")
        group = grouped_sdpa // kv_heads
    source = _cache_source(base, order, writes, role)
    if isinstance(source, Rejection):
        return source
    kind, write, storage = source
    heads, length, dim = (shape(base)[axis] for axis in order[1:])
    return CacheOperand(base, order, heads, length, dim, group, kind, write, storage, tuple(path))


def _axes(layout: Layout, base: Node, operand: Node, keys_last: bool, role: str) -> tuple[tuple[int, ...], int] | Rejection:
    key_atoms, dim_atoms = (layout[-1], layout[-2]) if keys_last else (layout[-2], layout[-1])
    lead = [atom for atoms in layout[:-2] for atom in atoms]
    if len(key_atoms) != 1 or len(dim_atoms) != 1 or not (_whole(key_atoms[0]) and _whole(dim_atoms[0])):
        return _reject(operand, f"{role} is regrouped: the key axis or the head dimension is not one axis of the cache")
    key, dim = key_atoms[0].dim, dim_atoms[0].dim
    rest = [d for d in range(4) if d not in (key, dim)]
    owned = [atom for atom in lead if not atom.broadcast]
    if not all(_whole(atom) and atom.dim in rest for atom in owned) or len(rest) != 2:
        return _reject(operand, f"{role} is regrouped: its leading axes are not batch and heads")
    if [atom.dim for atom in owned] != sorted(atom.dim for atom in owned if atom.dim is not None):
        return _reject(operand, f"permuted {role}: batch and heads are swapped")
    batch, heads = rest
    if len(layout) > 3:
        outer, inner = ({atom.dim for atoms in part for atom in atoms} for part in (layout[:1], layout[1:-2]))
        if heads in outer or (batch in inner and heads not in inner):
            return _reject(operand, f"permuted {role}: batch and heads are swapped")
    first_broadcast = next((i for i, atom in enumerate(lead) if atom.broadcast), len(lead))
    if any(not atom.broadcast for atom in lead[first_broadcast:]):
        return _reject(operand, f"the heads of {role} are tiled (head h reads h % Hkv), not grouped (h // group)")
    group = 1
    for atom in lead[first_broadcast:]:
        if not isinstance(atom.size, int):
            return _reject(operand, f"{role} is repeated a symbolic number of times")
        group *= atom.size
    if same(shape(base)[heads], 1) and not any(atom.dim == batch for atom in owned) and not same(shape(base)[batch], 1):
        return _reject(operand, f"the batch of {role} is broadcast")
    assert key is not None and dim is not None
    return (batch, heads, key, dim), group


def _whole(atom: Atom) -> bool:
    return not atom.broadcast and not atom.part


def _cache_source(
    base: Node, order: tuple[int, ...], writes: dict[Node, list[Node]], role: str
) -> tuple[str, str, Node] | Rejection:
    root = alias_root(base)
    key_axis = order[2]
    before = [write for write in writes.get(root, []) if write <= base or mutated_arguments(write)]
    if root.op in _INPUTS:
        if not before:
            return _reject(base, f"{role} is an input that this forward does not write: cross-attention or a read-only cache")
        for write in before:
            wrong = _wrong_write_axis(write, base, key_axis, role)
            if wrong is not None:
                return wrong
        return "static", str(packet(before[-1])).rsplit(".", 1)[-1], root
    if is_call(root, aten.cat):
        dim = argument(root, "dim", 0) % len(shape(root))
        parts = root.args[0] if isinstance(root.args[0], list | tuple) else []
        if base is not root and alias_parent(base) is not None and len(shape(base)) != len(shape(root)):
            return _no_cache(base, role)
        if not any(isinstance(part, Node) and alias_root(part).op in _INPUTS for part in parts):
            written = _written_below(root, writes)
            return _latent(root, role, written) if written is not None else _no_cache(root, role)
        if dim != key_axis:
            return _reject(root, f"permuted {role}: the cache grows along axis {dim}, attention's key axis is {key_axis}")
        if any(isinstance(part, Node) and alias_root(part) in writes for part in parts):
            return "rolling", "cat", root
        return "growing", "cat", root
    written = _written_below(root, writes)
    if written is not None:
        return _latent(root, role, written)
    return _no_cache(root, role)


def _wrong_write_axis(write: Node, base: Node, key_axis: int, role: str) -> Rejection | None:
    """The cache write must move along the key axis; only writes at the full rank of the cache tell."""
    target = write.args[0]
    if not isinstance(target, Node) or len(shape(target)) != 4 or len(shape(alias_root(base))) != 4:
        return None
    moved: list[int] = []
    if is_call(write, aten.index_copy, aten.scatter, aten.slice_scatter):
        dim = argument(write, "dim", 0)
        moved = [dim % 4]
    elif is_call(write, aten.index_put, aten._index_put_impl):
        moved = [dim for dim, index in enumerate(write.args[1]) if index is not None]  # type: ignore[arg-type]
    if moved and key_axis not in moved:
        return _reject(write, f"permuted {role}: the cache is written along axis {moved[-1]}, attention's key axis is {key_axis}")
    return None


def _written_below(node: Node, writes: dict[Node, list[Node]]) -> Node | None:
    """A written input that ``node`` is computed from, if one is near."""
    for parent in ancestors(node, 48):
        root = alias_root(parent)
        if root.op in _INPUTS and root in writes and len(shape(root)) >= 3:
            return root
    return None


def _latent(node: Node, role: str, cache: Node) -> Rejection:
    low = tensor(cache)
    if low is not None and not low.dtype.is_floating_point:
        return _reject(node, f"{role} is dequantised from a {low.dtype} cache; quantised caches are not supported yet")
    made_by = str(packet(node)).rsplit(".", 1)[-1] if packet(node) else node.op
    return _reject(
        node,
        f"{role} is computed from the cache by {made_by}, not read from it (MLA latent cache or dequantised cache); "
        "this attention stays as it was",
    )


def _no_cache(node: Node, role: str) -> Rejection:
    made_by = str(packet(node)).rsplit(".", 1)[-1] if packet(node) else node.op
    if made_by in ("zeros", "new_zeros", "empty", "new_empty", "full"):
        return _reject(
            node,
            f"the cache is allocated inside the compiled forward ({made_by}), so it is copied each step: allocate it before, "
            "e.g. spec_compile.VerifyCache(model, max_len=...)",
        )
    return _reject(node, f"no cache read: {role} comes from {made_by}, not from a KV cache")


def _names(path: list[Node]) -> str:
    return " -> ".join(str(packet(node)).rsplit(".", 1)[-1] for node in path) or "its views"
