"""A site of generated GPU code: its constants, its launches as learned, and the way around them.

Generated code makes one entry point a site when it is loaded, and calls it with the stream, the
number of rows, the tensors and planned results:

    site = gpu_site(eps=1e-06, group_name='0', world_size=2, ...)
    site(get_raw_stream(0), 8, None, None, buf4, arg3_1, arg4_1, None, buf5, buf6, None, None)

The entry point is the launcher in C. The first call with each number of rows, and whatever else
the launcher doesn't cover, comes to `GpuSite`, which takes the path that the op itself takes.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fx_fusion import compat
from fx_fusion.lowering import dispatch, gpu_driver, gpu_kernel
from fx_fusion.lowering.arguments import Arguments, Results, is_aligned, result_dtypes
from fx_fusion.lowering.gpu_launch import (
    Call,
    Kernel,
    Launch,
    Site,
    entry_point,
    kernel_of,
    launch_library,
)
from fx_fusion.lowering.gpu_workspace import GpuWorkspace
from fx_fusion.lowering.groups import checked_group
from fx_fusion.lowering.site_call import Number, Tensor, arguments_of, copy_results

#: Numbers of rows whose launches a site keeps; calls with more of them cost what they cost now.
MOST_CALLS: Final = 1024


def gpu_site(**constants: Any) -> Any:
    """The entry point of a site; takes what `GpuSite` takes."""
    site = GpuSite(**constants)
    return entry_point(site.site, site, compat.registered_groups())


class GpuSite:
    """One site's constants and its launches so far.

    Equal to `torch.ops.fx_fusion.all_reduce_add_rms_norm` with the same arguments, whose
    results it writes where it is told, and on the same path.

    Attributes:
        site: What the launcher in C reads.
    """

    def __init__(self, *, may_overwrite_x: bool = False, **constants: Any) -> None:
        """Take every argument of the op that isn't a tensor.

        `may_overwrite_x`: nobody reads x after the site.
        """
        self._may_overwrite_x = may_overwrite_x
        self._constants: dict[str, Any] = constants
        self._eps = float(constants["eps"])
        self._scale = float(constants.get("scale", 1.0))
        self.site = Site(eps=self._eps, scale=self._scale)
        self._address = ctypes.addressof(self.site)
        self._group: dist.ProcessGroup | None = None
        self._workspace: GpuWorkspace | None = None
        self._kernels: dict[gpu_kernel.Launcher, Kernel] = {}
        self._calls: dict[int, tuple[Any, int]] = {}
        self._groups = compat.registered_groups()
        launcher = launch_library()
        self._library: Any = None if launcher.has_entry else launcher.library

    def __call__(
        self,
        stream: int,
        rows: int,
        eps: Number,
        scale: Number,
        x: torch.Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: Tensor,
        hidden: Tensor,
        reduced: Tensor,
        rstd: Tensor,
    ) -> None:
        """Run the site on a stream of x's device, which is the current one.

        Args:
            stream: The raw handle of the current stream.
            rows: Rows of x.
            eps: A number or 0-d tensor in place of the constant; None for the constant.
            scale: The same for the factor.
            x: As the op takes it, and with it residual, weight and bias.
            residual: See x.
            weight: See x.
            bias: See x.
            norm: Where results go, contiguous, of the op's dtypes; None where not wanted.
            hidden: See norm.
            reduced: See norm.
            rstd: See norm.

        Raises:
            PeerTimeoutError: An earlier call failed, here or in a graph's replay.
        """
        tensors = (x, residual, weight, bias, norm, hidden, reduced, rstd)
        if self._library is not None and self._launched(stream, rows, eps, scale, tensors):
            return
        self._run(stream, eps, scale, tensors[:4], Results(*cast(Any, tensors[4:])))

    def _run(
        self, stream: int, eps: Number, scale: Number, inputs: Any, results: Results
    ) -> None:
        """The op's own way, into given results; learns the launches."""
        arguments = arguments_of(self._constants, eps, scale, *inputs)
        if arguments.x.numel() == 0:
            return
        group = checked_group(arguments.group_name, arguments.world_size)
        dispatch.meet_once(arguments, group)
        workspace = dispatch.gpu_workspace_for(arguments, group)
        if workspace is None:
            made = dispatch.run(
                arguments, group, results, may_overwrite_x=self._may_overwrite_x
            )
            copy_results(made, results)
            return
        algorithm = dispatch.gpu_algorithm_for(arguments)
        workspace.check()
        if workspace is not self._workspace or group is not self._group:
            self._forget()
            self._group, self._workspace = group, workspace
        with workspace.lock:
            workspace.order(stream)
            if all(map(is_aligned, results)):
                gpu_kernel.enqueue(arguments, workspace, stream, algorithm, results)
            else:
                made = gpu_kernel.enqueue(arguments, workspace, stream, algorithm)
                copy_results(made, results)
            self._learn(arguments, workspace, algorithm)
        tensor = arguments.eps_tensor
        self.site.takes_eps_pointer = (
            tensor is not None
            and tensor.dtype == torch.float32
            and tensor.device == arguments.x.device
        )

    def _forget(self) -> None:
        """Drop what was learned: another group or workspace, or none."""
        self.site.call_count = 0
        self._calls.clear()
        self._kernels.clear()
        self._group = self._workspace = None

    def _learn(self, arguments: Arguments, workspace: GpuWorkspace, algorithm: str) -> None:
        """Leave the launches of this number of rows to the launcher in C."""
        rows = arguments.x.numel() // arguments.x.shape[-1]
        if rows in self._calls or len(self._calls) == MOST_CALLS:
            return
        if not workspace.arch.startswith("sm_") or launch_library().library is None:
            return
        made = gpu_kernel.launches(arguments, rows, workspace, algorithm)
        launches = (Launch * len(made))()
        for launch, (launcher, first, count) in zip(launches, made, strict=True):
            if launcher not in self._kernels:
                self._kernels[launcher] = kernel_of(launcher.function, launcher.parameters)
            launch.kernel = ctypes.pointer(self._kernels[launcher])
            launch.first, launch.rows = first, count
            launch.clusters = launcher.clusters(count)
        self._calls[rows] = launches, len(made)
        calls = (Call * len(self._calls))()
        for call, (number, (array, count)) in zip(
            calls, sorted(self._calls.items()), strict=True
        ):
            call.rows, call.count = number, count
            call.launches = ctypes.cast(array, ctypes.POINTER(Launch))
        site = self.site
        if site.call_count == 0:
            site.launch = gpu_driver.launch_address()
            site.failed = workspace.host_address
            site.stream = ctypes.addressof(workspace.stream_word)
            site.group = id(self._group)
            site.strides[:] = _strides(arguments)
        site.calls = ctypes.cast(calls, ctypes.POINTER(Call))
        site.call_count = len(calls)

    def _launched(
        self, stream: int, rows: int, eps: Number, scale: Number, tensors: tuple[Tensor, ...]
    ) -> bool:
        """Launch through ctypes; False if this call isn't one that was learned."""
        if not self.site.call_count or self._group not in self._groups:
            return False
        if isinstance(eps, torch.Tensor) or isinstance(scale, torch.Tensor):
            return False
        one, two, three, four, *others = (0 if t is None else t.data_ptr() for t in tensors)
        arrays = (ctypes.c_void_p * 10)(one, two, three, four, 0, 0, *others)
        status = self._library.fx_fusion_launch(
            self._address,
            stream,
            rows,
            self._eps if eps is None else eps,
            self._scale if scale is None else scale,
            arrays,
        )
        if status < 0:
            raise gpu_driver.DriverError(f"cuLaunchKernelEx failed with error {-status}")
        return bool(status == 0)


def _strides(arguments: Arguments) -> tuple[int, ...]:
    """Bytes from row to row of what a launch reads and writes, in its order."""
    x, residual = arguments.x, arguments.residual
    hidden_size = x.shape[-1]
    norm_dtype, hidden_dtype = result_dtypes(arguments)
    return (
        hidden_size * x.element_size(),
        0 if residual is None else hidden_size * residual.element_size(),
        0,
        0,
        0,
        0,
        hidden_size * norm_dtype.itemsize,
        hidden_size * hidden_dtype.itemsize,
        hidden_size * x.element_size(),
        torch.float32.itemsize,
    )
