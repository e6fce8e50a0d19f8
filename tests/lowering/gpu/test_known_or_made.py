"""A group's GPU workspace is made once, in a thread of its own, and never under capture."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fx_fusion.errors import CaptureError
from fx_fusion.lowering.gpu_workspace import GpuWorkspace, known_or_made
from fx_fusion.lowering.own_thread import in_own_thread

DEVICE = torch.device("cuda", 0)


class Group:
    """What of a process group is looked at."""

    group_name = "pair"

    def rank(self) -> int:
        return 1


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph is being captured, in its only element; no GPU is touched."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext(index))
    return state


def test_it_is_made_once_for_each_group_and_not_under_capture(capturing: list[bool]) -> None:
    known: dict[tuple[str, int], GpuWorkspace] = {}
    threads: list[int] = []

    def make(group: dist.ProcessGroup, device: torch.device) -> GpuWorkspace:
        threads.append(threading.get_ident())
        return GpuWorkspace(group, device)

    def ask(group: Any) -> GpuWorkspace:
        given = cast(dist.ProcessGroup, group)
        return known_or_made(known, threading.Lock(), make, given, DEVICE)

    first, second = Group(), Group()
    capturing[0] = True
    with pytest.raises(CaptureError, match="prepare"):
        ask(first)
    assert known == {}
    capturing[0] = False
    made = ask(first)
    capturing[0] = True
    assert ask(first) is made
    capturing[0] = False
    assert ask(second) is not made  # the name was used again
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_what_a_thread_of_its_own_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)
    assert in_own_thread(threading.get_ident) != threading.get_ident()
