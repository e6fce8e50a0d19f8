"""Opaque norm and all_reduce ops of other libraries, described as data.

A library that calls its own kernel for RMSNorm or all_reduce leaves one opaque node in the
graph. A row here tells the pass what the node computes, so that it can be found like a
decomposed one; those in `opaque_rows` are built in, users add their own.

Mutating ops reach the pass as `auto_functionalized_v2(op, ...)` with one getitem for each
mutated argument; both that and the plain functional form are understood.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fx_fusion.errors import RegistrationError
from fx_fusion.lowering.norm_form import Cast, NormForm, Weight
from fx_fusion.passes.nodes import hidden_size, is_vector, same_shape, tensor
from fx_fusion.passes.opaque_rows import (
    ALL_REDUCES,
    NORMS,
    AllReduceRow,
    GroupResolver,
    NormRow,
    Result,
)


@dataclass(frozen=True)
class OpaqueNorm:
    """What a matched opaque norm reads and writes; see `find_norms.Norm` for the fields."""

    hidden: fx.Node
    output: fx.Node
    interior: tuple[fx.Node, ...]
    form: NormForm
    norm_dtype: torch.dtype | None
    eps: float
    eps_node: fx.Node | None
    weight: fx.Node | None
    residual: fx.Node | None
    hidden_output: fx.Node | None


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
    ignore: Sequence[str] = (),
) -> None:
    """Tell the pass that an opaque op is an RMSNorm over the last dimension, in fp32.

    A call is taken only if each argument that isn't named here has its default value or None,
    since it could change what the op computes.

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
            if the fp32 result is rounded to x's dtype first.
        ignore: Arguments that have no part in the result (how to launch, a workspace).

    Raises:
        RegistrationError: The op exists and lacks one of the arguments named, or has one that
            isn't named and has no default.
    """
    name = _op_name(op)
    named = [x, weight, eps, out, residual, residual_out, *ignore]
    _check_arguments(name, [value for value in named if isinstance(value, str)])
    if (residual is None) != (residual_out is None):
        raise RegistrationError(
            f"{name}: residual={residual!r} and residual_out={residual_out!r} must be given"
            " together: an op that adds a residual also returns or overwrites the sum."
        )
    form = NormForm(weight_form if weight is not None else "none", cast)
    row = NormRow(name, x, weight, eps, out, form, residual, residual_out, tuple(ignore))
    NORMS[name] = row


def register_all_reduce(
    op: str | torch._ops.OpOverload,
    *,
    x: str = "tensor",
    group: str = "group_name",
    resolve_group: GroupResolver | None = None,
    ignore: Sequence[str] = (),
) -> None:
    """Tell the pass that an opaque functional op is a sum all_reduce whose result is ready.

    A call is taken only if each argument that isn't named here has its default value or None.

    Args:
        op: The op, or its name "namespace::name".
        x: The argument that is reduced.
        group: The argument that holds the group's name.
        resolve_group: Turns that name into the name of a torch.distributed group (None if
            there is none); left out if it already is one.
        ignore: Arguments that have no part in the result.

    Raises:
        RegistrationError: The op exists and lacks one of the arguments named, or has one that
            isn't named and has no default.
    """
    name = _op_name(op)
    _check_arguments(name, [x, group, *ignore])
    ALL_REDUCES[name] = AllReduceRow(name, x, group, resolve_group, tuple(ignore))


def unregister(op: str | torch._ops.OpOverload) -> None:
    """Forget an op registered before; unknown ops are ignored."""
    name = _op_name(op)
    NORMS.pop(name, None)
    ALL_REDUCES.pop(name, None)


def registry_key() -> tuple[str, ...]:
    """The rows as text, for the compile-cache key."""
    norms = [repr(row) for row in NORMS.values()]
    reduces = [f"{r.name} {r.x} {r.group} {r.ignore}" for r in ALL_REDUCES.values()]
    return tuple(sorted(norms + reduces))


def opaque_norm(node: fx.Node) -> OpaqueNorm | None:
    """The registered norm this node computes, with its operands; None if it is none."""
    row = NORMS.get(_called_op(node))
    call = None if row is None else _call_of(node)
    if call is None or row is None or not call.has_only(_named(row)):
        return None
    hidden = call.arguments.get(row.x)
    output = call.result(row.out)
    weight = call.arguments.get(row.weight) if row.weight is not None else None
    eps = call.arguments.get(row.eps) if isinstance(row.eps, str) else row.eps
    residual = call.arguments.get(row.residual) if row.residual is not None else None
    if not (isinstance(hidden, fx.Node) and isinstance(output, fx.Node)):
        return None
    before, after = tensor(hidden), tensor(output)
    if before is not None and after is not None and not same_shape(before, after):
        return None
    if row.residual is not None and not isinstance(residual, fx.Node):
        return None
    if not (weight is None or _is_weight(weight, hidden)):
        return None
    if not isinstance(eps, (int, float, fx.Node)):
        return None
    form = row.form if weight is not None else NormForm("none", "after_weight")
    rounded = tensor(weight if row.rounds_to == "weight" else hidden)
    norm_dtype = rounded.dtype if rounded is not None and form.cast == "before_weight" else None
    if norm_dtype is torch.float32:  # it is fp32 already
        form, norm_dtype = replace(form, cast="after_weight"), None
    return OpaqueNorm(
        hidden=hidden,
        output=output,
        interior=tuple(sorted({node, output, *call.results.values()})),
        form=form,
        norm_dtype=norm_dtype,
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
    row = ALL_REDUCES.get(_called_op(node))
    call = None if row is None else _call_of(node)
    if call is None or row is None or call.functionalized:
        return None
    if not call.has_only({row.x, row.group, *row.ignore}):
        return None
    x, group = call.arguments.get(row.x), call.arguments.get(row.group)
    if not isinstance(x, fx.Node) or not isinstance(group, str):
        return None
    return x, group if row.resolve_group is None else row.resolve_group(group)


def _named(row: NormRow) -> set[Result | float | None]:
    """The arguments whose meaning a row gives."""
    given = (row.x, row.weight, row.eps, row.out, row.residual, row.residual_out)
    return {*given, *row.ignore}


def _is_weight(weight: object, hidden: object) -> bool:
    size = hidden_size(hidden)
    if size is None:
        return isinstance(weight, fx.Node)
    return isinstance(weight, fx.Node) and is_vector(weight, size)


@dataclass(frozen=True)
class _Call:
    """A call of an op: its arguments by name and the nodes of its results."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    results: dict[Result, fx.Node] = field(default_factory=dict)
    functionalized: bool = False

    def result(self, which: Result) -> fx.Node | None:
        return self.results.get(which)

    def has_only(self, named: Container[object]) -> bool:
        """True if every other argument is at its default, or None."""
        return all(
            self.arguments.get(argument.name) in (None, argument.default_value)
            for argument in self.op._schema.arguments
            if argument.name not in named
        )


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
    return _Call(op, arguments, results)


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
    return _Call(op, arguments, results, functionalized=True)


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
    schema = packet.default._schema
    known = [a.name for a in schema.arguments]
    missing = [argument for argument in arguments if argument not in known]
    if missing:
        raise RegistrationError(
            f"{name} has no argument {missing[0]!r}; it has: {', '.join(known)}."
        )
    for argument in schema.arguments:
        if argument.name not in arguments and not argument.has_default_value():
            raise RegistrationError(
                f"{name} has an argument {argument.name!r} without a default, and nothing says"
                f" what it is; if the result doesn't depend on it, give ignore=({argument.name!r},)."
            )
