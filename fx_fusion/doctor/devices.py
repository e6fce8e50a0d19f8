"""The GPUs that torch sees, and what is between them; on a machine without one all is well."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final, cast

import torch

from fx_fusion.doctor.check import Check, count_in_environment

#: The tools that know the links, and what prints them as a matrix.
_TOPOLOGY: Final = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopotype"))
_TOOL_SECONDS: Final = 30
#: Kinds of link between GPUs that are not PCIe: NV18 is 18 NVLinks.
_FAST_LINK: Final = re.compile(r"NV\d+|XGMI")


def gpu_count() -> int:
    """The GPUs torch sees; 0 also where asking fails."""
    try:
        return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    except Exception:  # a broken driver can raise anything
        return 0


def own_device() -> torch.device:
    """The GPU of this rank, as torchrun numbers the ranks of a host."""
    return torch.device("cuda", count_in_environment("LOCAL_RANK", 0) % max(1, gpu_count()))


def gpus() -> list[Check]:
    """Their names and memory."""
    count = gpu_count()
    if count == 0:
        seen = any(Path(f"/dev/{name}").exists() for name in ("nvidia0", "kfd"))
        if seen:
            text = "torch sees none, although the machine has a GPU's device file"
            remedy = (
                "Check the driver (nvidia-smi or rocm-smi), CUDA_VISIBLE_DEVICES, and that torch"
                " is a build for it."
            )
            return [Check("GPUs", "warn", text, remedy, shared="none")]
        return [Check("GPUs", "ok", "none; sites run on the CPU kernel", shared="none")]
    kinds: dict[str, int] = {}
    for index in range(count):
        properties = cast(Any, torch.cuda.get_device_properties(index))
        gigabytes = round(properties.total_memory / 2**30)
        kind = f"{torch.cuda.get_device_name(index)}, {gigabytes} GiB"
        kinds[kind] = kinds.get(kind, 0) + 1
    text = "; ".join(f"{number} x {kind}" for kind, number in kinds.items())
    if len(kinds) > 1:
        remedy = "Choose GPUs of one kind for a group, by CUDA_VISIBLE_DEVICES."
        return [Check("GPUs", "warn", f"of several kinds: {text}", remedy, shared=text)]
    return [Check("GPUs", "ok", text, shared=text)]


def peer_access() -> list[Check]:
    """Whether each GPU can read the memory of each other, which the GPU kernel does."""
    count = gpu_count()
    if count < 2:
        return []
    barred = [
        f"{one} to {other}"
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    if not barred:
        return [Check("peer access", "ok", f"between all {count} GPUs", shared="all")]
    remedy = (
        "Sites between these take the unfused path. Choose GPUs that reach each other, by"
        " CUDA_VISIBLE_DEVICES; on PCIe, look for ACS or IOMMU settings that bar it."
    )
    text = f"none from GPU {', '.join(barred)}"
    return [Check("peer access", "warn", text, remedy, shared=text)]


def links() -> list[Check]:
    """NVLink or XGMI between the GPUs, as the vendor's tool tells it."""
    if gpu_count() < 2:
        return []
    tool = next((command for command in _TOPOLOGY if shutil.which(command[0])), None)
    if tool is None:
        remedy = "Install nvidia-smi or rocm-smi to see the links."
        return [Check("links", "warn", "unknown: no tool that tells them", remedy)]
    try:
        done = subprocess.run(
            tool, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        )
        matrix = parse_topology(done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return [Check("links", "warn", f"unknown: {error}", f"Run {' '.join(tool)} by hand.")]
    kinds: dict[str, list[str]] = {}
    for one, row in enumerate(matrix):
        for other in range(one + 1, len(matrix)):
            kinds.setdefault(row[other], []).append(f"{one}-{other}")
    if not kinds:
        remedy = f"Run {' '.join(tool)} by hand."
        return [Check("links", "warn", f"{tool[0]} printed no matrix of GPUs", remedy)]
    pairs = sum(map(len, kinds.values()))
    text = "; ".join(
        f"{kind} between " + ("all GPUs" if len(found) == pairs else ", ".join(found))
        for kind, found in kinds.items()
    )
    if all(_FAST_LINK.match(kind) for kind in kinds):
        return [Check("links", "ok", text, shared=text)]
    remedy = "Put the ranks of a group on GPUs with NVLink or XGMI between them, if there are."
    return [Check("links", "warn", text, remedy, shared=text)]


def parse_topology(text: str) -> list[list[str]]:
    """The matrix of link kinds between GPUs, from what nvidia-smi or rocm-smi prints."""
    rows = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        cells = line.split()
        # the header starts with a GPU's name too, and goes on with another's
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and cells[1:2] != ["GPU1"]:
            rows.append(cells[1:])
    return [row[: len(rows)] for row in rows if len(row) >= len(rows) > 1]


def symmetric_memory() -> list[Check]:
    """Whether torch's symmetric memory, which the GPU kernel works over, can be had."""
    if gpu_count() == 0:
        return []
    remedy = (
        "Sites on GPUs take the unfused path. Containers need a common process namespace and"
        " temporary folder; see TORCH_SYMMMEM in torch's documentation."
    )
    try:
        import torch.distributed._symmetric_memory as symmetric

        cast(Any, symmetric).empty(1024, dtype=torch.uint8, device=own_device())
    except Exception as error:  # drivers and builds fail in ways of their own
        return [Check("symmetric memory", "warn", f"none: {error}", remedy, shared="none")]
    return [Check("symmetric memory", "ok", f"allocated on {own_device()}", shared="there")]


def rendezvous(group_name: str) -> Check:
    """Whether the ranks of a group can map each other's memory. Collective: call it on all."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        memory = cast(Any, symmetric).empty(1024, dtype=torch.uint8, device=own_device())
        handle = cast(Any, symmetric).rendezvous(memory, group_name)
        text = f"{handle.world_size} ranks map each other's memory"
        return Check("rendezvous", "ok", text)
    except Exception as error:  # drivers and builds fail in ways of their own
        remedy = (
            "Sites of this group take the unfused path. Ranks that share a GPU need"
            " TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; others need peer access."
        )
        return Check("rendezvous", "warn", f"failed: {error}", remedy)
