"""The fused op in Inductor's own terms: a collective, kept in order, called without detours.

A registered lowering makes each site a collective of Inductor's IR. That does two things:

* Inductor keeps collectives in the graph's order, by a fake dependency from each to the next.
  An op it doesn't know has no place in that order, and two ranks whose graphs were scheduled
  differently (one static, one dynamic) would meet each other's collectives.
* On the CPU the generated Python calls a `CpuSite` bound to the site's constants, not the
  dispatcher:

      site = CpuSite(eps=1e-06, group_name='0', world_size=2, ...)       # once, at import
      buf5 = site(buf4, arg3_1, arg4_1, None, None, None)
      buf6 = buf5[0]

  Elsewhere (GPUs, the C++ wrapper, AOTInductor) the op itself is called as before.
"""

from __future__ import annotations

from typing import Any, Final, cast

from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from fx_fusion.lowering.cpu_site import TENSORS
from fx_fusion.lowering.ops import all_reduce_add_rms_norm

_POSITIONAL: Final = ("x", "residual", "weight", "bias", "eps", "group_name", "world_size")


class SiteKernel(cast(Any, ir)._CollectiveKernel):  # type: ignore[misc]
    """One site: results as a tuple, ordered with the graph's other collectives."""

    def codegen(self, wrapper: Any) -> None:
        """Write the call: a bound CpuSite where that works, the op elsewhere."""
        arguments = self._arguments()
        x = arguments["x"]
        if V.graph.cpp_wrapper or x.get_device().type != "cpu":
            super().codegen(wrapper)
            return
        tensors = [arguments.pop(name, None) for name in TENSORS]
        constants = ", ".join(f"{name}={value!r}" for name, value in sorted(arguments.items()))
        # one a site: a site binds its dtypes and hidden size at its first call
        name = f"fx_fusion_site_{self.get_name()}"
        wrapper.add_import_once("from fx_fusion.lowering.cpu_site import CpuSite")
        wrapper.add_import_once(f"{name} = CpuSite({constants})")
        given = ", ".join("None" if t is None else t.codegen_reference() for t in tensors)
        self.codegen_comment(wrapper)
        wrapper.writeline(f"{self.get_name()} = {name}({given})")

    def _arguments(self) -> dict[str, Any]:
        """The call's arguments by name; tensors as IR nodes."""
        args, kwargs = self.unflatten_args(self.inputs, self.constant_args)
        return {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs, **self.kwargs}


def register() -> None:
    """Register the lowering with Inductor; again and again does no harm."""
    if all_reduce_add_rms_norm not in lowerings:
        register_lowering(all_reduce_add_rms_norm, type_promotion_kind=None)(_lower)


def _lower(*args: Any, **kwargs: Any) -> Any:
    """The op's lowering: a SiteKernel and its four results."""
    results = SiteKernel.create(all_reduce_add_rms_norm, *args, **kwargs)
    return pytree.tree_map_only(ir.IRNode, cast(Any, ir.TensorBox).create, results)
