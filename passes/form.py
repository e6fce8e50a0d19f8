"""What a site computes, for the choice of a kernel: read off the graph, nothing decided."""

from __future__ import annotations

import torch
from torch import fx

from fx_fusion.lowering.select import SiteForm
from fx_fusion.passes import nodes
from fx_fusion.passes.find_sites import Site
from fx_fusion.passes.outputs import chain_nodes, output_nodes, wanted_outputs


def form_of_site(site: Site) -> SiteForm:
    """The form of a site that leads to a norm; what the op's arguments will say."""
    norm = site.norm
    assert norm is not None
    added = site.step("residual")
    cast, scale = site.step("cast"), site.step("scale")
    hidden, output = _dtype(norm.hidden), _dtype(norm.output)
    wanted = wanted_outputs(chain_nodes(site), output_nodes(site))
    return SiteForm(
        residual=_dtype(norm.residual if added is None else added.value),
        weight=_dtype(norm.weight),
        weight_form=norm.form.weight,
        bias=site.step("bias") is not None,
        scale=scale is not None,
        eps_tensor=norm.eps_node is not None,
        add_dtype=_dtype(None if cast is None else cast.node),
        norm_dtype=norm.norm_dtype,
        out_dtype=None if output == hidden else output,
        want_reduced="reduced" in wanted,
        want_rstd="rstd" in wanted,
    )


def _dtype(node: fx.Node | None) -> torch.dtype | None:
    value = None if node is None else nodes.tensor(node)
    return None if value is None else value.dtype
