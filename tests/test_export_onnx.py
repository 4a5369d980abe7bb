"""ONNX artefacts: standard operators, caches in and out, run by onnxruntime in a process of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("transformers", minversion="5.17")

import onnx
from export_steps import DRAFTS, close, run_elsewhere, run_steps

import spec_compile as sc
from spec_compile import export_onnx
from spec_compile.errors import ArtefactError, ExportError, OptionsError
from spec_compile.models import zoo
from spec_compile.verify import call_model

# One layer with sinks, experts and a selection of blocks.
FIELDS = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=32, block_size=16))
SLOTS, PASTS = 800, (1, 17, 700)
NAME = "gpt_oss_sparse.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[Any, list[torch.Tensor]]:
    """Writes the file; logits of the compiled verify behind prompts of several lengths, and of every number of rows."""
    model = zoo.build("gpt_oss", "eager", **FIELDS)
    verify = sc.compile_verify(model, sc.VerifyCache(model, SLOTS), DRAFTS, PLAN, codegen="eager", strict=True)
    sc.export(verify, folder / NAME, strict=True)
    found: dict[Any, list[torch.Tensor]] = {}
    for past in PASTS:
        verify.reset()
        found[past] = run_steps(verify, verify.cache, True, past)
    verify.reset()
    found["rows"] = [verify(ids) for ids in every_number_of_rows()]
    return found


def every_number_of_rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, zoo.VOCAB, (1, rows), generator=generator) for rows in range(1, DRAFTS + 2)]


def test_onnxruntime_alone_in_a_new_process(folder: Path, expected: dict[Any, list[torch.Tensor]]) -> None:
    found, shown = run_elsewhere("run_onnx", folder / NAME, prompt=700)
    close(found[0], expected[700])
    assert shown.count("the cache holds") == 5


@pytest.mark.parametrize("past", PASTS)
def test_load_at_several_pasts(folder: Path, expected: dict[Any, list[torch.Tensor]], past: int) -> None:
    run = sc.load(folder / NAME)
    close(run_steps(run, run.cache, True, past), expected[past])


def test_every_number_of_rows(folder: Path, expected: dict[Any, list[torch.Tensor]]) -> None:
    run = sc.load(folder / NAME)
    for ids, wanted in zip(every_number_of_rows(), expected["rows"]):
        found = run(ids)
        assert not found.isnan().any() and torch.allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family, attention", [("gemma2", "eager"), ("mixtral", "sdpa")])
def test_families(folder: Path, family: str, attention: str) -> None:
    """Softcap and a mixture behind several pasts, at every number of rows, against the uncompiled model."""
    fields = {"layer_types": ["sliding_attention"]} if family == "gemma2" else {}
    model = zoo.build(family, attention, num_hidden_layers=1, **fields)
    sc.export(model, folder / f"{family}.onnx", strict=True, batch=1, max_len=SLOTS, draft_len=DRAFTS)
    run, cache, forward = sc.load(folder / f"{family}.onnx"), sc.VerifyCache(model, SLOTS), call_model(model)

    @torch.no_grad()
    def uncompiled(ids: torch.Tensor, sparse: Any = None) -> torch.Tensor:
        return forward(ids, torch.arange(cache.length, cache.length + ids.shape[1])[None], None, cache)

    for past in PASTS:
        run.reset(), cache.reset()
        close(run_steps(run, run.cache, False, past), run_steps(uncompiled, cache, False, past))
        for ids in every_number_of_rows():
            found = run(ids)
            assert not found.isnan().any() and torch.allclose(found, uncompiled(ids), atol=1e-5, rtol=1e-5)
            run.cache.crop(-ids.shape[1]), cache.crop(-ids.shape[1])


def test_sparse_steps_are_sparse(expected: dict[Any, list[torch.Tensor]]) -> None:
    """The last two steps have the same tokens and position; the first of them is sparse, the second exact."""
    assert float((expected[700][-2] - expected[700][-1]).abs().max()) > 1e-3


def test_file(folder: Path, expected: dict[Any, list[torch.Tensor]]) -> None:
    """Standard operators alone; caches go in and come out; the metadata says what is what."""
    model = onnx.load(folder / NAME)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")] == [20]
    manifest = sc.load(folder / NAME).manifest
    assert [value.name for value in model.graph.input] == [value.name for value in manifest.inputs]
    assert [value.name for value in model.graph.output] == ["logits", "next_keys_0", "next_values_0"]
    shape = {value.name: value for value in model.graph.input}["keys_0"].type.tensor_type.shape
    assert [size.dim_param or size.dim_value for size in shape.dim] == ["batch", 2, SLOTS + 64, 16]
    assert not any(b"site-packages" in part.SerializeToString() for part in model.graph.node)


def test_large_weights_lie_beside_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_onnx, "_INLINE", 0)
    model = zoo.build("llama", "sdpa", num_hidden_layers=1, tie_word_embeddings=True, vocab_size=4096)
    model.tie_weights()
    sc.export(model, folder / "tied.onnx", max_len=64, mask="causal", batch=1)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert weights / 2 < (folder / "tied.onnx.data").stat().st_size < weights + model.lm_head.weight.numel() * 2
    assert (folder / "tied.onnx").stat().st_size < weights / 2
    assert sc.load(folder / "tied.onnx")(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 4096)

    # An export that breaks off between its two files leaves no graph over the weights of another.
    replace = os.replace

    def broken(source: Any, to: Any) -> None:
        if str(to).endswith(".onnx"):
            raise OSError("no space left")
        replace(source, to)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space left"):
        sc.export(model, folder / "tied.onnx", max_len=64, mask="causal", batch=1)
    monkeypatch.undo()
    assert not (folder / "tied.onnx").exists()
    sc.export(model, folder / "tied.onnx", max_len=64, mask="causal", batch=1)
    assert not (folder / "tied.onnx.data").exists(), "weights that the small file does not name"


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    model = zoo.build("llama", "sdpa", num_hidden_layers=1).bfloat16()
    with pytest.raises(OptionsError, match="bfloat16"):
        sc.export(model, tmp_path / "a.onnx", max_len=64)


def test_a_dropped_cache_is_an_error(folder: Path, expected: dict[Any, list[torch.Tensor]], tmp_path: Path) -> None:
    """What the exporter does without a word, a file without a new cache, never passes the check."""
    model = onnx.load(folder / NAME)
    del model.graph.output[1]
    onnx.save(model, tmp_path / "a.onnx")
    manifest = sc.load(folder / NAME).manifest
    with pytest.raises(ExportError, match="dropped next_keys_0"):
        export_onnx._check_file(onnx, tmp_path / "a.onnx", manifest)


def test_files_that_are_refused(folder: Path, expected: dict[Any, list[torch.Tensor]], tmp_path: Path) -> None:
    whole, path = (folder / NAME).read_bytes(), tmp_path / "a.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError, match="no ONNX file, or is cut short"):
        sc.load(path)
    model = onnx.load_from_string(whole)
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(ArtefactError, match=r"not written by spec_compile\.export"):
        sc.load(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"opset": 17}, "opset must lie in 20"),
        ({"opset": 25}, "opset must lie in 20..23"),
        ({"flavour": "ops"}, "hold standard operators only"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        sc.export(zoo.build("llama", "sdpa"), tmp_path / "a.onnx", max_len=64, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Of a weight, a node or the manifest; in the file itself, and in the one beside it that holds large weights."""
    for inline in (1 << 30, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export_onnx, "_INLINE", inline)
            model = zoo.build("llama", "sdpa", num_hidden_layers=1)
            path = tmp_path / f"{inline}.onnx"
            sc.export(model, path, max_len=40, draft_len=3, batch=1, mask="causal")
        sc.load(path)
        home = path if inline else path.with_name(path.name + ".data")
        whole = home.read_bytes()
        weight = model.model.layers[0].mlp.down_proj.weight.detach()
        found = [whole.find(given.contiguous().numpy().tobytes()) for given in (weight, weight.t())]
        place = next(at for at in found if at >= 0)
        home.write_bytes(whole[: place + 3] + bytes([whole[place + 3] ^ 0x40]) + whole[place + 4 :])
        with pytest.raises(ArtefactError, match="does not match its checksum"):
            sc.load(path)
        home.write_bytes(whole)
        sc.load(path)
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"max_len": 40', b'"max_len": 41'))
    with pytest.raises(ArtefactError, match="does not match its checksum"):
        sc.load(path)
