"""What runs on the ranks in the tests of the CPU kernel's life: failures, plans, many calls."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import op_support
import pytest
import torch
import torch.distributed as dist
from cpu_kernel_ranks import complaints, random_parts, workspace
from op_support import BF16, FP32, arguments_for

from fx_fusion.errors import PeerTimeoutError, PlanMismatchError
from fx_fusion.lowering import cpu_kernel
from fx_fusion.lowering.cpu_workspace import cpu_workspace
from fx_fusion.ops import all_reduce_add_rms_norm as op


def run_until_a_rank_dies(rank: int, world_size: int) -> tuple[str, float]:
    """The last rank is killed between two calls; the others say what they saw, and when."""
    space = workspace()
    x = torch.ones(4, 256)
    for _ in range(3):
        cpu_kernel.run(arguments_for(x), space)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        cpu_kernel.run(arguments_for(x), space)
    except PeerTimeoutError as error:
        seconds = time.monotonic() - start
        try:
            cpu_kernel.run(arguments_for(x), space)
        except PeerTimeoutError:
            return str(error), seconds
    return "", 0.0


def run_with_a_late_rank(rank: int, world_size: int) -> str:
    """The last rank never calls, while it lives; the others must give up in time."""
    del world_size
    space = workspace()
    assert space.space is not None
    space.space.timeout_nanoseconds = 300_000_000
    barrier = dist.group.WORLD
    if rank == dist.get_world_size() - 1:
        dist.barrier(group=barrier)
        return ""
    try:
        cpu_kernel.run(arguments_for(torch.ones(2, 64)), space)
        return "did not raise"
    except PeerTimeoutError as error:
        dist.barrier(group=barrier)
        return str(error)


def run_beginnings(rank: int, world_size: int) -> dict[str, Any]:
    """How the memory of a group begins, well or not, in a new group each: what this rank sees."""
    return {
        "build": _with_a_failing_rank(rank, "build", _new_group(world_size)),
        "map": _with_a_failing_rank(rank, "map", _new_group(world_size)),
        "plans": _with_plans(rank, ("auto-1", "auto-2", "auto-1"), _new_group(world_size)),
        "unfused": _with_plans(rank, ("auto-1", "unfused-1", "auto-1"), _new_group(world_size)),
        "closed": [
            _closed(rank, world_size, _new_group(world_size), made=made)
            for made in (True, False)
        ],
        "file": _in_a_named_file(rank, world_size, _new_group(world_size)),
    }


def _new_group(world_size: int) -> Any:
    return dist.new_group(list(range(world_size)))


def _with_a_failing_rank(rank: int, step: str, group: Any) -> str:
    """Rank 1 can't build or map the memory: every rank's refusal must name it."""
    from fx_fusion.lowering import cpu_memory
    from fx_fusion.lowering import cpu_workspace as module
    from fx_fusion.lowering.cpu_build import Build

    def refuse(*_: object) -> Any:
        raise OSError("no room here")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and step == "build":
            patch.setattr(module, "cpu_library", lambda: Build(None, cause="no compiler here"))
        if rank == 1 and step == "map":
            patch.setattr(cpu_memory, "attach", refuse)
        made = cpu_workspace(group.group_name, group, "a plan")
        again = cpu_workspace(group.group_name, group, "a plan")
    assert made is again, "a refusal is remembered"
    return made.refusal


def _closed(rank: int, world_size: int, group: Any, *, made: bool) -> tuple[bool, list[str]]:
    """Close a group's memory, made or not; whether it is usable, and faults of a later call."""
    from fx_fusion.lowering import workspace as public

    if made:
        assert public.prepare(group, device="cpu")
    public.close(group, device="cpu")
    public.close(group, device="cpu")
    parts = random_parts(2, (3, 80), FP32, world_size)
    arguments = arguments_for(
        parts[rank], group_name=group.group_name, world_size=world_size, deterministic=True
    )
    found = complaints(op_support.call(arguments), parts, arguments)
    return public.prepare(group, device="cpu"), found


def _in_a_named_file(rank: int, world_size: int, group: Any) -> tuple[list[str], list[str]]:
    """Without memfd a file takes its place; nothing of it is left."""
    from fx_fusion.lowering import cpu_memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_memory, "MODES", ("file",))
        space = cpu_workspace(group.group_name, group, "a plan")
        assert space.usable, space.refusal
        parts = random_parts(1, (3, 80), FP32, world_size)
        arguments = arguments_for(
            parts[rank], group_name=group.group_name, world_size=world_size
        )
        found = complaints(cpu_kernel.run(arguments, space), parts, arguments)
    left = [name for name in os.listdir("/dev/shm") if name.startswith("fx_fusion-")]
    return found, left


def _with_plans(rank: int, plans: tuple[str, ...], group: Any) -> str:
    """Each rank calls the op with a plan of its own; what all ranks raise alike."""
    x, size = torch.ones(2, 64), len(plans)
    try:
        op(
            x,
            None,
            None,
            None,
            1e-6,
            group.group_name,
            size,
            weight_form="none",
            plan=plans[rank],
        )
    except PlanMismatchError as error:
        return str(error)
    return ""


def run_soak(rank: int, world_size: int, calls: int) -> tuple[str, int, int]:
    """Calls whose inputs change by call and rank, each output compared bit for bit.

    Returns:
        What was wrong, and by how much memory (KiB) and open files grew after a tenth of them.
    """
    space = workspace()
    variants = 61
    pools = [[random_parts(i, (2, 96), BF16, 1)[0] for i in range(variants)]] + [
        [random_parts(1000 * other + i, (2, 96), BF16, 1)[0] for i in range(variants)]
        for other in range(1, world_size)
    ]
    bound = cpu_kernel.BoundCall(
        arguments_for(pools[rank][0], residual=None, weight=None), space
    )
    # each rank steps through its pool at a pace of its own, so all combinations come up
    paces = (1, 7, 11, 13)
    expected: dict[tuple[int, ...], torch.Tensor] = {}
    memory = files = 0
    for call in range(calls):
        if call == calls // 10:
            memory, files = _used()
        chosen = tuple(
            (call * paces[other] + call // variants) % variants for other in range(world_size)
        )
        given = bound.run(pools[rank][chosen[rank]], None, None, None, None, None).reduced
        if chosen not in expected:
            total = torch.zeros(2, 96)
            for other in range(world_size):
                total = total + pools[other][chosen[other]].float()
            expected[chosen] = total.to(BF16)
        if not torch.equal(given, expected[chosen]):
            return f"call {call}: wrong sum", 0, 0
    now = _used()
    return "", now[0] - memory, now[1] - files


def _used() -> tuple[int, int]:
    """Resident memory in KiB, and how many files are open."""
    with open("/proc/self/status", encoding="ascii") as status:
        resident = next(line for line in status if line.startswith("VmRSS"))
    return int(resident.split()[1]), len(os.listdir("/proc/self/fd"))
