"""Reduce once where two reduced values are added (option merge_all_reduces).

Before:

    y = wait_tensor(all_reduce(a, "sum", g));  z = wait_tensor(all_reduce(b, "sum", g))
    h = add(residual, add(y, z))            # or add(add(residual, y), z)

After:

    s = add(a, b)
    h = add(residual, wait_tensor(all_reduce(s, "sum", g)))

`all_reduce` is linear, so the sum is the same but for rounding: the partial sums a and b are
added and rounded to the activation dtype on each rank before they are reduced, where eager
rounds each reduced value. Off by default for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten, c10d
from fx_fusion.passes.source import module_of, source_of


@dataclass(frozen=True)
class Origin:
    """Where an all_reduce that was merged away stood in the user's code."""

    source: str
    module: str


@dataclass(frozen=True)
class _Term:
    """A reduced value as it stands in a sum, with the views in front of it."""

    value: fx.Node
    all_reduce: fx.Node
    views: tuple[fx.Node, ...]

    @property
    def x(self) -> fx.Node:
        x = self.all_reduce.args[0]
        assert isinstance(x, fx.Node)
        return x


def merge_summed(graph: fx.Graph) -> dict[fx.Node, tuple[Origin, ...]]:
    """Merge all_reduces whose results are only added.

    Returns:
        For each all_reduce that now reduces several, the origins of those merged into it.
    """
    merged: dict[fx.Node, tuple[Origin, ...]] = {}
    for add in list(graph.nodes):
        pair = _pair(add)
        if pair is None:
            continue
        terms, residual = pair
        early, late = sorted(term.all_reduce for term in terms)
        origins = (*merged.pop(early, ()), Origin(source_of(early), module_of(early)))
        kept = _merge(graph, add, terms, residual)
        merged[kept] = (*origins, *merged.pop(late, ()))
    return merged


def _pair(add: fx.Node) -> tuple[tuple[_Term, _Term], fx.Node | None] | None:
    """The two terms of `y + z` or `(residual + y) + z`, and the residual of the second form."""
    operands = nodes.operands(add) if nodes.is_op(add, aten.add.Tensor) else None
    if operands is None or operands[0] is operands[1]:
        return None
    left, right = _term(operands[0]), _term(operands[1])
    if left is not None and right is not None:
        return ((left, right), None) if _mergeable(left, right) else None
    last, other = (right, operands[0]) if right is not None else (left, operands[1])
    if (
        last is None
        or not isinstance(other, fx.Node)
        or not nodes.is_op(other, aten.add.Tensor)
    ):
        return None
    inner = nodes.operands(other)
    if inner is None or len(other.users) != 1 or inner[0] is inner[1]:
        return None
    for index in (0, 1):
        first, residual = _term(inner[index]), inner[1 - index]
        if first is None or not isinstance(residual, fx.Node):
            continue
        if _mergeable(first, last) and _same_tensor(residual, last.value):
            return (first, last), residual
    return None


def _term(value: object) -> _Term | None:
    """The reduced value under `value`'s views, if nothing else reads any of them."""
    views: list[fx.Node] = []
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if nodes.is_op(value, c10d.wait_tensor.default):
            all_reduce = value.args[0]
            if not nodes.is_op(all_reduce, c10d.all_reduce.default):
                return None
            assert isinstance(all_reduce, fx.Node)
            if len(all_reduce.users) != 1 or all_reduce.args[1] != "sum":
                return None
            return _Term(views[0] if views else value, all_reduce, tuple(reversed(views)))
        if not nodes.is_view(value):
            return None
        views.append(value)
        value = value.args[0]
    return None


def _mergeable(left: _Term, right: _Term) -> bool:
    same_group = left.all_reduce.args[2] == right.all_reduce.args[2]
    return same_group and _same_tensor(left.value, right.value)


def _same_tensor(left: fx.Node, right: fx.Node) -> bool:
    a, b = nodes.tensor(left), nodes.tensor(right)
    if a is None or b is None:
        return False
    return a.dtype == b.dtype and a.device == b.device and nodes.same_shape(a, b)


def _merge(
    graph: fx.Graph, add: fx.Node, terms: tuple[_Term, _Term], residual: fx.Node | None
) -> fx.Node:
    """Put one all_reduce of the sum right before `add`; returns its node."""
    late = max(term.all_reduce for term in terms)
    with graph.inserting_before(add):
        left, right = (_viewed(graph, term) for term in terms)
        total = graph.call_function(aten.add.Tensor, (left, right))
        kept = graph.call_function(c10d.all_reduce.default, (total, *late.args[1:]))
        wait = graph.call_function(c10d.wait_tensor.default, (kept,))
    for node in (total, kept, wait):
        node.meta = nodes.copied_meta(late)
        node.meta["val"] = left.meta["val"]
    if residual is None:
        add.replace_all_uses_with(wait)
        graph.erase_node(add)
    else:
        (inner,) = terms[0].value.users
        add.args = (residual, wait)
        graph.erase_node(inner)
    for term in terms:
        (ready,) = term.all_reduce.users
        for node in (*reversed(term.views), ready, term.all_reduce):
            graph.erase_node(node)
    return kept


def _viewed(graph: fx.Graph, term: _Term) -> fx.Node:
    """A term's input with the term's views applied to it."""
    x = term.x
    for view in term.views:
        if not nodes.is_op(view, nodes.VIEWS):
            continue
        copy = nodes.copy_with_input(graph, view, x)
        copy.meta = nodes.copied_meta(view)
        x = copy
    return x
