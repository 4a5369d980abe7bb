"""``mlp`` and ``mlp_sparse`` against float64, and what they must not read."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from spec_compile.kernels import availability, library
from spec_compile.kernels.mlp import (
    ACTIVATIONS,
    mlp_exact,
    mlp_reference,
    mlp_sparse_gathered,
    mlp_sparse_reference,
    watch_channels,
    why_no_mlp_kernel,
    why_no_sparse_kernel,
    why_not_faster,
)
from spec_compile.kernels.step_mode import known_exact, launching


@dataclass(frozen=True)
class Spec:
    """Shape and kind of one call; ``channels``: how the last weight is stored."""

    rows: int = 5
    hidden: int = 40
    inner: int = 72
    out: int = 24
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    stored_by: str = "channels"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        plain = Spec()
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name))
        return " ".join(changed).replace("torch.", "") or "plain"


@dataclass
class Call:
    x: Tensor
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.x, self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias]


def make(spec: Spec, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(spec.dtype)

    gate, up = (rand(spec.inner, spec.hidden, scale=spec.hidden**-0.5) for _ in range(2))
    down = rand(spec.out, spec.inner, scale=spec.inner**-0.5)
    if spec.stored_by == "channels":
        down = down.t().contiguous().t()
    biases = [rand(size, scale=0.3) if spec.bias else None for size in (spec.inner, spec.inner, spec.out)]
    if not spec.gated:
        biases[0] = None
    x = rand(spec.rows, spec.hidden)
    return Call(x, gate if spec.gated else None, up, down, *biases, spec.activation)


def on_cuda(c: Call) -> Call:
    """With the strides of the weights; float64 references run there in no time, too."""
    return Call(*[t if t is None else on(t, "cuda") for t in c.tensors], c.activation)  # type: ignore[arg-type]


def act64(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation in ("relu", "relu2"):
        return (x * (x > 0)) ** (2 if activation == "relu2" else 1)
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def acts(c: Call) -> Tensor:
    by, bias = (c.up, c.up_bias) if c.gate is None else (c.gate, c.gate_bias)
    return act64(product(c.x, by, bias), c.activation)


def expected(c: Call, kept: Tensor | None = None) -> Tensor:
    h = acts(c)
    if c.gate is not None:
        h = h * product(c.x, c.up, c.up_bias)
    if kept is not None:
        h = torch.where(kept, h, 0)
    return product(h, c.down, c.down_bias)


DENSE: dict[str, Any] = {"reference": mlp_reference, "operator": torch.ops.spec_compile.mlp_v1.default}
SPARSE: dict[str, Any] = {
    "reference": mlp_sparse_reference,
    "gathered": functools.partial(mlp_sparse_gathered, most=1.0),
    "operator": torch.ops.spec_compile.mlp_sparse_v1.default,
}
if find_spec("triton"):
    from spec_compile.kernels.mlp_sparse_triton import mlp_sparse_triton
    from spec_compile.kernels.mlp_triton import mlp_triton

    DENSE["triton"], SPARSE["triton"] = mlp_triton, mlp_sparse_triton
CUDA = torch.cuda.is_available()
# Triton's interpreter knows no bfloat16.
TRITON_DTYPES = {torch.float32, torch.float16} | ({torch.bfloat16} if CUDA else set())
# Largest error of one element, for results of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on(x: Tensor, device: str) -> Tensor:
    """Moved with its strides."""
    if x.device.type == device or not x.numel():
        return x.to(device)
    return x.to(device) if x.is_contiguous() else x.t().contiguous().to(device).t()


def run(c: Call, table: dict[str, Any], name: str, *rest: Any) -> Tensor:
    """On the CUDA device if there is one, but for the CPU's own; the result comes back."""
    device = "cuda" if CUDA and name in ("operator", "triton") else "cpu"
    tensors = [x if x is None else on(x, device) for x in c.tensors]
    return table[name](*tensors, c.activation, *(r.to(device) if isinstance(r, Tensor) else r for r in rest)).cpu()


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def in_a_gap(values: Tensor, share: float) -> float:
    """A number that about ``share`` of the values lie below, in the widest gap near by: rounding moves none across it."""
    ordered = values.flatten().sort().values
    middle = int(share * len(ordered))
    near = ordered[max(0, middle - 12) : middle + 12]
    place = int((near[1:] - near[:-1]).argmax())
    return float((near[place] + near[place + 1]) / 2)


SHAPES = [
    Spec(rows=rows, hidden=hidden, inner=inner, out=out, dtype=torch.float16)
    for rows, hidden, inner, out in ((1, 64, 128, 64), (2, 130, 33, 70), (8, 136, 200, 136), (17, 64, 96, 33), (64, 40, 72, 24))
]
SPECS = [
    *SHAPES,
    *(Spec(activation=activation, bias=activation == "relu") for activation in ACTIVATIONS),
    *(Spec(activation=activation, gated=False, bias=True) for activation in ("relu2", "gelu_tanh")),
    Spec(bias=True),
    Spec(rows=33, bias=True),
    Spec(inner=1100, out=150, dtype=torch.float16, bias=True),
    Spec(dtype=torch.float64, bias=True),
    Spec(dtype=torch.bfloat16),
]


BY_OUTPUTS = [replace(spec, stored_by="outputs") for spec in SPECS[1:6:2]]


def runs(name: str, spec: Spec) -> bool:
    return name != "triton" or spec.dtype in TRITON_DTYPES


@pytest.mark.parametrize(
    ("name", "spec"), [(name, spec) for name in DENSE for spec in [*SPECS, *BY_OUTPUTS] if runs(name, spec)], ids=str
)  # fmt: skip
def test_dense_equals_float64(name: str, spec: Spec) -> None:
    c = make(spec)
    found = run(c, DENSE, name)
    assert found.dtype == c.x.dtype and found.is_contiguous()
    close(found, expected(c))


ON, OFF = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


RULES = [
    *((spec, 0.6, False) for spec in SPECS),
    *((spec, 0.6, True) for spec in (SPECS[2], SPECS[5], SPECS[11])),
    (SPECS[1], 0.95, True),
    (SPECS[2], 0.97, False),
]


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(("spec", "share", "joint"), RULES, ids=str)
def test_thresholds_equal_float64(name: str, spec: Spec, share: float, joint: bool) -> None:
    if not runs(name, spec):
        pytest.skip("the interpreter knows no such dtype")
    c = make(spec)
    size = acts(c).abs()
    threshold = in_a_gap(size, share)
    if spec.dtype == torch.bfloat16:
        # Where activations are rounded first, bits of the boundary may differ: put it where none lie.
        threshold = in_a_gap(size.bfloat16().double(), share)
    kept = size >= threshold
    kept = kept.any(0).expand_as(kept) if joint else kept
    assert 0 < kept.sum() < kept.numel() or spec.rows > 16 or joint
    close(run(c, SPARSE, name, ON, threshold, 0, joint), expected(c, kept))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("spec", [*SHAPES[:4], *SPECS[9:13]], ids=str)
def test_budgets_equal_float64(name: str, spec: Spec) -> None:
    if not runs(name, spec):
        pytest.skip("the interpreter knows no such dtype")
    c = make(spec)
    score = acts(c).square().sum(0)
    keep = int((score > in_a_gap(score, 0.5)).sum())
    kept = torch.zeros_like(score, dtype=torch.bool)
    kept[score.sort(descending=True).indices[:keep]] = True
    close(run(c, SPARSE, name, ON, 0.0, keep, True), expected(c, kept.expand(spec.rows, -1)))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("keep", [1, 30, 72])
def test_ties_of_a_budget_go_to_the_lowest_channel(name: str, keep: int) -> None:
    c = make(Spec(activation="relu2"))
    assert c.gate is not None
    c.gate[:, :] = c.gate[:1]
    kept = (torch.arange(72) < keep).expand(5, -1)
    close(run(c, SPARSE, name, ON, 0.0, keep, True), expected(c, kept))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("rest", [(OFF, 0.5, 0, False), (OFF, 0.0, 7, True), (ON, 0.0, 0, False), (ON, 0.0, 72, True)])
def test_exact_steps_and_rules_that_drop_nothing(name: str, rest: tuple[Any, ...]) -> None:
    c = make(Spec(bias=True))
    found = run(c, SPARSE, name, *rest)
    close(found, expected(c))
    if not CUDA and name in ("gathered", "operator"):
        assert torch.equal(found, run(c, DENSE, name if name == "operator" else "reference"))
    if name == "triton" and rest[0] is OFF and not rest[2]:
        every = [run(c, SPARSE, name, *r) for r in ((OFF, 0.9, 0, True), (OFF, 0.0, 3, True), (ON, 0.0, 0, False))]
        assert all(torch.equal(found, other) for other in every)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        ("row", Spec(bias=True)),
        ("row", Spec(rows=9, inner=300, dtype=torch.float16)),
        ("joint", Spec(gated=False)),
        ("budget", Spec(rows=9, inner=300, dtype=torch.float16)),
    ],
    ids=str,
)
def test_channels_that_no_row_keeps_are_not_read(name: str, spec: Spec, rule: str) -> None:
    if name == "operator" and not CUDA:
        pytest.skip("on CPU it gathers few channels only")
    c = make(spec)
    size = acts(c).abs()
    if rule == "budget":
        score = size.square().sum(0)
        keep = int((score > in_a_gap(score, 0.6)).sum())
        read, rest = torch.zeros(spec.inner, dtype=torch.bool), (ON, 0.0, keep, True)
        read[score.sort(descending=True).indices[:keep]] = True
    else:
        threshold = in_a_gap(size, 0.9)
        read, rest = (size >= threshold).any(0), (ON, threshold, 0, rule == "joint")
    assert 0 < read.sum() < spec.inner
    wanted = run(c, SPARSE, name, *rest)
    c.down[:, ~read] = torch.nan
    if c.gate is not None:
        c.up[~read] = torch.nan
        if c.up_bias is not None:
            c.up_bias[~read] = torch.nan
    assert torch.equal(run(c, SPARSE, name, *rest), wanted)


@pytest.mark.parametrize("spec", [Spec(bias=True), Spec(gated=False, activation="relu2"), Spec(dtype=torch.bfloat16)], ids=str)
def test_the_portable_form(spec: Spec) -> None:
    """What exported programs without operators of ours compute: the same function, with the dense bits in an exact step."""
    from spec_compile.kernels.portable import BODIES

    c = make(spec)
    table = {"portable": BODIES[torch.ops.spec_compile.mlp_sparse_v1.default]}
    threshold = in_a_gap(acts(c).abs().to(spec.dtype).double(), 0.6)
    for rest in ((ON, threshold, 0, False), (ON, threshold, 0, True), (ON, 0.0, 20, True)):
        found, wanted = run(c, table, "portable", *rest), run(c, SPARSE, "gathered", *rest)
        tolerance = TOLERANCE[spec.dtype]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        assert not torch.equal(found, run(c, DENSE, "reference"))
    assert torch.equal(run(c, table, "portable", OFF, threshold, 0, False), run(c, DENSE, "reference"))


@pytest.mark.skipif("triton" not in SPARSE, reason="needs Triton")
@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (16, torch.float16), (17, torch.float16)], ids=str)
def test_scratch_memory_may_hold_anything(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the ends of the list of kept channels, with NaN and large ids wherever nothing was written."""
    c = make(Spec(rows=1, inner=135, dtype=dtype))
    ordered = acts(c).abs().flatten().sort(descending=True).values
    threshold = float(ordered[count - 1 : count + 1].mean())
    wanted = expected(c, acts(c).abs() >= threshold)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        found = [
            run(c, SPARSE, "triton", ON, *rest) for rest in ((threshold, 0, False), (threshold, 0, True), (0.0, count, True))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    close(found[0], wanted)
    assert all(torch.equal(found[0], other) for other in found[1:])


# Number of channels, and how many of them each tile of 64 keeps.
KEPT: dict[str, tuple[int, list[int]]] = {
    "few": (640, [5, 0, 16, 1] + [3] * 6), "some": (640, [20, 0, 32, 1, 16, 17] + [3] * 4), "many in one": (640, [33] + [0] * 9),
    "all in the last": (640, [0] * 9 + [64]), "uneven": (640, [0, 64, 0, 40] + [0, 7] * 3), "many": (600, [40] * 9 + [24]),
    "all": (600, [64] * 9 + [24]), "few of many tiles": (2500, [1] * 40),
    "many tiles": (2500, [1, 0, 50] + [0, 9] * 18 + [4]), "none": (640, [0] * 10),
}  # fmt: skip


@pytest.mark.skipif("triton" not in SPARSE, reason="needs Triton")
@pytest.mark.parametrize(
    ("rule", "where"),
    # A budget keeps one channel at least.
    [(rule, where) for rule in ("threshold", "budget") for where in KEPT if (rule, where) != ("budget", "none")],
)
def test_wherever_the_kept_channels_lie(rule: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take a tile's channels where no tile has many, or equal shares of all, found in the lists of the tiles."""
    monkeypatch.setattr("spec_compile.kernels.mlp_sparse_triton.TOGETHER", 32)
    inner, counts = KEPT[where]
    c = make(Spec(rows=3, hidden=48, inner=inner, out=32, dtype=torch.float16))
    assert c.gate is not None and len(counts) == -(-inner // 64)
    generator = torch.Generator().manual_seed(len(counts))
    kept = torch.zeros(inner, dtype=torch.bool)
    for tile, count in enumerate(counts):
        width = min(64, inner - 64 * tile)
        kept[64 * tile + torch.randperm(width, generator=generator)[:count]] = True
    c.x[:, 0] = 1
    c.gate[:, 0] = torch.where(kept, 12.0, -40.0).half()
    total = torch.zeros(1, dtype=torch.int32, device="cuda" if CUDA else "cpu")
    rest = (ON, 0.5, 0, False) if rule == "threshold" else (ON, 0.0, int(kept.sum()), True)
    close(run(c, SPARSE, "triton", *rest, None, total), expected(c, kept.expand(3, -1)))
    assert int(total) == int(kept.sum()) == sum(counts)


@pytest.mark.parametrize("name", SPARSE)
def test_no_channel_at_all(name: str) -> None:
    c = make(Spec(bias=True, activation="relu"))
    assert c.down_bias is not None
    found = run(c, SPARSE, name, ON, 1e6, 0, False)
    assert torch.equal(found, c.down_bias.expand(5, -1))


@pytest.mark.parametrize("spec", [Spec(), Spec(gated=False), Spec(gated=False, activation="relu")], ids=str)
@pytest.mark.parametrize("name", SPARSE)
def test_nan_stays_in_its_row(name: str, spec: Spec) -> None:
    c = make(spec)
    threshold = in_a_gap(acts(c).abs(), 0.5)
    clean = run(c, SPARSE, name, ON, threshold, 0, False)
    c.x[1] = torch.nan
    found = run(c, SPARSE, name, ON, threshold, 0, False)
    assert found[1].isnan().all()
    others = torch.arange(5) != 1
    torch.testing.assert_close(found[others], clean[others])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", SPARSE)
def test_a_budget_keeps_what_is_nan(name: str, sign: float) -> None:
    c = make(Spec(gated=False, activation="relu2"))
    c.up[7] = math.copysign(math.nan, sign)
    assert run(c, SPARSE, name, ON, 0.0, 1, True).isnan().all()


@pytest.mark.parametrize("name", SPARSE)
def test_two_runs_give_the_same_bits(name: str) -> None:
    c = make(Spec(rows=8, inner=300, dtype=torch.float16))
    first, second = (run(c, SPARSE, name, ON, 0.3, 0, False) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("table", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_leading_dimensions_and_no_rows(table: dict[str, Any]) -> None:
    c = make(Spec(rows=6))
    rest = (ON, 0.2, 0, False) if table is SPARSE else ()
    flat = run(c, table, "operator", *rest)
    c.x = c.x.reshape(2, 3, 40)
    assert torch.equal(run(c, table, "operator", *rest), flat.reshape(2, 3, 24))
    c.x = c.x[:, :0]
    assert run(c, table, "operator", *rest).shape == (2, 0, 24)


@pytest.mark.parametrize("spec", [Spec(), Spec(gated=False, bias=True, dtype=torch.float16, stored_by="outputs")], ids=str)
def test_opcheck(spec: Spec) -> None:
    c = make(spec)
    torch.library.opcheck(library.mlp, (*c.tensors, c.activation))
    torch.library.opcheck(library.mlp_sparse, (*c.tensors, c.activation, ON, 0.3, 0, False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation must be one of"),
        ({"gate": torch.zeros(70, 40)}, "gate must be"),
        ({"down": torch.zeros(24, 70)}, "down must be"),
        ({"x": torch.zeros(5, 39)}, "x has 39 columns"),
        ({"up": torch.zeros(72, 40, dtype=torch.float16)}, "x's dtype"),
        ({"down_bias": torch.zeros(72)}, "biases must be"),
        ({"gate": None, "gate_bias": torch.zeros(72)}, "gate_bias without gate"),
        ({"threshold": -1.0}, "threshold must not be negative"),
        ({"keep": 73}, "keep must lie in"),
    ],
)
def test_operands_are_checked(change: dict[str, Any], message: str) -> None:
    rule = {"threshold": change.pop("threshold", 0.0), "keep": change.pop("keep", 0)}
    c = replace(make(Spec()), **change)
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.compile(lambda *args: library.mlp_sparse(*args), backend="aot_eager", fullgraph=True)(
            *c.tensors, c.activation, ON, *rule.values(), False
        )


def test_watchers_see_rows_and_unions() -> None:
    c = make(Spec(activation="relu"))
    seen: list[Any] = []
    with watch_channels(lambda *given: seen.append(given)):
        run(c, SPARSE, "operator", ON, 0.4, 0, False)
        run(c, SPARSE, "operator", ON, 0.4, 0, True)
        run(c, SPARSE, "operator", OFF, 0.4, 0, False)
    run(c, SPARSE, "operator", ON, 0.4, 0, False)
    kept = acts(c).abs() >= 0.4
    assert [rows.tolist() for _, rows, _ in seen] == [kept.sum(1).tolist(), [int(kept.any(0).sum())] * 5, [72] * 5]
    assert [int(union) for _, _, union in seen] == [int(kept.any(0).sum())] * 2 + [72]


def test_reasons_against_the_kernels() -> None:
    c = make(Spec())
    assert why_no_mlp_kernel(c.x, c.gate, c.up, c.down) == "device cpu"
    assert "not contiguous" in str(why_no_mlp_kernel(c.x, None, c.up.t().contiguous().t(), c.down))
    assert "stored by outputs" in str(why_no_sparse_kernel(c.x, c.gate, c.up, c.down.contiguous()))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    free = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    many = mode.from_tensor(torch.empty(72, 40), symbolic_context=free)
    # A number in the text would be one for the graph as well.
    assert "more than 64 rows" in str(why_no_mlp_kernel(many, c.gate, c.up, c.down))
    assert many.shape[0].node.maybe_as_int() is None  # type: ignore[attr-defined]
    assert "more than 64 rows" in str(why_no_mlp_kernel(c.x.new_zeros(5, 13, 40), c.gate, c.up, c.down))


def test_where_the_fused_kernel_is_taken() -> None:
    """Where it was measured, and at fewer rows."""
    assert why_not_faster(8, 14336, 4096, 2, 90) is None and why_not_faster(1, 28672, 8192, 2, 90) is None
    assert why_not_faster(32, 14336, 4096, 2, 90) is None
    assert "32 rows only" in str(why_not_faster(33, 14336, 4096, 2, 90))
    assert "Hopper" in str(why_not_faster(8, 14336, 4096, 2, 80))
    assert "1536 x 576" in str(why_not_faster(8, 1536, 576, 2, 90))
    assert "16-bit" in str(why_not_faster(8, 14336, 4096, 4, 90))
    assert "two first weights" in str(why_not_faster(8, 14336, 4096, 2, 90, gated=False))


def test_a_step_known_to_be_exact_reads_no_switch() -> None:
    """Nor channels: it is the layer of a graph without a plan, bit for bit on CPU. Other threads and later steps know nothing."""
    c = make(Spec(rows=9))
    dense = library.mlp(*c.tensors, c.activation)
    before = library.mlp_sparse(*c.tensors, c.activation, ON, 0.3, 0, False)
    elsewhere: list[bool] = []
    with launching(exact=True):
        assert torch.equal(library.mlp_sparse(*c.tensors, c.activation, ON, 0.3, 0, False), dense)
        thread = threading.Thread(target=lambda: elsewhere.append(known_exact()))
        thread.start()
        thread.join()
        with launching(exact=False):
            assert torch.equal(library.mlp_sparse(*c.tensors, c.activation, ON, 0.3, 0, False), before)
        assert known_exact()
    assert elsewhere == [False] and not known_exact() and not torch.equal(dense, before)
    assert torch.equal(library.mlp_sparse(*c.tensors, c.activation, ON, 0.3, 0, False), before)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_exact_steps_on_a_gpu_take_linear_calls_or_the_fused_kernel(
    gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule for graphs without a plan; devices are made up, the products are computed here."""
    c = make(Spec(rows=9, gated=gated, bias=bias))
    launches: list[int] = []

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda:0")

    def linears(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        launches.append(len(weights))
        return [torch.nn.functional.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]

    monkeypatch.setattr("spec_compile.kernels.linears.why_not", lambda *given: None)
    monkeypatch.setattr("spec_compile.kernels.linears.linears", linears)
    monkeypatch.setattr(availability, "capability", lambda device: 90)
    monkeypatch.setattr("spec_compile.kernels.mlp.why_no_mlp_kernel", lambda *given: None)
    x = c.x.as_subclass(Elsewhere)
    rest = [c.gate, c.up, c.down, c.gate_bias, c.up_bias, c.down_bias]
    found = mlp_exact(x, *rest, c.activation).as_subclass(Tensor)
    assert torch.allclose(found.double(), expected(c), atol=1e-5)
    # Several weights of few rows always share a launch; one does where it is narrow.
    assert launches == ([2, 1] if gated else [1, 1])
    taken: list[str] = []
    monkeypatch.setattr("spec_compile.kernels.mlp.why_not_faster", lambda *given: None)
    monkeypatch.setattr("spec_compile.kernels.mlp.mlp", lambda *given: taken.append(given[-1]))
    mlp_exact(x, *rest, c.activation)
    assert taken == ["silu"]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 9, 33])
@pytest.mark.parametrize("stored_by", ["channels", "outputs"])
@pytest.mark.parametrize("gated", [True, False])
def test_exact_steps_at_full_size(rows: int, stored_by: str, gated: bool) -> None:
    """The error is that of dense bfloat16, and the switch on the device says nothing."""
    spec = Spec(rows=rows, hidden=4096, inner=14336, out=4096, gated=gated, stored_by=stored_by, dtype=torch.bfloat16)
    c = on_cuda(make(spec))
    with launching(exact=True):
        out = library.mlp_sparse(*c.tensors, c.activation, ON.cuda(), 0.3, 0, False)
    wanted = expected(c)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 14336), (2048, 5632), (1000, 3001), (256, 65536)])
def test_replays_follow_inputs_and_the_switch(rows: int, hidden: int, inner: int) -> None:
    """One captured step: other rows, another union and exact steps without a new capture; the error is that of dense bfloat16."""
    c = on_cuda(make(Spec(rows=rows, hidden=hidden, inner=inner, out=hidden, dtype=torch.bfloat16)))
    tensors, switch = c.tensors, ON.cuda()
    sparse = torch.ops.spec_compile.mlp_sparse_v1.default
    sparse(*tensors, c.activation, switch, 0.3, 0, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse(*tensors, c.activation, switch, 0.3, 0, False)
    for scale, step in ((1.0, 1), (0.2, 1), (1.0, 0)):
        c.x.copy_(torch.randn(rows, hidden, generator=torch.Generator().manual_seed(7)).mul(scale))
        switch.fill_(step)
        graph.replay()
        kept = acts(c).abs() >= 0.3 if step else None
        wanted = expected(c, kept)
        assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("rest", [(0.3, 0, False), (0.0, 700, True)], ids=["threshold", "budget"])
def test_calls_in_a_row_share_scratch_memory(rest: tuple[Any, ...]) -> None:
    """Launches begin before those in front end, and lists of one call lie where those of the one before lay."""
    c = make(Spec(rows=8, hidden=2048, inner=5632, out=2048, dtype=torch.bfloat16))
    _, *weights = (t if t is None else on(t, "cuda") for t in c.tensors)
    switch, generator = ON.cuda(), torch.Generator().manual_seed(7)
    xs = [torch.randn(8, 2048, generator=generator).mul(scale).bfloat16().cuda() for scale in (1.0, 0.2, 0.05, 1.5, 0.1, 0.6)]

    def call(x: Tensor) -> Tensor:
        return torch.ops.spec_compile.mlp_sparse_v1.default(x, *weights, c.activation, switch, *rest)

    alone = []
    for x in xs:
        alone.append(call(x))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(x) for x in xs]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, alone))
