"""A default process group that needs no other process: its collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fx_fusion.errors import GroupError


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Make the default process group one of `world_size` ranks, of which only this one exists.

    Collectives return at once and leave their data as it is, so graphs can be traced,
    compiled and looked at on one machine; numbers that come out of them mean nothing. The group
    is always named "0", so graphs, which hold the name, don't depend on what ran before.

    Args:
        world_size: Ranks the group claims to have.
        rank: Which of them this process is.

    Yields:
        The default process group. It is destroyed at the end of the block.

    Raises:
        GroupError: The rank isn't in the group, or a default process group exists already.
    """
    # The import registers the backend; torch keeps it among its own test helpers.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise GroupError(
            f"fake_group(world_size={world_size}, rank={rank}): the rank must be at least 0"
            " and below the world size."
        )
    if dist.is_initialized():
        raise GroupError(
            f"fake_group(world_size={world_size}): this process already has a default group"
            f" ({dist.get_backend()}, {dist.get_world_size()} ranks); call"
            " torch.distributed.destroy_process_group() first."
        )
    # here, so that the processes `spawn` starts needn't load all of torch's compiler
    from fx_fusion.compat import restart_group_names

    restart_group_names()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
