"""Compile the GPU kernels at run time with NVRTC, which comes with CUDA builds of torch.

No nvcc, no headers but our own. The machine code is cached on disk by the hash of source, options and
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from fx_fusion.lowering.cpu_build import cache_folder
from fx_fusion.lowering.gpu_variant import Variant


class Kernel(NamedTuple):
    """A kernel's name in the machine code, and the file that it is compiled from."""

    entry: str
    source: str


#: By algorithm, as `Variant.algorithm` names it.
KERNELS: Final = {
    "one-shot": Kernel("fx_fusion_one_shot", "gpu_one_shot.cu"),
}
#: What the sources include.
HEADERS: Final = (
    "gpu_device.h",
    "gpu_params.h",
    "gpu_elements.h",
    "gpu_exchange.h",
    "gpu_epilogue.h",
)
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
    facts = (variant.algorithm, options, source_hash(), nvrtc_version())
    key = hashlib.sha256(repr(facts).encode())
    target = cache_folder() / f"gpu_{key.hexdigest()[:24]}.cubin"
    with contextlib.suppress(OSError):
        return target.read_bytes()
    code = compile_with_nvrtc(options, variant.algorithm)
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
def sources() -> Mapping[str, str]:
    """The text of every source and header, by file name."""
    folder = importlib.resources.files("fx_fusion.lowering") / "csrc"
    names = (*HEADERS, *(kernel.source for kernel in KERNELS.values()))
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


@functools.cache
def source_hash() -> str:
    """Twelve hex digits over all sources and headers; ranks have to agree on it."""
    return hashlib.sha256("\0".join(sources().values()).encode()).hexdigest()[:12]


@functools.cache
def nvrtc_version() -> str:
    """The compiler's version, "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def compile_with_nvrtc(options: tuple[str, ...], algorithm: str) -> bytes:
    """Compile an algorithm's kernel with these options; the cache is not looked at.

    Args:
        options: Of NVRTC: the arch, `-D` for each macro, and what rounding needs.
        algorithm: A key of KERNELS.

    Raises:
        BuildError: There is no NVRTC, or it refuses the source; the message is its log.
    """
    nvrtc = _nvrtc()
    texts, name = sources(), KERNELS[algorithm].source
    program = ctypes.c_void_p()
    count = len(HEADERS)
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            texts[name].encode(),
            name.encode(),
            count,
            (ctypes.c_char_p * count)(*(texts[header].encode() for header in HEADERS)),
            (ctypes.c_char_p * count)(*(header.encode() for header in HEADERS)),
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
