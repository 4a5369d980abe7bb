"""Command line: ``spec-compile demo``, ``generate``, ``explain``, ``calibrate``, ``export``; each takes ``--json FILE``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spec_compile import cli_generate
from spec_compile._version import __version__
from spec_compile.errors import SpecCompileError
from spec_compile.files import write_whole


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spec-compile", description="A graph compiler for the verify forward of speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"spec-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="decode real prompts by transformers and by us: exact, sparse, audited")
    demo.add_argument(
        "--model", type=Path, help="model folder or GGUF file, or moe (small mixture); default SmolLM2-135M-Instruct"
    )
    demo.add_argument("--new-tokens", type=int, default=48, help="tokens to generate per prompt (default 48)")
    demo.add_argument("--drafts", type=int, default=8, help="drafts per verify (default 8)")
    demo.add_argument("--source-tokens", type=int, default=2000, help="tokens of Python source to continue (default 2000)")
    demo.add_argument("--device", default="auto", help="cpu, cuda or auto (default): the GPU if there is one")

    explain = commands.add_parser("explain", help="show what would be rewritten in a model, without loading its weights")
    explain.add_argument("model", type=Path, metavar="MODEL_DIR_OR_GGUF")
    explain.add_argument("--draft-len", type=int, default=8, help="drafts per verify (default 8)")
    explain.add_argument("--max-len", type=int, default=8192, help="cache length in tokens (default 8192)")
    explain.add_argument("--batch", type=int, default=1)
    explain.add_argument("--attention", choices=("sdpa", "eager", "hooks"), default="sdpa", help="attention implementation")
    explain.add_argument("--plan", type=Path, help="sparsity plan (JSON)")
    explain.add_argument("--graph", choices=("before", "after"), help="print the graph instead of the table")

    calibrate = commands.add_parser("calibrate", help="make a plan that skips experts or channels, and measure what it costs")
    calibrate.add_argument("model", type=Path, metavar="MODEL_DIR_OR_GGUF")
    calibrate.add_argument(
        "--texts", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 texts, a quarter is held out"
    )
    calibrate.add_argument("--out", type=Path, required=True, metavar="PLAN.json", help="where to save the plan")
    calibrate.add_argument(
        "--skip", type=int, help="experts of a row that may be dropped, below the median share (3 if no rule is given)"
    )
    calibrate.add_argument("--ratio", type=float, help="drop experts below this share of the row's top weight")
    calibrate.add_argument("--top-k", type=int, help="experts a row keeps")
    calibrate.add_argument("--expert-budget", type=int, help="distinct experts over the rows of a step")
    calibrate.add_argument("--substitute", action="store_true", help="replace what the budget drops by experts within it")
    calibrate.add_argument(
        "--ffn-threshold", type=float, help="instead of experts: skip channels with smaller activations where it pays"
    )
    calibrate.add_argument("--draft-len", type=int, default=8, help="drafts per verify (default 8)")
    calibrate.add_argument("--window", type=int, default=512, help="tokens of a window (default 512)")
    calibrate.add_argument(
        "--limit-kl", type=float, default=0.05, help="KL divergence that the plan may have, nats (default 0.05)"
    )
    calibrate.add_argument("--limit-flips", type=float, default=0.05, help="share of top tokens that may change (default 0.05)")
    calibrate.add_argument("--force", action="store_true", help="save a plan past its limits, too")

    generate = commands.add_parser("generate", help="decode prompts speculatively: exact, sparse by a plan, or audited")
    cli_generate.add_arguments(generate)

    export = commands.add_parser("export", help="write the verify step of a model to a file that runs elsewhere")
    export.add_argument("model", type=Path, metavar="MODEL_DIR_OR_GGUF")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .pt2, .aoti.pt2 or .onnx")
    export.add_argument("--format", choices=("pt2", "aoti", "onnx"), help="default: by the ending of --out")
    export.add_argument(
        "--flavour", choices=("ops", "portable"), help="ops needs spec_compile at load; default ops, ONNX portable"
    )
    export.add_argument("--plan", type=Path, help="sparsity plan (JSON)")
    export.add_argument("--draft-len", type=int, default=8, help="drafts per verify (default 8)")
    export.add_argument("--max-len", type=int, default=8192, help="cache length in tokens (default 8192)")
    export.add_argument("--batch", type=int, help="sequences (default: any number up to 64)")
    export.add_argument("--mask", choices=("padding", "causal", "tree"), default="padding", help="mask input (default padding)")
    export.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of the weights")
    export.add_argument("--device", default="cpu", help="cpu (default), cuda or auto: where the file will run")
    export.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="attention implementation")
    export.add_argument("--opset", type=int, default=20, help="of ONNX (default 20)")
    export.add_argument("--strict", action="store_true", help="fail where an attention or an MoE layer is refused")

    for command in (demo, explain, calibrate, generate, export):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers that were printed")
    return parser


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all."""
    text = json.dumps(data, indent=2) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecCompileError(f"--json {path}: {error.strerror or error}") from None


def run_explain(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from spec_compile.explainer import explain
    from spec_compile.loading import load_skeleton
    from spec_compile.models.cache import VerifyCache
    from spec_compile.models.hooks import prepare

    model = load_skeleton(args.model, attention="sdpa" if args.attention == "hooks" else args.attention)
    if args.attention == "hooks":
        prepare(model)
    with torch.no_grad():
        report = explain(model, VerifyCache(model, args.max_len, args.batch), args.draft_len, args.plan)
    print(report.code(args.graph) if args.graph else report)
    return report.to_dict()


def run_calibrate(args: argparse.Namespace) -> dict[str, Any]:
    from spec_compile.calibrate import moe_calibrate, words
    from spec_compile.loading import load_model
    from spec_compile.plan import SparsityPlan

    if not args.out.resolve().parent.is_dir():
        raise SpecCompileError(f"--out {args.out}: no such folder")
    texts = []
    for path in args.texts:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SpecCompileError(f"--texts {path}: {getattr(error, 'strerror', None) or error}") from None
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    rules = (args.skip, args.ratio, args.top_k, args.expert_budget)
    if args.ffn_threshold is not None:
        if any(rule is not None for rule in rules) or args.substitute:
            raise SpecCompileError("--ffn-threshold makes a plan by itself: leave out the rules for experts")
        return _calibrate_ffn(args, texts)
    model, tokenizer = load_model(args.model)
    moe = moe_calibrate(
        model, texts, 3 if all(rule is None for rule in rules) else args.skip, tokenizer=tokenizer, ratio=args.ratio,
        top_k=args.top_k, expert_budget=args.expert_budget, substitute=args.substitute, draft_len=args.draft_len,
        window=args.window, limit_kl=args.limit_kl, limit_flips=args.limit_flips, force=args.force,
    )  # fmt: skip
    plan = SparsityPlan(moe=moe)
    plan.save(args.out)
    assert moe.calibration is not None
    print(f"{args.out}: {words(moe.calibration)}")
    return plan.to_dict()


def _calibrate_ffn(args: argparse.Namespace, texts: list[str]) -> dict[str, Any]:
    from spec_compile.calibrate_ffn import ffn_calibrate, words
    from spec_compile.loading import load_model
    from spec_compile.plan import SparsityPlan

    model, tokenizer = load_model(args.model)
    ffn = ffn_calibrate(
        model, texts, args.ffn_threshold, tokenizer=tokenizer, draft_len=args.draft_len, window=args.window,
        limit_kl=args.limit_kl, limit_flips=args.limit_flips, force=args.force,
    )  # fmt: skip
    plan = SparsityPlan(ffn=ffn)
    plan.save(args.out)
    print(f"{args.out}: {words(ffn)}")
    return plan.to_dict()


@contextlib.contextmanager
def _showing(what: str) -> Iterator[Callable[[str], None]]:
    """Show the stage at work on standard error, where rich is installed and somebody watches."""
    try:
        from rich.console import Console
    except ImportError:
        yield lambda stage: None
        return
    with Console(stderr=True).status(what) as status:
        yield lambda stage: status.update(f"{what}: {stage}")


def run_export(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from spec_compile.devices import choose_device
    from spec_compile.exporter import export
    from spec_compile.loading import load_model

    device = choose_device(args.device)
    model, _ = load_model(args.model, getattr(torch, args.dtype), args.attention, with_tokenizer=False)
    seconds: dict[str, float] = {}
    with _showing("export") as on_stage:
        manifest = export(
            model.to(device), args.out, args.format, flavour=args.flavour, plan=args.plan, draft_len=args.draft_len,
            max_len=args.max_len, batch=args.batch, mask=args.mask, strict=args.strict, opset=args.opset, seconds=seconds,
            on_stage=on_stage,
        )  # fmt: skip
    beside = args.out.with_name(args.out.name + ".data")
    size = args.out.stat().st_size + (beside.stat().st_size if manifest.format == "onnx" and beside.is_file() else 0)
    found = manifest.report
    print(
        f"{args.out}: {manifest.format}, {manifest.flavour}, {size / 1e6:.1f} MB, {sum(seconds.values()):.1f} s; "
        f"{found['attentions']} attentions rewritten, {found['refused']} refused, {found['sparse']} sparse"
    )
    print(f"  T {manifest.rows[0]}..{manifest.rows[1]}, batch {manifest.batch[0]}..{manifest.batch[1]}, {manifest.slots} slots")
    print(f"  needs {', '.join(manifest.operators) or 'nothing of spec_compile'}")
    return {"file": str(args.out), "bytes": size, "seconds": seconds, "manifest": manifest.to_dict()}


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    try:
        from spec_compile.demo import run
    except ImportError as error:
        raise SpecCompileError(f"the demo needs {error.name}: pip install 'spec-compile[demo]'") from error
    return run(args.model, args.new_tokens, args.drafts, args.source_tokens, args.device)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code (0, 1 for an error, 2 for usage, 130 when interrupted)."""
    args = build_parser().parse_args(argv)
    try:
        if args.json is not None and not args.json.resolve().parent.is_dir():
            raise SpecCompileError(f"--json {args.json}: no such folder")
        if args.json is not None and args.json.is_dir():
            raise SpecCompileError(f"--json {args.json} is a folder: name a file")
        runs = {
            "demo": run_demo, "explain": run_explain, "calibrate": run_calibrate, "generate": cli_generate.run,
            "export": run_export,
        }  # fmt: skip
        result = runs[args.command](args)
        if args.json is not None:
            write_json(args.json, result)
        if result.get("interrupted"):
            raise KeyboardInterrupt
    except SpecCompileError as error:
        print(f"spec-compile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("spec-compile: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
