"""Run a call on the Triton kernel, where the CUDA kernel can't run on every rank.

Equal to these eager lines, with the sum over ranks in rank order in fp32. Reduced value and
hidden state are bitwise equal to them, the norm is within one ulp (another order of adding up
the squares):

    reduced = all_reduce(x)                                # rounded to x's dtype
    h = residual + (reduced.to(add_dtype) + bias) * scale  # each step rounds
    norm = h.float() * rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    norm = (norm.to(norm_dtype) * weight).to(out_dtype)

A row is the work of one program, so its bits depend on nothing but the row.
"""

from __future__ import annotations

import torch

from fx_fusion.lowering import triton_build
from fx_fusion.lowering.arguments import Arguments, Results, aligned, empty_results
from fx_fusion.lowering.gpu_kernel import _scalar, variant_key
from fx_fusion.lowering.gpu_variant import bias_out_dtype
from fx_fusion.lowering.triton_layout import region_of
from fx_fusion.lowering.triton_workspace import TritonWorkspace


def run(arguments: Arguments, workspace: TritonWorkspace) -> Results:
    """Run one call on the kernel; results are new contiguous tensors.

    Raises:
        PeerTimeoutError: An earlier call failed, here or in a graph's replay.
    """
    workspace.check()
    index = arguments.x.device.index
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(arguments, workspace)
    with workspace.lock:
        workspace.order(torch._C._cuda_getCurrentRawStream(index))
        return enqueue(arguments, workspace)


def enqueue(arguments: Arguments, workspace: TritonWorkspace) -> Results:
    """Put one call into the current stream, as one launch or more; the lock is held.

    More rows than the ring holds go in several launches, the same ones on every rank.
    """
    hidden_size = arguments.x.shape[-1]
    rows = arguments.x.numel() // hidden_size
    most = region_of(hidden_size, arguments.x.element_size(), arguments.world_size).rows
    chunks = [(first, min(most, rows - first)) for first in range(0, rows, most)]
    return _launch(arguments, workspace, chunks)


def load(arguments: Arguments, workspace: TritonWorkspace) -> None:
    """Compile and load the kernel of a site, by a launch of no rows; any tokens will do.

    Not collective. `workspace.lock` is taken here.
    """
    with workspace.lock, torch.cuda.device(arguments.x.device):
        _launch(arguments, workspace, [(0, 0)])


def _launch(
    arguments: Arguments, workspace: TritonWorkspace, chunks: list[tuple[int, int]]
) -> Results:
    """One launch for each chunk, (its first row, its rows)."""
    key = variant_key(arguments)
    constants = workspace.launchers.get(key)
    if constants is None:
        constants = workspace.launchers[key] = {
            **triton_build.steps_of(arguments),
            **triton_build.exchange_of(arguments, workspace.machine),
            **triton_build.launch_options(arguments.x.shape[-1]),
        }
    tensors, numbers, results = _operands(arguments)
    kernel = triton_build.kernels().one_shot
    for first, count in chunks:
        # No more programs than are on the GPU at once: they wait for the peers'.
        programs = max(1, min(count, workspace.programs))
        kernel[(programs,)](*tensors, workspace.table, first, count, *numbers, **constants)
    return results


def add_rms_norm(arguments: Arguments) -> Results:
    """What follows the sum, for an x that is the sum over ranks already: no exchange."""
    hidden_size = arguments.x.shape[-1]
    rows = arguments.x.numel() // hidden_size
    tensors, numbers, results = _operands(arguments)
    constants = {
        **triton_build.steps_of(arguments),
        **triton_build.launch_options(hidden_size),
    }
    if rows:
        kernel = triton_build.kernels().local
        kernel[(min(rows, 65535),)](*tensors, rows, *numbers, **constants)
    return results


def _operands(
    arguments: Arguments,
) -> tuple[list[torch.Tensor | None], tuple[float, float], Results]:
    """The kernels' tensors in their order, None where absent; eps and scale; the results."""
    results = empty_results(arguments)
    eps, eps_tensor = _scalar(arguments.eps, arguments.eps_tensor, torch.float32)
    scale, scale_tensor = _scalar(
        arguments.scale, arguments.scale_tensor, bias_out_dtype(arguments)
    )
    inputs = (arguments.residual, arguments.weight, arguments.bias)
    tensors: list[torch.Tensor | None] = [aligned(arguments.x)]
    tensors += [None if value is None else aligned(value) for value in inputs]
    tensors += [eps_tensor, scale_tensor]
    tensors += [value if value.numel() else None for value in results]
    return tensors, (float(eps), float(scale)), results
