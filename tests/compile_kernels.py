"""Compile every Triton kernel for compute capability 9.0, without a GPU: the interpreter accepts what the compiler refuses.

Run as a script, in a process where TRITON_INTERPRET is not set; prints a line for each kernel that compiles.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spec_compile.kernels import (
    attention_triton,
    block_summary_triton,
    linears_triton,
    live_blocks_triton,
    select_blocks_triton,
)

TARGET = GPUTarget("cuda", 90, 32)


def build(label: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: Any) -> None:
    """Arguments that are neither pointers nor constants are ``scale`` and ``softcap`` (float) or integers."""
    signature: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(position,)] = constants[name]
        elif name in pointers:
            signature[name] = "*" + pointers[name]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    unknown = (set(constants) | set(pointers)) - set(kernel.arg_names)
    assert not unknown, unknown
    triton.compile(ASTSource(kernel, signature, values, attributes), target=TARGET, options={"num_warps": 4, **options})
    print(label, flush=True)


def attention() -> None:
    for kind, mask, listed, inline, cap in ((0, "u8", True, False, False), (1, "u8", True, False, True),
                                            (2, "bf16", True, True, False), (1, "u8", False, True, False)):  # fmt: skip
        for splits in (1, 16):
            constants = {
                "HEADS": 32, "GROUP": 4, "D": 128, "DV": 128, "BD": 128, "BDV": 128, "M": 64, "TILES": 1, "BLOCK": 64,
                "SPLITS": splits, "SCAN": 64, "MASK_KIND": kind, "HIDDEN": -1e38, "LISTED": listed, "FLAGGED": listed,
                "INLINE": inline, "HAS_CAP": cap, "HAS_SINKS": splits == 1, "PRECISION": None, "PDL": True,
                "q_d": 1, "k_d": 1, "v_d": 1, "o_d": 1,
            }  # fmt: skip
            pointers = {
                "Q": "bf16", "K": "bf16", "V": "bf16", "MASK": mask, "IDS": "i32", "COUNT": "i32", "FULL": "u8", "SINKS": "bf16",
                "TOP": "fp32", "TOTAL": "fp32", "PARTIAL": "fp32", "OUT": "bf16",
            }  # fmt: skip
            build(f"attention mask {kind} listed {listed} splits {splits}", attention_triton._split_kernel, pointers, constants,
                  num_stages=3)  # fmt: skip
    constants = {"HEADS": 32, "DV": 128, "BDV": 128, "SPLITS": 16, "BSPLITS": 16, "HAS_SINKS": True, "PDL": True, "o_d": 1}
    pointers = {"TOP": "fp32", "TOTAL": "fp32", "PARTIAL": "fp32", "SINKS": "bf16", "OUT": "bf16"}
    build("attention reduce", attention_triton._reduce_kernel, pointers, constants)


def live_blocks() -> None:
    for kind in ("u8", "bf16", "fp32"):
        constants = {"BLOCK": 64, "BLOCKS": 4, "ROWS": 16, "IS_BOOL": kind == "u8", "HIDDEN": -1e38, "m_s": 1}
        build(f"live blocks {kind}", live_blocks_triton._look_kernel, {"MASK": kind, "FLAGS": "u8"}, constants)
    pointers = {"FLAGS": "u8", "IDS": "i32", "COUNT": "i32", "FULL": "u8"}
    build("live blocks list", live_blocks_triton._compact_kernel, pointers, {"CHUNK": 2048})


def linears() -> None:
    names = [f"{letter}{i}" for letter in "WBY" for i in range(4)]
    for count, rows, width, depth, swap in ((1, 16, 64, 128, True), (3, 64, 64, 64, True), (4, 16, 32, 128, False)):
        constants = {"COUNT": count, "HAS_BIAS": count == 3, "M": rows, "BN": width, "BK": depth, "EVEN": True, "SWAP": swap}
        build(f"linears {count}", linears_triton._linears_kernel, dict.fromkeys(["X", *names], "bf16"), constants, num_stages=4)


def selection() -> None:
    for kind, bounds, query, mean in (("bf16", False, 0, False), ("bf16", True, 2, True), ("fp16", True, 1, False),
                                      ("bf16", True, 3, False), ("fp32", False, 2, False)):  # fmt: skip
        constants = {
            "KV_HEADS": 8, "GROUP": 4, "D": 128, "BD": 128, "M": 32, "BN": 64, "QUERY": query, "BOUNDS": bounds, "MEAN": mean,
            "WIDE": query == 3, "q_d": 1, "s_d": 1,
        }  # fmt: skip
        build(f"block scores {kind} {query}", select_blocks_triton._score_kernel, {"Q": kind, "SUMMARY": kind, "SCORES": "fp32"},
              constants)  # fmt: skip
    pointers = {
        "SCORES": "fp32", "IDS": "i32", "COUNT": "i32", "FULL": "u8", "POSITION": "i64", "GATE": "i64", "OUT_IDS": "i32",
        "OUT_COUNT": "i32", "OUT_FULL": "u8",
    }  # fmt: skip
    for joint in (False, True):
        for pooled in (False, True):
            constants = {"HEADS": 8, "JOINT": joint, "POOLED": pooled, "CHUNK": 2048, "SHARE": 0.3}
            build(f"contest joint {joint} pooled {pooled}", select_blocks_triton._contest_kernel, pointers, constants)
    types = {"bf16": tl.bfloat16, "fp32": tl.float32}
    for kind in types:
        for bounds in (False, True):
            for decide in (False, True):
                constants = {
                    "D": 128, "BD": 128, "BLOCK": 64, "BOUNDS": bounds, "TYPE": types[kind], "PROGRAMS": 1 if decide else 64,
                    "DECIDE": decide, "k_d": 1, "s_d": 1,
                }  # fmt: skip
                pointers = {"TABLE": "i64", "VALID": "i32", "POSITION": "i64", "START": "i32"}
                build(f"summary {kind} {bounds} {decide}", block_summary_triton._summary_kernel, pointers, constants)


if __name__ == "__main__":
    attention()
    live_blocks()
    linears()
    selection()
