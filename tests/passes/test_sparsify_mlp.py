"""SparsifyMlp: rules of a plan on small layers and models, what they compute, and which layers stay exact for which reason."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cloned, compare, rewrite, trace
from torch import Tensor
from torch.fx import GraphModule

from spec_compile.errors import PlanError
from spec_compile.kernels.mlp import watch_channels
from spec_compile.passes import plan_mlp
from spec_compile.passes.base import Rejection
from spec_compile.passes.plan_mlp import ChannelRule, assign_channels
from spec_compile.plan import FfnCalibration, FfnPlan
from spec_compile.report import RewriteReport

SPARSE = torch.ops.spec_compile.mlp_sparse_v1.default
ROWS, H, INNER = 3, 12, 20


def stack(x: Tensor, *weights: Tensor) -> Tensor:
    """Two residual layers: gated silu, and plain squared ReLU."""
    gate, up, down, first, last = weights
    x = x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return x + F.linear(F.relu(F.linear(x, first)).square(), last)


def operands(rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(rows, H), (INNER, H), (INNER, H), (H, INNER), (INNER, H), (H, INNER)]
    return [torch.randn(*size, generator=generator) * (1.0 if size[0] == rows else 0.4) for size in sizes]


def wanted(plan: FfnPlan, given: list[Tensor], layers: tuple[int, ...] = (0, 1)) -> Tensor:
    x, gate, up, down, first, last = given

    def kept(act: Tensor) -> Tensor:
        if plan.budget is not None:
            keep = -(-int(plan.budget * 1000 * INNER) // 1000)
            best = act.square().sum(0).sort(descending=True).indices[:keep]
            return torch.zeros(INNER, dtype=torch.bool).scatter(0, best, True).expand_as(act)
        assert isinstance(plan.threshold, float)
        own = act.abs() >= plan.threshold
        return own.any(0).expand_as(own) if plan.joint else own

    for place in range(2):
        act = F.silu(F.linear(x, gate)) if place == 0 else F.relu(F.linear(x, first)).square()
        h = act * F.linear(x, up) if place == 0 else act
        h = torch.where(kept(act), h, 0) if place in layers else h
        x = x + F.linear(h, down if place == 0 else last)
    return x


def rewritten(plan: FfnPlan | None, lowering: str = "auto", dynamic: Any = ()) -> tuple[GraphModule, RewriteReport]:
    return rewrite(trace(stack, operands(), dynamic), lowering, ffn_plan=plan)


def run(gm: GraphModule, given: list[Tensor], sparse: bool) -> Tensor:
    inputs = gm.graph.find_nodes(op="placeholder")
    switches = [torch.tensor([int(sparse)])] * (len(inputs) - len(given))
    with torch.no_grad():
        return gm(*cloned(given), *switches)


PLANS = [FfnPlan(threshold=0.2), FfnPlan(threshold=0.3, joint=True), FfnPlan(budget=0.5), FfnPlan(budget=0.01)]


@pytest.mark.parametrize("lowering", ["auto", "reference"])
@pytest.mark.parametrize("plan", PLANS, ids=["row", "joint", "budget", "one channel"])
def test_sparse_and_exact_steps_of_one_graph(plan: FfnPlan, lowering: str) -> None:
    gm, report = rewritten(plan, lowering)
    assert len(gm.graph.find_nodes(op="call_function", target=SPARSE)) == len(report.skipping) == 2
    given = operands()
    exact, _ = rewritten(None)
    assert torch.equal(run(gm, given, False), run(exact, given, False))
    torch.testing.assert_close(run(gm, given, True), wanted(plan, given), rtol=0.0, atol=1e-5)
    assert not torch.equal(run(gm, given, True), run(gm, given, False))
    # One switch serves all layers of a device.
    assert len(gm.graph.find_nodes(op="placeholder")) == len(given) + 1


def test_a_dynamic_number_of_rows() -> None:
    plan = FfnPlan(threshold=0.2)
    gm, _ = rewritten(plan, dynamic=((0, 0),))
    given = operands(5)
    torch.testing.assert_close(run(gm, given, True), wanted(plan, given), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"exclude": (0,)}, "excluded"), ({"include": (1,)}, "not included"),
        ({"dense_first": 1}, "among the first 1 feed-forward layers"),
        ({"threshold": None, "thresholds": (0.0, 0.2)}, "its threshold is 0"),
    ],
)  # fmt: skip
def test_layers_that_the_plan_leaves_out(fields: dict[str, Any], note: str) -> None:
    plan = FfnPlan(**{"threshold": 0.2, **fields})
    gm, report = rewritten(plan)
    first, second = report.mlps
    assert (first.status, first.rule, first.rule_note) == ("kept", "", note)
    assert second.status == "rewritten" and "skips channels below 0.2" in second.rule
    given = operands()
    torch.testing.assert_close(run(gm, given, True), wanted(FfnPlan(threshold=0.2), given, (1,)), rtol=0.0, atol=1e-5)
    assert f"exact ({note})" in str(report)


def test_a_calibration_speaks_in_the_report() -> None:
    found = FfnCalibration(rows=9, threshold=0.1, unions=(1.0, 0.31), kept=(0.9, 0.1), pays_below=0.8)
    _, report = rewritten(FfnPlan("auto", thresholds=(0.0, 0.1), calibration=found))
    first, second = report.mlps
    assert first.rule_note == "does not pay: 100.0% of its channels in the union of 9 rows"
    assert second.rule.endswith("31.0% of its channels in the union of 9 rows")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (FfnPlan(threshold=0.1, include=(2,)), r"plan\.ffn\.include: layer 2 does not exist, .* feed-forward layers 0\.\.1"),
        (FfnPlan(thresholds=(0.1,)), r"plan\.ffn\.thresholds: 1 thresholds for 2 .* layer 1 has none"),
        (FfnPlan(thresholds=(0.1,) * 3), r"plan\.ffn\.thresholds: .* layer 2 does not exist"),
    ],
)
def test_plans_that_do_not_fit(plan: FfnPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rewritten(plan)


def test_what_does_not_pay_on_a_gpu_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_mlp, "tensor", lambda node: SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(plan_mlp, "_why_dense", lambda layer: "")
    layers: list[Any] = [SimpleNamespace(x=None, inner=100)]
    [rule] = assign_channels(FfnPlan(budget=0.6), layers)
    assert rule == ChannelRule(note="does not pay: skipping channels was measured to be faster up to 50% of them alone")
    [rule] = assign_channels(FfnPlan(budget=0.1), layers)
    assert rule.words() == "keeps 10 channels for all rows"
    [rule] = assign_channels(FfnPlan(threshold=0.1), layers)
    assert rule.words() == "skips channels below 0.1, whether that pays was not measured (ffn_calibrate)"
    found = FfnCalibration(rows=9, unions=(0.123,), kept=(0.1,))
    [rule] = assign_channels(FfnPlan("auto", thresholds=(0.1,), calibration=found), layers)
    assert rule.words() == "skips channels below 0.1, 12.3% of its channels in the union of 9 rows"


def test_refused_layers_are_counted_and_budgets_may_cover_all() -> None:
    found = assign_channels(FfnPlan(threshold=0.5), [Rejection("reason", "node")])
    assert found == [ChannelRule(note="not rewritten: reason")]
    _, report = rewritten(FfnPlan(budget=0.99))
    assert {entry.rule_note for entry in report.mlps} == {"the budget covers its 20 channels"}


pytest.importorskip("transformers", minversion="5.17")
from spec_compile import SparsityPlan, VerifyCache, compile_verify  # noqa: E402
from spec_compile.models.zoo import VOCAB, build  # noqa: E402


def tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (1, rows), generator=torch.Generator().manual_seed(seed))


class Masked(torch.nn.Module):
    """transformers' gated layer with the paper's rule spelled out."""

    def __init__(self, mlp: Any, threshold: float) -> None:
        super().__init__()
        self.mlp, self.threshold = mlp, threshold

    def forward(self, x: Tensor) -> Tensor:
        act = self.mlp.act_fn(self.mlp.gate_proj(x))
        return self.mlp.down_proj(torch.where(act.abs() < self.threshold, 0, act) * self.mlp.up_proj(x))


@torch.no_grad()
def test_a_model_under_a_plan() -> None:
    """Sparse steps follow the rule spelled out; exact ones, and a threshold of 0, have the bits of a function without plan."""
    model = build("llama", "sdpa", num_hidden_layers=1)
    cache = VerifyCache(model, 64)
    model(input_ids=tokens(20), past_key_values=cache, use_cache=True)
    drafts = tokens(5, 1)
    verify = compile_verify(model, cache, 8, SparsityPlan(ffn=FfnPlan(threshold=0.3)), codegen="eager", strict=True)
    seen: list[tuple[float, float]] = []
    with watch_channels(lambda down, kept, read: seen.append((float(kept.float().mean()), float(read)))):
        sparse = verify(drafts)
    [(kept, read)] = seen
    assert 0 < kept < read <= 96
    cache.crop(-5)
    exact = verify(drafts, sparse=False)
    cache.crop(-5)
    plain = compile_verify(model, cache, 8, SparsityPlan(ffn=FfnPlan(threshold=0.0)), codegen="eager")
    assert torch.equal(plain(drafts), exact)
    cache.crop(-5)
    spelled = copy.deepcopy(model)
    spelled.model.layers[0].mlp = Masked(spelled.model.layers[0].mlp, 0.3)
    expected = spelled(input_ids=drafts, past_key_values=cache, use_cache=True).logits
    compare(expected, sparse, 1e-5 * max(1.0, float(expected.abs().max())))
    assert not torch.allclose(sparse, exact)
    assert "in sparse steps 1 of 1 skip channels" in str(verify.report())


def test_plans_without_effect_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_moe", "sdpa", num_hidden_layers=1)
    cache = VerifyCache(model, 64)
    verify = compile_verify(model, cache, 4, SparsityPlan(ffn=FfnPlan(threshold=0.3)), codegen="eager")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "spec_compile"):
        verify(tokens(5))
    assert "plan.ffn: no layer skips channels: no feed-forward layer was recognised" in caplog.text
