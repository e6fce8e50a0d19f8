"""The GPU memory that a group's ranks share for the Triton kernel: made once, never moved.

It is made, collectively, when the ranks have agreed that not all of them can run the CUDA
kernel, and outside of graph capture like that kernel's. If a rank can't make it, no rank does,
and all take the unfused path. `triton_layout` gives its size.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from fx_fusion.lowering import triton_build
from fx_fusion.lowering.agreement import CANNOT, agree
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.gpu_layout import MAX_WORLD_SIZE
from fx_fusion.lowering.gpu_workspace import (
    _HOST_WORDS,
    _OVERLAPPING,
    GpuWorkspace,
    _differences,
    _first_line,
    _host,
    _timeout_seconds,
    known_or_made,
)
from fx_fusion.lowering.triton_layout import layout


@dataclass
class TritonWorkspace(GpuWorkspace):
    """The shared memory as this rank sees it; as `GpuWorkspace`, with another layout.

    Attributes:
        machine: Which clock the kernel reads, as `triton_one_shot` numbers them.
        table: What the kernel has to know of the workspace, int64 in device memory.
    """

    machine: int = 0
    table: torch.Tensor | None = None

    @property
    def programs(self) -> int:
        """Programs of a launch at most: one a multiprocessor is always on the GPU at once."""
        return min(self.multiprocessors, self.block_limit or self.multiprocessors)

    def write_table(self) -> None:
        """Make the table anew, after a change of `timeout_nanoseconds`."""
        padding = [0] * (MAX_WORLD_SIZE - len(self.addresses))
        rank, timeout = self.group.rank(), self.timeout_nanoseconds
        entries = [*self.addresses, *padding, rank, timeout, self.host_address]
        written = torch.tensor(entries, dtype=torch.int64, device=self.device)
        if self.table is None:
            self.table = written
        else:
            self.table.copy_(written)  # captured graphs hold its address


_workspaces: dict[tuple[str, int], TritonWorkspace] = {}
_making: Final = threading.Lock()


def triton_workspace(group: dist.ProcessGroup, device: torch.device) -> TritonWorkspace:
    """The workspace of a group on a device. Made on first use, which is collective.

    Raises:
        CaptureError: It isn't made yet, and a graph is being captured.
        PlanMismatchError: The ranks disagree about sources or versions.
    """
    return known_or_made(_workspaces, _making, _make, group, device)


def close(group: dist.ProcessGroup, device: torch.device, *, also_later: bool) -> None:
    """Give up a group's workspace on a device, if it has one. Collective then.

    Args:
        group: The process group.
        device: The GPU.
        also_later: Calls would make one later on: they take the unfused path from now on.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    known = _workspaces.get((group.group_name, index))
    if known is not None and known.group is group:
        known.close()
    elif also_later:
        refused = TritonWorkspace(group, device, "the workspace was closed")
        _workspaces[group.group_name, index] = refused


def _make(group: dist.ProcessGroup, device: torch.device) -> TritonWorkspace:
    size = group.size()
    if not 2 <= size <= MAX_WORLD_SIZE:
        text = f"the Triton kernel takes 2 to {MAX_WORLD_SIZE} ranks, not {size}"
        return TritonWorkspace(group, device, text)
    facts = _facts(group, device)
    agreement = agree(group, facts, equal=("source", "triton", "torch", "bytes"))
    refusal = agreement.refusal or _differences(agreement.facts)
    devices = [(other["host"], other["uuid"]) for other in agreement.facts]
    sharers = max(devices.count(one) for one in devices)
    if sharers > 1 and os.environ.get(_OVERLAPPING) != "1":
        refusal = refusal or f"{sharers} ranks share a GPU ({_OVERLAPPING}=1 allows it)"
    if refusal:
        return TritonWorkspace(group, device, refusal)
    share = max(1, agreement.smallest("multiprocessors") // sharers)
    workspace = TritonWorkspace(
        group,
        device,
        arch=facts["arch"],
        multiprocessors=share,
        sharers=sharers,
        # other kernels of ranks that share a GPU must find a place beside those that wait
        block_limit=max(8, share // 2) if sharers > 1 else 0,
        timeout_nanoseconds=int(_timeout_seconds(group, device) * 1e9),
        machine=triton_build.machine_of(facts["arch"]),
    )
    cause = ""
    try:
        _share(workspace)
    except Exception as error:  # whatever torch raises, the other ranks have to hear of it
        cause = f"sharing memory failed: {_first_line(error)}"
    # Every rank's memory is filled before any rank goes on.
    shared = agree(group, {CANNOT: cause}, equal=())
    if shared.refusal:
        return TritonWorkspace(group, device, shared.refusal)
    return workspace


def _facts(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What this rank brings; `cannot` says what it lacks."""
    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, Any] = {
        "host": _host(),
        "uuid": str(properties.uuid),
        "arch": device_arch(device),
        "multiprocessors": properties.multi_processor_count,
        "torch": str(torch.__version__),
        "bytes": layout(group.size()).total,
        "source": triton_build.source_hash(),
        "triton": "",
    }
    try:
        facts["triton"] = triton_build.triton_version()
        triton_build.try_out(device)
    except triton_build.TritonError as error:
        facts[CANNOT] = _first_line(error)
    return facts


def _share(workspace: TritonWorkspace) -> None:
    """Allocate, exchange handles, lower all flags."""
    group, device = workspace.group, workspace.device
    torch.cuda.current_stream(device).synchronize()
    # A dedicated allocation: addresses and signal pad are this group's alone.
    memory: torch.Tensor = cast(Any, symmetric_memory)._SymmetricMemory.empty_strided_p2p(
        (layout(group.size()).total,), (1,), torch.uint8, device
    )
    handle = cast(Any, symmetric_memory).rendezvous(memory, group.group_name)
    offset = int(getattr(handle, "offset", 0))
    memory.zero_()
    host = torch.zeros(_HOST_WORDS, dtype=torch.int32, pin_memory=True)
    workspace.addresses = tuple(int(p) + offset for p in handle.buffer_ptrs)
    workspace._memory, workspace._handle, workspace._host = memory, handle, host
    workspace._host_words = (ctypes.c_int32 * _HOST_WORDS).from_address(host.data_ptr())
    workspace.write_table()
    torch.cuda.synchronize(device)
