"""What a pass is: stages, registry, context, and the record each pass leaves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from spec_compile.passes.nodes import mutated_arguments


class Stage(enum.IntEnum):
    """Total order of the pipeline. Passes of one stage run in registration order."""

    CANONICALIZE = 1
    DETECT = 2
    PLAN = 3
    SPARSIFY = 4
    SHARE = 5
    LOWER = 6
    CHECK = 7


@dataclass(frozen=True)
class Rejection:
    """Why a construct was left as it was.

    Attributes:
        reason: one sentence that names what was met and, where there is one, the remedy.
        node: name of the graph node at which the proof failed.
        layer: module path of the construct, where known.
        source: source line that produced the node, where known.
    """

    reason: str
    node: str
    layer: str | None = None
    source: str | None = None

    def __bool__(self) -> bool:
        return False


@dataclass
class PassReport:
    """What one pass did to one graph. ``ms`` is filled in by the pipeline."""

    name: str
    stage: Stage
    exact: bool
    hits: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ms: float = 0.0

    @property
    def changed(self) -> bool:
        return self.hits > 0


@dataclass
class PassContext:
    """Inputs of a run that passes may read.

    ``attentions`` (matches and rejections) and ``emitted`` (the calls that replaced the matches) are filled by the detector,
    ``roles`` (one per attention) by the plan stage, ``state`` by passes that add inputs to the graph. ``sparsity`` is the plan
    for attention, or None for exact. ``moes`` (what was found of each MoE layer) and ``moe_calls`` are filled by its detector;
    ``released`` names writes to temporaries that went away with a region which owned them. ``moe_plan`` is the plan for MoE, or
    None for exact, and ``moe_limits`` what it makes of each of ``moes``. ``mlps`` (what was found of each feed-forward layer) and
    ``ffn_rules`` (what ``ffn_plan`` makes of each of them) are filled by its detector, and ``mlp_calls`` with the calls by place.
    ``one_graph``: the graph must hold for every number of rows it was asked for (an export), so no pass may bound a symbolic one.
    ``batch_varies``: whoever runs the graph allocates added inputs for the batch at hand, which may be symbolic.
    """

    max_q_len: int = 32
    block_size: int = 64
    lowering: str = "auto"
    need_static_cache: bool = False
    attentions: list[Any] = field(default_factory=list)
    emitted: list[Node] = field(default_factory=list)
    sparsity: Any = None
    roles: list[Any] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    moes: list[Any] = field(default_factory=list)
    moe_calls: list[Node] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    moe_plan: Any = None
    moe_limits: list[Any] = field(default_factory=list)
    mlps: list[Any] = field(default_factory=list)
    mlp_calls: dict[int, Node] = field(default_factory=dict)
    ffn_plan: Any = None
    ffn_rules: list[Any] = field(default_factory=list)
    batch_varies: bool = False
    one_graph: bool = False


class Pass:
    """One transformation of a pre-dispatch ATen graph.

    Subclasses state ``name``, ``stage`` and ``exact`` and implement :meth:`run`, which rewrites ``gm.graph`` in place and
    returns a :class:`PassReport`. Timing, lint, recompilation and dumps belong to the pipeline.
    """

    name: str
    stage: Stage
    exact: bool = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassReport:
        raise NotImplementedError

    def report(self) -> PassReport:
        return PassReport(self.name, self.stage, self.exact)


_REGISTRY: list[type[Pass]] = []


def register_pass(name: str, stage: Stage, exact: bool = True) -> Callable[[type[Pass]], type[Pass]]:
    """Class decorator that gives a pass its name and stage and adds it to the registry."""

    def wrap(cls: type[Pass]) -> type[Pass]:
        if any(other.name == name for other in _REGISTRY):
            raise ValueError(f"a pass named {name!r} is registered already")
        cls.name, cls.stage, cls.exact = name, stage, exact
        _REGISTRY.append(cls)
        return cls

    return wrap


def registered_passes() -> list[type[Pass]]:
    """All passes in the order in which they run."""
    order = {cls: position for position, cls in enumerate(_REGISTRY)}
    return sorted(_REGISTRY, key=lambda cls: (cls.stage, order[cls]))


def erase_unused(nodes: Iterable[Node], proven: Iterable[Node] = ()) -> int:
    """Erase those of ``nodes`` that have no users and no effect, last first; returns how many went.

    ``proven`` nodes go although FX holds them for impure: SDPA and dropout are tagged as random, and a match has shown that
    no dropout is active.
    """
    erased, inactive = 0, set(proven)
    for node in sorted({*nodes, *inactive}, reverse=True):
        pure = node.op == "get_attr" or (node.op == "call_function" and not mutated_arguments(node))
        if pure and not node.users and (node in inactive or not node.is_impure()):
            node.graph.erase_node(node)
            erased += 1
    return erased
