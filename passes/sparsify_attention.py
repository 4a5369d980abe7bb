"""SparsifyAttention: layers that the plan makes anchors attend a selection of their live blocks.

Before::

    ids, count, full = live_blocks(mask, 64)
    attention(q, k, v, mask, ids, count, full, 64, scale)

After::

    block_summary_([k, ...], [summary, ...], valid, position, 16, "mean")           # once, for all anchors
    ids, count, full = live_blocks(mask, 16)
    ids, count, full = select_blocks(q, summary, None, ids, count, full, position, gate, 16, ...)
    attention(q, k, v, mask, ids, count, full, 16, scale)

``summary``, ``valid`` and ``gate`` are added inputs. Below ``gate`` tokens every live block is kept, and the call computes
what it computed before: the same kernel over the same blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from spec_compile.kernels import library
from spec_compile.passes.attention_match import AttentionMatch
from spec_compile.passes.base import Pass, PassContext, PassReport, Rejection, Stage, erase_unused, register_pass
from spec_compile.passes.cache_writes import first_row
from spec_compile.passes.emit import Emitter
from spec_compile.passes.nodes import aten, fake_mode, shape, tensor, writes_by_root
from spec_compile.passes.state_inputs import StateInput, add_input

assert library.select_blocks is not None  # importing it registers the operators
_LIVE = torch.ops.spec_compile.live_blocks_v2.default
_SELECT = torch.ops.spec_compile.select_blocks_v2.default
_SUMMARY = torch.ops.spec_compile.block_summary_v1_.default
_MASS = torch.ops.spec_compile.block_mass_v1.default
PARTS = {"mean": 1, "min_max": 2}


class SelectionPlan(Protocol):
    """The fields of ``spec_compile.AttentionPlan`` that are read here."""

    @property
    def budget(self) -> int | float | None: ...
    @property
    def budget_floor(self) -> int | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def sink(self) -> int: ...
    @property
    def recent(self) -> int: ...
    @property
    def representative(self) -> str: ...
    @property
    def query(self) -> str: ...
    @property
    def aggregate(self) -> str: ...
    @property
    def heads(self) -> str: ...
    @property
    def joint(self) -> bool: ...


@register_pass("sparsify_attention", Stage.SPARSIFY, exact=False)
class SparsifyAttention(Pass):
    """Give every anchor its selection, and the graph one upkeep of block summaries."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        report = self.report()
        anchors = [site for site in sites(ctx) if site.role.kind == "anchor"]
        if not anchors:
            return report
        plan: SelectionPlan = ctx.sparsity
        positions = _Positions(writes_by_root(gm.graph))
        summaries = {} if plan.representative == "exact" else _summarize(gm, ctx, anchors, positions)
        gates: dict[torch.device, Node] = {}
        for site in anchors:
            q = site.operand(0)
            device = q.device
            if device not in gates:
                with fake_mode(q):
                    like = torch.empty(1, dtype=torch.int64, device=device)
                gates[device] = add_input(gm, f"spec_gate_{len(gates)}", like)
                ctx.state.append(StateInput("gate", (), 0, 0, "", (1,), torch.int64, device))
            _select(site, plan, summaries.get(site.call), positions.of(site), gates[device])
            report.hits += 1
        report.notes = [describe(plan)]
        return report


class Site:
    """A sparse attention: its match, its call in the graph, its role, and its place among the graph's attentions."""

    def __init__(self, match: AttentionMatch, call: Node, role: Any, ordinal: int) -> None:
        self.match, self.call, self.role, self.ordinal = match, call, role, ordinal

    def operand(self, position: int) -> torch.Tensor:
        found = tensor(self.call.args[position])
        assert found is not None
        return found

    def use(self, lists: Iterable[Any], block_size: int) -> None:
        """Attend the blocks of ``ids, count, full`` instead."""
        before = [arg for arg in self.call.args[4:7] if isinstance(arg, Node)]
        made = [part.args[0] for part in before if isinstance(part.args[0], Node)]
        self.call.args = (*self.call.args[:4], *lists, block_size, *self.call.args[8:])
        erase_unused([*before, *dict.fromkeys(made)])


def sites(ctx: PassContext) -> list[Site]:
    """The sparse attentions of a graph, in order."""
    found, calls = [], iter(ctx.emitted)
    for ordinal, (match, role) in enumerate(zip(ctx.attentions, ctx.roles)):
        if isinstance(match, Rejection):
            continue
        call = next(calls)
        if role.kind != "dense":
            found.append(Site(match, call, role, ordinal))
    return found


class _Positions:
    """Slot of the first draft row, computed once a device, where its first anchor stands: all layers hold the same tokens."""

    def __init__(self, writes: dict[Node, list[Node]]) -> None:
        self.made: dict[torch.device, Node] = {}
        self.writes = writes

    def of(self, site: Site) -> Node:
        device = site.operand(1).device
        if device not in self.made:
            how = first_row(site.match, site.call, self.writes)
            assert not isinstance(how, Rejection)
            self.made[device] = how(Emitter(site.call).call)
        return self.made[device]


def _summarize(gm: GraphModule, ctx: PassContext, anchors: list[Site], positions: _Positions) -> dict[Node, Node]:
    """Add summaries and their upkeep; returns the summary of each anchor's call. One upkeep serves all caches of one shape."""
    plan: SelectionPlan = ctx.sparsity
    inputs = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    groups: dict[Any, list[Site]] = {}
    for site in anchors:
        k = site.operand(1)
        # A symbolic batch has no hash.
        groups.setdefault((k.device, k.dtype, str(shape(site.call.args[1])), str(k.stride())), []).append(site)
    found: dict[Node, Node] = {}
    for number, group in enumerate(groups.values()):
        k = group[0].operand(1)
        batch, (heads, slots, dim) = shape(group[0].call.args[1])[0], map(int, shape(group[0].call.args[1])[1:])
        blocks, parts = -(-slots // plan.block_size), PARTS[plan.representative]
        caches = tuple(inputs[site.match.key.storage] for site in group)
        emit = Emitter(group[0].call)
        with fake_mode(k):
            # One value for each input: code generators take inputs of one value for one tensor.
            values = [k.new_empty(batch, heads, blocks, parts, dim) for _ in group]
            valid = k.new_empty(batch, dtype=torch.int32)
        added = []
        for layer, (site, summary) in enumerate(zip(group, values)):
            node = add_input(gm, f"spec_summary_{site.ordinal}", summary)
            ctx.state.append(_state("summary", caches, layer, plan, summary))
            found[site.call] = node
            added.append(node)
        held = add_input(gm, f"spec_valid_{number}", valid)
        ctx.state.append(_state("valid", caches, 0, plan, valid))
        keys = [_as_read(emit, site) for site in group]
        emit.call(_SUMMARY, keys, added, held, positions.of(group[0]), plan.block_size, plan.representative)
    return found


def _state(kind: str, caches: tuple[int, ...], layer: int, plan: SelectionPlan, like: torch.Tensor) -> StateInput:
    return StateInput(kind, caches, layer, plan.block_size, plan.representative, tuple(like.shape), like.dtype, like.device)


def _as_read(emit: Emitter, site: Site) -> Node:
    """The layer's K cache as ``[B, Hkv, S, D]``, at a place in the graph where this step may not have written it yet."""
    key = site.match.key
    return key.storage if key.order == (0, 1, 2, 3) else emit.call(aten.permute.default, key.storage, list(key.order))


def _select(site: Site, plan: SelectionPlan, summary: Node | None, position: Node, gate: Node) -> None:
    emit = Emitter(site.call)
    q, k, mask, scale = site.call.args[0], site.call.args[1], site.call.args[3], site.call.args[8]
    live = emit.call(_LIVE, mask, plan.block_size)
    ids, count, full = (emit.call(operator.getitem, live, i) for i in range(3))
    masses = None
    if summary is None:
        masses = emit.call(_MASS, q, k, mask, ids, count, gate, plan.block_size, scale, plan.query, *site.call.args[9:])
    tokens, share, floor = budget_words(plan)
    chosen = emit.call(
        _SELECT, q, summary, masses, ids, count, full, position, gate, plan.block_size, scale, plan.query, plan.aggregate,
        plan.heads, plan.joint, plan.sink, plan.recent, tokens, share, floor,
    )  # fmt: skip
    site.use([emit.call(operator.getitem, chosen, i) for i in range(3)], plan.block_size)


def budget_words(plan: SelectionPlan) -> tuple[int, float, int]:
    """``tokens``, ``share`` and ``floor`` of ``select_blocks``."""
    if isinstance(plan.budget, float):
        return 0, plan.budget, plan.budget_floor or 0
    assert plan.budget is not None
    return plan.budget, 0.0, 0


def describe(plan: SelectionPlan) -> str:
    budget = f"{plan.budget} tokens" if isinstance(plan.budget, int) else f"{plan.budget:g} of the live keys"
    if plan.budget_floor:
        budget += f" above {plan.budget_floor} tokens"
    return f"budget {budget} in blocks of {plan.block_size}"
