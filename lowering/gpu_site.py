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
import functools
from typing import Any, cast

import torch
import torch.distributed as dist

from fx_fusion import compat
from fx_fusion.lowering import dispatch, gpu_driver, gpu_kernel
from fx_fusion.lowering.arguments import Results, is_aligned
from fx_fusion.lowering.gpu_launch import entry_point, launch_library
from fx_fusion.lowering.gpu_learned import Learned
from fx_fusion.lowering.gpu_unfused_site import UnfusedSite
from fx_fusion.lowering.gpu_workspace import GpuWorkspace
from fx_fusion.lowering.groups import checked_group
from fx_fusion.lowering.site_call import Number, Tensor, arguments_of, copy_results


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
        self._learned = Learned(self._eps, self._scale)
        self.site = self._learned.site
        self._address = ctypes.addressof(self.site)
        self._group: dist.ProcessGroup | None = None
        self._workspace: GpuWorkspace | None = None
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
        self._run(stream, rows, eps, scale, tensors[:4], Results(*cast(Any, tensors[4:])))

    def _run(
        self,
        stream: int,
        rows: int,
        eps: Number,
        scale: Number,
        inputs: Any,
        results: Results,
    ) -> None:
        """The op's own way, into given results; learns the launches."""
        arguments = arguments_of(self._constants, eps, scale, *inputs)
        if arguments.x.numel() == 0:
            return
        group = checked_group(arguments.group_name, arguments.world_size)
        dispatch.meet_once(arguments, group)
        workspace = dispatch.gpu_workspace_for(arguments, group)
        if workspace is None:
            made = dispatch.run_other_kernel(arguments, group)
            if made is None:
                self._unfused.run(stream, eps, scale, arguments, group, results)
            else:
                copy_results(made, results)
            return
        algorithm = dispatch.gpu_algorithm_for(arguments)
        workspace.check()
        if workspace is not self._workspace or group is not self._group:
            self._learned.forget()
            self._group, self._workspace = group, workspace
        with workspace.lock:
            workspace.order(stream)
            if all(map(is_aligned, results)):
                gpu_kernel.enqueue(arguments, workspace, stream, algorithm, results)
            else:
                made = gpu_kernel.enqueue(arguments, workspace, stream, algorithm)
                copy_results(made, results)
            if self._learned.wants(rows, workspace.arch):
                listed = gpu_kernel.launches(arguments, rows, workspace, algorithm)
                words = workspace.host_address, ctypes.addressof(workspace.stream_word)
                self._learned.learn(arguments, group, listed, *words)

    @functools.cached_property
    def _unfused(self) -> UnfusedSite:
        """Most sites never need it."""
        return UnfusedSite(self._constants, may_overwrite_x=self._may_overwrite_x)

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
