"""``VerifyCache``: shapes, marks, capacity, rollback, and use inside ``generate``."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from spec_compile import VerifyCache
from spec_compile.errors import CacheError
from spec_compile.models.zoo import FAMILIES, VOCAB, WINDOW, build
from spec_compile.options import MAX_ROWS

MARK = "_dynamo_static_input_type"
IMPLEMENTATION = {name: family.implementations[0] for name, family in FAMILIES.items()}
SHAPES = dict.fromkeys(FAMILIES, (2, 16, 16)) | dict.fromkeys(("gpt_neox", "gpt2", "opt", "bloom"), (4, 16, 16))
# MLA: one head, the latent (kv_lora_rank) as K and the rotary part of the keys (qk_rope_head_dim) as V.
SHAPES["deepseek_v3"] = (1, 24, 8)
SLIDING = ("mistral", "gemma2", "gemma3", "phi3", "starcoder2", "mixtral", "gpt_oss", "llama4")


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama", "sdpa")


def tokens(rows: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


def state(cache: Any) -> list[torch.Tensor]:
    return [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_per_family(name: str) -> None:
    model = build(name, IMPLEMENTATION[name])
    cache = VerifyCache(model, 50, batch=3)
    assert len(cache.layers) == FAMILIES[name].layers
    heads, k_dim, v_dim = SHAPES[name]
    for layer in cache.layers:
        assert type(layer) is StaticLayer
        assert layer.keys.shape == (3, heads, 50 + MAX_ROWS, k_dim)
        assert layer.values.shape == (3, heads, 50 + MAX_ROWS, v_dim)
        assert layer.keys.dtype == layer.values.dtype == torch.float32
        assert int(layer.cumulative_length) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_are_those_a_forward_makes(name: str) -> None:
    """The model's own lazily initialised cache is the truth."""
    model = build(name, IMPLEMENTATION[name])
    lazy = StaticCache(config=model.config, max_cache_len=50 + MAX_ROWS)
    slots = 50 + MAX_ROWS
    mask = {"attention_mask": torch.ones(1, slots, dtype=torch.int64)} if FAMILIES[name].padding_mask else {}
    positions = {"position_ids": torch.arange(3).unsqueeze(0)} if FAMILIES[name].positions else {}
    with torch.no_grad():
        model(input_ids=tokens(3), past_key_values=lazy, use_cache=True, **mask, **positions)
    for mine, theirs in zip(VerifyCache(model, 50).layers, lazy.layers, strict=True):
        assert mine.keys.shape[:2] == theirs.keys.shape[:2]
        assert mine.keys.shape[3] == theirs.keys.shape[3]
        assert mine.values.shape[3] == theirs.values.shape[3]
        assert mine.keys.dtype == theirs.keys.dtype


@pytest.mark.parametrize("name", SLIDING)
def test_window_layers_keep_everything(name: str) -> None:
    """A rejected draft that has pushed a token out of a window must be undone: logits equal a fresh run."""
    model = build(name, IMPLEMENTATION[name])
    prompt, drafts, accepted = tokens(2 * WINDOW + 3), tokens(6, 1), tokens(4, 2)
    cache = VerifyCache(model, 64)
    assert not any(layer.is_sliding for layer in cache.layers)
    forward(model, cache, prompt)
    forward(model, cache, drafts)
    cache.crop(-6)
    found = forward(model, cache, accepted)
    wanted = forward(model, None, torch.cat([prompt, accepted], 1))[:, -4:]
    assert (found - wanted).abs().max().item() <= 1e-4 * wanted.abs().max().item()


def test_dtype_and_device(llama: Any) -> None:
    cache = VerifyCache(llama, 10, dtype=torch.bfloat16)
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    half = build("llama", "sdpa", dtype=torch.float16)
    assert VerifyCache(half, 10).layers[0].values.dtype == torch.float16
    assert VerifyCache(half.to("meta"), 10).layers[0].values.device.type == "meta"


def test_making_a_cache_runs_nothing_and_keeps_the_model(llama: Any) -> None:
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    training = copy.deepcopy(llama).train()
    VerifyCache(training, 10)
    assert training.training
    VerifyCache(llama, 10)
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())
    assert all(type(weight) is torch.nn.Parameter for weight in llama.parameters())


def test_everything_is_marked_static(llama: Any) -> None:
    cache = VerifyCache(llama, 10)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            assert hasattr(tensor, MARK)
    cache.check_static()
    addresses = [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
    forward(llama, cache, tokens(5))
    cache.crop(-2)
    cache.reset()
    assert addresses == [
        tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)
    ]
    cache.check_static()


@pytest.mark.parametrize("name", ["keys", "values", "cumulative_length"])
def test_check_static_names_the_tensor(llama: Any, name: str) -> None:
    cache = VerifyCache(llama, 10)
    setattr(cache.layers[1], name, getattr(cache.layers[1], name).clone())
    with pytest.raises(CacheError, match=rf"layers\[1\]\.{name} is not marked static; make a new VerifyCache"):
        cache.check_static()


def test_a_deep_copy_is_marked_or_refused(llama: Any) -> None:
    """Either every tensor of the copy carries the mark and the copy works, or ``check_static`` says no."""
    cache = VerifyCache(llama, 30)
    forward(llama, cache, tokens(5))
    twin = copy.deepcopy(cache)
    marked = all(hasattr(tensor, MARK) for layer in twin.layers for tensor in (layer.keys, layer.values, layer.cumulative_length))
    if not marked:
        with pytest.raises(CacheError, match="make a new VerifyCache"):
            twin.check_static()
        return
    twin.check_static()
    assert torch.equal(forward(llama, twin, tokens(3, 1)), forward(llama, cache, tokens(3, 1)))
    twin.crop(-3)
    assert (twin.length, cache.length) == (5, 8)


def test_capacity_and_room(llama: Any) -> None:
    cache = VerifyCache(llama, 10)
    assert (cache.max_len, cache.capacity, cache.length) == (10, 10 + MAX_ROWS, 0)
    assert cache.get_max_cache_shape() == 10 + MAX_ROWS
    forward(llama, cache, tokens(8))
    assert cache.length == int(cache.get_seq_length()) == 8
    cache.require_room(MAX_ROWS + 2)
    cache.require_room(2, drafts=False)
    for rows, drafts in ((MAX_ROWS + 3, True), (3, False)):
        with pytest.raises(CacheError) as caught:
            cache.require_room(rows, drafts)
        assert f"it holds 8 tokens and {rows} more are to be written, but max_len is 10 (plus 64 slots" in str(caught.value)
        assert "VerifyCache(model, max_len=...)" in str(caught.value)


def test_too_short_fails_before_any_write(llama: Any) -> None:
    cache = VerifyCache(llama, 10)
    forward(llama, cache, tokens(70))
    before = state(cache)
    with pytest.raises(CacheError, match="too short"):
        forward(llama, cache, tokens(5))
    assert all(torch.equal(a, b) for a, b in zip(state(cache), before))
    forward(llama, cache, tokens(4))
    assert cache.length == cache.capacity


def test_crop(llama: Any) -> None:
    cache = VerifyCache(llama, 40)
    forward(llama, cache, tokens(12))
    for step, left in ((-3, 9), (torch.tensor(-2), 7), (0, 7), (torch.tensor(0), 7), (-7, 0)):
        cache.crop(step)
        assert [int(layer.cumulative_length) for layer in cache.layers] == [left] * 2


@pytest.mark.parametrize(
    ("step", "text"),
    [(-13, "13 tokens to remove, 12 held"), (1, "takes the negative number"), (torch.tensor(2), "negative")],
)
def test_bad_crops_change_nothing(llama: Any, step: Any, text: str) -> None:
    cache = VerifyCache(llama, 40)
    forward(llama, cache, tokens(12))
    with pytest.raises(CacheError, match=text):
        cache.crop(step)
    assert [int(layer.cumulative_length) for layer in cache.layers] == [12, 12]


def test_rollback_and_rewrite_equals_a_fresh_cache(llama: Any) -> None:
    cache, fresh = VerifyCache(llama, 40), VerifyCache(llama, 40)
    forward(llama, cache, tokens(12))
    forward(llama, cache, tokens(6, 1))
    cache.crop(-4)
    found = forward(llama, cache, tokens(3, 2))
    forward(llama, fresh, tokens(12))
    forward(llama, fresh, tokens(6, 1)[:, :2])
    assert torch.allclose(found, forward(llama, fresh, tokens(3, 2)), atol=1e-5)


def test_reset(llama: Any) -> None:
    cache = VerifyCache(llama, 40)
    first = forward(llama, cache, tokens(12))
    cache.reset()
    assert cache.length == 0
    assert [int(layer.cumulative_length) for layer in cache.layers] == [0, 0]
    assert torch.equal(forward(llama, cache, tokens(12)), first)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "10", None, True])
@pytest.mark.parametrize("name", ["max_len", "batch"])
def test_bad_numbers(llama: Any, name: str, bad: Any) -> None:
    given = {"max_len": 10, "batch": 1, name: bad}
    with pytest.raises(CacheError, match=f"{name} must be at least 1"):
        VerifyCache(llama, **given)


def test_a_model_that_is_not_from_transformers() -> None:
    with pytest.raises(CacheError, match="needs a transformers model, got Linear"):
        VerifyCache(torch.nn.Linear(2, 2), 10)
    with pytest.raises(CacheError, match="needs a transformers model, got NoneType"):
        VerifyCache(None, 10)


def test_the_reference_decoder_is_refused_with_words() -> None:
    """It has a config, but not one of transformers."""
    from spec_compile.models.reference_decoder import Decoder, DecoderConfig

    with pytest.raises(CacheError, match="transformers model"):
        VerifyCache(Decoder(DecoderConfig(layers=1)), 10)


def test_layers_that_are_no_attention() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(CacheError, match="layer 1 of SimpleNamespace is 'linear_attention'; only attention layers"):
        VerifyCache(SimpleNamespace(config=config), 10)


def test_made_in_inference_mode_works_outside(llama: Any) -> None:
    with torch.inference_mode():
        cache = VerifyCache(llama, 40)
        forward(llama, cache, tokens(5))
    assert not any(
        tensor.is_inference() for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)
    )
    forward(llama, cache, tokens(5, 1))
    cache.crop(-2)
    cache.reset()
    with torch.inference_mode():
        cache.crop(0)
        forward(llama, cache, tokens(5))
    assert cache.length == 5


def test_made_from_inference_weights() -> None:
    with torch.inference_mode():
        model = build("llama", "sdpa")
        cache = VerifyCache(model, 40)
    forward(model, cache, tokens(5))
    assert cache.length == 5


@torch.no_grad()
def generate(model: Any, prompt: torch.Tensor, cache: Any, new: int, **more: Any) -> torch.Tensor:
    return model.generate(
        prompt, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **more
    )  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_assisted_generation_equals_greedy(name: str) -> None:
    model = build(name, "eager")
    prompt = torch.cat([tokens(6)] * 4, 1)
    cache = VerifyCache(model, 24 + 20)
    greedy = generate(model, prompt, None, 20)
    assert torch.equal(generate(model, prompt, cache, 20, prompt_lookup_num_tokens=6), greedy)
    assert cache.length >= 24 + 19
    cache.reset()
    assert torch.equal(generate(model, prompt, cache, 20), greedy)


@pytest.mark.parametrize("lookup", [{}, {"prompt_lookup_num_tokens": 8}])
def test_generating_past_a_short_cache_names_the_remedy(llama: Any, lookup: dict[str, int]) -> None:
    cache = VerifyCache(llama, 8)
    with pytest.raises(CacheError, match=r"too short.*prompt \+ new tokens long: VerifyCache\(model, max_len=\.\.\.\)"):
        generate(llama, torch.cat([tokens(6)] * 4, 1), cache, 100, **lookup)
    assert cache.length <= cache.capacity


def test_a_prompt_beyond_the_cache_writes_nothing(llama: Any) -> None:
    cache = VerifyCache(llama, 8)
    before = state(cache)
    with pytest.raises(CacheError, match="it holds 0 tokens and 80 more"):
        generate(llama, tokens(80), cache, 4, prompt_lookup_num_tokens=4)
    assert all(torch.equal(a, b) for a, b in zip(state(cache), before))


def test_a_copied_cache_forgets_what_the_host_counted() -> None:
    """The copy's tensors count their versions anew, so an old count could pass for a current one."""
    cache = VerifyCache(build("llama", "sdpa"), max_len=50)
    length = cache.layers[0].cumulative_length
    cache.host_length.tokens, cache.host_length.version = 7, length._version
    twin = copy.deepcopy(cache)
    assert twin.host_length.version == -1
    twin.layers[0].cumulative_length.fill_(5)
    twin.crop(-3)
    assert twin.length == 2
    cache.crop(-2)
    assert (cache.host_length.tokens, cache.host_length.version) == (5, length._version)
    with pytest.raises(CacheError, match="6 tokens to remove, 5 held"):
        cache.crop(-6)
    # A write by anybody else: the device knows better.
    length.fill_(9)
    with pytest.raises(CacheError, match="10 tokens to remove, 9 held"):
        cache.crop(-10)


def test_what_cannot_be_captured_is_said() -> None:
    from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig
    from spec_compile.step_graph import why_not_captured

    llama, mistral = build("llama", "sdpa"), build("mistral", "sdpa")
    assert "CUDA device" in str(why_not_captured(llama, VerifyCache(llama, max_len=50)))
    sliding = StaticCache(config=mistral.config, max_cache_len=200)
    assert "StaticSlidingWindowLayer may keep state on the host" in str(why_not_captured(mistral, sliding))
    decoder = Decoder(DecoderConfig())
    assert "SimpleNamespace may keep state on the host" in str(why_not_captured(decoder, DecoderCache(decoder.config, 50)))
    with torch.inference_mode():
        made = VerifyCache(llama, max_len=50)
        made.layers[0].cumulative_length = torch.zeros((), dtype=torch.int64)
    assert "inference_mode" in str(why_not_captured(llama, made))
