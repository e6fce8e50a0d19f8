"""The launcher in C against the launches that Python makes, over a driver that writes them down."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stub_driver import Workspace, stub, stubbed, taken, workspace_of

from fx_fusion.errors import GroupError, PeerTimeoutError
from fx_fusion.lowering import gpu_launch, gpu_site
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.gpu_layout import rows_per_launch
from fx_fusion.lowering.gpu_workspace import NO_STREAM
from fx_fusion.testing import fake_group

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C compiler")

HIDDEN = 4096
BF16 = torch.bfloat16
STREAM = 0x5000
#: Rows of one launch.
MOST = rows_per_launch(HIDDEN, BF16.itemsize, 2)


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with fake_group(2) as group:
        made = workspace_of(group.group_name)
        with stubbed(made):
            yield made


@pytest.fixture(params=["builtin", "ctypes", "Python"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The three ways in: with Python's headers, without them, without a compiler."""
    built = gpu_launch.launch_library()
    assert built.has_entry, built.cause
    library = None if request.param == "Python" else built.library
    other = dataclasses.replace(built, library=library, has_entry=request.param == "builtin")
    with (
        mock.patch.object(gpu_launch, "launch_library", return_value=other),
        mock.patch.object(gpu_site, "launch_library", return_value=other),
    ):
        yield request.param


def made(**constants: Any) -> Any:
    group = dist.group.WORLD  # its name counts the groups that the process has had
    name = "0" if group is None else group.group_name
    return gpu_site.gpu_site(eps=1e-6, group_name=name, world_size=2, **constants)


class Tensors:
    """Inputs and results of a call."""

    def __init__(self, rows: int, **wanted: bool) -> None:
        self.rows = rows
        self.x, self.residual = (torch.ones(rows, HIDDEN, dtype=BF16) for _ in range(2))
        self.weight = torch.ones(HIDDEN, dtype=BF16)
        self.norm, self.hidden = (torch.zeros_like(self.x) for _ in range(2))
        self.rstd = torch.zeros(rows, 1) if wanted.get("rstd") else None

    def call(self, site: Any, stream: int = STREAM, eps: Any = None, scale: Any = None) -> None:
        site(
            stream,
            self.rows,
            eps,
            scale,
            self.x,
            self.residual,
            self.weight,
            None,
            self.norm,
            self.hidden,
            None,
            self.rstd,
        )


@pytest.fixture
def not_by_python() -> Any:
    """Patch the way around the launcher, to see that it isn't taken."""
    return mock.patch.object(gpu_site.GpuSite, "_run", side_effect=AssertionError)


@pytest.mark.parametrize("rows", [1, 8, MOST - 1, MOST, MOST + 1, 2 * MOST + 300])
def test_it_makes_the_launches_that_python_makes(
    workspace: Workspace, kind: str, not_by_python: Any, rows: int
) -> None:
    site = made(want_residual=True, want_rstd=True)
    tensors = Tensors(rows, rstd=True)
    tensors.call(site)
    first = taken()
    assert sum(int.from_bytes(launch[5][80:84], "little") for launch in first) == rows
    assert len(first) == -(-rows // MOST)
    if kind != "Python":
        with not_by_python:
            tensors.call(site)
        assert taken() == first


def test_pointers_numbers_and_rows_are_those_of_the_call(
    workspace: Workspace, not_by_python: Any
) -> None:
    site = made(scale=0.5, want_residual=True)
    for rows in (8, 3):
        Tensors(rows).call(site)
    taken()
    for rows in (3, 8, 3):
        tensors = Tensors(rows)
        with not_by_python:
            tensors.call(site, eps=1e-5)
        ((_, stream, *_, parameters),) = taken()
        words = [int.from_bytes(parameters[i : i + 8], "little") for i in range(0, 80, 8)]
        given = (tensors.x, tensors.residual, tensors.weight, None, None, None)
        results = (tensors.norm, tensors.hidden, None, None)
        assert words == [0 if t is None else t.data_ptr() for t in (*given, *results)]
        assert stream == STREAM
        numbers = torch.frombuffer(bytearray(parameters[88:96]), dtype=torch.float32)
        assert numbers.tolist() == torch.tensor([1e-5, 0.5]).tolist()


def test_what_it_does_not_cover_goes_to_python(workspace: Workspace, kind: str) -> None:
    site = made(want_residual=True)
    tensors = Tensors(8)
    tensors.call(site)
    known = taken()
    with mock.patch.object(workspace, "order", wraps=workspace.order) as order:
        tensors.call(site, stream=STREAM + 1)  # another stream
        assert order.call_count == 1
        tensors.call(site, stream=STREAM + 1)
        assert order.call_count == (2 if kind == "Python" else 1)
        Tensors(9).call(site, stream=STREAM + 1)  # another number of rows
        tensors.call(site, eps=torch.tensor(1e-6), stream=STREAM + 1)  # a tensor for a number
        assert order.call_count == (4 if kind == "Python" else 3)
    assert len(taken()) == 4
    odd = Tensors(8)
    room = torch.zeros(8 * HIDDEN + 1, dtype=BF16)
    odd.x = room[1:].view(8, HIDDEN).fill_(2)
    odd.norm = torch.zeros(8 * HIDDEN + 1, dtype=BF16)[1:].view(8, HIDDEN)
    odd.call(site, stream=STREAM + 1)
    ((*shape, parameters),) = taken()
    assert shape[2:] == list(known[0][2:5])
    for start in (0, 48):
        address = int.from_bytes(parameters[start : start + 8], "little")
        assert address % 16 == 0
        assert address not in (odd.x.data_ptr(), odd.norm.data_ptr())


def test_failures_are_raised(workspace: Workspace, kind: str) -> None:
    site = made(want_residual=True)
    Tensors(8).call(site)
    Tensors(MOST + 1).call(site)
    stub().stub_reset(1, 700)
    with pytest.raises(RuntimeError, match="700"):
        Tensors(MOST + 1).call(site)
    stub().stub_reset(0, 700)
    with pytest.raises(RuntimeError, match="700"):
        Tensors(8).call(site)
    stub().stub_reset(256, 0)
    workspace._host_words[0] = 1
    with pytest.raises(PeerTimeoutError, match="did not come"):
        Tensors(8).call(site)
    assert taken() == []


def test_a_closed_workspace_and_a_destroyed_group_are_noticed(kind: str) -> None:
    site = made(want_residual=True)
    with fake_group(2) as group:
        workspace = workspace_of(group.group_name)
        with stubbed(workspace):
            Tensors(8).call(site)
            assert len(taken()) == 1
        workspace.stream_word.value = NO_STREAM
        with stubbed(None):  # what the ranks agree on after closing
            tensors = Tensors(8)
            tensors.call(site)
            assert taken() == []
            assert torch.equal(tensors.hidden, torch.full_like(tensors.x, 2))
        with stubbed(workspace):
            Tensors(8).call(site)
            assert len(taken()) == 1
    assert not dist.is_initialized()
    with stubbed(workspace), pytest.raises(GroupError):
        Tensors(8).call(site)
    with fake_group(2) as group:
        other = workspace_of(group.group_name)
        with stubbed(other):
            Tensors(8).call(site)
            assert len(taken()) == 1
            assert other.stream_word.value == STREAM


def test_nothing_of_a_call_is_kept(workspace: Workspace, kind: str) -> None:
    """Else CUDA graph trees would find memory in their pool that nobody owns."""
    site = made(want_residual=True, want_rstd=True)
    for _ in range(2):  # the first through Python
        tensors = Tensors(8, rstd=True)
        values = [value for value in vars(tensors).values() if isinstance(value, torch.Tensor)]
        kept = [weakref.ref(value) for value in values]
        assert len(kept) == 6
        tensors.call(site)
        del tensors, values
        assert [reference() for reference in kept] == [None] * 6


def test_no_rows_are_no_launch(workspace: Workspace, kind: str) -> None:
    Tensors(0).call(made(want_residual=True))
    assert taken() == []
