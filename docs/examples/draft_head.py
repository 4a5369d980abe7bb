"""Draft with a head on the target's hidden states: ``python draft_head.py MODEL [PROMPT]``.

The head has the shape of EAGLE's (arXiv 2401.15077): a projection of the next token's embedding beside the feature of the token
before it, and one attention over what it has read. Its weights here are random: drafts are bad, tokens are the model's all the
same. Load trained weights into :class:`EagleHead` to make it fast.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import spec_compile as sc


class EagleHead(nn.Module):
    """``head(tokens [1, T], hidden [1, T, H], start, row) -> [1, T, H]``, with K and V by position for each row of the batch."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__()
        self.embed = model.get_input_embeddings()
        size = self.embed.weight.shape[1]
        like = {"device": self.embed.weight.device, "dtype": self.embed.weight.dtype}
        self.join = nn.Linear(2 * size, size, **like)
        self.query, self.key, self.value = (nn.Linear(size, size, **like) for _ in range(3))
        self.slots, self.kept = slots, dict[int, Tensor]()

    def forward(self, tokens: Tensor, hidden: Tensor, start: int, row: int) -> Tensor:
        x = self.join(torch.cat([self.embed(tokens), hidden], -1))[0]
        end = start + len(x)
        if row not in self.kept:
            self.kept[row] = x.new_zeros(2, self.slots, x.shape[1])
        # Written anew from `start` on: rejected drafts need no rollback. Position 0 has no feature before it.
        self.kept[row][:, start:end] = torch.stack([self.key(x), self.value(x)])
        keys, values = self.kept[row][:, 1:end]
        seen = torch.arange(1, end, device=x.device)[None] <= torch.arange(start, end, device=x.device)[:, None]
        return (x + nn.functional.scaled_dot_product_attention(self.query(x), keys, values, attn_mask=seen))[None]


def generate(model: Any, prompts: list[list[int]], new_tokens: int, **more: Any) -> sc.GenerateOutput:
    torch.manual_seed(0)
    head = EagleHead(model, slots=max(map(len, prompts)) + new_tokens + 8)
    drafter = sc.DraftHead(head, model.get_output_embeddings(), max_drafts=5)
    return sc.generate(model, prompts, drafter=drafter, max_new_tokens=new_tokens, **more)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    text = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
    out = generate(target, [tokenizer(text).input_ids], 32)
    print(tokenizer.decode(out.tokens[0]))
    print(out.metrics)
