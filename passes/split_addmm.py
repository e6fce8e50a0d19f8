"""Take an add apart from the GEMM that Inductor joined it with, so that a site can have it.

What the user's code says, and what Inductor made of it, as nobody else reads the product:

    h = x @ w + all_reduce(y)               # the residual is fresh from a GEMM
    h = addmm(wait_tensor(all_reduce(y)), x, w)

While sites are looked for:

    m = mm(x, w);  h = add(m, wait_tensor(all_reduce(y)))

What isn't fused is joined again. Eager rounds the product before it adds, so the fused op does as
eager does. An addmm that the user's code calls rounds once, and is left alone; which one it is
says `original_aten`, where torch keeps the op that a node was traced from (2.12 on; 2.11 leaves
what Inductor made without it, so there nothing is split).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.nodes import aten


def split_addmms(graph: fx.Graph) -> list[fx.Node]:
    """Split what Inductor joined, in place; returns the nodes that are adds now."""
    found = graph.find_nodes(op="call_function", target=aten.addmm.default)
    added = [node for node in found if _was_an_add(node)]
    for node in added:
        _split(graph, node)
    return added


def join_addmms(graph: fx.Graph, added: Sequence[fx.Node]) -> None:
    """Join again what is as `split_addmms` left it, in place.

    Args:
        graph: The graph, where sites have been rewritten since.
        added: What `split_addmms` returned.
    """
    present = set(graph.nodes) if added else set()
    for node in added:
        product = node.args[0] if node in present else None
        if not nodes.is_op(product, aten.mm.default):
            continue
        assert isinstance(product, fx.Node)
        if set(product.users) != {node}:  # the residual of a site
            continue
        node.target = aten.addmm.default
        node.args = (node.args[1], *product.args)
        graph.erase_node(product)


def _was_an_add(node: fx.Node) -> bool:
    """True if `node` is an add of two tensors of one shape in the user's code."""
    summand, result = nodes.tensor(node.args[0]), nodes.tensor(node)
    return (
        # by name: in a graph that was copied it is another object
        str(node.meta.get("original_aten")) == str(aten.add.Tensor)
        and not node.kwargs
        and summand is not None
        and result is not None
        and summand.dtype is result.dtype
        and nodes.same_shape(summand, result)
    )


def _split(graph: fx.Graph, node: fx.Node) -> None:
    summand, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(aten.mm.default, (left, right))
    product.meta = nodes.copied_meta(node)
    product.meta["val"] = torch.empty_like(node.meta["val"])  # memory of its own
    node.target, node.args = aten.add.Tensor, (product, summand)
