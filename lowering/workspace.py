"""`prepare` and `close`: a group's shared memory, made and given up when the caller says."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.gpu_select import AMD_ARCHS
from fx_fusion.lowering.select import full_plan

log = logging.getLogger(__name__)


def prepare(
    group: dist.ProcessGroup | str | None = None,
    *,
    max_tokens: int | None = None,
    hidden_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    block_limit: int | None = None,
    kernel: str = "auto",
) -> bool:
    """Make what the fused op shares among the ranks of a group, ahead of its first call.

    Call it on every rank before capturing a CUDA graph; otherwise the first call does the same.
    Collective over `group`. Calling it again costs little.

    Args:
        group: The process group or its name; None for the default group.
        max_tokens: With `hidden_size`, kernels for up to so many tokens are compiled and loaded
            too. Memory doesn't depend on it: longer calls stream through in chunks.
        hidden_size: Elements of a row.
        dtype: Of the all-reduced tensor and of the residual.
        device: Where the model is; None for the current GPU if there is one, else the CPU.
        block_limit: Blocks of a launch at most, the same on all ranks; 0 for as many as fit,
            None leaves it as it is. For ranks that share a GPU: their waiting blocks have to
            leave multiprocessors to the other kernels that the waiting depends on.
        kernel: The option that the model is compiled with. On AMD's GPUs, where our kernels
            have not been run, "auto" makes nothing and "fx_fusion" makes what they need.

    Returns:
        True if calls of this group will run on a kernel of ours, False if on the unfused path;
        a WARNING says why. The same on every rank.

    Raises:
        PlanMismatchError: The ranks disagree about versions or sources.
        CaptureError: A CUDA graph is being captured.
    """
    made = _group(group)
    where = _device(device)
    if where.type != "cuda":
        from fx_fusion.lowering.cpu_workspace import cpu_workspace

        return bool(cpu_workspace(made.group_name, made, full_plan("")).usable)
    if kernel != "fx_fusion" and device_arch(where) in AMD_ARCHS:
        log.warning(
            "fx_fusion: prepare made nothing for group %s: our kernels have not been run on %s"
            ' yet; kernel="fx_fusion" turns them on',
            made.group_name,
            device_arch(where),
        )
        return False
    from fx_fusion.lowering.gpu_workspace import gpu_workspace

    workspace = gpu_workspace(made, where)
    if workspace.lacks_compiler:
        return _prepare_triton(made, where, hidden_size, dtype, block_limit)
    if workspace.usable and block_limit not in (None, workspace.block_limit):
        workspace.block_limit = block_limit or 0
        workspace.launchers.clear()
    if workspace.usable and hidden_size is not None and max_tokens is not None:
        from fx_fusion.lowering.gpu_usual import load_usual_variants

        load_usual_variants(workspace, max_tokens, hidden_size, dtype)
    if workspace.usable:
        torch.cuda.synchronize(where)
        dist.barrier(made)
    return workspace.usable


def _prepare_triton(
    group: dist.ProcessGroup,
    device: torch.device,
    hidden_size: int | None,
    dtype: torch.dtype,
    block_limit: int | None,
) -> bool:
    """The same for the kernel in Triton, which has one variant for any number of tokens."""
    from fx_fusion.lowering import triton_kernel
    from fx_fusion.lowering.gpu_usual import usual_sites
    from fx_fusion.lowering.triton_workspace import triton_workspace

    workspace = triton_workspace(group, device)
    if workspace.usable:
        if block_limit is not None:
            workspace.block_limit = block_limit
        if hidden_size is not None:
            for arguments in usual_sites(workspace, hidden_size, dtype):
                triton_kernel.load(arguments, workspace)
        torch.cuda.synchronize(device)
        dist.barrier(group)
    return workspace.usable


def close(
    group: dist.ProcessGroup | str | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give up what `prepare` or the first call made. Collective over `group`.

    Later calls of the group take the unfused path; CUDA graphs that hold the fused op may not
    be replayed any more.
    """
    made = _group(group)
    where = _device(device)
    if where.type == "cuda":
        from fx_fusion.lowering import foreign, triton_workspace
        from fx_fusion.lowering.gpu_workspace import gpu_workspace

        workspace = gpu_workspace(made, where)
        workspace.close()
        triton_workspace.close(made, where, also_later=workspace.lacks_compiler)
        foreign.close(made)
    else:
        from fx_fusion.lowering.cpu_workspace import close_cpu_workspace

        close_cpu_workspace(made.group_name, made)


def _group(group: dist.ProcessGroup | str | None) -> dist.ProcessGroup:
    found: Any = group
    c10d = cast(Any, distributed_c10d)
    if found is None:
        found = c10d._get_default_group()
    elif isinstance(found, str):
        found = c10d._resolve_process_group(found)
    return cast(dist.ProcessGroup, found)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if str(chosen) == "cuda":  # without an index
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
