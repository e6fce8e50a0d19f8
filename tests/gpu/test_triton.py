"""The Triton kernel on real ranks: its bits beside the contract's and the CUDA kernel's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_jobs

from fx_fusion.lowering import triton_build
from fx_fusion.testing import spawn


def triton_is_missing() -> str:
    """Why Triton can't be used here, "" if it can."""
    try:
        triton_build.triton_version()
    except triton_build.TritonError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU"),
    pytest.mark.skipif(triton_is_missing() != "", reason=triton_is_missing()),
]

#: World size to how many mixed calls.
CALLS = {2: 200, 3: 100, 4: 100, 8: 40}
JOBS = (
    *("mixed calls", "back to back", "batch", "same bits", "exact"),
    *("layouts", "streams", "graphs", "chunks", "beside CUDA"),
)


@pytest.fixture(scope="module", params=sorted(CALLS))
def ranks(request: pytest.FixtureRequest, side_by_side: None) -> list[dict[str, list[str]]]:
    size = request.param
    with_cuda = torch.version.hip is None
    arguments = (CALLS[size], with_cuda)
    return spawn(triton_jobs.everything, size, device="cuda", timeout=300, args=arguments)


@pytest.mark.parametrize("name", JOBS)
def test_ranks(ranks: list[dict[str, list[str]]], name: str) -> None:
    if name not in ranks[0]:
        pytest.skip("the CUDA kernel does not run here")
    assert [results[name] for results in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize(
    ("job", "world_size"),
    [
        (triton_jobs.absent_peer, 2),
        (triton_jobs.absent_peer, 3),
        (triton_jobs.one_rank_lacks_a_compiler, 2),
        (triton_jobs.local_norm, 1),
    ],
    ids=["absent peer of 2", "absent peer of 3", "no compiler on one of 2", "local norm"],
)
def test_job(job: Any, world_size: int, side_by_side: None) -> None:
    assert spawn(job, world_size, device="cuda", timeout=120) == [[]] * world_size
