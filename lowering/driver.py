"""The driver of a GPU's maker, by its architecture."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol, cast

from fx_fusion.lowering import gpu_driver, hip_driver


class Function(Protocol):
    """A loaded kernel; see `gpu_driver.Function`."""

    def clusters_at_once(self, multiprocessors: int) -> int:
        """Clusters that so many multiprocessors hold at once."""

    def device_clusters(self) -> int:
        """Clusters that the whole GPU holds at once."""

    def launch(self, clusters: int, stream: int, parameters: Any) -> None:
        """Launch so many clusters."""


class Driver(Protocol):
    """What is needed of a driver; `gpu_driver` says what each call does."""

    def current_context(self) -> ctypes.c_void_p:
        """The context of this thread."""

    def is_capturing(self, stream: int) -> bool:
        """True while a graph is captured on the stream."""

    def Function(
        self,
        code: bytes,
        name: str,
        *,
        threads: int,
        cluster: int,
        programmatic: bool,
        context: ctypes.c_void_p,
    ) -> Function:
        """Load a kernel."""


def driver_for(arch: str) -> Driver:
    """CUDA's driver, or HIP's runtime for an arch such as "gfx942"."""
    return cast(Driver, hip_driver if arch.startswith("gfx") else gpu_driver)
