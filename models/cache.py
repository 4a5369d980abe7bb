"""``VerifyCache``: a static KV cache that speculative decoding can roll back.

transformers' own ``StaticCache`` is refused by assisted generation (an exact type test), allocates nothing until the first
forward (inside a compiled prefill its static marks are lost, and K and V are then copied every step), keeps no room for
drafts past the last token, and drops what slides out of a window, so a rejected draft cannot be undone. This subclass
differs in exactly these points.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from spec_compile import _compat
from spec_compile.errors import CacheError
from spec_compile.options import MAX_ROWS

# Before the imports that a missing or older transformers fails.
_compat.check_installed("transformers")

from transformers import StaticCache  # noqa: E402
from transformers.cache_utils import StaticLayer, get_layer_types_and_kwargs  # noqa: E402

_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_STATIC_MARK = "_dynamo_static_input_type"


class HostLength:
    """Tokens held as the host counts them; holds for one version of the first layer's length tensor."""

    def __init__(self) -> None:
        self.tokens, self.version = 0, -1

    def __deepcopy__(self, memo: Any) -> HostLength:
        # A copied tensor counts its versions from the start.
        return HostLength()

    def __reduce__(self) -> tuple[Any, ...]:
        return HostLength, ()


class VerifyCache(StaticCache):
    """Static KV cache for verify forwards, accepted by ``generate(..., past_key_values=cache, prompt_lookup_num_tokens=8)``.

    Args:
        model: a transformers model; only its config, dtype and devices are used.
        max_len: tokens the sequence may reach (prompt and new tokens). Room for 64 draft rows is added.
        batch: sequences.
        dtype: of K and V; default the model's.

    Every layer is a full-length layer: a sliding-window layer masks instead of dropping, so that rejected drafts can be
    rolled back. K, V and the lengths are allocated here and marked as static inputs.

    Raises:
        CacheError: ``max_len`` or ``batch`` below 1, a model without attention caches, or, while generating, a cache that
            is too short for prompt, new tokens and drafts.
    """

    layers: Any

    def __init__(self, model: Any, max_len: int, batch: int = 1, dtype: torch.dtype | None = None) -> None:
        if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
            raise CacheError(f"VerifyCache: max_len must be at least 1, got {max_len!r}")
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise CacheError(f"VerifyCache: batch must be at least 1, got {batch!r}")
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise CacheError(f"VerifyCache needs a transformers model, got {type(model).__name__}")
        config = model.config.get_text_config(decoder=True)
        layer_types, _ = get_layer_types_and_kwargs(config)
        for index, kind in enumerate(layer_types):
            if kind not in _ATTENTION_LAYERS:
                raise CacheError(
                    f"VerifyCache: layer {index} of {type(model).__name__} is {kind!r}; only attention layers "
                    f"({', '.join(_ATTENTION_LAYERS)}) can be rolled back"
                )
        # Inference tensors cannot be updated outside inference mode, and each layer makes its length here.
        with torch.inference_mode(False):
            super().__init__(config=config, max_cache_len=max_len + MAX_ROWS)
            self.layers = [StaticLayer(max_cache_len=max_len + MAX_ROWS) for _ in layer_types]
        self.max_len = max_len
        self.host_length = HostLength()
        self._allocate(model, batch, dtype)

    def _allocate(self, model: Any, batch: int, dtype: torch.dtype | None) -> None:
        shapes = _layer_shapes(model, len(self.layers))
        # Inference tensors cannot be updated outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for layer, (kv_heads, k_dim, v_dim, kind, device) in zip(self.layers, shapes):
                keys, values = (
                    torch.zeros(batch, kv_heads, 0, dim, dtype=dtype or kind, device=device) for dim in (k_dim, v_dim)
                )
                layer.lazy_initialization(keys, values)
        self.check_static()

    def check_static(self) -> None:
        """
        Raises:
            CacheError: a tensor of the cache is not marked as a static input (the cache was copied or re-initialised
                inside a compiled region).
        """
        for index, layer in enumerate(self.layers):
            for name in ("keys", "values", "cumulative_length"):
                if not hasattr(getattr(layer, name, None), _STATIC_MARK):
                    raise CacheError(
                        f"VerifyCache: layers[{index}].{name} is not marked static; make a new VerifyCache outside "
                        "torch.compile instead of copying one"
                    )

    @property
    def capacity(self) -> int:
        """Slots of each layer: ``max_len`` and the room for drafts."""
        return int(self.layers[0].max_cache_len)

    @property
    def length(self) -> int:
        """Tokens held. Reads the device, so it waits for it."""
        return int(self.layers[0].cumulative_length)

    def require_room(self, rows: int, drafts: bool = True) -> None:
        """
        Args:
            rows: tokens about to be written.
            drafts: whether some of them may be rejected; drafts may pass ``max_len``, a prompt may not.

        Raises:
            CacheError: they do not fit.
        """
        held = self.length
        limit = self.capacity if drafts else self.max_len
        if held + rows > limit:
            raise CacheError(
                f"VerifyCache is too short: it holds {held} tokens and {rows} more are to be written, but max_len is "
                f"{self.max_len} (plus {self.capacity - self.max_len} slots for drafts). Make it at least prompt + "
                "new tokens long: VerifyCache(model, max_len=...)"
            )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # generate() asks on the host before every forward: the one place to fail before a write out of bounds.
        if layer_idx == 0 and not torch.compiler.is_compiling():
            self.require_room(int(query_length))
        return super().get_mask_sizes(query_length, layer_idx)

    def activate_past_recording(self) -> None:
        """Nothing is ever dropped, so there is nothing to record for a rollback."""

    def crop(self, tokens_to_remove: Any) -> None:
        """Roll back the last ``|tokens_to_remove|`` tokens (an int or 0-d tensor, at most 0 as transformers passes it).

        Only lengths change: masks hide the rest, and the next tokens overwrite it.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise CacheError(f"VerifyCache.crop takes the negative number of tokens to remove, got {-count}")
        lengths = [layer.cumulative_length for layer in self.layers]
        known = not lengths[0].is_inference() and self.host_length.version == lengths[0]._version
        held = self.host_length.tokens if known else self.length
        if count > held:
            raise CacheError(f"VerifyCache.crop: {count} tokens to remove, {held} held")
        torch._foreach_sub_(lengths, count)
        if known:
            self.host_length.tokens, self.host_length.version = held - count, lengths[0]._version

    def reset(self) -> None:
        """Forget every token; K and V keep their place and are overwritten."""
        for layer in self.layers:
            layer.cumulative_length.zero_()


@contextlib.contextmanager
def _experts_by_row(model: Any) -> Iterator[None]:
    """Let experts run on fake tensors: their eager loop reads data, and the grouped product has no fake form but in bfloat16."""
    if getattr(model.config, "_experts_implementation", None) not in ("eager", "grouped_mm"):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _layer_shapes(model: Any, layers: int) -> list[tuple[int, int, int, torch.dtype, torch.device]]:
    """``(kv_heads, k_dim, v_dim, dtype, device)`` of every layer, from a forward of one token on fake tensors.

    The config alone does not tell: MLA caches a latent, some families vary head counts by layer, device maps spread layers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    probe = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=2)
    probe_layers: list[Any] = [StaticLayer(max_cache_len=2) for _ in range(layers)]
    probe.layers = probe_layers
    model = getattr(model, "_orig_mod", model)
    device = next(itertools.chain(model.parameters(), model.buffers())).device
    try:
        # forward, not __call__: a model compiled in place must not compile this probe.
        with (
            _experts_by_row(model),
            torch.compiler.set_stance("force_eager"),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.no_grad(),
        ):
            for layer in probe_layers:
                layer.cumulative_length = torch.zeros((), dtype=torch.int64, device=device)
            ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
            mask = torch.ones(1, 1, 1, 2, dtype=torch.bool, device=device)
            positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
            model.forward(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=probe, use_cache=True)
        return [
            (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype, layer.keys.device)
            for layer in probe_layers
        ]
    except Exception as error:
        shape = model._get_static_cache_init_shape() if hasattr(model, "_get_static_cache_init_shape") else None
        if shape is None:
            raise CacheError(f"VerifyCache: cannot tell the cache shapes of {type(model).__name__}: {error}") from error
        return [(shape[0], shape[1], shape[1], model.dtype, device)] * layers
