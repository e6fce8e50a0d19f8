"""Put a graph back as it was, should the pass fail half way through."""

from __future__ import annotations

from typing import Any

from torch import fx


class Snapshot:
    """What a graph consists of: its nodes in order, and each one's target and operands.

    Taking one copies references only, since operands are immutable: well below a microsecond a
    node, where a copy of the graph costs tens.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Remember `graph` as it is now."""
        self._graph = graph
        self._nodes = [(n, n.target, n.args, n.kwargs) for n in graph.nodes]

    def restore(self) -> None:
        """Make the graph what it was.

        Nodes that are still there are kept, so references to them stay valid; those that were
        erased come back as new nodes with the old meta data.
        """
        graph = self._graph
        present = set(graph.nodes)
        current: dict[fx.Node, fx.Node] = {}

        def mapped(value: Any) -> Any:
            return fx.map_arg(value, lambda node: current[node])

        last: fx.Node = graph._root
        for node, target, args, kwargs in self._nodes:
            # Before they're attached to a node, operands stand in the old order: mapping
            # them needs only nodes that came earlier.
            args, kwargs = mapped(args), mapped(kwargs)
            if node in present:
                node.target, node.args, node.kwargs = target, args, kwargs
                last.append(node)
                current[node] = node
            else:
                with graph.inserting_after(last):
                    again = graph.create_node(
                        node.op, target, args, kwargs, node.name, node.type
                    )
                again.meta = node.meta
                current[node] = again
            last = current[node]
        kept = set(current.values())
        added = [node for node in graph.nodes if node not in kept]
        for node in added:  # they may stand in any order
            node.args, node.kwargs = (), {}
        for node in added:
            graph.erase_node(node)
