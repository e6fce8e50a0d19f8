"""A kernel's variant as it is loaded for one hidden size, with the parameters of its launches."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Final, cast

from fx_fusion.lowering import gpu_build, gpu_driver
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.driver import driver_for
from fx_fusion.lowering.gpu_layout import (
    MAX_WORLD_SIZE,
    Geometry,
    row_segments,
    vectors_of,
)
from fx_fusion.lowering.gpu_variant import variant_of

#: `Params` of the kernel: what changes from call to call, what the hidden size gives, what the
#: workspace gives. Pointers first in each part, so nothing is padded but as said here.
CALL: Final = struct.Struct("=10Q2i2f")
HIDDEN: Final = struct.Struct("=3if")
WORKSPACE: Final = struct.Struct(f"=iI4Q{MAX_WORLD_SIZE}Q")


class Loaded:
    """One variant, ready to launch.

    Attributes:
        capacity: Clusters of a launch at most.
    """

    capacity: int

    def __init__(
        self,
        arguments: Arguments,
        shape: Geometry,
        algorithm: str,
        arch: str,
        context: ctypes.c_void_p,
    ) -> None:
        """Compile or fetch the variant, load it, and fill in what the hidden size gives.

        What the workspace gives stays zero.

        Raises:
            BuildError: It can't be compiled.
            DriverError: It can't be loaded.
        """
        variant = variant_of(arguments, shape, algorithm)
        self._function = driver_for(arch).Function(
            gpu_build.machine_code(variant, arch),
            gpu_build.KERNELS[variant.algorithm].entry,
            threads=shape.threads,
            cluster=shape.cluster,
            programmatic=has_programmatic_launch(arch),
            context=context,
        )
        hidden_size, width = arguments.x.shape[-1], arguments.x.element_size()
        self._parameters = bytearray(CALL.size + HIDDEN.size + WORKSPACE.size)
        HIDDEN.pack_into(
            self._parameters,
            CALL.size,
            hidden_size,
            vectors_of(hidden_size, width),
            row_segments(hidden_size, width),
            1.0 / hidden_size,
        )
        self._view: Any = (ctypes.c_char * len(self._parameters)).from_buffer(self._parameters)
        self._pointers: Any = (ctypes.c_void_p * 1)(ctypes.addressof(self._view))

    @property
    def function(self) -> gpu_driver.Function:
        """The loaded kernel, of CUDA: the launcher in C knows no other."""
        return cast(gpu_driver.Function, self._function)

    @property
    def parameters(self) -> bytes:
        """The kernel's parameters as they are now, those of the last call among them."""
        return bytes(self._parameters)

    def clusters(self, rows: int) -> int:
        """The clusters of a launch of so many rows."""
        return min(rows, self.capacity)

    def launch(
        self, pointers: tuple[int, ...], rows: int, eps: float, scale: float, stream: int
    ) -> None:
        """Put one launch into the stream: `rows` rows of the arrays at `pointers`.

        The lock that guards the parameters is held.
        """
        clusters = self.clusters(rows)
        CALL.pack_into(self._parameters, 0, *pointers, rows, clusters, eps, scale)
        self._function.launch(clusters, stream, self._pointers)


def has_programmatic_launch(arch: str) -> bool:
    """True from sm_90 on: a kernel may start before the one ahead has ended; clusters."""
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
