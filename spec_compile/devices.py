"""The device that a command runs on."""

from __future__ import annotations

import torch

from spec_compile.errors import OptionsError


def choose_device(name: str) -> torch.device:
    """``cpu``, ``cuda`` (or ``cuda:1``), or ``auto``: the GPU if there is one.

    Raises:
        OptionsError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise OptionsError(f"--device {name}: {next(iter(str(error).splitlines()), type(error).__name__)}") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionsError(f"--device {name}: only cpu and cuda are supported")
    return device
