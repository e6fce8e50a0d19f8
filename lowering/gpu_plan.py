"""All ranks of a group meet once for each plan that GPU code of theirs was compiled with.

A rank that was planned for a kernel and one that was planned for the unfused path would wait for
each other in different collectives. So the first call with a plan exchanges it, before anything
else; a mismatch raises on all ranks and names them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fx_fusion.lowering.agreement import PLAN, agree
from fx_fusion.lowering.own_thread import in_own_thread

_agreed: dict[tuple[str, str], dist.ProcessGroup] = {}


def agree_on_plan(group: dist.ProcessGroup, device: torch.device, plan: str) -> None:
    """Make sure that all ranks call with this plan. Collective the first time.

    Nothing is exchanged while a CUDA graph is captured, where it can't be, nor by a group of
    which only this process exists.

    Args:
        group: Whose ranks call; kept by identity, as a name is used again after destroy and init.
        device: The GPU of the call.
        plan: The op's `plan` argument, not empty.

    Raises:
        PlanMismatchError: On all ranks alike, if another rank came with another plan.
    """
    key = group.group_name, plan
    if _agreed.get(key) is group:
        return
    if dist.get_backend(group) != "fake":
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return

        def meet() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            agree(group, {PLAN: plan}, equal=(PLAN,))

        in_own_thread(meet)
    _agreed[key] = group
