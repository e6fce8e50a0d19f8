"""The launcher in C of `csrc/gpu_launch.c`: built at first use, its structures, its entry points.

A launch through ctypes takes some 30 us of the host's time, a launch from C about the driver's
own. The C compiler is the one Inductor uses. With Python's headers the launcher becomes a
builtin function that generated code calls; without them ctypes calls it with addresses; without
a compiler there is none, and `gpu_kernel` launches.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fx_fusion.lowering import gpu_driver
from fx_fusion.lowering.cpu_build import cached_library, compiler

log = logging.getLogger(__name__)

_SOURCES: Final = ("cpp_entry.h", "gpu_launch.c")
_FLAGS: Final = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-shared", "-w")
#: Inputs and results of a call as the kernel takes them; `kArrays` of the source.
ARRAYS: Final = 10
_PARAMETER_BYTES: Final = 512


class Kernel(ctypes.Structure):
    """A loaded kernel with its grid and its parameters."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("config", gpu_driver.Config),
        ("cluster", ctypes.c_uint32),
        ("parameter_bytes", ctypes.c_uint32),
        ("parameters", ctypes.c_ubyte * _PARAMETER_BYTES),
    ]


class Launch(ctypes.Structure):
    """One launch of a call."""

    _fields_ = [
        ("kernel", ctypes.POINTER(Kernel)),
        ("first", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("clusters", ctypes.c_uint32),
    ]


class Call(ctypes.Structure):
    """The launches of a call with so many rows."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("launches", ctypes.POINTER(Launch)),
    ]


class Site(ctypes.Structure):
    """What calls of one site share; zero until the first call binds it."""

    _fields_ = [
        ("launch", ctypes.c_void_p),
        ("failed", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("calls", ctypes.POINTER(Call)),
        ("call_count", ctypes.c_int64),
        ("strides", ctypes.c_int64 * ARRAYS),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("takes_eps_pointer", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class LaunchLibrary:
    """The compiled launcher, or why there is none.

    Attributes:
        library: None if there is none.
        has_entry: It was built with Python's headers and makes builtin functions.
        cause: Why one or the other is missing, "" if nothing is.
    """

    library: Any
    has_entry: bool = False
    cause: str = ""


@functools.cache
def launch_library() -> LaunchLibrary:
    """The launcher, built if it isn't in the cache. Never raises."""
    cause = ""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # One parameter block a kernel is enough only where calls exclude each other.
        return LaunchLibrary(None, cause="this Python runs threads without a lock")
    for with_python in (True, False):
        try:
            library = _build(with_python)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            lines = str(error).strip().splitlines()
            cause = cause or (lines[0] if lines else type(error).__name__)
            continue
        return LaunchLibrary(library, with_python, cause)
    log.warning("fx_fusion: the launcher could not be built, launches cost more: %s", cause)
    return LaunchLibrary(None, cause=cause)


def _build(with_python: bool) -> Any:
    if not compiler():
        raise RuntimeError("no C compiler was found (install g++ or set CXX)")
    command = [compiler(), *_FLAGS]
    if with_python:
        include = sysconfig.get_path("include")
        if not (Path(include) / "Python.h").exists():
            raise RuntimeError(f"{include} has no Python.h (install Python's headers)")
        version = sysconfig.get_config_var("SOABI") or ""
        command += [f"-I{include}", "-DFX_FUSION_PYTHON", f"-DFX_FUSION_SOABI={version}"]
    library = ctypes.PyDLL(str(cached_library(command, _SOURCES, "gpu_launch")))
    sizes = (ctypes.c_int64 * 5)()
    library.fx_fusion_launch_sizes(sizes)
    ours = [ctypes.sizeof(kind) for kind in (gpu_driver.Config, Kernel, Launch, Call, Site)]
    if list(sizes) != ours:
        raise RuntimeError(f"the compiler laid structures out as {list(sizes)}, not {ours}")
    library.fx_fusion_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_float,
        ctypes.c_void_p,
    ]
    if with_python:
        library.fx_fusion_bind.restype = ctypes.py_object
        library.fx_fusion_bind.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return library


def entry_point(site: Site, slow: Callable[..., None], groups: dict[Any, Any]) -> Any:
    """A builtin function for a site: launches, or calls `slow` with the same arguments.

    Args:
        site: Kept alive by `slow`.
        slow: What to do with a call that can't be launched from C.
        groups: The process groups that exist, as keys; others' calls go to `slow`.

    Returns:
        The function, or `slow` itself where there is no such launcher.
    """
    launcher = launch_library()
    if not launcher.has_entry:
        return slow
    return launcher.library.fx_fusion_bind(ctypes.addressof(site), slow, groups)


def kernel_of(function: gpu_driver.Function, parameters: bytes) -> Kernel:
    """The kernel as the launcher keeps it; `function` has to stay alive."""
    if len(parameters) > _PARAMETER_BYTES:
        raise ValueError(f"{len(parameters)} bytes of parameters; {_PARAMETER_BYTES} are kept")
    kernel = Kernel(
        function=function.handle,
        config=function.config,
        cluster=function.cluster,
        parameter_bytes=len(parameters),
    )
    ctypes.memmove(kernel.parameters, parameters, len(parameters))
    return kernel
