"""The GPU memory that a group's ranks share for the kernel: made once, never moved.

Made at the first op of a group outside of graph capture, or by `fx_fusion.prepare`, over torch's
symmetric memory, with the only collectives of its life. If a rank can't make it, no rank does:
all take the unfused path from then on, and one WARNING says which rank and why.

`gpu_layout` gives its size. Its addresses are baked into captured graphs, so it lives as long
as its process group, or until it is closed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from fx_fusion.errors import CaptureError, PeerTimeoutError
from fx_fusion.lowering import gpu_build
from fx_fusion.lowering.agreement import CANNOT, agree
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.driver import driver_for
from fx_fusion.lowering.gpu_driver import DriverError
from fx_fusion.lowering.gpu_layout import MAX_WORLD_SIZE, Layout, layout
from fx_fusion.lowering.gpu_select import AMD_ARCHS, gpu_takes
from fx_fusion.lowering.own_thread import in_own_thread
from fx_fusion.lowering.runtime_compiler import BuildError

log = logging.getLogger(__name__)

#: How long a call waits for its peers where the group doesn't say, in seconds.
DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
#: What the WARNING says is taken.
UNFUSED_PATH: Final = "the unfused path"
#: Lets ranks share a GPU, for tests.
_OVERLAPPING: Final = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
#: `Cause` of the kernel.
_TIMED_OUT: Final = 1
_HOST_WORDS: Final = 1 + MAX_WORLD_SIZE
#: No stream has this handle.
NO_STREAM: Final = 2**64 - 1


@dataclass
class GpuWorkspace:
    """The shared memory as this rank sees it; `refusal` says why there is none.

    Attributes:
        group: Whose it is.
        device: The GPU.
        refusal: Why calls don't take this kernel, "" if they do; equal on all ranks.
        lacks_compiler: A rank lacks the compiler or the driver's functions for this kernel, so
            that the one in Triton may do; equal on all ranks.
        arch: "sm_90".
        multiprocessors: Those a rank may fill: the least of all ranks', divided by the ranks
            that share the GPU.
        sharers: The most ranks that share a GPU.
        block_limit: Blocks of a launch at most, 0 for as many as fit. For tests in which ranks
            share a GPU with each other and with other kernels: a multiprocessor that holds a
            waiting block keeps its split of shared memory, with which a kernel that the waiting
            depends on may not fit, so some have to stay free.
        addresses: Of every rank's memory as mapped here, in rank order.
        lock: Held while a call is put into its stream, so that all of them are ordered.
        launchers: What `gpu_kernel` keeps of the variants in use.
        stream_word: The stream of the last call, NO_STREAM before the first and after the
            last. The launcher in C reads it: on another stream it leaves the call to Python.
    """

    group: dist.ProcessGroup
    device: torch.device
    refusal: str = ""
    lacks_compiler: bool = False
    arch: str = ""
    multiprocessors: int = 0
    sharers: int = 1
    block_limit: int = 0
    addresses: tuple[int, ...] = ()
    timeout_nanoseconds: int = 0
    context: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    lock: threading.Lock = field(default_factory=threading.Lock)
    launchers: dict[Any, Any] = field(default_factory=dict)
    _memory: torch.Tensor | None = None
    _handle: Any = None
    _host: torch.Tensor | None = None
    _host_words: Any = None
    stream_word: Any = field(default_factory=lambda: ctypes.c_uint64(NO_STREAM))
    _last_stream_object: Any = None

    @property
    def usable(self) -> bool:
        """True if calls of this group run on the kernel, on every rank."""
        return not self.refusal

    @property
    def layout(self) -> Layout:
        """Where things are in a rank's memory."""
        return layout(self.group.size())

    @property
    def host_address(self) -> int:
        """Of the host memory in which the kernel says what went wrong."""
        assert self._host is not None
        return self._host.data_ptr()

    def check(self) -> None:
        """Raise PeerTimeoutError if an earlier call failed; costs one read of host memory."""
        if self._host_words[0]:
            raise self._error()

    def _error(self) -> PeerTimeoutError:
        name = self.group.group_name
        if self._host_words[0] == _TIMED_OUT:
            missing = [str(r) for r in range(self.group.size()) if self._host_words[1 + r]]
            what = (
                f"rank {', '.join(missing) or '?'} did not come to a call within"
                f" {self.timeout_nanoseconds / 1e9:.0f} s"
            )
        else:
            what = "two calls overlapped, because nothing ordered their streams or graphs"
        return PeerTimeoutError(
            f"all_reduce_add_rms_norm of group {name!r} on {self.device}: {what}. Results since"
            " then are not valid (NaN after a timeout) and the group can't go on; destroy it"
            " and start the ranks again."
        )

    def order(self, stream: int) -> None:
        """Make calls that come on another stream than the last one wait for it.

        Within one capture that is an edge of the graph. Between a graph's replays and other
        work the order is the caller's; the kernel detects an overlap.
        """
        last = self.stream_word.value
        if stream == last:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last_stream_object is not None:
            is_capturing = driver_for(self.arch).is_capturing
            if is_capturing(stream) == is_capturing(last):
                event = cast(Any, torch.cuda).Event()
                event.record(self._last_stream_object)
                current.wait_event(event)
        self.stream_word.value, self._last_stream_object = stream, current

    def close(self) -> None:
        """Give the memory up. Collective; graphs that were captured may not be replayed."""
        if self._memory is None:
            return
        torch.cuda.synchronize(self.device)
        agree(self.group, {}, equal=())  # no rank unmaps what another still writes to
        self.refusal = "the workspace was closed"
        self.stream_word.value = NO_STREAM
        self.launchers.clear()
        self._memory = self._handle = None


Workspace = TypeVar("Workspace", bound=GpuWorkspace)

_workspaces: dict[tuple[str, int], GpuWorkspace] = {}
_making: Final = threading.Lock()


def gpu_workspace(group: dist.ProcessGroup, device: torch.device) -> GpuWorkspace:
    """The workspace of a group on a device. Made on first use, which is collective.

    Raises:
        CaptureError: It isn't made yet, and a graph is being captured.
        PlanMismatchError: The ranks disagree about sources or versions.
    """
    return known_or_made(_workspaces, _making, _make, group, device)


def known_or_made(
    known: dict[tuple[str, int], Workspace],
    making: threading.Lock,
    make: Callable[[dist.ProcessGroup, torch.device], Workspace],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Workspace:
    """A group's workspace of one kind on a device; `make` is called on first use, on all ranks.

    Keyed by the group itself: a name is used again after destroy and init.

    Args:
        known: Those of this kind, to which a new one is added.
        making: Held while one is made.
        make: Makes one, in a thread of its own in which the device is the current one.
        group: The process group.
        device: The GPU.

    Raises:
        CaptureError: It isn't made yet, and a graph is being captured.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (group.group_name, index)
    found = known.get(key)
    if found is not None and found.group is group:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"The first fused call of group {group.group_name!r} came while a CUDA graph was"
            " being captured, where its memory can't be made; call"
            " fx_fusion.prepare(group) on every rank before the capture."
        )

    def on_device() -> Workspace:
        with torch.cuda.device(index):
            return make(group, torch.device("cuda", index))

    with making:
        made = in_own_thread(on_device)
    known[key] = made
    if made.refusal and group.rank() == 0:
        path = "a kernel in Triton or the unfused path" if made.lacks_compiler else UNFUSED_PATH
        log.warning(
            "fx_fusion: group %s takes %s on all ranks: %s",
            group.group_name,
            path,
            made.refusal,
        )
    return made


def _make(group: dist.ProcessGroup, device: torch.device) -> GpuWorkspace:
    if not 2 <= group.size() <= MAX_WORLD_SIZE:
        return GpuWorkspace(
            group, device, f"the kernel takes 2 to {MAX_WORLD_SIZE} ranks, not {group.size()}"
        )
    facts = _facts(group, device)
    agreement = agree(group, facts, equal=("source", "compiler", "torch", "bytes"))
    refusal = agreement.refusal or _differences(agreement.facts)
    if refusal:
        return GpuWorkspace(group, device, refusal, bool(agreement.refusal))
    devices = [(other["host"], other["uuid"]) for other in agreement.facts]
    sharers = max(devices.count(one) for one in devices)
    if sharers > 1 and os.environ.get(_OVERLAPPING) != "1":
        return GpuWorkspace(
            group, device, f"{sharers} ranks share a GPU ({_OVERLAPPING}=1 allows it)"
        )
    workspace = GpuWorkspace(
        group,
        device,
        arch=facts["arch"],
        multiprocessors=agreement.smallest("multiprocessors") // sharers,
        sharers=sharers,
        timeout_nanoseconds=int(_timeout_seconds(group, device) * 1e9),
    )
    cause = ""
    try:
        _share(workspace)
    except Exception as error:  # whatever torch raises, the other ranks have to hear of it
        cause = f"sharing memory failed: {_first_line(error)}"
    # Every rank's memory is filled before any rank goes on.
    shared = agree(group, {CANNOT: cause}, equal=())
    if shared.refusal:
        return GpuWorkspace(group, device, shared.refusal)
    return workspace


def _facts(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """What this rank brings; `cannot` says what it lacks."""
    properties, arch = torch.cuda.get_device_properties(device), device_arch(device)
    facts: dict[str, Any] = {
        "host": _host(),
        "uuid": str(properties.uuid),
        "arch": arch,
        "multiprocessors": properties.multi_processor_count,
        "torch": str(torch.__version__),
        "bytes": layout(group.size()).total,
        "source": gpu_build.source_hash(),
        "compiler": "",
    }
    try:
        torch.cuda.synchronize(device)  # gives this thread the device's context
        driver_for(arch).current_context()
        facts["compiler"] = gpu_build.compiler_version()
        if not gpu_takes(arch, group.size(), 1):
            facts[CANNOT] = f"the kernels need sm_80 or newer or {AMD_ARCHS}, not {arch}"
    except (BuildError, DriverError) as error:
        facts[CANNOT] = _first_line(error)
    return facts


def _differences(facts: tuple[Any, ...]) -> str:
    """Why ranks that all can take part still can't together; "" if they can."""
    for name, what in (("host", "hosts"), ("arch", "kinds of GPU")):
        count = len({other[name] for other in facts})
        if count > 1:
            return f"its ranks are on {count} {what}"
    return ""


def _share(workspace: GpuWorkspace) -> None:
    """Allocate, exchange handles, and mark everything as not arrived."""
    group, device = workspace.group, workspace.device
    sizes = layout(group.size())
    torch.cuda.current_stream(device).synchronize()
    workspace.context = driver_for(workspace.arch).current_context()
    # A dedicated allocation: addresses and signal pad are this group's alone.
    memory: torch.Tensor = cast(Any, symmetric_memory)._SymmetricMemory.empty_strided_p2p(
        (sizes.total,), (1,), torch.uint8, device
    )
    handle = cast(Any, symmetric_memory).rendezvous(memory, group.group_name)
    offset = int(getattr(handle, "offset", 0))
    mark_empty(memory, sizes)
    host = torch.zeros(_HOST_WORDS, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize(device)
    workspace.addresses = tuple(int(p) + offset for p in handle.buffer_ptrs)
    workspace._memory, workspace._handle, workspace._host = memory, handle, host
    workspace._host_words = (ctypes.c_int32 * _HOST_WORDS).from_address(host.data_ptr())


def mark_empty(memory: torch.Tensor, sizes: Layout) -> None:
    """Fill a rank's memory: ones where nothing has arrived, zeros in states and control."""
    memory[: sizes.states].fill_(0xFF)
    memory[sizes.states :].zero_()


def _timeout_seconds(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long the group's own collectives wait for a rank."""
    try:
        backend = cast(Any, group)._get_backend(device)
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return DEFAULT_TIMEOUT_SECONDS


def _host() -> str:
    """What tells one running host from another, containers of it included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
