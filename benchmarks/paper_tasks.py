"""Tasks of paper_tables.py, deterministic, with a score in 0..1 each.

* needle, multi-needle: sentences "The magic number for <city> is <number>." at set depths of a long text, the question at its
  end; score: share of the numbers asked for that the answer holds.
* summary: one sentence about a long text; score: :func:`rouge1` with the first words of the text, its lead.
* maths: questions of GSM8K; score: whether the last number of the answer is right.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Dublin", "Lima", "Tunis", "Riga")
LEAD_WORDS = 50
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue; ``score`` of the text that follows, or None where nothing is scored."""

    task: str
    ids: list[int]
    new_tokens: int
    score: Callable[[str], float] | None = None


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def share_found(answer: str, wanted: list[int]) -> float:
    """Share of the numbers that the answer holds as whole numbers."""
    return sum(number in numbers(answer) for number in wanted) / len(wanted)


def last_number(answer: str, wanted: float) -> float:
    """1 if the last number of the answer is ``wanted``."""
    return float(numbers(answer)[-1:] == [wanted])


def rouge1(found: str, reference: str) -> float:
    """F1 of words in common, each as often as both have it, lower case: ROUGE-1 without stemming."""
    a, b = (Counter(re.findall(r"\w+", text.lower())) for text in (found, reference))
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else 0.0


def chat(tokenizer: Any, content: str, begun: str = "") -> list[int]:
    """The user's message in the chat template, and how the answer begins."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False)
    return tokenizer(text + begun, add_special_tokens=False).input_ids


def with_needles(lines: list[str], needles: list[str], depths: list[float]) -> str:
    """The text with each needle as a line of its own, at its depth in 0..1."""
    for needle, depth in sorted(zip(needles, depths), key=lambda pair: -pair[1]):
        lines = [*lines[: round(depth * len(lines))], needle, *lines[round(depth * len(lines)) :]]
    return "\n".join(lines)


def part_of(tokenizer: Any, text: str, tokens: int, place: int) -> list[str]:
    """Lines of about ``tokens`` tokens, another part for each ``place``."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    start = place * tokens % max(1, len(ids) - tokens)
    return tokenizer.decode(ids[start : start + tokens]).splitlines()[1:]


def prompts(tokenizer: Any, texts: list[str], questions: Path, context: int, new_tokens: int, count: int) -> Iterator[Prompt]:
    """``count`` prompts of each task over contexts of about ``context`` tokens; maths gets four times the new tokens."""
    draw = random.Random(0)
    for place in range(count):
        text = texts[place % len(texts)]
        for task, many in (("needle", 1), ("multi-needle", 3)):
            cities, wanted = draw.sample(CITIES, many), [draw.randrange(10_000, 100_000) for _ in range(many)]
            depths = [(place + 0.5) / count] if many == 1 else [0.15, 0.5, 0.85]
            lines = part_of(tokenizer, text, context, place)
            hidden = [f"The magic number for {city} is {number}." for city, number in zip(cities, wanted)]
            are = "is the magic number" if many == 1 else "are the magic numbers"
            asked = f"What {are} for {' and '.join(cities)}?"
            ids = chat(tokenizer, with_needles(lines, hidden, depths) + f"\n\n{asked}", f"The magic number for {cities[0]} is")
            room = new_tokens if many == 1 else 2 * new_tokens
            yield Prompt(task, ids, room, lambda answer, wanted=wanted: share_found(answer, wanted))
        text = "\n".join(part_of(tokenizer, text, context, place + 1))
        lead = " ".join(text.split()[:LEAD_WORDS])
        ids = chat(tokenizer, f"{text}\n\nSummarize the text above in one sentence.")
        yield Prompt("summary", ids, 2 * new_tokens, lambda answer, lead=lead: rouge1(answer, lead))
        row = json.loads(questions.read_text(encoding="utf-8").splitlines()[place])
        right = numbers(row["answer"].rsplit("####", 1)[1])[0]
        yield Prompt("maths", chat(tokenizer, row["question"]), 4 * new_tokens, lambda answer, n=right: last_number(answer, n))
