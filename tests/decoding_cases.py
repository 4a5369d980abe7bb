"""Models that never end, prompts that repeat themselves, and transformers' own greedy tokens, for the tests of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spec_compile.models.zoo import VOCAB, build


def endless(name: str = "llama", device: str = "cpu") -> Any:
    model = build(name, "sdpa").to(device)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def repeating(lengths: Sequence[int]) -> list[list[int]]:
    """Repeating texts, so that prompt lookup finds drafts."""
    generator = torch.Generator().manual_seed(1)
    times = -(-max(lengths) // 7)
    return [torch.randint(3, VOCAB, (7,), generator=generator).repeat(times)[:size].tolist() for size in lengths]


def greedy_tokens(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """transformers' own greedy tokens, one prompt at a time."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found
