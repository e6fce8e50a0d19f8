"""The GPU kernels on real ranks: their bits, their replays in CUDA graphs, and ranks that fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gpu_failure_jobs
import gpu_jobs
import gpu_support
import op_support
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from fx_fusion.errors import PeerTimeoutError
from fx_fusion.testing import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
]

#: World size to how many mixed calls.
CALLS = {2: 300, 3: 150, 4: 150, 6: 80, 8: 60}


@pytest.fixture(scope="module", params=sorted(CALLS))
def ranks(request: pytest.FixtureRequest, side_by_side: None) -> list[dict[str, list[str]]]:
    size = request.param
    return spawn(gpu_jobs.everything, size, device="cuda", timeout=240, args=(CALLS[size],))


@pytest.mark.parametrize(
    "name",
    [
        "mixed calls",
        "back to back",
        "batch",
        "same bits",
        "exact",
        "local",
        "layouts",
        "streams",
        "graphs",
    ],
)
def test_ranks(ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [results[name] for results in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize(
    ("job", "world_size"),
    [
        (gpu_jobs.several_groups, 4),
        (gpu_jobs.few_tokens, 16),
        (gpu_jobs.many_replays, 2),
        (gpu_jobs.large_calls, 2),
        (gpu_jobs.large_calls, 4),
        (gpu_failure_jobs.capture_before_prepare, 2),
        (gpu_failure_jobs.one_rank_cannot, 2),
        (gpu_failure_jobs.absent_peer, 3),
        (gpu_failure_jobs.absent_peer_of_two_shot, 3),
        (gpu_failure_jobs.closed, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_job(job: Any, world_size: int, side_by_side: None) -> None:
    assert spawn(job, world_size, device="cuda", timeout=240) == [[]] * world_size


def killed_peer(rank: int, folder: str) -> None:
    """Rank 1 is killed in the middle of replays; rank 0 writes how its next call ended."""
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    workspace = gpu_support.workspace_of()
    workspace.timeout_nanoseconds = 2_000_000_000
    workspace.launchers.clear()
    form = gpu_support.FORMS[0]
    parts = gpu_support.parts_of(form, 8, 1, 2)
    arguments = gpu_support.arguments_of(form, parts[rank], 1, 2, gpu_jobs.world_name())
    op_support.call(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            output = op_support.call(arguments)
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(3):
        graph.replay()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    try:
        op_support.call(arguments)
        text = "nothing was raised"
    except PeerTimeoutError as error:
        text = str(error)
    ending = f"{text}\n{bool(output.norm.isnan().all())}\n{time.monotonic() - start < 60}"
    (Path(folder) / "ending.part").write_text(ending)
    (Path(folder) / "ending.part").rename(Path(folder) / "ending")
    os._exit(0)  # closing the group would wait for the dead


def test_a_killed_peer_ends_the_wait_with_an_error(tmp_path: Path) -> None:
    # Without MPS, where a client that dies takes the others with it.
    context = multiprocessing.get_context("spawn")
    saved = {n: os.environ.pop(n, None) for n in ("CUDA_MPS_PIPE_DIRECTORY",)}
    processes = [
        context.Process(target=killed_peer, args=(rank, str(tmp_path))) for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
    finally:
        for process in processes:
            process.kill()
        os.environ.update({n: v for n, v in saved.items() if v is not None})
    text, all_nan, in_time = (tmp_path / "ending").read_text().split("\n")
    assert "rank 1 did not come" in text
    assert (all_nan, in_time) == ("True", "True")
