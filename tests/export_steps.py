"""Five steps with carried state and a rollback, for artefacts in processes that may lack spec_compile; needs torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DRAFTS, MAX_LEN, VOCAB = 15, 256, 128
ROWS = (1, 2, 5, 16, 3)
HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "docs" / "examples"


def pieces(prompt: int) -> list[Tensor]:
    """A prompt in pieces of at most 16 tokens, and five steps."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (1, prompt), generator=generator)
    return [*ids.split(DRAFTS + 1, 1), *(torch.randint(3, VOCAB, (1, rows), generator=generator) for rows in ROWS)]


def run_steps(verify: Any, cache: Any, sparse: bool, prompt: int = 150) -> list[Tensor]:
    """Logits of the five steps, with a rollback after the third, and of the last one again, exact; prompts are exact, too."""
    found: list[Tensor] = []
    given = pieces(prompt)
    exact = False if sparse else None
    for index, ids in enumerate(given):
        if index < len(given) - len(ROWS):
            verify(ids, sparse=exact)
            continue
        found.append(torch.as_tensor(verify(ids)))
        if len(found) == 3:
            cache.crop(-4)
    cache.crop(-ROWS[-1])
    return [*found, torch.as_tensor(verify(given[-1], sparse=exact))]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Within 1e-5, relative to logits above 1."""
    assert len(found) == len(wanted) == len(ROWS) + 1
    for step, (a, b) in enumerate(zip(found, wanted)):
        assert not a.isnan().any()
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5), f"step {step}: {float((a - b).abs().max())}"


_CHILD = """
import sys
kind, here, examples, prompt, *names = sys.argv[1:]
if kind != "load":
    sys.modules["spec_compile"] = None
sys.path[:0] = [here, examples]
import importlib, torch
from export_steps import run_steps
torch.set_num_threads(1)
for name in names:
    if kind == "load":
        import spec_compile
        verify = spec_compile.load(name)
        found = run_steps(verify, verify.cache, "sparse" in name, int(prompt))
    else:
        module = importlib.import_module(kind)
        step = getattr(module, "CompiledStep", module.Step)(name)
        call = (lambda ids, sparse=None: step(ids.numpy(), sparse)) if kind == "run_onnx" else step
        found = run_steps(call, step, "sparse" in name, int(prompt))
        step.length = 0
        module.demonstrate(step)
    torch.save(found, f"{name}.{kind}")
"""


def run_elsewhere(kind: str, *paths: Path, prompt: int = 150) -> tuple[list[list[Tensor]], str]:
    """Logits of :func:`run_steps` of artefacts, and what was printed, from one new process.

    ``kind`` is ``load``, or a file of docs/examples, which runs where spec_compile cannot be imported.
    """
    printed = in_new_process(_CHILD, kind, str(HERE), str(EXAMPLES), str(prompt), *map(str, paths))
    return [torch.load(f"{path}.{kind}") for path in paths], printed


def in_new_process(code: str, *args: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
