"""Tile sizes of the Triton kernels for experts: a static table, cut to the device's shared memory. Never tuned at run time.

``benchmarks/moe.py --tune`` measures candidates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from spec_compile.kernels.tiling import RESERVE, Device, device_of


@dataclass(frozen=True)
class Product:
    """How a product is cut: rows of the weight a tile, depth of a step, warps, pipeline stages, whether the weight is the
    left operand, and elements of each row that are asked for ahead of the pipeline (a power of two, or 0)."""

    width: int
    depth: int
    warps: int
    stages: int
    swap: bool
    ahead: int = 0


@dataclass(frozen=True)
class ExpertTiling:
    """The two products, rows of x a tile, splits of the second sum, and columns a program of the last sum."""

    up: Product
    down: Product
    rows: int
    splits: int = 1
    columns: int = 128


def shared_bytes(product: Product, rows: int, itemsize: int) -> int:
    """Shared memory of a product: ``stages`` buffers of the weight and of x, or its float32 result to be laid out anew."""
    buffers = product.stages * (product.width + rows) * product.depth * itemsize
    return max(buffers, product.width * (rows + 1) * 4)


def fitted(product: Product, rows: int, itemsize: int, device: Device) -> Product:
    """The product with as many stages, and then as much depth, as the device has room for."""
    while shared_bytes(product, rows, itemsize) + RESERVE > device.shared_bytes:
        if product.stages > 2:
            product = replace(product, stages=product.stages - 1)
        else:
            product = replace(product, depth=product.depth // 2)
    return product


def choose_expert_tiling(
    device: torch.device, dtype: torch.dtype, rows: int, experts: int, k: int, hidden: int, inner: int
) -> ExpertTiling:
    """The table: N rows that choose ``k`` of ``experts`` each, hidden and inner sizes of an expert."""
    return _choose(device_of(device), dtype.itemsize, rows, experts, k, hidden, inner)


@functools.lru_cache
def _choose(device: Device, itemsize: int, rows: int, experts: int, k: int, hidden: int, inner: int) -> ExpertTiling:
    pairs = rows * k
    # Where choices spread over many experts, a tile for all rows would mostly be padding: further rows take another turn.
    likely = min(rows, -(-4 * pairs // experts))
    tall = min(64, max(16, 1 << (likely - 1).bit_length()))
    distinct = experts * (1 - (1 - 1 / experts) ** pairs)
    if itemsize == 4:
        # Exact float32 products run on the ordinary arithmetic units: registers bound the tile.
        plain = Product(32, 32, 4, 3, False)
        return ExpertTiling(fitted(plain, 16, 4, device), fitted(plain, 16, 4, device), 16)
    swap = device.capability // 10 == 9

    def product(tiles: float, steps: int) -> Product:
        # One tile a processor needs a deep pipeline; short sums need neighbours that work while they start and end.
        stages = 6 if tiles <= device.processors and steps >= 6 else 3 if steps <= 8 else 4
        return fitted(Product(64, 128, 4, stages, swap, 256), tall, itemsize, device)

    up = product(distinct * -(-inner // 32), -(-hidden // 128))
    steps = -(-inner // 128)
    tiles = distinct * -(-hidden // 64)
    splits = 1
    while splits < 8 and tiles * splits < 6 * device.processors and steps >= 16 * splits:
        splits *= 2
    down = product(tiles * splits, steps // splits)
    return ExpertTiling(up, down, tall, splits)
