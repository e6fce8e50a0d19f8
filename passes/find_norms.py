"""Find every RMSNorm of a graph, however it is spelt.

The anchor is the reciprocal root; from it the walk goes back to the hidden state and forward
over weight and casts:

    hidden -> [convert fp32] -> pow(., 2) | mul(., .) -> mean -> add(eps) -> rsqrt | pow(-0.5) | sqrt
    mul(hidden32, root) | div(hidden32, sqrt) -> [convert] -> [mul weight] -> [convert]

A mean without keepdim is followed by an unsqueeze, at once or behind the root.
`aten._fused_rms_norm`, `aten.rms_norm` and the ops registered by `register_rms_norm` are found
as they are. Reads only. A norm over other dims or without upcast is found too: judging it is
`judge`'s job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from fx_fusion.lowering.norm_form import NormForm
from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten
from fx_fusion.passes.norm import Norm
from fx_fusion.passes.norm_tail import with_tail
from fx_fusion.passes.registry import opaque_norm


def find_norms(graph: fx.Graph) -> list[Norm]:
    """Every RMSNorm of the graph, in program order of its output."""
    found: list[Norm] = []
    for node in graph.nodes:
        norm = _from_root(node) or _from_aten_op(node) or opaque_norm_of(node)
        if norm is not None:
            found.append(norm)
    return sorted(found, key=lambda norm: norm.output)


def opaque_norm_of(node: fx.Node) -> Norm | None:
    """The norm a registered opaque op computes, or None."""
    match = opaque_norm(node)
    if match is None:
        return None
    return Norm(
        hidden=match.hidden,
        output=match.output,
        interior=match.interior,
        form=match.form,
        eps=match.eps,
        eps_node=match.eps_node,
        weight=match.weight,
        dims=(-1,),
        compute_dtype=torch.float32,
        norm_dtype=match.norm_dtype,
        residual=match.residual,
        hidden_output=match.hidden_output,
    )


def _from_root(root: fx.Node) -> Norm | None:
    """The norm whose reciprocal root is this node (rsqrt, pow(-0.5), sqrt or 1/sqrt)."""
    reciprocal = _root_kind(root)
    if reciprocal is None or not isinstance(root.args[0], fx.Node):
        return None
    statistic = _statistic(root.args[0])
    if statistic is None:
        return None
    if not statistic.kept:
        column = next((user for user in root.users if _is_column_of(user, root)), None)
        if column is None:
            return None
        statistic, root = replace(statistic, chain=(*statistic.chain, root)), column
    if reciprocal == "sqrt":
        scaled = _scaled_by(statistic.upcast, statistic.hidden, root, nodes.DIVS)
        if scaled is None:
            inverse = _inverse_of(root)
            if not inverse:
                return None
            statistic = replace(statistic, chain=(*statistic.chain, root, *inverse[:-1]))
            root, reciprocal = inverse[-1], "1/sqrt"
    if reciprocal != "sqrt":
        scaled = _scaled_by(statistic.upcast, statistic.hidden, root, nodes.MULS)
    if scaled is None:
        return None
    norm = Norm(
        hidden=statistic.hidden,
        output=scaled,
        interior=(*statistic.chain, root, scaled),
        form=NormForm("none", "after_weight", reciprocal),  # type: ignore[arg-type]
        eps=statistic.eps,
        eps_node=statistic.eps_node,
        dims=statistic.dims,
        compute_dtype=statistic.dtype,
        rstd=None if reciprocal == "sqrt" else root,
    )
    return with_tail(norm)


def _root_kind(node: fx.Node) -> str | None:
    if nodes.is_op(node, aten.rsqrt.default):
        return "rsqrt"
    if nodes.is_op(node, aten.sqrt.default):
        return "sqrt"
    if nodes.is_op(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5:
        return "pow"
    if nodes.is_op(node, aten.pow.Tensor_Scalar) and node.args[1] == 0.5:
        return "sqrt"
    return None


def _inverse_of(root: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes of `root.reciprocal()`, or of Python's `1 / root`, which multiplies it by 1."""
    for user in root.users:
        if not nodes.is_op(user, aten.reciprocal.default):
            continue
        following = next(iter(user.users)) if len(user.users) == 1 else None
        if nodes.is_op(following, nodes.MULS):
            assert following is not None
            pair = nodes.operands(following)
            if pair is not None and any(isinstance(v, (int, float)) and v == 1 for v in pair):
                return user, following
        return (user,)
    return ()


@dataclass(frozen=True)
class _Statistic:
    """mean(hidden^2) + eps, and the nodes that compute it; `kept` if as a column, [..., 1]."""

    hidden: fx.Node
    upcast: fx.Node
    chain: tuple[fx.Node, ...]
    eps: float
    eps_node: fx.Node | None
    dims: tuple[int, ...] | None
    dtype: torch.dtype | None
    kept: bool


def _statistic(node: fx.Node) -> _Statistic | None:
    chain = [node]
    eps: float = 0.0
    eps_node: fx.Node | None = None
    mean = node
    if nodes.is_op(node, nodes.ADDS):
        pair = nodes.operands(node)
        if pair is None:
            return None
        left, right = pair
        if nodes.is_scalar(left) and not nodes.is_scalar(right):
            left, right = right, left
        if not isinstance(left, fx.Node) or not nodes.is_scalar(right):
            return None
        mean = left
        if isinstance(right, fx.Node):
            eps_node = right
        else:
            assert isinstance(right, (int, float))
            eps = float(right)
        chain.append(mean)
    column = mean
    if nodes.is_op(mean, nodes.VIEWS) and isinstance(mean.args[0], fx.Node):
        mean = mean.args[0]
        chain.append(mean)
    squares = _mean_of(mean, chain)
    if squares is None:
        return None
    square, dims, kept = squares
    if column is not mean:  # mean(-1).unsqueeze(-1)
        if kept or not _is_column_of(column, mean):
            return None
        kept = True
    if not squares[2] and dims != (-1,):  # what comes back as the last dim was another
        return None
    upcast = _square_of(square)
    if upcast is None:
        return None
    chain.append(square)
    hidden = nodes.under_widening_cast(upcast)
    assert isinstance(hidden, fx.Node)
    if hidden is not upcast:
        chain.append(upcast)
    value = nodes.tensor(square)
    dtype = None if value is None else value.dtype
    return _Statistic(hidden, upcast, tuple(reversed(chain)), eps, eps_node, dims, dtype, kept)


def _is_column_of(view: fx.Node, source: fx.Node) -> bool:
    """True if `view` is `source` with a last dimension of 1, as by `unsqueeze(-1)`."""
    one, other = nodes.tensor(view), nodes.tensor(source)
    if not nodes.is_op(view, nodes.VIEWS) or one is None or other is None:
        return False
    return (
        one.ndim == other.ndim + 1
        and nodes.same_size(one.shape[-1], 1)
        and all(map(nodes.same_size, one.shape, other.shape))
    )


def _mean_of(
    mean: fx.Node, chain: list[fx.Node]
) -> tuple[fx.Node, tuple[int, ...] | None, bool] | None:
    """The node whose mean this is, over which dims, and keepdim; also spelt sum / hidden size."""
    if nodes.is_op(mean, aten.mean.dim):
        reduced, dims, keep = _reduction_arguments(mean)
    elif nodes.is_op(mean, nodes.DIVS) and nodes.is_op(mean.args[0], aten.sum.dim_IntList):
        total = mean.args[0]
        assert isinstance(total, fx.Node)
        reduced, dims, keep = _reduction_arguments(total)
        value = nodes.tensor(reduced)
        if (
            value is None
            or dims is None
            or len(dims) != 1
            or nodes.static_size(value.shape[dims[0]]) != mean.args[1]
        ):
            return None
        chain.append(total)
    else:
        return None
    return None if reduced is None else (reduced, dims, keep)


def _reduction_arguments(
    node: fx.Node,
) -> tuple[fx.Node | None, tuple[int, ...] | None, bool]:
    """Input, dims (negative, None if not literal) and keepdim of a mean or sum."""
    source = node.args[0]
    value = nodes.tensor(source)
    if not isinstance(source, fx.Node) or value is None or node.kwargs.get("dtype") is not None:
        return None, None, False
    if value.ndim == 0:  # torch takes dim -1 of a number, but it has no last dimension
        return None, None, False
    raw = node.args[1] if len(node.args) > 1 else None
    keep = bool(node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False))
    if not isinstance(raw, (list, tuple)) or not all(isinstance(dim, int) for dim in raw):
        return source, None, keep
    dims = tuple(sorted(int(str(dim)) % value.ndim - value.ndim for dim in raw))
    return source, dims, keep


def _square_of(node: fx.Node) -> fx.Node | None:
    """The node this is the square of: pow(x, 2) or x * x."""
    if (
        (nodes.is_op(node, aten.pow.Tensor_Scalar) and node.args[1] == 2)
        or nodes.is_op(node, aten.square.default)
        or (nodes.is_op(node, aten.mul.Tensor) and node.args[0] is node.args[1])
    ):
        base = node.args[0]
    else:
        return None
    return base if isinstance(base, fx.Node) else None


def _scaled_by(
    upcast: fx.Node, hidden: fx.Node, root: fx.Node, ops: frozenset[object]
) -> fx.Node | None:
    """The first reader of `root` that multiplies (or divides) the hidden state by it."""
    for user in nodes.users_in_order(root):
        if not nodes.is_op(user, ops):
            continue
        pair = nodes.operands(user)
        if pair is None or root not in pair:
            continue
        if ops is nodes.DIVS and pair[1] is not root:
            continue
        other = pair[0] if pair[1] is root else pair[1]
        same = other is upcast or other is hidden or nodes.under_widening_cast(other) is hidden
        if same:
            return user
    return None


def _from_aten_op(node: fx.Node) -> Norm | None:
    """The norm of `aten._fused_rms_norm` (two results) or `aten.rms_norm` (one)."""
    fused = nodes.is_op(node, aten._fused_rms_norm.default)
    if not fused and not nodes.is_op(node, aten.rms_norm.default):
        return None
    arguments = [*node.args, *[None] * (4 - len(node.args))]
    hidden, shape, weight, eps = arguments[:4]
    value = nodes.tensor(hidden)
    if not isinstance(hidden, fx.Node) or value is None or not isinstance(shape, (list, tuple)):
        return None
    if weight is not None and not isinstance(weight, fx.Node):
        return None
    results = {user.args[1]: user for user in node.users} if fused else {0: node}
    output = results.get(0)
    if output is None:
        return None
    interior = (node, *sorted(results.values())) if fused else (node,)
    default_eps = torch.finfo(torch.float32).eps
    return Norm(
        hidden=hidden,
        output=output,
        interior=interior,
        form=NormForm("w" if weight is not None else "none"),
        eps=default_eps if eps is None else float(str(eps)),
        weight=weight,
        dims=tuple(range(-len(shape), 0)),
        compute_dtype=torch.float32,
        rstd=results.get(1),
    )
