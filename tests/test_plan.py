"""Sparsity plans: round trips, error messages and files."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_compile import AttentionPlan, AuditPlan, FfnCalibration, FfnPlan, MoeCalibration, MoePlan, SparsityPlan
from spec_compile.errors import PlanError, SpecCompileError
from spec_compile.plan import SCHEMA_VERSION

LAYERS = st.lists(st.integers(0, 200), max_size=6).map(tuple)
UNIT = st.floats(0.0, 1.0)
RATIOS = st.floats(0.0, 1.0, exclude_min=True)
COUNTS = st.integers(1, 10**9)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def attention_plans(draw: st.DrawFn) -> AttentionPlan:
    budget = draw(maybe(st.integers(128, 1 << 20) | RATIOS))
    schedule = draw(st.sampled_from(["none", "freq", "pattern", "anchors"]))
    return AttentionPlan(
        budget=budget,
        budget_floor=draw(maybe(COUNTS)) if isinstance(budget, float) else None,
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        sink=draw(st.integers(0, 9)),
        recent=draw(st.integers(0, 9)),
        min_context=draw(st.integers(0, 10**6)),
        representative=draw(st.sampled_from(["mean", "min_max", "exact"])),
        query=draw(st.sampled_from(["first", "first_last", "all", "mean"])),
        heads=draw(st.sampled_from(["own", "pooled"])),
        joint=draw(st.booleans()),
        index_topk_freq=draw(st.integers(1, 40)) if schedule == "freq" else None,
        index_skip_topk_offset=draw(maybe(st.integers(0, 40))),
        index_topk_pattern="F" + draw(st.text("SF", max_size=40)) if schedule == "pattern" else None,
        anchors=draw(LAYERS) if schedule == "anchors" else None,
        include=draw(maybe(LAYERS)),
        exclude=draw(LAYERS),
        dense_first=draw(st.integers(0, 9)),
    )


@st.composite
def ffn_plans(draw: st.DrawFn) -> FfnPlan:
    threshold = draw(maybe(st.just("auto") | st.floats(0.0, 1e6) | st.integers(0, 9)))
    budget = draw(maybe(UNIT)) if threshold is None else None
    layers = draw(maybe(st.tuples(UNIT, UNIT))) if threshold == "auto" else None
    calibration = draw(maybe(st.builds(FfnCalibration, unions=st.tuples(UNIT, UNIT), forced=st.booleans())))
    return FfnPlan(
        threshold, budget, draw(maybe(LAYERS)), draw(LAYERS), layers, draw(st.booleans()), draw(st.integers(0, 9)), calibration
    )


CALIBRATIONS = st.builds(
    MoeCalibration,
    tokens=COUNTS,
    kl=UNIT,
    flips=UNIT,
    baseline_top_k=maybe(COUNTS),
    baseline_kl=maybe(UNIT),
    forced=st.booleans(),
)


@st.composite
def moe_plans(draw: st.DrawFn) -> MoePlan:
    skip = draw(maybe(COUNTS))
    expert_budget = draw(maybe(COUNTS))
    return MoePlan(
        skip=skip,
        betas=None if skip is None else draw(st.lists(UNIT, min_size=1, max_size=6).map(tuple)),
        ratio=draw(maybe(UNIT)),
        top_k=draw(maybe(COUNTS)),
        expert_budget=expert_budget,
        substitute=draw(st.booleans()) if expert_budget is not None else False,
        renormalize=draw(maybe(st.booleans())),
        include=draw(maybe(LAYERS)),
        exclude=draw(LAYERS),
        dense_first=draw(st.integers(0, 9)),
        calibration=draw(maybe(CALIBRATIONS)),
    )


AUDITS = st.builds(AuditPlan, window=st.integers(2, 32), margin=maybe(st.floats(0.0, 1e6)))
PLANS = st.builds(
    SparsityPlan,
    attention=maybe(attention_plans()),
    ffn=maybe(ffn_plans()),
    moe=maybe(moe_plans()),
    audit=maybe(AUDITS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = {
    section: [f.name for f in dataclasses.fields(cls)]
    for section, cls in {"attention": AttentionPlan, "ffn": FfnPlan, "moe": MoePlan, "audit": AuditPlan}.items()
}


def rich() -> SparsityPlan:
    """A plan with every section."""
    return SparsityPlan(
        AttentionPlan(budget=0.25, budget_floor=512, anchors=(0, 4), exclude=(1,), include=(0, 2, 4)),
        FfnPlan(threshold="auto"), MoePlan(skip=2, betas=(0.1, 0.2)), AuditPlan(window=16, margin=0.5),
    )  # fmt: skip


@given(PLANS)
def test_dict_round_trip(plan: SparsityPlan) -> None:
    assert SparsityPlan.from_dict(plan.to_dict()) == plan
    assert SparsityPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert hash(plan) == hash(SparsityPlan.from_dict(plan.to_dict()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(PLANS)
def test_file_round_trip(tmp_path: Path, plan: SparsityPlan) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert SparsityPlan.load(path) == plan
    assert SparsityPlan.load(str(path)) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@settings(max_examples=150)
@given(st.data())
def test_any_json_in_any_field_is_a_plan_or_a_plan_error(data: st.DataObject) -> None:
    """Whatever a file holds, nothing but PlanError comes out, and it names the section."""
    section = data.draw(st.sampled_from(sorted(FIELDS)))
    name = data.draw(st.sampled_from(FIELDS[section]))
    raw = {section: {name: data.draw(JSON)}}
    try:
        plan = SparsityPlan.from_dict(raw)
    except PlanError as error:
        assert f"plan.{section}" in str(error)
    else:
        assert SparsityPlan.from_dict(plan.to_dict()) == plan


def test_plain_json_types() -> None:
    raw = rich().to_dict()
    assert set(raw) == {"attention", "ffn", "moe", "audit", "version"}
    assert json.loads(json.dumps(raw))["attention"]["anchors"] == [0, 4]
    assert SparsityPlan().to_dict() == {"version": SCHEMA_VERSION}


BAD: list[tuple[Any, str]] = [
    ({"attn": {}}, "plan: unknown key 'attn'; known keys are attention, ffn, moe, audit, version"),
    ({"attention": {"budgets": 1}}, "plan.attention: unknown key 'budgets'; known keys are budget, budget_floor,"),
    ({"ffn": {"tau": 1}}, "plan.ffn: unknown key 'tau'"),
    ({"moe": {"k": 1}}, "plan.moe: unknown key 'k'"),
    ({"audit": {"w": 1}}, "plan.audit: unknown key 'w'"),
    ({"attention": {"budget": "2048"}}, "plan.attention.budget: expected int | float | None, got '2048'"),
    ({"attention": {"budget": True}}, "plan.attention.budget: expected"),
    ({"attention": {"budget": [1]}}, "plan.attention.budget: expected"),
    ({"attention": {"block_size": 64.0}}, "plan.attention.block_size: expected int"),
    ({"attention": {"block_size": None}}, "plan.attention.block_size: expected int"),
    ({"attention": {"joint": 1}}, "plan.attention.joint: expected bool"),
    ({"attention": {"query": 3}}, "plan.attention.query: expected str"),
    ({"attention": {"anchors": "0,4"}}, "plan.attention.anchors: expected"),
    ({"attention": {"anchors": [0, 1.5]}}, "plan.attention.anchors: expected"),
    ({"attention": {"anchors": [0, True]}}, "plan.attention.anchors: expected"),
    ({"attention": {"exclude": None}}, "plan.attention.exclude: expected"),
    ({"attention": []}, "plan.attention: expected AttentionPlan | None"),
    ({"attention": 3}, "plan.attention: expected AttentionPlan | None"),
    ({"ffn": {"threshold": []}}, "plan.ffn.threshold: expected"),
    ({"ffn": {"budget": "half"}}, "plan.ffn.budget: expected"),
    ({"moe": {"betas": 0.5}}, "plan.moe.betas: expected"),
    ({"moe": {"substitute": "yes"}}, "plan.moe.substitute: expected bool"),
    ({"audit": {"window": "8"}}, "plan.audit.window: expected int"),
    ({"version": "1"}, "plan.version: expected int"),
    ({"attention": {"budget": 0}}, "plan.attention.budget: must be at least 1, got 0"),
    ({"attention": {"budget": -5}}, "plan.attention.budget: must be at least 1"),
    ({"attention": {"budget": 1}}, "plan.attention.budget: 1 tokens are less than a block of 64; a share is a float (all: 1.0)"),
    ({"attention": {"budget": 127, "block_size": 128}}, "plan.attention.budget: 127 tokens are less than a block of 128"),
    ({"attention": {"budget": 0.0}}, "plan.attention.budget: a fraction must lie in (0, 1], got 0.0"),
    ({"attention": {"budget": 1.5}}, "plan.attention.budget: a fraction must lie in (0, 1], got 1.5"),
    ({"attention": {"budget": float("nan")}}, "plan.attention.budget: a fraction"),
    ({"attention": {"budget_floor": 0, "budget": 0.5}}, "plan.attention.budget_floor: must be at least 1"),
    ({"attention": {"budget_floor": 64, "budget": 128}}, "plan.attention.budget_floor: needs a fractional budget"),
    ({"attention": {"budget_floor": 64}}, "plan.attention.budget_floor: needs a fractional budget"),
    ({"attention": {"block_size": 48}}, "plan.attention.block_size: must be one of (8, 16, 32, 64, 128), got 48"),
    ({"attention": {"sink": -1}}, "plan.attention.sink: must not be negative"),
    ({"attention": {"recent": -1}}, "plan.attention.recent: must not be negative"),
    ({"attention": {"min_context": -1}}, "plan.attention.min_context: must not be negative"),
    ({"attention": {"dense_first": -1}}, "plan.attention.dense_first: must not be negative"),
    ({"attention": {"representative": "max"}}, "plan.attention.representative: must be one of"),
    ({"attention": {"query": "last"}}, "plan.attention.query: must be one of"),
    ({"attention": {"heads": "all"}}, "plan.attention.heads: must be one of"),
    ({"attention": {"index_topk_freq": 0}}, "plan.attention.index_topk_freq: must be at least 1"),
    ({"attention": {"index_skip_topk_offset": -1}}, "plan.attention.index_skip_topk_offset: must not be negative"),
    ({"attention": {"index_topk_pattern": ""}}, "plan.attention.index_topk_pattern: must be a string of F and S"),
    ({"attention": {"index_topk_pattern": "SXF"}}, "plan.attention.index_topk_pattern: must be a string of F and S"),
    ({"attention": {"index_topk_pattern": "SFFS"}}, "plan.attention.index_topk_pattern: layer 0 must select"),
    ({"attention": {"index_topk_freq": 2, "anchors": [0]}}, "plan.attention: index_topk_freq and anchors exclude each"),
    ({"attention": {"index_topk_pattern": "F", "anchors": [0]}}, "plan.attention: index_topk_pattern and anchors"),
    ({"attention": {"anchors": [0, -1]}}, "plan.attention.anchors: layers count from 0"),
    ({"attention": {"include": [-1]}}, "plan.attention.include: layers count from 0"),
    ({"attention": {"exclude": [-1]}}, "plan.attention.exclude: layers count from 0"),
    ({"ffn": {"threshold": "off"}}, "plan.ffn.threshold: must be a number or 'auto'"),
    ({"ffn": {"threshold": -0.5}}, "plan.ffn.threshold: must be finite and not negative"),
    ({"ffn": {"threshold": float("inf")}}, "plan.ffn.threshold: must be finite"),
    ({"ffn": {"threshold": 0.1, "thresholds": [0.1]}}, "plan.ffn: threshold and thresholds exclude each other"),
    ({"ffn": {"budget": 0.1, "thresholds": [0.1]}}, "plan.ffn: thresholds and budget exclude each other"),
    ({"ffn": {"thresholds": [0.1, -1.0]}}, "plan.ffn.thresholds[1]: must be finite and not negative"),
    ({"ffn": {"dense_first": -1}}, "plan.ffn.dense_first: must not be negative"),
    ({"ffn": {"calibration": {"kl": float("nan")}}}, "plan.ffn.calibration.kl: must be finite"),
    ({"ffn": {"budget": 1.1}}, "plan.ffn.budget: must lie in 0..1"),
    ({"ffn": {"budget": 0.5, "threshold": 0.1}}, "plan.ffn: threshold and budget exclude each other"),
    ({"ffn": {"include": [-1]}}, "plan.ffn.include: layers count from 0"),
    ({"moe": {"skip": 0, "betas": [0.1]}}, "plan.moe.skip: must be at least 1"),
    ({"moe": {"skip": 1}}, "plan.moe.betas: skip and betas go together"),
    ({"moe": {"skip": 1, "betas": []}}, "plan.moe.betas: needs a share for every MoE layer, got none"),
    ({"moe": {"calibration": {"kl": float("nan")}}}, "plan.moe.calibration.kl: must be finite, got nan"),
    ({"moe": {"calibration": {"baseline_kl": float("inf")}}}, "plan.moe.calibration.baseline_kl: must be finite, got inf"),
    ({"moe": {"betas": [0.1]}}, "plan.moe.betas: skip and betas go together"),
    ({"moe": {"skip": 1, "betas": [0.1, 2.0]}}, "plan.moe.betas[1]: must lie in 0..1"),
    ({"moe": {"ratio": -0.1}}, "plan.moe.ratio: must lie in 0..1"),
    ({"moe": {"include": [-1]}}, "plan.moe.include: layers count from 0"),
    ({"moe": {"exclude": [-1]}}, "plan.moe.exclude: layers count from 0"),
    ({"moe": {"dense_first": -1}}, "plan.moe.dense_first: must not be negative"),
    ({"moe": {"calibration": {"k": 1}}}, "plan.moe.calibration: unknown key 'k'; known keys are tokens, held_out,"),
    ({"moe": {"calibration": {"kl": "low"}}}, "plan.moe.calibration.kl: expected float"),
    ({"moe": {"calibration": 3}}, "plan.moe.calibration: expected MoeCalibration | None"),
    ({"moe": {"top_k": 0}}, "plan.moe.top_k: must be at least 1"),
    ({"moe": {"expert_budget": 0}}, "plan.moe.expert_budget: must be at least 1"),
    ({"moe": {"substitute": True}}, "plan.moe.substitute: needs expert_budget"),
    ({"audit": {"window": 1}}, "plan.audit.window: must lie in 2..32"),
    ({"audit": {"window": 33}}, "plan.audit.window: must lie in 2..32"),
    ({"audit": {"margin": -1}}, "plan.audit.margin: must not be negative"),
    ({"version": SCHEMA_VERSION + 1}, "plan.version: this version reads schema 1, the plan has 2"),
    ({"version": 0}, "plan.version: this version reads schema 1, the plan has 0"),
    ([], "plan: must be an object with keys, got list"),
    ("exact", "plan: must be an object with keys, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "text"), BAD, ids=[text[:60] for _, text in BAD])
def test_errors_name_section_and_field(raw: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        SparsityPlan.from_dict(raw)
    assert text in str(caught.value)
    assert isinstance(caught.value, SpecCompileError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AttentionPlan(budget=0), "plan.attention.budget"),
        (lambda: AttentionPlan(block_size=7), "plan.attention.block_size"),
        (lambda: FfnPlan(budget=2.0), "plan.ffn.budget"),
        (lambda: MoePlan(skip=1), "plan.moe.betas"),
        (lambda: AuditPlan(window=99), "plan.audit.window"),
        (lambda: SparsityPlan(version=9), "plan.version"),
    ],
)
def test_constructors_check_too(make: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text.replace(".", r"\.")):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AttentionPlan(budget="2048"), "plan.attention.budget"),  # type: ignore[arg-type]
        (lambda: AttentionPlan(sink=None), "plan.attention.sink"),  # type: ignore[arg-type]
        (lambda: AttentionPlan(anchors=3), "plan.attention.anchors"),  # type: ignore[arg-type]
        (lambda: MoePlan(top_k="2"), "plan.moe.top_k"),  # type: ignore[arg-type]
        (lambda: SparsityPlan(attention={"budget": 64}), "plan.attention"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_in_constructors_name_the_field(make: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text.replace(".", r"\.")):
        make()


def test_lists_become_tuples() -> None:
    plan = AttentionPlan(anchors=[0, 3], include=[1], exclude=[2])  # type: ignore[arg-type]
    assert (plan.anchors, plan.include, plan.exclude) == ((0, 3), (1,), (2,))
    assert FfnPlan(include=[1], exclude=[2]).include == (1,)  # type: ignore[arg-type]
    assert MoePlan(skip=1, betas=[0.5]).betas == (0.5,)  # type: ignore[arg-type]
    hash(plan)


def test_plans_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionPlan().budget = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "plan",
    [
        SparsityPlan(),
        SparsityPlan(AttentionPlan(), FfnPlan(), MoePlan(), AuditPlan()),
        SparsityPlan(AttentionPlan(index_topk_freq=4)),
        SparsityPlan(ffn=FfnPlan(threshold=0.0)),
        SparsityPlan(ffn=FfnPlan(threshold="auto", thresholds=(0.0, 0.0))),
        SparsityPlan(moe=MoePlan(renormalize=True)),
        SparsityPlan(moe=MoePlan(ratio=0.0)),
        SparsityPlan(moe=MoePlan(skip=2, betas=(0.0, 0.0))),
    ],
)
def test_exact_plans_are_supported(plan: SparsityPlan) -> None:
    assert plan.exact
    plan.require_supported()


@pytest.mark.parametrize("budget", [64, 0.1, 1.0])
def test_sparse_attention_is_supported(budget: float) -> None:
    plan = SparsityPlan(AttentionPlan(budget=budget))
    assert not plan.exact
    plan.require_supported()


@pytest.mark.parametrize(
    "plan", [MoePlan(top_k=1), MoePlan(ratio=0.1), MoePlan(expert_budget=4), MoePlan(skip=1, betas=(0.0, 0.1))], ids=str
)
def test_expert_skipping_is_supported(plan: MoePlan) -> None:
    assert not SparsityPlan(moe=plan).exact
    SparsityPlan(moe=plan).require_supported()


@pytest.mark.parametrize(
    "plan",
    [
        SparsityPlan(ffn=FfnPlan(threshold="auto", thresholds=(0.0, 0.1))),
        SparsityPlan(ffn=FfnPlan(budget=0.5)),
        SparsityPlan(AttentionPlan(budget=64), FfnPlan(threshold=0.1), MoePlan(top_k=1)),
    ],
)
def test_skipping_channels_is_supported(plan: SparsityPlan) -> None:
    assert not plan.exact
    plan.require_supported()


def test_an_automatic_threshold_needs_a_calibration() -> None:
    plan = SparsityPlan(ffn=FfnPlan(threshold="auto"))
    assert not plan.exact
    with pytest.raises(PlanError, match=r"plan\.ffn\.threshold: \"auto\" .*ffn_calibrate\(model, texts\) makes the section"):
        plan.require_supported()


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    rich().save(path)
    before = path.read_bytes()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("disk full")

    def fdopen(handle: int, *args: Any, **options: Any) -> Full:
        os.write(handle, b'{"attention": {"bud')
        os.close(handle)
        return Full()

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(OSError, match="disk full"):
        SparsityPlan().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_interrupted_replace_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    rich().save(path)

    def interrupt(source: Any, target: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        SparsityPlan().save(path)
    monkeypatch.undo()
    assert SparsityPlan.load(path) == rich()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    """Another user may read a saved plan exactly as any other file written here."""
    plain = tmp_path / "plain.json"
    plain.write_text("{}")
    SparsityPlan().save(tmp_path / "plan.json")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plan.json", "plain.json")]
    assert modes[0] == modes[1]


def test_save_next_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SparsityPlan().save("plan.json")
    assert SparsityPlan.load("plan.json") == SparsityPlan()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not JSON"),
        (b'{"attention": {"bud', "is not JSON"),
        (b"\xff\xfe\x00nonsense", "is not JSON"),
        (b"[1, 2]", "must be an object with keys, got list"),
        (b"null", "must be an object with keys, got NoneType"),
        (b'{"attention": {"budget": "many"}}', "plan.attention.budget"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        SparsityPlan.load(path)
    assert text in str(caught.value)
    if "JSON" in text:
        assert str(path) in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        SparsityPlan.load(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="directory"):
        SparsityPlan.load(tmp_path)


def test_coerce(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    rich().save(path)
    assert SparsityPlan.coerce(None) == SparsityPlan()
    plan = rich()
    assert SparsityPlan.coerce(plan) is plan
    assert SparsityPlan.coerce(plan.to_dict()) == plan
    assert SparsityPlan.coerce({}) == SparsityPlan()
    assert SparsityPlan.coerce(path) == plan
    assert SparsityPlan.coerce(str(path)) == plan
    with pytest.raises(PlanError, match="got int"):
        SparsityPlan.coerce(3)
    with pytest.raises(PlanError, match="No such file"):
        SparsityPlan.coerce("absent.json")
