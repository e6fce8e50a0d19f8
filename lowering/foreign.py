"""Run a call on another library's kernel, if it was planned for it and the library can.

Which path a call takes follows from facts that are equal on all ranks: the plan, the site, its
sizes, and the release of the library, which the ranks compare when they make its memory. What the
library can't take goes the unfused path, on every rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from fx_fusion.errors import CaptureError
from fx_fusion.lowering import aiter_backend, flashinfer_backend, gpu_driver
from fx_fusion.lowering.agreement import CANNOT, agree
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results, aligned
from fx_fusion.lowering.own_thread import in_own_thread
from fx_fusion.lowering.site_form import form_of

log = logging.getLogger(__name__)
#: Each is a module with `cause`, `algorithm`, `facts`, `kind_of`, `make`, `call` and
#: `close`.
LIBRARIES: Final[Mapping[str, Any]] = {
    "flashinfer": flashinfer_backend,
    "aiter": aiter_backend,
}


@dataclass
class Memory:
    """What a library shares among a group's ranks; `refusal` says why there is nothing.

    Attributes:
        group: Whose it is.
        device: The GPU.
        refusal: Why calls take the unfused path, "" if they don't; equal on all ranks.
        release: The library's release, equal on all ranks.
        made: The library's own object.
        lock: Held while a call is put into its stream.
    """

    group: dist.ProcessGroup
    device: torch.device
    refusal: str = ""
    release: Any = None
    made: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _last_stream: Any = None

    def order(self) -> None:
        """Make a call on another stream than the last one's wait for it."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        last, self._last_stream = self._last_stream, current
        if last is None or last == current:
            return
        if gpu_driver.is_capturing(last.cuda_stream) == gpu_driver.is_capturing(
            current.cuda_stream
        ):
            current.wait_stream(last)


_memories: dict[tuple[str, str, torch.device, str], Memory] = {}
_making: Final = threading.Lock()


def run(arguments: Arguments, group: dist.ProcessGroup, library: str) -> Results | None:
    """Run one call on a library's kernel; None where it has to take the unfused path.

    Equal to the eager lines of `unfused.py`, but for what the library's rules say.

    Args:
        arguments: The op's arguments, x on a GPU.
        group: The group that they name.
        library: "flashinfer" or "aiter".

    Raises:
        CaptureError: A graph is being captured and the library's memory isn't made yet.
        PlanMismatchError: The ranks have different releases.
    """
    x, backend = arguments.x, LIBRARIES[library]
    if x.numel() == 0:
        return None
    site = (
        device_arch(x.device),
        arguments.world_size,
        x.dtype,
        x.shape[-1],
        form_of(arguments),
    )
    if backend.cause(None, *site):
        return None
    memory = memory_of(library, group, x.device, backend.kind_of(x.dtype))
    if memory.refusal or backend.cause(memory.release, *site):
        return None
    algorithm = backend.algorithm(
        memory.release,
        arguments.world_size,
        x.dtype,
        x.shape[-1],
        x.numel() // x.shape[-1],
    )
    return _call(arguments, memory, backend, algorithm) if algorithm else None


def _call(arguments: Arguments, memory: Memory, backend: Any, algorithm: str) -> Results:
    x = arguments.x
    hidden_size = x.shape[-1]
    rows = aligned(x).view(-1, hidden_size)
    residual, weight = arguments.residual, arguments.weight
    given = (
        rows,
        rows.new_zeros(rows.shape)
        if residual is None
        else aligned(residual).view(-1, hidden_size),
        rows.new_ones(hidden_size) if weight is None else aligned(weight),
    )
    norm, hidden = torch.empty_like(rows), torch.empty_like(rows)
    with memory.lock:
        memory.order()
        backend.call(
            memory.made,
            memory.release,
            algorithm,
            given,
            arguments.eps,
            arguments.weight_form == "1+w",
            (norm, hidden),
        )
    norm, hidden = norm.view(x.shape), hidden.view(x.shape)
    reduced = hidden  # wanted only where there is no residual, so they are equal
    if arguments.want_residual and arguments.want_reduced:
        reduced = hidden.clone()
    return Results(
        norm if arguments.want_norm else norm.new_empty(0),
        hidden if arguments.want_residual else hidden.new_empty(0),
        reduced if arguments.want_reduced else reduced.new_empty(0),
        norm.new_empty(0, dtype=torch.float32),
    )


def memory_of(
    library: str, group: dist.ProcessGroup, device: torch.device, kind: str
) -> Memory:
    """A library's memory for a group, device and kind of dtype; made at first use, collective."""
    key = (library, group.group_name, device, kind)
    known = _memories.get(key)
    if known is not None and known.group is group:
        return known
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"The first call of group {group.group_name!r} on {library} came while a CUDA graph"
            " was being captured, where its memory can't be made; run the model once on every"
            " rank before the capture."
        )
    with _making:
        made = in_own_thread(lambda: _make(LIBRARIES[library], group, device, kind))
    _memories[key] = made
    if made.refusal and group.rank() == 0:
        log.warning(
            "fx_fusion: group %s takes the unfused path in place of %s on all ranks: %s",
            group.group_name,
            library,
            made.refusal,
        )
    return made


def _make(backend: Any, group: dist.ProcessGroup, device: torch.device, kind: str) -> Memory:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts: dict[str, Any] = {"kind": kind}
    try:
        # Loads and compiles: what fails here has kept no rank waiting yet.
        facts["release"] = backend.facts()
    except (
        Exception
    ) as error:  # whatever the library raises, the other ranks have to hear of it
        facts[CANNOT] = _first_line(error)
    agreement = agree(group, facts, equal=("release", "kind"))
    if agreement.refusal:
        return Memory(group, device, agreement.refusal)
    made, cause = None, ""
    try:
        made = backend.make(facts["release"], group, device, kind)
    except Exception as error:  # as above
        cause = f"its memory can't be made: {_first_line(error)}"
    refusal = agree(group, {CANNOT: cause}, equal=()).refusal
    if refusal:
        return Memory(group, device, refusal)
    return Memory(group, device, release=facts["release"], made=made)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text}"


def close(group: dist.ProcessGroup) -> None:
    """Give up what a group's calls made. Collective; later calls take the unfused path."""
    for (library, _, _, _), memory in _memories.items():
        if memory.group is group and not memory.refusal:
            if memory.device.type == "cuda":
                torch.cuda.synchronize(memory.device)
            agree(group, {}, equal=())  # no rank unmaps what another still writes to
            memory.refusal = "its memory was closed"
            LIBRARIES[library].close(memory.made, memory.release, group)
            memory.made = None


def forget() -> None:
    """Forget all memories, for tests."""
    _memories.clear()
