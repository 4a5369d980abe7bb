"""Last projections of feed-forward layers stored by channels, so that a step that skips channels reads whole rows.

A weight keeps its shape ``[H, F]`` and its values; only its strides change, to those of a transposed ``[F, H]``. That is a change
in place: no memory is added. ``state_dict`` gives contiguous copies of such weights, as safetensors needs them, which do not
write through; with ``keep_vars`` it gives the parameters. Weights in memory that others see (tied, views of a larger one, shared
between processes) stay; a parameter of another model over the same memory is not seen. Meant for inference: an optimizer made
before keeps state of the old strides.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_HOOK = "_spec_compile_by_channels"


def down_projections(model: nn.Module) -> list[nn.Linear]:
    """Linear modules that look like last projections: after one or two others in a module that lead from their outputs to their
    inputs.

    A wrong guess costs nothing but another layout; whether a layer is one is proven in the graph.
    """
    uses = Counter(_memory(p) for module in model.modules() for p in module.parameters(recurse=False))
    found = []
    for parent in model.modules():
        linears = [child for child in parent.children() if type(child) is nn.Linear]
        if len(linears) not in (2, 3):
            continue
        *others, down = linears
        inner, out = down.in_features, down.out_features
        widths = {other.out_features for other in others}
        if (
            all(other.in_features == out for other in others)
            and (widths == {inner} or (widths == {2 * inner} and len(others) == 1))
            and uses[_memory(down.weight)] == 1
        ):
            found.append(down)
    return found


def store_by_channels(model: Any, thresholds: Sequence[float] | None = None) -> int:
    """Turn the storage of the model's last projections; :func:`store_by_outputs` undoes it. Returns how many were turned.

    Given a plan's ``thresholds``, one for each of them, those with 0 stay: the small-row linear kernel wants them as they are.
    """
    found = down_projections(model) if isinstance(model, nn.Module) else []
    if thresholds is not None and len(thresholds) == len(found):
        found = [module for module, threshold in zip(found, thresholds) if threshold]
    turned = 0
    for module in found:
        weight = module.weight
        plain = type(weight) is nn.Parameter and weight.layout == torch.strided and weight.dtype.is_floating_point
        if not plain or weight.is_meta or weight.is_inference() or not weight.is_contiguous() or not _alone(weight):
            continue
        _turn(weight, by_channels=True)
        if _HOOK not in module.__dict__:
            setattr(module, _HOOK, module.register_state_dict_post_hook(_contiguous))
        turned += 1
    return turned


def store_by_outputs(model: Any) -> int:
    """Undo :func:`store_by_channels`. Returns how many weights were turned back."""
    return _turn_back(_turned(model))


def _turn_back(modules: Sequence[nn.Linear]) -> int:
    for module in modules:
        getattr(module, _HOOK).remove()
        delattr(module, _HOOK)
        _turn(module.weight, by_channels=False)
    return len(modules)


@contextlib.contextmanager
def stored_as_before(model: Any) -> Iterator[None]:
    """Undo whatever :func:`store_by_channels` turns in the block, also after an exception."""
    before = {id(module) for module in _turned(model)}
    try:
        yield
    finally:
        _turn_back([module for module in _turned(model) if id(module) not in before])


@contextlib.contextmanager
def stored_by_outputs(model: Any) -> Iterator[None]:
    """Undo :func:`store_by_channels` for a while: releases of torch differ in what they save of other layouts."""
    found = [module for module in _turned(model) if not module.weight.is_contiguous()]
    for module in found:
        _turn(module.weight, by_channels=False)
    try:
        yield
    finally:
        for module in found:
            _turn(module.weight, by_channels=True)


def _turned(model: Any) -> list[nn.Linear]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, nn.Linear) and _HOOK in module.__dict__]


@torch.no_grad()
def _turn(weight: Tensor, by_channels: bool) -> None:
    # A tensor made under inference mode would make an inference tensor of the parameter.
    with torch.inference_mode(False):
        held = weight.detach()
        weight.data = held.t().contiguous().t() if by_channels else held.contiguous()


def _memory(weight: Tensor) -> int:
    return id(weight) if weight.is_meta or type(weight) is not nn.Parameter else weight.untyped_storage()._cdata


def _alone(weight: Tensor) -> bool:
    """Whether nothing else is known to see the weight's memory."""
    shared = weight.device.type == "cpu" and weight.is_shared()
    return not shared and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def _contiguous(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    held = state.get(prefix + "weight")
    if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
        state[prefix + "weight"] = held.contiguous()
