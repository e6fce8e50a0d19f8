"""What the fused op returns for a site: which results are read, and what stands for them.

A chain is the nodes from the reduced value to the norm's output. Some of them can be replaced
by a result of the op (the norm, the hidden state, the reduced value, the reciprocal root); the
others are erased, or live on and are recomputed where something outside reads them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from fx_fusion.passes import nodes
from fx_fusion.passes.find_sites import Site

#: The op's results, in its order.
OUTPUTS: Final = ("norm", "residual", "reduced", "rstd")


def chain_nodes(site: Site) -> tuple[fx.Node, ...]:
    """The nodes from the reduced value to the norm's output, in program order."""
    assert site.norm is not None
    assert site.reduced is not None
    steps = [step.node for step in site.steps]
    chain = {site.reduced, *steps, *site.norm_views, *site.norm.interior}
    return tuple(sorted(chain))


def output_nodes(site: Site) -> dict[fx.Node, str]:
    """The nodes of the chain that results of the op can stand for, and which."""
    norm, hidden = site.norm, site.hidden
    assert norm is not None
    assert hidden is not None
    assert site.reduced is not None
    roots = {site.reduced: "reduced"}
    bare = all(step.kind == "view" for step in site.steps)
    if norm.residual is None:
        roots[hidden] = "reduced" if bare else "residual"
    elif norm.hidden_output is not None:
        roots[norm.hidden_output] = "residual"
    if norm.rstd is not None:
        roots[norm.rstd] = "rstd"
    roots[norm.output] = "norm"
    return roots


def wanted_outputs(chain: tuple[fx.Node, ...], roots: dict[fx.Node, str]) -> frozenset[str]:
    """The results something reads once the chain is replaced.

    A node of the chain lives on if something outside reads it, or a living node that isn't
    itself replaced does.
    """
    inside = set(chain)
    living: set[fx.Node] = set()
    for node in reversed(chain):
        for user in node.users:
            if user not in inside or (user in living and user not in roots):
                living.add(node)
                break
    return frozenset(name for node, name in roots.items() if node in living)


def fake_results(
    site: Site,
    x: fx.Node,
    wanted: frozenset[str],
    empty: dict[tuple[torch.dtype, torch.device], torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The op's results as fake tensors, as the op's own fake implementation would give them.

    The replaced nodes' fake tensors are used again where they fit: running the fake
    implementation for each site took a third of the pass's time. `empty` keeps one empty
    tensor a dtype and device for the results that aren't wanted.
    """
    like = nodes.tensor(x)
    assert like is not None
    held = {name: nodes.tensor(node) for node, name in output_nodes(site).items()}
    assert site.norm is not None
    norm, hidden = nodes.tensor(site.norm.output), _hidden_value(site)
    assert norm is not None
    dtypes = (norm.dtype, hidden.dtype, like.dtype, torch.float32)
    results = []
    for name, dtype in zip(OUTPUTS, dtypes, strict=True):
        if name not in wanted:
            key = (dtype, like.device)
            if key not in empty:
                empty[key] = like.new_empty((0,), dtype=dtype)
            results.append(empty[key])
            continue
        shape = (*like.shape[:-1], 1) if name == "rstd" else like.shape
        value = held.get(name)
        if value is None or not _is_contiguous(value, shape, dtype):
            value = like.new_empty(shape, dtype=dtype)
        results.append(value)
    return tuple(results)


def _hidden_value(site: Site) -> torch.Tensor:
    """The hidden state's fake tensor; an opaque add-and-norm op returns it itself."""
    norm = site.norm
    assert norm is not None
    value = nodes.tensor(norm.hidden_output or norm.hidden)
    assert value is not None
    return value


def _is_contiguous(
    value: torch.Tensor, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype
) -> bool:
    """True if a tensor surely is contiguous and has this shape and dtype, without a guard."""
    if value.dtype != dtype or value.ndim != len(shape):
        return False
    if not all(map(nodes.same_size, value.shape, shape)):
        return False
    # a symbolic layout counts as no
    known = all(nodes.static_size(size) is not None for size in value.shape)
    return known and value.is_contiguous()
