"""Launches that a site has made, kept for the launcher in C: by number of rows, with their kernels.

What is kept is what a call came to, no decision: the code that calls `learn` has taken its path
already, and takes it again for every call that the launcher hands back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from fx_fusion.lowering import gpu_driver
from fx_fusion.lowering.arguments import Arguments, result_dtypes
from fx_fusion.lowering.gpu_launch import Call, Kernel, Launch, Site, kernel_of, launch_library
from fx_fusion.lowering.gpu_loaded import Loaded

#: Numbers of rows whose launches a site keeps; calls with more of them cost what they cost now.
MOST_CALLS: Final = 1024


class Learned:
    """The launches of one site.

    Attributes:
        site: What the launcher in C reads.
    """

    def __init__(self, eps: float, scale: float) -> None:
        """Nothing is known yet: the launcher hands every call back."""
        self.site = Site(eps=eps, scale=scale)
        self._kernels: dict[Loaded, Kernel] = {}
        self._calls: dict[int, tuple[Any, int]] = {}

    def wants(self, rows: int, arch: str) -> bool:
        """True if a call with so many rows can be learned and isn't known.

        The launcher in C knows CUDA's driver alone.
        """
        known = rows in self._calls or len(self._calls) == MOST_CALLS
        can = arch.startswith("sm_") and launch_library().library is not None
        return can and not known

    def forget(self) -> None:
        """Drop what was learned: another group or workspace, or none."""
        self.site.call_count = 0
        self._calls.clear()
        self._kernels.clear()

    def learn(
        self,
        arguments: Arguments,
        group: dist.ProcessGroup,
        listed: Sequence[tuple[Loaded, int, int]],
        failed: int,
        stream: int,
    ) -> None:
        """Leave the launches of this number of rows to the launcher in C.

        Args:
            arguments: The op's.
            group: Without which no call is launched.
            listed: Variant, first row and rows of each launch; all of NVIDIA's driver.
            failed: Address of an int32 that isn't zero once a kernel failed.
            stream: Address of a uint64, the stream whose calls are launched.
        """
        rows = arguments.x.numel() // arguments.x.shape[-1]
        launches = (Launch * len(listed))()
        for launch, (launcher, first, count) in zip(launches, listed, strict=True):
            if launcher not in self._kernels:
                self._kernels[launcher] = kernel_of(launcher.function, launcher.parameters)
            launch.kernel = ctypes.pointer(self._kernels[launcher])
            launch.first, launch.rows = first, count
            launch.clusters = launcher.clusters(count)
        self._calls[rows] = launches, len(listed)
        calls = (Call * len(self._calls))()
        for call, (number, (array, count)) in zip(
            calls, sorted(self._calls.items()), strict=True
        ):
            call.rows, call.count = number, count
            call.launches = ctypes.cast(array, ctypes.POINTER(Launch))
        site = self.site
        if site.call_count == 0:
            site.launch = gpu_driver.launch_address()
            site.failed, site.stream, site.group = failed, stream, id(group)
            site.strides[:] = _strides(arguments)
            site.takes_eps_pointer = _is_a_pointer(arguments.eps_tensor, arguments.x.device)
        site.calls = ctypes.cast(calls, ctypes.POINTER(Call))
        site.call_count = len(calls)


def _is_a_pointer(eps: torch.Tensor | None, device: torch.device) -> bool:
    """True if kernels read eps where it is."""
    return eps is not None and eps.dtype == torch.float32 and eps.device == device


def _strides(arguments: Arguments) -> tuple[int, ...]:
    """Bytes from row to row of what a launch reads and writes, in its order."""
    x, residual = arguments.x, arguments.residual
    hidden_size = x.shape[-1]
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    return (
        hidden_size * x.element_size(),
        0 if residual is None else hidden_size * residual.element_size(),
        0,
        0,
        0,
        0,
        hidden_size * norm_dtype.itemsize,
        hidden_size * hidden_dtype.itemsize,
        hidden_size * x.element_size(),
        torch.float32.itemsize,
    )
