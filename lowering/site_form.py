"""What a site computes, in the terms by which another library's kernel can take it or not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fx_fusion.lowering.arguments import Arguments


class SiteForm(NamedTuple):
    """The part of a site that is neither its sizes nor its group; equal on every rank.

    Attributes:
        residual: The residual's dtype, None without one.
        weight: The weight's dtype, None without one.
        weight_form: "w", "1+w" or "none".
        bias: A bias is added.
        scale: The reduced value is multiplied.
        eps_tensor: eps is a tensor.
        add_dtype: What the reduced value is cast to first, None for nothing.
        norm_dtype: What the normalised value is cast to before the weight; None leaves fp32.
        out_dtype: The norm's dtype; None takes the hidden state's.
        want_reduced: The reduced value is read by itself.
        want_rstd: The reciprocal root is read.
    """

    residual: torch.dtype | None
    weight: torch.dtype | None
    weight_form: str = "w"
    bias: bool = False
    scale: bool = False
    eps_tensor: bool = False
    add_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    want_reduced: bool = False
    want_rstd: bool = False


def form_of(arguments: Arguments) -> SiteForm:
    """The form of one call of the op."""
    residual, weight = arguments.residual, arguments.weight
    return SiteForm(
        residual=None if residual is None else residual.dtype,
        weight=None if weight is None else weight.dtype,
        weight_form=arguments.weight_form,
        bias=arguments.bias is not None,
        scale=arguments.scale_tensor is not None or arguments.scale != 1.0,
        eps_tensor=arguments.eps_tensor is not None,
        add_dtype=arguments.add_dtype,
        norm_dtype=arguments.norm_dtype,
        out_dtype=arguments.out_dtype,
        want_reduced=arguments.want_reduced,
        want_rstd=arguments.want_rstd,
    )


def plain_form_cause(form: SiteForm, dtype: torch.dtype) -> str:
    """Why a kernel for residual + norm in one dtype can't give a site's numbers; "" if it can.

    Such a kernel adds a residual, norms in fp32, multiplies by the weight and rounds once, all
    tensors being of the reduced value's `dtype`. It returns the norm and the new residual. A
    site without residual gets one of zeros, and its reduced value is its new residual.
    """
    if form.bias or form.scale:
        return "it adds no bias and no scale"
    if form.eps_tensor:
        return "it takes eps as a number, not as a tensor"
    for what, given in (
        ("a residual", form.residual),
        ("a weight", form.weight),
        ("a cast of the reduced value", form.add_dtype),
        ("an output", form.out_dtype),
    ):
        if given not in (None, dtype):
            return f"it takes one dtype, {_name(dtype)}, and here is {what} of {_name(given)}"
    rounds_first = form.norm_dtype not in (None, torch.float32, dtype) or (
        form.norm_dtype == dtype != torch.float32 and form.weight is not None
    )
    if rounds_first:
        return "it multiplies by the weight before it rounds, the graph rounds first"
    if form.want_rstd:
        return "it doesn't return the reciprocal root that a backward pass reads"
    if form.want_reduced and form.residual is not None:
        return "it doesn't return the reduced value"
    return ""


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
