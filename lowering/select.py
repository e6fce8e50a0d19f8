"""Which kernel runs a site: the one place that decides, from a table of measurements.

The pass, the op and the sizing of workspaces all ask `select`. It is pure: it looks at the
problem, the settings and the table, never at the process, so that every rank, and a machine
that plans for another, gets the same answer.

On the CPU our kernel over shared memory takes every size. On GPUs the table decides, which holds
only what was measured, and what it doesn't list takes the unfused path: the group's own
all_reduce, then add and norm, inside the op.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import torch

from fx_fusion.lowering import gpu_layout
from fx_fusion.report import Number, Reason
from fx_fusion.settings import FusionSettings


@dataclass(frozen=True)
class Problem:
    """A site in the terms that choose a kernel.

    Attributes:
        hidden_size: Elements of the last dimension.
        dtype: The reduced tensor's dtype.
        world_size: Ranks in the group.
        arch: "cpu", "sm_90", "gfx942".
        tokens: Rows, if known when compiling; None where they're dynamic. A kernel's own
            limits on tokens go into the plan, so a static and a dynamic graph agree.
        deterministic: Only sums in rank order are allowed.
        local_cause: Why this process can't run a kernel (no compiler), "" if it can. It only
            changes what the report says: the ranks agree on the path at the first call.
    """

    hidden_size: int
    dtype: torch.dtype
    world_size: int
    arch: str
    tokens: int | None
    deterministic: bool
    local_cause: str = ""


@dataclass(frozen=True)
class Row:
    """One measured limit: `kernel` is the fastest up to and including `max_tokens`.

    Attributes:
        kernel: The kernel's name.
        arch: Where it holds, and with `world_size`, `dtype` and `hidden_size` for what.
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype, "bfloat16".
        hidden_size: Elements of the last dimension.
        max_tokens: The limit itself, inclusive.
        machine: What it was measured on.
        date: When, as YYYY-MM-DD.
        command: The command that measured it.
    """

    kernel: str
    arch: str
    world_size: int
    dtype: str
    hidden_size: int
    max_tokens: int
    machine: str
    date: str
    command: str


#: The measurements. Empty until a kernel of our own exists; no number comes in unmeasured.
TABLE: Final[tuple[Row, ...]] = ()

#: The unfused path takes every problem.
UNFUSED: Final = "unfused"
#: The CPU kernel's two algorithms; see `cpu_is_two_shot` for which runs.
CPU_ONE_SHOT: Final = "one-shot over shared memory"
CPU_TWO_SHOT: Final = "two-shot over shared memory"
#: Arch and world size for which the GPU kernel's tests, as it is now, have passed on such a GPU;
#: elsewhere it runs only if `kernel="fx_fusion"`. ("sm_90", 2) passed on an H200 before the
#: kernel's host code was last changed, and comes back when it has passed again.
GPU_PROVEN: Final[frozenset[tuple[str, int]]] = frozenset()
#: The GPU kernel; see `gpu_max_tokens` for when it runs.
GPU_ONE_SHOT: Final = "one-shot over symmetric memory"
#: The most bytes of a slot of the CPU workspace, and of all slots of a group together. With 2
#: ranks on 2 cores, 64 x 8192 bfloat16: 64 KiB 300 us a call, 256 KiB 250, 1 MiB 210.
CPU_SLOT_BYTES: Final = 1024 * 1024
CPU_MEMORY_BYTES: Final = 32 * 1024 * 1024
#: From how many bytes of x on, with more than two ranks, reading all ranks' rows costs more
#: than a second meeting. With two ranks one-shot moves no more than two-shot.
CPU_TWO_SHOT_BYTES: Final = 256 * 1024


@dataclass(frozen=True)
class Plan:
    """The kernel for a site.

    Attributes:
        kernel: Its name, for people: "unfused", "one-shot over shared memory".
        digest: What the choice rests on (`digest_of`); the op's `plan` argument, by which
            ranks and graphs that were planned differently are told apart. Nothing local to
            one rank is in it.
        cause: Why it is the unfused path although another was allowed, "" otherwise.
    """

    kernel: str
    digest: str
    cause: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a site stays as it is.

    Attributes:
        reason: The reason, which has a remedy in `report.REMEDIES`.
        numbers: The values that caused it.
    """

    reason: Reason
    numbers: Mapping[str, Number] = field(default_factory=dict)


def select(problem: Problem, settings: FusionSettings) -> Plan | Refusal:
    """Choose the kernel for `problem`.

    Returns:
        A Plan, or a Refusal with KERNEL_UNAVAILABLE where `settings.kernel` names a kernel
        that can't run here.
    """
    digest = digest_of(settings)
    if settings.kernel == UNFUSED:
        return Plan(UNFUSED, digest)
    cause = _own_kernel_cause(problem, settings.kernel)
    if settings.kernel in ("auto", "fx_fusion") and not cause:
        return Plan(_cpu_kernel(problem) if problem.arch == "cpu" else GPU_ONE_SHOT, digest)
    if settings.kernel == "auto":
        return Plan(UNFUSED, digest, cause)
    return Refusal(
        Reason.KERNEL_UNAVAILABLE,
        {
            "kernel": settings.kernel,
            "cause": cause if settings.kernel == "fx_fusion" else "not supported yet",
            "arch": problem.arch,
            "world_size": problem.world_size,
            "dtype": str(problem.dtype).removeprefix("torch."),
            "hidden_size": problem.hidden_size,
        },
    )


def full_plan(plan: str) -> str:
    """The op's `plan` argument; for the op called by hand, that of the default settings."""
    return plan or digest_of(FusionSettings())


def asks_for_unfused(plan: str) -> bool:
    """True if the op's `plan` argument was made for the unfused path."""
    return kernel_of(plan) == UNFUSED


def cpu_slot_bytes(world_size: int) -> int:
    """Bytes of a slot of the CPU workspace; each rank has four."""
    return min(CPU_SLOT_BYTES, CPU_MEMORY_BYTES // (4 * world_size))


def cpu_takes(hidden_size: int, element_size: int, world_size: int) -> bool:
    """True if the CPU kernel takes rows of this size: one must fit a slot."""
    return 0 < hidden_size * element_size <= cpu_slot_bytes(world_size)


def cpu_is_two_shot(tokens: int, hidden_size: int, element_size: int, world_size: int) -> bool:
    """True if each row is reduced by one rank only; the same answer on every rank."""
    bytes_of_x = tokens * hidden_size * element_size
    return world_size > 2 and bytes_of_x > CPU_TWO_SHOT_BYTES


@functools.lru_cache(maxsize=1024)
def gpu_max_tokens(
    kernel: str,
    arch: str,
    world_size: int,
    dtype: torch.dtype,
    hidden_size: int,
    deterministic: bool,
) -> int:
    """Up to how many tokens, inclusive, a call runs on the GPU kernel; 0 for never.

    Args:
        kernel: What the plan was made for: "auto", or "fx_fusion", which takes every size.
        arch: "sm_90".
        world_size: Ranks in the group.
        dtype: The reduced tensor's dtype.
        hidden_size: Elements of the last dimension. With "auto" the row of the table for the
            next larger size that was measured holds; beyond the largest there is none.
        deterministic: The kernel adds up in rank order, so then it takes every size too, where
            its tests have passed.
    """
    if kernel not in ("auto", "fx_fusion") or not _gpu_takes(arch, world_size, hidden_size):
        return 0
    if kernel == "fx_fusion":
        return sys.maxsize
    if (arch, world_size) not in GPU_PROVEN:
        return 0
    if deterministic:
        return sys.maxsize
    name = str(dtype).removeprefix("torch.")
    rows = [
        row
        for row in TABLE
        if (row.kernel, row.arch, row.world_size, row.dtype)
        == (GPU_ONE_SHOT, arch, world_size, name)
        and row.hidden_size >= hidden_size
    ]
    return min(rows, key=lambda row: row.hidden_size).max_tokens if rows else 0


def _gpu_takes(arch: str, world_size: int, hidden_size: int) -> bool:
    """True if the GPU kernel can run at all; AMD waits for a passing run on record."""
    number = arch.removeprefix("sm_")
    return (
        arch.startswith("sm_")
        and number.isdecimal()
        and int(number) >= 80
        and gpu_layout.takes(hidden_size, world_size)
    )


def kernel_of(plan: str) -> str:
    """The `kernel` setting that the op's `plan` argument was made with; "auto" without a plan."""
    return plan.partition("-")[0] or "auto"


def _gpu_cause(problem: Problem, kernel: str) -> str:
    """Why the GPU kernel doesn't take this problem; "" if it does, if only for few tokens."""
    if not _gpu_takes(problem.arch, problem.world_size, problem.hidden_size):
        return f"there is no kernel for {problem.arch} and this size yet"
    most = gpu_max_tokens(
        kernel,
        problem.arch,
        problem.world_size,
        problem.dtype,
        problem.hidden_size,
        problem.deterministic,
    )
    if most == 0:
        return f"nothing was measured for {problem.arch} and this size"
    if problem.tokens is not None and problem.tokens > most:
        return f"the kernel was measured to be faster up to {most} tokens only"
    return problem.local_cause


def _own_kernel_cause(problem: Problem, kernel: str) -> str:
    """Why no kernel of ours takes this problem; "" if one does."""
    if problem.arch != "cpu":
        return _gpu_cause(problem, kernel)
    if not cpu_takes(problem.hidden_size, problem.dtype.itemsize, problem.world_size):
        return f"a row of {problem.hidden_size} elements doesn't fit a slot"
    return problem.local_cause


def _cpu_kernel(problem: Problem) -> str:
    if problem.tokens is None:
        return CPU_ONE_SHOT if problem.world_size == 2 else f"{CPU_ONE_SHOT} or two-shot"
    two_shot = cpu_is_two_shot(
        problem.tokens, problem.hidden_size, problem.dtype.itemsize, problem.world_size
    )
    return CPU_TWO_SHOT if two_shot else CPU_ONE_SHOT


def digest_of(settings: FusionSettings, table: Sequence[Row] = TABLE) -> str:
    """The choice ("auto", "unfused") and twelve hex digits over the table and that choice.

    Facts of one site aren't in it, so that all graphs of a process that share settings share
    the digest; `deterministic` is an argument of the op already.
    """
    content = {"kernel": settings.kernel, "table": [asdict(row) for row in table]}
    text = json.dumps(content, sort_keys=True)
    return f"{settings.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
