"""Experts that a row does without under a plan: the rules, and which code applies them.

Dropping the lowest m experts of a row below a calibrated share of gate mass is the rule of "Accelerate Speculative Decoding with
Sparse Computation in Verification" (arXiv 2512.21911), which generalises Lu et al. (2402.14800); one set of experts for all draft
rows, and rerouting into it, is that of MoE-Spec (2602.16052).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.kernels import availability
from spec_compile.kernels.moe import wide_dtype

# Bounds of the kernel: rows whose experts are limited together, choices of a row, experts of a router.
MAX_ROWS, MAX_CHOICES, MAX_EXPERTS = 64, 16, 256


def _ranks(weight: Tensor, routed: Tensor) -> Tensor:
    """Place of each entry in the descending order of its row, ties to the first; entries that are not routed come last."""
    value = weight.masked_fill(~routed, -torch.inf)
    mine, other = value.unsqueeze(-1), value.unsqueeze(-2)
    place = torch.arange(weight.shape[1], device=weight.device)
    before = (other > mine) | ((other == mine) & (place < place.unsqueeze(-1)))
    return before.sum(-1)


def _places(order: Tensor) -> Tensor:
    """Inverse of a permutation along the last axis."""
    return torch.zeros_like(order).scatter(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def _best_first(value: Tensor, group: Tensor) -> Tensor:
    """Order by descending ``group``, then descending ``value``, then place."""
    by_value = value.sort(dim=-1, descending=True, stable=True).indices
    return by_value.gather(-1, group.int().gather(-1, by_value).sort(dim=-1, descending=True, stable=True).indices)


def _kept_by_row(weight: Tensor, routed: Tensor, rank: Tensor, top_k: int, skip: int, beta: float, ratio: float) -> Tensor:
    """What the rules for single rows keep of the choices as the model made them."""
    keep = routed
    if top_k > 0:
        keep = keep & (rank < top_k)
    if skip > 0:
        low = routed & (rank >= routed.sum(-1, keepdim=True) - skip)
        share = (weight * low).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        keep = keep & ~(low & (share < beta))
    if ratio > 0:
        keep = keep & ~(weight < ratio * weight.amax(-1, keepdim=True))
    return keep | (routed & (rank == 0))


def _budget_set(choice: Tensor, weight: Tensor, keep: Tensor, rank: Tensor, experts: int, budget: int) -> Tensor:
    """bool ``[E]``: top choices of all rows, and up to ``budget`` in all those with the largest sums of kept weights."""
    # Compared with every expert: adding by index is not deterministic on a GPU.
    names = torch.where(keep, choice, -1).flatten().unsqueeze(-1) == torch.arange(experts, device=choice.device)
    votes = (names * weight.clamp(min=0).flatten().unsqueeze(-1)).sum(0)
    chosen, forced = names.any(0), (names & (rank == 0).flatten().unsqueeze(-1)).any(0)
    order = _best_first(votes, 2 * forced.int() + chosen.int())
    return (chosen & (_places(order) < budget)) | forced


def _contest(logits: Tensor, bias: Tensor | None, score: str) -> tuple[Tensor, Tensor]:
    """``[N, E]``: what a router of this kind weighs experts by, and what it chooses them by."""
    value = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    return value, logits if bias is None else value + bias.to(value.dtype)


def moe_limit_reference(
    choice: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None, gate: Tensor, score: str, experts: int,
    top_k: int, skip: int, beta: float, ratio: float, expert_budget: int, substitute: bool, renormalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_limit`. Never looks at data on the host: may be captured."""
    if choice.numel() == 0:
        return choice.clone(), weight.clone()
    routed = (choice >= 0) & (choice < experts)
    given = torch.where(routed, weight.to(wide_dtype(weight.dtype)), 0)
    total = given.sum(-1, keepdim=True)
    # A row without numbers has no say.
    w = torch.where(total == total, given, 0)
    rank = _ranks(w, routed)
    keep = _kept_by_row(w, routed, rank, top_k, min(skip, choice.shape[1] - 1), beta, ratio)
    ids, out = choice, given
    if expert_budget > 0:
        held = _budget_set(choice, w, keep, rank, experts, expert_budget)
        out_of_set = keep & ~held[torch.where(routed, choice, 0)]
        if substitute:
            assert logits is not None
            value, contest = _contest(logits.to(w.dtype), bias, score)
            mine = (
                torch.zeros_like(contest, dtype=torch.int32).scatter_add(-1, torch.where(keep, choice, 0).long(), keep.int()) > 0
            )
            free = held & ~mine
            order = _best_first(contest, free)
            # The dropped entries in the order of their weights take the best of what the set still has for the row.
            turn = (out_of_set.unsqueeze(-2) & (rank.unsqueeze(-2) < rank.unsqueeze(-1))).sum(-1)
            found = order.gather(-1, turn.clamp(max=experts - 1))
            new = out_of_set & (turn < free.sum(-1, keepdim=True))
            before = (value.gather(-1, torch.where(routed, choice, 0).long()) * routed).sum(-1, keepdim=True)
            # A row whose scores all underflow has no sum to share: its substitutes weigh nothing, too.
            scale = torch.where(before == 0, 0, total / before)
            out = torch.where(new, value.gather(-1, found) * scale, out)
            ids = torch.where(new, found.to(choice.dtype), choice)
            out_of_set = out_of_set & ~new
        keep = keep & ~out_of_set
    out = torch.where(keep, out, 0)
    changed = ((routed & ~keep) | (ids != choice)).any(-1, keepdim=True)
    if renormalise:
        left = out.sum(-1, keepdim=True)
        out = torch.where(changed & (left > 0), out * (total / left), out)
    ids = torch.where(keep | ~routed, ids, -1)
    sparse = gate != 0
    return torch.where(sparse, ids, choice), torch.where(sparse & changed & routed, out.to(weight.dtype), weight)


def why_no_limit_kernel(choice: Tensor, weight: Tensor, logits: Tensor | None, experts: int, expert_budget: int) -> str | None:
    """Reason why the kernel cannot apply the rules, or None; looks at (fake) operands, never at data."""
    given = [t for t in (weight, logits) if t is not None]
    if choice.device.type != "cuda" or any(t.device != choice.device for t in given):
        return f"device {choice.device.type}"
    for t in given:
        if t.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {t.dtype}"
    if choice.shape[1] > MAX_CHOICES or experts > MAX_EXPERTS:
        return f"{choice.shape[1]} of {experts} experts are more than {MAX_CHOICES} of {MAX_EXPERTS}"
    if expert_budget > 0 and choice.shape[0] > MAX_ROWS:
        return f"more than {MAX_ROWS} rows share a budget"
    missing = availability.why_no_triton()
    if missing is None and availability.capability(choice.device) < 80:
        missing = "compute capability below 8.0 is not tested"
    return missing


def moe_limit(
    choice: Tensor, weight: Tensor, logits: Tensor | None, bias: Tensor | None, gate: Tensor, score: str, experts: int,
    top_k: int, skip: int, beta: float, ratio: float, expert_budget: int, substitute: bool, renormalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`spec_compile.kernels.library.moe_limit`."""
    run = moe_limit_reference
    if why_no_limit_kernel(choice, weight, logits if substitute else None, experts, expert_budget) is None:
        from spec_compile.kernels.moe_limit_triton import moe_limit_triton

        run = moe_limit_triton
    return run(
        choice, weight, logits, bias, gate, score, experts, top_k, skip, beta, ratio, expert_budget, substitute, renormalise
    )
