"""One RMSNorm found in a graph, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fx_fusion.lowering.norm_form import NormForm


@dataclass(frozen=True)
class Norm:
    """One RMSNorm of the graph.

    Attributes:
        hidden: The value that is normalised, before any upcast.
        output: The norm's last node.
        interior: The nodes from hidden (left out) to output (included), in program order.
        form: The spelling.
        eps: The literal eps, 0.0 where `eps_node` holds it.
        eps_node: A 0-d tensor eps (a graph input under dynamic=True), or None.
        weight: The 1-D weight node, or None.
        dims: The dims the mean runs over, None if not over known dims.
        compute_dtype: The dtype of the mean square.
        norm_dtype: What the fp32 result is rounded to before the weight, None if it isn't.
        rstd: The node of the reciprocal root, if it can be read by others; None in opaque ops.
        residual: The residual of an opaque add-and-norm op, and `hidden_output` its second
            result, the new residual.
    """

    hidden: fx.Node
    output: fx.Node
    interior: tuple[fx.Node, ...]
    form: NormForm
    eps: float = 0.0
    eps_node: fx.Node | None = None
    weight: fx.Node | None = None
    dims: tuple[int, ...] | None = None
    compute_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = None
    rstd: fx.Node | None = None
    residual: fx.Node | None = None
    hidden_output: fx.Node | None = None

    def formula(self) -> str:
        """The norm as a line of text, for reports."""
        eps = "eps" if self.eps_node is not None else f"{self.eps:.6g}"
        root = f"(mean(h^2) + {eps})"
        normed = {
            "rsqrt": f"h * rsqrt{root}",
            "pow": f"h * pow({root}, -0.5)",
            "sqrt": f"h / sqrt{root}",
            "1/sqrt": f"h * (1 / sqrt{root})",
        }[self.form.reciprocal]
        if self.norm_dtype is not None:
            normed = f"cast({normed})"
        weight = {"none": "", "w": "w * ", "1+w": "(1 + w) * "}[self.form.weight]
        text = f"{weight}{normed}"
        return text if self.norm_dtype is not None else f"cast({text})"
