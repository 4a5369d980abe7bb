"""Run an AOTInductor package: ``python run_aoti.py verify.aoti.pt2``.

A portable package needs torch alone. One of flavour ``ops`` calls operators of spec_compile, so they must be registered first.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from run_pt2 import Step, demonstrate


class CompiledStep(Step):
    """The same contract: inputs in the order of the manifest, K and V written in place."""

    def load(self, path: str) -> Any:
        if self.manifest["operators"]:
            import spec_compile.kernels.library  # noqa: F401
        return torch._inductor.aoti_load_package(path)


if __name__ == "__main__":
    demonstrate(CompiledStep(sys.argv[1]))
