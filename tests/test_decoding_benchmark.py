"""The parts of the decoding benchmark that can be wrong unnoticed: scripts, scripted outcomes, and what is timed."""

from __future__ import annotations

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
    for tokens in range(0, 2 * (system.WARM + system.TIMED + system.PROFILED), 8):
        watch.mark(tokens)
    watch.close()
    numbers = watch.numbers()
    assert numbers["tokens_per_second"] == pytest.approx(2 * system.TIMED / 4.0)
    assert numbers["tokens_per_step"] == pytest.approx(8)
    assert numbers["step_ms"] == pytest.approx(4000 / (2 * system.TIMED / 8))
    with pytest.raises(RuntimeError, match="ended before"):
        system.Watch(1, cuda=False).numbers()
