"""A CUDA driver that writes launches down, and a workspace over it, for tests of the host code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fx_fusion.lowering import dispatch, gpu_build, gpu_driver
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.gpu_workspace import GpuWorkspace
from fx_fusion.lowering.groups import resolve_group

SOURCE = Path(__file__).parent / "stub_driver.c"


#: The plain fields of a launch.
PLAIN = ("function", "stream", "cluster", "grid", "threads")


class Record(ctypes.Structure):
    """One launch."""

    _fields_ = [(name, ctypes.c_uint64) for name in PLAIN] + [
        ("parameters", ctypes.c_ubyte * 512)
    ]


@functools.cache
def stub() -> Any:
    """The stub driver, compiled once a process."""
    folder = tempfile.TemporaryDirectory(prefix="stub_driver_")
    target = Path(folder.name) / "stub.so"
    command = [compiler(), "-x", "c", "-O1", "-w", "-shared", "-fPIC", str(SOURCE)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=120)
    library: Any = ctypes.CDLL(str(target))
    library.stub_record.restype = ctypes.POINTER(Record)
    library.kept_folder = folder
    return library


def taken() -> list[tuple[Any, ...]]:
    """The launches since the last look: function, stream, cluster, grid, threads, parameters."""
    library = stub()
    found = []
    for index in range(library.stub_made()):
        record = library.stub_record(index).contents
        plain = tuple(getattr(record, name) for name in PLAIN)
        found.append((*plain, bytes(record.parameters)))
    library.stub_reset(256, 0)
    return found


class Workspace(GpuWorkspace):
    """A workspace whose streams are numbers that need no order."""

    def order(self, stream: int) -> None:
        """Remember the stream alone."""
        self.stream_word.value = stream


def workspace_of(group_name: str, multiprocessors: int = 132) -> Workspace:
    """A workspace of a group without memory behind it."""
    group = resolve_group(group_name)
    workspace = Workspace(
        group,
        torch.device("cpu"),
        arch="sm_90",
        multiprocessors=multiprocessors,
        addresses=tuple((1 + rank) << 40 for rank in range(group.size())),
        timeout_nanoseconds=1,
    )
    host = torch.zeros(17, dtype=torch.int32)
    workspace._host = host
    workspace._host_words = (ctypes.c_int32 * 17).from_address(host.data_ptr())
    return workspace


@contextlib.contextmanager
def stubbed(workspace: Workspace | None) -> Iterator[None]:
    """Launches go to the stub; calls of the group find `workspace`."""
    stub().stub_reset(256, 0)

    # functions: a Mock would keep the arguments of its calls

    def workspace_for(*_: object) -> Workspace | None:
        return workspace

    def no_workspace(*_: object) -> None:
        return None

    def algorithm_for(*_: object) -> str:
        return "one-shot"

    with (
        mock.patch.object(gpu_driver, "_driver", stub),
        mock.patch.object(gpu_build, "machine_code", return_value=b"code"),
        mock.patch.object(dispatch, "gpu_workspace_for", workspace_for),
        mock.patch.object(dispatch, "gpu_algorithm_for", algorithm_for),
        mock.patch.object(dispatch, "triton_workspace_for", no_workspace),
    ):
        yield
