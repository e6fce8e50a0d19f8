"""A site of generated CPU code, bound to its constants: what is left a call is little.

The dispatcher takes about 25 us for the op's twenty arguments, more than the kernel itself at a
few tokens. Generated code therefore makes one CpuSite a site when it is loaded, and calls it
with the tensors alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from fx_fusion.lowering import dispatch, unfused
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.cpu_kernel import BoundCall
from fx_fusion.lowering.groups import checked_group, current_group

#: The tensor arguments, in the order of a call.
TENSORS: Final = ("x", "residual", "weight", "bias", "eps_tensor", "scale_tensor")


class CpuSite:
    """One site's constants and what they come to; called with its tensors.

    Equal to `torch.ops.fx_fusion.all_reduce_add_rms_norm` with the same arguments, and it
    takes the same path: the kernel where the group has a workspace, else unfused.
    """

    def __init__(self, **constants: Any) -> None:
        """Take every argument of the op that isn't a tensor."""
        self._constants: dict[str, Any] = constants
        self._name: str = constants["group_name"]
        self._group: dist.ProcessGroup | None = None
        self._bound: BoundCall | None = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps_tensor: torch.Tensor | None,
        scale_tensor: torch.Tensor | None,
    ) -> Results:
        """Run the site; a name may stand for another group after destroy and init."""
        bound = self._bound
        if (
            bound is None
            or not bound.usable
            or x.numel() == 0
            or current_group(self._name) is not self._group
        ):
            given = (residual, weight, bias, eps_tensor, scale_tensor)
            named: dict[str, Any] = dict(zip(TENSORS[1:], given, strict=True))
            return self._first(Arguments(x=x, **named, **self._constants))
        return bound.run(x, residual, weight, bias, eps_tensor, scale_tensor)

    def _first(self, arguments: Arguments) -> Results:
        """The way of the op itself; binds the kernel's call for the next ones."""
        group = checked_group(self._name, arguments.world_size)
        workspace = dispatch.cpu_workspace_for(arguments, group)
        self._group, self._bound = group, None
        if workspace is None:
            return unfused.run(arguments, group)
        self._bound = BoundCall(arguments, workspace)
        return self._bound.run_arguments(arguments)
