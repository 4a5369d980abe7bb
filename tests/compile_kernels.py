"""Compile every Triton kernel for compute capability 9.0, without a GPU: the interpreter accepts what the compiler refuses.

Run as a script, in a process where TRITON_INTERPRET is not set; prints a line for each kernel that compiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spec_compile.kernels import (
    attention_triton,
    block_mass_triton,
    block_scores_triton,
    block_summary_triton,
    linears_triton,
    live_blocks_triton,
    mlp_sparse_triton,
    mlp_tiling,
    mlp_triton,
    moe_experts_triton,
    moe_limit_triton,
    moe_route_triton,
    moe_tiling,
    narrow_linear_triton,
    select_blocks_triton,
    streamed_contest_triton,
    tiling,
)

TARGET = GPUTarget("cuda", 90, 32)
# What a program of an H200 may use.
SHARED = 232_448
LONGS = ("w_half",)
FLOATS = ("scale", "softcap", "limit", "alpha", "epsilon", "beta", "ratio", "threshold")


def build(
    label: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], aligned: Iterable[str] = (), **options: Any
) -> Any:
    """Arguments that are neither pointers nor constants are floats (``FLOATS``) or integers (``LONGS`` of 64 bits), ``aligned``
    ones divisible by 16."""
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
            signature[name] = "fp32" if name in FLOATS else "i64" if name in LONGS else "i32"
            if name in aligned:
                attributes[(position,)] = [["tt.divisibility", 16]]
    unknown = (set(constants) | set(pointers) | set(aligned)) - set(kernel.arg_names)
    assert not unknown, unknown
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=TARGET, options={"num_warps": 4, **options})
    print(label, flush=True)
    return compiled


def attention() -> None:
    for kind, mask, listed, inline, cap, all_splits in (
        (0, "u8", True, False, False, (16,)), (1, "u8", True, False, True, (1, 16)), (2, "bf16", True, True, False, (16,)),
        (1, "u8", False, True, False, (1,)),
    ):  # fmt: skip
        for splits in all_splits:
            constants = {
                "HEADS": 32, "GROUP": 4, "D": 128, "DV": 128, "BD": 128, "BDV": 128, "M": 64, "TILES": 1, "BLOCK": 64,
                "SUBS": 1, "LAST": 4, "SPLITS": splits, "SCAN": 64, "MASK_KIND": kind, "HIDDEN": -1e38, "LISTED": listed,
                "FLAGGED": listed,
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


def attention_in_small_blocks() -> None:
    """Keys of several blocks a tile: still copied 16 bytes at a time, in as many buffers as those of whole blocks."""
    pointers = {
        "Q": "bf16", "K": "bf16", "V": "bf16", "MASK": "u8", "IDS": "i32", "COUNT": "i32", "FULL": "u8", "SINKS": "bf16",
        "TOP": "fp32", "TOTAL": "fp32", "PARTIAL": "fp32", "OUT": "bf16",
    }  # fmt: skip
    strides = [f"{x}_{axis}" for x in "qkv" for axis in ("b", "h", "s" if x != "q" else "t")]
    for block, dim, stages, kind in (
        (8, 128, 3, 1),
        (16, 128, 3, 1),
        (8, 64, 4, 1),
        (16, 64, 4, 1),
        (8, 128, 3, 0),
        (32, 128, 3, 2),
    ):
        inline, flagged = kind == 2, kind == 1
        constants = {
            "HEADS": 32, "GROUP": 4, "D": dim, "DV": dim, "BD": dim, "BDV": dim, "M": 64, "TILES": 1, "BLOCK": block,
            "SUBS": 64 // block, "LAST": 4, "SPLITS": 16, "SCAN": 64, "MASK_KIND": kind, "HIDDEN": -1e38, "LISTED": True,
            "FLAGGED": flagged,
            "INLINE": inline, "HAS_CAP": False, "HAS_SINKS": False, "PRECISION": None, "PDL": True,
            "q_d": 1, "k_d": 1, "v_d": 1, "o_d": 1,
        }  # fmt: skip
        compiled = build(f"attention blocks of {block} dim {dim} mask {kind}", attention_triton._split_kernel,
                         {**pointers, "MASK": "bf16" if inline else "u8"}, constants, strides, num_stages=stages)  # fmt: skip
        assert compiled.metadata.shared <= tiling.shared_bytes(64, 64, (dim, dim), 2, stages) + tiling.RESERVE
        copies = re.findall(r"cp\.async\.c[ag]\.\S+ .*?, 0x([0-9a-f]+), ", compiled.asm["ptx"])
        # A thread's share of K and V of one tile, once in the loop and once for each buffer filled ahead of it.
        assert copies == ["10"] * (stages * 2 * 64 * dim * 2 // 16 // 128), (len(copies), {*copies})


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
    for rows, depth in narrow_linear_triton._DEPTH.items():
        for even in (True, False):
            constants = {"HAS_BIAS": even, "M": rows, "BN": 8, "BK": depth, "PARTS": 4, "EVEN": even, "PDL": True}
            pointers = dict.fromkeys("XWBY", "bf16")
            built = build(f"narrow linear {rows}", narrow_linear_triton._narrow_linear_kernel, pointers, constants)
            assert built.metadata.shared <= SHARED, built.metadata.shared


def selection() -> None:
    for kind, bounds, query, aggregate in (
        ("bf16", False, 0, "max"), ("bf16", True, 2, "mean"), ("bf16", False, 2, "softmax"), ("fp16", True, 1, "max"),
        ("bf16", True, 3, "softmax"), ("fp32", False, 2, "max"),
    ):  # fmt: skip
        constants = {
            "KV_HEADS": 8, "GROUP": 4, "D": 128, "BD": 128, "M": 32, "BN": 64, "QUERY": query, "BOUNDS": bounds,
            "WIDE": query == 3, "BLOCK": 64, "SHARE": 0.3, "PARTS": 16, "PDL": True, "q_d": 1, "s_d": 1,
        }  # fmt: skip
        pointers = {
            "Q": kind, "SUMMARY": kind, "IDS": "i32", "COUNT": "i32", "POSITION": "i64", "GATE": "i64", "TOPS": "fp32",
            "SUMS": "fp32",
        }  # fmt: skip
        if aggregate == "softmax":
            found = build(f"row sums {kind} {query}", block_scores_triton._row_sums_kernel, pointers, constants, num_stages=3)
            q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
            words = ("first", "first_last", "all", "mean")
            assert found.metadata.shared <= block_scores_triton._shared_bytes(q, 32, words[query], aggregate, 3)
        pointers["SCORES"] = "fp32" if query == 1 else "u32"
        constants.update({"AGGREGATE": aggregate, "ORDERED": query != 1})
        build(f"block scores {kind} {query} {aggregate}", block_scores_triton._score_kernel, pointers, constants)
    pointers = {
        "SCORES": "fp32", "KEYS": "u32", "IDS": "i32", "COUNT": "i32", "FULL": "u8", "POSITION": "i64", "GATE": "i64",
        "OUT_IDS": "i32", "OUT_COUNT": "i32", "OUT_FULL": "u8",
    }  # fmt: skip
    aligned = ("blocks", "i_b", "f_b")
    for chunk, scored, pooled in ((256, True, False), (2048, False, True), (16_384, False, False), (16_384, True, True)):
        constants = {
            "HEADS": 8, "POOLED": pooled, "CHUNK": chunk, "PART": min(chunk, select_blocks_triton._MOST_IN_PART), "BLOCK": 64,
            "SHARE": 0.3, "SCORED": scored, "PDL": True,
        }  # fmt: skip
        found = build(f"contest of {chunk} scored {scored} pooled {pooled}", select_blocks_triton._contest_kernel, pointers,
                      constants, aligned, num_warps=select_blocks_triton.contest_warps(chunk))  # fmt: skip
        assert found.metadata.shared <= 48 << 10
    for joint, scored, pooled in ((False, True, False), (True, False, False), (True, True, True)):
        constants = {
            "HEADS": 8, "JOINT": joint, "POOLED": pooled, "CHUNK": 4096, "GROUPS": 16, "BLOCK": 64, "SHARE": 0.3,
            "SCORED": scored, "PDL": True,
        }  # fmt: skip
        build(f"contest in memory joint {joint} scored {scored} pooled {pooled}", streamed_contest_triton.streamed_contest_kernel,
              pointers, constants, aligned, num_warps=16)  # fmt: skip
    types = {"bf16": tl.bfloat16, "fp32": tl.float32}
    for kind, bounds, decide in (("bf16", False, False), ("bf16", True, True), ("fp32", True, False), ("fp32", False, True)):
        constants = {
            "D": 128, "BD": 128, "BLOCK": 64, "BOUNDS": bounds, "TYPE": types[kind], "PROGRAMS": 1 if decide else 64,
            "DECIDE": decide, "PDL": True, "k_d": 1, "s_d": 1,
        }  # fmt: skip
        pointers = {"TABLE": "i64", "VALID": "i32", "POSITION": "i64", "START": "i32"}
        build(f"summary {kind} {bounds} {decide}", block_summary_triton._summary_kernel, pointers, constants)


def masses() -> None:
    pointers = {
        "IDS": "i32", "COUNT": "i32", "GATE": "i64", "BLOCK_SUMS": "fp32", "SPLIT_SUMS": "fp32", "MASS": "fp32",
    }  # fmt: skip
    strides = ("q_b", "q_h", "q_t", "k_b", "k_h", "k_s")
    for kind, rows, block, query, mask in (("bf16", 16, 64, 0, "u8"), ("bf16", 16, 8, 1, "bf16"), ("bf16", 64, 16, 2, "u8"),
                                           ("bf16", 128, 128, 2, "bf16"), ("bf16", 16, 64, 3, "u8"), ("fp16", 128, 64, 3, "fp16"),
                                           ("fp32", 32, 64, 2, "u8")):  # fmt: skip
        wide = kind == "fp32"
        constants = {
            "KV_HEADS": 8, "GROUP": 4, "D": 128, "BD": 128, "M": rows, "BLOCK": block, "SUBS": max(1, 64 // block), "SPLITS": 48,
            "SLICE": 64, "QUERY": query, "MASK_KIND": 1 if mask == "u8" else 2, "HIDDEN": -1e38, "HAS_CAP": rows == 16,
            "PRECISION": "ieee" if wide else None, "PDL": True, "q_d": 1, "k_d": 1, "m_s": 1,
        }  # fmt: skip
        stages = 2 if wide else 3 if block == 128 else 4
        found = build(f"block mass {kind} rows {rows} block {block} query {query}", block_mass_triton._sum_kernel,
                      {**pointers, "Q": kind, "K": kind, "MASK": mask}, constants, strides, num_stages=stages,
                      num_warps=8 if rows > (16 if wide else 64) else 4)  # fmt: skip
        size, keys = 4 if wide else 2, max(64, block)
        queries = rows * 128 * size * (2 if query == 3 and not wide else 1)
        assert found.metadata.shared <= queries + rows * keys * 4 + stages * keys * 128 * size
        assert set(re.findall(r"cp\.async\.c[ag]\.\S+ .*?, 0x([0-9a-f]+), ", found.asm["ptx"])) == {"10"}
    for rows, sinks in ((16, False), (128, True)):
        constants = {
            "KV_HEADS": 8, "GROUP": 4, "M": rows, "BLOCK": 64, "SPLITS": 48, "BSPLITS": 64, "BLOCKS": 64, "HAS_SINKS": sinks,
            "PDL": True,
        }  # fmt: skip
        build(f"block mass shares of {rows} rows", block_mass_triton._share_kernel, {**pointers, "SINKS": "bf16"}, constants)


def experts() -> None:
    """The table's choices for models in use: weights copied 16 bytes at a time, and 64 of their rows a matrix instruction."""
    hopper = tiling.Device(90, 132, 227 << 10)
    strides = ("x_n", "w_e", "w_n", "w_half", "b_e", "hidden", "inner")
    for kind, rows, count, k, hidden, inner, activation, swapped, mixed, index in (
        ("bf16", 8, 128, 8, 2048, 768, "silu", False, False, "i64"), ("bf16", 64, 128, 8, 2048, 768, "silu", False, False, "i64"),
        ("bf16", 8, 8, 2, 4096, 14336, "silu", False, False, "i64"), ("bf16", 1, 8, 2, 4096, 14336, "silu", False, False, "i32"),
        ("bf16", 64, 8, 2, 4096, 14336, "gelu_tanh", False, False, "i64"),
        ("bf16", 8, 8, 2, 4096, 14336, "silu", True, False, "i64"),
        ("bf16", 9, 32, 4, 2880, 2880, "swiglu_oai", True, True, "i64"),
        ("fp16", 33, 60, 4, 1000, 500, "gelu", False, False, "i64"), ("fp32", 5, 8, 2, 4096, 1024, "relu", False, False, "i64"),
    ):  # fmt: skip
        size = 4 if kind == "fp32" else 2
        chosen = moe_tiling._choose(hopper, size, rows, count, k, hidden, inner)
        pairs = rows * k
        listed = max(64, triton.next_power_of_2(pairs))
        common = {
            "EXPERTS": count, "PAIRS": listed, "CHUNK": min(listed, 4096 // chosen.rows), "BY_PAIR": pairs < count,
            "M": chosen.rows, "TRANSPOSED": swapped, "HAS_BIAS": mixed, "PRECISION": "ieee" if size == 4 else None, "PDL": True,
        }  # fmt: skip
        first = {"K": k, "ACTIVATION": activation, "INTERLEAVED": mixed}
        second = {"SPLITS": chosen.splits}
        for name, kernel, product, depth, own in (
            ("gate and up", moe_experts_triton._gate_up_kernel, chosen.up, hidden, first),
            ("down", moe_experts_triton._down_kernel, chosen.down, inner, second),
        ):
            constants = {
                **common, **own, "BN": product.width, "BK": product.depth, "EVEN": depth % product.depth == 0,
                "SWAP": product.swap, "AHEAD": product.ahead if product.ahead <= depth else 0,
            }  # fmt: skip
            types = {"X": kind, "INNER": kind, "CHOICE": index, "W": kind, "BIAS": kind, "PARTS": "fp32"}
            pointers = {name: types[name] for name in kernel.arg_names if name in types}
            found = build(f"experts {name} {kind} {rows} x {k} of {count}{' transposed' * swapped}", kernel, pointers, constants,
                          [name for name in strides if name in kernel.arg_names], num_warps=product.warps,
                          num_stages=product.stages)  # fmt: skip
            assert found.metadata.shared <= moe_tiling.shared_bytes(product, chosen.rows, size) + tiling.RESERVE
            assert set(re.findall(r"cp\.async\.c[ag]\.\S+ .*?, 0x([0-9a-f]+), ", found.asm["ptx"])) == {"10"}
            assert ("wgmma.mma_async.sync.aligned.m64n" in found.asm["ptx"]) == product.swap
            assert ("prefetch.global.L2" in found.asm["ptx"]) == (constants["AHEAD"] > 0)
        constants = {"EXPERTS": count, "K": k, "BN": chosen.columns, "SPLITS": chosen.splits, "PDL": True}
        pointers = {"PARTS": "fp32", "CHOICE": index, "WEIGHT": "fp32", "OUT": kind}
        build(f"experts sum {kind} {k} splits {chosen.splits}", moe_experts_triton._combine_kernel, pointers, constants,
              ("hidden",), num_warps=1)  # fmt: skip


def routes() -> None:
    for kind, count, k, groups, softmax, first in (("bf16", 128, 8, 1, True, True), ("fp32", 256, 8, 8, False, True),
                                                   ("bf16", 8, 2, 1, True, True), ("bf16", 60, 4, 4, True, False),
                                                   ("fp16", 1024, 16, 1, False, False)):  # fmt: skip
        wide, size = moe_route_triton.padded(count, groups)
        constants = {
            "EXPERTS": count, "K": k, "GROUPS": groups, "KEPT": max(1, groups // 2), "G": wide, "S": size, "SOFTMAX": softmax,
            "SCORE_FIRST": first, "RENORMALISE": True, "HAS_BIAS": groups > 1, "PDL": True,
        }  # fmt: skip
        pointers = {"LOGITS": kind, "BIAS": "fp32", "CHOICE": "i64", "WEIGHT": kind}
        build(f"route {kind} {k} of {count} in {groups}", moe_route_triton._route_kernel, pointers, constants, ("l_n",),
              num_warps=1 if wide * size <= 512 else 4)  # fmt: skip


def limits() -> None:
    """Rules that take experts away, at few and at most rows."""
    for rows, k, experts, budget, substitute, kind in ((9, 8, 128, False, False, "i64"), (9, 8, 128, True, False, "i64"),
                                                       (64, 16, 256, True, True, "i32")):  # fmt: skip
        held, wide, all_experts, warps = moe_limit_triton.tile(rows, k, experts, budget)
        pointers = {"CHOICE": kind, "OUT_CHOICE": kind, "GATE": "i64", "LOGITS": "bf16", "BIAS": "fp32"}
        pointers.update(dict.fromkeys(["WEIGHT", "OUT_WEIGHT"], "bf16" if kind == "i32" else "fp32"))
        constants = {
            "K": k, "EXPERTS": experts, "R": held, "KK": wide, "E": all_experts, "BUDGET": budget, "SUBSTITUTE": substitute,
            "SOFTMAX": kind == "i64", "HAS_BIAS": kind == "i32", "RENORMALISE": True, "PDL": True,
        }  # fmt: skip
        build(f"limit {rows} rows {k} of {experts} budget {budget} substitute {substitute}", moe_limit_triton._limit_kernel,
              pointers, constants, num_warps=warps)  # fmt: skip


def feed_forward() -> None:
    """The table's choices: weights copied 16 bytes at a time, at full unions, too, those of listed channels."""
    hopper = tiling.Device(90, 132, 227 << 10)
    strides = ("x_m", "g_n", "u_n", "w_n", "w_f", "h_m", "cap", "hidden", "inner", "out")
    types = {
        "LIST": "i32", "COUNT": "i32", "KEPT": "i32", "TOTAL": "i32", "SWITCH": "i64", "ACT": "fp32", "SCORE": "fp32",
        "PARTS": "fp32",
    }  # fmt: skip

    def compiled(
        label: str, kernel: Any, kind: str, constants: dict[str, Any], cut: Any, chosen: Any, small: bool = False
    ) -> None:
        pointers = {name: types.get(name, kind) for name in kernel.arg_names if name.isupper() and name not in constants}
        found = build(label, kernel, pointers, constants, [name for name in strides if name in kernel.arg_names],
                      num_warps=cut.warps, num_stages=cut.stages)  # fmt: skip
        size = 4 if kind == "fp32" else 2
        assert found.metadata.shared <= moe_tiling.shared_bytes(cut, chosen.rows, size) + tiling.RESERVE
        # Buffers for both operands: what is loaded without one is waited for in every step.
        buffers = cut.stages if cut.swap else cut.stages - 1
        assert found.metadata.shared >= buffers * (cut.width + chosen.rows) * cut.depth * size, (label, found.metadata.shared)
        copies = set(re.findall(r"cp\.async\.c[ag]\.\S+ .*?, 0x([0-9a-f]+), ", found.asm["ptx"]))
        # Ids that are fetched a step ahead are copied 4 bytes at a time.
        assert copies - {"4"} == {"10"}, (label, copies)
        assert small or "4" not in copies, label
        assert "wgmma.mma_async.sync.aligned.m64n" in found.asm["ptx"] or not cut.swap, label

    for kind, rows, hidden, inner, activation, gated, bias in (
        ("bf16", 8, 4096, 14336, "silu", True, False),
        ("bf16", 32, 4096, 14336, "gelu_tanh", True, True), ("bf16", 64, 4096, 14336, "silu", True, False),
        ("fp16", 8, 576, 1536, "relu2", True, False), ("bf16", 16, 2048, 8192, "relu", False, True),
        ("fp32", 5, 768, 3072, "gelu", False, True),
    ):  # fmt: skip
        chosen = mlp_tiling._choose(hopper, 4 if kind == "fp32" else 2, rows, hidden, inner, hidden)
        common = {"M": chosen.rows, "PRECISION": "ieee" if kind == "fp32" else None, "PDL": True}
        name = f"{kind} {rows} rows {hidden} x {inner} {activation} gated {gated}"

        def of(cut: Any, depth: int, common: dict[str, Any] = common) -> dict[str, Any]:
            return {**common, "BN": cut.width, "BK": cut.depth, "EVEN": depth % cut.depth == 0, "SWAP": cut.swap}

        first, down, gate, sparse = chosen.first, chosen.down, chosen.gate, chosen.sparse_down
        constants = {
            **of(first, hidden), "GATED": gated, "HAS_GATE_BIAS": bias and gated, "HAS_UP_BIAS": bias, "ACTIVATION": activation,
            "AHEAD": first.ahead if first.ahead <= hidden else 0,
        }  # fmt: skip
        compiled(f"mlp first {name}", mlp_triton._mlp_first_kernel, kind, constants, first, chosen)
        for transposed in (False, True):
            constants = {**of(down, inner), "SPLITS": chosen.splits, "TRANSPOSED": transposed, "AHEAD": down.ahead}
            compiled(f"mlp down {name} transposed {transposed}", mlp_triton._mlp_down_kernel, kind, constants, down, chosen)
        for budget in (False, True):
            constants = {
                **of(gate, hidden), "HAS_BIAS": bias, "ACTIVATION": activation, "BUDGET": budget, "JOINT": bias or budget,
                "AHEAD": gate.ahead if gate.ahead <= hidden else 0,
            }  # fmt: skip
            compiled(
                f"mlp activation {name} budget {budget}", mlp_sparse_triton._mlp_activation_kernel, kind, constants, gate, chosen
            )
        constants = {
            **common, "GATED": True, "HAS_BIAS": bias, "CHUNK": 256, "SPLITS": chosen.sparse_splits,
            "WIDTHS": tuple(cut.width for cut in chosen.kept), "DEPTHS": tuple(cut.depth for cut in chosen.kept),
            "STAGES": tuple(cut.stages for cut in chosen.kept), "EVEN": hidden % max(cut.depth for cut in chosen.kept) == 0,
        }  # fmt: skip
        widest = max(chosen.kept, key=lambda cut: moe_tiling.shared_bytes(cut, chosen.rows, 2))
        compiled(f"mlp kept {name}", mlp_sparse_triton._mlp_kept_kernel, kind, constants, widest, chosen)
        constants = {**of(sparse, inner), "SPLITS": chosen.sparse_splits}
        del constants["EVEN"], constants["SWAP"]
        compiled(f"mlp sparse down {name}", mlp_sparse_triton._mlp_sparse_down_kernel, kind, constants, sparse, chosen, True)
        constants = {"HAS_BIAS": bias, "SPLITS": chosen.splits, "BN": chosen.columns, "PDL": True}
        build(f"mlp sum {name}", mlp_triton._mlp_sum_kernel, {"PARTS": "fp32", "BIAS": kind, "OUT": kind}, constants, ("out",),
              num_warps=1)  # fmt: skip
    for chunk in (1024, 16384, 65536):
        build(f"mlp contest of {chunk}", mlp_sparse_triton._mlp_contest_kernel,
              {"SCORE": "fp32", "LIST": "i32", "COUNT": "i32", "SWITCH": "i64"}, {"WIDTH": 64, "CHUNK": chunk, "PDL": True},
              num_warps=mlp_sparse_triton.contest_warps(chunk))  # fmt: skip


if __name__ == "__main__":
    attention()
    attention_in_small_blocks()
    live_blocks()
    linears()
    selection()
    masses()
    experts()
    routes()
    limits()
    feed_forward()
