"""A verify program without operators of ours: it loads where this package is not installed.

Operators become plain ATen (:mod:`spec_compile.kernels.portable`). Block summaries are computed from the keys in each step
instead of being kept: nothing is carried, so nothing can be dropped or go stale, and anchor layers read their K cache once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from spec_compile.errors import ExportError
from spec_compile.export_program import VerifyProgram, rebuild
from spec_compile.passes.nodes import fake_mode, tensor, value

_UPKEEP = torch.ops.spec_compile.block_summary_v1_.default
# What a program may call besides ATen and symbolic arithmetic.
_CORE = ("aten", "prims", "prim")


def decompose(verify: VerifyProgram) -> VerifyProgram:
    """The program in plain ATen; writes become explicit in its signature.

    Raises:
        ExportError: an operator has no plain form.
    """
    program, state = _without_summaries(verify)
    from spec_compile.kernels.portable import BODIES

    try:
        with torch.no_grad():
            plain = program.run_decompositions(dict(BODIES))
    except Exception as error:
        raise ExportError(f"the rewritten program cannot be decomposed: {type(error).__name__}: {str(error)[:300]}") from error
    left = foreign_operators(plain)
    if left:
        raise ExportError(f"no plain ATen form of {', '.join(left)}: use flavour='ops'")
    for node in plain.graph.nodes:
        node.meta.pop("stack_trace", None)
    inputs = [spec.arg.name for spec in plain.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    expected = [name for name in verify.inputs if name in state or name not in verify.state]
    if inputs != expected:
        raise ExportError(f"torch {torch.__version__} renamed the inputs {expected} to {inputs}: use flavour='ops'")
    written = [name for name in verify.written if name in inputs]
    return VerifyProgram(plain, verify.report, inputs, state, written)


def foreign_operators(program: ExportedProgram) -> list[str]:
    """Names of operators that neither ATen nor Python's arithmetic provides."""
    found = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target.namespace not in _CORE:
                found.add(str(node.target).removesuffix(".default"))
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            found.add(str(node.target))
    return sorted(found)


def _without_summaries(verify: VerifyProgram) -> tuple[ExportedProgram, dict[str, Any]]:
    """The program with summaries made from keys where they were read, and without the inputs that held them."""
    from spec_compile.kernels import portable

    graph = verify.program.graph
    upkeep = [node for node in graph.nodes if node.target is _UPKEEP]
    if not upkeep:
        return verify.program, verify.state
    for node in upkeep:
        keys, summaries, _, position, block_size, representative = node.args
        for k, summary in zip(keys, summaries):
            readers = [user for user in summary.users if user is not node]
            if readers:
                made = _insert(min(readers), portable.ops.summarize_v1.default, k, position, block_size, representative)
                for reader in readers:
                    reader.replace_input_with(summary, made)
        graph.erase_node(node)
    gone = {name for name, need in verify.state.items() if need.kind in ("summary", "valid")}
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.name in gone:
            graph.erase_node(placeholder)
    signature = verify.program.graph_signature
    specs = [spec for spec in signature.input_specs if spec.arg.name not in gone]
    state = {name: need for name, need in verify.state.items() if name not in gone}
    arguments = sum(name not in gone for name in verify.inputs)
    return rebuild(verify.program, graph, specs, list(signature.output_specs), arguments, 1), state


def _insert(before: Node, target: Any, k: Node, *args: Any) -> Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, (k, *args))
    with fake_mode(tensor(k)):
        made.meta["val"] = target(*torch.fx.map_arg((k, *args), value))
    return made
