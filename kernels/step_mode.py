"""What the host knows of the step it launches. Operators read their switch on the device, so that they can be captured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_step = threading.local()


@contextlib.contextmanager
def launching(exact: bool) -> Iterator[None]:
    """Around the launch of a step in this thread. What is captured within, if ``exact``, must not be replayed as a sparse one."""
    before = known_exact()
    _step.exact = exact
    try:
        yield
    finally:
        _step.exact = before


def known_exact() -> bool:
    """Whether the step is exact for certain. If not, only the switch on the device can tell."""
    return bool(getattr(_step, "exact", False))
