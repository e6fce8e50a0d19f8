"""`fx_fusion.testing`: the fake group, and real processes that never outlive the call."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import spawn_jobs
import torch
import torch.distributed as dist

from fx_fusion.errors import GroupError, SpawnError
from fx_fusion.testing import fake_group, spawn


def test_a_fake_group_has_the_ranks_that_were_asked_for_and_is_gone_afterwards() -> None:
    for rank in (0, 7):
        with fake_group(8, rank=rank) as group:
            assert (group.size(), dist.get_rank(), dist.get_backend()) == (8, rank, "fake")
            dist.all_reduce(torch.ones(2))
        assert not dist.is_initialized()


def test_a_fake_group_is_gone_after_an_error_too() -> None:
    with pytest.raises(KeyError), fake_group(2):
        raise KeyError
    with fake_group(2):
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_a_fake_group_s_name_does_not_depend_on_what_failed_before() -> None:
    # torch counts the group that isn't made all the same
    with pytest.raises(RuntimeError, match="nowhere"):
        dist.init_process_group("gloo", init_method="nowhere://", rank=0, world_size=2)
    with fake_group(2) as group:
        assert group.group_name == "0"


def test_a_second_default_group_is_refused_and_the_first_stays() -> None:
    with fake_group(2):
        refused = pytest.raises(GroupError, match=r"default group \(fake, 2 ranks\)")
        with refused, fake_group(4):
            pass
        assert dist.get_world_size() == 2


@pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_the_group_is_refused(world_size: int, rank: int) -> None:
    refused = pytest.raises(GroupError, match="at least 0 and below the world size")
    with refused, fake_group(world_size, rank=rank):
        pass


def test_spawn_returns_each_ranks_result_in_rank_order() -> None:
    results = spawn(spawn_jobs.rank_and_sum, 3, args=(torch.zeros(2),))
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(result[2], torch.full((2,), 3.0)) for result in results)


def test_spawned_ranks_have_a_gloo_group_one_thread_and_no_port() -> None:
    assert spawn(spawn_jobs.facts, 2) == [("gloo", 1, 0, ""), ("gloo", 1, 1, "")]


def test_a_large_result_and_a_destroyed_group_are_fine() -> None:
    assert spawn(spawn_jobs.large_result, 1) == [bytes(1 << 22)]
    assert spawn(spawn_jobs.leaves_without_its_group, 2) == [0, 1]


def test_the_traceback_of_a_rank_that_raised_is_in_the_error() -> None:
    with pytest.raises(SpawnError) as caught:
        spawn(spawn_jobs.rank_one_raises, 2)
    text = str(caught.value)
    assert "rank_one_raises on 2 ranks (cpu)" in text
    assert "rank 1 raised:" in text
    assert "KeyError: 'the one that failed'" in text
    assert "spawn_jobs.py" in text


def test_a_rank_that_died_is_named_with_its_exit_code() -> None:
    with pytest.raises(SpawnError, match="1 of them failed") as caught:
        spawn(spawn_jobs.rank_one_exits, 2)
    assert "rank 1 ended with exit code 7 and left no report." in str(caught.value)


def test_a_rank_that_did_not_finish_is_named_with_its_stack_and_ended() -> None:
    with pytest.raises(SpawnError) as caught:
        spawn(spawn_jobs.waits_for_ever, 2, timeout=12)
    text = str(caught.value)
    assert "rank 0 did not finish within 12 s; it was at:" in text
    assert "in waits_for_ever" in text
    assert "rank 1 did not finish within 12 s; where it was couldn't be seen" in text
    assert multiprocessing.active_children() == []


def test_a_collective_without_its_peer_ends_with_the_line_that_waited() -> None:
    with pytest.raises(SpawnError, match="2 of them failed") as caught:
        spawn(spawn_jobs.rank_one_skips_the_collective, 2, timeout=20)
    text = str(caught.value)
    assert "rank 0 raised:" in text
    assert "dist.all_reduce(torch.ones(1))" in text
    assert "rank 1 did not finish" in text


def test_a_result_that_cannot_be_pickled_fails_on_its_rank() -> None:
    with pytest.raises(SpawnError, match=r"rank 0 raised:[\s\S]*pickle"):
        spawn(spawn_jobs.returns_a_lambda, 1)


def test_what_a_rank_started_ends_with_the_call() -> None:
    ((rank, child),) = spawn(spawn_jobs.starts_a_process, 1)
    end = time.monotonic() + 10  # it has been killed, which takes a busy machine a moment
    while any(map(is_running, (rank, child))):
        assert time.monotonic() < end


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie (an orphan's new parent may be slow)."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_functions_that_cannot_be_imported_are_refused_before_any_process_starts() -> None:
    def local(rank: int, world_size: int) -> int:
        return os.getpid()

    with pytest.raises(SpawnError, match="top level of a module"):
        spawn(local, 2)
    with pytest.raises(SpawnError, match="cannot pickle its arguments"):
        spawn(spawn_jobs.rank_and_sum, 2, args=(lambda: 0,))


@pytest.mark.parametrize(
    ("world_size", "keywords", "message"),
    [
        (0, {}, "at least 1 rank"),
        (2, {"timeout": 0.0}, "positive number of seconds"),
        (2, {"device": "tpu"}, "choose 'cpu' or 'cuda'"),
    ],
)
def test_impossible_requests_are_refused(
    world_size: int, keywords: dict[str, float], message: str
) -> None:
    with pytest.raises(SpawnError, match=message):
        spawn(spawn_jobs.facts, world_size, **keywords)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="is about machines without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(SpawnError, match="sees no GPU"):
        spawn(spawn_jobs.facts, 2, device="cuda")
