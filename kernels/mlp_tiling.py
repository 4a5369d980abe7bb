"""Tile sizes of the Triton kernels for feed-forward layers: a static table, cut to the device's shared memory.

Never tuned at run time; ``benchmarks/ffn.py --tune`` measures candidates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from spec_compile.kernels.moe_tiling import Product, fitted
from spec_compile.kernels.tiling import Device, device_of


@dataclass(frozen=True)
class MlpTiling:
    """How a layer is cut.

    Attributes:
        first: gate and up in one launch (a tile holds as many rows of one as of the other), or the one first product.
        gate: the product of the activation, by itself, in sparse steps.
        kept: the other first product of kept channels, by how many a program takes at most (``width``); the last is as wide as
            ``gate``. They share their number of warps.
        fill: programs that share the kept channels, or as many as tiles of ``gate``.
        down, sparse_down: the last product in exact and in sparse steps: width counts outputs, depth channels; so does the
            ``ahead`` of what ``down`` asks for before the launch in front is done.
        splits, sparse_splits: parts of its sum.
        rows: rows of x a tile.
        columns: outputs a program of the last sum.
    """

    first: Product
    gate: Product
    kept: tuple[Product, ...]
    down: Product
    sparse_down: Product
    rows: int
    splits: int = 8
    sparse_splits: int = 8
    fill: int = 264
    columns: int = 128


def choose_mlp_tiling(device: torch.device, dtype: torch.dtype, rows: int, hidden: int, inner: int, out: int) -> MlpTiling:
    """The table: N rows, sizes H, F and H' of the layer."""
    return _choose(device_of(device), dtype.itemsize, rows, hidden, inner, out)


@functools.lru_cache
def _choose(device: Device, itemsize: int, rows: int, hidden: int, inner: int, out: int) -> MlpTiling:
    tall = min(64, max(16, 1 << (rows - 1).bit_length()))
    if itemsize == 4:
        # Exact float32 products run on the ordinary arithmetic units: registers bound the tile.
        plain = Product(32, 32, 4, 3, False)
        one = fitted(plain, 16, 4, device)
        return MlpTiling(one, one, (replace(one, width=16), one), one, one, 16, 4, 4, 2 * device.processors)
    swap = device.capability // 10 == 9

    def product(width: int, depth: int, stages: int, swapped: bool, ahead: int = 0, warps: int = 4) -> Product:
        return fitted(Product(width, depth, warps, stages, swapped, ahead), tall, itemsize, device)

    if tall == 16:
        kept = (product(16, 256, 6, False, warps=2), product(32, 128, 5, False, warps=2), product(64, 64, 6, False, warps=2))
    else:
        kept = (product(16, 256, 5, False), product(32, 256, 3, False), product(64, 128, 3, False))
    return MlpTiling(
        first=product(64, 128, 4, swap, 256), gate=product(64, 128, 4, swap, 256), kept=kept,
        down=product(64, 128, 4, swap, 256), sparse_down=product(64, 64, 3, False, warps=2), rows=tall,
        splits=_splits(device, out, 64, inner // 128), sparse_splits=_splits(device, out, 64, inner // 64),
        fill=2 * device.processors,
    )  # fmt: skip


def _splits(device: Device, out: int, width: int, steps: int) -> int:
    """Enough programs to fill the device a few times, each with a sum that is long enough for its pipeline."""
    splits, tiles = 1, -(-out // width)
    while splits < 16 and tiles * splits < 3 * device.processors and steps >= 16 * splits:
        splits *= 2
    return splits
