from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from fx_fusion.passes.undo import Snapshot

aten = torch.ops.aten


def random_graph(seed: int, size: int = 40) -> fx.Graph:
    """A graph with shared operands, list operands and keyword operands."""
    choose = random.Random(seed)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "y")]
    for _ in range(size):
        a, b = choose.choice(nodes), choose.choice(nodes)
        kind = choose.randrange(3)
        if kind == 0:
            node = graph.call_function(aten.add.Tensor, (a, b), {"alpha": 2})
        elif kind == 1:
            node = graph.call_function(aten.mul.Tensor, (a, 3.0))
        else:
            node = graph.call_function(aten.cat.default, ([a, b], 0))
        node.meta["val"] = len(nodes)
        nodes.append(node)
    graph.output((nodes[-1], nodes[-2], None))
    fx.GraphModule({}, graph)
    return graph


def structure(graph: fx.Graph) -> list[tuple[object, ...]]:
    """What a graph computes, with nodes named by their position."""
    number = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            repr(fx.map_arg(node.args, lambda n: _Named(number[n]))),
            repr(fx.map_arg(node.kwargs, lambda n: _Named(number[n]))),
            node.meta.get("val"),
        )
        for node in graph.nodes
    ]


class _Named(str):
    """A name that prints as itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def mangle(graph: fx.Graph, seed: int) -> None:
    """Erase, add, rewire and move nodes at random, and stop anywhere."""
    choose = random.Random(seed)
    for _ in range(choose.randint(1, 25)):
        inner = [node for node in graph.nodes if node.op == "call_function"]
        node = choose.choice(inner)
        action = choose.randrange(4)
        if action == 0:
            first = next(iter(graph.nodes))
            node.replace_all_uses_with(first)
            graph.erase_node(node)
        elif action == 1:
            with graph.inserting_after(node):
                new = graph.call_function(aten.neg.default, (node,))
            node.replace_all_uses_with(
                new, delete_user_cb=lambda user, new=new: user is not new
            )
        elif action == 2:
            node.target = aten.sub.Tensor
            node.kwargs = {}
        else:
            choose.choice(inner).append(node)  # breaks the order, too


@pytest.mark.parametrize("seed", range(30))
def test_a_graph_is_what_it_was(seed: int) -> None:
    graph = random_graph(seed)
    before = structure(graph)
    snapshot = Snapshot(graph)
    mangle(graph, seed)
    assert structure(graph) != before
    snapshot.restore()
    assert structure(graph) == before
    graph.lint()
    for node in graph.nodes:
        assert all(node in operand.users for operand in node.all_input_nodes)
        assert all(node in user.all_input_nodes for user in node.users)


def test_nodes_that_are_still_there_are_kept() -> None:
    graph = random_graph(0)
    nodes = list(graph.nodes)
    snapshot = Snapshot(graph)
    with graph.inserting_after(nodes[5]):
        graph.call_function(aten.neg.default, (nodes[5],))
    snapshot.restore()
    assert list(graph.nodes) == nodes


def test_a_restored_graph_can_be_searched_by_target() -> None:
    graph = random_graph(1)
    target = aten.mul.Tensor
    found = len(graph.find_nodes(op="call_function", target=target))
    snapshot = Snapshot(graph)
    for node in graph.find_nodes(op="call_function", target=target):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    snapshot.restore()
    assert len(graph.find_nodes(op="call_function", target=target)) == found
