"""Machine code of the GPU kernels, compiled at run time and kept on disk.

NVRTC or hipRTC does it (`runtime_compiler`), so no headers but our own are read. The cache's key
is a hash of sources, options and compiler version: each variant is compiled once a machine, in
a few tenths of a second.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import torch

from fx_fusion.lowering.cache import cache_folder
from fx_fusion.lowering.gpu_variant import Variant
from fx_fusion.lowering.runtime_compiler import HIPRTC, NVRTC, BuildError, RuntimeCompiler


class Kernel(NamedTuple):
    """A kernel's name in the machine code, and the file that it is compiled from."""

    entry: str
    source: str


#: By algorithm, as `Variant.algorithm` names it.
KERNELS: Final = {
    "one-shot": Kernel("fx_fusion_one_shot", "gpu_one_shot.cu"),
    "two-shot": Kernel("fx_fusion_two_shot", "gpu_two_shot.cu"),
    "local": Kernel("fx_fusion_local", "gpu_local.cu"),
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
_NVRTC_OPTIONS: Final = ("-std=c++17", "-default-device", "-fmad=false", "--ptxas-options=-v")
_HIPRTC_OPTIONS: Final = ("-std=c++17", "-O3", "-ffp-contract=off")


class Resources(NamedTuple):
    """What a thread of a kernel takes: registers, and bytes of stack and of spilled registers."""

    registers: int
    stack_bytes: int
    spilled_bytes: int


class Build(NamedTuple):
    """A compiled variant; `resources` is None where the compiler doesn't say (AMD)."""

    code: bytes
    resources: Resources | None


def machine_code(variant: Variant, arch: str) -> bytes:
    """The code of a variant for an arch such as "sm_90" or "gfx942", from the cache or compiled.

    Raises:
        BuildError: There is no compiler, or it refuses the source.
    """
    facts = (
        variant.algorithm,
        options_of(variant, arch),
        source_hash(),
        compiler_for(arch).version,
    )
    key = hashlib.sha256(repr(facts).encode())
    target = cache_folder() / f"gpu_{key.hexdigest()[:24]}.{arch}"
    with contextlib.suppress(OSError):
        return target.read_bytes()
    code = compile_variant(variant, arch).code
    with contextlib.suppress(OSError):  # a read-only or full disk only costs time
        _write(target, code)
    return code


def compile_ahead(variants: Collection[Variant], arch: str, threads: int) -> None:
    """Put variants into the cache, several at a time; those that are there cost nothing.

    What can't be compiled or written is left to `machine_code`, which says why.

    Args:
        variants: Which.
        arch: As in `machine_code`.
        threads: How many at a time; the compiler doesn't hold Python's lock.
    """
    if threads < 2 or len(variants) < 2:
        return

    def cached(variant: Variant) -> None:
        with contextlib.suppress(BuildError):
            machine_code(variant, arch)

    with ThreadPoolExecutor(min(threads, len(variants))) as pool:
        list(pool.map(cached, variants))


def compile_variant(variant: Variant, arch: str) -> Build:
    """Compile a variant; the cache is not looked at.

    Where NVIDIA's assembler has to spill registers, the variant is compiled again for fewer
    blocks on a multiprocessor, and so with more registers, until it needn't.

    Raises:
        BuildError: There is no compiler, or it refuses the source.
    """
    texts, name = sources(), KERNELS[variant.algorithm].source
    headers = {header: texts[header] for header in HEADERS}
    while True:
        code, log = compiler_for(arch).compile(
            texts[name], name, headers, options_of(variant, arch)
        )
        used = _resources(log)
        if used is None or used.stack_bytes + used.spilled_bytes == 0 or variant.blocks == 1:
            return Build(code, used)
        variant = variant._replace(blocks=variant.blocks // 2)


def _resources(log: str) -> Resources | None:
    """From the verbose log of NVIDIA's assembler; None if there is none."""
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        return None
    return Resources(int(registers.group(1)), int(spills.group(1)), int(spills.group(2)))


def compiler_for(arch: str) -> RuntimeCompiler:
    """hipRTC for AMD's archs ("gfx942"), NVRTC for the others."""
    return HIPRTC if arch.startswith("gfx") else NVRTC


def options_of(variant: Variant, arch: str) -> tuple[str, ...]:
    """What the compiler is told."""
    if arch.startswith("gfx"):
        return (f"--offload-arch={arch}", *_HIPRTC_OPTIONS, *variant.macros())
    return (f"--gpu-architecture={arch}", *_NVRTC_OPTIONS, *variant.macros())


def compiler_version() -> str:
    """The compiler that torch's build calls for, "NVRTC 13.0"; ranks have to agree on it.

    Raises:
        BuildError: There is none.
    """
    compiler = HIPRTC if torch.version.hip else NVRTC
    return f"{compiler.name} {compiler.version}"


def _write(target: Path, code: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=target.suffix, dir=target.parent)
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
