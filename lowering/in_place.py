"""The op that writes the hidden state over the residual, as the dispatcher runs it.

It is on the path of the op that leaves the residual alone, and gives the same bits. Our kernels
write to the residual itself: a thread has read its elements of it before it writes them, and
reads no other thread's. What runs elsewhere is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fx_fusion.lowering import dispatch
from fx_fusion.lowering.arguments import Arguments, Results, is_aligned, result_dtypes


def check(arguments: Arguments) -> None:
    """Raise ValueError unless the hidden state is wanted and fits where the residual is."""
    residual = arguments.residual
    _, hidden_dtype = result_dtypes(arguments)
    if residual is None or not arguments.want_residual:
        raise ValueError(
            "want_residual=False: what is written to the residual is the hidden state; give"
            " want_residual=True, or call all_reduce_add_rms_norm."
        )
    if residual.dtype != hidden_dtype:
        raise ValueError(
            f"residual is {residual.dtype} and the hidden state {hidden_dtype}, which can't be"
            f" written to it; cast it to {hidden_dtype}, or call all_reduce_add_rms_norm."
        )


def run(arguments: Arguments, group: dist.ProcessGroup) -> Results:
    """Run one call; the hidden state is in the residual, its own result is empty.

    Args:
        arguments: The op's, as `check` wants them; no other tensor shares the residual's memory.
        group: The group that they name.
    """
    residual = arguments.residual
    assert residual is not None
    results = None
    if residual.is_contiguous() and is_aligned(residual):
        results = _run_into(residual, arguments, group)
    if results is None:  # layout is a local fact: it costs a copy, and chooses no other path
        results = dispatch.run(arguments, group)
        residual.copy_(results.residual)
    return results._replace(residual=residual.new_empty(0))


def _run_into(
    residual: torch.Tensor, arguments: Arguments, group: dist.ProcessGroup
) -> Results | None:
    """Run on a kernel that writes where it is told; None if the call isn't one of its."""
    device = arguments.x.device.type
    workspace: Any = None
    if device == "cpu":
        workspace = dispatch.cpu_workspace_for(arguments, group)
    elif device == "cuda":
        dispatch.meet_once(arguments, group)
        workspace = dispatch.gpu_workspace_for(arguments, group)
    if workspace is None:
        return None
    from fx_fusion.lowering import cpu_kernel, gpu_kernel

    results = gpu_kernel.empty_results(arguments._replace(want_residual=False))
    results = results._replace(residual=residual)
    if device == "cpu":
        cpu_kernel.run_into(arguments, workspace, results)
        return results
    algorithm = dispatch.gpu_algorithm_for(arguments)
    return gpu_kernel.run(arguments, workspace, algorithm, results)
