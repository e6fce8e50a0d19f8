"""The kernels that a model's sites usually need, compiled and loaded ahead of the first call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch

from fx_fusion.lowering import gpu_build, gpu_kernel, gpu_local
from fx_fusion.lowering.arguments import Arguments
from fx_fusion.lowering.gpu_layout import rows_per_launch
from fx_fusion.lowering.gpu_select import gpu_takes_local
from fx_fusion.lowering.gpu_workspace import GpuWorkspace


def load_usual_variants(
    workspace: GpuWorkspace, max_tokens: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Compile and load the kernels of the usual sites, for calls of up to `max_tokens` tokens.

    That is for every spread of a row that so many tokens get, and the local kernel's as well.
    Compiling takes a few tenths of a second a variant, and uses this rank's share of the cores.

    Args:
        workspace: The group's.
        max_tokens: Of a call, at most.
        hidden_size: Elements of a row.
        dtype: Of the all-reduced tensor, the residual and the weight.
    """
    machine = gpu_local.machine_of(workspace.device.index)
    if machine is not None and not gpu_takes_local("auto", machine.arch, hidden_size):
        machine = None
    sites = list(usual_sites(workspace, hidden_size, dtype))
    calls = [
        (site, rows, algorithm)
        for site in sites
        for algorithm, rows in _sizes(workspace, max_tokens, hidden_size, dtype)
    ]
    local_rows: list[int] = []
    if machine is not None:  # more rows than multiprocessors get one spread
        local_rows = [*range(1, min(max_tokens, machine.multiprocessors) + 1), max_tokens]
    variants = {gpu_kernel.variant_for(a, rows, workspace, name) for a, rows, name in calls}
    if machine is not None:
        variants |= {gpu_local.variant_for(a, n, machine) for a in sites for n in local_rows}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    gpu_build.compile_ahead(variants, workspace.arch, cores // workspace.group.size())
    for arguments, rows, algorithm in calls:
        gpu_kernel.launcher_for(arguments, rows, workspace, algorithm)
    if machine is not None:
        for arguments, rows in itertools.product(sites, local_rows):
            gpu_local.launcher_for(arguments, rows, machine)


def usual_sites(
    workspace: GpuWorkspace, hidden_size: int, dtype: torch.dtype
) -> Iterator[Arguments]:
    """A call of one token of each usual site: residual and weight of x's dtype.

    The norm is cast before the weight or after, and the new residual is wanted or not.
    """
    x = torch.empty(1, hidden_size, dtype=dtype, device=workspace.device)
    name, size = workspace.group.group_name, workspace.group.size()
    for norm_dtype, want_residual in itertools.product((dtype, None), (True, False)):
        yield Arguments(
            x,
            x,
            x[0],
            None,
            0.0,
            name,
            size,
            norm_dtype=norm_dtype,
            want_residual=want_residual,
        )


def _sizes(
    workspace: GpuWorkspace, max_tokens: int, hidden_size: int, dtype: torch.dtype
) -> Iterator[tuple[str, int]]:
    """Algorithms and numbers of rows of the launches that calls may have."""
    size = workspace.group.size()
    for algorithm in ("one-shot", "two-shot") if size > 2 else ("one-shot",):
        most = rows_per_launch(hidden_size, dtype.itemsize, size, algorithm)
        for rows in range(1, min(max_tokens, most) + 1):
            yield algorithm, rows
