"""Masks that verify forwards meet."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(start: int, rows: int, kv_len: int) -> Tensor:
    """``[1, 1, T, S]``: row t stands at ``start + t`` and sees everything up to itself."""
    return (torch.arange(kv_len) <= torch.arange(start, start + rows)[:, None])[None, None]


def grid() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    kv_len, rows = 83, 5
    ragged = causal(40, rows, kv_len).repeat(2, 1, 1, 1)
    ragged[0, ..., :21] = False
    window = causal(60, rows, kv_len) & ~causal(40, rows, kv_len)
    random = torch.rand(3, 4, rows, kv_len, generator=generator) < 0.02
    bias = torch.randn(2, 4, rows, kv_len, generator=generator).masked_fill(~ragged, -torch.inf)
    return {
        "causal": causal(40, rows, kv_len),
        "causal to the last slot": causal(kv_len - rows, rows, kv_len),
        "left padding": ragged,
        "sliding window": window,
        "random sparse, per head and batch": random,
        "one row for all": causal(40, 1, kv_len),
        "nothing visible": torch.zeros(2, 1, rows, kv_len, dtype=torch.bool),
        "everything visible": torch.ones(1, 1, rows, kv_len, dtype=torch.bool),
        "additive": torch.zeros(ragged.shape).masked_fill(~ragged, -torch.inf),
        "additive bias per head": bias,
    }
