"""The command line, in process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17")

import spec_compile as sc
from spec_compile import cli
from spec_compile._version import __version__
from spec_compile.errors import SpecCompileError
from spec_compile.models.zoo import FAMILIES


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Write the config of a zoo family, and nothing else, into a folder."""

    def save(name: str) -> Path:
        path = tmp_path / name
        FAMILIES[name].config().save_pretrained(path)
        assert sorted(p.name for p in path.iterdir()) == ["config.json"]
        return path

    return save


def explain(path: Path, *more: str) -> int:
    return cli.main(["explain", str(path), "--max-len", "128", "--draft-len", "4", *more])


def test_explain_prints_the_table(folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(folder("llama")) == 0
    out, err = capsys.readouterr()
    assert "spec_compile  verify  q_len 5" in out
    assert "cache 192" in out
    assert "attention rewritten 2 of 2" in out
    assert "spec-compile:" not in err


def test_json_holds_the_numbers(folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert explain(folder("llama"), "--json", str(target), "--batch", "3") == 0
    data = json.loads(target.read_text(encoding="utf-8"))
    assert set(data) == {
        "kind", "reason", "q_len", "kv_len", "dynamic", "attentions_rewritten", "attentions_refused", "kv_bytes",
        "attentions", "attentions_sparse", "sparse_bytes", "moes", "moes_rewritten", "moes_refused", "moes_limited", "mlps",
        "mlps_rewritten", "mlps_kept", "mlps_refused", "mlps_skipping", "passes", "inputs", "static_inputs", "seconds",
        "notes", "torch",
    }  # fmt: skip
    assert (data["kind"], data["q_len"], data["kv_len"]) == ("verify", 5, 192)
    assert (data["attentions_rewritten"], data["attentions_refused"]) == (2, 0)
    layer = data["attentions"][0]
    assert (layer["heads"], layer["kv_heads"], layer["head_dim"], layer["cache"]) == (4, 2, 16, "static")
    assert data["kv_bytes"] == 2 * 3 * 2 * 192 * (16 + 16) * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "report.json"]
    assert "attention rewritten 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "present", "absent"),
    [
        ("before", "aten.scaled_dot_product", "spec_compile."),
        ("after", "spec_compile.attention_folded_v1", "aten.scaled_dot_product"),
    ],
)
def test_graph(folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str], which: str, present: str, absent: str) -> None:
    assert explain(folder("llama"), "--graph", which) == 0
    out = capsys.readouterr().out
    assert present in out
    assert absent not in out
    assert "attention rewritten" not in out


@pytest.mark.parametrize(("attention", "anchor"), [("sdpa", "sdpa"), ("eager", "softmax"), ("hooks", "marker")])
def test_attention_implementations(folder: Callable[[str], Path], tmp_path: Path, attention: str, anchor: str) -> None:
    target = tmp_path / "report.json"
    assert explain(folder("llama"), "--attention", attention, "--json", str(target)) == 0
    assert {layer["anchor"] for layer in json.loads(target.read_text())["attentions"]} == {anchor}


def test_refusals_are_a_report_not_an_error(folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(folder("deepseek_v3")) == 0
    out = capsys.readouterr().out
    assert "attention rewritten 0 of 2" in out
    assert "MLA latent cache" in out


def test_an_exact_plan_is_taken(folder: Callable[[str], Path], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"attention": {"sink": 2}}')
    assert explain(folder("llama"), "--plan", str(plan)) == 0


def failing(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Error text of a run that fails with exit code 1, in one line and nothing on stdout."""
    assert cli.main(list(argv)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spec-compile: ")
    assert "Traceback" not in err
    return err


def test_bad_model_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such model folder or .gguf file" in failing(capsys, "explain", str(tmp_path / "absent"))
    assert "holds no config.json and 0 GGUF files" in failing(capsys, "explain", str(tmp_path))
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    assert "no such model folder or .gguf file" in failing(capsys, "explain", str(file))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    assert "2 GGUF files" in failing(capsys, "explain", str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"model_type": "no_such_model"}',
        '{"model_type": "t5"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
    ],
)
def test_damaged_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in failing(capsys, "explain", str(tmp_path))


def test_damaged_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF but not really")
    assert str(path) in failing(capsys, "explain", str(path))


def test_attention_that_the_model_lacks(folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = folder("gpt_oss")
    assert "eager" in failing(capsys, "explain", str(path), "--max-len", "64")
    assert explain(path, "--attention", "eager") == 0


def test_json_folder_is_checked_before_any_work(
    folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(args: Any) -> dict[str, Any]:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(cli, "run_explain", never)
    target = tmp_path / "absent" / "report.json"
    assert f"--json {target}: no such folder" in failing(capsys, "explain", str(folder("llama")), "--json", str(target))


def test_json_target_that_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_explain", lambda args: {})
    target = tmp_path / "target"
    target.mkdir()
    assert "--json" in failing(capsys, "explain", "model", "--json", str(target))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        cli.write_json(target, {"a": object()})
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    cli.write_json(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}


def test_json_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run_explain", lambda args: {"a": 1})
    assert cli.main(["explain", "model", "--json", "report.json"]) == 0
    assert json.loads(Path("report.json").read_text()) == {"a": 1}


def test_json_has_the_usual_permissions(tmp_path: Path) -> None:
    plain, target = tmp_path / "plain.json", tmp_path / "report.json"
    plain.write_text("{}")
    cli.write_json(target, {})
    assert os.stat(target).st_mode == os.stat(plain).st_mode


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ('{"attention": {"bugdet": 1}}', "plan.attention: unknown key 'bugdet'"),
        ('{"ffn": {"threshold": "auto"}}', 'plan.ffn.threshold: "auto" needs text to measure'),
        ('{"ffn": {"threshold": 0.1, "include": [9]}}', "plan.ffn.include: layer 9 does not exist"),
        ('{"attention": {"budget": 64, "anchors": [9]}}', "plan.attention.anchors: layer 9 does not exist"),
    ],
)
def test_bad_plans(
    folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, text: str
) -> None:
    plan = tmp_path / "plan.json"
    if content is not None:
        plan.write_text(content)
    assert text in failing(capsys, "explain", str(folder("llama")), "--max-len", "64", "--plan", str(plan))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--draft-len", "32"), "draft_len must lie in 0..31"),
        (("--draft-len", "-1"), "draft_len must lie in 0..31"),
        (("--max-len", "0"), "max_len must be at least 1"),
        (("--batch", "0"), "batch must be at least 1"),
    ],
)
def test_bad_numbers(
    folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str], flags: tuple[str, str], text: str
) -> None:
    assert text in failing(capsys, "explain", str(folder("llama")), *flags)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["explain"],
        ["explain", "m", "--draft-len", "many"],
        ["explain", "m", "--graph", "middle"],
        ["demo", "--nope"],
    ],
)
def test_usage_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: spec-compile" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, text in (
        (["--version"], f"spec-compile {__version__}"),
        (["--help"], "explain"),
        (["explain", "--help"], "--json FILE"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_explain", interrupt)
    assert cli.main(["explain", "model"]) == 130
    assert capsys.readouterr().err.strip() == "spec-compile: interrupted"


def test_errors_exit_with_1_and_bugs_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours(args: Any) -> dict[str, Any]:
        raise SpecCompileError("name and remedy")

    def bug(args: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "run_explain", ours)
    assert failing(capsys, "explain", "model") == "spec-compile: name and remedy\n"
    monkeypatch.setattr(cli, "run_explain", bug)
    with pytest.raises(ZeroDivisionError):
        cli.main(["explain", "model"])


def test_demo_without_its_dependencies_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "spec_compile.demo", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'spec-compile[demo]'" in failing(capsys, "demo")


@pytest.mark.parametrize("device", ["cuda:99", "meta", "gpu"])
@pytest.mark.parametrize("command", [("demo",), ("export", "nowhere", "--out", "a.pt2")])
def test_a_device_that_is_not_there(command: tuple[str, ...], device: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert f"--device {device}" in failing(capsys, *command, "--device", device)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of one layer, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("mixture")
    assets = Path(__file__).parents[1] / "benchmarks" / "assets" / "tiny-moe"
    config = AutoConfig.from_pretrained(assets, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / file, path)
    return path


def test_calibrate_saves_a_plan_that_was_measured(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, plan, numbers = tmp_path / "text.py", tmp_path / "plan.json", tmp_path / "numbers.json"
    text.write_text(Path(__file__).read_text(encoding="utf-8")[:2000], encoding="utf-8")
    argv = ["calibrate", str(mixture), "--texts", str(text), "--out", str(plan), "--window", "64", "--draft-len", "3"]
    assert cli.main([*argv, "--ratio", "0.9", "--limit-kl", "0", "--force", "--json", str(numbers)]) == 0
    saved = sc.SparsityPlan.load(plan)
    assert saved.moe is not None and saved.moe.ratio == 0.9 and saved.moe.skip is None
    found = saved.moe.calibration
    assert found is not None and found.forced and found.kl > 0 and 1 <= found.kept < found.chosen == 4
    assert json.loads(numbers.read_text())["moe"]["calibration"]["kl"] == found.kl
    assert f"KL {found.kl:.4f} nats" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--texts", "nowhere.txt"], "--texts nowhere.txt: No such file or directory"),
        (["--out", "nowhere/plan.json"], "--out nowhere/plan.json: no such folder"),
        (["--skip", "4"], "skip must lie in 1..3, a row has 4 experts, got 4"),
        (["--ffn-threshold", "0.1", "--skip", "1"], "--ffn-threshold makes a plan by itself"),
        (["--ffn-threshold", "0"], "threshold must be a number above 0, got 0.0"),
        (["--ffn-threshold", "0.1"], "no feed-forward layer was recognised"),
    ],
)
def test_calibrate_errors_name_the_argument(
    flags: list[str], message: str, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text("x = 1\n" * 400, encoding="utf-8")
    argv = ["calibrate", str(mixture), "--texts", str(text), "--out", str(tmp_path / "plan.json"), "--window", "64"]
    assert message in failing(capsys, *argv, *flags)
    assert not (tmp_path / "plan.json").exists()
