"""Tile sizes of the Triton attention kernel: a static table, cut to the device's shared memory. Never tuned at run time.

The choices were measured on an H200 with bfloat16 and head dim 128; other dims, types and devices follow by what fits.
``benchmarks/tune_attention.py`` measures the candidates.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiling:
    """How one call is cut: rows a tile, splits of the block list, warps, pipeline stages, dependent launch, keys a tile, and
    how many tiles fewer the last split reads, because its last one mostly needs the mask and no pipeline.

    Blocks of fewer keys fill a tile together; one of more is a tile by itself.
    """

    rows: int
    splits: int
    warps: int
    stages: int
    pdl: bool
    keys: int = 64
    last: int = 4


@dataclass(frozen=True)
class Device:
    """What the choice depends on: ``capability`` major * 10 + minor, multiprocessors, shared memory a block may use."""

    capability: int
    processors: int
    shared_bytes: int


# The emulated device of the Triton interpreter: small, so that few programs cover many splits.
INTERPRETER = Device(capability=0, processors=4, shared_bytes=100 << 10)


# Kept free of the estimate below, for what the compiler adds.
RESERVE = 4096


@functools.lru_cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared = int(getattr(properties, "shared_memory_per_block_optin", 100 << 10))
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count, shared)


def shared_bytes(rows: int, keys: int, dims: tuple[int, int], itemsize: int, stages: int) -> int:
    """Shared memory of the split kernel: ``stages`` buffers of K and V, and a tile of queries, weights or results."""
    return (stages * keys * sum(dims) + rows * max(*dims, keys)) * itemsize


def padded_dims(dim: int, v_dim: int) -> tuple[int, int]:
    """Powers of two that the kernel works on."""
    return max(16, 1 << (dim - 1).bit_length()), max(16, 1 << (v_dim - 1).bit_length())


def choose_tiling(
    device: torch.device, dtype: torch.dtype, batch: int, kv_heads: int, rows: int, dim: int, v_dim: int, block_size: int
) -> Tiling:
    """The table: ``rows`` is T * G of one KV head.

    Raises:
        ValueError: no tile of this shape fits the device (:func:`why_not_tiled` says so beforehand).
    """
    return _choose(device_of(device), dtype.itemsize, batch, kv_heads, rows, dim, v_dim, block_size)


@functools.lru_cache
def _choose(device: Device, itemsize: int, batch: int, kv_heads: int, rows: int, dim: int, v_dim: int, block_size: int) -> Tiling:
    dims = padded_dims(dim, v_dim)
    wide = 1 << max(4, (rows - 1).bit_length())
    if itemsize == 2:
        # Hopper's matrix unit works on 64 rows; fewer fall back to an older instruction that loads its operands twice.
        smallest = 64 if device.capability // 10 == 9 else 16
        tile, wanted = min(64, max(smallest, wide)), 4
    else:
        # Exact float32 products run on the ordinary arithmetic units: registers bound the tile.
        tile, wanted = min(32, wide), 2
    # Small blocks give way where even one buffer of 64 keys is too much; their number of splits never depends on their size.
    for keys in (max(64, block_size), 32, 16):
        fitting = [
            (height, stages)
            for height in (64, 32, 16)
            for stages in range(wanted, 0, -1)
            if height <= tile and shared_bytes(height, keys, dims, itemsize, stages) + RESERVE <= device.shared_bytes
        ]
        if fitting or keys // 2 < block_size:
            break
    if not fitting:
        raise ValueError(f"head dims {dim} and {v_dim} with blocks of {block_size} need more shared memory than the device has")
    # A pipeline needs two buffers: prefer it to a taller tile.
    tile, stages = next((found for found in fitting if found[1] >= 2), fitting[0])
    tiles = -(-rows // tile)
    warps = 8 if sum(dims) > 256 or (itemsize == 4 and sum(dims) > 128) else 4
    groups = batch * kv_heads * tiles

    def resident(depth: int) -> int:
        # Every resident block takes one more KiB for the system.
        each = shared_bytes(tile, keys, dims, itemsize, depth) + 1024
        return max(1, min(2, (device.shared_bytes + 1024) // each))

    def idle(depth: int) -> float:
        """Share of the device that waits while the last splits run."""
        seats = device.processors * resident(depth)
        rounds = max(1, -(-groups // seats))
        return 1 - max(1, seats // groups) * groups / (rounds * seats)

    # One deep pipeline a processor beats two shallower ones, unless splits of equal size then leave processors empty, or splits
    # are few, and so long that nothing hides their ends.
    shallow = tiles > 1 or idle(stages) > 0.1 or device.processors // groups < 4
    if stages > 2 and resident(stages) == 1 and resident(stages - 1) == 2 and shallow:
        stages -= 1
    splits = device.processors * resident(stages) // groups
    return Tiling(tile, max(1, min(64, splits)), warps, stages, device.capability >= 90, keys)


def why_not_tiled(device: torch.device, dtype: torch.dtype, dim: int, v_dim: int, block_size: int) -> str | None:
    """Reason why no tiling exists, or None."""
    try:
        choose_tiling(device, dtype, 1, 1, 128, dim, v_dim, block_size)
    except ValueError as error:
        return str(error)
    return None
