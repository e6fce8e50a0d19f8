"""Run a call on a GPU kernel: choose the variant, fill in the parameters, launch.

Equal to the eager lines of `unfused.py`, with the sum over ranks in rank order in fp32. Reduced
value and hidden state are bitwise equal to that, the norm is within one ulp (another order of
adding up the squares). A row's bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fx_fusion.lowering.arguments import Arguments, Results, aligned, empty_results
from fx_fusion.lowering.gpu_layout import (
    MAX_WORLD_SIZE,
    Geometry,
    rows_per_launch,
)
from fx_fusion.lowering.gpu_loaded import (
    CALL,
    HIDDEN,
    WORKSPACE,
    Loaded,
    has_programmatic_launch,
)
from fx_fusion.lowering.gpu_variant import (
    Variant,
    bias_out_dtype,
    has_scale,
    spread_of,
    variant_of,
)
from fx_fusion.lowering.gpu_workspace import GpuWorkspace


class Launcher(Loaded):
    """One variant for one hidden size on one workspace, ready to launch.

    A launch has no more clusters than are on the GPU at once: they wait for the peers'.
    """

    def __init__(
        self, arguments: Arguments, shape: Geometry, workspace: GpuWorkspace, algorithm: str
    ) -> None:
        """Compile or fetch the variant, load it, and fill in what stays the same."""
        super().__init__(arguments, shape, algorithm, workspace.arch, workspace.context)
        capacity = self._function.clusters_at_once(workspace.multiprocessors)
        if shape.cluster > 1:
            capacity = min(capacity, self._function.device_clusters() // workspace.sharers)
        if workspace.block_limit:
            capacity = min(capacity, workspace.block_limit // shape.cluster)
        self.capacity = max(1, capacity)
        group, layout = workspace.group, workspace.layout
        region = layout.region(algorithm)
        rank, own = group.rank(), workspace.addresses[group.rank()]
        buffers = [address + region.buffer for address in workspace.addresses]
        WORKSPACE.pack_into(
            self._parameters,
            CALL.size + HIDDEN.size,
            rank,
            region.segments,
            workspace.timeout_nanoseconds,
            own + region.state,
            own + layout.control,
            workspace.host_address,
            *buffers,
            *[0] * (MAX_WORLD_SIZE - len(buffers)),
        )


def run(
    arguments: Arguments,
    workspace: GpuWorkspace,
    algorithm: str = "one-shot",
    results: Results | None = None,
) -> Results:
    """Run one call on a kernel, on the current stream.

    Args:
        arguments: The op's.
        workspace: The group's.
        algorithm: "one-shot" or "two-shot", the same on all ranks.
        results: Where to write, contiguous and aligned to 16 bytes, the residual's memory
            among it if need be; None for new tensors.

    Raises:
        PeerTimeoutError: An earlier call failed, here or in a graph's replay.
    """
    workspace.check()
    index = arguments.x.device.index
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return run(arguments, workspace, algorithm, results)
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    with workspace.lock:
        workspace.order(stream)
        return enqueue(arguments, workspace, stream, algorithm, results)


def enqueue(
    arguments: Arguments,
    workspace: GpuWorkspace,
    stream: int,
    algorithm: str = "one-shot",
    results: Results | None = None,
) -> Results:
    """Put one call into the stream, as one launch or more; the workspace's lock is held.

    Args:
        arguments: The op's.
        workspace: The group's.
        stream: The raw handle of the current stream.
        algorithm: "one-shot" or "two-shot", the same on all ranks.
        results: Where to write, contiguous and aligned to 16 bytes; None for new tensors.
    """
    rows = arguments.x.numel() // arguments.x.shape[-1]
    scale_dtype = bias_out_dtype(arguments)
    listed = launches(arguments, rows, workspace, algorithm)
    return submit(arguments, listed, stream, scale_dtype, results)


def submit(
    arguments: Arguments,
    listed: Sequence[tuple[Loaded, int, int]],
    stream: int,
    scale_dtype: torch.dtype,
    results: Results | None = None,
) -> Results:
    """Put the launches of one call into the stream.

    Args:
        arguments: The op's.
        listed: The launches, as `launches` gives them.
        stream: The raw handle of the current stream.
        scale_dtype: What a scale on the GPU is rounded to first.
        results: Where to write, contiguous and aligned to 16 bytes; None for new tensors.
    """
    x = aligned(arguments.x)
    residual, weight, bias = (
        None if value is None else aligned(value)
        for value in (arguments.residual, arguments.weight, arguments.bias)
    )
    results = empty_results(arguments) if results is None else results
    hidden_size = x.shape[-1]
    eps, eps_tensor = _scalar(arguments.eps, arguments.eps_tensor, torch.float32)
    scale, scale_tensor = _scalar(arguments.scale, arguments.scale_tensor, scale_dtype)
    # (address, bytes from row to row) of what a launch reads and writes
    arrays = (
        (x.data_ptr(), hidden_size * x.element_size()),
        _array(residual, hidden_size),
        _array(weight, 0),
        _array(bias, 0),
        _array(eps_tensor, 0),
        _array(scale_tensor, 0),
        _array(results.norm, hidden_size),
        _array(results.residual, hidden_size),
        _array(results.reduced, hidden_size),
        _array(results.rstd, 1),
    )
    for launcher, first, count in listed:
        pointers = tuple(address + first * stride for address, stride in arrays)
        launcher.launch(pointers, count, eps, scale, stream)
    return results


def launches(
    arguments: Arguments, rows: int, workspace: GpuWorkspace, algorithm: str = "one-shot"
) -> list[tuple[Launcher, int, int]]:
    """The launches of a call of so many rows: the variant, its first row, its number of rows.

    They depend on the rows and on what is the same in every call of a site, no more.
    """
    x = arguments.x
    most = rows_per_launch(x.shape[-1], x.element_size(), arguments.world_size, algorithm)
    counts = [(first, min(most, rows - first)) for first in range(0, rows, most)]
    return [
        (launcher_for(arguments, count, workspace, algorithm), first, count)
        for first, count in counts
    ]


def variant_for(
    arguments: Arguments, rows: int, workspace: GpuWorkspace, algorithm: str
) -> Variant:
    """What a launch of so many rows of a call runs."""
    return variant_of(arguments, _spread(arguments, rows, workspace, algorithm), algorithm)


def launcher_for(
    arguments: Arguments, rows: int, workspace: GpuWorkspace, algorithm: str = "one-shot"
) -> Launcher:
    """The variant of a launch of so many rows of a call, loaded; compiled if need be."""
    shape = _spread(arguments, rows, workspace, algorithm)
    key = (algorithm, shape, *variant_key(arguments))
    launcher: Launcher | None = workspace.launchers.get(key)
    if launcher is None:
        launcher = workspace.launchers[key] = Launcher(arguments, shape, workspace, algorithm)
    return launcher


def _spread(
    arguments: Arguments, rows: int, workspace: GpuWorkspace, algorithm: str
) -> Geometry:
    clusters = has_programmatic_launch(workspace.arch)
    return spread_of(arguments, rows, workspace.multiprocessors, clusters, algorithm)


def variant_key(arguments: Arguments) -> tuple[Any, ...]:
    """What of a call, beside algorithm and spread, chooses the variant and its parameters."""
    x = arguments.x
    return (
        x.dtype,
        x.shape[-1],
        None if arguments.residual is None else arguments.residual.dtype,
        None if arguments.weight is None else arguments.weight.dtype,
        None if arguments.bias is None else arguments.bias.dtype,
        has_scale(arguments),
        arguments[10:19],  # from add_dtype to want_rstd
    )


def _array(tensor: torch.Tensor | None, row: int) -> tuple[int, int]:
    if tensor is None or tensor.numel() == 0:
        return 0, 0
    return tensor.data_ptr(), row * tensor.element_size()


def _scalar(
    number: float, tensor: torch.Tensor | None, dtype: torch.dtype
) -> tuple[float, torch.Tensor | None]:
    """A scalar as torch's kernels take it: a CPU tensor by value, a GPU tensor in `dtype`."""
    if tensor is None:
        return number, None
    if tensor.device.type == "cpu":
        return float(tensor.item()), None
    return 0.0, tensor.to(dtype).to(torch.float32)
