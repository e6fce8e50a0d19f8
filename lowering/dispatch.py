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
from fx_fusion.lowering.select import (
    asks_for_unfused,
    cpu_takes,
    full_plan,
    gpu_max_tokens,
    kernel_of,
)

if TYPE_CHECKING:
    from fx_fusion.lowering.cpu_workspace import CpuWorkspace


def run(arguments: Arguments, group: dist.ProcessGroup) -> Results:
    """Run one call on the kernel that can take it, or on the unfused path."""
    x = arguments.x
    if x.device.type == "cpu":
        workspace = cpu_workspace_for(arguments, group)
        if workspace is not None:
            from fx_fusion.lowering import cpu_kernel

            return cpu_kernel.run(arguments, workspace)
    if x.device.type == "cuda" and x.numel() and _gpu_limit(arguments) > 0:
        from fx_fusion.lowering import gpu_kernel, gpu_workspace

        # Made at the first call whatever its size: a smaller one may come under capture.
        gpu = gpu_workspace.gpu_workspace(group, x.device)
        if gpu.usable and x.numel() <= _gpu_limit(arguments) * x.shape[-1]:
            return gpu_kernel.run(arguments, gpu)
    return unfused.run(arguments, group)


def _gpu_limit(arguments: Arguments) -> int:
    """The tokens up to which the GPU kernel takes this site; 0 for none."""
    x = arguments.x
    return gpu_max_tokens(
        kernel_of(arguments.plan),
        device_arch(x.device),
        arguments.world_size,
        x.dtype,
        x.shape[-1],
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
