"""The compilers that kernels are built with at first use, and the cache they go to."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

import torch

from fx_fusion.doctor.check import Check, Status
from fx_fusion.doctor.devices import gpu_count
from fx_fusion.lowering import toolchain

#: A build and the files Inductor writes around it fit into this many bytes.
_ROOM: Final = 256 * 2**20


def host_compiler() -> list[Check]:
    """The C++ compiler and Python's headers: Inductor compiles with them, and the CPU kernel."""
    needs: Status = "warn" if gpu_count() else "fail"
    checks = []
    if compiler := toolchain.cpu_compiler():
        found = shutil.which(compiler) or compiler
        checks.append(Check("C++ compiler", "ok", found, shared=Path(found).name))
    else:
        remedy = "Install one (Debian: apt-get install g++), or name it in the variable CXX."
        checks.append(Check("C++ compiler", needs, "none found", remedy, shared="none"))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        checks.append(Check("Python headers", "ok", "found", shared="found"))
    else:
        remedy = "Install them (Debian: apt-get install python3-dev)."
        checks.append(Check("Python headers", needs, f"no {header}", remedy, shared="none"))
    return checks


def cpu_kernel() -> list[Check]:
    """Whether the CPU kernel compiles and loads; a few seconds if it isn't in the cache."""
    kernel = toolchain.cpu_kernel()
    if not kernel.cause:
        return [Check("CPU kernel", "ok", kernel.what, shared=kernel.what)]
    status: Status = "warn" if gpu_count() else "fail"
    remedy = "Until it is built, sites on CPU take the slower unfused path."
    return [Check("CPU kernel", status, kernel.cause, remedy, shared="none")]


def nvrtc() -> list[Check]:
    """The run-time compiler for the GPU kernels: CUDA's, or ROCm's in a ROCm build of torch."""
    if torch.version.hip:
        return _hiprtc()
    compiler = toolchain.nvrtc()
    if not compiler.cause:
        return [Check("NVRTC", "ok", compiler.what, shared=compiler.what)]
    if not torch.version.cuda or gpu_count() == 0:
        return [Check("NVRTC", "ok", "not found; NVIDIA GPUs alone need it", shared="none")]
    major = torch.version.cuda.split(".")[0]
    remedy = f"pip install 'nvidia-cuda-nvrtc=={major}.*' (for CUDA 12 nvidia-cuda-nvrtc-cu12)."
    return [Check("NVRTC", "warn", compiler.cause, remedy, shared="none")]


def _hiprtc() -> list[Check]:
    compiler = toolchain.hiprtc()
    if not compiler.cause:
        return [Check("hipRTC", "ok", compiler.what, shared=compiler.what)]
    remedy = "It comes with ROCm builds of torch and with ROCm; install torch anew."
    status: Status = "warn" if gpu_count() else "ok"
    return [Check("hipRTC", status, compiler.cause, remedy, shared="none")]


def kernel_cache() -> list[Check]:
    """The cache of compiled kernels: where, how full, and whether it can be written."""
    folder = toolchain.kernel_cache()
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files) / 2**20
    text = f"{folder}: {size:.1f} MiB in {len(files)} files"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    remedy = "Choose another folder with TORCHINDUCTOR_CACHE_DIR, on a disk local to the host."
    if not os.access(existing, os.W_OK | os.X_OK):
        return [Check("kernel cache", "fail", f"{text}; can't be written", remedy)]
    free = shutil.disk_usage(existing).free
    if free < _ROOM:
        text = f"{text}; only {free // 2**20} MiB free on its disk"
        return [Check("kernel cache", "warn", text, remedy)]
    return [Check("kernel cache", "ok", text)]
