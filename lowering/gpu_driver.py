"""The few calls of the CUDA driver that a launch needs, through ctypes.

The driver is always there where a GPU is, so nothing has to be installed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

_LIBRARY: Final = "libcuda.so.1"
_INVALID_CONTEXT: Final = 201
_CLUSTER_DIMENSION: Final = 4
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_CAPTURE_RELAXED: Final = 2


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class _Value(ctypes.Union):
    _fields_ = [("words", ctypes.c_uint * 16), ("alignment", ctypes.c_uint64)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", _Value)]


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(f"the CUDA driver can't be loaded: {error}") from error


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def launch_address() -> int:
    """The address of cuLaunchKernelEx."""
    return ctypes.cast(_driver().cuLaunchKernelEx, ctypes.c_void_p).value or 0


def current_context() -> ctypes.c_void_p:
    """The context of this thread; torch has to have initialised the device."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context:
        raise DriverError("this thread has no CUDA context")
    return context


def is_capturing(stream: int) -> bool:
    """True while a graph is captured on the stream."""
    status = ctypes.c_int()
    code = _driver().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return code != 0 or status.value != 0


class Function:
    """A loaded kernel with a fixed block and cluster.

    Args:
        code: The cubin.
        name: The kernel's name.
        threads: Threads of a block.
        cluster: Blocks of a cluster.
        programmatic: Launch before the kernel ahead has ended; the kernel waits for it itself.
        context: The context to load into.
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
        driver = _driver()
        self._context = context
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            _check(
                driver.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData"
            )
            _check(
                driver.cuModuleGetFunction(
                    ctypes.byref(self._function), self._module, name.encode()
                ),
                "cuModuleGetFunction",
            )
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._attributes = (_Attribute * 2)()
        count = 0
        if programmatic:
            self._attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            self._attributes[count].value.words[0] = 1
            count += 1
        if cluster > 1:
            self._attributes[count].id = _CLUSTER_DIMENSION
            self._attributes[count].value.words[0] = cluster
            self._attributes[count].value.words[1] = 1
            self._attributes[count].value.words[2] = 1
            count += 1
        self._cluster = cluster
        self._config = Config(
            grid_x=cluster,
            grid_y=1,
            grid_z=1,
            block_x=threads,
            block_y=1,
            block_z=1,
            attributes=ctypes.cast(self._attributes, ctypes.POINTER(_Attribute)),
            attribute_count=count,
        )
        self._config_pointer = ctypes.byref(self._config)
        self._launch: Any = driver.cuLaunchKernelEx

    @property
    def handle(self) -> int:
        """The driver's handle of the kernel."""
        return self._function.value or 0

    @property
    def config(self) -> Config:
        """How it is launched, but for the grid and the stream."""
        return self._config

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self._cluster

    def clusters_at_once(self, multiprocessors: int) -> int:
        """Clusters (blocks, if a cluster is one) that so many multiprocessors hold at once."""
        driver, count = _driver(), ctypes.c_int()
        _check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count),
                self._function,
                ctypes.c_int(self._config.block_x),
                ctypes.c_size_t(0),
            ),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
        return count.value * multiprocessors // self._cluster

    def device_clusters(self) -> int:
        """Clusters that the whole GPU holds at once, as its multiprocessors are grouped."""
        count = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._function, self._config_pointer
            ),
            "cuOccupancyMaxActiveClusters",
        )
        return count.value

    def launch(self, clusters: int, stream: int, parameters: Any) -> None:
        """Launch; `parameters` is an array of pointers, one for each kernel parameter."""
        config = self._config
        config.grid_x = clusters * self._cluster
        config.stream = stream
        status = self._launch(self._config_pointer, self._function, parameters, None)
        if status == _INVALID_CONTEXT:  # a thread that has made no CUDA call yet
            _check(_driver().cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
            status = self._launch(self._config_pointer, self._function, parameters, None)
        if status:
            _check(status, "cuLaunchKernelEx")
