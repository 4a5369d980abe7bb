"""Run an ONNX artefact in onnxruntime: ``python run_onnx.py verify.onnx``. Neither torch nor spec_compile is needed.

ONNX writes nothing in place: a step takes K and V (``keys_0``, ...) and gives new ones (``next_keys_0``, ...), which go into the
next step. ``position`` says how many of their slots hold tokens; a smaller one undoes rejected drafts.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnxruntime


class Step:
    """One verify step and its cache, for one sequence."""

    def __init__(self, path: str) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.manifest = json.loads(self.session.get_modelmeta().custom_metadata_map["spec_compile"])
        self.length = 0
        self.past = {
            value["name"]: np.zeros([1 if size == "batch" else size for size in value["shape"]], value["dtype"])
            for value in self.manifest["inputs"]
            if value["next"]
        }

    def __call__(self, input_ids: np.ndarray, sparse: bool | None = None) -> np.ndarray:
        """Logits ``[1, T, V]`` of int64 ``input_ids`` ``[1, T]``; the cache advances by T."""
        rows = input_ids.shape[1]
        given = {
            "input_ids": np.asarray(input_ids),
            "position": np.array(self.length),
            "position_ids": np.arange(self.length, self.length + rows)[None],
            "attention_mask": np.ones((1, self.manifest["slots"]), bool),
            **self.past,
        }
        for value in self.manifest["inputs"]:
            if value["role"] == "gate":  # contexts of fewer tokens are read whole
                given[value["name"]] = np.array([1 << 62 if sparse is False else self.manifest["min_context"]])
            if value["role"] == "sparse":
                given[value["name"]] = np.array([int(sparse is not False)])
        names = [value["name"] for value in self.manifest["outputs"]]
        found = dict(zip(names, self.session.run(names, {v["name"]: given[v["name"]] for v in self.manifest["inputs"]})))
        self.past = {v["name"]: found[v["next"]] for v in self.manifest["inputs"] if v["next"]}
        self.length += rows
        return found["logits"]

    def crop(self, tokens_to_remove: int) -> None:
        """Undo rejected drafts, given as a negative number."""
        self.length += tokens_to_remove


def verify_drafts(step: Step, last: int, drafts: list[int]) -> list[int]:
    """Greedy verification: tokens that follow ``last``, at least one of them new."""
    best = step(np.array([[last, *drafts]]))[0].argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    step.crop(accepted - len(drafts))
    return best[: accepted + 1]


def demonstrate(step: Step) -> None:
    rows = step.manifest["rows"][1]
    prompt = [7, 11, 13, 7, 11, 13, 7, 11]
    for start in range(0, len(prompt), rows):
        last = int(step(np.array([prompt[start : start + rows]]), sparse=False)[0, -1].argmax())
    for _ in range(5):
        found = verify_drafts(step, last, [11, 13, 7][: rows - 1])
        last = found[-1]
        print(f"{len(found)} tokens: {found}; the cache holds {step.length}")


if __name__ == "__main__":
    demonstrate(Step(sys.argv[1]))
