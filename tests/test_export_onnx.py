"""ONNX artefacts: standard operators, caches in and out, run by onnxruntime in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytest.importorskip("transformers", minversion="5.17")

import onnx
from export_steps import DRAFTS, MAX_LEN, close, run_elsewhere, run_steps

import spec_compile as sc
from spec_compile import export_onnx
from spec_compile.errors import ArtefactError, ExportError, OptionsError
from spec_compile.models import zoo

PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=32, block_size=16))
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama_sparse.onnx": ("llama", PLAN, {"num_hidden_layers": 1}),
    "gpt_oss.onnx": ("gpt_oss", None, {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def verified(folder: Path) -> dict[str, Any]:
    """Writes every file; the compiled verify of each."""
    found = {}
    for name, (family, plan, fields) in CASES.items():
        model = zoo.build(family, "eager" if family == "gpt_oss" else "sdpa", **fields)
        verify = sc.compile_verify(model, sc.VerifyCache(model, MAX_LEN), DRAFTS, plan, codegen="eager", strict=True)
        sc.export(verify, folder / name, strict=True)
        found[name] = verify
    return found


@pytest.fixture(scope="module")
def expected(verified: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    return {name: run_steps(verify, verify.cache, "sparse" in name) for name, verify in verified.items()}


def test_onnxruntime_alone_in_a_new_process(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    found, shown = run_elsewhere("run_onnx", *(folder / name for name in CASES))
    for name, logits in zip(CASES, found):
        close(logits, expected[name])
    assert shown.count("the cache holds") == 10


@pytest.mark.parametrize("prompt", [1, 17])
def test_load_at_several_pasts(folder: Path, verified: dict[str, Any], prompt: int) -> None:
    for name, verify in verified.items():
        run = sc.load(folder / name)
        verify.reset()
        wanted = run_steps(verify, verify.cache, "sparse" in name, prompt)
        close(run_steps(run, run.cache, "sparse" in name, prompt), wanted)


def test_every_number_of_rows(folder: Path, verified: dict[str, Any]) -> None:
    run, verify = sc.load(folder / "gpt_oss.onnx"), verified["gpt_oss.onnx"]
    verify.reset()
    for rows in range(1, DRAFTS + 2):
        ids = torch.randint(3, zoo.VOCAB, (1, rows), generator=torch.Generator().manual_seed(rows))
        found, wanted = run(ids), verify(ids)
        assert not found.isnan().any() and torch.allclose(found, wanted, atol=1e-5, rtol=1e-5)


def test_file(folder: Path, verified: dict[str, Any]) -> None:
    """Standard operators alone; caches go in and come out; the metadata says what is what."""
    model = onnx.load(folder / "llama_sparse.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")] == [20]
    manifest = sc.load(folder / "llama_sparse.onnx").manifest
    assert [value.name for value in model.graph.input] == [value.name for value in manifest.inputs]
    assert [value.name for value in model.graph.output] == ["logits", "next_keys_0", "next_values_0"]
    shape = {value.name: value for value in model.graph.input}["keys_0"].type.tensor_type.shape
    assert [size.dim_param or size.dim_value for size in shape.dim] == ["batch", 2, MAX_LEN + 64, 16]
    assert not any(b"site-packages" in part.SerializeToString() for part in model.graph.node)


def test_weights_lie_in_the_file_once(folder: Path) -> None:
    model = zoo.build("llama", "sdpa", num_hidden_layers=1, tie_word_embeddings=True, vocab_size=4096)
    model.tie_weights()
    sc.export(model, folder / "tied.onnx", max_len=64, mask="causal", batch=1)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert (folder / "tied.onnx").stat().st_size < weights + model.lm_head.weight.numel() * 2


def test_large_weights_lie_beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_onnx, "_INLINE", 0)
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    sc.export(model, folder / "large.onnx", max_len=64, mask="causal", batch=1)
    assert (folder / "large.onnx.data").stat().st_size > 50_000
    assert sc.load(folder / "large.onnx")(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, zoo.VOCAB)


def test_a_dropped_cache_is_an_error(folder: Path, verified: dict[str, Any], tmp_path: Path) -> None:
    """What the exporter does without a word, a file without a new cache, never passes the check."""
    model = onnx.load(folder / "llama_sparse.onnx")
    del model.graph.output[1]
    onnx.save(model, tmp_path / "a.onnx")
    manifest = sc.load(folder / "llama_sparse.onnx").manifest
    with pytest.raises(ExportError, match="dropped next_keys_0"):
        export_onnx._check_file(onnx, tmp_path / "a.onnx", manifest)


def test_files_that_are_refused(folder: Path, verified: dict[str, Any], tmp_path: Path) -> None:
    whole, path = (folder / "gpt_oss.onnx").read_bytes(), tmp_path / "a.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtefactError, match="no ONNX file, or is cut short"):
        sc.load(path)
    model = onnx.load_from_string(whole)
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(ArtefactError, match=r"not written by spec_compile\.export"):
        sc.load(path)


@pytest.mark.parametrize(
    "arguments, message", [({"opset": 17}, "opset must lie in 20"), ({"flavour": "ops"}, "hold standard operators only")]
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        sc.export(zoo.build("llama", "sdpa"), tmp_path / "a.onnx", max_len=64, **arguments)
    assert not list(tmp_path.iterdir())
