"""Last weights stored by channels: which ones, that saving and loading still work, and that all of it can be undone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

import spec_compile as sc
from spec_compile.errors import OptionsError
from spec_compile.models.down_weights import down_projections, store_by_channels, store_by_outputs, stored_as_before
from spec_compile.models.zoo import FAMILIES, VOCAB, build


def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_last_projections_of_all_families(name: str) -> None:
    model: Any = build(name, FAMILIES[name].implementations[0])
    names = {module: path for path, module in model.named_modules()}
    found = [names[module] for module in down_projections(model)]
    # GPT-2's own kind of linear layer stores them by channels as it is.
    assert len(found) == (0 if name == "gpt2" else FAMILIES[name].mlps), found
    ends = ("down_proj", "fc2", "dense_4h_to_h", "c_proj")
    assert all(path.endswith(ends) and "attn" not in path for path in found), found


@torch.no_grad()
def test_values_stay_and_the_change_is_undone() -> None:
    model: Any = build("llama", "sdpa")
    before, weights = model(ids()).logits, {k: v.clone() for k, v in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert store_by_channels(model) == 2 and store_by_channels(model) == 0
    down = model.model.layers[0].mlp.down_proj.weight
    assert down.stride() == (1, 64) and down.shape == (64, 96)
    torch.testing.assert_close(model(ids()).logits, before, rtol=0, atol=1e-5)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) and state[name].is_contiguous() for name, weight in weights.items())
    assert store_by_outputs(model) == 2 and store_by_outputs(model) == 0
    assert torch.equal(model(ids()).logits, before) and down.is_contiguous()


@torch.no_grad()
def test_saving_and_loading(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file, save_model
    from transformers import AutoModelForCausalLM

    model: Any = build("llama", "sdpa", tie_word_embeddings=False)
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = model.state_dict()[name].clone()
    store_by_channels(model)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.save_pretrained(tmp_path / "folder")
    found = [load_file(tmp_path / f"{kind}.safetensors")[name] for kind in ("plain", "model")]
    found.append(torch.load(tmp_path / "state.pt")[name])
    found.append(AutoModelForCausalLM.from_pretrained(tmp_path / "folder").state_dict()[name])
    assert all(torch.equal(weight, wanted) for weight in found)
    other: Any = build("llama", "sdpa", seed=1, tie_word_embeddings=False)
    model.load_state_dict(other.state_dict())
    down = model.model.layers[1].mlp.down_proj.weight
    assert down.stride() == (1, 64) and torch.equal(down, other.model.layers[1].mlp.down_proj.weight)
    assert torch.equal(copy.deepcopy(model).state_dict()[name], down)


def test_prepare_and_restore() -> None:
    model: Any = build("llama", "sdpa")
    down = model.model.layers[0].mlp.down_proj.weight
    sc.prepare(model)
    assert down.is_contiguous()
    sc.restore(model)
    sc.prepare(model, ffn=True)
    assert not down.is_contiguous()
    sc.restore(model)
    assert down.is_contiguous()
    # What compile_verify does on a GPU, which restore undoes without prepare.
    store_by_channels(model)
    sc.restore(model)
    assert down.is_contiguous()
    with pytest.raises(OptionsError, match="not prepared"):
        sc.restore(model)


def test_layers_that_a_calibration_leaves_exact_stay() -> None:
    model: Any = build("llama", "sdpa")
    assert store_by_channels(model, (0.0, 0.1)) == 1
    first, second = (layer.mlp.down_proj.weight for layer in model.model.layers)
    assert first.is_contiguous() and not second.is_contiguous()
    # Not a threshold for each: all are turned.
    assert store_by_channels(model, (0.0, 0.1, 0.1)) == 1 and not first.is_contiguous()


def test_shared_odd_and_meta_weights_are_left_alone() -> None:
    model: Any = build("llama", "sdpa")
    first, second = (layer.mlp for layer in model.model.layers)
    second.down_proj.weight = first.down_proj.weight
    assert store_by_channels(model) == 0
    model = build("llama", "sdpa")
    model.model.layers[0].mlp.down_proj.to("meta")
    assert store_by_channels(model) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_compile_verify_turns_weights_on_a_gpu() -> None:
    model: Any = build("llama", "sdpa", dtype=torch.bfloat16).cuda()
    cache = sc.VerifyCache(model, 64)
    verify = sc.compile_verify(model, cache, 8, sc.SparsityPlan(ffn=sc.FfnPlan(threshold=0.3)), strict=True)
    assert model.model.layers[0].mlp.down_proj.weight.stride() == (1, 64)
    exact = verify(ids().cuda(), sparse=False)
    cache.crop(-9)
    sparse = verify(ids().cuda())
    assert len(verify.report().skipping) == 2 and not torch.equal(sparse, exact)
    torch.testing.assert_close(exact.float(), model(ids().cuda()).logits.float(), rtol=0.05, atol=0.3)
    sc.restore(model)
    assert model.model.layers[0].mlp.down_proj.weight.is_contiguous()


@torch.no_grad()
def test_memory_that_others_see_is_left_alone() -> None:
    """A view of a flat buffer, a second parameter over the same memory, and memory of several processes."""
    model: Any = build("llama", "sdpa")
    first, second = (layer.mlp.down_proj for layer in model.model.layers)
    flat = torch.zeros(2, *first.weight.shape)
    first.weight = torch.nn.Parameter(flat[0])
    assert store_by_channels(model) == 1 and first.weight.is_contiguous() and not second.weight.is_contiguous()
    flat.fill_(1)
    assert bool((first.weight == 1).all())
    model = build("llama", "sdpa")
    first, second = (layer.mlp.down_proj for layer in model.model.layers)
    second.weight = torch.nn.Parameter(first.weight.detach())
    assert store_by_channels(model) == 0
    model = build("llama", "sdpa").share_memory()
    assert store_by_channels(model) == 0 and model.model.layers[0].mlp.down_proj.weight.is_shared()


def test_assigned_weights_are_turned_again() -> None:
    model: Any = build("llama", "sdpa")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    store_by_channels(model)
    model.load_state_dict(state, assign=True)
    down = model.model.layers[0].mlp.down_proj
    assert down.weight.is_contiguous()
    assert store_by_channels(model) == 2 and not down.weight.is_contiguous()
    assert store_by_outputs(model) == 2 and down.weight.is_contiguous()


def test_parameters_stay_ordinary_ones() -> None:
    """Turned under inference mode, too; ``keep_vars`` gives the parameters themselves."""
    model: Any = build("llama", "sdpa")
    with torch.inference_mode():
        store_by_channels(model)
    down = model.model.layers[0].mlp.down_proj.weight
    assert not down.is_inference() and not down.is_contiguous()
    assert model.state_dict(keep_vars=True)["model.layers.0.mlp.down_proj.weight"] is down


def test_a_block_leaves_weights_as_they_were() -> None:
    model: Any = build("llama", "sdpa")
    first, second = (layer.mlp.down_proj.weight for layer in model.model.layers)
    store_by_channels(model, (0.1, 0.0))
    with pytest.raises(KeyError), stored_as_before(model):
        assert store_by_channels(model) == 1 and not second.is_contiguous()
        raise KeyError
    assert not first.is_contiguous() and second.is_contiguous()
