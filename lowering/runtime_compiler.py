"""NVRTC and hipRTC, the compilers that come with GPU builds of torch, through ctypes.

Both take a source and its headers as text and give machine code, without nvcc, hipcc or any
header of theirs; hipRTC's calls mirror NVRTC's under another prefix. Neither needs a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

#: What is loaded into this process, and where torch keeps its libraries.
_LOADED: Final = Path("/proc/self/maps")
_TORCH_LIBRARIES: Final = Path(torch.__file__).parent / "lib"


class BuildError(RuntimeError):
    """A kernel couldn't be compiled; the message is the compiler's."""


class Compiled(NamedTuple):
    """Machine code, and what the compiler said while making it."""

    code: bytes
    log: str


class RuntimeCompiler:
    """One of the two compilers.

    Args:
        name: For people, "NVRTC".
        prefix: Of its functions, "nvrtc".
        result: What its functions call the machine code, "CUBIN".
        candidates: Gives the files or names to load it from, best first.
    """

    def __init__(
        self, name: str, prefix: str, result: str, candidates: Callable[[], Sequence[str]]
    ) -> None:
        """Nothing is loaded before it is needed."""
        self.name, self._prefix, self._result = name, prefix, result
        self._candidates = candidates

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        causes = []
        for path in self._candidates():
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                causes.append(str(error))
        causes = causes or ["it isn't installed"]
        raise BuildError(f"{self.name} can't be loaded: {'; '.join(causes)}")

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)

    def _call(self, name: str, *given: Any) -> None:
        status = self._function(name)(*given)
        if status:
            raise BuildError(f"{self._prefix}{name} failed with status {status}")

    @functools.cached_property
    def version(self) -> str:
        """The compiler's version, "13.0".

        Raises:
            BuildError: It can't be loaded.
        """
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> Compiled:
        """Compile a source.

        Args:
            source: Its text.
            name: Its file name, for messages.
            headers: The text of what it includes, by file name.
            options: Of the compiler: the arch, a `-D` for each macro, what rounding needs.

        Raises:
            BuildError: The compiler can't be loaded, or it refuses the source.
        """
        program, count = ctypes.c_void_p(), len(headers)
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            count,
            (ctypes.c_char_p * count)(*(text.encode() for text in headers.values())),
            (ctypes.c_char_p * count)(*(header.encode() for header in headers)),
        )
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._function("CompileProgram")(program, len(options), given)
            log = self._text("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise BuildError(f"{self.name} {self.version}: {log.strip()}")
            return Compiled(self._text(self._result, program), log)
        finally:
            self._function("DestroyProgram")(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(1, size.value))
        self._call(f"Get{what}", program, text)
        return text.raw[: size.value]


def _nvrtc_candidates() -> list[str]:
    """The one torch was built for, else any that is installed as a wheel."""
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


def rocm_library(name: str) -> list[str]:
    """Where a library of ROCm may be, best first: the one in use, torch's own, the system's.

    The one that torch has loaded has to be used: two runtimes in a process don't know each
    other's streams.

    Args:
        name: Without prefix and suffix, "amdhip64".
    """
    file = f"lib{name}.so"
    found: list[str] = []
    with contextlib.suppress(OSError):
        for line in _LOADED.read_text().splitlines():
            path = line.partition("/")[2]
            if path and path.rsplit("/", 1)[-1].startswith(file):
                found.append(f"/{path}")
    found += [str(path) for path in sorted(_TORCH_LIBRARIES.glob(f"{file}*"))]
    return [*dict.fromkeys(found), *(file + suffix for suffix in ("", ".7", ".6"))]


NVRTC: Final = RuntimeCompiler("NVRTC", "nvrtc", "CUBIN", _nvrtc_candidates)
HIPRTC: Final = RuntimeCompiler("hipRTC", "hiprtc", "Code", lambda: rocm_library("hiprtc"))
