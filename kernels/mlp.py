"""Feed-forward layers at verify's row counts: the meaning of the two operators, and which code computes them.

Skipping channels whose activation is small is the rule of "Accelerate Speculative Decoding with Sparse Computation in
Verification" (arXiv 2512.21911), a threshold on the activation as in CATS (2404.08763). Draft rows share the weights that are
read, so what saves bytes is the union of the rows' channels; one set for all rows bounds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

from spec_compile.kernels import availability
from spec_compile.kernels.linears import fewest_launches
from spec_compile.kernels.moe import wide_dtype
from spec_compile.kernels.step_mode import known_exact

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# Bounds of the kernels: rows a call, channels.
MAX_ROWS, MAX_CHANNELS = 64, 1 << 16
# Where the fused kernel replaces linear calls in exact steps: measured on an H200 at 1 to 32 rows, two first weights and a last
# one in bfloat16, 4096 x 14336 each. Larger weights were not, but are read in the same tiles; more rows, smaller weights and
# plain layers keep linear calls.
FUSED_ROWS, FUSED_LEAST = 32, 4096 * 14336
# Union of the rows' channels up to which a step that skips the others was measured to be faster than an exact one, by kind of
# device: on an H200 (4096 x 14336, 1 to 32 rows, bfloat16) 1.2 times at 0.5 (1.0 to 1.1 with the contest for a budget), slower
# from 0.75 on, nothing between was measured; on one CPU core (9 rows, float32) as fast for 576 x 1536 and 1.7 times for 2048 x
# 8192 at 0.1. On CPU channels are gathered up to that union, and masked past it.
PAYS_BELOW = {"cuda": 0.5, "cpu": 0.1}
# Called with the down weight, channels that each row keeps [N] and channels that a step reads [], for each sparse call.
_watchers: list[Callable[[Tensor, Tensor, Tensor], Any]] = []


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return silu(x)
    if activation == "relu":
        return relu(x)
    if activation == "relu2":
        return relu(x).square()
    return gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def mlp_reference(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.mlp`; every product is rounded to x's dtype."""
    if gate is None:
        inner = activated(linear(x, up, up_bias), activation)
    else:
        inner = activated(linear(x, gate, gate_bias), activation) * linear(x, up, up_bias)
    return linear(inner, down, down_bias)


def channel_scores(acted: Tensor) -> Tensor:
    """What one set for all rows is chosen by: the sum over rows of squared activations, ``[N, F]`` to ``[F]``."""
    return acted.square().sum(0)


def kept_channels(acted: Tensor, threshold: float, keep: int, joint: bool) -> Tensor:
    """bool ``[N, F]``: the channels that each row keeps of activations in float32; a NaN stays."""
    if keep > 0:
        chosen = channel_scores(acted).sort(descending=True, stable=True).indices[:keep]
        held = torch.zeros(acted.shape[1], dtype=torch.bool, device=acted.device)
        # By comparison with a full mask and not by index: deterministic, and nothing is read on the host.
        return held.scatter(0, chosen, True).expand_as(acted)
    own = ~(acted.abs() < threshold)
    return own.any(0).expand_as(acted) if joint else own


def first_activations(
    x: Tensor, gate: Tensor | None, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, name: str
) -> Tensor:
    """Activations ``[N, F]`` in x's dtype."""
    return activated(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias), name)


def mlp_sparse_reference(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.mlp_sparse`. Never looks at data on the host: may be captured.

    Computed in float32 (float64 for float64) over copies of the weights.
    """
    wide = wide_dtype(x.dtype)
    rows = x.reshape(-1, x.shape[-1]).to(wide)
    first, second, third = (None if w is None else w.to(wide) for w in (gate, up, down))
    biases = [None if b is None else b.to(wide) for b in (gate_bias, up_bias, down_bias)]
    assert second is not None and third is not None
    acted = first_activations(rows, first, second, biases[0], biases[1], activation)
    kept = kept_channels(acted, threshold, keep, joint) | (switch == 0)
    read = kept.any(0)
    inner = acted
    if gate is not None:
        inner = acted * linear(rows, torch.where(read.unsqueeze(1), second, 0), biases[1])
    out = linear(torch.where(kept, inner, 0), torch.where(read, third, 0), biases[2])
    return out.to(x.dtype).reshape(*x.shape[:-1], down.shape[0])


def masked(x: Tensor, acted: Tensor, kept: Tensor, other: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
    """The layer of ``x`` from its activations and its other factor, channels that are not kept zeroed."""
    inner = acted if other is None else acted * other
    return linear(torch.where(kept, inner, 0), down, down_bias).reshape(*x.shape[:-1], down.shape[0])


def mlp_sparse_gathered(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
    most: float = PAYS_BELOW["cpu"],
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.mlp_sparse`; for CPU: reads data on the host. Products are rounded to x's dtype.

    Gathers weights of up to a share ``most`` of the channels; past it, copying would take longer than computing all of them.
    Where every row keeps every channel, the bits of :func:`mlp_reference`.
    """
    if not int(switch):
        return mlp_reference(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    rows = x.reshape(-1, x.shape[-1])
    acted = first_activations(rows, gate, up, gate_bias, up_bias, activation)
    kept = kept_channels(acted.to(wide_dtype(x.dtype)), threshold, keep, joint)
    if bool(kept.all()):
        return mlp_reference(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    read = kept.any(0).nonzero().squeeze(1)
    if len(read) > most * up.shape[0]:
        return masked(x, acted, kept, None if gate is None else linear(rows, up, up_bias), down, down_bias)
    inner, kept = acted[:, read], kept[:, read]
    if gate is not None:
        inner = inner * linear(rows, up[read], None if up_bias is None else up_bias[read])
    out = linear(torch.where(kept, inner, 0), down[:, read], down_bias)
    return out.reshape(*x.shape[:-1], down.shape[0])


def _why_no_kernel(x: Tensor, given: list[Tensor | None]) -> str | None:
    if x.device.type != "cuda":
        return f"device {x.device.type}"
    if any(t is not None and t.device != x.device for t in given):
        return "operands on several devices"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype}"
    if any(t is not None and t.dtype != x.dtype for t in given):
        return "operands of several dtypes"
    missing = availability.why_no_triton()
    if missing is None and availability.capability(x.device) < 80:
        missing = "compute capability below 8.0 is not tested"
    return missing


def rows_of(x: Tensor) -> Any:
    """Rows of ``[..., H]``; may be a symbol."""
    rows: Any = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def why_no_mlp_kernel(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Reason why the kernels cannot compute this layer, or None; looks at (fake) operands, never at data."""
    first = [w for w in (gate, up) if w is not None]
    if any(w.stride(1) != 1 for w in first):
        return "rows of the first weights are not contiguous"
    if down.stride(1) != 1 and down.stride(0) != 1:
        return "the last weight is contiguous in no dimension"
    if rows_of(x) > MAX_ROWS:
        return f"there are more than {MAX_ROWS} rows"
    if up.shape[0] > MAX_CHANNELS:
        return f"{int(up.shape[0])} channels are more than {MAX_CHANNELS}"
    return _why_no_kernel(x, [*first, down, gate_bias, up_bias, down_bias])


def why_no_sparse_kernel(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> str | None:  # fmt: skip
    """The same for steps that skip channels: those of the last weight must lie together."""
    if down.stride(0) != 1:
        return "the last weight is stored by outputs, not by channels: spec_compile.prepare(model, ffn=True) turns those it knows"
    return why_no_mlp_kernel(x, gate, up, down, gate_bias, up_bias, down_bias)


def why_not_faster(rows: Any, channels: int, hidden: int, itemsize: int, capability: int, gated: bool = True) -> str | None:
    """Reason why exact steps leave a layer's linear calls to cuBLAS, or None where the fused kernel was measured to be faster.

    Args:
        rows: of a step; a symbol is bounded by a guard.
        channels, hidden: F and H. itemsize: of the weights. capability: of the device, major * 10 + minor. gated: whether there
            are two first weights.
    """
    if capability // 10 != 9:
        return "the fused kernel was measured on Hopper only"
    if itemsize != 2:
        return "the fused kernel was measured with 16-bit weights only"
    if not gated:
        return "the fused kernel was measured with two first weights only"
    if channels * hidden < FUSED_LEAST:
        return f"the fused kernel was measured at 14336 x 4096 only, and {channels} x {hidden} is less"
    return None if rows <= FUSED_ROWS else f"the fused kernel was measured up to {FUSED_ROWS} rows only"


def mlp(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.mlp`."""
    run: Any = mlp_reference
    if x.numel() and why_no_mlp_kernel(x, gate, up, down, gate_bias, up_bias, down_bias) is None:
        from spec_compile.kernels.mlp_triton import mlp_triton

        run = mlp_triton
    return run(x, gate, up, down, gate_bias, up_bias, down_bias, activation)


def mlp_exact(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """Arguments and result of :func:`mlp`, by what serves the layer in a graph without a plan: the fused kernel where it is
    faster, else linear calls, those of few rows in one launch.
    """
    if x.device.type != "cuda":
        return mlp_reference(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    if why_no_mlp_kernel(x, gate, up, down, gate_bias, up_bias, down_bias) is None:
        capability = availability.capability(x.device)
        if why_not_faster(rows_of(x), up.shape[0], up.shape[1], up.itemsize, capability, gate is not None) is None:
            return mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    if gate is None:
        inner = activated(fewest_launches(x, [up], [up_bias])[0], activation)
    else:
        first, second = fewest_launches(x, [gate, up], [gate_bias, up_bias])
        inner = activated(first, activation) * second
    return fewest_launches(inner, [down], [down_bias])[0]


def mlp_sparse(
    x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    down_bias: Tensor | None, activation: str, switch: Tensor, threshold: float, keep: int, joint: bool,
) -> Tensor:  # fmt: skip
    """See :func:`spec_compile.kernels.library.mlp_sparse`."""
    run: Any = mlp_sparse_gathered if x.device.type == "cpu" else mlp_sparse_reference
    if known_exact():
        return mlp_exact(x, gate, up, down, gate_bias, up_bias, down_bias, activation)
    if x.numel() and why_no_sparse_kernel(x, gate, up, down, gate_bias, up_bias, down_bias) is None:
        from spec_compile.kernels.mlp_sparse_triton import mlp_sparse_triton

        run = mlp_sparse_triton
    if _watchers:
        acted = first_activations(x.reshape(-1, x.shape[-1]), gate, up, gate_bias, up_bias, activation)
        kept = kept_channels(acted.to(wide_dtype(x.dtype)), threshold, keep, joint) | (switch == 0)
        for watch in _watchers:
            watch(down, kept.sum(1), kept.any(0).sum())
    return run(x, gate, up, down, gate_bias, up_bias, down_bias, activation, switch, threshold, keep, joint)


@contextlib.contextmanager
def watch_channels(watch: Callable[[Tensor, Tensor, Tensor], Any]) -> Iterator[None]:
    """Have ``watch(down, channels each row keeps [N], channels read [])`` called for every sparse call that is not captured."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
