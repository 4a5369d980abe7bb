"""Errors a user can meet. Each message names the field and the remedy."""

from __future__ import annotations


class SpecCompileError(Exception):
    """Base of all errors raised by spec_compile."""


class OptionsError(SpecCompileError, ValueError):
    """A backend option or argument has an unknown name or a bad value."""


class PlanError(SpecCompileError, ValueError):
    """A sparsity plan is malformed; the message names section and field."""


class PlanNotYetError(PlanError, NotImplementedError):
    """A valid plan asks for something this version cannot do yet."""


class QualityError(SpecCompileError, RuntimeError):
    """A plan is further from the model than it may be; the message gives what was measured and the limits."""


class CacheError(SpecCompileError, ValueError):
    """A KV cache is of the wrong kind, too short, or not initialised as compilation needs it."""


class StrictError(SpecCompileError, RuntimeError):
    """Raised under ``strict=True`` where the default would warn and carry on."""


class ExportError(SpecCompileError, RuntimeError):
    """A verify program cannot be exported as asked; the message says what stands in the way."""


class ArtefactError(SpecCompileError, RuntimeError):
    """A file is no artefact of ours, is damaged, or needs what is missing here; the message names it."""


class VersionError(SpecCompileError, ImportError):
    """An installed dependency is outside the supported range."""
