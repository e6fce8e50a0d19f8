"""Compile the CPU kernel at first use, with the compiler and instruction set Inductor picks.

The library is cached on disk by the hash of its sources, flags, compiler and torch version, so
it is built once a machine, in seconds. No torch header beyond ATen's vector classes is read and
no torch library is linked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fx_fusion.lowering.cache import cache_folder

_SOURCES: Final = (
    "cpu_block.h",
    "cpu_site.h",
    "cpu_forms.h",
    "cpu_barrier.h",
    "cpu_all_reduce_add_rms_norm.cpp",
)
#: Rounding is part of the contract: no contraction into fused multiply-adds, no fast-math.
_FLAGS: Final = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-w",
)
#: How long the compiler may take, in seconds; it needs about four.
BUILD_SECONDS: Final = 300


@dataclass(frozen=True)
class Build:
    """A compiled kernel, or why there is none.

    Attributes:
        library: The loaded library, None if there is none.
        isa: The instruction set it was built for, "scalar" without a vector one.
        name: Its file name, which holds the hash of sources, flags, compiler and torch.
        cause: Why there is none, "" if there is.
    """

    library: ctypes.CDLL | None
    isa: str = ""
    name: str = ""
    cause: str = ""


@functools.cache
def cpu_library() -> Build:
    """The kernel's library, built if it isn't in the cache. Never raises."""
    try:
        command, isa = _command()
        path = cached_library(command, _SOURCES, "cpu")
        return Build(ctypes.CDLL(str(path)), isa, path.name)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Build(None, cause=f"the CPU kernel could not be built: {_first_line(error)}")


@functools.cache
def compiler() -> str:
    """The C++ compiler Inductor uses; "" if there is none. Cheap: nothing is compiled."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except Exception:  # torch raises errors of its own where no compiler is found
        return ""


def _command() -> tuple[list[str], str]:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    name = compiler()
    if not name:
        raise RuntimeError("no C++ compiler was found (install g++ or set CXX)")
    isa: Any = pick_vec_isa()
    arch_flags = str(isa.build_arch_flags()).split() if isa else []
    macros = [f"-D{macro}" for macro in isa.build_macro()] if isa else []
    # ATen's vector classes ask for the plain name as well, "AVX512"
    capability = [f"-DCPU_CAPABILITY={m[len('-DCPU_CAPABILITY_') :]}" for m in macros]
    include = Path(torch.__file__).parent / "include"
    command = [name, *_FLAGS, *arch_flags, *macros, *capability, f"-I{include}"]
    return command, str(isa) if isa else "scalar"


def cached_library(command: list[str], sources: Sequence[str], prefix: str) -> Path:
    """The shared library that `command` makes of the last of `sources`, from the cache or built.

    Args:
        command: The compiler and its options, without source and target.
        sources: Names of files in `csrc`; those before the last are included by it.
        prefix: Begins the library's file name.

    Raises:
        OSError, RuntimeError, subprocess.SubprocessError: It can't be built.
    """
    with _sources() as folder:
        key = hashlib.sha256(repr((command, torch.__version__)).encode())
        key.update(_compiler_version(command[0]).encode())
        for source in sources:
            key.update((folder / source).read_bytes())
        target = cache_folder() / f"{prefix}_{key.hexdigest()[:24]}.so"
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        try:
            done = subprocess.run(
                [*command, str(folder / sources[-1]), "-o", temporary],
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(done.stderr.strip() or f"{command[0]} failed")
            os.replace(temporary, target)  # atomic: ranks may build at the same time
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return target


@contextlib.contextmanager
def _sources() -> Iterator[Path]:
    folder = importlib.resources.files("fx_fusion.lowering") / "csrc"
    with importlib.resources.as_file(folder) as path:
        yield path


def _compiler_version(name: str) -> str:
    done = subprocess.run(
        [name, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
