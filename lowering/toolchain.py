"""What the kernels need of a machine, as facts for `fx-fusion doctor`; nothing here raises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fx_fusion.lowering import cpu_build
from fx_fusion.lowering.cache import cache_folder
from fx_fusion.lowering.runtime_compiler import HIPRTC, NVRTC, BuildError, RuntimeCompiler


@dataclass(frozen=True)
class Found:
    """Something a kernel needs: what was found, or why it wasn't (`cause`, "" if it was)."""

    what: str = ""
    cause: str = ""


def cpu_compiler() -> str:
    """The C++ compiler that Inductor and the CPU kernel are built with, "" if there is none."""
    return cpu_build.compiler()


def cpu_kernel() -> Found:
    """The CPU kernel: its instruction set and file name. Compiles it if it isn't cached."""
    build = cpu_build.cpu_library()
    return Found(f"{build.isa}, {build.name}" if not build.cause else "", build.cause)


def nvrtc() -> Found:
    """The run-time compiler of CUDA, which the GPU kernels are built with: its version."""
    return _version_of(NVRTC)


def hiprtc() -> Found:
    """The same of ROCm."""
    return _version_of(HIPRTC)


def _version_of(compiler: RuntimeCompiler) -> Found:
    try:
        return Found(compiler.version)
    except (BuildError, OSError, AttributeError) as error:
        return Found(cause=str(error))


def kernel_cache() -> Path:
    """The folder in which compiled kernels are kept; it may not exist yet."""
    return cache_folder()
