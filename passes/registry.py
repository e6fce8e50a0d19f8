"""Opaque norm and all_reduce ops of other libraries, described as data.

A library that calls its own kernel for RMSNorm or all_reduce leaves one opaque node in the
graph. A row here tells the pass what the node computes, so that it can be found like a
decomposed one. Rows for FlashInfer's and vLLM's ops are built in; they are named by string, so
neither library is imported, and a row whose op doesn't exist costs nothing.

Mutating ops reach the pass as `auto_functionalized_v2(op, ...)` with one getitem for each
mutated argument; both that and the plain functional form are understood.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from fx_fusion.errors import RegistrationError
from fx_fusion.lowering.norm_form import Cast, NormForm, Weight
from fx_fusion.passes.nodes import same_shape, tensor

#: A result of an op: its index among the returned values, or the name of the mutated argument.
Result = int | str
GroupResolver = Callable[[str], "str | None"]


@dataclass(frozen=True)
class _NormRow:
    name: str
    x: str
    weight: str | None
    eps: str | float
    out: Result
    form: NormForm
    residual: str | None = None
    residual_out: Result | None = None


@dataclass(frozen=True)
class _AllReduceRow:
    name: str
    x: str
    group: str
    resolve_group: GroupResolver | None = None


@dataclass(frozen=True)
class OpaqueNorm:
    """What a matched opaque norm reads and writes; see `find_norms.Norm` for the fields."""

    hidden: fx.Node
    output: fx.Node
    interior: tuple[fx.Node, ...]
    form: NormForm
    eps: float
    eps_node: fx.Node | None
    weight: fx.Node | None
    residual: fx.Node | None
    hidden_output: fx.Node | None


def _vllm_group(name: str) -> str | None:
    """The c10d name of the device group behind a vLLM group name ("tp:0"), if vLLM runs."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    reference = getattr(state, "_groups", {}).get(name) if state is not None else None
    coordinator = reference() if reference is not None else None
    group = getattr(coordinator, "device_group", None)
    return getattr(group, "group_name", None)


def _row(
    name: str, x: str, out: Result, eps: str, cast: Cast, weight: Weight = "w"
) -> _NormRow:
    return _NormRow(name, x, "weight", eps, out, NormForm(weight, cast))


def _add_row(name: str, eps: str, cast: Cast, weight: Weight = "w") -> _NormRow:
    form = NormForm(weight, cast)
    return _NormRow(name, "input", "weight", eps, "input", form, "residual", "residual")


# FlashInfer multiplies by the weight in fp32 and rounds once; vLLM's CUDA kernels round first.
_NORMS: Final[dict[str, _NormRow]] = {
    row.name: row
    for row in (
        _row("flashinfer::rmsnorm", "input", "out", "eps", "after_weight"),
        _row("flashinfer::gemma_rmsnorm", "input", "out", "eps", "after_weight", "1+w"),
        _add_row("flashinfer::fused_add_rmsnorm", "eps", "after_weight"),
        _add_row("flashinfer::gemma_fused_add_rmsnorm", "eps", "after_weight", "1+w"),
        _row("_C::rms_norm", "input", "result", "epsilon", "before_weight"),
        _add_row("_C::fused_add_rms_norm", "epsilon", "before_weight"),
        _row("vllm_ir::rms_norm", "x", 0, "epsilon", "before_weight"),
        _NormRow(
            "vllm_ir::fused_add_rms_norm",
            "x",
            "weight",
            "epsilon",
            0,
            NormForm("w", "before_weight"),
            "x_residual",
            1,
        ),
    )
}
_ALL_REDUCES: Final[dict[str, _AllReduceRow]] = {
    "vllm::all_reduce": _AllReduceRow("vllm::all_reduce", "tensor", "group_name", _vllm_group),
}


def register_rms_norm(
    op: str | torch._ops.OpOverload,
    *,
    x: str = "input",
    weight: str | None = "weight",
    eps: str | float = "eps",
    out: Result = 0,
    residual: str | None = None,
    residual_out: Result | None = None,
    weight_form: Weight = "w",
    cast: Cast = "after_weight",
) -> None:
    """Tell the pass that an opaque op is an RMSNorm over the last dimension, in fp32.

    Args:
        op: The op, or its name "namespace::name". It may be registered with torch later.
        x: The argument that is normalised.
        weight: The argument that holds the weight [hidden size], None if there is none.
        eps: The argument that holds eps, or eps itself.
        out: Where the norm comes out: the index of a returned value, or the name of the
            argument that is overwritten.
        residual: The argument that is added to `x` first, None if the op adds nothing.
        residual_out: Where the sum comes out, as for `out`.
        weight_form: "w", or "1+w" for Gemma's.
        cast: "after_weight" if the product with the weight is taken in fp32, "before_weight"
            if the fp32 result is rounded first.

    Raises:
        RegistrationError: The op exists and lacks one of the arguments named.
    """
    name = _op_name(op)
    named = [x, weight, eps, out, residual, residual_out]
    _check_arguments(name, [value for value in named if isinstance(value, str)])
    if (residual is None) != (residual_out is None):
        raise RegistrationError(
            f"{name}: residual={residual!r} and residual_out={residual_out!r} must be given"
            " together: an op that adds a residual also returns or overwrites the sum."
        )
    form = NormForm(weight_form if weight is not None else "none", cast)
    _NORMS[name] = _NormRow(name, x, weight, eps, out, form, residual, residual_out)


def register_all_reduce(
    op: str | torch._ops.OpOverload,
    *,
    x: str = "tensor",
    group: str = "group_name",
    resolve_group: GroupResolver | None = None,
) -> None:
    """Tell the pass that an opaque functional op is a sum all_reduce whose result is ready.

    Args:
        op: The op, or its name "namespace::name".
        x: The argument that is reduced.
        group: The argument that holds the group's name.
        resolve_group: Turns that name into the name of a torch.distributed group (None if
            there is none); left out if it already is one.

    Raises:
        RegistrationError: The op exists and lacks one of the arguments named.
    """
    name = _op_name(op)
    _check_arguments(name, [x, group])
    _ALL_REDUCES[name] = _AllReduceRow(name, x, group, resolve_group)


def unregister(op: str | torch._ops.OpOverload) -> None:
    """Forget an op registered before; unknown ops are ignored."""
    name = _op_name(op)
    _NORMS.pop(name, None)
    _ALL_REDUCES.pop(name, None)


def registry_key() -> tuple[str, ...]:
    """The rows as text, for the compile-cache key."""
    norms = [repr(row) for row in _NORMS.values()]
    reduces = [f"{r.name} {r.x} {r.group}" for r in _ALL_REDUCES.values()]
    return tuple(sorted(norms + reduces))


def opaque_norm(node: fx.Node) -> OpaqueNorm | None:
    """The registered norm this node computes, with its operands; None if it is none."""
    row = _NORMS.get(_called_op(node))
    call = None if row is None else _call_of(node)
    if call is None or row is None:
        return None
    hidden = call.arguments.get(row.x)
    output = call.result(row.out)
    weight = call.arguments.get(row.weight) if row.weight is not None else None
    eps = call.arguments.get(row.eps) if isinstance(row.eps, str) else row.eps
    residual = call.arguments.get(row.residual) if row.residual is not None else None
    nodes = (hidden, output)
    if not all(isinstance(value, fx.Node) for value in nodes):
        return None
    if row.residual is not None and not isinstance(residual, fx.Node):
        return None
    if not (weight is None or isinstance(weight, fx.Node)):
        return None
    if not isinstance(eps, (int, float, fx.Node)):
        return None
    assert isinstance(hidden, fx.Node)
    assert isinstance(output, fx.Node)
    form = row.form if weight is not None else NormForm("none", row.form.cast)
    return OpaqueNorm(
        hidden=hidden,
        output=output,
        interior=tuple(sorted({node, output, *call.results.values()})),
        form=form,
        eps=0.0 if isinstance(eps, fx.Node) else float(eps),
        eps_node=eps if isinstance(eps, fx.Node) else None,
        weight=weight,
        residual=residual if isinstance(residual, fx.Node) else None,
        hidden_output=None if row.residual_out is None else call.result(row.residual_out),
    )


def opaque_all_reduce(node: fx.Node) -> tuple[fx.Node, str | None] | None:
    """The input and the torch group name of a registered all_reduce; None if it is none.

    The name is None where the library's own name leads to no torch group.
    """
    row = _ALL_REDUCES.get(_called_op(node))
    call = None if row is None else _call_of(node)
    if call is None or row is None or call.functionalized:
        return None
    x, group = call.arguments.get(row.x), call.arguments.get(row.group)
    if not isinstance(x, fx.Node) or not isinstance(group, str):
        return None
    return x, group if row.resolve_group is None else row.resolve_group(group)


@dataclass(frozen=True)
class _Call:
    """A call of an op: its arguments by name and the nodes of its results."""

    arguments: dict[str, Any]
    results: dict[Result, fx.Node] = field(default_factory=dict)
    functionalized: bool = False

    def result(self, which: Result) -> fx.Node | None:
        return self.results.get(which)


def _called_op(node: fx.Node) -> str:
    """The name of the op a node calls, directly or functionalized; "" if it calls none."""
    op: object = node.target
    if not isinstance(op, torch._ops.OpOverload) and str(op) == "auto_functionalized_v2":
        op = node.args[0]
    return op._schema.name if isinstance(op, torch._ops.OpOverload) else ""


def _call_of(node: fx.Node) -> _Call | None:
    if isinstance(node.target, torch._ops.OpOverload):
        return _plain_call(node, node.target)
    return _functionalized_call(node)


def _plain_call(node: fx.Node, op: torch._ops.OpOverload) -> _Call:
    schema = op._schema
    arguments = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    arguments.update(node.kwargs)
    for argument in schema.arguments:
        if argument.name not in arguments and argument.has_default_value():
            arguments[argument.name] = argument.default_value
    results: dict[Result, fx.Node] = {}
    if len(schema.returns) == 1:
        results[0] = node
    else:
        results.update(_getitems(node))
    return _Call(arguments, results)


def _functionalized_call(node: fx.Node) -> _Call | None:
    op = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return None
    schema = op._schema
    bases = node.kwargs.get("_all_bases", [])
    assert isinstance(bases, (list, tuple))
    items = _getitems(node)
    arguments: dict[str, Any] = {}
    results: dict[Result, fx.Node] = {
        index: items[index] for index in range(len(schema.returns)) if index in items
    }
    first_base = max(len(schema.returns), 1)  # an op without results still fills one slot
    for argument in schema.arguments:
        name = argument.name
        index = node.kwargs.get(f"_{name}_base_index")
        if index is None:
            arguments[name] = node.kwargs.get(name, argument.default_value)
            continue
        if any(f"_{name}_{part}" in node.kwargs for part in ("size", "dim", "start")):
            return None  # the op sees only a part of the base
        assert isinstance(index, int)
        base = bases[index]
        arguments[name] = base
        item = items.get(first_base + index)
        if item is not None:
            before, after = tensor(base), tensor(item)
            if before is None or after is None or not same_shape(before, after):
                return None
            results[name] = item
    return _Call(arguments, results, functionalized=True)


def _getitems(node: fx.Node) -> dict[Result, fx.Node]:
    return {
        user.args[1]: user
        for user in node.users
        if user.target is operator.getitem and isinstance(user.args[1], int)
    }


def _op_name(op: str | torch._ops.OpOverload) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema.name)
    if isinstance(op, str) and op.count("::") == 1:
        return op.split(".")[0]
    raise RegistrationError(
        f"{op!r} is not an op: give an OpOverload such as torch.ops.mylib.rms_norm.default, or"
        ' its name "mylib::rms_norm".'
    )


def _check_arguments(name: str, arguments: list[str]) -> None:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None:
        return  # not registered with torch yet
    known = [a.name for a in packet.default._schema.arguments]
    missing = [argument for argument in arguments if argument not in known]
    if missing:
        raise RegistrationError(
            f"{name} has no argument {missing[0]!r}; it has: {', '.join(known)}."
        )
