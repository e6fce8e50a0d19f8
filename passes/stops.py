"""Why the walk from an all_reduce ended before an RMSNorm: one Stop for each dead end.

A dead end is looked behind for a bounded number of nodes, so that the reason given is the true
one: an unknown op in front of an RMSNorm is an `unsupported_step`, in front of a LayerNorm it
is `layer_norm`, in front of a matmul it is `no_norm`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten, c10d
from fx_fusion.passes.order import depends_on
from fx_fusion.passes.registry import opaque_all_reduce
from fx_fusion.report import Number, Reason

#: How many nodes are looked at behind a dead end.
PROBE_NODES: Final = 48
#: How many scalar steps may stand between a sum of squares and its root.
ROOT_STEPS: Final = 5

#: Of several dead ends the first in this list is reported.
PRIORITY: Final = (
    Reason.COALESCED,
    Reason.LAYER_NORM,
    Reason.SUM_OF_SQUARES,
    Reason.SUMMED_ALL_REDUCES,
    Reason.CHAINED_ALL_REDUCES,
    Reason.RESIDUAL_SHAPE,
    Reason.RESIDUAL_DEPENDS,
    Reason.UNKNOWN_SHAPE,
    Reason.NORM_DIMS,
    Reason.UNSUPPORTED_STEP,
    Reason.NO_NORM,
    Reason.LEAVES_GRAPH,
)
_LAYER_NORMS: Final = frozenset(
    {
        aten.var_mean.correction,
        aten.native_layer_norm.default,
        aten.layer_norm.default,
        aten.var.correction,
    }
)
#: What a norm begins with, whichever it is.
NORM_STEPS: Final = _LAYER_NORMS | {aten.mean.dim, aten._fused_rms_norm.default}
_ROOTS: Final = frozenset({aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar})
#: Ops other than pointwise ones that a probe looks through.
_LOOK_THROUGH: Final = frozenset(
    {
        aten.sum.dim_IntList,
        aten.slice.Tensor,
        aten.slice_scatter.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.select.int,
        aten.index.Tensor,
        aten.expand.default,
        aten.permute.default,
        aten.cat.default,
        aten.native_dropout.default,
    }
)


@dataclass(frozen=True)
class Stop:
    """A dead end: the reason, and the values that show it."""

    reason: Reason
    numbers: Mapping[str, Number] = field(default_factory=dict)


def first_stop(stops: Sequence[Stop]) -> Stop:
    """The dead end that tells most; NO_NORM if the value is simply not used."""
    for reason in PRIORITY:
        for stop in stops:
            if stop.reason is reason:
                return stop
    return Stop(Reason.NO_NORM, {"readers": 0})


def stop_at(
    node: fx.Node,
    user: fx.Node,
    residual: object,
    hidden_states: Collection[fx.Node],
) -> Stop | None:
    """Why `user`, reading `node`, is no step; None if the reader says nothing.

    Args:
        node: The last value of the walk.
        user: The reader that the walk can't follow.
        residual: The residual added so far, or None.
        hidden_states: The values that some RMSNorm of the graph normalises.
    """
    while nodes.is_view(user) and len(user.users) == 1:
        node, user = user, next(iter(user.users))
    if user.op == "output":
        return Stop(Reason.LEAVES_GRAPH, {"value": node.name})
    if nodes.is_op(user, aten.copy_.default):
        return None
    if nodes.is_op(user, c10d.all_reduce.default) or opaque_all_reduce(user) is not None:
        return Stop(Reason.CHAINED_ALL_REDUCES, {"next": user.name})
    op = nodes.op_name(user)
    if _reads_layer_norm(user):
        return Stop(Reason.LAYER_NORM, {"op": op})
    if _reaches_root(node, user):
        return Stop(Reason.SUM_OF_SQUARES, {"op": op})
    if nodes.is_op(user, aten.add.Tensor) and _other_depends(node, user):
        # the value goes on as the residual stream: a norm behind it belongs to later blocks
        reason = Reason.RESIDUAL_DEPENDS if _is_normed(user, hidden_states) else Reason.NO_NORM
        return Stop(reason, {"op": op, "input": "residual"})
    behind = probe(user, hidden_states)
    if behind == "layer_norm":
        return Stop(Reason.LAYER_NORM, {"op": op})
    if behind != "rms_norm":
        return Stop(Reason.NO_NORM, {"op": op, "leads_to": behind})
    if nodes.is_op(user, aten.add.Tensor):
        return _stop_at_add(node, user, residual, hidden_states)
    if nodes.is_op(user, nodes.VIEWS):  # it changes the last dimension, or it'd be a step
        return Stop(Reason.NORM_DIMS, {"op": op, **_last_dims(node, user)})
    return Stop(Reason.UNSUPPORTED_STEP, {"op": op})


def _stop_at_add(
    node: fx.Node, user: fx.Node, residual: object, hidden_states: Collection[fx.Node]
) -> Stop:
    op = nodes.op_name(user)
    found = nodes.other_operand(user, node)
    if found is None:
        return Stop(
            Reason.UNSUPPORTED_STEP, {"op": op, "alpha": str(user.kwargs.get("alpha", 1))}
        )
    other, value = nodes.tensor(found[0]), nodes.tensor(node)
    if isinstance(found[0], fx.Node) and "val" not in found[0].meta:
        return Stop(Reason.UNKNOWN_SHAPE, {"node": found[0].name, "role": "residual"})
    if residual is not None:
        if any(comes_from_all_reduce(added, hidden_states) for added in (found[0], residual)):
            return Stop(Reason.SUMMED_ALL_REDUCES, {"op": op})
        return Stop(Reason.UNSUPPORTED_STEP, {"op": op, "adds": 2})
    if other is not None and value is not None and not nodes.same_shape(other, value):
        shapes = {"reduced": str(list(value.shape)), "residual": str(list(other.shape))}
        return Stop(Reason.RESIDUAL_SHAPE, shapes)
    return Stop(Reason.UNSUPPORTED_STEP, {"op": op})


def _last_dims(node: fx.Node, view: fx.Node) -> dict[str, str]:
    """The last dimension in front of a view and behind it."""
    before, after = nodes.tensor(node), nodes.tensor(view)
    return {
        name: str(value.shape[-1])
        for name, value in (("reduced", before), ("viewed", after))
        if value is not None and value.ndim
    }


def _other_depends(node: fx.Node, add: fx.Node) -> bool:
    found = nodes.other_operand(add, node)
    return found is not None and isinstance(found[0], fx.Node) and depends_on(found[0], node)


def _is_normed(node: fx.Node, hidden_states: Collection[fx.Node]) -> bool:
    """True if a norm reads `node`, or a view of it."""
    while node not in hidden_states:
        views = [user for user in node.users if nodes.is_view(user)]
        if len(views) != 1:
            return False
        node = views[0]
    return True


def comes_from_all_reduce(
    value: object, hidden_states: Collection[fx.Node], depth: int = 8
) -> bool:
    """True if a value is a reduced tensor, or a sum of such, but for views, casts, bias, scale.

    What a norm reads is the residual stream, not a bare sum of all_reduces, even in the first
    layer of a model whose embedding is reduced too.
    """
    if not isinstance(value, fx.Node) or depth == 0 or _is_normed(value, hidden_states):
        return False
    value = nodes.under_views(value)
    if nodes.is_op(value, c10d.wait_tensor.default) or opaque_all_reduce(value) is not None:
        return True
    pair = nodes.operands(value) if nodes.is_op(value, nodes.ADDS | nodes.MULS) else None
    big = [] if pair is None else [operand for operand in pair if _at_least_2d(operand)]
    if len(big) == 2 and not nodes.is_op(value, nodes.ADDS):
        return False
    return bool(big) and all(
        comes_from_all_reduce(operand, hidden_states, depth - 1) for operand in big
    )


def _at_least_2d(value: object) -> bool:
    held = nodes.tensor(value)
    return held is not None and held.ndim > 1


def _reads_layer_norm(user: fx.Node) -> bool:
    """True if `user` takes the mean of what it reads (or of its cast) to subtract it."""
    if nodes.is_op(user, _LAYER_NORMS):
        return True
    if nodes.is_cast(user):
        return any(_reads_layer_norm(reader) for reader in user.users)
    if not nodes.is_op(user, aten.mean.dim):
        return False
    return any(
        nodes.is_op(reader, aten.sub.Tensor) and reader.args[1] is user for reader in user.users
    )


def _reaches_root(node: fx.Node, user: fx.Node) -> bool:
    """True if the value, one number a row, goes through scalar steps into a root."""
    value = nodes.tensor(node)
    if value is None or nodes.hidden_size(node) != 1:
        return False
    for _ in range(ROOT_STEPS):
        if nodes.is_op(user, _ROOTS):
            return True
        scalar_step = nodes.is_op(user, nodes.ADDS | nodes.MULS | nodes.DIVS) and all(
            argument is node or nodes.is_scalar(argument) for argument in user.args
        )
        if not (scalar_step or nodes.is_cast(user)) or len(user.users) != 1:
            return False
        node, user = user, next(iter(user.users))
    return False


def probe(start: fx.Node, hidden_states: Collection[fx.Node]) -> str:
    """What lies behind a node: "rms_norm", "layer_norm", or the op where the look ended."""
    queue = deque([start])
    seen = {start}
    end = nodes.op_name(start)
    looked = 0
    while queue and looked < PROBE_NODES:
        node = queue.popleft()
        looked += 1
        if node in hidden_states:
            return "rms_norm"
        if not looks_through(node):
            continue
        for user in nodes.users_in_order(node):
            if user in seen:
                continue
            seen.add(user)
            if _reads_layer_norm(user):
                return "layer_norm"
            end = nodes.op_name(user)
            queue.append(user)
    return end


def looks_through(node: fx.Node) -> bool:
    """True for an op that a norm may stand behind: pointwise, a view, a part of a tensor."""
    if nodes.is_op(node, nodes.VIEWS | nodes.IDENTITIES | nodes.CASTS | _LOOK_THROUGH):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.pointwise in target.tags
    return getattr(target, "__name__", "") == "getitem"
