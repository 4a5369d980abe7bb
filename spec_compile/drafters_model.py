"""Drafters that run a model: an assistant, the target's own first layers, or a head on the target's hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.drafters import Draft, HostDrafter
from spec_compile.errors import OptionsError
from spec_compile.options import Options
from spec_compile.sampling import Sampler

# Cache lengths are rounded up to this, so that prompts of similar length share compiled graphs.
_CACHE_STEP = 512
# Most rows of a step: after full acceptance the last draft and the token of the target itself are new.
_ROWS = 2
# An audit takes back at most a window of tokens.
_KEPT_FEATURES = 64


class AssistantModel(HostDrafter):
    """A smaller model with the target's vocabulary drafts token by token (Leviathan et al. 2023).

    It keeps its own static cache with a length per row: verdicts roll it back, and tokens that it has not seen (the target's own)
    lead its next step.

    Args:
        model: a transformers causal LM in eval mode.
        max_drafts: drafts per step, 1..31.
        sampler: how drafts are chosen; None greedily. Drafts that are drawn carry their distributions, and the target's sampler
            accepts them by ``min(1, p/q)``; it may have another temperature. Its random stream is split off, so that one seed may
            serve both.
        max_len: tokens that the cache holds at first; default the prompt and 512 more. It grows by as
            many when needed, which compiles steps anew.
        options: of the backend that compiles the model's steps (``codegen``, ``cudagraphs``, ``lowering``).

    Raises:
        OptionsError, CacheError: bad arguments, or a model that steps cannot run on.
    """

    def __init__(
        self, model: Any, max_drafts: int = 5, sampler: Sampler | None = None, max_len: int | None = None, **options: Any
    ) -> None:
        super().__init__(max_drafts)
        from spec_compile.row_verify import mask_kinds

        mask_kinds(model)
        if sampler is not None and not isinstance(sampler, Sampler):
            raise OptionsError(f"{type(self).__name__}: sampler must be a Sampler or None, got {type(sampler).__name__}")
        self.model, self._max_len = model, max_len
        self.sampler = None if sampler is None else sampler.for_drafts()
        self._options = Options.parse(options)
        # Width of the target's logits; the drafting model's may be padded otherwise.
        self.vocabulary: int | None = None
        self._cache: Any = None
        self._verify: Any = None

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        super().start(tokens)
        if not all(self.rows):
            raise OptionsError(f"{type(self).__name__}: a prompt is empty; give every row at least one token")
        self._allocate(len(self.rows), max(self._max_len or 0, max(map(len, self.rows)) + self.max_drafts + 1))
        self._cache.reset()
        self._prefill()

    def _allocate(self, batch: int, tokens: int) -> None:
        """A cache for ``tokens`` per row, if there is none yet; what an older one holds moves along."""
        from spec_compile.models.row_cache import RowCache
        from spec_compile.row_verify import RowVerify

        old = self._cache
        if old is not None and old.batch == batch and old.max_len >= tokens:
            return
        length = self._max_len or 0
        if length < tokens:
            length = -(-(tokens + _CACHE_STEP) // _CACHE_STEP) * _CACHE_STEP
        self._cache = RowCache(self.model, max_len=length, batch=batch)
        self._verify = RowVerify(self.model, self._cache, self._options, sizes=(1, _ROWS))
        if old is not None and old.batch == batch and any(old.lengths):
            with torch.no_grad():
                for layer, before in zip(self._cache.layers, old.layers):
                    held = before.keys.shape[2]
                    layer.keys[:, :, :held], layer.values[:, :, :held] = before.keys, before.values
            self._cache.set_lengths(old.lengths)

    @torch.no_grad()
    def _prefill(self) -> None:
        from spec_compile.decode_loop import PREFILL_CHUNK
        from spec_compile.models.row_cache import sequence_cache

        device = self._cache.layers[0].device
        for row, tokens in enumerate(self.rows):
            past = sequence_cache(self._cache, row)
            # The last token of the prompt leads the first step.
            for begin in range(0, len(tokens) - 1, PREFILL_CHUNK):
                ids = torch.tensor([tokens[begin : min(begin + PREFILL_CHUNK, len(tokens) - 1)]], device=device)
                positions = torch.arange(begin, begin + ids.shape[1], device=device)[None]
                self.model.forward(
                    input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True, **self._verify.last_logits
                )
        self._cache.set_lengths([len(tokens) - 1 for tokens in self.rows])

    def propose(self, limit: int) -> Draft:
        room, batch = min(limit, self.max_drafts), len(self.rows)
        if room < 1 or not any(self.active):
            return Draft(torch.zeros(batch, 0, dtype=torch.int64), [0] * batch)
        self._allocate(batch, max(map(len, self.rows)) + room)
        self._roll_back([len(row) - 1 for row in self.rows])
        drafted: list[list[int]] = [[] for _ in self.rows]
        laws = []
        logits = self._catch_up()
        while True:
            tokens, law = self._choose(logits, drafted)
            laws.append(law)
            for new, token in zip(drafted, tokens):
                new.append(token)
            if len(laws) == room:
                break
            counts = [0 if active else -1 for active in self.active]
            none = torch.zeros(batch, 0, dtype=torch.int64)
            logits = self._verify(tokens, none, counts)[:, :1]
            self._cache.commit([1 if active else 0 for active in self.active])
        counts = [room if active else 0 for active in self.active]
        probs = None if self.sampler is None or not self.sampler.do_sample else torch.cat(laws, 1)
        return Draft(torch.tensor(drafted, dtype=torch.int64), counts, probs=probs)

    def _catch_up(self) -> Tensor:
        """Feed what each row got since; logits ``[B, 1, V]`` of its last token."""
        found: list[Tensor | None] = [None] * len(self.rows)
        while True:
            lengths = self._cache.lengths
            unseen = [row[held:] if on else [] for row, held, on in zip(self.rows, lengths, self.active, strict=True)]
            if not any(unseen):
                some = next(logits for logits in found if logits is not None)
                return torch.stack([some if logits is None else logits for logits in found])[:, None]
            now = [new[:_ROWS] for new in unseen]
            width = max(map(len, now))
            drafts = torch.tensor([[*new[1:], *[0] * (width - max(len(new), 1))] for new in now], dtype=torch.int64)
            counts = [len(new) - 1 for new in now]
            logits = self._verify([new[0] if new else 0 for new in now], drafts.reshape(len(now), width - 1), counts)
            self._cache.commit([len(new) for new in now])
            for row, (new, all_new) in enumerate(zip(now, unseen)):
                if new and len(new) == len(all_new):
                    # The next step overwrites the logits.
                    found[row] = logits[row, len(new) - 1].clone()

    def _choose(self, logits: Tensor, drafted: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        logits = logits[..., : self.vocabulary]
        if self.sampler is None:
            return logits[:, 0].argmax(-1).tolist(), logits
        law = self.sampler.distribution(logits, [[*row, *new] for row, new in zip(self.rows, drafted)])
        tokens = self.sampler.draw(law)[:, 0].tolist()
        return tokens, nn.functional.pad(law, (0, max(0, (self.vocabulary or 0) - law.shape[-1])))

    def accept(self, tokens: Sequence[Sequence[int]], kept: Sequence[int]) -> None:
        # The cache holds the drafts but the last, of which only those that were kept belong to the row.
        valid = [len(row) + count for row, count in zip(self.rows, kept)]
        super().accept(tokens, kept)
        self._roll_back(valid)

    def retract(self, counts: Sequence[int]) -> None:
        super().retract(counts)
        self._roll_back([len(row) for row in self.rows])

    def _roll_back(self, valid: Sequence[int]) -> None:
        self._cache.set_lengths([min(held, tokens) for held, tokens in zip(self._cache.lengths, valid)])


class EarlyExit(AssistantModel):
    """The target's first layers, its final norm and its output layer draft, over a cache of their own.

    Args:
        model: the target, a transformers causal LM; its weights are shared, and it stays as it is.
        layers: how many of its layers draft; default a quarter of them, at least one.
        others: as of :class:`AssistantModel`.

    Raises:
        OptionsError: as many layers as the target has, or more; or a model whose layers are not one list.
    """

    def __init__(self, model: Any, layers: int | None = None, max_drafts: int = 5, **others: Any) -> None:
        super().__init__(first_layers(model, layers), max_drafts, **others)


def first_layers(model: Any, layers: int | None = None) -> Any:
    """A causal LM of the first ``layers`` layers of ``model``, which shares its modules and weights.

    Raises:
        OptionsError: see :class:`EarlyExit`.
    """
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    config = getattr(model, "config", None)
    total = getattr(config, "num_hidden_layers", None)
    if not isinstance(base, nn.Module) or total is None or config is not config.get_text_config(decoder=True):  # type: ignore[union-attr]
        raise OptionsError(f"EarlyExit needs a transformers causal LM of text, got {type(model).__name__}")
    layers = max(total // 4, 1) if layers is None else layers
    if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers < total:
        raise OptionsError(f"EarlyExit: layers must lie in 1..{total - 1} (the model has {total}), got {layers!r}")
    found = [name for name, part in base.named_modules() if isinstance(part, nn.ModuleList) and len(part) == total]
    if len(found) != 1:
        raise OptionsError(f"EarlyExit: the layers of {type(model).__name__} are not one list of {total} modules")
    short = copy.deepcopy(config)
    short.num_hidden_layers = layers
    if getattr(short, "layer_types", None) is not None:
        short.layer_types = list(short.layer_types[:layers])
    path = [model.base_model_prefix, *found[0].split(".")]
    top = part = _shallow(model, short)
    for name in path[:-1]:
        part._modules[name] = _shallow(part._modules[name], short)
        part = part._modules[name]
    part._modules[path[-1]] = nn.ModuleList(part._modules[path[-1]][:layers])
    return top


def _shallow(module: Any, config: Any) -> Any:
    """A copy of a module that shares all but its table of submodules and its config."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    # A model compiled in place would run the original, and so would one whose forward lies on the instance.
    twin.__dict__["_compiled_call_impl"] = None
    forward = twin.__dict__.pop("forward", None)
    if forward is not None and getattr(forward, "previous", forward) is not None:
        raise OptionsError(
            f"EarlyExit: forward of {type(module).__name__} was replaced on the instance (by a hook of accelerate, say), and "
            "would run all layers: take a model without it"
        )
    if hasattr(module, "config"):
        twin.config = config
    return twin


class DraftHead(HostDrafter):
    """A head on the target's last hidden states drafts (EAGLE, Li et al. 2024, arXiv 2401.15077).

    The head extrapolates features: from the target's feature of a token and the token after it to the feature of that token, from
    which the target's output layer tells the next. Its first inputs in a step are the target's own features, the others its own.

    Args:
        head: ``head(tokens, hidden, start) -> hidden``: ``tokens`` int64 ``[1, T]`` and ``hidden`` ``[1, T, H]``, the features of
            the tokens *before* them; ``start`` int, the position of ``tokens[0]``; returns the features of ``tokens`` as
            predicted, ``[1, T, H]``. A head that attends keeps K and V by position itself, one store per ``row`` (a keyword
            argument): entries from ``start`` on are to be written anew, so it needs no rollback.
        output: from features ``[1, T, H]`` to logits ``[1, T, V]``: ``model.get_output_embeddings()``.
        max_drafts: drafts per step, 1..31.
        sampler: as of :class:`AssistantModel`.

    The loop (``generate`` does) hands over hidden states by :meth:`observe` before each ``accept``.
    """

    needs_hidden = True

    def __init__(
        self, head: Callable[..., Tensor], output: Callable[[Tensor], Tensor], max_drafts: int = 5, sampler: Sampler | None = None
    ) -> None:
        super().__init__(max_drafts)
        self.head, self.output = head, output
        self.sampler = None if sampler is None else sampler.for_drafts()
        self._features: list[Tensor | None] = []
        self._seen: list[int] = []
        self._done: list[int] = []

    def start(self, tokens: Sequence[Sequence[int]]) -> None:
        super().start(tokens)
        # Features of the target that the head has not read yet, the tokens they cover so far, and how many of them it read.
        self._features, self._seen, self._done = [None] * len(self.rows), [0] * len(self.rows), [0] * len(self.rows)

    def observe(self, hidden: Sequence[Tensor]) -> None:
        """Take the target's last hidden states (after its final norm, as its output layer gets them).

        Args:
            hidden: per row ``[k, H]``: of the prompt's tokens after the prefill; of the last accepted token and the kept drafts
                after a step; empty for finished rows.
        """
        for row, new in enumerate(hidden):
            before = self._features[row]
            self._features[row] = new if before is None else torch.cat([before, new])
            self._seen[row] += len(new)

    def retract(self, counts: Sequence[int]) -> None:
        super().retract(counts)
        for row, count in enumerate(counts):
            features = self._features[row]
            if count == 0 or features is None:
                continue
            held = len(self.rows[row])
            surplus = max(self._seen[row] - held, 0)
            self._features[row] = features[: len(features) - surplus]
            self._seen[row] -= surplus
            # What the head read of a token that is gone was of no use.
            self._done[row] = min(self._done[row], held - 1)

    @torch.no_grad()
    def propose(self, limit: int) -> Draft:
        room, batch = min(limit, self.max_drafts), len(self.rows)
        drafted: list[list[int]] = [[] for _ in self.rows]
        laws: list[list[Tensor]] = [[] for _ in self.rows]
        for row, tokens in enumerate(self.rows):
            # Before a prompt's second token there is no feature to go on.
            if not self.active[row] or room < 1 or len(tokens) == 1:
                continue
            if self._seen[row] != len(tokens) - 1:
                raise OptionsError(
                    f"DraftHead: row {row} has {len(tokens)} tokens, and hidden states of {self._seen[row]} were handed over; "
                    f"the loop must call observe() with those of the first {len(tokens) - 1} before accept()"
                )
            self._draft_row(row, room, drafted[row], laws[row])
        width = max(map(len, drafted))
        counts = [len(new) for new in drafted]
        padded = torch.tensor([[*new, *[0] * (width - len(new))] for new in drafted], dtype=torch.int64).reshape(batch, width)
        if self.sampler is None or not self.sampler.do_sample or width == 0:
            return Draft(padded, counts)
        some = next(law for row in laws for law in row)
        probs = [torch.cat([*row, *[torch.zeros_like(some)] * (width - len(row))], 1) for row in laws]
        return Draft(padded, counts, probs=torch.cat(probs))

    def _draft_row(self, row: int, room: int, drafted: list[int], laws: list[Tensor]) -> None:
        tokens, features = self.rows[row], self._features[row]
        assert features is not None
        # The feature of token i goes with token i + 1; what the head made of its own guesses is written anew.
        start = self._done[row] + 1
        hidden = features[len(features) - (self._seen[row] - self._done[row]) :][None]
        ids = torch.tensor([tokens[start:]], device=hidden.device)
        while True:
            hidden = self.head(ids, hidden, start, row=row)[:, -1:]
            start += ids.shape[1]
            logits = self.output(hidden)
            if self.sampler is None:
                token = int(logits[0, 0].argmax())
            else:
                law = self.sampler.distribution(logits, [[*tokens, *drafted]])
                laws.append(law)
                token = int(self.sampler.draw(law))
            drafted.append(token)
            if len(drafted) == room:
                break
            ids = torch.tensor([[token]], device=hidden.device)
        self._done[row] = self._seen[row]
        self._features[row] = features[-_KEPT_FEATURES:]
