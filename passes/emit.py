"""Insert calls with values and provenance."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from spec_compile.passes.nodes import fake_mode, tensor, value


class Emitter:
    """Inserts calls before one node with a tensor value; they carry its provenance and are marked as ours."""

    def __init__(self, before: Node) -> None:
        self.graph: Graph = before.graph
        self.before, self.mode = before, fake_mode(tensor(before))

    def call(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in self.before.meta:
                node.meta[key] = self.before.meta[key]
        real = torch.fx.map_arg(args, value)
        with self.mode:
            node.meta["val"] = target(*real)
        node.meta["spec_compile"] = True
        return node
