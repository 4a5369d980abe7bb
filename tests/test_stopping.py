"""Where a generation ends inside an accepted run, and what a streamer gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.errors import OptionsError
from spec_compile.stopping import Stopping, Stream, end_tokens


def test_ends_inside_a_run() -> None:
    stopping = Stopping([3, 2], max_new_tokens=5, eos_token_id=[2, 9])
    assert stopping.cut(0, [1, 1, 1], [4, 2, 5, 6]) == ([4, 2], "eos")
    assert stopping.cut(0, [1, 1, 1], [4, 9, 2]) == ([4, 9], "eos")
    assert stopping.cut(0, [1, 2, 1], [4, 5]) == ([4, 5], None)
    # A row's own prompt counts, not the longest one.
    assert stopping.cut(1, [1, 1, 4, 4, 4], [4, 5, 6]) == ([4, 5], "length")
    assert stopping.cut(0, [1, 1, 1, 4, 4, 4], [4, 5]) == ([4, 5], "length")
    assert stopping.cut(0, [1, 1, 1, 4, 4, 4], [4, 2, 5]) == ([4, 2], "eos")
    assert (stopping.room(0, 7), stopping.room(1, 7)) == (1, 0)


def test_end_tokens_before_the_least_length_do_not_count() -> None:
    stopping = Stopping([1], max_new_tokens=9, min_new_tokens=3, eos_token_id=2)
    assert stopping.cut(0, [7], [2, 5, 2, 6]) == ([2, 5, 2, 6], None)
    assert stopping.cut(0, [7], [2, 5, 5, 2, 6]) == ([2, 5, 5, 2], "eos")
    assert stopping.cut(0, [7, 5, 5, 5], [2, 6]) == ([2], "eos")


@pytest.mark.parametrize(("given", "found"), [(None, ()), (2, (2,)), ([3, 4], (3, 4)), (torch.tensor([5, 6]), (5, 6))])
def test_end_tokens(given: Any, found: tuple[int, ...]) -> None:
    assert end_tokens(given) == found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    return transformers.AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "benchmarks" / "assets" / "tiny-moe")


@pytest.mark.parametrize("string", ["return", "def f", "(x):\n", "urn x"])
def test_stop_strings_end_where_a_run_of_single_tokens_would(tokenizer: Any, string: str) -> None:
    """However a text is cut into runs, it ends at the first token after which the text holds the string."""
    ids = tokenizer("import os\n\ndef f(x):\n    return x + 1\n").input_ids
    first = next(size for size in range(1, len(ids) + 1) if string in tokenizer.decode(ids[:size]))
    stopping = Stopping([0], max_new_tokens=99, stop_strings=["never there", string], tokenizer=tokenizer)
    for run in (1, 2, 3, 7, len(ids)):
        held: list[int] = []
        reason = None
        while reason is None and len(held) < len(ids):
            kept, reason = stopping.cut(0, held, ids[len(held) : len(held) + run])
            held += kept
        assert (held, reason) == (ids[:first], "stop_string")


def test_a_stop_string_may_begin_in_the_prompt(tokenizer: Any) -> None:
    ids = tokenizer("x = 1\nreturn value").input_ids
    stopping = Stopping([len(ids) - 1], max_new_tokens=9, stop_strings=tokenizer.decode(ids[-2:]), tokenizer=tokenizer)
    assert stopping.cut(0, ids[:-1], ids[-1:]) == (ids[-1:], "stop_string")


class Put:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert self.ended == 0
        self.got.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def test_stream() -> None:
    put = Put()
    stream = Stream(put, 1)
    stream.prompt(torch.tensor([[1, 2]]))
    for run in ([3], [4, 5], []):
        stream.run(run)
    stream.end()
    assert (put.got, put.ended) == ([[1, 2], [3], [4, 5]], 1)
    silent = Stream(None, 4)
    silent.prompt(torch.tensor([[1, 2]]))
    silent.run([3])
    silent.end()


def test_text_streamer_takes_runs(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TextStreamer

    ids = tokenizer("def f(x):\n    return x\n").input_ids
    stream = Stream(TextStreamer(tokenizer, skip_prompt=True), 1)
    stream.prompt(torch.tensor([ids]))
    stream.run(ids[:3])
    stream.run(ids[3:])
    stream.end()
    assert capsys.readouterr().out.strip() == tokenizer.decode(ids).strip()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens 4 is above max_new_tokens 3"),
        ({"max_new_tokens": 3, "stop_strings": "x"}, "need the tokenizer"),
        ({"max_new_tokens": 3, "stop_strings": [""], "tokenizer": object()}, "not empty"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        Stopping([1], **arguments)


def test_streams_refuse_batches_and_strangers() -> None:
    with pytest.raises(OptionsError, match="one sequence, the batch has 2"):
        Stream(Put(), 2)
    with pytest.raises(OptionsError, match=r"put\(tokens\) and end\(\), got list"):
        Stream([], 1)
