"""The fused op in Inductor's own terms: a collective, kept in order, called without detours.

A registered lowering makes each site a collective of Inductor's IR. That does three things:

* Inductor keeps collectives in the graph's order, by a fake dependency from each to the next.
  An op it doesn't know has no place in that order, and two ranks whose graphs were scheduled
  differently (one static, one dynamic) would meet each other's collectives.
* The generated Python calls an entry point bound to the site's constants, not the dispatcher.
  On a GPU it is the launcher in C, see `gpu_site`; on the CPU it is `cpu_site`:

      site = CpuSite(eps=1e-06, group_name='0', world_size=2, ...)       # once, at import
      site(None, None, buf4, arg3_1, arg4_1, None, buf5, None, None, None)

* Results are Inductor's buffers, planned and used again like its own kernels' results, and
  one that isn't wanted takes no memory. They are allocated empty, and the site mutates them.
* The hidden state goes where the residual was, if that dies at the site and is no input of the
  graph. Inductor's own pass for it decides (`reinplace`); see `offer_residuals`:

      site(None, None, buf4, buf1, arg4_1, None, buf5, buf1, None, None)

With the C++ wrapper and in AOTInductor's packages the code calls the same entry points, see
`cpp_code`. Where tensors of that code aren't tensors of torch's (AOTInductor's
`allow_stack_allocation`) it calls the op itself, through the dispatcher.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch._inductor import config, ir
from torch._inductor.lowering import empty_strided, lowerings, register_lowering, to_dtype
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from fx_fusion import compat
from fx_fusion.lowering import cpp_code
from fx_fusion.lowering.arguments import Results
from fx_fusion.lowering.ops import (
    all_reduce_add_rms_norm,
    into_residual,
    over_residual,
    with_residual,
)
from fx_fusion.lowering.residual_memory import may_mutate_residual, owns_all_its_memory
from fx_fusion.lowering.x_memory import may_overwrite_x

_POSITIONAL: Final = ("x", "residual", "weight", "bias", "eps", "group_name", "world_size")
#: Tensors whose memory a call reads, in its order; then those that stand for a number.
_ARRAYS: Final = ("x", "residual", "weight", "bias")
_NUMBERS: Final = ("eps", "scale")
_WANTED: Final = ("norm", "residual", "reduced", "rstd")
# torch leaves parts of it untyped.
_ir: Final = cast(Any, ir)


class DispatchedSite(cast(Any, ir)._CollectiveKernel):  # type: ignore[misc]
    """One site as a call of the op, ordered with the graph's other collectives."""


class PlannedSite(cast(Any, ir)._CollectiveKernel):  # type: ignore[misc]
    """One site as a call of its entry point, which writes to buffers that Inductor planned.

    Attributes:
        constants: Every argument of the op that isn't a tensor.
        tensors: The tensor arguments by name.
        results: Norm, hidden state, reduced value and rstd; None where not wanted.
        site_constants: `constants`, and whether the site may overwrite its x.
    """

    def __init__(
        self,
        constants: dict[str, Any],
        tensors: dict[str, Any],
        results: tuple[Any, ...],
        overwrites_x: bool,
    ) -> None:
        """Register the site with Inductor's graph, and that it writes to `results`."""
        self.constants, self.tensors, self.results = constants, tensors, results
        self.site_constants = constants | ({"may_overwrite_x": True} if overwrites_x else {})
        device = tensors["x"].get_device()
        named = {name: value for name, value in constants.items() if name not in _POSITIONAL}
        positional = [{**tensors, **constants}.get(name) for name in _POSITIONAL]
        wanted = [result for result in results if result is not None]
        given = [
            *tensors.values(),
            *(one for one in wanted if one is not tensors.get("residual")),
        ]
        super().__init__(
            _ir.NoneLayout(device=device),
            all_reduce_add_rms_norm,
            given,
            # Inductor's estimates find the group's name here.
            (constants["group_name"],),
            lambda *_: (positional, named),
        )
        self.mutation_outputs.extend(
            _ir.MutationOutput(_ir.NoneLayout(device=device), result, self) for result in wanted
        )

    def codegen(self, wrapper: Any) -> None:
        """Write the call, and in Python the making of the entry point at import."""
        if V.graph.cpp_wrapper:
            self._codegen_cpp(wrapper)
            return
        x = self.tensors["x"]
        device = x.get_device()
        # one a site: a site binds its dtypes and hidden size at its first call
        name = f"fx_fusion_site_{self.get_name()}"
        constants = ", ".join(
            f"{key}={value!r}" for key, value in sorted(self.site_constants.items())
        )
        given = [self._number(key) for key in _NUMBERS]
        given += [_reference(self.tensors.get(key)) for key in _ARRAYS]
        given += map(_reference, self.results)
        if not runs_on_gpu(device):
            wrapper.add_import_once("from fx_fusion.lowering.cpu_site import CpuSite")
            wrapper.add_import_once(f"{name} = CpuSite({constants})")
        else:
            wrapper.add_import_once("from fx_fusion.lowering.gpu_site import gpu_site")
            wrapper.add_import_once(f"{name} = gpu_site({constants})")
            wrapper.write_get_raw_stream_header()
            rows = sympy_product(x.get_size()[:-1])
            given = [
                f"get_raw_stream({device.index})",
                wrapper.codegen_python_sizevar(rows),
                *given,
            ]
        wrapper.writeline(f"{name}({', '.join(given)})")

    def _codegen_cpp(self, wrapper: Any) -> None:
        """Write the call in C++, and once a file what all calls share."""
        name = f"fx_fusion_site_{self.get_name()}"
        on_gpu = runs_on_gpu(self.tensors["x"].get_device())
        numbers: list[str | None] = []
        scalars: list[str | None] = []
        for key in _NUMBERS:
            tensor = self.tensors.get(f"{key}_tensor")
            is_number = tensor is not None and tensor.get_device().type == "cpu"
            numbers.append(f"{name}_{key}" if is_number else None)
            scalars.append(None if tensor is None or is_number else _reference(tensor))
            if tensor is not None and is_number:
                wrapper.codegen_tensor_item(
                    tensor.get_dtype(), _reference(tensor), f"{name}_{key}"
                )
        inputs = [
            None if (t := self.tensors.get(key)) is None else _reference(t) for key in _ARRAYS
        ]
        results = [None if result is None else _reference(result) for result in self.results]
        cpp_code.prepare(wrapper)
        wrapper.writeline(
            cpp_code.call(
                name,
                cpp_code.describe(self.site_constants, self.tensors, self.results, on_gpu),
                wrapper.codegen_sizevar(sympy_product(self.tensors["x"].get_size()[:-1])),
                numbers,
                [*inputs, *scalars, *results],
                on_gpu=on_gpu,
                is_package=V.graph.aot_mode,
            )
        )

    def _number(self, name: str) -> str:
        """eps or scale of the call: None for the constant, a CPU tensor's value, a tensor."""
        tensor = self.tensors.get(f"{name}_tensor")
        if tensor is None:
            return "None"
        text = _reference(tensor)
        return f"{text}.item()" if tensor.get_device().type == "cpu" else text


def register() -> None:
    """Register the lowerings with Inductor; again and again does no harm."""
    if all_reduce_add_rms_norm not in lowerings:
        register_lowering(over_residual, type_promotion_kind=None)(_lower_in_place)
        register_lowering(with_residual, type_promotion_kind=None)(_lower)
        register_lowering(all_reduce_add_rms_norm, type_promotion_kind=None)(_lower)


def offer_residuals(graph: torch.fx.Graph) -> None:
    """Let Inductor write hidden states over residuals that die.

    Its table of ops that can be in place holds `with_residual` alone: its pass fails on a site
    without a residual. So the sites that have one become calls of that op, last of all, as
    they are shown and searched for by the op's own name.
    """
    if not compat.register_in_place(with_residual, over_residual, 1, may_mutate_residual):
        return
    for node in graph.find_nodes(op="call_function", target=all_reduce_add_rms_norm):
        if isinstance(node.args[1], torch.fx.Node) and node.kwargs.get("want_residual"):
            node.target = with_residual


def _lower(*args: Any, **kwargs: Any) -> Any:
    """The op's lowering: one site and its four results."""
    if _by_the_dispatcher():
        return _dispatched(all_reduce_add_rms_norm, *args, **kwargs)
    return _planned(dict(zip(_POSITIONAL, args, strict=False)) | kwargs)


def _lower_in_place(x: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
    """The same where the residual may be written to, which then is the second result."""
    residual = _dense(residual)
    if not isinstance(residual, _ir.TensorBox):
        residual = _ir.TensorBox(residual)
    name = residual.get_name()
    if not owns_all_its_memory(residual):
        return _lower(x, residual, *args, **kwargs)
    # What reads the old value has to be in front of the site in Inductor's list of operations.
    V.graph.mark_buffer_mutated(name)
    if _by_the_dispatcher():
        results = _dispatched(into_residual, x, residual, *args, **kwargs)
        return results._replace(residual=residual)
    given = (x, residual, *args)
    return _planned(dict(zip(_POSITIONAL, given, strict=False)) | kwargs, residual)


def _by_the_dispatcher() -> bool:
    """True for C++ whose tensors aren't torch's own."""
    return V.graph.cpp_wrapper and bool(config.aot_inductor.allow_stack_allocation)


def _dispatched(op: Any, *args: Any, **kwargs: Any) -> Results:
    results = DispatchedSite.create(op, *args, **kwargs)
    return Results(*pytree.tree_map_only(ir.IRNode, _ir.TensorBox.create, results))


def _planned(arguments: dict[str, Any], hidden: Any = None) -> Results:
    """A site with its results; `hidden` is where the hidden state goes, None for a new buffer."""
    tensors, constants = {}, {}
    for name, value in arguments.items():
        if isinstance(value, ir.IRNode):
            tensors[name] = _dense(value)
        elif value is not None or name.endswith("dtype"):
            constants[name] = value
    eps = tensors.get("eps_tensor")
    if eps is not None and runs_on_gpu(eps.get_device()):
        tensors["eps_tensor"] = _as_float32(eps)
    x = arguments["x"]
    results = Results(
        *(
            hidden
            if name == "residual" and hidden is not None
            else empty_strided(
                _size(name, x, _wanted(name, arguments)),
                None,
                dtype=dtype,
                device=x.get_device(),
            )
            for name, dtype in zip(_WANTED, _dtypes(), strict=True)
        )
    )
    planned = tuple(
        result.data if _wanted(name, arguments) else None
        for name, result in zip(_WANTED, results, strict=True)
    )
    PlannedSite(constants, tensors, planned, may_overwrite_x(V.graph.current_node))
    return results


def runs_on_gpu(device: torch.device) -> bool:
    """True if a site on this device is launched with a stream."""
    return device.type != "cpu"


def _as_float32(scalar: Any) -> Any:
    """A 0-d tensor as the kernel reads it, cast once a graph."""
    if scalar.get_dtype() is torch.float32:
        return scalar
    casts = V.graph.__dict__.setdefault("fx_fusion_casts", {})
    name = scalar.get_name()
    if name not in casts:
        casts[name] = _dense(to_dtype(_ir.TensorBox.create(scalar), torch.float32))
    return casts[name]


def _wanted(name: str, arguments: dict[str, Any]) -> bool:
    return bool(arguments.get(f"want_{name}", name == "norm"))


def _size(name: str, x: Any, wanted: bool) -> list[Any]:
    """A result's size; one that isn't wanted is empty, and no code is written for it."""
    if not wanted:
        return [0]
    return [*x.get_size()[:-1], 1] if name == "rstd" else list(x.get_size())


def _dtypes() -> list[torch.dtype]:
    """The results' dtypes, from the fake call."""
    return [value.dtype for value in V.graph.current_node.meta["val"]]


def _dense(tensor: Any) -> Any:
    """A tensor in memory without gaps; copied only where it isn't that already."""
    kernel = _ir.ExternKernel
    realized = kernel.realize_input(tensor)
    return kernel.require_contiguous_strides(realized) if tensor.get_size() else realized


def _reference(tensor: Any) -> str:
    return "None" if tensor is None else str(tensor.codegen_reference())
