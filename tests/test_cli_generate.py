"""``spec-compile generate`` and the demo's table, in process."""

from __future__ import annotations

import argparse
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("rich")

import spec_compile as sc
from spec_compile import cli, cli_generate
from spec_compile.loading import load_model

TEXT = "import os\n\ndef first(x):\n    return x\n\ndef second(x):\n    return"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a real tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    path = tmp_path_factory.mktemp("tiny")
    assets = Path(__file__).parents[1] / "benchmarks" / "assets" / "tiny-moe"
    size = len(AutoTokenizer.from_pretrained(assets))
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / file, path)
    return path


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPILE_DISABLE", "1")


def generate(folder: Path, *more: str) -> int:
    return cli.main(["generate", str(folder), "--device", "cpu", "--codegen", "eager", *more])


def greedy(folder: Path, text: str, count: int) -> list[int]:
    import torch

    model, tokenizer = load_model(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def test_a_batch_with_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("class A:\n    pass\n", encoding="utf-8")
    target = tmp_path / "out.json"
    argv = ("--prompt", TEXT, "--prompt-file", str(file), "--max-new-tokens", "12", "--drafts", "4", "--json", str(target))
    assert generate(folder, *argv) == 0
    data = json.loads(target.read_text(encoding="utf-8"))
    assert (data["mode"], data["interrupted"], data["total"]["new_tokens"]) == ("exact", False, 24)
    assert data["requests"][0]["tokens"] == greedy(folder, TEXT, 12)
    assert data["requests"][1]["tokens"] == greedy(folder, "class A:\n    pass\n", 12)
    out = capsys.readouterr().out
    assert "exact:" in out
    assert "length" in out


def test_audited_equals_exact_by_a_drafter_that_runs_a_model(folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    sc.SparsityPlan(attention=sc.AttentionPlan(budget=16, block_size=16, recent=1, min_context=0)).save(plan)
    target = tmp_path / "out.json"
    argv = ("--prompt", TEXT * 6, "--max-new-tokens", "10", "--drafter", str(folder), "--drafts", "3", "--mode", "audited")
    assert generate(folder, *argv, "--plan", str(plan), "--json", str(target)) == 0
    data = json.loads(target.read_text(encoding="utf-8"))
    assert data["requests"][0]["tokens"] == greedy(folder, TEXT * 6, 10)


def test_streaming_and_stop(folder: Path, tmp_path: Path, uncompiled: None, capsys: pytest.CaptureFixture[str]) -> None:
    _, tokenizer = load_model(folder)
    tokens = greedy(folder, TEXT, 12)
    stop = tokenizer.decode(tokens[4:5])
    target = tmp_path / "out.json"
    assert generate(folder, "--prompt", TEXT, "--stream", "--stop", stop, "--json", str(target), "--max-new-tokens", "12") == 0
    data = json.loads(target.read_text(encoding="utf-8"))["requests"][0]
    size = next(n for n in range(1, 13) if stop in tokenizer.decode(tokens[:n]))
    assert (data["finish"], data["tokens"]) == ("stop_string", tokens[:size])
    assert tokenizer.decode(tokens[:size]).strip() in capsys.readouterr().out


def test_interrupted_prints_what_there_is(
    folder: Path, tmp_path: Path, uncompiled: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spec_compile.drafters import PromptLookup

    def stop(self: Any, tokens: Any, kept: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptLookup, "accept", stop)
    target = tmp_path / "out.json"
    assert generate(folder, "--prompt", TEXT, "--json", str(target)) == 130
    data = json.loads(target.read_text(encoding="utf-8"))
    assert data["interrupted"]
    assert data["total"]["new_tokens"] >= 1
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "give a prompt: --prompt TEXT"),
        (["--prompt", "  "], "a prompt is empty"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: No such file"),
        (["--prompt", "x", "--mode", "sparse"], "--mode sparse needs --plan"),
        (["--prompt", "x", "--plan", "nowhere.json"], "nowhere.json"),
        (["--prompt", "x", "--drafter", "medusa"], "neither prompt_lookup nor early_exit nor a model folder"),
        (["--prompt", "x", "--exit-layers", "1"], "--exit-layers goes with --drafter early_exit"),
        (["--prompt", "x", "--drafter", "early_exit", "--branches", "2"], "--branches goes with"),
        (["--prompt", "x", "--drafter", "early_exit", "--exit-layers", "2"], "layers must lie in 1..1"),
        (["--prompt", "x", "--drafts", "0"], "max_drafts must lie in 1..31"),
        (["--prompt", "x", "--sample", "--temperature", "0"], "temperature must be above 0"),
        (["--prompt", "x", "--prompt", "y", "--stream"], "a streamer takes one sequence"),
    ],
)
def test_errors(folder: Path, argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, *argv) == 1
    assert text in capsys.readouterr().err


def test_an_assistant_with_another_vocabulary(folder: Path) -> None:
    model, tokenizer = load_model(folder)

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    args = argparse.Namespace(
        drafter=str(folder), exit_layers=None, branches=1, drafts=None, sample=False, codegen="eager", temperature=1.0, top_k=0,
        top_p=1.0, seed=0,
    )  # fmt: skip
    with pytest.raises(sc.errors.OptionsError, match="vocabulary is not the target's"):
        cli_generate.make_drafter(args, model, tokenizer, lambda path: (model, Words()), model.device)


def test_prompt_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from the pipe"))
    assert cli_generate.read_prompts(argparse.Namespace(prompt=["-"], prompt_file=[])) == ["from the pipe"]


def test_the_demo_reads_its_own_table() -> None:
    from spec_compile.demo import reading

    def method(same: float, speed: float, read: float = 1.0) -> dict[str, Any]:
        return {"tokens_identical": same, "tokens_per_second": speed, "prompts": [{"kv_bytes_per_token": read}]}

    methods = {"greedy": method(1.0, 10.0), "exact": method(1.0, 25.0, 8.0), "sparse": method(0.9, 40.0, 2.0)}
    text = reading({**methods, "audited": method(0.995, 20.0)})
    assert "exact keeps all of HF greedy's tokens at 2.5x its speed" in text
    assert "audited keeps 99.5% of HF greedy's tokens at 2.0x" in text
    assert "sparse reads 25% of exact's K and V on the source and keeps 90% of the tokens" in text
