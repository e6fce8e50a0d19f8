"""What the ranks of the GPU tests run where something goes wrong; each returns what was wrong."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_jobs import one_call, world_name
from gpu_support import (
    BF16,
    FORMS,
    FP32,
    OWN_KERNEL,
    arguments_of,
    parts_of,
    random_tensor,
    warm_up,
    workspace_of,
)
from op_support import call

from fx_fusion.errors import CaptureError, PeerTimeoutError
from fx_fusion.lowering import gpu_workspace
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.reference import fp64_oracle


def capture_before_prepare(rank: int, world_size: int) -> list[str]:
    x = random_tensor(rank, 4, 64, dtype=BF16)
    arguments = Arguments(
        x, x, None, None, 1e-6, world_name(), world_size, weight_form="none", plan=OWN_KERNEL
    )
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(arguments)
    except CaptureError as error:
        return [] if "fx_fusion.prepare" in str(error) else [str(error)]
    return ["nothing was raised"]


def one_rank_cannot(rank: int, world_size: int) -> list[str]:
    """All ranks take the unfused path, now and later, and the cause names the rank."""

    def fails(workspace: Any) -> None:
        raise RuntimeError("no memory for this test")

    if rank == 1:
        gpu_workspace._share = fails
    else:
        gpu_workspace._share = lambda workspace: None
    group = dist.group.WORLD
    assert group is not None
    failed = []
    for _ in range(2):
        arguments, given, parts = one_call(FORMS[9], 4, 3, rank, world_size, world_name())
        exact = fp64_oracle(parts, arguments)
        if not torch.allclose(given.norm.double(), exact.norm, atol=1e-3):
            failed.append("wrong numbers")
    made = gpu_workspace.gpu_workspace(group, torch.device("cuda", torch.cuda.current_device()))
    if made.usable or "rank 1" not in made.refusal or "no memory" not in made.refusal:
        failed.append(made.refusal)
    return failed


def absent_peer_of_two_shot(rank: int, world_size: int) -> list[str]:
    """The same by two-shot, where an owner passes on for whom it waited."""
    return absent_peer(rank, world_size, "two-shot")


def absent_peer(rank: int, world_size: int, algorithm: str = "one-shot") -> list[str]:
    """The last rank stops replaying: the others' outputs are NaN and their next call raises."""
    workspace = workspace_of()
    workspace.timeout_nanoseconds = 300_000_000
    workspace.launchers.clear()
    warm_up(FORMS[:1], workspace)
    parts = parts_of(FORMS[0], 8, 21, world_size)
    arguments = arguments_of(FORMS[0], parts[rank], 21, world_size, world_name(), algorithm)
    call(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(arguments) for _ in range(3)]
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(o.norm.isnan().any()) for o in outputs):
        return ["NaN while all ranks were there"]
    dist.barrier()
    if rank == world_size - 1:
        dist.barrier()
        return []
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    spent = time.monotonic() - start
    dist.barrier()
    failed = [] if spent < 10 else [f"{spent:.1f} s"]
    for output in outputs:
        if not all(bool(o.isnan().all()) for o in output):
            failed.append("outputs are not all NaN")
    try:
        call(arguments)
        failed.append("the next call did not raise")
    except PeerTimeoutError as error:
        if f"rank {world_size - 1} did not come" not in str(error):
            failed.append(str(error))
    return failed


def closed(rank: int, world_size: int) -> list[str]:
    """After close() calls take the unfused path."""
    workspace = workspace_of()
    workspace.close()
    arguments, given, parts = one_call(FORMS[9], 4, 3, rank, world_size, world_name())
    exact = fp64_oracle(parts, arguments)
    good = torch.allclose(given.norm.double(), exact.norm, atol=1e-3)
    return [] if good and given.norm.dtype == FP32 else ["wrong numbers after close"]
