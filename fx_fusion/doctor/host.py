"""What of this host the CPU kernel needs: memory to share, and cores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from fx_fusion.doctor.check import Check, count_in_environment
from fx_fusion.lowering.select import CPU_MEMORY_BYTES

SHARED_MEMORY: Final = Path("/dev/shm")
_MEBIBYTE: Final = 2**20


def shared_memory() -> list[Check]:
    """Memory for the ranks of a host: anonymous (memfd), or else files in /dev/shm."""
    needed = f"{CPU_MEMORY_BYTES // _MEBIBYTE} MiB"
    barred = _memfd_cause()
    remedy = (
        f"A group needs up to {needed}. Give the container more, as with docker run"
        " --shm-size=1g, or delete what is left in the folder."
    )
    try:
        figures = os.statvfs(SHARED_MEMORY)
        size, free = (
            figures.f_frsize * blocks for blocks in (figures.f_blocks, figures.f_bavail)
        )
        text = f"{SHARED_MEMORY} has {free // _MEBIBYTE} of {size // _MEBIBYTE} MiB free"
        enough = free >= CPU_MEMORY_BYTES and os.access(SHARED_MEMORY, os.W_OK)
    except OSError as error:
        text, enough = f"{SHARED_MEMORY}: {error.strerror}", False
    if not barred:
        # anonymous memory isn't taken from the folder; it is where memfd can't be handed on
        return [Check("shared memory", "ok", f"memfd works; {text}", shared="memfd")]
    text = f"no memfd ({barred}); {text}"
    if enough:
        return [Check("shared memory", "ok", text, shared="file")]
    return [Check("shared memory", "fail", text, remedy, shared="none")]


def _memfd_cause() -> str:
    """Why a memfd of one mebibyte can't be had, "" if it can."""
    try:
        descriptor = os.memfd_create("fx_fusion_doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        return str(error)
    try:
        os.posix_fallocate(descriptor, 0, _MEBIBYTE)
    except OSError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return ""


def cores() -> list[Check]:
    """Whether the ranks of this host have a core for each of their threads."""
    available = len(os.sched_getaffinity(0))
    quota = _quota()
    usable = min(available, max(1, int(quota))) if quota else available
    ranks = max(1, count_in_environment("LOCAL_WORLD_SIZE", 1))
    threads = torch.get_num_threads()
    text = f"{available} cores"
    if quota and quota < available:
        text += f", of which the container may use {quota:g}"
    text += f"; ranks here: {ranks}, threads of each: {threads}"
    if ranks * threads <= usable:
        return [Check("cores", "ok", text, shared=text, differs="warn")]
    if ranks > usable:
        remedy = "Ranks that share a core wait for each other at every all_reduce: use fewer."
    else:
        remedy = (
            f"Set OMP_NUM_THREADS={usable // ranks}: more threads than cores wait in turns."
        )
    return [Check("cores", "warn", text, remedy, shared=text, differs="warn")]


def _quota() -> float:
    """The cores a container's limit amounts to, 0 without one."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):
        return 0.0
