"""One artefact in a process of its own, for ``export.py``: loads it, runs the given tokens, writes logits beside it.

``load`` goes through ``spec_compile.load``; ``elsewhere`` runs the step of docs/examples where spec_compile cannot be imported.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Steps = Callable[..., Any]


def pieces(ids: Tensor, past: int, rows: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """The first ``past`` tokens, and what follows them in steps of ``rows``."""
    return ids[:, :past], list(ids[:, past : past + sum(rows)].split(list(rows), 1))


def run_group(verify: Steps, crop: Callable[[int], Any], ids: Tensor, past: int, rows: Sequence[int], exact: Any) -> list[Tensor]:
    """Logits behind ``past`` tokens, which are read by exact steps.

    First five steps that carry state, with a rollback of 4 tokens after the third, then every number of rows up to the most,
    each rolled back.
    """
    most = max(rows)
    prompt, steps = pieces(ids, past, rows)
    for part in prompt.split(most, 1):
        verify(part, sparse=exact)
    found = []
    for step in steps:
        found.append(torch.as_tensor(verify(step)).cpu())
        if len(found) == 3:
            crop(-4)
    for count in range(1, most + 1):
        found.append(torch.as_tensor(verify(ids[:, past : past + count])).cpu())
        crop(-count)
    return found


def step_ms(verify: Steps, crop: Callable[[int], Any], ids: Tensor, device: str, repeats: int = 20) -> float:
    """Median over steps of 9 rows, each rolled back."""
    times = []
    for _ in range(repeats + 3):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        verify(ids[:, :9])
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        crop(-9)
    return statistics.median(times[3:]) * 1e3


def main(kind: str, path: str, given: str, codegen: str) -> None:
    tokens = torch.load(given)
    ids, groups, rows = tokens["ids"], tokens["pasts"], tokens["rows"]
    if kind == "elsewhere":
        sys.modules["spec_compile"] = None  # type: ignore[assignment]
    start = time.perf_counter()
    if kind == "load":
        import spec_compile

        verify: Any = spec_compile.load(path, **({"codegen": codegen} if codegen else {}))
        crop, reset, device = verify.cache.crop, verify.reset, verify.device.type
        exact = False if verify.manifest.sparse else None
    else:
        sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
        step, device = _example(path), "cpu"
        verify = (lambda ids, sparse=None: step(ids.numpy(), sparse)) if path.endswith(".onnx") else step
        crop, exact = step.crop, False if step.manifest["sparse"] else None

        def reset() -> None:
            step.length = 0

    loaded = time.perf_counter() - start
    ids, logits = ids.to(device), []
    for past in groups:
        reset()
        logits.append(run_group(verify, crop, ids, past, rows, exact))
    torch.save(logits, f"{path}.{kind}")
    print(json.dumps({"load_s": loaded, "step_ms": step_ms(verify, crop, ids, device)}))


def _example(path: str) -> Any:
    if path.endswith(".onnx"):
        from run_onnx import Step

        return Step(path)
    if path.endswith(".aoti.pt2"):
        from run_aoti import CompiledStep

        return CompiledStep(path)
    from run_pt2 import Step as TorchStep

    return TorchStep(path)


if __name__ == "__main__":
    main(*sys.argv[1:5])
