"""Under torchrun: every rank's checks side by side, and which rank differs in what."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from fx_fusion.doctor.check import STATUSES, Check
from fx_fusion.doctor.devices import gpu_count, rendezvous


def started_by_torchrun() -> bool:
    """Whether this process is a rank: torchrun's variables are set, or there is a group."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def join(timeout: float) -> tuple[int, str]:
    """Make the default group of gloo if there is none, and wait for all ranks.

    Args:
        timeout: Seconds each wait may take.

    Returns:
        This rank, and why the ranks didn't meet, "" if they did.
    """
    rank = int(os.environ.get("RANK", "0"))
    wait = timedelta(seconds=timeout)
    try:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=wait)
        # unlike barrier(), its error names the ranks that are missing
        cast(Any, dist).monitored_barrier(timeout=wait, wait_all_ranks=True)
        return dist.get_rank(), ""
    except Exception as error:  # torch raises errors of several classes, and ValueError
        lines = [line for line in str(error).splitlines() if line.strip()]
        return rank, lines[0] if lines else type(error).__name__


def not_met(cause: str, timeout: float) -> Check:
    """The check that says so."""
    world_size = os.environ.get("WORLD_SIZE", "?")
    return Check(
        "ranks",
        "fail",
        f"not all {world_size} ranks met within {timeout:g} s: {cause}",
        "Look for a rank that ended early; check MASTER_ADDR, MASTER_PORT and firewalls between"
        " hosts, and GLOO_SOCKET_IFNAME where a host has several networks.",
    )


def gather(checks: Sequence[Check]) -> list[list[Check]]:
    """Every rank's checks, in rank order. Collective over the default group."""
    gathered: list[Any] = [None] * dist.get_world_size()
    cast(Any, dist).all_gather_object(gathered, list(checks))
    return cast("list[list[Check]]", gathered)


def leave() -> None:
    """Wait until every rank has read what the others sent, so that none is cut off."""
    # a rank may be gone; all that was to be said has been gathered
    with contextlib.suppress(RuntimeError):
        dist.barrier()


def host() -> list[Check]:
    """The host, by what it was booted as: containers of one host are on it together."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = name
    return [Check("host", "ok", name, shared=boot, differs="warn")]


def together(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """Checks that take all ranks: can they map each other's GPU memory. Collective."""
    boots = {check.shared for checks in by_rank for check in checks if check.name == "host"}
    everywhere = all(
        any(c.name == "symmetric memory" and c.status == "ok" for c in checks)
        for checks in by_rank
    )
    if gpu_count() == 0 or len(boots) > 1 or not everywhere:
        return []
    group = dist.group.WORLD
    assert group is not None
    return [rendezvous(group.group_name)]


def merged(by_rank: Sequence[Sequence[Check]]) -> list[Check]:
    """One list for all ranks: rank 0's, what is worse elsewhere, and who differs in what."""
    lines: list[Check] = []
    names = dict.fromkeys(check.name for checks in by_rank for check in checks)
    for name in names:
        found = {
            rank: check
            for rank, checks in enumerate(by_rank)
            for check in checks
            if check.name == name
        }
        first = found.get(0)
        if first is not None:
            lines.append(first)
        for rank, check in found.items():
            if rank and check.status != "ok" and (first is None or check.text != first.text):
                text = f"rank {rank}: {check.text}"
                lines.append(Check(name, check.status, text, check.remedy))
        lines += _difference(name, found, len(by_rank))
    count = len(by_rank)
    if not any(line.name.startswith("ranks differ") for line in lines):
        lines.append(Check("ranks", "ok", f"all {count} agree in what they have to"))
    return lines


def _difference(name: str, found: dict[int, Check], world_size: int) -> list[Check]:
    """A line that names the odd ones out in one check, none where the ranks agree."""
    groups: dict[str | None, list[int]] = {}
    for rank in range(world_size):
        check = found.get(rank)
        groups.setdefault(check.shared if check else "missing", []).append(rank)
    if len(groups) < 2:
        return []
    usual = max(groups.values(), key=len)
    several = [ranks for ranks in groups.values() if len(ranks) == len(usual)]
    parts = []
    for ranks in sorted(groups.values(), key=len):
        check = found.get(ranks[0])
        text = check.text if check else "nothing to check"
        others = ranks is usual and len(several) == 1
        who = f"the other {len(ranks)}" if others else _named(ranks)
        parts.append(f"{who} {'have' if others or len(ranks) > 1 else 'has'}: {text}")
    status = max((check.differs for check in found.values()), key=STATUSES.index)
    remedy = "Start all ranks in the same environment, on machines of one kind."
    if name == "host":
        remedy = "Sites of groups across hosts take the unfused path; keep a group on one host."
    return [Check(f"ranks differ: {name}", status, "; ".join(parts), remedy)]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
