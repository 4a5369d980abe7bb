"""Mixture of experts at verify's row counts: the meaning of its two operators, and which code computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu, softmax

from spec_compile.kernels import availability

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
SCORES = ("softmax", "sigmoid")
ORDERS = ("score_first", "topk_first")
# Bounds of the kernels: rows a call, choices in all and of a row, experts of a router.
MAX_ROWS, MAX_PAIRS, MAX_CHOICES, MAX_EXPERTS = 64, 1024, 32, 1024


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gated(gate: Tensor, up: Tensor, activation: str, limit: float, alpha: float) -> Tensor:
    """``[..., I]``, the input of the second product."""
    if activation == "swiglu_oai":
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == "silu":
        return silu(gate) * up
    if activation == "relu":
        return relu(gate) * up
    return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _expert(
    x: Tensor, e: int, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, interleaved: bool, transposed: bool, limit: float, alpha: float, up: Tensor | None,
) -> Tensor:  # fmt: skip
    """One expert on some rows, in x's dtype."""

    def weight(of: Tensor) -> Tensor:
        return (of[e].T if transposed else of[e]).to(x.dtype)

    def bias(of: Tensor | None) -> Tensor | None:
        return None if of is None else of[e].to(x.dtype)

    first = linear(x, weight(gate_up), bias(gate_up_bias))
    if up is not None:
        gate, other = first, linear(x, weight(up))
    elif interleaved:
        gate, other = first[..., 0::2], first[..., 1::2]
    else:
        gate, other = first.chunk(2, -1)
    inner = gated(gate, other, activation, limit, alpha)
    return linear(inner, weight(down), bias(down_bias))


def _weighted_sum(pairs: Tensor, choice: Tensor, weight: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """``pairs`` ``[N, K, H]`` summed over K in order; entries of ``choice`` that name no expert add nothing."""
    wide = wide_dtype(dtype)
    routed = ((choice >= 0) & (choice < experts)).unsqueeze(-1)
    terms = torch.where(routed, pairs.to(wide) * weight.to(wide).unsqueeze(-1), 0)
    out = torch.zeros(pairs.shape[0], pairs.shape[2], dtype=wide, device=pairs.device)
    for k in range(pairs.shape[1]):
        out += terms[:, k]
    return out.to(dtype)


def moe_experts_reference(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_experts`. Never looks at data on the host: may be captured.

    Computes every expert for all rows and keeps what was chosen, so that no more memory is needed than for one expert.
    """
    rows = x.to(wide_dtype(x.dtype))
    pairs = rows.new_zeros(*choice.shape, down.shape[2] if transposed else down.shape[1])
    for e in range(gate_up.shape[0]):
        found = _expert(rows, e, gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha, up)
        pairs = torch.where((choice == e).unsqueeze(-1), found.unsqueeze(1), pairs)
    return _weighted_sum(pairs, choice, weight, gate_up.shape[0], x.dtype)


def moe_experts_grouped(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_experts`; for CPU: reads data on the host.

    One pass over the experts that rows chose, each weight being read once and none copied. Products are rounded to x's dtype.
    """
    order = choice.flatten().argsort(stable=True)
    ids, counts = choice.flatten()[order].unique_consecutive(return_counts=True)
    rows = x[order // choice.shape[1]].split(counts.tolist())
    found = [
        _expert(part, e, gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha, up)
        if 0 <= e < gate_up.shape[0]
        else part
        for e, part in zip(ids.tolist(), rows)
    ]
    pairs = x.new_empty(choice.numel(), x.shape[1])
    if found:
        pairs[order] = torch.cat(found)
    return _weighted_sum(pairs.view(*choice.shape, x.shape[1]), choice, weight, gate_up.shape[0], x.dtype)


def _best(score: Tensor, count: int) -> Tensor:
    """Places of the ``count`` largest in descending order, ties going to the lowest place; NaN is above all, as in topk."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def moe_route_reference(
    logits: Tensor, bias: Tensor | None, score: str, k: int, renormalise: bool, epsilon: float, scale: float, groups: int,
    kept_groups: int, order: str, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_route`."""

    def scored(x: Tensor) -> Tensor:
        return softmax(x, -1) if score == "softmax" else torch.sigmoid(x)

    logits = logits.to(wide_dtype(logits.dtype))
    value = scored(logits) if order == "score_first" else logits
    contest = value if bias is None else value + bias.to(value.dtype)
    if groups > 1:
        grouped = contest.unflatten(-1, (groups, -1))
        sums = grouped.gather(-1, _best(grouped, 2)).sum(-1)
        kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, _best(sums, kept_groups), True)
        contest = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    choice = _best(contest, k)
    weight = value.gather(-1, choice)
    if order == "topk_first":
        weight = scored(weight)
    if renormalise:
        weight = weight / (weight.sum(-1, keepdim=True) + epsilon)
    return choice.contiguous(), (weight * scale).to(dtype or weight.dtype)


def _why_no_kernel(x: Tensor) -> str | None:
    if x.device.type != "cuda":
        return f"device {x.device.type}"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype}"
    missing = availability.why_no_triton()
    if missing is None and availability.capability(x.device) < 80:
        missing = "compute capability below 8.0 is not tested"
    return missing


def why_no_experts_kernel(
    x: Tensor, choice: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, up: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Reason why the kernels cannot compute these experts, or None; looks at (fake) operands, never at data or addresses."""
    given = [t for t in (choice, gate_up, down, gate_up_bias, down_bias, up) if t is not None]
    if any(t.device != x.device for t in given):
        return "operands on several devices"
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        return f"dtypes {x.dtype}, {gate_up.dtype} and {down.dtype}"
    if gate_up.stride(2) != 1 or down.stride(2) != 1:
        return "rows of the weights are not contiguous"
    if up is not None and up.stride() != gate_up.stride():
        return f"the weights of gate and up have different strides, {tuple(gate_up.stride())} and {tuple(up.stride())}"
    if x.shape[0] > MAX_ROWS:
        return f"there are more than {MAX_ROWS} rows"
    if x.shape[0] * choice.shape[1] > MAX_PAIRS:
        return f"rows with {choice.shape[1]} experts each make more than {MAX_PAIRS} pairs"
    return _why_no_kernel(x)


def most_rows(k: int) -> int:
    """Rows of one launch, with ``k`` experts each."""
    return max(1, min(MAX_ROWS, MAX_PAIRS // max(1, k)))


def _whole_apart(gate: Tensor, up: Tensor | None) -> bool:
    """Whether the kernel can step from gate to up: whole elements lie between them, as alignment alone ensures."""
    return up is None or (up.data_ptr() - gate.data_ptr()) % gate.itemsize == 0


def why_no_route_kernel(logits: Tensor, k: int) -> str | None:
    """Reason why the kernel cannot choose experts for these logits, or None; looks at (fake) operands, never at data."""
    if logits.shape[1] > MAX_EXPERTS or k > MAX_CHOICES:
        return f"{k} of {logits.shape[1]} experts are more than {MAX_CHOICES} of {MAX_EXPERTS}"
    return _why_no_kernel(logits)


def moe_experts(
    x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, interleaved: bool, transposed: bool, limit: float = 0.0, alpha: float = 0.0,
    up: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_experts`."""
    rest: tuple[Any, ...] = (gate_up, down, gate_up_bias, down_bias, activation, interleaved, transposed, limit, alpha, up)
    most = most_rows(choice.shape[1])
    why_not = why_no_experts_kernel(x[:most], choice[:most], gate_up, down, gate_up_bias, down_bias, up)
    if why_not is None and _whole_apart(gate_up, up):
        from spec_compile.kernels.moe_experts_triton import moe_experts_triton

        # Loaded programs serve any number of rows; compiled ones leave more than the kernel takes as they were.
        parts = [moe_experts_triton(*part, *rest) for part in zip(x.split(most), choice.split(most), weight.split(most))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    run = moe_experts_grouped if x.device.type == "cpu" else moe_experts_reference
    return run(x, choice, weight, *rest)


def moe_route(
    logits: Tensor, bias: Tensor | None, score: str, k: int, renormalise: bool, epsilon: float, scale: float, groups: int,
    kept_groups: int, order: str, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_route`."""
    run = moe_route_reference
    if why_no_route_kernel(logits, k) is None:
        from spec_compile.kernels.moe_route_triton import moe_route_triton

        run = moe_route_triton
    return run(logits, bias, score, k, renormalise, epsilon, scale, groups, kept_groups, order, dtype)
