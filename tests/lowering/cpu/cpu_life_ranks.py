"""What runs on the ranks in the tests of the CPU kernel's life: failures, plans, many calls."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from cpu_kernel_ranks import random_parts, run_many, workspace
from op_support import BF16, arguments_for

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import cpu_kernel
from fx_fusion.lowering.cpu_workspace import cpu_workspace


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


def run_with_a_failing_rank(rank: int, world_size: int, step: str) -> str:
    """One rank can't build or map the memory: every rank's refusal must name it."""
    del world_size
    from fx_fusion.lowering import cpu_memory
    from fx_fusion.lowering import cpu_workspace as module
    from fx_fusion.lowering.cpu_build import Build

    if rank == 1 and step == "build":
        vars(module)["cpu_library"] = lambda: Build(None, cause="no compiler here")
    if rank == 1 and step == "map":

        def refuse(*_: object) -> Any:
            raise OSError("no room here")

        cpu_memory.attach = refuse  # type: ignore[assignment]
    group = dist.group.WORLD
    assert group is not None
    made = cpu_workspace(group.group_name, group, "a plan")
    again = cpu_workspace(group.group_name, group, "a plan")
    assert made is again, "a refusal is remembered"
    return made.refusal


def run_in_a_named_file(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Without memfd a file takes its place; nothing of it is left."""
    from fx_fusion.lowering import cpu_memory

    cpu_memory.MODES = ("file",)  # type: ignore[misc,assignment]
    found = run_many(rank, world_size, 50)
    left = [name for name in os.listdir("/dev/shm") if name.startswith("fx_fusion-")]
    return found, left


def run_with_plans(rank: int, world_size: int, plans: tuple[str, ...]) -> str:
    """Each rank calls the op with a plan of its own; what all ranks raise alike."""
    from fx_fusion.errors import PlanMismatchError
    from fx_fusion.ops import all_reduce_add_rms_norm as op

    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(2, 64)
    try:
        op(
            x,
            None,
            None,
            None,
            1e-6,
            group.group_name,
            world_size,
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
