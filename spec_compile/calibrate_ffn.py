"""``ffn_calibrate``: which feed-forward layers skip enough channels to pay, and how far the plan is from the model.

A threshold of "Accelerate Speculative Decoding with Sparse Computation in Verification" (arXiv 2512.21911) saves arithmetic in
every row, but a step reads the union of its rows' channels, which is often all of them. So the union is measured, layer by layer,
in verify steps over text; layers whose union is too large stay exact. What is left is measured against exact steps of the same
compiled function on held-out text, and refused past a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_compile.calibrate import check_numbers, divergence_sum, progress_bar, split_windows, token_windows, vocabulary_size
from spec_compile.errors import OptionsError, QualityError
from spec_compile.kernels.mlp import PAYS_BELOW, watch_channels
from spec_compile.logs import logger
from spec_compile.models.down_weights import stored_as_before
from spec_compile.plan import FfnCalibration, FfnPlan, SparsityPlan


@torch.no_grad()
def ffn_calibrate(
    model: Any,
    texts: Sequence[Any],
    threshold: float = 0.05,
    *,
    tokenizer: Any = None,
    joint: bool = False,
    pays_below: float | None = None,
    draft_len: int = 8,
    window: int = 512,
    held_out: float = 0.25,
    limit_kl: float = 0.05,
    limit_flips: float = 0.05,
    force: bool = False,
    progress: bool = True,
    **options: Any,
) -> FfnPlan:
    """Measure, in verify steps, whether skipping channels below ``threshold`` pays, and what it costs.

    Args:
        model: a transformers causal LM in eval mode.
        texts: strings (with ``tokenizer``), or token ids: lists or 1-D tensors. They are cut into windows.
        threshold: channels with a smaller activation are skipped by a row (the paper's tau).
        tokenizer: called on each string.
        joint: see :class:`~spec_compile.FfnPlan`.
        pays_below: a layer stays exact where a step keeps, on average, at least this share of its channels. Default: where steps
            were measured to be faster, 0.1 on CUDA and on CPU.
        draft_len: drafts a verify step; ``draft_len + 1`` rows share what is read.
        window: tokens of a window, at least ``2 * draft_len + 3``.
        held_out: share of the windows, the last ones, on which the plan is compared with exact steps.
        limit_kl: mean KL divergence of a sparse step from an exact one, in nats, that the plan may have.
        limit_flips: share of positions whose most likely token may change.
        force: return a plan past the limits instead of raising; its ``calibration.forced`` says so.
        progress: show a bar on stderr, where ``rich`` is installed.
        options: of :func:`~spec_compile.compile_verify`, but ``cudagraphs``; by default the rewritten graph is not compiled
            further (``codegen="eager"``).

    Returns:
        A plan with ``threshold="auto"`` and one of ``thresholds`` per layer, 0 where it does not pay; all of them may be 0, and
        the plan is exact then. Unions and divergence are in ``calibration``.

    Raises:
        OptionsError: no feed-forward layer is recognised, too little text, a model in training mode, or bad arguments.
        PlanError: a bad ``threshold``.
        QualityError: the plan is past a limit, or (whatever ``force`` is) its steps have no finite divergence.
    """
    options = {"codegen": "eager", **options}
    if options.get("cudagraphs"):
        raise OptionsError("cudagraphs: channels are counted while a step runs, which a replay does not: leave it out")
    if not isinstance(model, torch.nn.Module):
        raise OptionsError(f"model must be a transformers causal LM, got {type(model).__name__}")
    if model.training:
        raise OptionsError("model is in training mode: call model.eval()")
    if "plan" in options:
        raise OptionsError("plan is what ffn_calibrate makes: give threshold and joint instead")
    check_numbers(None, draft_len, window, held_out, limit_kl, limit_flips, options)
    if pays_below is None:
        pays_below = PAYS_BELOW["cuda" if next(model.parameters()).is_cuda else "cpu"]
    if not isinstance(pays_below, int | float) or isinstance(pays_below, bool) or not 0.0 < pays_below <= 1.0:
        raise OptionsError(f"pays_below must lie in (0, 1], got {pays_below!r}")
    everywhere = FfnPlan(threshold=threshold, joint=joint)
    if everywhere.exact or isinstance(threshold, str):
        raise OptionsError(f"threshold must be a number above 0, got {threshold!r}")
    rows = draft_len + 1
    train, test = split_windows(token_windows(texts, tokenizer, window, vocabulary_size(model)), held_out, 2 * rows + 1)
    # Steps of the first plan turn the weights of every layer, whether it pays or not.
    with stored_as_before(model), progress_bar(progress) as tick:
        first = _steps(model, everywhere, train, draft_len, options, tick, "unions", compare=False)
        unions = tuple(layer.union for layer in first.layers)
        thresholds = tuple(float(threshold) if layer.union < pays_below else 0.0 for layer in first.layers)
        found = FfnCalibration(rows, float(threshold), unions, tuple(layer.kept for layer in first.layers), float(pays_below))
        plan = FfnPlan("auto", thresholds=thresholds, joint=joint, calibration=found)
        if not plan.exact:
            second = _steps(model, plan, test, draft_len, options, tick, "plan", compare=True)
            kl, flips = second.kl / second.positions, second.flipped / second.positions
            if not math.isfinite(kl):
                raise QualityError(
                    f"the KL divergence of sparse steps from exact ones is {kl}, with or without force: the logits of one of "
                    "them are not finite"
                )
            forced = bool(kl > limit_kl or flips > limit_flips)
            found = FfnCalibration(
                rows, float(threshold), unions, found.kept, float(pays_below), second.positions, kl, flips, forced
            )
            plan = FfnPlan("auto", thresholds=thresholds, joint=joint, calibration=found)
    logger.info("calibrated: %s", words(plan))
    if found.forced and not force:
        raise QualityError(
            f"the plan is past its limits (KL {limit_kl:g} nats, {limit_flips:.1%} flips): {words(plan)}. Lower threshold, or "
            "pass force=True"
        )
    return plan


def words(plan: FfnPlan) -> str:
    """A calibrated plan in one line."""
    found, thresholds = plan.calibration, plan.thresholds
    if found is None or thresholds is None:
        return "not calibrated"
    sparse = [union for union, threshold in zip(found.unions, thresholds) if threshold]
    total = len(thresholds)
    mean = sum(found.unions) / total
    text = (
        f"{len(sparse)} of {total} layers skip channels below {found.threshold:g}; {found.rows} rows keep {mean:.1%} of the "
        f"channels, a row {sum(found.kept) / total:.1%}"
    )
    if not sparse:
        return f"{text}: no layer pays (below {found.pays_below:.0%}), the plan is exact"
    return f"{text}; KL {found.kl:.4f} nats, {found.flips:.1%} of {found.held_out} top tokens flip"


@dataclass
class _Layer:
    """Sums over the sparse steps of one layer."""

    channels: int
    kept_sum: float = 0.0
    read_sum: float = 0.0
    calls: int = 0
    # Not rewritten under the plan: nothing was measured.
    exact: bool = False

    @property
    def kept(self) -> float:
        return self.kept_sum / (self.channels * self.calls) if self.calls else 1.0

    @property
    def union(self) -> float:
        return self.read_sum / (self.channels * self.calls) if self.calls else 1.0


@dataclass
class _Measured:
    layers: list[_Layer] = field(default_factory=list)
    kl: float = 0.0
    flipped: int = 0
    positions: int = 0


def _steps(
    model: Any, plan: FfnPlan, windows: list[Tensor], draft_len: int, options: dict[str, Any],
    tick: Callable[[str, int], None], name: str, compare: bool,
) -> _Measured:  # fmt: skip
    """Sparse steps over the second half of every window, each from an exact cache; beside exact ones where ``compare``."""
    from spec_compile.models.cache import VerifyCache
    from spec_compile.verify import compile_verify

    rows, device = draft_len + 1, next(model.parameters()).device
    cache = VerifyCache(model, max(map(len, windows)))
    verify = compile_verify(model, cache, draft_len, SparsityPlan(ffn=plan), **options)
    found = _Measured()
    seen: list[tuple[Tensor, Tensor, int]] = []

    def watch(down: Tensor, kept: Tensor, read: Tensor) -> None:
        seen.append((kept, read, down.shape[1]))

    for ids in windows:
        ids = ids[None].to(device)
        steps = max(1, ids.shape[1] // 2 // rows)
        start = ids.shape[1] - steps * rows
        cache.reset()
        model(input_ids=ids[:, :start], past_key_values=cache, use_cache=True)
        for step in ids[:, start:].split(rows, 1):
            seen.clear()
            with watch_channels(watch):
                sparse = verify(step, sparse=True)
            if not found.layers:
                found.layers = _layers(verify.report())
            calls = iter(seen)
            for layer in found.layers:
                if not layer.exact:
                    kept, read, channels = next(calls)
                    layer.channels, layer.calls = channels, layer.calls + 1
                    layer.kept_sum += float(kept.float().mean())
                    layer.read_sum += float(read)
            # The next step starts from what the exact one leaves behind.
            cache.crop(-rows)
            exact = verify(step, sparse=False)
            if compare:
                exact, sparse = exact.double().log_softmax(-1), sparse.double().log_softmax(-1)
                found.kl += divergence_sum(exact, sparse)
                found.flipped += int((exact.argmax(-1) != sparse.argmax(-1)).sum())
            found.positions += rows
        tick(f"measuring {name}", len(windows))
    return found


def _layers(report: Any) -> list[_Layer]:
    if not report.skipping:
        notes = "; ".join(dict.fromkeys(entry.rule_note or entry.reason for entry in report.mlps))
        raise OptionsError(f"the plan skips channels in no layer: {notes or 'no feed-forward layer was recognised'}")
    return [_Layer(entry.inner, exact=not entry.rule) for entry in report.mlps]
