"""``spec-compile generate``: speculative decoding of prompts from the command line, with its metrics as one table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from spec_compile.errors import OptionsError, SpecCompileError

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the command."""
    command.add_argument("model", type=Path, metavar="MODEL_DIR_OR_GGUF")
    prompts = command.add_argument_group("prompts (several make a batch)")
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; - reads standard input")
    prompts.add_argument("--prompt-file", action="append", default=[], type=Path, metavar="FILE", help="a prompt in a UTF-8 file")
    prompts.add_argument("--raw", action="store_true", help="no chat template, also where the tokenizer has one")
    draft = command.add_argument_group("drafts")
    draft.add_argument(
        "--drafter", default="prompt_lookup", metavar="NAME_OR_MODEL",
        help="prompt_lookup (default), early_exit, or a smaller model's folder or GGUF file",
    )  # fmt: skip
    draft.add_argument("--drafts", type=int, help="drafts a step (default 8 for prompt_lookup, 5 for models)")
    draft.add_argument("--branches", type=int, default=1, help="prompt_lookup: continuations merged into one tree (default 1)")
    draft.add_argument("--exit-layers", type=int, help="early_exit: layers that draft (default a quarter)")
    mode = command.add_argument_group("verification")
    mode.add_argument("--mode", choices=("exact", "sparse", "audited"), default="exact", help="default exact")
    mode.add_argument("--plan", type=Path, metavar="PLAN.json", help="sparsity plan; needed by sparse and audited")
    sample = command.add_argument_group("tokens")
    sample.add_argument("--max-new-tokens", type=int, default=128)
    sample.add_argument("--min-new-tokens", type=int, default=0)
    sample.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop at this text; may be repeated")
    sample.add_argument("--sample", action="store_true", help="draw tokens; default greedy")
    sample.add_argument("--temperature", type=float, default=1.0)
    sample.add_argument("--top-k", type=int, default=0)
    sample.add_argument("--top-p", type=float, default=1.0)
    sample.add_argument("--seed", type=int)
    run = command.add_argument_group("execution")
    run.add_argument("--device", default="auto", help="cpu, cuda or auto (default): the GPU if there is one")
    run.add_argument("--dtype", choices=_DTYPES, help="default float32 on the CPU, bfloat16 on a GPU")
    run.add_argument("--codegen", choices=("inductor", "eager"), default="inductor", help="eager starts sooner and runs slower")
    run.add_argument("--stream", action="store_true", help="print the text while it is generated (one prompt)")


def read_prompts(args: argparse.Namespace) -> list[str]:
    """
    Raises:
        OptionsError: no prompt, an empty one, or a file that cannot be read.
    """
    texts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    for path in args.prompt_file:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise OptionsError(f"--prompt-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not texts:
        raise OptionsError("give a prompt: --prompt TEXT, --prompt - or --prompt-file FILE")
    if not all(text.strip() for text in texts):
        raise OptionsError("a prompt is empty")
    return texts


def encode(tokenizer: Any, text: str, raw: bool) -> list[int]:
    """Token ids of a prompt, in the tokenizer's chat template if it has one and ``raw`` is not set."""
    if getattr(tokenizer, "chat_template", None) and not raw:
        chat = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        found = tokenizer(text).input_ids
    return [int(token) for token in found]


def make_drafter(args: argparse.Namespace, model: Any, tokenizer: Any, load: Any, device: Any) -> Any:
    """The drafter that the arguments name.

    Raises:
        OptionsError: options of another drafter, or an assistant with another vocabulary.
    """
    from spec_compile.drafters import PromptLookup
    from spec_compile.sampling import Sampler

    if args.exit_layers is not None and args.drafter != "early_exit":
        raise OptionsError("--exit-layers goes with --drafter early_exit")
    if args.branches != 1 and args.drafter != "prompt_lookup":
        raise OptionsError("--branches goes with --drafter prompt_lookup")
    if args.drafter == "prompt_lookup":
        return PromptLookup(8 if args.drafts is None else args.drafts, branches=args.branches)
    from spec_compile.drafters_model import AssistantModel, EarlyExit

    sampler = Sampler(True, args.temperature, args.top_k, args.top_p, seed=args.seed, device=device) if args.sample else None
    drafts = 5 if args.drafts is None else args.drafts
    options = {"sampler": sampler, "codegen": args.codegen, "cudagraphs": device.type == "cuda"}
    if args.drafter == "early_exit":
        return EarlyExit(model, args.exit_layers, drafts, **options)
    path = Path(args.drafter)
    if not path.exists():
        raise OptionsError(f"--drafter {args.drafter}: neither prompt_lookup nor early_exit nor a model folder or GGUF file")
    assistant, words = load(path)
    if words.get_vocab() != tokenizer.get_vocab():
        raise OptionsError(f"--drafter {path}: its vocabulary is not the target's; an assistant must have the same tokenizer")
    return AssistantModel(assistant, drafts, **options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the command, print text and table, and return the numbers with the text.

    Raises:
        SpecCompileError: arguments that do not fit.
    """
    texts = read_prompts(args)
    if args.mode != "exact" and args.plan is None:
        raise OptionsError(f"--mode {args.mode} needs --plan PLAN.json")
    try:
        from rich.console import Console
    except ImportError as error:
        raise SpecCompileError(f"generate needs {error.name}: pip install 'spec-compile[demo]'") from error
    import torch

    from spec_compile.devices import choose_device
    from spec_compile.generation import generate
    from spec_compile.loading import load_model
    from spec_compile.plan import SparsityPlan

    device = choose_device(args.device)
    plan = None if args.plan is None else SparsityPlan.load(args.plan)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    from transformers import TextStreamer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    def load(path: Path) -> tuple[Any, Any]:
        model, tokenizer = load_model(path, dtype)
        return model.to(device), tokenizer

    model, tokenizer = load(args.model)
    prompts = [encode(tokenizer, text, args.raw) for text in texts]
    console = Console()
    out = generate(
        model, prompts, drafter=make_drafter(args, model, tokenizer, load, device), plan=plan, mode=args.mode,
        max_new_tokens=args.max_new_tokens, min_new_tokens=args.min_new_tokens, stop_strings=args.stop or None,
        tokenizer=tokenizer, do_sample=args.sample, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        seed=args.seed, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if args.stream else None,
        progress=not args.stream and console.is_terminal, codegen=args.codegen,
    )  # fmt: skip
    found = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out.tokens]
    if not args.stream:
        for at, text in enumerate(found):
            console.print(f"[bold]{at}[/bold]" if len(found) > 1 else "", end=" " if len(found) > 1 else "")
            console.print(text.strip(), markup=False, highlight=False)
    console.print(out.metrics.table())
    numbers = out.metrics.to_dict()
    for request, tokens, text in zip(numbers["requests"], out.tokens, found):
        request["tokens"], request["text"] = tokens, text
    return numbers
