"""``export``: the rewritten verify step of a model as a file that runs elsewhere."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from spec_compile import _compat
from spec_compile._version import __version__
from spec_compile.backend import switch_of
from spec_compile.classify import EXPERT_LOOP
from spec_compile.decompose import decompose, foreign_operators
from spec_compile.errors import CacheError, ExportError, OptionsError
from spec_compile.export_program import MASKS, MAX_BATCH, CacheShape, StepSpec, VerifyProgram, check_sizes, trace_step
from spec_compile.logs import logger
from spec_compile.manifest import FORMATS, NAME, Manifest, Value
from spec_compile.models.down_weights import stored_by_outputs
from spec_compile.options import Options, disabled
from spec_compile.passes.base import PassContext
from spec_compile.plan import SparsityPlan
from spec_compile.report import RewriteReport
from spec_compile.verify import VerifyFunction, _mask_types, call_model, check_draft_len, has_expert_loop

_SUFFIXES = {".aoti.pt2": "aoti", ".pt2": "pt2", ".onnx": "onnx"}


def export(
    verify_or_model: Any,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    flavour: str | None = None,
    plan: Any = None,
    draft_len: int | None = None,
    max_len: int | None = None,
    batch: int | None = None,
    mask: str = "padding",
    strict: bool = False,
    opset: int = 20,
    seconds: dict[str, float] | None = None,
    on_stage: Callable[[str], None] | None = None,
    **options: Any,
) -> Manifest:
    """Write the rewritten verify step of a model to a file.

    The program takes ``input_ids`` ``[B, T]``, ``position`` (tokens held, int64 scalar), masks as asked, and K and V of every
    layer ``[B, Hkv, slots, D]``, and gives logits ``[B, T, V]``. T may be 1..``draft_len + 1`` in one artefact. In .pt2 and
    AOTInductor packages K, V and block summaries are inputs that the step writes in place; in ONNX their new values are outputs.
    The cache itself is never part of the file. docs/export.md has the details.

    Args:
        verify_or_model: a :class:`~spec_compile.VerifyFunction`, whose plan, draft length, cache length and options are the
            defaults, or a transformers causal LM in eval mode.
        path: ends in ``.pt2``, ``.aoti.pt2`` or ``.onnx``. Replaced as a whole, once everything has been written.
        format: ``pt2``, ``aoti`` or ``onnx``; default by the ending.
        flavour: ``ops`` keeps this package's operators, which must then be installed where the file is loaded: fastest.
            ``portable`` is plain ATen. Default ``ops``, for ONNX ``portable``.
        plan: sparsity plan; default exact.
        draft_len: drafts per step, 8 by default.
        max_len: tokens that the cache shall hold; 64 slots for drafts are added. Needed for a model.
        batch: sequences; default any number up to 64.
        mask: ``padding`` takes ``position_ids`` and a bool mask ``[B, slots]`` (left padding); ``causal`` neither; ``tree`` takes
            ``position_ids`` and a bool mask ``[B, 1, T, slots]``, one for each layer type of a model with several.
        strict: raise where an attention or an MoE layer is refused, instead of warning.
        opset: of ONNX, 20 to 23.
        seconds: is given the time of each stage.
        on_stage: is called with the name of each stage when it begins.
        options: further backend options: ``block_size``, ``lowering``, ``max_q_len``.

    Returns:
        The manifest, as it stands in the file.

    Raises:
        OptionsError, PlanError, CacheError: bad arguments.
        ExportError: the model cannot be exported so.
    """
    _compat.check_installed("torch")
    if disabled():
        raise OptionsError("SPEC_COMPILE_DISABLE is set, so nothing would be rewritten: unset it to export")
    target = Path(path)
    kind, flavour = _format(target, format, flavour)
    model, settings, drafts, slots, room = _source(verify_or_model, plan, draft_len, max_len, strict, options)
    _check(model, target, batch, mask, opset, kind)
    clock = _Clock({} if seconds is None else seconds, on_stage)
    layers, device = _cache_shapes(model)
    if device.type == "cuda" and kind != "onnx" and settings.plan.ffn is not None and not settings.plan.ffn.exact:
        raise ExportError(
            "plan.ffn: artefacts hold the last weights by outputs, and steps on CUDA that skip channels need them by channels; "
            "export a plan without ffn, or a model on CPU"
        )
    spec = StepSpec(layers, drafts + 1, batch, slots, mask, _tree_types(model, mask))
    context = PassContext(
        max_q_len=settings.max_q_len,
        block_size=settings.block_size,
        lowering=settings.lowering if flavour == "ops" or settings.lowering != "auto" else "folded",
        sparsity=None if settings.plan.attention is None or settings.plan.attention.exact else settings.plan.attention,
        moe_plan=None if settings.plan.moe is None or settings.plan.moe.exact else settings.plan.moe,
        ffn_plan=None if settings.plan.ffn is None or settings.plan.ffn.exact else settings.plan.ffn,
        batch_varies=batch is None,
        one_graph=True,
    )
    with stored_by_outputs(model):
        with clock.stage("trace"):
            verify = trace_step(model, call_model(model), spec, context)
        _complain(verify.report, settings.plan, strict)
        if flavour == "portable":
            with clock.stage("decompose"):
                verify = decompose(verify)
        check_sizes(verify, spec)
        manifest = _manifest(verify, kind, flavour, model, settings, spec, room, device, drafts)
        _check_loadable(manifest)
        _write(verify, target, kind, manifest, opset, clock)
    return manifest


def _format(path: Path, format: str | None, flavour: str | None) -> tuple[str, str]:
    found = next((kind for suffix, kind in _SUFFIXES.items() if path.name.endswith(suffix)), None)
    if format is not None and format not in FORMATS:
        raise OptionsError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    kind = format or found
    if kind is None:
        raise OptionsError(f"path must end in {', '.join(_SUFFIXES)}, or format must be given, got {path.name!r}")
    if found is None or (found == "onnx") != (kind == "onnx"):
        wanted = ".onnx" if kind == "onnx" else ".pt2"
        raise OptionsError(f"path must end in {wanted} for format {kind!r}, got {path.name!r}")
    flavour = flavour or ("portable" if kind == "onnx" else "ops")
    if flavour not in ("ops", "portable"):
        raise OptionsError(f"flavour must be 'ops' or 'portable', got {flavour!r}")
    if kind == "onnx" and flavour == "ops":
        raise OptionsError("ONNX files hold standard operators only: flavour must be 'portable'")
    return kind, flavour


def _source(
    given: Any, plan: Any, draft_len: int | None, max_len: int | None, strict: bool, options: dict[str, Any]
) -> tuple[Any, Options, int, int, int]:
    """Model, options, drafts, slots of the cache, and tokens it may hold."""
    from spec_compile.models.cache import VerifyCache
    from spec_compile.options import MAX_ROWS

    known = {"block_size", "lowering", "max_q_len"}
    if odd := next((name for name in options if name not in known), None):
        raise OptionsError(f"unknown option {odd!r} of export; known are {', '.join(sorted(known))}")
    if isinstance(given, VerifyFunction):
        base = given._options
        defaults = {name: getattr(base, name) for name in known}
        settings = Options.parse({**defaults, **options, "plan": base.plan if plan is None else plan, "strict": strict})
        drafts = given.draft_len if draft_len is None else draft_len
        layers = getattr(given.cache, "layers", None)
        if not layers:
            raise CacheError(f"export needs a transformers cache, got {type(given.cache).__name__}: use VerifyCache")
        # Layers that slide keep their window only; the exported ones hold all.
        slots = max(int(layer.keys.shape[2]) for layer in layers)
        room = given.cache.max_len if isinstance(given.cache, VerifyCache) else slots
        model = given.model
    else:
        if max_len is None:
            raise OptionsError("max_len is needed to export a model: how many tokens the cache shall hold")
        settings = Options.parse({**options, "plan": plan, "strict": strict})
        drafts, model = 8 if draft_len is None else draft_len, given
        slots = room = 0
    if max_len is not None:
        if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
            raise OptionsError(f"max_len must be at least 1, got {max_len!r}")
        slots, room = max_len + MAX_ROWS, max_len
    check_draft_len(drafts, settings.max_q_len)
    return model, settings, drafts, slots, room


def _check(model: Any, path: Path, batch: int | None, mask: str, opset: int, kind: str) -> None:
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise OptionsError(f"export needs a transformers causal LM, got {type(model).__name__}")
    if model.training:
        raise OptionsError("export is for inference: call model.eval() first")
    if has_expert_loop(model):
        raise OptionsError(EXPERT_LOOP)
    if mask not in MASKS:
        raise OptionsError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise OptionsError(f"batch must be at least 1, or None for any, got {batch!r}")
    if not path.absolute().parent.is_dir():
        raise OptionsError(f"{path}: no such folder")
    if path.is_dir():
        raise OptionsError(f"{path} is a folder: name a file")
    if kind == "onnx":
        from spec_compile.export_onnx import check_installed

        check_installed(opset)
    devices = {str(x.device) for x in [*model.parameters(), *model.buffers()]}
    if len(devices) > 1:
        raise OptionsError(f"the model lies on {len(devices)} devices ({', '.join(sorted(devices))}): one is needed to export it")
    if devices == {"meta"}:
        raise OptionsError("the model has no weights (meta device): load them to export it")
    odd = next((p for p in model.parameters() if not _compat.is_plain_tensor(p)), None)
    if odd is not None:
        raise OptionsError(f"a parameter is a {type(odd).__name__}: sharded or quantised tensors cannot be exported yet")
    if kind == "onnx" and any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise OptionsError("ONNX files are run through NumPy, which has no bfloat16: export model.float() or model.half()")


def _cache_shapes(model: Any) -> tuple[list[CacheShape], torch.device]:
    from spec_compile.models.cache import VerifyCache

    layers = VerifyCache(model, 1).layers
    found = [CacheShape(x.keys.shape[1], x.keys.shape[3], x.values.shape[3], x.keys.dtype, x.keys.device) for x in layers]
    return found, found[0].device


def _tree_types(model: Any, mask: str) -> list[str]:
    types = sorted(set(_mask_types(model)))
    return types if mask == "tree" and len(types) > 1 else []


def _complain(report: RewriteReport, plan: SparsityPlan, strict: bool) -> None:
    problems = []
    if report.refused:
        first = report.refused[0]
        problems.append(f"{len(report.refused)} of {len(report.attentions)} attentions refused: {first.layer}: {first.reason}")
    elif not report.rewritten:
        problems.append("0 attentions rewritten: no attention was recognised")
    kept = [moe for moe in report.moes if moe.status == "refused"]
    if kept:
        problems.append(f"{len(kept)} of {len(report.moes)} MoE layers refused: {kept[0].layer}: {kept[0].reason}")
    if plan.attention is not None and not plan.attention.exact and not report.sparse:
        problems.append("plan.attention: no layer is sparse")
    if plan.moe is not None and not plan.moe.exact and not report.limited:
        problems.append("plan.moe: no layer is limited")
    if plan.ffn is not None and not plan.ffn.exact and not report.skipping:
        problems.append("plan.ffn: no layer skips channels")
    for problem in problems:
        if strict:
            raise ExportError(problem)
        logger.warning(problem)


def _manifest(
    verify: VerifyProgram, kind: str, flavour: str, model: Any, settings: Options, spec: StepSpec, room: int,
    device: torch.device, drafts: int,
) -> Manifest:  # fmt: skip
    plan = settings.plan
    values, shapes = [], verify.shapes()
    for name in verify.inputs:
        sizes = tuple(_size(size, axis) for axis, size in enumerate(shapes[name].shape))
        written = name in verify.written and kind != "onnx"
        following = f"next_{name}" if name in verify.written and kind == "onnx" else None
        values.append(Value(name, sizes, str(shapes[name].dtype).removeprefix("torch."), _role(name), written, following))
    vocabulary = verify.program.graph.output_node().args[0][-1].meta["val"]
    logits = Value("logits", ("batch" if spec.batch is None else spec.batch, "rows", int(vocabulary.shape[-1])),
                   str(vocabulary.dtype).removeprefix("torch."), "logits")  # fmt: skip
    outputs = [logits] + [Value(v.next, v.shape, v.dtype, v.role) for v in values if v.next]
    return Manifest(
        format=kind, flavour=flavour, versions=_versions(kind), model=type(model).__name__, plan=plan.to_dict(),
        sparse=bool(verify.state), min_context=switch_of(plan).min_context,
        rows_vote=plan.rows_vote,
        device=device.type, capability=_capability(kind, device), rows=(1, drafts + 1),
        batch=(1, MAX_BATCH) if spec.batch is None else (spec.batch, spec.batch), slots=spec.slots, max_len=room,
        layers=len(spec.layers), mask=spec.mask, operators=tuple(foreign_operators(verify.program)), inputs=tuple(values),
        outputs=tuple(outputs), report={"attentions": len(verify.report.rewritten), "refused": len(verify.report.refused),
                                        "sparse": len(verify.report.sparse), "moes": len(verify.report.moes),
                                        "mlps": len(verify.report.mlps), "skipping": len(verify.report.skipping)},
    )  # fmt: skip


def _check_loadable(manifest: Manifest) -> None:
    """Loading an AOTInductor package that calls the operators for experts ended the process (torch 2.11, H200; not on CPU)."""
    experts = [name for name in manifest.operators if ".moe_" in name]
    if manifest.format == "aoti" and manifest.device == "cuda" and experts:
        raise ExportError(
            f"format: an AOTInductor package for CUDA cannot hold {', '.join(experts)}: torch crashes while loading it; pass "
            "flavour='portable', or export a .pt2"
        )


def _role(name: str) -> str:
    plain = name.removeprefix("spec_")
    if plain.startswith("attention_mask"):
        return "mask"
    return plain if plain in ("input_ids", "position", "position_ids") else plain.rsplit("_", 1)[0]


def _size(size: Any, axis: int) -> int | str:
    if isinstance(size, int):
        return size
    return "batch" if axis == 0 else "rows"


def _versions(kind: str) -> dict[str, str]:
    found = {"spec_compile": __version__, "torch": str(torch.__version__)}
    for package in ("transformers", "triton", *(("onnx", "onnxscript") if kind == "onnx" else ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _capability(kind: str, device: torch.device) -> str:
    """What compiled code was made for; "" where nothing was compiled."""
    if kind != "aoti":
        return ""
    if device.type == "cuda":
        return ".".join(map(str, torch.cuda.get_device_capability(device)))
    return str(torch.backends.cpu.get_cpu_capability())


class _Clock:
    """Times of stages."""

    def __init__(self, seconds: dict[str, float], on_stage: Callable[[str], None] | None) -> None:
        self.seconds, self.on_stage = seconds, on_stage

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.on_stage is not None:
            self.on_stage(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def _write(verify: VerifyProgram, path: Path, kind: str, manifest: Manifest, opset: int, clock: _Clock) -> None:
    """Everything is written beside the target first: an interrupted export leaves the old file, or none."""
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as folder:
        part = Path(folder) / path.name
        if kind == "pt2":
            with clock.stage("save"):
                torch.export.save(verify.program, part, extra_files={NAME: manifest.to_json()})
        elif kind == "aoti":
            from spec_compile.export_aoti import compile_package

            with clock.stage("compile"):
                compile_package(verify, part, manifest)
        else:
            from spec_compile.export_onnx import write_onnx

            with clock.stage("onnx"):
                write_onnx(verify, part, manifest, opset)
        # Weights beside an ONNX file go first: the file itself never names what is not there.
        files = sorted((f for f in Path(folder).iterdir() if f.is_file()), key=lambda found: found.name == path.name)
        home = path.absolute().parent
        if len(files) > 1:
            # An old graph would load over new weights.
            (home / path.name).unlink(missing_ok=True)
        for made in files:
            mask = os.umask(0)
            os.umask(mask)
            made.chmod(0o666 & ~mask)
            os.replace(made, home / made.name)
        if kind == "onnx" and len(files) == 1:
            (home / f"{path.name}.data").unlink(missing_ok=True)
