"""Typed questions about fx nodes: what op is this, what does it hold, what is under a cast.

Everything here reads; nothing changes a graph. Sizes are compared without making guards, so
that looking at a graph with symbolic or unbacked sizes never specialises it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

#: Reshapes that only regroup elements; a step is a view only if it keeps the last dimension.
VIEWS: Final = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.flatten.using_ints,
    }
)
#: Those whose second argument is the list of sizes.
RESHAPES: Final = frozenset(
    {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
)
#: Ops whose result has the very values, shape and dtype of their first argument.
IDENTITIES: Final = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
    }
)
CASTS: Final = frozenset(
    {prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype}
)
ADDS: Final = frozenset({aten.add.Tensor, aten.add.Scalar})
MULS: Final = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVS: Final = frozenset({aten.div.Tensor, aten.div.Scalar})
#: The dtypes that the fused op takes and gives.
DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_op(node: object, ops: frozenset[Any] | Any) -> bool:
    """True if `node` is a call of one of `ops` (one overload, or a set of them)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in ops if isinstance(ops, frozenset) else node.target is ops


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None if it is unknown or not one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def op_name(node: fx.Node) -> str:
    """A short readable name: "aten.add.Tensor", "output"."""
    return str(node.target) if node.op == "call_function" else node.op


def static_size(size: object) -> int | None:
    """A size as a number if the compiler knows it, without adding a guard; None if symbolic."""
    if isinstance(size, torch.SymInt):
        known = size.node.maybe_as_int()
        return None if known is None else int(known)
    return size if isinstance(size, int) else None


def same_size(left: object, right: object) -> bool:
    """True if two sizes are equal for certain, without adding a guard.

    Certain is also what follows from guards that tracing made: after `residual + y.view(-1, 4, D)`
    the compiler knows that the residual's first size is a fourth of y's.
    """
    known = static_size(left), static_size(right)
    if known[0] is not None and known[1] is not None:
        return known[0] == known[1]
    if not (isinstance(left, (int, torch.SymInt)) and isinstance(right, (int, torch.SymInt))):
        return False
    return statically_known_true(left == right)


def hidden_size(node: object) -> int | None:
    """The size of a tensor's last dimension if it is known; None otherwise."""
    value = tensor(node)
    return None if value is None or value.ndim == 0 else static_size(value.shape[-1])


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if two shapes are equal for certain, without adding a guard."""
    return left.ndim == right.ndim and all(map(same_size, left.shape, right.shape))


def is_vector(node: object, size: int) -> bool:
    """True for a 1-D tensor of `size` elements: a bias or a norm's weight."""
    value = tensor(node)
    return value is not None and value.ndim == 1 and same_size(value.shape[0], size)


def is_scalar(value: object) -> bool:
    """True for a number, or a node that holds a 0-d tensor."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return True
    held = tensor(value)
    return held is not None and held.ndim == 0


def is_cast(node: object) -> bool:
    """True for a change of dtype alone (not of device, layout or memory format)."""
    if not is_op(node, CASTS):
        return False
    assert isinstance(node, fx.Node)
    held = tensor(node.args[0])
    result = tensor(node)
    return held is not None and result is not None and held.device == result.device


def is_second_wait(node: object) -> bool:
    """True for a wait_tensor of a wait_tensor."""
    if not is_op(node, c10d.wait_tensor.default):
        return False
    assert isinstance(node, fx.Node)
    return is_op(node.args[0], c10d.wait_tensor.default)


def is_view(node: object) -> bool:
    """True for a reshape or identity that keeps the last dimension as it is.

    A wait for what has been waited for is an identity too: `funcol.wait_tensor` written around
    `funcol.all_reduce`, which waits by itself while it is traced.
    """
    if not (is_op(node, VIEWS) or is_op(node, IDENTITIES) or is_second_wait(node)):
        return False
    assert isinstance(node, fx.Node)
    before, after = tensor(node.args[0]), tensor(node)
    if before is None or after is None or before.ndim == 0 or after.ndim == 0:
        return False
    return same_size(before.shape[-1], after.shape[-1])


def under_views(node: fx.Node) -> fx.Node:
    """The node below any views and casts."""
    while (is_view(node) or is_cast(node)) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def under_widening_cast(node: object) -> object:
    """The node below a cast to fp32, if there is one: the value before the upcast."""
    if is_cast(node):
        assert isinstance(node, fx.Node)
        result = tensor(node)
        if result is not None and result.dtype is torch.float32:
            return node.args[0]
    return node


def under_scalar_cast(node: fx.Node) -> fx.Node:
    """The 0-d tensor below a cast to fp32, where the fused op takes it to fp32 itself.

    A cast to a smaller dtype, or of or to an integer, rounds otherwise than that and must stay.
    """
    below = under_widening_cast(node)
    held = tensor(below)
    if isinstance(below, fx.Node) and held is not None and held.dtype.is_floating_point:
        return below
    return node


def operands(node: fx.Node) -> tuple[object, object] | None:
    """The two operands of a plain binary op; None if it carries alpha or rounding."""
    if len(node.args) != 2 or any(value != 1 for value in node.kwargs.values()):
        return None
    return node.args[0], node.args[1]


def other_operand(node: fx.Node, known: fx.Node) -> tuple[object, int] | None:
    """The operand of a commutative op beside `known`, and its index; None for `x + x`."""
    pair = operands(node)
    if pair is None or pair[0] is pair[1]:
        return None
    if pair[0] is known:
        return pair[1], 1
    if pair[1] is known:
        return pair[0], 0
    return None


def users_in_order(node: fx.Node) -> list[fx.Node]:
    """The readers of a node, in program order."""
    return sorted(node.users)


def graph_nodes(graph: fx.Graph, op: str) -> Iterator[fx.Node]:
    """The nodes of one kind ("placeholder", "output"), in order."""
    return (node for node in graph.nodes if node.op == op)


def copied_meta(node: fx.Node) -> dict[str, Any]:
    """The meta data for a node that stands for a part of `node`; its "val" may have to change.

    What it was called with in eager isn't what the part is called with.
    """
    return {key: value for key, value in node.meta.items() if key != "eager_input_vals"}


def copy_with_input(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """Insert a copy of `node` that reads `source` in place of its first argument."""
    assert callable(node.target)
    return graph.call_function(node.target, (source, *node.args[1:]), dict(node.kwargs))
