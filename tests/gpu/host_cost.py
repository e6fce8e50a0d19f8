"""Microseconds of the host's time for one site, by each way to run it: python host_cost.py [hidden size]

Ways: the launcher in C as generated code calls it, the same through ctypes, the launches as
Python makes them, the dispatched op, and one Triton kernel of PyTorch's own for comparison; a
site on the unfused path, its parts, and what Inductor makes of the same lines by itself. Each is queued 200 times without waiting for the GPU; the median of 9 rounds, the slowest rank.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fx_fusion
from fx_fusion.lowering import dispatch, gpu_kernel, gpu_launch, gpu_local, gpu_site
from fx_fusion.lowering.arguments import Arguments, Results, check, empty_results
from fx_fusion.lowering.gpu_workspace import gpu_workspace
from fx_fusion.lowering.groups import checked_group
from fx_fusion.lowering.ops import all_reduce_add_rms_norm
from fx_fusion.lowering.select import digest_of
from fx_fusion.settings import FusionSettings
from fx_fusion.testing import spawn

ROUNDS, QUEUED, TOKENS = 9, 200, 8


def median(call: Callable[[], object]) -> float:
    """Microseconds to queue one call."""
    times = []
    for number in range(ROUNDS + 2):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(QUEUED):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        if number > 1:
            times.append(spent / QUEUED * 1e6)
    return statistics.median(times)


def made(constants: dict[str, Any], **changes: Any) -> Any:
    """A site's entry point with another launcher."""
    launcher = dataclasses.replace(gpu_launch.launch_library(), **changes)
    with (
        mock.patch.object(gpu_launch, "launch_library", return_value=launcher),
        mock.patch.object(gpu_site, "launch_library", return_value=launcher),
    ):
        return gpu_site.gpu_site(**constants)


def reduced_in_place(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The collective as Inductor's code calls it."""
    ops = torch.ops._c10d_functional
    ops.wait_tensor.default(ops.all_reduce_.default(x, "sum", group.group_name))


def lines_without_fusion(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The site's lines, for Inductor by itself."""
    ops = torch.ops._c10d_functional
    hidden = residual + ops.wait_tensor(ops.all_reduce(x * 0.5, "sum", name))
    return torch.nn.functional.rms_norm(hidden, (x.shape[-1],), weight, 1e-6), hidden


def costs(rank: int, world_size: int, hidden: int) -> dict[str, float]:
    """Way to microseconds."""
    del rank
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = gpu_workspace(group, device)
    assert workspace.usable, workspace.refusal
    workspace.timeout_nanoseconds = 20_000_000_000
    fx_fusion.prepare(max_tokens=TOKENS, hidden_size=hidden)
    x, residual = (
        torch.ones(TOKENS, hidden, dtype=torch.bfloat16, device=device) for _ in "xr"
    )
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    norm, state = torch.empty_like(x), torch.empty_like(x)
    constants: dict[str, Any] = {
        "eps": 1e-6,
        "group_name": group.group_name,
        "world_size": world_size,
        "want_residual": True,
        "plan": digest_of(FusionSettings(kernel="fx_fusion")),
    }
    arguments = Arguments(x, residual, weight, None, **constants)
    results = Results(norm, state, None, None)  # type: ignore[arg-type]
    stream = int(torch._C._cuda_getCurrentRawStream(device.index or 0))
    tensors = (x, residual, weight, None, norm, state, None, None)
    add = torch.compile(lambda a, b: a + b)
    add(x, residual)
    torch.cuda.synchronize()
    dist.barrier()
    get_stream: Any = torch._C._cuda_getCurrentRawStream

    def through(entry: Any) -> Callable[[], object]:
        return lambda: entry(get_stream(device.index), TOKENS, None, None, *tensors)

    ways: dict[str, Callable[[], object]] = {
        "launcher in C": through(made(constants)),
        "launcher through ctypes": through(made(constants, has_entry=False)),
    }
    ways["launches by Python"] = lambda: gpu_kernel.enqueue(
        arguments, workspace, stream, "one-shot", results
    )
    ways["dispatched op"] = lambda: all_reduce_add_rms_norm(
        x, residual, weight, None, **constants
    )
    ways["  of it, below the dispatcher"] = lambda: dispatch.run(arguments, group)

    def choose() -> None:
        dispatch.meet_once(arguments, group)
        dispatch.gpu_workspace_for(arguments, group)
        dispatch.gpu_algorithm_for(arguments)

    def checks() -> None:
        check(arguments)
        checked_group(arguments.group_name, world_size)

    ways["  of it, choosing the path"] = choose
    ways["  of it, checks"] = checks
    ways["  of it, kernel and results"] = lambda: gpu_kernel.run(arguments, workspace)
    ways["  of it, results"] = lambda: empty_results(arguments)
    ways["torch.cuda.is_available()"] = torch.cuda.is_available
    ways["compiled x + residual, one Triton kernel"] = lambda: add(x, residual)
    unfused = constants | {"plan": digest_of(FusionSettings(kernel="unfused"))}
    # zeros: it adds up in x, call after call
    tensors = (torch.zeros_like(x), *tensors[1:])
    ways["unfused site"] = through(made(unfused | {"may_overwrite_x": True}))
    ways["  of it, all_reduce and wait"] = lambda: reduced_in_place(tensors[0], group)
    ways["  of it, add and norm"] = lambda: gpu_local.run(x, arguments, results)
    inductor = torch.compile(lines_without_fusion)
    ways["compiled without fusion"] = lambda: inductor(x, residual, weight, group.group_name)
    return {name: median(call) for name, call in ways.items()}


def main() -> None:
    """Print the table."""
    hidden = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    ranks = spawn(costs, 2, device="cuda", timeout=120, args=(hidden,))
    for name in ranks[0]:
        sys.stdout.write(f"{max(rank[name] for rank in ranks):8.2f} us  {name}\n")


if __name__ == "__main__":
    main()
