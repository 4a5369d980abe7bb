"""AOTInductor packages: the verify step as machine code, weights included, loaded without tracing anything."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from spec_compile.errors import ExportError
from spec_compile.export_program import VerifyProgram, rebuild
from spec_compile.manifest import NAME, Manifest
from spec_compile.passes.nodes import hint


def compile_package(verify: VerifyProgram, path: Path, manifest: Manifest) -> None:
    """Compile, package, and put the manifest inside.

    Raises:
        ExportError: Inductor cannot compile the program (on CPU it needs a C++ compiler).
    """
    program = verify.program
    signature = program.graph_signature
    example = rebuild(
        program,
        program.graph,
        list(signature.input_specs),
        list(signature.output_specs),
        len(verify.inputs),
        1,
        _examples(verify),
    )
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(example, package_path=str(path))
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ExportError(f"AOTInductor failed: {type(error).__name__}: {lines[0][:400] if lines else ''}") from error
    with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
        root = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{root}/extra/{NAME}", manifest.to_json())


def _examples(verify: VerifyProgram) -> tuple[Tensor, ...]:
    """Inputs of the sizes that were traced; Inductor looks at sizes alone."""
    return tuple(
        torch.zeros([hint(size) or 1 for size in like.shape], dtype=like.dtype, device=like.device)
        for like in verify.shapes().values()
    )
