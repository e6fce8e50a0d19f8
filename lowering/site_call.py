"""What the calls of sites in generated code share on all devices: arguments in, results out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fx_fusion.lowering.arguments import Arguments, Results

#: eps or scale in a call: None for the site's constant.
Number = float | torch.Tensor | None
Tensor = torch.Tensor | None


def arguments_of(
    constants: Mapping[str, Any],
    eps: Number,
    scale: Number,
    x: torch.Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> Arguments:
    """The op's arguments of a call of a site with these constants."""
    named: dict[str, Any] = dict(constants)
    for name, given in (("eps", eps), ("scale", scale)):
        if isinstance(given, torch.Tensor):
            named[f"{name}_tensor"] = given
        elif given is not None:
            named[name] = given
    return Arguments(x=x, residual=residual, weight=weight, bias=bias, **named)


def copy_results(made: Results, given: Results) -> None:
    """Copy what is wanted and not there yet; what isn't wanted is None in `given`."""
    for source, target in zip(made, given, strict=True):
        if target is not None and source is not target:
            target.copy_(source)
