"""``moe_experts`` and ``moe_route`` against loops over rows and experts in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spec_compile.kernels import library, moe
from spec_compile.kernels.moe import (
    ACTIVATIONS,
    _whole_apart,
    moe_experts_reference,
    moe_route_reference,
    why_no_experts_kernel,
    why_no_route_kernel,
)


@dataclass(frozen=True)
class Spec:
    """Shape and kind of one call; ``layout`` is that of the weights."""

    rows: int = 5
    experts: int = 6
    k: int = 2
    hidden: int = 24
    inner: int = 20
    activation: str = "silu"
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    split: bool = False  # gate and up in two tensors

    def __str__(self) -> str:
        plain = Spec()
        changed = (f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name))
        return " ".join(changed).replace("torch.", "") or "plain"


@dataclass
class Call:
    x: Tensor
    choice: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    rest: tuple[Any, ...] = field(default=())
    up: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.x, self.choice, self.weight, self.gate_up, self.down, self.gate_up_bias, self.down_bias]

    @property
    def arguments(self) -> list[Any]:
        return [*self.tensors, *self.rest, *(() if self.up is None else (self.up,))]


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "sliced":
        wide = x.new_full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 8), torch.nan)
        wide[1:, 2:, :-8] = x
        return wide[1:, 2:, :-8]
    return x


def make(spec: Spec, seed: int = 0) -> Call:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(spec.dtype)

    gate_up = rand(spec.experts, 2 * spec.inner, spec.hidden, scale=spec.hidden**-0.5)
    down = rand(spec.experts, spec.hidden, spec.inner, scale=spec.inner**-0.5)
    firsts = gate_up.split(spec.inner, 1) if spec.split else (gate_up,)
    if spec.transposed:
        firsts, down = [w.transpose(1, 2) for w in firsts], down.transpose(1, 2).contiguous()
    gate_up, *others = (laid_out(w.contiguous(), spec.layout) for w in firsts)
    choice = torch.stack([torch.randperm(spec.experts, generator=generator)[: spec.k] for _ in range(spec.rows)])
    weight = torch.rand(spec.rows, spec.k, generator=generator)
    bias = [rand(spec.experts, 2 * spec.inner), rand(spec.experts, spec.hidden)] if spec.bias else [None, None]
    bias[0] = None if spec.split else bias[0]
    limits = (0.7, 1.702) if spec.activation == "swiglu_oai" else (0.0, 0.0)
    return Call(
        rand(spec.rows, spec.hidden), choice.to(spec.ids), weight.to(spec.weights),
        gate_up, laid_out(down, spec.layout), *bias,
        (spec.activation, spec.interleaved, spec.transposed, *limits), *others,
    )  # fmt: skip


def act64(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "relu":
        return x * (x > 0)
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def expected(c: Call) -> Tensor:
    """One pair of a row and an expert after the other, in float64."""
    activation, interleaved, transposed, limit, alpha = c.rest
    inner = c.down.shape[1 if transposed else 2]
    out = torch.zeros(c.x.shape, dtype=torch.float64)
    for n, k in itertools.product(*map(range, c.choice.shape)):
        e = int(c.choice[n, k])
        if not 0 <= e < c.gate_up.shape[0]:
            continue
        firsts = [w[e].double().T if transposed else w[e].double() for w in (c.gate_up, c.up) if w is not None]
        down = c.down[e].double().T if transposed else c.down[e].double()
        h = torch.cat([w @ c.x[n].double() for w in firsts])
        if c.gate_up_bias is not None:
            h = h + c.gate_up_bias[e].double()
        gate, up = (h[0::2], h[1::2]) if interleaved else (h[:inner], h[inner:])
        if activation == "swiglu_oai":
            gate, up = torch.minimum(gate, torch.tensor(limit).double()), up.clamp(-limit, limit)
            h = (up + 1) * gate / (1 + torch.exp(-alpha * gate))
        else:
            h = act64(gate, activation) * up
        y = down @ h
        if c.down_bias is not None:
            y = y + c.down_bias[e].double()
        out[n] += c.weight[n, k].double() * y
    return out


IMPLEMENTATIONS = {"reference": moe_experts_reference, "operator": torch.ops.spec_compile.moe_experts_v1.default}
if find_spec("triton"):
    from spec_compile.kernels.moe_experts_triton import moe_experts_triton

    IMPLEMENTATIONS["triton"] = moe_experts_triton
CUDA = torch.cuda.is_available()
# Triton's interpreter knows no bfloat16.
TRITON_DTYPES = {torch.float32, torch.float16} | ({torch.bfloat16} if CUDA else set())
# Largest error of one element, for results of order 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def run(c: Call, name: str, **options: Any) -> Tensor:
    """On the CUDA device if there is one, but for the reference; the result comes back."""
    device = "cuda" if CUDA and name != "reference" else "cpu"
    return IMPLEMENTATIONS[name](*(on(x, device) if isinstance(x, Tensor) else x for x in c.arguments), **options).cpu()


def on(x: Tensor, device: str) -> Tensor:
    """Moved with its strides."""
    if x.device.type == device:
        return x
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return x.as_strided((size,), (1,)).to(device).as_strided(x.shape, x.stride()) if x.numel() else x.to(device)


def check(c: Call, name: str) -> Tensor:
    found = run(c, name)
    assert found.shape == c.x.shape and found.dtype == c.x.dtype and found.is_contiguous()
    wanted = expected(c)
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[c.x.dtype], atol=TOLERANCE[c.x.dtype])
    return found


# Rows, experts, choices and sizes: tiles that are not full, experts for programs and choices for programs.
SHAPES = [
    Spec(rows=rows, experts=experts, k=k, hidden=hidden, inner=inner, dtype=torch.float16)
    for rows, experts, k, hidden, inner in (
        (1, 8, 2, 64, 64),
        (2, 5, 1, 130, 33),
        (8, 60, 4, 136, 40),
        (17, 8, 2, 64, 96),
        (64, 4, 3, 40, 24),
        (3, 256, 8, 64, 40),
    )
]
SPECS = [
    *SHAPES,
    *(Spec(activation=activation, bias=activation == "relu") for activation in ACTIVATIONS),
    Spec(interleaved=True),
    Spec(transposed=True),
    Spec(activation="swiglu_oai", interleaved=True, transposed=True, bias=True),
    Spec(layout="sliced", bias=True),
    Spec(layout="sliced", transposed=True),
    Spec(rows=1),
    Spec(rows=1, k=1),
    Spec(rows=9, experts=5, k=1, hidden=40, inner=12),
    Spec(rows=33, experts=60, k=4),
    Spec(rows=8, experts=128, k=8),
    Spec(rows=3, experts=4, k=4),
    Spec(ids=torch.int32, weights=torch.float16),
    Spec(weights=torch.bfloat16, bias=True),
    Spec(weights=torch.float64),
    Spec(dtype=torch.float64, bias=True),
    Spec(dtype=torch.float16),
    Spec(dtype=torch.bfloat16, weights=torch.bfloat16),
    Spec(split=True),
    Spec(split=True, rows=1, k=1, dtype=torch.float16),
    Spec(split=True, rows=17, hidden=130, inner=33, dtype=torch.float16),
    Spec(split=True, transposed=True, bias=True, rows=9, inner=33),
    Spec(split=True, layout="sliced", activation="gelu", rows=8, experts=60, k=4),
    Spec(split=True, layout="sliced", activation="swiglu_oai", transposed=True),
    Spec(split=True, dtype=torch.float64),
    Spec(split=True, dtype=torch.bfloat16),
]


@pytest.mark.parametrize(
    ("name", "spec"),
    [(name, spec) for name in IMPLEMENTATIONS for spec in SPECS if name != "triton" or spec.dtype in TRITON_DTYPES],
    ids=str,
)
def test_experts_equal_float64(name: str, spec: Spec) -> None:
    check(make(spec), name)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_entries_that_name_no_expert_add_nothing(name: str, ids: torch.dtype) -> None:
    c = make(Spec(rows=4, k=3, ids=ids))
    c.choice[0, 1], c.choice[1, 0], c.choice[1, 2] = -1, 6, 1 << 20
    c.choice[3] = -1
    c.weight[c.choice < 0] = torch.nan
    c.weight[1, 0] = torch.inf
    found = check(c, name)
    assert found[3].eq(0).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("split", [False, True])
def test_experts_without_rows_are_not_read(name: str, split: bool) -> None:
    c = make(Spec(rows=3, experts=8, bias=True, split=split))
    c.choice[:] = torch.tensor([[5, 1], [1, 7], [7, 5]])
    wanted = check(c, name)
    for e in (0, 2, 3, 4, 6):
        for tensor in (c.gate_up, c.down, c.gate_up_bias, c.down_bias, c.up):
            if tensor is not None:
                tensor[e] = torch.nan
    assert torch.equal(check(c, name), wanted)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_may_lie_anywhere(name: str, transposed: bool) -> None:
    """Up behind the gate or in front of it, at distances of any alignment, between values that are no weights; or one tensor."""
    c = make(Spec(split=True, transposed=transposed, rows=4, inner=40))
    wanted = check(c, name)
    gate, up, numel = c.gate_up, c.up, c.gate_up.numel()
    assert up is not None
    for gate_at, up_at in ((0, numel + 16), (numel + 3, 0), (5, numel + 6)):
        held = gate.new_full((2 * numel + 64,), torch.nan)
        parts = []
        for weight, at in ((gate, gate_at), (up, up_at)):
            parts.append(held[at : at + numel].view(gate.shape))
            parts[-1].copy_(weight)
        torch.testing.assert_close(check(replace(c, gate_up=parts[0], up=parts[1]), name), wanted, rtol=1e-6, atol=1e-6)
    check(replace(c, up=gate), name)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_expert_chosen_twice_counts_twice(name: str) -> None:
    c = make(Spec(rows=6, k=4))
    c.choice[:] = 2
    twice = check(c, name)
    once = replace(c, choice=c.choice[:, :1].contiguous(), weight=c.weight.sum(1, keepdim=True))
    torch.testing.assert_close(twice, check(once, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nan_stays_in_its_row(name: str) -> None:
    c = make(Spec())
    clean = check(c, name)
    c.x[1] = torch.nan
    found = run(c, name)
    assert found[1].isnan().all()
    others = torch.arange(5) != 1
    torch.testing.assert_close(found[others], clean[others])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_rows(name: str) -> None:
    c = make(Spec(rows=2))
    c.x, c.choice, c.weight = c.x[:0], c.choice[:0], c.weight[:0]
    assert run(c, name).shape == (0, 24)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec(bias=True, activation="swiglu_oai", interleaved=True, transposed=True, ids=torch.int32, dtype=torch.float16),
        Spec(split=True),
    ],
    ids=str,
)
def test_opcheck_of_experts(spec: Spec) -> None:
    torch.library.opcheck(library.moe_experts, tuple(make(spec).arguments))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation must be one of"),
        ({"choice": torch.zeros(5, 3, dtype=torch.int64)}, "one shape"),
        ({"choice": torch.zeros(5, 2)}, "choice must be integer"),
        ({"down": torch.zeros(6, 20, 24)}, "gate_up must be"),
        ({"down": torch.zeros(5, 24, 20)}, "down must be"),
        ({"x": torch.zeros(5, 24, dtype=torch.float16)}, "dtypes differ"),
        ({"down_bias": torch.zeros(6, 20)}, "biases must be"),
        ({"x": torch.zeros(4, 24)}, "a row for each"),
        ({"up": torch.zeros(6, 20, 24)}, r"up must be \(6, 40, 24\) in torch.float32"),
        ({"up": torch.zeros(6, 40, 24)}, r"gate_up must be \(6, 20, 24\)"),
    ],
)
def test_operands_are_checked(change: dict[str, Any], message: str) -> None:
    c = make(Spec())
    if "activation" in change:
        c.rest = (change["activation"], *c.rest[1:])
    else:
        c = replace(c, **change)
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.compile(lambda *args: library.moe_experts(*args), backend="aot_eager", fullgraph=True)(*c.arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up": torch.zeros(6, 20, 24, dtype=torch.float64)}, "got .* in torch.float64"),
        ({"up": torch.zeros(6, 20, 24, device="meta")}, "on meta"),
        ({"up": torch.zeros(6, 24, 20)}, "up must be"),
        ({"gate_up_bias": torch.zeros(6, 20)}, "no gate_up_bias"),
        ({"rest": ("silu", True, False, 0.0, 0.0)}, "not interleaved"),
    ],
)
def test_two_stacks_are_checked_without_compilation_too(change: dict[str, Any], message: str) -> None:
    """The kernel reaches one through the other."""
    c = replace(make(Spec(split=True)), **change)
    with pytest.raises((RuntimeError, ValueError), match=message):
        library.moe_experts(*c.arguments)


@dataclass(frozen=True)
class Rule:
    """Everything of a choice but its tensors."""

    score: str = "softmax"
    k: int = 3
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    order: str = "score_first"

    def __str__(self) -> str:
        plain = Rule()
        return " ".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)) or "plain"


MIXTRAL = Rule(k=2, renormalise=True)
DEEPSEEK = Rule("sigmoid", 4, True, 1e-20, 2.5, 4, 2)
GPT_OSS = Rule(order="topk_first", k=4)
RULES = [Rule(), MIXTRAL, Rule(k=1), DEEPSEEK, replace(DEEPSEEK, kept_groups=1), replace(DEEPSEEK, groups=8, kept_groups=3),
         Rule("softmax", 2, groups=4, kept_groups=2), GPT_OSS, Rule("sigmoid", order="topk_first", k=1),
         Rule("sigmoid", 5, True, 0.5), replace(GPT_OSS, groups=2, renormalise=True), Rule(k=24)]  # fmt: skip
ROUTES = {"reference": moe_route_reference, "operator": torch.ops.spec_compile.moe_route_v1.default}
if find_spec("triton"):
    from spec_compile.kernels.moe_route_triton import moe_route_triton

    ROUTES["triton"] = moe_route_triton


def order_of(value: list[float]) -> list[int]:
    return sorted(range(len(value)), key=lambda e: (0.0 if math.isnan(value[e]) else 1.0, -value[e], e))


def scored(value: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in value]
    return [math.exp(x - max(value)) / sum(math.exp(y - max(value)) for y in value) for x in value]


def expected_route(logits: Tensor, bias: Tensor | None, rule: Rule) -> tuple[list[list[int]], list[list[float]]]:
    choices, weights = [], []
    for row in logits.double().tolist():
        value = scored(row, rule.score) if rule.order == "score_first" else row
        contest = [v + (0.0 if bias is None else float(bias[e])) for e, v in enumerate(value)]
        if rule.groups > 1:
            size = len(row) // rule.groups
            sums = [sum(sorted(contest[g * size : (g + 1) * size])[-2:]) for g in range(rule.groups)]
            kept = order_of(sums)[: rule.kept_groups]
            contest = [v if e // size in kept else -math.inf for e, v in enumerate(contest)]
        choice = order_of(contest)[: rule.k]
        weight = [value[e] for e in choice]
        if rule.order == "topk_first":
            weight = scored(weight, rule.score)
        if rule.renormalise:
            weight = [w / (sum(weight) + rule.epsilon) for w in weight]
        choices.append(choice)
        weights.append([w * rule.scale for w in weight])
    return choices, weights


def route(name: str, logits: Tensor, bias: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    device = "cuda" if CUDA and name != "reference" else "cpu"
    choice, weight = ROUTES[name](logits.to(device), None if bias is None else bias.to(device), *vars(rule).values())
    return choice.cpu(), weight.cpu()


def check_route(name: str, logits: Tensor, bias: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    choice, weight = route(name, logits, bias, rule)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    assert choice.dtype == torch.int64 and weight.dtype == wide
    assert choice.shape == weight.shape == (logits.shape[0], rule.k)
    wanted, weights = expected_route(logits, bias, rule)
    assert choice.tolist() == wanted
    close = 1e-12 if wide == torch.float64 else 4e-6
    torch.testing.assert_close(weight.double(), torch.tensor(weights, dtype=torch.float64), rtol=close, atol=close)
    return choice, weight


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ROUTES for dtype in TOLERANCE if name != "triton" or dtype != torch.float64],
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_routes_equal_float64(rule: Rule, name: str, dtype: torch.dtype) -> None:
    # Steps of 1/8, exact in every dtype: many ties, and no two scores that only rounding tells apart.
    logits = (torch.randn(7, 24) * 12).round() / 8
    bias = (torch.randn(24) * 4).round() / 16
    check_route(name, logits.to(dtype), bias if rule.score == "sigmoid" and rule.order == "score_first" else None, rule)


@pytest.mark.parametrize("name", ROUTES)
def test_ties_go_to_the_lowest_expert(name: str) -> None:
    for rule in (Rule(), GPT_OSS, replace(DEEPSEEK, k=7)):
        choice, _ = check_route(name, torch.zeros(2, 24), None, rule)
        assert choice.tolist() == [[*range(rule.k)]] * 2
    # A zero of either sign is one value; scores that underflow are ties.
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    check_route(name, logits, None, replace(GPT_OSS, k=2))
    check_route(name, torch.tensor([[0.0, -900.0, -1000.0, -800.0]]), None, Rule(k=3))


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("rule", [Rule(), DEEPSEEK, GPT_OSS, Rule("sigmoid")], ids=str)
def test_nan_and_infinite_logits_give_distinct_experts(name: str, rule: Rule) -> None:
    logits = torch.randn(6, 24)
    logits[0, 5] = logits[1] = torch.nan
    logits[2, [3, 7]] = torch.tensor([torch.nan, -torch.inf])
    logits[3] = -torch.inf
    logits[4, [1, 2]] = torch.inf
    choice, weight = route(name, logits, None, rule)
    again = route(name, logits, None, rule)
    torch.testing.assert_close((choice, weight), again, rtol=0, atol=0, equal_nan=True)
    assert ((choice >= 0) & (choice < 24)).all()
    assert all(len({*row}) == rule.k for row in choice.tolist())
    wanted, weights = route("reference", logits, None, rule)
    assert torch.equal(choice, wanted)
    torch.testing.assert_close(weight, weights, rtol=4e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("rule", [MIXTRAL, DEEPSEEK, GPT_OSS], ids=str)
def test_opcheck_of_routes(rule: Rule) -> None:
    bias = torch.randn(24) if rule is DEEPSEEK else None
    torch.library.opcheck(library.moe_route, (torch.randn(3, 24), bias, *vars(rule).values()))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("tanh"), "score must be one of"),
        (Rule(order="both"), "order must be one of"),
        (Rule(k=25), "k must be"),
        (Rule(groups=5), "groups of 24 experts"),
        (Rule(groups=24), "groups of 24 experts"),
    ],
)
def test_rules_are_checked(rule: Rule, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        torch.compile(lambda *args: library.moe_route(*args), backend="aot_eager", fullgraph=True)(
            torch.randn(3, 24), None, *vars(rule).values()
        )


def test_deepseek_routes_as_its_router_does() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=16, n_routed_experts=24, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    router = modeling.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias)
    x = torch.randn(50, 16)
    logits, weight, choice = router(x)
    found, weights = library.moe_route(logits, router.e_score_correction_bias, *vars(DEEPSEEK).values())
    order = choice.sort(-1)
    mine = found.sort(-1)
    assert torch.equal(order.values, mine.values)
    torch.testing.assert_close(weights.gather(1, mine.indices), weight.gather(1, order.indices), rtol=2e-6, atol=0)


needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")


@needs_triton
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "spec",
    [Spec(rows=9, inner=100, hidden=70), Spec(rows=9, inner=100, hidden=70, transposed=True, interleaved=True, bias=True)],
    ids=str,
)
def test_tilings_agree(spec: Spec, splits: int, swap: bool) -> None:
    from spec_compile.kernels.moe_tiling import ExpertTiling, Product

    c = make(replace(spec, dtype=torch.float16))
    # All rows with one expert, twice: more than a tile holds.
    c.choice[:7] = 3
    product = Product(32, 32, 4, 2, swap)
    found = run(c, "triton", tiling=ExpertTiling(product, product, 16, splits, columns=64))
    torch.testing.assert_close(found.double(), expected(c), rtol=4e-3, atol=4e-3)


@needs_triton
def test_choices_are_listed_in_chunks() -> None:
    from spec_compile.kernels.moe_tiling import ExpertTiling, Product

    c = make(Spec(rows=40, experts=3, k=3, hidden=20, inner=16))
    product = Product(32, 32, 4, 2, False)
    # Rows a tile and choices a chunk: 64 x 64 of 120 choices, 40 of them of each expert.
    found = run(c, "triton", tiling=ExpertTiling(product, product, 64, columns=64))
    torch.testing.assert_close(found.double(), expected(c), rtol=4e-6, atol=4e-6)
    assert torch.equal(found, run(c, "triton", tiling=ExpertTiling(product, product, 64, columns=64)))


def test_table_of_tilings_fits_devices() -> None:
    from spec_compile.kernels.moe_tiling import _choose, shared_bytes
    from spec_compile.kernels.tiling import RESERVE, Device

    for device in (Device(90, 132, 232448), Device(80, 108, 166912), Device(89, 128, 101376), Device(0, 4, 100 << 10)):
        for itemsize, rows, experts, k in itertools.product((2, 4), (1, 8, 33, 64), (5, 8, 60, 128, 256), (1, 4, 8, 16)):
            for hidden, inner in ((2048, 768), (4096, 14336), (24, 20), (7168, 2048)):
                found = _choose(device, itemsize, rows, experts, k, hidden, inner)
                for product in (found.up, found.down):
                    assert shared_bytes(product, found.rows, itemsize) + RESERVE <= device.shared_bytes
                    assert product.depth >= 16 and product.stages >= 2
                assert found.splits == 1 or -(-inner // found.down.depth) >= 8 * found.splits


def test_reasons_against_the_kernels() -> None:
    c = make(Spec())
    assert why_no_experts_kernel(c.x, c.choice, c.gate_up, c.down) == "device cpu"
    assert why_no_route_kernel(torch.zeros(2, 24), 2) == "device cpu"
    many = make(Spec(rows=65))
    assert "more than 64 rows" in str(why_no_experts_kernel(many.x, many.choice, many.gate_up, many.down))
    wide = make(Spec(rows=64, experts=20, k=17))
    assert "pairs" in str(why_no_experts_kernel(wide.x, wide.choice, wide.gate_up, wide.down))
    strided = c.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    assert "not contiguous" in str(why_no_experts_kernel(c.x, c.choice, strided, c.down))
    assert "dtypes" in str(why_no_experts_kernel(c.x.half(), c.choice, c.gate_up, c.down))
    assert "operands on" in str(why_no_experts_kernel(c.x.to("meta"), c.choice, c.gate_up, c.down))
    c = make(Spec(split=True))
    assert c.up is not None
    assert why_no_experts_kernel(c.x, c.choice, c.gate_up, c.down, up=c.up) == "device cpu"
    sliced = laid_out(c.up, "sliced")
    assert "different strides" in str(why_no_experts_kernel(c.x, c.choice, c.gate_up, c.down, up=sliced))
    assert "operands on" in str(why_no_experts_kernel(c.x, c.choice, c.gate_up, c.down, up=c.up.to("meta")))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (c.x, c.choice, c.gate_up, c.down, c.up)]
        assert why_no_experts_kernel(*fake[:4], up=fake[4]) == "device cpu"
    odd = torch.frombuffer(bytearray(c.up.numel() * 4 + 1), dtype=torch.float32, offset=1)
    assert _whole_apart(c.gate_up, c.up) and not _whole_apart(c.gate_up, odd)
    assert "33 of" in str(why_no_route_kernel(torch.zeros(2, 64), 33))


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize(("rows", "k", "calls"), [(64, 2, [64]), (150, 2, [64, 64, 22]), (70, 17, [60, 10])])
def test_more_rows_than_a_launch_takes(rows: int, k: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of an export may have them: they run in turns, and a row gets what it would get by itself."""
    c = make(Spec(rows=rows, experts=20, k=k))
    if not CUDA:
        monkeypatch.setattr(moe, "_why_no_kernel", lambda x: None)
    ran: list[int] = []
    from spec_compile.kernels import moe_experts_triton as kernels

    own = kernels.moe_experts_triton
    monkeypatch.setattr(kernels, "moe_experts_triton", lambda x, *rest: (ran.append(len(x)), own(x, *rest))[1])
    arguments = [t.cuda() if CUDA and isinstance(t, Tensor) else t for t in c.arguments]
    found = library.moe_experts(*arguments).cpu()
    assert ran == calls
    assert torch.allclose(found, moe_experts_reference(*c.arguments), atol=1e-5)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def on_gpu(spec: Spec) -> tuple[list[Any], Tensor]:
    """Operands on the device, and the result in float64."""
    c = make(spec)
    arguments = [on(x, "cuda") if isinstance(x, Tensor) else x for x in c.arguments]
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    return arguments, moe_experts_reference(*wide)


class TestOnGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 64])
    @pytest.mark.parametrize(
        ("experts", "k", "hidden", "inner"),
        [(8, 2, 512, 896), (128, 8, 512, 192), (60, 4, 256, 176), (5, 1, 136, 72), (256, 8, 192, 64), (32, 4, 360, 360)],
    )
    def test_bfloat16(self, experts: int, k: int, hidden: int, inner: int, rows: int) -> None:
        spec = Spec(rows=rows, experts=experts, k=k, hidden=hidden, inner=inner, dtype=torch.bfloat16)
        arguments, wanted = on_gpu(spec)
        assert why_no_experts_kernel(*(arguments[i] for i in (0, 1, 3, 4))) is None
        found = library.moe_experts(*arguments)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3
        assert torch.equal(found, library.moe_experts(*arguments))

    @pytest.mark.parametrize("rows", [3, 40])
    @pytest.mark.parametrize("layout", ["plain", "sliced"])
    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_layouts(self, interleaved: bool, transposed: bool, layout: str, rows: int) -> None:
        spec = Spec(rows, 16, 4, 320, 200, "swiglu_oai", interleaved, transposed, True, layout, torch.bfloat16, torch.int32)
        arguments, wanted = on_gpu(spec)
        found = library.moe_experts(*arguments)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3

    @pytest.mark.parametrize("rows", [1, 9, 64])
    @pytest.mark.parametrize("layout", ["plain", "sliced"])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_two_stacks_give_the_bits_of_one(self, transposed: bool, layout: str, rows: int) -> None:
        """The kernel is the same; only where the rows of up lie differs."""
        spec = Spec(rows, 16, 4, 320, 200, transposed=transposed, layout=layout, dtype=torch.bfloat16, split=True)
        arguments, wanted = on_gpu(spec)
        assert why_no_experts_kernel(*(arguments[i] for i in (0, 1, 3, 4)), up=arguments[-1]) is None
        found = library.moe_experts(*arguments)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3
        fused = torch.cat([arguments[3], arguments[-1]], 2 if transposed else 1)
        assert torch.equal(found, library.moe_experts(*arguments[:3], fused, *arguments[4:-1]))

    @pytest.mark.parametrize("shift", [0, 1, 8])
    def test_stacks_far_apart_on_either_side(self, shift: int) -> None:
        """More than 2^31 elements from the gate back to up, at distances of any alignment; nothing in between is read."""
        experts, hidden, inner = 65, 8192, 4096
        numel = experts * hidden * inner
        held = torch.full((2 * numel + shift,), torch.nan, device="cuda", dtype=torch.bfloat16)
        up, gate = held[:numel].view(experts, inner, hidden), held[numel + shift :].view(experts, inner, hidden)
        down = torch.empty(experts, hidden, inner, device="cuda", dtype=torch.bfloat16)
        for part in (gate[3], up[3], down[3]):
            part.normal_(0, part.shape[1] ** -0.5)
        x = torch.randn(2, hidden, device="cuda", dtype=torch.bfloat16)
        choice = torch.full((2, 1), 3, device="cuda")
        weight = torch.ones(2, 1, device="cuda")
        found = library.moe_experts(x, choice, weight, gate, down, None, None, "silu", False, False, up=up)
        h = torch.nn.functional.silu(x.double() @ gate[3].double().T) * (x.double() @ up[3].double().T)
        wanted = h @ down[3].double().T
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3

    def test_all_rows_with_one_expert_and_none(self) -> None:
        spec = Spec(rows=64, experts=64, k=8, hidden=256, inner=128, dtype=torch.bfloat16)
        arguments, _ = on_gpu(spec)
        x, choice, weight = arguments[:3]
        choice[:] = 63
        choice[::3, 1::2] = -1
        weight[::3, 1::2] = torch.nan
        arguments[3][:63] = torch.nan
        arguments[4][:63] = torch.nan
        found = library.moe_experts(*arguments)
        gate_up, down = arguments[3][63].double(), arguments[4][63].double()
        h = x.double() @ gate_up.T
        y = (torch.nn.functional.silu(h[:, :128]) * h[:, 128:]) @ down.T
        wanted = y * torch.where(choice == 63, weight, 0).double().sum(1, keepdim=True)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3
        choice[:] = -1
        assert library.moe_experts(*arguments).eq(0).all()

    def test_weights_past_two_gigaelements(self) -> None:
        experts, hidden, inner = 33, 8192, 4096
        gate_up = torch.empty(experts, 2 * inner, hidden, device="cuda", dtype=torch.bfloat16)
        down = torch.empty(experts, hidden, inner, device="cuda", dtype=torch.bfloat16)
        gate_up[-1].normal_(0, hidden**-0.5)
        down[-1].normal_(0, inner**-0.5)
        x = torch.randn(2, hidden, device="cuda", dtype=torch.bfloat16)
        choice = torch.full((2, 1), experts - 1, device="cuda")
        weight = torch.ones(2, 1, device="cuda")
        assert gate_up[-1].storage_offset() >= 1 << 31
        found = library.moe_experts(x, choice, weight, gate_up, down, None, None, "silu", False, False)
        h = x.double() @ gate_up[-1].double().T
        wanted = (torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]) @ down[-1].double().T
        assert float((found.double() - wanted).norm() / wanted.norm()) < 4e-3

    @pytest.mark.parametrize("rows", [8, 70])
    def test_graph_replays_follow_the_choice(self, rows: int) -> None:
        """Route and experts in one captured graph; past the kernels' rows it is the reference that is captured."""
        spec = Spec(rows=rows, experts=32, k=4, hidden=256, inner=128, dtype=torch.bfloat16)
        arguments, _ = on_gpu(spec)
        x, gate_up, down = arguments[0], arguments[3], arguments[4]
        router = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16) / 16

        def block() -> tuple[Tensor, Tensor, Tensor]:
            choice, weight = library.moe_route(x @ router.T, None, "softmax", 4, True, 0.0, 1.0, 1, 1, "score_first")
            return choice, weight, library.moe_experts(x, choice, weight, gate_up, down, None, None, "silu", False, False)

        block()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = block()
        for _ in range(3):
            x.normal_()
            graph.replay()
            again = block()
            assert all(torch.equal(mine, other) for mine, other in zip(captured, again))
            choice, _ = moe_route_reference(x @ router.T, None, "softmax", 4, True, 0.0, 1.0, 1, 1, "score_first")
            assert torch.equal(captured[0], choice)
            wide = [t.double() for t in (x, gate_up, down)]
            wanted = moe_experts_reference(
                wide[0], captured[0], captured[1].double(), wide[1], wide[2], None, None, "silu", False, False
            )
            assert float((captured[2].double() - wanted).norm() / wanted.norm()) < 4e-3

    @pytest.mark.parametrize("experts", [8, 60, 128, 256, 384])
    def test_routes(self, experts: int) -> None:
        groups = 4
        for rule in (replace(MIXTRAL, k=8), replace(DEEPSEEK, k=8, groups=groups), GPT_OSS):
            if rule.groups > 1 and experts < 60:
                continue
            logits = ((torch.randn(64, experts) * 64).round() / 32).bfloat16()
            check_route("operator", logits, None, rule)
            assert why_no_route_kernel(logits.cuda(), rule.k) is None

    @pytest.mark.parametrize("experts", [8, 60, 128])
    def test_ties_end_as_those_of_topk(self, experts: int) -> None:
        """A rewritten router sends tied rows where the source's own ``torch.topk`` sends them."""
        k = experts // 8 + 1
        logits = (torch.randn(64, experts, device="cuda") * 4).round() / 2
        ours, _ = library.moe_route(logits, None, "softmax", k, False, 0.0, 1.0, 1, 1, "score_first")
        wanted = torch.topk(torch.softmax(logits, -1), k)
        boundary = torch.sort(logits, -1, descending=True).values
        assert (boundary[:, k - 1] == boundary[:, k]).sum() > 10
        assert torch.equal(ours.sort(-1).values, wanted.indices.sort(-1).values)
