"""Roles of layers under a reuse plan, against a plain reading of the plan's words."""

from __future__ import annotations

import dataclasses

import pytest

from spec_compile.errors import PlanError
from spec_compile.passes.plan_reuse import LayerKind, assign_roles
from spec_compile.plan import AttentionPlan


def layers(count: int, *special: tuple[int, str]) -> list[LayerKind]:
    kinds = dict(special)
    return [LayerKind(f"layers.{i}", kinds.get(i, "full")) for i in range(count)]


def spelled(reuse: AttentionPlan, given: list[LayerKind]) -> str:
    """``S`` selects, a digit follows that layer, ``d`` stays dense."""
    return "".join({"dense": "d", "anchor": "S"}.get(role.kind, str(role.anchor)) for role in assign_roles(reuse, given))


@pytest.mark.parametrize(
    ("reuse", "wanted"),
    [
        (AttentionPlan(), "SSSSSSSS"),
        (AttentionPlan(index_topk_freq=1), "SSSSSSSS"),
        (AttentionPlan(index_topk_freq=4), "S000S444"),
        (AttentionPlan(index_topk_freq=4, index_skip_topk_offset=3), "SSS222S6"),
        (AttentionPlan(index_topk_freq=4, index_skip_topk_offset=0), "S00S333S"),
        (AttentionPlan(index_topk_freq=100), "S0000000"),
        (AttentionPlan(index_topk_pattern="FSSFSSSF"), "S00S333S"),
        (AttentionPlan(anchors=(0, 5)), "S0000S55"),
        (AttentionPlan(anchors=(3,)), "S00S3333"),
        (AttentionPlan(index_topk_freq=4, dense_first=2), "ddS2S444"),
        (AttentionPlan(index_topk_freq=4, exclude=(0, 4)), "dS11d111"),
        (AttentionPlan(index_topk_freq=2, include=(1, 2, 7)), "dSSdddd2"),
        (AttentionPlan(dense_first=8), "dddddddd"),
    ],
)
def test_words_of_the_plan(reuse: AttentionPlan, wanted: str) -> None:
    assert spelled(reuse, layers(8)) == wanted


def test_the_first_sparse_layer_selects_and_says_so() -> None:
    roles = assign_roles(AttentionPlan(index_topk_pattern="FSSS", dense_first=1), layers(4))
    assert [role.kind for role in roles] == ["dense", "anchor", "follower", "follower"]
    assert roles[1].note == "the first sparse layer selects"
    assert roles[2].anchor == roles[3].anchor == 1


def test_geometries_do_not_share() -> None:
    """Sliding and full layers alternate, as in Gemma."""
    given = layers(8, *((i, "window") for i in (1, 3, 5, 7)))
    assert spelled(AttentionPlan(index_topk_freq=4), given) == "SS01S141"
    roles = assign_roles(AttentionPlan(index_topk_freq=4), given)
    for role, layer in zip(roles, given):
        if role.anchor is not None:
            assert given[role.anchor].geometry == layer.geometry and roles[role.anchor].kind == "anchor"
    assert "no earlier selection" in roles[1].note


def test_a_refused_layer_stays_dense() -> None:
    given = layers(4)
    given[1] = dataclasses.replace(given[1], refusal="not rewritten")
    roles = assign_roles(AttentionPlan(index_topk_freq=4), given)
    assert [role.kind for role in roles] == ["anchor", "dense", "follower", "follower"]
    assert roles[1].note == "not rewritten"


@pytest.mark.parametrize(
    ("reuse", "text"),
    [
        (AttentionPlan(anchors=(0, 9)), r"anchors: layer 9 does not exist, the model has attention layers 0\.\.7"),
        (AttentionPlan(include=(8,)), "include: layer 8 does not exist"),
        (AttentionPlan(exclude=(30,)), "exclude: layer 30 does not exist"),
        (AttentionPlan(index_topk_pattern="FSSF"), "4 letters for 8 attention layers: layer 4 has no letter"),
        (AttentionPlan(index_topk_pattern="F" * 9), "9 letters for 8 attention layers: layer 8 does not exist"),
        (AttentionPlan(anchors=(0, 2), exclude=(2,)), r"anchors: layer 2 \(layers\.2\) cannot select, it stays dense: excluded"),
        (AttentionPlan(anchors=(1,), dense_first=2), "layer 1 .* among the first 2 layers"),
    ],
)
def test_bad_plans_name_the_layer(reuse: AttentionPlan, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        assign_roles(reuse, layers(8))
