"""What keeps ranks from sharing memory, and how they share the cores: pure functions of facts."""

from __future__ import annotations

from typing import Any

import pytest

from fx_fusion.lowering import cpu_workspace
from fx_fusion.lowering.agreement import Agreement
from fx_fusion.lowering.select import CPU_MEMORY_BYTES, cpu_slot_bytes, cpu_takes

FACTS = {"host": "a", "isa": "avx2", "kernel": "cpu_1.so"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"host": "b"}, "its ranks are on 2 hosts"),
        ({"isa": "avx512"}, "different instruction sets: avx2, avx512"),
        ({"kernel": "cpu_2.so"}, "different sources"),
    ],
)
def test_ranks_share_memory_on_one_host_with_one_kernel(
    other: dict[str, Any], words: str
) -> None:
    refusal = cpu_workspace._difference(Agreement((FACTS, {**FACTS, **other})))
    assert words in refusal
    assert bool(words) == bool(refusal)


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        ([[0, 1], [0, 1]], [1, 1]),
        ([[0, 1], [0, 1], [0, 1]], [1, 1, 1]),
        ([list(range(8))] * 2, [4, 4]),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [4, 4]),  # a socket each
        ([[0, 1, 2, 3], [3]], [2, 1]),
    ],
)
def test_a_rank_takes_its_share_of_the_cores(
    cores: list[list[int]], threads: list[int]
) -> None:
    shares = [cpu_workspace._threads(rank, cores) for rank in range(len(cores))]
    assert shares == threads


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16, 64])
def test_memory_is_bounded_and_real_rows_fit(world_size: int) -> None:
    slot = cpu_slot_bytes(world_size)
    assert 4 * world_size * slot <= CPU_MEMORY_BYTES
    assert cpu_takes(16384, 4, world_size)
    assert not cpu_takes(slot // 4 + 1, 4, world_size)
