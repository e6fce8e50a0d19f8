"""Which kernel runs a site: the one place that decides, from a table of measurements.

The pass, the op and the sizing of workspaces all ask `select`. It is pure: it looks at the
problem, the settings and the table, never at the process, so that every rank, and a machine
that plans for another, gets the same answer.

On the CPU our kernel over shared memory takes every size. On GPUs the table decides, which holds
what was measured, and a rule for small sizes where nothing was; what neither takes stays in the
graph as it was. The unfused path, the group's own all_reduce, then add and norm, inside the op,
is for graphs whose tokens are known at run time only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import torch

from fx_fusion.lowering import aiter_rules, flashinfer_rules
from fx_fusion.lowering.gpu_select import (
    AMD_ARCHS,
    GPU_ONE_SHOT,
    GPU_ONE_SHOT_BYTES,
    GPU_ONE_SHOT_LEAST_BYTES,
    GPU_PROVEN,
    GPU_TWO_SHOT,
    TABLE,
    Row,
    gpu_algorithm,
    gpu_limits,
    gpu_max_tokens,
    gpu_takes,
)
from fx_fusion.lowering.site_form import SiteForm as SiteForm
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
        form: What the site computes, which decides for other libraries' kernels; None to
            leave that to the call.
    """

    hidden_size: int
    dtype: torch.dtype
    world_size: int
    arch: str
    tokens: int | None
    deterministic: bool
    local_cause: str = ""
    form: SiteForm | None = None


#: Kernels of other libraries, by the setting that asks for them: how a report names each.
FOREIGN: Final = {
    "flashinfer": "FlashInfer's all_reduce + add + RMSNorm",
    "aiter": "AITER's all_reduce + add + RMSNorm",
}
#: The unfused path takes every problem.
UNFUSED: Final = "unfused"
#: The CPU kernel's two algorithms; see `cpu_is_two_shot` for which runs.
CPU_ONE_SHOT: Final = "one-shot over shared memory"
CPU_TWO_SHOT: Final = "two-shot over shared memory"
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
        A Plan, or a Refusal: KERNEL_UNAVAILABLE where `settings.kernel` names a kernel that
        can't run here, NOT_FASTER where "auto" finds none that was measured to be faster. With
        `deterministic`, or where only this process can't run a kernel, it is a Plan for the
        unfused path inside the op, as the sum is the op's or as the other ranks call the op.
    """
    digest = digest_of(settings)
    if settings.kernel == UNFUSED:
        return Plan(UNFUSED, digest)
    if settings.kernel in FOREIGN:
        cause = _foreign_cause(problem, settings.kernel)
        if not cause:
            return Plan(FOREIGN[settings.kernel], digest)
    else:
        cause = _own_kernel_cause(problem, settings.kernel)
    if settings.kernel in ("auto", "fx_fusion") and not cause:
        if problem.arch == "cpu":
            return Plan(_cpu_kernel(problem), digest)
        return Plan(_gpu_kernel(problem, settings.kernel), digest)
    if settings.kernel == "auto" and (problem.deterministic or cause == problem.local_cause):
        return Plan(UNFUSED, digest, cause)
    if settings.kernel == "auto":
        # Outside of the op Inductor's own code runs, which is faster than the op's unfused path.
        return Refusal(Reason.NOT_FASTER, _numbers(problem, cause))
    return Refusal(
        Reason.KERNEL_UNAVAILABLE, {"kernel": settings.kernel, **_numbers(problem, cause)}
    )


def _numbers(problem: Problem, cause: str) -> dict[str, Number]:
    """What a refusal's reader needs to know of the problem."""
    tokens: dict[str, Number] = {} if problem.tokens is None else {"tokens": problem.tokens}
    return {
        "cause": cause,
        "arch": problem.arch,
        "world_size": problem.world_size,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "hidden_size": problem.hidden_size,
        **tokens,
    }


def full_plan(plan: str) -> str:
    """The op's `plan` argument; for the op called by hand, that of the default settings."""
    return plan or digest_of(FusionSettings())


def forced_plan(algorithm: str) -> str:
    """A `plan` argument of the op with which every size runs by one algorithm.

    For tests and benchmarks, which compare the algorithms; no setting gives it. With two ranks
    "two-shot" is one-shot.

    Args:
        algorithm: "one-shot", "two-shot", or "triton" for one-shot as the kernel in Triton runs it.
    """
    return f"{algorithm.replace('-', '_')}-forced"


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


def kernel_of(plan: str) -> str:
    """The `kernel` setting that the op's `plan` argument was made with; "auto" without a plan."""
    return plan.partition("-")[0] or "auto"


def _gpu_cause(problem: Problem, kernel: str) -> str:
    """Why the GPU kernel doesn't take this problem, the same on every rank; "" if it does."""
    if not gpu_takes(problem.arch, problem.world_size, problem.hidden_size):
        return f"there is no kernel for {problem.arch} and this size yet"
    most = gpu_max_tokens(
        kernel,
        problem.arch,
        problem.world_size,
        problem.dtype,
        problem.hidden_size,
        problem.deterministic,
    )
    if most == 0 and problem.arch in AMD_ARCHS:
        return (
            f"our kernels have not been run on {problem.arch} yet;"
            ' kernel="fx_fusion" turns them on'
        )
    if most == 0:
        return f"nothing was measured for {problem.arch} and this size"
    if problem.tokens is not None and problem.tokens > most:
        return f"our kernels are known to be faster up to {most} tokens only"
    return ""


def _foreign_cause(problem: Problem, kernel: str) -> str:
    """Why another library takes no call of this problem, whatever its release; "" if it may.

    Which release is installed is a fact of one process, so it must not decide here: the ranks
    compare theirs at the first call.
    """
    given = (problem.arch, problem.world_size, problem.dtype, problem.hidden_size, problem.form)
    if kernel == "flashinfer":
        return flashinfer_rules.cause(None, *given)
    return aiter_rules.cause(None, *given)


def _own_kernel_cause(problem: Problem, kernel: str) -> str:
    """Why no kernel of ours takes this problem; "" if one does."""
    if problem.arch != "cpu":
        return _gpu_cause(problem, kernel) or problem.local_cause
    if not cpu_takes(problem.hidden_size, problem.dtype.itemsize, problem.world_size):
        return f"a row of {problem.hidden_size} elements doesn't fit a slot"
    return problem.local_cause


def _gpu_kernel(problem: Problem, kernel: str) -> str:
    """The GPU kernel of a problem that one of ours takes; both where its tokens decide."""
    given = (
        kernel,
        problem.arch,
        problem.world_size,
        problem.dtype,
        problem.hidden_size,
    )
    limits = gpu_limits(*given, problem.deterministic)
    if problem.tokens is not None:
        chosen = gpu_algorithm(*given, problem.tokens, problem.deterministic)
        return GPU_TWO_SHOT if chosen == "two-shot" else GPU_ONE_SHOT
    if limits.one_shot >= limits.two_shot:
        return GPU_ONE_SHOT
    return f"{GPU_ONE_SHOT} or two-shot" if limits.one_shot else GPU_TWO_SHOT


def _cpu_kernel(problem: Problem) -> str:
    if problem.tokens is None:
        return CPU_ONE_SHOT if problem.world_size == 2 else f"{CPU_ONE_SHOT} or two-shot"
    two_shot = cpu_is_two_shot(
        problem.tokens, problem.hidden_size, problem.dtype.itemsize, problem.world_size
    )
    return CPU_TWO_SHOT if two_shot else CPU_ONE_SHOT


def digest_of(settings: FusionSettings, table: Sequence[Row] = TABLE) -> str:
    """The choice ("auto", "unfused") and twelve hex digits over all that decides.

    That is the choice, the table, where kernels are proven, and the provisional limits.
    Facts of one site aren't in it, so that all graphs of a process that share settings share
    the digest; `deterministic` is an argument of the op already.
    """
    content = {
        "kernel": settings.kernel,
        "table": [asdict(row) for row in table],
        "proven": sorted(GPU_PROVEN),
        "one_shot_bytes": [sorted(GPU_ONE_SHOT_BYTES.items()), GPU_ONE_SHOT_LEAST_BYTES],
    }
    text = json.dumps(content, sort_keys=True)
    return f"{settings.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
