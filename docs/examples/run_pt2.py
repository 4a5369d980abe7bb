"""Run a portable .pt2 artefact with torch alone: ``python run_pt2.py verify.pt2``.

spec_compile is not imported. The step writes K and V into the tensors it is given; a smaller length undoes rejected drafts.
"""

from __future__ import annotations

import json
import sys
import zipfile
from typing import Any

import torch
from torch import Tensor


class Step:
    """One verify step and its cache, for one sequence."""

    def __init__(self, path: str) -> None:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("extra/spec_compile.json"))
            self.manifest = json.loads(archive.read(name))
        self.program = self.load(path)
        self.length = 0
        self.state = {
            value["name"]: torch.zeros([1 if size == "batch" else size for size in value["shape"]], dtype=dtype(value))
            for value in self.manifest["inputs"]
            if value["written"]
        }

    def load(self, path: str) -> Any:
        if self.manifest["operators"]:
            raise SystemExit(f"{path} needs the operators of spec_compile: export it with flavour='portable'")
        return torch.export.load(path).module()

    def __call__(self, input_ids: Tensor, sparse: bool | None = None) -> Tensor:
        """Logits ``[1, T, V]`` of ``input_ids`` ``[1, T]``; the cache advances by T."""
        rows = input_ids.shape[1]
        given = {
            "input_ids": input_ids,
            "position": torch.tensor(self.length),
            "position_ids": torch.arange(self.length, self.length + rows)[None],
            "attention_mask": torch.ones(1, self.manifest["slots"], dtype=torch.bool),
            **self.state,
        }
        for value in self.manifest["inputs"]:
            if value["role"] == "gate":  # contexts of fewer tokens are read whole
                given[value["name"]] = torch.tensor([1 << 62 if sparse is False else self.manifest["min_context"]])
            if value["role"] == "sparse":
                given[value["name"]] = torch.tensor([int(sparse is not False)])
        with torch.no_grad():
            found = self.program(*[given[value["name"]] for value in self.manifest["inputs"]])
        self.length += rows
        return found[0] if isinstance(found, tuple | list) else found

    def crop(self, tokens_to_remove: int) -> None:
        """Undo rejected drafts, given as a negative number."""
        self.length += tokens_to_remove


def dtype(value: dict[str, Any]) -> torch.dtype:
    return getattr(torch, value["dtype"])


def verify_drafts(step: Any, last: int, drafts: list[int]) -> list[int]:
    """Greedy verification: tokens that follow ``last``, at least one of them new."""
    logits = step(torch.tensor([[last, *drafts]]))
    best = logits[0].argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    step.crop(accepted - len(drafts))
    return best[: accepted + 1]


def demonstrate(step: Any) -> None:
    rows = step.manifest["rows"][1]
    prompt = torch.tensor([[7, 11, 13, 7, 11, 13, 7, 11]])
    for part in prompt.split(rows, 1):
        last = int(step(part, sparse=False)[0, -1].argmax())
    for _ in range(5):
        found = verify_drafts(step, last, [11, 13, 7][: rows - 1])
        last = found[-1]
        print(f"{len(found)} tokens: {found}; the cache holds {step.length}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    demonstrate(Step(sys.argv[1]))
