"""``load``: an exported verify step as a callable with a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_compile import _compat
from spec_compile.errors import ArtefactError, CacheError, OptionsError
from spec_compile.kernels.step_mode import launching
from spec_compile.logs import logger
from spec_compile.manifest import Manifest, Value, read_manifest

# More tokens than any cache holds: every block is kept.
_NEVER = 1 << 62
# Each level of a CPU's vector units runs code made for those before it.
_CPU_LEVELS = ("DEFAULT", "AVX2", "AVX512")

Runner = Callable[[Mapping[str, Tensor]], Tensor]


def load(path: str | os.PathLike[str], *, batch: int = 1, codegen: str | None = None, **session: Any) -> LoadedVerify:
    """Load an artefact of :func:`spec_compile.export`.

    Manifest and checksums are checked before anything is loaded. AOTInductor packages hold machine code: load those you trust.

    Args:
        path: the file.
        batch: sequences that the cache is made for.
        codegen: of .pt2: ``inductor`` compiles the program at its first calls (default on CUDA), ``eager`` runs it as it is
            (default on CPU).
        session: keywords of ``onnxruntime.InferenceSession``, for ONNX.

    Returns:
        A :class:`LoadedVerify`.

    Raises:
        ArtefactError: no artefact of ours, a damaged one, or one that needs what is not here: a device, operators, a package, a
            version. The message names it.
        OptionsError: bad arguments.
    """
    target = Path(path)
    manifest = read_manifest(target)
    _check(manifest, target)
    if not isinstance(batch, int) or isinstance(batch, bool) or not manifest.batch[0] <= batch <= manifest.batch[1]:
        low, high = manifest.batch
        raise OptionsError(f"batch must be {low if low == high else f'{low}..{high}'} for this artefact, got {batch!r}")
    if codegen not in (None, "inductor", "eager") or (codegen is not None and manifest.format != "pt2"):
        raise OptionsError(f"codegen is 'inductor' or 'eager', for .pt2 only, got {codegen!r} for {manifest.format}")
    if session and manifest.format != "onnx":
        raise OptionsError(f"unknown argument {next(iter(session))!r} for {manifest.format}")
    if manifest.format == "onnx":
        from spec_compile.export_onnx import open_session

        return LoadedVerify(manifest, open_session(target, manifest, session), batch)
    try:
        program = _pt2(target, manifest, codegen) if manifest.format == "pt2" else _aoti(target)
    except ArtefactError:
        raise
    except Exception as error:
        made, here = manifest.versions.get("torch"), torch.__version__
        hint = "" if made == here else f"; it was made by torch {made}, this is {here}"
        raise ArtefactError(
            f"{target} cannot be loaded: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}{hint}"
        ) from error
    names = [value.name for value in manifest.inputs]

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        found: Any = program(*[inputs[name] for name in names])
        return found[0] if isinstance(found, tuple | list) else found

    return LoadedVerify(manifest, run, batch)


def _check(manifest: Manifest, path: Path) -> None:
    """What the artefact needs is here, or a plain error."""
    if manifest.device == "cuda" and manifest.format != "onnx":
        if not torch.cuda.is_available():
            raise ArtefactError(f"{path} was exported for CUDA, and there is no CUDA device here: export it from a model on CPU")
        capability = torch.cuda.get_device_capability()
        # Machine code runs on devices of its major version, its own minor version and later ones.
        if manifest.format == "aoti" and not _runs_on(manifest.capability, capability):
            here = ".".join(map(str, capability))
            raise ArtefactError(f"{path} was compiled for compute capability {manifest.capability}, this device has {here}")
    if manifest.format == "aoti" and manifest.device == "cpu":
        made, has = manifest.capability, str(torch.backends.cpu.get_cpu_capability())
        if made != has and (
            made not in _CPU_LEVELS or has not in _CPU_LEVELS or _CPU_LEVELS.index(made) > _CPU_LEVELS.index(has)
        ):
            raise ArtefactError(f"{path} was compiled for CPUs with {made}, this one has {has}: export it on this machine")
    if manifest.format == "onnx":
        return
    made_by = manifest.versions.get("torch", "0.0")
    if _compat.parse_version(made_by)[:2] != _compat.parse_version(str(torch.__version__))[:2]:
        if manifest.format == "aoti":
            raise ArtefactError(
                f"{path} was compiled with torch {made_by}, this is {torch.__version__}: compiled code holds for one version; "
                "export it again, or as .pt2"
            )
        logger.warning("%s was exported by torch %s, this is %s: it may not load", path, made_by, torch.__version__)
    _register()
    missing = [name for name in manifest.operators if not _has_operator(name)]
    if missing:
        raise ArtefactError(
            f"{path} needs operators that are not here: {', '.join(missing)} (made by spec_compile "
            f"{manifest.versions.get('spec_compile')}): install that version, or export with flavour='portable'"
        )


def _runs_on(made: str, has: tuple[int, int]) -> bool:
    major, minor = map(int, made.split("."))
    return major == has[0] and minor <= has[1]


def _register() -> None:
    import spec_compile.kernels.library  # noqa: F401


def _has_operator(name: str) -> bool:
    space, _, rest = name.partition(".")
    return hasattr(getattr(torch.ops, space), rest.split(".")[0])


def _pt2(path: Path, manifest: Manifest, codegen: str | None) -> Callable[..., Any]:
    module = torch.export.load(path).module()
    if codegen == "eager" or (codegen is None and manifest.device == "cpu"):
        return module
    compiled = torch.compile(module, fullgraph=True)
    varying = [value.shape.index("rows") if "rows" in value.shape else None for value in manifest.inputs]

    def run(*args: Tensor) -> Any:
        for tensor, dim in zip(args, varying):
            # One graph for every number of rows; one row is a graph of its own.
            if dim is not None and tensor.shape[dim] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return compiled(*args)

    return run


def _aoti(path: Path) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path))


class CacheLayer:
    """K ``[B, Hkv, slots, D]`` and V of one layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class LoadedCache:
    """The cache of a loaded step; rolls back like :class:`~spec_compile.VerifyCache`."""

    def __init__(self, manifest: Manifest, batch: int, device: torch.device) -> None:
        self._manifest, self.batch, self.length = manifest, batch, 0
        found = {value.name: _zeros(value, batch, device) for value in manifest.written()}
        self.layers = [CacheLayer(found.pop(f"keys_{i}"), found.pop(f"values_{i}")) for i in range(manifest.layers)]
        self.summaries: dict[str, Tensor] = found
        self._versions: list[int] = []
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                torch._dynamo.mark_static_address(tensor)

    @property
    def capacity(self) -> int:
        """Slots of each layer."""
        return self._manifest.slots

    def require_room(self, rows: int) -> None:
        """
        Raises:
            CacheError: ``rows`` more tokens do not fit.
        """
        if self.length + rows > self.capacity:
            raise CacheError(
                f"the cache is too short: it holds {self.length} tokens in {self.capacity} slots and {rows} more are to be "
                "written. Export with a larger max_len"
            )

    def crop(self, tokens_to_remove: Any) -> None:
        """Roll back the last ``|tokens_to_remove|`` tokens (at most 0, as for ``VerifyCache``)."""
        count = -int(tokens_to_remove)
        if not 0 <= count <= self.length:
            raise CacheError(f"crop takes the negative number of tokens to remove, at most {self.length}, got {tokens_to_remove}")
        self.length -= count

    def reset(self) -> None:
        """Forget every token."""
        self.length = 0

    def copy_from(self, cache: Any, length: int | None = None) -> None:
        """Take over the tokens of a transformers cache, such as one that the model itself prefilled.

        Args:
            cache: has ``layers`` with ``keys`` and ``values`` ``[B, Hkv, S, D]``; S may be less than the slots here.
            length: tokens held; default ``cache.get_seq_length()``.

        Raises:
            CacheError: it does not fit.
        """
        try:
            held = int(cache.get_seq_length() if length is None else length)
        except (RuntimeError, ValueError):
            raise CacheError("the sequences have lengths of their own; an artefact has one for all: give length=") from None
        layers = list(cache.layers)
        if len(layers) != len(self.layers) or not 0 <= held <= self.capacity:
            raise CacheError(
                f"{len(layers)} layers with {held} tokens do not fit {len(self.layers)} layers of {self.capacity} slots"
            )
        pairs = [(getattr(a, part), getattr(b, part)) for a, b in zip(layers, self.layers) for part in ("keys", "values")]
        for given, own in pairs:
            if given.shape[2] < held or (given.shape[0], given.shape[1], given.shape[3]) != (*own.shape[:2], own.shape[3]):
                raise CacheError(f"a cache of {list(given.shape)} does not fit one of {list(own.shape)}")
        with torch.no_grad():
            for given, own in pairs:
                own[:, :, :held].copy_(given[:, :, :held])
        self.length = held

    def _inputs(self) -> dict[str, Tensor]:
        """What a step reads and writes; summaries are distrusted if somebody else wrote K."""
        if self.summaries and self._versions != self._now():
            for name, tensor in self.summaries.items():
                if name.startswith("spec_valid"):
                    tensor.zero_()
        pairs = [(f"{part}_{i}", getattr(layer, part)) for i, layer in enumerate(self.layers) for part in ("keys", "values")]
        return {**dict(pairs), **self.summaries}

    def _advance(self, rows: int) -> None:
        self.length += rows
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [layer.keys._version for layer in self.layers] if self.summaries else []


def _zeros(value: Value, batch: int, device: torch.device) -> Tensor:
    sizes = [batch if size == "batch" else int(size) for size in value.shape]
    with torch.inference_mode(False):
        return torch.zeros(sizes, dtype=getattr(torch, value.dtype), device=device)


class LoadedVerify:
    """A loaded verify step; called like :class:`~spec_compile.VerifyFunction`.

    Attributes:
        manifest: what the artefact says about itself.
        cache: advances by the rows of each call; roll it back with ``cache.crop(-rejected)``.
    """

    def __init__(self, manifest: Manifest, run: Runner, batch: int) -> None:
        self.manifest, self._run = manifest, run
        self.device = torch.device("cpu" if manifest.format == "onnx" else manifest.device)
        self.cache = LoadedCache(manifest, batch, self.device)
        self.draft_len = manifest.rows[1] - 1
        self._constants: dict[Any, Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Any = None, sparse: bool | None = None
    ) -> Tensor:
        """Run one verify step.

        Args:
            input_ids: int64 ``[B, T]``, the last accepted token and T - 1 drafts.
            position_ids: int64 ``[B, T]``; default continues the cache (per row, if a 2-D mask is given).
            attention_mask: as the artefact's ``mask`` says: ``padding`` takes None or 2-D ``[B, held + T]`` with 0 for padding,
                ``tree`` takes a bool ``[B|1, 1, T, slots]``, or a dict of them by layer type.
            sparse: True or False picks the mode of this step; default: sparse if the plan is.

        Returns:
            Logits ``[B, T, V]``.

        Raises:
            OptionsError: wrong shapes, or what the artefact was not made for.
            CacheError: the cache is too short.
        """
        rows = self._check(input_ids, position_ids, sparse)
        self.cache.require_room(rows)
        inputs = self.cache._inputs()
        inputs["input_ids"] = _whole(input_ids.to(self.device, torch.int64))
        inputs["position"] = torch.tensor(self.cache.length, device=self.device)
        inputs.update(self._masks(rows, position_ids, attention_mask))
        for value in self.manifest.inputs:
            if value.role in ("gate", "sparse"):
                inputs[value.name] = self._switch(value.role, sparse is not False)
        with launching(exact=sparse is False):
            logits = self._run(inputs)
        self.cache._advance(rows)
        return logits

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Take in a prompt ``[B, N]`` by exact steps of as many rows as the artefact has; returns the last logits ``[B, V]``.

        For long prompts let the model prefill, and hand its cache to ``cache.copy_from``.
        """
        if self.manifest.mask == "tree":
            raise OptionsError(
                "prefill needs an export with mask='padding' or 'causal'; let the model prefill, then cache.copy_from(its cache)"
            )
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise OptionsError(f"prefill takes input_ids [B, N] with N of at least 1, got {list(input_ids.shape)}")
        self.cache.require_room(input_ids.shape[1])
        logits = None
        for part in input_ids.split(self.manifest.rows[1], dim=1):
            held = self.cache.length + part.shape[1]
            mask = None if attention_mask is None else attention_mask[:, :held]
            logits = self(part, attention_mask=mask, sparse=False if self.manifest.sparse else None)
        assert logits is not None
        return logits[:, -1]

    def reset(self) -> None:
        """Forget the sequence: the next call starts at position 0."""
        self.cache.reset()

    def report(self) -> Manifest:
        """What was exported."""
        return self.manifest

    def _check(self, input_ids: Tensor, position_ids: Tensor | None, sparse: bool | None) -> int:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise OptionsError(f"input_ids must be int64 [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
        batch, rows = input_ids.shape
        least, most = self.manifest.rows
        if not least <= rows <= most:
            raise OptionsError(f"input_ids has {rows} rows; this artefact was made for {least}..{most}")
        if batch != self.cache.batch:
            raise OptionsError(f"input_ids has batch {batch}, the cache was made for batch {self.cache.batch}: load(batch=...)")
        if sparse and not self.manifest.sparse:
            raise OptionsError("sparse=True needs an artefact with a plan that is not exact: export(..., plan=...)")
        if position_ids is not None and self.manifest.mask == "causal":
            raise OptionsError("this artefact derives positions from the cache: export with mask='padding' to give position_ids")
        if position_ids is not None and tuple(position_ids.shape) not in ((1, rows), (batch, rows)):
            raise OptionsError(f"position_ids must be [B, T] = {[batch, rows]}, got {list(position_ids.shape)}")
        return rows

    def _masks(self, rows: int, position_ids: Tensor | None, attention_mask: Any) -> dict[str, Tensor]:
        """Inputs of positions and masks."""
        kind, batch, held, slots = self.manifest.mask, self.cache.batch, self.cache.length, self.manifest.slots
        if kind == "causal":
            if attention_mask is not None:
                raise OptionsError("this artefact takes no mask: export with mask='padding' or mask='tree'")
            return {}
        if kind == "tree":
            found = self._trees(rows, attention_mask)
        elif attention_mask is None:
            found = {"attention_mask": self._ones(batch, slots)}
        else:
            if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (batch, held + rows):
                given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
                raise OptionsError(
                    f"attention_mask must be 2-D [B, held + T] = {[batch, held + rows]}, got {given}; trees need an export with "
                    "mask='tree'"
                )
            mask = attention_mask.to(self.device).bool()
            if position_ids is None:
                position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, held:]
            found = {"attention_mask": torch.nn.functional.pad(mask, (0, slots - held - rows), value=True)}
        if position_ids is None:
            position_ids = torch.arange(held, held + rows, device=self.device).unsqueeze(0)
        return {**found, "position_ids": _whole(position_ids.to(self.device, torch.int64).expand(batch, rows))}

    def _trees(self, rows: int, given: Any) -> dict[str, Tensor]:
        names = [value.name for value in self.manifest.inputs if value.role == "mask"]
        if len(names) > 1:
            wanted = [name.removeprefix("attention_mask_") for name in names]
            if not isinstance(given, dict) or sorted(given) != sorted(wanted):
                raise OptionsError(f"attention_mask must be a dict with a mask for each of {', '.join(wanted)}")
            masks = {f"attention_mask_{kind}": mask for kind, mask in given.items()}
        else:
            masks = {names[0]: next(iter(given.values())) if isinstance(given, dict) and len(given) == 1 else given}
        batch, slots = self.cache.batch, self.manifest.slots
        for mask in masks.values():
            fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4
            if not fits or tuple(mask.shape[1:]) != (1, rows, slots) or mask.shape[0] not in (1, batch):
                found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise OptionsError(f"attention_mask must be bool {[batch, 1, rows, slots]} (rows, cache slots), got {found}")
        return {name: _whole(mask.to(self.device).expand(batch, 1, rows, slots)) for name, mask in masks.items()}

    def _ones(self, batch: int, slots: int) -> Tensor:
        if "ones" not in self._constants:
            self._constants["ones"] = torch.ones(batch, slots, dtype=torch.bool, device=self.device)
        return self._constants["ones"]

    def _switch(self, kind: str, sparse: bool) -> Tensor:
        if (kind, sparse) not in self._constants:
            on = self.manifest.min_context if kind == "gate" else 1
            off = _NEVER if kind == "gate" else 0
            self._constants[kind, sparse] = torch.tensor([on if sparse else off], device=self.device)
        return self._constants[kind, sparse]


def _whole(x: Tensor) -> Tensor:
    """A contiguous copy at an aligned address: AOTInductor's code reads its inputs as such, and checks nothing."""
    return x.clone(memory_format=torch.contiguous_format)
