"""A site of generated CPU code, bound to its constants: what is left a call is little.

The dispatcher takes about 25 us for the op's twenty arguments, more than the kernel itself at a
few tokens. Generated code therefore makes one CpuSite a site when it is loaded, and calls it
with the tensors and the planned results alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fx_fusion.lowering import dispatch, unfused
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.cpu_kernel import BoundCall
from fx_fusion.lowering.groups import checked_group, current_group
from fx_fusion.lowering.site_call import Number, Tensor, arguments_of, copy_results


class CpuSite:
    """One site's constants and what they come to; called with its tensors.

    Equal to `torch.ops.fx_fusion.all_reduce_add_rms_norm` with the same arguments, whose
    results it writes where it is told, and on the same path: the kernel where the group has a
    workspace, else unfused.
    """

    def __init__(self, *, may_overwrite_x: bool = False, **constants: Any) -> None:
        """Take every argument of the op that isn't a tensor.

        `may_overwrite_x`: nobody reads x after the site.
        """
        self._may_overwrite_x = may_overwrite_x
        self._constants: dict[str, Any] = constants
        self._name: str = constants["group_name"]
        self._group: dist.ProcessGroup | None = None
        self._bound: BoundCall | None = None

    def __call__(
        self,
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
        """Run the site; a name may stand for another group after destroy and init.

        Args:
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
        """
        bound = self._bound
        if (
            bound is None
            or not bound.usable
            or x.numel() == 0
            or current_group(self._name) is not self._group
        ):
            bound = self._bind(
                arguments_of(self._constants, eps, scale, x, residual, weight, bias),
                Results(norm, hidden, reduced, rstd),  # type: ignore[arg-type]
            )
            if bound is None:
                return
        eps = None if eps is None else float(eps)
        scale = None if scale is None else float(scale)
        bound.run_into(eps, scale, x, residual, weight, bias, norm, hidden, reduced, rstd)

    def _bind(self, arguments: Arguments, results: Results) -> BoundCall | None:
        """The kernel's call for this and the next ones; None if the call was made, unfused."""
        group = checked_group(self._name, arguments.world_size)
        workspace = dispatch.cpu_workspace_for(arguments, group)
        self._group, self._bound = group, None
        if workspace is None:
            made = unfused.run(arguments, group, may_overwrite_x=self._may_overwrite_x)
            copy_results(made, results)
            return None
        self._bound = BoundCall(arguments, workspace)
        return self._bound
