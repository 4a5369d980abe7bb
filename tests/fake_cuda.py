"""What the passes make of a model on a CUDA device, found without one: Dynamo's graph, traced again on fake tensors of an H200.

Builds of torch without CUDA know such tensors, but not the device guards that some methods of Python open for them; these
methods are replaced by their operators meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from spec_compile import capture
from spec_compile.backend import _sparsity
from spec_compile.classify import classify
from spec_compile.kernels import availability
from spec_compile.options import Options
from spec_compile.passes.base import PassContext
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport

CUDA = torch.device("cuda:0")
H200 = types.SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10, L2_cache_size=50 << 20
)
aten = torch.ops.aten


@dataclass
class Compiled:
    """One verify graph, rewritten.

    Attributes:
        q_len: rows, a symbol where the graph serves any number.
        guards: on sizes that the passes, or tracing what they made, have added.
        pinned: symbols that became numbers meanwhile.
    """

    q_len: Any
    gm: GraphModule
    report: RewriteReport
    guards: list[str]
    pinned: list[str]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (H200.major, H200.minor))
    availability.capability.cache_clear()
    yield
    availability.capability.cache_clear()


def backend_for(plan: Any, found: list[Compiled]) -> Callable[..., Any]:
    """A Dynamo backend that rewrites verify graphs as on a CUDA device, into ``found``, and runs them as they came."""
    options = Options.parse({"plan": plan})

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        kind = classify(gm, options.max_q_len)
        if kind.verify:
            with _operators_for_methods():
                found.append(_rewrite(gm, example_inputs, options, kind.q_len))
        return gm.forward

    return backend


def _rewrite(gm: GraphModule, example_inputs: list[Any], options: Options, q_len: Any) -> Compiled:
    plan = options.plan
    inputs, mode = capture._fakify(gm, example_inputs)
    with mode:
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) if isinstance(x, Tensor) else x for x in inputs
        ]
        with torch.fx.traceback.preserve_node_meta():
            traced = make_fx(lambda *args: Interpreter(_moved(gm)).run(*args), pre_dispatch=True)(*inputs)
    capture._keep_dynamo_metadata(gm, traced)
    sizes: Any = mode.shape_env
    guards, replaced = len(sizes.guards) if sizes else 0, dict(sizes.replacements) if sizes else {}
    ctx = PassContext(
        max_q_len=options.max_q_len,
        block_size=options.block_size,
        lowering=options.lowering,
        sparsity=_sparsity(options),
        moe_plan=None if plan.moe is None or plan.moe.exact else plan.moe,
        ffn_plan=None if plan.ffn is None or plan.ffn.exact else plan.ffn,
    )
    report = RewriteReport(inputs=len(example_inputs))
    rewritten = run_passes(traced, ctx, report)
    # As Inductor does next: the operators' fake kernels see the symbols, too.
    with mode:
        Interpreter(rewritten).run(*[node.meta["val"] for node in rewritten.graph.find_nodes(op="placeholder")])
    if sizes is None:
        return Compiled(q_len, rewritten, report, [], [])
    pinned = [str(symbol) for symbol in sizes.replacements if symbol not in replaced]
    return Compiled(q_len, rewritten, report, [str(guard.expr) for guard in sizes.guards[guards:]], pinned)


def _moved(gm: GraphModule) -> GraphModule:
    """A copy whose nodes name the CUDA device."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = torch.fx.node.map_aggregate(node.args, _device)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _device)
        if node.target is torch.tensor:
            node.target = _scalar
    return GraphModule(gm, graph)


def _device(value: Any) -> Any:
    return CUDA if isinstance(value, torch.device) else value


@contextlib.contextmanager
def _operators_for_methods() -> Iterator[None]:
    replaced = {
        "__getitem__": _index,
        "__setitem__": _set,
        "__invert__": aten.bitwise_not.default,
        "contiguous": _contiguous,
        "copy_": aten.copy_.default,
    }
    with contextlib.ExitStack() as stack:
        for name, operator in replaced.items():
            stack.enter_context(_replaced(name, operator))
        yield


@contextlib.contextmanager
def _replaced(name: str, operator: Callable[..., Any]) -> Iterator[None]:
    own = getattr(Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (operator if self.device.type == "cuda" else own)(self, *args, **kwargs)

    setattr(Tensor, name, method)
    try:
        yield
    finally:
        setattr(Tensor, name, own)


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return aten.contiguous.default(x, memory_format=memory_format)


def _index(x: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in index):
        at = next(i for i, part in enumerate(index) if part is Ellipsis)
        used = sum(part is not None and part is not Ellipsis for part in index)
        index = (*index[:at], *[slice(None)] * (x.dim() - used), *index[at + 1 :])
    dim, gathered = 0, {}
    for part in index:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            if part != slice(None):
                end = sys.maxsize if part.stop is None else part.stop
                x = aten.slice.Tensor(x, dim, part.start or 0, end, part.step or 1)
        elif isinstance(part, Tensor):
            gathered[dim] = part
        else:
            x, dim = x.select(dim, part), dim - 1
        dim += 1
    return aten.index.Tensor(x, [gathered.get(i) for i in range(max(gathered) + 1)]) if gathered else x


def _scalar(value: float, **options: Any) -> Tensor:
    return torch.full((), value, **options)


def _set(x: Tensor, index: Tensor, value: Tensor) -> None:
    aten.index_put_.default(x, [index], value)
