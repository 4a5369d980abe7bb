"""Is this graph a verify forward? Decided on Dynamo's graph, before the cost of a retrace.

A verify forward has 1..``max_q_len`` query rows and reads a cache longer than that. Where the row count is symbolic the
decision is made on its hint and then installed as a guard, so that a later prefill cannot run through the verify graph, nor
a later verify through a graph that was passed through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.passes.nodes import hint

_SOFTMAX_NAMES = ("softmax", "_safe_softmax", "_softmax")
_GREATER = ("greater", "gt", "ne", "bool")
EXPERT_LOOP = (
    "experts run in a Python loop over those that were hit, which breaks the graph at every MoE layer: call "
    "spec_compile.prepare(model), or model.set_experts_implementation('grouped_mm')"
)
_LINEAR_NAMES = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum")


@dataclass(frozen=True)
class GraphKind:
    """``verify`` with sizes, or the reason why the graph is passed through; sizes may be symbolic.

    ``expert_loop`` names the node at which a loop over experts broke the graph, "" where there is none.
    """

    verify: bool
    reason: str = ""
    q_len: Any = None
    kv_len: Any = None
    attentions: int = 0
    has_linear: bool = False
    expert_loop: str = ""


def classify(gm: GraphModule, max_q_len: int) -> GraphKind:
    """Classify a Dynamo graph and install the guard that keeps the classification true."""
    return replace(_classify(gm, max_q_len), expert_loop=_expert_loop(gm))


def _classify(gm: GraphModule, max_q_len: int) -> GraphKind:
    pairs: list[tuple[Any, Any]] = []
    has_linear = flex = False
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if "flex_attention" in _name(node):
            flex = True
        has_linear = has_linear or _name(node) in _LINEAR_NAMES
        pair = _rows_and_keys(node)
        if pair is not None and None not in (hint(pair[0]), hint(pair[1])):
            pairs.append(pair)
    if not pairs and flex:
        reason = "flex_attention is not rewritten: use attn_implementation='sdpa' or 'eager', or spec_compile.prepare(model)"
        return GraphKind(False, reason, has_linear=True)
    if not pairs:
        return GraphKind(False, "no attention in this graph", has_linear=has_linear)
    fitting = [(rows, keys) for rows, keys in pairs if _fits(rows, keys, max_q_len)]
    if fitting:
        rows, keys = fitting[0]
        _guard(rows <= max_q_len)
        _guard(rows < keys)
        return GraphKind(True, "", rows, keys, len(fitting), has_linear)
    rows, keys = pairs[0]
    if (hint(rows) or 0) > max_q_len:
        _guard(rows > max_q_len)
        return GraphKind(False, f"prefill: q_len {hint(rows)} is above max_q_len {max_q_len}", rows, keys, len(pairs), has_linear)
    reason = f"no cache behind the rows: q_len {hint(rows)}, kv_len {hint(keys)}"
    return GraphKind(False, reason, rows, keys, len(pairs), has_linear)


def _expert_loop(gm: GraphModule) -> str:
    """Name of a one-hot of choices that leaves the graph as a mask of the experts hit: the graph broke at ``nonzero``."""
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or _name(node) != "one_hot":
            continue
        reached, queue = {node}, [node]
        while queue:
            users = [user for user in queue.pop().users if user not in reached]
            reached.update(users)
            queue += [user for user in users if user.op != "output" and _name(user) in ("permute", "transpose", "sum", *_GREATER)]
        hit = any(_name(found) in _GREATER for found in reached if found.op != "output")
        if hit and any(found.op == "output" for found in reached):
            return str(node.name)
    return ""


def _fits(rows: Any, keys: Any, max_q_len: int) -> bool:
    seen_rows, seen_keys = hint(rows), hint(keys)
    return seen_rows is not None and seen_keys is not None and 1 <= seen_rows <= max_q_len and seen_keys > seen_rows


def _guard(holds: Any) -> None:
    # Evaluating a symbolic comparison records it as a guard of the compilation in progress.
    assert bool(holds)


def _name(node: Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def _example(arg: Any) -> torch.Tensor | None:
    found = arg.meta.get("example_value", arg.meta.get("val")) if isinstance(arg, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _rows_and_keys(node: Node) -> tuple[Any, Any] | None:
    name = _name(node)
    if name in ("scaled_dot_product_attention", "dense_attention_v1"):
        q = _example(node.args[0] if node.args else node.kwargs.get("query"))
        k = _example(node.args[1] if len(node.args) > 1 else node.kwargs.get("key"))
        return (q.shape[-2], k.shape[-2]) if q is not None and k is not None and q.dim() >= 3 else None
    if name == "multi_head_attention_forward" and len(node.args) > 1:
        query, key = _example(node.args[0]), _example(node.args[1])
        return (query.shape[0], key.shape[0]) if query is not None and key is not None else None
    if name in _SOFTMAX_NAMES and node.args:
        scores = _example(node.args[0])
        if scores is None or scores.dim() < 3:
            return None
        sinkless = _example(_before_sinks(node.args[0]))
        return scores.shape[-2], (scores if sinkless is None else sinkless).shape[-1]
    return None


def _before_sinks(node: Any) -> Any:
    """The scores behind ``cat([scores, sinks], -1) - max``: a column of sinks is no key."""
    for _ in range(3):
        if not isinstance(node, Node):
            return None
        if _name(node) == "cat":
            parts = node.args[0] if node.args else node.kwargs.get("tensors")
            return parts[0] if isinstance(parts, list | tuple) else None
        node = node.args[0] if node.args else None
    return None
