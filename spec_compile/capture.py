"""Both doors into the one IR: pre-dispatch ATen with fake values, symbols, and Dynamo's metadata kept.

Retracing uses fake tensors only: tracing the cache write on real tensors would execute it on the user's cache. Dynamo's
metadata is copied over because AOTAutograd recognises weights and caches as static inputs by it; without it every weight
would be copied on each CUDA-graph replay.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from spec_compile import _compat


def dynamo_to_aten(gm: GraphModule, example_inputs: list[Any]) -> GraphModule:
    """Retrace a Dynamo graph into pre-dispatch ATen.

    Args:
        gm: what Dynamo hands to a backend.
        example_inputs: its inputs, real tensors, parameters or SymInts, in placeholder order; never read or written.

    Returns:
        A graph with the same inputs and outputs whose nodes carry fake values in ``meta["val"]``.
    """
    inputs, mode = _fakify(gm, example_inputs)
    with mode, torch.fx.traceback.preserve_node_meta():
        traced = make_fx(lambda *args: Interpreter(gm).run(*args), pre_dispatch=True)(*inputs)
    _keep_dynamo_metadata(gm, traced)
    return traced


def module_to_aten(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **export: Any) -> Any:
    """Export a module (``torch.export``, non-strict); the program's graph is the same IR.

    Args:
        module, args, kwargs: as for ``torch.export.export``.
        export: further keywords of it, e.g. ``dynamic_shapes``.
    """
    return torch.export.export(module, args, kwargs, strict=False, **export)


def _fakify(gm: GraphModule, example_inputs: list[Any]) -> tuple[list[Any], Any]:
    context = _compat.tracing_context()
    mode = context.fake_mode if context is not None else None
    if mode is None:
        mode = detect_fake_mode(example_inputs) or FakeTensorMode()
    known = context.tensor_to_context if context is not None else {}
    inputs = []
    for given in example_inputs:
        if isinstance(given, torch.Tensor) and not (isinstance(given, FakeTensor) and given.fake_mode is mode):
            symbolic = known.get(given)
            source = symbolic.tensor_source if symbolic is not None else None
            given = mode.from_tensor(given, symbolic_context=symbolic, source=source, trace=False)
        inputs.append(given)
    return inputs, mode


def _keep_dynamo_metadata(source: GraphModule, target: GraphModule) -> None:
    target.meta.update(source.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    _compat.name_constants(target)
    old = source.graph.find_nodes(op="placeholder")
    new = target.graph.find_nodes(op="placeholder")
    assert len(old) == len(new), f"retracing changed the number of inputs from {len(old)} to {len(new)}"
    for before, after in zip(old, new):
        for key in ("tensor_dict", "steal_arg", "grapharg"):
            if key in before.meta:
                after.meta[key] = before.meta[key]
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source
        # Dynamo's names say which weight or cache an input is; keep them in dumps and reports.
        with contextlib.suppress(Exception):
            after._rename(before.name)
