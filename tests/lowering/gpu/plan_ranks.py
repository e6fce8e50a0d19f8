"""What the ranks run in the tests of the meeting on a plan."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fx_fusion.errors import PlanMismatchError
from fx_fusion.lowering.gpu_plan import agree_on_plan

CPU = torch.device("cpu")


def meetings(rank: int, world_size: int) -> list[str]:
    """What each meeting raised; the last is of a rank planned for a kernel with one that isn't."""
    del world_size
    group = dist.group.WORLD
    assert group is not None
    raised = []
    last = "unfused-1" if rank else "fx_fusion-1"
    for plan in ("auto-1", "auto-1", "fx_fusion-2", "auto-1", last):
        try:
            agree_on_plan(group, CPU, plan)
            raised.append("")
        except PlanMismatchError as error:
            raised.append(str(error))
    return raised
