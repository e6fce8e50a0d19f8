"""The unfused path of a site of generated GPU code, at the host's cost of the lines it stands for.

    site(x, residual, weight, norm, hidden)

is the group's all_reduce of x, as Inductor's own code calls it, and one launch of our kernel for
add and norm, as Inductor's code would launch one of Triton's:

    reduced = all_reduce(x); hidden = residual + reduced; norm = rms_norm(hidden, weight)

It is taken where the choice fell on the unfused path; nothing is chosen here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch.distributed as dist

from fx_fusion import compat
from fx_fusion.lowering import gpu_local, unfused
from fx_fusion.lowering.arch import device_arch
from fx_fusion.lowering.arguments import Arguments, Results
from fx_fusion.lowering.gpu_launch import entry_point
from fx_fusion.lowering.gpu_learned import Learned
from fx_fusion.lowering.site_call import Number, arguments_of, copy_results


class UnfusedSite:
    """One site's unfused path."""

    def __init__(self, constants: dict[str, Any], *, may_overwrite_x: bool) -> None:
        """Take every argument of the op that isn't a tensor.

        `may_overwrite_x`: nobody reads x after the site.
        """
        self._may_overwrite_x = may_overwrite_x
        self._add_and_norm = _AddAndNorm(constants)
        self._entry = entry_point(
            self._add_and_norm.learned.site, self._add_and_norm, compat.registered_groups()
        )

    def run(
        self,
        stream: int,
        eps: Number,
        scale: Number,
        arguments: Arguments,
        group: dist.ProcessGroup,
        results: Results,
    ) -> None:
        """Run one call, not of no rows, on a stream of x's device, which is the current one.

        Args:
            stream: The raw handle of the current stream.
            eps: A number or 0-d tensor in place of the constant; None for the constant.
            scale: The same for the factor.
            arguments: The op's.
            group: The group that they name.
            results: Where results go, contiguous; None where not wanted.
        """
        self._add_and_norm.expect(group, stream)
        reduced = unfused.reduce(arguments, group, may_overwrite_x=self._may_overwrite_x)
        norm, hidden, wanted, rstd = results
        if wanted is not None:
            wanted.copy_(reduced)
        x, residual, weight, bias = arguments[:4]
        rows = x.numel() // x.shape[-1]
        given = (reduced, residual, weight, bias, norm, hidden, None, rstd)
        self._entry(stream, rows, eps, scale, *given)


class _AddAndNorm:
    """Add and norm of a reduced value: what the launcher in C hands back, and learns from.

    It doesn't hold the entry point, which holds it where Python's collector can't look.
    """

    def __init__(self, constants: dict[str, Any]) -> None:
        # what is reduced comes in, so there is nothing of it to write
        self._constants = constants | {"want_reduced": False}
        self._group: dist.ProcessGroup | None = None
        self._never_failed = ctypes.c_int32(0)
        self._stream = ctypes.c_uint64(0)
        self.learned = Learned(float(constants["eps"]), float(constants.get("scale", 1.0)))

    def expect(self, group: dist.ProcessGroup, stream: int) -> None:
        """The next call belongs to this group and stream."""
        if group is not self._group:
            self.learned.forget()
            self._group = group
        self._stream.value = stream

    def __call__(
        self,
        stream: int,
        rows: int,
        eps: Number,
        scale: Number,
        *tensors: Any,
    ) -> None:
        """Run one call; the arguments are the launcher's, the reduced value being its x."""
        del stream  # it is the current one
        results = Results(*tensors[4:])
        arguments = arguments_of(self._constants, eps, scale, *tensors[:4])
        reduced = arguments.x
        copy_results(unfused.add_and_norm(reduced, arguments, results), results)
        if self._group is None or not self.learned.wants(rows, device_arch(reduced.device)):
            return
        listed = gpu_local.launches(reduced, arguments)
        if listed is not None:
            words = ctypes.addressof(self._never_failed), ctypes.addressof(self._stream)
            self.learned.learn(arguments, self._group, listed, *words)
