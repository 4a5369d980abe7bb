"""``generate``: speculative decoding of a batch by our own loop, exact, sparse or audited."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile import _compat
from spec_compile.decode_loop import DecodingLoop
from spec_compile.drafters import Drafter, make_drafter
from spec_compile.drafters_model import AssistantModel
from spec_compile.errors import CacheError, OptionsError
from spec_compile.logs import logger
from spec_compile.metrics import DecodingMetrics
from spec_compile.options import Options
from spec_compile.plan import AuditPlan
from spec_compile.report import RewriteReport
from spec_compile.row_verify import MOST_ROWS, RowVerify
from spec_compile.sampling import Sampler
from spec_compile.stopping import Stopping, Stream, end_tokens

MODES = ("exact", "sparse", "audited")
# Caches made here have a length of a multiple of this, so that generations of about one length share their graphs.
_ROUND = 512


@dataclass(frozen=True)
class GenerateOutput:
    """What :func:`generate` returns.

    Attributes:
        sequences: int64 ``[B, L]`` on the model's device: prompts as given (lists are left-padded), then the new tokens, padded
            on the right.
        tokens: new tokens of each sequence.
        metrics: how it went.
        report: of the compiled verify graph; None where no step ran compiled.
    """

    sequences: Tensor
    tokens: list[list[int]]
    metrics: DecodingMetrics
    report: RewriteReport | None


def generate(
    model: Any,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | None = None,
    drafter: Drafter | str = "prompt_lookup",
    plan: Any = None,
    mode: str = "exact",
    max_new_tokens: int = 256,
    min_new_tokens: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    logits_processor: Any = None,
    seed: int | None = None,
    streamer: Any = None,
    cache: Any = None,
    progress: bool = False,
    cudagraphs: bool | None = None,
    warm_up: bool = False,
    **options: Any,
) -> GenerateOutput:
    """Generate with speculative decoding.

    Greedy tokens are those of the model alone, up to near ties (a step of several rows rounds differently); sampled tokens are
    distributed as the model's. That holds for ``exact`` and ``audited``; ``sparse`` changes tokens.

    Args:
        model: a transformers causal LM in eval mode, with ``sdpa`` or ``eager`` attention.
        input_ids: int64 ``[B, L]``, left-padded where prompts differ in length, or a list of prompts without padding.
        attention_mask: ``[B, L]``, 0 for left padding. Without one, leading pad tokens count as padding (unless the pad token
            also ends texts). Padding never reaches the cache.
        drafter: :class:`~spec_compile.drafters.Drafter`, ``"prompt_lookup"`` or ``"early_exit"``, which is made, and compiled,
            for this call alone: make one ``EarlyExit(model)`` for many.
        plan: sparsity plan, its dict or path; needed by ``sparse`` and ``audited``, ignored by ``exact`` steps.
        mode: ``exact``; ``sparse``: every step by the plan, lossy; ``audited``: sparse steps run ahead, dense steps check them.
        max_new_tokens, min_new_tokens, eos_token_id, stop_strings, tokenizer: when sequences end
            (:class:`~spec_compile.stopping.Stopping`); end tokens default to those of the
            model's generation config; ``[]`` for none.
        pad_token_id: fills the result; default the model's, else its end token, else 0.
        do_sample, temperature, top_k, top_p, logits_processor, seed: :class:`~spec_compile.sampling.Sampler`.
        streamer: transformers streamer, for a batch of 1; audited tokens arrive when they are final.
        cache: :class:`~spec_compile.RowCache` to use, whatever it holds; default a new one.
        progress: show a bar (needs ``rich``).
        cudagraphs: capture steps; default on CUDA devices.
        warm_up: compile and capture the steps of this mode before the prefill, so that no stream stops for a compiler later
            (the first audit, say); later calls over the same ``cache`` find them ready.
        options: further backend options (``codegen``, ``lowering``, ``strict``, ...).

    Returns:
        :class:`GenerateOutput`. After a KeyboardInterrupt it holds what was final until then, and says so in its metrics.

    Raises:
        OptionsError, PlanError, CacheError: arguments that do not fit.
    """
    _compat.check_installed("torch")
    _compat.check_installed("transformers")
    if mode not in MODES:
        raise OptionsError(f"mode must be one of {MODES}, got {mode!r}")
    if getattr(model, "training", False):
        raise OptionsError("generate needs a model in eval mode: call model.eval()")
    device = model.get_input_embeddings().weight.device
    capture = device.type == "cuda" if cudagraphs is None else cudagraphs
    settings = Options.parse({**options, "plan": plan, "cudagraphs": capture})
    if mode == "exact":
        # Steps without a selection in them; the plan has no say.
        settings = Options.parse({**options, "cudagraphs": capture})
    elif settings.plan.exact:
        raise OptionsError(
            f"mode={mode!r} needs a plan that is not exact: plan=SparsityPlan(attention=AttentionPlan(budget=...))"
        )
    ends = _default(model, "eos_token_id") if eos_token_id is None else eos_token_id
    prompts, padded, pad = _prompts(input_ids, attention_mask, pad_token_id, ends, model)
    lengths = [len(prompt) for prompt in prompts]
    stopping = Stopping(lengths, max_new_tokens, min_new_tokens, ends, stop_strings, tokenizer)
    stream = Stream(streamer, len(prompts))
    sampler = Sampler(do_sample, temperature, top_k, top_p, logits_processor, seed, device)
    if min_new_tokens:
        sampler.forbid_end_before(stopping.end_tokens, [length + min_new_tokens for length in lengths])
    chosen = make_drafter(drafter, model, codegen=settings.codegen, lowering=settings.lowering, cudagraphs=settings.cudagraphs)
    if isinstance(chosen, AssistantModel):
        chosen.vocabulary = getattr(model.get_output_embeddings(), "out_features", None)
    metrics = DecodingMetrics(mode)
    _check_positions(model, max(lengths) + max_new_tokens)
    given_cache = cache
    cache = _cache(model, cache, len(prompts), max(lengths) + max_new_tokens)
    sizes = [chosen.max_drafts + 1]
    if mode == "audited":
        window = (settings.plan.audit or AuditPlan()).window
        sizes.append(min(MOST_ROWS, window + chosen.max_drafts + 1))
    verify = RowVerify(model, cache, settings, sizes, keep_hidden=getattr(chosen, "needs_hidden", False))
    if warm_up:
        audits = [(sizes[0], False), (sizes[-1], False)] if mode == "audited" else []
        verify.warm_up([(sizes[0], mode != "exact"), *audits])
    with _bar(progress, len(prompts) * max_new_tokens) as told:
        parts = (verify, chosen, sampler, stopping, stream, metrics, prompts, settings.plan, told)
        loop = DecodingLoop(*parts)
        if mode == "audited":
            from spec_compile.audit import AuditedLoop

            loop = AuditedLoop(*parts)
        stream.prompt(padded)
        try:
            with verify.steps_in_a_row():
                loop.run()
        finally:
            if cache is not given_cache:
                # Captured steps know their cache: let nothing keep its memory.
                cache.captured.clear()
    new = [row[length : length + request.new_tokens] for row, length, request in zip(loop.tokens, lengths, metrics.requests)]
    width = max(map(len, new), default=0)
    tail = torch.tensor([[*row, *[pad] * (width - len(row))] for row in new], dtype=torch.int64).reshape(len(new), width)
    sequences = torch.cat([padded.to(device), tail.to(device)], 1)
    return GenerateOutput(sequences, new, metrics, verify.report())


def _default(model: Any, name: str) -> Any:
    """A setting of the model's generation config; of its config where it has no other."""
    config = getattr(model, "generation_config", None)
    return getattr(model.config if config is None else config, name, None)


def _prompts(
    input_ids: Any, attention_mask: Any, pad_token_id: int | None, ends: Any, model: Any
) -> tuple[list[list[int]], Tensor, int]:
    """Prompts without padding, the padded tensor, and the pad token.

    Raises:
        OptionsError: an empty prompt, a wrong shape, or padding that is not on the left.
    """
    found = end_tokens(ends)
    given = _default(model, "pad_token_id") if pad_token_id is None else pad_token_id
    pad = given if given is not None else found[0] if found else 0
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise OptionsError(
                f"input_ids must be int64 [B, L] or a list of prompts, got {input_ids.dtype} {list(input_ids.shape)}"
            )
        padded = input_ids.long()
        rows = padded.tolist()
        if attention_mask is not None:
            if tuple(attention_mask.shape) != tuple(input_ids.shape):
                raise OptionsError(
                    f"attention_mask must be [B, L] = {list(input_ids.shape)} like input_ids, got {list(attention_mask.shape)}"
                )
            masks = attention_mask.long().tolist()
        else:
            hidden = given is not None and given not in found
            starts = [next((i for i, token in enumerate(row) if token != pad), len(row)) if hidden else 0 for row in rows]
            masks = [[0] * start + [1] * (len(row) - start) for row, start in zip(rows, starts)]
        for place, mask in enumerate(masks):
            if sorted(mask) != mask or set(mask) - {0, 1}:
                raise OptionsError(
                    f"attention_mask row {place}: padding must be on the left (zeros, then ones): tokenizer.padding_side='left'"
                )
        prompts = [row[len(row) - sum(mask) :] for row, mask in zip(rows, masks)]
    else:
        if attention_mask is not None:
            raise OptionsError("attention_mask goes with a tensor of input_ids; a list of prompts has no padding")
        prompts = [[int(token) for token in prompt] for prompt in input_ids]
        width = max(map(len, prompts), default=0)
        padded = torch.tensor([[*[pad] * (width - len(row)), *row] for row in prompts], dtype=torch.int64)
    if not prompts or not all(prompts):
        raise OptionsError("every prompt needs a token: give at least the model's first one (bos_token_id)")
    return prompts, padded, pad


def _check_positions(model: Any, longest: int) -> None:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return
    if getattr(config, "rope_parameters", None) is None and getattr(config, "rope_theta", None) is None:
        raise OptionsError(
            f"prompt and new tokens reach {longest} tokens, {type(model).__name__} has {limit} positions: lower max_new_tokens"
        )
    logger.warning("prompt and max_new_tokens reach %d tokens; the model was made for %d positions", longest, limit)


def _cache(model: Any, cache: Any, batch: int, longest: int) -> Any:
    from spec_compile.models.row_cache import RowCache

    if cache is None:
        return RowCache(model, -(-longest // _ROUND) * _ROUND, batch)
    if not isinstance(cache, RowCache):
        raise CacheError(f"generate needs a RowCache(model, max_len=..., batch={batch}), got {type(cache).__name__}")
    if cache.batch != batch:
        raise CacheError(
            f"the cache was made for batch {cache.batch}, there are {batch} prompts: RowCache(model, ..., batch={batch})"
        )
    if cache.max_len < longest:
        raise CacheError(
            f"the cache is too short: max_len is {cache.max_len}, prompt and new tokens reach {longest}: "
            f"RowCache(model, max_len={longest})"
        )
    cache.reset()
    return cache


@contextlib.contextmanager
def _bar(progress: bool, total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar over new tokens, told how many arrived."""
    if not progress:
        yield None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        raise OptionsError("progress=True needs rich: pip install rich") from None

    with Progress(TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda new: bar.advance(task, new)
