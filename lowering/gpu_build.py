"""Compile the GPU kernel at run time with NVRTC, which comes with CUDA builds of torch.

No nvcc, no headers. The machine code is cached on disk by the hash of source, options and
compiler version, so each variant is compiled once a machine, in a few tenths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.resources
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from fx_fusion.lowering.cpu_build import cache_folder
from fx_fusion.lowering.gpu_variant import Variant

KERNEL_NAME: Final = "fx_fusion_one_shot"
_HEADER: Final = "gpu_device.h"
_SOURCE: Final = "gpu_one_shot.cu"
#: Rounding is part of the contract: no contraction into fused multiply-adds.
_OPTIONS: Final = ("-std=c++17", "-default-device", "-fmad=false")


class BuildError(RuntimeError):
    """The kernel couldn't be compiled; the message is the compiler's."""


def machine_code(variant: Variant, arch: str) -> bytes:
    """The cubin of a variant for an arch such as "sm_90", from the cache or the compiler.

    Raises:
        BuildError: There is no NVRTC, or it refuses the source.
    """
    options = (f"--gpu-architecture={arch}", *_OPTIONS, *variant.macros())
    key = hashlib.sha256(repr((options, source_hash(), nvrtc_version())).encode())
    target = cache_folder() / f"gpu_{key.hexdigest()[:24]}.cubin"
    with contextlib.suppress(OSError):
        return target.read_bytes()
    code = compile_with_nvrtc(options)
    with contextlib.suppress(OSError):  # a read-only or full disk only costs time
        _write(target, code)
    return code


def _write(target: Path, code: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".cubin", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, target)  # atomic: ranks may build at the same time
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


@functools.cache
def sources() -> tuple[str, str]:
    """The kernel's source and the header it includes."""
    folder = importlib.resources.files("fx_fusion.lowering") / "csrc"
    return (
        (folder / _SOURCE).read_text(encoding="utf-8"),
        (folder / _HEADER).read_text(encoding="utf-8"),
    )


@functools.cache
def source_hash() -> str:
    """Twelve hex digits over the sources; ranks have to agree on it."""
    return hashlib.sha256("\0".join(sources()).encode()).hexdigest()[:12]


@functools.cache
def nvrtc_version() -> str:
    """The compiler's version, "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def compile_with_nvrtc(options: tuple[str, ...]) -> bytes:
    """Compile the source with these options; the cache is not looked at."""
    nvrtc = _nvrtc()
    source, header = sources()
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)(header.encode())
    names = (ctypes.c_char_p * 1)(_HEADER.encode())
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), _SOURCE.encode(), 1, headers, names
        ),
        "nvrtcCreateProgram",
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise BuildError(f"NVRTC {nvrtc_version()}: {log.decode().strip()}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)), "NVRTC's size")
    text = ctypes.create_string_buffer(size.value)
    _check(get(program, text), "NVRTC's result")
    return text.raw


def _check(status: int, what: str) -> None:
    if status:
        raise BuildError(f"{what} failed with status {status}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC: the one torch was built for, else any that is installed as a wheel."""
    causes = []
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            causes.append(str(error))
    raise BuildError("NVRTC can't be loaded: " + ("; ".join(causes) or "it isn't installed"))


def _candidates() -> list[str]:
    cuda = torch.version.cuda
    named = [f"libnvrtc.so.{cuda.split('.')[0]}"] if cuda else []
    found: list[str] = []
    with contextlib.suppress(ImportError):
        # a namespace package: each NVIDIA wheel puts a folder into it
        for root in importlib.import_module("nvidia").__path__:
            found += [str(path) for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*"))]
    # those of torch's CUDA version first
    found.sort(key=lambda path: not any(path.endswith(name) for name in named))
    return found[:1] + named + found[1:]
