"""``moe_calibrate``: thresholds of an expert-skipping plan from a model's own routers, and how far the plan is from the model.

Thresholds are the medians of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv 2512.21911), per
layer. Medians alone say nothing about quality (without a cap on the experts skipped they are known to break models): the plan is
then measured against exact steps of the same compiled function on held-out text, and refused past a limit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_compile.classify import EXPERT_LOOP
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
        texts: strings (with ``tokenizer``), or token ids: lists or 1-D tensors. They are cut into windows; empty ones are
            passed over.
        skip: experts of a row that may be dropped (the paper's m), or None for no such rule.
        tokenizer: called on each string.
        ratio, top_k, expert_budget, substitute, renormalize: further rules, see :class:`~spec_compile.MoePlan`.
        draft_len: drafts a verify step; a budget is shared by ``draft_len + 1`` rows.
        window: tokens of a window, at least ``2 * draft_len + 3``.
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
        OptionsError: no MoE layer, experts that run in transformers' eager loop, none that the rules can limit, a model in
            training mode, too little text, or bad arguments.
        PlanError: a rule has a bad value, or the rules do not fit the model.
        QualityError: the plan is past a limit, or (whatever ``force`` is) its steps have no finite divergence.
    """
    options = {"codegen": "eager", **options}
    _check_model(model)
    check_numbers(skip, draft_len, window, held_out, limit_kl, limit_flips, options)
    rules = MoePlan(None, None, ratio, top_k, expert_budget, substitute, renormalize)
    if skip is None and rules.exact:
        raise OptionsError("nothing to calibrate: give skip, ratio, top_k or expert_budget")
    rows = draft_len + 1
    train, test = split_windows(token_windows(texts, tokenizer, window, vocabulary_size(model)), held_out, 2 * rows + 1)
    with progress_bar(progress) as tick:
        routings = [*_routings(model, train, tick).values()]
        if not routings:
            raise OptionsError(f"{type(model).__name__} calls none of its experts through transformers' experts interface")
        fewest, chosen = (of(weight.shape[1] for _, weight in routings) for of in (min, max))
        if skip is not None and skip >= fewest:
            raise OptionsError(
                f"skip must lie in 1..{fewest - 1}, a row has {fewest} experts, got {skip}"
                if fewest > 1
                else f"skip must be None where a row has one expert, got {skip}"
            )
        plan = rules
        if skip is not None:
            plan = replace(rules, skip=skip, betas=tuple(_share(weight, skip).median().item() for _, weight in routings))
        if plan.exact:
            raise OptionsError(f"nothing to skip: the lowest {skip} experts hold no weight in half of the rows of every layer")
        kept, distinct, distinct_exact = _counts(model, plan, test, rows, tick)
        kl, flips, positions = _divergence(model, plan, test, draft_len, options, tick, "plan")
        if not math.isfinite(kl):
            raise QualityError(
                f"the KL divergence of sparse steps from exact ones is {kl}, with or without force: the logits of one of them "
                "are not finite"
            )
        found = MoeCalibration(
            sum(map(len, train)), positions, kl, flips, kept, chosen, distinct, distinct_exact,
            forced=bool(kl > limit_kl or flips > limit_flips),
        )  # fmt: skip
        static = min(chosen - 1, max(1, round(kept)))
        if static and replace(plan, top_k=None, renormalize=None) != MoePlan():
            baseline = MoePlan(top_k=static, renormalize=renormalize)
            kl, flips, _ = _divergence(model, baseline, test, draft_len, options, tick, f"top {static}")
            found = replace(found, baseline_top_k=static, baseline_kl=kl if math.isfinite(kl) else None, baseline_flips=flips)
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


def _check_model(model: Any) -> None:
    """Whether it can be calibrated at all, before work starts."""
    from spec_compile.verify import has_expert_loop

    if not isinstance(model, torch.nn.Module):
        raise OptionsError(f"model must be a transformers causal LM, got {type(model).__name__}")
    _experts(model)
    if has_expert_loop(model):
        raise OptionsError(EXPERT_LOOP)
    if model.training:
        raise OptionsError("model is in training mode: call model.eval()")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_numbers(
    skip: Any, draft_len: Any, window: Any, held_out: Any, limit_kl: Any, limit_flips: Any, options: dict[str, Any]
) -> None:
    from spec_compile.options import Options
    from spec_compile.verify import check_draft_len

    if "plan" in options:
        raise OptionsError("plan is what moe_calibrate makes: give its rules (skip, ratio, top_k, expert_budget) instead")
    check_draft_len(draft_len, Options.parse(options).max_q_len)
    if skip is not None and not _whole(skip, 1):
        raise OptionsError(f"skip must be None or an integer of at least 1, got {skip!r}")
    least = 2 * draft_len + 3
    if not _whole(window, least):
        raise OptionsError(f"window must be an integer of at least {least} tokens with draft_len={draft_len}, got {window!r}")
    numbers = {"held_out": held_out, "limit_kl": limit_kl, "limit_flips": limit_flips}
    for name, value in numbers.items():
        # NaN fails every comparison.
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise OptionsError(f"{name} must be a number of at least 0, got {value!r}")
    if not 0.0 < held_out < 1.0:
        raise OptionsError(f"held_out must lie between 0 and 1, got {held_out!r}")


def vocabulary_size(model: Any) -> int | None:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def token_windows(texts: Any, tokenizer: Any, window: int, vocabulary: int | None = None) -> list[Tensor]:
    wanted = "texts must be a list of strings or of token ids"
    if isinstance(texts, str | bytes | Tensor | Mapping) or not isinstance(texts, Iterable):
        raise OptionsError(f"{wanted}, got {type(texts).__name__}")
    found: list[Tensor] = []
    for number, text in enumerate(texts):
        if isinstance(text, str):
            if tokenizer is None:
                raise OptionsError("texts holds strings: pass the model's tokenizer, or token ids")
            text = tokenizer(text)["input_ids"]
        try:
            ids = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptionsError(f"{wanted}; texts[{number}] is neither: {error}") from None
        if ids.dim() == 1 and len(ids) == 0:
            continue
        if ids.dim() != 1 or ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise OptionsError(f"token ids must be 1-D integers, got {ids.dtype} {list(ids.shape)} in texts[{number}]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            last = "" if vocabulary is None else vocabulary - 1
            raise OptionsError(f"token ids must lie in 0..{last}, got {low if low < 0 else high} in texts[{number}]")
        found += ids.long().split(window)
    if not found:
        raise OptionsError(f"{wanted}, got none with tokens")
    return found


def split_windows(windows: list[Tensor], held_out: float, least: int) -> tuple[list[Tensor], list[Tensor]]:
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

    before = model.get_experts_implementation()
    # It copies the weights of each row's experts: fit for a step, not for a window.
    copies = "batched_mm" in (before.values() if isinstance(before, dict) else [before])
    with contextlib.ExitStack() as undo:
        for module in _experts(model):
            undo.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        if copies:
            undo.callback(model.set_experts_implementation, before)
            model.set_experts_implementation("grouped_mm")
        yield seen


def _routings(model: Any, windows: list[Tensor], tick: Callable[[str, int], None]) -> dict[Any, Routing]:
    """``choice, weight`` ``[tokens, K]`` by each MoE layer's experts, in the order of the forward."""
    device = next(model.parameters()).device
    with _watched(model) as seen:
        for ids in windows:
            model(input_ids=ids[None].to(device), use_cache=False)
            tick("routing", len(windows))
    return {module: (torch.cat([c for c, _ in parts]), torch.cat([w for _, w in parts])) for module, parts in seen.items()}


def _share(weight: Tensor, skip: int) -> Tensor:
    """Share of each row's weight that its ``skip`` lowest experts hold."""
    return weight.sort(dim=-1).values[:, :skip].sum(-1) / weight.sum(-1)


def _counts(
    model: Any, plan: MoePlan, windows: list[Tensor], rows: int, tick: Callable[[str, int], None]
) -> tuple[float, float, float]:
    """Mean experts a row keeps, and mean distinct experts a step and layer: under the plan, and exact."""
    gate = torch.ones(1, dtype=torch.int64)
    kept, distinct, exact = [], [], []
    # Window by window, so that no step spans two texts.
    for ids in windows:
        for layer, (module, (choice, weight)) in enumerate(_routings(model, [ids], lambda *_: None).items()):
            experts = module.down_proj.shape[0]
            for c, w in zip(choice.split(rows)[: len(ids) // rows], weight.split(rows)):
                beta = 0.0 if plan.betas is None else plan.betas[layer]
                limited, _ = moe_limit_reference(
                    c, w, None, None, gate, "softmax", experts, plan.top_k or 0, plan.skip or 0, beta, plan.ratio or 0.0,
                    plan.expert_budget or 0, False, False,
                )  # fmt: skip
                kept.append((limited >= 0).float().sum(-1).mean().item())
                distinct.append(len(limited[limited >= 0].unique()))
                exact.append(len(c.unique()))
        tick("counting", len(windows))
    return sum(kept) / len(kept), sum(distinct) / len(distinct), sum(exact) / len(exact)


def divergence_sum(exact: Tensor, sparse: Tensor) -> float:
    """Sum of KL divergences from logarithms of probabilities; a token that the exact step excludes (-inf) adds nothing."""
    return float((exact.exp() * (exact - sparse)).masked_fill(exact == -torch.inf, 0.0).sum())


def _divergence(
    model: Any, plan: MoePlan, windows: list[Tensor], draft_len: int, options: dict[str, Any],
    tick: Callable[[str, int], None], name: str,
) -> tuple[float, float, int]:  # fmt: skip
    """Mean KL of sparse steps from exact ones, share of flipped top tokens, positions. Every step starts from an exact cache."""
    from spec_compile.models.cache import VerifyCache
    from spec_compile.verify import compile_verify

    rows, device = draft_len + 1, next(model.parameters()).device
    cache = VerifyCache(model, max(map(len, windows)))
    verify = compile_verify(model, cache, draft_len, SparsityPlan(moe=plan), **options)
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
            divergence += divergence_sum(exact, sparse)
            flipped += int((exact.argmax(-1) != sparse.argmax(-1)).sum())
            positions += rows
        tick(f"measuring {name}", len(windows))
    return divergence / positions, flipped / positions, positions


@contextlib.contextmanager
def progress_bar(show: bool) -> Iterator[Callable[[str, int], None]]:
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
