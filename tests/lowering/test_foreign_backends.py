"""FlashInfer and AITER behind the op: which calls reach them, with what, on stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_jobs import arguments, job

from fx_fusion.errors import CaptureError
from fx_fusion.lowering import foreign
from fx_fusion.testing import fake_group, spawn

Ranks = list[dict[str, Any]]
UNFUSED = ["unfused"]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    """What two ranks saw."""
    return spawn(job, 2, timeout=120)


def test_flashinfer_gives_the_contract_s_numbers_where_it_is_taken(ranks: Ranks) -> None:
    for result in (rank["sound"] for rank in ranks):
        refused = [name for name, found in result["seen"].items() if found == UNFUSED]
        assert refused == ["rounds first", "bias", "too large"]
        assert all(found in ([], UNFUSED) for found in result["seen"].values())
        assert result["closed"] == ["destroyed", "destroyed", "unfused"]
        assert result["made"] == 2  # one memory for 16 bits, one for float32
        assert all(call == {"one_shot": True, "pdl": True} for call in result["calls"])


def test_an_old_flashinfer_is_taken_for_what_it_gets_right(ranks: Ranks) -> None:
    for result in (rank["old"] for rank in ranks):
        refused = [name for name, found in result["seen"].items() if found == UNFUSED]
        assert refused == ["1+w", "rounds first", "bias", "2880", "fp32", "too large"]
        assert not [
            found for found in result["seen"].values() if found not in ([], ["unfused"])
        ]
        assert result["closed"] == ["destroyed", "destroyed", "unfused"]
        older = {"one_shot": True, "pdl": False, "older": True}
        assert all(call == older for call in result["calls"])


def test_ranks_with_two_releases_raise_on_both(ranks: Ranks) -> None:
    for rank in ranks:
        assert "release: rank 0 has (0, 7, 2, 1), rank 1 has (0, 7, 4, 0)" in rank["mismatch"]


def test_a_rank_without_the_library_sends_all_ranks_the_unfused_way(ranks: Ranks) -> None:
    first, second = (rank["missing"] for rank in ranks)
    assert first[0] == second[0] == ["unfused", "unfused"]
    assert first[1].count("rank 1: RuntimeError: the release of FlashInfer") == 1
    assert second[1] == ""


def test_aiter_gives_the_contract_s_numbers_where_it_is_taken(ranks: Ranks) -> None:
    for result in (rank["aiter"] for rank in ranks):
        assert result["seen"] == {
            "plain": [],
            "1+w": [],
            "larger": [],
            "no residual": [],
            "rounds first": ["unfused"],
        }
        assert [call["one_stage"] for call in result["calls"]] == [True, True, False, True]
        assert [call["gemma"] for call in result["calls"]] == [False, True, False, False]


def test_memory_is_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with fake_group(world_size=2):
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(CaptureError, match="before the capture"):
            foreign.memory_of("flashinfer", group, torch.device("cuda", 0), "16 bits")


def test_where_the_library_cannot_run_nobody_is_asked() -> None:
    with fake_group(world_size=2):  # which would fail if it were asked
        given, _ = arguments(0, 5, 1024, "flashinfer", torch.bfloat16)
        group: Any = dist.group.WORLD
        assert foreign.run(given, group, "flashinfer") is None
        assert foreign.run(given._replace(x=given.x[:0]), group, "flashinfer") is None
