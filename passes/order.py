"""Order in a graph: what depends on what, what is written in place, where an op can stand.

Program order (`Node.__lt__`) prunes every search, so a check costs the nodes between two
places rather than the whole graph. It holds as long as the graph is topologically sorted,
which `rewrite` sees to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten


def depends_on(node: fx.Node, ancestor: fx.Node) -> bool:
    """True if `node` is computed from `ancestor`, or is it."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        if current is ancestor:
            return True
        for source in current.all_input_nodes:
            # nothing before the ancestor can depend on it
            if source not in seen and not source < ancestor:
                seen.add(source)
                stack.append(source)
    return False


def descendants(roots: Iterable[fx.Node], graph: fx.Graph) -> frozenset[fx.Node]:
    """Every node computed from one of `roots`, those included; one pass over the graph."""
    reached = set(roots)
    if not reached:
        return frozenset()
    for node in graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return frozenset(reached)


@dataclass(frozen=True)
class Mutations:
    """The in-place writes of a graph: each writing node with the base it writes to."""

    writes: tuple[tuple[fx.Node, fx.Node], ...]

    def __bool__(self) -> bool:
        """True if anything is written in place."""
        return bool(self.writes)

    def between(self, value: fx.Node, start: fx.Node, end: fx.Node) -> fx.Node | None:
        """A write to `value`'s memory after `start` and before the op that stands at `end`."""
        base = _base(value)
        for write, written in self.writes:
            if written is base and start < write and not end < write:
                return write
        return None


def mutations_of(graph: fx.Graph) -> Mutations:
    """Collect the in-place writes of a graph; the final copies into graph inputs included."""
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        schema = node.target._schema
        if not schema.is_mutable:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = (
                node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            )
            held = given if isinstance(given, (list, tuple)) else [given]
            writes += [(node, _base(value)) for value in held if isinstance(value, fx.Node)]
    return Mutations(tuple(writes))


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and isinstance(
        node.args[0] if node.args else None, fx.Node
    ):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target is aten.clone.default:
            break
        returns = target._schema.returns
        shares = bool(returns) and returns[0].alias_info is not None
        if not (shares or nodes.is_op(node, nodes.VIEWS)):
            break
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node
