"""The parts of the decoding benchmark that can be wrong unnoticed: scripts, scripted outcomes, and what is timed."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("rich")

from spec_compile.drafters import Draft


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``decoding`` and ``decoding_system``, as they are when run as scripts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import decoding
    import decoding_system

    yield decoding, decoding_system
    for name in ("decoding", "decoding_system"):
        sys.modules.pop(name, None)


def test_scripts_are_right_as_often_as_they_say(benchmarks: Any) -> None:
    decoding, _ = benchmarks
    prompts, rest = [[1, 2, 3], [4, 5]], [list(range(100, 2100)), list(range(3000, 5000))]
    drafter = decoding.scripted(list(zip(prompts, rest)), 0.7)
    right = total = 0
    for place in range(0, 1900, 10):
        drafter.start([[*prompt, *known[:place]] for prompt, known in zip(prompts, rest)])
        draft = drafter.propose(8)
        assert list(draft.counts) == [8, 8]
        for known, tokens in zip(rest, draft.tokens.tolist()):
            right += sum(a == b for a, b in zip(tokens, known[place:]))
            total += 8
    assert abs(right / total - 0.7) < 0.03


def test_prompts_are_forty_and_ragged(benchmarks: Any) -> None:
    from transformers import AutoTokenizer

    decoding, _ = benchmarks
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "benchmarks" / "assets" / "tiny-moe")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    prompts = decoding.greedy_prompts(tokenizer, 40)
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert len({len(prompt) for prompt in prompts}) > 20


def test_scripted_outcomes(benchmarks: Any) -> None:
    _, system = benchmarks
    sampler = type("One", (system.ScriptedSampler,), {"accept": 0.5, "agree": 1.0})()
    draft = Draft(torch.arange(3)[None], [3])
    logits = torch.zeros(1, 4, 10)
    lengths = [len(sampler.verify(logits, draft, [[]]).path[0]) for _ in range(4000)]
    assert abs(sum(lengths) / 4000 - (0.5 + 0.25 + 0.125)) < 0.05
    # A step that runs ahead makes pending tokens, all of which this audit agrees with.
    ahead = sampler.verify(logits, draft, [[]], margins=True)
    pending = len(ahead.kept[0])
    joined = Draft(torch.arange(pending)[None], [pending])
    assert sampler.verify(torch.zeros(1, pending + 1, 10), joined, [[]]).path == [list(range(pending))]
    assert len(sampler.verify(torch.zeros(1, 4, 10), draft, [[]]).kept[0]) <= 4


def test_watch_times_what_lies_between_its_marks(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, system = benchmarks
    clock = iter([10.0, 14.0])
    watch = system.Watch(2, cuda=False)
    monkeypatch.setattr(watch, "now", lambda: next(clock))
    # Three steps in four take a tenth of a second.
    ticks = itertools.accumulate(itertools.cycle([0.1, 0.1, 0.5, 0.1]), initial=10.0)
    next(ticks)
    monkeypatch.setattr(system.time, "perf_counter", lambda: next(ticks))
    made: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self) -> None:
            self.at = len(ran)

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    ran: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    launch = watch.launch(lambda step: ran.extend([step, step]))
    for tokens in range(0, 2 * (system.WARM + system.TIMED + system.TAIL), 8):
        watch.mark(tokens)
        launch(tokens)
    # Two events for each timed launch, between which it ran.
    assert len(made) == 2 * watch.steps and watch.numbers()["device_ms"] == 2.0
    numbers = watch.numbers()
    assert numbers["tokens_per_second"] == pytest.approx(2 * system.TIMED / 4.0)
    assert numbers["tokens_per_step"] == pytest.approx(8)
    assert numbers["median_ms"] == pytest.approx(100)
    assert numbers["step_ms"] == pytest.approx(4000 / (2 * system.TIMED / 8))
    with pytest.raises(RuntimeError, match="ended before"):
        system.Watch(1, cuda=False).numbers()


def test_a_row_from_a_process_of_its_own(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run on a GPU does for each row, with the toy."""
    _, system = benchmarks
    run = subprocess.run
    monkeypatch.setattr(system.subprocess, "run", lambda command, **more: run([*command, "--tiny"], **more))
    args = argparse.Namespace(accept=1.0, agree=0.97, budget=0.125, reuse=4, layers=2, codegen="eager")
    row, line = system._elsewhere(args, "1x64", "exact")
    assert row["tokens_per_step"] == pytest.approx(9, abs=0.5) and row["context"] == 64
    assert line.startswith("1 x 64, exact: ") and "tokens/s" in line
    with pytest.raises(SystemExit, match="1x0, exact"):
        system._elsewhere(args, "1x0", "exact")
