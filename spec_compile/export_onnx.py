"""Verify steps as ONNX: standard operators, K and V in and out. Everything here needs the ``onnx`` extra.

ONNX has no writing in place, and the exporter drops writes to inputs without a word. The program's writes are therefore turned
into outputs here, and the file is refused if one of them is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from spec_compile.errors import ArtefactError, ExportError, OptionsError
from spec_compile.export_program import VerifyProgram, rebuild
from spec_compile.manifest import PROPERTY, Manifest

# Property beside the manifest.
CHECKSUM = f"{PROPERTY}_sha256"

# Protocol buffers end at 2 GiB; weights past this lie in a file beside.
_INLINE = 1 << 30
_NEEDED = "ONNX export needs onnx and onnxscript: pip install 'spec-compile[onnx]'"


def check_installed(opset: int) -> None:
    """
    Raises:
        ExportError: a package is missing.
        OptionsError: an opset that export does not write.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(f"{_NEEDED} ({error})") from None
    # Later ones have operators of their own for what the exporter writes, which then is invalid.
    newest = min(onnx.defs.onnx_opset_version(), 23)
    if not isinstance(opset, int) or isinstance(opset, bool) or not 20 <= opset <= newest:
        raise OptionsError(f"opset must lie in 20..{newest}, got {opset!r}")


def write_onnx(verify: VerifyProgram, path: Path, manifest: Manifest, opset: int) -> None:
    """Write and check the file.

    Raises:
        ExportError: the exporter cannot express the program, or dropped one of its outputs.
    """
    import onnx

    program = _writes_as_outputs(verify, manifest)
    with _quiet(), torch.no_grad():
        try:
            made = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=opset,
                input_names=[value.name for value in manifest.inputs],
                output_names=[value.name for value in manifest.outputs],
                custom_translation_table=_translations(),
                verbose=False,
                optimize=True,
            )
        except Exception as error:
            text = str(error.__cause__ or error).splitlines()
            raise ExportError(f"the ONNX exporter failed: {type(error).__name__}: {text[0][:400] if text else ''}") from error
        assert made is not None
        model = made.model
        _name_sizes(model, manifest)
        model.metadata_props[PROPERTY] = manifest.to_json()
        model.producer_name, model.producer_version = "spec_compile", manifest.versions["spec_compile"]
        for node in model.graph.all_nodes() if hasattr(model.graph, "all_nodes") else model.graph:
            node.metadata_props.clear()
        large = sum(p.numel() * p.element_size() for p in program.state_dict.values()) > _INLINE
        made.save(str(path), external_data=large)
    written = onnx.load(str(path), load_external_data=False)
    onnx.helper.set_model_props(
        written, {entry.key: entry.value for entry in written.metadata_props} | {CHECKSUM: _digest(written, path)}
    )
    onnx.save(written, str(path))
    _check_file(onnx, path, manifest)


def _writes_as_outputs(verify: VerifyProgram, manifest: Manifest) -> ExportedProgram:
    """The program with what it would write as outputs behind the logits, in the order of the inputs."""
    program = verify.program
    results = list(zip(program.graph_signature.output_specs, program.graph.output_node().args[0]))
    by_target = {spec.target: node for spec, node in results if spec.kind is OutputKind.USER_INPUT_MUTATION}
    logits = [node for spec, node in results if spec.kind is OutputKind.USER_OUTPUT]
    odd = [str(spec.kind) for spec, _ in results if spec.kind not in (OutputKind.USER_INPUT_MUTATION, OutputKind.USER_OUTPUT)]
    wanted = [value.name for value in manifest.inputs if value.next]
    if odd or len(logits) != 1 or sorted(by_target) != sorted(wanted):
        raise ExportError(f"the program writes {sorted(by_target)} {odd}, the file would hold {sorted(wanted)}")
    ordered = [*logits, *(by_target[name] for name in wanted)]
    program.graph.output_node().args = (tuple(ordered),)
    specs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in ordered]
    arguments = sum(spec.kind is InputKind.USER_INPUT for spec in program.graph_signature.input_specs)
    return rebuild(program, program.graph, list(program.graph_signature.input_specs), specs, arguments, len(ordered))


def _translations() -> dict[Any, Any]:
    """Operators that the exporter does not know, or expresses otherwise than meant."""
    from onnxscript import opset20

    op: Any = opset20

    def sort(self: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
        # TopK gives equal values in the order of their places, as a stable sort does.
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, size, axis=dim, largest=descending, sorted=True)

    def sort_default(self: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort(self, dim, descending)

    return {torch.ops.aten.sort.stable: sort, torch.ops.aten.sort.default: sort_default}


def _name_sizes(model: Any, manifest: Manifest) -> None:
    """Call sizes that vary ``batch`` and ``rows``, whatever the exporter named them."""
    import onnx_ir

    for held, values in ((model.graph.inputs, manifest.inputs), (model.graph.outputs, manifest.outputs)):
        if [value.name for value in held] != [value.name for value in values]:
            names = [value.name for value in held]
            raise ExportError(f"the ONNX exporter made {names}, expected {[value.name for value in values]}")
        for found, value in zip(held, values):
            found.shape = onnx_ir.Shape(list(value.shape))


def _check_file(onnx: Any, path: Path, manifest: Manifest) -> None:
    """The file is valid, and every value of the manifest is in it."""
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ExportError(f"the ONNX exporter wrote an invalid file: {str(error)[:400]}") from error
    held = onnx.load(str(path), load_external_data=False)
    domains = sorted({node.domain for node in held.graph.node} - {"", "ai.onnx"})
    if domains or held.functions:
        raise ExportError(f"the file uses operators of {', '.join(domains)}, or functions, instead of standard operators alone")
    outputs = {value.name for value in held.graph.output}
    lost = [value.name for value in manifest.outputs if value.name not in outputs]
    inputs = {value.name for value in held.graph.input}
    lost += [value.name for value in manifest.inputs if value.name not in inputs]
    if lost:
        raise ExportError(f"the ONNX exporter dropped {', '.join(lost)}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints progress and warns of what is meant."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _digest(model: Any, path: Path) -> str:
    """SHA-256 over manifest, nodes and weights, however protobuf writes them: ONNX has no checksum of its own."""
    found = hashlib.sha256()
    found.update(next((entry.value for entry in model.metadata_props if entry.key == PROPERTY), "").encode())
    for node in model.graph.node:
        found.update(repr((node.op_type, node.domain, [*node.input], [*node.output])).encode())
        for attribute in sorted(node.attribute, key=lambda given: given.name):
            found.update(attribute.SerializeToString(deterministic=True))
    external = False
    for weight in model.graph.initializer:
        found.update(repr((weight.name, weight.data_type, [*weight.dims])).encode())
        external = external or bool(weight.external_data)
        found.update(weight.raw_data or repr([*weight.float_data, *weight.int32_data, *weight.int64_data]).encode())
    if external:
        with path.with_name(path.name + ".data").open("rb") as beside:
            while part := beside.read(1 << 24):
                found.update(part)
    return found.hexdigest()


def read_property(path: Path) -> str | None:
    """The manifest's text in an ONNX file.

    Raises:
        ArtefactError: onnx is not installed, or the file is damaged.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ArtefactError(f"{path} needs onnx to be loaded: pip install 'spec-compile[onnx]' ({error})") from None
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise ArtefactError(f"{path} is no ONNX file, or is cut short: {error}") from None
    held = {entry.key: entry.value for entry in model.metadata_props}
    try:
        intact = CHECKSUM not in held or held[CHECKSUM] == _digest(model, path)
    except OSError as error:
        raise ArtefactError(f"{path} is not whole: its weights cannot be read ({error}). Copy or export it again") from None
    if not intact:
        raise ArtefactError(f"{path} is damaged: it does not match its checksum. Copy or export it again")
    return held.get(PROPERTY)


def open_session(path: Path, manifest: Manifest, keywords: dict[str, Any]) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A runner over ``onnxruntime``: new K and V take the place of those that were given.

    Raises:
        ArtefactError: onnxruntime is missing, or cannot load the file.
    """
    try:
        import onnxruntime
    except ImportError:
        raise ArtefactError(f"{path} needs onnxruntime: pip install onnxruntime") from None
    options = keywords.pop("sess_options", None) or onnxruntime.SessionOptions()
    if "OMP_NUM_THREADS" in os.environ and options.intra_op_num_threads == 0:
        options.intra_op_num_threads = torch.get_num_threads()
    providers = keywords.pop("providers", ["CPUExecutionProvider"])
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers, **keywords)
    except Exception as error:
        raise ArtefactError(f"{path} cannot be loaded by onnxruntime {onnxruntime.__version__}: {str(error)[:400]}") from error
    names = [value.name for value in manifest.outputs]
    following = {value.next: value.name for value in manifest.inputs if value.next}

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        found = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
        for name, array in zip(names, found):
            if name in following:
                # The new array takes the place of the old one: a copy would read and write the whole cache.
                inputs[following[name]].set_(torch.from_numpy(array))  # type: ignore[call-overload]
        return torch.from_numpy(found[0])

    return run
