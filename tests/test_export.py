"""``export`` and ``load``: .pt2 and AOTInductor artefacts against the compiled verify, each loaded in a process of its own."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from export_steps import DRAFTS, MAX_LEN, close, run_elsewhere, run_steps

import spec_compile as sc
from spec_compile import cli
from spec_compile.errors import ArtefactError, CacheError, ExportError, OptionsError
from spec_compile.export_load import _runs_on
from spec_compile.exporter import _check_loadable
from spec_compile.manifest import NAME, read_manifest
from spec_compile.models import zoo
from spec_compile.passes.lower_attention import LowerAttention
from spec_compile.passes.nodes import specialize

EXPERTS = "spec_compile.moe_experts_v1"
PLAN = sc.SparsityPlan(attention=sc.AttentionPlan(budget=32, block_size=16, index_topk_freq=2))
BOTH = sc.SparsityPlan(attention=PLAN.attention, moe=sc.MoePlan(expert_budget=2))
# Artefacts by family, plan and arguments. Those named sparse switch between sparse and exact steps.
CASES: dict[tuple[str, Any], dict[str, dict[str, Any]]] = {
    ("gemma2", None): {"gemma2.pt2": {"mask": "causal"}},
    ("qwen3_moe", BOTH): {"sparse.pt2": {}, "portable_sparse.pt2": {"flavour": "portable", "batch": 1}},
}
NAMES = ["gemma2.pt2", "sparse.pt2", "portable_sparse.pt2"]


def tied(vocabulary: int) -> Any:
    model = zoo.build("llama", "sdpa", num_hidden_layers=1, tie_word_embeddings=True, vocab_size=vocabulary)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def once_and_a_half(model: Any) -> float:
    """Bytes of a file that holds a tied head once, and half of it to spare."""
    return sum(p.numel() * 4 for p in model.parameters()) + model.lm_head.weight.numel() * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[torch.Tensor]]:
    """Writes every artefact; logits of the compiled verify."""
    found: dict[str, list[torch.Tensor]] = {}
    for (family, plan), artefacts in CASES.items():
        model = zoo.build(family, "eager" if family == "gemma2" else "sdpa")
        verify = sc.compile_verify(model, sc.VerifyCache(model, MAX_LEN), DRAFTS, plan, codegen="eager", strict=True)
        logits = run_steps(verify, verify.cache, plan is not None)
        for name, arguments in artefacts.items():
            sc.export(verify, folder / name, strict=True, **arguments)
            found[name] = logits
    return found


def test_loaded_in_a_new_process(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    found, _ = run_elsewhere("load", *(folder / name for name in NAMES))
    for name, logits in zip(NAMES, found):
        close(logits, expected[name])


def test_portable_where_spec_compile_cannot_be_imported(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    found, shown = run_elsewhere("run_pt2", folder / "portable_sparse.pt2")
    close(found[0], expected["portable_sparse.pt2"])
    assert shown.count("the cache holds") == 5


def test_the_switch_reaches_the_program(expected: dict[str, list[torch.Tensor]]) -> None:
    """The last two steps have the same tokens and position; the first of them is sparse, the second exact."""
    for name in NAMES:
        assert ("sparse" in name) == (float((expected[name][-2] - expected[name][-1]).abs().max()) > 1e-3), name


def test_aot_inductor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The C++ compiler's time is most of this test's.
    monkeypatch.setattr(torch._inductor.config.aot_inductor, "compile_wrapper_opt_level", "O0")
    model = tied(32768)
    verify = sc.compile_verify(model, sc.VerifyCache(model, MAX_LEN), DRAFTS, codegen="eager")
    manifest = sc.export(verify, folder / "verify.aoti.pt2", flavour="portable", mask="causal")
    assert (manifest.format, manifest.operators) == ("aoti", ())
    assert (folder / "verify.aoti.pt2").stat().st_size < once_and_a_half(model)
    wanted = run_steps(verify, verify.cache, sparse=False)
    run = sc.load(folder / "verify.aoti.pt2")
    close(run_steps(run, run.cache, sparse=False), wanted)
    found, shown = run_elsewhere("run_aoti", folder / "verify.aoti.pt2")
    close(found[0], wanted)
    assert shown.count("the cache holds") == 5
    # Compiled code checks no strides: pieces of two sequences must not be read as if they lay together.
    two, ids = sc.load(folder / "verify.aoti.pt2", batch=2), torch.randint(3, zoo.VOCAB, (2, 37))
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.allclose(two.prefill(ids[:, :21]), logits[:, 20], atol=1e-5)
    assert torch.allclose(two(ids[:, 21:30]), logits[:, 21:30], atol=1e-5)
    assert torch.allclose(two(ids.t().contiguous().t()[:, 30:]), logits[:, 30:], atol=1e-5)


def test_packages_that_crash_at_load_are_refused() -> None:
    """Experts' operators in AOTInductor packages for CUDA; each other combination is made."""
    given: dict[str, Any] = {"format": "aoti", "device": "cuda", "operators": ("spec_compile.attention_triton_v1", EXPERTS)}
    with pytest.raises(ExportError, match=f"cannot hold {EXPERTS}: .* pass flavour='portable', or export a .pt2"):
        _check_loadable(SimpleNamespace(**given))  # type: ignore[arg-type]
    for change in ({"format": "pt2"}, {"device": "cpu"}, {"operators": ("spec_compile.attention_triton_v1",)}):
        _check_loadable(SimpleNamespace(**{**given, **change}))  # type: ignore[arg-type]


def test_manifest(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    found = read_manifest(folder / "sparse.pt2")
    assert (found.format, found.flavour, found.device, found.slots) == ("pt2", "ops", "cpu", MAX_LEN + 64)
    assert (found.rows, found.batch, found.model, found.sparse) == ((1, 16), (1, 64), "Qwen3MoeForCausalLM", True)
    assert found.versions["torch"] == torch.__version__ and found.plan == json.loads(json.dumps(BOTH.to_dict()))
    needed = {"attention_gathered_v1", "block_summary_v1_", "moe_experts_v1", "moe_limit_v1"}
    assert {f"spec_compile.{name}" for name in needed} <= set(found.operators)
    names = [value.name for value in found.inputs]
    assert names[:4] == ["input_ids", "position", "position_ids", "attention_mask"]
    keys = found.inputs[names.index("keys_0")]
    assert (keys.shape, keys.dtype, keys.written) == (("batch", 2, MAX_LEN + 64, 16), "float32", True)
    assert found.outputs[0].shape == ("batch", "rows", zoo.VOCAB)
    portable = read_manifest(folder / "portable_sparse.pt2")
    assert portable.operators == () and not any(value.role in ("summary", "valid") for value in portable.inputs)


def test_weights_once_and_no_cache_in_the_file(folder: Path) -> None:
    model = tied(4096)
    sc.export(model, folder / "tied.pt2", max_len=60_000, batch=1, mask="causal")
    assert (folder / "tied.pt2").stat().st_size < once_and_a_half(model)
    with zipfile.ZipFile(folder / "tied.pt2") as archive:
        assert not any(b"/site-packages/" in archive.read(name) for name in archive.namelist() if name.endswith(".json"))


def test_batch_padding_and_tree(folder: Path) -> None:
    """Left padding, positions per row and a tree mask of two sequences give what the compiled verify gives."""
    torch.manual_seed(0)
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    verify = sc.compile_verify(model, sc.VerifyCache(model, 64, batch=2), 7, codegen="eager")
    sc.export(verify, folder / "padded.pt2")
    sc.export(verify, folder / "tree.pt2", mask="tree")
    padded, tree = sc.load(folder / "padded.pt2", batch=2), sc.load(folder / "tree.pt2", batch=2)
    ids, mask = torch.randint(3, zoo.VOCAB, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    wanted = verify(ids, attention_mask=mask)
    live = mask.bool().unsqueeze(-1)
    assert torch.allclose((padded(ids, attention_mask=mask) * live), wanted * live, atol=1e-5)
    tree.cache.copy_from(verify.cache)
    drafts, positions = torch.randint(3, zoo.VOCAB, (2, 3)), torch.tensor([[8, 9, 9], [5, 6, 6]])
    sees = torch.zeros(2, 1, 3, verify.cache.capacity, dtype=torch.bool)
    sees[:, :, :, :8] = mask.bool()[:, None, None]
    sees[:, :, 0, 8] = sees[:, :, 1, 8:10] = sees[:, :, 2, 8] = sees[:, :, 2, 10] = True
    wanted = verify(drafts, position_ids=positions, attention_mask=sees)
    assert torch.allclose(tree(drafts, position_ids=positions, attention_mask=sees), wanted, atol=1e-5)
    with pytest.raises(OptionsError, match=r"attention_mask must be bool \[2, 1, 3, 128\]"):
        tree(drafts)
    with pytest.raises(OptionsError, match="prefill needs an export with mask="):
        tree.prefill(drafts)
    with pytest.raises(OptionsError, match="trees need an export with mask='tree'"):
        padded(drafts, attention_mask=sees)


def test_summaries_follow_foreign_writes(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    """A cache that was taken over from elsewhere is summarized anew; one that nobody else wrote is not."""
    run = sc.load(folder / "sparse.pt2")
    run_steps(run, run.cache, sparse=True)
    held = [layer.keys.clone() for layer in run.cache.layers]
    run.cache.crop(-3)
    again = torch.randint(3, zoo.VOCAB, (1, 3), generator=torch.Generator().manual_seed(5))
    wanted = run(again)
    # The newest block stays whole: that one the operator watches by itself.
    older = run.cache.length // PLAN.attention.block_size - 1

    def spoil() -> None:
        for name, tensor in run.cache.summaries.items():
            if name.startswith("spec_summary"):
                tensor[:, :, :older].mul_(-1)

    spoil()
    run.cache.crop(-3)
    assert not torch.equal(run(again), wanted), "nobody wrote K, and its summaries were made anew"
    run.cache.crop(-3)
    for layer, keys in zip(run.cache.layers, held):
        layer.keys.normal_()
        layer.keys.copy_(keys)
    assert torch.equal(run(again), wanted)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"format": "tflite"}, "format must be one of"),
        ({"flavour": "fast"}, "flavour must be"),
        ({"mask": "blob"}, "mask must be one of"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"draft_len": 99}, "draft_len must lie in"),
        ({"max_len": None}, "max_len is needed"),
        ({"path": "verify.bin"}, "path must end in"),
        ({"path": "verify.onnx", "format": "pt2"}, "path must end in .pt2"),
        ({"path": "missing/verify.pt2"}, "no such folder"),
        ({"codegen": "eager"}, "unknown option 'codegen'"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    given = {"path": "verify.pt2", "max_len": 64, **arguments}
    with pytest.raises(OptionsError, match=message):
        sc.export(zoo.build("llama", "sdpa"), tmp_path / given.pop("path"), **given)
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"call model\.eval"):
        sc.export(zoo.build("llama", "sdpa").train(), tmp_path / "a.pt2", max_len=64)
    with pytest.raises(OptionsError, match="needs a transformers causal LM, got Linear"):
        sc.export(torch.nn.Linear(1, 1), tmp_path / "a.pt2", max_len=64)
    loop = zoo.build("qwen3_moe", "sdpa")
    loop.set_experts_implementation("eager")
    with pytest.raises(OptionsError, match="experts run in a Python loop"):
        sc.export(loop, tmp_path / "a.pt2", max_len=64)
    assert not list(tmp_path.iterdir())


def _rewrite(path: Path, change: Any) -> None:
    """Change the manifest inside an archive."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if name.endswith(NAME):
                found = json.loads(data)
                change(found)
                data = json.dumps(found).encode()
            archive.writestr(name, data)


def test_files_that_are_refused(folder: Path, tmp_path: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    whole = (folder / "gemma2.pt2").read_bytes()
    path = tmp_path / "a.pt2"

    def refused(match: str) -> None:
        with pytest.raises(ArtefactError, match=match):
            sc.load(path)

    refused("no such file")
    path.write_bytes(whole[: len(whole) // 2])
    refused("cut short")
    path.write_bytes(b"")
    refused("cut short")
    path.write_bytes(whole[: len(whole) // 3] + bytes(64) + whole[len(whole) // 3 + 64 :])
    refused("damaged")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)
    refused("not written by spec_compile.export")
    changes: list[tuple[Any, str]] = [
        (lambda m: m.update(schema=99), "manifest of schema 99"),
        (lambda m: m.pop("inputs"), "manifest is damaged"),
        (lambda m: m.update(operators=["spec_compile.attention_v77"]), "operators that are not here: spec_compile.attention_v77"),
    ]
    if not torch.cuda.is_available():
        changes.append((lambda m: m.update(device="cuda"), "there is no CUDA device here"))
    for change, message in changes:
        path.write_bytes(whole)
        _rewrite(path, change)
        refused(message)


def test_calls_that_are_refused(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    run = sc.load(folder / "gemma2.pt2")
    with pytest.raises(OptionsError, match=r"17 rows; this artefact was made for 1..16"):
        run(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(OptionsError, match="has batch 2"):
        run(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(OptionsError, match="sparse=True needs an artefact with a plan"):
        run(torch.zeros(1, 3, dtype=torch.int64), sparse=True)
    with pytest.raises(CacheError, match="at most 0"):
        run.cache.crop(-1)
    run.cache.length = MAX_LEN + 60
    with pytest.raises(CacheError, match="the cache is too short"):
        run(torch.zeros(1, 5, dtype=torch.int64))
    run.cache.length = 9
    with pytest.raises(CacheError, match="the cache is too short"):
        run.prefill(torch.zeros(1, MAX_LEN + 60, dtype=torch.int64))
    assert run.cache.length == 9
    with pytest.raises(OptionsError, match="batch must be 1"):
        sc.load(folder / "portable_sparse.pt2", batch=2)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt2").write_text("before")

    def fail(*args: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.export, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        sc.export(zoo.build("llama", "sdpa", num_hidden_layers=1), tmp_path / "a.pt2", max_len=64)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"] and (tmp_path / "a.pt2").read_text() == "before"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spec_compile.loading.load_model", lambda *args, **more: (zoo.build("llama", "sdpa", num_hidden_layers=1), None)
    )
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / "verify.pt2"
    arguments = ["export", "model", "--out", str(out), "--plan", str(tmp_path / "plan.json"), "--max-len", "128"]
    assert cli.main([*arguments, "--draft-len", "4", "--json", str(tmp_path / "numbers.json")]) == 0
    assert "1 attentions rewritten, 0 refused, 1 sparse" in capsys.readouterr().out
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["bytes"] == out.stat().st_size and numbers["manifest"]["rows"] == [1, 5]
    assert sc.load(out)(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, zoo.VOCAB)
    assert cli.main(["export", "model", "--out", str(tmp_path / "verify.bin")]) == 1
    assert "path must end in" in capsys.readouterr().err
    (tmp_path / "folder.pt2").mkdir()
    assert cli.main(["export", "model", "--out", str(tmp_path / "folder.pt2"), "--max-len", "64"]) == 1
    assert "folder.pt2 is a folder: name a file" in capsys.readouterr().err
    assert cli.main([*arguments, "--json", str(tmp_path)]) == 1
    assert "is a folder: name a file" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_exported(tmp_path: Path) -> None:
    zoo.build("llama", "sdpa", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    assert cli.main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "a.pt2"), "--max-len", "64"]) == 0


def test_outputs_that_a_pass_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where the last linear layer becomes part of another call."""
    monkeypatch.setattr("spec_compile.passes.fuse_linears.why_not", lambda *operands: None)
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    verify = sc.compile_verify(model, sc.VerifyCache(model, 64), 4, codegen="eager")
    manifest = sc.export(verify, tmp_path / "a.pt2", batch=1)
    assert "spec_compile.linears_v1" in manifest.operators
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(sc.load(tmp_path / "a.pt2")(ids), verify(ids), atol=1e-5, rtol=1e-5)


def test_a_program_of_fixed_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that computes with the number of rows pins it to the traced one."""
    run = LowerAttention.run

    def pinning(self: LowerAttention, gm: torch.fx.GraphModule, ctx: Any) -> Any:
        specialize(next(node for node in gm.graph.nodes if node.name == "input_ids").meta["val"].shape[1])
        return run(self, gm, ctx)

    monkeypatch.setattr(LowerAttention, "run", pinning)
    with pytest.raises(ExportError, match=r"holds for rows of 5 alone, it was to hold for 1\.\.9"):
        sc.export(zoo.build("llama", "sdpa", num_hidden_layers=1), tmp_path / "a.pt2", max_len=64)
    assert not list(tmp_path.iterdir())


def test_a_program_with_a_bound_on_rows_and_sequences_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel's limit puts it; no range of a size tells of it."""
    run = LowerAttention.run

    def bounding(self: LowerAttention, gm: torch.fx.GraphModule, ctx: Any) -> Any:
        batch, rows = next(node for node in gm.graph.nodes if node.name == "input_ids").meta["val"].shape
        assert batch * rows <= 64
        return run(self, gm, ctx)

    monkeypatch.setattr(LowerAttention, "run", bounding)
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    with pytest.raises(ExportError, match=r"holds where .*<= 64 alone, not for rows of 2 and batch of 64"):
        sc.export(model, tmp_path / "a.pt2", max_len=64)
    sc.export(model, tmp_path / "b.pt2", max_len=64, batch=1)
    assert [made.name for made in tmp_path.iterdir()] == ["b.pt2"]


def test_one_draft(tmp_path: Path) -> None:
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    verify = sc.compile_verify(model, sc.VerifyCache(model, 64), 1, codegen="eager")
    sc.export(verify, tmp_path / "a.pt2", batch=1)
    run = sc.load(tmp_path / "a.pt2")
    for rows in (2, 1, 2, 1):
        ids = torch.full((1, rows), 7)
        torch.testing.assert_close(run(ids), verify(ids), atol=1e-5, rtol=1e-5)
    with pytest.raises(OptionsError, match="3 rows"):
        run(torch.full((1, 3), 7))


def test_a_link_is_replaced(tmp_path: Path) -> None:
    model = zoo.build("llama", "sdpa", num_hidden_layers=1)
    (tmp_path / "kept").mkdir()
    old, link = tmp_path / "kept" / "v1.pt2", tmp_path / "current.pt2"
    old.write_bytes(b"old")
    link.symlink_to(old)
    sc.export(model, link, max_len=64, batch=1)
    assert not link.is_symlink() and sc.load(link).manifest.rows == (1, 9)
    assert old.read_bytes() == b"old" and [path.name for path in (tmp_path / "kept").iterdir()] == ["v1.pt2"]


def test_which_devices_machine_code_runs_on() -> None:
    assert _runs_on("9.0", (9, 0)) and _runs_on("8.0", (8, 9))
    assert not _runs_on("8.9", (8, 0)) and not _runs_on("8.0", (9, 0))
