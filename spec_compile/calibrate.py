"""``moe_calibrate``: thresholds of an expert-skipping plan from a model's own routers, and how far the plan is from the model.

Thresholds are the medians of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv 2512.21911), per
layer. Medians alone say nothing about quality (without a cap on the experts skipped they are known to break models): the plan is
then measured against exact steps of the same compiled function on held-out text, and refused past a limit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import OptionsError, QualityError
from spec_compile.kernels.moe_limit import moe_limit_reference
from spec_compile.logs import logger
from spec_compile.plan import MoeCalibration, MoePlan, SparsityPlan

Routing = tuple[Tensor, Tensor]


@torch.no_grad()
def moe_calibrate(
    model: Any,
    texts: Sequence[Any],
    skip: int | None = 3,
    *,
    tokenizer: Any = None,
    ratio: float | None = None,
    top_k: int | None = None,
    expert_budget: int | None = None,
    substitute: bool = False,
    renormalize: bool | None = None,
    draft_len: int = 8,
    window: int = 512,
    held_out: float = 0.25,
    limit_kl: float = 0.05,
    limit_flips: float = 0.05,
    force: bool = False,
    progress: bool = True,
    **options: Any,
) -> MoePlan:
    """Calibrate and measure a plan for the MoE layers of ``model``.

    Args:
        model: a transformers causal LM in eval mode whose experts use transformers' experts interface.
        texts: strings (with ``tokenizer``), or token ids: lists or 1-D tensors. They are cut into windows.
        skip: experts of a row that may be dropped (the paper's m), or None for no such rule.
        tokenizer: called on each string.
        ratio, top_k, expert_budget, substitute, renormalize: further rules, see :class:`~spec_compile.MoePlan`.
        draft_len: drafts a verify step; a budget is shared by ``draft_len + 1`` rows.
        window: tokens of a window.
        held_out: share of the windows, the last ones, that is measured and not calibrated on.
        limit_kl: mean KL divergence of a sparse step from an exact one, in nats, that the plan may have.
        limit_flips: share of positions whose most likely token may change.
        force: return a plan past the limits instead of raising; its ``calibration.forced`` says so.
        progress: show a bar on stderr, where ``rich`` is installed.
        options: of :func:`~spec_compile.compile_verify`, for the measurement; by default the rewritten graph is not compiled
            further (``codegen="eager"``).

    Returns:
        The plan, with what was measured, and a static top-k of about as many experts for comparison, in ``calibration``.

    Raises:
        OptionsError: no MoE layer, none that the rules can limit, too little text, or bad arguments.
        PlanError: the rules do not fit the model.
        QualityError: the plan is past a limit.
    """
    if not 0.0 < held_out < 1.0:
        raise OptionsError(f"held_out must lie between 0 and 1, got {held_out!r}")
    rows = draft_len + 1
    train, test = _split(_windows(texts, tokenizer, window), held_out, 2 * rows + 1)
    with _bar(progress) as tick:
        routings = _routings(model, train, tick)
        chosen = max(weight.shape[1] for _, weight in routings)
        if skip is not None and not 1 <= skip < min(weight.shape[1] for _, weight in routings):
            raise OptionsError(f"skip must lie in 1..{chosen - 1}, a row has {chosen} experts, got {skip!r}")
        betas = None if skip is None else tuple(_share(weight, skip).median().item() for _, weight in routings)
        plan = MoePlan(skip, betas, ratio, top_k, expert_budget, substitute, renormalize)
        if plan.exact:
            raise OptionsError("nothing to calibrate: give skip, ratio, top_k or expert_budget")
        kept, distinct, distinct_exact = _counts(model, plan, test, rows, tick)
        kl, flips, positions = _divergence(model, plan, test, draft_len, options, tick, "plan")
        found = MoeCalibration(
            sum(map(len, train)), positions, kl, flips, kept, chosen, distinct, distinct_exact,
            forced=bool(kl > limit_kl or flips > limit_flips or math.isnan(kl)),
        )  # fmt: skip
        static = min(chosen - 1, max(1, round(kept)))
        if static and replace(plan, top_k=None, renormalize=None) != MoePlan():
            baseline = MoePlan(top_k=static, renormalize=renormalize)
            kl, flips, _ = _divergence(model, baseline, test, draft_len, options, tick, f"top {static}")
            found = replace(found, baseline_top_k=static, baseline_kl=kl, baseline_flips=flips)
    plan = replace(plan, calibration=found)
    logger.info("calibrated: %s", words(found))
    if found.forced and not force:
        raise QualityError(
            f"the plan is past its limits (KL {limit_kl:g} nats, {limit_flips:.1%} flips): {words(found)}. Skip fewer experts, "
            "raise expert_budget, or pass force=True"
        )
    return plan


def words(found: MoeCalibration) -> str:
    """A calibration in one line."""
    text = (
        f"KL {found.kl:.4f} nats, {found.flips:.1%} of {found.held_out} top tokens flip, a row keeps {found.kept:.2f} of "
        f"{found.chosen} experts, a layer reads {found.distinct:.1f} instead of {found.distinct_exact:.1f} a step"
    )
    if found.baseline_kl is not None and found.baseline_flips is not None:
        text += f"; static top {found.baseline_top_k}: KL {found.baseline_kl:.4f}, {found.baseline_flips:.1%} flip"
    return text


def _windows(texts: Sequence[Any], tokenizer: Any, window: int) -> list[Tensor]:
    if isinstance(texts, str) or not texts:
        raise OptionsError("texts must be a list of strings or of token ids")
    found: list[Tensor] = []
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise OptionsError("texts holds strings: pass the model's tokenizer, or token ids")
            text = tokenizer(text)["input_ids"]
        ids = torch.as_tensor(text)
        if ids.dim() != 1 or ids.dtype.is_floating_point:
            raise OptionsError(f"token ids must be 1-D integers, got {ids.dtype} {list(ids.shape)}")
        found += ids.long().split(window)
    return found


def _split(windows: list[Tensor], held_out: float, least: int) -> tuple[list[Tensor], list[Tensor]]:
    """Windows to calibrate on, and the last ones, to measure on."""
    if len(windows) == 1:
        windows = [*windows[0].chunk(2)]
    windows = [w for w in windows if len(w) >= least]
    count = max(1, round(held_out * len(windows)))
    if len(windows) < 2:
        raise OptionsError(f"too little text: at least two windows of {least} tokens are needed")
    count = min(count, len(windows) - 1)
    return windows[:-count], windows[-count:]


def _experts(model: Any) -> list[Any]:
    found = [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "is_transposed")]
    if not found:
        raise OptionsError(f"{type(model).__name__} has no MoE layer whose experts use transformers' experts interface")
    return found


@contextlib.contextmanager
def _watched(model: Any) -> Iterator[dict[Any, list[Routing]]]:
    """Choices and weights that reach each module of experts, in the order in which modules are first called."""
    seen: dict[Any, list[Routing]] = {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        given = {**dict(zip(names, args)), **kwargs}
        choice, weight = given["top_k_index"], given["top_k_weights"]
        seen.setdefault(module, []).append((choice.detach().cpu(), weight.detach().float().cpu()))

    held = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in _experts(model)]
    before = model.get_experts_implementation()
    # It copies the weights of each row's experts: fit for a step, not for a window.
    copies = "batched_mm" in (before.values() if isinstance(before, dict) else [before])
    try:
        if copies:
            model.set_experts_implementation("grouped_mm")
        yield seen
    finally:
        for hook in held:
            hook.remove()
        if copies:
            model.set_experts_implementation(before)


def _routings(model: Any, windows: list[Tensor], tick: Callable[[str, int], None]) -> list[Routing]:
    """``choice, weight`` ``[tokens, K]`` of each MoE layer, in the order of the forward."""
    device = next(model.parameters()).device
    with _watched(model) as seen:
        for ids in windows:
            model(input_ids=ids[None].to(device), use_cache=False)
            tick("routing", len(windows))
    return [(torch.cat([c for c, _ in parts]), torch.cat([w for _, w in parts])) for parts in seen.values()]


def _share(weight: Tensor, skip: int) -> Tensor:
    """Share of each row's weight that its ``skip`` lowest experts hold."""
    return weight.sort(dim=-1).values[:, :skip].sum(-1) / weight.sum(-1)


def _counts(
    model: Any, plan: MoePlan, windows: list[Tensor], rows: int, tick: Callable[[str, int], None]
) -> tuple[float, float, float]:
    """Mean experts a row keeps, and mean distinct experts a step and layer: under the plan, and exact."""
    gate = torch.ones(1, dtype=torch.int64)
    experts = [module.down_proj.shape[0] for module in _experts(model)]
    kept, distinct, exact = [], [], []
    # Window by window, so that no step spans two texts.
    for ids in windows:
        for layer, (choice, weight) in enumerate(_routings(model, [ids], lambda *_: None)):
            for c, w in zip(choice.split(rows)[: len(ids) // rows], weight.split(rows)):
                beta = 0.0 if plan.betas is None else plan.betas[layer]
                limited, _ = moe_limit_reference(
                    c, w, None, None, gate, "softmax", experts[layer], plan.top_k or 0, plan.skip or 0, beta, plan.ratio or 0.0,
                    plan.expert_budget or 0, False, False,
                )  # fmt: skip
                kept.append((limited >= 0).float().sum(-1).mean().item())
                distinct.append(len(limited[limited >= 0].unique()))
                exact.append(len(c.unique()))
        tick("counting", len(windows))
    return sum(kept) / len(kept), sum(distinct) / len(distinct), sum(exact) / len(exact)


def _divergence(
    model: Any, plan: MoePlan, windows: list[Tensor], draft_len: int, options: dict[str, Any],
    tick: Callable[[str, int], None], name: str,
) -> tuple[float, float, int]:  # fmt: skip
    """Mean KL of sparse steps from exact ones, share of flipped top tokens, positions. Every step starts from an exact cache."""
    from spec_compile.models.cache import VerifyCache
    from spec_compile.verify import compile_verify

    rows, device = draft_len + 1, next(model.parameters()).device
    cache = VerifyCache(model, max(map(len, windows)))
    verify = compile_verify(model, cache, draft_len, SparsityPlan(moe=plan), **{"codegen": "eager", **options})
    divergence, flipped, positions = 0.0, 0, 0
    for ids in windows:
        ids = ids[None].to(device)
        steps = max(1, ids.shape[1] // 2 // rows)
        start = ids.shape[1] - steps * rows
        cache.reset()
        model(input_ids=ids[:, :start], past_key_values=cache, use_cache=True)
        for step in ids[:, start:].split(rows, 1):
            sparse = verify(step, sparse=True).double().log_softmax(-1)
            if not positions and not verify.report().limited:
                notes = "; ".join(dict.fromkeys(entry.rule_note or entry.reason for entry in verify.report().moes))
                raise OptionsError(f"the plan limits no MoE layer: {notes or 'none was recognised'}")
            cache.crop(-rows)
            exact = verify(step, sparse=False).double().log_softmax(-1)
            divergence += float((exact.exp() * (exact - sparse)).sum())
            flipped += int((exact.argmax(-1) != sparse.argmax(-1)).sum())
            positions += rows
        tick(f"measuring {name}", len(windows))
    return divergence / positions, flipped / positions, positions


@contextlib.contextmanager
def _bar(show: bool) -> Iterator[Callable[[str, int], None]]:
    """``tick(stage, total)`` advances the bar of a stage by one."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        show = False
    # Where nobody watches, the bar would still leave empty lines.
    console = Console(stderr=True) if show else None
    if console is None or not console.is_terminal:
        yield lambda stage, total: None
        return
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True) as bar:

        def tick(stage: str, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.advance(tasks[stage])

        yield tick
