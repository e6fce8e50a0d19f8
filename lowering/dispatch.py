"""Which path a call of the op takes: a kernel where the group has a workspace, else unfused.

The choice is a pure function of values that are the same on every rank: sizes, dtypes, the
plan's choice, and the workspace's refusal, which the ranks agreed on. A rank on another path
than its peers would be a deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from fx_fusion.lowering import unfused
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.gpu_select import gpu_algorithm, gpu_limits
from fx_fusion.lowering.select import (
    FOREIGN,
    asks_for_unfused,
    cpu_takes,
    full_plan,
    kernel_of,
)

if TYPE_CHECKING:
    from fx_fusion.lowering.cpu_workspace import CpuWorkspace
    from fx_fusion.lowering.gpu_workspace import GpuWorkspace
    from fx_fusion.lowering.triton_workspace import TritonWorkspace


def run(
    arguments: Arguments,
    group: dist.ProcessGroup,
    results: Results | None = None,
) -> Results:
    """Run one call on the kernel that can take it, or on the unfused path.

    Args:
        arguments: The op's.
        group: The one that they name.
        results: Where results may be written, contiguous and aligned to 16 bytes, the
            residual's memory among it if need be; None for new tensors.

    Returns:
        Contiguous tensors: new ones, or those of `results`.
    """
    x = arguments.x
    if x.device.type == "cpu":
        workspace = cpu_workspace_for(arguments, group)
        if workspace is not None:
            from fx_fusion.lowering import cpu_kernel

            return cpu_kernel.run(arguments, workspace, results)
    if x.device.type == "cuda":
        meet_once(arguments, group)
        gpu = gpu_workspace_for(arguments, group)
        if gpu is not None:
            from fx_fusion.lowering import gpu_kernel

            return gpu_kernel.run(arguments, gpu, gpu_algorithm_for(arguments), results)
        made = run_other_kernel(arguments, group)
        if made is not None:
            return made
    return unfused.run(arguments, group, results)


def run_other_kernel(arguments: Arguments, group: dist.ProcessGroup) -> Results | None:
    """Run one call that no workspace of `gpu_workspace_for` takes, and not on the unfused path.

    That is on a library's kernel, where the plan names it, or else on the one in Triton; None
    where neither takes the call. Results are new tensors, and x is left alone.
    """
    if (library := kernel_of(arguments.plan)) in FOREIGN:
        from fx_fusion.lowering import foreign

        return foreign.run(arguments, group, library)
    triton = triton_workspace_for(arguments, group)
    if triton is None:
        return None
    from fx_fusion.lowering import triton_kernel

    return triton_kernel.run(arguments, triton)


def meet_once(arguments: Arguments, group: dist.ProcessGroup) -> None:
    """Let the ranks of a GPU group make sure that they were planned alike, once a plan."""
    from fx_fusion.lowering.gpu_plan import agree_on_plan

    agree_on_plan(group, arguments.x.device, full_plan(arguments.plan))


def gpu_workspace_for(arguments: Arguments, group: dist.ProcessGroup) -> GpuWorkspace | None:
    """The group's memory if this call runs on a GPU kernel, made now if need be; else None."""
    x = arguments.x
    if x.numel() == 0 or kernel_of(arguments.plan) == "triton" or not gpu_may_take(arguments):
        return None
    from fx_fusion.lowering.gpu_workspace import gpu_workspace

    # Made at the first call whatever its size: a smaller one may come under capture.
    workspace = gpu_workspace(group, x.device)
    taken = workspace.usable and gpu_algorithm_for(arguments) != "unfused"
    return workspace if taken else None


def triton_workspace_for(
    arguments: Arguments, group: dist.ProcessGroup
) -> TritonWorkspace | None:
    """The group's memory if this call runs on the kernel in Triton; else None.

    That is where a rank can't compile the first kernel, and not with "auto", whose limits were
    measured with that one; or where a plan forces it.
    """
    x, kernel = arguments.x, kernel_of(arguments.plan)
    if kernel == "auto" or x.numel() == 0 or not gpu_may_take(arguments):
        return None
    from fx_fusion.lowering.gpu_workspace import gpu_workspace

    if kernel != "triton" and not gpu_workspace(group, x.device).lacks_compiler:
        return None
    from fx_fusion.lowering.triton_workspace import triton_workspace

    workspace = triton_workspace(group, x.device)
    taken = workspace.usable and gpu_algorithm_for(arguments) != "unfused"
    return workspace if taken else None


def gpu_may_take(arguments: Arguments) -> bool:
    """True if a GPU kernel of ours takes calls of this site, if only those of few tokens."""
    x = arguments.x
    limits = gpu_limits(
        kernel_of(arguments.plan),
        device_arch(x.device),
        arguments.world_size,
        x.dtype,
        x.shape[-1],
        arguments.deterministic,
    )
    return max(limits) > 0


def gpu_algorithm_for(arguments: Arguments) -> str:
    """How this call runs on a GPU: "one-shot", "two-shot" or "unfused"; equal on all ranks."""
    x = arguments.x
    return gpu_algorithm(
        kernel_of(arguments.plan),
        device_arch(x.device),
        arguments.world_size,
        x.dtype,
        x.shape[-1],
        x.numel() // x.shape[-1],
        arguments.deterministic,
    )


def cpu_workspace_for(arguments: Arguments, group: dist.ProcessGroup) -> CpuWorkspace | None:
    """The group's shared memory if this call runs over it, made now if need be; else None."""
    x = arguments.x
    if x.numel() == 0 or not cpu_takes(x.shape[-1], x.element_size(), arguments.world_size):
        return None
    # on first use: sockets and ctypes structures are needed by CPU groups only
    from fx_fusion.lowering.cpu_workspace import agree_on_unfused, cpu_workspace

    if asks_for_unfused(arguments.plan):
        agree_on_unfused(arguments.group_name, group, arguments.plan)
        return None
    workspace = cpu_workspace(arguments.group_name, group, full_plan(arguments.plan))
    return workspace if workspace.usable else None
