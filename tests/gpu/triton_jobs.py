"""What the ranks of the Triton kernel's GPU tests run: the CUDA kernel's jobs, and both at once."""

from __future__ import annotations

import logging
import random
import time
import traceback
from typing import Any

import gpu_jobs
import torch
import torch.distributed as dist
from gpu_support import (
    FORMS,
    FP32,
    Differences,
    arguments_of,
    expected_of,
    parts_of,
    tokens_for,
    workspace_of,
)

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.lowering import gpu_kernel, gpu_workspace, triton_kernel, triton_layout
from fx_fusion.lowering.agreement import CANNOT
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.reference import fp64_oracle
from fx_fusion.lowering.triton_workspace import TritonWorkspace, triton_workspace
from fx_fusion.lowering.workspace import close, prepare

log = logging.getLogger(__name__)


def ready(seconds: float = 20.0) -> TritonWorkspace:
    """The group's workspace, with the kernel of every form loaded, each rank compiling a part."""
    group = dist.group.WORLD
    assert group is not None
    workspace = triton_workspace(group, torch.device("cuda", torch.cuda.current_device()))
    assert workspace.usable, workspace.refusal
    workspace.timeout_nanoseconds = int(seconds * 1e9)  # a hang is to end the test soon
    workspace.write_table()
    if workspace.sharers > 1:
        workspace.block_limit = max(8, workspace.multiprocessors // 2)
    rank, size = group.rank(), group.size()
    sites = [
        arguments_of(form, parts_of(form, 1, 0, 1)[0], 0, size, str(group.group_name))
        for form in FORMS
    ]
    one = torch.tensor(1.0, device="cuda")
    sites.append(sites[0]._replace(scale_tensor=one))  # of `odd_layouts`
    for site in sites[rank::size]:
        triton_kernel.load(site, workspace)
    dist.barrier()  # the others find these in the cache on disk
    for site in sites:
        triton_kernel.load(site, workspace)
    torch.cuda.synchronize()
    dist.barrier()
    return workspace


def patched(**names: Any) -> None:
    """Set names of `gpu_jobs` for the rest of this process."""
    for name, value in names.items():
        setattr(gpu_jobs, name, value)


def through_triton(workspace: TritonWorkspace) -> None:
    """Let the jobs of `gpu_jobs` call the Triton kernel in place of the op."""

    def call(arguments: Arguments) -> Results:
        return triton_kernel.run(arguments, workspace)

    patched(call=call)


def both_kernels(rank: int, size: int, workspace: TritonWorkspace, calls: int) -> list[str]:
    """The same calls through both kernels: one's results beside the other's and the contract's."""
    other = workspace_of()
    choice, differences = random.Random(90_000), Differences()
    for number in range(calls):
        form = choice.choice(FORMS)
        tokens = tokens_for(form, choice)
        gpu_jobs.delay(choice, rank, size)
        seed = 90_000 + number
        parts = parts_of(form, tokens, seed, size)
        arguments = arguments_of(form, parts[rank], seed, size, gpu_jobs.world_name())
        given = triton_kernel.run(arguments, workspace)
        check = gpu_kernel.run(arguments, other)
        name = f"call {number}, {tokens} tokens, {form}"
        differences.compare(name, given, arguments, expected_of(parts, arguments))
        differences.compare(f"{name}, beside CUDA", given, arguments, check)
    workspace.check()
    other.check()
    return differences.lines()


def everything(rank: int, size: int, calls: int, with_cuda: bool) -> dict[str, list[str]]:
    """The jobs that share a start of processes."""
    workspace = ready()
    if with_cuda:
        workspace_of()
    else:
        patched(workspace_of=lambda group=None: workspace)
    through_triton(workspace)
    jobs: dict[str, Any] = {
        "mixed calls": lambda: gpu_jobs.mixed_calls(rank, size, 10_000, calls),
        "back to back": lambda: gpu_jobs.back_to_back(rank, size, 50_000, 60),
        "batch": lambda: gpu_jobs.rows_do_not_depend_on_the_batch(rank, size),
        "same bits": lambda: gpu_jobs.all_ranks_get_the_same_bits(rank, size),
        "exact": lambda: gpu_jobs.near_the_exact_answer(rank, size),
        "layouts": lambda: gpu_jobs.odd_layouts(rank, size),
        "streams": lambda: gpu_jobs.two_streams(rank, size),
        "graphs": lambda: gpu_jobs.two_graphs(rank, size, 200),
        "chunks": lambda: chunks(rank, size),
    }
    if with_cuda:
        jobs["beside CUDA"] = lambda: both_kernels(rank, size, workspace, calls)
    results = {}
    for name, job in jobs.items():
        start = time.monotonic()
        try:
            results[name] = job()
        except Exception:  # one job's failure is not to hide the others'
            results[name] = [traceback.format_exc()]
        torch.cuda.synchronize()
        log.info("rank %d: %s took %.1f s", rank, name, time.monotonic() - start)
    workspace.check()
    return results


def chunks(rank: int, size: int) -> list[str]:
    """Calls with more rows than the ring, and one of as many."""
    differences = Differences()
    form = FORMS[1]
    most = triton_layout.region_of(form.hidden, form.x.itemsize, size).rows
    for number, tokens in enumerate((most, most + 1, 3 * most - 1)):
        arguments, given, parts = gpu_jobs.one_call(
            form, tokens, 97_000 + number, rank, size, gpu_jobs.world_name()
        )
        expected = expected_of(parts, arguments)
        differences.compare(f"{tokens} tokens", given, arguments, expected)
    return differences.lines()


def absent_peer(rank: int, size: int) -> list[str]:
    """The last rank stops replaying: the others' outputs are NaN and their next call raises."""
    workspace = ready()
    parts = parts_of(FORMS[0], 8, 21, size)
    arguments = arguments_of(FORMS[0], parts[rank], 21, size, gpu_jobs.world_name())
    triton_kernel.run(arguments, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [triton_kernel.run(arguments, workspace) for _ in range(3)]
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(output.norm.isnan().any()) for output in outputs):
        return ["NaN while all ranks were there"]
    workspace.timeout_nanoseconds = 300_000_000
    workspace.write_table()  # the captured launches read it
    torch.cuda.synchronize()
    dist.barrier()
    if rank == size - 1:
        dist.barrier()
        return []
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    failed = []
    for output in outputs:
        if not all(bool(value.isnan().all()) for value in output):
            failed.append("outputs are not all NaN")
    try:
        triton_kernel.run(arguments, workspace)
        failed.append("the next call did not raise")
    except PeerTimeoutError as error:
        if f"rank {size - 1} did not come" not in str(error):
            failed.append(str(error))
    return failed


def one_rank_lacks_a_compiler(rank: int, size: int) -> list[str]:
    """All ranks run the op on this kernel if one can't compile the other, until it's closed."""
    facts_of = gpu_workspace._facts

    def facts(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
        return {**facts_of(group, device), **({CANNOT: "no compiler"} if rank == 1 else {})}

    gpu_workspace._facts = facts
    group = dist.group.WORLD
    assert group is not None
    failed = [] if prepare(group, hidden_size=4096) else ["not prepared"]
    where = torch.device("cuda", torch.cuda.current_device())
    if "rank 1: no compiler" not in gpu_workspace.gpu_workspace(group, where).refusal:
        failed.append("the first kernel's refusal")
    ready()
    differences = Differences()
    for number, form in enumerate(FORMS):
        arguments, given, parts = gpu_jobs.one_call(
            form, 5, 99_000 + number, rank, size, gpu_jobs.world_name()
        )
        differences.compare(f"{form}", given, arguments, expected_of(parts, arguments))
    if not bool(triton_workspace(group, where).table.any()):  # type: ignore[union-attr]
        failed.append("no memory")
    close(group)
    arguments, given, parts = gpu_jobs.one_call(
        FORMS[9], 4, 3, rank, size, gpu_jobs.world_name()
    )
    exact = fp64_oracle(parts, arguments)
    if not torch.allclose(given.norm.double(), exact.norm, atol=1e-3):
        failed.append("wrong numbers after close")
    return failed + differences.lines()


def local_norm(rank: int, size: int) -> list[str]:
    """What follows the sum, without an exchange, on one rank."""
    differences = Differences()
    for number, form in enumerate(FORMS):
        for tokens in (1, 37):
            part = parts_of(form, tokens, 98_000 + number, 1)
            arguments = arguments_of(form, part[0], 98_000 + number, 1, "")
            given = triton_kernel.add_rms_norm(arguments)
            expected = expected_of(part, arguments)
            differences.compare(f"{tokens} tokens, {form}", given, arguments, expected)
    assert FP32 in {form.x for form in FORMS}
    return differences.lines()
