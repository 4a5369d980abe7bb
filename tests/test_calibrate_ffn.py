"""``ffn_calibrate``: what it measures on tiny models, which layers it leaves exact, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import spec_compile as sc
from spec_compile.calibrate_ffn import words
from spec_compile.errors import OptionsError, PlanError, QualityError
from spec_compile.models.down_weights import store_by_channels
from spec_compile.models.zoo import VOCAB, build

ROWS, WINDOW = 5, 30


@pytest.fixture(scope="module")
def model() -> Any:
    """Activations of the second layer are a thousand times smaller than those of the first."""
    made: Any = build("llama", "sdpa")
    with torch.no_grad():
        made.model.layers[1].mlp.gate_proj.weight.mul_(1e-3)
    return made


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB, (2 * WINDOW,), generator=generator) for _ in range(2)]


def calibrate(model: Any, threshold: Any = 0.05, **given: Any) -> sc.FfnPlan:
    given = {"draft_len": ROWS - 1, "window": WINDOW, "progress": False, "pays_below": 0.8, **given}
    return sc.ffn_calibrate(model, texts(), threshold, **given)


@torch.no_grad()
def counted(model: Any, threshold: float) -> list[tuple[float, float]]:
    """Mean share of channels that rows and steps keep, with hooks and without a cache."""
    found = []
    for layer in model.model.layers:
        kept, read = [], []

        def keep(_: Any, __: Any, act: torch.Tensor, kept: list[float] = kept, read: list[float] = read) -> None:
            for part in act[0, WINDOW // 2 :].split(ROWS):
                own = part.abs() >= threshold
                kept.append(float(own.float().mean()))
                read.append(float(own.any(0).float().mean()))

        hook = layer.mlp.act_fn.register_forward_hook(keep)
        # Of four windows the last one is held out.
        for window in [part for text in texts() for part in text.split(WINDOW)][:3]:
            model(input_ids=window[None])
        hook.remove()
        found.append((sum(kept) / len(kept), sum(read) / len(read)))
    return found


def test_unions_decide_which_layers_skip_channels(model: Any, tmp_path: Path) -> None:
    plan = calibrate(model, 0.003, limit_kl=1e-15, force=True)
    found = plan.calibration
    assert found is not None and plan.threshold == "auto" and plan.thresholds == (0.0, 0.003)
    for (kept, union), measured_kept, measured in zip(counted(model, 0.003), found.kept, found.unions, strict=True):
        assert measured_kept == pytest.approx(kept, abs=1e-3) and measured == pytest.approx(union, abs=1e-3)
    assert found.unions[1] < found.pays_below < found.unions[0]
    assert found.rows == ROWS and found.held_out > 0 and found.forced == (found.kl > 1e-15)
    whole = sc.SparsityPlan(ffn=plan)
    whole.save(tmp_path / "plan.json")
    assert sc.SparsityPlan.load(tmp_path / "plan.json") == whole
    report = str(sc.explain(model, sc.VerifyCache(model, 64), ROWS - 1, whole))
    assert f"exact (does not pay: {found.unions[0]:.1%} of its channels in the union of {ROWS} rows)" in report
    assert "in sparse steps 1 of 2 skip channels" in report
    assert "1 of 2 layers skip channels below 0.003" in words(plan)


def test_where_nothing_pays_the_plan_is_exact(model: Any) -> None:
    plan = calibrate(model, 1e-9, pays_below=None)
    assert plan.calibration is not None and plan.calibration.pays_below == 0.1
    assert plan.exact and plan.thresholds == (0.0, 0.0) and "no layer pays" in words(plan)
    sc.SparsityPlan(ffn=plan).require_supported()


def test_plans_past_a_limit() -> None:
    model = build("llama", "sdpa", num_hidden_layers=1)
    with pytest.raises(QualityError, match=r"past its limits .* Lower threshold, or pass force=True"):
        calibrate(model, 5.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threshold": 0.0}, "threshold must be a number above 0"),
        ({"threshold": "auto"}, "threshold must be a number above 0"),
        ({"pays_below": 0.0}, "pays_below must lie in"),
        ({"window": 8}, "window must be an integer of at least 11"),
        ({"cudagraphs": True}, "channels are counted while a step runs"),
        ({"plan": None}, "plan is what ffn_calibrate makes"),
        ({"held_out": 1.0}, "held_out must lie"),
    ],
)
def test_bad_arguments(model: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        calibrate(model, **given)


def test_bad_models_and_thresholds(model: Any) -> None:
    with pytest.raises(PlanError, match=r"plan\.ffn\.threshold"):
        calibrate(model, -1.0)
    with pytest.raises(OptionsError, match="must be a transformers causal LM"):
        calibrate(object())
    model.train()
    with pytest.raises(OptionsError, match=r"call model\.eval"):
        calibrate(model)
    model.eval()
    with pytest.raises(OptionsError, match="no feed-forward layer was recognised"):
        calibrate(build("qwen3_moe", "sdpa", num_hidden_layers=1))


def test_weights_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a calibration turn the weights of every layer on a GPU (here they are made to): none stays so."""
    turned = []
    monkeypatch.setattr("spec_compile.verify.store_for", lambda plan, model: turned.append(store_by_channels(model)))
    model: Any = build("llama", "sdpa")
    assert calibrate(model, 1e-9).exact
    assert turned[0] == 2 and all(layer.mlp.down_proj.weight.is_contiguous() for layer in model.model.layers)
