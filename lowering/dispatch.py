"""Which path a call of the op takes: a kernel where the group has a workspace, else unfused.

The choice is a pure function of values that are the same on every rank: sizes, dtypes, the
plan's choice, and the workspace's refusal, which the ranks agreed on. A rank on another path
than its peers would be a deadlock.
"""

from __future__ import annotations

import torch.distributed as dist

from fx_fusion.lowering import unfused
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.select import asks_for_unfused, cpu_takes


def run(arguments: Arguments, group: dist.ProcessGroup) -> Results:
    """Run one call on the kernel that can take it, or on the unfused path."""
    x = arguments.x
    if asks_for_unfused(arguments.plan) or x.numel() == 0:
        return unfused.run(arguments, group)
    if x.device.type == "cpu":
        # imported on first use: ctypes structures and sockets are needed on CPU groups only
        from fx_fusion.lowering import cpu_kernel, cpu_workspace

        if cpu_takes(x.shape[-1], x.element_size()):
            workspace = cpu_workspace.cpu_workspace(arguments.group_name, group)
            if workspace.usable:
                return cpu_kernel.run(arguments, workspace)
    return unfused.run(arguments, group)
