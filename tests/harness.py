"""Run the passes on small programs without Dynamo, and compare eager with the rewritten graph.

A program is a function (or module) of tensors; caches are ordinary inputs that it writes in place. Tracing happens on
fake tensors, so the inputs handed in are never written.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from spec_compile.passes.base import PassContext
from spec_compile.passes.lower_attention import LowerAttention
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport

# Small blocks, so that caches of a few dozen slots span several of them and end in a short one.
BLOCK_SIZE = 16

ATTENTION = torch.ops.spec_compile.attention_v1.default
FOLDED = torch.ops.spec_compile.attention_folded_v1.default
LIVE_BLOCKS = torch.ops.spec_compile.live_blocks_v2.default

Program = Callable[..., Any]


def trace(fn: Program, inputs: Sequence[Any], dynamic: Sequence[tuple[int, int]] = ()) -> GraphModule:
    """Trace ``fn`` into pre-dispatch ATen whose nodes carry fake values.

    Args:
        fn: function or module; parameters of a module become ``get_attr`` nodes.
        inputs: tensors (any strides) or Python scalars.
        dynamic: ``(input, dim)`` pairs whose sizes become symbols, equal hints sharing one symbol.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, allow_non_fake_inputs=True)
    fakes = [_fake(mode, given, [d for i, d in dynamic if i == at]) for at, given in enumerate(inputs)]
    with mode, torch.no_grad():
        return make_fx(fn, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)


def _fake(mode: FakeTensorMode, given: Any, dims: list[int]) -> Any:
    if not isinstance(given, Tensor):
        return given
    if mode.shape_env is None:
        return mode.from_tensor(given)
    sizes = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(given.dim())]
    return mode.from_tensor(given, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def rewrite(gm: GraphModule, lowering: str = "auto", **options: Any) -> tuple[GraphModule, RewriteReport]:
    """Run all passes on ``gm`` in place; ``options`` are fields of :class:`PassContext`."""
    options.setdefault("block_size", BLOCK_SIZE)
    report = RewriteReport()
    return run_passes(gm, PassContext(lowering=lowering, **options), report), report


def lower(gm: GraphModule) -> GraphModule:
    """Put kernels behind the attention calls of a graph that was rewritten with ``lowering="reference"``."""
    LowerAttention().run(gm, PassContext())
    gm.recompile()
    return gm


def count(gm: GraphModule, *targets: torch._ops.OpOverload) -> int:
    """Calls of any of ``targets``."""
    return sum(node.op == "call_function" and node.target in targets for node in gm.graph.nodes)


def op_counts(gm: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def cloned(inputs: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, offsets and aliasing between inputs."""
    return copy.deepcopy(list(inputs))


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@dataclass
class Case:
    """Eager against rewritten: outputs, every input after the call, the report and the graph."""

    expected: Any
    actual: Any
    expected_inputs: list[Any]
    actual_inputs: list[Any]
    report: RewriteReport
    graph: GraphModule = field(repr=False)

    @property
    def hits(self) -> int:
        return len(self.report.rewritten)

    @property
    def reasons(self) -> list[str]:
        return [entry.reason for entry in self.report.refused]

    def check(self, atol: float = 1e-5) -> Case:
        """Outputs agree within ``atol``; written inputs agree bit for bit."""
        compare(self.expected, self.actual, atol)
        compare(self.expected_inputs, self.actual_inputs, 0.0)
        return self

    def check_rewritten(self, hits: int = 1, atol: float = 1e-5) -> Case:
        assert (self.hits, self.reasons) == (hits, []), self.reasons
        return self.check(atol)

    def check_refused(self, reason: str) -> Case:
        assert self.hits == 0, "the attention was rewritten"
        assert any(reason in found for found in self.reasons), self.reasons
        return self.check(0.0)


def compare(expected: Any, actual: Any, atol: float) -> None:
    pairs = list(zip(tensors(expected), tensors(actual), strict=True))
    for wanted, got in pairs:
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=atol, equal_nan=True)


@torch.no_grad()
def run_case(
    fn: Program, inputs: Sequence[Any], lowering: str = "auto", dynamic: Sequence[tuple[int, int]] = (), **options: Any
) -> Case:
    """Run ``fn`` eagerly and rewritten, each on its own copy of ``inputs``."""
    gm, report = rewrite(trace(fn, inputs, dynamic), lowering, **options)
    expected_inputs, actual_inputs = cloned(inputs), cloned(inputs)
    expected, actual = fn(*expected_inputs), gm(*actual_inputs)
    return Case(expected, actual, expected_inputs, actual_inputs, report, gm)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one verify forward; ``seen`` slots of the cache are filled before it."""

    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    rows: int = 3
    slots: int = 40
    dim: int = 8
    v_dim: int = 8
    seen: int = 21
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Data:
    """Random operands of one verify forward; K and V in ``[B, Hkv, S, D]``, drafts not yet written."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    pos: Tensor
    keep: Tensor

    def __iter__(self) -> Any:
        return iter((self.q, self.k_new, self.v_new, self.k_cache, self.v_cache, self.pos, self.keep))


def data(sizes: Sizes | None = None, seed: int = 0) -> Data:
    """Operands with a mask ``keep`` ``[B, 1, T, S]``: each row sees the prefix, itself and some earlier drafts."""
    s = sizes or Sizes()
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(s.dtype)

    keep = torch.zeros(s.batch, 1, s.rows, s.slots, dtype=torch.bool)
    keep[..., : s.seen] = True
    tree = torch.rand(s.batch, 1, s.rows, s.rows, generator=gen) < 0.5
    keep[..., s.seen : s.seen + s.rows] = tree.tril() | torch.eye(s.rows, dtype=torch.bool)
    # The first batch row hides some of its prefix (left padding), so that batch rows differ.
    keep[0, ..., : s.seen // 3] = False
    return Data(
        rand(s.batch, s.heads, s.rows, s.dim),
        rand(s.batch, s.kv_heads, s.rows, s.dim),
        rand(s.batch, s.kv_heads, s.rows, s.v_dim),
        rand(s.batch, s.kv_heads, s.slots, s.dim),
        rand(s.batch, s.kv_heads, s.slots, s.v_dim),
        torch.arange(s.seen, s.seen + s.rows),
        keep,
    )


def repeat_kv(x: Tensor, group: int) -> Tensor:
    """``[B, Hkv, S, D]`` to ``[B, Hkv * group, S, D]``, as Hugging Face models spell it."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, group, length, dim).reshape(batch, heads * group, length, dim)


def additive(keep: Tensor, hidden: float | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Additive mask: 0 where ``keep``, else ``hidden`` (the dtype's minimum by default)."""
    low = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, low)
