"""One verify step as a ``torch.export`` program: weights inside, cache and block summaries as inputs that it writes.

The model is traced over cache tensors that are arguments, so the program holds no cache of its own: one artefact serves many
sequences, and a rollback is a smaller ``position``. The passes of the compiler then run on the program's graph; inputs that they
add (block summaries and switches) become inputs of the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from spec_compile.capture import module_to_aten
from spec_compile.errors import ExportError
from spec_compile.passes.base import PassContext
from spec_compile.passes.nodes import known
from spec_compile.passes.state_inputs import StateInput
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport

MASKS = ("causal", "padding", "tree")
MAX_BATCH = 64


class _Step(nn.Module):
    """``model`` over cache tensors that are arguments."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor], slots: int) -> None:
        super().__init__()
        self.model, self.run, self.slots = model, run, slots

    def forward(self, input_ids: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return self.run(input_ids, None, None, self.cache(position, keys, values))

    def cache(self, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
        from transformers.cache_utils import Cache, StaticLayer

        layers: list[Any] = []
        for k, v in zip(keys, values):
            layer: Any = StaticLayer(max_cache_len=self.slots)
            layer.keys, layer.values, layer.dtype, layer.device = k, v, k.dtype, k.device
            layer.batch_size, layer.num_heads, layer.k_head_dim, layer.v_head_dim = *k.shape[:2], k.shape[3], v.shape[3]
            # Each layer counts for itself, and the input stays what the caller gave.
            layer.cumulative_length = position.to(k.device, copy=True)
            layer.is_initialized = True
            layers.append(layer)
        return Cache(layers=layers)


class _MaskedStep(_Step):
    """Positions and a mask (or masks by layer type) are given."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        return self.run(input_ids, position_ids, attention_mask, self.cache(position, keys, values))


@dataclass(frozen=True)
class CacheShape:
    """One layer's K and V: ``[B, kv_heads, slots, k_dim]`` and ``[.., v_dim]``."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class StepSpec:
    """What the program must accept.

    Attributes:
        rows: draft rows, at most; at least 1.
        batch: sequences, or None for 1..``MAX_BATCH``.
        slots: of the cache.
        mask: ``causal`` (no mask input), ``padding`` (bool ``[B, slots]``) or ``tree`` (bool ``[B, 1, T, slots]``).
        mask_types: layer types that take a tree mask of their own.
    """

    layers: Sequence[CacheShape]
    rows: int
    batch: int | None
    slots: int
    mask: str = "padding"
    mask_types: Sequence[str] = ()


@dataclass
class VerifyProgram:
    """A rewritten program with flat inputs, in the order of ``inputs``; K and V and summaries are written in place."""

    program: ExportedProgram
    report: RewriteReport
    inputs: list[str]
    state: dict[str, StateInput] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def shapes(self) -> dict[str, Tensor]:
        """Fake value of each input."""
        nodes = {node.name: node for node in self.program.graph.find_nodes(op="placeholder")}
        return {name: nodes[name].meta["val"] for name in self.inputs}


def trace_step(model: Any, run: Callable[..., Tensor], spec: StepSpec, context: PassContext) -> VerifyProgram:
    """Export one verify step of ``model`` and rewrite it.

    Args:
        model: in eval mode.
        run: ``f(input_ids, position_ids, attention_mask, cache) -> logits`` over it.
        spec: sizes and masks.
        context: of the passes.

    Raises:
        ExportError: the model cannot be traced, or a size was specialised.
    """
    args, shapes = _examples(spec)
    masked = spec.mask != "causal"
    step = (_MaskedStep if masked else _Step)(model, run, spec.slots)
    names = _names(spec)
    try:
        with torch.no_grad():
            program = module_to_aten(step, args, dynamic_shapes=shapes)
    except Exception as error:
        advice = "; a fixed batch (batch=1) leaves fewer sizes to vary" if spec.batch is None else ""
        raise ExportError(f"torch.export cannot trace {type(model).__name__}: {_first_line(error)}{advice}") from error
    found = [spec.arg.name for spec in program.graph_signature.input_specs if _is_user(spec)]
    if found != names:
        raise ExportError(f"torch.export named the inputs {found}, expected {names}")
    _drop_assertions(program.graph_module)
    report = RewriteReport(inputs=len(program.graph_signature.input_specs))
    report.dynamic = True
    run_passes(program.graph_module, context, report)
    return _with_added_inputs(program, context.state, report)


def check_sizes(verify: VerifyProgram, spec: StepSpec) -> None:
    """
    Raises:
        ExportError: the program does not hold for every number of rows or sequences that it was asked for. Compiled code
            would not notice: it reads the rows that it knows of, and memory behind them where there are fewer.
    """
    batch, rows = verify.shapes()["input_ids"].shape
    asked: list[tuple[str, Any, int]] = [("rows", rows, spec.rows)] if spec.rows > 1 else []
    asked += [("batch", batch, MAX_BATCH)] if spec.batch is None else []
    for name, size, most in asked:
        fixed = known(size)
        if isinstance(fixed, int):
            raise ExportError(f"the program holds for {name} of {fixed} alone, it was to hold for 1..{most}")
        bounds = size.node.shape_env.bound_sympy(size.node.expr)
        if not (bounds.lower <= 2 and bounds.upper >= most):
            raise ExportError(
                f"the program holds for {name} of {bounds.lower}..{bounds.upper} alone, it was to hold for 1..{most}"
            )
    _check_guards({size.node.expr: (name, most) for name, size, most in asked}, [size for _, size, _ in asked])


def _check_guards(asked: dict[Any, tuple[str, int]], sizes: list[Any]) -> None:
    """Those of torch.export hold for the ranges that it was given; passes may have added others, which no range shows."""
    guards = [guard.expr for guard in sizes[0].node.shape_env.guards] if sizes else []
    for guard in guards:
        if not guard.free_symbols <= set(asked):
            continue
        for corner in itertools.product(*((2, most) for _, most in asked.values())):
            if guard.subs(dict(zip(asked, corner))) == sympy.false:
                met = " and ".join(f"{name} of {size}" for (name, _), size in zip(asked.values(), corner))
                raise ExportError(f"the program holds where {guard} alone, not for {met}")


def _is_user(spec: InputSpec) -> bool:
    return spec.kind is InputKind.USER_INPUT


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:400] if text else type(error).__name__


def _examples(spec: StepSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments to trace with, never read, and which of their sizes vary."""
    device = spec.layers[0].device
    varies = spec.rows > 1
    # A size of 1 would be specialised; and sizes must differ, lest two symbols become one.
    rows = 5 if spec.rows >= 5 else spec.rows
    batch = spec.batch or (2 if rows == 3 else 3)
    # A range of 1..2 becomes the one size 2; callers hold to the manifest's rows.
    t = torch.export.Dim("rows", min=1, max=max(spec.rows, 3)) if varies else None
    b = torch.export.Dim("batch", min=1, max=MAX_BATCH) if spec.batch is None else None

    def dims(**found: Any) -> dict[int, Any]:
        return {int(axis[1:]): size for axis, size in found.items() if size is not None}

    keys = [torch.empty(batch, x.kv_heads, spec.slots, x.k_dim, dtype=x.dtype, device=x.device) for x in spec.layers]
    values = [torch.empty(batch, x.kv_heads, spec.slots, x.v_dim, dtype=x.dtype, device=x.device) for x in spec.layers]
    ids = torch.zeros(batch, rows, dtype=torch.int64, device=device)
    position = torch.zeros((), dtype=torch.int64, device=device)
    caches = [dims(_0=b)] * len(keys)
    if spec.mask == "causal":
        return (ids, position, keys, values), (dims(_0=b, _1=t), None, caches, caches)
    if spec.mask == "padding":
        mask: Any = torch.ones(batch, spec.slots, dtype=torch.bool, device=device)
        mask_dims: Any = dims(_0=b)
    else:
        mask, mask_dims = torch.ones(batch, 1, rows, spec.slots, dtype=torch.bool, device=device), dims(_0=b, _2=t)
        if spec.mask_types:
            mask, mask_dims = ({kind: of.clone() if of is mask else of for kind in spec.mask_types} for of in (mask, mask_dims))
    return (ids, position, ids.clone(), mask, keys, values), (dims(_0=b, _1=t), None, dims(_0=b, _1=t), mask_dims, caches, caches)


def _names(spec: StepSpec) -> list[str]:
    names = ["input_ids", "position"]
    if spec.mask == "tree" and spec.mask_types:
        names += ["position_ids", *(f"attention_mask_{kind}" for kind in spec.mask_types)]
    elif spec.mask != "causal":
        names += ["position_ids", "attention_mask"]
    return [*names, *(f"{kind}_{i}" for kind in ("keys", "values") for i in range(len(spec.layers)))]


def _drop_assertions(gm: torch.fx.GraphModule) -> None:
    """Remove checks of dtypes that held while tracing: they count as readers of a value."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)


def _with_added_inputs(program: ExportedProgram, state: Sequence[StateInput], report: RewriteReport) -> VerifyProgram:
    """The program with flat inputs, those that passes added last."""
    graph = program.graph_module.graph
    known = {spec.arg.name for spec in program.graph_signature.input_specs}
    added: dict[str, StateInput] = {}
    waiting = list(state)
    for node in graph.find_nodes(op="placeholder"):
        if node.name in known:
            continue
        kind = node.name.removeprefix("spec_").rsplit("_", 1)[0]
        found = next(need for need in waiting if need.kind == kind)
        waiting.remove(found)
        added[node.name] = found
    if waiting:
        raise ExportError(f"inputs were not found in the graph: {', '.join(need.kind for need in waiting)}")
    for node in graph.nodes:
        # Traces name files of the machine that exported.
        node.meta.pop("stack_trace", None)
    specs = list(program.graph_signature.input_specs)
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(name=name), None) for name in added]
    inputs = [spec.arg.name for spec in specs if _is_user(spec)]
    # Passes may have replaced the node that made an output.
    results = zip(program.graph_signature.output_specs, graph.output_node().args[0], strict=True)
    outputs = [OutputSpec(spec.kind, TensorArgument(name=node.name), spec.target) for spec, node in results]
    flat = rebuild(program, graph, specs, outputs, len(inputs), 1)
    written = [name for name in inputs if name.startswith(("keys_", "values_", "spec_summary_", "spec_valid_"))]
    return VerifyProgram(flat, report, inputs, added, written)


def rebuild(
    program: ExportedProgram,
    graph: torch.fx.Graph,
    inputs: list[InputSpec],
    outputs: list[OutputSpec],
    arguments: int,
    results: int,
    examples: tuple[Tensor, ...] | None = None,
) -> ExportedProgram:
    """``program`` with another graph and signature, called with ``arguments`` tensors in a row.

    Example inputs are left behind where none are given: they would be saved, caches included.
    """
    from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature

    in_spec = pytree.tree_structure((tuple(range(arguments)), {}))
    out_spec = pytree.tree_structure(0 if results == 1 else tuple(range(results)))
    users = [spec.arg for spec in inputs if _is_user(spec)]
    found = [spec.arg for spec in outputs if spec.kind is OutputKind.USER_OUTPUT]
    call = ModuleCallSignature(
        inputs=users, outputs=found, in_spec=in_spec, out_spec=out_spec, forward_arg_names=[arg.name for arg in users]
    )
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=None if examples is None else (examples, {}),
        constants=program.constants,
        verifiers=program.verifiers,
    )
