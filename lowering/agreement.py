"""What the ranks of a group must agree on before they share memory: one exchange, one verdict.

A kernel over shared memory hangs or returns garbage if one rank runs it and another doesn't,
or if they were planned differently. So when a workspace is made, the only collective of its
life gathers each rank's facts, and every rank draws the same conclusion from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from fx_fusion.errors import PlanMismatchError

#: The fact that says why a rank can't take part; absent or "" where it can.
CANNOT = "cannot"
#: The fact that says what the rank's graph was planned with, see `select.Plan.digest`.
PLAN = "plan"


@dataclass(frozen=True)
class Agreement:
    """The facts of all ranks, in rank order, and why there is no workspace ("" if there is)."""

    facts: tuple[Mapping[str, Any], ...]
    refusal: str = ""

    def smallest(self, name: str) -> int:
        """The least value of a numeric fact, such as the blocks that fit a device at once."""
        return min(int(facts[name]) for facts in self.facts)


def agree(
    group: dist.ProcessGroup, facts: Mapping[str, Any], *, equal: Sequence[str]
) -> Agreement:
    """Gather every rank's facts and judge them. Collective over `group`.

    Args:
        group: The process group; its timeout bounds the wait.
        facts: This rank's facts, JSON-like; `facts["cannot"]` says why it can't take part.
        equal: The facts that have to be the same on all ranks.

    Returns:
        The facts of all ranks. Where a rank can't take part, `refusal` names it and its cause,
        the same text on every rank, and all take the unfused path.

    Raises:
        PlanMismatchError: On all ranks alike, if a fact in `equal` differs.
    """
    gathered: list[Any] = [None] * group.size()
    cast(Any, dist).all_gather_object(gathered, dict(facts), group=group)
    refusals = [
        f"rank {rank}: {other[CANNOT]}"
        for rank, other in enumerate(gathered)
        if other.get(CANNOT)
    ]
    if refusals:
        return Agreement(tuple(gathered), "; ".join(refusals))
    for name in equal:
        values = [other.get(name) for other in gathered]
        if any(value != values[0] for value in values):
            raise PlanMismatchError(
                f"The ranks of the group disagree about {name}: "
                + ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
                + ". Compile with the same options, package versions and machines on every"
                " rank, then start again."
            )
    return Agreement(tuple(gathered))
