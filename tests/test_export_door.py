"""The second door: ``torch.export`` programs run through the same passes, are saved, loaded and exported again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_compile.capture import module_to_aten
from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig
from spec_compile.passes.base import PassContext
from spec_compile.pipeline import run_passes
from spec_compile.report import RewriteReport


class Step(nn.Module):
    """Decoder and cache in one module: export sees the cache as mutated buffers."""

    def __init__(self, repeat: str) -> None:
        super().__init__()
        self.model = Decoder(DecoderConfig(layers=2, repeat=repeat))
        self.cache = DecoderCache(self.model.config, 100)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, self.cache)


def program(repeat: str) -> Any:
    # torch 2.11 cannot export a broadcasting matmul over a dynamic number of rows.
    shapes = None if repeat == "grouped" else ({1: torch.export.Dim("rows", min=2, max=32)},)
    with torch.no_grad():
        return module_to_aten(Step(repeat).eval(), (torch.zeros(1, 9, dtype=torch.int64),), dynamic_shapes=shapes)


def rewrite(exported: Any) -> RewriteReport:
    report = RewriteReport()
    run_passes(exported.graph_module, PassContext(), report)
    return report


@pytest.mark.parametrize("repeat", ["expand", "interleave", "gqa", "grouped"])
def test_rewritten_program_equals_the_original(repeat: str) -> None:
    torch.manual_seed(0)
    original = program(repeat).module()
    exported = program(repeat)
    exported.module().load_state_dict(original.state_dict())
    report = rewrite(exported)
    assert len(report.rewritten) == 2 and not report.refused
    ours = exported.module()
    ours.load_state_dict(original.state_dict())
    with torch.no_grad():
        for rows in (9, 9) if repeat == "grouped" else (9, 4, 2, 17):
            ids = torch.randint(0, 128, (1, rows))
            assert torch.allclose(original(ids), ours(ids), atol=1e-5)


def test_save_load_and_export_again(tmp_path: Path) -> None:
    exported = program("expand")
    rewrite(exported)
    torch.export.save(exported, tmp_path / "verify.pt2")
    loaded = torch.export.load(tmp_path / "verify.pt2")
    ids = torch.randint(0, 128, (1, 5))
    with torch.no_grad():
        expected = exported.module()(ids)
        assert torch.equal(expected, loaded.module()(ids))
        again = torch.export.export(loaded.module(), (ids,), strict=False)
    targets = [str(node.target) for node in again.graph.nodes]
    assert sum("attention_folded_v1" in target for target in targets) == 2
    assert not any("scaled_dot_product_attention" in target for target in targets)
    assert not rewrite(again).rewritten


def test_decomposed_program_is_recognised_too() -> None:
    """After ``run_decompositions({})`` cache writes are functional and SDPA survives."""
    exported = program("expand").run_decompositions({})
    assert any("index_put.default" in str(node.target) for node in exported.graph.nodes)
    assert len(rewrite(exported).rewritten) == 2
