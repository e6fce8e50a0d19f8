"""Which architecture a device has, without initialising a GPU that isn't asked about."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

# torch leaves it untyped.
_is_initialized: Final[Any] = torch.cuda.is_initialized


def device_arch(device: torch.device) -> str:
    """The architecture of a device: "cpu", "sm_90" (NVIDIA), "gfx942" (AMD), or its type."""
    if device.type != "cuda":
        return device.type
    if not _is_initialized() and not torch.cuda.is_available():
        return device.type
    return _gpu_arch(device.index if device.index is not None else torch.cuda.current_device())


@functools.cache
def _gpu_arch(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
