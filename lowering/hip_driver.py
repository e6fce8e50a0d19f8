"""The few calls of the HIP runtime that a launch needs, through ctypes: `gpu_driver` for AMD.

Nothing here has run on an AMD GPU yet; tests check the calls that are made against a stand-in.
There are no clusters and no programmatic launch on these GPUs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from fx_fusion.lowering.gpu_driver import DriverError
from fx_fusion.lowering.runtime_compiler import rocm_library

_CAPTURE_RELAXED: Final = 2


@functools.cache
def _runtime() -> ctypes.CDLL:
    causes = []
    for path in rocm_library("amdhip64"):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            causes.append(str(error))
            continue
        library.hipGetErrorString.restype = ctypes.c_char_p
        return library
    raise DriverError(f"the HIP runtime can't be loaded: {'; '.join(causes)}")


def _check(status: int, what: str) -> None:
    if status:
        text = _runtime().hipGetErrorString(status) or b"unknown error"
        raise DriverError(f"{what}: {text.decode()} ({status})")


def current_context() -> ctypes.c_void_p:
    """The current device of this thread, which is what a context is to HIP: its number."""
    device = ctypes.c_int()
    _check(_runtime().hipGetDevice(ctypes.byref(device)), "hipGetDevice")
    return ctypes.c_void_p(device.value)


def is_capturing(stream: int) -> bool:
    """True while a graph is captured on the stream."""
    status = ctypes.c_int()
    code = _runtime().hipStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return code != 0 or status.value != 0


class Function:
    """A loaded kernel with a fixed block; arguments as `gpu_driver.Function`'s.

    Raises:
        DriverError: The code can't be loaded, or clusters were asked for.
    """

    def __init__(
        self,
        code: bytes,
        name: str,
        *,
        threads: int,
        cluster: int,
        programmatic: bool,
        context: ctypes.c_void_p,
    ) -> None:
        """Load the code. Legal while a stream is being captured."""
        if cluster > 1 or programmatic:
            raise DriverError("AMD's GPUs have neither clusters nor programmatic launch")
        runtime = _runtime()
        self._context, self._threads = context, threads
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        runtime.hipThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            _check(
                runtime.hipModuleLoadData(ctypes.byref(self._module), code),
                "hipModuleLoadData",
            )
            _check(
                runtime.hipModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                ),
                "hipModuleGetFunction",
            )
        finally:
            runtime.hipThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._launch: Any = runtime.hipModuleLaunchKernel

    def clusters_at_once(self, multiprocessors: int) -> int:
        """Blocks that so many compute units hold at once."""
        count = ctypes.c_int()
        _check(
            _runtime().hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count),
                self._function,
                ctypes.c_int(self._threads),
                ctypes.c_size_t(0),
            ),
            "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        return count.value * multiprocessors

    def device_clusters(self) -> int:
        """There are no clusters, so nothing is held."""
        return 0

    def launch(self, clusters: int, stream: int, parameters: Any) -> None:
        """Launch; `parameters` is an array of pointers, one for each kernel parameter."""
        one, none = ctypes.c_uint(1), ctypes.c_uint(0)
        status = self._launch(
            self._function,
            *(ctypes.c_uint(clusters), one, one),
            *(ctypes.c_uint(self._threads), one, one),
            none,
            ctypes.c_void_p(stream),
            parameters,
            None,
        )
        if status:
            _check(status, "hipModuleLaunchKernel")
