"""The CPU kernel on real ranks: its bits, its waits, and what happens when a rank fails."""

from __future__ import annotations

import functools
import os
from typing import Any

import cpu_kernel_ranks as ranks
import cpu_life_ranks as life
import pytest

from fx_fusion.errors import SpawnError
from fx_fusion.testing import spawn


def shared_files() -> set[str]:
    """Our files in shared memory; tests that run beside this one have others there."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("fx_fusion-")}


@functools.cache
def checked(world_size: int) -> list[dict[str, list[str]]]:
    """What the checks found on each rank of a world."""
    return spawn(ranks.run_checks, world_size, timeout=400)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_output_keeps_the_contract(world_size: int) -> None:
    assert [found["grid"] for found in checked(world_size)] == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_row_does_not_depend_on_its_batch(world_size: int) -> None:
    assert [found["batch"] for found in checked(world_size)] == [[]] * world_size


def test_many_calls_of_changing_sizes_never_read_an_old_value() -> None:
    assert [found["many"] for found in checked(2)] == [[], []]


def test_the_form_does_not_change_the_sum_of_squares() -> None:
    assert [found["forms"] for found in checked(2)] == [[], []]


def test_ranks_runs_and_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # more threads than cores: they mustn't spin while they wait
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    first = spawn(ranks.run_digest, 3, args=(1,), timeout=200)
    second = spawn(ranks.run_digest, 3, args=(2,), timeout=200)
    assert first[0] == first[1] == first[2]
    assert first == second


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_million_calls_without_a_wrong_bit_or_a_leak(world_size: int) -> None:
    for found, grown, opened in spawn(
        life.run_soak, world_size, args=(1_000_000,), timeout=1100
    ):
        assert found == ""
        assert grown < 4096, f"{grown} KiB more after nine tenths of the calls"
        assert opened == 0


@functools.cache
def beginnings() -> list[dict[str, Any]]:
    """How the memory of several groups of three began, on each rank."""
    return spawn(life.run_beginnings, 3, timeout=200)


@pytest.mark.parametrize(("check", "other"), [("plans", "auto-2"), ("unfused", "unfused-1")])
def test_ranks_with_different_plans_are_told_on_every_rank(check: str, other: str) -> None:
    first, second, third = (found[check] for found in beginnings())
    assert first == second == third
    assert "disagree about plan" in first
    for words in ("rank 0 has 'auto-1'", f"rank 1 has '{other}'", "rank 2 has 'auto-1'"):
        assert words in first


def test_groups_do_not_disturb_each_other() -> None:
    for found in spawn(ranks.run_two_groups, 4, timeout=200):
        assert found == []


def test_a_killed_rank_is_named_and_nothing_is_left_behind() -> None:
    before = shared_files()
    with pytest.raises(SpawnError, match="rank 2"):
        spawn(life.run_until_a_rank_dies, 3, timeout=60)
    assert shared_files() == before


def test_a_rank_that_does_not_come_is_named_within_the_bound() -> None:
    messages = spawn(life.run_with_a_late_rank, 3, timeout=60)
    for message in messages[:2]:
        assert "rank 2" in message
        assert "did not come" in message or "gave up" in message


@pytest.mark.parametrize("step", ["build", "map"])
def test_if_one_rank_cannot_no_rank_does(step: str) -> None:
    refusals = [found[step] for found in beginnings()]
    assert "rank 1" in refusals[0]
    assert refusals[0] == refusals[1] == refusals[2]


def test_a_closed_group_takes_the_unfused_path_whether_its_memory_was_made_or_not() -> None:
    assert [found["closed"] for found in beginnings()] == [[(False, []), (False, [])]] * 3


def test_a_named_file_takes_the_place_of_memfd() -> None:
    assert [found["file"] for found in beginnings()] == [([], [])] * 3
