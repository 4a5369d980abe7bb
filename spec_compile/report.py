"""What the compiler did to one graph: every attention, rewritten or refused with its reason, and what it cost."""

from __future__ import annotations

import collections
import contextlib
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from spec_compile.kernels.selection import budget_in_blocks
from spec_compile.passes.attention_match import AttentionMatch
from spec_compile.passes.base import PassReport, Rejection
from spec_compile.passes.detect_mlp import MlpFound
from spec_compile.passes.detect_moe import MoeFound
from spec_compile.passes.nodes import hint, tensor
from spec_compile.passes.plan_mlp import ChannelRule
from spec_compile.passes.plan_reuse import Role
from spec_compile.passes.sparsify_attention import PARTS, budget_words
from spec_compile.passes.sparsify_moe import Limit


@dataclass(frozen=True)
class AttentionEntry:
    """One attention of the graph.

    Attributes:
        layer: module path or ordinal.
        status: ``rewritten`` or ``refused``.
        reason, node, source: of a refusal.
        anchor: ``sdpa``, ``softmax`` or ``marker``.
        heads, kv_heads, head_dim, v_head_dim, kv_len: sizes; ``kv_len`` as seen while tracing.
        cache, write: ``static``, ``growing`` or ``rolling``, and the operator that writes it.
        softcap, sinks, masked: what else takes part.
        kv_bytes: bytes of K and V that the cache of this layer holds (all ``kv_len`` slots).
        role: ``dense``, ``anchor`` (selects blocks) or ``follower`` of the layer ``follows``; "" without a sparse plan.
        role_note: why it has that role, where the plan does not say it.
        blocks, live_blocks: blocks read of live ones in a full cache (per KV head; the mean where heads compete).
        sparse_bytes: bytes of K and V read from a full cache in a sparse step, and of summaries read to select.
    """

    layer: str
    status: str
    reason: str = ""
    node: str = ""
    source: str = ""
    anchor: str = ""
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    kv_len: int = 0
    cache: str = ""
    write: str = ""
    softcap: float = 0.0
    sinks: bool = False
    masked: bool = False
    kv_bytes: int = 0
    role: str = ""
    role_note: str = ""
    follows: str = ""
    blocks: int = 0
    live_blocks: int = 0
    sparse_bytes: int = 0

    @classmethod
    def of(cls, found: AttentionMatch | Rejection, ordinal: int, role: Any = None, plan: Any = None) -> AttentionEntry:
        if isinstance(found, Rejection):
            layer = found.layer or f"attention {ordinal}"
            return cls(layer, "refused", found.reason, found.node, found.source or "")
        key, value, base = found.key, found.value, tensor(found.key.base)
        assert base is not None
        length, batch = hint(key.kv_len) or 0, hint(base.shape[key.order[0]]) or 0
        size = batch * key.kv_heads * length * (key.head_dim + value.head_dim) * base.element_size()
        return cls(
            found.layer or f"attention {ordinal}", "rewritten", anchor=found.kind, heads=found.heads,
            kv_heads=key.kv_heads, head_dim=key.head_dim, v_head_dim=value.head_dim, kv_len=length, cache=key.kind,
            write=key.write, softcap=found.softcap, sinks=found.sinks is not None, masked=bool(found.terms),
            kv_bytes=size, **_sparsity(found, role, plan, length, size),
        )  # fmt: skip


def _sparsity(match: AttentionMatch, role: Role | None, plan: Any, length: int, size: int) -> dict[str, Any]:
    """What the plan makes of an attention over a full cache of ``length`` tokens."""
    if role is None:
        return {}
    said = {"role": role.kind, "role_note": role.note}
    live = -(-length // plan.block_size)
    if role.kind == "dense":
        return {**said, "sparse_bytes": size}
    tokens, share, floor = budget_words(plan)
    gate = torch.full((1,), plan.min_context, dtype=torch.int64)
    budget = int(budget_in_blocks(torch.tensor([live]), plan.block_size, tokens, share, floor, gate))
    kept = min(live, budget + min(plan.sink + plan.recent, live))
    read = size * min(1.0, kept * plan.block_size / max(1, length))
    if role.kind == "anchor" and plan.representative == "exact":
        read += size * match.key.head_dim / (match.key.head_dim + match.value.head_dim)
    elif role.kind == "anchor":
        share_of_keys = match.key.head_dim / (match.key.head_dim + match.value.head_dim)
        read += size * share_of_keys * PARTS[plan.representative] / plan.block_size
    return {**said, "blocks": kept, "live_blocks": live, "sparse_bytes": round(read)}


@dataclass(frozen=True)
class MoeEntry:
    """One MoE layer of the graph.

    Attributes:
        layer, status, reason, node, source: as of :class:`AttentionEntry`.
        form: how the experts were written: ``batched_mm``, ``grouped_mm``, ``gather``, ``marker`` or ``loop``.
        experts, top_k, hidden, inner: sizes E, K, H and I.
        activation: of the experts.
        router: rule of the router, "" where none was proven.
        router_note: why the router stays as it was traced, "" where it was rewritten.
        expert_bytes: bytes of one expert's weights; a step reads as many experts as its rows chose.
        rule: what a plan takes away in sparse steps, "" where the layer stays exact, for the reason ``rule_note``.
    """

    layer: str
    status: str
    reason: str = ""
    node: str = ""
    source: str = ""
    form: str = ""
    experts: int = 0
    top_k: int = 0
    hidden: int = 0
    inner: int = 0
    activation: str = ""
    router: str = ""
    router_note: str = ""
    expert_bytes: int = 0
    rule: str = ""
    rule_note: str = ""

    @classmethod
    def of(cls, found: MoeFound | Rejection, ordinal: int, limit: Limit | None = None) -> MoeEntry:
        rule, note = ("", "") if limit is None else (limit.words(), limit.note)
        if isinstance(found, Rejection):
            return cls(
                found.layer or f"moe {ordinal}",
                "refused",
                found.reason,
                found.node,
                found.source or "",
                rule=rule,
                rule_note=note,
            )
        experts, route, down = found.experts, found.route, tensor(found.experts.down)
        assert down is not None
        return cls(
            experts.layer or f"moe {ordinal}", "rewritten", form=experts.form, experts=experts.experts, top_k=experts.top_k,
            hidden=experts.hidden, inner=experts.inner, activation=experts.activation,
            router="" if isinstance(route, Rejection) else route.words(),
            router_note=route.reason if isinstance(route, Rejection) else found.kept,
            expert_bytes=3 * experts.hidden * experts.inner * down.element_size(), rule=rule, rule_note=note,
        )  # fmt: skip

    def words(self) -> str:
        """What is common to layers of one kind."""
        router = self.router or f"top {self.top_k}"
        kept = f" (router as traced: {self.router_note})" if self.router_note else ""
        return f"{self.form}, {self.experts} experts of {self.hidden} x {self.inner}, {self.activation}, {router}{kept}"


@dataclass(frozen=True)
class MlpEntry:
    """One feed-forward layer of the graph.

    Attributes:
        layer, reason, node, source: as of :class:`AttentionEntry`.
        status: ``rewritten``, ``kept`` (proven, but its linear calls stay, for the reason ``kept``), or ``refused``.
        form: ``gated``, ``fused`` (gate and up in one weight) or ``plain`` (one first projection).
        hidden, inner: sizes H and F. activation: of the first projection.
        weight_bytes: bytes of its weights, all read in an exact step. sparse_bytes: those read in a sparse step, as far as known:
            under a budget, or by a calibration.
        rule: what a plan skips in sparse steps, "" where the layer stays exact, for the reason ``rule_note``.
    """

    layer: str
    status: str
    reason: str = ""
    node: str = ""
    source: str = ""
    form: str = ""
    hidden: int = 0
    inner: int = 0
    activation: str = ""
    weight_bytes: int = 0
    sparse_bytes: int = 0
    kept: str = ""
    rule: str = ""
    rule_note: str = ""

    @classmethod
    def of(cls, found: MlpFound | Rejection, ordinal: int, rule: ChannelRule | None = None) -> MlpEntry:
        words, note = ("", "") if rule is None else (rule.words(), rule.note)
        if isinstance(found, Rejection):
            layer = found.layer or f"mlp {ordinal}"
            return cls(layer, "refused", found.reason, found.node, found.source or "", rule=words, rule_note=note)
        match = found.match
        return cls(
            match.layer or f"mlp {ordinal}", "kept" if found.kept else "rewritten", form=match.form, hidden=match.hidden,
            inner=match.inner, activation=match.activation, weight_bytes=match.weight_bytes,
            sparse_bytes=match.read_bytes(rule.union if rule is not None and words else 1.0), kept=found.kept, rule=words,
            rule_note=note,
        )  # fmt: skip

    def words(self) -> str:
        """What is common to layers of one kind."""
        return f"{self.form}, {self.hidden} x {self.inner}, {self.activation}"


@dataclass
class RewriteReport:
    """Report on one compiled graph. ``str()`` is a table, :meth:`to_dict` is JSON-ready.

    Attributes:
        kind: ``verify``, or ``passed through``.
        reason: why a graph was passed through.
        q_len, kv_len: as seen while tracing; ``dynamic`` tells whether q_len is symbolic.
        attentions: every attention of the graph.
        moes: every MoE layer of the graph.
        mlps: every feed-forward layer of the graph, shared experts included.
        passes: what each pass did.
        inputs, static_inputs: graph inputs, and how many of them keep their address (weights, static caches).
        seconds: ``capture``, ``passes``, ``codegen``.
        notes: anything else worth knowing.
    """

    kind: str = "verify"
    reason: str = ""
    q_len: int = 0
    kv_len: int = 0
    dynamic: bool = False
    attentions: list[AttentionEntry] = field(default_factory=list)
    moes: list[MoeEntry] = field(default_factory=list)
    mlps: list[MlpEntry] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    inputs: int = 0
    static_inputs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    before: str = field(default="", repr=False)
    after: str = field(default="", repr=False)

    @property
    def rewritten(self) -> list[AttentionEntry]:
        return [entry for entry in self.attentions if entry.status == "rewritten"]

    @property
    def refused(self) -> list[AttentionEntry]:
        return [entry for entry in self.attentions if entry.status == "refused"]

    @property
    def sparse(self) -> list[AttentionEntry]:
        return [entry for entry in self.attentions if entry.role in ("anchor", "follower")]

    def add_attentions(self, found: list[Any], roles: list[Role], plan: Any) -> None:
        given: list[Role | None] = [*roles] or [None] * len(found)
        entries = [AttentionEntry.of(item, place, role, plan) for place, (item, role) in enumerate(zip(found, given))]
        for place, role in enumerate(roles):
            if role.anchor is not None:
                entries[place] = replace(entries[place], follows=entries[role.anchor].layer)
        self.attentions = entries

    @property
    def limited(self) -> list[MoeEntry]:
        return [entry for entry in self.moes if entry.rule]

    def add_moes(self, found: list[Any], limits: list[Limit] | None = None) -> None:
        given: list[Limit | None] = [*limits] if limits else [None] * len(found)
        start = len(self.moes)
        self.moes += [MoeEntry.of(item, start + place, limit) for place, (item, limit) in enumerate(zip(found, given))]

    @property
    def skipping(self) -> list[MlpEntry]:
        return [entry for entry in self.mlps if entry.rule]

    def add_mlps(self, found: list[Any], rules: list[ChannelRule] | None = None) -> None:
        given: list[ChannelRule | None] = [*rules] if rules else [None] * len(found)
        self.mlps += [MlpEntry.of(item, place, rule) for place, (item, rule) in enumerate(zip(found, given))]

    def code(self, which: str = "after") -> str:
        """The graph as Python, ``before`` or ``after`` the passes (kept by ``explain`` and under ``dump``)."""
        if which not in ("before", "after"):
            raise ValueError(f"which must be 'before' or 'after', got {which!r}")
        return self.before if which == "before" else self.after

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "reason": self.reason,
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "dynamic": self.dynamic,
            "attentions_rewritten": len(self.rewritten),
            "attentions_refused": len(self.refused),
            "kv_bytes": sum(entry.kv_bytes for entry in self.attentions),
            "attentions_sparse": len(self.sparse),
            "sparse_bytes": sum(entry.sparse_bytes for entry in self.attentions) if self.sparse else None,
            "attentions": [asdict(entry) for entry in self.attentions],
            "moes_rewritten": sum(entry.status == "rewritten" for entry in self.moes),
            "moes_refused": sum(entry.status == "refused" for entry in self.moes),
            "moes_limited": len(self.limited),
            "moes": [asdict(entry) for entry in self.moes],
            "mlps_rewritten": sum(entry.status == "rewritten" for entry in self.mlps),
            "mlps_kept": sum(entry.status == "kept" for entry in self.mlps),
            "mlps_refused": sum(entry.status == "refused" for entry in self.mlps),
            "mlps_skipping": len(self.skipping),
            "mlps": [asdict(entry) for entry in self.mlps],
            "passes": [
                {
                    "name": p.name, "stage": p.stage.name, "exact": p.exact, "hits": p.hits, "ms": round(p.ms, 3),
                    "rejections": [asdict(r) for r in p.rejections], "notes": p.notes,
                }
                for p in self.passes
            ],
            "inputs": self.inputs,
            "static_inputs": self.static_inputs,
            "seconds": {key: round(value, 4) for key, value in self.seconds.items()},
            "notes": self.notes,
            "torch": torch.__version__,
        }  # fmt: skip

    def _sparse_lines(self) -> list[str]:
        read = sum(entry.sparse_bytes for entry in self.attentions)
        held = sum(entry.kv_bytes for entry in self.attentions)
        lines = [
            f"  sparse layers {len(self.sparse)} of {len(self.attentions)}; of the rewritten ones a step reads in a full cache"
        ]
        lines.append(f"    {read / 1e6:.1f} MB of {held / 1e6:.1f} MB of K and V ({read / max(1, held):.1%}), summaries included")
        for entry in self.attentions:
            if not entry.role:
                continue
            what = {"anchor": "selects", "dense": "dense"}.get(entry.role) or f"follows {entry.follows}"
            kept = f", {entry.blocks} of {entry.live_blocks} blocks" if entry.role != "dense" else ""
            lines.append(f"    {entry.layer}: {what}{kept}" + (f" ({entry.role_note})" if entry.role_note else ""))
        return lines

    def _moe_lines(self) -> list[str]:
        done = [entry for entry in self.moes if entry.status == "rewritten"]
        lines = [f"  MoE rewritten {len(done)} of {len(self.moes)}"]
        groups: dict[str, list[MoeEntry]] = {}
        for entry in done:
            groups.setdefault(entry.words(), []).append(entry)
        for text, entries in groups.items():
            lines.append(f"    {len(entries)} x {text}: {_span([entry.layer for entry in entries])}")
        lines += _refused_lines([entry for entry in self.moes if entry.status == "refused"])
        if any(entry.rule or entry.rule_note for entry in self.moes):
            lines.append(f"  in sparse steps {len(self.limited)} of {len(self.moes)} are limited")
            lines += [f"    {entry.layer}: {entry.rule or f'exact ({entry.rule_note})'}" for entry in self.moes]
        if done:
            held, one = sum(entry.experts * entry.expert_bytes for entry in done), done[0].expert_bytes
            lines.append(
                f"  expert weights {held / 1e6:.1f} MB, {one / 1e6:.1f} MB an expert; each expert chosen is read once a step"
            )
        return lines

    def _mlp_lines(self) -> list[str]:
        proven = [entry for entry in self.mlps if entry.status != "refused"]
        done = sum(entry.status == "rewritten" for entry in proven)
        lines = [f"  feed-forward layers found {len(proven)} of {len(self.mlps)}, rewritten {done}"]
        groups: dict[str, list[MlpEntry]] = {}
        for entry in proven:
            kept = f" (linear calls stay: {entry.kept})" if entry.kept else ""
            groups.setdefault(entry.words() + kept, []).append(entry)
        for text, entries in groups.items():
            lines.append(f"    {len(entries)} x {text}: {_span([entry.layer for entry in entries])}")
        lines += _refused_lines([entry for entry in self.mlps if entry.status == "refused"])
        if any(entry.rule or entry.rule_note for entry in self.mlps):
            held, read = sum(entry.weight_bytes for entry in proven), sum(entry.sparse_bytes for entry in proven)
            known = f" and read {read / 1e6:.1f} MB of {held / 1e6:.1f} MB of their weights" if read < held else ""
            lines.append(f"  in sparse steps {len(self.skipping)} of {len(self.mlps)} skip channels{known}")
            lines += [f"    {entry.layer}: {entry.rule or f'exact ({entry.rule_note})'}" for entry in self.mlps]
        return lines

    def __str__(self) -> str:
        rows = f"{self.q_len} (dynamic)" if self.dynamic else f"{self.q_len}"
        lines = [f"spec_compile  {self.kind}  q_len {rows}  cache {self.kv_len}  torch {torch.__version__}"]
        if self.reason:
            lines.append(f"  {self.reason}")
        if self.passes:
            lines += ["", f"  {'pass':<20} {'hits':>5} {'refused':>8} {'exact':>6} {'ms':>8}"]
            for p in self.passes:
                exact, notes = "yes" if p.exact else "no", ", ".join(p.notes)
                lines.append(f"  {p.name:<20} {p.hits:>5} {len(p.rejections):>8} {exact:>6} {p.ms:>8.1f}  {notes}".rstrip())
        if self.attentions:
            lines += ["", f"  attention rewritten {len(self.rewritten)} of {len(self.attentions)}"]
            lines += [f"    {text}" for text in _grouped(self.rewritten)]
        lines += _refused_lines(self.refused)
        if self.rewritten:
            held = sum(entry.kv_bytes for entry in self.attentions)
            lines.append(f"  K and V of the whole cache {held / 1e6:.1f} MB; only live blocks of it are read each step")
        if any(entry.role for entry in self.attentions):
            lines += self._sparse_lines()
        if self.moes:
            lines += ["", *self._moe_lines()]
        if self.mlps:
            lines += ["", *self._mlp_lines()]
        if self.inputs:
            lines.append(f"  inputs {self.inputs}, static {self.static_inputs}")
        if self.seconds:
            lines.append("  seconds " + ", ".join(f"{key} {value:.2f}" for key, value in self.seconds.items()))
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _grouped(entries: list[AttentionEntry]) -> list[str]:
    """One line per distinct shape, with the layers it holds for."""
    groups: dict[str, list[str]] = {}
    for e in entries:
        extra = "".join([", softcap" if e.softcap else "", ", sinks" if e.sinks else "", "" if e.masked else ", no mask"])
        dims = f"{e.head_dim}" if e.head_dim == e.v_head_dim else f"{e.head_dim}/{e.v_head_dim}"
        groups.setdefault(f"{e.anchor}, {e.heads}/{e.kv_heads} heads, D {dims}, {e.cache} cache ({e.write}){extra}", []).append(
            e.layer
        )
    return [f"{len(layers)} x {text}: {_span(layers)}" for text, layers in groups.items()]


def _span(layers: list[str]) -> str:
    return layers[0] + (f" .. {layers[-1]}" if len(layers) > 1 else "")


def _refused_lines(refused: list[Any]) -> list[str]:
    """Entries by reason, each reason once."""
    groups: dict[str, list[Any]] = {}
    for entry in refused:
        groups.setdefault(entry.reason, []).append(entry)
    lines = []
    for reason, entries in groups.items():
        more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
        lines.append(f"    refused: {', '.join(entry.layer for entry in entries[:4])}{more}")
        lines += textwrap.wrap(reason, 110, initial_indent="      ", subsequent_indent="      ")
        if entries[0].node:
            lines.append(f"      at {entries[0].node}" + (f", {entries[0].source}" if entries[0].source else ""))
    return lines


_HISTORY: collections.deque[RewriteReport] = collections.deque(maxlen=256)
_RECORDS: list[list[RewriteReport]] = []


def remember(report: RewriteReport) -> None:
    _HISTORY.append(report)
    for record in _RECORDS:
        record.append(report)


def history() -> list[RewriteReport]:
    """Reports of the graphs compiled in this process, oldest first (the last 256).

    Positions in it shift once it is full: :func:`recorded` tells which graphs a piece of work compiled.
    """
    return list(_HISTORY)


@contextlib.contextmanager
def recorded() -> Iterator[list[RewriteReport]]:
    """Collects the reports of every graph this process compiles inside the block, however many they are."""
    record: list[RewriteReport] = []
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS[:] = [other for other in _RECORDS if other is not record]
