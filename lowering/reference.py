"""The op's numbers, written to be read: what kernels and the unfused path are tested against.

No process group is involved: each function takes the partial sums of all ranks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fx_fusion.lowering.arguments import Arguments, Results


def rank_order_reference(parts: Sequence[torch.Tensor], arguments: Arguments) -> Results:
    """The numerics contract: the sum in rank order, rounded once, then the eager lines.

    Args:
        parts: x of every rank, in rank order, all of one shape and dtype.
        arguments: The op's arguments on any rank; its `x` and its `want_*` are not used.

    Returns:
        All four results, in the dtypes that the op gives them.
    """
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return eager_lines(total.to(parts[0].dtype), arguments)


def eager_lines(reduced: torch.Tensor, arguments: Arguments) -> Results:
    """What follows the all_reduce in an eager model, with torch's rounding at each step."""
    h = reduced
    if arguments.add_dtype is not None:
        h = h.to(arguments.add_dtype)
    if arguments.bias is not None:
        h = h + arguments.bias
    if arguments.scale_tensor is not None:
        h = h * arguments.scale_tensor
    if arguments.scale != 1.0:
        h = h * arguments.scale
    if arguments.residual is not None:
        h = arguments.residual + h

    h32 = h.to(torch.float32)
    eps = arguments.eps if arguments.eps_tensor is None else arguments.eps_tensor
    s = h32.pow(2).mean(-1, keepdim=True) + eps
    if arguments.reciprocal == "pow":
        rstd = torch.pow(s, -0.5)
    elif arguments.reciprocal == "1/sqrt":
        rstd = torch.reciprocal(torch.sqrt(s))
    else:
        rstd = torch.rsqrt(s)
    n = h32 / torch.sqrt(s) if arguments.reciprocal == "sqrt" else h32 * rstd
    if arguments.norm_dtype is not None:
        n = n.to(arguments.norm_dtype)
    if arguments.weight_form == "w":
        assert arguments.weight is not None
        n = arguments.weight * n
    if arguments.weight_form == "1+w":
        assert arguments.weight is not None
        n = n * (1.0 + arguments.weight.to(torch.float32))
    return Results(n.to(arguments.out_dtype or h.dtype), h, reduced, rstd)


def fp64_oracle(parts: Sequence[torch.Tensor], arguments: Arguments) -> Results:
    """The exact answer, as near as fp64 gets: no rounding to a smaller dtype anywhere.

    Arguments as in `rank_order_reference`; the casts among them are not used. All four results
    are float64.
    """
    reduced = torch.stack([part.double() for part in parts]).sum(0)
    h = reduced
    if arguments.bias is not None:
        h = h + arguments.bias.double()
    scale = (
        arguments.scale if arguments.scale_tensor is None else arguments.scale_tensor.double()
    )
    h = h * scale
    if arguments.residual is not None:
        h = h + arguments.residual.double()
    eps = arguments.eps if arguments.eps_tensor is None else arguments.eps_tensor.double()
    rstd = 1.0 / (h.square().mean(-1, keepdim=True) + eps).sqrt()
    norm = h * rstd
    if arguments.weight is not None:
        norm = norm * (arguments.weight.double() + (arguments.weight_form == "1+w"))
    return Results(norm, h, reduced, rstd)
