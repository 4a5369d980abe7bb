"""Axis algebra: which axes of a base tensor each dimension of a view consists of.

A chain of views, transposes and broadcasts from a cache tensor to a matmul operand is replayed on *atoms*: the axes of the
base tensor, and one broadcast atom for every axis that an ``expand`` or ``repeat_interleave`` makes. What reaches the matmul
then says which base axis is contracted, which one is the key axis, and whether heads are repeated group by group, whatever
spelling the model used (``repeat_kv``, ``expand``, ``unsqueeze`` with a broadcasting matmul, ``permute``, merged heads).
Axes of size 1 carry no information and have no atom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from spec_compile.passes.nodes import aten, is_call, keeps_values, packet, same, shape, tensor


@dataclass(frozen=True)
class Atom:
    """One axis: ``dim`` of the base tensor (or part of it), or a broadcast axis (``dim`` None)."""

    dim: int | None
    size: Any
    part: tuple[int, ...] = ()

    @property
    def broadcast(self) -> bool:
        return self.dim is None


Layout = list[tuple[Atom, ...]]

_RESHAPES = (aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze)
_COPIES = (aten.contiguous, aten.clone, aten.alias, aten.detach)
_TRANSPOSES = (aten.transpose, aten.swapaxes, aten.permute, aten.t, aten.mT, aten.movedim)
_BROADCASTS = (aten.expand, aten.repeat_interleave, aten.repeat, aten.expand_as)
VIEWS = (*_RESHAPES, *_COPIES, *_TRANSPOSES, *_BROADCASTS)


def is_noop_slice(node: Node) -> bool:
    """A slice that keeps every element (``x[:, :n]`` with n at least the size)."""
    if not is_call(node, aten.slice):
        return False
    kept, given = shape(node), shape(node.args[0])
    return len(kept) == len(given) and all(same(a, b) for a, b in zip(kept, given))


def is_noop_cast(node: Node) -> bool:
    """A ``to`` that returns its input: same dtype and device, no copy asked for."""
    if not is_call(node, aten.to):
        return False
    out, given = tensor(node), tensor(node.args[0])
    copies = node.kwargs.get("copy") or any(arg is True for arg in node.args[2:])
    return out is not None and given is not None and out.dtype == given.dtype and out.device == given.device and not copies


def base_of(node: Node) -> tuple[Node, list[Node]]:
    """Walk up through views, copies and broadcasts; returns the base and the path from it down to ``node``."""
    path: list[Node] = []
    while (packet(node) in VIEWS and keeps_values(node)) or is_noop_slice(node) or is_noop_cast(node):
        if not isinstance(node.args[0], Node):
            break
        path.append(node)
        node = node.args[0]
    return node, path[::-1]


def initial_layout(base: Node) -> Layout:
    return [() if same(size, 1) else (Atom(dim, size),) for dim, size in enumerate(shape(base))]


def replay(base: Node, path: list[Node]) -> Layout | None:
    """Layout of the last node of ``path`` in terms of the axes of ``base``; None where an axis cannot be followed."""
    layout: Layout | None = initial_layout(base)
    for node in path:
        if layout is None:
            return None
        layout = _apply(node, layout)
    return layout


def broadcast_to(layout: Layout, sizes: tuple[Any, ...]) -> Layout | None:
    """Layout after broadcasting to ``sizes``; new axes and axes of size 1 become broadcast atoms."""
    lead = len(sizes) - len(layout)
    if lead < 0:
        return None
    padded: Layout = [()] * lead + layout
    return [(Atom(None, size),) if not atoms and not same(size, 1) else atoms for atoms, size in zip(padded, sizes)]


def _apply(node: Node, layout: Layout) -> Layout | None:
    if packet(node) in _COPIES or is_noop_slice(node) or is_noop_cast(node):
        return layout
    if packet(node) in _RESHAPES:
        return _regroup([atom for atoms in layout for atom in atoms], shape(node))
    if packet(node) in _TRANSPOSES:
        order = _permutation(node, len(layout))
        return None if order is None else [layout[dim] for dim in order]
    if is_call(node, aten.expand, aten.expand_as):
        return broadcast_to(layout, shape(node))
    if is_call(node, aten.repeat_interleave):
        return _repeat_interleave(node, layout)
    if is_call(node, aten.repeat):
        return _repeat(node, layout)
    return None


def _permutation(node: Node, ndim: int) -> list[int] | None:
    order = list(range(ndim))
    if is_call(node, aten.permute):
        dims: Any = node.args[1]
        return [dim % ndim for dim in dims]
    if is_call(node, aten.movedim):
        return None
    a, b = (-2, -1) if is_call(node, aten.t, aten.mT) else (node.args[1], node.args[2])
    if ndim < 2 or not isinstance(a, int) or not isinstance(b, int):
        return None
    order[a], order[b] = order[b], order[a]
    return order


def _repeat_interleave(node: Node, layout: Layout) -> Layout | None:
    repeats = node.args[1] if len(node.args) > 1 else None
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    if repeats == 1:
        return layout
    out = list(layout)
    out[dim] = (*out[dim], Atom(None, repeats))
    return out


def _repeat(node: Node, layout: Layout) -> Layout | None:
    repeats = list(node.args[1])  # type: ignore[arg-type]
    padded: Layout = [()] * (len(repeats) - len(layout)) + layout
    return [atoms if same(n, 1) else (Atom(None, n), *atoms) for n, atoms in zip(repeats, padded)]


def _regroup(atoms: list[Atom], sizes: tuple[Any, ...]) -> Layout | None:
    """Distribute ``atoms`` over dimensions of the given sizes in row-major order, splitting an atom where needed."""
    pending, out = list(atoms), []
    for size in sizes:
        group: list[Atom] = []
        while not same(math.prod(atom.size for atom in group), size):
            if not pending:
                return None
            atom = pending.pop(0)
            filled = math.prod(a.size for a in group)
            if same(filled, 0):
                return None
            if isinstance(atom.size, int) and isinstance(size, int) and isinstance(filled, int):
                if size % filled:
                    return None
                room = size // filled
                if atom.size > room:
                    if atom.size % room:
                        return None
                    pending.insert(0, Atom(atom.dim, atom.size // room, (*atom.part, 1)))
                    atom = Atom(atom.dim, room, (*atom.part, 0))
            group.append(atom)
        out.append(tuple(group))
    return None if pending else out
