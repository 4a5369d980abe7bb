"""Inputs that passes add to a graph: tensors of ours that outlive a step, such as block summaries.

A graph only says what it needs. The tensors are looked up by cache tensor at each call, so that graphs of different T share
them and several caches can run through one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.passes.nodes import fake_mode


@dataclass(frozen=True)
class StateInput:
    """One added input.

    Attributes:
        kind: ``gate`` (tokens below which every block is kept), ``sparse`` (0 in exact steps), ``summary`` or ``valid``.
        caches: positions, among the graph's inputs, of the K caches it belongs to: of all layers that share ``valid``.
        layer: for a summary, which of ``caches``.
        block_size, representative: what is summarized.
        shape, dtype, device: of the tensor.
    """

    kind: str
    caches: tuple[int, ...]
    layer: int
    block_size: int
    representative: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def add_input(gm: GraphModule, name: str, value: Tensor) -> Node:
    """Append a placeholder that code generators treat as a tensor of fixed address, like weights and caches."""
    last = gm.graph.find_nodes(op="placeholder")[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    node.meta.update(val=value, spec_compile=True, tensor_dict={"_dynamo_static_input_type": "unguarded"})
    node._dynamo_source = None
    return node


def sparse_switch(gm: GraphModule, state: list[StateInput], like: Tensor) -> Node:
    """The input that is 0 in exact steps: one for each device, which all layers on it share. ``like`` is a value there."""
    held = [need.device for need in state if need.kind == "sparse"]
    if like.device in held:
        name = f"spec_sparse_{held.index(like.device)}"
        return next(node for node in gm.graph.find_nodes(op="placeholder") if node.target == name)
    with fake_mode(like):
        number = torch.empty(1, dtype=torch.int64, device=like.device)
    state.append(StateInput("sparse", (), 0, 0, "", (1,), torch.int64, like.device))
    return add_input(gm, f"spec_sparse_{len(held)}", number)
