"""Version ranges, and every use of a PyTorch internal that differs between versions."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any

import torch

from spec_compile.errors import VersionError

# Tested: the lower bound and the highest release below the upper bound. A release above the range warns once, below fails.
SUPPORTED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 18))}


def parse_version(text: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` to ``(2, 13, 0)``."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise VersionError(f"cannot read the version {text!r}")
    return tuple(int(part) for part in match.groups(default="0"))


def check_version(package: str, installed: str) -> str | None:
    """None if supported, a warning text if newer than tested.

    Raises:
        VersionError: ``installed`` is older than the supported range.
    """
    low, high = SUPPORTED[package]
    found = parse_version(installed)[:2]
    if found < low:
        raise VersionError(
            f"spec_compile needs {package} >= {low[0]}.{low[1]}, found {installed}: pip install -U '{package}>={low[0]}.{low[1]}'"
        )
    if found >= high:
        return f"{package} {installed} is newer than the tested range [{low[0]}.{low[1]}, {high[0]}.{high[1]})"
    return None


@functools.cache
def check_installed(package: str) -> None:
    """Check one installed package once per process.

    Raises:
        VersionError: the package is missing or too old.
    """
    from spec_compile.logs import logger

    try:
        installed = torch.__version__ if package == "torch" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        low = SUPPORTED[package][0]
        raise VersionError(
            f"this needs {package} >= {low[0]}.{low[1]}, which is not installed: pip install '{package}'"
        ) from None
    warning = check_version(package, str(installed))
    if warning:
        logger.warning("%s; it may work, but was not tested", warning)


def tracing_context() -> Any | None:
    from torch._guards import TracingContext

    return TracingContext.try_get()


def compile_id() -> Any | None:
    """Dynamo's ``(frame, attempt)`` of the compilation in progress, or None."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def trace_artifact(name: str, text: str) -> None:
    """Hand a graph dump to ``TORCH_TRACE`` (read by tlparse); free when tracing is off."""
    from torch._logging import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


@contextlib.contextmanager
def allow_real_constants() -> Iterator[None]:
    """Let Dynamo mix fake tensors with constants that ``torch.tensor(0.0, device="meta")`` makes: those stay real."""
    from torch._subclasses.fake_tensor import fake_tensor_tls

    before = fake_tensor_tls.allow_non_fake_inputs_override
    fake_tensor_tls.allow_non_fake_inputs_override = True
    try:
        yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = before


def name_constants(gm: Any) -> None:
    """Give constants that retracing lifted into buffers a source: AOTAutograd insists on one for every buffer."""
    from torch._dynamo.source import ConstantSource

    known = dict(getattr(gm, "_param_name_to_source", None) or {})
    for name, _ in [*gm.named_parameters(), *gm.named_buffers()]:
        known.setdefault(name, ConstantSource(f"spec_compile.{name}"))
    gm._param_name_to_source = known


def is_plain_tensor(x: Any) -> bool:
    """Whether the compiler may trace this tensor: not a wrapper subclass (DTensor, quantised weights)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(x) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
