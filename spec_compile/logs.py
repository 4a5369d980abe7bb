"""The ``spec_compile`` logger: quiet by default, switched like PyTorch's own logs with ``TORCH_LOGS="+spec_compile"``."""

from __future__ import annotations

import logging

logger = logging.getLogger("spec_compile")
