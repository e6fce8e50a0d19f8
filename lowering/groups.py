"""Find a process group by its name, and check that it is the one a graph was compiled for."""

from __future__ import annotations

from typing import Any, Final, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fx_fusion.errors import GroupError, WorldSizeError

# torch leaves it untyped.
_c10d: Final = cast(Any, distributed_c10d)


def resolve_group(group_name: str) -> dist.ProcessGroup:
    """The group of this name; torch raises RuntimeError or ValueError if there is none."""
    return cast(dist.ProcessGroup, _c10d._resolve_process_group(group_name))


def checked_group(group_name: str, world_size: int) -> dist.ProcessGroup:
    """The group of this name; raises unless the group exists and has the size that was compiled in."""
    try:
        group = resolve_group(group_name)
    except (RuntimeError, ValueError) as error:
        raise GroupError(
            f"There is no process group {group_name!r} in this process; create it"
            " (torch.distributed.init_process_group or new_group) before running the graph,"
            " or call torch._dynamo.reset() and compile again if its name changed."
        ) from error
    if group.size() != world_size:
        raise WorldSizeError(
            f"The graph was compiled for a group of {world_size} ranks, but process group"
            f" {group_name!r} now has {group.size()}; call torch._dynamo.reset() and compile"
            " again."
        )
    return group


def current_group(group_name: str) -> dist.ProcessGroup | None:
    """The group of this name as of now, None if there is none."""
    try:
        return resolve_group(group_name)
    except (RuntimeError, ValueError):
        return None
