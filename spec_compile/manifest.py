"""What an exported artefact says about itself: one JSON object inside the file.

In .pt2 and AOTInductor archives it is the entry ``extra/spec_compile.json``, in ONNX files the property ``spec_compile``.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_compile.errors import ArtefactError

SCHEMA = 1
NAME = "spec_compile.json"
PROPERTY = "spec_compile"
FORMATS = ("pt2", "aoti", "onnx")


@dataclass(frozen=True)
class Value:
    """One input or output.

    Attributes:
        name: in the artefact.
        shape: sizes; ``batch`` and ``rows`` where they vary.
        dtype: as ``float32``.
        role: ``input_ids``, ``position``, ``position_ids``, ``mask``, ``keys``, ``values``, ``summary``, ``valid``, ``gate``,
            ``sparse`` or ``logits``.
        written: whether the step writes it in place (.pt2, AOTI).
        next: the output that holds its new value (ONNX).
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    role: str
    written: bool = False
    next: str | None = None


@dataclass(frozen=True)
class Manifest:
    """
    Attributes:
        format: ``pt2``, ``aoti`` or ``onnx``.
        flavour: ``ops`` (needs this package's operators) or ``portable``.
        versions: of spec_compile, torch and others at export.
        model: class name of what was exported.
        plan: of sparsity; ``sparse``: whether it makes any step sparse, so that there is a switch.
        min_context: tokens below which a sparse step reads every block.
        rows_vote: whether the rows of a step share a selection or a budget.
        device: kind of device, ``cpu`` or ``cuda``, with ``capability`` of CUDA (AOTInductor) or of the CPU's vector units.
        rows, batch: ``[least, most]`` of a step.
        slots: of the cache, of which drafts may use those past ``max_len``.
        layers: of attention.
        mask: ``causal``, ``padding`` or ``tree``.
        operators: beyond ATen (ONNX: beyond the default domain).
        inputs, outputs: in order.
        report: what was rewritten.
    """

    format: str
    flavour: str
    versions: dict[str, str]
    model: str
    plan: dict[str, Any]
    sparse: bool
    min_context: int
    rows_vote: bool
    device: str
    capability: str
    rows: tuple[int, int]
    batch: tuple[int, int]
    slots: int
    max_len: int
    layers: int
    mask: str
    operators: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    report: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, path: Path) -> Manifest:
        """
        Raises:
            ArtefactError: not a manifest, or of another schema.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ArtefactError(f"{path}: its manifest is damaged ({error}): export it again") from None
        if not isinstance(found, dict) or "schema" not in found:
            raise ArtefactError(f"{path}: its manifest is damaged (no schema): export it again")
        if found["schema"] != SCHEMA:
            raise ArtefactError(
                f"{path} has a manifest of schema {found['schema']!r}, this version reads {SCHEMA}: "
                f"install spec_compile {found.get('versions', {}).get('spec_compile', 'that made it')}, or export again"
            )
        try:
            values = {k: tuple(Value(**{**v, "shape": tuple(v["shape"])}) for v in found[k]) for k in ("inputs", "outputs")}
            made = cls(**{**found, **values, **{key: tuple(found[key]) for key in ("rows", "batch", "operators")}})
        except (TypeError, KeyError) as error:
            raise ArtefactError(f"{path}: its manifest is damaged ({error}): export it again") from None
        if made.format not in FORMATS or made.flavour not in ("ops", "portable"):
            raise ArtefactError(f"{path}: its manifest names format {made.format!r} and flavour {made.flavour!r}")
        return made

    def written(self) -> list[Value]:
        return [value for value in self.inputs if value.written or value.next]


def read_manifest(path: Path) -> Manifest:
    """The manifest of an artefact, whose bytes are checked against their checksums first where the format has such.

    Raises:
        ArtefactError: no such file, a damaged one, or none of ours.
    """
    if not path.is_file():
        raise ArtefactError(f"{path}: no such file")
    if path.suffix == ".onnx":
        return _from_onnx(path)
    if not zipfile.is_zipfile(path):
        raise ArtefactError(f"{path} is no artefact of spec_compile.export, or it is cut short: it is no complete .pt2 archive")
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith(f"extra/{NAME}")), None)
            if name is None:
                raise ArtefactError(
                    f"{path} was not written by spec_compile.export: it has no manifest. torch.export.load reads other .pt2 files"
                )
            bad = archive.testzip()
            if bad is not None:
                raise ArtefactError(f"{path} is damaged: {bad} does not match its checksum. Copy or export it again")
            _refuse_pickles(archive, path)
            return Manifest.from_json(archive.read(name), path)
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error, NotImplementedError) as error:
        raise ArtefactError(f"{path} is damaged: {error}. Copy or export it again") from None


def _refuse_pickles(archive: zipfile.ZipFile, path: Path) -> None:
    """Weights of ours are raw bytes: a file that says otherwise was tampered with."""
    for name in archive.namelist():
        if not name.endswith("_config.json") or "/data/" not in name:
            continue
        try:
            entries = json.loads(archive.read(name)).get("config", {}).values()
            pickled = any(entry.get("use_pickle") for entry in entries)
        except (ValueError, AttributeError):
            raise ArtefactError(f"{path} is damaged: {name} cannot be read. Export it again") from None
        if pickled:
            raise ArtefactError(f"{path} holds pickled tensors, which could run code and which export never writes: not loaded")


def _from_onnx(path: Path) -> Manifest:
    from spec_compile.export_onnx import read_property

    text = read_property(path)
    if text is None:
        raise ArtefactError(f"{path} was not written by spec_compile.export: it has no property {PROPERTY!r}")
    return Manifest.from_json(text, path)
