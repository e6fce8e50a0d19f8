"""The shared memory of a gloo group whose ranks share a host: made once, kept, closed together.

Made at the first op of a group (or by `fx_fusion.prepare`), with the only collectives of its
life: the ranks exchange facts, rank 0 makes the memory, all say that they have it. If a rank
can't, no rank does: all take the unfused path from then on, and one WARNING says which rank
and why.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import cpu_memory
from fx_fusion.lowering.agreement import CANNOT, PLAN, Agreement, agree
from fx_fusion.lowering.cpu_build import Build, cpu_library
from fx_fusion.lowering.select import CPU_TWO_SHOT_BYTES, cpu_slot_bytes

log = logging.getLogger(__name__)

#: The most ranks one memory holds (`kMaxRanks` of the kernel).
MAX_RANKS: Final = 64
#: How long a call waits for its peers where the group doesn't say, in seconds.
DEFAULT_TIMEOUT_SECONDS: Final = 1800.0

_CLOSED: Final = "the workspace was closed"
_STATUS: Final = {
    1: "did not come within {seconds:.0f} s",
    2: "died",
    3: "gave up after an error of its own",
}


class _Space(ctypes.Structure):
    """`Workspace` of the kernel's source, field by field."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("descriptor", ctypes.c_int32),
        ("count", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("timeout_nanoseconds", ctypes.c_int64),
        ("missing", ctypes.c_uint64),
    ]


@dataclass
class CpuWorkspace:
    """The group's memory as this rank sees it; `refusal` says why there is none.

    `threads` is how many threads of this rank a call may use.
    """

    group: dist.ProcessGroup
    refusal: str = ""
    memory: cpu_memory.SharedMemory | None = None
    space: _Space | None = None
    run: Any = None
    threads: int = 1
    broken: str = ""

    @property
    def usable(self) -> bool:
        """True if calls of this group run over the shared memory, on every rank."""
        return not self.refusal

    def call(self, call: ctypes.Structure) -> None:
        """Run one call; raises PeerTimeoutError naming the ranks that didn't come."""
        if self.broken:
            raise PeerTimeoutError(self.broken)
        space = self.space
        assert space is not None
        status = self.run(ctypes.byref(space), ctypes.byref(call))
        if status:
            missing = [r for r in range(space.world_size) if space.missing >> r & 1]
            what = _STATUS[status].format(seconds=space.timeout_nanoseconds / 1e9)
            self.broken = (
                f"all_reduce_add_rms_norm of group {self.group.group_name!r}: rank"
                f" {', '.join(map(str, missing))} {what}. The group can't go on; destroy it"
                " and start the ranks again."
            )
            raise PeerTimeoutError(self.broken)

    def close(self) -> None:
        """Give the memory up. Collective by agreement: no rank may call the op afterwards."""
        if self.memory is not None:
            self.space = None
            self.memory.close()
            self.memory = None
        self.refusal = self.refusal or _CLOSED


_workspaces: dict[str, CpuWorkspace] = {}


def cpu_workspace(group_name: str, group: dist.ProcessGroup, plan: str) -> CpuWorkspace:
    """The workspace of a group, made on first use. Collective then, a look-up afterwards.

    `plan` is that of the first call, on which the ranks must agree. Keyed by the group itself: a
    name is used again after destroy and init.
    """
    known = _workspaces.get(group_name)
    if known is not None:
        if known.group is group:
            return known
        known.close()
    made = _make(group, plan)
    _workspaces[group_name] = made
    if made.refusal and group.rank() == 0:
        log.warning(
            "fx_fusion: group %s takes the unfused path on all ranks: %s",
            group_name,
            made.refusal,
        )
    return made


def close_cpu_workspace(group_name: str, group: dist.ProcessGroup) -> None:
    """Close the group's workspace for good; where there is none yet, none will be made."""
    known = _workspaces.get(group_name)
    if known is not None:
        known.close()
    if known is None or known.group is not group:
        _workspaces[group_name] = CpuWorkspace(group, refusal=_CLOSED)


_agreed_on_unfused: dict[str, dist.ProcessGroup] = {}


def agree_on_unfused(group_name: str, group: dist.ProcessGroup, plan: str) -> None:
    """Make sure, once a group, that all ranks take the unfused path. Collective the first time.

    A rank whose plan has the kernel exchanges its facts at its first call; this meets it there,
    where it would otherwise wait for a collective that never comes.

    Raises:
        PlanMismatchError: On all ranks alike, if another rank was compiled with another plan.
    """
    if _agreed_on_unfused.get(group_name) is group:
        return
    if _local_cause(group) is None:
        agree(group, {PLAN: plan}, equal=(PLAN,))
    _agreed_on_unfused[group_name] = group


def _make(group: dist.ProcessGroup, plan: str) -> CpuWorkspace:
    cause = _local_cause(group)
    if cause is not None:
        return CpuWorkspace(group, refusal=cause)
    build = cpu_library()
    facts = {
        CANNOT: build.cause,
        "host": _host(),
        "isa": build.isa,
        "kernel": build.name,
        "cores": sorted(os.sched_getaffinity(0)),
        PLAN: plan,
        "slot and two-shot bytes": [cpu_slot_bytes(group.size()), CPU_TWO_SHOT_BYTES],
    }
    agreement = agree(group, facts, equal=(PLAN, "slot and two-shot bytes"))
    refusal = agreement.refusal or _difference(agreement)
    if refusal:
        return CpuWorkspace(group, refusal=refusal)
    for mode in cpu_memory.MODES:
        memory, refusal = _share(group, mode, build)
        if memory is not None:
            threads = _threads(group.rank(), [facts["cores"] for facts in agreement.facts])
            return _workspace(group, memory, build, threads)
    return CpuWorkspace(group, refusal=refusal)


def _local_cause(group: dist.ProcessGroup) -> str | None:
    """Why there is nothing to agree on: facts of the group, so the same on every rank."""
    try:
        backend = cast(Any, group)._get_backend(torch.device("cpu"))
    except RuntimeError:
        return "the group has no backend for CPU tensors"
    if "gloo" not in type(backend).__name__.lower():
        return f"the group's CPU backend is {type(backend).__name__}, not gloo"
    if group.size() > MAX_RANKS:
        return f"the group has {group.size()} ranks; the CPU kernel takes {MAX_RANKS}"
    return None


def _difference(agreement: Agreement) -> str:
    """What keeps ranks that could each run the kernel from running it together, or ""."""
    hosts, isas, kernels = (
        sorted({str(facts[name]) for facts in agreement.facts})
        for name in ("host", "isa", "kernel")
    )
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts"
    if len(isas) > 1:
        return f"its ranks have different instruction sets: {', '.join(isas)}"
    if len(kernels) > 1:
        return "its ranks built the kernel from different sources or with different compilers"
    return ""


def _host() -> str:
    """What tells one running host from another, containers of it included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _share(
    group: dist.ProcessGroup, mode: str, build: Build
) -> tuple[cpu_memory.SharedMemory | None, str]:
    """One attempt to make and hand round the memory; None and the cause if any rank failed."""
    rank, world_size = group.rank(), group.size()
    size = _memory_bytes(build, world_size)
    offer: cpu_memory.Offer | None = None
    facts: dict[str, Any] = {}
    if rank == 0:
        try:
            offer = cpu_memory.Offer(mode, size)
            facts["address"] = offer.address
        except OSError as error:
            facts[CANNOT] = f"{size} bytes of shared memory ({mode}): {error}"
    first = agree(group, facts, equal=())
    if first.refusal:
        return None, first.refusal
    memory: cpu_memory.SharedMemory | None = None
    facts = {}
    try:
        if offer is not None:
            offer.hand_to(world_size - 1)
            descriptor = offer.descriptor
        else:
            descriptor = cpu_memory.receive(mode, first.facts[0]["address"])
        memory = cpu_memory.attach(descriptor, size, rank)
    except OSError as error:
        facts[CANNOT] = f"sharing memory ({mode}): {error}"
    second = agree(group, facts, equal=())
    if offer is not None:
        offer.finish()
    if second.refusal:
        if memory is not None:
            memory.close()
        return None, second.refusal
    return memory, ""


def _memory_bytes(build: Build, world_size: int) -> int:
    assert build.library is not None
    measure = build.library.fx_fusion_cpu_memory_bytes
    measure.restype = ctypes.c_int64
    measure.argtypes = [ctypes.c_int32, ctypes.c_int64]
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-int(measure(world_size, cpu_slot_bytes(world_size))) // page) * page


def _threads(rank: int, cores: Sequence[Sequence[int]]) -> int:
    """This rank's share of the cores it may run on, at least one.

    Ranks that share cores wait for each other at every call: with more threads than cores, a
    team's barrier waits for a thread that waits for another rank's, and a call of 0.2 ms was
    seen to take seconds.

    Args:
        rank: This rank.
        cores: For each rank the cores it may run on.
    """
    mine = set(cores[rank])
    sharers = sum(not mine.isdisjoint(others) for others in cores)
    return max(1, len(mine) // sharers)


def _workspace(
    group: dist.ProcessGroup, memory: cpu_memory.SharedMemory, build: Build, threads: int
) -> CpuWorkspace:
    assert build.library is not None
    view = ctypes.c_char.from_buffer(memory.mapping)
    space = _Space(
        memory=ctypes.addressof(view),
        slot_bytes=cpu_slot_bytes(group.size()),
        rank=group.rank(),
        world_size=group.size(),
        descriptor=memory.descriptor,
        timeout_nanoseconds=int(_timeout_seconds(group) * 1e9),
    )
    run = build.library.fx_fusion_cpu_run
    run.restype = ctypes.c_int32
    return CpuWorkspace(group, memory=memory, space=space, run=run, threads=threads)


def _timeout_seconds(group: dist.ProcessGroup) -> float:
    """How long the group's own collectives wait for a rank."""
    try:
        backend = cast(Any, group)._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_SECONDS
